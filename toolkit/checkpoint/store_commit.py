"""What a committed checkpoint is on an object store, where nothing can be renamed.

    step-N.try-K-*/         an attempt to save step N: the K-th; never written again
        ...                 its files, each put whole
        manifest.json       their sizes and hashes
        COMMIT              put last: sha256 of the manifest
        BAD                 put when it failed verification; kept for a look, never read

Owns these names, the order of puts and deletes, and the copy from a store to a folder. What a
manifest is, and which checkpoints stay, is `toolkit.commit`'s, whose functions have the same names
here. One process calls it, one save of a run at a time.

[Note: COMMIT is the whole protocol] A local save gets its name by a rename, when it is whole. Here
an object has the name it is put under, and a prefix "appears" with its first object. So every
attempt has a prefix of its own, with a random part: what a killed process still had on the wire
cannot land in the attempt of its successor. Nothing that has been put is put again, so a reader of
an attempt never sees two versions of one object.

    save    the files; manifest.json; a listing, which must show them all with their sizes; COMMIT
    delete  COMMIT; then the rest, in any order

Of the attempts of one step the highest K that is committed counts. K is one more than the highest
there is, whatever became of that one. So an overwritten step is never without a committed attempt:
the old one counts until the new COMMIT is there, and is deleted by the pruning after it. Where the
new one fails verification later it gets BAD, and an old one that is still there counts again.

An attempt without COMMIT was killed while it was written or deleted. Nobody can tell which, nobody
needs to, and the next save removes it. One whose COMMIT is not that of its manifest was damaged,
and is kept. A put that failed, as far as we can see, may have been done: then a save that raised
has committed, whole, which does no harm. It holds where an object that was put is read and listed
by everybody at once: S3, Google Cloud Storage and Azure promise that.

A folder of a disk (`step-N`) that was copied to the store counts too, as attempt 0, and without
COMMIT is left alone: somebody may still be copying.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint import commit as local
from toolkit.checkpoint.commit import CHECKPOINTS, COMMIT, MANIFEST, STATE, step_name
from toolkit.checkpoint.store import Place
from toolkit.config.retention import Retention
from toolkit.errors import CheckpointError

BAD = "BAD"
_ATTEMPT = re.compile(r"step-([0-9]{8,})(?:\.try-([0-9]{4,})-[0-9a-f]{8})?")
# What `prune` reads again at most; over a network, so less than on a disk.
_AFFORDABLE = 16 * 2**20
_AT_ONCE = 8  # small objects under way


@dataclass(frozen=True)
class _Attempt:
    place: Place
    step: int
    number: int
    """0: copied from a disk."""
    files: dict[str, int]
    """Name -> size."""


# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


def committed_steps(run: Place) -> dict[int, Place]:
    """Return step -> place of every committed checkpoint of a run, oldest first.

    One listing, and COMMIT and the manifest of each.
    """
    return {step: a.place for step, a in _counting(_attempts(run)).items()}


def broken_steps(run: Place) -> dict[int, tuple[Place, str]]:
    """Return step -> (place, what is wrong) of what has a COMMIT that is not its manifest's."""
    found = {}
    for attempt in _attempts(run):
        if COMMIT in attempt.files and BAD not in attempt.files and not _is_committed(attempt):
            what = (
                f"{COMMIT} is not that of {MANIFEST}: one of them was changed"
                if MANIFEST in attempt.files
                else f"{MANIFEST} missing"
            )
            found[attempt.step] = (attempt.place, what)
    return dict(sorted(found.items()))


def find_checkpoint(place: Place) -> Place:
    """Return the checkpoint that `place` means: itself, or the newest committed one of a run.

    Raises:
        CheckpointError: neither.
    """
    files = place.files()
    if COMMIT in files and BAD not in files and _manifest_bytes(place) is not None:
        return place
    steps = committed_steps(place)
    if not steps:
        raise CheckpointError(
            f"{place} holds no committed checkpoint ({place / CHECKPOINTS}/step-*/{COMMIT})"
        )
    return steps[max(steps)]


def read_manifest(checkpoint: Place) -> dict[str, Any]:
    """Return the manifest of a committed checkpoint; raises as `toolkit.commit` does."""
    content = _manifest_bytes(checkpoint)
    if content is None:
        raise CheckpointError(f"{checkpoint} is not committed")
    return local.parse_manifest(content, checkpoint / MANIFEST)


