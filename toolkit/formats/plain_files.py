"""Files that belong to one folder: their names, and links that would lead out of it."""

import re
from pathlib import Path

from toolkit.errors import ToolkitError

_DRIVE = re.compile(r"[A-Za-z]:")


def is_plain_name(name: str) -> bool:
    """Whether `name` is that of an entry of a folder itself, on any system: no path, no way out."""
    return (
        name not in ("", ".", "..") and not re.search(r"[\0\\/]", name) and not _DRIVE.match(name)
    )


def is_inner_path(name: str) -> bool:
    """Whether `name` is a path below its folder (`dcp/.metadata`), written in the one way."""
    return all(is_plain_name(part) for part in name.split("/"))


def leaves_folder(path: Path) -> bool:
    """Whether `path` is a link that leads out of its folder.

    A snapshot of the Hub's cache holds links to the cache's `blobs`: those belong to it.
    """
    if not path.is_symlink():
        return False
    own = [path.parent.resolve()]
    if path.parent.parent.name == "snapshots":
        own.append((path.parent.parent.parent / "blobs").resolve())
    return path.resolve().parent not in own


def plain_file(folder: Path, name: str, error: type[ToolkitError]) -> Path:
    """Return the path of the file `name` of `folder`.

    Raises:
        error: it is not there, no regular file, a link that leads out of the folder, or `name` is
            no plain name.
    """
    path = folder / name
    if not is_plain_name(name):
        raise error(f"{name!r:.200} is no file of its folder, {folder}")
    if leaves_folder(path):
        raise error(f"{path} is a link that leaves its folder; copy the file here instead")
    if not path.is_file():
        raise error(f"{path} is missing, or no plain file; complete the copy of {folder}")
    return path
