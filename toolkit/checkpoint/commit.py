"""Commit, verify and list checkpoints, safe against crashes, on any `Storage`.

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

Knows neither tensors nor ranks: one process calls it, one save of a run at a time.

[Note: order of operations] On a disk an fsync stands between two steps, because a disk that loses
power may keep any later change of a folder and lose an earlier one.

    save, on a disk     files, folders, manifest and COMMIT.prepared of the tmp folder
                        a committed step-N of the same step -> step-N.old-*
                        tmp -> step-N
                        COMMIT.prepared -> COMMIT        from here on it is committed
    save, on a store    files; a listing, which must show all with their sizes; manifest.json
                        COMMIT                           from here on it is committed
    delete              on a disk: step-N -> step-N.trash-*
                        COMMIT                           from here on it is no checkpoint
                        the other files

All bytes are on the disk before the first rename, so a full disk shows while nothing has moved. A
folder with COMMIT.prepared and without COMMIT is the leftover of a killed save; one with neither
has lost its COMMIT: that is damage, and it is kept. On a store an attempt without COMMIT is a
leftover: objects are read and listed by everybody at once, as S3, Google Cloud Storage and Azure
promise.
"""

import contextlib
import difflib
import errno
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from toolkit.checkpoint import store
from toolkit.checkpoint.local_folder import disk_error, raise_disk_errors
from toolkit.checkpoint.names import (
    BAD,
    CHECKPOINTS,
    COMMIT,
    MANIFEST,
    ROW_SUMS,
    SHARD,
    Attempt,
    step_name,
)
from toolkit.checkpoint.store import storage_of
from toolkit.errors import CheckpointError
from toolkit.formats import METADATA_FILE, is_inner_path
from toolkit.parsing import MAX_JSON_BYTES, parse_json

Files = dict[str, dict[str, Any]]  # name -> size and sha256
SHARDED_SAFETENSORS = "shard-*-model-*-of-*.safetensors"
ACCELERATE = "pytorch_model_fsdp_"  # folder of the weights in what `save_state` writes
LEFTOVER_KINDS = ("tmp", "trash")  # kinds of attempts that killed saves and deletions leave
_STEP = re.compile(rb'^ "step": ([0-9]+)', re.MULTILINE)  # in a manifest, as it is written
# Faults of what lies there, not of the disk that is asked: no second look finds something else.
_NO_FILE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.ELOOP),
    errno.ENAMETOOLONG,
}
_AT_ONCE = 8  # small objects under way
_THREADS = min(4, os.cpu_count() or 1)  # that hash
# Files of which a folder that can be read as a checkpoint has one.
_MARKS = (
    *(COMMIT, METADATA_FILE, SHARDED_SAFETENSORS, f"{ACCELERATE}*/{METADATA_FILE}"),
    f"{CHECKPOINTS}/step-*/{COMMIT}",
)


# ---- Reading


def committed_steps(run: str | store.Folder) -> dict[int, Any]:
    """Return step -> folder of every committed checkpoint of a run, oldest first."""
    return {step: a.folder for step, a in latest_attempts(list_attempts(run)).items()}


def broken_steps(run: str | store.Folder) -> dict[int, tuple[Any, str]]:
    """Return step -> (folder, fault) where COMMIT or manifest was changed or lost: no kill does.
    Raises as `is_committed`.
    """
    saved = [(a, _read_committed(a.folder)[1]) for a in list_attempts(run) if a.kind == "saved"]
    return {a.step: (a.folder, fault) for a, fault in saved if fault is not None}


def is_committed(checkpoint: store.Folder) -> bool:
    """Return whether COMMIT is there and is, to the byte, the hash of the manifest that is there.

    CheckpointError: the disk does not let itself be read just now, so that nobody can tell.
    """
    return _read_committed(checkpoint)[1] is None


def find_checkpoint(path: str | store.Folder, *also: Callable[[Path], bool]) -> Any:
    """Return the checkpoint that `path` means: itself, or the newest committed one of a run; else
    CheckpointError says which paths around it would do, or are of a kind that is asked for `also`.
    """
    path = store.parse_location(path)
    storage = storage_of(path)
    if is_committed(path) and (storage.is_disk or BAD not in storage.files([BAD])):
        return path
    if steps := committed_steps(path):
        return steps[max(steps)]
    raise CheckpointError(_explain_missing(path, *also))


def _explain_missing(path: Any, *also: Callable[[Path], bool]) -> str:
    """Return the error that says why there is no checkpoint, and which paths around would do."""
    none = f"{path} holds no committed checkpoint ({path / CHECKPOINTS}/step-*/{COMMIT})"
    if not storage_of(path).is_disk:
        return none
    hint = suggest_paths(path, _looks_like_checkpoint, *also)
    if not path.exists():
        if re.match(r"[a-z][a-z0-9+.-]+:/[^/]", str(path)):
            return f"{path} is a URL; copy its checkpoint first, with checkpoint.local_copy{hint}"
        return f"{path} does not exist (current folder: {Path.cwd()}){hint}"
    if (path / MANIFEST).exists() or re.match(r"step-[0-9]{8}", path.name):
        return f"{path} is not committed ({COMMIT} missing or not that of its manifest){hint}"
    if (path / "config.json").is_file():
        verify = "`toolkit verify` reads an export"
        return f"{path} is a Hugging Face folder, no checkpoint; {verify}{hint}"
    return none + hint


