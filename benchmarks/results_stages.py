"""The stages of `make results`: each runs its programs and returns figures."""

import hashlib
import json
import math
import re
import shutil
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from results_common import (
    PEERS,
    ROOT,
    TRL,
    ResultsError,
    Setup,
    Stage,
    fresh,
    kill_after_checkpoint,
    launcher,
    read_metrics,
    read_record,
    run_file,
    run_peer,
    run_program,
    toolkit_command,
    trl_reason,
)
from results_distillation import distillation_sizes, run_distillation
from results_inputs import NANOGPT, describe_model, write_rows, write_text

KINDS = {
    "sft-lora": "SFT with LoRA",
    "sft-full": "SFT of all parameters",
    "dpo": "DPO with LoRA",
}
RESUMED = ("sft-full", "dpo")
PROMPTS = (
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What is 7 plus 5?",
    "What is 9 times 6?",
    "Name three primary colours.",
    "Write a two-line poem about the sea.",
    "Translate 'good morning' into Spanish.",
    "How many days does a week have?",
    "Which planet is closest to the sun?",
    "Give one tip for growing tomatoes.",
)
PUBLISHED_LOSS = 1.88
"""nanoGPT's README: validation loss of the CPU set-up, over 20 random batches."""
ROUNDING_OF_MARGINS = 1e-5
BARS = {"shakespeare": 0.02, "losses": 1e-3, "held_out": 1e-3}


def tuning_sizes(tiny: bool) -> dict[str, Any]:
    """Return the sizes of the fine-tuning stages."""
    if tiny:
        sizes: dict[str, Any] = {"steps": 4, "batch": 2, "rounds": 1, "held_out": 4}
        sizes |= {"max_tokens": 256, "warm": 1, "prompts": 2, "answer_tokens": 4}
        # Saves take longer than steps here, so a kill after the first one comes before the end.
        sizes["save_steps"] = 1
    else:
        sizes = {"steps": 20, "batch": 4, "rounds": 2, "held_out": 64}
        sizes |= {
            "max_tokens": 128,
            "warm": 2,
            "prompts": len(PROMPTS),
            "answer_tokens": 48,
            "save_steps": 10,
        }
    rates = {"sft-lora": 2e-4, "sft-full": 2e-5, "dpo": 1e-4}
    return sizes | {"learning_rates": rates, "beta": 0.1, "lora": {"r": 8, "lora_alpha": 16}}


def shakespeare_sizes(tiny: bool) -> dict[str, Any]:
    """Return the sizes of the stage on tiny shakespeare."""
    if tiny:
        return {"seeds": [1], "steps": 6, "logging_steps": 2, "nanogpt": NANOGPT}
    return {"seeds": [1, 2], "steps": 2000, "logging_steps": 10, "nanogpt": NANOGPT}


def with_trl(tiny: bool) -> dict[str, Any]:
    """Return the tuning sizes and the release of TRL."""
    return tuning_sizes(tiny) | {"trl": TRL}


def nanogpt_reason(setup: Setup) -> str | None:
    """Return why nanoGPT's side is not measured, or None if it is."""
    return None if "nanogpt" in setup.inputs else "nanoGPT's scripts are not there"


# ---- Inputs --------------------------------------------------------------------------------------


def prepare(setup: Setup) -> dict[str, Any]:
    """Write the rows that all sides read; say where the inputs come from."""
    sizes = tuning_sizes(setup.tiny)
    train = sizes["steps"] * sizes["batch"]
    figures: dict[str, Any] = {}
    if "text" in setup.inputs:
        write_text(setup)
    if "model" in setup.inputs and "pairs" in setup.inputs:
        rows = write_rows(setup, train, sizes["held_out"], sizes["max_tokens"])
        figures = {"model": describe_model(setup.inputs["model"]), "rows": rows}
    return figures


# ---- nanoGPT's characters ------------------------------------------------------------------------


