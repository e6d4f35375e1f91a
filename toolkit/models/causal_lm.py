"""A Hugging Face causal LM on the meta device: its shapes, its layers, its ties, its assets.

Owns the way from a checkpoint folder or Hub id to a model without bytes. Knows nothing of sharding.
"""

import copy
import inspect
import os
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from toolkit import ranks
from toolkit.config.settings import ModelConfig
from toolkit.errors import ModelError
from toolkit.formats import (
    HFAssets,
    asset_files,
    assets_of,
    check_config,
    conversion_mapping,
    local_folder,
    read_config,
    read_weights,
    source_dtypes,
    weight_files,
)
from toolkit.models.patterns import matching_parameters
from toolkit.models.ties import tied_names


def build_on_meta(cfg: ModelConfig) -> PreTrainedModel:
    """Return the model of `cfg` on the meta device, tied; the folder needs no weights.

    Parameters have the storage dtype `cfg.dtype`, or fp32 where transformers keeps them so.
    `model.hf_assets` holds what an export needs. Costs milliseconds a layer and no memory.

    Raises:
        ModelError: no such folder, no usable config, or not a causal LM.
    """
    folder = local_folder(cfg.name_or_path, cfg.revision)
    config = load_config(cfg)
    model_class = causal_lm_class(config, cfg)
    _check_stands_alone(model_class, cfg)
    config = _own_section(config, model_class)
    dtype = storage_dtype(cfg, config, folder)
    if cfg.attn_implementation is not None:
        config._attn_implementation = cfg.attn_implementation
    pristine = read_config(folder)
    try:
        with torch.device("meta"):
            model = model_class._from_config(copy.deepcopy(config), dtype=dtype)
    except Exception as error:  # config.json comes from outside: it may ask for anything
        raise ModelError(
            f"{cfg.name_or_path}: {model_class.__name__} cannot be built from its config.json: "
            f"{one_line(error)}"
        ) from error
    for section in (model.config, model.config.get_text_config()):
        section.use_cache = False  # of no use in training; the export keeps the pristine config
    if dtype != torch.float32:
        for tensor in _in_fp32(
            model, {**dict(model.named_parameters()), **dict(model.named_buffers())}
        ).values():
            tensor.data = torch.empty_like(tensor, dtype=torch.float32)
    tokenizer_folder = folder
    if cfg.tokenizer_name_or_path is not None:
        tokenizer_folder = _tokenizer_folder(cfg.tokenizer_name_or_path, cfg.revision)
        check_config(tokenizer_folder, required=False)
    resized = cfg.resize_embeddings and _resize(model, pristine, tokenizer_folder, cfg)
    model.tie_weights()
    _freeze(model, cfg.frozen_parameters)
    model.hf_assets = HFAssets(
        config=pristine,
        files=_files(folder, tokenizer_folder),
        source=source_dtypes(folder) if cfg.init == "pretrained" else None,
        tied=tied_names(model),
        conversions=conversion_mapping(model),
        model_class=model_class,
        resized=resized,
        name_or_path=os.path.abspath(folder)
        if os.path.isdir(os.path.expanduser(cfg.name_or_path))
        else cfg.name_or_path,
        revision=cfg.revision,
        folder=folder,
    )
    return model


def _freeze(model: PreTrainedModel, patterns: list[str]) -> None:
    for name in matching_parameters(model, patterns, "model.frozen_parameters"):
        model.get_parameter(name).requires_grad_(False)
    if patterns and not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            f"model.frozen_parameters {patterns} names every parameter of "
            f"{type(model).__name__}: nothing would be trained; leave some out"
        )


def _files(folder: Path, tokenizer_folder: Path) -> dict[str, bytes]:
    """Return what an export carries: the tokenizer's files, and the model's generation config."""
    files = asset_files(tokenizer_folder)
    if tokenizer_folder != folder:
        name = "generation_config.json"
        files.pop(name, None)
        files |= {n: content for n, content in asset_files(folder).items() if n == name}
    return files


@ranks.collective
def prepare(cfg: ModelConfig, sequence_length: int) -> PreTrainedModel:
    """Return the model of `cfg` on meta, after every refusal that needs no data. Collective.

    Raises:
        ModelError, LoadingError: as `check_usable` and `build_on_meta`; or the model sees future
            tokens, or drops layers at random.
    """
    if cfg.trust_remote_code and ranks.rank() == 0:
        print(
            "WARNING: model.trust_remote_code is on: Python code that comes with "
            f"{cfg.name_or_path} runs with your rights",
            flush=True,
        )
    check_usable(cfg, sequence_length)
    model = build_on_meta(cfg)
    check_causal(model)
    check_layerdrop(model.config)
    return model


