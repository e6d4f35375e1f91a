"""Compare runs of two checkouts of this repository, value by value.

    python tests/equal_runs.py BEFORE [AFTER] [--only NAME ...] [--work DIR] [--write FILE]

BEFORE and AFTER (default: this checkout) are folders that `make install` has set up. Both train the
same tiny models on the same rows: architectures in pretraining on two ranks, kinds of fine-tuning
and objectives of preference tuning. Two runs are equal if every logged loss, gradient norm,
learning rate, token count and evaluation is equal, and every tensor of every checkpoint and export
is bitwise identical. A change that must not alter behaviour, such as a renaming, is checked by it.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TYPES = (
    "llama",
    "gpt2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "mistral",
    "olmo2",
    "phi3",
    "gpt_oss",
    "deepseek_v3",
    "mamba2",
)
LORA = {"r": 4, "lora_alpha": 8}
FINETUNES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LORA},
    "lora-saved-modules": {
        "lora": {**LORA, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}
    },
    "dora-packed": {
        "lora": {**LORA, "use_dora": True},
        "data": {"packing": "bfd"},
    },
    "qlora": {"lora": {**LORA, "load_in_4bit": True}},
}
PREFERENCES: dict[str, dict[str, Any]] = {
    "dpo": {"lora": LORA, "preference": {"loss_type": "sigmoid"}},
    "orpo-full": {"preference": {"loss_type": "orpo"}},
    "kto": {"lora": LORA, "preference": {"loss_type": "kto"}},
    "reward": {"lora": LORA, "preference": {"loss_type": "reward"}},
}
_TIMES = ("time", "seconds", "per_second", "bytes", "mfu", "util")
"""Parts of the names of metrics that measure the machine."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_inputs(folder: Path) -> None:
    """Write the models, the rows and the chat template that all runs read."""
    import torch
    from conftest import save_byte_tokenizer
    from tiny_models import perturb, tiny_class, tiny_config

    for kind in TYPES:
        torch.manual_seed(0)
        longer = {"max_position_embeddings": 256} if kind == "llama" else {}
        model = tiny_class(kind)(tiny_config(kind, vocab_size=300, **longer))
        perturb(model)
        model.save_pretrained(folder / kind)
        save_byte_tokenizer(folder / kind)
    # Quantisation to 4 bits works on blocks of 64 values.
    torch.manual_seed(0)
    wide = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 256}
    model = tiny_class("llama")(tiny_config("llama", vocab_size=300, **wide, head_dim=32))
    perturb(model)
    model.save_pretrained(folder / "llama-wide")
    save_byte_tokenizer(folder / "llama-wide")
    draw = random.Random(0)
    words = [f"word{i}" for i in range(50)]

    def sentence(count: int) -> str:
        return " ".join(draw.choices(words, k=count)) + "."

    def conversation(answer: str) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": sentence(4)},
            {"role": "assistant", "content": answer},
        ]

    (folder / "text.txt").write_text("\n".join(sentence(12) for _ in range(400)))
    rows: dict[str, list[dict[str, Any]]] = {"chats": [], "pairs": [], "answers": []}
    for i in range(64):
        rows["chats"].append({"messages": conversation(sentence(1 + i % 5))})
        prompt = [{"role": "user", "content": sentence(3)}]
        sides = [[{"role": "assistant", "content": sentence(1 + i % n)}] for n in (4, 3)]
        rows["pairs"].append({"prompt": prompt, "chosen": sides[0], "rejected": sides[1]})
        rows["answers"].append(
            {"prompt": prompt, "completion": sides[i % 2], "label": i % 2 == 0},
        )
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (folder / "template.jinja").write_text(TEMPLATE)


