"""Tiny checkpoints in the layouts in which today's models are published, random values everywhere.

Owns the table of them: the class that config.json names, how its default config is shrunk, and the
tensors that a published checkpoint holds beside those of the class (layers that predict several
tokens, keys and values that layers share). Names and nesting are those of transformers'
`save_pretrained`, changed by `names` where it writes others than the published
`model.safetensors.index.json` of the model named beside it has.
"""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


@dataclass(frozen=True)
class Layout:
    """One published layout."""

    class_name: str  # that config.json names
    settings: dict[str, Any] = field(default_factory=dict)  # on top of the shrunk defaults
    extra: Callable[[Tensors], Tensors] = lambda tensors: {}
    """What the checkpoint holds that the class does not load, made from what it does."""
    after: str | None = None  # a published model of this layout
    names: tuple[tuple[str, str], ...] = ()  # pattern of a saved name, published spelling
    stored: str | None = None  # "fp8" or "mxfp4": how its matrices are stored


def copied_as(pattern: str, new: str, layer: int = 0) -> Callable[[Tensors], Tensors]:
    """Return what copies the tensors of one layer under the names of another module."""

    def extra(tensors: Tensors) -> Tensors:
        begin = pattern.format(layer)
        return {
            new + name.removeprefix(begin): torch.randn_like(value)
            for name, value in tensors.items()
            if name.startswith(begin)
        }

    return extra


def mtp(prefix: str, layer: int) -> Callable[[Tensors], Tensors]:
    """Return what makes Qwen's `mtp.*` of a decoder layer below `prefix`."""
    inner = copied_as(prefix + "layers.{}.", "mtp.layers.0.", layer)

    def extra(tensors: Tensors) -> Tensors:
        width = tensors[prefix + "norm.weight"].shape[0]
        names = ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight")
        own = {name: torch.randn(width) for name in (*names, "mtp.pre_fc_norm_hidden.weight")}
        return inner(tensors) | own | {"mtp.fc.weight": torch.randn(width, 2 * width)}

    return extra


def next_layer(prefix: str, source: int, number: int) -> Callable[[Tensors], Tensors]:
    """Return what makes DeepSeek's and GLM's layer behind the last, which predicts one more token:
    a layer with `eh_proj`, norms, and an embedding and a head of its own.
    """
    new = f"{prefix}layers.{number}."
    inner = copied_as(prefix + "layers.{}.", new, source)

    def extra(tensors: Tensors) -> Tensors:
        embedding = tensors[prefix + "embed_tokens.weight"]
        width = embedding.shape[1]
        own = {new + name: torch.randn(width) for name in ("enorm.weight", "hnorm.weight")}
        own[new + "shared_head.norm.weight"] = torch.randn(width)
        for name in ("embed_tokens.weight", "shared_head.head.weight"):
            own[new + name] = torch.randn_like(embedding)
        return inner(tensors) | own | {new + "eh_proj.weight": torch.randn(width, 2 * width)}

    return extra


def shared_values(prefix: str, layers: tuple[int, ...]) -> Callable[[Tensors], Tensors]:
    """Return what makes keys and values of layers that take those of another."""

    def extra(tensors: Tensors) -> Tensors:
        return {
            f"{prefix}layers.{n}.self_attn.{leaf}": torch.randn_like(value)
            for n in layers
            for leaf in ("k_proj.weight", "v_proj.weight", "k_norm.weight")
            if (value := tensors.get(f"{prefix}layers.0.self_attn.{leaf}")) is not None
        }

    return extra