def load_config(cfg: ModelConfig) -> PreTrainedConfig:
    """Return transformers' config of the model.

    Raises:
        ModelError: it cannot be read, its model type is unknown to the installed transformers, or
            its weights are quantised.
    """
    folder = local_folder(cfg.name_or_path, cfg.revision)
    content = read_config(folder)
    check_config(folder)
    _refuse_quantised(folder, content)
    kind = content.get("model_type")
    if kind is not None and kind not in CONFIG_MAPPING:
        if "auto_map" not in content:
            raise ModelError(
                f"{folder / 'config.json'} is of model_type {kind!r}, which transformers "
                f"{transformers.__version__} does not know; check the file, or install the "
                "transformers that the model asks for"
            )
        if not cfg.trust_remote_code:
            raise ModelError(
                f"{folder / 'config.json'} is of model_type {kind!r}, which needs Python code that "
                "comes with the checkpoint; read that code, then set model.trust_remote_code: "
                "true to run it"
            )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    except Exception as error:  # the file comes from outside: it may hold anything
        raise ModelError(
            f"{folder / 'config.json'} cannot be used: {one_line(error)}; correct it or get "
            "it again"
        ) from error


def _refuse_quantised(folder: Path, content: dict[str, Any]) -> None:
    """Refuse weights that are quantised already: they are neither trained nor quantised again."""
    sections = [content, *(v for v in content.values() if isinstance(v, dict))]
    found: Any = next((s[_QUANTISED] for s in sections if s.get(_QUANTISED)), None)
    if found is None:
        return
    kind = found.get("quant_method", found) if isinstance(found, dict) else found
    raise ModelError(
        f"{folder / 'config.json'} has a {_QUANTISED}: its weights are quantised already "
        f"({kind}), which cannot be trained. Give the checkpoint that they were made from, in "
        "float32 or bfloat16; lora.load_in_4bit quantises that while loading"
    )


_QUANTISED = "quantization_config"


def causal_lm_class(config: PreTrainedConfig, cfg: ModelConfig) -> type[PreTrainedModel]:
    """Return the causal LM class for `config`.

    Raises:
        ModelError: the checkpoint is of another kind (encoder, classifier, translation model, ...).
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    if cfg.trust_remote_code and "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    ):
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        reference = config.auto_map["AutoModelForCausalLM"]
        return get_class_from_dynamic_module(
            reference, str(local_folder(cfg.name_or_path, cfg.revision))
        )
    known: set[str] = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        known.update([names] if isinstance(names, str) else names)
    named = (getattr(config, "architectures", None) or [None])[0]
    if named in known:
        return getattr(transformers, named)
    mapped: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # A base model without a head (LlamaModel) may be trained as a causal LM; another head may not.
    if mapped is None or (named is not None and not named.endswith("Model")):
        raise ModelError(
            f"{cfg.name_or_path} is {named or config.model_type}, not a causal language model; "
            f"expected an architecture such as {_example(mapped)} (config.json: model_type "
            f"{config.model_type}). Give another model.name_or_path"
        )
    return mapped[0] if isinstance(mapped, tuple) else mapped


def _check_stands_alone(model_class: type[PreTrainedModel], cfg: ModelConfig) -> None:
    """Refuse a drafter, which works on another model's keys and values, not on text."""
    if "shared_kv_states" in inspect.signature(model_class.forward).parameters:
        raise ModelError(
            f"{cfg.name_or_path} is {model_class.__name__}, a drafter that works on the keys and "
            "values of the model it assists (shared_kv_states): it cannot be trained on text by "
            "itself. Give the model that it assists as model.name_or_path"
        )


