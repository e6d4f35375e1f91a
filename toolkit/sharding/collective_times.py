"""How long this rank is in the collectives of its units: the transfer, and the wait for others.

FSDP2 takes the functions that gather and reduce (`set_custom_all_gather` and its kin); these are
its own with a clock around. A host that waits inside (gloo) is timed by its clock; a device by two
events on the stream of the collective, which are read once the step has ended: nothing waits.
A collective that is started ahead (`sharding.unshard_early`, prefetches asked for) is not counted:
what it waits, the host does elsewhere.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# As torch 2.13 names them; it warns of the older names.
_NEW = hasattr(dist, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _NEW else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if _NEW else "reduce_scatter_tensor"


class CollectiveTimes:
    """Adds up this rank's seconds in collectives, while `on`; `take` them then."""

    def __init__(self) -> None:
        self.on = False
        self.hidden = False  # behind the computing, as on devices
        self._seconds, self._events = 0.0, list[tuple[torch.cuda.Event, torch.cuda.Event]]()
        self._ended: Any = None  # when the last one did
        self._reduced: Any = None  # when a reduce-scatter did, whose all-reduce follows

    @contextmanager
    def measure(self, device: torch.device) -> Iterator[None]:
        """Count what is done inside, on the current stream of `device`."""
        begun = self._now(device)
        yield
        self._ended = self._now(device)
        self._add(begun, self._ended)

    @contextmanager
    def measure_reduction(self, device: torch.device) -> Iterator[None]:
        """Count a reduce-scatter, and have `after_all_reduce` count what follows it."""
        with self.measure(device):
            yield
        self._reduced = self._ended

    def after_all_reduce(self, output: torch.Tensor) -> None:
        """Count the all-reduce over replicas that follows a reduce-scatter (HSDP). Without one, as
        of units that lie whole on each rank, it is not counted.
        """
        self._add(self._reduced, self._now(output.device))
        self._reduced = None

    def take(self) -> float:
        """Return the seconds since the last call. Waits for the steps that were measured."""
        for begun, ended in self._events:
            ended.synchronize()
            self._seconds += begun.elapsed_time(ended) / 1e3
        found, self._seconds = self._seconds, 0.0
        self._events.clear()
        return found

    def _now(self, device: torch.device) -> Any:
        if not self.on:
            return None
        if device.type != "cuda":
            return time.perf_counter()
        self.hidden = True
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add(self, begun: Any, ended: Any) -> None:
        if begun is None or ended is None:
            return
        if isinstance(begun, float):
            self._seconds += ended - begun
        else:
            self._events.append((begun, ended))


def time_collectives(model: nn.Module, *, replicas: bool) -> None:
    """Have the units of a sharded `model` timed; `times_of` finds the result."""
    times = CollectiveTimes()
    vars(model)["collective_times"] = times
    units: list[Any] = [m for m in model.modules() if hasattr(m, "set_custom_all_gather")]
    for unit in units:
        unit.set_custom_all_gather(_Timed(_ALL_GATHER, times.measure))
        unit.set_custom_reduce_scatter(_Timed(_REDUCE_SCATTER, times.measure_reduction))
        if replicas:
            unit.set_all_reduce_hook(times.after_all_reduce)


def times_of(model: nn.Module) -> CollectiveTimes | None:
    """Return what `time_collectives` left on `model`, None where it did not."""
    return vars(model).get("collective_times")


def timed(model: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Count a collective outside of the units of `model`, inside of the block."""
    times = times_of(model)
    return nullcontext() if times is None else times.measure(device)


class _Timed:
    """A collective of a unit, with a clock around; see torch's `Comm`."""

    def __init__(self, name: str, measure: Callable[..., AbstractContextManager[None]]) -> None:
        self._name, self._measure = name, measure

    def allocate(self, size: Sequence[int], **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any
    ) -> dist.Work | None:
        with nullcontext() if options.get("async_op") else self._measure(input_tensor.device):
            return getattr(dist, self._name)(output_tensor, input_tensor, **options)
