"""Build a causal LM on the meta device from a checkpoint folder or Hub id, with its assets."""

import contextlib
import copy
import inspect
import math
import os
import re
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from toolkit import formats, ranks
from toolkit.config.preference import RewardModelConfig
from toolkit.config.settings import ModelConfig
from toolkit.errors import ModelError, one_line
from toolkit.formats import nested_items
from toolkit.models.classes import (
    build_from_config,
    causal_lm_class,
    causal_lm_names,
    classifier_names,
    model_class_name,
    multimodal_class,
)
from toolkit.models.experts import set_experts_kernel
from toolkit.models.float8 import use_float8
from toolkit.models.kernels import check_kernels, use_kernels
from toolkit.models.layers import parameters_outside_text, tied_names
from toolkit.models.patterns import matching_parameters
from toolkit.models.reward import reward_class, set_reward_assets
from toolkit.models.stored import (
    QUANTISED,
    dtypes_after_dequantising,
    group_stored_parts,
    make_dequantiser,
    refuse_float16,
)
from toolkit.models.tiny_copy import advise_part, build_meta_model, find_text_fault

_process = {"trusts_code": False}
_GENERATION = "generation_config.json"
_ROUTER = "output_router_logits"


def build_on_meta(cfg: ModelConfig) -> PreTrainedModel:
    """Build the model of `cfg` on the meta device, with tied weights. Reads no weights.

    Parameters get the dtype `cfg.dtype`, except those that transformers keeps in fp32. Frozen ones
    do not require a gradient. `model.hf_assets` has what loading and exports need.

    Raises:
        ModelError: the folder has no usable config, or a setting has no effect on this model.
    """
    if cfg.trust_remote_code:
        allow_remote_code()
    folder = formats.local_folder(cfg.name_or_path, cfg.revision)
    config = _load_config(cfg, folder)
    model_class = _find_model_class(config, cfg, folder)
    class_name = next(iter(config.architectures or ()), None)
    multimodal = None if _is_reward_config(cfg) else multimodal_class(config, class_name)
    if "shared_kv_states" in inspect.signature(model_class.forward).parameters:
        raise ModelError(
            f"{cfg.name_or_path} is {model_class.__name__}, a drafter that works on the keys and "
            "values of another model (shared_kv_states). Set model.name_or_path to that model"
        )
    composite = config
    config_class = model_class.config_class
    text = config.get_text_config()
    if (
        config_class is not None
        and not isinstance(config, config_class)
        and isinstance(text, config_class)
    ):
        # The text part alone, without images and sound, as `AutoModelForCausalLM` builds it.
        config, composite = text, config
    dtype = _choose_storage_dtype(cfg, config, folder)
    reader = make_dequantiser(composite)
    for section in (composite, config):
        # The model is built in full precision.
        vars(section).pop(QUANTISED, None)
    model = _instantiate_on_meta(cfg, model_class, config, dtype)
    set_experts_kernel(model, cfg.experts_implementation)
    for section in (model.config, model.config.get_text_config()):
        # A cache is of no use in training. The export keeps the pristine config.
        section.use_cache = False
        # `training.router` computes the loss of routers, if the run uses it.
        if getattr(section, _ROUTER, False):
            setattr(section, _ROUTER, False)
    if dtype != torch.float32:
        for tensor in find_fp32_tensors(model, buffers=True).values():
            tensor.data = torch.empty_like(tensor, dtype=torch.float32)
    assets, tokenizer_folder = _read_assets(cfg, folder, reader, composite)
    if _is_reward_config(cfg):
        set_reward_assets(model, config, assets)
    for name in parameters_outside_text(model):
        model.get_parameter(name).requires_grad_(False)
    if cfg.resize_embeddings:
        assets.resized = _resize_embeddings(model, assets.config, tokenizer_folder, cfg)
    model.tie_weights()
    for name in matching_parameters(model, cfg.frozen_parameters, "model.frozen_parameters"):
        model.get_parameter(name).requires_grad_(False)
    if cfg.frozen_parameters and not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            f"model.frozen_parameters {cfg.frozen_parameters} names every parameter of "
            f"{type(model).__name__}: nothing would be trained"
        )
    assets.tied = tied_names(model)
    assets.model_class = model_class
    assets.whole = None if multimodal in (None, model_class) else (multimodal, composite)
    assets.conversions = formats.conversion_mapping(model, hf_quantizer=reader)
    model.hf_assets = assets  # type: ignore[assignment]
    return model


