"""Read safetensors files that anybody may have written: index, headers and rows."""

import contextlib
import math
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from toolkit.errors import LoadingError, one_line
from toolkit.formats.hf_folder import (
    ADAPTER_FILE,
    AGAIN,
    INDEX_FILE,
    SINGLE_FILE,
    is_text_map,
    refuse_adapter,
)
from toolkit.formats.hub_access import ensure_file
from toolkit.formats.plain_files import is_plain_name, resolve_plain_file
from toolkit.formats.stored_tensors import StoredTensor, contiguous_tensor
from toolkit.parsing import MAX_JSON_BYTES, parse_json, read_json

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_BYTES = 2**48  # of a tensor, its empty dimensions counted as 1
_MAX_DIMS = 64


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file: tensor name -> location, dtype and shape.

    Raises:
        LoadingError: the header is damaged or too large, tensors overlap or leave gaps, or the file
            is longer or shorter than the header says.
    """
    header, begin, size = _read_raw_header(file)
    header.pop("__metadata__", None)
    try:
        entries = {name: _parse_entry(file, begin, name, info) for name, info in header.items()}
        position = begin
        previous = "the header"
        for name, entry in sorted(entries.items(), key=lambda e: (e[1].begin, e[1].nbytes)):
            if entry.begin < position:
                raise ValueError(f"{name} overlaps {previous}")
            if entry.begin > position:
                raise ValueError(f"{name} leaves a hole after {previous}")
            position = entry.begin + entry.nbytes
            previous = name
    except (ValueError, TypeError) as error:
        raise _header_error(file, error) from error
    if position != size:
        raise LoadingError(
            f"{file} should be {position} bytes long by its header, and is {size}; {AGAIN}"
        )
    return entries


def header_metadata(file: Path) -> dict[str, str]:
    """Read `__metadata__` of a safetensors header; {} if there is none.

    Raises:
        LoadingError: the header is damaged.
    """
    return _read_raw_header(file)[0].get("__metadata__", {})


def _read_raw_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """Read and parse the JSON header of a safetensors file.

    Returns:
        (header, offset of the first tensor byte, size of the file in bytes).

    Raises:
        LoadingError: the file is no safetensors file, or its header is damaged.
    """
    with open(file, "rb") as f:
        size = f.seek(0, 2)
        f.seek(0)
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 <= length <= min(MAX_JSON_BYTES, size - 8):
            about = f"{size} bytes long" + (f", header of {length}" if length >= 0 else "")
            raise LoadingError(f"{file} is not a safetensors file ({about}); {AGAIN}")
        raw = f.read(length)
    if not raw.startswith(b"{"):
        raise _header_error(file, "it is no JSON object")
    header = parse_json(raw, f"{file}: damaged safetensors header: it", LoadingError, strict=True)
    about = header.get("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(v, str) for v in about.values()):
        raise _header_error(file, "__metadata__ must map names to texts")
    return header, 8 + length, size


def _parse_entry(file: Path, base: int, name: str, info: Any) -> StoredTensor:
    """Convert one tensor's entry of a safetensors header to a `StoredTensor`.

    Args:
        file: the safetensors file.
        base: offset in the file to which `data_offsets` are relative.
        name: name of the tensor, for the message.
        info: the JSON value of the entry.

    Raises:
        TypeError, ValueError: the entry is malformed.
    """
    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        raise TypeError(f"{name} must have dtype, shape and data_offsets")
    kind, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"{name} has dtype {str(kind)[:40]!r}; known are {', '.join(DTYPES)}")
    sizes = shape if isinstance(shape, list) and len(shape) <= _MAX_DIMS else [None]
    if not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
        raise TypeError(f"{name} has shape {str(shape)[:80]}, a list of sizes is expected")
    if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int]:
        raise TypeError(f"{name} has data_offsets {str(offsets)[:80]}, two numbers are expected")
    (begin, end), itemsize = offsets, DTYPES[kind].itemsize
    if not 0 <= begin <= end or end - begin != math.prod(shape) * itemsize:
        raise ValueError(f"{name}: bytes {begin} to {end} do not hold {kind} {tuple(shape)}")
    if math.prod(n or 1 for n in shape) * itemsize > _MAX_BYTES:
        raise ValueError(f"{name} has shape {str(shape)[:80]}, which no tensor can have")
    return contiguous_tensor(file, DTYPES[kind], tuple(shape), base + begin)


def _header_error(file: Path, problem: object) -> LoadingError:
    """Build the exception for a damaged safetensors header."""
    text = one_line(str(problem), 200)
    return LoadingError(f"{file} has a damaged safetensors header: {text}; {AGAIN}")


def weight_files(
    folder: Path, name_or_path: str | None = None, revision: str | None = None
) -> list[Path]:
    """Return the safetensors files of a model folder; download missing ones from the Hub.

    Uses model.safetensors if it exists, else the files that the index names.

    Args:
        folder: the model folder.
        name_or_path: the Hub id to download missing files from. If it is a local folder or None,
            nothing is downloaded.
        revision: branch, tag or commit of the Hub id.

    Raises:
        LoadingError: there are no weights, they have another format, or the index names a file that
            is missing or outside of the folder.
        ModelError: the folder holds an adapter.
    """
    remote = name_or_path if name_or_path is not None and not Path(name_or_path).is_dir() else None
    if ensure_file(folder, SINGLE_FILE, remote, revision):  # first, as transformers takes it
        names = [SINGLE_FILE]
    elif ensure_file(folder, INDEX_FILE, remote, revision):
        names = sorted(set(read_index(folder / INDEX_FILE).values()))
        missing = [n for n in names if not ensure_file(folder, n, remote, revision)]
        if missing:
            raise LoadingError(
                f"{folder / INDEX_FILE} names {len(missing)} file(s) that are not there: "
                f"{', '.join(missing[:5])}; complete the copy of {folder}"
            )
    else:
        kinds = (".bin", ".pt", ".pth", ".gguf")
        other_weights = ", ".join(sorted(p.name for p in folder.glob("*") if p.suffix in kinds)[:3])
        refuse_adapter(folder / ADAPTER_FILE, name_or_path or str(folder))
        if other_weights:
            raise LoadingError(
                f"{folder} holds no {SINGLE_FILE} and no {INDEX_FILE}; it has {other_weights}: "
                "load it once with transformers and save_pretrained it"
            )
        raise LoadingError(
            f"{folder} holds no {SINGLE_FILE} and no {INDEX_FILE}; complete the folder, or set "
            "model.init: random to start from random weights"
        )
    return [resolve_plain_file(folder, name, LoadingError) for name in names]


def read_weights(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Read the headers of all weight files of a model: tensor name -> `StoredTensor`.

    With several files, the index next to them is compared with the headers.

    Raises:
        LoadingError: a file is damaged, two files hold the same tensor, or a tensor is not in the
            file that the index names.
    """
    entries: dict[str, StoredTensor] = {}
    files = list(files)
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise LoadingError(f"tensor {name} is in both {entries[name].file} and {file}")
            entries[name] = entry
    index = files[0].parent / INDEX_FILE if files else None
    if index is not None and index.is_file() and files[0].name != SINGLE_FILE:
        for name, file_name in read_index(index).items():
            if name not in entries or entries[name].file.name != file_name:
                raise LoadingError(
                    f"{index} places tensor {name} in {file_name}, which does not hold it; they "
                    "are not of one checkpoint. Copy all of them again"
                )
    return entries


