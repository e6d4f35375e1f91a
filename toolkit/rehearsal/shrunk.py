"""The scaled-down model of a rehearsal: every kind of layer of the real one, few and narrow.

Its folder looks like the real one: config.json, tokenizer and code. If the run loads pretrained
weights, the folder holds random ones under the names and in the dtype of the real files. An adapter
that the run continues (`lora.from`) gets a small counterpart.
"""

import contextlib
import json
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from toolkit.adapters.lora import add_adapters
from toolkit.adapters.peft_folder import map_file_keys
from toolkit.adapters.targets import check_target_names
from toolkit.checkpoint.adapter_source import parse_adapter_settings
from toolkit.config.lora import LoraConfig
from toolkit.config.preference import PreferConfig
from toolkit.config.settings import ModelConfig, RunConfig
from toolkit.errors import ModelError, one_line
from toolkit.formats import ADAPTER_FILE, ADAPTER_WEIGHTS, DTYPES, assets_of, local_folder
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.classes import build_from_config, model_class_name, original_class
from toolkit.models.modes import forked_rng
from toolkit.models.peft_model import adapter_config, trained_tensors
from toolkit.models.tiny_copy import describe_layer_kinds, shrunk_configs
from toolkit.objectives.reference_model import reference_settings

_MAX_PARAMETERS = 2**28
_TARGET_SETTINGS = ("target_modules", "target_parameters", "exclude_modules", "modules_to_save")


@dataclass(frozen=True)
class Shrunk:
    """Folder and size of the scaled-down model, and how it differs from the real one."""

    folder: Path
    parameters: int
    layers: tuple[int, int]
    """Decoder layers of the small model and of the real one."""
    kinds: int
    """Kinds of decoder layers."""
    dtype: str
    """The dtype in which this machine can compute its steps: `param_dtype`, or float32."""

    def __str__(self) -> str:
        kinds = f"{self.kinds} kind{'s' * (self.kinds > 1)}"
        layers = f"{self.layers[0]} of {self.layers[1]} layers ({kinds})"
        return f"{layers}, {self.parameters:,} parameters"


def shrink(cfg: ModelConfig, param_dtype: str, folder: Path) -> Shrunk:
    """Write a scaled-down copy of the run's model, with random weights, into `folder`.

    Args:
        cfg: the settings of the run's model, without kernels for GPUs.
        param_dtype: the compute dtype of the run.
        folder: the folder to create.

    Raises:
        ModelError: no scaled-down model can compute a step on this machine.
    """
    cfg = replace(cfg, resize_embeddings=False, frozen_parameters=[])
    real = build_on_meta(cfg)
    kinds = describe_layer_kinds(real)
    reason = "it has no decoder layers"
    small_configs = shrunk_configs(real.config, kinds, None, real_text=True) if kinds else ()
    # A model that is small already is used as it is.
    for config in chain(small_configs, [real.config]):
        try:
            small = _build_small(real, config)
            dtypes = (param_dtype, "float32")
            dtype = next(d for d in dtypes if _can_step(small, getattr(torch, d)))
            _write_model(small, real, cfg, folder)
        except StopIteration:
            reason = "no step can be computed on this machine's CPU"
        except Exception as error:  # the next config is closer to the real one
            reason = one_line(error)
        else:
            count = sum(p.numel() for p in small.parameters())
            layers = (len(describe_layer_kinds(small)), len(kinds))
            return Shrunk(folder, count, layers, len({*kinds}), dtype)
    raise ModelError(f"{model_class_name(real)} cannot be scaled down for a rehearsal: {reason}")


def _build_small(real: PreTrainedModel, config: Any) -> PreTrainedModel:
    """Build a model of the class of `real` from `config`, with random float32 weights on the CPU.

    Raises:
        ModelError: it would have more than 2^28 parameters.
    """
    with torch.device("meta"), forked_rng():
        size = sum(
            p.numel()
            for p in build_from_config(original_class(real), config, torch.float32).parameters()
        )
    if size > _MAX_PARAMETERS:
        raise ModelError(f"scaled down it still has {size:,} parameters")
    with forked_rng():
        torch.manual_seed(0)
        return build_from_config(original_class(real), config, torch.float32)


