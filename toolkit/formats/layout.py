"""Compute which part of a sharded tensor this rank holds."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.formats.private import torch_private

Tensors = dict[str, torch.Tensor]  # by name


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Compute this rank's part of the global tensor, as one slice for each dim."""
    part = torch_private("distributed.tensor._utils", "compute_local_shape_and_global_offset")
    shape, offset = part(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def is_sharded_by_rows(tensor: torch.Tensor) -> bool:
    """Return True if each rank holds complete rows of `tensor`, or all of it."""
    # Not `is_shard`: a strided shard, of a dim that two axes cut, answers no (torch 2.13).
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return all(p.is_replicate() or getattr(p, "dim", None) == 0 for p in placements)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Get the part of `tensor` that this rank holds; all of a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def slice_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Slice `whole` to the part that this rank holds of `like`; a view."""
    return whole[local_slices(like)] if isinstance(like, DTensor) else whole


def like_dtensor(reference: DTensor, part: torch.Tensor) -> DTensor:
    """Make a DTensor with the layout of `reference` and the local part `part`, on its device."""
    # `DTensor.from_local` would move what is in host memory (offload, copies) to the mesh's device.
    return DTensor(part.contiguous(), reference._spec, requires_grad=False)  # type: ignore[call-arg]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters of `model`, so that its parameters are the sharded ones.

    After a forward without a backward, units that do not reshard, such as the root, still hold
    gathered parameters. An optimizer built then would update tensors that nobody reads.
    """
    for module in model.modules():
        if callable(free := getattr(module, "reshard", None)):
            free()