def source_dtypes(folder: Path) -> dict[str, str] | None:
    """Map each tensor of the weights in `folder` to its safetensors dtype, such as "BF16".

    Returns:
        The dict; None if the weights are missing or damaged, which is reported when they are
        loaded.

    Raises:
        ModelError: the folder holds an adapter.
    """
    try:
        entries = read_weights(weight_files(folder))
    except LoadingError:  # damage is reported when the weights are loaded
        return None
    return {name: DTYPE_NAMES[entry.dtype] for name, entry in entries.items()}


def read_index(file: Path) -> dict[str, str]:
    """Read a safetensors index: tensor name -> file name.

    Raises:
        LoadingError: the file is missing or malformed, or names a file outside of its folder.
    """
    content = read_json(file, LoadingError, strict=True)
    index = content.get("weight_map") if isinstance(content, dict) else None
    if not index or not is_text_map(index):
        raise LoadingError(
            f"{file} is not a safetensors index: its weight_map must map tensor names to file "
            f"names; {AGAIN}"
        )
    for name in sorted(set(index.values())):
        if not is_plain_name(name):
            raise LoadingError(
                f"{file} names {name!r:.200}, which is not a file of its folder; get the "
                "checkpoint from a source that you trust"
            )
    return index


class OpenFiles(contextlib.ExitStack):
    """A context that keeps safetensors files open; `requested` counts the bytes read from them."""

    def __init__(self) -> None:
        super().__init__()
        self.requested = 0
        self._files: dict[Path, Any] = {}
        self._lock = threading.Lock()

    def get_slice(self, name: str, entry: StoredTensor) -> Any:
        """Return safetensors' lazy slice object of a tensor; open its file if necessary."""
        if entry.file not in self._files:
            self._files[entry.file] = self.enter_context(safe_open(entry.file, framework="pt"))
        return self._files[entry.file].get_slice(name)

    def count_request(self, nbytes: int) -> None:
        """Add `nbytes` to `requested`. Safe to call from any thread."""
        with self._lock:
            self.requested += nbytes


