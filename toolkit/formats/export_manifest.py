"""What a Hugging Face folder was when it was written: sizes and hashes of its files and tensors.

Owns `toolkit_manifest.json`: what is in it, its one rendering, and its reading with suspicion.
Knows safetensors headers, nothing of DCP, of models or of where the weights
came from: `origin` is the caller's.

Not part of it: the model card (README.md), which is the user's to edit, and hidden names, which are
those of other tools (`.gitattributes`, `.cache` of a download).
"""

import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.errors import ExportError, LoadingError
from toolkit.formats.plain_files import is_plain_name, plain_file
from toolkit.formats.safetensors_header import DTYPE_NAMES, TensorEntry, read_header
from toolkit.parsing import MAX_JSON_BYTES, parse_json, read_bounded

FILE = "toolkit_manifest.json"
CARD = "README.md"
_BLOCK = 2**20  # bytes read at a time
_SMALL = 2**16  # bytes below which handing them to a second thread costs more than it gains
_HEX = re.compile(r"[0-9a-f]{64}")


def describe(
    folder: Path,
    advance: Callable[[int], Any] = lambda n: None,
    only: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return {"files": {name: {"size", "sha256"}}, "tensors": {key: {"file", "dtype", "shape",
    "begin", "sha256"}}} of a Hugging Face folder.

    A tensor's sha256 is over its bytes as they are stored, `begin` is where they begin in the file;
    its dtype has safetensors' name. One
    pass over every file, several files at a time, hashing on two threads a file; holds 1 MB a file.
    `advance` is called with the number of bytes done; with `only`, the named files are described.

    Raises:
        ExportError: a link, a folder or a damaged weight file is in it, or two files hold one
            tensor.
    """
    names = listed(folder) if only is None else list(only)
    for name in names:
        if (folder / name).is_symlink() or not (folder / name).is_file():
            raise ExportError(f"{folder / name} is not a plain file; an export holds nothing else")
    lock = threading.Lock()

    def locked(count: int) -> None:
        with lock:  # a progress bar is no place for two threads
            advance(count)

    workers = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool, ThreadPoolExecutor(workers) as second:
        done = list(pool.map(lambda n: _describe(folder / n, second, locked), names))
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, (size, sha256, found) in zip(names, done, strict=True):
        files[name] = {"size": size, "sha256": sha256}
        for key, entry in found.items():
            if key in tensors:
                raise ExportError(
                    f"{folder}: tensor {key} is in both {tensors[key]['file']} and {name}"
                )
            tensors[key] = entry
    return {"files": files, "tensors": tensors}


def write(folder: Path, described: dict[str, Any], origin: dict[str, Any]) -> None:
    """Write the manifest of what `describe` returned, fsynced.

    Args:
        origin: where the weights came from; plain JSON values. A number that JSON cannot hold (NaN)
            is written as null.
    """
    manifest = {
        "version": 1,
        "toolkit": __version__,
        "origin": json.loads(json.dumps(_finite(origin))),  # keys as a reader will find them
        "files": described["files"],
        "tensors": described["tensors"],
    }
    with open(folder / FILE, "wb") as f:
        f.write(_render(manifest))
        f.flush()
        os.fsync(f.fileno())


def read(folder: Path) -> dict[str, Any]:
    """Return the manifest of an export.

    Raises:
        ExportError: there is none, it is not to the byte what `write` wrote, it is of a newer
            version, or it names something that is not a file of its folder.
    """
    file = folder / FILE
    if not file.is_file():
        raise ExportError(
            f"{folder} has no {FILE}: it was not written by `toolkit consolidate`, or not copied "
            "whole"
        )
    raw = read_bounded(plain_file(folder, FILE, ExportError), MAX_JSON_BYTES, ExportError)
    content = parse_json(raw, f"{file} is damaged: it", ExportError)
    if not isinstance(content, dict) or not isinstance(content.get("manifest"), dict):
        raise ExportError(f"{file} is damaged: it holds no manifest")
    manifest = content["manifest"]
    try:
        whole = _render(manifest) == raw
    except ValueError:  # a number that JSON does not have
        whole = False
    if not whole:
        raise ExportError(f"{file} is damaged: its content does not have its own sha256")
    _check(file, manifest)
    return manifest


def listed(folder: Path) -> list[str]:
    """Return the names in a Hugging Face folder that its manifest speaks of, sorted."""
    return sorted(
        name for name in os.listdir(folder) if name not in (FILE, CARD) and not name.startswith(".")
    )


def _describe(
    file: Path, second: Executor, advance: Callable[[int], None]
) -> tuple[int, str, dict[str, dict[str, Any]]]:
    entries: dict[str, TensorEntry] = {}
    if file.suffix == ".safetensors":
        try:
            entries = read_header(file)
        except LoadingError as error:
            raise ExportError(str(error)) from error
    ordered = sorted(entries.items(), key=lambda item: item[1].begin)
    whole, size = hashlib.sha256(), file.stat().st_size
    found: dict[str, dict[str, Any]] = {}
    position = 0
    room = memoryview(bytearray(_BLOCK))
    with open(file, "rb", buffering=0) as f:

        def pass_over(end: int, also: Any = None) -> None:
            """Hash the file up to `end`, and what is passed over into `also`."""
            nonlocal position
            while position < end:
                count = f.readinto(room[: end - position])
                block = room[:count]
                if not count:
                    raise ExportError(f"{file} became shorter while it was read")
                if also is None or count < _SMALL:
                    whole.update(block)
                    if also is not None:
                        also.update(block)
                else:
                    pending = second.submit(whole.update, block)
                    also.update(block)
                    pending.result()
                position += count
                advance(count)

        for key, entry in ordered:
            pass_over(entry.begin)
            own = hashlib.sha256()
            pass_over(entry.begin + entry.nbytes, own)
            found[key] = {
                "file": file.name,
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "begin": entry.begin,
                "sha256": own.hexdigest(),
            }
        pass_over(size)
    return size, whole.hexdigest(), found


def _render(manifest: dict[str, Any]) -> bytes:
    """Return the file's one rendering: any other byte in it is damage."""
    text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"sha256": "{digest}", "manifest": {text}}}\n'.encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def _check(file: Path, manifest: Any) -> None:
    """Refuse what `write` never writes: the hash says that a file is whole, not whose it is."""
    try:
        if manifest["version"] != 1:
            raise ExportError(
                f"{file} has version {manifest['version']!r}; this toolkit ({__version__}) reads "
                "version 1: install a newer one"
            )
        if not isinstance(manifest["origin"], dict):
            raise TypeError("its origin is no object")
        for name, entry in manifest["files"].items():
            if not is_plain_name(name) or name in (FILE, CARD):
                raise ExportError(f"{file} names {name!r}, which is no file of its folder")
            if type(entry["size"]) is not int or not _HEX.fullmatch(entry["sha256"]):
                raise TypeError(f"size or sha256 of {name}")
        for key, entry in manifest["tensors"].items():
            known = entry["file"] in manifest["files"] and entry["dtype"] in DTYPE_NAMES.values()
            shaped = all(type(n) is int and n >= 0 for n in entry["shape"])
            placed = type(entry["begin"]) is int and entry["begin"] >= 0
            if not (known and shaped and placed and _HEX.fullmatch(entry["sha256"])):
                raise TypeError(f"tensor {key}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ExportError(f"{file} is no manifest of this toolkit: {error}") from error
