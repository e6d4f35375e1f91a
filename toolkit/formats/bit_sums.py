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
    """Compute the checksum of each row of a plain tensor [n, ...]: int64 [n] on its device.

    Reads the tensor once, at 20 GB/s on one core. See [Note: bit sums].
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
    """Compute the checksums of this rank's part of `tensor`. See [Note: bit sums].

    Reads the part once, without synchronising the device. Costs 8 bytes for each row.

    Returns:
        int64 [2] on the device: the sum of the bytes, equal to `bytes_sum` of the same bytes in a
        file, and the row sum. Added over the parts of all ranks, the row sum is the same for any
        sharding by rows (`cut_by_rows`).
    """
    part = local_tensor(tensor).detach()
    first = local_slices(tensor)[0].start if isinstance(tensor, DTensor) and tensor.ndim else 0
    rows = part if part.ndim > 1 else part.reshape(-1, 1)
    sums = byte_and_row_sums(rows, first)
    if len(rows) and part.nbytes // len(rows) % 8:  # rows end inside an integer
        sums[0] = _bytes_sum_on_device(part)
    return sums


def byte_and_row_sums(rows: torch.Tensor, first: int) -> torch.Tensor:
    """Compute the byte sum and the row sum of some rows of a tensor.

    Args:
        rows: [n, ...].
        first: index of the first one in the tensor.

    Returns:
        int64 [2] on their device.
    """
    total = torch.zeros(2, dtype=torch.int64, device=rows.device)
    for begin in range(0, len(rows), _ROWS_AT_A_TIME):
        sums = bit_sums(rows[begin : begin + _ROWS_AT_A_TIME])
        numbers = torch.arange(len(sums), device=rows.device) + (first + begin)
        total += torch.stack([sums.sum(), (sums * (numbers * _FACTOR | 1)).sum()])
    return total


def _bytes_sum_on_device(part: torch.Tensor) -> torch.Tensor:
    """Compute the sum of a part's bytes as one sequence, padded with zeros to 8 bytes."""
    flat = part.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64).sum()


def bytes_sum(content: memoryview) -> int:
    """Compute the wrapping sum of bytes in host memory as integers of 8 bytes, at 10 GB/s.

    The last integer is padded with zeros. Sums of parts add up if their lengths divide by 8.
    """
    aligned = len(content) // 8 * 8
    total = int(numpy.frombuffer(content[:aligned], dtype="<i8").sum(dtype=numpy.int64))
    return wrap_to_int64(total + int.from_bytes(content[aligned:], "little"))


def wrap_to_int64(number: int) -> int:
    """Wrap a number around as a signed integer of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
