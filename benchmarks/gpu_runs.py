"""What must work on one GPU as a user runs it: cases of `gpu.py`, whole runs by the command line on
small random models. Each raises, or records a check that is false, where it does
not.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from gpu_common import ROOT, NotHere, Place, Program, apart, folder, model_config, tokens
from gpu_ledger import Case
from results_common import ResultsError
from results_inputs import DOWNLOADS, find_file


def recipe(kind: str, output: Path, **flags: Any) -> list[str]:
    given = [
        part
        for name, value in flags.items()
        for part in (
            f"--{name.replace('__', '.')}",
            value if isinstance(value, str) else json.dumps(value),
        )
    ]
    return [f"recipes/{kind}.py", "--output_dir", str(output), *given]


def committed(run: Path) -> list[Path]:
    return sorted(p.parent for p in run.glob("checkpoints/step-????????/COMMIT"))


def manifest(run: Path) -> dict[str, Any]:
    """Return what the newest checkpoint of a run says of its tensors."""
    return json.loads((committed(run)[-1] / "manifest.json").read_text())


def pretrain_and_finetune(place: Place) -> None:
    pretrain_runs(place)
    finetune_run(place)


def pretrain_runs(place: Place) -> None:
    """Train, save behind the loop, kill -9, resume, export, prove; twice the same run."""
    base = place.work / "pretrain"
    source = base / "text"
    source.mkdir(parents=True)
    for module in (argparse, dataclasses, shutil):
        shutil.copy(str(module.__file__), source / f"{module.__name__}.txt")
    model = base / "config"
    model_config(place, "small", vocab_size=2048).save_pretrained(model)
    written = json.loads((model / "config.json").read_text())
    written["architectures"] = ["LlamaForCausalLM"]
    (model / "config.json").write_text(json.dumps(written))
    steps = 9 if place.tiny else 60
    flags = {
        "model__name_or_path": str(model),
        "model__init": "random",
        "model__train_tokenizer": True,
        "data__train_files": [str(source / "*.txt")],
        "data__sequence_length": 64 if place.tiny else 256,
        "train__max_steps": steps,
        "train__per_device_train_batch_size": 4,
        "train__logging_steps": 1,
        "checkpoint__save_steps": steps // 3,
        "checkpoint__async_save": True,
        "train__deterministic": True,
    }
    if not place.tiny:
        flags["sharding__param_dtype"] = "bfloat16"
    calm, killed = base / "calm", base / "killed"
    undisturbed = Program(place, recipe("pretrain", calm, **flags), "calm")
    victim = Program(place, recipe("pretrain", killed, **flags), "killed")
    until(victim, lambda: bool(committed(killed)))
    victim.kill()
    left = len(committed(killed))
    undisturbed.end_well()
    said = Program(place, recipe("pretrain", killed, **flags), "resumed").end_well()
    resumed = left < 3 and "after step" in said
    place.record("killed and resumed", resumed, checkpoints_before=left)
    ours, theirs = manifest(killed)["row_sums"], manifest(calm)["row_sums"]
    unlike = [name for name in theirs if ours.get(name) != theirs[name]]
    place.record(
        "deterministic: state after the kill is that of an undisturbed run",
        not unlike and len(ours) == len(theirs) > 0,
        tensors=len(theirs),
        unlike=unlike[:20],
    )
    export = base / "hf"
    command = ["-m", "toolkit", "consolidate", str(killed), "--output", str(export)]
    Program(place, command, "consolidate").end_well()
    command = ["-m", "toolkit", "verify", str(killed), str(export), "--logits"]
    Program(place, command, "verify").end_well()
    place.record("export proven", True)


def finetune_run(place: Place) -> None:
    """Adapters on packed conversations: proof after each save, answers, exports, proofs."""
    base = place.work / "pretrain" / "hf"  # what `pretrain_runs` exported
    work = place.work / "finetune"
    work.mkdir()
    chats = work / "chats.jsonl"
    with open(chats, "w") as f:
        for i in range(200):
            question, answer = f"What is {i} plus {i % 7}?", f"It is {i + i % 7}."
            turns = [("user", question), ("assistant", answer)]
            messages = [{"role": role, "content": content} for role, content in turns]
            f.write(json.dumps({"messages": messages}) + "\n")
    run = work / "run"
    flags = {
        "model__name_or_path": str(base),
        "data__train_files": [str(chats)],
        "data__chat_template": str(ROOT / "recipes/configs/chat_template.jinja"),
        "data__sequence_length": 128,
        "data__packing": "bfd",
        "data__eval_split": 0.05,
        "lora__r": 8,
        "train__max_steps": 4,
        "train__per_device_train_batch_size": 2,
        "train__eval_steps": 2,
        "train__eval_prompts": ["What is 3 plus 4?"],
        "checkpoint__save_steps": 2,
        "checkpoint__export_steps": 4,
    }
    said = Program(place, recipe("finetune", run, **flags), "run").end_well()
    answers = [p for p in run.rglob("*") if p.is_file() and "sample" in p.name]
    place.record("answers at an evaluation", bool(answers), said=said[-400:])
    live = list((run / "exports").glob("step-*"))
    place.record("exported while it ran", len(live) == 1)
    for name, more in (("adapter", []), ("merged", ["--merge"])):
        out = str(work / name)
        command = ["-m", "toolkit", "consolidate", str(run), "--output", out, *more]
        Program(place, command, f"consolidate-{name}").end_well()
        logits = [] if more else ["--logits"]
        command = ["-m", "toolkit", "verify", str(run), out, *logits]
        Program(place, command, f"verify-{name}").end_well()
        place.record(f"{name} proven", True)


# ---- What a run says of itself -------------------------------------------------------------------


def config_file(path: Path, **flags: Any) -> Path:
    """Write settings, given as `section__field`, as a YAML file."""
    content: dict[str, Any] = {}
    for name, value in flags.items():
        section, _, field = name.rpartition("__")
        (content.setdefault(section, {}) if section else content)[field] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path


def plain_run(place: Place, **flags: Any) -> dict[str, Any]:
    """Return the settings of a run of the small model on tokens, under the case's own folder."""
    length = 64 if place.tiny else 512
    return {
        "model__name_or_path": str(apart(folder, place, "small")),
        "data__train_files": [str(tokens(place, "small", 2 * 10**6 // (100 if place.tiny else 1)))],
        "data__sequence_length": length,
        "sharding__param_dtype": "bfloat16",
        "sharding__torch_compile": "none",
        "train__per_device_train_batch_size": 4,
        "train__logging_steps": 1,
        "output_dir": str(place.work / place.name / "run"),
    } | flags


def lines_of(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def until(program: Program, seen: Callable[[], bool]) -> None:
    """Wait until `seen`; RuntimeError where the program ends before."""
    while not seen():
        if program.ended():
            raise RuntimeError(f"it ended too early: {program.output()[-1500:]}")
        time.sleep(0.005)


def preempted(place: Place) -> None:
    """`toolkit train`: profiled, stopped by SIGTERM with a checkpoint, resumed to the end."""
    base = place.work / place.name
    steps = 60 if place.tiny else 400
    flags = plain_run(place, train__max_steps=steps, train__profile_steps=[4, 6])
    run = Path(flags["output_dir"])
    launcher = "one_gpu" if place.cuda else "cpu"
    command = ["-m", "toolkit", "train", str(config_file(base / "config.yaml", **flags))]
    command += ["--accelerate_config", launcher, "--num_processes", "1"]
    program = Program(place, command, "stopped", fresh=True)
    until(program, (run / "profile" / "summary.json").exists)
    began = time.monotonic()
    program.send(signal.SIGTERM)
    code, seconds = program.code(), time.monotonic() - began
    saved = [int(path.name.removeprefix("step-")) for path in committed(run)]
    trained = max((line["step"] for line in lines_of(run)), default=0)
    ok = code == 75 and len(saved) == 1 and saved[0] < steps and trained - saved[0] in (0, 1)
    place.record("stopped with a checkpoint", ok, code=code, seconds=seconds, saved=saved)
    summary = json.loads((run / "profile" / "summary.json").read_text())["seconds_per_step"]
    busy = sum(summary.values()) > 0 and "WARNING: a trace has no kernels" not in program.output()
    place.record("profiled", busy, **summary)
    if place.cuda:
        snapshots = list((run / "profile").glob("memory-*"))
        place.record(
            "memory snapshot", bool(snapshots), bytes=[f.stat().st_size for f in snapshots]
        )
    said = Program(place, command, "resumed", fresh=True).end_well()
    place.record("resumed to the end", f"after step {saved[0]}" in said and "Traceback" not in said)
    after = [line["step"] for line in lines_of(run)]
    place.record("each step once", after == list(range(1, steps + 1)), steps=len(after))


def planned(place: Place) -> None:
    """The plan of a run, corrected by a step on this device, against the run's peak and time."""
    base = place.work / place.name
    flags = plain_run(place, train__max_steps=8, sharding__activation_checkpointing="full")
    flags |= {"sharding__accumulation": "reduce_each"}
    run = Path(flags["output_dir"])
    config = str(config_file(base / "config.yaml", **flags))
    command = ["-m", "toolkit", "plan", config, "--world_size", "1", "--json"]
    command += ["--device", "cpu"] if not place.cuda else []
    os.environ["XDG_CACHE_HOME"] = str(base / "cache")
    found = {}
    for name, more in (("assumed", []), ("calibrated", ["--calibrate"])):
        said = Program(place, [*command, *more], f"plan-{name}").end_well()
        found[name] = json.JSONDecoder().raw_decode(said, said.index('{"model"'))[0]
    Program(place, ["recipes/finetune.py", "--config", config], "run").end_well()
    lines = [line for line in lines_of(run) if "memory_peak_bytes" in line]
    peak = max(line["memory_peak_bytes"] for line in lines)
    for name, plan in found.items():
        expected = plan["memory"] - plan["reserve"]
        differs = abs(expected / peak - 1)
        within = 0.05 if name == "calibrated" else 0.10
        ok = differs <= within if place.cuda else None  # on a CPU the process is counted
        place.record(f"peak memory, {name}", ok, differs=differs, planned=expected, peak=peak)
        step = sorted(line["step_time"] for line in lines[2:])[len(lines[2:]) // 2]
        seconds = plan["estimate"]["step"]
        place.record(f"step time, {name}", None, planned=seconds, measured=step)


def automatic(place: Place) -> None:
    """`auto` for batch and recomputation in 4 GB of device memory: chosen, said, trained."""
    base = place.work / place.name
    flags = plain_run(place, train__max_steps=3, train__global_batch_size=64)
    flags |= {
        "train__per_device_train_batch_size": "auto",
        "sharding__activation_checkpointing": "auto",
        "sharding__device_memory": "4GB",
    }
    config = config_file(base / "config.yaml", **flags)
    command = ["recipes/finetune.py", "--config", str(config)]
    said = Program(place, command, "run", fresh=True).end_well()
    chosen = [line for line in said.splitlines() if line.startswith(("auto", "memory"))]
    lines = lines_of(Path(flags["output_dir"]))
    trained = [line["step"] for line in lines] == [1, 2, 3]
    ok = trained and any("per_device" in line for line in chosen)
    place.record("chosen and trained", ok, said=chosen)
    if place.cuda:
        peak = max(line["memory_peak_bytes"] for line in lines)
        place.record("within the memory", peak <= 4e9, peak=peak)


def memory_shortage(place: Place) -> None:
    """Too little device memory: a readable error with what would fit, exit code 1."""
    flags = plain_run(place, train__max_steps=3)
    if place.cuda:
        flags["train__per_device_train_batch_size"] = 2048
    else:
        flags["sharding__device_memory"] = "100KB"  # refused before it is loaded
    config = config_file(place.work / place.name / "config.yaml", **flags)
    command = ["recipes/finetune.py", "--config", str(config)]
    program = Program(place, command, "run", fresh=True)
    code, said = program.code(), program.output()
    wanted = ["error: ", "Cheapest changes: ", "out of memory in" if place.cuda else "cannot fit"]
    ok = code == 1 and all(text in said for text in wanted) and "Traceback" not in said
    place.record("readable, exit code 1", ok, code=code, said=said[-1200:])


def rehearsed(place: Place) -> None:
    """`toolkit rehearse` beside a GPU, on its CPU."""
    flags = plain_run(place, train__max_steps=100)
    config = config_file(place.work / place.name / "config.yaml", **flags)
    command = ["-m", "toolkit", "rehearse", str(config), "--skip", "disk"]
    begun = time.monotonic()
    program = Program(place, command, "rehearsal", fresh=True)
    code, seconds = program.code(), time.monotonic() - begun
    place.record("every stage", code == 0, code=code, seconds=seconds, said=program.output()[-800:])


def shakespeare(place: Place) -> None:
    """nanoGPT's characters by the ready config: the best validation loss of the run."""
    work = place.work / "shakespeare"
    work.mkdir()
    run, flags = work / "run", {}
    if place.tiny:
        text = "A short text of few letters. " * 120
        flags = {"train__max_steps": 2, "train__eval_steps": 1, "checkpoint__save_steps": 2}
        flags |= {"train__global_batch_size": 1, "train__per_device_train_batch_size": 1}
        flags |= {"optim__warmup_steps": 1, "sharding__param_dtype": "float32"}
    else:
        try:
            text = find_file(DOWNLOADS["text"][0], None).read_text("utf-8")
        except ResultsError as error:
            raise NotHere(str(error)) from error
    count = int(len(text) * 0.9)
    for name, part in (("train", text[:count]), ("val", text[count:])):
        (work / f"{name}.txt").write_text(part, "utf-8")
    flags |= {"data__train_files": [str(work / "train.txt")]}
    flags |= {"data__eval_files": [str(work / "val.txt")]}
    # Flags win over a config that stands before them.
    script, *more = recipe("pretrain", run, **flags)
    config = ["--config", "recipes/configs/shakespeare_char_gpu.yaml"]
    begun = time.monotonic()
    Program(place, [script, *config, *more], "run").end_well()
    seconds = time.monotonic() - begun
    lines = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    best = min((line for line in lines if "eval_loss" in line), key=lambda line: line["eval_loss"])
    figures = {"eval_loss": best["eval_loss"], "step": best["step"], "seconds": seconds}
    place.record("best validation loss", None, **figures)


CASES = (
    Case("shakespeare", shakespeare, 240),
    Case("automatic", automatic, 60, needs=("small",)),
    Case("memory_shortage", memory_shortage, 50, needs=("small",)),
    Case("rehearsed", rehearsed, 90, needs=("small",), host=True),
    Case("planned", planned, 30, needs=("small",)),
    Case("pretrain_runs", pretrain_and_finetune, 105),
    Case("preempted", preempted, 75, needs=("small",)),
)
