"""The tensors of a torch distributed checkpoint (DCP): their chunks, and the way to their bytes.

__R_I.distcp    blobs one after the other, each a zip file that torch.save writes, with a
                tensor's bytes as */data/0
"""

import io
import math
import os
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from toolkit.errors import CheckpointError, one_line

_MAX_RECORD = 2**20  # bytes of a record that is not a tensor's, and of the directory

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes of a part of a tensor


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
    blob: tuple[int, int] = (0, 0)  # its offset and length, where `read_chunk` may be needed


def tensor_chunks(folder: str | Path, metadata: Metadata, fqn: str) -> list[Chunk]:
    """Return the non-empty chunks of one tensor, each with the place of its raw bytes.

    Reads the directory of each blob's zip, never a payload. CheckpointError where there is no such
    tensor, or a chunk's blob is missing or no tensor of its size.
    """
    entry = _tensor_metadata(metadata, fqn)
    parts = [part for part in entry.chunks if math.prod(part.sizes) > 0]
    return [_locate(Path(folder), metadata, fqn, part) for part in parts]


def _tensor_metadata(metadata: Metadata, fqn: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata.get(fqn)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"{fqn} is {'no tensor' if entry else 'not in the checkpoint'}")
    return entry


def _locate(folder: Path, metadata: Metadata, fqn: str, part: ChunkStorageMetadata) -> Chunk:
    info = metadata.storage_data.get(MetadataIndex(fqn, part.offsets))
    if info is None:
        raise CheckpointError(f"{fqn}: the chunk at {tuple(part.offsets)} is stored nowhere")
    if info.transform_descriptors:
        raise CheckpointError(f"{fqn} is stored by {info.transform_descriptors}; save it plainly")
    file, sizes = folder / info.relative_path, tuple(part.sizes)
    dtype = _tensor_metadata(metadata, fqn).properties.dtype
    nbytes = math.prod(sizes) * dtype.itemsize
    try:
        with open(file, "rb", buffering=0) as f:
            blob = BlobView(f.fileno(), info.offset, info.length)
            begin, length = payload(blob)
            tensor = blob.load("meta")
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
    """Return a chunk's tensor through torch's own reader, where it is not stored row by row."""
    with open(chunk.file, "rb", buffering=0) as f:
        return BlobView(f.fileno(), *chunk.blob).load("cpu").contiguous()


def coverage_fault(metadata: Metadata, fqn: str) -> str | None:
    """Return why chunks do not cover each element of a tensor exactly once; None if they do."""
    entry = _tensor_metadata(metadata, fqn)
    boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
    return boxes_fault(tuple(entry.size), boxes)


def boxes_fault(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Return why `boxes` do not cover each element of `shape` exactly once."""
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


def check_blob(file: Path, offset: int, length: int) -> None:
    """Raise CheckpointError for a blob that torch.save does not write, or that would grow."""
    try:
        with open(file, "rb", buffering=0) as f:
            payload(BlobView(f.fileno(), offset, length))
    except Exception as error:  # what a damaged zip file raises has no common class
        raise CheckpointError(f"{file}: a blob cannot be read: {one_line(error)}") from error


def payload(blob: "BlobView") -> tuple[int, int]:
    """Return place and length, in the blob, of the tensor's bytes, its record data/0 (0, 0: none).

    Nothing may be compressed, or a small blob could become a large tensor. The CRCs of the other
    records are checked where there are any. CheckpointError or zipfile.BadZipFile where torch.save
    did not write it.
    """
    blob.most = _MAX_RECORD  # while the directory is read
    with zipfile.ZipFile(blob) as archive:
        blob.most = None
        _check_directory(blob, archive.start_dir)
        place = (0, 0)
        for record in archive.infolist():
            _check_stored(record)
            if record.filename.endswith("/data/0"):
                header = blob.at(record.header_offset, 30)
                if header[:4] != b"PK\x03\x04" or place != (0, 0):
                    raise CheckpointError("its record of bytes has no header")
                skipped = sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
                place = (record.header_offset + 30 + skipped, record.file_size)
                continue
            if record.file_size > _MAX_RECORD:
                raise CheckpointError(
                    f"its record {record.filename:.80} has {record.file_size} bytes"
                )
            if record.CRC == 0:  # torch.save was told to leave it out
                record.CRC = None  # type: ignore[assignment]
            content = archive.read(record)
            if record.filename.endswith("/byteorder") and content.decode() != sys.byteorder:
                raise CheckpointError(f"it was written {content.decode()} endian")
    if sum(place) > blob.length:
        raise CheckpointError("its record of bytes ends behind it")
    return place


def _check_directory(blob: "BlobView", begin: int) -> None:
    """Refuse a blob whose directory zipfile finds elsewhere than torch, which follows offsets."""
    end = blob.at(max(0, blob.length - 98), 98).rjust(98, b"\0")
    if end[56:60] == b"PK\6\7":  # a zip64 record of 56 bytes, its locator of 20, the end of 22
        found = [int.from_bytes(end[i : i + 8], "little") for i in (64, 48)]
        expected = [blob.length - 98, begin]
    else:
        found, expected = [int.from_bytes(end[92:96], "little")], [begin]
    if found != expected:
        raise CheckpointError("its end names another directory than the one before it")


def _check_stored(record: zipfile.ZipInfo) -> None:
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
        raise CheckpointError(f"{record.filename!a:.80} is compressed, which torch.save never does")


class BlobView(io.RawIOBase):
    """A part of a file as a seekable stream of its own, through pread: nothing else is read."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self.descriptor, self.offset, self.length, self.position = descriptor, offset, length, 0
        self.most: int | None = None
        """Bytes that may be read at a time."""

    def at(self, position: int, count: int) -> bytes:
        count = max(0, min(count, self.length - position))
        if self.most is not None and count > self.most:
            raise CheckpointError(f"its directory has {count} bytes")
        return os.pread(self.descriptor, count, self.offset + position)

    def load(self, device: str) -> Any:
        """Return what torch.save wrote here; without its values for `meta`."""
        self.seek(0)
        return torch.load(io.BufferedReader(self), map_location=device, weights_only=True)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("seek before the beginning")
        self.position = base + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        data = self.at(self.position, len(buffer))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)
