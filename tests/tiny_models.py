"""A tiny model of every causal-LM type that transformers knows, with random values everywhere.

Owns how the defaults of a config class are shrunk: general rules by the name of a setting, then a
table of what some types need beside them. Refuses to know what is done with the models.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 160
TOKENS = (8, 120)
"""Ids to draw samples from: below and above lie special tokens."""
_HIDDEN, _HEADS, _KV_HEADS, _HEAD, _LAYERS, _EXPERTS = 32, 4, 2, 8, 3, 4

# How many layers there are, by the names that configs have for it.
_DEPTHS = [
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_blocks",
    "num_decoder_layers",
    "num_encoder_layers",
    "depth",
]

# Setting -> its tiny value; integers are never made larger than they are.
_RULES: dict[str, Any] = {
    **dict.fromkeys(
        [
            "hidden_size",
            "d_model",
            "n_embd",
            "embedding_dim",
            "emb_dim",
            "lru_width",
            "backbone_hidden_size",
            "attention_hidden_size",
            "word_embed_proj_dim",
            "dim_model_base",
            "hidden_size_global",
            "embedding_size",
            "input_embedding_size",
            "output_embedding_size",
            "projection_dim",
            "n_embed",
            "out_hidden_size",
        ],
        _HIDDEN,
    ),
    **dict.fromkeys(
        [
            "intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "d_ff",
            "d_inner",
            "dff",
            "dim_ff",
            "n_inner",
            "ffn_hidden_size",
            "feed_forward_size",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "mlp_dim",
        ],
        48,
    ),
    **dict.fromkeys(
        [
            "moe_intermediate_size",
            "expert_ffn_hidden_size",
            "shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "shared_intermediate_size",
            "router_hidden_size",
            "moe_shared_expert_intermediate_size",
        ],
        16,
    ),
    **dict.fromkeys(
        [
            "num_attention_heads",
            "n_head",
            "n_heads",
            "attention_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_decoder_attention_heads",
            "num_encoder_attention_heads",
            "linear_num_heads",
            "swa_num_attention_heads",
        ],
        _HEADS,
    ),
    "mamba_n_heads": 8,
    # Of a few heads all often score 0: which of such keys are best hangs on what is beside them.
    "index_n_heads": 32,
    **dict.fromkeys(
        [
            "num_key_value_heads",
            "num_kv_heads",
            "kv_n_heads",
            "swa_num_key_value_heads",
            "linear_num_key_heads",
            "num_query_groups",
        ],
        _KV_HEADS,
    ),
    "linear_num_value_heads": _HEADS,
    **dict.fromkeys(
        [
            "head_dim",
            "dim_head",
            "d_head",
            "kv_channels",
            "swa_head_dim",
            "attention_head_size",
            "global_head_dim",
            "linear_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "index_head_dim",
            "mamba_d_head",
            "v_head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "swa_v_head_dim",
        ],
        _HEAD,
    ),
    **dict.fromkeys(
        ["q_lora_rank", "kv_lora_rank", "o_lora_rank", "hc_lowrank", "adapter_rank"], 16
    ),
    **dict.fromkeys([*_DEPTHS, "num_layers_per_stack"], _LAYERS),
    **dict.fromkeys(
        ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], _EXPERTS
    ),
    **dict.fromkeys(
        [
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_topk",
            "moe_top_k",
            "moe_k",
            "top_k_experts",
        ],
        2,
    ),
    **dict.fromkeys(["n_group", "num_expert_group"], 2),
    "topk_group": 1,
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers"], 1),
    **dict.fromkeys(["vocab_size", "decoder_vocab_size", "unpadded_vocab_size"], VOCABULARY),
    **dict.fromkeys(
        [
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_target_positions",
            "max_seq_len",
            "context_length",
            "max_source_positions",
            "model_max_length",
            "rel_extent",
            "original_max_position_embeddings",
        ],
        64,
    ),
    **dict.fromkeys(
        [
            "state_size",
            "ssm_state_size",
            "mamba_d_state",
            "n_groups",
            "mamba_dt_rank",
            "time_step_rank",
        ],
        4,
    ),
    **dict.fromkeys(["chunk_size", "mamba_chunk_size"], 8),
    **dict.fromkeys(
        ["sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size"],
        8,
    ),
    "index_topk": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 8,
    "projector_hidden_size": 16,
}
_OFF = ("dropout", "pdrop", "dropout_p", "layerdrop", "jitter_noise", "dropout_prob", "_drop")


def _shrunk(section: dict[str, Any]) -> dict[str, Any]:
    """Return tiny values for the settings of `section` that need them; nested sections too."""
    layers = next(
        (
            section[k]
            for k in ("num_hidden_layers", "n_layer", "n_layers", "decoder_layers")
            if section.get(k)
        ),
        0,
    )
    lists = {
        k: v for k, v in section.items() if isinstance(v, list | tuple) and len(v) == layers > 3
    }
    kinds = max((len({json.dumps(x) for x in v}) for v in lists.values()), default=0)
    count = max(_LAYERS, min(layers, _LAYERS + (kinds > 1) + (kinds > 3)))
    changes: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, dict):
            if "model_type" in value:
                changes[name] = {"model_type": value["model_type"], **_shrunk(value)}
        elif isinstance(value, bool):
            continue
        elif name in lists:
            changes[name] = _cut(value, count)
        elif name.endswith(_OFF) and isinstance(value, int | float):
            changes[name] = type(value)(0)
        elif name.endswith(("token_id", "token_index")):
            changes.update(_special(name, value))
        elif isinstance(value, int) and name in _RULES:
            tiny = count if _RULES[name] == _LAYERS and name in _DEPTHS else _RULES[name]
            changes[name] = min(value, tiny)
        elif value is None and name in _EMPTY:
            changes[name] = _RULES[name]
    if section.get("kv_lora_rank"):  # multi-head latent attention has as many key heads
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    return changes


# Settings whose default None means something much larger than tiny.
_EMPTY = ("n_inner", "ffn_dim", "head_dim", "num_key_value_heads")


def _cut(values: list[Any], count: int) -> list[Any]:
    """Return `count` of `values` in their order, in which each kind comes at least once."""
    kept = list(values[:count])
    missing = [v for i, v in enumerate(values) if v not in kept and v not in values[:i]]
    for i, value in enumerate(reversed(missing[: count - 1])):
        kept[-1 - i] = value
    # A kind that the replacement pushed out comes back first.
    lost = [v for v in values[:count] if v not in kept]
    for i, value in enumerate(lost[:1]):
        kept[i] = value
    return kept


def _special(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, int) or isinstance(value, bool):
        return {name: 2} if isinstance(value, list) else {}
    plain = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    others = ("image", "audio", "video", "vision", "boi", "eoi", "boa", "eoa", "decoder_start")
    if name in plain:
        return {name: plain[name]}
    place = next((i for i, o in enumerate(others) if name.startswith(o)), len(others))
    return {name: VOCABULARY - 20 + place + (5 if "end" in name else 0)}


# Type -> settings on top of the rules; a nested section is merged, `...` takes a setting out.
_HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_NOTE = {
    "num_key_value_heads": _HEADS,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
    "swa_qk_rope_head_dim": 8,
}
_INDEXED = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 100,
    "split_ngram_parts": 4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "eos_token_id": 2,
}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            },
            "sliding_attention": None,
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "dots1": {"n_routed_experts": _EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": _NOTE,
        "vision_config": {
            "hidden_size": 32,
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {"hidden_size": 32, "adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": _NOTE,
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        **_SHARED_KV,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "intermediate_size": [48] * 4,
    },
    "gemma4_assistant": {"text_config": {**_SHARED_KV, "num_kv_shared_layers": 4}},
    "gemma4_unified_assistant": {"text_config": _SHARED_KV},
    "gpt_neo": {
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "attention_layers": ...,
    },
    "gptj": {"rotary_dim": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "musicgen": {"decoder": {"num_codebooks": 2}},
    "musicgen_melody": {"decoder": {"num_codebooks": 2}},
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 8, "mamba_head_dim": 8},
    "phi4_multimodal": {"audio_config": {"nemo_conv_channels": 32, "ext_pw_out_channel": 32}},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [4, 4],
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 40,
        "pronunciation_embed_dim": 8,
        "shape_vocab_size": 40,
        "shape_embed_dim": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": _HYBRID,
        "attention_hidden_size": 2 * _HIDDEN,
        "attention_head_dim": 16,
        "num_key_value_heads": _HEADS,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": _HYBRID,
        "num_key_value_heads": _HEADS,
        **dict.fromkeys(
            [
                "attention_hidden_size",
                "kv_channels",
                "num_query_groups",
                "hybrid_layer_ids",
                "mamba_headdim",
                "attention_head_dim",
            ],
            ...,
        ),
    },
}
# What a config class does not accept its own defaults without.
_NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}
# Sizes that neither 2 nor 3 divides, dims shorter than three ranks, fewer experts than ranks.
_ODD = {
    "hidden_size": 35,
    "intermediate_size": 37,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "vocab_size": VOCABULARY + 3,
}
_ODD_GPT = {"n_embd": 35, "n_head": 5, "n_inner": 37, "vocab_size": VOCABULARY + 3}
_FEW_EXPERTS = {
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 2),
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 4,  # grouped products want rows of 16 bytes
    "hidden_size": 28,
}
UNEVEN: dict[str, dict[str, Any]] = {
    "llama": _ODD,
    "gpt2": _ODD_GPT,
    "gemma2": _ODD,
    "bert": {**_ODD, "head_dim": ...},
    "opt": {
        "hidden_size": 35,
        "word_embed_proj_dim": 35,
        "ffn_dim": 37,
        "num_attention_heads": 5,
        "vocab_size": VOCABULARY + 3,
    },
    "phi3": {**_ODD, "hidden_size": 50},
    "qwen2_moe": {**_ODD, **_FEW_EXPERTS, "shared_expert_intermediate_size": 7},
    "qwen3_moe": {**_ODD, **_FEW_EXPERTS},
    "mixtral": {**_ODD, **_FEW_EXPERTS, "intermediate_size": 20},
    "deepseek_v3": {
        **_FEW_EXPERTS,
        "n_group": 1,
        "vocab_size": VOCABULARY + 3,
        "q_lora_rank": 5,
    },
    "hrm_text": {**_ODD, "num_key_value_heads": 5},
    "kimi_linear": {**_FEW_EXPERTS, "linear_num_heads": 5, "vocab_size": VOCABULARY + 3},
    "olmo_hybrid": {"hidden_size": 35, "intermediate_size": 37, "vocab_size": VOCABULARY + 3},
    "falcon_h1": {"hidden_size": 35, "intermediate_size": 37, "vocab_size": VOCABULARY + 3},
    "zamba2": {"intermediate_size": 37, "vocab_size": VOCABULARY + 3},
}


def tiny_config(kind: str, *, uneven: bool = False, **changes: Any) -> PreTrainedConfig:
    """Return the config of a model of `kind` with some ten thousand parameters, dropout off.

    Args:
        kind: a model type out of `TYPES`.
        uneven: sizes that no number of ranks divides, and fewer experts than three ranks.
        changes: settings on top.
    """
    cls = CONFIG_MAPPING[kind]
    settings = _shrunk(cls(**_NEEDED.get(kind, {})).to_dict())
    settings = _merged(settings, _NEEDED.get(kind, {}))
    settings = _merged(settings, _OWN.get(kind, {}))
    if uneven:
        settings = _merged(settings, UNEVEN[kind])
    config = cls(**_merged(settings, changes))
    for section in _sections(config):
        if hasattr(section, "is_decoder"):
            section.is_decoder = True  # BERT and its kin see the future otherwise
        section.use_cache = False
    return config


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for name, value in top.items():
        if isinstance(value, dict) and isinstance(out.get(name), dict):
            out[name] = _merged(out[name], value)
        elif value is ...:
            out.pop(name, None)
        else:
            out[name] = value
    return out


def _sections(config: PreTrainedConfig) -> Iterable[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _sections(value)


def tiny_class(kind: str) -> type[PreTrainedModel]:
    """Return the class that transformers maps `kind` to."""
    import transformers

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def tiny_model(
    kind: str, *, uneven: bool = False, seed: int = 0, perturbed: bool = True, **changes: Any
) -> PreTrainedModel:
    """Return an fp32 model of `kind`, as transformers draws it or with noise on every parameter."""
    torch.manual_seed(seed)
    config = own_section(tiny_config(kind, uneven=uneven, **changes), tiny_class(kind))
    model = tiny_class(kind)._from_config(config, dtype=torch.float32)
    if perturbed:
        perturb(model, seed)
    return model


def own_section(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> PreTrainedConfig:
    """Return the part of `config` that `cls` is built from: all of it, or its text or decoder."""
    wanted = cls.config_class
    return next((c for c in _sections(config) if wanted is None or isinstance(c, wanted)), config)


@torch.no_grad()
def perturb(model: nn.Module, seed: int = 0) -> None:
    """Add noise to every parameter, so that no zeros or ones of an initialisation hide a fault."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_(noise * 0.05)


