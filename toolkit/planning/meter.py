"""What a step allocates, computes and sends, counted while it runs on tensors without bytes.

A dispatch mode sees every operation. Each storage that an operation makes counts from then until
Python lets go of it, under the kind of work that made it; FSDP2's own labels (`record_function`)
tell gathered parameters from gradients on their way. Knows no model and no settings.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from toolkit.formats import torch_private
from toolkit.planning.fused import Operations, fused_operations
from toolkit.sharding.host_memory import TO_HOST

_aten: Any = torch.ops.aten
PARAMETERS, BUFFERS, GRADIENTS, STATE = "parameters", "buffers", "gradients", "optimizer state"
GATHERED, REDUCED = "gathered parameters", "gradients being reduced"
ACTIVATIONS, HOST = "activations", "host"
WORKING = {"forward": ACTIVATIONS, "backward": "backward", "optimizer step": "optimizer step"}
"""Phase of a step -> kind of what it makes."""

_KEPT = {PARAMETERS, BUFFERS, GRADIENTS, STATE}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
# What the host would read of the device: any loss, every token supervised, nothing drawn.
_ALL_TRUE = {_aten.equal.default, _aten.is_nonzero.default}
_COMPILER = "_dynamo.backends.debugging"  # which runs graphs as they are
_OfOperators = torch_private("_ops", "HigherOrderOperator")
_WITH_RANDOM_STATE = {"run_and_save_rng_state", "run_with_rng_state"}
# By which DTensor tries an operation that it meets first on whole tensors without bytes, to learn
# the shape of its result. Those are none of the step's.
_TRIAL = "_propagate_tensor_meta_non_cached"
_COLLECTIVES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
}


@dataclass
class Peak:
    """The largest moment of a phase."""

    nbytes: int = 0
    working: int = 0
    """Of them, what is not held between two steps: activations, gathered parameters and the like.
    """
    kinds: dict[str, int] = field(default_factory=dict)
    """Kind -> bytes."""
    layer: str = ""
    """The decoder layer that ran last before it."""


@dataclass
class Work:
    """Operations and traffic, to be turned into time by the figures of a device."""

    operations: Operations = field(default_factory=Counter)
    """(floating-point operations, bytes read and written, in 16 bits) -> how often."""
    traffic: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    """(collective, bytes of the whole tensor, ranks) -> how often."""

    def __mul__(self, times: int) -> "Work":
        return Work(*(Counter({k: n * times for k, n in c.items()}) for c in vars(self).values()))


@dataclass
class _LiveStorage:
    kind: str
    nbytes: int = 0


class Meter(TorchDispatchMode):
    """Counts bytes, operations and traffic of what runs inside, on fake tensors of a CPU.

    Code that `torch.compile` makes is counted as it runs, not while it is made.

    Args:
        absent: kinds that are not in the device's memory, such as what is offloaded.
        granularity: bytes that an allocation is rounded up to.
        gloo: collectives are gloo's, which reduces a copy of what it scatters.
    """

    supports_higher_order_operators = True

    def __init__(
        self, absent: Iterable[str] = (), granularity: int = 1, gloo: bool = False
    ) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        """Kind -> bytes that are held now."""
        self.peaks: dict[str, Peak] = {}
        """Phase -> its largest moment."""
        self.work: dict[str, Work] = {}
        """Part of a step -> what it computes and sends."""
        self.layer = ""
        self._absent, self._granularity, self._gloo = {HOST, *absent}, granularity, gloo
        self._phase, self._part, self._labels = "", "", list[str]()
        self._held: dict[int, _LiveStorage] = {}
        self._total, self._aside, self._compiled = 0, 0, 0
        self._compilation = torch_private("_guards", "CompileContext")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let `torch.compile` work inside; torch asks."""
        return True

    def begin(self, phase: str, part: str = "") -> None:
        """Let a phase of a step begin, and, where one is named, a part of it."""
        self._phase, self._part = phase, part or self._part
        self.peaks.setdefault(phase, Peak())
        self.work.setdefault(self._part, Work())
        self._mark()

    def claim(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count the memory of `tensors` under `kind` from here on."""
        for tensor in tensors:
            self._count(tensor, kind, anew=True)

    @contextlib.contextmanager
    def running(self, *, compiled: bool = False) -> Iterator[None]:
        """Count what runs inside; `compiled`: some of it is by `torch.compile`."""
        resize, meter = torch.UntypedStorage.resize_, self
        propagator = torch_private("distributed.tensor._sharding_prop", "ShardingPropagator")
        propagate = getattr(propagator, _TRIAL)

        def resized(storage: torch.UntypedStorage, size: int) -> Any:  # seen by no dispatch mode
            out = resize(storage, size)
            if (held := meter._held.get(id(storage))) is not None:
                meter._change(held, storage.nbytes())
            return out

        def tried(*args: Any) -> Any:
            meter._aside += 1
            try:
                return propagate(*args)
            finally:
                meter._aside -= 1

        with contextlib.ExitStack() as patches:
            for owner, name, own in (
                (torch.UntypedStorage, "resize_", resized),
                (propagator, _TRIAL, tried),
            ):
                patches.enter_context(mock.patch.object(owner, name, own))
            if compiled:  # seconds to import
                patches.enter_context(self._graphs_told())
            with self:
                yield

    def _graphs_told(self) -> Any:
        """Count the operations of each compiled graph that runs, as if they were fused."""
        compile_graph, meter = torch_private(_COMPILER, "boxed_nop"), self

        def told(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            run, operations = compile_graph(graph, inputs), fused_operations(graph.graph, _flops)

            def counted(args: Any) -> Any:
                if meter._part:
                    meter.work[meter._part].operations += operations
                meter._compiled += 1
                try:
                    return run(args)
                finally:
                    meter._compiled -= 1

            counted._boxed_call = True  # type: ignore[attr-defined]
            return counted

        patches = contextlib.ExitStack()
        patches.enter_context(mock.patch(f"torch.{_COMPILER}.boxed_nop", told))
        # A graph for each kind of layer: sizes that are symbols would be counted as nothing.
        patches.enter_context(torch._dynamo.config.patch(automatic_dynamic_shapes=False))
        return patches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, _OfOperators):
            return self._of_operators(func, args, kwargs or {})
        if func.namespace == "prim" or self._aside or self._compilation.try_get() is not None:
            return func(*args, **(kwargs or {}))
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # comes again, with the local tensors
        if func.namespace == "profiler":
            self._label(func, args)
            return func(*args, **(kwargs or {}))
        if func in _ALL_TRUE:
            return True
        if func is _aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is _aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # Kernels take other dtypes, the one for tensors without bytes does not.
            like = [t.bfloat16() if isinstance(t, torch.Tensor) else t for t in args[:2]]
            out = func(*like, *args[2:], **(kwargs or {})).to(args[0].dtype)
        elif func is _aten.addmm.dtype_out:
            out = kwargs["out"]  # torch 2.11's fake one takes the dtype for a factor
        elif func is _aten.nonzero.default:
            every = args[0].numel(), args[0].ndim
            out = _aten.new_empty(args[0], every, dtype=torch.int64)
        else:
            out = func(*args, **(kwargs or {}))
        kind = self._kind()
        if func.namespace == "c10d":
            self._send(func, args)
        if not func.is_view:
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self._count(tensor, kind)
            if self._part and not self._compiled:
                self._compute(func, args, kwargs or {}, out)
        return out

    def _of_operators(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose arguments are operators."""
        if self._compilation.try_get() is not None or func.name() not in _WITH_RANDOM_STATE:
            return func(*args, **kwargs)
        # Attention in a compiled layer that recomputes: a kernel that might draw random numbers.
        with self:
            if func.name() == "run_with_rng_state":
                return args[1](*args[2:], **kwargs)
            return torch.empty(16, dtype=torch.uint8), args[0](*args[1:], **kwargs)

    # ---- Memory ----------------------------------------------------------------------------------

    def _label(self, func: Any, args: Any) -> None:
        """Follow the labels that code puts around itself."""
        if func is not torch.ops.profiler._record_function_enter_new.default:
            self._labels[-1:] = []
        else:
            self._labels.append(str(args[0]))

    def _kind(self) -> str:
        for label in reversed(self._labels):
            if label == TO_HOST:
                return HOST
            if label.startswith("FSDP::post_backward_reduce"):
                return REDUCED
            if label.startswith("FSDP::all_gather"):
                return GATHERED
        return WORKING.get(self._phase, self._phase)

    def _count(self, tensor: torch.Tensor, kind: str, anew: bool = False) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta":
            return
        storage = local.untyped_storage()
        held = self._held.get(id(storage))
        if held is None:
            held = self._held[id(storage)] = _LiveStorage(kind)
            weakref.finalize(storage, self._gone, id(storage)).atexit = False
        elif anew and held.kind != kind:
            size = held.nbytes
            self._change(held, 0)
            held.kind = kind
            self._change(held, size)
        self._change(held, storage.nbytes())

    def _gone(self, key: int) -> None:
        self._change(self._held.pop(key), 0)

    def _change(self, held: _LiveStorage, nbytes: int) -> None:
        nbytes = -(-nbytes // self._granularity) * self._granularity
        if more := nbytes - held.nbytes:
            held.nbytes = nbytes
            self.live[held.kind] += more
            if held.kind not in self._absent:
                self._total += more
                if more > 0:
                    self._mark()

    def _mark(self) -> None:
        peak = self.peaks.get(self._phase)
        if peak is not None and self._total > peak.nbytes:
            kinds = {kind: size for kind, size in self.live.items() if size}
            held = sum(kinds.get(kind, 0) for kind in _KEPT - self._absent)
            self.peaks[self._phase] = Peak(self._total, self._total - held, kinds, self.layer)

    # ---- Work ------------------------------------------------------------------------------------

    def _send(self, func: Any, args: Any) -> None:
        name = _COLLECTIVES.get(func._schema.name)
        tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        if name is None or not tensors:
            return
        sizes = [t.numel() * t.itemsize for t in tensors]
        if name == "reduce_scatter":
            self._count(tensors[0], GRADIENTS, anew=True)
            if self._gloo:
                copy = _LiveStorage(REDUCED)
                self._change(copy, max(sizes))
                self._change(copy, 0)
        parts = name in ("all_gather", "reduce_scatter")
        ranks = max(sizes) // max(1, min(sizes)) if parts else 0  # 0: all of them
        if self._part:
            self.work[self._part].traffic[name, max(sizes) if parts else sum(sizes), ranks] += 1

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if func.namespace in ("c10d", "profiler"):
            return
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        moved = [t for t in (*inputs, *tree_leaves(out)) if isinstance(t, torch.Tensor)]
        if not moved or func in (_aten.empty.memory_format, _aten.new_empty.default):
            return
        nbytes = sum(t.numel() * t.itemsize for t in moved)
        half = min((t.itemsize for t in inputs if t.is_floating_point()), default=4) <= 2
        operations = self.work[self._part].operations
        operations[float(_flops(func, args, kwargs, out)), nbytes, half] += 1


def _flops(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> float:
    """Return the floating-point operations of a matrix product or an attention, 0 of all else."""
    name = func._schema.name
    if "flash_attention_for_cpu" in name:  # of a causal one half is left out
        causal = kwargs.get("is_causal") or any(value is True for value in args)
        share = 0.5 if causal else 1.0
        backward = name.endswith("backward")
        shapes = [t.shape for t in args if isinstance(t, torch.Tensor)][: 3 + backward]
        # Keys and values that heads share count for each; torch 2.11 refuses them.
        shapes = [torch.Size((s[0], shapes[backward][1], *s[2:])) for s in shapes]
        return share * (sdpa_backward_flop_count if backward else sdpa_flop_count)(*shapes)
    if name.rpartition("::")[2] in _PRODUCTS:
        first = args[1 if "add" in name else 0]
        groups = out.shape[0] if out.ndim > first.ndim else 1  # which share the inner dimension
        return 2.0 * out.numel() * first.shape[-1] / groups
    counted = flop_registry.get(func.overloadpacket)
    return 0.0 if counted is None else float(counted(*args, **kwargs, out_val=out))
