"""Proof on one GPU: what must work; how fast it is beside a bare loop and transformers' Trainer.

    python benchmarks/gpu.py --out OUT [--deadline 810] [--results FILE] [--write FILE]
    python benchmarks/gpu.py --page --results FILE --write FILE    # the tables alone
    python benchmarks/gpu.py --bundle DIR                    # for a GPU machine without a network
    python benchmarks/gpu.py --tiny --device cpu --out OUT   # every line but the CUDA calls

One call takes at most 15 minutes, and goes on where the last one ended, on whichever day and
machine that was: what every call finds is appended to FILE (OUT/results.jsonl), and the cases come
in the order in which they are owed: never run, then failed or timed out, then those whose figures
are of the oldest commit. What has run well at this very commit is not run again, unless it is named
(--only). Every case is a process of its own with a deadline of its own, and is left out where less
time is left than it needs. What needs the processor alone, such as weights that are written and
plans, runs beside cases that are not timed. The tables (OUT/gpu.md) come last, with what is owed.
Exit code 1 where a case of this call failed; a bar that is not met is a result.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from gpu_bundle import bundle, revision  # noqa: E402
from gpu_ledger import (  # noqa: E402
    Case,
    Line,
    append,
    by_debt,
    expected_seconds,
    read_results,
    settle,
)
from gpu_report import DRY, report  # noqa: E402

# Set before torch starts, and by the cases' processes too.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as the toolkit does; for its peers too
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asks without CUDA, which this process must not start
}
_NO_GPU = (
    "torch sees no GPU here. `python benchmarks/gpu.py --bundle DIR` packs what a GPU machine "
    "needs; `python benchmarks/gpu.py --tiny --device cpu --out OUT` is the dry run on this one"
)
_FIRST = (
    *("host_syncs", "saving_while_training", "streamed_dpo", "nccl_split"),
    *("loss_head", "log_probabilities"),
)
_IMPORTED = ("torch", "transformers", "accelerate", "peft", "pyarrow", "psutil", "xxhash")
_IMPORTED += ("datasets", "jsonargparse", "safetensors", "yaml", "tqdm", "numpy")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    seconds = "from the start of the program to the end of the last case"
    parser.add_argument("--deadline", type=float, default=810.0, help=f"seconds {seconds}")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="tables and logs")
    parser.add_argument("--results", type=Path, help="what all calls have found; appended to")
    parser.add_argument("--work", type=Path, help="models and runs; deleted at the end")
    parser.add_argument("--write", type=Path, help="write the tables to this file too")
    parser.add_argument("--only", nargs="+", default=[], help="cases, by name")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the dry run: tiny models, forks")
    parser.add_argument("--page", action="store_true", help="write the tables, run nothing")
    parser.add_argument("--bundle", type=Path, help="pack the project and wheels into a folder")
    for name in ("inner", "case", "stamp"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bundle is not None:
        return bundle(args.bundle)
    if missing := [n for n in _IMPORTED if importlib.util.find_spec(n) is None]:
        print(f"error: not installed: {', '.join(missing)}; see --bundle", file=sys.stderr)
        return 1
    os.environ |= _ENVIRONMENT
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # Trainer would use all in one process
    if args.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    if args.device == "cuda" and not args.page and not torch.cuda.is_available():
        print(f"error: {_NO_GPU}", file=sys.stderr)
        return 1
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = (args.results or out / "results.jsonl").resolve()
    if args.inner:
        return inner(args, out, results)
    if args.page:
        text = report(read_results(results), all_cases(), revision()["commit"].rstrip("+"))
        (args.write or out / "gpu.md").write_text(text, "utf-8")
        return 0
    chosen = chosen_cases(args.only) if args.only else []
    work = args.work or Path(tempfile.mkdtemp(prefix="toolkit-gpu-", dir=_roomy()))
    os.environ["HF_DATASETS_CACHE"] = str(work / "datasets")
    call = Call(out, results, work, args.device, args.tiny, STARTED + args.deadline)
    try:
        prepare(call)
        known = read_results(results)
        cases = by_debt(all_cases(), known, call.stamp["commit"])
        if chosen:
            cases = chosen
        run_cases([*preparations(cases), *cases], call)
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    settle(results)
    return write_pages(call, args.write)


@dataclass
class Call:
    """One call of this program: where it works, until when, and what its records bear."""

    out: Path
    results: Path
    work: Path
    device: str
    tiny: bool
    ends: float  # by `time.monotonic`
    stamp: dict[str, Any] = field(default_factory=dict)


def _roomy() -> str | None:
    """Return the memory file system where it holds the weights of all cases, else None."""
    shm = Path("/dev/shm")
    return str(shm) if shm.is_dir() and shutil.disk_usage(shm).free > 60e9 else None


def prepare(call: Call) -> None:
    """Import all that cases use, which takes up to 20 s: the cases are forks of this process, and
    they alone use CUDA. Then record what the machine is.
    """
    import gpu_common

    all_cases()
    # PEFT imports bitsandbytes, which uses CUDA at once.
    if importlib.util.find_spec("bitsandbytes") is None:
        import peft  # noqa: F401
    about = gpu_common.apart(machine, call.device == "cuda")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {name: about["versions"].get(name) for name in ("torch", "transformers")}
    call.stamp |= {**revision(), "date": now, "card": about["card"], **versions}
    case = {"case": f"machine {about['card']}, {call.stamp['commit']}"}
    append(call.results, case | {"check": "machine", "ok": None} | about | call.stamp)
    append(call.results, case | {"status": "ended"} | call.stamp)


def machine(cuda: bool) -> dict[str, Any]:
    """Return what is known of the card and the versions."""
    import torch

    packages = ("torch", "transformers", "accelerate", "datasets", "peft")
    packages += ("bitsandbytes", "liger-kernel", "flash-attn")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    about: dict[str, Any] = {"card": f"{DRY} ({platform.machine()}), a dry run"}
    if cuda:
        card = torch.cuda.get_device_properties(0)
        about = {"card": card.name, "memory_gb": round(card.total_memory / 1e9, 1)}
        about["cuda"] = torch.version.cuda
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        if shutil.which("nvidia-smi"):
            asked = subprocess.run(query, capture_output=True, text=True, check=False)
            about["driver"] = asked.stdout.strip()
        from toolkit.training.flops import find_peak_flops

        about["peak_tflops"] = (find_peak_flops(card.name) or 0) / 1e12
    return about | {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def all_cases() -> list[Case]:
    """Return every case. Of those that are owed alike the first is run first: what preference
    tuning and saving behind the loop owe (`_FIRST`), then what has a bar.
    """
    import gpu_bench
    import gpu_cases
    import gpu_experts
    import gpu_kernels
    import gpu_preference
    import gpu_ranks
    import gpu_runs

    modules = (gpu_preference, gpu_bench, gpu_kernels, gpu_experts, gpu_ranks, gpu_runs)
    barred = [case for module in modules for case in module.CASES]
    cases = [*barred, *gpu_bench.LATER, *gpu_cases.CASES]
    return sorted(cases, key=lambda case: _FIRST.index(case.name) if case.name in _FIRST else 99)


def chosen_cases(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names; exit with code 2 for a name that no case has."""
    cases = all_cases()
    if unknown := sorted({*names} - {case.name for case in cases}):
        print(f"--only {' '.join(unknown)}: no such case", file=sys.stderr)
        raise SystemExit(2)
    return [case for case in cases if case.name in names]


