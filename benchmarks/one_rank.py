"""One rank of many, in one process: its real work, and the order of what it does with the others.

The other ranks do not exist (`fake_world`). What this one gathers are copies of its own part, of
what it reduces it keeps its own slice: memory, kernels and streams are those of the rank, the
values mean nothing. Each collective and each exchange of `toolkit.ranks` is noted: ranks of a
group must note the same, in the same order (`differing`). A wait for the wire can be put in.
"""

import contextlib
import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit import ranks
from toolkit.checkpoint import commit, shards
from toolkit.formats import torch_private, transformers_private
from toolkit.planning.fake_ranks import fake_world

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Namespaces of operations that exchange tensors between ranks."""
_AMONG = " among "
_EXCHANGES = (
    "broadcast",
    "_min_of_each",
    "gather_to_main",
    "gather_integers",
    "sum_over_ranks",
    "object_group",
)


class Noted(TorchDispatchMode):
    """Records the collectives of this rank, by name, shapes and ranks of the group, and its
    exchanges. Those of other threads are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again as the operations on local tensors, collectives too
        group = _group_of(func, args, kwargs or {})
        if group is not None:
            shapes = [list(t.shape) for t in _tensors(args)]
            self.record(func._schema.name.rpartition("::")[2], shapes, group)
        return func(*args, **(kwargs or {}))

    def record(self, name: str, content: object, group: Any = None) -> None:
        """Append one exchange of this rank; `group` None: with all ranks."""
        members = dist.get_process_group_ranks(group)
        self.order.append(f"{name} {content}{_AMONG}{','.join(map(str, members))}")


def _group_of(func: Any, args: Any, kwargs: Any) -> dist.ProcessGroup | None:
    """Return the group of a collective, None of any other operation (a wait for one, too)."""
    if func.namespace not in COLLECTIVES:
        return None
    resolve = torch_private("distributed.distributed_c10d", "_resolve_process_group")
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if "ProcessGroup" in str(argument.type):
            return dist.ProcessGroup.unbox(value)
        if argument.name == "group_name":
            return resolve(value)
    return None


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
            count = (
                len(args[0])
                if name in ("_min_of_each", "gather_integers", "sum_over_ranks")
                else ""
            )
            noted.record(f"exchange {name}", count)
            return exchange(*args, **options)

        return noting

    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_world(world, rank))
        for name in _EXCHANGES:
            stack.enter_context(mock.patch.object(ranks, name, note(name)))
        # What others wrote is not there: the checkpoint has this rank's part only.
        stack.enter_context(mock.patch.object(shards, "build_metadata", return_value=b""))
        stack.enter_context(mock.patch.object(commit, "find_damaged_files", return_value=[]))
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
        _note(self._kind, [list(output_tensor.shape), list(input_tensor.shape)], group)
        whole, part = output_tensor, input_tensor
        if self._kind == "all_gather":
            whole.view(-1, part.numel()).copy_(part.expand(whole.numel() // part.numel(), -1))
        else:
            output_tensor.copy_(input_tensor.view(-1, output_tensor.numel())[group.rank()])
        sent = max(whole.nbytes, part.nbytes)
        self._wire(sent - min(whole.nbytes, part.nbytes))
        return None


@contextlib.contextmanager
def local_all_to_all(wire: Callable[[int], None] = lambda nbytes: None) -> Iterator[None]:
    """Within the context, all-to-alls return what this rank sends, by local copies.

    For `sharding.context_parallel` and `expert_parallel`. The number of received rows is as with
    other ranks; rows without a sender are zero.

    Args:
        wire: called with the bytes that the rank would send to others, on the current stream.
    """
    module = "distributed.expert_parallel"
    transformers_private(module, "all_to_all_single")
    transformers_private(module, "all_to_all_single_autograd")
    own = importlib.import_module(f"transformers.{module}")

    def exchange(output: torch.Tensor, values: torch.Tensor, *, group: Any) -> None:
        """Replace `torch.distributed.all_to_all_single` of parts of equal sizes."""
        _note("all_to_all", [list(values.shape)], group)
        output.copy_(values)
        wire(_sent_bytes(values, group))

    def exchange_rows(values: torch.Tensor, rows: list[int], _: list[int], group: Any) -> Any:
        """Replace torch's `all_to_all_single_autograd`."""
        return _Rows.apply(values, sum(rows), group, wire)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "all_to_all_single", exchange))
        stack.enter_context(mock.patch.object(own, "all_to_all_single", exchange))
        stack.enter_context(mock.patch.object(own, "all_to_all_single_autograd", exchange_rows))
        yield


