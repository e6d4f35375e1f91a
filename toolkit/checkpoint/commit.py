"""Atomic, crash-safe checkpoint folders, on a disk or an object store.

    step-N            committed once COMMIT, written last, is the sha256 of its manifest.json
    step-N.tmp-*      being written; never read
    step-N.old-*      committed before under the same step; counts until the new step-N is committed
    step-N.bad-*      failed verification; kept for a look, never read and never deleted
    step-N.trash-*    being deleted

A store renames nothing. There each attempt to save has a prefix of its own, and what has been put
is never put again:

    step-N.try-K-*    the K-th attempt; of the committed ones of a step the highest K counts
    step-N            copied from a disk: attempt 0
    .../BAD           in an attempt that failed verification

Owns these names, the order of operations, the manifest's form. Knows neither tensors
nor ranks: one process calls it, one save of a run at a time. What stays is `retention`'s.

[Note: order of operations] On a disk an fsync stands between two steps, because a disk that loses
power may keep any later change of a folder and lose an earlier one.

    save, on a disk     files, folders, manifest and COMMIT.prepared of the tmp folder
                        a committed step-N of the same step -> step-N.old-*
                        tmp -> step-N
                        COMMIT.prepared -> COMMIT        from here on it is committed
    save, on a store    files; manifest.json; a listing, which must show all with their sizes
                        COMMIT                           from here on it is committed
    delete              on a disk: step-N -> step-N.trash-*
                        COMMIT                           from here on it is no checkpoint
                        the other files

All bytes are on the disk before the first rename, so a full disk shows while nothing has moved. A
folder with COMMIT.prepared and without COMMIT was never committed and is a leftover; one with
neither has lost its COMMIT: that is damage, and it is kept. On a store an attempt without COMMIT
was killed while it was written or deleted: a leftover. It holds where an object that was put is
read and listed by everybody at once, as S3, Google Cloud Storage and Azure promise.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.durable import disk_errors, sync, sync_above, write_synced
from toolkit.checkpoint.store import BLOCK, Folder, Place, files_below, where
from toolkit.errors import CheckpointError
from toolkit.formats import is_inner_path
from toolkit.parsing import MAX_JSON_BYTES, parse_json

CHECKPOINTS = "checkpoints"
EXPORTS = "exports"  # of a run that writes them itself
MANIFEST = "manifest.json"
COMMIT = "COMMIT"
STATE = "state.json"
BAD = "BAD"
_PREPARED = "COMMIT.prepared"
_ON_DISK = re.compile(r"step-([0-9]{8,})(?:\.(tmp|old|bad|trash)-[0-9a-f]{8})?")
_ON_STORE = re.compile(r"step-([0-9]{8,})(?:\.try-([0-9]{4,})-[0-9a-f]{8})?")
_AT_ONCE = 8  # small objects under way


@dataclass(frozen=True)
class Attempt:
    """A folder that bears a name of the protocol."""

    folder: Any
    """`Path` or `Place`."""
    step: int
    kind: str
    """saved, old, tmp, bad or trash: as named on a disk; on a store as its objects say."""
    order: tuple[int, ...]
    """Of the committed ones of a step the highest counts."""


# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def committed_steps(run: str | Folder) -> dict[int, Any]:
    """Return step -> folder of every committed checkpoint of a run, oldest first.

    Reads COMMIT and the manifest of each, no other file; of a store one listing.
    """
    return {step: a.folder for step, a in counting(attempts_of(run)).items()}


def broken_steps(run: str | Folder) -> dict[int, tuple[Any, str]]:
    """Return step -> (folder, what is wrong) of what was committed under its name and is not now.

    Its COMMIT or its manifest was changed, or is gone. A save that was killed leaves no such
    folder.
    """
    return {
        a.step: (a.folder, _mismatch(a.folder))
        for a in attempts_of(run)
        if a.kind == "saved" and not is_committed(a.folder)
    }


def quarantined(run: str | Folder) -> list[str]:
    """Return the names of the checkpoints that failed verification and were set aside."""
    return [a.folder.name for a in attempts_of(run) if a.kind == "bad"]


def is_committed(checkpoint: Folder) -> bool:
    """Whether COMMIT is there and is, to the byte, the hash of the manifest that is there."""
    return _committed_manifest(checkpoint) is not None


def find_checkpoint(path: str | Folder) -> Any:
    """Return the checkpoint that `path` means: itself, or the newest committed one of a run.

    Raises:
        CheckpointError: neither; says which paths would do.
    """
    path = where(path)
    if is_committed(path) and not (isinstance(path, Place) and BAD in path.files()):
        return path
    steps = committed_steps(path)
    if steps:
        return steps[max(steps)]
    if isinstance(path, Path):
        _refuse_wrong_path(path)
    raise CheckpointError(
        f"{path} holds no committed checkpoint ({path / CHECKPOINTS}/step-*/{COMMIT})"
    )


def _refuse_wrong_path(path: Path) -> None:
    if re.match(r"[a-z][a-z0-9+.-]+:/[^/]", str(path)) and not path.exists():
        raise CheckpointError(
            f"{path} looks like a URL: the command line copies a checkpoint from its store first "
            "(in Python: toolkit.checkpoint.fetch.local_copy); here a folder is expected"
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
    if (path / MANIFEST).exists() or _ON_DISK.match(path.name):
        raise CheckpointError(
            f"{path} is not committed ({COMMIT} missing or not that of its manifest)"
        )


def read_manifest(checkpoint: Folder) -> dict[str, Any]:
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
    """Return the manifest that `content` is; `source` names it in errors, which are those of
    `read_manifest`.
    """
    manifest = parse_json(content, source, CheckpointError)
    try:
        files = [(n, e["size"], e["sha256"]) for n, e in manifest["files"].items()]
        tensors = [(e["shape"], e["dtype"], e["digest"]) for e in manifest["tensors"].values()]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source} is not a manifest of this toolkit: {error!r}") from error
    for name, size, sha256 in files:
        if not is_inner_path(name) or type(size) is not int or not isinstance(sha256, str):
            raise CheckpointError(f"{source} names {name!r}, which is no file of the checkpoint")
    if not all(isinstance(s, list) and isinstance(d, str) for s, d, _ in tensors):
        raise CheckpointError(f"{source} is not a manifest of this toolkit: shapes and dtypes")
    return manifest


def damaged_files(
    checkpoint: Folder, only: Iterable[str] | None = None, *, hashed: bool = True
) -> list[tuple[str, str]]:
    """Return (file, what is wrong) for every file that is not what the manifest says.

    Reads and hashes the files named in `only` (all by default; with `hashed` false it compares
    sizes) and, of all, looks for files that the manifest does not know.
    """
    files, sizes = read_manifest(checkpoint)["files"], files_below(checkpoint)
    names = list(files) if only is None else list(only)
    strangers = sorted(sizes.keys() - {*files, MANIFEST, COMMIT}) if only is None else []
    strangers += [n for n in names if n not in files]
    names = [n for n in names if n in files]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        faults = list(
            pool.map(lambda n: damage(checkpoint / n, sizes.get(n), files[n], hashed), names)
        )
    found = [(name, fault) for name, fault in zip(names, faults, strict=True) if fault is not None]
    return found + [(n, "is not in the manifest") for n in strangers]


def sha256_of(file: Any) -> str:
    """Return the sha256 of a file or an object, in hexadecimal."""
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


def begin(run: str | Folder, step: int) -> Any:
    """Return the empty folder, or the place, in which the checkpoint of `step` is written.

    What killed saves and deletions of this run left is removed first, since it may be what fills
    the disk: call it only when no other save of the run is going on.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    root = where(run) / CHECKPOINTS
    if isinstance(root, Place):
        attempts = attempts_of(run)
        delete(a.folder for a in attempts if a.kind == "tmp")
        number = max((a.order[0] for a in attempts if a.step == step), default=0) + 1
        return root / f"{step_name(step)}.try-{number:04d}-{os.urandom(4).hex()}"
    with disk_errors(f"{root} cannot be written"):
        if os.path.lexists(root) and not root.is_dir():
            raise CheckpointError(
                f"{root} is a file or a broken link, a folder is expected; move it elsewhere, or "
                "give another output_dir"
            )
        root.mkdir(parents=True, exist_ok=True)
        sync_above(root)
        delete(a.folder for a in attempts_of(run) if a.kind in ("tmp", "trash"))
        folder = _beside(root / step_name(step), "tmp")
        folder.mkdir()
    return folder


