"""The protocol of a storage for checkpoints, and which storage a path or a URL names."""

import re
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol

from toolkit.checkpoint.local_folder import LocalFolder
from toolkit.checkpoint.names import Attempt
from toolkit.checkpoint.object_store import RemotePath, parse_store_url
from toolkit.errors import CheckpointError
from toolkit.parsing import parse_json

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_FILE_URL = re.compile(r"^(file|local)://", re.IGNORECASE)

Folder = Path | RemotePath  # where checkpoints are


class Storage(Protocol):
    """The operations on a folder or file that checkpoints need, on a disk or on an object store.

    Unless stated otherwise, they raise an OSError (disk) or a StorageError (store).
    """

    is_disk: ClassVar[bool]  # files have descriptors and locks, and hosts may share them

    def files(self, only: Collection[str] | None = None) -> dict[str, int]:
        """Map the relative names of all files below this folder to their sizes in bytes.

        Args:
            only: look only for these names; missing files are skipped. None lists all files.

        Returns:
            Name -> size; the size is -1 for an entry that is no regular file, such as a link.
        """

    def read_small_file(self) -> bytes:
        """Read this file completely; on a disk, raise an OSError if it is a link or too large."""

    def local_file(self) -> AbstractContextManager[Path]:
        """Yield a local path with the content of this small file, as a context manager.

        On a disk it is the file itself, from a store a temporary copy.
        """

    def replace(self, content: str | bytes) -> None:
        """Write this file over an existing one, atomically if possible; create its folder."""

    def put(self, source: Path) -> None:
        """Store the local file `source` durably as this file.

        On a disk, `source` is this file already, and is only fsynced.
        """

    def check_usable(self, setting: str) -> None:
        """Raise a ConfigError or CheckpointError if checkpoints cannot be written to this folder.

        `setting` is the name of the setting for this folder, for the error.
        """

    def free_bytes(self) -> int | None:
        """Return the free bytes of this storage; None for a store, where this is unknown."""

    def attempts(self) -> Iterable[Attempt]:
        """Yield each save of a step in this folder, whether committed, unfinished or damaged."""

    def new_attempt(self, step: int, number: int) -> Any:
        """Create a location in this folder for a save of `step`, and return it.

        On a disk it is a new folder; on a store it is only a new prefix. `number` counts the saves
        of this step, from 1.
        """

    def scratch_folder(self) -> Path:
        """Return a local folder in which the files of this checkpoint are first written.

        On a disk it is this folder. For a store, each call creates a temporary folder.
        """

    def committed_path(self, step: int) -> Any:
        """Return the location that this checkpoint has after its commit."""

    def commit(self, step: int, manifest: str, seal: str, verifies: Callable[[Any], bool]) -> Any:
        """Commit this checkpoint, whose files are complete; return its final location.

        Args:
            step: the step.
            manifest: content of the manifest, which is written.
            seal: content of COMMIT, which is written last.
            verifies: returns True if a checkpoint is intact. On a disk, it is called on an earlier
                checkpoint of the same step.
        """

    def quarantine(self) -> Any:
        """Rename (disk) or mark (store) this damaged checkpoint, so that it is never read.

        Returns:
            On a disk the new path, on a store the object that marks it.
        """

    def delete(self) -> None:
        """Delete this checkpoint, committed or not. A half-deleted checkpoint is never valid."""


def storage_of(folder: Folder) -> Storage:
    """Return the `Storage` object for a folder or file on a disk or on an object store."""
    return folder if isinstance(folder, RemotePath) else LocalFolder(folder)


def is_url(path: object) -> bool:
    """Return True if `path` is the URL of an object store; `file://` counts as a local path."""
    return bool(isinstance(path, str) and _URL.match(path) and not _FILE_URL.match(path))


def parse_location(path: str | Folder) -> Folder:
    """Parse a path or URL into a local path or a path on an object store. Sends no request.

    A `file://` URL becomes a local path. A value that is not a `str` is returned unchanged.

    Raises:
        CheckpointError: the URL contains credentials, or its fsspec driver is not installed.
    """
    if not isinstance(path, str):
        return path
    return parse_store_url(path) if is_url(path) else Path(_FILE_URL.sub("", path, count=1))


def folder_bytes(folder: Folder) -> int:
    """Sum the sizes in bytes of all regular files below `folder`; links are not followed."""
    return sum(size for size in storage_of(folder).files().values() if size > 0)


def read_json_object(file: Folder) -> dict[str, Any] | None:
    """Read a file that holds a JSON object; return None if the file does not exist.

    Raises:
        CheckpointError: the file cannot be read, or its content is not a JSON object.
    """
    try:
        content = parse_json(storage_of(file).read_small_file(), file, CheckpointError)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, expected an object")
    return content