def preparations(cases: Sequence[Case]) -> list[Case]:
    """Return what writes the weights that `cases` load, in the order in which they do."""
    import gpu_bench

    shapes = dict.fromkeys(shape for case in cases for shape in case.needs)
    # The small ones first: cases that need no others can begin.
    return [gpu_bench.weights_of(s) for s in sorted(shapes, key=gpu_bench.weight_seconds)]


def inner(args: argparse.Namespace, out: Path, results: Path) -> int:
    """Run what a case starts as a program of its own."""
    import gpu_cases
    import gpu_common

    stamp = json.loads(args.stamp)
    place = gpu_common.Place(
        args.case, args.device, args.tiny, out, args.work, results=results, stamp=stamp
    )
    gpu_cases.INNER[args.inner](place)
    return 0


def write_pages(call: Call, *more: Path | None) -> int:
    """Write and print the tables; return the exit code."""
    results = read_results(call.results)
    text = report(results, all_cases(), call.stamp["commit"])
    for file in (call.out / "gpu.md", *more):
        if file is not None:
            file.write_text(text, "utf-8")
    print(text)
    print(f"{time.monotonic() - STARTED:.0f} s from the start to this page")
    mine = [line for line in results if line.get("date") == call.stamp["date"]]
    failed = {line["case"] for line in mine if line.get("status") in ("failed", "timeout")}
    failed |= {line["case"] for line in mine if line.get("ok") is False}
    return 1 if failed else 0


# ---- Running cases -------------------------------------------------------------------------------


@dataclass
class Running:
    """A case that runs."""

    case: Case
    process: Any
    begun: float
    needed: float  # seconds, as expected
    until: float  # when it is ended
    log: Path


