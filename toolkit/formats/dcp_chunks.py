"""The tensors of a torch distributed checkpoint (DCP): their chunks, and the way to their bytes.

    __R_I.distcp    blobs one after the other, each what torch.save writes

Owns the checks that chunks cover a tensor and that a blob is the tensor it should be. Knows neither
models nor the Hugging Face format.
"""

import io
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from toolkit.errors import CheckpointError
from toolkit.formats.dcp_blobs import MAX_RECORD, BlobView, check_records
from toolkit.formats.dcp_metadata import StorageInfo, read_metadata


@dataclass(frozen=True)
class Chunk:
    """One rectangular part of a tensor and the blob that holds it."""

    file: Path
    blob: tuple[int, int]
    """Offset and length of the blob in the file."""
    raw: int | None
    """Offset in the file of the payload, exactly this chunk in row-major order; None where the blob
    is stored in another way: `read_chunk` reads that."""
    nbytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""


class TrustedReader(FileSystemReader):
    """`FileSystemReader` for `dcp.load` that trusts neither `.metadata` nor the blobs."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; see `read_metadata` of this module for the checks and errors."""
        if kwargs.get("rank") is not None:
            raise CheckpointError(f"{self.path} was saved without coordination of its ranks")
        metadata = read_metadata(self.path)
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read what `plan` asks for, once each blob is known to be as large as it says."""
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            with open(Path(self.path) / info.relative_path, "rb", buffering=0) as f:
                most = None if item.type == LoadItemType.BYTE_IO else MAX_RECORD
                check_records(BlobView(f.fileno(), info.offset, info.length), most)
        return super().read_data(plan, planner)


class TrustedLoadPlanner(DefaultLoadPlanner):
    """`DefaultLoadPlanner` that reads byte entries (scalars, lists) with `weights_only`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one byte entry into the state dict.

        Raises:
            CheckpointError: it holds something other than plain values and tensors.
        """
        fqn = read_item.dest_index.fqn
        try:
            content = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"entry {fqn} of the checkpoint is no plain value: {error}"
            ) from error
        # The stock method does the placing; it gets bytes that were just written here.
        clean = io.BytesIO()
        torch.save(content, clean)
        clean.seek(0)
        super().load_bytes(read_item, clean)


def tensor_metadata(metadata: Metadata, fqn: str) -> TensorStorageMetadata:
    """Return shape, dtype and chunks of one tensor.

    Raises:
        CheckpointError: there is no such entry, or it is no tensor.
    """
    entry = metadata.state_dict_metadata.get(fqn)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(
            f"{fqn} is {'no tensor' if entry is not None else 'not in the checkpoint'}"
        )
    return entry


def tensor_chunks(
    folder: str | Path, metadata: Metadata, fqn: str, part_of: Sequence[slice] | None = None
) -> list[Chunk]:
    """Return the non-empty chunks of one tensor, each with the place of its raw bytes.

    Reads the directory of each blob's zip (a few hundred bytes), never a payload. With `part_of`, a
    slice a dim, only of the chunks that overlap that part.

    Raises:
        CheckpointError: a chunk that is stored nowhere, or a blob that is no tensor of its size.
    """
    entry = tensor_metadata(metadata, fqn)
    chunks = []
    for part in entry.chunks:
        if math.prod(part.sizes) == 0:
            continue
        if part_of is not None and any(
            o >= want.stop or o + n <= want.start
            for o, n, want in zip(part.offsets, part.sizes, part_of, strict=True)
        ):
            continue
        info = metadata.storage_data.get(MetadataIndex(fqn, part.offsets))
        if info is None:
            raise CheckpointError(f"{fqn}: the chunk at {tuple(part.offsets)} is stored nowhere")
        chunks.append(_locate(Path(folder), fqn, entry, part, info))
    return chunks


def coverage_fault(metadata: Metadata, fqn: str) -> str | None:
    """Return why chunks do not cover each element of a tensor exactly once; None if they do.

    Intervals only, no bytes are read.
    """
    entry = tensor_metadata(metadata, fqn)
    boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
    return boxes_fault(tuple(entry.size), boxes)


def boxes_fault(
    shape: tuple[int, ...], boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
) -> str | None:
    """Return why boxes (offsets, sizes) do not cover each element of `shape` exactly once.

    O(n log n) in the number of boxes for tensors sharded over one dimension.
    """
    boxes = [(offsets, sizes) for offsets, sizes in boxes if math.prod(sizes) > 0]
    total, held = math.prod(shape), sum(math.prod(sizes) for _, sizes in boxes)
    if len(shape) > 0 and len(boxes) > 1:
        # Sweep along the dimension that separates most chunks, so that few are open at a time.
        dim = max(range(len(shape)), key=lambda d: len({o[d] for o, _ in boxes}))
        open_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for offsets, sizes in sorted(boxes, key=lambda box: box[0][dim]):
            open_boxes = [b for b in open_boxes if b[0][dim] + b[1][dim] > offsets[dim]]
            for other, extent in open_boxes:
                if all(
                    o < p + m and p < o + n
                    for o, n, p, m in zip(offsets, sizes, other, extent, strict=True)
                ):
                    return f"the chunks at {other} (of {extent}) and {offsets} (of {sizes}) overlap"
            open_boxes.append((offsets, sizes))
    elif len(boxes) > 1:
        return f"{len(boxes)} chunks hold its single element"
    if held != total:
        return f"its chunks hold {held} of {total} elements"
    return None


def contiguous_runs(
    offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield (first element in the whole tensor, number of elements) of a chunk's contiguous runs.

    They come in the chunk's own row-major order: together, one after the other, its payload.
    """
    full = len(shape)
    while full > 0 and sizes[full - 1] == shape[full - 1]:
        full -= 1
    if full == 0:
        yield 0, math.prod(shape)
        return
    inner = math.prod(shape[full:])
    strides = [math.prod(shape[d + 1 :]) for d in range(full)]
    outer = [range(offsets[d], offsets[d] + sizes[d]) for d in range(full - 1)]
    for position in itertools.product(*outer):
        first = (
            sum(p * s for p, s in zip(position, strides, strict=False)) + offsets[full - 1] * inner
        )
        yield first, sizes[full - 1] * inner


