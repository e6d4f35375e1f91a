"""Whether an adapter does anything: it is turned up, in place, and put back."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from toolkit.adapters.first_values import original_part
from toolkit.formats import local_tensor
from toolkit.models.peft_model import copies, layer_parameters


@contextlib.contextmanager
def amplified(model: nn.Module) -> Iterator[bool]:
    """Let an adapted model compute with what moved scaled to 1: a difference after little training
    then survives rounding, unless the adapter takes no part in the forward. Gives whether any of
    it, on this rank, is no longer what adds nothing to the base.
    """
    kept, has_moved = [], False
    try:
        with torch.no_grad():
            for tensor, start in _moving(model):
                kept.append((tensor, tensor.clone()))
                moved = tensor if start is None else tensor - start
                most = moved.abs().max() if moved.numel() else moved.sum()
                has_moved |= bool(most > 0)
                tensor.add_(torch.where(most > 0, moved / most - moved, 0.0))
        yield has_moved
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def _moving(model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield (local part, its start; None: zero) of what an adapter does anything by."""
    seen: set[int] = set()
    for original, copy in copies(model):
        if id(copy) not in seen:
            seen.add(id(copy))
            yield local_tensor(copy.detach()), original_part(original, copy).to(copy.dtype)
    for module in model.modules():
        own = layer_parameters(module)  # of each pair of factors the one that begins at zero
        for name in own.keys() & {"lora_B", "lora_embedding_A"}:
            yield local_tensor(own[name].detach()), None
