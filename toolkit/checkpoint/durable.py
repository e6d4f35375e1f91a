"""Files that outlast a power loss, and the error of a disk that refuses.

Owns fsync of files and folders. Knows nothing of checkpoints.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from toolkit.errors import CheckpointError

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


def write_synced(file: Path, text: str) -> None:
    """Write a file and fsync it."""
    with open(file, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def replace_synced(file: Path, text: str) -> None:
    """Write a file whole or not at all, over the one that was there; make its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.tmp")
    write_synced(temporary, text)
    os.replace(temporary, file)
    sync(file.parent)


def disk_error(what: str, error: BaseException) -> CheckpointError:
    """Return the error that says `what` failed and names the disk's own cause.

    torch reports a full disk as "unexpected pos 704 vs 598" and keeps the cause only as the context
    of that exception.
    """
    cause = _first_os_error(error)
    if cause is None:
        return CheckpointError(f"{what}: {error}")
    place = f" ({cause.filename})" if cause.filename else ""
    advice = ""
    if cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = (
            "; free some space, lower checkpoint.save_total_limit or give another output_dir, and "
            "start again. The checkpoints before it are as they were"
        )
    return CheckpointError(f"{what}: {cause.strerror or cause}{place}{advice}")


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise the disk's errors as ours: `ranks` tells those to ranks that did not fail."""
    try:
        yield
    except OSError as error:
        raise disk_error(what, error) from error


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
