"""An adapter switched off, or turned up: what a model computes without it, and whether it matters.

Owns the switch and the question whether an adapter has left its start. Works in place on the local
shards of any adapted model and puts everything back. Knows neither files nor ranks.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.errors import ExportError
from toolkit.formats.layout import local_slices
from toolkit.models.peft_model import ADAPTER


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let an adapted model compute as its base does.

    PEFT's own `disable_adapter` also turns the adapters' gradients off and on, which sharded
    parameters do not follow: only the switch itself is moved here.

    Raises:
        ExportError: PEFT has no such switch any more.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers = [
        m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)
    ]
    if not layers or any(not hasattr(m, "_disable_adapters") for m in layers):
        raise ExportError(
            "this model has no adapters that can be switched off (_disable_adapters); install a "
            "peft from 0.18 to 0.21"
        )
    before = [m._disable_adapters for m in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


@contextlib.contextmanager
def amplified(model: nn.Module) -> Iterator[None]:
    """Let an adapted model compute with adapters turned up until they cannot be overlooked.

    An adapter that was trained a little may be too weak for a difference to survive rounding; with
    what moved scaled to 1 it is not, unless the adapter takes no part in the forward. In place, on
    local shards; the values are put back.
    """
    kept = []
    try:
        with torch.no_grad():
            for tensor, start in _moving(model):
                kept.append((tensor, tensor.clone()))
                moved = tensor if start is None else tensor - start
                most = moved.abs().max() if moved.numel() else moved.sum()
                tensor.add_(torch.where(most > 0, moved / most - moved, 0.0))
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def has_moved(model: nn.Module) -> bool:
    """Whether this rank's part of the adapter is no longer what adds nothing to the base."""
    return any(
        bool(tensor.any()) if start is None else not torch.equal(tensor, start)
        for tensor, start in _moving(model)
    )


def _moving(model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield (local part, its start; None: zero) of what decides whether the adapter does anything:
    of each pair of factors the one that begins at zero, and the modules trained as a whole.
    """
    from peft.tuners.lora.layer import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            begun = dict(module.original_module.named_parameters())
            for name, parameter in module.modules_to_save[ADAPTER].named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    tensor, start = _local(parameter), begun[name].detach()
                    if isinstance(parameter, DTensor) and not isinstance(start, DTensor):
                        start = start[local_slices(parameter)]  # the whole of it is on each rank
                    yield tensor, _local(start).to(tensor.dtype)
        elif isinstance(module, LoraLayer):
            if ADAPTER in module.lora_B:
                yield _local(module.lora_B[ADAPTER].weight), None
            if ADAPTER in module.lora_embedding_A:
                yield _local(module.lora_embedding_A[ADAPTER]), None


def _local(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
