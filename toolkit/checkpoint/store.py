"""`Storage`, the protocol of a place for checkpoints, and which kind a path or a URL names."""

import re
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol

from toolkit.checkpoint.local_folder import LocalFolder
from toolkit.checkpoint.names import Attempt
from toolkit.checkpoint.object_store import RemotePath, from_url
from toolkit.errors import CheckpointError
from toolkit.parsing import parse_json

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_FILE_URL = re.compile(r"^(file|local)://", re.IGNORECASE)

Folder = Path | RemotePath  # where checkpoints are


class Storage(Protocol):
    """A folder or file with the operations that checkpoints need of its kind of storage.

    They raise OSError (a disk) or StorageError (a store) unless said otherwise.
    """

    is_disk: ClassVar[bool]  # files have descriptors and locks, and hosts may share them

    def files(self, only: Collection[str] | None = None) -> dict[str, int]:
        """Return relative name -> size of all files below, or of those in `only` that are there;
        -1 of an entry that is no plain file, such as a link.
        """

    def read_plain(self) -> bytes:
        """Return the bytes of this file, which is small; OSError where it is none, or a link."""

    def local(self) -> AbstractContextManager[Path]:
        """Give this small file on a local disk, in a folder of its own or where it is."""

    def replace(self, content: str | bytes) -> None:
        """Write this file, whole or not at all, over one that was there; make its folder."""

    def put(self, source: Path) -> None:
        """Make `source`, a file in the `scratch` folder, this file, durably."""

    def check_usable(self, setting: str) -> None:
        """Refuse a folder that checkpoints cannot go to: ConfigError or CheckpointError."""

    def free_bytes(self) -> int | None:
        """Return how many bytes are free here; None where nobody can ask."""

    def attempts(self) -> Iterable[Attempt]:
        """Give all in this folder that bears a name of the protocol."""

    def new_attempt(self, step: int, number: int) -> Any:
        """Return an empty place in this folder for an attempt to save `step`, its `number`-th."""

    def scratch(self) -> Path:
        """Return a local folder in which the small files of this attempt are written first."""

    def committed_as(self, step: int) -> Any:
        """Return where this attempt will be once it is committed."""

    def commit(self, step: int, manifest: str, seal: str, verifies: Callable[[Any], bool]) -> Any:
        """Commit this attempt, whose files are all there: write the manifest, and `seal` as COMMIT,
        last. Return where it is. `verifies` tells whether a checkpoint in its place is sound.
        """

    def set_aside(self) -> Any:
        """Keep a checkpoint that failed verification from being read; return where it is kept."""

    def delete(self) -> None:
        """Delete an attempt: at no moment it is half deleted and still taken for a checkpoint."""


def storage_of(folder: Folder) -> Storage:
    """Return the folder, or file, with the operations of its kind of storage."""
    return folder if isinstance(folder, RemotePath) else LocalFolder(folder)


def is_url(path: object) -> bool:
    """Return whether `path` names a place on an object store; `file://` is a path."""
    return bool(isinstance(path, str) and _URL.match(path) and not _FILE_URL.match(path))


def parse_location(path: str | Folder) -> Folder:
    """Return the folder, or the place on a store, that `path` names. Asks no store anything;
    raises as `from_url`.
    """
    if not isinstance(path, str):
        return path
    return from_url(path) if is_url(path) else Path(_FILE_URL.sub("", path, count=1))


def folder_bytes(folder: Folder) -> int:
    """Return the bytes of all files below `folder`, without those that links lead to."""
    return sum(size for size in storage_of(folder).files().values() if size > 0)


def read_json_object(file: Folder) -> dict[str, Any] | None:
    """Return the JSON object that a file holds, None where there is no file."""
    try:
        content = parse_json(storage_of(file).read_plain(), file, CheckpointError)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, expected an object")
    return content
