"""The stage of `make results` that distils a model into a student with fewer layers."""

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from results_common import (
    ResultsError,
    Setup,
    fresh,
    read_metrics,
    run_file,
    run_peer,
    run_program,
    toolkit_command,
)
from results_inputs import write_jsonl

RUNS = {"finetune": "without the teacher", "distill": "with the teacher"}
"""Kind of run -> how the page names its student."""


def distillation_sizes(tiny: bool) -> dict[str, Any]:
    """Return the sizes of the stage. The student keeps every `layer_stride`-th layer."""
    common: dict[str, Any] = {"learning_rate": 5e-4, "kl_weight": 0.9, "temperature": 1.0}
    if tiny:
        return common | {"layer_stride": 2, "steps": 3, "batch": 2, "max_tokens": 96, "held_out": 3}
    sizes = {"layer_stride": 3, "steps": 80, "batch": 4, "max_tokens": 128, "held_out": 64}
    return common | sizes


def run_distillation(setup: Setup) -> dict[str, Any]:
    """Train two equal students, one with a teacher; measure both with plain transformers."""
    sizes, folder = distillation_sizes(setup.tiny), setup.folder / "distillation"
    counts = write_texts(setup, sizes)
    student = fresh(folder / "student")
    shape = {"model": str(setup.need("model")), "layer_stride": sizes["layer_stride"]}
    shape = run_peer("student", shape | {"out": str(student)}, student)
    models = {"teacher": setup.need("model"), "student at the start": student}
    runs = {}
    for kind, title in RUNS.items():
        run, export = fresh(folder / kind), fresh(folder / f"{kind}-export")
        config = student_config(setup, kind, student, run)
        command = toolkit_command(config, 1, run_file(run, "yaml"))
        _, seconds = run_program(command, run_file(run, "log"), threads=2)
        toolkit = [sys.executable, "-m", "toolkit", "consolidate", str(run), "--output"]
        command = [*toolkit, str(export), "--dtype", "float32"]
        run_program(command, folder / f"{kind}-consolidate.log", threads=2)
        lines = read_metrics(run)
        if lines[-1]["step"] != sizes["steps"]:
            raise ResultsError(f"{kind}: expected {sizes['steps']} steps, got {lines[-1]['step']}")
        times = [line["step_time"] for line in lines[2:] or lines]
        entry = {"seconds": seconds, "step_seconds": statistics.median(times)}
        entry["peak"] = max(line["memory_peak_bytes"] for line in lines)
        entry["curve"] = [[line["step"], line.get("cross_entropy", line["loss"])] for line in lines]
        if "agreement" in lines[-1]:
            entry["agreement"] = [line["agreement"] for line in lines]
        runs[kind], models[title] = entry, export
    settings: dict[str, Any] = {"rows": str(setup.data / "texts_held_out.jsonl")}
    settings["models"] = {name: str(model) for name, model in models.items()}
    settings["tokenizer"] = str(setup.need("model"))
    held_out = run_peer("texts", settings, folder / "held_out")
    return {"student": shape, "rows": counts, "runs": runs, "held_out": held_out}


def student_config(setup: Setup, kind: str, student: Path, run: Path) -> dict[str, Any]:
    """Return the config of a run that trains the student; `kind` is one of `RUNS`."""
    sizes = distillation_sizes(setup.tiny)
    config: dict[str, Any] = {
        "kind": kind,
        "model": {"name_or_path": str(student), "dtype": "float32"},
        "sharding": {"param_dtype": "float32"},
        "data": {
            "train_files": str(setup.data / "texts_train.jsonl"),
            "sequence_length": sizes["max_tokens"],
            "packing": "none",
            "eval_split": 0.0,
        },
        "optim": {
            "learning_rate": sizes["learning_rate"],
            "lr_scheduler_type": "cosine",
            "warmup_steps": min(5, sizes["steps"] - 1),
        },
        "train": {
            "max_steps": sizes["steps"],
            "global_batch_size": sizes["batch"],
            "per_device_train_batch_size": sizes["batch"],
            "logging_steps": 1,
        },
        "checkpoint": {"save_steps": sizes["steps"]},
        "output_dir": str(run),
    }
    if kind == "distill":
        config["teacher"] = {"name_or_path": str(setup.need("model"))}
        config["distill"] = {name: sizes[name] for name in ("kl_weight", "temperature")}
    return config


def write_texts(setup: Setup, sizes: dict[str, Any]) -> dict[str, int]:
    """Write rows of text from both parts of the text; return the number of rows of each.

    A row has whole paragraphs, as many as fit into `max_tokens` with two special tokens.

    Raises:
        ResultsError: the text has too few rows.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(setup.need("model"))
    row_counts = {"train": sizes["steps"] * sizes["batch"], "held_out": sizes["held_out"]}
    for name, source in (("train", "train.txt"), ("held_out", "val.txt")):
        text = (setup.data / source).read_text("utf-8")
        rows = []
        for row in iterate_rows(text, tokenizer, sizes["max_tokens"] - 2):
            rows.append({"text": row})
            if len(rows) == row_counts[name]:
                break
        if len(rows) < row_counts[name]:
            raise ResultsError(f"expected {row_counts[name]} rows of {source}, found {len(rows)}")
        write_jsonl(setup.data / f"texts_{name}.jsonl", rows)
    return row_counts


def iterate_rows(text: str, tokenizer: Any, max_tokens: int) -> Iterator[str]:
    """Join paragraphs to rows of at most `max_tokens` tokens. Longer paragraphs are dropped."""
    row = ""
    for paragraph in text.split("\n\n"):
        longer = f"{row}\n\n{paragraph}" if row else paragraph
        if len(tokenizer(longer, add_special_tokens=False)["input_ids"]) <= max_tokens:
            row = longer
            continue
        if row:
            yield row
        fits = len(tokenizer(paragraph, add_special_tokens=False)["input_ids"]) <= max_tokens
        row = paragraph if fits else ""
    if row:
        yield row
