"""Stored tensors, of a checkpoint or a file: their rows, read in blocks, summed, compared."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.errors import CheckpointError
from toolkit.formats.bit_sums import sums_of_rows, wrapped
from toolkit.formats.dcp_tensors import Chunk, read_chunk
from toolkit.formats.plain_files import BLOCK

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on the disk: in one piece, or in chunks that cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def file(self) -> Path:
        """File of a tensor in one piece."""
        return self.chunks[0].file

    @property
    def begin(self) -> int:
        """Offset in its file of a tensor in one piece."""
        return self.chunks[0].raw or 0

    @property
    def rows(self) -> int:
        """Number of rows; a tensor of less than two dimensions is one."""
        return self.shape[0] if len(self.shape) > 1 else 1

    def block(self, first: int, last: int) -> torch.Tensor:
        """Return rows `first` to `last` [last - first, ...]; CheckpointError where they end."""
        width = self.shape[1:] if len(self.shape) > 1 else (math.prod(self.shape),)
        found = torch.empty(last - first, *width, dtype=self.dtype)
        for chunk in self.chunks:
            missing = 2 - len(chunk.sizes)  # a dimension of rows, where the tensor has none
            offsets, sizes = (0,) * missing + chunk.offsets, (1,) * missing + chunk.sizes
            begin, end = max(first, offsets[0]), min(last, offsets[0] + sizes[0])
            if begin < end:
                inner = [slice(o, o + n) for o, n in zip(offsets[1:], sizes[1:], strict=True)]
                place = found[(slice(begin - first, end - first), *inner)]
                _read(chunk, sizes, begin - offsets[0], end - offsets[0], place)
        return found


def in_one_piece(
    file: Path, dtype: torch.dtype, shape: tuple[int, ...], begin: int
) -> StoredTensor:
    """Return a tensor whose bytes follow each other in a file, from offset `begin` on."""
    return StoredTensor(dtype, shape, (Chunk(file, (0,) * len(shape), shape, dtype, begin),))


def whole(tensor: StoredTensor) -> torch.Tensor:
    """Return a stored tensor in memory, of its own shape."""
    return tensor.block(0, tensor.rows).reshape(tensor.shape)


def blocks(tensor: StoredTensor, itemsize: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index of the first row, rows) over a tensor: BLOCK bytes, or one row where that is
    larger; `itemsize`: of the wider one of two.
    """
    if tensor.nbytes == 0:
        return
    width = tensor.nbytes // tensor.rows // tensor.dtype.itemsize
    step = max(1, BLOCK // (width * max(itemsize, tensor.dtype.itemsize)))
    if any(chunk.raw is None for chunk in tensor.chunks):  # blobs that are read as a whole
        step = tensor.rows
    for first in range(0, tensor.rows, step):
        yield first, tensor.block(first, min(first + step, tensor.rows))


def row_sum(tensor: StoredTensor) -> int:
    """Return the sum of a tensor's rows as a manifest has it; see [Note: bit sums]."""
    return wrapped(sum(block_sum(tensor, first, rows) for first, rows in blocks(tensor)))


def block_sum(tensor: StoredTensor, first: int, rows: torch.Tensor) -> int:
    """Return the share of `rows`, from index `first` on, in the `row_sum` of a tensor."""
    return int(sums_of_rows(rows if len(tensor.shape) > 1 else rows.reshape(-1, 1), first)[1])


def same_values(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return which elements of two tensors of one dtype have the same bits, or are both NaN."""
    kind = _INTEGERS[left.dtype.itemsize]
    same = left.contiguous().view(kind) == right.contiguous().view(kind)
    if left.is_floating_point() and not bool(same.all()):
        same |= left.isnan() & right.isnan()  # a cast may choose among the NaNs
    return same


def first_difference(left: StoredTensor, right: StoredTensor) -> tuple[str | None, int]:
    """Compare `left`, cast to the dtype of `right`, with `right`; both have one shape.

    Returns what differs or None, and the `row_sum` of `left` as it was read.
    """
    total, wrong, where = 0, 0, None
    for first, rows in blocks(left, right.dtype.itemsize):
        total += block_sum(left, first, rows)
        came = right.block(first, first + rows.shape[0])
        same = same_values(rows.to(right.dtype), came)
        if not bool(same.all()):
            wrong += int((~same).sum())
            if where is None:
                at = tuple(int(i) for i in (~same).nonzero()[0])
                index = (first + at[0], *at[1:])[-max(1, len(right.shape)) :]
                where = (
                    f"at {list(index) if right.shape else []} it has {came[at].item()!r}, "
                    f"expected {rows.to(right.dtype)[at].item()!r}"
                )
    count = math.prod(left.shape)
    said = None if where is None else f"{wrong} of {count} values are others: {where}"
    return said, wrapped(total)


def _read(chunk: Chunk, sizes: tuple[int, ...], first: int, last: int, place: torch.Tensor) -> None:
    """Read rows `first` to `last` of a chunk into `place`, a view of that shape."""
    if chunk.raw is None:
        place.copy_(read_chunk(chunk).reshape(sizes)[first:last])
        return
    rows = place if place.is_contiguous() else torch.empty(place.shape, dtype=chunk.dtype)
    with open(chunk.file, "rb") as f:  # buffered: it reads on until all is there
        f.seek(chunk.raw + first * math.prod(sizes[1:]) * chunk.dtype.itemsize)
        if f.readinto(rows.reshape(-1).view(torch.uint8).numpy()) != rows.nbytes:  # type: ignore[arg-type]
            raise CheckpointError(f"{chunk.file} ends in the middle of a tensor")
    if rows is not place:
        place.copy_(rows)
