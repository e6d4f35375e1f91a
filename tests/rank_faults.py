"""A rank that dies, leaves, stops or hangs, in each phase of a run: all end, and the cause is told.

    python tests/rank_faults.py --write docs/evidence/rank_faults.md     (make soak)
    python tests/rank_faults.py --only stop --phases step save

Ranks are forks of warm processes without a launcher that could end them, as ranks of another host
are for each other. For each fault in each phase what must hold:

    gone         every process of the run ends in time: at a death within 30 s, at a hang within
                 the patience that is set and 20 s
    cause        the first line of the watchdog, or of the error, names the rank and what it did
    no orphans   nothing that the run started is left, watchers and loaders included
    resumes      the checkpoints that were committed are whole
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil  # noqa: E402
from distributed import run_recipe_ranks  # noqa: E402

PLANT = """
import os, runpy, signal, sys, time
import pkgutil

def plant(place, nth, fault, rank, mark):
    module, name = place.rsplit(".", 1)
    module = pkgutil.resolve_name(module)
    plain, calls = getattr(module, name), [0]

    def planted(*args, **more):
        calls[0] += 1
        if calls[0] != nth or os.environ["RANK"] != rank:
            return plain(*args, **more)
        open(mark, "w").write(str(time.time()))
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "exception":
            raise RuntimeError("planted")
        if fault == "memory":
            import torch
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        while fault == "loop":
            pass
        return None  # a missed collective: the others' calls find no partner

    setattr(module, name, planted)

