"""Shrink a config until its model takes a second to try, and try whether it learns from text alone.

A copy has the model's own class, attention implementation, head sizes, position settings and layer
kinds. It has as many of the first layers as it takes for each kind to appear. Widths, vocabulary
and experts are reduced in proportion; if that does not run, the next milder reduction is tried.
Sliding windows and chunks are reduced too, so that they have an effect, unless they are as long as
a row. A copy that processes real text keeps tokens, positions and windows, and is narrower.
"""

import copy
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.errors import one_line
from toolkit.models.classes import build_from_config, multimodal_class
from toolkit.models.layers import decoder_layers
from toolkit.models.modes import forked_rng
from toolkit.models.patterns import replace_numbers

VOCABULARY = 128
SPECIAL = 48  # ids from here up to VOCABULARY are no special tokens of a copy
_WINDOW = 4
_SETTING = bool | str | int | float | None
_MOST_PARAMETERS = 2**28
_Answer = TypeVar("_Answer")

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_VISION_DEPTHS = (*_DEPTHS, "depth", "num_blocks", "encoder_layers", "num_encoder_layers")
# fmt: off
_WINDOWS = (
    "sliding_window", "sliding_window_size", "attention_window_size", "local_attention_window",
    "attention_chunk_size", "window_size", "index_topk",
)
# fmt: on
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# fmt: off
_CHOSEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    "top_k_experts",
)
# fmt: on
_GROUPS = ("n_group", "topk_group", "num_expert_group")
# fmt: off
_INNER = (
    "intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "ffn_hidden_size",
    "moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size",
    "shared_intermediate_size", "intermediate_size_mlp", "dense_intermediate_size",
)
# fmt: on
_ROPES = ("rope_parameters", "rope_scaling")
_TRAINED_LENGTH = "original_max_position_embeddings"
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
# Heads, and widths that are a multiple of them. One factor divides all, so that the ratios stay.
# fmt: off
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
    "mamba_n_heads", "mamba_num_heads",
)
# fmt: on
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
# fmt: off
_WIDTHS = (
    "hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "lru_width", "mamba_d_ssm",
    "attention_hidden_size",
)
# fmt: on

_HEAD_SIZES = ("head_dim", "global_head_dim", "rotary_dim", "mamba_head_dim", "mamba_d_head")
_STATE_GROUPS = ("n_groups", "mamba_n_groups")
_NARROW = 64


def build_meta_model(
    model_class: type[PreTrainedModel], config: PreTrainedConfig
) -> PreTrainedModel:
    """Build a model from a config on the meta device, in fp32."""
    with forked_rng(), torch.device("meta"):
        return build_from_config(model_class, config, torch.float32)


