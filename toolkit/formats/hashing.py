"""Hashes of files and of rows without torch, and a program that hashes what another is writing.

Imports nothing of torch: as a program it must start at once (`export.writer`). A thread that hashes
waits for Python's lock after each block, and the writer for the thread; a process waits for bytes
only. It has the kernel write to the disk what it has hashed, not the writer, who would let pages go
that are still to be hashed. Lines on stdin, for one file after the other:

    file PATH                     the next file, which is being written
    to OFFSET                     it is written up to there
    rows WIDTH NAME               a tensor with rows of so many bytes begins; NAME as JSON
    part OFFSET                   the header, or a tensor, ends there
    end                           the whole file was written

For each `end` a line on stdout says, in JSON, its size, its XXH3-128, and of each part its XXH3-128
and the digest of its rows, if it has any; or the errno of what the disk refused.
"""

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import xxhash

LANES = 2  # 64-bit lanes of a digest
BLOCK = 2**20  # bytes read at a time: the processor's cache has them while they are hashed
_BEHIND = 16 * 2**20  # bytes
_MASK = 2**64 - 1
_ROWS = 2**16  # hashed before they are added up: the list of their hashes stays small


class RowHashes:
    """The wrapping sum of the hashes of a tensor's rows, which come in order from index `first`; a
    row has `width` bytes, and its hash is seeded with the tensor's `name` and its index.

    Costs about 1 microsecond a row, and runs at 8 GB/s. See [Note: digests] in `formats.digests`.
    """

    def __init__(self, name: str, width: int, first: int = 0) -> None:
        self.lanes = numpy.zeros(LANES, dtype=numpy.uint64)
        self._seed = xxhash.xxh3_64_intdigest(name.encode()) + first
        self._width, self._open, self._missing = width, xxhash.xxh3_128(), 0

    def update(self, content: memoryview) -> None:
        """Take the next bytes; they may begin and end amid a row."""
        if self._missing:
            part, content = content[: self._missing], content[self._missing :]
            self._open.update(part)
            self._missing -= len(part)
            if self._missing:
                return
            self._add([self._open.digest()])
        count, width, seed = len(content) // self._width, self._width, self._seed
        digest = xxhash.xxh3_128_digest
        for begin in range(0, count, _ROWS):
            rows = range(begin, min(begin + _ROWS, count))
            self._add(
                [digest(content[i * width : (i + 1) * width], (seed + i) & _MASK) for i in rows]
            )
        if rest := content[count * width :]:
            self._open = xxhash.xxh3_128(rest, self._seed & _MASK)
            self._missing = width - len(rest)

    def _add(self, hashes: list[bytes]) -> None:
        self.lanes += numpy.frombuffer(b"".join(hashes), dtype="<u8").reshape(-1, LANES).sum(0)
        self._seed += len(hashes)

    def hexdigest(self) -> str:
        """Return the sum as a manifest keeps it."""
        return self.lanes.astype("<u8").tobytes().hex()


def hasher(kind: str) -> Any:
    """Return an empty hash: sha256 (1.5 GB/s), or xxh3 (XXH3-128, 10 GB/s) and xxh3_64, which guard
    against accidents only.
    """
    if kind == "sha256":
        return hashlib.sha256()
    return xxhash.xxh3_64() if kind == "xxh3_64" else xxhash.xxh3_128()


def write_behind(descriptor: int, given: int, end: int) -> int:
    """Have the kernel begin to write a file to the disk, some MB at a time: fsync then waits for
    the rest only. The bytes up to `given` are on their way; return up to where they are now.

    The page cache may let go of them: what reads them soon should have read them before. It is not
    in `synced_files` because the program below can import nothing of the toolkit.
    """
    if end - given < _BEHIND or not hasattr(os, "posix_fadvise"):
        return given
    os.posix_fadvise(descriptor, given, end - given, os.POSIX_FADV_DONTNEED)
    return end


def _written(descriptor: int, begin: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes from `begin` to `end` of a file, BLOCK at a time, where the page cache has
    them: reading them took 0.5 of 1.0 s for a GB that is hashed three times.
    """
    if begin == end:
        return
    skipped = begin % mmap.ALLOCATIONGRANULARITY
    # Private: some network file systems have no other. Linux knows MAP_POPULATE.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0)
    length, offset = end - begin + skipped, begin - skipped
    with mmap.mmap(descriptor, length, flags, mmap.PROT_READ, offset=offset) as mapped:
        for at in range(skipped, length, BLOCK):
            with memoryview(mapped) as whole, whole[at : at + BLOCK] as content:
                yield content


def main() -> None:
    """Serve the lines of stdin until it ends."""
    rows: RowHashes | None = None
    parts: list[tuple[str, str | None]]
    for line in sys.stdin:
        word, _, value = line.rstrip("\n").partition(" ")
        if word == "file":
            descriptor, at, given = os.open(json.loads(value), os.O_RDONLY), 0, 0
            whole, part, parts = xxhash.xxh3_128(), xxhash.xxh3_128(), []
        elif word == "end":
            os.close(descriptor)
            print(json.dumps({"size": at, "xxh3": whole.hexdigest(), "parts": parts}), flush=True)
        elif word == "rows":
            width, _, name = value.partition(" ")
            rows = RowHashes(json.loads(name), int(width))
        else:
            for content in _written(descriptor, at, int(value)):
                whole.update(content)
                part.update(content)
                if rows is not None:
                    rows.update(content)
            at = int(value)
            given = write_behind(descriptor, given, at)
            if word == "part":
                parts.append((part.hexdigest(), rows.hexdigest() if rows else None))
                part.reset()
                rows = None


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(json.dumps({"errno": error.errno}))
