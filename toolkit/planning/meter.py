"""Count what a step allocates, computes and sends, while it runs on tensors without bytes.

A dispatch mode sees every operation. A storage counts from the operation that creates it until
Python frees it, under the kind of work that created it. FSDP2's own labels (`record_function`)
distinguish gathered parameters from gradients that are being reduced. Knows no model and no
settings.

[Note: fused operations] In a compiled graph, operations between two matrix products become one
kernel, so the values between them are neither read nor written. What inductor fuses in practice is
more fine-grained; this estimate distinguishes compiled layers from eager ones.
"""

import contextlib
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from toolkit.formats import torch_private
from toolkit.sharding.host_memory import TO_HOST

Operations = Counter[tuple[float, int, bool]]
"""(floating-point operations, bytes read and written, in 16 bits) -> number of operations."""

PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
STATE = "optimizer state"
GATHERED = "gathered parameters"
REDUCED = "gradients being reduced"
ACTIVATIONS = "activations"
HOST = "host"
WORKING = {"forward": ACTIVATIONS, "backward": "backward", "optimizer step": "optimizer step"}
"""Phase of a step -> kind of the memory that it allocates."""

_aten: Any = torch.ops.aten
# Kinds that a rank holds between two steps.
_PERSISTENT = {PARAMETERS, BUFFERS, GRADIENTS, STATE}
_MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
# Answers that the host would read from the device: any loss, every token supervised, nothing drawn.
_ANSWERED_TRUE = {_aten.equal.default, _aten.is_nonzero.default}
_COMPILER = "_dynamo.backends.debugging"  # its `boxed_nop` runs graphs as they are
_HigherOrderOperator = torch_private("_ops", "HigherOrderOperator")
_WITH_RANDOM_STATE = {"run_and_save_rng_state", "run_with_rng_state"}
# DTensor calls this for an operation that it meets for the first time, to learn the shape of the
# result from full tensors without bytes. The step does not need their memory.
_SHAPE_TRIAL = "_propagate_tensor_meta_non_cached"
_COLLECTIVES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
    "_c10d_functional::all_to_all_single": "all_to_all",  # in compiled layers
}


@dataclass
class Peak:
    """The moment of a phase, such as the backward, at which most device memory is in use."""

    nbytes: int = 0
    working: int = 0
    """The part of `nbytes` that is not held between two steps, such as activations."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Kind of memory -> bytes in use at the peak."""
    layer: str = ""
    """The decoder layer that ran last before the peak."""


@dataclass
class Work:
    """Counts of operations and collectives. A device's figures turn them into time."""

    operations: Operations = field(default_factory=Counter)
    traffic: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    """(collective, bytes of the full tensor, ranks) -> number of calls. 0 ranks are all."""

    def __mul__(self, times: int) -> "Work":
        return Work(*(Counter({k: n * times for k, n in c.items()}) for c in vars(self).values()))


@dataclass
class _LiveStorage:
    """Kind and size of a storage that is in use."""

    kind: str
    nbytes: int = 0


