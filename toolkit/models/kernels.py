"""Use Liger's Triton kernels for norms, rotary positions and gated MLPs (`model.kernels: liger`).

Only this file knows Liger. The loss stays the toolkit's own.
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

_SETTING = "model.kernels: liger"
_DEVICES = ("cuda", "xpu")  # device types that Triton compiles for
# The toolkit computes the loss itself. All other kernels are Liger's defaults for the type.
_CHOSEN = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def check_kernels(device: torch.device | str) -> None:
    """Raise ConfigError unless Liger's kernels are installed and support the type of `device`."""
    if (kind := torch.device(device).type) not in _DEVICES:
        raise ConfigError(
            f"{_SETTING} needs a device that Triton compiles for ({' or '.join(_DEVICES)}); this "
            f"run computes on {kind}. Remove model.kernels"
        )
    _load_liger_functions()


def use_kernels(model: PreTrainedModel) -> None:
    """Use Liger's kernels in `model`, in place, and log in which modules.

    Call it before adapters and sharding. Parameters keep their names. Only this model changes:
    transformers' classes are restored, because other copies of the model run on the CPU.

    Raises:
        ModelError: Liger does not support the model type, or cannot be applied to it.
        ConfigError: Liger cannot be imported.
    """
    kind = model.config.model_type
    if kind not in (types := _load_liger_functions()):
        raise ModelError(
            f"{_SETTING}: Liger has no kernels for model_type {kind!r}; it knows "
            f"{', '.join(sorted(types))}. Remove model.kernels"
        )
    apply = transformers_private("integrations.liger", "apply_liger_kernel")
    modeling = vars(sys.modules[type(model).__module__])
    before = dict(modeling)
    try:
        apply(model, _CHOSEN)
        replaced = {n: modeling[n] for n, function in before.items() if modeling[n] is not function}
    except Exception as error:
        # Any error may come from a version of transformers that Liger does not know.
        raise ModelError(
            f"{_SETTING}: Liger cannot be applied to {type(model).__name__}: {one_line(error)}. "
            "Remove model.kernels"
        ) from error
    finally:
        modeling.update(before)
    _replace_called_functions(model, {n: f for n, f in replaced.items() if inspect.isfunction(f)})
    # Modules whose forward was replaced, by class.
    replaced_classes = Counter(type(m).__name__ for m in model.modules() if "forward" in vars(m))
    if not replaced_classes:
        raise ModelError(
            f"{_SETTING}: Liger changed nothing in {type(model).__name__}; remove the setting"
        )
    assets_of(model).kernels = "liger"
    listed = ", ".join(f"{count} {name}" for name, count in replaced_classes.items())
    ranks.log_once(f"kernels    Liger's in {listed}")


def _replace_called_functions(model: nn.Module, functions: dict[str, types.FunctionType]) -> None:
    """Replace global functions that the modules' forwards call, for this model only.

    Each affected module gets a copy of its forward in which the names refer to the replacements.

    Args:
        model: the model, which is changed in place.
        functions: name of a global function -> its replacement.
    """
    for module in model.modules():
        # transformers 5.24 accepts old argument names in a wrapper, which our calls do not need.
        forward = inspect.unwrap(type(module).forward, stop=_is_unwrapped_forward)
        if (
            functions.keys()
            & getattr(forward, "__code__", _replace_called_functions.__code__).co_names
        ):
            rebound = types.FunctionType(
                forward.__code__,
                forward.__globals__ | functions,
                forward.__name__,
                forward.__defaults__,
                forward.__closure__,
            )
            rebound.__kwdefaults__ = forward.__kwdefaults__
            module.forward = types.MethodType(rebound, module)


def _is_unwrapped_forward(forward: Any) -> bool:
    """Return False if a forward is transformers' wrapper for deprecated arguments, else True."""
    return getattr(forward, "__globals__", {}).get("__name__") != "transformers.utils.deprecation"


def _load_liger_functions() -> dict[str, Any]:
    """Return model_type -> Liger's patch function; raise ConfigError if Liger is missing."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ConfigError(
            f"{_SETTING} needs liger-kernel 0.8 and Triton, but an import fails ({error}): "
            "install fsdp2-toolkit[liger], or remove the setting"
        ) from error
    return MODEL_TYPE_TO_APPLY_LIGER_FN
