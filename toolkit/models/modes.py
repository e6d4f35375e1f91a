"""Contexts for a forward that must leave no trace: random state, eval mode, no compilation."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def forked_rng(device: torch.device | str = "cpu") -> contextlib.AbstractContextManager[None]:
    """Return a context that restores the random state of the CPU and of `device` at its end."""
    place = torch.device(device)
    if place.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    index = torch.accelerator.current_device_index() if place.index is None else place.index
    return torch.random.fork_rng(devices=[index], device_type=place.type)


def get_random_state() -> list[torch.Tensor]:
    """Return [random state of the CPU], followed by that of the accelerator if there is one.

    Both are copies, as byte tensors.
    """
    # A CUDA build reports an accelerator on a machine without one, too.
    device = torch.accelerator.current_accelerator(check_available=True)
    states = [torch.get_rng_state()]
    return states if device is None else [*states, torch.get_device_module(device).get_rng_state()]


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the context, replace the forward of `module` (this instance only) by `forward`."""
    before = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = before


@contextlib.contextmanager
def isolated_forward(model: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Within the context, put `model` in eval mode and disable compilation.

    At its end, the training mode of each module and the random state are restored. The caller must
    free all-gathered parameters afterwards (`formats.reshard`).
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with forked_rng(device), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
