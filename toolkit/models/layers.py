"""Where a model keeps its decoder layers, found from modules and classes; which names are tied."""

import re

from torch import nn
from transformers import PreTrainedModel

from toolkit.formats import nested_items
from toolkit.models.patterns import module_class_name
from toolkit.models.peft_model import base_of
from toolkit.models.reward import HEAD

_EXPERTS = re.compile(r"(^|_)(n|num)_((?!shared)\w+_)?experts$")
_CHOSEN = re.compile(r"num_experts_per_tok(en)?|moe_(topk|top_k|k)|top_k_experts")


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers of `model`, name -> module, in the order of definition.

    They are the elements of its stacks (every outermost `ModuleList` that holds more than a
    fiftieth of the parameters) and the modules of the classes in `_no_split_modules`; of nested
    ones the outermost, but the layers rather than a stage that stacks several. Never one that holds
    an embedding, the head, or a parameter tied to something that is no layer; none of a tower for
    images or sound.
    """
    classes: set[str] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            classes.update(getattr(module, "_no_split_modules", None) or [])
    named = dict(model.named_modules())
    by_class = {n for n, m in named.items() if n and module_class_name(m) in classes}
    found: set[str] = set()
    for name in by_class | _stacked(model):
        stages = [
            f"{name}.{inner}"
            for inner, child in named[name].named_modules()
            if isinstance(child, nn.ModuleList)
            and sum(f"{name}.{inner}.{i}" in by_class for i in range(len(child))) > 1
        ]
        if not stages:
            found.add(name)
    beside = set(modules_outside_text(model))
    found = {n for n in found if not beside.intersection([n, *enclosing_names(n)])}
    apart = _kept_apart(model, named, found)
    held = {n: [id(p) for p in named[n].parameters()] for n in named if n in found}
    layers = {n: named[n] for n, own in held.items() if own and not apart.intersection(own)}
    return {n: m for n, m in layers.items() if not any(o in layers for o in enclosing_names(n))}


def enclosing_names(name: str) -> list[str]:
    """Return the modules around a name, outermost first, the root left out."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _stacked(model: nn.Module) -> set[str]:
    """Return the names of the elements of the stacks that matter, outermost lists only."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0}
    total = sum(p.numel() for p in model.parameters())
    total -= sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    return {
        f"{name}.{i}"
        for name, stack in lists.items()
        if not any(outer in lists for outer in enclosing_names(name))
        and sum(p.numel() for p in stack.parameters()) * 50 >= total
        for i, child in enumerate(stack)
        if not isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Embedding)
    }


def _kept_apart(model: nn.Module, named: dict[str, nn.Module], layers: set[str]) -> set[int]:
    """Return what no layer may hold: parameters of embedding and head, and ties beyond layers."""
    apart: set[int] = set()
    base = base_of(model)
    if isinstance(base, PreTrainedModel):
        for module in (base.get_input_embeddings(), base.get_output_embeddings()):
            apart.update(map(id, () if module is None else module.parameters()))
    for first, *others in tied_families(model).values():
        inside = [any(o in layers for o in enclosing_names(name)) for name in (first, *others)]
        if others and not all(inside):
            apart.add(id(model.get_parameter(first)))
    return apart


def expert_counts(model: PreTrainedModel) -> set[int]:
    """Return how many routed experts a layer may have, by the settings of the config."""
    settings = nested_items(model.config.to_dict())
    return {n for name, n in settings if type(n) is int and n > 1 and _EXPERTS.search(str(name))}


def experts_per_token(model: nn.Module) -> int | None:
    """Return to how many routed experts of a layer a token is sent, by the config."""
    settings = nested_items(base_of(model).config.get_text_config().to_dict())
    chosen = (n for name, n in settings if type(n) is int and _CHOSEN.fullmatch(str(name)))
    return next(chosen, None)


def active_expert_shares(model: nn.Module) -> dict[str, float]:
    """Return, for every parameter of routed experts, the share of it that a token meets: experts
    that it is sent to, by the config, of those that are there. Empty: no mixture of experts.
    """
    chosen = experts_per_token(model)
    if not chosen or not (counts := expert_counts(base_of(model))):
        return {}
    share = min(1.0, chosen / max(counts))
    return {
        name: share
        for name, p in model.named_parameters()
        if "experts" in name.split(".") or (p.ndim == 3 and p.shape[0] in counts)
    }


def tied_families(model: nn.Module) -> dict[str, list[str]]:
    """Return every parameter's first name -> all its names."""
    first: dict[int, str] = {}
    families: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        families.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return families


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return alias -> the first name of the same parameter, for every tied parameter."""
    return {alias: names[0] for names in tied_families(model).values() for alias in names[1:]}


def modules_outside_text(model: nn.Module) -> list[str]:
    """Return the outermost modules that text does not run through: towers for images and sound,
    and what leads from them. None of a model that takes nothing but text.
    """
    base = base_of(model)
    used = _text_modules(base)
    if not used:
        return []
    names = {id(module): name for name, module in model.named_modules()}
    inside = {names[id(m)] for part in used for m in part.modules() if id(m) in names}
    around = {outer for name in inside for outer in ["", *enclosing_names(name)]}
    found: list[str] = []
    for name in names.values():
        if name in inside or name in around or any(n in inside for n in enclosing_names(name)):
            continue
        if names[id(base)] not in ("", name, *enclosing_names(name)):
            continue  # of the adapters
        if not any(outer in found for outer in enclosing_names(name)):
            found.append(name)
    return found


def parameters_outside_text(model: nn.Module) -> set[str]:
    """Return every name of the parameters that lie beside the text part; see `beside_text`."""
    used = _text_modules(base_of(model))
    kept = {id(p) for module in used for p in module.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, p in named if id(p) not in kept} if used else set()


def frozen_towers_line(model: nn.Module) -> str:
    """Return what a run says of what lies beside the text part; "" where nothing does."""
    base = base_of(model)
    found = {name: base.get_submodule(name) for name in modules_outside_text(base)}
    total = sum(p.numel() for module in found.values() for p in module.parameters())
    if not total:
        return ""
    return (
        f"frozen     {', '.join(found)}: {total / 1e6:,.1f} M parameters that text does not reach"
    )


def _text_modules(base: nn.Module) -> list[nn.Module]:
    """Return decoder, embedding and head of a model for more than text; else nothing."""
    config = getattr(base, "config", None)
    if (
        not isinstance(base, PreTrainedModel)
        or config is None
        or config.get_text_config() is config
    ):
        return []
    decoder = base.get_decoder()
    if decoder is None or decoder is base:
        return []
    ends = (base.get_input_embeddings(), _output_embeddings(base), getattr(base, HEAD, None))
    return [decoder, *(end for end in ends if end is not None)]


def _output_embeddings(base: PreTrainedModel) -> nn.Module | None:
    """Return the head that makes logits; a class that names none may hold a language model that
    does (nemotron_h_omni: `language_model.lm_head`).
    """
    inner = (module for module in base.modules() if isinstance(module, PreTrainedModel))
    heads = (module.get_output_embeddings() for module in inner)
    return next((head for head in heads if head is not None), None)