def damaged_files(checkpoint: Place, only: Iterable[str]) -> list[tuple[str, str]]:
    """Return (file, what is wrong) for each file of `only` that is not what the manifest says.

    Streams them; 64 MB of memory.
    """
    files, sizes = read_manifest(checkpoint)["files"], checkpoint.files()
    found = []
    for name in only:
        if what := _damage(checkpoint / name, files[name], sizes.get(name)):
            found.append((name, what))
    return found


def files_below(place: Place) -> set[str]:
    """Return the names, relative to `place`, of all objects below it."""
    return set(place.files())


def fetch(
    checkpoint: Place,
    folder: Path,
    wanted: Callable[[str], bool] = lambda name: True,
    *,
    hashed: bool = True,
) -> None:
    """Copy those files of a committed checkpoint whose name is `wanted` into a local folder.

    Args:
        hashed: refuse a file that is not what the manifest says. Without, everything that lies
            there comes as it is, manifest and COMMIT too: a copy to be judged.

    Raises:
        CheckpointError: a file is missing or has other bytes.
    """
    files, sizes = read_manifest(checkpoint)["files"], checkpoint.files()
    names = [n for n in (files if hashed else sizes) if wanted(n)]
    if odd := [n for n in names if not local.is_inside(n)]:
        raise CheckpointError(f"{checkpoint} holds {odd[0]!r}, which is no name of a file")
    with ThreadPoolExecutor(2) as pool:  # each with several requests under way
        jobs = [
            pool.submit(_copy, checkpoint / n, folder / n, sizes.get(n), files[n] if hashed else {})
            for n in names
        ]
        for job in jobs:
            job.result()


def size(checkpoint: Place) -> int:
    """Return the bytes of a checkpoint."""
    return sum(checkpoint.files().values())


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


def begin(run: Place, step: int) -> Place:
    """Return the place of a new attempt to save `step`, after what killed saves and deletions of
    this run left was removed.

    Call it only when no other save of the run is going on.
    """
    attempts = _attempts(run)
    _delete(a for a in attempts if _is_leftover(a))
    number = max((a.number for a in attempts if a.step == step), default=0) + 1
    return run / CHECKPOINTS / f"{step_name(step)}.try-{number:04d}-{os.urandom(4).hex()}"


