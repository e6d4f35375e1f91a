"""Send the values of an adapter from rank 0 to the shards of all ranks."""

import torch
import torch.distributed as dist

from toolkit import ranks
from toolkit.formats import local_tensor, slice_like


def copy_from_main(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    """Copy this rank's part of a full tensor on rank 0 into `tensor`. Collective.

    Args:
        tensor: a parameter, sharded or not.
        value: the full tensor on rank 0, and None on all other ranks.
    """
    full = torch.empty(tensor.shape, dtype=tensor.dtype) if value is None else value.contiguous()
    if (group := ranks.object_group()) is not None:
        dist.broadcast(full, src=0, group=group)
    with torch.no_grad():
        local_tensor(tensor).copy_(slice_like(full, tensor))
