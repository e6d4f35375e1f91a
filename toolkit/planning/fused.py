"""Work of a compiled graph, in which what lies between two matrix products is one kernel.

So of values that live in between nothing is read or written. What inductor really fuses is finer:
an estimate, by which compiled layers are told from eager ones. Knows no model and no settings.
"""

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

Operations = Counter[tuple[float, int, bool]]  # as in `meter.Work`


def fused_operations(graph: fx.Graph, flops: Callable[[Any, Any, Any, Any], float]) -> Operations:
    """Return the operations of a graph that AOTAutograd made. `flops`: (operation, its arguments,
    those by name, its result) -> floating-point operations, 0 where it may be fused.
    """
    found: Operations = Counter()
    kernel = dict[fx.Node, int]()  # node -> number of the kernel that writes it; none: given
    base = dict[fx.Node, fx.Node]()  # view -> what it is a view of
    members = list[tuple[float, list[fx.Node]]]()
    opened = False  # whether the last kernel takes more
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        target, args = node.target, node.args
        if isinstance(target, torch._ops.HigherOrderOperator):  # with the state of random numbers
            place = next(i for i, a in enumerate(args) if isinstance(a, torch._ops.OpOverload))
            target, args = args[place], args[place + 1 :]
        if target is operator.getitem or getattr(target, "is_view", False):
            base[node] = base.get(args[0], args[0])
            continue
        given, named = tree_map_only(fx.Node, _value, (args, node.kwargs))
        count = flops(target, given, named, _value(node))
        if count or not opened:
            members.append((count, []))
        opened = not count
        kernel[node] = len(members) - 1
        members[-1][1].append(node)
    read = [dict[fx.Node, None]() for _ in members]
    written = [dict[fx.Node, None]() for _ in members]
    for node in graph.nodes:
        here = kernel.get(node)
        if here is None and node.op != "output":
            continue
        for argument in node.all_input_nodes:
            source = base.get(argument, argument)
            if kernel.get(source) != here:
                if here is not None:
                    read[here][source] = None
                if source in kernel:
                    written[kernel[source]][source] = None
    for i, (count, _) in enumerate(members):
        tensors = [t for n in (*read[i], *written[i]) for t in _tensors(n)]
        inputs = [t for n in read[i] for t in _tensors(n) if t.is_floating_point()]
        half = min((t.itemsize for t in inputs), default=4) <= 2
        found[count, sum(t.numel() * t.itemsize for t in tensors), half] += 1
    return found


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    tensors = (t for t in tree_leaves(_value(node)) if isinstance(t, torch.Tensor))
    return [t for t in tensors if isinstance(t.numel(), int)]  # not states of random numbers
