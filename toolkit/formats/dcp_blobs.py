"""What torch.save wrote into a part of a file: a zip file with a tensor's bytes as */data/0."""

import io
import os
import sys
import zipfile
from typing import Any

from toolkit.errors import CheckpointError

MAX_RECORD = 2**20
"""Bytes of a record that is not a tensor's, and of the directory."""


def check_records(blob: "BlobView", most: int | None) -> tuple[int, int]:
    """Return place and length, in the blob, of the tensor's bytes, its record data/0 (0, 0: none).

    Nothing may be compressed, or a small blob could become a large tensor. The CRCs of the other
    records are checked; with `most` they have at most so many bytes each.

    Raises:
        CheckpointError, zipfile.BadZipFile: it is not what torch.save writes.
    """
    blob.most = MAX_RECORD  # while the directory is read
    with zipfile.ZipFile(blob) as archive:
        blob.most = None
        place = (0, 0)
        for record in archive.infolist():
            if (
                record.compress_type != zipfile.ZIP_STORED
                or record.file_size != record.compress_size
            ):
                raise CheckpointError("it is compressed, which torch.save never does")
            if record.filename.endswith("/data/0"):
                header = blob.at(record.header_offset, 30)
                if header[:4] != b"PK\x03\x04" or place != (0, 0):
                    raise CheckpointError("its record of bytes has no header")
                skipped = sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
                place = (record.header_offset + 30 + skipped, record.file_size)
            elif most is not None and record.file_size > most:
                raise CheckpointError(
                    f"its record {record.filename:.80} has {record.file_size} bytes"
                )
            elif most is not None:
                content = archive.read(record)
                if record.filename.endswith("/byteorder") and content.decode() != sys.byteorder:
                    raise CheckpointError(f"it was written {content.decode()} endian")
    if sum(place) > blob.length:
        raise CheckpointError("its record of bytes ends behind it")
    return place


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