def hash_files(
    folder: Path, names: Iterable[str], to: Place | None = None
) -> dict[str, dict[str, Any]]:
    """Fsync the files `names` below `folder`, or put them `to` a store; return name ->
    {"size", "sha256"} for the manifest.
    """

    def settle(name: str) -> dict[str, Any]:
        file = folder / name
        if to is None:
            sync(file)
        else:
            with (to / name).open("wb") as target, open(file, "rb") as source:
                shutil.copyfileobj(source, target, BLOCK)
        return {"size": file.stat().st_size, "sha256": sha256_of(file)}

    names = list(names)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1) if to is None else _AT_ONCE) as pool:
        return dict(zip(names, pool.map(settle, names), strict=True))


def commit(folder: Any, step: int, manifest: dict[str, Any]) -> Any:
    """Turn what `begin` returned into the committed checkpoint of `step`; return where that is.

    After the return a power loss cannot undo it; before the last step of this function nothing
    counts as committed. Every file is fsynced here once more, which costs nothing where it was
    before. See [Note: order of operations].

    Raises:
        CheckpointError: the folder is not what `manifest` says, or the disk or store refuses; what
            was committed before is as it was, and `folder` is there to be removed.
    """
    text = json.dumps(manifest, indent=1, sort_keys=True)
    if isinstance(folder, Place):
        (folder / MANIFEST).write_bytes(text.encode())
        _check_whole(folder, manifest)
        (folder / COMMIT).write_bytes(seal(text.encode()).encode())
        return folder
    target = folder.parent / step_name(step)
    with disk_errors(f"checkpoint of step {step} could not be committed"):
        _check_whole(folder, manifest)
        (folder / COMMIT).unlink(missing_ok=True)  # in a copy of a committed folder
        write_synced(folder / MANIFEST, text)
        write_synced(folder / _PREPARED, seal(text.encode()))
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


