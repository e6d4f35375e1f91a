"""One group of parameters becomes the tensors of the source checkpoint, without a copy if possible.

transformers' conversions mostly cut and turn and then copy what they cut; here such copies stay
views, so that fused experts need their own memory once instead of twice.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.errors import ExportError
from toolkit.export.plan import ExportPlan
from toolkit.formats import ExportGroup, convert_back

_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def convert_group(
    plan: ExportPlan, group: ExportGroup, parameters: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return output name -> tensor, in the order of `group.outputs`; they may be strided views.

    Raises:
        ExportError: transformers makes other tensors than planned, or writes into its input.
    """
    if not group.converted:
        return dict(zip(group.outputs, parameters.values(), strict=True))
    with torch.no_grad(), CopiesAreViews():
        converted = convert_back(plan.model, parameters)
    found = {name: tuple(tensor.shape) for name, tensor in converted.items()}
    if found != group.outputs:
        raise ExportError(f"{group.sources} were converted to {found}, expected {group.outputs}")
    return {name: converted[name] for name in group.outputs}


class CopiesAreViews(TorchDispatchMode):
    """Let `clone` and `contiguous` return views; refuse operations that write into a tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        if func in _RESHAPES and not args[0].is_contiguous():  # these need a real copy
            copied = args[0].clone(memory_format=torch.contiguous_format)
            return func(copied, *args[1:])
        if func._schema.is_mutable:
            raise ExportError(f"transformers' conversion writes in place ({func}): not supported")
        return func(*args, **(kwargs or {}))
