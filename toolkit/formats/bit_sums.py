"""Compute checksums of tensors on their device, to compare what was written or read.

[Note: bit sums] A checksum is the wrapping sum of a tensor's bytes as integers of 8 bytes, so a
single flipped bit changes it. The row sum multiplies the checksum of each row (dim 0; of a vector
each element) by a different odd factor, so it also detects exchanged rows. Row sums of parts add
up, so the result is the same for any number of shards. Checksums guard against accidents: late
copies, and bits flipped by a device, memory or a disk. The sha256 of the files guards against
tampering.
"""

import numpy
import torch
from torch.distributed.tensor import DTensor

from toolkit.formats.layout import local_slices, local_tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # int64; spreads the row numbers over all bits
_ROWS_AT_A_TIME = 2**22


def bit_sums(rows: torch.Tensor) -> torch.Tensor:
    """Compute a checksum of each row of a plain (not distributed) tensor [n, ...].

    Reads the tensor once, at 20 GB/s on one core. See [Note: bit sums].

    Returns:
        int64 [n] on the tensor's device: the wrapping sum of each row's bytes, read as 8-byte
        integers. Bytes at the end of a row that do not fill 8 bytes are summed as integers of the
        element's size. An empty row has the sum 0.
    """
    if not rows.numel():
        return torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    size = rows.element_size()
    # A last dim of length 1 may have any stride and count as contiguous.
    is_strided = rows.ndim > 1 and rows.stride(-1) != 1
    if is_strided or not rows.is_contiguous() or rows.storage_offset() * size % 8:
        rows = rows.clone(memory_format=torch.contiguous_format)
    flat = rows.view(len(rows), -1)
    aligned = flat.shape[1] * size // 8 * 8 // size  # values that fill integers of 8 bytes
    if aligned == flat.shape[1]:
        return flat.view(torch.int64).sum(1)
    remainder = flat[:, aligned:].contiguous().view(INTEGERS[size]).sum(1, dtype=torch.int64)
    return remainder + bit_sums(flat[:, :aligned].contiguous()) if aligned else remainder


@torch.no_grad()
def part_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the byte sum and the row sum of this rank's part of `tensor`.

    Reads the part once and does not synchronise the device. Needs 8 bytes of memory for each row.
    See [Note: bit sums].

    Returns:
        int64 [2] on the device: (byte sum, row sum). The byte sum equals `bytes_sum` of the part's
        bytes in a file. If the tensor is sharded by rows (`is_sharded_by_rows`), the row sums of
        all shards add up to the same number for any number of shards.
    """
    part = local_tensor(tensor).detach()
    first = local_slices(tensor)[0].start if isinstance(tensor, DTensor) and tensor.ndim else 0
    rows = part if part.ndim > 1 else part.reshape(-1, 1)
    sums = byte_and_row_sums(rows, first)
    if len(rows) and part.nbytes // len(rows) % 8:  # rows end inside an integer
        sums[0] = _bytes_sum_on_device(part)
    return sums


def byte_and_row_sums(rows: torch.Tensor, first: int) -> torch.Tensor:
    """Compute the byte sum and the row sum of consecutive rows of a tensor.

    Args:
        rows: the rows, [n, ...].
        first: index of `rows[0]` in the complete tensor; the row sum depends on it.

    Returns:
        int64 [2] on the device of `rows`: (byte sum, row sum). See [Note: bit sums].
    """
    total = torch.zeros(2, dtype=torch.int64, device=rows.device)
    for begin in range(0, len(rows), _ROWS_AT_A_TIME):
        sums = bit_sums(rows[begin : begin + _ROWS_AT_A_TIME])
        numbers = torch.arange(len(sums), device=rows.device) + (first + begin)
        total += torch.stack([sums.sum(), (sums * (numbers * _FACTOR | 1)).sum()])
    return total


def _bytes_sum_on_device(part: torch.Tensor) -> torch.Tensor:
    """Compute the byte sum of a tensor as one sequence of bytes, padded with zeros to 8 bytes."""
    flat = part.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64).sum()


def bytes_sum(content: memoryview) -> int:
    """Compute the byte sum of a buffer in host memory, at 10 GB/s.

    It is the wrapping int64 sum of the bytes, read as 8-byte integers. The last integer is padded
    with zeros. Sums of consecutive parts add up if all lengths but the last are multiples of 8.
    """
    aligned = len(content) // 8 * 8
    total = int(numpy.frombuffer(content[:aligned], dtype="<i8").sum(dtype=numpy.int64))
    return wrap_to_int64(total + int.from_bytes(content[aligned:], "little"))


def wrap_to_int64(number: int) -> int:
    """Reduce an integer modulo 2**64 to the range of a signed 64-bit integer."""
    return (number + 2**63) % 2**64 - 2**63
