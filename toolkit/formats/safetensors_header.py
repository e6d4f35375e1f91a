"""The header of a safetensors file, read with suspicion: it comes from outside."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import LoadingError, one_line
from toolkit.formats.plain_files import sha256_of_part
from toolkit.parsing import MAX_JSON_BYTES, parse_json

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
_MAX_TENSORS = 50_000  # of one file, read in 2 s: large MoE models have 100,000 in 100 files
_AGAIN = "copy or download the file again"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file: where its bytes are and what they mean."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset of the first byte in the file."""
    nbytes: int


def read_header(file: Path, *, whole: bool = True) -> dict[str, TensorEntry]:
    """Return the tensors of one safetensors file; their bytes follow each other without a gap.

    Without `whole` the file may be shorter or longer than its header says, to see what is lost.

    Raises:
        LoadingError: the header is damaged (a name that is there twice, ranges that overlap or
            leave holes, shapes that are no shapes), beyond its bounds, or the file is shorter or
            longer than it says.
    """
    header, begin, size = _read(file)
    header.pop("__metadata__", None)
    try:
        entries = {name: _entry(file, begin, name, info) for name, info in header.items()}
        position, before = begin, "the header"
        for name, entry in sorted(entries.items(), key=lambda e: (e[1].begin, e[1].nbytes)):
            if entry.begin != position:  # bytes of two tensors, or of none
                what = "overlaps" if entry.begin < position else "leaves a hole after"
                raise ValueError(f"{name} {what} {before}")
            position, before = entry.begin + entry.nbytes, name
    except (ValueError, TypeError) as error:
        raise _damaged(file, error) from error
    if whole and position != size:
        raise LoadingError(
            f"{file} should be {position} bytes long by its header, and is {size}; {_AGAIN}"
        )
    return entries


def header_metadata(file: Path) -> dict[str, str]:
    """Return what the header of a safetensors file says beside its tensors. Raises LoadingError."""
    return _read(file)[0].get("__metadata__", {})


def damaged_pieces(
    file: Path, entries: dict[str, TensorEntry], hashes: dict[str, str]
) -> list[tuple[str, str]]:
    """Return (tensor, what is wrong) for the tensors of a safetensors file that are not what was
    written, by the sha256 of their bytes.
    """
    size, found = file.stat().st_size, []
    for name, entry in entries.items():
        if entry.begin + entry.nbytes > size:
            left = max(0, size - entry.begin)
            found.append((name, f"is lost: {left} of its {entry.nbytes} bytes are there"))
        elif name in hashes and sha256_of_part(file, entry.begin, entry.nbytes) != hashes[name]:
            found.append((name, "has other bytes than were written"))
    return found


def _read(file: Path) -> tuple[dict[str, Any], int, int]:
    """Return (header, offset of the first tensor's bytes, size of the file)."""
    with open(file, "rb") as f:
        size = f.seek(0, 2)
        f.seek(0)
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 <= length <= min(MAX_JSON_BYTES, size - 8):
            about = f", header of {length}" if length >= 0 else ""
            raise LoadingError(
                f"{file} is not a safetensors file ({size} bytes long{about}); {_AGAIN}"
            )
        raw = f.read(length)
    if not raw.startswith(b"{"):
        raise _damaged(file, "it is no JSON object")
    count = raw.count(b'"data_offsets"')
    if count > _MAX_TENSORS:
        raise LoadingError(
            f"{file} names {count:,} tensors, more than the {_MAX_TENSORS:,} of one file that are "
            "read; save the model in several files (max_shard_size)"
        )
    header = parse_json(raw, f"{file}: damaged safetensors header: it", LoadingError, strict=True)
    about = header.get("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(v, str) for v in about.values()):
        raise _damaged(file, "__metadata__ must map names to texts")
    return header, 8 + length, size


def _entry(file: Path, base: int, name: str, info: Any) -> TensorEntry:
    """Return the entry that one line of a header describes; refuses what is not of its type."""
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
    return TensorEntry(file, DTYPES[kind], tuple(shape), base + begin, end - begin)


def _damaged(file: Path, what: object) -> LoadingError:
    text = one_line(str(what), 200)
    return LoadingError(f"{file} has a damaged safetensors header: {text}; {_AGAIN}")
