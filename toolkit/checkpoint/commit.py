"""Commit, verify and list checkpoints, safe against crashes, on any `Storage`.

    step-N            committed as soon as COMMIT, written last, is the sha256 of its manifest.json
    step-N.tmp-*      being written; never read
    step-N.old-*      an earlier save of this step; valid until the new step-N is committed
    step-N.bad-*      failed verification; kept for inspection, never read and never deleted
    step-N.trash-*    being deleted

A store cannot rename. There, each attempt to save has a separate prefix, and no object is written
twice:

    step-N.try-K-*    the K-th attempt; of the committed attempts of a step, the highest K is valid
    step-N            copied from a disk: attempt 0
    .../BAD           marks an attempt that failed verification

This module knows neither tensors nor ranks. One process calls it, for one save of a run at a time.

[Note: order of operations] On a disk, an fsync separates any two steps, because a disk that loses
power may keep a later change of a folder and lose an earlier one.

    save, on a disk     files, folders, manifest and COMMIT.prepared of the tmp folder
                        a committed step-N of the same step -> step-N.old-*
                        tmp -> step-N
                        COMMIT.prepared -> COMMIT        from here on it is committed
    save, on a store    files; a listing, which must show all with their sizes; manifest.json
                        COMMIT                           from here on it is committed
    delete              on a disk: step-N -> step-N.trash-*
                        COMMIT                           from here on it is no checkpoint
                        the other files

All bytes are on the disk before the first rename, so a full disk fails before anything has moved. A
folder with COMMIT.prepared and without COMMIT is the leftover of a killed save. A folder with
neither has lost its COMMIT, which is damage, so it is kept. On a store, an attempt without COMMIT
is a leftover: S3, Google Cloud Storage and Azure guarantee that objects can be read and listed by
every client as soon as they are written.
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
# Faults of the path, not of the disk: a second attempt to read would find the same.
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
    """Map the steps of a run's committed checkpoints to their folders, in ascending order.

    Only names, COMMIT and manifests are read, so files may still be damaged. A run without
    checkpoints gives {}.

    Raises:
        CheckpointError: the manifest of a folder records another step than the folder's name, or
            the disk cannot be read at the moment.
    """
    return {step: a.folder for step, a in latest_attempts(list_attempts(run)).items()}


def find_broken_checkpoints(run: str | store.Folder) -> dict[int, tuple[Any, str]]:
    """Find checkpoints that were committed, but whose COMMIT or manifest is now missing or changed.

    Saves that were killed before their commit are not included.

    Returns:
        Step -> (folder, description of the fault).

    Raises:
        CheckpointError: the disk cannot be read at the moment.
    """
    saved = [
        (a, _read_committed_manifest(a.folder)[1]) for a in list_attempts(run) if a.kind == "saved"
    ]
    return {a.step: (a.folder, fault) for a, fault in saved if fault is not None}


def is_committed(checkpoint: store.Folder) -> bool:
    """Return True if COMMIT exists and holds exactly the hash of the manifest.

    Raises:
        CheckpointError: the disk cannot be read at the moment, so the answer is unknown.
    """
    return _read_committed_manifest(checkpoint)[1] is None


def find_checkpoint(path: str | store.Folder, *also: Callable[[Path], bool]) -> Any:
    """Return `path` if it is a committed checkpoint, or the newest committed one if it is a run.

    Args:
        path: path or URL of a checkpoint or a run.
        also: predicates. The error also suggests nearby folders for which one of them is true.

    Raises:
        CheckpointError: there is no committed checkpoint; the error suggests paths nearby.
    """
    path = store.parse_location(path)
    storage = storage_of(path)
    if is_committed(path) and (storage.is_disk or BAD not in storage.files([BAD])):
        return path
    if steps := committed_steps(path):
        return steps[max(steps)]
    raise CheckpointError(_explain_missing(path, *also))


def _explain_missing(path: Any, *also: Callable[[Path], bool]) -> str:
    """Format an error message that says why `path` is no checkpoint and suggests paths nearby.

    `also` are further predicates for folders to suggest; see `suggest_paths`.
    """
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
    """Return True if a folder has a file that marks a run, or a checkpoint of any tool."""
    return any(any(path.glob(mark)) for mark in _MARKS)


def suggest_paths(path: Path, *kinds: Callable[[Path], bool]) -> str:
    """Format "; did you mean ...?" with up to three folders near `path` that match a predicate.

    Three parents of `path` are tried first, then folders one and two levels below it. The first of
    these groups with a match is used. Folders with similar names come first.

    Args:
        path: the wrong path, which may not exist.
        kinds: predicates; a folder matches if one of them is true.

    Returns:
        The text; "" if nothing matches.
    """
    here = next(p for p in (path, *path.absolute().parents) if p.is_dir())
    below = (sorted(itertools.islice(here.glob(depth), 1000)) for depth in ("*", "*/*"))
    for group in (list(path.parents)[:3], *below):
        folders = sorted((p for p in group if p.is_dir()), key=lambda p: _name_distance(p, path))
        if similar := [p for kind in kinds for p in folders if kind(p)]:
            return f"; did you mean {' or '.join(map(str, similar[:3]))}?"
    return ""


def _name_distance(folder: Path, path: Path) -> float:
    """Compute how different the names of two folders are, from 0 (equal) to 1."""
    return 1 - difflib.SequenceMatcher(None, folder.name, path.name).ratio()


def read_manifest(checkpoint: store.Folder) -> dict[str, Any]:
    """Read and parse the manifest of a checkpoint.

    Raises:
        CheckpointError: the checkpoint is not committed, or the manifest is damaged.
    """
    content, fault = _read_committed_manifest(checkpoint)
    if fault is not None:
        raise CheckpointError(f"{checkpoint} is not committed: {fault}")
    return parse_manifest(content, checkpoint / MANIFEST)


def parse_manifest(content: bytes, source: object) -> dict[str, Any]:
    """Parse the JSON of a manifest and validate it; `source` names the file in errors.

    Returns:
        The manifest. `files` maps each file name to its `size` in bytes and `sha256`. `step` (int)
        and `row_sums` (tensor -> checksum) may be absent.

    Raises:
        CheckpointError: the content is no JSON, an entry has a wrong type, or a file name is no
            path inside the checkpoint.
    """
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
    """List the files of a checkpoint that are missing or differ from its manifest.

    Args:
        folder: the checkpoint.
        only: names of the files to check. None checks all, and also reports files that are not in
            the manifest.
        hashed: names of the files to read and hash. Of other files, only the size is compared. None
            hashes every file.
        files: the manifest's entries; None reads them from the committed manifest.

    Returns:
        (file name, fault) pairs. The fault continues a sentence, such as "is missing".

    Raises:
        CheckpointError: the manifest is not valid, or a file cannot be read at the moment.
    """
    files = read_manifest(folder)["files"] if files is None else files
    only = None if only is None else list(only)
    sizes = storage_of(folder).files(only)
    names = sorted({*files, *sizes} - {MANIFEST, COMMIT}) if only is None else only

    def fault(name: str) -> str | None:
        """Describe how a file differs from the manifest; None if it matches."""
        if name not in files:
            return "is not in the manifest"
        is_read = hashed is None or name in hashed
        return describe_damage(folder / name, sizes.get(name, -1), files[name], hashed=is_read)

    with ThreadPoolExecutor(_THREADS) as pool:
        return [(n, f) for n, f in zip(names, pool.map(fault, names), strict=True) if f is not None]


def is_intact(checkpoint: store.Folder) -> bool:
    """Return True if a checkpoint is committed and its files match the manifest.

    For shards, only the size is compared; all other files are hashed. Files that the manifest does
    not list are ignored. If the checkpoint cannot be read at the moment, the result is False.
    """
    try:
        files = read_manifest(checkpoint)["files"]
        small = {name for name in files if not name.endswith(SHARD)}
        return not find_damaged_files(checkpoint, files, hashed=small, files=files)
    except CheckpointError:
        # Also if it cannot be read at the moment: then it is not known to be intact.
        return False


def describe_damage(
    file: store.Folder, size: int, expected: dict[str, Any], *, hashed: bool
) -> str | None:
    """Describe how a file differs from its manifest entry; return None if it matches.

    Args:
        file: the file.
        size: its size in bytes; -1 if it is missing or no regular file.
        expected: its manifest entry: `size`, and `sha256` or `xxh3`.
        hashed: read the file and compare its hash, too. If False, only the size is compared.

    Returns:
        The end of a sentence, such as "is missing", or None.

    Raises:
        CheckpointError: the file cannot be read at the moment (too many open files, a stale handle,
            no permission, a failing disk), which does not prove damage.
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
    """Hash a local file (`Path`) or an object of a store (`RemotePath`).

    Args:
        file: the file or object.
        kind: `xxh3` (128 bits), or an algorithm of hashlib such as `sha256`.

    Returns:
        The digest as hexadecimal digits.
    """
    with file.open("rb") as f:
        return hashlib.file_digest(f, xxhash.xxh3_128 if kind == "xxh3" else kind).hexdigest()


