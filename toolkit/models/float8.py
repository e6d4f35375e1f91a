"""Compute the linear layers of decoder layers in float8 (`model.float8`), with torchao.

Only this file knows torchao. Weights keep their storage dtype, so checkpoints and exports are those
of a run without float8. Before each product, both factors are scaled and cast to 8 bits.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.errors import ConfigError, ModelError
from toolkit.formats import assets_of
from toolkit.models.layers import children_read_directly, decoder_layers

_MULTIPLE = 16  # float8 products need widths that are multiples of it
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
# Compute capability of the first GPUs with a fast product for each recipe.
_CAPABILITIES = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}


def check_float8(recipe: str, device: torch.device | str) -> None:
    """Raise ConfigError unless torchao is installed and `device` can compute in float8.

    A CPU can: there the casts are emulated, which shows the rounding and saves no time.

    Args:
        recipe: value of `model.float8`; `none` is not checked.
        device: the device of the run.
    """
    if recipe == "none":
        return
    _load_torchao(recipe)
    device = torch.device(device)
    if device.type == "cpu":
        return
    needed = ".".join(map(str, _CAPABILITIES[recipe]))
    if device.type != "cuda" or torch.version.hip is not None:
        raise ConfigError(
            f"model.float8: {recipe} needs an NVIDIA GPU of compute capability {needed} or newer; "
            f"this run computes on {device.type}. Remove model.float8"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITIES[recipe]:
        raise ConfigError(
            f"model.float8: {recipe} needs compute capability {needed} or newer; "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}. Remove "
            "model.float8"
        )


def use_float8(model: PreTrainedModel, recipe: str, device: torch.device | str) -> None:
    """Let the linear layers of the decoder layers compute in float8, in place; log which ones.

    Call it before sharding. The head, routers, fused experts and narrow layers are not converted.
    `tensorwise` also gathers the weights in float8.

    Args:
        model: on meta, without adapters.
        recipe: value of `model.float8`, which names a recipe of torchao; `none` changes nothing.
        device: the device of the run. On a CPU the casts are emulated, and layers of any size are
            converted.

    Raises:
        ModelError: no layer can be converted.
        ConfigError: torchao cannot be imported.
    """
    if recipe == "none":
        return
    convert, config_class = _load_torchao(recipe)
    is_emulated = torch.device(device).type == "cpu"
    names, excluded = _select_linears(model, recipe, any_size=is_emulated)
    if not names:
        reasons = ", ".join(f"{count} {why}" for why, count in excluded.items())
        raise ModelError(
            f"model.float8: {recipe}: no layer of {type(model).__name__} gains from it "
            f"({reasons or 'it has no linear layers'}). Remove model.float8"
        )
    config = replace(
        config_class.from_recipe_name(recipe),
        emulate=is_emulated,
        enable_fsdp_float8_all_gather=recipe == "tensorwise",
    )
    chosen = frozenset(names)
    convert(model, config=config, module_filter_fn=lambda _, name: name in chosen)
    assets_of(model).float8 = recipe
    kinds = Counter(name.rpartition(".")[2] for name in names)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    unconverted = "".join(f"; {count} {why}" for why, count in excluded.items())
    where = ", emulated on the CPU: slower, the same rounding" if is_emulated else ""
    ranks.log_once(f"float8     {recipe}{where}: {listed}{unconverted}")


def gathers_float8(model: nn.Module) -> bool:
    """Return True if the model's weights are gathered in float8."""
    return getattr(getattr(model, "hf_assets", None), "float8", "none") == "tensorwise"


def precompute_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in float8, in one all-reduce. Collective.

    Call it after each optimizer step. Without it, each gather computes its own scales.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def _select_linears(
    model: PreTrainedModel, recipe: str, *, any_size: bool
) -> tuple[list[str], Counter[str]]:
    """Select the linear layers to convert: (names, reason -> number of excluded layers)."""
    names: list[str] = []
    excluded: Counter[str] = Counter()
    for layer_name, layer in decoder_layers(model).items():
        for name, module in layer.named_modules(prefix=layer_name):
            if type(module) is not nn.Linear:
                continue
            outer, _, leaf = name.rpartition(".")
            kind: Any = type(model.get_submodule(outer))
            # Some routers are modules with a linear layer inside.
            if not _ROUTERS.isdisjoint(name.removeprefix(layer_name).split(".")):
                excluded["of routers"] += 1
            elif leaf in children_read_directly(kind):
                excluded["whose weights are used without their forward"] += 1
            elif any(width % _MULTIPLE for width in module.weight.shape):
                excluded[f"whose widths are no multiples of {_MULTIPLE}"] += 1
            elif not (any_size or _is_faster(recipe, module)):
                excluded["too small to gain"] += 1
            else:
                names.append(name)
    return names, excluded


def _is_faster(recipe: str, linear: nn.Linear) -> bool:
    """Return True if a layer is large enough that float8 saves time on an H100.

    The limits are those of torchao 0.18 (`torchao.float8.float8_linear_utils`).
    """
    out, width = linear.weight.shape
    if recipe == "tensorwise":
        return width > 4096 or out > 1024
    return out > 2048 and width > 1024 and (out > 4096 or width > 2048)


def _load_torchao(recipe: str) -> tuple[Any, Any]:
    """Import torchao's `convert_to_float8_training` and `Float8LinearConfig`; else ConfigError."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError(
            f"model.float8: {recipe} needs torchao 0.18, but an import fails ({error}): install "
            "fsdp2-toolkit[float8], or remove the setting"
        ) from error
    return convert_to_float8_training, Float8LinearConfig
