"""What a committed checkpoint is: a folder protocol that a kill or a full disk cannot fool.

    step-N.tmp-*   being written; never read
    step-N         has all its files, a manifest of their sizes and hashes, and COMMIT, written last
    step-N.old-*   committed before under the same step; counts until the new step-N is committed
    step-N.bad-*   failed verification; kept for a look, never read and never deleted
    step-N.trash-* being deleted

COMMIT holds the sha256 of manifest.json and alone decides. Owns these names, the order of fsyncs,
and retention. Knows neither tensors nor ranks: one process calls it, one save at a time. Object
stores, which rename nothing, are `toolkit.store_commit`'s.

[Note: order of operations] Between two steps below stands an fsync, because a disk that loses power
may keep any later change of a folder and lose an earlier one.

    save    files, folders, manifest and COMMIT.prepared of the tmp folder
            a committed step-N of the same step -> step-N.old-*
            tmp -> step-N
            COMMIT.prepared -> COMMIT           from here on it is committed
    delete  step-N -> step-N.trash-*
            COMMIT removed                      from here on nothing takes it for a checkpoint
            the other files

All bytes are on the disk before the first rename, so a full disk shows while nothing has moved. A
folder with COMMIT.prepared and without COMMIT was never committed and is a leftover; one with
neither has lost its COMMIT: that is damage, and it is kept.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from toolkit.config.retention import Retention
from toolkit.errors import CheckpointError

CHECKPOINTS = "checkpoints"
EXPORTS = "exports"  # of a run that writes them itself
MANIFEST = "manifest.json"
COMMIT = "COMMIT"
STATE = "state.json"
_PREPARED = "COMMIT.prepared"
_STEP = re.compile(r"step-([0-9]{8,})")
_ASIDE = re.compile(r"step-([0-9]{8,})\.(tmp|old|bad|trash)-[0-9a-f]{8}")
# What `prune` reads again at most, over all checkpoints: a fraction of a second.
_AFFORDABLE = 128 * 2**20
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP}


# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def committed_steps(run_dir: str | Path) -> dict[int, Path]:
    """Return step -> folder of every committed checkpoint of a run, oldest first.

    Reads COMMIT and the manifest of each, no other file.
    """
    found: dict[int, Path] = {}
    olds: dict[int, list[Path]] = {}
    for path, step, kind in _folders(run_dir):
        if kind in ("", "old") and is_committed(path):
            if kind == "":
                found[step] = path
            else:
                olds.setdefault(step, []).append(path)
    for step, paths in olds.items():
        # `commit` leaves one at most; of more, the last that was committed.
        found.setdefault(step, max(paths, key=lambda p: ((p / COMMIT).stat().st_mtime_ns, p)))
    return dict(sorted(found.items()))


def broken_steps(run_dir: str | Path) -> dict[int, tuple[Path, str]]:
    """Return step -> (folder, what is wrong) of every `step-N` that was committed and is not now.

    Its COMMIT or its manifest was changed, or is gone. A save that was killed leaves no such
    folder.
    """
    found = {}
    for path, step, kind in _folders(run_dir):
        if kind or is_committed(path) or _unfinished(path):
            continue
        if not path.is_dir():
            what = "is not a folder"
        else:
            lacking = [n for n in (COMMIT, MANIFEST) if not (path / n).is_file()]
            what = f"{' and '.join(lacking)} missing" if lacking else _mismatch(path)
        found[step] = (path, what)
    return dict(sorted(found.items()))


def is_committed(checkpoint: Path) -> bool:
    """Whether COMMIT is there and is, to the byte, the hash of the manifest that is there."""
    return _committed_manifest(checkpoint) is not None


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
    if re.match(r"[a-z][a-z0-9+.-]+:/[^/]", str(path)) and not path.exists():
        raise CheckpointError(
            f"{path} looks like a URL: the command line copies a checkpoint from its store first "
            "(in Python: toolkit.fetch.at_hand); here a folder is expected"
        )
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
        CheckpointError: it is not the committed one, no manifest at all, or names a file outside
            the checkpoint.
    """
    content = _committed_manifest(checkpoint)
    if content is None:
        raise CheckpointError(f"{checkpoint} is not committed")
    return parse_manifest(content, checkpoint / MANIFEST)


