"""An initialisation recorded without bytes, and replayed for the rows that a rank holds.

    with (recorder := Recorder()):
        model = build()  # constructors and initialisation run as always, on tensors without bytes
    recorder.name(dict(model.named_parameters()))
    rows = recorder.replay(model.lm_head.weight, slices, dtype, seed)

Owns the record of what is written into tensors that have no bytes, and its replay from a seed made
of (seed, name, block of rows). Knows nothing of models: a parameter is a tensor and a name.

[Note: recorded start] How an architecture begins is spread over constructors, torch's own resets
and `_init_weights` of nested models, each of which may skip what another has done. So nothing of it
is imitated: the model is built a second time, exactly as transformers builds it. Fresh memory
(`empty`, `zeros`, `randn`, ...) becomes a meta tensor with a history; what is written into it, or
computed from it, is added to the history and not computed; to whoever asks, such a tensor says that
it lies on the CPU, since some initialisations leave out what lies on meta. Everything else (ranges,
constants) is small and real. Afterwards the history of one parameter at a time is run for real,
only for the rows that are asked for where every step works row by row (nearly always), else for the
whole tensor.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from toolkit.errors import LoadingError

# A block of rows is drawn from one seed: small enough to stream, the same for every world size.
_BLOCK_ELEMENTS = 2**22
_EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
# Fresh memory with a content -> the in-place operation that makes it.
_FILLED = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), torch.ops.aten.zero_.default),
    **dict.fromkeys(("rand", "rand_like"), torch.ops.aten.uniform_.default),
    **dict.fromkeys(("randn", "randn_like"), torch.ops.aten.normal_.default),
    **dict.fromkeys(
        ("ones", "ones_like", "new_ones", "full", "full_like", "new_full"),
        torch.ops.aten.fill_.Scalar,
    ),
}
_ELEMENTWISE = {
    *(
        "trunc_normal_",
        "normal_",
        "uniform_",
        "zero_",
        "fill_",
        "erfinv_",
        "mul_",
        "div_",
        "add_",
        "sub_",
        "clamp_",
    ),
    *("copy_", "log_", "exp_", "neg_", "clamp_min_", "clamp_max_"),
}
_trunc_normal: Any = torch.nn.init._no_grad_trunc_normal_
_ROWS = torch.contiguous_format
_OVERWRITES = {"trunc_normal_", "normal_", "uniform_", "zero_", "fill_", "copy_"}


@dataclass(frozen=True)
class _Write:
    """One in-place operation on a tensor without bytes, or on a view of it."""

    op: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    args: tuple
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return "trunc_normal_" if self.op is _trunc_normal else _short(self.op)


@dataclass(frozen=True)
class _Past:
    """A tensor without bytes as it was at one moment."""

    history: "_History"
    version: int
    """Number of writes that had been recorded."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _History:
    """How the content of one storage came about."""

    def __init__(self, storage: Any, number: int, shape: torch.Size, dtype: torch.dtype):
        self.storage = storage  # kept alive: the next storage must not get its address
        self.number = number
        self.shape, self.dtype = tuple(shape), dtype
        self.origin: tuple[Any, tuple, dict, int | None] | None = None
        """(function, arguments, keyword arguments, which of its results) for a computed tensor."""
        self.writes: list[_Write] = []
        self.name: str | None = None