def run_cases(cases: Sequence[Case], call: Call) -> None:
    """Run `cases` in their order, each in its own process; record how each ended."""
    pending, running = list(cases), list[Running]()
    known = read_results(call.results)
    card = call.stamp.get("card", "")
    needed = {case.name: expected_seconds(case, known, card) for case in cases}
    ready = {part for case in cases for part in case.needs} - {
        case.name.removeprefix("weights_") for case in cases
    }
    while pending or running:
        left = call.ends - time.monotonic()
        for case in [c for c in pending if left < (0 if call.tiny else needed[c.name])]:
            pending.remove(case)
            leave_out(case, f"{left:.0f} s left, {needed[case.name]:.0f} s needed")
        case = next_case(pending, running, ready, needed, apart=not call.tiny)
        if case is not None:
            pending.remove(case)
            running.append(start(case, needed[case.name], call))
            continue
        if not running:
            for case in pending:
                leave_out(case, "its weights could not be written")
            break
        first = min(one.until for one in running) - time.monotonic()
        ended = wait([one.process.sentinel for one in running], max(first, 0))
        for one in list(running):
            if (done := one.process.sentinel in ended) or time.monotonic() >= one.until:
                running.remove(one)
                if finish(one, call, done) == "ended":
                    ready.add(one.case.name.removeprefix("weights_"))


def leave_out(case: Case, why: str) -> None:
    """Say that a case is not run; it stays owed."""
    print(json.dumps({"case": case.name, "status": "left out", "why": why}), flush=True)


def next_case(
    pending: Sequence[Case],
    running: Sequence[Running],
    ready: set[str],
    needed: dict[str, float],
    *,
    apart: bool,
) -> Case | None:
    """Return the first of `pending` that may start beside what runs: nothing beside a timed one,
    one on the device and one on the host elsewhere. Not `apart`, in a dry run: any two.
    """
    able = [case for case in pending if ready.issuperset(case.needs)]
    if not able or not running:
        return able[0] if able else None
    if len(running) > 1:
        return None
    if not apart:
        return able[0]
    if running[0].case.timed:
        return None
    (other,) = running
    beside = [case for case in able if not case.timed and case.host != other.case.host]
    if able[0].timed:  # it waits for what runs, and not for longer
        rest = other.begun + other.needed - time.monotonic()
        beside = [case for case in beside if needed[case.name] <= rest]
    return beside[0] if beside else None


def start(case: Case, needed: float, call: Call) -> Running:
    from gpu_common import Place

    place = Place(
        case.name,
        call.device,
        call.tiny,
        call.out,
        call.work,
        results=call.results,
        stamp=call.stamp,
    )
    log = place.logs / f"{case.name}.log"
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=run_case, args=(place, case.fn, log))
    process.start()
    begun = time.monotonic()
    # `seconds` are a GPU machine's; two cases share a small one in a dry run.
    patience = (6 if call.tiny else 1) * (2 * needed + 30)
    return Running(case, process, begun, needed, min(begun + patience, call.ends), log)


def finish(one: Running, call: Call, done: bool) -> str:
    """Record how a case ended, by force where it is not `done`; return its status."""
    process, name = one.process, one.case.name
    line: Line = {"case": name}
    process.join(10 if done else 0)
    if process.exitcode is None:
        line["status"] = "timeout"
    else:
        line["status"] = "ended" if process.exitcode == 0 else "failed"
    if process.exitcode == _NOT_HERE:
        line["status"] = "not here"
    elif process.exitcode != 0:
        line["log"] = last_lines(one.log)
    if process.exitcode != 0:
        end_group(process)
    if line["status"] == "not here":
        line["why"] = last_lines(one.log, 1)
    line["seconds"] = round(time.monotonic() - one.begun, 1)
    append(call.results, line | call.stamp)
    print(json.dumps(line), flush=True)
    return line["status"]


_NOT_HERE = 3  # exit code of a case that this machine cannot run


def run_case(place: Any, fn: Any, log: Path) -> None:
    """Run one case in this process, which is its own; what it prints goes to `log`."""
    os.setsid()  # so that a case that hangs is ended with the programs that it started
    import gpu_common
    import torch

    gpu_common.redirect(log)
    if place.tiny:
        torch.set_num_threads(1)
    try:
        fn(place)
    except gpu_common.NotHere as error:
        print(error, file=sys.__stdout__, flush=True)
        os._exit(_NOT_HERE)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)  # threads of a process group that failed may never end
    sys.stdout.flush()


def end_group(process: Any) -> None:
    """Kill a case and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended before it had a group of its own, or with all of it
        process.kill()
    process.join()


def last_lines(log: Path, count: int = 12) -> str:
    text = log.read_text("utf-8", "replace") if log.exists() else ""
    return "\n".join(text.rstrip().splitlines()[-count:])[-1500:]


if __name__ == "__main__":
    sys.exit(main())
