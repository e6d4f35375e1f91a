"""Files that belong to one folder: their names, links that would lead out of it, and hashes."""

import re
from collections.abc import Iterable
from pathlib import Path

import xxhash

from toolkit.errors import ToolkitError

BLOCK = 2**20  # bytes read at a time: the processor's cache has them while they are hashed


def is_plain_name(name: str) -> bool:
    """Return whether `name` is of an entry of a folder, on any system: no path, no way out."""
    return name not in ("", ".", "..") and not re.search(r"[\0\\/]|^[A-Za-z]:", name)


def is_inner_path(name: str) -> bool:
    """Return whether `name` is a path below its folder (`dcp/.metadata`), in its one spelling."""
    return all(is_plain_name(part) for part in name.split("/"))


def is_cached(path: Path) -> bool:
    """Return whether `path` is a link as the Hub's cache has them: from a snapshot to its blobs."""
    of_snapshot = path.is_symlink() and path.parent.parent.name == "snapshots"
    blobs = path.parent.parent.parent / "blobs"
    return of_snapshot and path.resolve().parent == blobs.resolve()


def plain_file(folder: Path, name: str, error: type[ToolkitError]) -> Path:
    """Return the path of the regular file `name` of `folder`, or raise `error`.

    A link may not leave the folder, except one of the Hub's cache to its blobs.
    """
    path, home = folder / name, folder.resolve()
    if not is_plain_name(name):
        raise error(f"{name!r:.200} is no file of its folder, {folder}")
    if path.is_symlink() and path.resolve().parent != home and not is_cached(home / name):
        raise error(
            f"{path} is a link that leaves its folder, to {path.resolve()}; copy the file here, or "
            "give the folder that holds it"
        )
    if not path.is_file():
        raise error(f"{path} is missing, or no plain file; complete the copy of {folder}")
    return path


def hash_of_part(file: Path, begin: int, count: int) -> str:
    """Return the XXH3-128 over `count` bytes of a file, in hexadecimal; ToolkitError without them.
    It runs at 10 GB/s, and guards against accidents only.
    """
    hashed = xxhash.xxh3_128()
    with open(file, "rb", buffering=0) as f:
        f.seek(begin)
        while count > 0:
            if not (block := f.read(min(count, BLOCK))):
                raise ToolkitError(f"{file} became shorter while it was read")
            hashed.update(block)
            count -= len(block)
    return hashed.hexdigest()


def damaged_parts(file: Path, parts: Iterable[tuple[str, int, int, str]]) -> dict[str, str]:
    """Return tensor -> what is wrong, where its part of a file is not what was written; `parts`:
    (tensor, offset, count, hash).
    """
    size, found = file.stat().st_size, {}
    for name, begin, count, expected in parts:
        if begin + count > size:
            found[name] = f"is lost: {max(0, size - begin)} of its {count} bytes are there"
        elif hash_of_part(file, begin, count) != expected:
            found[name] = "has other bytes than were written"
    return found
