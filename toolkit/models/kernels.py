"""Liger's Triton kernels for norms, rotary positions and gated MLPs (`model.kernels: liger`).

The only file that knows Liger. The loss stays the toolkit's own.
"""

import inspect
import sys
import types
from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.errors import ConfigError, ModelError, one_line
from toolkit.formats import assets_of, transformers_private

_ASKED = "model.kernels: liger"
_DEVICES = ("cuda", "xpu")  # that Triton compiles for
# The loss is made in the toolkit's head; what else a type gets is Liger's default for it.
_CHOSEN = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def check_kernels(device: torch.device | str) -> None:
    """Refuse kernels that cannot run on `device`, or that are not installed; ConfigError."""
    if (kind := torch.device(device).type) not in _DEVICES:
        raise ConfigError(
            f"{_ASKED} needs a device that Triton compiles for ({' or '.join(_DEVICES)}); this run "
            f"computes on {kind}. Leave model.kernels out"
        )
    _known_types()


def use_kernels(model: PreTrainedModel) -> None:
    """Have `model` compute with Liger's kernels, in place; parameters and names stay.

    Before adapters and sharding. Only this model: transformers' classes, of which copies for trials
    and random starts are built on the host, are put back as they were. ModelError where Liger does
    not know the type, or fails on it.
    """
    kind = model.config.model_type
    if kind not in (known := _known_types()):
        raise ModelError(
            f"{_ASKED}: Liger has no kernels for model_type {kind!r}; it knows "
            f"{', '.join(sorted(known))}. Leave model.kernels out"
        )
    apply = transformers_private("integrations.liger", "apply_liger_kernel")
    modeling = vars(sys.modules[type(model).__module__])
    before = dict(modeling)
    try:
        apply(model, _CHOSEN)
        replaced = {n: modeling[n] for n, own in before.items() if modeling[n] is not own}
    except Exception as error:  # of any class, where transformers has moved on
        raise ModelError(
            f"{_ASKED}: Liger cannot be put on {type(model).__name__}: {one_line(error)}. Leave "
            "model.kernels out"
        ) from error
    finally:
        modeling.update(before)
    _call_instead(model, {n: f for n, f in replaced.items() if inspect.isfunction(f)})
    # What has a forward of its own now, by class.
    found = Counter(type(m).__name__ for m in model.modules() if "forward" in vars(m))
    if not found:
        raise ModelError(f"{_ASKED}: Liger changed nothing in {type(model).__name__}; leave it out")
    assets_of(model).kernels = "liger"
    listed = ", ".join(f"{count} {name}" for name, count in found.items())
    ranks.log_once(f"kernels    Liger's in {listed}")


def _call_instead(model: nn.Module, functions: dict[str, types.FunctionType]) -> None:
    """Have the modules of `model` that call functions of these names call these."""
    for module in model.modules():
        # transformers 5.24 takes an old name of an argument in a wrapper, which our calls lack.
        forward = inspect.unwrap(type(module).forward, stop=_is_own)
        if functions.keys() & getattr(forward, "__code__", _call_instead.__code__).co_names:
            own = types.FunctionType(
                forward.__code__,
                forward.__globals__ | functions,
                forward.__name__,
                forward.__defaults__,
                forward.__closure__,
            )
            own.__kwdefaults__ = forward.__kwdefaults__
            module.forward = types.MethodType(own, module)


def _is_own(forward: Any) -> bool:
    return getattr(forward, "__globals__", {}).get("__name__") != "transformers.utils.deprecation"


def _known_types() -> dict[str, Any]:
    """Return what Liger knows, by model_type; ConfigError where it cannot be imported."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ConfigError(
            f"{_ASKED} needs liger-kernel 0.8 and Triton, of which an import fails ({error}): "
            "install fsdp2-toolkit[liger], or leave it out"
        ) from error
    return MODEL_TYPE_TO_APPLY_LIGER_FN
