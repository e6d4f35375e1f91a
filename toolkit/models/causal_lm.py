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
    conversion_mapping,
    local_folder,
    read_config,
    read_weights,
    source_dtypes,
    weight_files,
)
from toolkit.models.patterns import matching_parameters, plain_class_name
from toolkit.models.peft_model import base_of


def build_on_meta(cfg: ModelConfig) -> PreTrainedModel:
    """Build the model of `cfg` on the meta device: every shape, no bytes, ties in place.

    Parameters have the storage dtype `cfg.dtype`; those that transformers keeps in fp32 for half
    precision stay fp32. `model.hf_assets` holds what an export needs. Costs milliseconds a layer
    and no memory; the folder needs a config.json but no weights.

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
            f"{_said(error)}"
        ) from error
    for section in (model.config, model.config.get_text_config()):
        section.use_cache = (
            False  # training has no use for it; the export keeps the pristine config
        )
    if dtype != torch.float32:
        for name in kept_in_fp32(model):
            parameter = model.get_parameter(name)
            parameter.data = torch.empty_like(parameter, dtype=torch.float32)
        for name in _matching_fp32(model, dict(model.named_buffers())):
            path, _, leaf = name.rpartition(".")
            buffers = model.get_submodule(path)._buffers
            buffers[leaf] = torch.empty_like(model.get_buffer(name), dtype=torch.float32)
    tokenizer_folder = folder
    if cfg.tokenizer_name_or_path is not None:
        tokenizer_folder = _tokenizer_folder(cfg.tokenizer_name_or_path, cfg.revision)
    resized = False
    if cfg.resize_embeddings:
        resized = _resize(model, pristine, tokenizer_folder, cfg)
    model.tie_weights()
    for name in matching_parameters(model, cfg.frozen_parameters, "model.frozen_parameters"):
        model.get_parameter(name).requires_grad_(False)
    if cfg.frozen_parameters and not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            f"model.frozen_parameters {cfg.frozen_parameters} names every parameter of "
            f"{type(model).__name__}: nothing would be trained; leave some out"
        )
    files = asset_files(tokenizer_folder)
    if tokenizer_folder != folder:
        files.pop("generation_config.json", None)
        own = asset_files(folder)
        if "generation_config.json" in own:
            files["generation_config.json"] = own["generation_config.json"]
    model.hf_assets = HFAssets(
        config=pristine,
        files=files,
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
            f"{folder / 'config.json'} cannot be used: {_said(error)}; correct it or get it again"
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
    said = (getattr(config, "architectures", None) or [None])[0]
    if said in known:
        return getattr(transformers, said)
    mapped: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # A base model without a head (LlamaModel) may be trained as a causal LM; another head may not.
    if mapped is None or (said is not None and not said.endswith("Model")):
        raise ModelError(
            f"{cfg.name_or_path} is {said or config.model_type}, not a causal language model; "
            f"expected an architecture such as {_example(mapped)} (config.json: model_type "
            f"{config.model_type}). Give another model.name_or_path"
        )
    return mapped[0] if isinstance(mapped, tuple) else mapped


def _check_stands_alone(model_class: type[PreTrainedModel], cfg: ModelConfig) -> None:
    """Refuse a drafter, which continues another model's keys and values and reads no text itself.

    Raises:
        ModelError: names the class.
    """
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
    """Return the dtype in which parameters are stored; `auto` is the checkpoint's, else
    bfloat16.
    """
    if cfg.dtype != "auto":
        return getattr(torch, cfg.dtype or "float32")
    said = getattr(config, "dtype", None)
    if said is None:
        source = source_dtypes(folder) or {}
        return torch.float32 if set(source.values()) == {"F32"} else torch.bfloat16
    dtype = getattr(torch, said) if isinstance(said, str) else said
    if dtype == torch.float16:
        raise ModelError(
            f"{cfg.name_or_path} is stored in float16, which cannot hold master weights (AdamW's "
            "second moment underflows to 0); set model.dtype: float32"
        )
    return dtype


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the decoder layers of `model`, name -> module, in the order of definition.

    They are the elements of its stacks (every outermost `ModuleList` that holds more than a
    fiftieth of the parameters) and the modules of the classes in `_no_split_modules`; of nested
    ones the outermost, but the layers rather than a stage that stacks several. Never one that holds
    an embedding or the head, or a parameter tied to something that is no layer. Layers may share
    parameters with each other.
    """
    classes: set[str] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            classes.update(getattr(module, "_no_split_modules", None) or [])
    named = dict(model.named_modules())
    by_class = {n for n, m in named.items() if n and plain_class_name(m) in classes}
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
    apart = _kept_apart(model, named, found)
    own = [n for n in named if n in found and not apart.intersection(map(id, _own(named[n])))]
    own = [n for n in own if next(named[n].parameters(), None) is not None]
    chosen = set(own)
    return {n: named[n] for n in own if not any(outer in chosen for outer in _outer(n))}


