"""Decide what stays gathered, and what is reduced, between the micro-batches of one step.

[Note: accumulation] FSDP2 gathers a unit in each forward and each backward. If parameters stay
gathered from the first micro-batch to the last (`keep_gathered`), each is gathered once a step, at
the cost of the full model in its compute dtype. Gradients that are reduced once a step are complete
on every rank until then, in the dtype of the reduction. If they are reduced after each micro-batch
(`reduce_each`), they are shards. Replicas (HSDP) exchange gradients in the last micro-batch only,
in either case.

`auto` decides on the gradients before the first step, from the device's size alone, because a
resumed run must round as the first start did. If a shard is the complete parameter (one rank, or
one per replica), it reduces each time. That moves nothing and rounds the same, and the gradient is
held once, by the stream of the reduction, not a second time by the stream of the backward, whose
freed memory the other cannot use. Gathering changes no bit, and is decided after two steps, by
their peak.
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
from toolkit.mesh import count_gathered_values

_WHOLE_GRADIENT = (
    0.25  # of the device's memory; larger gradients are reduced after each micro-batch
)
_FROZEN_SHARE = 0.4  # of the free memory that complete copies of frozen parameters may use
_MARGIN = 0.1  # of the device's memory, for fragmentation and for later steps that need more
_MEASURED = 2  # steps; the optimizer creates its state at the end of the first


class Accumulation:
    """Decides what FSDP2 does between the micro-batches of a step; see [Note: accumulation].

    A unit is one FSDP2 communication group: a module that `fully_shard` was applied to.
    """

    def __init__(self, model: nn.Module, cfg: ShardingConfig) -> None:
        self._model = model
        self._units: list[Any] = [m for m in model.modules() if hasattr(m, "unshard")]
        # Frozen units have no gradient to keep for later. FSDP would look for one and fail, also in
        # units that no forward gathers, such as a tower for images.
        self._frozen = {m for m in self._units if not any(p.requires_grad for p in m.parameters())}
        self._reduce_size = getattr(torch, cfg.reduce_dtype).itemsize
        self._gathered_size = getattr(torch, cfg.param_dtype).itemsize
        setting = cfg.accumulation
        self.keep = setting == "keep_gathered"
        """True if parameters stay gathered from the first micro-batch of a step to the last."""
        self.reduce_each: bool | None = None if setting == "auto" else setting == "reduce_each"
        """True if gradients are reduced after each micro-batch; None before the first step."""
        freed = {cfg.reshard_after_forward, *cfg.reshard_after_forward_overrides.values()}
        self._to_measure = _MEASURED if setting == "auto" and freed <= {"auto", False} else 0
        self._shapes: set[torch.Size] = set()

    def begin(self, targets: torch.Tensor, index: int, count: int) -> None:
        """Set FSDP2's flags for micro-batch `index`: if units reduce gradients and if they reshard.

        Call it before the forward. The first call with several micro-batches decides `accumulation:
        auto` for the gradients, and is then collective.

        Args:
            targets: labels of the micro-batch; only their device and shape are used.
            index: number of the micro-batch in its step, from 0.
            count: number of micro-batches in the step.
        """
        if self.reduce_each is None and count > 1:
            total = ranks.min_over_ranks(_measure_memory(targets.device)[1])
            shards = _count_shards(self._model)
            trained = (p for p in self._model.parameters() if p.requires_grad)
            values = sum(map(count_gathered_values, trained))
            self.reduce_each = should_reduce_each(values, self._reduce_size, total, shards)
        last = index == count - 1
        keep = self.keep and count > 1
        reduced = last or bool(self.reduce_each)
        for unit in self._units:
            unit.set_requires_gradient_sync(reduced or unit in self._frozen, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            unit.set_reshard_after_backward(last or not keep, recurse=False)
            if keep:
                unit.set_reshard_after_forward(False, recurse=False)
        self._units[0].set_is_last_backward(last)
        self._shapes.add(targets.shape)

    def end(self, device: torch.device, count: int) -> None:
        """End a step; after the second step, decide if parameters stay gathered within later steps.

        The decision measures the device's memory, is logged, and is collective. Does nothing if the
        settings fix the choice, or if the step has one micro-batch.

        Args:
            device: the device of this rank.
            count: number of micro-batches in the step.
        """
        if not self._to_measure or count == 1:
            return
        self._to_measure -= 1
        if not self._to_measure:
            room = ranks.min_over_ranks(self._room(device))
            self.keep = room > 0
            way = "reduce_each" if self.reduce_each else "reduce_once"
            ranks.log_once(
                f"auto       accumulation {'keep_gathered' if self.keep else way} (with the model "
                f"gathered {room / 1e9:,.2f} GB are free)"
            )

    def _room(self, device: torch.device) -> float:
        """Estimate the bytes left if all parameters are gathered at once; may be negative.

        Ten percent of the memory are kept as a margin.
        """
        free, total, activations = _measure_memory(device)
        sharded = (p for p in self._model.parameters() if isinstance(p, DTensor))
        gathered = sum(map(count_gathered_values, sharded)) * self._gathered_size
        # If samples have many lengths, the longest one may not have come in two steps.
        longer = activations if len(self._shapes) > 1 else 0
        return free - _MARGIN * total - gathered - longer


def should_reduce_each(values: int, itemsize: int, memory: float, shards: int) -> bool:
    """Decide for `accumulation: auto` whether each micro-batch reduces its gradients.

    If not, only the last micro-batch of a step does. The result is True if unsharded gradients
    would take more than a quarter of the memory. It is also True if parameters are not split,
    because reducing then sends nothing.

    Args:
        values: number of values of the trained parameters, gathered on one rank.
        itemsize: bytes of one value of a gradient.
        memory: bytes of the device.
        shards: number of ranks over which each parameter is split.
    """
    return shards == 1 or values * itemsize > _WHOLE_GRADIENT * memory


def _count_shards(model: nn.Module) -> int:
    """Return the number of ranks over which the parameters are split; 1 for an unsharded model."""
    parameter = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    if parameter is None:
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def can_replicate_frozen(
    parameters: list[nn.Parameter], shards: int, device_type: str, free: float | None = None
) -> tuple[bool, str]:
    """Decide whether each rank has memory for complete copies of the frozen parameters.

    Collective if `free` is None. See the setting `sharding.frozen`.

    Args:
        parameters: the frozen parameters, before sharding.
        shards: number of ranks over which they would be split otherwise.
        device_type: type of the run's devices, such as `cuda`.
        free: free bytes of each device. None: measure them, and use the smallest number of all
            ranks.

    Returns:
        The decision, and a text with the bytes that the copies add and the bytes that are free.
    """
    extra_bytes = sum(p.numel() * p.element_size() for p in parameters) * (1 - 1 / shards)
    if free is None:
        index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0
        free = ranks.min_over_ranks(_measure_memory(torch.device(device_type, index))[0])
    return (
        extra_bytes <= _FROZEN_SHARE * free,
        f"{extra_bytes / 1e9:,.2f} GB more, {free / 1e9:,.2f} GB are free",
    )


def _measure_memory(device: torch.device) -> tuple[int, int, int]:
    """Measure the memory of a device, or for a CPU this process's share of the host's memory.

    Returns:
        Three numbers of bytes: free at this process's peak so far; total; peak minus present use.
    """
    if device.type != "cpu":
        api = torch.get_device_module(device)
        free, total = api.mem_get_info(device)
        peak = api.max_memory_allocated(device)
        now = api.memory_allocated(device)
        return free + api.memory_reserved(device) - peak, total, peak - now
    above = max(0, peak_host_memory() - psutil.Process().memory_info().rss)
    host = psutil.virtual_memory()
    container = container_memory()
    here = ranks.local_world_size()
    free = min(host.available, container.free)
    total = min(host.total, container.limit)
    return int(free // here) - above, int(total // here), above
