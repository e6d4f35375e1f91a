"""Checkpoints in a local folder: attempts are renamed, with an fsync between two steps."""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from toolkit.checkpoint.names import COMMIT, MANIFEST, Attempt, step_name
from toolkit.errors import CheckpointError, ConfigError, StorageError
from toolkit.formats.synced_files import (
    fsync_path,
    fsync_with_parents,
    replace_synced,
    write_synced,
)
from toolkit.parsing import MAX_JSON_BYTES

_PREPARED = "COMMIT.prepared"
_ATTEMPT = re.compile(r"step-([0-9]{8,})(?:\.(tmp|old|bad|trash)-[0-9a-f]{8})?")
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DISK_FAILS = {errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO}


@dataclass(frozen=True)
class LocalFolder:
    """The `Storage` on a disk; the suffix of a checkpoint folder's name is its state."""

    path: Path
    is_disk: ClassVar[bool] = True

    def files(self, only: Collection[str] | None = None) -> dict[str, int]:
        """Map the relative names of all files below this folder to their sizes in bytes.

        The size of a link or special file is -1. With `only`, look only for these names; files that
        are missing or below a link are skipped.
        """
        folder = self.path
        if only is None:
            entries = {str(p.relative_to(folder)): p.lstat() for p in folder.rglob("*")}
        else:
            above = {parent for name in only for parent in Path(name).parents}
            links = {parent for parent in above - {Path()} if (folder / parent).is_symlink()}
            inside = (n for n in only if links.isdisjoint(Path(n).parents))
            entries = {n: (folder / n).lstat() for n in inside if os.path.lexists(folder / n)}
        return {
            name: entry.st_size if stat.S_ISREG(entry.st_mode) else -1
            for name, entry in entries.items()
            if not stat.S_ISDIR(entry.st_mode)
        }

    def read_small_file(self) -> bytes:
        """Read this file; raise an OSError if it is no regular file or exceeds `MAX_JSON_BYTES`."""
        entry = os.lstat(self.path)
        if not stat.S_ISREG(entry.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(self.path))
        if entry.st_size > MAX_JSON_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self.path))
        return self.path.read_bytes()

    @contextlib.contextmanager
    def local_file(self) -> Iterator[Path]:
        """Yield the path of this file, as a context manager; it is local, so nothing is copied."""
        yield self.path

    def replace(self, content: str | bytes) -> None:
        """Write this file atomically over an existing one, and fsync it; create its folder."""
        replace_synced(self.path, content)

    def put(self, source: Path) -> None:
        """Fsync `source`. It must be this file, because files on a disk are written in place."""
        fsync_path(source)

    def check_usable(self, setting: str) -> None:
        """Raise a ConfigError if this folder cannot be created, or the user may not write to it.

        Nothing is written. `setting` is the name of the setting for this folder, for the error.
        """
        absolute = self.path.absolute()
        above = next(p for p in (absolute, *absolute.parents) if os.path.lexists(p))
        if not above.is_dir():
            raise ConfigError(
                f"{setting} {self.path} cannot be made: {above} is not a folder; give another"
            )
        if not os.access(above, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{setting} {self.path} cannot be made: {above} cannot be written to; give another"
            )

    def free_bytes(self) -> int:
        """Return the free bytes of the file system of this folder, which need not exist yet."""
        return shutil.disk_usage(nearest_existing_folder(self.path)).free

    def attempts(self) -> Iterator[Attempt]:
        """Yield the checkpoint folders in this folder; their names give step and kind.

        A folder `step-N` counts as `tmp` if its save was killed just before the commit.
        """
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if match := _ATTEMPT.fullmatch(path.name):
                kind = match[2] or ("tmp" if _is_unfinished(path) else "saved")
                yield Attempt(path, int(match[1]), kind, 0 if kind == "old" else 1)

    def new_attempt(self, step: int, number: int) -> Path:
        """Create an empty folder `step-N.tmp-*` in this folder; `number` has no effect."""
        self.path.mkdir(parents=True, exist_ok=True)
        fsync_with_parents(self.path)
        folder = new_attempt_name(self.path / step_name(step), "tmp")
        folder.mkdir()
        return folder

    def scratch_folder(self) -> Path:
        """Return this folder, because on a disk files are written in place."""
        return self.path

    def committed_path(self, step: int) -> Path:
        """Return the path that `commit` renames this folder to: `step-N` next to it."""
        return self.path.with_name(step_name(step))

    def commit(self, step: int, manifest: str, seal: str, verifies: Callable[[Path], bool]) -> Path:
        """Write the manifest, rename this folder to `step-N`, and create COMMIT.

        Each change is fsynced. A checkpoint that has the name `step-N` is renamed first (see
        `move_existing_checkpoint`). If a rename fails, the renames are undone and the OSError is
        raised. For the arguments see `Storage.commit`.

        Returns:
            The new path.
        """
        folder, target = self.path, self.committed_path(step)
        (folder / COMMIT).unlink(missing_ok=True)  # in a copy of a committed folder
        write_synced(folder / MANIFEST, manifest)
        write_synced(folder / _PREPARED, seal)
        for below, _, _ in os.walk(folder):
            fsync_path(Path(below))
        aside = move_existing_checkpoint(target, verifies)
        try:
            os.rename(folder, target)
            fsync_path(target.parent)
            os.rename(target / _PREPARED, target / COMMIT)
        except OSError:
            _undo_renames(folder, target, aside)
            raise
        fsync_path(target)
        return target

    def quarantine(self) -> Path:
        """Rename this damaged checkpoint to `step-N.bad-*`, so that it is never read.

        Returns:
            The new path.

        Raises:
            CheckpointError: it cannot be renamed.
        """
        bad = new_attempt_name(self.path, "bad")
        with raise_disk_errors(f"{self.path} cannot be quarantined"):
            os.rename(self.path, bad)
            fsync_path(bad.parent)
        return bad

    def delete(self) -> None:
        """Rename this folder to `step-N.trash-*`, delete COMMIT, then everything else."""
        folder = self.path
        if not re.search(r"\.(tmp|trash)-", folder.name):
            folder = new_attempt_name(folder, "trash")
            os.rename(self.path, folder)
            fsync_path(folder.parent)
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink()
            return
        if os.path.lexists(folder / COMMIT):
            (folder / COMMIT).unlink()
            fsync_path(folder)
        shutil.rmtree(folder)


