"""A copy of a model in the small: a config cut down until its model takes a second to try.

[Note: tiny copy] A copy has the model's own class, attention implementation, head sizes, position
settings and layer kinds. It has fewer layers: the first so many, up to where each kind of layer has
appeared; whether that is so is looked up in the built copy. Widths, vocabulary and experts are cut
in proportion; where that makes something that does not run, the next milder cut is to be tried.
Sliding windows and chunks are cut too, so that they bite, but not those that are as long as a row:
they never bite.
"""

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.models.layers import decoder_layers
from toolkit.models.modes import forked_rng

VOCABULARY = 128
SPECIAL = 48
"""Ids from here up to VOCABULARY mean nothing special to a copy."""
_WINDOW = 4

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_VISION_DEPTHS = (*_DEPTHS, "depth", "num_blocks", "encoder_layers", "num_encoder_layers")
_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "local_attention_window",
    "attention_chunk_size",
    "window_size",
    "index_topk",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
_GROUPS = ("n_group", "topk_group", "num_expert_group")
_INNER = (
    "intermediate_size",
    "ffn_dim",
    "decoder_ffn_dim",
    "n_inner",
    "d_ff",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "intermediate_size_mlp",
    "dense_intermediate_size",
)
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
# What is cut by one factor, so that the ratios stay: heads, and widths that are a multiple of them.
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "mamba_n_heads",
    "mamba_num_heads",
)
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
_WIDTHS = (
    "hidden_size",
    "d_model",
    "n_embd",
    "word_embed_proj_dim",
    "lru_width",
    "mamba_d_ssm",
    "attention_hidden_size",
)


