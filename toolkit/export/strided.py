"""Which bytes of its sources an output of a conversion is, found without the bytes.

Most conversions of weights only cut and turn: each output is a strided view of one source. Running
the conversion on tensors without bytes tells which, and the bytes can then be moved straight from
the shard to the file. Owns that discovery. Knows no conversion by name: what is no such view (a
concatenation, arithmetic) is said to be none, and must be computed.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class View:
    """Elements of one source in row-major order of `size`, as `torch.as_strided` takes them."""

    source: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield (first element in the source, number) of its contiguous runs, all equally long."""
        sizes, strides = list(self.size), list(self.stride)
        length = 1
        while sizes and (sizes[-1] == 1 or strides[-1] == length):
            length *= sizes.pop()
            strides.pop()
        if math.prod(self.size) == 0:
            return
        for position in itertools.product(*(range(n) for n in sizes)):
            yield self.offset + sum(p * s for p, s in zip(position, strides, strict=True)), length

    def run_length(self) -> int:
        """Return the number of elements of each run."""
        return next((length for _, length in self.runs()), 0)


def trace_views(
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, View | None]:
    """Return, for each output of `convert` on tensors of `shapes`, the view it is; None: no view.

    Costs one run of `convert` on the meta device. A conversion that fails without bytes gives no
    views at all.
    """
    sources = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    storages = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
    try:
        with torch.no_grad(), _KeepViews():
            outputs = convert(dict(sources))
    except Exception:  # of the conversion, on tensors it was not made for: the real ones will tell
        return {}
    views: dict[str, View | None] = {}
    for name, tensor in outputs.items():
        source = storages.get(tensor.untyped_storage()._cdata)
        views[name] = None
        if source is not None and tensor.dtype == torch.float32:
            place = int(tensor.storage_offset())
            views[name] = View(source, tuple(tensor.shape), tuple(tensor.stride()), place)
    return views


class _KeepViews(TorchDispatchMode):
    """Copies stay views of what they copy; writing into a tensor is refused."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} writes")
        return func(*args, **(kwargs or {}))
