"""Read a model with adapters: which of its modules are the base, and what is trained.

This file looks at modules only. It does not import PEFT, which takes seconds.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from toolkit.errors import ModelError
from toolkit.formats import reshard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"  # PEFT's name for the one adapter of a run
# PEFT's attributes of a wrapper: the wrapped module, and the modules that it adds.
_WRAPS = (("base_layer", "lora_A"), ("original_module", "modules_to_save"))
_SWITCH = "_disable_adapters"  # PEFT's private switch; the public method also sets `requires_grad`
_ADAPTER_PARTS = (
    "lora_A",
    "lora_B",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
)


def has_adapters(model: nn.Module) -> bool:
    """Return True if `model` is a PeftModel as `add_adapters` returns it, sharded or not."""
    kind = type(model)
    return hasattr(kind, "get_base_model") and hasattr(kind, "active_peft_config")


def base_of(model: nn.Module) -> "PreTrainedModel":
    """Return the transformers model inside the adapters, its modules still wrapped; or `model`."""
    adapted: Any = model
    return adapted.get_base_model() if has_adapters(model) else adapted


@contextlib.contextmanager
def unwrapped_base(model: nn.Module) -> Iterator["PreTrainedModel"]:
    """Yield the base as it was before the adapters: same modules, names and parameters.

    Loaders know a model by its names, so they run in this context. A forward inside it would not
    use the adapters.
    """
    base = base_of(model)
    replaced = []
    for parent in list(base.modules()) if has_adapters(model) else ():
        for name, child in parent._modules.items():
            inner = _unwrap_module(child)
            if inner is not child:
                replaced.append((parent, name, child))
                parent._modules[name] = inner
    try:
        yield base
    finally:
        for parent, name, child in reversed(replaced):
            parent._modules[name] = child


def _unwrap_module(module: nn.Module | None) -> nn.Module | None:
    """Return the innermost module that an adapter wraps, or `module` if nothing wraps it."""
    for inner, added in _WRAPS:
        if hasattr(module, added) and (wrapped := getattr(module, inner, None)) is not None:
            return _unwrap_module(wrapped)
    return module


@contextlib.contextmanager
def disabled_adapters(model: nn.Module) -> Iterator[None]:
    """Switch off all adapters within the context, so that forwards are those of the base.

    PEFT's own `disable_adapter` also sets `requires_grad`. FSDP2 reads that in the model's first
    forward, to decide in which dtype it reduces gradients and returns them. A first forward with
    frozen adapters would lose both, so this context changes PEFT's switch only.

    Raises:
        ModelError: `model` has no adapters, or PEFT has renamed its switch.
    """
    switches = [m for m in model.modules() if hasattr(m, _SWITCH)]
    before = [getattr(m, _SWITCH) for m in switches]
    try:
        for module in switches:
            setattr(module, _SWITCH, True)
        if not switches or not all(getattr(m, "disable_adapters", False) for m in switches):
            raise ModelError(
                f"expected PEFT layers with the switch {_SWITCH}, found "
                f"{len(switches)} in {type(model).__name__}; install PEFT 0.20 or 0.21"
            )
        yield
    finally:
        for module, value in zip(switches, before, strict=True):
            setattr(module, _SWITCH, value)


def trained_module(module: nn.Module | None) -> nn.Module | None:
    """Return the copy that is trained in full instead of `module`, or `module` itself.

    While adapters are off it is the original module.
    """
    wrapper: Any = module
    if not hasattr(module, "modules_to_save"):
        return module
    return wrapper.original_module if wrapper.disable_adapters else wrapper.modules_to_save[ADAPTER]


def trained_copies(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """List (parameter of the base, its trained copy) of all modules that are trained in full."""
    pairs = []
    for original, copy in copied_modules(model).values():
        base_parameters = dict(original.named_parameters())
        pairs += [(base_parameters[leaf], parameter) for leaf, parameter in copy.named_parameters()]
    return pairs


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Map the base's name of each adapted module to its outermost LoRA layer."""
    wrapped = _find_outermost_wrappers(base_of(model), "")
    return {name: module for name, module in wrapped if hasattr(module, "lora_A")}


def copied_modules(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Map the base's name of each module trained in full to (module of the base, its copy)."""
    wrapped: Any = _find_outermost_wrappers(base_of(model), "")
    pairs = ((n, m) for n, m in wrapped if hasattr(m, "modules_to_save"))
    return {n: (m.original_module, m.modules_to_save[ADAPTER]) for n, m in pairs}


def layer_parameters(layer: Any) -> dict[str, nn.Parameter]:
    """Collect the parameters of one LoRA layer's adapter under PEFT's names (`lora_A`, ...)."""
    parameters = {}
    for name in _ADAPTER_PARTS:
        table: Any = getattr(layer, name, ())
        if ADAPTER in table:
            entry = table[ADAPTER]
            parameters[name] = entry if isinstance(entry, nn.Parameter) else entry.weight
    return parameters


def adapted_parameters(model: nn.Module) -> dict[str, nn.Module]:
    """Map the base's name of each adapted parameter to its LoRA layer.

    One module may have several adapted parameters.
    """
    layers = {}
    for name, module in adapted_modules(model).items():
        layer: Any = module
        while hasattr(layer, "lora_A"):
            leaf = getattr(layer, "parameter_name", None) or "weight"
            layers[f"{name}.{leaf}"] = layer
            layer = getattr(layer, "base_layer", None)
    return layers


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collect trained parameters, and persistent buffers of modules trained in full.

    Names are those of the adapted model.
    """
    copy_prefix = f".modules_to_save.{ADAPTER}."
    tensors = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return tensors | {n: b for n, b in persistent_buffers(model).items() if copy_prefix in n}


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collect the tensors that a checkpoint holds, as `model.<name>` -> tensor.

    They are parameters (tied ones once) and persistent buffers; of a model with adapters only
    `trained_tensors`.
    """
    # A forward outside of a step may have left the root gathered.
    reshard(model)
    if has_adapters(model):
        tensors = trained_tensors(model)
    else:
        tensors = {n: p.detach() for n, p in model.named_parameters()} | persistent_buffers(model)
    return {f"model.{n}": t for n, t in tensors.items()}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collect the buffers that belong to the model's state dict."""
    # Without `keep_vars` each parameter would be detached.
    persistent = model.state_dict(keep_vars=True).keys()
    return {n: b for n, b in model.named_buffers() if n in persistent}


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """Return the adapters' configuration as adapter_config.json holds it, with sorted sets."""
    content = cast(Any, model).peft_config[ADAPTER].to_dict() | {"inference_mode": True}
    return json.loads(json.dumps(dict(sorted(content.items())), default=sorted))


def _find_outermost_wrappers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name in the base, wrapper) of every wrapped module; only outermost wrappers."""
    for name, child in module._modules.items():
        if child is None:
            continue
        path = f"{prefix}{name}"
        if _unwrap_module(child) is not child:
            yield path, child
        else:
            yield from _find_outermost_wrappers(child, path + ".")
