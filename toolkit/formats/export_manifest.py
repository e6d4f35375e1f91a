"""`toolkit_manifest.json`: sizes and hashes of files and tensors of a Hugging Face folder.

The hashes are XXH3-128, which run at 10 GB/s and detect accidents. Whoever can change a file can
change the manifest too, so sha256 would prove no more.

The manifest does not list the model card (README.md), which the user may edit, and hidden files,
which belong to other tools (`.gitattributes`, `.cache` of a download).
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.errors import ExportError, LoadingError
from toolkit.formats.plain_files import hash_file_part, is_plain_name, resolve_plain_file
from toolkit.formats.safetensors_files import DTYPE_NAMES, read_header
from toolkit.formats.stored_tensors import StoredTensor
from toolkit.formats.synced_files import write_synced
from toolkit.parsing import MAX_JSON_BYTES, parse_json, read_bounded

FILE = "toolkit_manifest.json"
CARD = "README.md"
VERSION = 1
_TERMS = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)([-_]\w+)?(\.(md|txt))?", re.IGNORECASE)
_HEX = re.compile(r"[0-9a-f]{32}")


def describe_folder(folder: Path, only: Iterable[str] | None = None) -> dict[str, Any]:
    """Hash the files of a Hugging Face folder and the tensors in its safetensors files.

    Args:
        folder: the folder.
        only: names of the files to hash; None: all files that a manifest lists.

    Returns:
        {"files": {file name: {"size": bytes, "xxh3": hash}}, "tensors": {key: entry}}, with entries
        from `describe_tensor`.

    Raises:
        ExportError: a file is a link or missing, a weight file is damaged, or two files hold the
            same tensor.
    """
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name in names_in_manifest(folder) if only is None else only:
        file = folder / name
        if file.is_symlink() or not file.is_file():
            raise ExportError(f"{file} is not a plain file; an export holds nothing else")
        size = file.stat().st_size
        files[name] = {"size": size, "xxh3": hash_file_part(file, 0, size)}
        try:
            entries = read_header(file) if file.suffix == ".safetensors" else {}
        except LoadingError as error:
            raise ExportError(str(error)) from error
        for key, entry in entries.items():
            if key in tensors:
                raise ExportError(
                    f"{folder}: tensor {key} is in both {tensors[key]['file']} and {name}"
                )
            xxh3 = hash_file_part(file, entry.begin, entry.nbytes)
            tensors[key] = describe_tensor(entry, xxh3)
    return {"files": files, "tensors": tensors}


def describe_tensor(entry: StoredTensor, xxh3: str) -> dict[str, Any]:
    """Build a tensor's entry in the manifest, with keys file, dtype, shape, begin and xxh3.

    `begin` is the offset of the first byte in the file.

    Args:
        entry: the contiguous tensor in its file.
        xxh3: XXH3-128 of its stored bytes, in hexadecimal.
    """
    return {
        "file": entry.file.name,
        "dtype": DTYPE_NAMES[entry.dtype],
        "shape": list(entry.shape),
        "begin": entry.begin,
        "xxh3": xxh3,
    }


def write(folder: Path, described: dict[str, Any], origin: dict[str, Any]) -> None:
    """Write the manifest into an export's folder, and fsync it.

    Args:
        folder: the export.
        described: its files and tensors, as `describe_folder` returns them.
        origin: the source of the weights, as JSON. NaN and infinity are written as null.
    """
    manifest = {
        "version": VERSION,
        "toolkit": __version__,
        # Keys as a reader will find them; NaN and infinity as null.
        "origin": json.loads(json.dumps(origin), parse_constant=lambda _: None),
        "files": described["files"],
        "tensors": described["tensors"],
    }
    write_synced(folder / FILE, _encode(manifest))


def read(folder: Path) -> dict[str, Any]:
    """Read and validate the manifest of an export.

    Returns:
        {"version", "toolkit", "origin", "files", "tensors"}, as `write` wrote it.

    Raises:
        ExportError: there is no manifest, it is damaged, has another version, or names a file
            outside of its folder.
    """
    file = folder / FILE
    if not file.is_file():
        raise ExportError(
            f"{folder} has no {FILE}: not written by `toolkit consolidate`, or copied incompletely"
        )
    raw = read_bounded(resolve_plain_file(folder, FILE, ExportError), MAX_JSON_BYTES, ExportError)
    content = parse_json(raw, f"{file} is damaged: it", ExportError)
    manifest: Any = content.get("manifest") if isinstance(content, dict) else None
    try:
        if _encode(manifest) != raw:
            raise ExportError(f"{file} is damaged: its content does not have its own sha256")
    except ValueError as error:
        raise ExportError(f"{file} is damaged: {error}") from error
    _check_content(file, manifest)
    return manifest


def names_in_manifest(folder: Path) -> list[str]:
    """List the sorted names of a folder's entries that belong into its manifest.

    These are all except the manifest, the model card, hidden files and files with terms of use.
    """
    names = (n for n in os.listdir(folder) if n not in (FILE, CARD) and n[0] != ".")
    return sorted(name for name in names if not _TERMS.fullmatch(name))


def terms_files(folder: Path) -> list[str]:
    """List the sorted names of a folder's licence and terms-of-use files.

    They are not in the manifest, because the user may edit them, like the model card.
    """
    return sorted(name for name in os.listdir(folder) if _TERMS.fullmatch(name))


def _encode(manifest: dict[str, Any]) -> bytes:
    """Encode a manifest as JSON with the sha256 of its text; equal manifests give equal bytes.

    Raises:
        ValueError: it contains NaN or infinity.
    """
    text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"sha256": "{digest}", "manifest": {text}}}\n'.encode()


def _check_content(file: Path, manifest: Any) -> None:
    """Raise ExportError if a manifest has content that `write` never writes.

    The manifest's own hash proves only that the file is intact, not who wrote it.
    """
    try:
        if manifest["version"] != VERSION:
            raise ExportError(
                f"{file} has version {manifest['version']!r}; this toolkit ({__version__}) reads "
                f"version {VERSION}"
            )
        if not isinstance(manifest["origin"], dict):
            raise TypeError("its origin is no object")
        for name, entry in manifest["files"].items():
            if not is_plain_name(name) or name in (FILE, CARD):
                raise ExportError(f"{file} names {name!r}, which is no file of its folder")
            if type(entry["size"]) is not int or not _HEX.fullmatch(entry["xxh3"]):
                raise TypeError(f"size or hash of {name}")
        for key, entry in manifest["tensors"].items():
            is_listed = entry["file"] in manifest["files"]
            has_dtype = entry["dtype"] in DTYPE_NAMES.values()
            has_shape = all(type(n) is int and n >= 0 for n in entry["shape"])
            has_place = type(entry["begin"]) is int and entry["begin"] >= 0
            if not (
                is_listed
                and has_dtype
                and has_shape
                and has_place
                and _HEX.fullmatch(entry["xxh3"])
            ):
                raise TypeError(f"tensor {key}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ExportError(f"{file} is no manifest of this toolkit: {error}") from error
