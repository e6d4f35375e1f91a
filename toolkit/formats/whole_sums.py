"""Compute checksums of tensors whose parts are on several ranks; see [Note: bit sums]."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.formats.bit_sums import INTEGERS, part_sums, wrap_to_int64
from toolkit.formats.layout import is_sharded_by_rows, local_tensor

_BLOCK = 2**24  # elements to widen to 64 bits at a time


@dataclass(frozen=True)
class WholeSum:
    """The checksum of a complete tensor, summed over the parts on all ranks."""

    first: int  # over the first copy of each part
    copies: int  # over every copy
    holders: int  # ranks that hold a copy of the same part

    def matches(self, expected: int) -> bool:
        """Return True if every replica of the tensor has the checksum `expected`."""
        return self.first == expected and self.copies_agree()

    def copies_agree(self) -> bool:
        """Return True if all replicas of the tensor have the same checksum."""
        return self.copies == wrap_to_int64(self.first * self.holders)


def whole_sums(
    tensors: Mapping[str, torch.Tensor],
    part: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: part_sums(tensor)[1],
) -> dict[str, WholeSum] | None:
    """Compute the checksums of complete tensors from the memory of all ranks. Collective.

    Reads every local part once.

    Args:
        tensors: name -> tensor, with the same names on every rank. Tensors that are sharded along
            another dim than 0 are skipped.
        part: computes the checksum of this rank's part of a tensor. The checksums of all parts must
            add up to that of the tensor. Default: the row sum.

    Returns:
        Name -> checksum, on every rank; None if the process group is simulated (`fake_world`).
    """
    names = [name for name, tensor in tensors.items() if is_sharded_by_rows(tensor)]
    shares = ranks.on_all(lambda: [int(part(tensors[name])) for name in names])
    firsts = [s * _holds_first_copy(tensors[n]) for s, n in zip(shares, names, strict=True)]
    totals = ranks.sum_over_ranks(firsts + shares)
    if totals is None:
        return None
    pairs = zip(totals[: len(names)], totals[len(names) :], strict=True)
    return {
        n: WholeSum(*pair, count_holders(tensors[n])) for n, pair in zip(names, pairs, strict=True)
    }


@torch.no_grad()
def element_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Compute a checksum of this rank's part of a tensor that ignores the order of elements.

    It is the wrapping sum of the elements' bits, read as integers.

    Returns:
        0-d int64 on the device. A single flipped bit changes it.
    """
    flat = local_tensor(tensor).detach().contiguous().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for block in flat.split(_BLOCK):
        total += block.view(INTEGERS[block.element_size()]).sum(dtype=torch.int64)
    return total


def count_holders(tensor: torch.Tensor) -> int:
    """Count the ranks that hold the same part of `tensor`; all ranks for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ranks.world_size()
    mesh = tensor.device_mesh
    return math.prod(mesh.size(d) for d, p in enumerate(tensor.placements) if p.is_replicate())


def _holds_first_copy(tensor: torch.Tensor) -> bool:
    """Return True if this rank holds the first replica of its part of `tensor`."""
    if not isinstance(tensor, DTensor):
        return ranks.rank() == 0
    coordinate = tensor.device_mesh.get_coordinate() or ()
    places = zip(coordinate, tensor.placements, strict=True)
    return not any(place for place, placement in places if placement.is_replicate())
