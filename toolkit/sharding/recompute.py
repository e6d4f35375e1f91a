"""Activation checkpointing: what a layer keeps for its backward, and where.

The module's forward is replaced, not the module wrapped: names stay, and the recomputation runs
inside the module's hooks, on gathered parameters and cast inputs (from outside, torch 2.11 and 2.12
lose that cast).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from toolkit.errors import ShardingError
from toolkit.models.modes import random_state
from toolkit.sharding.host_memory import HostMemory, OnHost

# Worth more to keep than to compute again: they take nearly all of a layer's time.
_KEPT = (
    *("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"),
    *("convolution", "_flash_attention_forward", "_efficient_attention_forward"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    "_scaled_dot_product_fused_attention_overrideable",
)
# Not where experts have biases: transformers adds them in place, so that what was kept would be
# added to twice.
_OF_EXPERTS = frozenset(("bmm", "baddbmm", "_grouped_mm", "_scaled_grouped_mm"))
# Custom operations, there once their library is imported: torch's varlen attention, flash-attn's.
_KEPT_OF = {
    "torch_attn": ("_varlen_attn",),
    "flash_attn": ("_flash_attn_forward", "_flash_attn_varlen_forward"),
}


def recompute_in_backward(
    module: nn.Module, *, selective: bool = False, host: HostMemory | None = None
) -> None:
    """Recompute `module`'s forward in the backward pass, in place. Training only.

    `selective` keeps the results of matrix products and attention; with `host` what is kept is
    there until the backward.
    """
    forward: Callable = module.forward
    biased = any(getattr(inner, "has_bias", False) is True for inner in module.modules())
    operations = _kept_operations(without=_OF_EXPERTS if biased else frozenset())
    draws: bool | None = None  # whether it draws random numbers; not known before the first

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        nonlocal draws
        tries = draws is None and not torch.compiler.is_compiling()
        before = random_state() if tries else None
        # Dropout must drop the same again; where there is none, the states need not be put back.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws is not False}
        group = None if host is None else host.group()
        if selective and group is not None:
            options["context_fn"] = partial(_offloading_contexts, group, operations)
        elif selective:
            keep = list(operations)
            options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)
        hooks: Any = nullcontext()
        if group is not None:
            hooks = torch.autograd.graph.saved_tensors_hooks(group.keep, lambda kept: kept.get())
        with hooks:
            out = checkpoint(forward, *args, **options, **kwargs)
        if before is not None:
            draws = not all(map(torch.equal, before, random_state()))
        return out

    module.forward = recomputed  # type: ignore[method-assign]


@functools.cache
def _kept_operations(without: frozenset[str]) -> frozenset[Any]:
    spaces = [(getattr(torch.ops, space), names) for space, names in _KEPT_OF.items()]
    found = ((torch.ops.aten, _KEPT), *spaces)
    named = [(ops, name) for ops, names in found for name in names if name not in without]
    packets = [getattr(ops, name) for ops, name in named if hasattr(ops, name)]
    return frozenset(getattr(p, overload) for p in packets for overload in p.overloads())


def _offloading_contexts(group: Any, operations: frozenset[Any]) -> tuple["_Keep", "_Reuse"]:
    # PyTorch's selective checkpointing keeps what it keeps on the device: its offload policy is
    # heeded by the compiler only.
    kept: dict[Any, list[Any]] = {}
    return _Keep(kept, group, operations), _Reuse(kept, operations)


class _Keep(TorchDispatchMode):
    """In the forward: copies the results of the kept operations to host memory."""

    def __init__(self, kept: dict[Any, list[Any]], group: Any, operations: frozenset[Any]):
        super().__init__()
        self._kept, self._group, self._operations = kept, group, operations
        self._copied = set[StorageWeakRef]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._refuse_writing(func, args, kwargs)
        out = func(*args, **kwargs)
        if func in self._operations:
            stored = tree_map_only(torch.Tensor, self._group.keep, out)
            self._kept.setdefault(func, []).append(stored)
            for tensor in tree_leaves(out):
                self._copied |= _storage(tensor)
        return out

    def _refuse_writing(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse to write to what is being copied: the copy, on a stream of its own, may be late,
        and hold what was written; the recomputation would write it again.
        """
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            if any(_storage(tensor) & self._copied for tensor in tree_leaves(given)):
                raise ShardingError(
                    f"a layer writes to the result of a product in place ({func}), which "
                    "activation_checkpointing: selective with activation_offload keeps elsewhere; "
                    "set activation_checkpointing: full, or activation_offload: false"
                )


def _storage(value: Any) -> set[StorageWeakRef]:
    plain = isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value)
    return {StorageWeakRef(value.untyped_storage())} if plain else set()


class _Reuse(TorchDispatchMode):
    """In the recomputation: hands the kept results back instead of computing them."""

    def __init__(self, kept: dict[Any, list[Any]], operations: frozenset[Any]):
        super().__init__()
        self._kept, self._operations = kept, operations
        self._next: dict[Any, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in self._operations:
            return func(*args, **(kwargs or {}))
        index = self._next.get(func, 0)
        self._next[func] = index + 1
        results = self._kept.get(func, [])
        if index >= len(results):
            raise ShardingError(
                f"the recomputation runs {func} more often than the forward did; this layer's "
                "forward is not repeatable: leave it out of activation_checkpointing"
            )
        return tree_map_only(OnHost, lambda kept: kept.get(), results[index])