class Meter(TorchDispatchMode):
    """Dispatch mode that counts memory, operations and traffic of a step on fake CPU tensors.

    Memory is counted by kind: `parameters`, `gradients`, `activations` and so on. Code of
    `torch.compile` is counted when it runs, not while it is compiled.

    Args:
        absent: kinds that are not in the device's memory, such as offloaded ones. Totals and peaks
            do not include them.
        granularity: unit of the allocator in bytes; the size of each storage is rounded up to a
            multiple.
        gloo: count the copy that gloo makes of a tensor that it reduces.
    """

    supports_higher_order_operators = True

    def __init__(
        self, absent: Iterable[str] = (), granularity: int = 1, gloo: bool = False
    ) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        """Kind -> bytes in use now."""
        self.peaks: dict[str, Peak] = {}
        """Phase of the step -> its peak."""
        self.work: dict[str, Work] = {}
        """Part of the step -> its operations and traffic."""
        self.layer = ""
        """The decoder layer that runs; set by the caller."""
        self._absent = {HOST, *absent}
        self._granularity = granularity
        self._gloo = gloo
        self._phase = ""
        self._part = ""
        self._labels: list[str] = []
        self._storages: dict[int, _LiveStorage] = {}
        self._total_bytes = 0
        self._shape_trials = 0
        """Number of shape trials that are running, nested."""
        self._compiled_graphs = 0
        """Number of compiled graphs that are running, nested."""
        self._compilation = torch_private("_guards", "CompileContext")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions run compiled while this mode is active."""
        return True

    def begin(self, phase: str, part: str = "") -> None:
        """Begin a phase, such as the backward, and optionally another part of the step.

        Args:
            phase: key of `peaks` under which the memory counts from now on.
            part: key of `work` under which operations and traffic count from now on; empty: no
                change.
        """
        self._phase = phase
        self._part = part or self._part
        self.peaks.setdefault(phase, Peak())
        self.work.setdefault(self._part, Work())
        self._update_peak()

    def claim(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count the memory of these tensors as `kind` instead of as their previous kind."""
        for tensor in tensors:
            self._count(tensor, kind, replaces_kind=True)

    @contextlib.contextmanager
    def running(self, *, compiled: bool = False) -> Iterator[None]:
        """Within the context, count everything that runs.

        Also patches torch, so that resized storages and the graphs of `torch.compile` are counted.

        Args:
            compiled: set it if some of the code is compiled by `torch.compile`.
        """
        meter = self
        resize = torch.UntypedStorage.resize_
        propagator = torch_private("distributed.tensor._sharding_prop", "ShardingPropagator")
        try_shape = getattr(propagator, _SHAPE_TRIAL)

        # No dispatch mode sees that a storage is resized.
        def counting_resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            if (live := meter._storages.get(id(storage))) is not None:
                meter._resize(live, storage.nbytes())
            return out

        def uncounted_trial(*args: Any) -> Any:
            meter._shape_trials += 1
            try:
                return try_shape(*args)
            finally:
                meter._shape_trials -= 1

        with contextlib.ExitStack() as patches:
            patch = mock.patch.object(torch.UntypedStorage, "resize_", counting_resize)
            patches.enter_context(patch)
            patches.enter_context(mock.patch.object(propagator, _SHAPE_TRIAL, uncounted_trial))
            # The compiler takes seconds to import.
            if compiled:
                patches.enter_context(self._counting_graphs())
            with self:
                yield

    def _counting_graphs(self) -> Any:
        """Build a context in which each compiled graph, when it runs, counts its fused kernels."""
        meter = self
        compile_graph = torch_private(_COMPILER, "boxed_nop")

        def compile_and_count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            run = compile_graph(graph, inputs)
            operations = fused_operations(graph.graph, _count_flops)

            def run_and_count(args: Any) -> Any:
                if meter._part:
                    meter.work[meter._part].operations += operations
                meter._compiled_graphs += 1
                try:
                    return run(args)
                finally:
                    meter._compiled_graphs -= 1

            run_and_count._boxed_call = True  # type: ignore[attr-defined]
            return run_and_count

        patches = contextlib.ExitStack()
        patches.enter_context(mock.patch(f"torch.{_COMPILER}.boxed_nop", compile_and_count))
        # Each kind of layer needs a separate graph: a size that is a symbol counts as nothing.
        patches.enter_context(torch._dynamo.config.patch(automatic_dynamic_shapes=False))
        return patches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it; torch calls this for each one."""
        kwargs = kwargs or {}
        if isinstance(func, _HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs)
        is_compiling = self._compilation.try_get() is not None
        if func.namespace == "prim" or self._shape_trials or is_compiling:
            return func(*args, **kwargs)
        if any(issubclass(t, DTensor) for t in types):
            # DTensor calls the operation again, with the local tensors.
            return NotImplemented
        if func.namespace == "profiler":
            self._follow_label(func, args)
            return func(*args, **kwargs)
        if func in _ANSWERED_TRUE:
            return True
        if func is _aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        out = self._run_operation(func, args, kwargs)
        kind = self._current_kind()
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(func, args)
        if not func.is_view:
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self._count(tensor, kind)
            if self._part and not self._compiled_graphs:
                self._count_work(func, args, kwargs, out)
        return out

    def _run_operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation. If it would fail on fake tensors, run an equivalent one instead."""
        if func is _aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # Kernels support other dtypes, but the implementation for fake tensors does not.
            operands = [t.bfloat16() if isinstance(t, torch.Tensor) else t for t in args[:2]]
            return func(*operands, *args[2:], **kwargs).to(args[0].dtype)
        if func is _aten.addmm.dtype_out:
            # The implementation of torch 2.11 mistakes the dtype for a factor.
            return kwargs["out"]
        if func is _aten.nonzero.default:
            shape = args[0].numel(), args[0].ndim
            return _aten.new_empty(args[0], shape, dtype=torch.int64)
        return func(*args, **kwargs)

    def _run_higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that takes another operator as an argument.

        If the operator only saves or restores the random state, the inner operator runs and is
        counted.
        """
        is_compiling = self._compilation.try_get() is not None
        if is_compiling or func.name() not in _WITH_RANDOM_STATE:
            return func(*args, **kwargs)
        # Attention in a compiled layer that recomputes: the kernel could draw random numbers.
        with self:
            if func.name() == "run_with_rng_state":
                return args[1](*args[2:], **kwargs)
            return torch.empty(16, dtype=torch.uint8), args[0](*args[1:], **kwargs)

    # ---- Memory ----------------------------------------------------------------------------------

    def _follow_label(self, func: Any, args: Any) -> None:
        """Push a label of `record_function` when it begins, and pop the last one when it ends."""
        if func is not torch.ops.profiler._record_function_enter_new.default:
            self._labels[-1:] = []
        else:
            self._labels.append(str(args[0]))

    def _current_kind(self) -> str:
        """Return the kind of memory allocated now, by FSDP's innermost label or else the phase."""
        for label in reversed(self._labels):
            if label == TO_HOST:
                return HOST
            if label.startswith("FSDP::post_backward_reduce"):
                return REDUCED
            if label.startswith("FSDP::all_gather"):
                return GATHERED
        return WORKING.get(self._phase, self._phase)

    def _count(self, tensor: torch.Tensor, kind: str, replaces_kind: bool = False) -> None:
        """Count a tensor's storage until it is freed. For a counted storage, update its size.

        Args:
            tensor: the tensor; if it is a DTensor, its local tensor counts. Meta tensors are
                ignored.
            kind: the kind of a new storage.
            replaces_kind: also change the kind of a storage that counts already.
        """
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta":
            return
        storage = local.untyped_storage()
        live = self._storages.get(id(storage))
        if live is None:
            live = self._storages[id(storage)] = _LiveStorage(kind)
            weakref.finalize(storage, self._free, id(storage)).atexit = False
        elif replaces_kind and live.kind != kind:
            nbytes = live.nbytes
            self._resize(live, 0)
            live.kind = kind
            self._resize(live, nbytes)
        self._resize(live, storage.nbytes())

    def _free(self, key: int) -> None:
        """Stop counting a storage whose memory was freed. `key` is the `id()` of the storage."""
        self._resize(self._storages.pop(key), 0)

    def _resize(self, live: _LiveStorage, nbytes: int) -> None:
        """Set the counted size of a storage to `nbytes`, rounded up, and update totals and peak."""
        nbytes = -(-nbytes // self._granularity) * self._granularity
        if growth := nbytes - live.nbytes:
            live.nbytes = nbytes
            self.live[live.kind] += growth
            if live.kind not in self._absent:
                self._total_bytes += growth
                if growth > 0:
                    self._update_peak()

    def _update_peak(self) -> None:
        """Record the memory in use as the phase's peak if it exceeds the peak so far."""
        peak = self.peaks.get(self._phase)
        if peak is not None and self._total_bytes > peak.nbytes:
            kinds = {kind: nbytes for kind, nbytes in self.live.items() if nbytes}
            persistent = sum(kinds.get(kind, 0) for kind in _PERSISTENT - self._absent)
            working = self._total_bytes - persistent
            self.peaks[self._phase] = Peak(self._total_bytes, working, kinds, self.layer)

    # ---- Work ------------------------------------------------------------------------------------

    def _count_collective(self, func: Any, args: Any) -> None:
        """Add a collective to the traffic of the current part.

        A reduce-scatter also counts its output as gradients and, under gloo, a temporary copy.
        """
        name = _COLLECTIVES.get(func._schema.name)
        tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        if name is None or not tensors:
            return
        sizes = [t.numel() * t.itemsize for t in tensors]
        if name == "reduce_scatter":
            self._count(tensors[0], GRADIENTS, replaces_kind=True)
            if self._gloo:
                copy = _LiveStorage(REDUCED)
                self._resize(copy, max(sizes))
                self._resize(copy, 0)
        # One tensor is the full one, the other the shard of a rank.
        has_shards = name in ("all_gather", "reduce_scatter")
        ranks = max(sizes) // max(1, min(sizes)) if has_shards else 0
        if self._part:
            nbytes = max(sizes) if has_shards or name == "all_to_all" else sum(sizes)
            self.work[self._part].traffic[name, nbytes, ranks] += 1

    def _count_work(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Add an operation to the current part: its FLOPs, and the bytes that it moves."""
        if func.namespace in ("c10d", "_c10d_functional", "profiler"):
            return
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        tensors = [t for t in (*inputs, *tree_leaves(out)) if isinstance(t, torch.Tensor)]
        if not tensors or func in (_aten.empty.memory_format, _aten.new_empty.default):
            return
        nbytes = sum(t.numel() * t.itemsize for t in tensors)
        is_half = min((t.itemsize for t in inputs if t.is_floating_point()), default=4) <= 2
        operations = self.work[self._part].operations
        operations[float(_count_flops(func, args, kwargs, out)), nbytes, is_half] += 1


def _count_flops(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs of a matrix product, attention or convolution; 0 for other operations.

    Causal flash attention on a CPU counts half.
    """
    name = func._schema.name
    if "flash_attention_for_cpu" in name:
        # Causal attention computes half of the products.
        is_causal = kwargs.get("is_causal") or any(value is True for value in args)
        share = 0.5 if is_causal else 1.0
        is_backward = name.endswith("backward")
        shapes = [t.shape for t in args if isinstance(t, torch.Tensor)][: 3 + is_backward]
        # Keys and values that heads share count for each head; torch 2.11 refuses their shapes.
        heads = shapes[is_backward][1]
        shapes = [torch.Size((s[0], heads, *s[2:])) for s in shapes]
        return share * (sdpa_backward_flop_count if is_backward else sdpa_flop_count)(*shapes)
    if name.rpartition("::")[2] in _MATRIX_PRODUCTS:
        operand = args[1 if "add" in name else 0]
        # Groups share the inner dimension.
        groups = out.shape[0] if out.ndim > operand.ndim else 1
        return 2.0 * out.numel() * operand.shape[-1] / groups
    count = flop_registry.get(func.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


# ---- Compiled graphs -----------------------------------------------------------------------------


def fused_operations(graph: fx.Graph, flops: Callable[[Any, Any, Any, Any], float]) -> Operations:
    """Estimate the kernels that a compiled graph becomes; see [Note: fused operations].

    Args:
        graph: a graph of AOTAutograd, whose nodes hold fake tensors.
        flops: function of (operation, arguments, keyword arguments, result) that returns the
            floating-point operations; 0 if the operation can be fused with its neighbours.

    Returns:
        A counter of kernels. Its keys are (floating-point operations, bytes read and written, True
        if the smallest float input has 16 bits or less).
    """
    # Node -> the kernel that writes it; inputs of the graph have none.
    kernel_of: dict[fx.Node, int] = {}
    # View -> the node that it is a view of.
    base_of: dict[fx.Node, fx.Node] = {}
    kernel_flops: list[float] = []
    can_extend = False  # the last kernel can take further operations
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        target, args = node.target, node.args
        if isinstance(target, torch._ops.HigherOrderOperator):
            # It saves or restores the state of random numbers around an operation.
            place = next(i for i, a in enumerate(args) if isinstance(a, torch._ops.OpOverload))
            target, args = args[place], args[place + 1 :]
        if target is operator.getitem or getattr(target, "is_view", False):
            base_of[node] = base_of.get(args[0], args[0])
            continue
        arg_values, kwarg_values = tree_map_only(fx.Node, _fake_value, (args, node.kwargs))
        count = flops(target, arg_values, kwarg_values, _fake_value(node))
        if count or not can_extend:
            kernel_flops.append(count)
        can_extend = not count
        kernel_of[node] = len(kernel_flops) - 1
    # Dicts without values are sets that keep the order.
    reads: list[dict[fx.Node, None]] = [{} for _ in kernel_flops]
    writes: list[dict[fx.Node, None]] = [{} for _ in kernel_flops]
    for node in graph.nodes:
        kernel = kernel_of.get(node)
        if kernel is None and node.op != "output":
            continue
        for argument in node.all_input_nodes:
            source = base_of.get(argument, argument)
            if kernel_of.get(source) != kernel:
                if kernel is not None:
                    reads[kernel][source] = None
                if source in kernel_of:
                    writes[kernel_of[source]][source] = None
    operations: Operations = Counter()
    for kernel, count in enumerate(kernel_flops):
        tensors = [t for node in (*reads[kernel], *writes[kernel]) for t in _list_tensors(node)]
        inputs = [t for n in reads[kernel] for t in _list_tensors(n) if t.is_floating_point()]
        is_half = min((t.itemsize for t in inputs), default=4) <= 2
        nbytes = sum(t.numel() * t.itemsize for t in tensors)
        operations[count, nbytes, is_half] += 1
    return operations


def _fake_value(node: fx.Node) -> Any:
    """Return the fake tensors that a graph node stores as its result; None if it stores none."""
    return node.meta.get("val")


def _list_tensors(node: fx.Node) -> list[torch.Tensor]:
    """List the fake tensors of a graph node's result, except random states, which have no size."""
    tensors = (t for t in tree_leaves(_fake_value(node)) if isinstance(t, torch.Tensor))
    return [t for t in tensors if isinstance(t.numel(), int)]
