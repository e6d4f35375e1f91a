"""The tensors of a torch distributed checkpoint (DCP): their chunks, and the way to their bytes.

__R_I.distcp    blobs one after the other, each what torch.save writes
"""

import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from toolkit.errors import CheckpointError, one_line
from toolkit.formats.dcp_blobs import BlobView, payload

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""


@dataclass(frozen=True)
class Chunk:
    """One rectangular part of a tensor and where it is stored."""

    file: Path
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    raw: int | None
    """Offset in the file of the payload, exactly this chunk in row-major order; None where the blob
    is stored in another way: `read_chunk` reads that."""
    blob: tuple[int, int] = (0, 0)
    """Offset and length of the blob in the file, where `read_chunk` may be needed."""


def tensor_chunks(folder: str | Path, metadata: Metadata, fqn: str) -> list[Chunk]:
    """Return the non-empty chunks of one tensor, each with the place of its raw bytes.

    Reads the directory of each blob's zip (a few hundred bytes), never a payload.

    Raises:
        CheckpointError: no such tensor, a chunk that is stored nowhere, or a blob that is no tensor
            of its size.
    """
    entry = _tensor_metadata(metadata, fqn)
    parts = [part for part in entry.chunks if math.prod(part.sizes) > 0]
    return [_locate(Path(folder), metadata, fqn, entry, part) for part in parts]


def _tensor_metadata(metadata: Metadata, fqn: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata.get(fqn)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"{fqn} is {'no tensor' if entry else 'not in the checkpoint'}")
    return entry


def _locate(
    folder: Path,
    metadata: Metadata,
    fqn: str,
    entry: TensorStorageMetadata,
    part: ChunkStorageMetadata,
) -> Chunk:
    info = metadata.storage_data.get(MetadataIndex(fqn, part.offsets))
    if info is None:
        raise CheckpointError(f"{fqn}: the chunk at {tuple(part.offsets)} is stored nowhere")
    if info.transform_descriptors:
        raise CheckpointError(
            f"{fqn} is stored transformed ({info.transform_descriptors}); save it plainly"
        )
    file, dtype, sizes = folder / info.relative_path, entry.properties.dtype, tuple(part.sizes)
    nbytes = math.prod(sizes) * dtype.itemsize
    try:
        with open(file, "rb", buffering=0) as f:
            blob = BlobView(f.fileno(), info.offset, info.length)
            begin, length = payload(blob)
            blob.seek(0)
            tensor = torch.load(io.BufferedReader(blob), map_location="meta", weights_only=True)
    except Exception as error:  # what a damaged blob raises has no common class
        raise CheckpointError(
            f"{file}: the blob of {fqn} cannot be read: {one_line(error)}"
        ) from error
    is_tensor = isinstance(tensor, torch.Tensor)
    found = (tensor.dtype, tuple(tensor.shape)) if is_tensor else type(tensor)
    if found != (dtype, sizes) or length < nbytes:
        raise CheckpointError(
            f"{file}: the blob of {fqn} should be {dtype} {sizes} in {nbytes} bytes, is {found} in "
            f"{length}"
        )
    row_major = length == nbytes and tensor.is_contiguous() and tensor.storage_offset() == 0
    raw = info.offset + begin if row_major else None
    return Chunk(file, tuple(part.offsets), sizes, dtype, raw, (info.offset, info.length))


def read_chunk(chunk: Chunk) -> torch.Tensor:
    """Return a chunk's tensor through torch's own reader, where it is not stored row by row.

    Needs the memory of the blob.
    """
    with open(chunk.file, "rb") as f:
        f.seek(chunk.blob[0])
        blob = io.BytesIO(f.read(chunk.blob[1]))
    return torch.load(blob, map_location="cpu", weights_only=True).contiguous()


def coverage_fault(metadata: Metadata, fqn: str) -> str | None:
    """Return why chunks do not cover each element of a tensor exactly once; None if they do.

    Intervals only, no bytes are read.
    """
    entry = _tensor_metadata(metadata, fqn)
    boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
    return boxes_fault(tuple(entry.size), boxes)


def boxes_fault(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Return why `boxes` do not cover each element of `shape` exactly once.

    O(n log n) in the number of boxes for tensors sharded over one dimension.
    """
    boxes = [(offsets, sizes) for offsets, sizes in boxes if math.prod(sizes) > 0]
    if not shape and len(boxes) > 1:
        return f"{len(boxes)} chunks hold its single element"
    if len(boxes) > 1:
        # Sweep along the dimension that separates most chunks, so that few are open at a time.
        dim = max(range(len(shape)), key=lambda d: len({o[d] for o, _ in boxes}))
        open_boxes: list[Box] = []
        for offsets, sizes in sorted(boxes, key=lambda box: box[0][dim]):
            open_boxes = [b for b in open_boxes if b[0][dim] + b[1][dim] > offsets[dim]]
            for other, extent in open_boxes:
                sides = zip(offsets, sizes, other, extent, strict=True)
                if all(o < p + m and p < o + n for o, n, p, m in sides):
                    return f"the chunks at {other} (of {extent}) and {offsets} (of {sizes}) overlap"
            open_boxes.append((offsets, sizes))
    total, held = math.prod(shape), sum(math.prod(sizes) for _, sizes in boxes)
    return None if held == total else f"its chunks hold {held} of {total} elements"