def on_meta(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model of a config without bytes; the config stays as it is."""
    with forked_rng(), torch.device("meta"):
        return model_class._from_config(copy.deepcopy(config), dtype=torch.float32)


@dataclass(frozen=True)
class Layers:
    """Where a model keeps its decoder layers, and what its config says of each."""

    stacks: tuple[str, ...]
    """Names of the lists that hold them; of a layer that is in none, its own name."""
    listed: tuple[str, ...]
    """Settings that are lists with an entry a layer."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Layers":
        names = list(decoder_layers(model))
        parted = [name.rpartition(".") for name in names]
        settings = vars(model.config.get_text_config())
        return cls(
            tuple(dict.fromkeys(p[0] if p[2].isdecimal() else "".join(p) for p in parted)),
            tuple(
                name
                for name, value in settings.items()
                if isinstance(value, list | tuple) and len(value) == len(names)
            ),
        )

    def kinds(self, model: PreTrainedModel) -> list[str]:
        """Return what kind each decoder layer is: its modules, their switches, its settings.

        Numbers count only by whether they are there: widths and a layer's own index are no kind.
        """
        settings = vars(model.config.get_text_config())
        named = dict(model.named_modules())
        layers: list[nn.Module] = []
        for name in self.stacks:
            found = named[name]
            layers += found.children() if isinstance(found, nn.ModuleList) else [found]
        return [
            json.dumps(
                [_switches(layer), [_kind(settings[name], i) for name in self.listed]],
                sort_keys=True,
            )
            for i, layer in enumerate(layers)
        ]


def _kind(entries: Any, layer: int) -> Any:
    """Return what of a layer's entry makes a kind; 0 is often an `off`."""
    if layer >= len(entries):
        return None
    entry = entries[layer]
    return bool(entry) if isinstance(entry, int | float) else _plain(entry)


def _switches(layer: nn.Module) -> list[Any]:
    found = set()
    for name, module in layer.named_modules():
        own = {
            key: _plain(value)
            for key, value in vars(module).items()
            if not key.startswith("_")
            and key != "training"
            and (value is None or isinstance(value, bool | str | int | float))
        }
        place = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
        found.add(json.dumps([place, type(module).__name__, own], sort_keys=True))
    return sorted(found)


def _plain(value: Any) -> Any:
    """Return what of a value makes a kind."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return "number"
    return type(value).__name__


def cuts(
    config: PreTrainedConfig, layers: "Layers", kinds: list[str], sequence_length: int | None
) -> Iterator[PreTrainedConfig]:
    """Yield configs of tiny copies, the smallest first.

    Args:
        layers: of the full model, and `kinds` of them, one a layer.
        sequence_length: windows and chunks that are as long as that are not cut; None: all are.
    """
    depth = max(kinds.index(kind) for kind in set(kinds)) + 1
    for count, narrow in dict.fromkeys([(depth, True), (depth, False), (len(kinds), True)]):
        yield _shrunk(config, len(kinds), count, narrow, sequence_length)


def _shrunk(
    config: PreTrainedConfig, depth: int, layers: int, narrow: bool, length: int | None
) -> PreTrainedConfig:
    """Return a copy of `config` with `layers` of its `depth` layers; `narrow`: less wide."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    for section in _sections(small):
        _cut_section(section, length)
        if section is not text and section is not small:  # images and sound, which no text passes
            _each(section, _VISION_DEPTHS, lambda n: min(n, 1))
    _cut_depth(text, depth, layers)
    if narrow:
        _cut_width(text)
    for section in _sections(small):
        section.use_cache = False
    return small


def _sections(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _sections(value)


def _cut_section(section: PreTrainedConfig, length: int | None) -> None:
    _each(section, _POSITIONS, lambda n: min(n, 512))
    _each(section, _WINDOWS, lambda n: n if length is not None and n >= length else min(n, _WINDOW))
    _each(section, _EXPERTS, lambda n: min(n, 4))
    _each(section, _CHOSEN, lambda n: min(n, 2))
    _each(section, _GROUPS, lambda n: min(n, 1))
    _each(section, _INNER, lambda n: min(n, 64))
    _each(
        section,
        [n for n in vars(section) if "vocab_size" in n],
        lambda n: min(n, VOCABULARY),
    )
    special = [n for n in vars(section) if n.endswith(("token_id", "token_index"))]
    for place, name in enumerate(special):
        value = getattr(section, name)
        if isinstance(value, int):
            setattr(section, name, 1 + place % (SPECIAL - 2))
        elif isinstance(value, list):
            setattr(section, name, [1 + place % (SPECIAL - 2)])


def _each(section: PreTrainedConfig, names: Iterable[str], cut: Callable[[int], int]) -> None:
    """Change those of the settings `names` that are whole numbers, or lists of them."""
    for name in names:
        value = vars(section).get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            setattr(section, name, cut(value))
        elif isinstance(value, list) and value and all(type(v) is int for v in value):
            setattr(section, name, [cut(v) if v > 0 else v for v in value])


def _cut_depth(section: PreTrainedConfig, depth: int, layers: int) -> None:
    for name, value in list(vars(section).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(section, name, value[:layers])
        elif name in _DEPTHS and value == depth:
            setattr(section, name, layers)


def _cut_width(section: PreTrainedConfig) -> None:
    """Divide heads and widths by the largest factor that leaves four heads and no fractions."""
    here = vars(section)
    heads = [here[n] for n in _HEADS if isinstance(here.get(n), int) and here[n] > 0]
    widths = [here[n] for n in _WIDTHS if isinstance(here.get(n), int) and here[n] > 0]
    keys = [here[n] for n in _KEY_HEADS if isinstance(here.get(n), int) and here[n] > 1]
    if not widths:
        return
    factor = max(
        f
        for f in range(1, max(1, min(heads) // 4 if heads else min(widths) // 64) + 1)
        if not any(n % f for n in (*heads, *widths, *keys)) and min(widths) // f >= min(32, *widths)
    )
    for names in (_HEADS, _WIDTHS):
        _each(section, names, lambda n: n // factor)
    _each(section, _KEY_HEADS, lambda n: n // factor if n > 1 else n)
