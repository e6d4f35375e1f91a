"""Storage of checkpoints: a folder of a disk, or an object store (fsspec)."""

import contextlib
import errno
import os
import re
import stat
import urllib.parse
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from toolkit.errors import CheckpointError, StorageError, ToolkitError, one_line
from toolkit.parsing import MAX_JSON_BYTES, parse_json

BLOCK = 16 * 2**20  # bytes of one request: long against a round trip
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_FILE_URL = re.compile(r"^(file|local)://", re.IGNORECASE)
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DISK_FAILS = {errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO}


@dataclass(frozen=True)
class RemotePath:
    """An object on a store, or a prefix of objects; named and read as a `Path` is."""

    url: str
    path: str  # as the driver names it
    fs: Any = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}", f"{self.path}/{name}", self.fs)

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.url.rpartition("/")[0], self.path.rpartition("/")[0], self.fs)

    def files(self) -> dict[str, int]:
        """Return name below this place -> size of every object; one listing, never a cached one."""
        with _driver_errors(f"{self} cannot be listed"):
            self.fs.invalidate_cache()
            inside = self.path.rstrip("/") + "/"
            return {
                path.removeprefix(inside): info["size"]
                for path, info in sorted(self.fs.find(self.path, detail=True).items())
                if path.startswith(inside)
            }

    def read_bytes(self) -> bytes:
        """Return the whole object; FileNotFoundError where there is none."""
        with _driver_errors(f"{self} cannot be read", passed=FileNotFoundError):
            return self.fs.cat_file(self.path)

    def write_bytes(self, content: bytes) -> None:
        """Make, or replace, the object: whole, or not at all where the store keeps to that."""
        with _driver_errors(f"{self} cannot be written"):
            self.fs.pipe_file(self.path, content)

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[IO[bytes]]:
        """Give the object as a stream; one that is written appears when the context ends well."""
        reads = mode == "rb"
        what = f"{self} cannot be {'read' if reads else 'written'}"
        with _driver_errors(what, passed=FileNotFoundError if reads else ToolkitError):
            file = self.fs.open(self.path, mode, block_size=BLOCK)
            try:
                yield file
            except BaseException:
                # As far as the driver can; whatever it leaves is part of no checkpoint.
                with contextlib.suppress(Exception):
                    getattr(file, "discard", file.close)()
                raise
            file.close()

    def unlink(self) -> None:
        """Delete the object; none there is fine."""
        with (
            contextlib.suppress(FileNotFoundError),
            _driver_errors(f"{self} cannot be deleted", passed=FileNotFoundError),
        ):
            self.fs.rm_file(self.path)


Folder = Path | RemotePath  # where checkpoints are


def is_url(path: object) -> bool:
    """Whether `path` names a place on an object store; `file://` is a path."""
    if isinstance(path, str):
        return bool(_URL.match(path)) and not _FILE_URL.match(path)
    return isinstance(path, RemotePath)


def where(path: str | Folder) -> Folder:
    """Return the folder, or the place on a store, that `path` names. Asks no store anything.

    CheckpointError for a URL with credentials in it, or of a driver that is not installed.
    """
    if isinstance(path, RemotePath):
        return path
    if not is_url(path):
        return Path(path if isinstance(path, Path) else _FILE_URL.sub("", path, count=1))
    url = str(path).rstrip("/")
    parts = urllib.parse.urlsplit(url)
    if "@" in parts.netloc or parts.query or "::" in url:
        raise CheckpointError(
            f"{parts.scheme}://... holds credentials, options or a chain of file systems; give the "
            "store's own URL, such as s3://bucket/run, and leave those to its driver"
        )
    import fsspec  # here: a run on a disk needs no store

    try:
        fs, stripped = fsspec.url_to_fs(url)
    except Exception as error:  # drivers have no common class
        raise CheckpointError(
            f"{url} cannot be opened, each machine of the run needs the driver of the store: "
            f"{one_line(error)}"
        ) from error
    return RemotePath(url, str(stripped).rstrip("/"), fs)


def files_below(folder: Folder, only: Collection[str] | None = None) -> dict[str, int]:
    """Return relative name -> size of all files below `folder`, or of those in `only` that are
    there; -1 of what is none, or a link.
    """
    if isinstance(folder, RemotePath):
        return folder.files()
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


def bytes_below(folder: Folder) -> int:
    """Return the bytes of all files below `folder`, without what links lead to."""
    return sum(size for size in files_below(folder).values() if size > 0)


def read_plain(file: Folder) -> bytes:
    """Return the bytes of a file of bounded size; OSError where it is none, or a link to one."""
    if isinstance(file, Path):
        entry = os.lstat(file)
        if not stat.S_ISREG(entry.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(file))
        if entry.st_size > MAX_JSON_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
    return file.read_bytes()


def read_object(file: Folder) -> dict[str, Any] | None:
    """Return the JSON object that a file holds, None where there is no file."""
    try:
        content = parse_json(read_plain(file), file, CheckpointError)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, expected an object")
    return content


def probe(place: RemotePath) -> None:
    """Put a small object there, read it back, delete it; CheckpointError where that fails."""
    # A name of its own, listed alone: every rank of a large run does this, beside its checkpoints.
    folder = place / f"probe-{os.urandom(8).hex()}"
    try:
        (folder / "object").write_bytes(b"probe")
        found = (folder / "object").read_bytes(), folder.files()
        (folder / "object").unlink()
        if found != (b"probe", {"object": 5}):
            raise CheckpointError(f"5 bytes were put there, read and listed are {found}")
    except (CheckpointError, FileNotFoundError) as error:
        raise CheckpointError(
            f"checkpoints cannot go to {place}: {error}; check the URL, the network and the "
            "credentials, or give another checkpoint.root"
        ) from error


@contextlib.contextmanager
def _driver_errors(what: str, passed: type[Exception] = ToolkitError) -> Iterator[None]:
    """Raise what a driver raises, but for `passed`, as the one error."""
    try:
        yield
    except (ToolkitError, passed):
        raise
    except Exception as error:  # drivers have no common class
        raise StorageError(f"{what}: {one_line(error)}") from error


def is_refusal(error: BaseException | None) -> bool:
    """Whether a disk that is full or broken raised `error`."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL | _DISK_FAILS


def disk_error(what: str, error: BaseException) -> CheckpointError:
    """Return the error that says `what` failed, and the disk's own cause; a `StorageError` where
    the disk is full or broken.
    """
    # torch reports a full disk as "unexpected pos 704 vs 598" and keeps the cause as its context.
    cause: Any = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno is not None):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return CheckpointError(f"{what}: {error}")
    place = f" ({cause.filename})" if cause.filename else ""
    advice = ""
    if cause.errno in _DISK_FULL:
        advice = (
            "; free some space, lower checkpoint.save_total_limit or give another output_dir. The "
            "checkpoints before it are as they were"
        )
    kind = StorageError if is_refusal(cause) else CheckpointError
    return kind(f"{what}: {cause.strerror or cause}{place}{advice}")


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise the disk's errors as ours: `ranks` tells those to ranks that did not fail."""
    try:
        yield
    except OSError as error:
        raise disk_error(what, error) from error
