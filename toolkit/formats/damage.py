"""Which tensors of a damaged file are hit: a shard of a DCP checkpoint, or a safetensors file.

Owns the way from a byte to its tensor without a copy of the right bytes. In a shard every blob is a
zip file, whose CRCs guard the contents of its records; the rest of a blob (headers, padding, the
directory) is the same for every tensor of a dtype and shape, and is compared with what torch.save
writes for one. Knows neither manifests nor models.
"""

import functools
import hashlib
import os
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.formats.dcp_blobs import BlobView
from toolkit.formats.safetensors_header import TensorEntry

_BLOCK = 2**22
_DESCRIPTOR = b"PK\x07\x08"


@dataclass(frozen=True)
class BlobPlace:
    """Where the blob of one chunk is, and what should be in it."""

    name: str
    """Of the tensor."""
    begin: int
    length: int
    dtype: torch.dtype | None
    """None for an entry that is no tensor."""
    sizes: tuple[int, ...]


def damaged_blobs(file: Path, places: Iterable[BlobPlace]) -> list[tuple[str, str]]:
    """Return (tensor, what is wrong) for the blobs of a shard that are not what was written.

    Reads the whole shard once, in blocks of 4 MB. Where every blob is whole by itself the list is
    empty: then the shard is that of another checkpoint, or the damage lies between the blobs.
    """
    size = file.stat().st_size
    found: dict[str, str] = {}
    unlike: dict[str, str] = {}
    whole = 0
    with open(file, "rb", buffering=0) as f:
        for place in sorted(places, key=lambda p: p.begin):
            if place.begin + place.length > size:
                left = max(0, size - place.begin)
                found[place.name] = f"is lost: {left} of its {place.length} bytes are there"
                continue
            blob = BlobView(f.fileno(), place.begin, place.length)
            if what := _broken_record(blob):
                found[place.name] = what
            elif place.dtype is not None:
                whole += 1
                if what := _unlike_torch(blob, place.dtype, place.sizes):
                    unlike.setdefault(place.name, what)
    # Where no blob is as this torch would write it, another version of torch wrote them.
    if len(unlike) < max(2, whole):
        found = {**unlike, **found}
    return list(found.items())


def damaged_pieces(
    file: Path, entries: dict[str, TensorEntry], hashes: dict[str, str]
) -> list[tuple[str, str]]:
    """Return (tensor, what is wrong) for the tensors of a safetensors file that are not what was
    written, by the sha256 of their bytes.
    """
    size, found = file.stat().st_size, []
    with open(file, "rb", buffering=0) as f:
        for name, entry in sorted(entries.items(), key=lambda e: e[1].begin):
            if entry.begin + entry.nbytes > size:
                left = max(0, size - entry.begin)
                found.append((name, f"is lost: {left} of its {entry.nbytes} bytes are there"))
                continue
            hasher = hashlib.sha256()
            for begin in range(0, entry.nbytes, _BLOCK):
                count = min(_BLOCK, entry.nbytes - begin)
                hasher.update(os.pread(f.fileno(), count, entry.begin + begin))
            if name in hashes and hasher.hexdigest() != hashes[name]:
                found.append((name, "has other bytes than were written"))
    return found


def _broken_record(blob: BlobView) -> str | None:
    """Return what is wrong with the records of a blob, by their CRCs."""
    try:
        with zipfile.ZipFile(blob) as archive:
            for info in archive.infolist():
                # torch stores; zipfile does not look at the CRC where the two lengths differ.
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    return f"is damaged: the lengths of {_short(info.filename)} in its blob"
                with archive.open(info) as record:
                    while record.read(_BLOCK):
                        pass
    except Exception as error:  # what a damaged zip file raises has no common class
        return f"is damaged: {type(error).__name__}: {_short(error)}"
    return None


def _unlike_torch(blob: BlobView, dtype: torch.dtype, sizes: tuple[int, ...]) -> str | None:
    """Return where a blob whose records are whole is not what torch.save writes around them."""
    like = _reference(dtype, sizes)
    if like.length != blob.length:
        return "is damaged: its blob is not as long as torch writes it"
    with zipfile.ZipFile(blob) as archive:
        records, at = archive.infolist(), archive.start_dir
    free, crcs = [], []  # ranges that differ between tensors; places of CRCs, and their values
    for info in records:
        names, extras = struct.unpack("<HH", blob.at(info.header_offset + 26, 4))
        begin = info.header_offset + 30 + names + extras
        end = begin + info.file_size
        free.append((begin, end))
        for place in (info.header_offset + 14, end + 4, at + 16):
            # Before a record that is streamed, torch leaves its CRC out; only behind such a one
            # there is another.
            behind = place == end + 4
            if behind and blob.at(end, 4) != _DESCRIPTOR:
                continue
            if like.at(place, 4) != bytes(4):
                crcs.append((place, info.CRC))
        at += 46 + sum(struct.unpack("<HHH", blob.at(at + 28, 6)))
    for place, crc in crcs:
        free.append((place, place + 4))
        if blob.at(place, 4) != struct.pack("<L", crc):
            return "is damaged: a CRC in its blob"
    position = 0
    for begin, end in [*sorted(free), (blob.length, blob.length)]:
        if blob.at(position, begin - position) != like.at(position, begin - position):
            return f"is damaged: between byte {position} and {begin} of its blob"
        position = max(position, end)
    return None


class _Sparse:
    """What torch.save writes, without the tensor's memory where that is large."""

    def __init__(self, payload: int) -> None:
        self.payload, self.length = payload, 0
        self.pieces: list[tuple[int, bytes]] = []

    def write(self, content: Any) -> int:
        count = len(content)
        if count != self.payload or count < _BLOCK:
            self.pieces.append((self.length, bytes(content)))
        self.length += count
        return count

    def flush(self) -> None:
        pass

    def at(self, position: int, count: int) -> bytes:
        found = bytearray(max(0, min(count, self.length - position)))
        for begin, piece in self.pieces:
            first, last = max(begin, position), min(begin + len(piece), position + len(found))
            if first < last:
                found[first - position : last - position] = piece[first - begin : last - begin]
        return bytes(found)


@functools.lru_cache(256)
def _reference(dtype: torch.dtype, sizes: tuple[int, ...]) -> _Sparse:
    """Return what torch.save writes for such a tensor. Of ones: a CRC of 0 would look left out."""
    tensor = torch.ones(sizes, dtype=dtype)
    stream = _Sparse(tensor.nbytes)
    torch.save(tensor, stream)  # type: ignore[arg-type]
    return stream


def _short(error: object) -> str:
    text = " ".join(repr(str(error))[1:-1].split())
    return text if len(text) <= 120 else text[:120] + " ..."
