"""The bundle of `gpu.py`: the committed tree, and the wheels and the text of a GPU machine."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Beside CUDA's PyTorch 2.11 an image may have no, or an older, one of these. What they import
# themselves and such an image may have too old follows them.
_CARRIED = ("transformers", "peft", "huggingface_hub", "safetensors", "tokenizers")
_CARRIED += ("hf-xet", "httpx2", "httpcore2", "truststore", "idna", "click")
_CARRIED += ("datasets", "dill", "multiprocess")
_CARRIED += ("jsonargparse", "docstring_parser", "typeshed_client")
_OPTIONAL = ("liger-kernel", "bitsandbytes", "torchao")
_MOST = 64 * 2**20  # that can be carried to such a machine
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17")
_LIBRARIES = tuple(f"libbitsandbytes_{n}.so" for n in ("cpu", "cuda128", "cuda130", "cuda132"))
REVISION = "REVISION.json"  # of a tree that is no repository


def revision() -> dict[str, str]:
    """Return the commit of this tree and its day; a `+` marks changes that are not committed."""
    written = ROOT / REVISION
    if written.exists():
        return json.loads(written.read_text())

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    results = [":!docs/evidence/benchmarks/gpu.md", ":!docs/evidence/benchmarks/gpu_results.jsonl"]
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *results)
    commit = git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")
    return {"commit": commit, "committed": git("show", "-s", "--format=%cI", "HEAD")}


def bundle(folder: Path) -> int:
    """Pack the committed tree, wheels and a text; print their size and the commands."""
    wheels, project = folder / "wheels", folder / "project"
    for part in (wheels, project):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "archive", "--format=tar", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-x", "-C", str(project)], input=archive.stdout, check=True)
    about = revision()
    if about["commit"].endswith("+"):
        print(f"note: changes that are not committed are left out; packed is {about['commit']}")
    (project / REVISION).write_text(json.dumps(about | {"commit": about["commit"].rstrip("+")}))
    for name in (*_CARRIED, *_OPTIONAL):
        download(name, wheels)
    for wheel in wheels.glob("bitsandbytes-*.whl"):
        trim(wheel)
    carry_text(folder / "data")
    parts: dict[str, Any] = {"tree": size(project), "text": size(folder / "data")}
    parts |= {w.name.split("-")[0]: size(w) for w in wheels.iterdir()}
    for name, count in sorted(parts.items(), key=lambda part: -part[1]):
        print(f"{count / 2**20:6.1f} MiB  {name}")
    total = sum(parts.values())
    if total > _MOST:
        most = f"at most {_MOST / 2**20:.0f} can be carried"
        print(f"error: {folder} has {total / 2**20:.1f} MiB, {most}", file=sys.stderr)
        return 1
    print(f"{total / 2**20:6.1f} MiB  in all. Beside the GPU, in {folder}:\n\n{_COMMANDS}")
    return 0


_COMMANDS = """\
python3 -m pip install -q --no-index --no-deps --no-compile --target site wheels/*.whl
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/site:$PWD/project RESULTS_CACHE=$PWD/data
mkdir -p out && cp -n project/docs/evidence/benchmarks/gpu_results.jsonl out/
python3 project/benchmarks/gpu.py --out out --results out/gpu_results.jsonl [--deadline SECONDS]

What comes back, out/gpu_results.jsonl and out/gpu.md, belongs into docs/evidence/benchmarks/."""


def carry_text(folder: Path) -> None:
    """Copy the text of the case shakespeare to `folder`, or say that the case stays owed."""
    from results_common import ResultsError
    from results_inputs import DOWNLOADS, find_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (text,) = DOWNLOADS["text"]
    try:
        shutil.copy(find_file(text, None), folder / text.name)
    except ResultsError as error:
        print(f"note: without its text the case shakespeare cannot run there: {error}")


def size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(f.stat().st_size for f in files if f.is_file())


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
