"""Sums of a tensor's bits, made where the tensor is: what was written or read is compared with it.

[Note: bit sums] The bytes are taken as integers of 8 bytes and added up, which wraps around: any
single changed bit changes the sum. The sum over rows gives each row (dim 0; of a vector each
element) an odd factor of its own, so that it sees rows that changed places, too, and is the same
for any number of shards: parts add up. It guards against accidents: late copies, and bits that a
device, memory or a disk changed; the files' sha256 guards against more.
"""

import numpy
import torch
from torch.distributed.tensor import DTensor

from toolkit.formats.layout import local_slices, local_tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # spreads the numbers of rows over all bits, as int64
_ROWS = 2**22  # whose factors are in memory at a time


def bit_sums(rows: torch.Tensor) -> torch.Tensor:
    """Return the wrapping sums of the bits of `rows`, a plain tensor [n, ...], as integers: int64
    [n] on its device. A single changed bit changes one. Reads them once, 20 GB/s on a core.
    """
    if not rows.numel():
        return torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    size = rows.element_size()
    odd = rows.ndim > 1 and rows.stride(-1) != 1  # of a length of 1
    if odd or not rows.is_contiguous() or rows.storage_offset() * size % 8:
        rows = rows.clone(memory_format=torch.contiguous_format)
    flat = rows.view(len(rows), -1)
    whole = flat.shape[1] * size // 8 * 8 // size  # values that fill integers of 8 bytes
    if whole == flat.shape[1]:
        return flat.view(torch.int64).sum(1)
    rest = flat[:, whole:].contiguous().view(INTEGERS[size]).sum(1, dtype=torch.int64)
    return rest + bit_sums(flat[:, :whole].contiguous()) if whole else rest


@torch.no_grad()
def part_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of this rank's part of `tensor`, int64 [2] on its device: of its bytes, as
    `bytes_sum` gives it of the same bytes in a file, and of its rows. See [Note: bit sums].

    The second, added up over parts that cover the tensor once, is the same for any sharding by
    rows (`cut_by_rows`). Reads the part once; does not wait. Costs 8 bytes a row.
    """
    part = local_tensor(tensor).detach()
    first = local_slices(tensor)[0].start if isinstance(tensor, DTensor) and tensor.ndim else 0
    rows = part if part.ndim > 1 else part.reshape(-1, 1)
    sums = sums_of_rows(rows, first)
    if len(rows) and part.nbytes // len(rows) % 8:  # a row ends amid an integer
        sums[0] = _bytes_sum(part)
    return sums


def sums_of_rows(rows: torch.Tensor, first: int) -> torch.Tensor:
    """Return the sums of the bytes and of the rows of `rows` [n, ...], from index `first` of a
    tensor on: int64 [2] on their device.
    """
    total = torch.zeros(2, dtype=torch.int64, device=rows.device)
    for begin in range(0, len(rows), _ROWS):
        sums = bit_sums(rows[begin : begin + _ROWS])
        numbers = torch.arange(len(sums), device=rows.device) + (first + begin)
        total += torch.stack([sums.sum(), (sums * (numbers * _FACTOR | 1)).sum()])
    return total


def _bytes_sum(part: torch.Tensor) -> torch.Tensor:
    flat = part.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64).sum()


def bytes_sum(content: memoryview) -> int:
    """Return the sum of bytes in host memory, as integers of 8 bytes, the last filled with zeros;
    it wraps around. Sums of parts whose lengths divide by 8 add up. Runs at 10 GB/s.
    """
    whole = len(content) // 8 * 8
    total = int(numpy.frombuffer(content[:whole], dtype="<i8").sum(dtype=numpy.int64))
    return wrapped(total + int.from_bytes(content[whole:], "little"))


def wrapped(number: int) -> int:
    """Return `number` as an integer of 64 bits has it."""
    return (number + 2**63) % 2**64 - 2**63