def read_chunk(chunk: Chunk) -> torch.Tensor:
    """Return a chunk's tensor through torch's own reader, where it is not stored row by row.

    Needs the memory of the blob.
    """
    with open(chunk.file, "rb") as f:
        f.seek(chunk.blob[0])
        blob = io.BytesIO(f.read(chunk.blob[1]))
    return torch.load(blob, map_location="cpu", weights_only=True).contiguous()


def _locate(
    folder: Path,
    fqn: str,
    entry: TensorStorageMetadata,
    part: ChunkStorageMetadata,
    info: StorageInfo,
) -> Chunk:
    dtype, sizes = entry.properties.dtype, tuple(part.sizes)
    nbytes = math.prod(sizes) * dtype.itemsize
    if info.transform_descriptors:
        raise CheckpointError(
            f"{fqn} is stored transformed ({info.transform_descriptors}); save it plainly"
        )
    file = folder / info.relative_path
    try:
        with open(file, "rb", buffering=0) as f:
            blob = BlobView(f.fileno(), info.offset, info.length)
            payload, length = check_records(blob, MAX_RECORD)
            blob.seek(0)
            tensor = torch.load(io.BufferedReader(blob), map_location="meta", weights_only=True)
    except Exception as error:  # what a damaged blob raises has no common class
        what = " ".join(f"{error}".split())[:300]
        raise CheckpointError(f"{file}: the blob of {fqn} cannot be read: {what}") from error
    found = (
        (tensor.dtype, tuple(tensor.shape)) if isinstance(tensor, torch.Tensor) else type(tensor)
    )
    if found != (dtype, sizes) or length < nbytes:
        raise CheckpointError(
            f"{file}: the blob of {fqn} should be {dtype} {sizes} in {nbytes} bytes, is {found} in "
            f"{length}"
        )
    row_major = length == nbytes and tensor.is_contiguous() and tensor.storage_offset() == 0
    place = info.offset + payload if row_major else None
    at = (info.offset, info.length)
    return Chunk(file, at, place, nbytes, tuple(part.offsets), sizes, dtype, tuple(entry.size))