def _looks_like_checkpoint(path: Path) -> bool:
    return any(any(path.glob(mark)) for mark in _MARKS)


def suggest_paths(path: Path, *kinds: Callable[[Path], bool]) -> str:
    """Return the end of an error: which folders around `path` are of one of the `kinds`."""
    here = next(p for p in (path, *path.absolute().parents) if p.is_dir())
    below = (sorted(itertools.islice(here.glob(depth), 1000)) for depth in ("*", "*/*"))
    for group in (list(path.parents)[:3], *below):
        folders = sorted((p for p in group if p.is_dir()), key=lambda p: _name_distance(p, path))
        if found := [p for kind in kinds for p in folders if kind(p)]:
            return f"; did you mean {' or '.join(map(str, found[:3]))}?"
    return ""


def _name_distance(folder: Path, asked: Path) -> float:
    """Return how unlike two names are, from 0 to 1."""
    return 1 - difflib.SequenceMatcher(None, folder.name, asked.name).ratio()


def read_manifest(checkpoint: store.Folder) -> dict[str, Any]:
    """Return the manifest of a committed checkpoint; CheckpointError where it cannot be trusted."""
    content, fault = _read_committed(checkpoint)
    if fault is not None:
        raise CheckpointError(f"{checkpoint} is not committed: {fault}")
    return parse_manifest(content, checkpoint / MANIFEST)


def parse_manifest(content: bytes, source: object) -> dict[str, Any]:
    """Return the manifest that `content` is; `source` names it in errors."""
    manifest = parse_json(content, source, CheckpointError)
    try:
        listed = manifest["files"].items()
        files = [(name, e["size"], e["sha256"]) for name, e in listed]
        sums = list(manifest.get(ROW_SUMS, {}).values())
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source} is not a manifest of this toolkit: {error!r}") from error
    for name, size, sha256 in files:
        if not is_inner_path(name) or type(size) is not int or not isinstance(sha256, str):
            raise CheckpointError(f"{source} names {name!r}, which is no file of the checkpoint")
    step = manifest.get("step")
    if not isinstance(step, int | None):
        raise CheckpointError(f"{source} is not a manifest of this toolkit: step {step!r:.80}")
    if not all(type(n) is int for n in sums):
        raise CheckpointError(f"{source} is not a manifest of this toolkit: {ROW_SUMS}")
    return manifest


def find_damaged_files(
    folder: store.Folder,
    only: Iterable[str] | None = None,
    *,
    hashed: Collection[str] | None = None,
    files: Files | None = None,
) -> list[tuple[str, str]]:
    """Return (file, what is wrong) for every file that is not what the manifest says.

    Looks at the files named in `only`, else at all, also those that the manifest does not know, and
    reads those in `hashed`, else all. `files` are the manifest's where they are known already.
    Raises as `damage`.
    """
    files = read_manifest(folder)["files"] if files is None else files
    only = None if only is None else list(only)
    sizes = storage_of(folder).files(only)
    names = sorted({*files, *sizes} - {MANIFEST, COMMIT}) if only is None else only

    def fault(name: str) -> str | None:
        if name not in files:
            return "is not in the manifest"
        is_read = hashed is None or name in hashed
        return find_damage(folder / name, sizes.get(name, -1), files[name], hashed=is_read)

    with ThreadPoolExecutor(_THREADS) as pool:
        return [(n, f) for n, f in zip(names, pool.map(fault, names), strict=True) if f is not None]


def is_intact(checkpoint: store.Folder) -> bool:
    """Return whether a checkpoint is committed, and its files have their sizes, and all but the
    shards their hashes.
    """
    try:
        files = read_manifest(checkpoint)["files"]
        small = {name for name in files if not name.endswith(SHARD)}
        return not find_damaged_files(checkpoint, files, hashed=small, files=files)
    except CheckpointError:  # also where it cannot be read just now: it is not known to be whole
        return False


def find_damage(
    file: store.Folder, size: int, expected: dict[str, Any], *, hashed: bool
) -> str | None:
    """Return what is wrong with a file of `size` bytes (-1: it is none); None where nothing is.

    CheckpointError: it cannot be read just now (too many open files, a stale handle, no permission,
    a failing disk): that says nothing about its bytes.
    """
    if size < 0:
        return "is missing"
    if size != expected["size"]:
        return f"is {size} bytes long, expected {expected['size']}"
    try:
        kind = "sha256" if "sha256" in expected else "xxh3"  # of an export
        same = not hashed or hash_file(file, kind) == expected[kind]
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return _describe_read_error(file, error)
    return None if same else "has other bytes than were saved"


def hash_file(file: Any, kind: str = "sha256") -> str:
    """Return the hash of some `kind` (sha256, xxh3) over a file or an object, in hexadecimal."""
    with file.open("rb") as f:
        return hashlib.file_digest(f, xxhash.xxh3_128 if kind == "xxh3" else kind).hexdigest()