def _instantiate_on_meta(
    cfg: ModelConfig,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype,
) -> PreTrainedModel:
    """Instantiate `model_class` on meta, with the attention implementation of `cfg`.

    Raises:
        ModelError: a package is missing, or the class does not accept the config.
    """
    kernel = cfg.attn_implementation
    # On meta nothing can be drawn, and trying it takes half a second. Remote code may use the
    # result of drawing, which would be None, so it is not patched.
    undrawn: Any = contextlib.nullcontext
    if model_class.__module__.startswith("transformers."):
        undrawn = formats.transformers_private("initialization", "no_init_weights")
    try:
        with torch.device("meta"), undrawn():
            options = {} if kernel is None else {"attn_implementation": kernel}
            return build_from_config(model_class, config, dtype, **options)
    except ImportError as error:
        if kernel is None:
            raise ModelError(f"{cfg.name_or_path}: {one_line(error, 400)}") from error
        raise ModelError(
            f"model.attn_implementation {kernel} cannot be used here: {one_line(error, 400)} "
            "Install its package (pip install flash-attn for flash_attention_2), or remove the "
            "setting: PyTorch's own attention is the default"
        ) from error
    except Exception as error:  # anybody may have written config.json, so any error may occur
        raise ModelError(
            f"{cfg.name_or_path}: {model_class.__name__} cannot be built from its config.json: "
            f"{one_line(error, 400)}"
        ) from error


def _read_assets(
    cfg: ModelConfig, folder: Path, reader: Any, config: PreTrainedConfig
) -> tuple[formats.HFAssets, Path]:
    """Read the small files of a model folder, and the names and dtypes of its tensors.

    Args:
        cfg: settings of the model and its tokenizer.
        folder: the model folder.
        reader: quantiser from `make_dequantiser`, or None.
        config: config of the complete checkpoint.

    Returns:
        (assets, folder of the tokenizer).
    """
    pristine = formats.read_config(folder)
    files = formats.asset_files(folder)
    source = formats.source_dtypes(folder) if cfg.init == "pretrained" else None
    parts: dict[str, tuple[str, ...]] = {}
    if reader is not None:
        pristine.pop(QUANTISED, None)
        parts = group_stored_parts(source or (), reader)
        source = source and dtypes_after_dequantising(
            source, parts, getattr(config, "dtype", None) or torch.bfloat16
        )
    tokenizer_folder = folder
    if cfg.tokenizer_name_or_path is not None:
        tokenizer_folder = _tokenizer_folder(cfg, cfg.tokenizer_name_or_path)
        formats.check_parsed_files(tokenizer_folder)
    # Keep the model's generation config, and take all other files from the tokenizer's folder.
    if tokenizer_folder != folder:
        model_files = {n: c for n, c in files.items() if n == _GENERATION or n.endswith(".py")}
        files = formats.asset_files(tokenizer_folder)
        files = {n: content for n, content in files.items() if n != _GENERATION} | model_files
    is_folder = os.path.isdir(os.path.expanduser(cfg.name_or_path))
    assets = formats.HFAssets(
        config=pristine,
        files=files,
        source=source,
        stored=parts,
        reader=reader,
        name_or_path=os.path.abspath(folder) if is_folder else cfg.name_or_path,
        revision=cfg.revision,
        folder=folder,
        float8_setting=cfg.float8,
    )
    return assets, tokenizer_folder