def config_of(name: str, inputs: Path) -> tuple[str, dict[str, Any]]:
    """Return the recipe and the config of the case `name`, such as "finetune lora"."""
    recipe, case = name.split(" ")
    rows, changes = "text.txt", {}
    if recipe == "finetune":
        rows, changes = "chats.jsonl", FINETUNES[case]
    elif recipe == "prefer":
        rows, changes = ("answers" if case == "kto" else "pairs") + ".jsonl", PREFERENCES[case]
    data: dict[str, Any] = {
        "train_files": [str(inputs / rows)],
        "sequence_length": 64 if recipe == "pretrain" else 128,
        "eval_split": 0.1,
    }
    if recipe != "pretrain":
        data["chat_template"] = str(inputs / "template.jinja")
    model = case if recipe == "pretrain" else "llama-wide" if case == "qlora" else "llama"
    return recipe, {
        "model": {"name_or_path": str(inputs / model)},
        "sharding": {"param_dtype": "float32"},
        "train": {
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "logging_steps": 1,
            "eval_steps": 2,
        },
        "optim": {"learning_rate": 1e-3, "warmup_steps": 0},
        "checkpoint": {"save_steps": 2, "export_at_end": True},
        "output_dir": "run",
        **{key: value for key, value in changes.items() if key != "data"},
        "data": data | changes.get("data", {}),
    }


def run_cases(names: list[str], inputs: Path, work: Path) -> None:
    """Train each case on two ranks, in the checkout that this process imports, below `work`."""
    from distributed import run_recipe_ranks

    for name in names:
        folder = work / name.replace(" ", "-")
        folder.mkdir(parents=True)
        recipe, config = config_of(name, inputs)
        (folder / "config.yaml").write_text(json.dumps(config))
        done = run_recipe_ranks(recipe, 2, "--config", "config.yaml", cwd=folder, kill_after=900)
        (folder / "log.txt").write_text(done.stdout + done.stderr)
        print(f"{name}: exit code {done.returncode}", flush=True)


def read_facts(folder: Path) -> dict[str, str]:
    """Map each logged value, and each file of tensors below `folder`, to its text or digest."""
    facts: dict[str, str] = {}
    if not (folder / "run/metrics.jsonl").is_file():
        return facts
    for line in (folder / "run/metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        for key, value in step.items():
            if not any(part in key for part in _TIMES):
                facts[f"step {step['step']} {key}"] = repr(value)
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".distcp", ".safetensors") and path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            facts[str(path.relative_to(folder))] = digest
    return facts


def main() -> int:
    """Run both checkouts, compare them, print a table; exit 1 if any run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/equal")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = [
        *(f"pretrain {kind}" for kind in TYPES),
        *(f"finetune {case}" for case in FINETUNES),
        *(f"prefer {case}" for case in PREFERENCES),
    ]
    names = [name for name in names if not args.only or name in args.only]
    inputs = args.work.resolve() / "inputs"
    if args.worker:
        run_cases(names, inputs, args.after)
        return 0
    inputs.mkdir(parents=True)
    write_inputs(inputs)
    for side, checkout in (("before", args.before), ("after", args.after)):
        checkout = checkout.resolve()
        paths = f"{checkout}:{checkout / 'tests'}"
        # This script is copied, so that both sides run the same cases with their own helpers.
        script = checkout / "tests" / "_equal_runs_worker.py"
        script.write_text(Path(__file__).read_text())
        try:
            subprocess.run(
                [
                    str(checkout / ".venv/bin/python"), str(script), str(checkout),
                    str(args.work.resolve() / side), "--work", str(args.work), "--worker",
                    "--only", *names,
                ],
                env=os.environ | {"PYTHONPATH": paths}, cwd=checkout, check=True,
            )  # fmt: skip
        finally:
            script.unlink()
    lines, differing = [], 0
    for name in names:
        folder = name.replace(" ", "-")
        before, after = (read_facts(args.work / side / folder) for side in ("before", "after"))
        unequal = [key for key in before | after if before.get(key) != after.get(key)]
        differing += bool(unequal)
        verdict = "equal" if not unequal else f"{len(unequal)} differ: {', '.join(unequal[:4])}"
        if not before or not after:
            differing, verdict = differing + 1, "failed; see log.txt"
        lines.append(f"| {name} | {len(before)} | {verdict} |")
    table = "\n".join(["| Run | Values and files compared | Outcome |", "|---|---|---|", *lines])
    print(table)
    if args.write:
        import torch
        import transformers

        commits = [
            subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"],
                cwd=folder,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for folder in (args.before, args.after)
        ]
        args.write.write_text(
            f"# Equal runs\n\nCommits {commits[0]} and {commits[1]}, two ranks, torch "
            f"{torch.__version__}, transformers {transformers.__version__}, "
            f"{platform.machine()}. Written by `tests/equal_runs.py`.\n\n{table}\n"
        )
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
