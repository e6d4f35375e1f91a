"""Choose the layers of a frozen base that are kept in 4 bits (QLoRA) or float8, and replace them.

[Note: blocks] A scale belongs to 64 consecutive values of the flattened matrix. If rows are no
multiple of that, a block spans two rows, and bitsandbytes 0.50 on CPUs with AVX-512 then pairs
blocks and scales wrongly, without an error (in_features of 32, 80, 96, ...). Such layers keep the
base's dtype, on every device, so that a run means the same on each.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import ModelConfig, ShardingConfig
from toolkit.errors import ConfigError, ModelError
from toolkit.formats import assets_of
from toolkit.models import float8_base, packed_linear
from toolkit.models.causal_lm import find_fp32_tensors
from toolkit.models.classes import model_class_name
from toolkit.models.layers import (
    children_read_directly,
    decoder_layers,
    enclosing_module_names,
    expert_counts,
)
from toolkit.models.modes import forked_rng
from toolkit.models.packed_experts import pack_experts_on_meta, packed_expert_weights
from toolkit.models.patterns import replace_numbers
from toolkit.models.peft_model import unwrapped_base


@ranks.collective
def check_quantisation(
    lora: LoraConfig | None,
    sharding: ShardingConfig,
    model: ModelConfig,
    device: torch.device | str,
) -> None:
    """Raise ConfigError if the settings of a packed base conflict, or fail on `device`. Collective.

    Multiplies a small 4-bit or float8 matrix on `device` as a test. Does nothing without adapters,
    or if neither `lora.load_in_4bit` nor `model.float8` is set.
    """
    if lora is None or not (lora.load_in_4bit or model.float8 != "none"):
        return
    name = "lora.load_in_4bit" if lora.load_in_4bit else f"model.float8: {model.float8}"
    for setting, is_set, why in (
        ("model.init random", model.init == "random", "there is nothing to quantise but noise"),
        ("lora.use_dora", lora.use_dora, "DoRA needs the rows of the weights, which are packed"),
    ):
        if is_set:
            raise ConfigError(f"{name} with {setting}: {why}. Leave out one of them")
    dtype = getattr(torch, sharding.param_dtype)
    if lora.load_in_4bit:
        packed_linear.check_4bit_device(torch.device(device), lora, dtype)
    else:
        float8_base.check_float8_device(torch.device(device), dtype)


@ranks.collective
def quantise_on_meta(model: PreTrainedModel, cfg: LoraConfig, param_dtype: str) -> None:
    """Replace the linear layers in the decoder layers by packed 4-bit ones, in place. Collective.

    Call it before `add_adapters` and `apply_fsdp`. Embedding, head, routers and modules that are
    not an `nn.Linear` (convolutions) keep their dtype; `describe_quantisation` lists them. So do
    fused experts without `cfg.quantize_moe_experts`; see [Note: packed experts]. The method is
    QLoRA's (https://arxiv.org/abs/2305.14314); see [Note: packed weights].

    Args:
        model: on meta, without adapters.
        cfg: the settings of adapters.
        param_dtype: name of the dtype in which FSDP2 computes.

    Raises:
        ModelError: no layer can be quantised, `lora.target_parameters` names the weight of a
            layer that is quantised, or fused experts cannot be quantised.
    """
    make = packed_linear.packed_linear_class()
    dtype = getattr(torch, param_dtype)
    chosen, unpacked = _choose_layers(model, cfg, _reason_against_4_bits)
    if cfg.quantize_moe_experts:
        experts = pack_experts_on_meta(model, cfg, dtype)
        remaining = {why: [n for n in names if n not in experts] for why, names in unpacked.items()}
        unpacked = {why: names for why, names in remaining.items() if names}
    assets_of(model).unpacked = unpacked
    _refuse_layers(model, cfg, chosen, "lora.load_in_4bit")
    _replace_layers(model, chosen, lambda linear: make(linear, cfg, dtype))
    # PEFT chooses its layers by this attribute.
    vars(model)["is_loaded_in_4bit"] = True


@ranks.collective
def store_in_float8(model: PreTrainedModel, cfg: LoraConfig, param_dtype: str) -> None:
    """Replace the linear layers in the decoder layers by frozen float8 ones, in place. Collective.

    Call it before `add_adapters` and `apply_fsdp`. The layers that `quantise_on_meta` skips keep
    their dtype, and so do narrow ones; `describe_quantisation` lists them. See [Note: float8 base].

    Args:
        model: on meta, without adapters.
        cfg: the settings of adapters.
        param_dtype: name of the dtype in which FSDP2 computes.

    Raises:
        ModelError: no layer can be stored in float8, or `lora.target_parameters` names the weight
            of one that is.
    """
    dtype = getattr(torch, param_dtype)
    chosen, assets_of(model).unpacked = _choose_layers(model, cfg, _reason_against_float8)
    _refuse_layers(model, cfg, chosen, "model.float8: rowwise")
    _replace_layers(model, chosen, lambda linear: float8_base.Float8BaseLinear(linear, dtype))


def _refuse_layers(
    model: PreTrainedModel, cfg: LoraConfig, chosen: dict[str, nn.Linear], setting: str
) -> None:
    """Raise a ModelError if no layer was chosen, or if an adapter needs the weight of a chosen one.

    Args:
        model: the model.
        cfg: the settings of adapters.
        chosen: name -> layer that will be packed.
        setting: the setting that packs layers, for messages.
    """
    if not chosen:
        raise ModelError(
            f"{setting}: {model_class_name(model)} has no linear layer to quantise in its decoder "
            f"layers ({_format_reasons(assets_of(model).unpacked) or 'they hold no matrices'})"
        )
    for target in cfg.target_parameters:
        if hit := [name for name in chosen if f".{name}.weight".endswith(f".{target}")]:
            raise ModelError(
                f"lora.target_parameters: {target!r} names the weight of {hit[0]}, which is in "
                f"{'4 bits' if cfg.load_in_4bit else 'float8'}; use lora.target_modules"
            )


def _replace_layers(
    model: PreTrainedModel,
    chosen: dict[str, nn.Linear],
    make: Callable[[nn.Linear], packed_linear.PackedLinear],
) -> None:
    """Replace layers by packed ones, in place. Layers or weights that are shared stay shared.

    Args:
        model: on meta.
        chosen: name -> layer, under all names of shared layers.
        make: makes the packed layer.
    """
    packed: dict[int, packed_linear.PackedLinear] = {}
    weights: dict[int, nn.Parameter] = {}
    for name, linear in chosen.items():
        if id(linear) not in packed:
            layer = packed[id(linear)] = make(linear)
            # A weight that two layers share stays one parameter.
            layer.weight = weights.setdefault(id(linear.weight), layer.weight)
        model.set_submodule(name, packed[id(linear)])


def _reason_against_4_bits(linear: nn.Linear) -> str:
    """Return why the shape of a layer does not allow 4 bits; empty if it does."""
    block = packed_linear.BLOCK
    return f"in_features is no multiple of {block}" if linear.in_features % block else ""


def _reason_against_float8(linear: nn.Linear) -> str:
    """Return why the shape of a layer does not allow float8, or gains nothing; empty otherwise."""
    multiple, least = float8_base.MULTIPLE, float8_base.MIN_WIDTH
    if linear.in_features % multiple or linear.out_features % multiple:
        return f"widths are no multiples of {multiple}"
    is_narrow = min(linear.in_features, linear.out_features) < least
    return f"narrower than {least}" if is_narrow else ""


def _choose_layers(
    model: PreTrainedModel, cfg: LoraConfig, reason_against: Callable[[nn.Linear], str]
) -> tuple[dict[str, nn.Linear], dict[str, list[str]]]:
    """Choose the linear layers to quantise.

    Args:
        model: on meta, without adapters.
        cfg: the settings of adapters.
        reason_against: returns why the shape of a layer excludes it; empty if it does not.

    Returns:
        (name -> layer to quantise, under all names of shared layers; reason -> names of the
        matrices in decoder layers that keep their dtype for it).
    """
    fp32 = set(find_fp32_tensors(model))
    modules = dict(model.named_modules(remove_duplicate=False))
    experts = expert_counts(model)

    def reason_to_keep(name: str, linear: nn.Linear) -> str:
        """Return why a linear layer keeps its dtype; empty where it does not."""
        outer, _, leaf = name.rpartition(".")
        kind: Any = type(modules[outer])
        # A router has one output per expert, and a gate has one output.
        one_each = linear.out_features in experts | {1} and linear.out_features < linear.in_features
        around = [type(modules[outer]).__name__.lower() for outer in enclosing_module_names(name)]
        reasons = {
            "lora.modules_to_save": any(
                _matches_module(name, pattern) for pattern in cfg.modules_to_save
            ),
            "kept in float32 by the model": f"{name}.weight" in fp32,
            "router": one_each or any("router" in n for n in around),
            "its weight is used without its forward": leaf in children_read_directly(kind),
        }
        return next((why for why, holds in reasons.items() if holds), "") or reason_against(linear)

    chosen: dict[str, nn.Linear] = {}
    unpacked: dict[str, list[str]] = {}
    for outer, decoder in decoder_layers(model).items():
        for inner, module in decoder.named_modules(remove_duplicate=False):
            name = f"{outer}.{inner}" if inner else outer
            matrices = [n for n, p in module.named_parameters(recurse=False) if p.ndim > 1]
            if not matrices:
                continue
            kind: Any = type(module)
            if not (isinstance(module, nn.Linear) and _is_plain_linear_class(kind)):
                why = f"in {kind.__name__}, which is no nn.Linear"
                unpacked.setdefault(why, []).extend(f"{name}.{leaf}" for leaf in matrices)
            elif why := reason_to_keep(name, module):
                unpacked.setdefault(why, []).append(name)
            else:
                chosen[name] = module
    return chosen, unpacked


@functools.cache
def _is_plain_linear_class(kind: Any) -> bool:
    """Return True if a subclass of `nn.Linear` computes the same, by a small trial. Cached."""
    if kind is nn.Linear:
        return True
    with forked_rng():
        plain = nn.Linear(6, 4)
        layer = kind.__new__(kind)
    vars(layer).update(copy.deepcopy(vars(plain)))
    x = torch.linspace(-1, 1, 18).reshape(3, 6)
    try:
        output = layer(x)
    except Exception:
        # A custom layer may need attributes that the copy lacks.
        return False
    return isinstance(output, torch.Tensor) and torch.allclose(output, plain(x), atol=1e-5)


def _matches_module(name: str, pattern: str) -> bool:
    """Return True if `pattern` is the name, or the last parts of the name, of a module.

    A pattern for a module that contains module `name` matches, too.
    """
    return any(f".{path}".endswith(f".{pattern}") for path in (*enclosing_module_names(name), name))


def _format_reasons(unpacked: dict[str, list[str]]) -> str:
    """Format which matrices keep their dtype and why, with up to four names for each reason.

    Args:
        unpacked: reason -> names.
    """
    parts = []
    for reason, names in unpacked.items():
        kinds = list(dict.fromkeys(map(replace_numbers, names)))
        more = f" and {len(kinds) - 4} more" if len(kinds) > 4 else ""
        parts.append(f"{', '.join(kinds[:4])}{more} ({reason})")
    return "; ".join(parts)


def quantisation_settings(model: nn.Module) -> dict[str, Any] | None:
    """Return the settings that determine packed values, as a JSON object, to compare on resume.

    They are the settings of the format (4 bits: double quantisation and block size), and the number
    of layers by name. Returns None without packed weights.
    """
    with unwrapped_base(model) as base:
        packed = packed_linear.packed_weights(base)
    if not packed:
        return None
    first = next(iter(packed.values()))
    layers = Counter(replace_numbers(name.removesuffix(".weight")) for name in packed)
    return {**first.settings, "layers": dict(sorted(layers.items()))}


def describe_quantisation(model: nn.Module, shards: int) -> str | None:
    """Format two log lines: which layers are packed, and how many bytes each rank holds.

    Args:
        model: sharded or not.
        shards: number of ranks that share the weights.

    Returns:
        The lines as one text; None if nothing is packed.
    """
    with unwrapped_base(model) as base:
        packed = packed_linear.packed_weights(base)
        decoders = decoder_layers(base).values()
        parameter_sizes = {id(p): p.numel() for decoder in decoders for p in decoder.parameters()}
    if not packed:
        return None
    one_each = {id(layer.weight): layer for layer in packed.values()}
    other_elements = sum(n for key, n in parameter_sizes.items() if key not in one_each)
    layers = list(one_each.values())
    elements = sum(layer.elements for layer in layers)
    nbytes = sum(layer.nbytes for layer in layers)
    plain = sum(layer.elements * layer.source_dtype.itemsize for layer in layers)
    unpacked = _format_reasons(assets_of(base).unpacked)
    stacks = len(packed_expert_weights(base))
    bits = layers[0].value_bits
    value_bytes = elements * bits / 8
    return (
        f"{layers[0].format_text}: "
        f"{len(packed) - stacks} linear layers"
        + (f" and {stacks} tensors of fused experts" if stacks else "")
        + f", {elements / (elements + other_elements):.1%} of the decoder "
        "layers"
        + (f"; not: {unpacked}" if unpacked else "")
        + f"\n{value_bytes / 1e6:,.2f} MB of {bits}-bit values and "
        f"{(nbytes - value_bytes) / 1e6:,.2f} MB of scales, "
        f"{'both sharded' if shards > 1 else 'complete on each rank'}: "
        f"{nbytes / shards / 1e6:,.2f} MB a rank, not {plain / shards / 1e6:,.2f}"
    )