def put_files(attempt: Place, folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Put the files `names` of a local folder; return name -> {"size", "sha256"}."""

    def put(name: str) -> dict[str, Any]:
        (attempt / name).put_file(folder / name)
        with open(folder / name, "rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
        return {"size": (folder / name).stat().st_size, "sha256": digest}

    names = list(names)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(names, pool.map(put, names), strict=True))


def commit(attempt: Place, step: int, manifest: dict[str, Any]) -> Place:
    """Turn an attempt into the committed checkpoint of `step`; return its place.

    See [Note: COMMIT is the whole protocol].

    Raises:
        CheckpointError: not all files are there with their sizes, or the store refuses.
    """
    text = local.render_manifest(manifest)
    (attempt / MANIFEST).put(text.encode())
    there = attempt.files()
    expected = {n: e["size"] for n, e in manifest["files"].items()}
    expected[MANIFEST] = len(text.encode())
    for name in sorted(there.keys() | expected.keys()):
        if there.get(name) != expected.get(name):
            raise CheckpointError(
                f"checkpoint of step {step} is not committed: {attempt / name} has "
                f"{there.get(name)} bytes in the store's list, expected {expected.get(name)}"
            )
    (attempt / COMMIT).put(local.seal(text.encode()).encode())
    return attempt


def set_aside(checkpoint: Place) -> Place:
    """Mark a checkpoint that failed verification; nothing is deleted. Return the marker."""
    (checkpoint / BAD).put(b"failed verification; kept for a look, never read\n")
    return checkpoint / BAD


def set_aside_steps(run: Place) -> list[str]:
    """Return the names of the checkpoints that failed verification and were marked."""
    return [a.place.name for a in _attempts(run) if BAD in a.files]


def prune(run: Place, keep: int | Retention | None) -> list[Place]:
    """Delete the checkpoints that the policy does not keep, superseded attempts and leftovers;
    return what went.

    As `toolkit.commit.prune`: what does not verify is not deleted and does not count as kept. Sizes
    come from the listing; hashes as far as 16 MB go.
    """
    policy = keep if isinstance(keep, Retention) else Retention(last=keep)
    attempts, budget = _attempts(run), _AFFORDABLE
    counting = _counting(attempts)
    verified: dict[int, dict[str, float]] = {}
    for step in sorted(counting, reverse=True):
        sound, read = _verifies(counting[step], budget)
        budget -= read
        if sound:
            verified[step] = _metrics(counting[step].place)
    gone = [a for a in attempts if _is_leftover(a)]
    for a in attempts:
        newer = counting.get(a.step)
        superseded = newer is not None and a.number < newer.number and _is_committed(a)
        if superseded and a.step in verified:
            gone.append(a)
    gone += [counting[step] for step in sorted(local.expendable(verified, policy))]
    _delete(gone)
    return [a.place for a in gone]


# --------------------------------------------------------------------------------------------------
# Attempts
# --------------------------------------------------------------------------------------------------


def _attempts(run: Place) -> list[_Attempt]:
    """Return all that bears a name of the protocol, oldest step and first attempt first."""
    root = run / CHECKPOINTS
    by_name: dict[str, dict[str, int]] = {}
    for path, nbytes in root.files().items():
        folder, _, name = path.partition("/")
        if name:
            by_name.setdefault(folder, {})[name] = nbytes
    found = []
    for folder, files in by_name.items():
        match = _ATTEMPT.fullmatch(folder)
        # step-000000007 would be a second step 7
        if match is not None and step_name(int(match[1])) == folder.partition(".")[0]:
            found.append(_Attempt(root / folder, int(match[1]), int(match[2] or 0), files))
    return sorted(found, key=lambda a: (a.step, a.number, a.place.name))


def _counting(attempts: list[_Attempt]) -> dict[int, _Attempt]:
    """Return step -> its committed attempt with the highest number."""
    return {a.step: a for a in attempts if _is_committed(a)}


def _is_committed(attempt: _Attempt) -> bool:
    return (
        {COMMIT, MANIFEST} <= attempt.files.keys()
        and BAD not in attempt.files
        and _manifest_bytes(attempt.place) is not None
    )


def _is_leftover(attempt: _Attempt) -> bool:
    return attempt.number > 0 and not {COMMIT, BAD} & attempt.files.keys()


def _manifest_bytes(checkpoint: Place) -> bytes | None:
    """Return the manifest's bytes when COMMIT is its seal, else None."""
    try:
        said, content = (checkpoint / COMMIT).read(), (checkpoint / MANIFEST).read()
    except FileNotFoundError:
        return None
    return content if said == local.seal(content).encode() else None


def _delete(attempts: Iterable[_Attempt]) -> None:
    for attempt in attempts:
        if COMMIT in attempt.files:
            (attempt.place / COMMIT).delete()  # from here on nothing takes it for a checkpoint
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            rest = attempt.files.keys() - {COMMIT}
            list(pool.map(lambda n, place=attempt.place: (place / n).delete(), sorted(rest)))


def _verifies(attempt: _Attempt, budget: int) -> tuple[bool, int]:
    """Return whether an attempt verifies, as far as `budget` goes, and the bytes read."""
    try:
        files = read_manifest(attempt.place)["files"]
    except CheckpointError:
        return False, 0

    def damage(name: str, entry: dict[str, Any], hashed: bool) -> str | None:
        return _damage(attempt.place / name, entry, attempt.files.get(name), hashed=hashed)

    return local.within_budget(files, budget, damage)


def _metrics(checkpoint: Place) -> dict[str, float]:
    state = checkpoint / STATE
    try:
        return local.parse_metrics(state.read_text("utf-8"), state)
    except FileNotFoundError:
        return {}


def _damage(
    file: Place, expected: dict[str, Any], there: int | None, *, hashed: bool = True
) -> str | None:
    if there is None:
        return "is missing"
    if there != expected["size"]:
        return f"is {there} bytes long, expected {expected['size']}"
    if not hashed:
        return None
    digest = hashlib.sha256()
    try:
        for block in file.blocks(0, there):
            digest.update(block)
    except FileNotFoundError:
        return "is missing"
    return None if digest.hexdigest() == expected["sha256"] else "has other bytes than were saved"


def _copy(file: Place, to: Path, there: int | None, expected: dict[str, Any]) -> None:
    """Copy an object of `there` bytes to a local file; refuse one that is not as `expected`."""
    if there is None:
        raise CheckpointError(f"{file} is missing")
    to.parent.mkdir(parents=True, exist_ok=True)
    digest, length = hashlib.sha256(), 0
    with open(to, "wb") as f:
        for block in file.blocks(0, there):
            f.write(block)
            digest.update(block)
            length += len(block)
    if expected and (length, digest.hexdigest()) != (expected["size"], expected["sha256"]):
        raise CheckpointError(f"{file} has other bytes than were saved")
