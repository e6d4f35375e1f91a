"""What stays gathered, and what is reduced, between the micro-batches of one step.

[Note: accumulation] FSDP2 gathers a unit in each forward and each backward. While parameters stay
gathered from the first micro-batch to the last (`keep_gathered`), each is gathered once a step,
which takes the whole model in its compute dtype. Gradients that are reduced once a step are whole
until then, in the reduction's dtype; reduced after each micro-batch (`reduce_each`), they are
shards. Of replicas (HSDP) only the last micro-batch crosses to the others in either case.

`auto` decides on the gradients before the first step, from the device's size alone: a resumed run
must round as the first start did. Where a shard is the whole (one rank, or one a replica) it
reduces each time: that moves nothing, rounds alike, and the gradient is held once, by the stream of
the reduction, not a second time by that of the backward, whose freed memory the other cannot use.
What is gathered changes no bit, and waits for two steps' peak.
"""

import math
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.config.settings import ShardingConfig
from toolkit.formats.container_memory import container_memory, peak_host_memory

_WHOLE_GRADIENT = 0.25  # of the device: a larger one is reduced after each micro-batch
_FROZEN_SHARE = 0.4  # of the free memory: what whole copies of frozen parameters may take of it
_MARGIN = 0.1  # of the device: fragments, and what a later step needs more
_MEASURED = 2  # steps: the first makes the optimizer's state at its end


class Accumulation:
    """Sets the units of a sharded model for each micro-batch; see [Note: accumulation]."""

    def __init__(self, model: nn.Module, cfg: ShardingConfig) -> None:
        self._model = model
        self._units: list[Any] = [m for m in model.modules() if hasattr(m, "unshard")]
        # These have no gradient to keep for later. FSDP would look for one also where no forward
        # gathers the unit, as a tower for images of which only the text is trained, and fail.
        self._frozen = {m for m in self._units if not any(p.requires_grad for p in m.parameters())}
        self._reduce_size = getattr(torch, cfg.reduce_dtype).itemsize
        self._gathered_size = getattr(torch, cfg.param_dtype).itemsize
        asked = cfg.accumulation
        self.keep = asked == "keep_gathered"
        """Whether parameters stay gathered from the first micro-batch of a step to the last."""
        self.reduce_each: bool | None = None if asked == "auto" else asked == "reduce_each"
        """Whether gradients are reduced after each micro-batch; None before the first step."""
        freed = {cfg.reshard_after_forward, *cfg.reshard_after_forward_overrides.values()}
        self._to_measure = _MEASURED if asked == "auto" and freed <= {"auto", False} else 0
        self._shapes: set[torch.Size] = set()

    def begin(self, ids: torch.Tensor, index: int, count: int) -> None:
        """Prepare for micro-batch `index` of `count`. Collective at the first."""
        if self.reduce_each is None and count > 1:
            total = ranks.min_over_ranks(_memory(ids.device)[1])
            shards = _shards(self._model)
            self.reduce_each = should_reduce_each(self._model, self._reduce_size, total, shards)
        last, keep = index == count - 1, self.keep and count > 1
        reduced = last or bool(self.reduce_each)
        for unit in self._units:
            unit.set_requires_gradient_sync(reduced or unit in self._frozen, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            unit.set_reshard_after_backward(last or not keep, recurse=False)
            if keep:
                unit.set_reshard_after_forward(False, recurse=False)
        self._units[0].set_is_last_backward(last)
        self._shapes.add(ids.shape)

    def end(self, device: torch.device, count: int) -> None:
        """Take note of a step's memory; after two decide what stays gathered. Collective then."""
        if not self._to_measure or count == 1:
            return
        self._to_measure -= 1
        if not self._to_measure:
            room = ranks.min_over_ranks(self._room(device))
            self.keep = room > 0
            way = "reduce_each" if self.reduce_each else "reduce_once"
            ranks.log_once(
                f"auto       accumulation {'keep_gathered' if self.keep else way} (beside the "
                f"gathered model {room / 1e9:,.2f} GB are left)"
            )

    def _room(self, device: torch.device) -> float:
        """Return the bytes that would be free beside the gathered model."""
        free, total, activations = _memory(device)
        sharded = (p for p in self._model.parameters() if isinstance(p, DTensor))
        gathered = sum(p.numel() for p in sharded) * self._gathered_size
        # Of samples of many lengths two steps need not have seen the longest.
        longer = activations if len(self._shapes) > 1 else 0
        return free - _MARGIN * total - gathered - longer


def should_reduce_each(model: nn.Module, itemsize: int, memory: float, shards: int) -> bool:
    """Return whether `auto` reduces gradients, of `itemsize` bytes a value, after each micro-batch:
    a whole one is too much for a device of so much memory to hold from one to the next, or there is
    one of `shards`, so that reducing moves nothing.
    """
    values = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return shards == 1 or values * itemsize > _WHOLE_GRADIENT * memory


def _shards(model: nn.Module) -> int:
    """Return how many ranks share a copy of the parameters."""
    parameter = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    if parameter is None:
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def can_replicate_frozen(
    parameters: list[nn.Parameter], shards: int, device_type: str, free: float | None = None
) -> tuple[bool, str]:
    """Return whether whole copies of frozen parameters fit on every rank, and the figures; see
    `sharding.frozen`. `free`: bytes; None: as many as the fullest device has. Collective.
    """
    more = sum(p.numel() * p.element_size() for p in parameters) * (1 - 1 / shards)
    if free is None:
        index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0
        free = ranks.min_over_ranks(_memory(torch.device(device_type, index))[0])
    return more <= _FROZEN_SHARE * free, f"{more / 1e9:,.2f} GB more, {free / 1e9:,.2f} GB are free"


def _memory(device: torch.device) -> tuple[int, int, int]:
    """Return (bytes free at this process's peak, bytes in all, bytes of the peak that are not held
    now). Of a host, this process's part of it.
    """
    if device.type != "cpu":
        api = torch.get_device_module(device)
        free, total = api.mem_get_info(device)
        peak, now = api.max_memory_allocated(device), api.memory_allocated(device)
        return free + api.memory_reserved(device) - peak, total, peak - now
    above = max(0, peak_host_memory() - psutil.Process().memory_info().rss)
    host, container, here = psutil.virtual_memory(), container_memory(), ranks.local_world_size()
    free, total = min(host.available, container.free), min(host.total, container.limit)
    return int(free // here) - above, int(total // here), above
