"""A copy of tensors in host memory, taken while the loop waits.

Owns the copies' memory. DCP asks a stager for them. torch's own serves once in 2.11 and 2.12, and
pins its memory anew for each save; this one keeps it, because filling fresh pages, let alone
pinning them, takes longer than the copy.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from toolkit.formats.layout import laid_out_as


class HostStager(AsyncStager):
    """Copies tensors; hands DCP what was copied.

    In two steps, since a rank that fails within `dcp.async_save` would leave the others waiting.
    """

    _synchronize_after_execute = False  # read by DCP: the copy is whole before it is called

    def __init__(self) -> None:
        self._kept: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return copies of this rank's parts, laid out like `tensors`; they last until the next
        call.

        Costs the bytes of the parts in host memory, pinned where they come from a device.
        """
        kept, self._kept = self._kept, {}
        staged, devices = {}, set()
        for name, tensor in tensors.items():
            tensor = tensor.detach()
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            room = kept.pop(name, None)
            if room is None or room.shape != local.shape or room.dtype != local.dtype:
                pinned = local.device.type != "cpu"
                room = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
            room.copy_(local, non_blocking=True)
            devices.add(local.device)
            self._kept[name] = room
            staged[name] = laid_out_as(tensor, room) if isinstance(tensor, DTensor) else room
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return staged

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return what `copy` returned; called by `dcp.async_save`."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Return: nothing is under way."""
        return

    def close(self) -> None:
        """Let go of the memory."""
        self._kept.clear()
