"""Activation checkpointing: what a layer keeps for its backward, and where.

The module's forward is replaced, and the module is not wrapped. So names stay, and the
recomputation runs inside the module's hooks, on gathered parameters and cast inputs. (From outside,
torch 2.11 and 2.12 lose that cast.)

[Note: kept and written to] If the layer wrote to a kept result later, the recomputation would get
the changed result and write to it a second time. So a result that is written to is not kept, but
computed again. The same holds for results that leave the layer, because others may write to them.
Writes are found by storage, as version counters do not follow `_unsafe_view` (in each linear layer
without a bias) nor `.data`. A kernel that writes past PyTorch is found in a layer's first forward,
by sums of the bits. Compiled layers need none of this: the compiler removes writes from the graph
first.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import Cache

from toolkit import ranks
from toolkit.errors import ShardingError
from toolkit.formats.bit_sums import bit_sums
from toolkit.models.modes import get_random_state
from toolkit.sharding.host_memory import HostMemory, OnHost

# These operations take nearly all of a layer's time, so their results are kept. The values say
# which argument of a product holds the summed side, and from which dimension on.
_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"), (0, -1)),
    **dict.fromkeys(("addmm", "baddbmm"), (1, -1)),
    "convolution": (1, 1),
}
# fmt: off
_ATTENTION = (
    "_flash_attention_forward", "_efficient_attention_forward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
# fmt: on
# Custom operations of torch's varlen attention and of flash-attn, if the library is imported.
_KEPT_OF = {
    "torch_attn": ("_varlen_attn",),
    "flash_attn": ("_flash_attn_forward", "_flash_attn_varlen_forward"),
}
# A product over k values costs 2k operations for each value kept. Below about 300 a GPU spends the
# time of that on the bytes of the result, as for an addition: nothing is gained by keeping LoRA's
# B (k is the rank), attention scores (a head's width) or a depthwise convolution. LoRA's A stays:
# its result is small, and computing it again reads the layer's whole input.
_THIN = 256
_INSTEAD = "set sharding.activation_checkpointing: none"
_log_once = functools.cache(ranks.log_once)


def recompute_in_backward(
    module: nn.Module,
    *,
    name: str = "the layer",
    selective: bool = False,
    host: HostMemory | None = None,
) -> None:
    """Replace `module.forward`, so that the backward runs it again and few activations are kept.

    Calls in evaluation mode or without gradients run the original forward. Caches among the
    arguments are replaced by None.

    Args:
        module: a layer, changed in place.
        name: name of the layer, for messages.
        selective: keep the results of attention and of large matrix products, and recompute only
            the rest. If False, keep only the layer's inputs.
        host: keeps tensors in host memory until the backward. None: they stay on the device.
    """
    forward: Callable = module.forward
    draws: bool | None = None  # the forward draws random numbers; None before the first forward
    layer = _LayerFacts(name, type(module).__name__)

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        nonlocal draws
        # A cache would grow a second time. transformers' own checkpointing passes none either.
        args = tuple(None if isinstance(a, Cache) else a for a in args)
        kwargs = {k: None if isinstance(v, Cache) else v for k, v in kwargs.items()}
        # Dropout must drop the same values again. Without random draws nothing has to be restored.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws is not False}
        if torch.compiler.is_compiling():
            if selective:
                options["context_fn"] = partial(
                    create_selective_checkpoint_contexts, _compiler_policy
                )
            return checkpoint(forward, *args, **options, **kwargs)
        group = None if host is None else host.group()
        if draws is not None and not selective:
            with _saved_tensor_hooks(group):
                return checkpoint(forward, *args, **options, **kwargs)
        before = get_random_state() if draws is None else None
        store = torch.Tensor.detach if group is None else group.keep
        keep = _KeepResults(
            layer, store if selective else None, (args, kwargs), first=draws is None
        )
        options["context_fn"] = lambda: (keep, _ReuseResults(keep))
        with _saved_tensor_hooks(group):
            out = checkpoint(keep.wrap_forward(forward), *args, **options, **kwargs)
        keep.end(out)
        if before is not None:
            draws = not all(map(torch.equal, before, get_random_state()))
        return out

    module.forward = recomputed  # type: ignore[method-assign]


def _saved_tensor_hooks(group: Any) -> Any:
    """Build a context in which autograd keeps its saved tensors in the host memory of `group`.

    If `group` is None, the context changes nothing.
    """
    if group is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(group.keep, lambda stored: stored.get())


@functools.cache
def _kept_operations() -> frozenset[Any]:
    """Collect the operations whose results a selective recomputation may keep.

    They are matrix products, convolutions and attention kernels. Cached.
    """
    spaces = [(getattr(torch.ops, space), names) for space, names in _KEPT_OF.items()]
    operations = ((torch.ops.aten, (*_PRODUCTS, *_ATTENTION)), *spaces)
    packets = [getattr(ops, n) for ops, names in operations for n in names if hasattr(ops, n)]
    overloads = (getattr(p, overload) for p in packets for overload in p.overloads())
    # An overload with `out` only writes.
    return frozenset(op for op in overloads if not op._schema.is_mutable)


def _is_worth_keeping(func: Any, args: Sequence[Any]) -> bool:
    """Return False if an operation is a matrix product that sums at most 256 values per result.

    Recomputing such a thin product costs no more than reading and writing its result.
    """
    side = _PRODUCTS.get(func._schema.name.removeprefix("aten::"))
    if side is None:
        return True
    summed = math.prod(args[side[0]].shape[side[1] :])
    # A symbolic size is no weight's width, so the product is not thin.
    return not isinstance(summed, int) or summed > _THIN


def _compiler_policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide for torch's compiler whether to keep or to recompute an operation's result."""
    keeps = func in _kept_operations() and _is_worth_keeping(func, args)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class _LayerFacts:
    """Facts about one layer that all its forwards share: its name, class and unsafe operations."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.unseen = set[Any]()
        """Operations to whose results the layer writes without telling PyTorch."""

    def build_error(self, reason: str) -> ShardingError:
        """Build the error that this layer cannot be recomputed, with the reason and a remedy."""
        return ShardingError(
            f"activation_checkpointing: {self.name} ({self.kind}) cannot be recomputed: {reason}; "
            f"{_INSTEAD}"
        )


class _KeepResults(TorchDispatchMode):
    """Dispatch mode of a layer's forward that keeps the results which the recomputation reuses.

    If a later operation writes to a kept result in place, the result is dropped; see [Note: kept
    and written to].
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions run compiled while this mode is active."""
        return True

    def __init__(
        self, layer: _LayerFacts, store: Callable[[Any], Any] | None, inputs: Any, *, first: bool
    ) -> None:
        """Begin a forward.

        Args:
            layer: the layer whose forward begins.
            store: converts a result to the form that is kept; None: nothing is kept.
            inputs: arguments of the forward, which must not be written to.
            first: True if this is the layer's first forward.
        """
        super().__init__()
        self.layer = layer
        self._store = store
        self._first = first
        self.operations = _kept_operations()
        # For each call of an operation: the shapes of its arguments, and the kept result or None.
        self.calls: dict[Any, list[list[Any]]] = {}
        self._places: dict[StorageWeakRef, tuple[Any, int]] = {}
        self._written = set[Any]()
        self._inputs = _storages(inputs) if first else set[StorageWeakRef]()
        self._sums: list[tuple[Any, int, torch.Tensor, torch.Tensor]] = []
        self._ended = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            self._drop_written(func, args, kwargs)
        elif func in self.operations:
            self._keep(func, args, out)
        return out

    def _keep(self, func: Any, args: Sequence[Any], out: Any) -> None:
        """Record a call of an operation and its shapes, and keep its result if that saves time."""
        calls = self.calls.setdefault(func, [])
        call = [_tensor_shapes(args), None]
        calls.append(call)
        if self._store is None or func in self.layer.unseen or not _is_worth_keeping(func, args):
            return
        call[1] = tree_map_only(torch.Tensor, self._store, out)
        place = func, len(calls) - 1
        self._places |= dict.fromkeys(_storages(out), place)
        if self._first:
            results = [
                t for t in _iterate_tensors(out) if not (isinstance(t, FakeTensor) or t.is_meta)
            ]
            self._sums += [(*place, t.detach(), bit_sums(t.detach()[None])) for t in results]

    def _drop_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Drop the kept results to which an in-place operation writes.

        Args:
            func: the operation.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Raises:
            ShardingError: it writes to an input of the layer, so the forward cannot run again.
        """
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            storages = _storages(args[i] if i < len(args) else kwargs.get(argument.name))
            if storages & self._inputs:
                raise self.layer.build_error(f"it writes to its own input in place ({func})")
            self._written |= {func_of_result for func_of_result, _ in self._drop(storages)}

    def _drop(self, storages: set[StorageWeakRef]) -> list[tuple[Any, int]]:
        """Drop the kept results whose memory is in `storages`.

        Returns:
            For each dropped result, the operation, and the index of the call among its calls.
        """
        places = [self._places.pop(storage) for storage in storages & self._places.keys()]
        for func, index in places:
            self.calls[func][index][1] = None
        return places

    def wrap_forward(self, forward: Callable) -> Callable:
        """Wrap `forward` so that an error in the layer's first recomputation names the layer.

        Errors of the device or the network, and those of the forward itself, are raised unchanged.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except (RuntimeError, ValueError, TypeError, LookupError) as error:
                # Errors of the device or the network are not the forward's fault.
                outside = torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError
                if not (self._ended and self._first) or isinstance(error, outside):
                    raise
                raise self.layer.build_error(f"the second time it ends with {error}") from error

        return run

    def end(self, out: Any) -> None:
        """End the forward: drop the results that cannot be reused.

        These are results that belong to the output, and results to which a kernel wrote without
        telling PyTorch. A layer's first forward finds such writes by checksums, and logs which
        operations will run again. Later forwards do not keep the results of those operations.

        Args:
            out: output of the layer; other code may write to it.
        """
        self._ended = True
        self._drop(_storages(out))
        changed = [
            not torch.equal(bit_sums(t.detach()[None]), bits) for _, _, t, bits in self._sums
        ]
        for (func, index, *_), is_other in zip(self._sums, changed, strict=True):
            if is_other and self.calls[func][index][1] is not None:
                self.layer.unseen.add(func)
        self._sums.clear()
        for func in self.layer.unseen if self._first else ():
            for call in self.calls[func]:
                call[1] = None
        again = self._written | self.layer.unseen if self._first else set()
        if again and not any(
            isinstance(t, FakeTensor) for t in _iterate_tensors(out)
        ):  # not in a plan
            names = ", ".join(sorted({func._schema.name.split("::")[1] for func in again}))
            _log_once(
                f"recompute  {self.layer.kind} writes in place to results of {names}: those run "
                "again in the backward instead of being kept"
            )


class _ReuseResults(TorchDispatchMode):
    """Dispatch mode of the recomputation that returns kept results instead of computing them.

    Raises a ShardingError if an operation is called more often than in the forward, or with other
    shapes.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions run compiled while this mode is active."""
        return True

    def __init__(self, keep: _KeepResults) -> None:
        super().__init__()
        self._layer = keep.layer
        self._calls = keep.calls
        self._operations = keep.operations
        self._next: dict[Any, Iterator[list[Any]]] = {}

    def __enter__(self) -> Any:
        self._next = {func: iter(calls) for func, calls in self._calls.items()}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in self._operations:
            return func(*args, **(kwargs or {}))
        call = next(self._next.get(func, iter(())), None)
        if call is None or call[0] != (now := _tensor_shapes(args)):
            which = "more often" if call is None else f"on {now}, not on {call[0]}"
            raise self._layer.build_error(f"the second time it runs {func} {which}")
        # Give up the reference, so that the memory is free once the backward has used the result.
        result = call[1]
        call[1] = None
        if result is None:
            return func(*args, **(kwargs or {}))
        return tree_map_only(OnHost, lambda stored: stored.get(), result)


def _iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nested value; for a DTensor or other wrapper its inner tensors."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and is_traceable_wrapper_subclass(leaf):
            yield from _iterate_tensors(
                [getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]]
            )
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def _storages(value: Any) -> set[StorageWeakRef]:
    """Collect weak references to the storages of all tensors in a nested value."""
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in _iterate_tensors(value)}


def _tensor_shapes(args: Sequence[Any]) -> list[tuple[int, ...]]:
    """List the shapes of those arguments that are tensors."""
    return [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