def build_noisy_copy(
    model_class: Any, config: PreTrainedConfig, device: torch.device
) -> PreTrainedModel:
    """Build a model of `config` on `device`, in eval mode, with noise added to its random weights.

    Initial zeros and ones would hide errors such as a leak between samples. The values are the same
    in each call. The dtype is fp32, or bf16 for flash attention.
    """
    # Flash attention runs in half precision only.
    is_flash = "flash" in str(config._attn_implementation)
    dtype = torch.bfloat16 if is_flash else torch.float32
    with forked_rng(device):
        torch.manual_seed(0)
        model = build_from_config(model_class, config, dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.to(device)


def describe_layer_kinds(model: PreTrainedModel, full: PreTrainedModel | None = None) -> list[str]:
    """Describe each decoder layer by a JSON string that is equal for layers of the same kind.

    It contains the layer's modules, their non-numeric attributes, and the layer's entries in lists
    of the config. Numbers are ignored, because widths and layer indices make no new kind.

    Args:
        model: on meta or not.
        full: the full model if `model` is a tiny copy of it. The names of its layers tell which
            modules of the copy are layers. None: `model` is the full model.
    """
    full = model if full is None else full
    names = list(decoder_layers(full))
    parted = [name.rpartition(".") for name in names]
    # The lists that hold the layers, or a layer that is in no list.
    stacks = dict.fromkeys(p[0] if p[2].isdecimal() else "".join(p) for p in parted)
    layers: list[nn.Module] = []
    for name in stacks:
        stack = model.get_submodule(name)
        layers += stack.children() if isinstance(stack, nn.ModuleList) else [stack]
    settings, of_full = (vars(m.config.get_text_config()) for m in (model, full))
    lists = {n: v for n, v in of_full.items() if isinstance(v, list | tuple)}
    listed = [n for n, v in lists.items() if len(v) == len(names)]
    kinds = []
    for i, layer in enumerate(layers):
        entries = [entry for name in listed for entry in settings[name][i : i + 1]]
        # Zero often means "off".
        values = [bool(e) if isinstance(e, int | float) else _reduce_value(e) for e in entries]
        kinds.append(json.dumps([_describe_modules(layer), values], sort_keys=True))
    return kinds


def _describe_modules(layer: nn.Module) -> list[str]:
    """Return a sorted list of JSON strings that describe the modules of a layer."""
    lines = set()
    for name, module in layer.named_modules():
        attributes = {
            k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"
        }
        settings = {k: _reduce_value(v) for k, v in attributes.items() if isinstance(v, _SETTING)}
        lines.add(
            json.dumps([replace_numbers(name), type(module).__name__, settings], sort_keys=True)
        )
    return sorted(lines)


def _reduce_value(value: Any) -> Any:
    """Replace a number by "number" and an object by its type; keep None, bools and strings."""
    if value is None or isinstance(value, bool | str):
        return value
    return "number" if isinstance(value, int | float) else type(value).__name__


def shrunk_configs(
    config: PreTrainedConfig, kinds: list[str], length: int | None, *, real_text: bool = False
) -> Iterator[PreTrainedConfig]:
    """Yield reduced configs for tiny copies of a model, from the smallest to the largest.

    Args:
        config: config of the full model; it is not changed.
        kinds: kind of each of its layers, from `describe_layer_kinds`. Small copies have only as
            many of the first layers as it takes to include all kinds.
        length: length of a row in tokens. Attention windows that are at least this long are kept;
            None: reduce all.
        real_text: keep vocabulary, positions and windows, and at least two layers.
    """
    depth = max(kinds.index(kind) for kind in set(kinds)) + 1
    if real_text:
        depth = min(max(depth, 2), len(kinds))
    narrower = (_set_one_state_group, _shrink_widths)
    tries: list[tuple] = [(depth, _shrink_widths), (depth,), (len(kinds), _shrink_widths)]
    if real_text:
        narrowest = (
            (_shrink_hidden_size, _shrink_head_sizes),
            (_shrink_hidden_size,),
            (_halve_widths_and_heads,),
        )
        tries = [*((depth, *narrower, *more) for more in narrowest), *tries]
    for count, *narrow in dict.fromkeys(tries):
        small = copy.deepcopy(config)
        text = small.get_text_config()
        for section in _nested_configs(small):
            _shrink_section(section, length, real_text)
            section.use_cache = False
            # Sections for images and sound: text does not use them.
            if section is not text and section is not small:
                _change_integers(section, _VISION_DEPTHS, lambda n: min(n, 1))
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == len(kinds):
                setattr(text, name, value[:count])
            elif name in _DEPTHS and value == len(kinds):
                setattr(text, name, count)
        for cut in narrow:
            cut(text)
        yield small


def _nested_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a config and all configs nested in it, at any depth."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _nested_configs(value)


def _shrink_section(section: PreTrainedConfig, length: int | None, real_text: bool) -> None:
    """Reduce experts, inner widths, vocabulary, positions and windows in one config, in place.

    Ids of special tokens are renumbered from 1 to fit the small vocabulary.

    Args:
        section: a config. Configs nested in it are not changed.
        length: see `shrunk_configs`.
        real_text: keep vocabulary, token ids, positions and windows, and reduce
            `hidden_size_per_layer_input`.
    """
    vocabularies = [name for name in vars(section) if "vocab_size" in name]
    sizes = ((_EXPERTS, 4), (_CHOSEN, 2), (_GROUPS, 1), (_INNER, 64))
    for names, most in sizes if real_text else (*sizes, (_POSITIONS, 512)):
        _change_integers(section, names, functools.partial(min, most))
    if real_text:
        _change_integers(section, ("hidden_size_per_layer_input",), functools.partial(min, 16))
        return
    # The trial draws tokens from the complete vocabulary.
    _change_integers(section, vocabularies, lambda _: VOCABULARY)

    def cut(n: int) -> int:
        return n if length is not None and n >= length else min(n, _WINDOW)

    _change_integers(section, _WINDOWS, cut)
    if _shrink_longrope(section, cut):
        _change_integers(section, (_TRAINED_LENGTH,), cut)
    special = [n for n in vars(section) if n.endswith(("token_id", "token_index"))]
    for place, name in enumerate(special):
        value = getattr(section, name)
        small = 1 + place % (SPECIAL - 2)
        if isinstance(value, int | list):
            setattr(section, name, small if isinstance(value, int) else [small])


def _shrink_longrope(section: Any, cut: Callable[[int], int]) -> bool:
    """Apply `cut` to `original_max_position_embeddings` of `longrope` settings, in place.

    At this length, `longrope` positions change their factors.

    Returns:
        True if the config uses `longrope`.
    """
    has_longrope = False
    ropes = [v for k, v in vars(section).items() if k in _ROPES and isinstance(v, dict)]
    # Each kind of layer may have its own settings, nested in those of the section.
    ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)]
    for rope in ropes:
        length = rope.get(_TRAINED_LENGTH)
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "longrope" and isinstance(length, int):
            rope[_TRAINED_LENGTH] = cut(length)
            has_longrope = True
    return has_longrope


