"""The other sides of `make results`, each in a separate process.

    python benchmarks/results_peers.py order --config FILE --output FILE
    python benchmarks/results_peers.py sft|dpo|adapter --settings FILE --output FILE
    python benchmarks/results_peers.py held_out|nanogpt|student|texts --settings FILE --output FILE

`order` asks the toolkit for the order of its rows, so that TRL reads the same. `sft` and `dpo` are
TRL's trainers. `held_out` and `texts` load models with plain transformers, whoever trained them.
"""

import argparse
import json
import math
import os
import re
import resource
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=PROGRAMS)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--settings", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    settings = json.loads(args.settings.read_text("utf-8")) if args.settings else {}
    if args.config:
        settings |= {"config": str(args.config), "output": str(args.output)}
    result = PROGRAMS[args.what](settings)
    if int(os.environ.get("RANK", "0")) == 0:
        args.output.write_text(json.dumps(result) + "\n", "utf-8")


# ---- The toolkit's order of rows -----------------------------------------------------------------


def list_order(settings: dict[str, Any]) -> list[int]:
    """Return the numbers of the rows that the toolkit trains on, in its order, of all steps."""
    import yaml

    from toolkit import assembly, checkpoint, objectives
    from toolkit.checkpoint import RunFolder
    from toolkit.config import find_shipped_kind, load
    from toolkit.data.prepare import prepare_data
    from toolkit.mesh import init_mesh
    from toolkit.training import launch

    path = Path(settings["config"])
    kind = find_shipped_kind(yaml.safe_load(path.read_text("utf-8"))["kind"])
    cfg: Any = load(kind.config, path, ["--output_dir", f"{settings['output']}.run"])
    with launch.start() as run:
        folder = RunFolder(cfg, run)
        cfg = checkpoint.apply_adapter_settings(cfg)
        model, model_cfg = assembly.build(cfg, run, folder)
        mesh = init_mesh(run.device.type, run.world_size, cfg.sharding)
        metrics = objectives.build(cfg, mesh).metrics
        data = prepare_data(cfg, model, model_cfg, run, mesh, metrics)
        numbers: list[int] = []
        for step in range(data.max_steps):
            for text in data.feed.describe_samples(step, run):
                numbers += map(int, re.findall(r"\d+", text.rpartition(" row")[2]))
    return numbers


# ---- TRL -----------------------------------------------------------------------------------------


