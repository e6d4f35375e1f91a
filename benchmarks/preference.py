"""A step of DPO beside TRL's DPOTrainer: time, peak memory, losses.

    python benchmarks/preference.py [--rounds 3] [--steps 6] [--worlds 1 2] [--output FILE]
        [--vocabularies 131072 32768]

A Llama in fp32, full parameters, fused AdamW. TRL runs twice. On a CPU it falls back to logits of
every position; on GPUs it computes those of supervised positions only. The second run takes that
path on the CPU too, so that both sides do the same work. The rows are those of one global
batch, so every step sees the same pairs whatever the order, and losses can be compared. Both sides
know their reference values before the first step, but for TRL on two ranks, whose precomputation
fails on a sharded model: it holds a second one. The toolkit runs `recipes/prefer.py`, TRL its
trainer on a model sharded by transformers where there are two ranks; one thread a rank. A round
runs each side in processes of its own; a side's time is that of a step after the first two, its
memory the most that rank 0 has held, all it loads included.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from machine import describe

PAIRS, PROMPT = 8, 64  # pairs of a global batch, tokens of a prompt
VOCABULARIES = [131_072, 32_768]
ANSWERS = (64, 192)  # tokens of an answer: from, to
RATE, WARM = 1e-5, 2
SIDES = {
    "toolkit": "toolkit",
    "trl": "TRL's DPOTrainer, its fallback for CPUs (logits of every position)",
    "trl_positions": "TRL's DPOTrainer, its path for GPUs (supervised positions only)",
}
RECIPE = Path(__file__).parent.parent / "recipes" / "prefer.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="timed ones, of each round")
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2], help="ranks")
    parser.add_argument(
        "--output", type=Path, default=Path("docs/evidence/benchmarks/preference.md")
    )
    parser.add_argument("--vocabularies", type=int, nargs="*", default=VOCABULARIES)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        with_trl(args)
        return
    found: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    sizes: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for vocabulary in args.vocabularies:
            args.folder = Path(scratch) / str(vocabulary)
            sizes[vocabulary] = write_inputs(args.folder, vocabulary)
            for world in args.worlds:
                for i in range(args.rounds):
                    for side in [*SIDES][:: -1 if i % 2 else 1]:
                        key = vocabulary, world, side
                        found.setdefault(key, []).append(measured(args, side, world))
                        print(*key, found[key][-1], file=sys.stderr, flush=True)
    text = report(args, sizes, found)
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)


def write_inputs(folder: Path, vocabulary: int) -> int:
    """Write the model, with a tokenizer of one token a word, and the pairs; return its size."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    words = {"<pad>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    own = Tokenizer(WordLevel(words, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(folder / "model")
    chance = random.Random(0)

    def text(count: int) -> str:
        return " ".join(f"w{chance.randrange(2, vocabulary)}" for _ in range(count))

    rows = [
        {"prompt": text(PROMPT)}
        | {side: " " + text(chance.randint(*ANSWERS)) for side in ("chosen", "rejected")}
        for _ in range(PAIRS)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model.num_parameters()


def measured(args: argparse.Namespace, side: str, world: int) -> dict[str, Any]:
    """Run one side in processes of its own; return its `seconds` of every timed step, `losses`, and
    the `peak` in bytes, or the `error` that it ended with.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world)]
    steps, run = WARM + args.steps, args.folder / f"run-{time.time_ns()}"
    settings = {
        "model.name_or_path": args.folder / "model",
        "data.train_files": args.folder / "pairs.jsonl",
        "data.packing": "none",
        "data.eval_split": 0.0,
        "data.sequence_length": 2 * (PROMPT + ANSWERS[1] + 1),
        "sharding.param_dtype": "float32",
        "optim.learning_rate": RATE,
        "optim.weight_decay": 0.0,
        "optim.lr_scheduler_type": "constant",
        "train.max_steps": steps,
        "train.per_device_train_batch_size": PAIRS // world,
        "train.logging_steps": 1,
        "output_dir": run,
    }
    own = [f"--{name}={value}" for name, value in settings.items()]
    if side == "toolkit":
        command += ["--standalone", str(RECIPE), *own]
    else:
        command += ["--standalone", __file__, "--side", side, "--folder", str(args.folder)]
        command += ["--steps", str(args.steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        return {"error": (errors or done.stderr.splitlines() or ["?"])[0].strip()}
    if side != "toolkit":
        return json.loads((args.folder / "trl.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": [line["step_time"] for line in lines[WARM:]],
        "losses": [line["loss"] for line in lines],
        "peak": max(line["memory_peak_bytes"] for line in lines),
    }


def with_trl(args: argparse.Namespace) -> None:
    import datasets
    import trl.trainer.utils
    from transformers import AutoTokenizer, LlamaForCausalLM, TrainerCallback
    from transformers.distributed import DistributedConfig
    from trl import DPOConfig, DPOTrainer

    torch.set_num_threads(1)
    if args.side == "trl_positions":
        # It asks for the device whether its fused head scores supervised positions only.
        trl.trainer.utils._use_triton = lambda device: True
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    world = int(os.environ["WORLD_SIZE"])
    # Accelerate's plugin is not used on a CPU: transformers' own FSDP2 is.
    sharded = {"distributed_config": DistributedConfig(fsdp_size=world)} if world > 1 else {}
    source = args.folder / "model"
    load = lambda: LlamaForCausalLM.from_pretrained(source, dtype=torch.float32, **sharded)  # noqa: E731
    model = load()
    settings = DPOConfig(
        output_dir=str(args.folder / "out"),
        per_device_train_batch_size=PAIRS // world,
        precompute_ref_log_probs=world == 1,
        max_steps=WARM + args.steps,
        learning_rate=RATE,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
    )
    # TRL's precomputation fails on a sharded model: there it holds a second one.
    beside = load() if world > 1 else None
    rows = datasets.load_dataset("json", data_files=str(args.folder / "pairs.jsonl"), split="train")
    trainer = DPOTrainer(
        model,
        ref_model=beside,
        args=settings,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(args.folder / "model"),
        callbacks=[Clock()],
    )
    trainer.train()
    if int(os.environ["RANK"]) == 0:
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        seconds = [b - a for a, b in pairwise(times[: len(losses)])]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {"seconds": seconds[WARM - 1 :], "losses": losses, "peak": peak}
        (args.folder / "trl.json").write_text(json.dumps(found))


def report(
    args: argparse.Namespace,
    sizes: dict[int, int],
    found: dict[tuple[int, int, str], list[dict[str, Any]]],
) -> str:
    rows = []
    for vocabulary, world in product(args.vocabularies, args.worlds):
        for side, title in SIDES.items():
            ours, theirs = (found[vocabulary, world, one] for one in ("toolkit", side))
            rows.append(f"| {vocabulary:,} | {world} | {title} | {row(ours, theirs)}")
    low, high = ANSWERS
    of_sizes = " and ".join(f"{n / 1e6:.0f} M with {v:,} tokens" for v, n in sizes.items())
    return "\n".join(
        [
            "# DPO beside TRL's DPOTrainer",
            "",
            f"A Llama in fp32, all parameters trained ({of_sizes}); {PAIRS} pairs a step, prompts "
            f"of {PROMPT} tokens and answers of {low} to {high}, padded; 1 thread a rank. "
            f"{args.rounds} rounds in which the sides take turns, {args.steps} timed steps each, "
            "reference values known before (TRL on 2 ranks holds a second model, since its "
            "precomputation fails on a sharded one); medians, ratios taken per round. Memory is "
            "the peak of rank 0's process, with all that it loads. The losses of all steps are "
            "compared.",
            "",
            "On a CPU, TRL's trainer falls back to computing logits of every position, prompts and "
            "padding included. On GPUs it computes them for supervised positions only, as the "
            "toolkit does everywhere; the last row of each group takes that path on the CPU. It is "
            "the comparison of like with like.",
            "",
            "| tokens | ranks | | s a step | toolkit's time against it | peak GB | "
            "toolkit's peak against it | losses differ by |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            describe("preference.py", "torch", "transformers", "accelerate", "trl"),
            "",
        ]
    )


def row(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """Return the cells of one side, beside the toolkit's."""
    if errors := [one["error"] for one in theirs if "error" in one]:
        return f"does not run: `{errors[0]}` | | | | |"
    seconds = [[statistics.median(one["seconds"]) for one in side] for side in (ours, theirs)]
    ratio = statistics.median(a / b for a, b in zip(*seconds, strict=True))
    peaks = [statistics.median(one["peak"] for one in side) for side in (ours, theirs)]
    losses = zip(ours[0]["losses"], theirs[0]["losses"], strict=True)
    worst = max(abs(a - b) for a, b in losses)
    return (
        f"{statistics.median(seconds[1]):.2f} | {ratio:.2f} | {peaks[1] / 1e9:.2f} | "
        f"{peaks[0] / peaks[1]:.2f} | {worst:.0e} |"
    )


if __name__ == "__main__":
    main()