def save(model: PreTrainedModel, folder: Path, kind: str, *, uneven: bool = False) -> Path:
    """Write `model` as a checkpoint into `folder`; return it.

    A type whose model is built from the text section of its config keeps the whole config, where
    transformers' `AutoModelForCausalLM` takes that section out by itself.
    """
    model.save_pretrained(folder)
    config = tiny_config(kind, uneven=uneven)
    section = type(config).sub_configs.get("text_config")
    if type(config) is not type(model.config) and section is type(model).config_class:
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    return folder


def rows(count: int, length: int = 16, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `labels` [count, length]; each row supervises fewer tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(*TOKENS, (count, length), generator=generator)
    labels = ids.clone()
    for row in range(count):
        labels[row, : 2 + 2 * row] = -100
    return {"input_ids": ids, "labels": labels}


class _Float64ForFloat32(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def wide(argument: Any) -> Any:
            return torch.float64 if argument is torch.float32 else argument

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        named = {name: wide(argument) for name, argument in (kwargs or {}).items()}
        return function(*map(wide, args), **named)


@contextlib.contextmanager
def float64_throughout() -> Iterator[None]:
    """Have a model that is in fp64 compute in fp64 also where its code asks for fp32, as norms,
    linear attention and losses do; a backward in it too.
    """
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64ForFloat32():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
