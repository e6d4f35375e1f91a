"""Find the bytes of the tensors of a torch distributed checkpoint (DCP).

__R_I.distcp    a sequence of blobs; each is a zip file written by torch.save, which has the
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
    """One rectangular part of a tensor in a DCP checkpoint, and its location on disk."""

    file: Path
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    raw: int | None
    """Offset in the file of this chunk's bytes in row-major order; None if they are stored in
    another way, which `read_chunk` reads."""
    blob: tuple[int, int] = (0, 0)  # offset and length of the blob, for `read_chunk`


def tensor_chunks(folder: str | Path, metadata: Metadata, fqn: str) -> list[Chunk]:
    """Find the non-empty chunks of one tensor, and locate their bytes in the shard files.

    A blob is the part of a shard file that holds one chunk. Its zip directory is read, but no
    tensor values.

    Args:
        folder: the DCP folder.
        metadata: the folder's metadata.
        fqn: name of the tensor.

    Raises:
        CheckpointError: there is no such tensor; or the blob of a chunk is missing or damaged, or
            does not match the metadata.
    """
    entry = _get_tensor_metadata(metadata, fqn)
    parts = [part for part in entry.chunks if math.prod(part.sizes) > 0]
    return [_find_chunk(Path(folder), metadata, fqn, part) for part in parts]


def _get_tensor_metadata(metadata: Metadata, fqn: str) -> TensorStorageMetadata:
    """Return the metadata of the tensor `fqn`; raise CheckpointError if there is no such tensor."""
    entry = metadata.state_dict_metadata.get(fqn)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"{fqn} is {'no tensor' if entry else 'not in the checkpoint'}")
    return entry


def _find_chunk(folder: Path, metadata: Metadata, fqn: str, part: ChunkStorageMetadata) -> Chunk:
    """Locate the bytes of one chunk, and return it as a `Chunk`.

    Raises:
        CheckpointError: its blob is missing or damaged, or does not match the metadata.
    """
    info = metadata.storage_data.get(MetadataIndex(fqn, part.offsets))
    if info is None:
        raise CheckpointError(f"{fqn}: the chunk at {tuple(part.offsets)} is stored nowhere")
    if info.transform_descriptors:
        raise CheckpointError(f"{fqn} is stored by {info.transform_descriptors}; save it plainly")
    file, sizes = folder / info.relative_path, tuple(part.sizes)
    dtype = _get_tensor_metadata(metadata, fqn).properties.dtype
    nbytes = math.prod(sizes) * dtype.itemsize
    try:
        with open(file, "rb", buffering=0) as f:
            blob = BlobView(f.fileno(), info.offset, info.length)
            begin, length = find_payload(blob)
            tensor = blob.load("meta")
    except Exception as error:  # errors of a damaged blob have no common class
        raise CheckpointError(
            f"{file}: the blob of {fqn} cannot be read: {one_line(error)}"
        ) from error
    is_tensor = isinstance(tensor, torch.Tensor)
    actual = (tensor.dtype, tuple(tensor.shape)) if is_tensor else type(tensor)
    if actual != (dtype, sizes) or length < nbytes:
        raise CheckpointError(
            f"{file}: the blob of {fqn} should be {dtype} {sizes} in {nbytes} bytes, is "
            f"{actual} in {length}"
        )
    row_major = length == nbytes and tensor.is_contiguous() and tensor.storage_offset() == 0
    raw = info.offset + begin if row_major else None
    return Chunk(file, tuple(part.offsets), sizes, dtype, raw, (info.offset, info.length))


def read_chunk(chunk: Chunk) -> torch.Tensor:
    """Read a chunk's values onto the CPU with torch.load, as a contiguous tensor.

    Needed for chunks whose `raw` is None; it also works for others.
    """
    with open(chunk.file, "rb", buffering=0) as f:
        return BlobView(f.fileno(), *chunk.blob).load("cpu").contiguous()


def find_coverage_fault(metadata: Metadata, fqn: str) -> str | None:
    """Explain why the chunks of tensor `fqn` do not cover each element exactly once.

    Returns:
        The explanation; None if they do.
    """
    entry = _get_tensor_metadata(metadata, fqn)
    boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
    return find_boxes_fault(tuple(entry.size), boxes)


def find_boxes_fault(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Explain why `boxes` do not cover each element of a tensor exactly once; None if they do.

    Args:
        shape: shape of the tensor.
        boxes: (offsets, sizes) of each rectangular part. Empty parts are ignored.
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
    total = math.prod(shape)
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    return None if covered == total else f"its chunks hold {covered} of {total} elements"


def check_blob(file: Path, offset: int, length: int) -> None:
    """Raise CheckpointError if a blob is not as torch.save writes it, or is compressed.

    A blob is the zip archive of one tensor in a shard file.

    Args:
        file: the shard file.
        offset: first byte of the blob in the file.
        length: number of bytes of the blob.
    """
    try:
        with open(file, "rb", buffering=0) as f:
            find_payload(BlobView(f.fileno(), offset, length))
    except Exception as error:  # errors of a damaged zip file have no common class
        raise CheckpointError(f"{file}: a blob cannot be read: {one_line(error)}") from error


def find_payload(blob: "BlobView") -> tuple[int, int]:
    """Locate the tensor's bytes in a blob; torch.save writes them as the zip record `data/0`.

    Compressed records are refused, because a small blob could expand to a large tensor. If the blob
    has CRCs, those of all records except `data/0` are checked.

    Returns:
        (offset in the blob, number of bytes); (0, 0) if there is no such record.

    Raises:
        CheckpointError, zipfile.BadZipFile: torch.save did not write the blob.
    """
    blob.max_read = _MAX_RECORD  # while the directory is read
    with zipfile.ZipFile(blob) as archive:
        blob.max_read = None
        _check_directory(blob, archive.start_dir)
        place = (0, 0)
        for record in archive.infolist():
            _check_uncompressed(record)
            if record.filename.endswith("/data/0"):
                header = blob.read_at(record.header_offset, 30)
                if header[:4] != b"PK\x03\x04" or place != (0, 0):
                    raise CheckpointError("its record of bytes has no header")
                skipped = sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
                place = (record.header_offset + 30 + skipped, record.file_size)
                continue
            if record.file_size > _MAX_RECORD:
                raise CheckpointError(
                    f"its record {record.filename:.80} has {record.file_size} bytes"
                )
            if record.CRC == 0:  # torch.save was configured to omit it
                record.CRC = None  # type: ignore[assignment]
            content = archive.read(record)
            if record.filename.endswith("/byteorder") and content.decode() != sys.byteorder:
                raise CheckpointError(f"it was written {content.decode()} endian")
    if sum(place) > blob.length:
        raise CheckpointError("its record of bytes ends behind it")
    return place


def _check_directory(blob: "BlobView", begin: int) -> None:
    """Raise CheckpointError if zipfile and torch would read different zip directories of a blob.

    torch follows the offsets at the end of the blob. zipfile searches for a directory that ends
    there.

    Args:
        blob: the blob.
        begin: offset of the directory that zipfile reads.
    """
    end = blob.read_at(max(0, blob.length - 98), 98).rjust(98, b"\0")
    if end[56:60] == b"PK\6\7":  # a zip64 record of 56 bytes, its locator of 20, the end of 22
        offsets = [int.from_bytes(end[i : i + 8], "little") for i in (64, 48)]
        expected = [blob.length - 98, begin]
    else:
        offsets = [int.from_bytes(end[92:96], "little")]
        expected = [begin]
    if offsets != expected:
        raise CheckpointError("its end names another directory than the one before it")


def _check_uncompressed(record: zipfile.ZipInfo) -> None:
    """Raise CheckpointError if a zip record is compressed."""
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
        raise CheckpointError(f"{record.filename!a:.80} is compressed, which torch.save never does")


class BlobView(io.RawIOBase):
    """A read-only stream over the bytes [offset, offset + length) of a file: one blob.

    It never reads bytes outside of the blob.
    """

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self.descriptor, self.offset, self.length, self.position = descriptor, offset, length, 0
        self.max_read: int | None = None
        """Most bytes that one read may request; None: any number."""

    def read_at(self, position: int, count: int) -> bytes:
        """Read up to `count` bytes at byte `position` of the blob, without moving the stream.

        Fewer bytes are returned if the blob ends before.

        Raises:
            CheckpointError: more than `max_read` bytes are requested.
        """
        count = max(0, min(count, self.length - position))
        if self.max_read is not None and count > self.max_read:
            raise CheckpointError(f"its directory has {count} bytes")
        return os.pread(self.descriptor, count, self.offset + position)

    def load(self, device: str) -> Any:
        """Load the object that torch.save wrote into this blob, with `weights_only`.

        Args:
            device: device of its tensors; "meta" reads no values.
        """
        self.seek(0)
        return torch.load(io.BufferedReader(self), map_location=device, weights_only=True)

    def readable(self) -> bool:
        """Return True: a blob is always readable."""
        return True

    def seekable(self) -> bool:
        """Return True: a blob is always seekable."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the stream's position and return it; see `io.IOBase.seek`."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("seek before the beginning")
        self.position = base + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Read from the stream's position into `buffer`; return the number of bytes."""
        data = self.read_at(self.position, len(buffer))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)
