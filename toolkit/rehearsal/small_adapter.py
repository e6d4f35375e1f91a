"""The adapter of a rehearsal whose run continues one (`lora.from`): its shape, random values."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from toolkit.adapters.lora import add_adapters
from toolkit.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE, file_keys
from toolkit.adapters.targets import check_named
from toolkit.checkpoint.adapter_source import structure_of
from toolkit.config.lora import LoraConfig
from toolkit.errors import ModelError
from toolkit.models.peft_model import adapter_config, trained_tensors

_NAMES = ("target_modules", "target_parameters", "exclude_modules", "modules_to_save")


def write_small_adapter(lora: LoraConfig, model: PreTrainedModel, folder: Path) -> LoraConfig:
    """Write a PEFT folder with an adapter like that of `lora.from` for the small model of a
    rehearsal, which is on meta and becomes part of it; return the settings that continue it.
    """
    own = replace(fitting_names(lora, model), from_=str(folder), revision=None)
    adapted = add_adapters(model, own)
    live = trained_tensors(adapted)
    chooser = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.randn(live[name].shape, generator=chooser) * 0.02
        for key, name in file_keys(adapted).items()
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(adapter_config(adapted), indent=2), "utf-8")
    return replace(own, **structure_of(adapter_config(adapted), str(folder)))


def fitting_names(lora: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """Return the settings without names of layers that the small model does not have."""
    for setting in _NAMES:
        listed = getattr(lora, setting)
        if not isinstance(listed, list):
            continue
        kept = []
        for name in listed:
            one_name: dict[str, Any] = {setting: [name]}
            alone = replace(LoraConfig(r=1, target_modules="all-linear"), **one_name)
            with contextlib.suppress(ModelError):  # it names nothing in the small model
                check_named(model, alone)
                kept.append(name)
        fitting: dict[str, Any] = {setting: kept or listed}
        lora = replace(lora, **fitting)
    return lora