def _own_section(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """Return the part of `config` that the class is built from.

    That is the text section where config.json describes more (images, sound) than the language
    model that is trained; `AutoModelForCausalLM` takes it out in the same way.
    """
    wanted = model_class.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    text = config.get_text_config()
    return text if isinstance(text, wanted) else config


def storage_dtype(cfg: ModelConfig, config: PreTrainedConfig, folder: Path) -> torch.dtype:
    """Return the dtype in which parameters are stored; `auto`: the checkpoint's, or bfloat16."""
    if cfg.dtype != "auto":
        return getattr(torch, cfg.dtype or "float32")
    stored = getattr(config, "dtype", None)
    if stored is None:
        source = source_dtypes(folder) or {}
        return torch.float32 if set(source.values()) == {"F32"} else torch.bfloat16
    dtype = getattr(torch, stored) if isinstance(stored, str) else stored
    if dtype == torch.float16:
        raise ModelError(
            f"{cfg.name_or_path} is stored in float16, which cannot hold master weights (AdamW's "
            "second moment underflows to 0); set model.dtype: float32"
        )
    return dtype


def kept_in_fp32(model: nn.Module) -> list[str]:
    """Return the parameters that transformers keeps in fp32 where the model runs in bfloat16.

    Raises:
        ModelError: the installed transformers does not say.
    """
    if not isinstance(model, PreTrainedModel):
        return []
    return list(_in_fp32(model, dict(model.named_parameters())))


def _in_fp32(model: PreTrainedModel, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return those of `tensors` that transformers keeps in fp32."""
    if not hasattr(model, "_get_dtype_plan"):
        raise ModelError(
            f"transformers {transformers.__version__} has no PreTrainedModel._get_dtype_plan; "
            "install one from 5.17 to 5.23"
        )
    plan = model._get_dtype_plan(torch.bfloat16)
    kept = re.compile("|".join(f"({pattern.replace('*', '.*')})" for pattern in plan) or "$^")
    return {n: t for n, t in tensors.items() if t.is_floating_point() and kept.search(n)}


def check_causal(model: PreTrainedModel) -> None:
    """Refuse a model whose tokens see the next one: BERT and its kin without `is_decoder`.

    Raises:
        ModelError: names the setting.
    """
    if getattr(model.config, "is_decoder", True):
        return
    if any(
        False in (getattr(m, "is_decoder", True), getattr(m, "is_causal", True))
        for m in model.modules()
    ):
        name = plain_name(model)
        raise ModelError(
            f"{name} attends in both directions, since is_decoder is false in its config.json: "
            "each token would see the one that it must predict. Set is_decoder: true there, or "
            "give a causal model as model.name_or_path"
        )


@ranks.collective
def check_usable(cfg: ModelConfig, sequence_length: int) -> None:
    """Refuse what is no causal LM, has too few positions, or lacks its weights. Collective.

    Reads the config and the headers of the weights.

    Raises:
        ModelError, LoadingError: says which.
    """
    config = load_config(cfg)
    causal_lm_class(config, cfg)
    check_positions(config, sequence_length)
    if cfg.init == "pretrained":
        where = local_folder(cfg.name_or_path, cfg.revision)
        read_weights(weight_files(where, cfg.name_or_path, cfg.revision))


def check_positions(config: PreTrainedConfig, sequence_length: int) -> None:
    """Refuse sequences longer than the positions of the model, which rotary models take silently.

    Raises:
        ModelError: names both lengths.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < sequence_length:
        raise ModelError(
            f"data.sequence_length is {sequence_length}, the model has {limit} positions "
            f"(max_position_embeddings); use at most {limit}"
        )


def check_layerdrop(config: PreTrainedConfig) -> None:
    """Refuse LayerDrop: each rank would skip other layers and gather shards of different ones.

    Raises:
        ModelError: names the setting.
    """
    for name in ("layerdrop", "decoder_layerdrop", "encoder_layerdrop"):
        value = getattr(config.get_text_config(), name, 0.0)
        if isinstance(value, float | int) and value > 0:
            raise ModelError(
                f"{name} is {value} in config.json: ranks would skip different layers, whose "
                "shards then mix. Set it to 0.0 there"
            )


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of rows of the input embedding."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def plain_name(model: nn.Module) -> str:
    """Return the name of the model's class as it was before sharding changed it."""
    return (assets_of(model).model_class or type(model)).__name__


def one_line(error: BaseException) -> str:
    """Return the error of a library on one line of at most 400 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 400 else text[:400].rsplit(" ", 1)[0] + " ..."


def _tokenizer_folder(name_or_path: str, revision: str | None) -> Path:
    if os.path.isdir(name_or_path):
        return Path(name_or_path)
    from transformers.utils import cached_file

    found = None
    for name in ("tokenizer_config.json", "tokenizer.json"):
        try:
            found = cached_file(name_or_path, name, revision=revision)
        except OSError:
            continue
        break
    if found is None:
        raise ModelError(
            f"model.tokenizer_name_or_path {name_or_path} is neither a folder nor on the Hub"
        )
    return Path(found).parent


def _resize(
    model: PreTrainedModel, pristine: dict[str, Any], folder: Path, cfg: ModelConfig
) -> bool:
    """Give embedding and head a row per token of the tokenizer; whether that changed them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    multiple = cfg.pad_to_multiple_of or 1
    size = -(-(max(tokenizer.get_vocab().values()) + 1) // multiple) * multiple
    before = vocabulary_size(model)
    if size == before:
        return False
    with torch.device("meta"):
        model.resize_token_embeddings(size, mean_resizing=False)
    # Not the vocabulary of another section, which images or sound have.
    sections = [pristine, *(v for v in pristine.values() if isinstance(v, dict))]
    for section in [s for s in sections if s.get("vocab_size") == before] or [pristine]:
        section["vocab_size"] = size
    return True


def _example(mapped: Any) -> str:
    if mapped is None:
        return "LlamaForCausalLM"
    return (mapped[0] if isinstance(mapped, tuple) else mapped).__name__