class Recorder(TorchDispatchMode):
    """Records what happens to fresh memory, instead of doing it; see [Note: recorded start]."""

    def __init__(self) -> None:
        super().__init__()
        self._histories: dict[int, _History] = {}
        self._manners = _Manners(self)
        self.guessed: list[str] = []
        """What was decided or computed at once from values that are drawn: no replay knows them."""

    def __enter__(self) -> "Recorder":
        torch.nn.init._no_grad_trunc_normal_ = self._truncated  # type: ignore[assignment]
        self._manners.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._manners.__exit__(*error)
        torch.nn.init._no_grad_trunc_normal_ = _trunc_normal

    # ---- Recording -------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        short = _short(func)
        if short in _EMPTY or short in _FILLED:
            return self._fresh(func, short, args, kwargs)
        if any(a.name == "device" for a in func._schema.arguments):
            # Beside a tensor without bytes: real values, on the CPU.
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "meta":
                kwargs["device"] = torch.device("cpu")
        tensors = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
        if not any(self._of(t) for t in tensors):
            return func(*args, **kwargs)
        if _is_view(func) or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            if not isinstance(args[0], torch.Tensor):
                raise LoadingError(f"{func} writes into several tensors, which is not recorded")
            if self._of(args[0]) is None:
                return func(args[0], *self._real(func, args[1:]), **self._real(func, kwargs))
            history = self._of(args[0])
            assert history is not None
            history.writes.append(
                _Write(func, *_geometry(args[0]), self._frozen(args[1:]), self._frozen(kwargs))
            )
            return args[0]
        return self._computed(func, args, kwargs)

    def _truncated(self, tensor: torch.Tensor, *args: Any, generator: Any = None) -> torch.Tensor:
        """Record a draw from a truncated normal as one operation.

        torch draws again what falls outside, until nothing does: that looks at values. For a tensor
        without bytes it does nothing at all.
        """
        if (history := self._of(tensor)) is None:
            return _trunc_normal(tensor, *args, generator=generator)
        history.writes.append(_Write(_trunc_normal, *_geometry(tensor), args, {}))
        return tensor

    def _fresh(self, func: Any, short: str, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        out = func(*_on_meta(args), **{**_on_meta(kwargs), "device": torch.device("meta")})
        out = _plain(out)
        history = self._begin(out)
        if short in _FILLED:
            value: tuple = ()
            if short.startswith(("ones", "new_ones")):
                value = (1,)
            elif "full" in short:
                value = (kwargs.get("fill_value", args[-1]),)
            history.writes.append(_Write(_FILLED[short], *_geometry(out), value, {}))
        return out

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of a computation as tensors without bytes, or as real numbers."""
        if not all("Tensor" in str(r.type) for r in func._schema.returns):
            return func(*self._real(func, args), **self._real(func, kwargs))
        origin = (func, self._frozen(args), self._frozen(kwargs))
        there = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
        out = func(*_on_meta(args), **{**_on_meta(kwargs), **there})
        parts, spec = tree_flatten(out)
        single = isinstance(out, torch.Tensor)
        for i, part in enumerate(parts):
            if self._of(part) is not None:  # a view after all, such as _unsafe_view
                continue
            parts[i] = _plain(part)
            history = self._begin(parts[i])
            history.origin = (*origin, None if single else i)
        return tree_unflatten(parts, spec)

    def _begin(self, tensor: torch.Tensor) -> _History:
        storage = tensor.untyped_storage()
        history = _History(storage, len(self._histories), tensor.shape, tensor.dtype)
        self._histories[storage._cdata] = history
        return history

    def _of(self, tensor: torch.Tensor) -> _History | None:
        return self._histories.get(tensor.untyped_storage()._cdata)

    def _frozen(self, values: Any) -> Any:
        """Return `values` with tensors without bytes replaced by what they are at this moment."""

        def freeze(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if history := self._of(value):
                    return _Past(history, len(history.writes), *_geometry(value))
                return value.detach().clone()
            return value

        return tree_map(freeze, values)

    def _real(self, func: Any, values: Any) -> Any:
        """Return `values` computed at once, for what must look at them."""
        frozen = self._frozen(values)
        if any(isinstance(v, _Past) and _is_drawn(v) for v in tree_flatten(frozen)[0]):
            self.guessed.append(str(func))
        return _evaluated(frozen, seed=0)

    # ---- Replaying -------------------------------------------------------------------------------

    def name(self, tensors: dict[str, torch.Tensor]) -> None:
        """Tell the names of the parameters: each is drawn from its own, wherever it is used."""
        for name, tensor in tensors.items():
            if (history := self._of(tensor)) is not None and history.name is None:
                history.name = name

    def replay(
        self,
        tensor: torch.Tensor,
        slices: tuple[slice, ...],
        dtype: torch.dtype,
        seed: int,
    ) -> torch.Tensor:
        """Return `slices` of the content that was recorded for `tensor`, cast to `dtype`.

        Raises:
            LoadingError: nothing was ever written into some part of it.
        """
        history = self._of(tensor)
        if history is None:
            if tensor.is_meta:
                raise LoadingError("its memory was made in a way that is not recorded")
            return tensor.detach()[slices].to(dtype, copy=True)
        if _geometry(tensor) == (history.shape, _contiguous(history.shape), 0):
            return _content(history, len(history.writes), seed, slices).to(dtype)
        past = _Past(history, len(history.writes), *_geometry(tensor))
        return _evaluated(past, seed)[slices].to(dtype, copy=True)


class _Manners(TorchFunctionMode):
    """Lets a recorded tensor behave as one with bytes towards those who look at it from Python."""

    _ANSWERS: ClassVar[list[tuple[Any, Any]]] = [
        (torch.Tensor.is_meta.__get__, False),  # type: ignore[attr-defined]
        (torch.Tensor.device.__get__, torch.device("cpu")),  # type: ignore[attr-defined]
    ]
    _READERS: ClassVar[list[Any]] = [
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__array__,
    ]

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and self._recorder._of(args[0]) is not None:
            for getter, answer in self._ANSWERS:
                if func == getter:
                    return answer
            if func in self._READERS:
                args = self._recorder._real(func, args)
        return func(*args, **(kwargs or {}))


def _short(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _is_view(func: Any) -> bool:
    """Whether the first result shares memory with an argument, and nothing is written."""
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not func._schema.is_mutable


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without bytes of the same shape, one row behind the other."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=_ROWS)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def _on_meta(values: Any) -> Any:
    return tree_map(
        lambda v: v.to("meta") if isinstance(v, torch.Tensor) and v.dim() > 0 else v, values
    )


# --------------------------------------------------------------------------------------------------
# From a history to values
# --------------------------------------------------------------------------------------------------


def _evaluated(values: Any, seed: int) -> Any:
    """Return `values` with every recorded tensor computed."""

    def compute(value: Any) -> Any:
        if not isinstance(value, _Past):
            return value
        whole = tuple(slice(0, n) for n in value.history.shape)
        content = _content(value.history, value.version, seed, whole)
        return content.as_strided(value.size, value.stride, value.offset)

    return tree_map(compute, values)


def _content(history: _History, version: int, seed: int, slices: tuple[slice, ...]) -> torch.Tensor:
    """Return `slices` of what a storage held after `version` writes."""
    shape = history.shape
    writes = _effective(history.writes[:version], shape)
    drawn = writes[0].size == shape and writes[0].name in _OVERWRITES if writes else False
    if not drawn and history.origin is None and not _covered(writes, shape):
        raise LoadingError("parts of it are never given a value")
    if not shape:
        return _block(history, writes, 0, 1, seed, drawn)
    first, last, _ = slices[0].indices(shape[0])
    elements = 1
    for n in shape[1:]:
        elements *= n
    split = drawn and all(_row_by_row(w, shape) for w in writes)
    step = max(1, _BLOCK_ELEMENTS // max(1, elements)) if split else max(1, shape[0])
    out: torch.Tensor | None = None
    for begin in range(first - first % step, last, step):
        end = min(begin + step, shape[0])
        block = _block(history, writes, begin, end, seed, drawn)
        if out is None:
            out = torch.empty((max(0, last - first), *shape[1:]), dtype=block.dtype)
        low, high = max(begin, first), min(end, last)
        out[low - first : high - first] = block[low - begin : high - begin]
    if out is None:
        out = torch.empty((0, *shape[1:]), dtype=history.dtype)
    return out[(slice(None), *slices[1:])].contiguous()


def _covered(writes: list[_Write], shape: tuple[int, ...]) -> bool:
    """Whether every element is written by one of `writes` that does not need what was there."""
    seen = torch.zeros(shape, dtype=torch.bool)
    for write in writes:
        if write.name in _OVERWRITES:
            seen.as_strided(write.size, write.stride, write.offset).fill_(True)
    return bool(seen.all())


def _is_drawn(past: _Past) -> bool:
    """Whether a tensor depends on drawn numbers."""
    history = past.history
    inputs: list[Any] = []
    for write in history.writes[: past.version]:
        if _draws(write.op):
            return True
        inputs += tree_flatten((write.args, write.kwargs))[0]
    if history.origin is not None:
        if _draws(history.origin[0]):
            return True
        inputs += tree_flatten(history.origin[1:3])[0]
    return any(isinstance(i, _Past) and _is_drawn(i) for i in inputs)


def _draws(func: Any) -> bool:
    return func is _trunc_normal or any(a.name == "generator" for a in func._schema.arguments)


def _block(
    history: _History, writes: list[_Write], begin: int, end: int, seed: int, drawn: bool
) -> torch.Tensor:
    """Run `writes` on rows `begin` to `end`, from a seed of their own."""
    shape = history.shape
    whole = not shape or (begin, end) == (0, shape[0])
    if drawn or history.origin is None:
        size = (end - begin, *shape[1:]) if shape else ()
        block = torch.empty(size, dtype=history.dtype)
    else:
        func, args, kwargs, index = history.origin
        out = func(*_evaluated(args, seed), **_evaluated(kwargs, seed))
        block = (out if index is None else out[index]).clone(memory_format=_ROWS)
    name = history.name if history.name is not None else f"#{history.number}"
    key = hashlib.sha256(f"{seed}/{name}/{begin}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    for write in writes:
        args, kwargs = _evaluated(write.args, seed), dict(_evaluated(write.kwargs, seed))
        if _draws(write.op):
            kwargs["generator"] = generator
        if whole:
            write.op(block.as_strided(write.size, write.stride, write.offset), *args, **kwargs)
            continue
        low, high = _rows_of(write, shape)
        low, high = max(low, begin), min(high, end)
        if low < high:
            args = tuple(_rows(a, shape, low, high) for a in args)
            write.op(block[low - begin : high - begin], *args, **kwargs)
    return block


def _rows(argument: Any, shape: tuple[int, ...], low: int, high: int) -> Any:
    if isinstance(argument, torch.Tensor) and tuple(argument.shape) == shape:
        return argument[low:high]
    return argument


def _effective(writes: list[_Write], shape: tuple[int, ...]) -> list[_Write]:
    """Drop what a later write of the whole tensor makes void."""
    starts = [i for i, w in enumerate(writes) if w.size == shape and w.name in _OVERWRITES]
    return writes[starts[-1] :] if starts else writes


def _rows_of(write: _Write, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows (first, behind the last) of a tensor that a write covers whole."""
    row = _contiguous(shape)[0]
    first = write.offset // max(1, row)
    return first, first + (write.size[0] if len(write.size) == len(shape) else 1)


def _row_by_row(write: _Write, shape: tuple[int, ...]) -> bool:
    """Whether a write treats whole rows, each by itself: then rows can be drawn apart."""
    stride = _contiguous(shape)
    covers = write.size == shape and write.stride == stride and write.offset == 0
    rows = (
        write.size[-len(shape) + 1 :] == shape[1:] if len(shape) > 1 else len(write.size) <= 1
    ) and write.stride == (stride if len(write.size) == len(shape) else stride[1:])
    tensors = [a for a in write.args if isinstance(a, torch.Tensor | _Past)]
    if write.name not in _ELEMENTWISE or not (covers or (rows and not tensors)):
        return False
    return all(
        isinstance(a, torch.Tensor) and (a.dim() == 0 or tuple(a.shape) == shape) for a in tensors
    )
