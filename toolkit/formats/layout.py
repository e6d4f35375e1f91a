"""Compute which part of a sharded tensor this rank holds."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.formats.private import torch_private

Tensors = dict[str, torch.Tensor]  # by name


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Return the slice [start, stop) of each dim of the full tensor that this rank holds."""
    part = torch_private("distributed.tensor._utils", "compute_local_shape_and_global_offset")
    shape, offset = part(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def is_sharded_by_rows(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is sharded along dim 0 only, replicated, or not distributed."""
    # Not `is_shard`: a strided shard, of a dim that two axes cut, answers no (torch 2.13).
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return all(p.is_replicate() or getattr(p, "dim", None) == 0 for p in placements)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor; return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def slice_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of the slice of the full tensor `whole` at this rank's shard of `like`.

    If `like` is no DTensor, `whole` itself is returned.
    """
    return whole[local_slices(like)] if isinstance(like, DTensor) else whole


def like_dtensor(reference: DTensor, part: torch.Tensor) -> DTensor:
    """Wrap the local shard `part` in a DTensor with the mesh and placements of `reference`.

    The shard stays on its device, even if the mesh is on another device.
    """
    # `DTensor.from_local` would move what is in host memory (offload, copies) to the mesh's device.
    return DTensor(part.contiguous(), reference._spec, requires_grad=False)  # type: ignore[call-arg]


def wrap_like(reference: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Wrap `part` in the tensor subclass of `reference`, without a copy.

    FSDP2 asks the subclass how to gather it, as for float8 weights.
    """
    if type(part) is type(reference) or not hasattr(reference, "__tensor_flatten__"):
        return part
    subclass: Any = type(reference)
    [inner], context = reference.__tensor_flatten__()
    return subclass.__tensor_unflatten__({inner: part}, context, part.size(), part.stride())


def reshard(model: nn.Module) -> None:
    """Free the all-gathered parameters of every FSDP module in `model`, so that only shards remain.

    After a forward without a backward, the root module and others that do not reshard still hold
    gathered parameters. An optimizer that is built then would update tensors that no module uses.
    """
    for module in model.modules():
        if callable(free := getattr(module, "reshard", None)):
            free()