_TEXT = "model.language_model."
LAYOUTS: dict[str, Layout] = {
    # ---- Text alone
    "qwen3": Layout("Qwen3ForCausalLM"),
    "llama tied": Layout("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mixtral": Layout("MixtralForCausalLM"),
    "olmo2": Layout("Olmo2ForCausalLM"),
    "gemma3_text": Layout("Gemma3ForCausalLM"),
    "gpt_oss": Layout("GptOssForCausalLM"),
    "minimax_m2": Layout("MiniMaxM2ForCausalLM"),
    "deepseek_v3": Layout(
        "DeepseekV3ForCausalLM",
        {"num_nextn_predict_layers": 1},
        next_layer("model.", 1, 3),
        "deepseek-ai/DeepSeek-V3",
    ),
    "deepseek_v3 fp8": Layout(
        "DeepseekV3ForCausalLM",
        # A number of rows that the blocks do not divide, as 576 of DeepSeek-V3.
        {"num_nextn_predict_layers": 1, "kv_lora_rank": 21},
        next_layer("model.", 1, 3),
        "deepseek-ai/DeepSeek-V3",
        stored="fp8",
    ),
    "qwen3 fp8": Layout("Qwen3ForCausalLM", after="Qwen/Qwen3-8B-FP8", stored="fp8"),
    "gpt_oss mxfp4": Layout(
        "GptOssForCausalLM", {"intermediate_size": 64}, after="openai/gpt-oss-20b", stored="mxfp4"
    ),
    "glm4_moe": Layout(
        "Glm4MoeForCausalLM",
        {"num_nextn_predict_layers": 1},
        next_layer("model.", 1, 3),
        "zai-org/GLM-4.6",
    ),
    "qwen3_next": Layout("Qwen3NextForCausalLM", {}, mtp("model.", 2), "Qwen/Qwen3-Next-80B-A3B"),
    "nemotron_h": Layout(
        "NemotronHForCausalLM", {}, copied_as("backbone.layers.{}.", "mtp.layers.0.", 1)
    ),
    # ---- Text with images or sound
    "qwen3_5": Layout("Qwen3_5ForConditionalGeneration", {}, mtp(_TEXT, 3), "Qwen/Qwen3.5-9B"),
    "qwen3_5 tied": Layout(
        "Qwen3_5ForConditionalGeneration", {"tie_word_embeddings": True}, mtp(_TEXT, 3)
    ),
    "qwen3_5_moe": Layout(
        "Qwen3_5MoeForConditionalGeneration", {}, mtp(_TEXT, 3), "Qwen/Qwen3.5-35B-A3B"
    ),
    "llama4": Layout("Llama4ForConditionalGeneration", after="meta-llama/Llama-4-Scout-17B-16E"),
    "gemma3": Layout("Gemma3ForConditionalGeneration"),
    "gemma4": Layout(
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            }
        },
        shared_values(_TEXT, (2, 3)),
        "google/gemma-4-E2B",
    ),
    "mistral3": Layout("Mistral3ForConditionalGeneration"),
    "mllama": Layout("MllamaForConditionalGeneration"),
    "qwen2_vl": Layout(
        "Qwen2VLForConditionalGeneration", {"text_config": {"rope_parameters": _MROPE}}
    ),
    "qwen2_5_vl": Layout(
        "Qwen2_5_VLForConditionalGeneration", {"text_config": {"rope_parameters": _MROPE}}
    ),
    "qwen3_vl": Layout("Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": Layout("Qwen3VLMoeForConditionalGeneration"),
    "llava": Layout("LlavaForConditionalGeneration"),
    "llava_next": Layout("LlavaNextForConditionalGeneration"),
    "llava_onevision": Layout("LlavaOnevisionForConditionalGeneration"),
    "glm4v": Layout("Glm4vForConditionalGeneration", {"text_config": {"rope_parameters": _MROPE}}),
    "glm4v_moe": Layout(
        "Glm4vMoeForConditionalGeneration",
        {"text_config": {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}}},
    ),
    "internvl": Layout("InternVLForConditionalGeneration"),
    "smolvlm": Layout("SmolVLMForConditionalGeneration"),
    "idefics3": Layout("Idefics3ForConditionalGeneration"),
    "lfm2_vl": Layout("Lfm2VlForConditionalGeneration"),
    "cohere2_vision": Layout("Cohere2VisionForConditionalGeneration"),
    "exaone4_5": Layout("Exaone4_5_ForConditionalGeneration"),
    "ovis2": Layout("Ovis2ForConditionalGeneration"),
    "minimax_m3_vl": Layout("MiniMaxM3SparseForConditionalGeneration"),
    "kimi_k25": Layout(
        "Kimi_K25ForConditionalGeneration",
        after="moonshotai/Kimi-K2.5",
        names=(
            (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
            (r"^vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed."),
            (r"^model\.mm_projector\.", "mm_projector."),
        ),
    ),
    "phi4_multimodal": Layout("Phi4MultimodalForCausalLM"),
    "voxtral": Layout("VoxtralForConditionalGeneration"),
    "qwen2_audio": Layout("Qwen2AudioForConditionalGeneration"),
    "paligemma": Layout("PaliGemmaForConditionalGeneration"),
}