def train_with_trl(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with SFTTrainer or DPOTrainer; return losses, seconds of steps, peak bytes, metrics.

    Args:
        kind: `sft` or `dpo`.
        settings: `model`, `adapter` (a PEFT folder, or None), `rows`, `template`, `out`, `steps`,
            `batch`, `optim` (named as in TrainingArguments), `beta` of DPO, `warm` steps that are
            not timed, `save` to write the trained model, and `supervised_only`: TRL's head scores
            supervised positions only.
    """
    import torch
    import trl.kernels.chunked_logprob
    import trl.trainer.utils
    from transformers import TrainerCallback

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if settings["supervised_only"]:
        # TRL asks for the device whether its head scores supervised positions only.
        trl.trainer.utils._use_triton = lambda device: True
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    trainer = build_trainer(kind, settings, Clock())
    trainer.train()
    # The peak is that of training; what follows writes a second copy.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if settings["save"]:
        trainer.save_model(f"{settings['out']}/model")
        trainer.processing_class.save_pretrained(f"{settings['out']}/model")
    lines = [line for line in trainer.state.log_history if "loss" in line]
    seconds = [after - before for before, after in pairwise(times[: len(lines)])]
    return {
        "seconds": seconds[settings["warm"] - 1 :],
        "losses": [line["loss"] for line in lines],
        "grad_norms": [float(line["grad_norm"]) for line in lines],
        "peak": peak,
        "metrics": {
            name: [line[theirs] for line in lines]
            for name, theirs in DPO_METRICS.items()
            if theirs in lines[0]
        },
    }


def build_trainer(kind: str, settings: dict[str, Any], callback: Any) -> Any:
    """Return TRL's trainer for `train_with_trl`."""
    import datasets
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    world = int(os.environ.get("WORLD_SIZE", "1"))
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.chat_template = Path(settings["template"]).read_text("utf-8")
    common: dict[str, Any] = {
        "output_dir": f"{settings['out']}/trainer",
        "per_device_train_batch_size": settings["batch"] // world,
        "max_steps": settings["steps"],
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": None,
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch_fused",
        **settings["optim"],
    }
    rows = datasets.load_dataset("json", data_files=settings["rows"], split="train")
    options: dict[str, Any] = {"train_dataset": rows, "processing_class": tokenizer}
    options["callbacks"] = [callback]
    model = load_start(settings, world)
    if kind == "sft":
        return SFTTrainer(model, SFTConfig(**common), **options)
    beta, ahead = settings["beta"], world == 1
    config = DPOConfig(**common, beta=beta, precompute_ref_log_probs=ahead)
    return DPOTrainer(model, args=config, **options)


def load_start(settings: dict[str, Any], world: int) -> Any:
    """Return the model from which TRL trains, in fp32; of several ranks a full model is sharded."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    sharded = {}
    if world > 1 and settings["adapter"] is None:
        from transformers.distributed import DistributedConfig

        sharded = {"distributed_config": DistributedConfig(fsdp_size=world)}
    source = settings["model"]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **sharded)
    if settings["adapter"] is None:
        return model
    return PeftModel.from_pretrained(model, settings["adapter"], is_trainable=True)


DPO_METRICS = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "margin": "rewards/margins",
    "accuracy": "rewards/accuracies",
}
"""Metric of the toolkit -> the same of TRL."""


def write_adapter(settings: dict[str, Any]) -> str:
    """Write a new LoRA adapter for `model` with PEFT, from which both sides start."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **settings["lora"])
    get_peft_model(model, config).save_pretrained(settings["out"])
    return settings["out"]


# ---- Held-out figures and answers, with plain transformers ---------------------------------------


def load_model(folder: Path, base: str) -> Any:
    """Return the model of a folder in fp32: a complete model, or an adapter on `base`."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if (folder / "adapter_config.json").is_file():
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return PeftModel.from_pretrained(plain, folder).merge_and_unload().eval()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def measure_models(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure held-out figures and answers of `models`, each by `measure_held_out`."""
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tokenizer = AutoTokenizer.from_pretrained(settings["base"])
    tokenizer.chat_template = Path(settings["template"]).read_text("utf-8")
    held_out, answers = {}, {}
    for entry in settings["models"]:
        model = load_model(Path(entry["model"]), settings["base"])
        held_out[entry["name"]] = measure_held_out(model, tokenizer, entry)
        if entry["prompts"]:
            answers[entry["name"]] = [
                answer_prompt(model, tokenizer, prompt, settings["tokens"])
                for prompt in entry["prompts"]
            ]
    return {"held_out": held_out, "answers": answers}


def answer_logps(model: Any, tokenizer: Any, prompt: list, answer: list) -> Any:
    """Return for each token of an answer its log-probability and whether it is the likeliest."""
    import torch

    full = tokenizer.apply_chat_template(prompt + answer, tokenize=False)
    start = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids, head = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (full, start))
    if ids[: len(head)] != head:
        raise SystemExit("the prompt's tokens are not the first ones of the conversation")
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0, len(head) - 1 : -1].float()
    targets = tokens[0, len(head) :]
    logps = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return logps, logits.argmax(-1) == targets