class _Rows(torch.autograd.Function):
    """An all-to-all of rows, also in the backward, in which this rank receives its own rows."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rows: int, group: Any, wire: Any) -> torch.Tensor:
        ctx.arguments = len(values), group, wire
        _note("all_to_all", [list(values.shape)], group)
        wire(_sent_bytes(values, group))
        if rows == len(values):
            return values.clone()
        received = values.new_zeros(rows, *values.shape[1:])
        kept = min(rows, len(values))
        received[:kept] = values[:kept]
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Rows.apply(gradients[0].contiguous(), *ctx.arguments), None, None, None


def _sent_bytes(values: torch.Tensor, group: dist.ProcessGroup) -> int:
    """Return the bytes of an all-to-all that leave the rank."""
    return values.nbytes * (group.size() - 1) // group.size()


def _note(name: str, shapes: list[list[int]], group: Any) -> None:
    """Append an exchange to the notes of this rank, if it takes any."""
    if noting := next((m for m in _modes() if isinstance(m, Noted)), None):
        noting.record(name, shapes, group)


def _modes() -> list[Any]:
    return torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def differing(orders: list[list[str]] | dict[int, list[str]]) -> str:
    """Return the first exchange at which ranks wait for each other forever, "" if there is none.

    An exchange completes when it is the next one of every rank of its group, under the same name
    and with the same shapes. `orders[rank]` are the exchanges of that rank in order. Ranks that a
    dict does not have were not run, and are taken to do what the others of their groups do.
    """
    orders = dict(enumerate(orders)) if isinstance(orders, list) else orders
    counts = dict.fromkeys(orders, 0)
    waiting = set(orders)
    while waiting:
        rank = waiting.pop()
        if counts[rank] == len(orders[rank]):
            continue
        members = orders.keys() & _members(orders[rank][counts[rank]])
        heads = {
            r: orders[r][counts[r]] if counts[r] < len(orders[r]) else "nothing" for r in members
        }
        if len({*heads.values()}) > 1:
            continue  # until another one of them has come so far
        for member in members:
            counts[member] += 1
        waiting.update(members)
    stuck = [rank for rank, order in orders.items() if counts[rank] < len(order)]
    if not stuck:
        return ""
    members = sorted(orders.keys() & _members(orders[stuck[0]][counts[stuck[0]]]))
    heads = {r: orders[r][counts[r]] if counts[r] < len(orders[r]) else "nothing" for r in members}
    usual, _ = Counter(heads.values()).most_common(1)[0]
    odd = next(rank for rank, head in heads.items() if head != usual)
    other = next(rank for rank, head in heads.items() if head == usual)
    at = f"collective {counts[odd]} of {len(orders[odd])}"
    return f"rank {odd}, {at}: {heads[odd]}, of rank {other}: {usual}"


def of_any_group(exchange: str) -> str:
    """Return an exchange with the number of ranks of its group in place of the ranks."""
    return f"{exchange.rpartition(_AMONG)[0]} in a group of {len(_members(exchange))}"


def first_difference(first: list[str], second: list[str]) -> str:
    """Name the first exchange that two orders do not share, "" if they are equal."""
    pairs = enumerate(itertools.zip_longest(first, second, fillvalue="nothing"))
    different = (f"exchange {i}: {a}, of the other: {b}" for i, (a, b) in pairs if a != b)
    return next(different, "")


def _members(exchange: str) -> set[int]:
    return {int(rank) for rank in exchange.rpartition(_AMONG)[2].split(",")}
