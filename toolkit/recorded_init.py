"""An initialisation recorded on meta, and replayed for the rows that a rank holds.

Owns the record of what `_init_weights` writes into parameters without bytes, and its replay from a
seed made of (seed, name, block of rows). Knows nothing of models: a parameter is a name and a
layout.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.errors import LoadingError
from toolkit.layout import local_slices

# A block of rows is drawn from one seed: small enough to stream, the same for every world size.
_BLOCK_ELEMENTS = 2**22


@dataclass(frozen=True)
class Write:
    """One in-place operation on a parameter, or on a view of it."""

    op: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    args: tuple
    kwargs: dict[str, Any]


class Recorder(TorchDispatchMode):
    """Records what an initialisation writes into the tracked meta tensors."""

    def __init__(self, tracked: dict[str, torch.Tensor]):
        super().__init__()
        self._names = {t.untyped_storage()._cdata: n for n, t in tracked.items()}
        self.writes: dict[str, list[Write]] = {n: [] for n in tracked}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        name = self._names.get(target.untyped_storage()._cdata) if target is not None else None
        if target is not None and name is not None and func._schema.is_mutable:
            others = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.Tensor)]
            if any(a.is_meta for a in others):
                raise LoadingError(
                    f"the random start of {name} depends on another parameter ({func}), which "
                    "cannot be drawn shard by shard; save a random start with transformers and "
                    "load that"
                )
            self.writes[name].append(
                Write(
                    func,
                    tuple(target.shape),
                    target.stride(),
                    int(target.storage_offset()),
                    args[1:],
                    kwargs,
                )
            )
            return target
        # What an initialisation makes beside the parameters (ranges, draws) gets real values.
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if (device is not None and device.type == "meta") or (
            name is not None and any(a.name == "device" for a in func._schema.arguments)
        ):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


def replay(writes: list[Write], name: str, reference: torch.Tensor, seed: int) -> torch.Tensor:
    """Return this rank's slice of the parameter that `writes` describe."""
    shape = tuple(reference.shape)
    writes = _effective(writes, shape)
    slices = (
        local_slices(reference)
        if isinstance(reference, DTensor)
        else tuple(slice(0, n) for n in shape)
    )
    if not shape:
        return _replay_block(writes, shape, 0, 1, name, seed, reference.dtype)
    first, last, _ = slices[0].indices(shape[0])
    per_row = max(1, reference.numel() // max(1, shape[0]))
    step = max(1, _BLOCK_ELEMENTS // per_row) if _row_by_row(writes, shape) else max(1, shape[0])
    out = torch.empty((max(0, last - first), *shape[1:]), dtype=reference.dtype)
    for begin in range(first - first % step, last, step):
        end = min(begin + step, shape[0])
        block = _replay_block(writes, shape, begin, end, name, seed, reference.dtype)
        low, high = max(begin, first), min(end, last)
        out[low - first : high - first] = block[low - begin : high - begin]
    return out[(slice(None), *slices[1:])].contiguous()


def _replay_block(
    writes: list[Write],
    shape: tuple[int, ...],
    begin: int,
    end: int,
    name: str,
    seed: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Replay `writes` on rows `begin` to `end`, from a seed of their own."""
    key = hashlib.sha256(f"{seed}/{name}/{begin}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    whole = not shape or (begin, end) == (0, shape[0])
    block = torch.empty(
        (end - begin, *shape[1:]) if shape else (),
        dtype=torch.float32 if dtype.is_floating_point else dtype,
    )
    for write in writes:
        target = block.as_strided(write.size, write.stride, write.offset) if whole else block
        args = write.args
        if not whole and args and isinstance(args[0], torch.Tensor) and args[0].dim() == len(shape):
            args = (args[0][begin:end], *args[1:])
        kwargs = dict(write.kwargs)
        if any(a.name == "generator" for a in write.op._schema.arguments):
            kwargs["generator"] = generator
        write.op(target, *args, **kwargs)
    return block.to(dtype)


def _effective(writes: list[Write], shape: tuple[int, ...]) -> list[Write]:
    """Drop what a later write of the whole tensor makes void."""
    fresh = {"normal_", "uniform_", "zero_", "fill_", "copy_"}
    starts = [
        i
        for i, w in enumerate(writes)
        if w.size == shape and w.op._schema.name.removeprefix("aten::") in fresh
    ]
    return writes[starts[-1] :] if starts else writes


def _row_by_row(writes: list[Write], shape: tuple[int, ...]) -> bool:
    """Whether rows can be drawn apart: every write covers the whole tensor, element by element."""
    elementwise = {
        "normal_",
        "uniform_",
        "zero_",
        "fill_",
        "erfinv_",
        "mul_",
        "add_",
        "clamp_",
        "copy_",
    }
    return all(
        w.size == shape
        and w.offset == 0
        and w.op._schema.name.removeprefix("aten::") in elementwise
        and all(
            a.dim() == 0 or tuple(a.shape) == shape for a in w.args if isinstance(a, torch.Tensor)
        )
        for w in writes
    )
