"""Read tensors of checkpoints and files in blocks of rows; sum and compare them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.errors import CheckpointError
from toolkit.formats.bit_sums import byte_and_row_sums, wrap_to_int64
from toolkit.formats.dcp_tensors import Chunk, read_chunk
from toolkit.formats.plain_files import BLOCK

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk: its dtype, its shape, and the parts of files that hold its values.

    It is contiguous if one part of one file holds all values in row-major order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def file(self) -> Path:
        """File of the first chunk; the only file if the tensor is contiguous."""
        return self.chunks[0].file

    @property
    def begin(self) -> int:
        """Offset in `file` of the first byte, for a contiguous tensor."""
        return self.chunks[0].raw or 0

    @property
    def rows(self) -> int:
        """Number of rows (dim 0). A tensor with fewer than two dims counts as one row."""
        return self.shape[0] if len(self.shape) > 1 else 1

    def read_rows(self, first: int, last: int) -> torch.Tensor:
        """Read the rows [first, last) of the tensor.

        Returns:
            [last - first, ...] on the CPU. A tensor with fewer than two dims counts as one row.

        Raises:
            CheckpointError: a file is too short.
        """
        width = self.shape[1:] if len(self.shape) > 1 else (math.prod(self.shape),)
        rows = torch.empty(last - first, *width, dtype=self.dtype)
        for chunk in self.chunks:
            missing = 2 - len(chunk.sizes)  # dims to add, so that the tensor has rows
            offsets, sizes = (0,) * missing + chunk.offsets, (1,) * missing + chunk.sizes
            begin, end = max(first, offsets[0]), min(last, offsets[0] + sizes[0])
            if begin < end:
                inner = [slice(o, o + n) for o, n in zip(offsets[1:], sizes[1:], strict=True)]
                place = rows[(slice(begin - first, end - first), *inner)]
                _read_chunk_rows(chunk, sizes, begin - offsets[0], end - offsets[0], place)
        return rows


def contiguous_tensor(
    file: Path, dtype: torch.dtype, shape: tuple[int, ...], begin: int
) -> StoredTensor:
    """Create the `StoredTensor` of a contiguous tensor that starts at byte `begin` of a file."""
    return StoredTensor(dtype, shape, (Chunk(file, (0,) * len(shape), shape, dtype, begin),))


def read_tensor(tensor: StoredTensor) -> torch.Tensor:
    """Read a complete tensor from disk to the CPU, in its stored shape."""
    return tensor.read_rows(0, tensor.rows).reshape(tensor.shape)


def read_blocks(tensor: StoredTensor, itemsize: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """Read a tensor in blocks of rows of about 1 MB, or of one row if a row is larger.

    Args:
        tensor: the tensor.
        itemsize: bytes per element from which the size of a block is computed, if larger than the
            tensor's own. Use it to read two tensors of different dtypes in equal blocks.

    Yields:
        (index of the first row, rows), in order. An empty tensor yields nothing. A tensor with
        chunks that are not row-major is one block.
    """
    if tensor.nbytes == 0:
        return
    width = tensor.nbytes // tensor.rows // tensor.dtype.itemsize
    step = max(1, BLOCK // (width * max(itemsize, tensor.dtype.itemsize)))
    if any(chunk.raw is None for chunk in tensor.chunks):  # blobs that can only be read completely
        step = tensor.rows
    for first in range(0, tensor.rows, step):
        yield first, tensor.read_rows(first, min(first + step, tensor.rows))


def compute_row_sum(tensor: StoredTensor) -> int:
    """Read a tensor and compute its row sum, the checksum in manifests; see [Note: bit sums]."""
    return wrap_to_int64(
        sum(compute_block_sum(tensor, first, rows) for first, rows in read_blocks(tensor))
    )


def compute_block_sum(tensor: StoredTensor, first: int, rows: torch.Tensor) -> int:
    """Compute the part of a tensor's row sum that comes from some of its rows.

    The results of all blocks add up to `compute_row_sum`, modulo 2**64.

    Args:
        tensor: the complete tensor.
        first: index of the first row.
        rows: the rows, as `read_blocks` yields them.
    """
    return int(byte_and_row_sums(rows if len(tensor.shape) > 1 else rows.reshape(-1, 1), first)[1])


def same_values(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a bool mask of the elements that have equal bits, or are NaN in both tensors.

    Both tensors must have the same dtype.
    """
    kind = _INTEGERS[first.dtype.itemsize]
    same = first.contiguous().view(kind) == second.contiguous().view(kind)
    if first.is_floating_point() and not bool(same.all()):
        same |= first.isnan() & second.isnan()  # a cast may produce any NaN
    return same


def first_difference(expected: StoredTensor, actual: StoredTensor) -> tuple[str | None, int]:
    """Cast `expected` to the dtype of `actual` and compare the values of both; read both once.

    The shapes must be equal. NaN equals NaN.

    Returns:
        (description of the number of differences and the first one, or None if there is none; row
        sum of `expected` before the cast).
    """
    total = 0
    wrong = 0
    where = None
    for first, rows in read_blocks(expected, actual.dtype.itemsize):
        total += compute_block_sum(expected, first, rows)
        actual_rows = actual.read_rows(first, first + rows.shape[0])
        same = same_values(rows.to(actual.dtype), actual_rows)
        if not bool(same.all()):
            wrong += int((~same).sum())
            if where is None:
                at = tuple(int(i) for i in (~same).nonzero()[0])
                index = (first + at[0], *at[1:])[-max(1, len(actual.shape)) :]
                where = (
                    f"at {list(index) if actual.shape else []} it has {actual_rows[at].item()!r}, "
                    f"expected {rows.to(actual.dtype)[at].item()!r}"
                )
    count = math.prod(expected.shape)
    difference = None if where is None else f"{wrong} of {count} values differ: {where}"
    return difference, wrap_to_int64(total)


def _read_chunk_rows(
    chunk: Chunk, sizes: tuple[int, ...], first: int, last: int, place: torch.Tensor
) -> None:
    """Read the rows [first, last) of a chunk into `place`.

    Args:
        chunk: the chunk.
        sizes: its shape, with at least two dims.
        first: first row to read.
        last: the row after the last one.
        place: tensor [last - first, ...], which is overwritten.

    Raises:
        CheckpointError: the file is too short.
    """
    if chunk.raw is None:
        place.copy_(read_chunk(chunk).reshape(sizes)[first:last])
        return
    rows = place if place.is_contiguous() else torch.empty(place.shape, dtype=chunk.dtype)
    with open(chunk.file, "rb") as f:  # buffered, so that `readinto` reads everything
        f.seek(chunk.raw + first * math.prod(sizes[1:]) * chunk.dtype.itemsize)
        if f.readinto(rows.reshape(-1).view(torch.uint8).numpy()) != rows.nbytes:  # type: ignore[arg-type]
            raise CheckpointError(f"{chunk.file} ends in the middle of a tensor")
    if rows is not place:
        place.copy_(rows)