def _outer(name: str) -> list[str]:
    """Return the names of the modules around `name`, the root left out."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters())


def _stacked(model: nn.Module) -> set[str]:
    """Return the names of the elements of the stacks that matter, outermost lists only."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0}
    total = sum(p.numel() for p in model.parameters())
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            total -= module.weight.numel()
    found = set()
    for name, stack in lists.items():
        if any(outer in lists for outer in _outer(name)):
            continue
        if sum(p.numel() for p in stack.parameters()) * 50 < total:
            continue
        for i, child in enumerate(stack):
            if not isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Embedding):
                found.add(f"{name}.{i}")
    return found


def _kept_apart(model: nn.Module, named: dict[str, nn.Module], layers: set[str]) -> set[int]:
    """Return the parameters that no layer may hold: of embedding and head, and ties beyond
    layers.
    """
    apart: set[int] = set()
    base = base_of(model)
    if isinstance(base, PreTrainedModel):
        for module in (base.get_input_embeddings(), base.get_output_embeddings()):
            apart.update(map(id, () if module is None else module.parameters()))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for key, aliases in names.items():
        inside = [any(outer in layers for outer in _outer(alias)) for alias in aliases]
        if len(aliases) > 1 and not all(inside):
            apart.add(key)
    return apart


def kept_in_fp32(model: nn.Module) -> list[str]:
    """Return the parameters that transformers keeps in fp32 where the model runs in bfloat16.

    Raises:
        ModelError: the installed transformers does not say.
    """
    if not isinstance(model, PreTrainedModel):
        return []
    return _matching_fp32(model, dict(model.named_parameters()))


def _matching_fp32(model: PreTrainedModel, tensors: dict[str, Any]) -> list[str]:
    """Return which of `tensors` transformers keeps in fp32."""
    if not hasattr(model, "_get_dtype_plan"):
        raise ModelError(
            f"transformers {transformers.__version__} has no PreTrainedModel._get_dtype_plan; "
            "install one from 5.17 to 5.23"
        )
    plan = model._get_dtype_plan(torch.bfloat16)
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in plan]
    names = [n for n, t in tensors.items() if t.is_floating_point()]
    return [n for n in names if any(p.search(n) for p in patterns)]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return alias -> the first name of the same parameter, for every tied parameter."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            aliases[name] = owner
    return aliases


def check_causal(model: PreTrainedModel) -> None:
    """Refuse a decoder that its config turns into an encoder, where each token sees the next one.

    BERT and its kin build a causal LM from any config, and without `is_decoder` mask nothing: the
    loss of next-token prediction then falls to nothing, and so does the use of the model.

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
                "shards "
                "then mix. Set it to 0.0 there"
            )


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of rows of the input embedding."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def plain_name(model: nn.Module) -> str:
    """Return the name of the model's class as it was before sharding changed it."""
    return (assets_of(model).model_class or type(model)).__name__


def _said(error: BaseException) -> str:
    """Return what a library said, on one line that ends where a sentence or the patience does."""
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
    """Give embedding and head one row per token of the tokenizer, in `model` and its
    config.json.
    """
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