def compute_commit_content(manifest: bytes) -> str:
    """Compute the content of COMMIT for a manifest: its sha256 in hexadecimal, and a newline."""
    return hashlib.sha256(manifest).hexdigest() + "\n"


def _read_committed_manifest(checkpoint: store.Folder) -> tuple[bytes, str | None]:
    """Read the manifest, and check that COMMIT holds its hash.

    Returns:
        (bytes of the manifest, None), or (b"", the reason why the checkpoint is not committed).

    Raises:
        CheckpointError: the disk cannot be read at the moment.
    """
    contents = []
    for name in (COMMIT, MANIFEST):
        try:
            contents.append(storage_of(checkpoint / name).read_small_file())
        except FileNotFoundError:
            return b"", f"{name} missing"
        except OSError as error:
            return b"", f"{name} {_describe_read_error(checkpoint / name, error)}"
    commit_content, manifest = contents
    if commit_content != compute_commit_content(manifest).encode():
        return b"", f"{COMMIT} is not that of {MANIFEST}: one of them was changed"
    return manifest, None


def _describe_read_error(file: store.Folder, error: OSError) -> str:
    """Describe an error of reading `file` that a retry would give again, such as a missing file.

    Raises:
        CheckpointError: the disk is at fault, so the state of the file is unknown.
    """
    if error.errno in _NO_FILE:
        return f"cannot be read: {error.strerror}"
    raise disk_error(f"{file} cannot be read", error) from error