def _can_step(model: Any, dtype: torch.dtype) -> bool:
    """Return True if this machine can compute a forward and a backward of `model` in `dtype`.

    Afterwards the model is in float32, without gradients. A failure in float32 is raised.
    """
    ids = torch.arange(1, 9)[None]
    try:
        with forked_rng():
            model.to(dtype).train()(input_ids=ids, use_cache=False).logits.sum().backward()
    except (RuntimeError, NotImplementedError):
        if dtype == torch.float32:
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
        model.float()
    return True


def _write_model(small: Any, real: PreTrainedModel, cfg: ModelConfig, folder: Path) -> None:
    """Write the small model's folder with the config, tokenizer and code files of `real`.

    Weights are written only if the real model has weight files. They get its most frequent dtype.
    """
    assets = assets_of(real)
    common = Counter((assets.source or {}).values()).most_common(1)
    stored_dtype = assets.config.get("dtype", assets.config.get("torch_dtype"))
    small.config.use_cache = True
    if common:
        small.to(DTYPES[common[0][0]])
        small.save_pretrained(folder)
        stored_dtype = str(small.dtype).removeprefix("torch.")
    else:
        small.config.architectures = [model_class_name(real)]
        small.config.save_pretrained(folder)
    for file in local_folder(cfg.name_or_path, cfg.revision).glob("*.py"):
        shutil.copyfile(file, folder / file.name)
    for name, content in assets.files.items():
        (folder / name).write_bytes(content)
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    for key in ("auto_map", "architectures"):
        if key in assets.config:
            config[key] = assets.config[key]
    # Of a model for several modalities only the text part is rehearsed.
    if assets.whole is not None:
        config["architectures"] = [model_class_name(real)]
    config.pop("dtype", None)
    config |= {} if stored_dtype is None else {"dtype": stored_dtype}
    file.write_text(json.dumps(config, indent=2), "utf-8")


def write_small_adapter(lora: LoraConfig, model: PreTrainedModel, folder: Path) -> LoraConfig:
    """Write a PEFT folder with random values, like the adapter of `lora.from` but smaller.

    Targets that match nothing in the small model are dropped; see `drop_unmatched_targets`.

    Args:
        lora: the settings of the run's adapter.
        model: the small model, on meta; the adapter is added to it.
        folder: the folder to create.

    Returns:
        The settings with which a run continues the small adapter.
    """
    lora = replace(drop_unmatched_targets(lora, model), from_=str(folder), revision=None)
    adapted = add_adapters(model, lora)
    parameters = trained_tensors(adapted)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.randn(parameters[name].shape, generator=generator) * 0.02
        for key, name in map_file_keys(adapted).items()
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    (folder / ADAPTER_FILE).write_text(json.dumps(adapter_config(adapted), indent=2), "utf-8")
    return replace(lora, **parse_adapter_settings(adapter_config(adapted), str(folder)))


def write_small_reference(
    cfg: RunConfig, small_run: RunConfig, small_model: ModelConfig, folder: Path
) -> RunConfig:
    """Write a small counterpart of the model or adapter in `preference.reference`, if there is one.

    Args:
        cfg: the settings of the run, without kernels for GPUs.
        small_run: the settings of the small run.
        small_model: the settings of its model.
        folder: the rehearsal's folder.

    Returns:
        `small_run` with the small reference.
    """
    if not isinstance(cfg, PreferConfig) or not isinstance(small_run, PreferConfig):
        return small_run
    if cfg.preference.reference is None:
        return small_run
    settings, lora = reference_settings(cfg)
    if lora is not None:
        place = folder / "reference-adapter"
        plain = replace(lora, load_in_4bit=False, quantize_moe_experts=False)
        write_small_adapter(plain, build_on_meta(small_model), place)
    else:
        place = shrink(settings, cfg.sharding.param_dtype, folder / "reference-model").folder
    preference = replace(small_run.preference, reference=str(place))
    return replace(small_run, preference=preference)


def drop_unmatched_targets(lora: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """Return the LoRA settings without those names that match nothing in the small model.

    A setting is not changed if none of its names match.
    """
    for setting in _TARGET_SETTINGS:
        names = getattr(lora, setting)
        if not isinstance(names, list):
            continue
        matched = []
        for name in names:
            target: dict[str, Any] = {setting: [name]}
            single = replace(LoraConfig(r=1, target_modules="all-linear"), **target)
            with contextlib.suppress(ModelError):
                check_target_names(model, single)
                matched.append(name)
        remaining: dict[str, Any] = {setting: matched or names}
        lora = replace(lora, **remaining)
    return lora
