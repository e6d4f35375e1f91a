"""Files that a kill leaves whole, the old one or the new one; with fsync a loss of power, too."""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

_BEHIND = 16 * 2**20  # bytes
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP}


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


def write_behind(descriptor: int, given: int, end: int) -> int:
    """Have the kernel begin to write a file to the disk, some MB at a time: fsync then waits for
    the rest only. The bytes up to `given` are on their way; return up to where they are now.

    The page cache may let go of them: what reads them soon should have read them before.
    """
    if end - given < _BEHIND or not hasattr(os, "posix_fadvise"):
        return given
    os.posix_fadvise(descriptor, given, end - given, os.POSIX_FADV_DONTNEED)
    return end


def sync_above(folder: Path) -> None:
    """Fsync `folder` and what it lies in, up to the root of its file system: without a synced entry
    there it is lost with everything in it.
    """
    device = os.stat(folder).st_dev
    for path in (folder.resolve(), *folder.resolve().parents):
        if os.stat(path).st_dev != device or not os.access(path, os.R_OK):
            return  # not ours to have made
        sync(path)


def write_synced(file: Path, content: str | bytes) -> None:
    """Write a file and fsync it."""
    with open(file, "wb") as f:
        f.write(content.encode() if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())


def replace_synced(file: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, over the one that was there; make its folder. For files
    with one writer; what a kill leaves of it is overwritten by the next.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.tmp")
    write_synced(temporary, content)
    os.replace(temporary, file)
    sync(file.parent)


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Give a file to write, which takes the place of `file` once it is whole; make its folder. For
    files that can be made again, by any number of processes: nothing is fsynced.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".tmp-{uuid.uuid4().hex}")
    try:
        yield scratch
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)
