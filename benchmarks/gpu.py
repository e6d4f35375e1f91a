"""Proof on one GPU: what must work; how fast it is beside a bare loop and transformers' Trainer.

    python benchmarks/gpu.py --out OUT [--part 1|2|3] [--deadline 480] [--write FILE]
    python benchmarks/gpu.py --bundle DIR                    # for a GPU machine without a network
    python benchmarks/gpu.py --tiny --device cpu --out OUT   # every line but the CUDA calls

Part 1 checks numbers, part 2 measures, part 3 makes whole runs by the command line; each is made
for a call of at most 8 minutes. Every case is a process of its own with a deadline of its own, and
is left out where the time that is left is less than it needs. Results are appended to
OUT/results.jsonl at once; the tables (OUT/gpu.md) come last.
Exit code 1 where a case failed; a bar that is not met is a result.
"""

import argparse
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
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from gpu_report import DRY, failures, forget, read_results, report  # noqa: E402

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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=(1, 2, 3), help="one part only")
    parser.add_argument("--deadline", type=float, default=480.0, help="seconds of a part")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="results and logs")
    parser.add_argument("--work", type=Path, help="models and runs; deleted at the end")
    parser.add_argument("--write", type=Path, help="write the tables to this file too")
    parser.add_argument("--only", nargs="+", default=[], help="cases, by name")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the dry run: tiny models, forks")
    parser.add_argument("--bundle", type=Path, help="pack the project and wheels into a folder")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
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

    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"error: {_NO_GPU}", file=sys.stderr)
        return 1
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.inner:
        return inner(args, out)
    work = args.work or Path(tempfile.mkdtemp(prefix="toolkit-gpu-", dir=_roomy()))
    os.environ["HF_DATASETS_CACHE"] = str(work / "datasets")
    try:
        for part in (args.part,) if args.part else (1, 2, 3):
            cases = [
                c
                for c in cases_of(part)
                if not args.only or c[0] in (f"machine_{part}", *args.only)
            ]
            run_part(cases, out, work, args.device, args.tiny, args.deadline)
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    results = read_results(out)
    text = report(results)
    for file in (out / "gpu.md", args.write):
        if file is not None:
            file.write_text(text)
    print(text)
    return 1 if failures(results) else 0


def _roomy() -> str | None:
    """Return the memory file system where it holds the weights of all cases, else None."""
    shm = Path("/dev/shm")
    return str(shm) if shm.is_dir() and shutil.disk_usage(shm).free > 60e9 else None


def cases_of(part: int) -> list[tuple[str, Callable[[Any], None], float]]:
    """Return the name, function and seconds of the cases of a part."""
    if part == 2:
        import gpu_bench

        return [("machine_2", machine, 10), *gpu_bench.CASES]
    import gpu_cases
    import gpu_runs

    cases = gpu_cases.CASES if part == 1 else gpu_runs.CASES
    return [(f"machine_{part}", machine, 10), *((f.__name__, f, seconds) for f, seconds in cases)]


def inner(args: argparse.Namespace, out: Path) -> int:
    """Run what a case starts as a program of its own."""
    import gpu_cases
    import gpu_common

    place = gpu_common.Place(args.inner, args.device, args.tiny, out, args.work)
    gpu_cases.INNER[args.inner](place)
    return 0


# ---- Running cases -------------------------------------------------------------------------------


def run_part(
    cases: Iterable[tuple[str, Callable[[Any], None], float]],
    out: Path,
    work: Path,
    device: str,
    tiny: bool,
    deadline: float,
) -> None:
    """Run `cases` one after the other, each in its own process; record how each ended."""
    from gpu_common import Place, append

    cases = list(cases)
    forget(out, {name for name, _, _ in cases})
    # Imports take up to 20 s: this process imports all, and its forks alone use CUDA. PEFT imports
    # bitsandbytes, which uses it at once.
    if importlib.util.find_spec("bitsandbytes") is None:
        import peft  # noqa: F401
    context = multiprocessing.get_context("fork")
    ends = time.monotonic() + deadline
    for name, fn, seconds in cases:
        left = ends - time.monotonic()
        begun = time.monotonic()
        if left < (0 if tiny else seconds):
            line = {"status": "skipped", "why": f"{left:.0f} s left, {seconds:.0f} s needed"}
        else:
            place = Place(name, device, tiny, out, work)
            log = place.logs / f"{name}.log"
            log.parent.mkdir(exist_ok=True)
            log.unlink(missing_ok=True)
            process = context.Process(target=run_case, args=(place, fn, log))  # type: ignore[attr-defined]
            process.start()
            patience = (3 if tiny else 1) * (2 * seconds + 30)  # `seconds` are a GPU machine's
            process.join(min(left, patience))
            if process.exitcode is None:
                line = {"status": "timeout"}
            else:
                line = {"status": "ended" if process.exitcode == 0 else "failed"}
            if process.exitcode != 0:
                end_group(process)
                line["log"] = last_lines(log)
        line |= {"case": name, "seconds": round(time.monotonic() - begun, 1)}
        append(out, line)
        print(json.dumps(line), flush=True)


