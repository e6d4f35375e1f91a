"""Replace files atomically, so that a kill leaves the old or the new one; also with fsync."""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

_MIN_WRITE_BEHIND = 16 * 2**20  # bytes
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP}


def fsync_path(path: Path) -> None:
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


def write_behind(descriptor: int, begin: int, end: int) -> int:
    """Let the kernel start to write a file to the disk, so that fsync waits for the last MB only.

    The page cache may drop the written bytes, so read them before if they are needed soon.

    Args:
        descriptor: of the file.
        begin: bytes up to here were started before.
        end: bytes up to here are in the file.

    Returns:
        The new `begin`.
    """
    if end - begin < _MIN_WRITE_BEHIND or not hasattr(os, "posix_fadvise"):
        return begin
    os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
    return end


def fsync_with_parents(folder: Path) -> None:
    """Fsync a folder and its parents, up to the root of its file system.

    Without a synced entry in its parent, a folder is lost with its content when the power fails.
    """
    device = os.stat(folder).st_dev
    for path in (folder.resolve(), *folder.resolve().parents):
        if os.stat(path).st_dev != device or not os.access(path, os.R_OK):
            return  # this process cannot have created it
        fsync_path(path)


def write_synced(file: Path, content: str | bytes) -> None:
    """Write a file and fsync it."""
    with open(file, "wb") as f:
        f.write(content.encode() if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())


def replace_synced(file: Path, content: str | bytes) -> None:
    """Replace a file atomically and durably; create its folder if it is missing.

    For files with one writer: the next write overwrites what a kill leaves.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.tmp")
    write_synced(temporary, content)
    os.replace(temporary, file)
    fsync_path(file.parent)


@contextlib.contextmanager
def replace_on_exit(file: Path) -> Iterator[Path]:
    """Yield a scratch file to write, which replaces `file` at the end; create its folder.

    For files that can be made again, by any number of processes: nothing is fsynced.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".tmp-{uuid.uuid4().hex}")
    try:
        yield scratch
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)