class FileTensor:
    """A tensor in a file whose values are read when it is indexed.

    It has the interface of safetensors' slice object, which transformers' loader expects.

    Args:
        reader: the open files.
        name: name of the tensor.
        entry: its header entry.
        dtype: dtype to which floating values are cast; None keeps the file's dtype.
        rows: number of rows of a resized embedding. Added rows are the mean of the stored rows.
            None: as stored.
        copy: return copies in `dtype`. If False, results may be views of the file, and are not
            cast.
    """

    def __init__(
        self,
        reader: OpenFiles,
        name: str,
        entry: StoredTensor,
        dtype: torch.dtype | None = None,
        rows: int | None = None,
        copy: bool = True,
    ):
        self._reader, self._inner, self._entry = reader, reader.get_slice(name, entry), entry
        self._dtype = dtype if dtype and entry.dtype.is_floating_point else entry.dtype
        self._copy = copy
        self._shape = entry.shape if rows is None else (rows, *entry.shape[1:])

    def get_shape(self) -> list[int]:
        """Return the shape, with the number of rows after a resize."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return the safetensors name of the dtype in the file, such as "BF16"."""
        return DTYPE_NAMES[self._entry.dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part of the tensor, and nothing else."""
        piece = (
            self._inner[index] if self._shape == self._entry.shape else self._read_resized(index)
        )
        self._reader.count_request(piece.numel() * self._entry.dtype.itemsize)
        if not self._copy:
            return piece
        return torch.empty(piece.shape, dtype=self._dtype).copy_(piece)

    def _read_resized(self, index: Any) -> torch.Tensor:
        """Read a part of a resized embedding; added rows are the mean of all rows in the file."""
        index = index if isinstance(index, tuple) else (index,)
        rows = index[0] if isinstance(index[0], slice) else slice(None)
        begin, end, _ = rows.indices(self._shape[0])
        old = self._entry.shape[0]
        old_rows = self._inner[(slice(min(begin, old), min(end, old)), *index[1:])]
        fresh = end - max(begin, old)
        if fresh <= 0:
            return old_rows
        total = torch.zeros(self._entry.shape[1:], dtype=torch.float64)
        for start in range(0, old, 4096):
            total += self._inner[start : min(start + 4096, old)].double().sum(0)
        mean = (total / old).to(self._entry.dtype)
        return torch.cat([old_rows, mean.expand(fresh, *mean.shape)[(slice(None), *index[1:])]])
