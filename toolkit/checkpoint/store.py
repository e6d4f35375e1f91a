"""A place on an object store, through fsspec: whole objects put, read in ranges, listed, deleted.

Owns what tells a URL from a path, the way to its driver, and the one error that says what failed.
Knows nothing of what is stored. Credentials come from where the driver finds them (its environment,
its files), never from a URL.
"""

import collections
import contextlib
import os
import re
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError, ToolkitError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://(.*)", re.DOTALL)
_BLOCK = 16 * 2**20  # bytes of one request: long against a round trip
_AHEAD = 4  # requests under way for one object


@dataclass(frozen=True)
class Place:
    """An object, or a prefix of objects; `/`, `name` and `parent` as a path has them."""

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
        with _said(f"{self} cannot be listed"):
            self.fs.invalidate_cache()
            found = self.fs.find(self.path, detail=True)
            inside = self.path.rstrip("/") + "/"
            return {
                path.removeprefix(inside): info["size"]
                for path, info in sorted(found.items())
                if path.startswith(inside)
            }

    def read(self, begin: int | None = None, end: int | None = None) -> bytes:
        """Return the object's bytes, or a range of them, in one request.

        Raises:
            FileNotFoundError: there is no such object.
        """
        with _said(f"{self} cannot be read"):
            return self.fs.cat_file(self.path, start=begin, end=end)

    def read_text(self, encoding: str) -> str:
        """Return the whole object as text."""
        return self.read().decode(encoding)

    def blocks(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield a range in blocks, in order, some of them under way: 64 MB of memory.

        It ends early where the object does.
        """
        with ThreadPoolExecutor(_AHEAD) as pool:
            waiting: collections.deque[Any] = collections.deque()
            for at in range(begin, end, _BLOCK):
                if len(waiting) == _AHEAD:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(self.read, at, min(end, at + _BLOCK)))
            while waiting:
                yield waiting.popleft().result()

    def put(self, content: bytes) -> None:
        """Make, or replace, the object: whole, or not at all where the store keeps to that."""
        with _said(f"{self} cannot be written", missing=True):
            self.fs.pipe_file(self.path, content)

    def put_file(self, file: Path) -> None:
        """Put the content of a local file."""
        with Upload(self) as upload, open(file, "rb") as f:
            while block := f.read(_BLOCK):
                upload.write(block)

    def delete(self) -> None:
        """Delete the object; none there is fine."""
        with contextlib.suppress(FileNotFoundError), _said(f"{self} cannot be deleted"):
            self.fs.rm_file(self.path)


class Upload:
    """An object that is written piece by piece and is there when it is closed."""

    def __init__(self, place: Place) -> None:
        self.place = place
        with _said(f"{place} cannot be written", missing=True):
            self._file = place.fs.open(place.path, "wb")

    def __enter__(self) -> "Upload":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def write(self, content: Any) -> None:
        """Append; `content` may change afterwards."""
        with _said(f"{self.place} cannot be written", missing=True):
            self._file.write(content)

    def close(self) -> None:
        """Make the object appear."""
        with _said(f"{self.place} cannot be written", missing=True):
            self._file.close()

    def abort(self) -> None:
        """Give up, as far as the driver can; whatever it leaves is part of no checkpoint."""
        # The failure under way is the one to tell.
        with contextlib.suppress(Exception):
            getattr(self._file, "discard", self._file.close)()


def is_url(path: object) -> bool:
    """Whether `path` names a place on an object store; `file://` is a path."""
    if isinstance(path, Place):
        return True
    match = _URL.match(path) if isinstance(path, str) else None
    return match is not None and match[1].lower() not in ("file", "local")


def where(path: str | Path | Place) -> Path | Place:
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
    # Here: a run on a disk needs no store.
    import fsspec

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


def probe(place: Place) -> None:
    """Put a small object there, read it back, delete it: what a run will need, before it begins.

    Raises:
        CheckpointError: one of it fails.
    """
    # A name of its own, listed alone: every rank of a large run does this, beside its checkpoints.
    folder = place / f"probe-{os.urandom(8).hex()}"
    advice = "check the URL, the network and the credentials, or give another checkpoint.root"
    try:
        (folder / "object").put(b"probe")
        came, listed = (folder / "object").read(), folder.files()
        (folder / "object").delete()
        if came != b"probe" or listed != {"object": 5}:
            raise CheckpointError(f"5 bytes were put there; {came!r} are read, {listed} is listed")
    except (CheckpointError, FileNotFoundError) as error:
        raise CheckpointError(f"checkpoints cannot go to {place}: {error}; {advice}") from error


@contextlib.contextmanager
def _said(what: str, missing: bool = False) -> Iterator[None]:
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