def _change_integers(
    section: PreTrainedConfig, names: Iterable[str], cut: Callable[[int], int]
) -> None:
    """Apply `cut` to positive integers in the settings `names`, also in lists, in place."""
    for name in names:
        value = vars(section).get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            setattr(section, name, cut(value))
        elif isinstance(value, list) and value and all(type(v) is int for v in value):
            setattr(section, name, [cut(v) if v > 0 else v for v in value])


def _shrink_widths(section: PreTrainedConfig) -> None:
    """Divide the numbers of heads and all widths by one factor, in place.

    It is the largest common divisor that leaves four heads. Widths above 32 stay at 32 or more.
    """
    heads, widths, keys = (
        [n for name in names if isinstance(n := vars(section).get(name), int) and n > 0]
        for names in (_HEADS, _WIDTHS, _KEY_HEADS)
    )
    keys = [n for n in keys if n > 1]
    if not widths:
        return
    most = max(1, min(heads) // 4 if heads else min(widths) // 64)
    factor = max(
        f
        for f in range(1, most + 1)
        if not any(n % f for n in (*heads, *widths, *keys)) and min(widths) // f >= min(32, *widths)
    )
    _change_integers(section, (*_HEADS, *_WIDTHS), lambda n: n // factor)
    _change_integers(section, _KEY_HEADS, lambda n: n // factor if n > 1 else n)


def _set_one_state_group(section: PreTrainedConfig) -> None:
    """Set Mamba's number of state groups to 1, in place."""
    _change_integers(section, _STATE_GROUPS, lambda _: 1)


def _shrink_hidden_size(section: PreTrainedConfig) -> None:
    """Set all widths of the hidden state to 64, in place, if they are equal and above 64."""
    widths = [n for name in _WIDTHS if isinstance(n := vars(section).get(name), int) and n > 0]
    if len({*widths}) == 1 and widths[0] > _NARROW:
        _change_integers(section, _WIDTHS, lambda _: _NARROW)


def _shrink_head_sizes(section: PreTrainedConfig) -> None:
    """Halve the sizes of heads, in place, until they are below 32."""
    _change_integers(section, _HEAD_SIZES, lambda n: n // 2 ** max(0, (n // 16).bit_length() - 1))


def _halve_widths_and_heads(section: PreTrainedConfig) -> None:
    """Halve widths and head sizes together, in place, as often as possible.

    Widths stay at 64 or more and head sizes at 8 or more.
    """
    while True:
        widths, heads = (
            [n for name in names if isinstance(n := vars(section).get(name), int) and n > 0]
            for names in (_WIDTHS, _HEAD_SIZES)
        )
        if not widths or min(widths) < 2 * _NARROW or any(n % 2 for n in widths):
            return
        if any(n % 4 or n < 16 for n in heads):
            return
        _change_integers(section, (*_WIDTHS, *_HEAD_SIZES), lambda n: n // 2)


_CAUSAL = 1e-3  # a later token may move logits by this share of their spread
_faults: dict[tuple[type, str], str] = {}


def try_tiny_copies(
    config: PreTrainedConfig,
    model_class: Any,
    length: int | None,
    attempt: Callable[[PreTrainedConfig], _Answer],
) -> tuple[_Answer | None, str]:
    """Call `attempt` with the config of a tiny copy, and with larger ones until it succeeds.

    Copies that lack a kind of layer, and copies that are too large to try, are skipped.

    Args:
        config: config of the full model.
        model_class: its class.
        length: length of a row in tokens; see `shrunk_configs`.
        attempt: builds and runs the copy. It may raise any exception.

    Returns:
        (what `attempt` returned, ""), or (None, the reason why no copy runs).
    """
    try:
        full = build_meta_model(model_class, config)
        kinds = describe_layer_kinds(full)
    except Exception as error:  # an architecture may do anything on its way
        return None, f"its layers cannot be looked at: {one_line(error, 300)}"
    why = "it has no decoder layers to look at"
    for small in shrunk_configs(config, kinds, length) if kinds else ():
        try:
            bare = build_meta_model(model_class, small)
            if set(kinds) - set(describe_layer_kinds(bare, full)):
                why = "not all kinds of its layers are in a tiny copy"
            elif (size := sum(p.numel() for p in bare.parameters())) > _MOST_PARAMETERS:
                why = f"its tiny copy would have {size / 1e6:.0f} M parameters, too many to try"
            else:
                return attempt(small), ""
        except Exception as error:  # an architecture may refuse in any way
            why = f"a tiny copy does not run: {one_line(error, 300)}"
    return None, why


def find_text_fault(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """Try if a multimodal class can be trained on text alone, and return the reason if it cannot.

    Runs a tiny copy, which takes a second. The result is cached for this process.

    Returns:
        The reason; "" if it can be trained, or if every copy is too large to try.
    """
    key = (model_class, config.to_json_string(use_diff=False))
    if key not in _faults:
        _faults[key] = _find_fault_in_copies(model_class, config)
    return _faults[key]


def advise_part(config: PreTrainedConfig) -> str:
    """Say what to set in place of a checkpoint that has no forward for text alone.

    It names a part that can be trained on text alone, such as the thinker of qwen3_omni_moe. The
    part is not trained in place, because no class of transformers loads it from the keys of the
    composite checkpoint.
    """
    for name in config.sub_configs:
        part: Any = getattr(config, name, None)
        part_class = None if part is None else multimodal_class(part, None)
        if part_class is not None and not find_text_fault(part_class, part):
            attribute = name.removesuffix("_config")
            return (
                f"Its part `{attribute}` ({part_class.__name__}) has one: save it with "
                f"`model.{attribute}.save_pretrained(FOLDER)`, copy the tokenizer to FOLDER, and "
                "set model.name_or_path to FOLDER"
            )
    return "Give another model.name_or_path"


def _find_fault_in_copies(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """Run tiny copies until one runs without an exception; return its fault.

    If none does, return the last exception as text; see `find_text_fault`.
    """
    fault = ""
    try:
        kinds = describe_layer_kinds(build_meta_model(model_class, config))
    except Exception as error:  # the code of any model
        return one_line(error, 200)
    for small in shrunk_configs(config, kinds, None):
        try:
            size = sum(p.numel() for p in build_meta_model(model_class, small).parameters())
        except Exception:
            # The config does not allow this reduction, so a milder one is tried.
            continue
        if size > _MOST_PARAMETERS:
            continue
        try:
            return _find_fault_in_copy(
                build_noisy_copy(model_class, small, torch.device("cpu")).train()
            )
        except Exception as error:  # the code of any model
            fault = one_line(error, 200)
    return fault


@torch.no_grad()
def _find_fault_in_copy(model: PreTrainedModel) -> str:
    """Return why a copy is not a causal LM on text; "" if it is.

    The reasons are a wrong shape of the logits, or logits that depend on later tokens.
    """
    with forked_rng(), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        ids = torch.randint(SPECIAL, VOCABULARY, (2, 8))
        other = ids.clone()
        other[:, -1] = SPECIAL + (ids[:, -1] - SPECIAL + 17) % (VOCABULARY - SPECIAL)
        answers = []
        for tokens in (ids, other):
            torch.manual_seed(1)  # dropout
            answers.append(model(input_ids=tokens, use_cache=False).logits.float())
    logits, moved = answers
    if logits.shape[:2] != ids.shape:
        return f"returns logits of shape {list(logits.shape)} for tokens {list(ids.shape)}"
    off = float((moved - logits)[:, :-1].abs().max() / logits.std().clamp_min(1e-9))
    return "" if off <= _CAUSAL else "lets a token of a text see later ones"