def model_on_meta(
    folder: Path, init: Literal["pretrained", "random"] = "random"
) -> PreTrainedModel:
    """Build the model of a local folder on meta; a reward model if it is a classifier.

    Args:
        folder: a local folder with a config.json.
        init: with "pretrained", the assets also list the tensors of the weight files.
    """
    architectures = formats.read_config(folder).get("architectures") or [None]
    kind = RewardModelConfig if architectures[0] in classifier_names() else ModelConfig
    return build_on_meta(kind(str(folder), init=init, trust_remote_code=allows_remote_code()))


def allow_remote_code() -> None:
    """Allow `model_on_meta` to run Python code from model folders, in this process."""
    _process["trusts_code"] = True


def allows_remote_code() -> bool:
    """Return True if `allow_remote_code` was called in this process."""
    return _process["trusts_code"]


def check_usable(cfg: ModelConfig, sequence_length: int, device: torch.device | str) -> None:
    """Raise an error unless the run can train the model of `cfg`. Collective.

    It must be a causal LM or reward model with enough positions, whose weight files have valid
    headers, and whose kernels run on `device`. Downloads the files of a Hub id that exports copy.

    Raises:
        ModelError: the model cannot be trained.
        LoadingError: its weights are missing or damaged.
        ConfigError: its kernels do not run on `device`.
    """
    ranks.main_first(lambda: formats.download_assets(cfg.name_or_path, cfg.revision))
    if (tokenizer := cfg.tokenizer_name_or_path) not in (None, cfg.name_or_path):
        ranks.main_first(lambda: formats.download_assets(str(tokenizer)))
    _check_usable_on_this_rank(cfg, sequence_length, device)


@ranks.collective
def _check_usable_on_this_rank(
    cfg: ModelConfig, sequence_length: int, device: torch.device | str
) -> None:
    """Run the checks of `check_usable`, which has downloaded the files. Collective."""
    if cfg.kernels == "liger":
        check_kernels(device)
    if cfg.trust_remote_code:
        ranks.log_once(
            "WARNING: model.trust_remote_code is on: Python code that comes with "
            f"{cfg.name_or_path} runs with your rights"
        )
    folder = formats.local_folder(cfg.name_or_path, cfg.revision)
    config = _load_config(cfg, folder)
    _find_model_class(config, cfg, folder)
    if cfg.init == "pretrained" and (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} holds an adapter (adapter_config.json) next to its weights: transformers "
            "would load both, this toolkit would load the weights only. Merge the adapter into "
            "the weights (PEFT's merge_and_unload), or move it away"
        )
    if cfg.attn_implementation == "flex_attention" and torch.device(device).type == "cpu":
        raise ModelError(
            "model.attn_implementation flex_attention has no backward on CPUs; remove the setting "
            "to use sdpa"
        )
    # Rotary models accept longer sequences without an error.
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < sequence_length:
        raise ModelError(
            f"data.sequence_length is {sequence_length}, the model has {limit} positions "
            f"(max_position_embeddings); use at most {limit}"
        )
    if cfg.init == "pretrained":
        formats.read_weights(formats.weight_files(folder, cfg.name_or_path, cfg.revision))


@ranks.collective
def prepare(
    cfg: ModelConfig, device: torch.device | str = "cpu", *, adapted: bool = False
) -> PreTrainedModel:
    """Build the model of `cfg` on meta for training on `device`. Collective.

    Its layers use `cfg.kernels` and `cfg.float8`. If it will be the base of adapters (`adapted`),
    `prepare_adapters` applies `cfg.float8` instead. Call it after `check_usable`.

    Raises:
        ModelError: as in `build_on_meta`; also if tokens attend to later ones (BERT without
            `is_decoder`), if the config drops layers at random, or if `auto` chose float16.
    """
    model = build_on_meta(cfg)
    refuse_float16(model, cfg.name_or_path)
    marks = [(getattr(m, "is_decoder", 1), getattr(m, "is_causal", 1)) for m in model.modules()]
    if not getattr(model.config, "is_decoder", True) and any(False in mark for mark in marks):
        raise ModelError(
            f"{model_class_name(model)} attends in both directions, since is_decoder is false in "
            "its config.json. Set is_decoder: true there, or set model.name_or_path to a causal "
            "model"
        )
    for name in ("layerdrop", "decoder_layerdrop", "encoder_layerdrop"):
        value = getattr(model.config.get_text_config(), name, 0.0)
        if isinstance(value, float | int) and value > 0:
            raise ModelError(
                f"{name} is {value} in config.json: ranks would skip different layers, whose "
                "shards then mix. Set it to 0.0 there"
            )
    if cfg.kernels == "liger":
        use_kernels(model)
    use_float8(model, "none" if adapted else cfg.float8, device)
    return model