# ---- Writing


def begin_attempt(run: str | store.Folder, step: int) -> Any:
    """Start a new checkpoint of `step`, and return its location for `commit`.

    On a disk, this creates an empty folder `step-N.tmp-*`. On a store, it only chooses a new
    prefix. Leftovers of killed saves and deletions are deleted first, because they may fill the
    disk. Therefore no other save of the run may be in progress.

    Raises:
        CheckpointError: the folder cannot be created.
    """
    root = store.parse_location(run) / CHECKPOINTS
    with raise_disk_errors(f"{root} cannot be used, a folder is expected"):
        attempts = list_attempts(run)
        # A folder that cannot be deleted does no harm here; `prune_checkpoints` will report it.
        with contextlib.suppress(OSError, CheckpointError):
            delete_attempts(a.folder for a in attempts if a.kind in LEFTOVER_KINDS)
        number = max((a.order for a in attempts if a.step == step), default=0) + 1
        return storage_of(root).new_attempt(step, number)


def store_files(folder: Path, names: Iterable[str], to: store.Folder | None = None) -> Files:
    """Fsync or upload files of a checkpoint that is being saved; return their manifest entries.

    Args:
        folder: the local folder that holds the files.
        names: names of the files in it.
        to: location of the checkpoint. If it is None or `folder`, the files are only fsynced. If it
            is on a store, they are uploaded.

    Returns:
        Name -> {"size": bytes, "sha256": hash}.
    """

    def store_file(name: str) -> dict[str, Any]:
        """Store a file; return its manifest entry (size in bytes, and sha256)."""
        file = folder / name
        storage_of((to or folder) / name).put(file)
        return {"size": file.stat().st_size, "sha256": hash_file(file)}

    names = list(names)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(names, pool.map(store_file, names), strict=True))


def commit(folder: Any, step: int, manifest: dict[str, Any]) -> Any:
    """Commit the checkpoint that `begin_attempt` started; return its final location.

    First, the sizes of all files are compared with the manifest. After the return, a power loss
    cannot undo the commit. This function syncs only folders, so every rank must have synced its own
    files (`store_files` does). See [Note: order of operations].

    Args:
        folder: the location from `begin_attempt`, with all files of the checkpoint.
        step: the step.
        manifest: content of manifest.json, which this function writes.

    Raises:
        CheckpointError: the folder does not match `manifest`, the manifest is too large, or a disk
            or store failed. Earlier committed checkpoints are unchanged, and `folder` remains.
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
        return storage_of(folder).commit(
            step, text, compute_commit_content(text.encode()), is_intact
        )


def delete_attempts(folders: Iterable[Any]) -> None:
    """Delete checkpoint folders, committed or not; a half-deleted one is never valid.

    If a folder cannot be deleted (on NFS, a process may have a file open), the next ones are tried
    before the first error is raised.

    Raises:
        OSError or CheckpointError: a checkpoint cannot be deleted.
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
    """List all saves of a run, committed or not, including damaged and half-deleted ones.

    They are sorted by step, then by the order of saving. If several saves of one step are
    committed, the last of them is valid. Folders with other names are ignored.
    """
    unsorted = storage_of(store.parse_location(run) / CHECKPOINTS).attempts()
    # `step-000000007` would be a second folder of step 7.
    attempts = [a for a in unsorted if step_name(a.step) == a.folder.name.partition(".")[0]]
    return sorted(attempts, key=lambda a: (a.step, a.order, a.folder.name))


def latest_attempts(attempts: list[Attempt]) -> dict[int, Attempt]:
    """Map each step to its valid checkpoint: the last committed one among `attempts`.

    Args:
        attempts: sorted as `list_attempts` returns them.

    Raises:
        CheckpointError: the manifest of a folder records another step than the folder's name.
    """
    latest = {}
    for a in attempts:
        content, fault = (
            _read_committed_manifest(a.folder) if a.kind in ("saved", "old") else (b"", "")
        )
        if fault is None:
            saved_step = _STEP.search(content)
            if saved_step and int(saved_step[1]) != a.step:
                raise CheckpointError(
                    f"{a.folder} is the checkpoint of step {int(saved_step[1])}, renamed or copied "
                    f"by hand; give it back the name {step_name(int(saved_step[1]))}, or move it "
                    "away"
                )
            latest[a.step] = a
    return latest