def run_shakespeare(setup: Setup) -> dict[str, Any]:
    """Train nanoGPT's CPU set-up by config and by nanoGPT's script, with the same seeds."""
    sizes = shakespeare_sizes(setup.tiny)
    sides: dict[str, list[dict[str, Any]]] = {"toolkit": [], "nanogpt": []}
    reason = nanogpt_reason(setup)
    for index, seed in enumerate(sizes["seeds"]):
        order = ["toolkit", "nanogpt"][:: -1 if index % 2 else 1]
        for side in order:
            if side == "toolkit":
                sides[side].append(_shakespeare_toolkit(setup, sizes, seed))
            elif reason is None:
                sides[side].append(_shakespeare_nanogpt(setup, sizes, seed))
    return {"sides": sides, "published": PUBLISHED_LOSS, "not_measured": reason}


def _shakespeare_toolkit(setup: Setup, sizes: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train by recipe and config; return the evaluation, the losses and the seconds of steps."""
    run = fresh(setup.folder / "shakespeare" / f"toolkit-{seed}")
    flags = {
        "seed": seed,
        "output_dir": run,
        "data.train_files": setup.data / "train.txt",
        "data.eval_files": setup.data / "val.txt",
        "train.max_steps": sizes["steps"],
        "train.logging_steps": sizes["logging_steps"],
    }
    if setup.tiny:
        flags["optim.warmup_steps"] = 2
    config = ROOT / "recipes" / "configs" / "shakespeare_char_cpu.yaml"
    command = [*launcher(1), "recipes/pretrain.py", "--config", str(config)]
    command += [f"--{name}={value}" for name, value in flags.items()]
    _, seconds = run_program(command, run.parent / f"toolkit-{seed}.log", threads=2)
    lines = read_metrics(run)
    return {
        "seed": seed,
        "loss": lines[-1]["eval_loss"],
        "curve": [[line["step"], line["loss"]] for line in lines],
        "step_seconds": statistics.median(line["step_time"] for line in lines[1:]),
        "seconds": seconds,
    }


def _shakespeare_nanogpt(setup: Setup, sizes: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train by nanoGPT's script on the same text; evaluate its checkpoint over all windows."""
    work = fresh(setup.folder / "shakespeare" / f"nanogpt-{seed}")
    shutil.copytree(setup.need("nanogpt"), work)
    script = work / "train.py"
    source = script.read_text("utf-8")
    seeded = source.replace("torch.manual_seed(1337 + seed_offset)", f"torch.manual_seed({seed})")
    if seeded == source:
        raise ResultsError("nanoGPT's train.py does not set its seed as expected")
    script.write_text(seeded, "utf-8")
    data = work / "data" / "shakespeare_char"
    shutil.copy(setup.need("text"), data / "input.txt")
    log = work.parent / f"nanogpt-{seed}.log"
    run_program([sys.executable, str(data / "prepare.py")], log, threads=2, cwd=work)
    steps = sizes["steps"]
    # The CPU set-up of nanoGPT's README; evaluations only at the start and the end, log more often.
    flags = {"device": "cpu", "compile": False, "eval_iters": 20, "block_size": 64}
    flags |= {"batch_size": 12, "n_layer": 4, "n_head": 4, "n_embd": 128, "max_iters": steps}
    flags |= {"lr_decay_iters": steps, "dropout": 0.0, "eval_interval": steps}
    flags |= {"always_save_checkpoint": True, "log_interval": sizes["logging_steps"]}
    flags["out_dir"] = "out"
    if setup.tiny:
        flags["warmup_iters"] = 2
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    output, seconds = run_program(command, log, threads=2, cwd=work)
    settings = {"checkpoint": "out/ckpt.pt", "val": "data/shakespeare_char/val.bin"}
    evaluated = run_peer("nanogpt", settings, work / "evaluation", cwd=work)
    if evaluated["step"] != steps:
        raise ResultsError(f"nanoGPT's checkpoint is of step {evaluated['step']}, not {steps}")
    lines = re.findall(r"^iter (\d+): loss ([\d.]+), time ([\d.]+)ms", output, re.MULTILINE)
    return {
        "seed": seed,
        "loss": evaluated["loss"],
        "windows": evaluated["windows"],
        "curve": [[int(step), float(loss)] for step, loss, _ in lines],
        # The first and the last line include an evaluation.
        "step_seconds": statistics.median(float(ms) / 1e3 for _, _, ms in lines[1:-1]),
        "seconds": seconds,
    }


# ---- A real model next to TRL --------------------------------------------------------------------


def tuning_config(setup: Setup, kind: str, world: int, run: Path) -> dict[str, Any]:
    """Return the toolkit's config of one of `KINDS`."""
    sizes = tuning_sizes(setup.tiny)
    is_dpo = kind == "dpo"
    rows = setup.data / ("pairs_train.jsonl" if is_dpo else "chats_train.jsonl")
    config: dict[str, Any] = {
        "kind": "prefer" if is_dpo else "finetune",
        "model": {"name_or_path": str(setup.need("model")), "dtype": "float32"},
        "sharding": {"param_dtype": "float32"},
        "data": {
            "train_files": str(rows),
            "chat_template": str(setup.data / "chat.jinja"),
            "sequence_length": sizes["max_tokens"] * (2 if is_dpo else 1),
            "packing": "none",
            "eval_split": 0.0,
        },
        "optim": {
            "learning_rate": sizes["learning_rates"][kind],
            "lr_scheduler_type": "linear",
            "warmup_steps": 2,
        },
        "train": {
            "max_steps": sizes["steps"],
            "global_batch_size": sizes["batch"],
            "per_device_train_batch_size": sizes["batch"] // world,
            "logging_steps": 1,
        },
        "checkpoint": {"save_steps": sizes["save_steps"]},
        "output_dir": str(run),
    }
    if kind != "sft-full":
        config["lora"] = {"from": str(start_adapter(setup))}
    if is_dpo:
        config["preference"] = {"beta": sizes["beta"]}
    return config


def train_with_toolkit(setup: Setup, kind: str, world: int, run: Path) -> dict[str, Any]:
    """Train by recipe; return losses, seconds of steps, peak bytes and metrics."""
    fresh(run)
    command = toolkit_command(tuning_config(setup, kind, world, run), world, run_file(run, "yaml"))
    _, seconds = run_program(command, run_file(run, "log"), threads=2 // world)
    return read_run(setup, run) | {"program_seconds": seconds}


def read_run(setup: Setup, run: Path) -> dict[str, Any]:
    """Return the figures of a finished run of the toolkit."""
    lines = read_metrics(run)
    names = ("reward_chosen", "reward_rejected", "margin", "accuracy")
    return {
        "losses": [line["loss"] for line in lines],
        "grad_norms": [line["grad_norm"] for line in lines],
        "seconds": [line["step_time"] for line in lines[tuning_sizes(setup.tiny)["warm"] :]],
        "peak": max(line["memory_peak_bytes"] for line in lines),
        "metrics": {name: [line[name] for line in lines] for name in names if name in lines[0]},
    }


def train_with_trl(setup: Setup, kind: str, world: int, run: Path, save: bool) -> dict[str, Any]:
    """Train with TRL's trainer on the toolkit's rows in the toolkit's order."""
    sizes = tuning_sizes(setup.tiny)
    fresh(run).mkdir(parents=True)
    is_dpo = kind == "dpo"
    settings = {
        "model": str(setup.need("model")),
        "adapter": None if kind == "sft-full" else str(start_adapter(setup)),
        "rows": str(ordered_rows(setup, kind)),
        "template": str(setup.data / "chat.jinja"),
        "out": str(run),
        "steps": sizes["steps"],
        "batch": sizes["batch"],
        "warm": sizes["warm"],
        "beta": sizes["beta"],
        "supervised_only": is_dpo,
        "save": save,
        "optim": {
            "learning_rate": sizes["learning_rates"][kind],
            "lr_scheduler_type": "linear",
            "warmup_steps": 2,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
        },
    }
    return run_peer("dpo" if is_dpo else "sft", settings, run / "figures", world=world)


def ordered_rows(setup: Setup, kind: str) -> Path:
    """Write the training rows in the order in which the toolkit reads them; return the file."""
    name = "pairs_train" if kind == "dpo" else "chats_train"
    target = ordered_file(setup, kind)
    if target.exists():
        return target
    order_file = setup.folder / kind / "order"
    config = tuning_config(setup, kind, 1, order_file.with_suffix(".run"))
    toolkit_command(config, 1, run_file(order_file, "yaml"))
    command = [*launcher(1), str(PEERS), "order", "--config", str(run_file(order_file, "yaml"))]
    output = run_file(order_file, "json")
    run_program([*command, "--output", str(output)], run_file(order_file, "log"), threads=2)
    numbers = json.loads(output.read_text("utf-8"))
    rows = (setup.data / f"{name}.jsonl").read_text("utf-8").splitlines()
    if sorted(numbers) != [*range(len(rows))]:
        raise ResultsError(f"the toolkit does not read each of the {len(rows)} rows once")
    target.write_text("".join(rows[number] + "\n" for number in numbers), "utf-8")
    return target


def ordered_file(setup: Setup, kind: str) -> Path:
    """Return the file of `ordered_rows`. Each measurement of a kind on one rank writes its own."""
    return setup.data / f"{kind}_ordered.jsonl"


def run_tuning(setup: Setup, kind: str) -> dict[str, Any]:
    """Train on one rank by the toolkit and by TRL, in turns, and export the toolkit's model."""
    # The file of an earlier measurement may have other rows or another order.
    ordered_file(setup, kind).unlink(missing_ok=True)
    write_start(setup, kind)
    reason = trl_reason()
    sides: dict[str, list[dict[str, Any]]] = {"toolkit": [], "trl": []}
    folder = setup.folder / kind
    for index in range(tuning_sizes(setup.tiny)["rounds"]):
        for side in ["toolkit", "trl"][:: -1 if index % 2 else 1]:
            run = folder / f"{side}-{index}"
            if side == "toolkit":
                sides[side].append(train_with_toolkit(setup, kind, 1, run))
            elif reason is None:
                sides[side].append(train_with_trl(setup, kind, 1, run, save=index == 0))
    run, export = folder / "toolkit-0", fresh(folder / "export")
    merge = [] if kind == "sft-full" else ["--merge"]
    toolkit = [sys.executable, "-m", "toolkit"]
    command = [*toolkit, "consolidate", str(run), "--output", str(export), *merge]
    run_program([*command, "--dtype", "float32"], folder / "consolidate.log", threads=2)
    verified, _ = run_program(
        [*toolkit, "verify", str(run), str(export)], folder / "verify.log", threads=2
    )
    figures = {"sides": sides, "not_measured": reason, "verified": "verified" in verified}
    return figures | {"compared": [compare(a, b) for a, b in _pairs(sides)]}


def _pairs(sides: dict[str, list[dict[str, Any]]]) -> list[tuple[dict, dict]]:
    """Return the runs of the same round of both sides."""
    return [*zip(sides["toolkit"], sides["trl"], strict=False)]


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the largest differences of losses and metrics over all steps, and both ratios."""
    largest = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    time, their_time = (statistics.median(side["seconds"]) for side in (ours, theirs))
    return {
        "loss": largest,
        "steps": len(ours["losses"]),
        "time_ratio": time / their_time,
        "peak_ratio": ours["peak"] / theirs["peak"],
        "metrics": {
            name: _largest_metric_gap(name, ours["metrics"], theirs["metrics"])
            for name in theirs["metrics"]
        },
    }


def _largest_metric_gap(
    name: str, ours: dict[str, list[float]], theirs: dict[str, list[float]]
) -> float:
    """Return the largest difference of a metric over the steps at which it has a meaning.

    Until the first update changes a weight, the model is its own reference: margins are rounding,
    and the accuracy counts the signs of that. Those steps are left out for the accuracy.
    """
    pairs = zip(ours[name], theirs[name], strict=True)
    if name != "accuracy":
        return max(abs(a - b) for a, b in pairs)
    margins = zip(ours["margin"], theirs["margin"], strict=True)
    has_moved = [max(map(abs, both)) > ROUNDING_OF_MARGINS for both in margins]
    gaps = [abs(a - b) for (a, b), moved in zip(pairs, has_moved, strict=True) if moved]
    return max(gaps, default=math.nan)


def run_ranks(setup: Setup) -> dict[str, Any]:
    """Train each kind on two ranks by both sides; compare with the runs on one rank."""
    reason = trl_reason()
    figures: dict[str, Any] = {"not_measured": reason, "kinds": {}}
    for kind in KINDS if not setup.tiny else ("dpo",):
        write_start(setup, kind)
        folder = setup.folder / "ranks"
        ours = train_with_toolkit(setup, kind, 2, folder / f"{kind}-toolkit")
        single = measured(setup, kind)["sides"]["toolkit"][0]
        differences = zip(ours["losses"], single["losses"], strict=True)
        entry: dict[str, Any] = {"toolkit": ours}
        entry["one_rank_loss"] = max(abs(a - b) for a, b in differences)
        if reason is None:
            theirs = train_with_trl(setup, kind, 2, folder / f"{kind}-trl", save=False)
            entry |= {"trl": theirs, "compared": compare(ours, theirs)}
        figures["kinds"][kind] = entry
    return figures


def run_resume(setup: Setup) -> dict[str, Any]:
    """Kill runs with SIGKILL after their first checkpoint, resume them, compare every loss."""
    figures = {}
    for kind in RESUMED if not setup.tiny else ("dpo",):
        run = fresh(setup.folder / "resume" / kind)
        command = toolkit_command(tuning_config(setup, kind, 1, run), 1, run_file(run, "yaml"))
        log = run.parent / f"{kind}-killed.log"
        saved = kill_after_checkpoint(command, log, 2, run, seconds=1800)
        output, _ = run_program(command, run_file(run, "log"), threads=2)
        resumed, calm = read_run(setup, run), measured(setup, kind)["sides"]["toolkit"][0]
        sums = [_final_sums(path) for path in (run, setup.folder / kind / "toolkit-0")]
        figures[kind] = {
            "checkpoints_at_kill": saved,
            "has_resumed": "after step" in output,
            "losses": resumed["losses"],
            "losses_equal": resumed["losses"] == calm["losses"],
            "grad_norms_equal": resumed["grad_norms"] == calm["grad_norms"],
            "state_equal": sums[0] == sums[1] and bool(sums[0]),
        }
    return figures


def _final_sums(run: Path) -> dict[str, Any]:
    """Return the checksums of all tensors of the newest checkpoint of a run."""
    newest = sorted(run.glob("checkpoints/step-*/manifest.json"))[-1]
    return json.loads(newest.read_text("utf-8"))["row_sums"]


def run_answers(setup: Setup) -> dict[str, Any]:
    """Answer ten prompts and measure held-out rows, before and after, by plain transformers."""
    sizes = tuning_sizes(setup.tiny)
    base = str(setup.need("model"))
    common = {"base": base, "template": str(setup.data / "chat.jinja")}
    questions = {"prompts": PROMPTS[: sizes["prompts"]], "tokens": sizes["answer_tokens"]}
    models = {"before": base} | {kind: str(setup.folder / kind / "export") for kind in KINDS}
    for kind in KINDS:
        trl = setup.folder / kind / "trl-0" / "model"
        if trl.is_dir() and measured(setup, kind)["not_measured"] is None:
            models[f"{kind} by TRL"] = str(trl)
    chats, pairs = (str(setup.data / f"{name}_held_out.jsonl") for name in ("chats", "pairs"))
    # One program for all models, one after the other.
    measured_models = [
        {
            "name": name,
            "model": model,
            "chats": None if name.startswith("dpo") else chats,
            "pairs": None if name.startswith("sft") else pairs,
            "prompts": () if name.endswith("by TRL") else questions["prompts"],
        }
        for name, model in models.items()
    ]
    settings = {**common, **questions, "models": measured_models}
    figures = run_peer("held_out", settings, setup.folder / "answers" / "held_out")
    answers, held_out = figures["answers"], figures["held_out"]
    before = held_out["before"]["pair_logps"]
    for name, figures in held_out.items():
        if "pair_logps" in figures and name != "before":
            figures["reward_accuracy"] = _reward_accuracy(figures["pair_logps"], before)
    return {"prompts": questions["prompts"], "answers": answers, "held_out": held_out}


def _reward_accuracy(after: list[list[float]], before: list[list[float]]) -> float:
    """Return the share of pairs whose chosen answer gained more log-probability."""
    gains = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before, strict=True)]
    return statistics.mean(chosen > rejected for chosen, rejected in gains)


# ---- Helpers -------------------------------------------------------------------------------------


def start_adapter(setup: Setup) -> Path:
    """Return the folder of the adapter from which both sides of a LoRA stage start.

    Its name has a digest of the model and of LoRA's settings, so that others get a new adapter.
    """
    content = [setup.digests.get("model"), tuning_sizes(setup.tiny)["lora"]]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return setup.data / f"adapter-{digest}"


def write_start(setup: Setup, kind: str) -> None:
    """Write the adapter of `start_adapter`, unless it is there or `kind` has none."""
    adapter = start_adapter(setup)
    if kind != "sft-full" and not (adapter / "adapter_config.json").is_file():
        settings = {"model": str(setup.need("model")), "out": str(adapter)}
        settings["lora"] = tuning_sizes(setup.tiny)["lora"]
        run_peer("adapter", settings, run_file(adapter, "start"))


def measured(setup: Setup, name: str) -> dict[str, Any]:
    """Return the figures of an earlier stage, or raise ResultsError if there are none."""
    record = read_record(setup, name)
    if record is None:
        raise ResultsError(f"the stage {name} has to run before")
    return record["figures"]


ROWS = ("model", "pairs")
STAGES = [
    Stage(
        "shakespeare",
        "nanoGPT's characters",
        run_shakespeare,
        shakespeare_sizes,
        inputs=("text",),
        optional=("nanogpt",),
        minutes=10,
        peer_reason=nanogpt_reason,
    ),
    *(
        Stage(
            kind,
            title,
            partial(run_tuning, kind=kind),
            with_trl,
            inputs=ROWS,
            minutes={"sft-lora": 4, "sft-full": 7, "dpo": 9}[kind],
            peer_reason=lambda setup: trl_reason(),
        )
        for kind, title in KINDS.items()
    ),
    Stage(
        "ranks",
        "the same on two ranks",
        run_ranks,
        with_trl,
        inputs=ROWS,
        after=tuple(KINDS),
        minutes=12,
        peer_reason=lambda setup: trl_reason(),
    ),
    Stage(
        "resume",
        "kill -9 and resume",
        run_resume,
        tuning_sizes,
        inputs=ROWS,
        after=tuple(KINDS),
        minutes=6,
    ),
    Stage(
        "answers",
        "before and after",
        run_answers,
        tuning_sizes,
        inputs=ROWS,
        after=tuple(KINDS),
        minutes=3,
    ),
    Stage(
        "distillation",
        "a student of a third of the layers",
        run_distillation,
        distillation_sizes,
        inputs=("model", "text"),
        minutes=8,
    ),
]
"""The measured stages, in their order. A new one needs a section in `results_page.SECTIONS`."""
