"""Whether an adapter does anything: it is turned up, in place, and put back."""

import contextlib
from collections.abc import Iterator

from torch import nn

from toolkit.models.peft_model import ADAPTER, layer_parameters


@contextlib.contextmanager
def amplified(model: nn.Module) -> Iterator[bool]:
    """Let each adapter add what it learned as if its largest value were 1: a difference after
    little training then survives rounding, unless the adapter takes no part in the forward. Gives
    whether any of them is no longer what adds nothing to the base.
    """
    before: list[tuple[dict[str, float], float]] = []
    for module in model.modules():
        own = layer_parameters(module)  # of each pair of factors the one that begins at zero
        for name in own.keys() & {"lora_B", "lora_embedding_A"}:
            if most := float(own[name].detach().abs().max()):
                scaling: dict[str, float] = module.scaling  # type: ignore[assignment]
                before.append((scaling, scaling[ADAPTER]))
                scaling[ADAPTER] /= most
    try:
        yield bool(before)
    finally:
        for scaling, value in before:
            scaling[ADAPTER] = value
