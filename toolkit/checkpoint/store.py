"""Where files are: a folder of a disk, or a place on an object store, through fsspec.

Owns what tells a URL from a path, the way to a store's driver, and the one error that says what
failed. Knows nothing of what is stored. Credentials come from where the driver finds them (its
environment, its files), never from a URL.
"""

import contextlib
import os
import re
import stat
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from toolkit.errors import CheckpointError, ToolkitError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://(.*)", re.DOTALL)
BLOCK = 16 * 2**20  # bytes of one request: long against a round trip


@dataclass(frozen=True)
class Place:
    """An object on a store, or a prefix of objects; named and read as a `Path` is."""

    url: str
    path: str
    """As the driver names it."""
    fs: Any = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "Place":
        return Place(f"{self.url}/{name}", f"{self.path}/{name}", self.fs)

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "Place":
        """What it lies in."""
        return Place(self.url.rpartition("/")[0], self.path.rpartition("/")[0], self.fs)

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
        """Return the whole object.

        Raises:
            FileNotFoundError: there is no such object.
        """
        with _driver_errors(f"{self} cannot be read"):
            return self.fs.cat_file(self.path)

    def write_bytes(self, content: bytes) -> None:
        """Make, or replace, the object: whole, or not at all where the store keeps to that."""
        with _driver_errors(f"{self} cannot be written", missing=True):
            self.fs.pipe_file(self.path, content)

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[IO[bytes]]:
        """Give the object as a stream; one that is written appears when the context ends well."""
        what = f"{self} cannot be {'read' if mode == 'rb' else 'written'}"
        with _driver_errors(what, missing=mode != "rb"):
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
        with contextlib.suppress(FileNotFoundError), _driver_errors(f"{self} cannot be deleted"):
            self.fs.rm_file(self.path)


Folder = Path | Place
"""Where checkpoints are."""


def is_url(path: object) -> bool:
    """Whether `path` names a place on an object store; `file://` is a path."""
    if isinstance(path, Place):
        return True
    match = _URL.match(path) if isinstance(path, str) else None
    return match is not None and match[1].lower() not in ("file", "local")


def where(path: str | Folder) -> Folder:
    """Return the folder, or the place on a store, that `path` names. Asks no store anything.

    Raises:
        CheckpointError: a URL with credentials in it, or of a driver that is not installed.
    """
    if isinstance(path, Place):
        return path
    if not is_url(path):
        match = _URL.match(str(path))
        return Path(match[2]) if match and isinstance(path, str) else Path(path)
    url = str(path).rstrip("/")
    if "::" in url:
        raise CheckpointError(
            f"{url} is a chain of file systems; give the store's own URL, such as s3://bucket/run"
        )
    parts = urllib.parse.urlsplit(url)
    if "@" in parts.netloc or parts.query:
        raise CheckpointError(
            f"{parts.scheme}://... holds credentials or options; leave those to the store's own "
            "configuration (its environment variables, its file in the home folder)"
        )
    import fsspec  # here: a run on a disk needs no store

    try:
        fs, stripped = fsspec.url_to_fs(url)
    except ImportError as error:
        raise CheckpointError(
            f"{url} needs a driver that is not installed: {error} (with pip, on every machine of "
            "the run)"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{url} is of no store that fsspec knows: {error}") from error
    except Exception as error:  # a driver that cannot be set up: each has its own classes
        raise CheckpointError(f"{url} cannot be opened: {_cause(error)}") from error
    return Place(url, str(stripped).rstrip("/"), fs)


def files_below(folder: Folder) -> dict[str, int]:
    """Return name relative to `folder` -> size of all files below it; -1 of what is no file, such
    as a link.
    """
    if isinstance(folder, Place):
        return folder.files()
    found = {}
    for path in folder.rglob("*"):
        entry = path.lstat()
        if not stat.S_ISDIR(entry.st_mode):
            size = entry.st_size if stat.S_ISREG(entry.st_mode) else -1
            found[str(path.relative_to(folder))] = size
    return found


def probe(place: Place) -> None:
    """Put a small object there, read it back, delete it: what a run will need, before it begins.

    Raises:
        CheckpointError: one of it fails.
    """
    # A name of its own, listed alone: every rank of a large run does this, beside its checkpoints.
    folder = place / f"probe-{os.urandom(8).hex()}"
    advice = "check the URL, the network and the credentials, or give another checkpoint.root"
    try:
        (folder / "object").write_bytes(b"probe")
        content, listed = (folder / "object").read_bytes(), folder.files()
        (folder / "object").unlink()
        if content != b"probe" or listed != {"object": 5}:
            raise CheckpointError(
                f"5 bytes were put there; {content!r} are read, {listed} is listed"
            )
    except (CheckpointError, FileNotFoundError) as error:
        raise CheckpointError(f"checkpoints cannot go to {place}: {error}; {advice}") from error


@contextlib.contextmanager
def _driver_errors(what: str, missing: bool = False) -> Iterator[None]:
    """Turn whatever a driver raises into the one error; a missing object stays what it is, unless
    `missing` is an error as any other: a bucket that is not there.
    """
    try:
        yield
    except ToolkitError:
        raise
    except Exception as error:  # drivers have no common class
        if isinstance(error, FileNotFoundError) and not missing:
            raise
        raise CheckpointError(f"{what}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
