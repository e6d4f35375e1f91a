"""The part of a model that text runs through, and what lies beside it.

A checkpoint that also takes images or sound names a class of which text needs the decoder, its
embedding and its head. That class is trained, so that an export is again what `config.json` names;
what lies beside the text part is frozen, and never gathered.
"""

from torch import nn
from transformers import PreTrainedModel

from toolkit.models.peft_model import base_of
from toolkit.models.reward import HEAD


def beside_text(model: nn.Module) -> list[str]:
    """Return the outermost modules that text does not run through: towers for images and sound,
    and what leads from them. None of a model that takes nothing but text.
    """
    base = base_of(model)
    used = _text_modules(base)
    if not used:
        return []
    names = {id(module): name for name, module in model.named_modules()}
    inside = {names[id(m)] for part in used for m in part.modules() if id(m) in names}
    around = {outer for name in inside for outer in _outer(name)}
    found: list[str] = []
    for name in names.values():
        if name in inside or name in around or any(n in inside for n in _outer(name)):
            continue
        if names[id(base)] not in ("", name, *_outer(name)):
            continue  # of the adapters
        if not any(outer in found for outer in _outer(name)):
            found.append(name)
    return found


def untaught(model: nn.Module) -> set[str]:
    """Return every name of the parameters that lie beside the text part; see `beside_text`."""
    used = _text_modules(base_of(model))
    kept = {id(p) for module in used for p in module.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, p in named if id(p) not in kept} if used else set()


def beside_line(model: nn.Module) -> str:
    """Return what a run says of what lies beside the text part; "" where nothing does."""
    base = base_of(model)
    found = {name: base.get_submodule(name) for name in beside_text(base)}
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


def _outer(name: str) -> list[str]:
    parts = name.split(".")
    return ["", *(".".join(parts[:i]) for i in range(1, len(parts)))] if name else []
