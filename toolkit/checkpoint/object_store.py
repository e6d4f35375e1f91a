"""The `Storage` of an object store, by fsspec: what has been put is never put again."""

import contextlib
import os
import re
import shutil
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

from toolkit.checkpoint.names import BAD, COMMIT, MANIFEST, Attempt, step_name
from toolkit.errors import CheckpointError, StorageError, ToolkitError, one_line
from toolkit.formats import is_inner_path

_BLOCK = 16 * 2**20  # bytes of one request: long against a round trip
_ATTEMPT = re.compile(r"step-([0-9]{8,})(?:\.try-([0-9]{4,})-[0-9a-f]{8})?")
_DELETED_AT_ONCE = 8


@dataclass(frozen=True)
class RemotePath:
    """A path on an object store, with methods of `pathlib.Path` and of `Storage`.

    It is the key of an object, or a prefix that acts as a folder. Failed requests raise a
    StorageError.
    """

    url: str
    path: str  # as the driver names it
    fs: Any = field(compare=False, repr=False)
    is_disk: ClassVar[bool] = False

    # ---- As a `Path`

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: object) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}", f"{self.path}/{name}", self.fs)

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The path without its last part."""
        return RemotePath(self.url.rpartition("/")[0], self.path.rpartition("/")[0], self.fs)

    def resolve(self) -> "RemotePath":
        """Return this path, because a URL is absolute."""
        return self

    def is_symlink(self) -> bool:
        """Return False, because a store has no links."""
        return False

    def read_bytes(self) -> bytes:
        """Read the entire object; raise a FileNotFoundError if it does not exist."""
        with _driver_errors(f"{self} cannot be read", passed=FileNotFoundError):
            return self.fs.cat_file(self.path)

    def write_bytes(self, content: bytes) -> None:
        """Create or replace the object; this is atomic if the store guarantees that."""
        with _driver_errors(f"{self} cannot be written"):
            self.fs.pipe_file(self.path, content)

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[IO[bytes]]:
        """Open the object as a stream, as a context manager; `mode` is `rb` or `wb`.

        A written object appears when the context ends without an error. After an error it is
        discarded, if the driver can do that. A missing object raises a FileNotFoundError.
        """
        reads = mode == "rb"
        failure = f"{self} cannot be {'read' if reads else 'written'}"
        with _driver_errors(failure, passed=FileNotFoundError if reads else ToolkitError):
            file = self.fs.open(self.path, mode, block_size=_BLOCK)
            try:
                yield file
            except BaseException:
                # Not every driver can discard it, but what remains is part of no checkpoint.
                with contextlib.suppress(Exception):
                    getattr(file, "discard", file.close)()
                raise
            file.close()

    def unlink(self) -> None:
        """Delete the object if it exists."""
        with (
            contextlib.suppress(FileNotFoundError),
            _driver_errors(f"{self} cannot be deleted", passed=FileNotFoundError),
        ):
            self.fs.rm_file(self.path)

    # ---- As a `Storage`

    def files(self, only: Collection[str] | None = None) -> dict[str, int]:
        """Map the relative names of the objects below this prefix to their sizes in bytes.

        With `only`, keep only these names; missing objects are skipped.
        """
        inside = self.path.rstrip("/") + "/"
        with _driver_errors(f"{self} cannot be listed"):
            self.fs.invalidate_cache()
            entries = sorted(self.fs.find(self.path, detail=True).items())
        sizes = {p.removeprefix(inside): e["size"] for p, e in entries if p.startswith(inside)}
        return sizes if only is None else {n: sizes[n] for n in only if n in sizes}

    read_small_file = read_bytes

    @contextlib.contextmanager
    def local_file(self) -> Iterator[Path]:
        """Yield the path of a temporary local copy of this small object."""
        with tempfile.TemporaryDirectory(prefix="toolkit-") as scratch:
            copy = Path(scratch, self.name)
            copy.write_bytes(self.read_bytes())
            yield copy

    def replace(self, content: str | bytes) -> None:
        """Create or replace the object; a `str` is encoded as UTF-8."""
        self.write_bytes(content.encode() if isinstance(content, str) else content)

    def put(self, source: Path) -> None:
        """Upload a local file as this object."""
        with self.open("wb") as target, open(source, "rb") as content:
            shutil.copyfileobj(content, target, _BLOCK)

    def check_usable(self, setting: str) -> None:
        """Write, read, list and delete a small object; raise a CheckpointError if that fails.

        `setting` is the name of the setting for this URL, for the error.
        """
        # Each rank of a large run does this next to the checkpoints, so each uses a unique prefix.
        folder = self / f"probe-{os.urandom(8).hex()}"
        try:
            (folder / "object").write_bytes(b"probe")
            probe = (folder / "object").read_bytes(), folder.files()
            (folder / "object").unlink()
            if probe != (b"probe", {"object": 5}):
                raise CheckpointError(f"5 bytes were put there, read and listed are {probe}")
        except (CheckpointError, FileNotFoundError) as error:
            raise CheckpointError(
                f"checkpoints cannot go to {self}: {error}; check the URL, the network and the "
                f"credentials, or give another {setting}"
            ) from error

    def free_bytes(self) -> None:
        """Return None, because a store does not report its free space."""

    def attempts(self) -> Iterator[Attempt]:
        """Yield the saves below this prefix, with step, kind and order.

        Objects BAD and COMMIT decide the kind: `bad`, `saved` or else `tmp`. A `step-N` prefix
        without COMMIT is skipped, because somebody may still be copying it.
        """
        names: dict[str, set[str]] = {}
        for path in self.files():
            folder, _, name = path.partition("/")
            names.setdefault(folder, set()).add(name)
        for folder, files in names.items():
            if (match := _ATTEMPT.fullmatch(folder)) and files != {""}:
                number = int(match[2] or 0)
                kind = "bad" if BAD in files else "saved" if COMMIT in files else "tmp"
                if kind != "tmp" or number > 0:  # otherwise somebody may still be copying it
                    yield Attempt(self / folder, int(match[1]), kind, number)

    def new_attempt(self, step: int, number: int) -> "RemotePath":
        """Return a new unique prefix for the `number`-th save of `step`. Sends no request."""
        return self / f"{step_name(step)}.try-{number:04d}-{os.urandom(4).hex()}"

    def scratch_folder(self) -> Path:
        """Create a local temporary folder for files to upload; the caller deletes it."""
        return Path(tempfile.mkdtemp(prefix="checkpoint-"))

    def committed_path(self, step: int) -> "RemotePath":
        """Return this path, because a commit on a store renames nothing."""
        return self

    def commit(self, step: int, manifest: str, seal: str, verifies: Callable[[Any], bool]) -> Any:
        """Write the manifest and then COMMIT, which makes the checkpoint valid; return this path.

        `step` and `verifies` have no effect on an object store.
        """
        (self / MANIFEST).write_bytes(manifest.encode())
        (self / COMMIT).write_bytes(seal.encode())
        return self

    def quarantine(self) -> "RemotePath":
        """Mark this damaged checkpoint with an object `BAD`, so that it is never read.

        Returns:
            The path of the object.
        """
        (self / BAD).write_bytes(b"failed verification; kept for a look, never read\n")
        return self / BAD

    def delete(self) -> None:
        """Delete all objects of this checkpoint, COMMIT first. Missing objects are no error."""
        (self / COMMIT).unlink()
        names = list(self.files())
        if _can_delete_lists(self.fs, [f"{self.path}/{name}" for name in names]):
            with (
                contextlib.suppress(FileNotFoundError),  # another process deletes it, too
                _driver_errors(f"{self} cannot be deleted", passed=FileNotFoundError),
            ):
                self.fs.rm([f"{self.path}/{name}" for name in names])
            names = list(self.files())  # a store may refuse some, which not all drivers report
        with ThreadPoolExecutor(_DELETED_AT_ONCE) as pool:
            list(pool.map(lambda name: (self / name).unlink(), names))

    def download(self, folder: Path) -> None:
        """Copy all objects of a checkpoint into the local `folder`, and announce that on stderr.

        Raises:
            CheckpointError: the disk for temporary files has too little space, or an object's name
                is no path inside the folder.
            StorageError: the store failed.
        """
        files = self.files()
        if odd := [n for n in files if not is_inner_path(n)]:
            raise CheckpointError(f"{self} holds {odd[0]!r}, which is no name of a file")
        nbytes, temporary = sum(files.values()), tempfile.gettempdir()
        if nbytes > (free := shutil.disk_usage(temporary).free):
            raise CheckpointError(
                f"{self} has {nbytes:,} bytes and {free:,} are free in {temporary}: set TMPDIR "
                f"to a larger folder, or copy it to a folder named {folder.name} by the tool of "
                "its store, and give that"
            )
        print(f"copying {self} ({nbytes:,} bytes) to {folder}", file=sys.stderr, flush=True)
        for name in files:  # not every driver creates them
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with _driver_errors(f"{self} cannot be copied"):
            self.fs.get([f"{self.path}/{n}" for n in files], [str(folder / n) for n in files])


def parse_store_url(url: str) -> RemotePath:
    """Parse a URL into a path on an object store. Sends no request.

    Raises:
        CheckpointError: the URL contains credentials, options or a chain of file systems, or its
            fsspec driver is not installed.
    """
    url = url.rstrip("/")
    parts = urllib.parse.urlsplit(url)
    if "@" in parts.netloc or parts.query or "::" in url:
        raise CheckpointError(
            f"{parts.scheme}://... holds credentials, options or a chain of file systems; give the "
            "store's own URL, such as s3://bucket/run, and leave those to its driver"
        )
    import fsspec  # imported here, because a run on a disk needs no store

    try:
        fs, stripped = fsspec.url_to_fs(url)
    except Exception as error:  # drivers have no common class
        raise CheckpointError(
            f"{url} cannot be opened, each machine of the run needs the driver of the store: "
            f"{one_line(error)}"
        ) from error
    return RemotePath(url, str(stripped).rstrip("/"), fs)


def _can_delete_lists(fs: Any, paths: list[str]) -> bool:
    """Return True if the fsspec driver `fs` can delete the list `paths` in few requests.

    The driver of S3 deletes 1,000 objects per request, the one of Google Cloud Storage 100. The
    default implementation in fsspec sends one request per object. Drivers treat `*`, `?` and `[` as
    patterns, so the result is False if a path contains one of them. It is also False for an empty
    list.
    """
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    name, general = ("_rm", AsyncFileSystem) if fs.async_impl else ("rm", AbstractFileSystem)
    has_own = getattr(type(fs), name, None) is not getattr(general, name)
    return bool(paths) and has_own and not any(set(path) & set("*?[") for path in paths)


@contextlib.contextmanager
def _driver_errors(failure: str, passed: type[Exception] = ToolkitError) -> Iterator[None]:
    """Convert an error of the store's driver to a StorageError whose message begins with `failure`.

    Errors of the class `passed` and of this toolkit are raised unchanged.
    """
    try:
        yield
    except (ToolkitError, passed):
        raise
    except Exception as error:  # drivers have no common class
        raise StorageError(f"{failure}: {one_line(error)}") from error