def run_case(place: Any, fn: Callable[[Any], None], log: Path) -> None:
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
        gpu_common.append(place.out, {"case": place.name, "status": "skipped", "why": str(error)})
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


def machine(place: Any) -> None:
    """Record the card and the versions."""
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
    if place.cuda:
        card = torch.cuda.get_device_properties(0)
        about = {"card": card.name, "memory_gb": round(card.total_memory / 1e9, 1)}
        about["cuda"] = torch.version.cuda
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        if shutil.which("nvidia-smi"):
            asked = subprocess.run(query, capture_output=True, text=True, check=False)
            about["driver"] = asked.stdout.strip()
        from toolkit.training.metrics import peak_flops

        about["peak_tflops"] = (peak_flops(card.name) or 0) / 1e12
    python = platform.python_version()
    place.record("machine", **about, cores=os.cpu_count(), python=python, versions=versions)


# ---- The bundle ----------------------------------------------------------------------------------

# What the toolkit imports and an image with CUDA, PyTorch and transformers may lack: by package.
_CARRIED = (
    "datasets",
    "dill",
    "multiprocess",
    "jsonargparse",
    "docstring_parser",
    "typeshed_client",
)
_OPTIONAL = ("liger-kernel", "bitsandbytes")
_IMPORTED = ("torch", "transformers", "accelerate", "peft", "pyarrow", "psutil", "xxhash")
_IMPORTED += (*_CARRIED, "safetensors", "yaml", "tqdm", "numpy")
_MOST = 30 * 2**20
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17")
_LIBRARIES = tuple(f"libbitsandbytes_{n}.so" for n in ("cpu", "cuda128", "cuda130", "cuda132"))


def bundle(folder: Path) -> int:
    """Pack the committed tree and the wheels; print the command to run beside a GPU."""
    wheels, project = folder / "wheels", folder / "project"
    for part in (wheels, project):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "archive", "--format=tar", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-x", "-C", str(project)], input=archive.stdout, check=True)
    for name in (*_CARRIED, *_OPTIONAL):
        download(name, wheels)
    for wheel in wheels.glob("bitsandbytes-*.whl"):
        trim(wheel)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    if size > _MOST:
        print(f"error: {folder} has {size / 2**20:.1f} MiB, at most 30 are meant", file=sys.stderr)
        return 1
    print(f"{folder}: {size / 2**20:.1f} MiB. Beside the GPU, in this folder:\n")
    print(
        "python3 -m pip install -q --no-index --no-deps --target site wheels/*.whl\n"
        "export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/site:$PWD/project\n"
        "python3 project/benchmarks/gpu.py --out out --part 1 --deadline 460\n"
        "python3 project/benchmarks/gpu.py --out out --part 2 --deadline 460\n"
        "python3 project/benchmarks/gpu.py --out out --part 3 --deadline 460"
    )
    return 0


def download(name: str, wheels: Path) -> None:
    """Fetch the wheel of `name` for CPython 3.12 on x86-64 Linux, in the version installed here."""
    try:
        wanted = f"{name}=={importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        wanted = name  # the newest; a peer that is only measured against
    platforms = [part for p in _PLATFORMS for part in ("--platform", f"{p}_x86_64")]
    only = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", *only, *platforms, "--dest", str(wheels), wanted]
    subprocess.run(command, check=True)


def trim(wheel: Path) -> None:
    """Leave out of the wheel of bitsandbytes the libraries of other CUDA versions: most of it."""
    whole = wheel.with_suffix(".whole")
    wheel.rename(whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as to:
        dropped = {n for n in source.namelist() if ".so" in n and not n.endswith(_LIBRARIES)}
        for name in source.namelist():
            content = source.read(name)
            if name.endswith(".dist-info/RECORD"):
                rows = content.decode().splitlines(keepends=True)
                content = "".join(r for r in rows if r.split(",")[0] not in dropped).encode()
            if name not in dropped:
                to.writestr(name, content)
    whole.unlink()


if __name__ == "__main__":
    sys.exit(main())
