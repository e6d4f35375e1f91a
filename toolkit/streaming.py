"""Bytes from a shard to their place in an output file, cast on the way, in bounded memory.

Owns the copying: straight in the kernel where dtypes agree, through a block that stays in the cache
where they do not. Knows neither names nor which bytes go where: the caller plans that.
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from toolkit.dcp_format import Chunk, contiguous_runs, read_chunk
from toolkit.errors import CheckpointError, ExportError

_CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BLOCK = 2**20  # bytes read at a time where they are cast: small enough to stay in the cache
_RANGE = 64 * 2**20  # bytes the kernel copies at a time, for the progress bar
_DIRECT = 2**16  # runs shorter than this are cheaper through a block than by a system call each
_UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


class Mover:
    """Moves the bytes of chunks and tensors into open files, casting where dtypes differ."""

    def __init__(self, advance: Callable[[int], Any]) -> None:
        self.advance = advance
        """Called with the number of bytes written."""
        self.buffer = bytearray(_BLOCK)
        self.room = bytearray(8 * _BLOCK)  # for a cast block: float8 may become float64
        self.kernel_copies = hasattr(os, "copy_file_range")

    def move(self, chunk: Chunk, target: int, begin: int, dtype: torch.dtype, name: str) -> None:
        """Write `chunk` to its place in the tensor that starts at byte `begin` of `target`."""
        runs = contiguous_runs(chunk.offsets, chunk.sizes, chunk.shape)
        if chunk.raw is None:
            self._scatter(_blocks(read_chunk(chunk)), runs, target, begin, dtype, name)
            return
        with open(chunk.file, "rb", buffering=0) as f:
            source, position = f.fileno(), chunk.raw
            runs = iter(runs)
            first = next(runs)
            item = chunk.dtype.itemsize
            if chunk.dtype == dtype and first[1] * item >= _DIRECT:
                # All runs of a chunk are equally long.
                for start, count in [first, *runs]:
                    self._copy(source, position, target, begin + start * item, count * item, name)
                    position += count * item
                return
            blocks = self._read_blocks(source, position, chunk.nbytes, chunk.dtype, name)
            self._scatter(blocks, [first, *runs], target, begin, dtype, name)

    def write(
        self, tensor: torch.Tensor, target: int, begin: int, dtype: torch.dtype, name: str
    ) -> None:
        """Write a whole tensor at byte `begin` of `target`."""
        if tensor.numel() > 0:
            runs = [(0, tensor.numel())]
            self._scatter(_blocks(tensor), runs, target, begin, dtype, name)

    def _copy(self, source: int, at: int, target: int, to: int, nbytes: int, name: str) -> None:
        """Copy bytes as they are: by the kernel where it can, else through the buffer."""
        done = 0
        while done < nbytes and self.kernel_copies:
            try:
                count = os.copy_file_range(
                    source, target, min(_RANGE, nbytes - done), at + done, to + done
                )
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self.kernel_copies = False
                break
            if count == 0:
                break  # the end of the file, or a file system that cannot: reading tells
            done += count
            self.advance(count)
        while done < nbytes:
            block = self._read(source, at + done, min(_BLOCK, nbytes - done), name)
            write_all(target, block, to + done)
            done += len(block)
            self.advance(len(block))

    def _read(self, source: int, at: int, nbytes: int, name: str) -> memoryview:
        block, done = memoryview(self.buffer)[:nbytes], 0
        while done < nbytes:
            count = os.preadv(source, [block[done:]], at + done)
            if count == 0:
                raise CheckpointError(f"a shard ended in the middle of {name}: it is truncated")
            done += count
        return block

    def _read_blocks(
        self, source: int, at: int, nbytes: int, dtype: torch.dtype, name: str
    ) -> Iterator[torch.Tensor]:
        for done in range(0, nbytes, _BLOCK):
            block = self._read(source, at + done, min(_BLOCK, nbytes - done), name)
            yield torch.frombuffer(block, dtype=dtype)

    def _scatter(
        self,
        blocks: Iterable[torch.Tensor],
        runs: Iterable[tuple[int, int]],
        target: int,
        begin: int,
        dtype: torch.dtype,
        name: str,
    ) -> None:
        """Write consecutive blocks over the runs, which they fill one after the other."""
        runs = iter(runs)
        start, left = 0, 0
        for block in blocks:
            content = self._cast(block, dtype, name)
            done, length = 0, block.numel()
            while done < length:
                if left == 0:
                    start, left = next(runs)
                count = min(left, length - done)
                piece = content[done * dtype.itemsize : (done + count) * dtype.itemsize]
                write_all(target, piece, begin + start * dtype.itemsize)
                self.advance(len(piece))
                done, start, left = done + count, start + count, left - count

    def _cast(self, block: torch.Tensor, dtype: torch.dtype, name: str) -> memoryview:
        """Return the bytes of `block` in `dtype`; they last until the next call."""
        if block.dtype != dtype:
            cast = torch.frombuffer(self.room, dtype=dtype, count=block.numel())
            cast.copy_(block)
            if dtype == torch.float16 and bool((cast.isinf() & block.isfinite()).any()):
                raise ExportError(
                    f"{name} has values beyond float16's 65504; use --dtype bfloat16 or float32"
                )
            block = cast
        return memoryview(block.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(tensor.detach().reshape(-1).split(_BLOCK // tensor.dtype.itemsize))


def create(file: Path, size: int) -> int:
    """Create `file` with `size` bytes reserved on the disk; return its descriptor."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        try:
            os.posix_fallocate(descriptor, 0, size)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", errno.EINVAL) not in _UNSUPPORTED:
                raise
            os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], offset + done)