def _load_config(cfg: ModelConfig, folder: Path) -> PreTrainedConfig:
    """Read a model's config.json as a transformers config, with checks of its values.

    Raises:
        ModelError: the model type is unknown, a value is impossible, or the weights are quantised
            by a method that transformers cannot read in full precision.
    """
    file = folder / "config.json"
    content = formats.read_config(folder)
    formats.check_parsed_files(folder)
    kind = content.get("model_type")
    has_code = "auto_map" in content
    if kind is not None and kind not in CONFIG_MAPPING and not (has_code and cfg.trust_remote_code):
        advice = f"transformers {transformers.__version__} does not know; install one that does"
        if has_code:
            advice = (
                "needs its own Python code; read that, then set model.trust_remote_code: true "
                "(--trust_remote_code of consolidate, verify and push)"
            )
        raise ModelError(f"{file} is of model_type {kind!r}, which {advice}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    except Exception as error:  # anybody may have written the file, so any error may occur
        raise ModelError(f"{file} cannot be used: {one_line(error, 400)}; correct it") from error
    check_config_values(content, file)
    quantisation = next((v for k, v in formats.nested_items(content) if k == QUANTISED and v), None)
    if quantisation and make_dequantiser(config) is None:
        kind = (
            quantisation.get("quant_method", quantisation)
            if isinstance(quantisation, dict)
            else quantisation
        )
        raise ModelError(
            f"{file} has a {QUANTISED}: its weights are quantised already ({kind}), and "
            "transformers does not read them in full precision. Give the checkpoint that they were "
            "made from, in float32 or bfloat16; lora.load_in_4bit quantises that while loading"
        )
    return config


def _is_reward_config(cfg: ModelConfig) -> bool:
    """Return True if `cfg` is the settings of a reward model."""
    return isinstance(cfg, RewardModelConfig)


def _find_model_class(config: Any, cfg: ModelConfig, folder: Path) -> type[PreTrainedModel]:
    """Find the class to train: a reward model if `cfg` asks for one, else a causal LM.

    A multimodal checkpoint gives its own class, or its text part if that class needs more than
    text.

    Raises:
        ModelError: the checkpoint is an encoder, a classifier, or another kind of model.
    """
    if _is_reward_config(cfg):
        return reward_class(config, cfg.name_or_path)
    custom = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if cfg.trust_remote_code and custom:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(custom, str(folder))
    class_name = (getattr(config, "architectures", None) or [None])[0]
    if class_name in causal_lm_names():
        return getattr(transformers, class_name)
    mapped = causal_lm_class(config)
    fault = ""
    if (conditional := multimodal_class(config, class_name)) is not None:
        if not (fault := find_text_fault(conditional, config)):
            return conditional
        # Train the text part alone. Exports copy the rest of the checkpoint.
        if mapped is not None:
            return mapped
        fault = f", and {conditional.__name__} has no forward for text alone ({fault})"
    # A base model without a head (LlamaModel) may be trained as a causal LM; another head may not.
    if mapped is None or (class_name is not None and not class_name.endswith("Model")):
        raise ModelError(
            f"{cfg.name_or_path} is {class_name or config.model_type}, not a causal language model"
            f"{fault}; expected an architecture such as "
            f"{getattr(mapped, '__name__', 'LlamaForCausalLM')} "
            f"(config.json: model_type {config.model_type}). {advise_part(config)}"
        )
    return mapped


def _choose_storage_dtype(cfg: ModelConfig, config: PreTrainedConfig, folder: Path) -> torch.dtype:
    """Choose the dtype in which parameters are stored.

    For `auto` it is the checkpoint's dtype, or bfloat16 if that is unknown.
    """
    if cfg.dtype != "auto":
        return getattr(torch, cfg.dtype or "float32")
    stored = getattr(config, "dtype", None)
    if stored is None:
        kinds = {*(formats.source_dtypes(folder) or {}).values()}
        if "F16" not in kinds or "BF16" in kinds:
            return torch.float32 if kinds == {"F32"} else torch.bfloat16
        stored = torch.float16
    return getattr(torch, stored) if isinstance(stored, str) else stored


def find_fp32_tensors(
    model: nn.Module, *, buffers: bool = False, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Find the parameters that transformers keeps in fp32 if it loads the model in `dtype`.

    Args:
        model: sharded or not.
        buffers: include buffers.
        dtype: dtype in which the model is loaded.

    Returns:
        Name -> tensor; {} if `model` is not a transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    dtype_plan = formats.transformers_private("modeling_utils", "PreTrainedModel._get_dtype_plan")
    plan = dtype_plan(model, dtype)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors |= model.named_buffers() if buffers else ()
    pattern = re.compile("|".join(f"({pattern.replace('*', '.*')})" for pattern in plan) or "$^")
    return {n: t for n, t in tensors.items() if t.is_floating_point() and pattern.search(n)}


def loaded_dtype(
    model: nn.Module, parameter: str, stored: torch.dtype, requested: torch.dtype
) -> torch.dtype:
    """Return the dtype that transformers' `from_pretrained` gives to a floating parameter.

    Args:
        model: not sharded and without adapters.
        parameter: name of the parameter.
        stored: its dtype in the checkpoint.
        requested: dtype that is passed to `from_pretrained`. The result is the wider one, or fp32
            if transformers keeps this parameter in fp32.
    """
    dtype = torch.promote_types(stored, requested)
    fp32_names = find_fp32_tensors(model, dtype=dtype) if dtype.itemsize < 4 else {}
    return torch.float32 if parameter in fp32_names else dtype


def requests_router_loss(model: PreTrainedModel) -> bool:
    """Return True if the model's config.json enables the auxiliary loss of MoE routers."""
    assets = getattr(model, "hf_assets", None)
    settings = model.config.to_dict() if assets is None else assets.config
    return any(value is True for name, value in formats.nested_items(settings) if name == _ROUTER)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of rows of the input embedding."""
    return cast(torch.Tensor, model.get_input_embeddings().weight).shape[0]


def _tokenizer_folder(cfg: ModelConfig, name: str) -> Path:
    """Return the folder of a tokenizer; a Hub id is downloaded into the cache.

    Raises ModelError if `name` is neither a folder nor on the Hub.
    """
    if (path := Path(name).expanduser()).is_dir():
        return path
    # Another repository has other revisions.
    revision = cfg.revision if name == cfg.name_or_path else None
    for file in ("tokenizer_config.json", "tokenizer.json"):
        with contextlib.suppress(OSError):
            return Path(str(cached_file(name, file, revision=revision))).parent
    raise ModelError(f"model.tokenizer_name_or_path {name} is neither a folder nor on the Hub")


def _resize_embeddings(
    model: Any, pristine: dict[str, Any], folder: Path, cfg: ModelConfig
) -> dict[str, int]:
    """Resize embedding and head of `model` to the tokenizer's number of tokens, in place.

    Args:
        model: on meta.
        pristine: content of the exported config.json, which is updated.
        folder: folder of the tokenizer.
        cfg: `resize_embeddings` gives the multiple to which the size is rounded up.

    Returns:
        Name of each changed parameter -> previous number of rows; {} if the size is right.

    Raises:
        ModelError: transformers cannot resize this model.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    multiple = int(cfg.resize_embeddings)  # true is 1
    size = -(-(max(tokenizer.get_vocab().values()) + 1) // multiple) * multiple
    if size == (before := vocabulary_size(model)):
        return {}
    settings = (text_config := model.config.get_text_config()).to_dict()
    # Inkling counts the rows of its head, or its logits, apart from those of its embedding.
    head_rows = settings.get("unpadded_vocab_size")
    shapes = {n: p.shape for n, p in model.named_parameters(remove_duplicate=False)}
    ties = tied_names(model)
    fault = ""
    try:
        if head_rows not in (None, before):
            raise ValueError(f"unpadded_vocab_size is {head_rows}, expected vocab_size {before}")
        with torch.device("meta"):
            model.resize_token_embeddings(size, mean_resizing=False)
            model.tie_weights()
    except Exception as error:  # the code of any model
        fault = one_line(error, 200)
    if head_rows is not None:
        text_config.unpadded_vocab_size = size
    if not fault and (rows := vocabulary_size(model)) != size:
        fault = f"its embedding still has {rows} rows, expected {size}"
    fault = fault or _find_unstored_size(model)
    if fault:
        raise ModelError(
            f"model.resize_embeddings: {type(model).__name__} cannot get another number of tokens: "
            f"{fault}. Remove the setting, and use a tokenizer of at most "
            f"{before} tokens (model.tokenizer_name_or_path)"
        )
    # A setter may store parameters once that the source keeps separate (reformer's biases).
    for alias in tied_names(model).keys() - ties.keys():
        path, _, leaf = alias.rpartition(".")
        apart = nn.Parameter(torch.empty_like(model.get_parameter(alias)))
        setattr(model.get_submodule(path), leaf, apart)
    now = text_config.to_dict().items()
    changed = {k: v for k, v in now if type(v) is int and v != settings.get(k)}
    # Sections for images or sound may have another vocabulary, which stays.
    sections = [pristine, *(v for v in pristine.values() if isinstance(v, dict))]
    for section in [s for s in sections if s.get("vocab_size") == before] or [pristine]:
        section.update(changed)
    parameters = model.named_parameters(remove_duplicate=False)
    return {n: shapes[n][0] for n, p in parameters if n in shapes and p.shape != shapes[n]}


def _find_unstored_size(model: PreTrainedModel) -> str:
    """Return why a resized model does not match its config; "" if all shapes match."""
    rebuilt = build_meta_model(type(model), copy.deepcopy(model.config))
    shapes = {n: tuple(p.shape) for n, p in rebuilt.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = tuple(parameter.shape)
        if shapes.get(name, shape) != shape:
            return f"{name} has shape {shape}, but its resized config describes {shapes[name]}"
    return ""


_PROBABILITY = re.compile(r"dropout(_prob|_rate|_p)?$|_pdrop$|layer_?drop$|drop_path_rate$")
_POSITIVE = re.compile(r"^rope_theta$")
_EPSILON = re.compile(r"norm_eps(ilon)?$")
_SIZES = re.compile(r"^(num_\w*(heads|layers|experts)|hidden_size|head_dim|vocab_size)$")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_config_values(content: dict[str, Any], file: Path) -> None:
    """Raise ModelError if config.json has a number that no model can use, such as a dropout of 2.

    Args:
        content: content of the config.json.
        file: its path, for the message.
    """
    for name, value in nested_items(content):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        expected = ""
        if _PROBABILITY.search(name) and not 0 <= value <= 1:
            expected = "a probability from 0 to 1"
        elif _POSITIVE.search(name) and not (value > 0 and math.isfinite(value)):
            expected = "a number above 0"
        elif _EPSILON.search(name) and not (value >= 0 and math.isfinite(value)):
            expected = "0 or more"
        elif _SIZES.search(name) and value < 0:
            expected = "no negative number"
        if expected:
            raise ModelError(f"{file}: {name} is {value}, expected {expected}. Correct it there")
    for section in (content, *(v for v in content.values() if isinstance(v, dict))):
        chosen = [section[name] for name in _CHOSEN if isinstance(section.get(name), int)]
        experts = [section[name] for name in _EXPERTS if isinstance(section.get(name), int)]
        if chosen and experts and max(chosen) > max(experts) > 0:
            raise ModelError(
                f"{file}: {max(chosen)} experts are chosen for a token, of {max(experts)}. Correct "
                "one of the two there"
            )