def commit_text(manifest: bytes) -> str:
    """Return the text of COMMIT for a manifest."""
    return hashlib.sha256(manifest).hexdigest() + "\n"


def _read_committed(checkpoint: store.Folder) -> tuple[bytes, str | None]:
    """Return the bytes of the manifest, and why they are not the committed ones; None: they are."""
    found = []
    for name in (COMMIT, MANIFEST):
        try:
            found.append(storage_of(checkpoint / name).read_plain())
        except FileNotFoundError:
            return b"", f"{name} missing"
        except OSError as error:
            return b"", f"{name} {_describe_read_error(checkpoint / name, error)}"
    if found[0] != commit_text(found[1]).encode():
        return b"", f"{COMMIT} is not that of {MANIFEST}: one of them was changed"
    return found[1], None


def _describe_read_error(file: store.Folder, error: OSError) -> str:
    """Return what is wrong with a file that is none; raise where only the disk cannot be read."""
    if error.errno in _NO_FILE:
        return f"cannot be read: {error.strerror}"
    raise disk_error(f"{file} cannot be read", error) from error


# ---- Writing


def begin_attempt(run: str | store.Folder, step: int) -> Any:
    """Return the empty folder, or the place, in which the checkpoint of `step` is written.

    What killed saves and deletions of this run left is removed first, since it may be what fills
    the disk: call it only when no other save of the run is going on.
    """
    root = store.parse_location(run) / CHECKPOINTS
    with raise_disk_errors(f"{root} cannot be used, a folder is expected"):
        attempts = list_attempts(run)
        # A folder that cannot be deleted now is in nobody's way; `prune` says so.
        with contextlib.suppress(OSError, CheckpointError):
            delete_attempts(a.folder for a in attempts if a.kind in LEFTOVER_KINDS)
        number = max((a.order for a in attempts if a.step == step), default=0) + 1
        return storage_of(root).new_attempt(step, number)


def store_files(folder: Path, names: Iterable[str], to: store.Folder | None = None) -> Files:
    """Store files of the `scratch` folder of an attempt, durably, in the attempt `to`; where both
    are one, fsync them. Return their manifest entries.
    """

    def settle(name: str) -> dict[str, Any]:
        file = folder / name
        storage_of((to or folder) / name).put(file)
        return {"size": file.stat().st_size, "sha256": hash_file(file)}

    names = list(names)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(names, pool.map(settle, names), strict=True))


def commit(folder: Any, step: int, manifest: dict[str, Any]) -> Any:
    """Turn what `begin` returned into the committed checkpoint of `step`; return where that is.

    After the return a power loss cannot undo it; before its last step nothing counts as committed.
    Each file was fsynced by whoever wrote it (`hash_files` does): here the folders are, since one
    process that syncs the files of a thousand waits for as many round trips of a network disk. See
    [Note: order of operations].

    CheckpointError: the folder is not what `manifest` says, or the disk or store refuses; what was
    committed before is as it was, and `folder` is there to be removed.
    """
    text = json.dumps(manifest, indent=1, sort_keys=True)
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{MANIFEST} of step {step} has {len(text):,} bytes, more than the {MAX_JSON_BYTES:,} "
            "that are read: not committed"
        )
    with raise_disk_errors(f"checkpoint of step {step} could not be committed"):
        for name, fault in find_damaged_files(folder, hashed=(), files=manifest["files"]):
            raise CheckpointError(f"{folder / name} {fault}: not committed")
        return storage_of(folder).commit(step, text, commit_text(text.encode()), is_intact)


def delete_attempts(folders: Iterable[Any]) -> None:
    """Delete so that at no moment a half-deleted folder is taken for a checkpoint. Where one
    resists (a file that somebody has open, on NFS), the others go, and its error is raised.
    """
    resisted = []
    for folder in folders:
        try:
            storage_of(folder).delete()
        except (OSError, CheckpointError) as error:
            resisted.append(error)
    if resisted:
        raise resisted[0]


# ---- Names


def list_attempts(run: str | store.Folder) -> list[Attempt]:
    """Return all that bears a name of the protocol, by step, what counts last."""
    found = storage_of(store.parse_location(run) / CHECKPOINTS).attempts()
    # step-000000007 would be a second step 7
    attempts = [a for a in found if step_name(a.step) == a.folder.name.partition(".")[0]]
    return sorted(attempts, key=lambda a: (a.step, a.order, a.folder.name))


def latest_attempts(attempts: list[Attempt]) -> dict[int, Attempt]:
    """Return step -> the committed attempt that counts.

    CheckpointError: one bears the name of another step than it was saved at.
    """
    found = {}
    for a in attempts:
        content, fault = _read_committed(a.folder) if a.kind in ("saved", "old") else (b"", "")
        if fault is None:
            said = _STEP.search(content)
            if said and int(said[1]) != a.step:
                raise CheckpointError(
                    f"{a.folder} is the checkpoint of step {int(said[1])}, renamed or copied by "
                    f"hand; give it back the name {step_name(int(said[1]))}, or move it away"
                )
            found[a.step] = a
    return found
