"""Architectures of well-known models, as their config.json on the Hub has them, without weights.

Owns the values that shapes, positions and windows follow from, and the sizes that the models were
published with. `folder_of` writes one as a folder that the toolkit takes for a model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


@dataclass(frozen=True)
class Published:
    """One model as it is on the Hub."""

    config: dict[str, Any]
    """Of its config.json what a model without weights needs."""
    parameters: int
    """Tied ones once; the Hub shows as many, where the checkpoint stores tied ones once."""


def _sizes(hidden: int, mlp: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


PUBLISHED = {
    "meta-llama/Llama-3.1-8B": Published(_LLAMA_3 | _sizes(4096, 14336, 32, 32), 8_030_261_248),
    "meta-llama/Llama-3.1-70B": Published(_LLAMA_3 | _sizes(8192, 28672, 80, 64), 70_553_706_496),
    "Qwen/Qwen3-0.6B": Published(
        _QWEN3 | _sizes(1024, 3072, 28, 16) | {"tie_word_embeddings": True}, 596_049_920
    ),
    "Qwen/Qwen3-8B": Published(
        _QWEN3 | _sizes(4096, 12288, 36, 32) | {"tie_word_embeddings": False}, 8_190_735_360
    ),
    "Qwen/Qwen3-30B-A3B": Published(
        _QWEN3
        | _sizes(2048, 6144, 48, 32)
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
        },
        30_532_122_624,
    ),
    "google/gemma-3-1b-pt": Published(
        _sizes(1152, 6912, 26, 4)
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "head_dim": 256,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32768,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        999_885_952,
    ),
    "mistralai/Mistral-7B-v0.3": Published(
        _sizes(4096, 14336, 32, 32)
        | {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "vocab_size": 32768,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        7_248_023_552,
    ),
    "allenai/OLMo-2-0425-1B": Published(
        _sizes(2048, 8192, 16, 16)
        | {
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            "vocab_size": 100352,
            "num_key_value_heads": 16,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-06,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "eos_token_id": 100257,
            "pad_token_id": 100277,
        },
        1_484_916_736,
    ),
    "allenai/OLMo-2-1124-7B": Published(
        _sizes(4096, 11008, 32, 32)
        | {
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            "vocab_size": 100352,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-06,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "eos_token_id": 100257,
            "pad_token_id": 100277,
        },
        7_298_617_344,
    ),
    "mistralai/Mixtral-8x7B-v0.1": Published(
        _sizes(4096, 14336, 32, 32)
        | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "vocab_size": 32000,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        46_702_792_704,
    ),
    # The release of openai/gpt-oss-20b in bfloat16.
    "unsloth/gpt-oss-20b-BF16": Published(
        _sizes(2880, 2880, 24, 64)
        | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "attention_bias": True,
            "rms_norm_eps": 1e-05,
            "rope_theta": 150000,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "tie_word_embeddings": False,
            "eos_token_id": 200002,
            "pad_token_id": 199999,
        },
        20_914_757_184,
    ),
}

# Tuned models of the same architecture.
for _tuned, _base in {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Llama-3.1-70B",
    "google/gemma-3-1b-it": "google/gemma-3-1b-pt",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistralai/Mistral-7B-v0.3",
}.items():
    PUBLISHED[_tuned] = PUBLISHED[_base]


def folder_of(name: str, folder: Path) -> Path:
    """Write config.json of the published model `name` below `folder`; return where it lies."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(PUBLISHED[name].config), encoding="utf-8")
    return target