def parse_manifest(content: bytes, source: object) -> dict[str, Any]:
    """Return the manifest that `content` is; raises as `read_manifest`, which names `source`."""
    try:
        manifest = json.loads(content)
        entries = [(n, e["size"], e["sha256"]) for n, e in manifest["files"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source} is not a manifest of this toolkit: {error!r}") from error
    for name, size, _ in entries:
        if not is_inside(name) or not isinstance(size, int):
            raise CheckpointError(f"{source} names {name!r}, which is no file of the checkpoint")
    return manifest


def damaged_files(checkpoint: Path, only: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """Return (file, what is wrong) for every file that is not what the manifest says.

    Reads and hashes the files named in `only` (all by default) and looks for files that the
    manifest does not know.
    """
    files = read_manifest(checkpoint)["files"]
    names = list(files) if only is None else list(only)
    strangers = sorted(n for n in names if n not in files)
    names = [n for n in names if n in files]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        verdicts = list(pool.map(lambda n: _damage(checkpoint / n, files[n]), names))
    found = [(name, what) for name, what in zip(names, verdicts, strict=True) if what is not None]
    if only is None:
        strangers = sorted(files_below(checkpoint) - {*files, MANIFEST, COMMIT})
    return found + [(n, "is not in the manifest") for n in strangers]


def files_below(folder: Path) -> set[str]:
    """Return the names, relative to `folder`, of all files below it; a link is a file."""
    return {
        str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir() or p.is_symlink()
    }


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


def set_aside_steps(run_dir: str | Path) -> list[str]:
    """Return the names of the checkpoints that failed verification and were set aside."""
    return [path.name for path, _, kind in _folders(run_dir) if kind == "bad"]


def begin(run_dir: str | Path, step: int) -> Path:
    """Create and return the empty temporary folder in which the checkpoint of `step` is written.

    What killed saves and deletions of this run left is removed first, since it may be what fills
    the disk: call it only when no other save of the run is going on.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    root = Path(run_dir) / CHECKPOINTS
    with _disk_errors(f"{root} cannot be written"):
        if os.path.lexists(root) and not root.is_dir():
            raise CheckpointError(
                f"{root} is a file or a broken link, a folder is expected; move it elsewhere, or "
                "give another output_dir"
            )
        root.mkdir(parents=True, exist_ok=True)
        sync_above(root)
        _delete(root, _leftovers(root))
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
    counts as committed. Every file is fsynced here once more, which costs nothing where it was
    before. See [Note: order of operations].

    Raises:
        CheckpointError: the folder is not what `manifest` says, or the disk refuses; what was
            committed before is as it was, and `folder` is there to be removed.
    """
    target = folder.parent / step_name(step)
    with _disk_errors(f"checkpoint of step {step} could not be committed"):
        _check_whole(folder, manifest)
        text = render_manifest(manifest)
        (folder / COMMIT).unlink(missing_ok=True)  # in a copy of a committed folder
        _write_synced(folder / MANIFEST, text)
        _write_synced(folder / _PREPARED, seal(text.encode()))
        for below, _, files in os.walk(folder):
            for name in files:
                sync(Path(below, name))
            sync(Path(below))
        aside = _step_aside(target, step)
        try:
            os.rename(folder, target)
            sync(target.parent)
            os.rename(target / _PREPARED, target / COMMIT)
        except OSError:
            _take_back(folder, target, aside)
            raise
        sync(target)
    return target


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that failed verification to `step-N.bad-*`; nothing is deleted.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    # Of step-N.old-*, too: a name that went on from there would still count.
    bad = _beside(checkpoint.with_name(checkpoint.name.partition(".")[0]), "bad")
    with _disk_errors(f"{checkpoint} cannot be set aside"):
        os.rename(checkpoint, bad)
        sync(bad.parent)
    return bad


def sync(path: Path) -> None:
    """Fsync a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems order their renames themselves and refuse this for folders.
        if error.errno not in _NO_FOLDER_SYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def sync_above(folder: Path) -> None:
    """Fsync `folder` and what it lies in, up to the root of its file system.

    A folder that is not an entry of a synced folder is lost with everything in it. Costs little:
    folders that did not change have nothing to write.
    """
    device = os.stat(folder).st_dev
    for path in (folder.resolve(), *folder.resolve().parents):
        if os.stat(path).st_dev != device or not os.access(path, os.R_OK):
            return  # not ours to have made
        sync(path)


def disk_error(what: str, error: BaseException) -> CheckpointError:
    """Return the error that says `what` failed and names the disk's own cause.

    torch reports a full disk as "unexpected pos 704 vs 598" and keeps the cause only as the context
    of that exception.
    """
    cause = _first_os_error(error)
    if cause is None:
        return CheckpointError(f"{what}: {error}")
    where = f" ({cause.filename})" if cause.filename else ""
    advice = ""
    if cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = (
            "; free some space, lower checkpoint.save_total_limit or give another output_dir, and "
            "start again. The checkpoints before it are as they were"
        )
    return CheckpointError(f"{what}: {cause.strerror or cause}{where}{advice}")


# --------------------------------------------------------------------------------------------------
# Retention
# --------------------------------------------------------------------------------------------------


def expendable(verified: Mapping[int, Mapping[str, float]], policy: Retention) -> set[int]:
    """Return the steps that may be deleted.

    Args:
        verified: step -> metrics of every committed checkpoint that verifies. Others are no
            candidates, and do not count as kept either.
    """
    if policy.last is None:
        return set()
    kept = set(sorted(verified)[-max(2, policy.last) :])
    if policy.every is not None:
        kept |= {step for step in verified if step % policy.every == 0}
    sign = -1 if policy.greater_is_better else 1
    measured = {
        step: values[policy.metric]
        for step, values in verified.items()
        if math.isfinite(values.get(policy.metric, math.nan))
    }
    ranked = sorted(measured, key=lambda step: (sign * measured[step], -step))
    return set(verified) - kept - set(ranked[: policy.best])


def prune(run_dir: str | Path, keep: int | Retention | None) -> list[Path]:
    """Delete the checkpoints that the policy does not keep, and leftovers; return what went.

    A number stands for `Retention(last=number)`, None keeps all. A checkpoint counts as kept only
    when it verifies: its files have the sizes of the manifest, and the hashes too as far as 128 MB
    go, newest checkpoint and smallest files first (shards of hundreds of GB are not read again
    after every save; `resume` hashes everything and falls back). One that does not verify is not
    deleted. Neither are links: somebody else put them there. Leftovers are unfinished (`tmp`),
    half-deleted (`trash`) and superseded (`old`) folders. Call it only after the newest checkpoint
    is committed.

    Raises:
        CheckpointError: something cannot be deleted.
    """
    policy = keep if isinstance(keep, Retention) else Retention(last=keep)
    root = Path(run_dir) / CHECKPOINTS
    with _disk_errors(f"old checkpoints in {root} could not be deleted"):
        steps, budget = committed_steps(run_dir), _AFFORDABLE
        verified: dict[int, dict[str, float]] = {}
        for step in sorted(steps, reverse=True):
            if not steps[step].is_symlink():
                sound, read = _verifies(steps[step], budget)
                budget -= read
                if sound:
                    verified[step] = _metrics(steps[step])
        gone = _leftovers(root)
        for path, step, kind in _folders(run_dir):
            if kind == "old" and step in verified and path != steps[step]:
                gone.append(path)
        gone += [steps[step] for step in sorted(expendable(verified, policy))]
        _delete(root, gone)
    return gone


# --------------------------------------------------------------------------------------------------
# The folder's names
# --------------------------------------------------------------------------------------------------


def _folders(run_dir: str | Path) -> Iterator[tuple[Path, int, str]]:
    """Yield (path, step, kind) of all that bears a name of the protocol; kind "" is `step-N`."""
    root = Path(run_dir) / CHECKPOINTS
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _STEP.fullmatch(path.name) or _ASIDE.fullmatch(path.name)
        if match is None or step_name(int(match[1])) != path.name.partition(".")[0]:
            continue  # step-000000007 would be a second step 7
        yield path, int(match[1]), match[2] if match.re is _ASIDE else ""


def _leftovers(root: Path) -> list[Path]:
    """Return what a kill left and nobody will use: unfinished and half-deleted folders."""
    return [
        path
        for path, _, kind in _folders(root.parent)
        if kind in ("tmp", "trash") or (kind == "" and _unfinished(path))
    ]


def _unfinished(path: Path) -> bool:
    """Whether a save was killed between the rename to `step-N` and COMMIT."""
    return os.path.lexists(path / _PREPARED) and not os.path.lexists(path / COMMIT)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f"{target.name}.{kind}-{os.urandom(4).hex()}")


def _step_aside(target: Path, step: int) -> Path | None:
    """Free the name `target`; return where a committed checkpoint of this name went, if one did."""
    if not os.path.lexists(target):
        return None
    aside = None
    if _unfinished(target):
        os.rename(target, _beside(target, "trash"))
    elif is_committed(target) and _verifies(target, 0)[0]:
        for path, other, kind in _folders(target.parent.parent):
            if other == step and kind == "old":  # superseded: from now on there is another `old`
                os.rename(path, _beside(target, "trash"))
                sync(target.parent)
        aside = _beside(target, "old")
        os.rename(target, aside)
    else:
        os.rename(target, _beside(target, "bad"))
    sync(target.parent)
    return aside


def _take_back(folder: Path, target: Path, aside: Path | None) -> None:
    """Undo the renames of a `commit` that failed, as far as the disk lets.

    Where it does not, nothing is lost: `target` has no COMMIT, and `aside` counts.
    """
    with contextlib.suppress(OSError):
        if not os.path.lexists(folder):
            os.rename(target, folder)
            sync(target.parent)
        if aside is not None:
            os.rename(aside, target)
            sync(target.parent)


def _delete(root: Path, paths: Iterable[Path]) -> None:
    """Delete folders so that at no moment a half-deleted one is taken for a checkpoint."""
    doomed = []
    for path in paths:
        match = _ASIDE.fullmatch(path.name)
        if match is None or match[2] == "old":
            trash = _beside(path.with_name(path.name.partition(".")[0]), "trash")
            os.rename(path, trash)
            path = trash
        doomed.append(path)
    if doomed:
        sync(root)
    for path in doomed:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            continue
        if os.path.lexists(path / COMMIT):
            (path / COMMIT).unlink()
            sync(path)
        shutil.rmtree(path)


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


def _committed_manifest(checkpoint: Path) -> bytes | None:
    """Return the bytes of the manifest when COMMIT is its hash, else None."""
    try:
        said = _read_plain(checkpoint / COMMIT)
        content = _read_plain(checkpoint / MANIFEST)
    except OSError:  # not there, or not to be read: either way it cannot be used
        return None
    return content if said == seal(content).encode() else None


def _read_plain(file: Path) -> bytes:
    if not stat.S_ISREG(os.lstat(file).st_mode):
        raise FileNotFoundError(errno.ENOENT, "is no regular file", str(file))
    return file.read_bytes()


def render_manifest(manifest: dict[str, Any]) -> str:
    """Return the text of a manifest."""
    return json.dumps(manifest, indent=1, sort_keys=True)


def seal(manifest: bytes) -> str:
    """Return the text of COMMIT for a manifest."""
    return hashlib.sha256(manifest).hexdigest() + "\n"


def _mismatch(checkpoint: Path) -> str:
    for name in (COMMIT, MANIFEST):
        try:
            _read_plain(checkpoint / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return f"{COMMIT} is not that of {MANIFEST}: one of them was changed"


def is_inside(name: str) -> bool:
    """Whether a manifest's name is that of a file below its folder, written in the one way."""
    path = PurePosixPath(name)
    return (
        bool(path.parts)
        and not path.is_absolute()
        and ".." not in path.parts
        and (str(path) == name and "\0" not in name)
    )


def _check_whole(folder: Path, manifest: dict[str, Any]) -> None:
    """Refuse to commit a folder that holds other files, or of other sizes, than its manifest."""
    files = manifest["files"]
    there = files_below(folder) - {MANIFEST, COMMIT, _PREPARED}
    for name in sorted(there - set(files)):
        raise CheckpointError(f"{folder / name} is not in the manifest: not committed")
    for name, entry in files.items():
        if what := _damage(folder / name, entry, hashed=False):
            raise CheckpointError(f"{folder / name} {what}: not committed")


def _verifies(checkpoint: Path, budget: int) -> tuple[bool, int]:
    """Return whether a checkpoint verifies, as far as `budget` goes, and the bytes read."""
    try:
        files = read_manifest(checkpoint)["files"]
    except CheckpointError:
        return False, 0
    return within_budget(files, budget, lambda n, e, h: _damage(checkpoint / n, e, hashed=h))


def within_budget(
    files: dict[str, dict[str, Any]],
    budget: int,
    damage: Callable[[str, dict[str, Any], bool], str | None],
) -> tuple[bool, int]:
    """Return whether all files have their sizes, and up to `budget` bytes of them their hashes,
    the smallest first; and the bytes read.

    Args:
        files: of a manifest.
        damage: (name, entry, whether to hash) -> what is wrong with the file.
    """
    read = 0
    for name, entry in sorted(files.items(), key=lambda item: item[1]["size"]):
        hashed = read + entry["size"] <= budget
        read += entry["size"] if hashed else 0
        if damage(name, entry, hashed):
            return False, read
    return True, read


def _metrics(checkpoint: Path) -> dict[str, float]:
    """Return the metrics that a checkpoint was saved with, {} where there are none."""
    try:
        return parse_metrics((checkpoint / STATE).read_text("utf-8"), checkpoint / STATE)
    except FileNotFoundError:
        return {}


def parse_metrics(content: str, source: object) -> dict[str, float]:
    """Return the metrics in the text of a state.json; `source` is its name in errors."""
    try:
        state = json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{source} is not JSON: {error}") from error
    values = (state.get("metrics") if isinstance(state, dict) else None) or {}
    return {k: float(v) for k, v in values.items() if isinstance(v, int | float)}


def _damage(file: Path, expected: dict[str, Any], *, hashed: bool = True) -> str | None:
    try:
        if not stat.S_ISREG(os.lstat(file).st_mode):
            return "is missing"
        size = file.stat().st_size
        if size != expected["size"]:
            return f"is {size} bytes long, expected {expected['size']}"
        if not hashed:
            return None
        with open(file, "rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
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


def _first_os_error(error: BaseException) -> OSError | None:
    """Return the OSError that `error` is, comes from, or was raised on the way out of."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, OSError) and found.errno is not None:
            return found
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return None


@contextlib.contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(what, error) from error