def nearest_existing_folder(folder: Path) -> Path:
    """Return `folder` as an absolute path if it exists, otherwise its nearest existing parent."""
    folder = folder.absolute()
    return folder if folder.is_dir() else nearest_existing_folder(folder.parent)


def new_attempt_name(folder: Path, kind: str) -> Path:
    """Return the path `step-N.KIND-*` next to `folder`, with random digits at the end.

    An earlier `.KIND-*` suffix of `folder` is replaced. Nothing is renamed.
    """
    return folder.with_name(f"{folder.name.partition('.')[0]}.{kind}-{os.urandom(4).hex()}")


def move_existing_checkpoint(target: Path, verifies: Callable[[Path], bool]) -> Path | None:
    """Rename the folder `target`, if it exists, so that a new checkpoint can take its name.

    The new suffix is `.old-*` for an intact checkpoint, `.bad-*` for a damaged one and `.trash-*`
    for an unfinished save. If it becomes `.old-*`, earlier `.old-*` folders of the step become
    `.trash-*`.

    Args:
        target: the final path of the new checkpoint.
        verifies: returns True if a checkpoint is intact.

    Returns:
        The `.old-*` path of an intact checkpoint; None if there was none.
    """
    if not os.path.lexists(target):
        return None
    aside = None
    if _is_unfinished(target):
        os.rename(target, new_attempt_name(target, "trash"))
    elif verifies(target):
        for a in list(LocalFolder(target.parent).attempts()):
            if a.kind == "old" and a.folder.stem == target.name:  # superseded by this one
                os.rename(a.folder, new_attempt_name(target, "trash"))
                fsync_path(target.parent)
        aside = new_attempt_name(target, "old")
        os.rename(target, aside)
    else:
        os.rename(target, new_attempt_name(target, "bad"))
    fsync_path(target.parent)
    return aside


def _undo_renames(folder: Path, target: Path, aside: Path | None) -> None:
    """Undo the renames of a failed `commit`; ignore errors of the disk.

    Args:
        folder: the folder that was to be committed.
        target: its final path.
        aside: the new path of the checkpoint that had this name; None if there was none.
    """
    # If that fails, nothing is lost: `target` has no COMMIT, so `aside` is the valid checkpoint.
    with contextlib.suppress(OSError):
        if not os.path.lexists(folder):
            os.rename(target, folder)
            fsync_path(target.parent)
        if aside is not None:
            os.rename(aside, target)
            fsync_path(target.parent)


def _is_unfinished(path: Path) -> bool:
    """Return True if a save was killed after the rename to `step-N` and before COMMIT existed.

    Such a folder has COMMIT.prepared and no COMMIT.
    """
    return os.path.lexists(path / _PREPARED) and not os.path.lexists(path / COMMIT)


# ---- Errors of a disk


def is_disk_failure(error: BaseException | None) -> bool:
    """Return True if `error` is an OSError of a full, read-only or failing disk."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL | _DISK_FAILS


def disk_error(failure: str, error: BaseException) -> CheckpointError:
    """Build a CheckpointError from `failure`, the OSError behind `error`, and advice.

    It is a `StorageError` if the disk is full or broken. The OSError may be a cause of `error`.
    """
    # torch reports a full disk as "unexpected pos 704 vs 598" and keeps the cause as its context.
    cause: Any = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno is not None):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return CheckpointError(f"{failure}: {error}")
    place = f" ({cause.filename})" if cause.filename else ""
    advice = ""
    if cause.errno in _DISK_FULL:
        advice = (
            "; free some space, lower checkpoint.save_total_limit or give another output_dir. The "
            "checkpoints before it are as they were"
        )
    kind = StorageError if is_disk_failure(cause) else CheckpointError
    return kind(f"{failure}: {cause.strerror or cause}{place}{advice}")


@contextlib.contextmanager
def raise_disk_errors(failure: str) -> Iterator[None]:
    """Convert an OSError in the context to a CheckpointError that begins with `failure`.

    It is a `StorageError` if the disk is full or broken; see `disk_error`.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(failure, error) from error