def quarantine(checkpoint: Any) -> Any:
    """Set a checkpoint that failed verification aside: rename it to `step-N.bad-*`, or mark it on a
    store. Nothing is deleted. Return the new name.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    if isinstance(checkpoint, Place):
        (checkpoint / BAD).write_bytes(b"failed verification; kept for a look, never read\n")
        return checkpoint / BAD
    # Of step-N.old-*, too: a name that went on from there would still count.
    bad = _beside(checkpoint.with_name(checkpoint.name.partition(".")[0]), "bad")
    with disk_errors(f"{checkpoint} cannot be set aside"):
        os.rename(checkpoint, bad)
        sync(bad.parent)
    return bad


# --------------------------------------------------------------------------------------------------
# Names
# --------------------------------------------------------------------------------------------------


def attempts_of(run: str | Folder) -> list[Attempt]:
    """Return all that bears a name of the protocol, by step, what counts last."""
    root = where(run) / CHECKPOINTS
    if isinstance(root, Place):
        names: dict[str, set[str]] = {}
        for path in root.files():
            folder, _, name = path.partition("/")
            names.setdefault(folder, set()).add(name)
        found = [_on_store(root / folder, files) for folder, files in names.items()]
    else:
        found = [_on_disk(path) for path in (root.iterdir() if root.is_dir() else ())]
    # step-000000007 would be a second step 7
    attempts = [a for a in found if a and step_name(a.step) == a.folder.name.partition(".")[0]]
    return sorted(attempts, key=lambda a: (a.step, a.order, a.folder.name))


def _on_disk(path: Path) -> Attempt | None:
    match = _ON_DISK.fullmatch(path.name)
    if match is None:
        return None
    kind = match[2] or ("tmp" if _unfinished(path) else "saved")
    order: tuple[int, ...] = (1,)
    if kind == "old":  # `commit` leaves one at most; of more, the last that was committed
        commit_file = path / COMMIT
        order = (0, commit_file.stat().st_mtime_ns if commit_file.exists() else 0)
    return Attempt(path, int(match[1]), kind, order)


def _on_store(place: Place, files: set[str]) -> Attempt | None:
    match = _ON_STORE.fullmatch(place.name)
    if match is None or files == {""}:
        return None
    number = int(match[2] or 0)
    if BAD in files:
        kind = "bad"
    elif COMMIT in files:
        kind = "saved"
    elif number > 0:
        kind = "tmp"
    else:
        return None  # without COMMIT somebody may still be copying it
    return Attempt(place, int(match[1]), kind, (number,))


def counting(attempts: list[Attempt]) -> dict[int, Attempt]:
    """Return step -> the committed attempt that counts."""
    return {a.step: a for a in attempts if a.kind in ("saved", "old") and is_committed(a.folder)}


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
    elif is_committed(target) and verifies(target, 0)[0]:
        for a in attempts_of(target.parent.parent):
            if a.step == step and a.kind == "old":  # superseded: from now on there is another
                os.rename(a.folder, _beside(target, "trash"))
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


def delete(folders: Iterable[Any]) -> None:
    """Delete so that at no moment a half-deleted folder is taken for a checkpoint."""
    doomed = []
    for folder in folders:
        if isinstance(folder, Path) and not re.search(r"\.(tmp|trash)-", folder.name):
            trash = _beside(folder.with_name(folder.name.partition(".")[0]), "trash")
            os.rename(folder, trash)
            sync(folder.parent)
            folder = trash
        doomed.append(folder)
    for folder in doomed:
        if isinstance(folder, Place):
            (folder / COMMIT).unlink()
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda name, f=folder: (f / name).unlink(), folder.files()))
        elif folder.is_symlink() or not folder.is_dir():
            folder.unlink()
        else:
            if os.path.lexists(folder / COMMIT):
                (folder / COMMIT).unlink()
                sync(folder)
            shutil.rmtree(folder)


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


def seal(manifest: bytes) -> str:
    """Return the text of COMMIT for a manifest."""
    return hashlib.sha256(manifest).hexdigest() + "\n"


def _committed_manifest(checkpoint: Folder) -> bytes | None:
    """Return the bytes of the manifest when COMMIT is its hash, else None."""
    try:
        expected = read_plain(checkpoint / COMMIT)
        content = read_plain(checkpoint / MANIFEST)
    except OSError:  # not there, or not to be read: either way it cannot be used
        return None
    return content if expected == seal(content).encode() else None


def read_plain(file: Folder) -> bytes:
    if isinstance(file, Path):
        entry = os.lstat(file)
        if not stat.S_ISREG(entry.st_mode):
            raise FileNotFoundError(errno.ENOENT, "is no regular file", str(file))
        if entry.st_size > MAX_JSON_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
    return file.read_bytes()


def _mismatch(checkpoint: Folder) -> str:
    """Return why a folder that should be committed is not."""
    if isinstance(checkpoint, Path) and not checkpoint.is_dir():
        return "is not a folder"
    files = files_below(checkpoint)
    if lacking := [n for n in (COMMIT, MANIFEST) if n not in files]:
        return f"{' and '.join(lacking)} missing"
    for name in (COMMIT, MANIFEST):
        try:
            read_plain(checkpoint / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return f"{COMMIT} is not that of {MANIFEST}: one of them was changed"


def _check_whole(folder: Folder, manifest: dict[str, Any]) -> None:
    """Refuse to commit a folder that holds other files, or of other sizes, than its manifest."""
    files, sizes = manifest["files"], files_below(folder)
    for name in sorted(sizes.keys() - {*files, MANIFEST, COMMIT, _PREPARED}):
        raise CheckpointError(f"{folder / name} is not in the manifest: not committed")
    for name, entry in files.items():
        if fault := damage(folder / name, sizes.get(name), entry, hashed=False):
            raise CheckpointError(f"{folder / name} {fault}: not committed")


def verifies(checkpoint: Folder, budget: int) -> tuple[bool, int]:
    """Return whether all files have their sizes, and up to `budget` bytes of them their hashes, the
    smallest first; and the bytes read.
    """
    try:
        files, sizes = read_manifest(checkpoint)["files"], files_below(checkpoint)
    except CheckpointError:
        return False, 0
    read = 0
    for name, entry in sorted(files.items(), key=lambda item: item[1]["size"]):
        hashed = read + entry["size"] <= budget
        read += entry["size"] if hashed else 0
        if damage(checkpoint / name, sizes.get(name), entry, hashed):
            return False, read
    return True, read


def damage(file: Folder, size: int | None, expected: dict[str, Any], hashed: bool) -> str | None:
    """Return what is wrong with a file of `size` bytes; None where nothing is."""
    if size is None or size < 0:
        return "is missing"
    if size != expected["size"]:
        return f"is {size} bytes long, expected {expected['size']}"
    try:
        same = not hashed or sha256_of(file) == expected["sha256"]
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if same else "has other bytes than were saved"