plant(**{arguments!r})
runpy.run_path({recipe!r}, run_name="__main__")
"""
# Phase -> the call that it begins with, which of them, and what is named in the cause.
PHASES = {
    "start": ("toolkit.data.prepare.prepare_data", 1),
    "load": ("toolkit.loading.load_or_init", 1),
    "step": ("toolkit.training.Update.step", 3),
    "evaluate": ("toolkit.training.evaluate_metrics", 1),
    "save": ("toolkit.checkpoint.save", 1),
    "export": ("toolkit.export.Exporter.export", 1),
    "exit": ("toolkit.training.launch._exit_process", 1),
}
DEATHS = {
    "kill": r"watchdog: rank 1 \(pid \d+ on \S+\) is gone: killed",
    "exception": r"watchdog: rank 1 \(pid \d+ on \S+\) ended: RuntimeError: planted",
    "memory": r"out of memory on rank 1|\[rank 1\] error: CUDA out of memory",
}
HANGS = {
    "stop": r"watchdog: no rank made progress .*missing \(no answer, T \(stopped\)\): rank 1",
    "loop": r"watchdog: no rank made progress .*missing \(\S+:\d+ in planted\): rank 1",
}
# What a rank that skips a call does next depends on the call: it meets the others in a call that
# does not fit, fails on what it did not get, or waits.
# Gloo aborts a process that is sent more than it expected.
MISSED = {"missed": r"watchdog: (rank \d .* (ended: |is gone: )|no rank made progress )|error: "}
FAULTS = DEATHS | HANGS | MISSED
HANG_SECONDS = 3.0
PATIENT = 12
PLANS = 75.0  # seconds for which a rank without memory may plan what would fit, with its imports


def run(folder: Path, fault: str, phase: str, number: int, *more: str) -> dict[str, Any]:
    """Run a recipe with a fault; return what was seen and, in `wrong`, what should not be."""
    scene = folder / f"{number}-{fault}-{phase}"
    scene.mkdir()
    script, mark = planted(scene, fault, phase)
    ended = run_recipe_ranks(script, 2, *flags(folder, scene / "run"), *more, cwd=scene, grace=90.0)
    took = time.time() - float(mark.read_text()) if mark.exists() else float("nan")
    said = ended.stderr.splitlines()
    cause = next(
        (line for line in said if re.match(r"watchdog: |(\[rank \d\] )?error: ", line)), ""
    )
    wrong = []
    if not mark.exists():
        wrong.append("the fault never happened")
    hangs = fault not in DEATHS and "no rank made progress" in cause
    # A rank that missed a call of a step waits in the next evaluation, where more time may pass.
    steady = phase == "step" and fault != "missed"
    patience = HANG_SECONDS * (1 if steady else PATIENT) + 20.0 if hangs else 30.0
    patience += PLANS if fault == "memory" else 0.0
    if not took <= patience:
        wrong.append(f"gone after {took:.0f} s, expected at most {patience:.0f}")
    if ended.returncode == 0:
        wrong.append("exit code 0")
    # What ends a rank after its last words is seen from outside alone.
    expected = DEATHS["kill"] if phase == "exit" and fault in DEATHS else FAULTS[fault]
    if not re.search(expected, ended.stderr):
        wrong.append(f"cause not told: {cause}")
    if hangs and not list((scene / "run").glob("hang-*.txt")):
        wrong.append("no report of the hang")
    if left := orphans(str(scene)):
        wrong.append(f"left behind: {left}")
    wrong += damaged(scene / "run")
    return {"fault": fault, "phase": phase, "seconds": took, "cause": cause, "wrong": wrong,
            "code": ended.returncode, "stderr": ended.stderr}  # fmt: skip


def planted(scene: Path, fault: str, phase: str) -> tuple[Path, Path]:
    """Write a recipe of which rank 1 has a fault; return it, and the file that tells when."""
    place, nth = PHASES[phase]
    script, mark = scene / "planted.py", scene / "mark"
    arguments = {"place": place, "nth": nth, "fault": fault, "rank": "1", "mark": str(mark)}
    recipe = str(HERE.parent / "recipes" / "pretrain.py")
    text = PLANT.replace("{arguments!r}", repr(arguments)).replace("{recipe!r}", repr(recipe))
    script.write_text(text)
    return script, mark


def flags(folder: Path, output: Path) -> list[str]:
    return [
        "--model.name_or_path", str(folder / "model"),
        "--data.train_files", str(folder / "text.txt"),
        "--data.sequence_length", "32",
        "--data.eval_split", "0.1",
        "--data.max_eval_samples", "8",
        "--data.num_workers", "1",
        "--train.per_device_train_batch_size", "2",
        "--train.max_steps", "6",
        "--train.eval_steps", "3",
        "--train.hang_seconds", str(HANG_SECONDS),
        "--checkpoint.save_steps", "2",
        "--checkpoint.export_at_end", "true",
        "--output_dir", str(output),
    ]  # fmt: skip


def orphans(scene: str) -> list[str]:
    """Return processes that name the scene and are still there after some seconds."""
    until = time.monotonic() + 5.0
    while True:
        found = []
        for process in psutil.process_iter(["pid", "cmdline"]):
            words = " ".join(process.info["cmdline"] or [])
            if scene in words and process.pid != os.getpid():
                found.append(f"{process.pid}: {words[:80]}")
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.2)


def damaged(output: Path) -> list[str]:
    from toolkit.checkpoint.commit import committed_steps, find_damaged_files

    return [
        f"checkpoint {step} damaged: {fault}"
        for step, checkpoint in committed_steps(output).items()
        for fault in find_damaged_files(checkpoint)
    ]


def prepare(folder: Path) -> None:
    """Write a model and a text."""
    from conftest import save_byte_tokenizer, save_tiny_model

    (folder / "model").mkdir()
    save_byte_tokenizer(folder / "model")
    save_tiny_model(folder / "model")
    (folder / "text.txt").write_bytes(Path(argparse.__file__).read_bytes()[:40_000])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=[*FAULTS], default=[*FAULTS])
    parser.add_argument("--phases", nargs="*", choices=[*PHASES], default=[*PHASES])
    parser.add_argument("--more", type=int, default=12, help="random ones, saved behind the loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="write the table here")
    args = parser.parse_args()
    cases = [
        (fault, phase, False)
        for phase in args.phases
        for fault in args.only
        if (fault, phase) != ("missed", "exit")  # no collective follows
    ]
    draw = random.Random(args.seed)
    cases += [(*draw.choice(cases)[:2], True) for _ in range(args.more)]
    results = []
    with tempfile.TemporaryDirectory(prefix="rank-faults-") as made:
        prepare(Path(made))
        for number, (fault, phase, behind) in enumerate(cases):
            more = ["--checkpoint.async_save", "true"] if behind else []
            results.append(result := run(Path(made), fault, phase, number, *more))
            print(f"{fault:10} {phase:9} {result['seconds']:6.1f} s  {result['code']:3}  "
                  f"{result['cause'][:90]}", flush=True)  # fmt: skip
            for wrong in result["wrong"]:
                print(f"  WRONG: {wrong}", flush=True)
            shutil.rmtree(Path(made, f"{number}-{fault}-{phase}"))
    bad = sum(bool(result["wrong"]) for result in results)
    print(json.dumps({"runs": len(results), "wrong": bad}))
    if args.write:
        write_report(args.write, results)
    return 1 if bad else 0


def write_report(file: Path, results: list[dict[str, Any]]) -> None:
    import torch

    bad = sum(bool(result["wrong"]) for result in results)
    lines = [
        "# A rank dies, stops or hangs: measured",
        "",
        "Written by `tests/rank_faults.py` (`make soak`). Two gloo ranks without a launcher that "
        f"could end them; rank 1 has the fault. {len(results)} runs, **{bad} wrong**: every "
        "process gone in time, the cause on one line, nothing left behind, what was committed "
        "whole. "
        f"`train.hang_seconds` {HANG_SECONDS:.0f} (x {PATIENT} beside steady steps); a death has "
        "30 s, a hang its patience and 20 s.",
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores.",
        "",
        "Seconds from the fault until the last process was gone (largest of the runs):",
        "",
        "| fault | " + " | ".join(PHASES) + " |",
        "|---|" + "---|" * len(PHASES),
    ]
    for fault in FAULTS:
        cells = []
        for phase in PHASES:
            took = [r["seconds"] for r in results if (r["fault"], r["phase"]) == (fault, phase)]
            cells.append(f"{max(took):.1f}" if took else "")
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    lines += ["", "Causes as they were told, one a fault:", ""]
    for fault in FAULTS:
        told = next((r["cause"] for r in results if r["fault"] == fault and r["cause"]), "")
        lines.append(f"- {fault}: `{re.sub(r'/[^ ;]*/', '', told)}`")
    file.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
