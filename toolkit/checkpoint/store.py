"""The protocol of a storage for checkpoints, and which storage a path or a URL names."""

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
    """A folder or file, with the operations that checkpoints need on its kind of storage.

    Unless stated otherwise, they raise OSError (on a disk) or StorageError (on a store).
    """

    is_disk: ClassVar[bool]  # files have descriptors and locks, and hosts may share them

    def files(self, only: Collection[str] | None = None) -> dict[str, int]:
        """Map the relative names of all files in this folder to their sizes.

        Args:
            only: look only for these files.

        Returns:
            The size is -1 for an entry that is no regular file, such as a link.
        """

    def read_plain(self) -> bytes:
        """Read this small file; raise an OSError if it is missing or a link."""

    def local(self) -> AbstractContextManager[Path]:
        """Provide this small file on a local disk: in place, or a copy in a temporary folder."""

    def replace(self, content: str | bytes) -> None:
        """Write this file atomically, replacing an existing one; create its folder."""

    def put(self, source: Path) -> None:
        """Store `source`, a file in the `scratch` folder, durably as this file."""

    def check_usable(self, setting: str) -> None:
        """Raise a ConfigError or CheckpointError if checkpoints cannot be written here."""

    def free_bytes(self) -> int | None:
        """Return the free bytes of this storage; None for a store, where this is unknown."""

    def attempts(self) -> Iterable[Attempt]:
        """Yield all folders in this one whose names follow the commit protocol."""

    def new_attempt(self, step: int, number: int) -> Any:
        """Create an empty place in this folder for the `number`-th attempt to save `step`."""

    def scratch(self) -> Path:
        """Return the local folder in which small files of this attempt are written first."""

    def committed_as(self, step: int) -> Any:
        """Return the location of this attempt after its commit."""

    def commit(self, step: int, manifest: str, seal: str, verifies: Callable[[Any], bool]) -> Any:
        """Commit this attempt, whose files are complete; return its location.

        Args:
            step: the step.
            manifest: content of the manifest.
            seal: content of COMMIT, which is written last.
            verifies: returns True if a checkpoint that has the step's name already is intact.
        """

    def set_aside(self) -> Any:
        """Quarantine a checkpoint that failed verification; return its new location."""

    def delete(self) -> None:
        """Delete this attempt; while it is half deleted, it is no valid checkpoint."""


def storage_of(folder: Folder) -> Storage:
    """Return a folder or file as a `Storage`, with the operations of its kind."""
    return folder if isinstance(folder, RemotePath) else LocalFolder(folder)


def is_url(path: object) -> bool:
    """Return True if `path` is the URL of an object store; `file://` counts as a local path."""
    return bool(isinstance(path, str) and _URL.match(path) and not _FILE_URL.match(path))


def parse_location(path: str | Folder) -> Folder:
    """Parse a path or URL into a local folder or a place on a store. Sends no request.

    Raises:
        CheckpointError: as `from_url`.
    """
    if not isinstance(path, str):
        return path
    return from_url(path) if is_url(path) else Path(_FILE_URL.sub("", path, count=1))


def folder_bytes(folder: Folder) -> int:
    """Sum the bytes of all regular files below `folder`; links are not followed."""
    return sum(size for size in storage_of(folder).files().values() if size > 0)


def read_json_object(file: Folder) -> dict[str, Any] | None:
    """Read a file that holds a JSON object; return None if there is no file."""
    try:
        content = parse_json(storage_of(file).read_plain(), file, CheckpointError)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, expected an object")
    return content
