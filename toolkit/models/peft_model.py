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
    """Return True if `model` is a PeftModel, sharded or not."""
    kind = type(model)
    return hasattr(kind, "get_base_model") and hasattr(kind, "active_peft_config")


def base_of(model: nn.Module) -> "PreTrainedModel":
    """Return the transformers model inside a PeftModel; return any other model unchanged.

    The result still has LoRA layers in place of its linear layers.
    """
    adapted: Any = model
    return adapted.get_base_model() if has_adapters(model) else adapted


@contextlib.contextmanager
def unwrapped_base(model: nn.Module) -> Iterator["PreTrainedModel"]:
    """Yield the base model, which has its original modules instead of PEFT's in the context.

    Parameters then have their original names, as loaders expect, and a forward ignores the
    adapters. A model without adapters is yielded unchanged.
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
    """Return the original module inside PEFT's wrappers; `module` itself if it is not wrapped."""
    for inner, added in _WRAPS:
        if hasattr(module, added) and (wrapped := getattr(module, inner, None)) is not None:
            return _unwrap_module(wrapped)
    return module


@contextlib.contextmanager
def disabled_adapters(model: nn.Module) -> Iterator[None]:
    """Disable all adapters within the context, so that forwards compute the base model.

    PEFT's own `disable_adapter` also changes `requires_grad`. FSDP2 reads that in the first forward
    to choose how it reduces gradients, so this context only sets PEFT's private switch.

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
    """Return the trained copy if `module` is PEFT's wrapper for `modules_to_save`.

    Any other module is returned itself. If the adapters are disabled, the original module is
    returned instead of the copy.
    """
    wrapper: Any = module
    if not hasattr(module, "modules_to_save"):
        return module
    return wrapper.original_module if wrapper.disable_adapters else wrapper.modules_to_save[ADAPTER]


def trained_copies(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """List (original parameter, trained copy) of all modules in `modules_to_save`."""
    pairs = []
    for original, copy in copied_modules(model).values():
        base_parameters = dict(original.named_parameters())
        pairs += [(base_parameters[leaf], parameter) for leaf, parameter in copy.named_parameters()]
    return pairs


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return name in the base model -> LoRA layer, for each module that a LoRA layer wraps.

    If several LoRA layers wrap a module, it is the outermost one.
    """
    wrapped = _find_outermost_wrappers(base_of(model), "")
    return {name: module for name, module in wrapped if hasattr(module, "lora_A")}


def copied_modules(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return name in the base model -> (original module, trained copy), for `modules_to_save`."""
    wrapped: Any = _find_outermost_wrappers(base_of(model), "")
    pairs = ((n, m) for n, m in wrapped if hasattr(m, "modules_to_save"))
    return {n: (m.original_module, m.modules_to_save[ADAPTER]) for n, m in pairs}


def layer_parameters(layer: Any) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters in one LoRA layer by PEFT's names, such as `lora_A`."""
    parameters = {}
    for name in _ADAPTER_PARTS:
        table: Any = getattr(layer, name, ())
        if ADAPTER in table:
            entry = table[ADAPTER]
            parameters[name] = entry if isinstance(entry, nn.Parameter) else entry.weight
    return parameters


def adapted_parameters(model: nn.Module) -> dict[str, nn.Module]:
    """Return name in the base model -> LoRA layer, for each parameter that an adapter changes.

    A module may have several such parameters, each with its own layer.
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
    """Return name -> tensor for the trained parameters, and for buffers of trained copies.

    Of the buffers, only persistent ones of `modules_to_save` are included.
    """
    copy_prefix = f".modules_to_save.{ADAPTER}."
    tensors = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return tensors | {n: b for n, b in persistent_buffers(model).items() if copy_prefix in n}


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model tensors that a checkpoint holds: `model.<name>` -> tensor.

    They are all parameters (tied ones once) and persistent buffers; with adapters, only those of
    `trained_tensors`. Frees all-gathered parameters first.
    """
    # A forward outside of a step may have left the root gathered.
    reshard(model)
    if has_adapters(model):
        tensors = trained_tensors(model)
    else:
        tensors = {n: p.detach() for n, p in model.named_parameters()} | persistent_buffers(model)
    return {f"model.{n}": t for n, t in tensors.items()}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> buffer for the buffers that are in the model's state dict."""
    # Without `keep_vars` each parameter would be detached.
    persistent = model.state_dict(keep_vars=True).keys()
    return {n: b for n, b in model.named_buffers() if n in persistent}


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """Return the content of adapter_config.json, with sets as sorted lists."""
    content = cast(Any, model).peft_config[ADAPTER].to_dict() | {"inference_mode": True}
    return json.loads(json.dumps(dict(sorted(content.items())), default=sorted))


def _find_outermost_wrappers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name in the base model, wrapper) for each module that PEFT wraps.

    If wrappers are nested, only the outermost one is yielded.

    Args:
        module: the module to search.
        prefix: text before the names, such as "model.".
    """
    for name, child in module._modules.items():
        if child is None:
            continue
        path = f"{prefix}{name}"
        if _unwrap_module(child) is not child:
            yield path, child
        else:
            yield from _find_outermost_wrappers(child, path + ".")
