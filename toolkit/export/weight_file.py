"""One weight file of an export: written front to back, and hashed on the way."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from toolkit.errors import ExportError
from toolkit.formats import BLOCK, StoredTensor, export_manifest
from toolkit.formats.synced_files import write_behind

TensorValues = torch.Tensor | Iterator[torch.Tensor]
"""A whole tensor, or its rows in order, some at a time."""


def write_file(
    path: Path,
    header: bytes,
    places: dict[str, StoredTensor],
    values: Iterator[TensorValues],
    advance: Callable[[int], object],
) -> dict[str, Any]:
    """Write a safetensors file; return what `export_manifest.describe` says of it.

    Costs one write, and hashes of 10 GB/s over the file and over each tensor; holds blocks of 1 MB
    beside the values.

    Args:
        header: its first bytes.
        places, values: its tensors in order, and the values of each.
        advance: called with the numbers of bytes that were written.

    Raises:
        ExportError: values that do not have the planned size, or that their dtype cannot hold.
        OSError: the disk failed.
    """
    end = given = 0
    whole, tensors = xxhash.xxh3_128(), dict[str, Any]()
    with open(path, "xb", buffering=0) as file:

        def write(content: memoryview) -> None:
            nonlocal end, given
            whole.update(content)
            _write_all(file.fileno(), content, end)
            end += len(content)
            given = write_behind(file.fileno(), given, end)
            advance(len(content))

        write(memoryview(header))
        for name, place in places.items():
            begin, value, hashed = end, next(values), xxhash.xxh3_128()
            for content in _contents(value, place.dtype, name):
                hashed.update(content)
                write(content)
                del content  # a view may keep its whole group while the next one is read
            del value
            if (begin, end - begin) != (place.begin, place.nbytes):
                raise ExportError(
                    f"{name} got {end - begin} bytes at {begin} of {path}, planned were "
                    f"{place.nbytes} at {place.begin}"
                )
            tensors[name] = export_manifest.describe_tensor(place, hashed.hexdigest())
    return {"files": {path.name: {"size": end, "xxh3": whole.hexdigest()}}, "tensors": tensors}


def _write_all(descriptor: int, content: memoryview, position: int) -> None:
    while content:
        count = os.pwrite(descriptor, content, position)
        content, position = content[count:], position + count


def _contents(values: TensorValues, dtype: torch.dtype, name: str) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in `dtype`, in row-major order, a block at a time."""
    for part in [values] if isinstance(values, torch.Tensor) else values:
        for block in _blocks(part, BLOCK // max(part.dtype.itemsize, dtype.itemsize)):
            cast = block.to(dtype)
            if dtype == torch.float16 and bool((cast.isinf() & block.isfinite()).any()):
                raise ExportError(
                    f"{name} has values beyond float16's 65504; use --dtype bfloat16 or float32"
                )
            yield memoryview(cast.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _blocks(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in row-major order, `most` at a time, whatever its strides."""
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(most) if tensor.numel() else ()
    elif math.prod(tensor.shape[1:]) > most:
        for part in tensor:
            yield from _blocks(part, most)
    else:
        for rows in tensor.split(max(1, most // math.prod(tensor.shape[1:]))):
            yield rows.reshape(-1)