def measure_held_out(model: Any, tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return perplexity and token accuracy on held-out answers, and pair accuracy and log-ratios.

    A pair counts as right if the chosen answer has the larger summed log-probability.
    """
    total, count, right = 0.0, 0, 0
    for row in _rows(settings["chats"]) if settings["chats"] else ():
        logps, is_top = answer_logps(model, tokenizer, row["prompt"], row["completion"])
        total, count = total + float(logps.double().sum()), count + len(logps)
        right += int(is_top.sum())
    sums = [
        [
            float(answer_logps(model, tokenizer, row["prompt"], row[side])[0].double().sum())
            for side in ("chosen", "rejected")
        ]
        for row in (_rows(settings["pairs"]) if settings["pairs"] else ())
    ]
    figures: dict[str, Any] = {}
    if count:
        figures |= {"perplexity": math.exp(-total / count), "nll": -total / count}
        figures |= {"token_accuracy": right / count, "tokens": count}
    if sums:
        accuracy = statistics.mean(chosen > rejected for chosen, rejected in sums)
        figures |= {"pair_logps": sums, "pair_accuracy": accuracy}
    return figures


def answer_prompt(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """Return the greedy answer to a user's prompt, of at most `tokens` tokens."""
    import torch

    turns = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True).strip()


def _rows(file: str) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]


# ---- Distillation --------------------------------------------------------------------------------


def write_student(settings: dict[str, Any]) -> dict[str, int]:
    """Write a copy of `model` that keeps every `layer_stride`-th layer, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = settings["model"]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    before = sum(parameter.numel() for parameter in model.parameters())
    layers = model.model.layers
    counts = {"teacher_layers": len(layers)}
    model.model.layers = torch.nn.ModuleList([*layers][:: settings["layer_stride"]])
    model.config.num_hidden_layers = len(model.model.layers)
    model.save_pretrained(settings["out"])
    AutoTokenizer.from_pretrained(source).save_pretrained(settings["out"])
    after = sum(parameter.numel() for parameter in model.parameters())
    counts["student_layers"] = model.config.num_hidden_layers
    return counts | {"teacher_parameters": before, "student_parameters": after}


def measure_texts(settings: dict[str, Any]) -> dict[str, Any]:
    """Return model -> perplexity and number of tokens over all tokens but the first of each row."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    figures = {}
    for name, folder in settings["models"].items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        total, count = 0.0, 0
        for row in _rows(settings["rows"]):
            ids = tokenizer(row["text"], add_special_tokens=False, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            total += float(logps.gather(1, ids[0, 1:, None]).double().sum())
            count += ids.shape[1] - 1
        figures[name] = {"perplexity": math.exp(-total / count), "tokens": count}
    return figures


# ---- nanoGPT -------------------------------------------------------------------------------------


def evaluate_nanogpt(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the loss of a checkpoint of nanoGPT over all windows of its validation file.

    Windows of block_size + 1 characters that do not overlap, as the toolkit evaluates. Runs in the
    folder of nanoGPT, whose model it imports.
    """
    import numpy
    import torch

    sys.path.insert(0, os.getcwd())
    from model import GPT, GPTConfig  # nanoGPT's

    saved = torch.load(settings["checkpoint"], weights_only=False)
    model = GPT(GPTConfig(**saved["model_args"]))
    model.load_state_dict({n.removeprefix("_orig_mod."): v for n, v in saved["model"].items()})
    model.eval()
    ids = numpy.fromfile(settings["val"], dtype=numpy.uint16).astype(numpy.int64)
    width = saved["model_args"]["block_size"] + 1
    count = len(ids) // width
    windows = torch.from_numpy(ids[: count * width].reshape(count, width))
    total = 0.0
    with torch.no_grad():
        for part in windows.split(64):
            _, loss = model(part[:, :-1], part[:, 1:].contiguous())
            total += float(loss) * len(part)
    return {"windows": count, "loss": total / count, "step": saved["iter_num"]}


PROGRAMS = {
    "order": list_order,
    "sft": lambda settings: train_with_trl("sft", settings),
    "dpo": lambda settings: train_with_trl("dpo", settings),
    "adapter": write_adapter,
    "held_out": measure_models,
    "nanogpt": evaluate_nanogpt,
    "student": write_student,
    "texts": measure_texts,
}


if __name__ == "__main__":
    main()