def tiny_layout(name: str, seed: int = 0) -> PreTrainedModel:
    """Return the model of a layout in fp32, with noise on every parameter."""
    layout = LAYOUTS[name]
    cls = getattr(transformers, layout.class_name)
    settings = tiny_models._shrunk(cls.config_class().to_dict())
    settings = tiny_models._merged(settings, tiny_models._OWN.get(name.split()[0], {}))
    config = cls.config_class(**tiny_models._merged(settings, layout.settings))
    torch.manual_seed(seed)
    model = cls._from_config(copy.deepcopy(config), dtype=torch.float32)
    tiny_models.perturb(model, seed)
    return model


def save_layout(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Write the checkpoint of a layout into `folder`; return its tensors."""
    model = tiny_layout(name).to(dtype)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for pattern, published in LAYOUTS[name].names:
        tensors = {re.sub(pattern, published, key): value for key, value in tensors.items()}
    stored = LAYOUTS[name].stored
    torch.manual_seed(7)
    extra = {k: v.to(dtype) for k, v in LAYOUTS[name].extra(tensors).items()}
    assert LAYOUTS[name].extra(tensors).keys().isdisjoint(tensors)
    tensors |= extra
    if stored is not None:
        plain = {n: t.float() for n, t in tensors.items()}
        tensors, plain, settings = _QUANTISE[stored](plain)
        (folder / "plain").mkdir()
        config = json.loads((folder / "config.json").read_text())
        (folder / "plain" / "config.json").write_text(json.dumps(config))
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        save_file(plain, folder / "plain" / "model.safetensors", {"format": "pt"})
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [LAYOUTS[name].class_name]
    return tensors


_BLOCK = 16
_NIBBLES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_fp8(tensors: Tensors) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Return tensors as DeepSeek stores them, what they mean in fp32, and the config's settings."""
    stored, plain = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        matrix = (value.ndim == 2 and name.endswith("_proj.weight")) or "kv_a_proj" in name
        if not matrix or value.ndim != 2:
            stored[name] = value.bfloat16()
            plain[name] = stored[name].float()
            continue
        rows, columns = value.shape
        grid = -(-rows // _BLOCK), -(-columns // _BLOCK)
        scales = torch.rand(grid) * 0.01 + 0.01
        wide = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)[:rows, :columns]
        stored[name] = (value / wide).clamp(-400, 400).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scales
        plain[name] = stored[name].float() * wide
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return stored, plain, settings | {"weight_block_size": [_BLOCK, _BLOCK]}


def in_mxfp4(tensors: Tensors) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Return tensors as gpt-oss stores its experts, what they mean in fp32, and the settings."""
    stored, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, value in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = value.bfloat16()
            plain[name] = stored[name].float()
            continue
        experts, rows, columns = value.shape  # [E, in, out]; stored as [E, out, in / 32, 16]
        codes = torch.randint(0, 16, (experts, columns, rows // 32, 32), dtype=torch.uint8)
        scales = torch.randint(120, 124, (experts, columns, rows // 32), dtype=torch.uint8)
        stored[name + "_blocks"] = codes[..., 0::2] | (codes[..., 1::2] << 4)
        stored[name + "_scales"] = scales
        values = _NIBBLES[codes.long()] * torch.exp2(scales.float() - 127)[..., None]
        plain[name] = values.flatten(2).transpose(1, 2).contiguous()
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    return stored, plain, {"quant_method": "mxfp4", "modules_to_not_convert": kept}


_QUANTISE = {"fp8": in_fp8, "mxfp4": in_mxfp4}


def trained_parts(model: Any) -> set[str]:
    """Return the parameters of a model of transformers that a text trains: those that got a
    gradient.
    """
    return {n for n, p in model.named_parameters() if p.grad is not None}
