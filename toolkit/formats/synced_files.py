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
    """Fsync a file or a folder. Some file systems refuse this for folders, which is no error."""
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
    """Start to write a file's new bytes to disk in the background, so that a later fsync is short.

    Does nothing below 16 MB of new bytes. The page cache may drop the written bytes. If they are
    needed again, read them before this call.

    Args:
        descriptor: file descriptor of the file.
        begin: offset of the first byte that is not yet being written.
        end: number of bytes in the file.

    Returns:
        The `begin` for the next call.
    """
    if end - begin < _MIN_WRITE_BEHIND or not hasattr(os, "posix_fadvise"):
        return begin
    os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
    return end


def fsync_with_parents(folder: Path) -> None:
    """Fsync a folder and its readable parents on the same file system.

    If the power fails, a new folder may be lost with its content unless its parent was synced.
    """
    device = os.stat(folder).st_dev
    for path in (folder.resolve(), *folder.resolve().parents):
        if os.stat(path).st_dev != device or not os.access(path, os.R_OK):
            return  # this process cannot have created it
        fsync_path(path)


def write_synced(file: Path, content: str | bytes) -> None:
    """Write a file and fsync it, but not its folder. The write is not atomic."""
    with open(file, "wb") as f:
        f.write(content.encode() if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())


def replace_synced(file: Path, content: str | bytes) -> None:
    """Write a file atomically, and fsync it and its folder; create the folder if it is missing.

    Only one process may write the file at a time, because the name of the temporary file is fixed.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.tmp")
    write_synced(temporary, content)
    os.replace(temporary, file)
    fsync_path(file.parent)


@contextlib.contextmanager
def replace_on_exit(file: Path) -> Iterator[Path]:
    """Yield a temporary path, as a context manager; on success, it replaces `file` atomically.

    If the context raises an error, the temporary file is deleted and `file` is unchanged. Creates
    the folder. Many processes may write the same file. Nothing is fsynced, so use it for files that
    can be created again.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".tmp-{uuid.uuid4().hex}")
    try:
        yield scratch
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)
