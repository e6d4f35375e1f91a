"""The rows of a torch distributed checkpoint (DCP) that this rank wants, and no others.

torch's own reader reads whole blobs and slices them: 2 x the bytes when 2 ranks saved and 4 load.
Owns the reading into tensors that are there, sharded or not. Knows neither models nor manifests.
"""

import io
import math
import os
import threading
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.tensor import DTensor

from toolkit.checkpoint.store import Place
from toolkit.errors import CheckpointError
from toolkit.formats.dcp import (
    BlobView,
    Chunk,
    coverage_fault,
    read_chunk,
    tensor_chunks,
    tensor_metadata,
)
from toolkit.formats.layout import local_slices

_BLOCK = 16 * 2**20  # bytes read at a time where they do not go straight to their place
_SMALL = 2**20  # bytes of a blob that a store sends whole sooner than in three requests
_EDGE = 2**16  # bytes at both ends of a blob, with all of the zip's own records


@dataclass
class Requested:
    """How many bytes one rank asked for, and how many it wanted."""

    own: int = 0
    """Bytes of this rank's parts of the tensors."""
    read: int = 0
    """Bytes asked for of the files' tensors."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, own: int, read: int) -> None:
        """Add; from any thread."""
        with self._lock:
            self.own += own
            self.read += read


def read_tensors(
    folder: Path | Place, metadata: Metadata, tensors: dict[str, torch.Tensor]
) -> Requested:
    """Fill this rank's parts of `tensors` in place from a DCP folder; no collective.

    Each name must be in `metadata` with the tensor's shape and dtype. Whole rows go from the file
    straight to their place; on a device, through a block of host memory. From an object store, the
    same ranges; small blobs whole.

    Raises:
        CheckpointError: a tensor whose chunks do not cover it exactly once, a damaged blob, a file
            that ends too early.
    """
    found = Requested()
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(_fill, folder, metadata, n, t, found) for n, t in tensors.items()]
        for job in jobs:
            job.result()
    return found


def _fill(
    folder: Path | Place,
    metadata: Metadata,
    name: str,
    tensor: torch.Tensor,
    found: Requested,
) -> None:
    if fault := coverage_fault(metadata, name):
        raise CheckpointError(f"{folder}: {name} is not whole: {fault}")
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        target, wanted = tensor.to_local(), local_slices(tensor)
    else:
        target, wanted = tensor, tuple(slice(0, n) for n in tensor.shape)
    if target.numel() == 0:
        return
    read = 0
    if isinstance(folder, Place):
        read = _fill_from_store(folder, metadata, name, target, wanted)
    else:
        for chunk in tensor_chunks(folder, metadata, name, wanted):
            read += _copy(chunk, target, wanted, name)
    found.count(target.nbytes, read)


def _copy(chunk: Chunk, target: torch.Tensor, wanted: tuple[slice, ...], name: str) -> int:
    """Copy what `chunk` and `wanted` share to its place in `target`; return the bytes read."""
    inside, place = _shared(chunk.offsets, chunk.sizes, target, wanted)
    if chunk.raw is None:
        place.copy_(read_chunk(chunk)[inside])
        return chunk.blob[1]
    # Rows of the chunk: dim 0, and all that is below one of its elements.
    rows = range(inside[0].start, inside[0].stop) if inside else range(1)
    width = chunk.nbytes // (chunk.sizes[0] if inside else 1)
    whole = all(s.stop - s.start == n for s, n in zip(inside[1:], chunk.sizes[1:], strict=True))
    with open(chunk.file, "rb", buffering=0) as f:
        begin = chunk.raw + rows.start * width
        if whole and place.is_contiguous() and place.device.type == "cpu":
            _read_into(f.fileno(), begin, _memory(place), name)
            return len(rows) * width
        step = max(1, _BLOCK // width)
        for first in range(0, len(rows), step):
            count = min(step, len(rows) - first)
            shape = (count, *chunk.sizes[1:]) if inside else ()
            block = torch.empty(shape, dtype=chunk.dtype)
            _read_into(f.fileno(), begin + first * width, _memory(block), name)
            part = place[first : first + count] if inside else place
            part.copy_(block[(slice(None), *inside[1:])] if inside else block)
    return len(rows) * width


def _shared(
    offsets: Sequence[int], sizes: Sequence[int], target: torch.Tensor, wanted: tuple[slice, ...]
) -> tuple[tuple[slice, ...], torch.Tensor]:
    """Return what a chunk and `wanted` share: as part of the chunk, and as a view of `target`."""
    box = [
        slice(max(o, w.start), min(o + n, w.stop))
        for o, n, w in zip(offsets, sizes, wanted, strict=True)
    ]
    inside = tuple(slice(b.start - o, b.stop - o) for b, o in zip(box, offsets, strict=True))
    place = target[
        tuple(slice(b.start - w.start, b.stop - w.start) for b, w in zip(box, wanted, strict=True))
    ]
    return inside, place


def _memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _read_into(descriptor: int, begin: int, room: Any, name: str) -> None:
    done = 0
    while done < len(room):
        count = os.preadv(descriptor, [room[done:]], begin + done)
        if count == 0:
            raise CheckpointError(f"a shard ended in the middle of {name}: it is truncated")
        done += count


# --------------------------------------------------------------------------------------------------
# From an object store
# --------------------------------------------------------------------------------------------------


def _fill_from_store(
    folder: Place, metadata: Metadata, name: str, target: torch.Tensor, wanted: tuple[slice, ...]
) -> int:
    """Fill `target` with the part `wanted` of a tensor that our writer stored; return the bytes
    asked for.
    """
    entry, read = tensor_metadata(metadata, name), 0
    for part in entry.chunks:
        sizes = tuple(part.sizes)
        spans = zip(part.offsets, sizes, wanted, strict=True)
        if not math.prod(sizes) or any(o >= w.stop or o + n <= w.start for o, n, w in spans):
            continue
        info = metadata.storage_data.get(MetadataIndex(name, part.offsets))
        if info is None:
            raise CheckpointError(f"{name}: the chunk at {tuple(part.offsets)} is stored nowhere")
        inside, place = _shared(part.offsets, sizes, target, wanted)
        file, dtype = folder / info.relative_path, entry.properties.dtype
        if info.length <= _SMALL:
            blob = file.read(info.offset, info.offset + info.length)
            place.copy_(_loaded(blob, sizes, dtype, f"{file}: {name}")[inside])
            read += info.length
            continue
        nbytes = math.prod(sizes) * dtype.itemsize
        raw = info.offset + _payload(StoredBlob(file, info.offset, info.length), nbytes, name)
        first, count = (inside[0].start, inside[0].stop - inside[0].start) if inside else (0, 1)
        width = nbytes // (sizes[0] if inside else 1)
        step = max(1, _BLOCK // width)
        whole = all(s.stop - s.start == n for s, n in zip(inside[1:], sizes[1:], strict=True))
        if whole and place.is_contiguous() and place.device.type == "cpu":
            _stream(file, raw + first * width, _memory(place), name)
        else:
            for begin in range(0, count, step):
                rows = min(step, count - begin)
                block = torch.empty((rows, *sizes[1:]) if inside else (), dtype=dtype)
                _stream(file, raw + (first + begin) * width, _memory(block), name)
                part_of = place[begin : begin + rows] if inside else place
                part_of.copy_(block[(slice(None), *inside[1:])] if inside else block)
        read += count * width
    return read


class StoredBlob(BlobView):
    """A blob on an object store as a seekable stream; its ends are asked for once."""

    def __init__(self, file: Place, offset: int, length: int) -> None:
        super().__init__(-1, offset, length)
        self.file = file
        edge = min(_EDGE, length)
        self._head = file.read(offset, offset + edge)
        self._tail = file.read(offset + length - edge, offset + length)

    def at(self, position: int, count: int) -> bytes:
        """Return `count` bytes from `position`, fewer at the end."""
        end = min(position + max(0, count), self.length)
        if end <= len(self._head):
            return self._head[position:end]
        behind = self.length - len(self._tail)
        if position >= behind:
            return self._tail[position - behind : end - behind]
        return self.file.read(self.offset + position, self.offset + end)


def _payload(blob: StoredBlob, nbytes: int, name: str) -> int:
    """Return where in the blob the tensor's bytes begin: the one record that is not copied."""
    try:
        with zipfile.ZipFile(blob) as archive:
            (data,) = [i for i in archive.infolist() if i.filename.endswith("/data/0")]
        header = blob.at(data.header_offset, 30)
        plain = data.compress_type == zipfile.ZIP_STORED and data.file_size == nbytes
        if not plain or header[:4] != b"PK\x03\x04":
            raise ValueError(f"{data.file_size} bytes, expected {nbytes}")
    except (zipfile.BadZipFile, ValueError, OverflowError) as error:
        raise CheckpointError(f"{blob.file}: {name} is not as it was written: {error}") from error
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return data.header_offset + 30 + names


def _loaded(blob: bytes, sizes: tuple[int, ...], dtype: torch.dtype, what: str) -> torch.Tensor:
    try:
        tensor = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged blob raises has no common class
        raise CheckpointError(f"{what} cannot be read: {error}") from error
    if not isinstance(tensor, torch.Tensor) or (tuple(tensor.shape), tensor.dtype) != (
        sizes,
        dtype,
    ):
        raise CheckpointError(f"{what} is not the {dtype} {sizes} that the metadata promises")
    return tensor


def _stream(file: Place, begin: int, room: memoryview, name: str) -> None:
    done = 0
    for block in file.blocks(begin, begin + len(room)):
        room[done : done + len(block)] = block
        done += len(block)
    if done != len(room):
        raise CheckpointError(f"a shard ended in the middle of {name}: it is truncated")
