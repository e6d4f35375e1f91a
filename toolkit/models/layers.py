"""Find the parts of a model: decoder layers, experts, tied names, and the text path.

[Note: text path] A checkpoint that also takes images or sound names a class of which text needs the
decoder, its embedding and its head. That class is trained, so that an export is again what
`config.json` names. Modules outside the text path are frozen, and never gathered.
"""

import contextlib
import functools
import inspect
import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from toolkit.formats import nested_items
from toolkit.models.patterns import module_class_name
from toolkit.models.peft_model import base_of
from toolkit.models.reward import HEAD

_EXPERTS = re.compile(r"(^|_)(n|num)_((?!shared)\w+_)?experts$")
_CHOSEN = re.compile(r"num_experts_per_tok(en)?|moe_(topk|top_k|k)|top_k_experts")


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers of `model` as name -> module, in the order of definition.

    Candidates are modules of the classes in `_no_split_modules`, and elements of outermost
    `ModuleList`s with over a fiftieth of the parameters. If candidates are nested, the outer one is
    used, unless it is a stage with several layers. A layer never holds the embedding, the head or a
    parameter that is tied to one outside the layers. It is never part of a tower for images or
    sound.
    """
    layer_classes: set[str] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            layer_classes.update(getattr(module, "_no_split_modules", None) or [])
    modules = dict(model.named_modules())
    by_class = {n for n, m in modules.items() if n and module_class_name(m) in layer_classes}
    candidates: set[str] = set()
    for name in by_class | _stack_elements(model):
        stages = [
            f"{name}.{inner}"
            for inner, child in modules[name].named_modules()
            if isinstance(child, nn.ModuleList)
            and sum(f"{name}.{inner}.{i}" in by_class for i in range(len(child))) > 1
        ]
        if not stages:
            candidates.add(name)
    outside_text = set(modules_outside_text(model))
    candidates = {
        n for n in candidates if not outside_text.intersection([n, *enclosing_module_names(n)])
    }
    apart = _parameters_outside_layers(model, modules, candidates)
    parameter_ids = {
        n: [id(p) for p in modules[n].parameters()] for n in modules if n in candidates
    }
    layers = {
        n: modules[n] for n, ids in parameter_ids.items() if ids and not apart.intersection(ids)
    }
    return {
        n: m for n, m in layers.items() if not any(o in layers for o in enclosing_module_names(n))
    }


def enclosing_module_names(name: str) -> list[str]:
    """Return the names of the modules that contain module `name`, outermost first.

    For example, "a.b.c" gives ["a", "a.b"].
    """
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _stack_elements(model: nn.Module) -> set[str]:
    """Return the names of the elements of large `ModuleList`s that are in no other list.

    A list is large if it has at least a fiftieth of all parameters without embeddings.
    """
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0}
    total = sum(p.numel() for p in model.parameters())
    total -= sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    return {
        f"{name}.{i}"
        for name, stack in lists.items()
        if not any(outer in lists for outer in enclosing_module_names(name))
        and sum(p.numel() for p in stack.parameters()) * 50 >= total
        for i, child in enumerate(stack)
        if not isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Embedding)
    }


def _parameters_outside_layers(
    model: nn.Module, modules: dict[str, nn.Module], layers: set[str]
) -> set[int]:
    """Return the `id()` of each parameter that a decoder layer must not hold.

    They are the parameters of embedding and head, and tied parameters with a name outside the
    layers.

    Args:
        model: the model.
        modules: name -> module.
        layers: names of candidates for decoder layers.
    """
    apart: set[int] = set()
    base = base_of(model)
    if isinstance(base, PreTrainedModel):
        for module in (base.get_input_embeddings(), base.get_output_embeddings()):
            apart.update(map(id, () if module is None else module.parameters()))
    for first, *aliases in tied_families(model).values():
        inside = [
            any(o in layers for o in enclosing_module_names(name)) for name in (first, *aliases)
        ]
        if aliases and not all(inside):
            apart.add(id(model.get_parameter(first)))
    return apart


def expert_counts(model: PreTrainedModel) -> set[int]:
    """Return all numbers of routed experts in the config; empty if the model has no experts.

    There may be several, since a config may have several settings.
    """
    settings = nested_items(model.config.to_dict())
    return {n for name, n in settings if type(n) is int and n > 1 and _EXPERTS.search(str(name))}


def experts_per_token(model: nn.Module) -> int | None:
    """Return from the config how many routed experts process each token; None without experts."""
    settings = nested_items(base_of(model).config.get_text_config().to_dict())
    chosen = (n for name, n in settings if type(n) is int and _CHOSEN.fullmatch(str(name)))
    return next(chosen, None)


def active_expert_shares(model: nn.Module) -> dict[str, float]:
    """Return the fraction of each expert parameter that processes a token.

    It serves to count active parameters.

    Returns:
        Parameter name -> experts per token / number of experts. {} if the model has no experts.
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
    """Return first name -> all names, for each parameter. Tied parameters have several names."""
    first: dict[int, str] = {}
    families: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        families.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return families


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return alias -> first name, for each additional name of a tied parameter."""
    return {alias: names[0] for names in tied_families(model).values() for alias in names[1:]}


def modules_outside_text(model: nn.Module) -> list[str]:
    """Return the names of the outermost modules that text does not pass through.

    They are encoders of images and sound, and their projections. A text model has none. See [Note:
    text path].
    """
    base = base_of(model)
    text_parts = _find_text_modules(base)
    if not text_parts:
        return []
    names = {id(module): name for name, module in model.named_modules()}
    inside = {names[id(m)] for part in text_parts for m in part.modules() if id(m) in names}
    around = {outer for name in inside for outer in ["", *enclosing_module_names(name)]}
    outside: list[str] = []
    for name in names.values():
        if (
            name in inside
            or name in around
            or any(n in inside for n in enclosing_module_names(name))
        ):
            continue
        if names[id(base)] not in ("", name, *enclosing_module_names(name)):
            # Skip modules of the adapters.
            continue
        if not any(outer in outside for outer in enclosing_module_names(name)):
            outside.append(name)
    return outside


def parameters_outside_text(model: nn.Module) -> set[str]:
    """Return the names of all parameters that text does not use; empty for a text model.

    Tied parameters have all their names. See [Note: text path].
    """
    text_parts = _find_text_modules(base_of(model))
    text_ids = {id(p) for module in text_parts for p in module.parameters()}
    parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, p in parameters if id(p) not in text_ids} if text_parts else set()


def format_frozen_towers(model: nn.Module) -> str:
    """Format the log line about modules that text does not use; "" if there are none."""
    base = base_of(model)
    towers = {name: base.get_submodule(name) for name in modules_outside_text(base)}
    total = sum(p.numel() for module in towers.values() for p in module.parameters())
    if not total:
        return ""
    return (
        f"frozen     {', '.join(towers)}: {total / 1e6:,.1f} M parameters that text does not reach"
    )


def _find_text_modules(base: nn.Module) -> list[nn.Module]:
    """Return decoder, embedding and heads of a multimodal model; [] for a text model.

    Heads are the one that computes logits and that of a reward model, if the model has them.
    """
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
    ends = (base.get_input_embeddings(), _find_output_head(base), getattr(base, HEAD, None))
    return [decoder, *(end for end in ends if end is not None)]


def _find_output_head(base: PreTrainedModel) -> nn.Module | None:
    """Return the head that computes logits; None if there is none.

    It may belong to a nested model (`language_model.lm_head`).
    """
    inner = (module for module in base.modules() if isinstance(module, PreTrainedModel))
    heads = (module.get_output_embeddings() for module in inner)
    return next((head for head in heads if head is not None), None)


@functools.cache
def children_read_directly(kind: Any) -> frozenset[str]:
    """Return the child modules whose weight a class uses without calling their forward. Cached.

    They are found in the source code of `kind`. An example is `out_proj` in Mamba, which a kernel
    reads. Such layers must keep a plain weight.
    """
    names: set[str] = set()
    for cls in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        # A class that was created at run time has no source.
        with contextlib.suppress(OSError, TypeError):
            source = inspect.getsource(cls)
            names.update(re.findall(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device))", source))
    return frozenset(names)


# An operand of a product, or an argument of a kernel. A slice or a shape is neither: bloom slices
# the weight of `dense` for `slow_but_exact` only.
_OPERAND = re.compile(
    r"self\.(\w+)\.weight(?:\.(?:type|to|float|clamp)\([^()]*\)|\.t\(\)|\.T)*\s*(?:[,)@]|$)",
    re.MULTILINE,
)
_SET_UP = re.compile(r"_*(init|reset|tie)")


@functools.cache
def children_bypassed(kind: Any) -> frozenset[str]:
    """Return the child modules whose weight a class uses in place of their forward. Cached.

    They are found in the source code of the methods of `kind`, except those that initialise or tie
    weights. An adapter on such a module has no effect, or only without the kernel that reads the
    weight. Examples are `dt_proj` in Jamba, and `out_proj` in Bamba.
    """
    names: set[str] = set()
    for cls in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for method in filter(inspect.isfunction, vars(cls).values()):
            if _SET_UP.match(method.__name__):
                continue
            # A method that was created at run time has no source.
            with contextlib.suppress(OSError, TypeError):
                source = re.sub(r"isinstance\([^()]*\)", "", inspect.getsource(method))
                names.update(_OPERAND.findall(source))
    return frozenset(names)
