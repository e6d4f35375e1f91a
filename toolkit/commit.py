"""What a committed checkpoint is: a folder protocol that a kill or a full disk cannot fool.

    step-N.tmp-*   being written; never read
    step-N         has all its files, a manifest of their sizes and hashes, and COMMIT, written last
    step-N.old-*   committed before under the same step; counts until the new step-N is committed
    step-N.bad-*   failed verification at resume; kept for a look, never read
    step-N.trash-* being deleted

COMMIT holds the sha256 of manifest.json and alone decides. Owns these names, the order of fsyncs,
and retention. Knows neither tensors nor ranks: one process calls it.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
COMMIT = "COMMIT"
_STEP = re.compile(r"step-(\d{8,})")
_OLD = re.compile(r"step-(\d{8,})\.old-.*")
_LEFTOVER = re.compile(r"step-\d{8,}\.(tmp|trash)-.*")


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def committed_steps(run_dir: str | Path) -> dict[int, Path]:
    """Return step -> folder of every committed checkpoint of a run, oldest first."""
    root = Path(run_dir) / CHECKPOINTS
    found = {}
    for path in root.iterdir() if root.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and is_committed(path):
            found[int(match[1])] = path
    for path in root.iterdir() if root.is_dir() else ():
        match = _OLD.fullmatch(path.name)
        if match and int(match[1]) not in found and is_committed(path):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def is_committed(checkpoint: Path) -> bool:
    """Whether COMMIT is there and is the hash of the manifest that is there."""
    try:
        said = (checkpoint / COMMIT).read_text("ascii").strip()
        return said == hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint that `path` means: itself, or the newest committed one of a run.

    Raises:
        CheckpointError: neither; says which paths would do.
    """
    path = Path(path)
    if is_committed(path):
        return path
    steps = committed_steps(path)
    if steps:
        return steps[max(steps)]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist (current folder: {Path.cwd()})")
    if path.name == CHECKPOINTS and committed_steps(path.parent):
        raise CheckpointError(
            f"{path} holds checkpoints; give one of them, or the run: {path.parent}"
        )
    for above in list(path.parents)[:2]:
        if is_committed(above):
            raise CheckpointError(f"{path} is a part of a checkpoint; give the checkpoint: {above}")
    if (path / MANIFEST).exists() or _STEP.match(path.name):
        raise CheckpointError(
            f"{path} is not committed ({COMMIT} missing or not that of its manifest)"
        )
    raise CheckpointError(
        f"{path} holds no committed checkpoint ({path / CHECKPOINTS}/step-*/{COMMIT})"
    )


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a committed checkpoint.

    Raises:
        CheckpointError: it is not the committed one, or no manifest at all.
    """
    if not is_committed(checkpoint):
        raise CheckpointError(f"{checkpoint} is not committed")
    try:
        return json.loads((checkpoint / MANIFEST).read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint / MANIFEST} is not JSON: {error}") from error


def damaged_files(checkpoint: Path, only: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """Return (file, what is wrong) for every file that is not what the manifest says.

    Reads and hashes the files named in `only` (all by default) and looks for files that the
    manifest does not know.
    """
    files = read_manifest(checkpoint)["files"]
    names = list(files) if only is None else list(only)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        verdicts = list(pool.map(lambda n: _damage(checkpoint / n, files[n]), names))
    found = [(name, what) for name, what in zip(names, verdicts, strict=True) if what is not None]
    if only is None:
        known = {*files, MANIFEST, COMMIT}
        found += [(n, "is not in the manifest") for n in sorted(files_below(checkpoint) - known)]
    return found


def begin(run_dir: str | Path, step: int) -> Path:
    """Create and return the empty temporary folder in which the checkpoint of `step` is written."""
    root = Path(run_dir) / CHECKPOINTS
    root.mkdir(parents=True, exist_ok=True)
    sync(root.parent)
    folder = root / f"{step_name(step)}.tmp-{os.urandom(4).hex()}"
    folder.mkdir()
    return folder


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Fsync the files `names` below `folder`; return name -> {"size", "sha256"} for the
    manifest.
    """
    names = list(names)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda n: _sync_and_hash(folder / n), names), strict=True))


def commit(folder: Path, step: int, manifest: dict[str, Any]) -> Path:
    """Turn the temporary `folder` into the committed checkpoint of `step`; return its path.

    After the return a power loss cannot undo it; before the last step of this function nothing
    counts as committed.
    """
    target = folder.parent / step_name(step)
    _write_synced(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
    for below, _, _ in os.walk(folder):
        sync(Path(below))
    if target.exists():  # a committed or broken checkpoint of the same step: step aside first
        kind = "old" if is_committed(target) else "bad"
        os.rename(target, f"{target}.{kind}-{os.urandom(4).hex()}")
    os.rename(folder, target)
    sync(target.parent)
    digest = hashlib.sha256((target / MANIFEST).read_bytes()).hexdigest()
    _write_synced(target / COMMIT, digest + "\n")
    sync(target)
    sync(target.parent)
    return target


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that failed verification to `step-N.bad-*`; nothing is deleted."""
    bad = checkpoint.with_name(f"{checkpoint.name}.bad-{os.urandom(4).hex()}")
    os.rename(checkpoint, bad)
    sync(bad.parent)
    return bad


def prune(run_dir: str | Path, keep: int | None) -> list[Path]:
    """Delete all but the newest `keep` committed checkpoints, and leftovers; return what went.

    Leftovers are unfinished (`tmp`) and half-deleted (`trash`) folders. Call it only after the
    newest checkpoint is committed. `None` keeps all.
    """
    root = Path(run_dir) / CHECKPOINTS
    steps = committed_steps(run_dir)
    kept = set(steps.values())
    gone = [
        p
        for p in root.iterdir()
        if _LEFTOVER.fullmatch(p.name) or (_OLD.fullmatch(p.name) and p not in kept)
    ]
    if keep is not None:
        for step in sorted(steps)[:-keep]:
            trash = root / f"{step_name(step)}.trash-{os.urandom(4).hex()}"
            os.rename(steps[step], trash)
            gone.append(trash)
        sync(root)
    for path in gone:
        shutil.rmtree(path)
    return gone


def files_below(folder: Path) -> set[str]:
    """Return the names, relative to `folder`, of all files below it."""
    return {
        str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir() or p.is_symlink()
    }


def _damage(file: Path, expected: dict[str, Any]) -> str | None:
    if file.is_symlink() or not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size != expected["size"]:
        return f"is {size} bytes long, expected {expected['size']}"
    with open(file, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    return None if digest == expected["sha256"] else "has other bytes than were saved"


def _sync_and_hash(file: Path) -> dict[str, Any]:
    with open(file, "rb") as f:
        os.fsync(f.fileno())
        return {
            "size": os.fstat(f.fileno()).st_size,
            "sha256": hashlib.file_digest(f, "sha256").hexdigest(),
        }


def _write_synced(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def sync(path: Path) -> None:
    """Fsync a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
