"""Bytes from a shard to their place in an output file, cast on the way, in bounded memory.

Owns the copying, several parts at a time, each through two blocks of memory, past the page cache
(`direct_io`). Knows neither names nor which bytes go where: the caller plans that.
"""

import bisect
import contextlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import CheckpointError, ExportError
from toolkit.export.strided import View
from toolkit.formats.dcp import Chunk, contiguous_runs, read_chunk
from toolkit.formats.direct_io import (
    ALIGNMENT,
    BLOCK,
    Reader,
    Scatterer,
    block,
    open_again,
    reserve,
    write_all,
)

_CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BLOCK = BLOCK - 2 * ALIGNMENT  # bytes read at a time: what lies around them fits beside them
_LONG_RUN = 2**16  # bytes; shorter runs are cheaper through a block than read one by one
_SLICE = 8 * 2**20  # bytes written by one thread before it takes the next part
_OPEN_FILES = 16  # a thread keeps so many shards open


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a stored tensor, which lie together in a file."""

    first: int
    """Index of the first one in the whole tensor, in row-major order."""
    count: int
    file: Path
    position: int
    """Offset of the first byte in `file`."""


@dataclass(frozen=True)
class Copy:
    """Elements to be moved from one place of a file to one of the file being written."""

    file: Path
    position: int
    count: int
    stored: torch.dtype
    at: int
    dtype: torch.dtype
    name: str
    """Of the tensor, for errors."""

    @property
    def nbytes(self) -> int:
        """Bytes that it writes."""
        return self.count * self.dtype.itemsize

    def split(self) -> "Iterator[Copy]":
        """Yield parts of at most `_SLICE` bytes to write: the units that threads share.

        All but the first begin at a multiple of that, so that whole blocks are written.
        """
        done = 0
        while done < self.count:
            at = self.at + done * self.dtype.itemsize
            count = min(self.count - done, max(1, (_SLICE - at % _SLICE) // self.dtype.itemsize))
            position = self.position + done * self.stored.itemsize
            yield replace(self, position=position, count=count, at=at)
            done += count


@dataclass(frozen=True)
class Target:
    """A file being written, with all its bytes reserved: open through the page cache and past it.

    Both are one descriptor where a file system has one way only.
    """

    cached: int
    direct: int


Task = Callable[["Mover", Target], None]
"""Writes a part of the file."""


def flat_pieces(chunks: Iterable[Chunk]) -> list[Piece] | None:
    """Return where a tensor's elements are, in order; None where that is not a few long pieces.

    Chunks split along the first dimension are one piece each; for those split along another one it
    is None.
    """
    pieces = []
    for chunk in chunks:
        if chunk.raw is None:
            return None
        runs = contiguous_runs(chunk.offsets, chunk.sizes, chunk.shape)
        first, count = next(runs)
        if count * chunk.dtype.itemsize != chunk.nbytes:
            return None
        pieces.append(Piece(first, count, chunk.file, chunk.raw))
    return sorted(pieces, key=lambda p: p.first)


def copies(
    view: View, pieces: list[Piece], stored: torch.dtype, at: int, dtype: torch.dtype, name: str
) -> list[Copy] | None:
    """Return how the output that is `view` of a tensor is moved to offset `at`.

    None where its bytes lie in runs too short to be moved one by one.
    """
    length = view.run_length()
    if length * stored.itemsize < min(_LONG_RUN, math.prod(view.size) * stored.itemsize):
        return None
    firsts = [p.first for p in pieces]
    found: list[Copy] = []
    for start, count in view.runs():
        index = max(0, bisect.bisect_right(firsts, start) - 1)
        while count > 0:
            piece = pieces[index]
            skip = start - piece.first
            part = min(count, piece.count - skip)
            position = piece.position + skip * stored.itemsize
            last = found[-1] if found else None
            if (
                last is not None
                and last.file == piece.file
                and last.position + last.count * stored.itemsize == position
            ):
                found[-1] = replace(last, count=last.count + part)
            else:
                found.append(Copy(piece.file, position, part, stored, at, dtype, name))
            start, count, at = start + part, count - part, at + part * dtype.itemsize
            index += 1
    return found


def run_tasks(
    tasks: Sequence[Copy | Task], target: "Target", threads: int, advance: Callable[[int], Any]
) -> None:
    """Do all `tasks` on the file `target`, several at a time, begun in their order.

    `advance` is called with the bytes written, one call at a time. The first failure ends it and is
    raised; so does an interrupt.
    """
    lock, stop = threading.Lock(), threading.Event()
    pending = iter(tasks)

    def counted(count: int) -> None:
        with lock:
            advance(count)

    def work() -> None:
        with Mover(counted) as mover:
            while not stop.is_set():
                with lock:
                    task = next(pending, None)
                if task is None:
                    return
                if isinstance(task, Copy):
                    mover.copy(task, target)
                else:
                    task(mover, target)

    threads = max(1, min(threads, len(tasks)))
    if threads == 1:
        work()
        return
    # Each thread casts by itself: torch's own threads would only get in each other's way.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            try:
                for future in as_completed([pool.submit(work) for _ in range(threads)]):
                    future.result()
            finally:
                stop.set()
    finally:
        torch.set_num_threads(before)


class Mover:
    """Moves the bytes of chunks and tensors into open files, casting where dtypes differ.

    For one thread: it has blocks of memory of its own. What was moved is in the file after `flush`,
    and after the context.
    """

    def __init__(self, advance: Callable[[int], Any]) -> None:
        self.advance = advance
        """Called with the number of bytes written."""
        self.sources: dict[Path, Reader] = {}
        self._block = block()
        self._room = bytearray()  # for a cast block
        self._out = Scatterer()

    def __enter__(self) -> "Mover":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()
        for reader in self.sources.values():
            reader.close()
        self.sources.clear()

    def flush(self) -> None:
        """Write what is gathered of the last file."""
        self._out.flush()

    def copy(self, copy: Copy, target: Target) -> None:
        """Write the elements of `copy` to their place in `target`."""
        source, nbytes = self._open(copy.file), copy.count * copy.stored.itemsize
        if copy.stored == copy.dtype:
            self._copy(source, copy.position, target, copy.at, nbytes, copy.name)
        else:
            most = _elements(copy.stored, copy.dtype)
            blocks = self._read_blocks(source, copy.position, nbytes, copy.stored, most, copy.name)
            runs = [(0, copy.count)]
            self._scatter(blocks, runs, target, copy.at, copy.dtype, copy.name)

    def _open(self, file: Path) -> Reader:
        if file not in self.sources:
            if len(self.sources) >= _OPEN_FILES:
                self.sources.pop(next(iter(self.sources))).close()
            self.sources[file] = Reader(file)
        return self.sources[file]

    def move(self, chunk: Chunk, target: Target, begin: int, dtype: torch.dtype, name: str) -> None:
        """Write `chunk` to its place in the tensor that starts at byte `begin` of `target`."""
        runs = contiguous_runs(chunk.offsets, chunk.sizes, chunk.shape)
        if chunk.raw is None:
            blocks = _blocks(read_chunk(chunk), _elements(chunk.dtype, dtype))
            self._scatter(blocks, runs, target, begin, dtype, name)
            return
        source, position = self._open(chunk.file), chunk.raw
        runs = iter(runs)
        first = next(runs)
        item = chunk.dtype.itemsize
        if chunk.dtype == dtype and first[1] * item >= _LONG_RUN:
            # All runs of a chunk are equally long.
            for start, count in itertools.chain([first], runs):
                self._copy(source, position, target, begin + start * item, count * item, name)
                position += count * item
            return
        most = _elements(chunk.dtype, dtype)
        blocks = self._read_blocks(source, position, chunk.nbytes, chunk.dtype, most, name)
        self._scatter(blocks, itertools.chain([first], runs), target, begin, dtype, name)

    def write(
        self, tensor: torch.Tensor, target: Target, begin: int, dtype: torch.dtype, name: str
    ) -> None:
        """Write a whole tensor, of any strides, at byte `begin` of `target`."""
        if tensor.numel() > 0:
            blocks, runs = _blocks(tensor, _elements(tensor.dtype, dtype)), [(0, tensor.numel())]
            self._scatter(blocks, runs, target, begin, dtype, name)

    def _copy(
        self, source: Reader, at: int, target: Target, to: int, nbytes: int, name: str
    ) -> None:
        """Copy bytes as they are.

        The kernel's own copy_file_range does it through the page cache where offsets are not
        aligned, and page by page: 1.5 x the processor time of doing that here, on ext4.
        """
        for done in range(0, nbytes, _BLOCK):
            count = min(_BLOCK, nbytes - done)
            self._put(target, to + done, self._read(source, at + done, count, name))

    def _read(self, source: Reader, at: int, nbytes: int, name: str) -> memoryview:
        found = source.read(self._block, at, nbytes)
        if len(found) < nbytes:
            raise CheckpointError(f"a shard ended in the middle of {name}: it is truncated")
        return found

    def _put(self, target: Target, offset: int, content: memoryview) -> None:
        self._out.put(target.cached, target.direct, offset, content)
        self.advance(len(content))

    def _read_blocks(
        self, source: Reader, at: int, nbytes: int, dtype: torch.dtype, most: int, name: str
    ) -> Iterator[torch.Tensor]:
        for done in range(0, nbytes, most * dtype.itemsize):
            count = min(most * dtype.itemsize, nbytes - done)
            content = self._read(source, at + done, count, name)
            yield torch.frombuffer(content, dtype=dtype)

    def _scatter(
        self,
        blocks: Iterable[torch.Tensor],
        runs: Iterable[tuple[int, int]],
        target: Target,
        begin: int,
        dtype: torch.dtype,
        name: str,
    ) -> None:
        """Write consecutive blocks over the runs, which they fill one after the other."""
        runs = iter(runs)
        start, left = 0, 0
        for elements in blocks:
            content = self._cast(elements, dtype, name)
            done, length = 0, elements.numel()
            while done < length:
                if left == 0:
                    start, left = next(runs)
                count = min(left, length - done)
                piece = content[done * dtype.itemsize : (done + count) * dtype.itemsize]
                at = begin + start * dtype.itemsize
                if len(piece) < _LONG_RUN and count == left:
                    write_all(target.cached, piece, at)  # the next run lies elsewhere
                    self.advance(len(piece))
                else:
                    self._put(target, at, piece)
                done, start, left = done + count, start + count, left - count

    def _cast(self, values: torch.Tensor, dtype: torch.dtype, name: str) -> memoryview:
        """Return the bytes of `values` in `dtype`; they last until the next call."""
        if values.dtype != dtype:
            if len(self._room) < values.numel() * dtype.itemsize:
                self._room = bytearray(values.numel() * dtype.itemsize)
            cast = torch.frombuffer(self._room, dtype=dtype, count=values.numel())
            cast.copy_(values)
            if dtype == torch.float16 and bool((cast.isinf() & values.isfinite()).any()):
                raise ExportError(
                    f"{name} has values beyond float16's 65504; use --dtype bfloat16 or float32"
                )
            values = cast
        return memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _elements(stored: torch.dtype, dtype: torch.dtype) -> int:
    """Return how many elements fit into a block before and after the cast."""
    return max(1, _BLOCK // max(stored.itemsize, dtype.itemsize))


def _blocks(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in row-major order, `most` at a time, whatever its strides."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(most)
    elif math.prod(tensor.shape[1:]) > most:
        for part in tensor:
            yield from _blocks(part, most)
    else:
        for rows in tensor.split(max(1, most // math.prod(tensor.shape[1:]))):
            yield rows.reshape(-1)


@contextlib.contextmanager
def created(file: Path, size: int) -> Iterator[Target]:
    """Create `file` with `size` bytes reserved on the disk, open while the context lasts."""
    cached = _create(file, size)
    try:
        direct = open_again(cached, file, os.O_WRONLY)
        try:
            yield Target(cached, direct)
        finally:
            os.close(direct)
    finally:
        os.close(cached)


def _create(file: Path, size: int) -> int:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        reserve(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
