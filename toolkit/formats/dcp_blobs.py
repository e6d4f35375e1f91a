"""What torch.save wrote into a part of a file: a zip file with a tensor's bytes as */data/0."""

import io
import os
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import CheckpointError, one_line

_MAX_RECORD = 2**20  # bytes of a record that is not a tensor's, and of the directory


def check_blob(file: Path, offset: int, length: int) -> None:
    """Refuse a blob that would become larger than it is, or that torch.save does not write.

    Raises:
        CheckpointError: names the file.
    """
    try:
        with open(file, "rb", buffering=0) as f:
            payload(BlobView(f.fileno(), offset, length))
    except Exception as error:  # what a damaged zip file raises has no common class
        raise CheckpointError(f"{file}: a blob cannot be read: {one_line(error)}") from error


def payload(blob: "BlobView") -> tuple[int, int]:
    """Return place and length, in the blob, of the tensor's bytes, its record data/0 (0, 0: none).

    Nothing may be compressed, or a small blob could become a large tensor. The CRCs of the other
    records are checked.

    Raises:
        CheckpointError, zipfile.BadZipFile: it is not what torch.save writes.
    """
    blob.most = _MAX_RECORD  # while the directory is read
    with zipfile.ZipFile(blob) as archive:
        blob.most = None
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
            content = archive.read(record)
            if record.filename.endswith("/byteorder") and content.decode() != sys.byteorder:
                raise CheckpointError(f"it was written {content.decode()} endian")
    if sum(place) > blob.length:
        raise CheckpointError("its record of bytes ends behind it")
    return place


def damaged_blobs(file: Path, places: Iterable[tuple[str, int, int]]) -> list[tuple[str, str]]:
    """Return (tensor, what is wrong) for the blobs of a shard that are not what was written.

    CRCs guard the records of a blob; the rest (headers, padding, the directory) is compared with
    what torch.save makes of the blob's own tensor. Where every blob is whole by itself the list is
    empty: then the shard is of another checkpoint, or the damage lies between the blobs. Memory:
    the largest blob.

    Args:
        places: (tensor, offset, length) of the blobs.
    """
    size, whole = file.stat().st_size, 0
    found: dict[str, str] = {}
    unlike: dict[str, str] = {}
    with open(file, "rb", buffering=0) as f:
        for name, begin, length in sorted(places, key=lambda place: place[1]):
            if begin + length > size:
                found[name] = f"is lost: {max(0, size - begin)} of its {length} bytes are there"
                continue
            blob = BlobView(f.fileno(), begin, length)
            try:
                with zipfile.ZipFile(blob) as archive:
                    for record in archive.infolist():
                        _check_stored(record)  # zipfile looks at the CRC only of such records
                    if broken := archive.testzip():
                        raise zipfile.BadZipFile(f"the CRC of {broken!a} is another")
            except Exception as error:  # what a damaged zip file raises has no common class
                found[name] = f"is damaged: {one_line(error, 120)}"
                continue
            whole += 1
            if not _as_saved(blob):
                unlike[name] = "is damaged: a header, padding or the directory of its blob"
    # Where no blob is as this torch would write it, another version of torch wrote them.
    return list(({**unlike, **found} if len(unlike) < max(2, whole) else found).items())


def _check_stored(record: zipfile.ZipInfo) -> None:
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
        raise CheckpointError(f"{record.filename!a:.80} is compressed, which torch.save never does")


def _as_saved(blob: "BlobView") -> bool:
    """Whether the bytes of a blob are those that torch.save writes for what it holds."""
    again = _Comparison(blob)
    try:
        blob.seek(0)
        held = torch.load(io.BufferedReader(blob), map_location="cpu", weights_only=True)
        torch.save(held, again)  # type: ignore[arg-type]
    except Exception:  # the directory is damaged where the CRCs are not
        return False
    return again.same and again.position == blob.length


class _Comparison:
    """A file to write to, which keeps nothing but whether a blob has the same bytes."""

    def __init__(self, blob: "BlobView") -> None:
        self.blob, self.position, self.same = blob, 0, True

    def write(self, content: Any) -> int:
        self.same = self.same and self.blob.at(self.position, len(content)) == content
        self.position += len(content)
        return len(content)

    def flush(self) -> None:
        pass


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

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        data = self.at(self.position, len(buffer))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)
