"""One rank of many, in one process: its real work, and the order of what it does with the others.

The other ranks do not exist (`fake_world`). What this one gathers are copies of its own part, of
what it reduces it keeps its own slice: memory, kernels and streams are those of the rank, the
values mean nothing. Each collective and each exchange of `toolkit.ranks` is noted: ranks that wait
for each other must note the same, in the same order. A wait for the wire can be put in.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit import ranks
from toolkit.checkpoint import commit, shard_plan
from toolkit.planning.fake_ranks import fake_world

_EXCHANGES = ("broadcast", "_least", "gather_to_main", "gather_integers", "totals", "object_group")


class Noted(TorchDispatchMode):
    """Notes the collectives of this rank, by name and shapes, and its exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            shapes = [list(t.shape) for t in _tensors(args)]
            self.order.append(f"{func._schema.name.removeprefix('c10d::')} {shapes}")
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[Noted]:
    """Be `rank` of `world`; what is done with the others inside is noted. Once a process."""
    noted = Noted()

    def note(name: str) -> Callable[..., Any]:
        exchange = getattr(ranks, name)

        def noting(*args: Any, **options: Any) -> Any:
            count = len(args[0]) if name in ("_least", "gather_integers", "totals") else ""
            noted.order.append(f"exchange {name} {count}".strip())
            return exchange(*args, **options)

        return noting

    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_world(world, rank))
        for name in _EXCHANGES:
            stack.enter_context(mock.patch.object(ranks, name, note(name)))
        # What others wrote is not there: the checkpoint has this rank's part only.
        stack.enter_context(mock.patch.object(shard_plan, "metadata_of", return_value=b""))
        stack.enter_context(mock.patch.object(commit, "damaged_files", return_value=[]))
        stack.enter_context(noted)
        yield noted


def local_collectives(model: nn.Module, wire: Callable[[int], None] = lambda nbytes: None) -> None:
    """Let the units of a sharded `model` gather and reduce by local copies; `wire` is called with
    the bytes that a rank would send, on the stream of the collective.
    """
    for unit in (m for m in model.modules() if hasattr(m, "set_custom_all_gather")):
        unit.set_custom_all_gather(_Local("all_gather", wire))  # type: ignore[operator]
        unit.set_custom_reduce_scatter(_Local("reduce_scatter", wire))  # type: ignore[operator]


class _Local:
    """A collective of a unit, among copies of this rank; see torch's `Comm`."""

    def __init__(self, kind: str, wire: Callable[[int], None]) -> None:
        self._kind, self._wire = kind, wire

    def allocate(self, size: Any, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any
    ) -> dist.Work | None:
        noting = next((m for m in _modes() if isinstance(m, Noted)), None)
        if noting is not None:
            shapes = [list(output_tensor.shape), list(input_tensor.shape)]
            noting.order.append(f"{self._kind} {shapes}")
        whole, part = output_tensor, input_tensor
        if self._kind == "all_gather":
            whole.view(-1, part.numel()).copy_(part.expand(whole.numel() // part.numel(), -1))
        else:
            output_tensor.copy_(input_tensor.view(-1, output_tensor.numel())[group.rank()])
        sent = max(whole.nbytes, part.nbytes)
        self._wire(sent - min(whole.nbytes, part.nbytes))
        return None


def _modes() -> list[Any]:
    return torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def differing(orders: list[list[str]]) -> str:
    """Return where the first rank departs from rank 0, "" where all do the same."""
    for rank, order in enumerate(orders):
        for i, (own, first) in enumerate(itertools.zip_longest(order, orders[0])):
            if own != first:
                return f"rank {rank}, collective {i} of {len(order)}: {own}, of rank 0: {first}"
    return ""
