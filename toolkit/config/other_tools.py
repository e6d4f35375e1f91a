"""Recognise the tool that a config was written for, by its keys. Imports no torch."""

import re
from collections.abc import Mapping
from typing import Any

from toolkit.errors import ConfigError

OWN = "toolkit"
"""Name of this toolkit's own configs in `recognise_tool`."""
TITLES = {
    "axolotl": "axolotl",
    "llama-factory": "LLaMA-Factory",
    "ms-swift": "ms-swift",
    "open-instruct": "open-instruct",
    "openrlhf": "OpenRLHF",
    "torchtune": "torchtune",
    "trainer": "transformers' Trainer",
    "trl": "TRL",
    "unsloth": "Unsloth",
}
"""Tool -> its name in messages. `toolkit convert-config` converts configs of these tools."""
NAMES = (
    *("axolotl", "llama-factory", "ms-swift", "open-instruct", "open-instruct-dpo"),
    *("openrlhf-sft", "openrlhf-dpo", "openrlhf-rm", "openrlhf-kto", "torchtune", "trainer"),
    *("trl", "trl-dpo", "trl-orpo", "trl-kto", "trl-cpo", "trl-reward", "unsloth"),
)
"""Values of `--from`: a tool, and its command where the keys do not tell the objective."""
_SECTIONS = {"model", "sharding", "data", "optim", "train", "checkpoint", "metrics", "hub"} | {
    "lora",
    "preference",
}
_TOP = {"output_dir", "seed"}
_FEW = 3  # so many keys of another tool are no slip of the pen
# Keys that only one tool has. The first tool with one of its keys wins.
_KEYS: tuple[tuple[str, set[str]], ...] = (
    (
        "llama-factory",
        {"finetuning_type", "stage", "cutoff_len", "pref_loss", "pref_beta", "pref_ftx"}
        | {"freeze_trainable_layers", "neat_packing", "lora_target", "quantization_bit"},
    ),
    (
        "ms-swift",
        {"tuner_type", "train_type", "sft_type", "rlhf_type", "split_dataset_ratio", "quant_bits"},
    ),
    (
        "open-instruct",
        {"use_lora", "use_qlora", "with_tracking", "checkpointing_steps", "dataset_mixer_list"}
        | {"use_slow_tokenizer", "gamma_beta_ratio", "hf_metadata_dataset", "dataset_mix_dir"},
    ),
    (
        "openrlhf",
        {"train.micro_batch_size", "ds.zero_stage", "adam.lr", "data.max_len", "model.beta"}
        | {"model.model_name_or_path", "pretrain", "zero_stage", "packing_samples"}
        | {"micro_train_batch_size", "ckpt.output_dir"},
    ),
    ("axolotl", {"base_model", "micro_batch_size", "sequence_len"}),
    (
        "trl",
        {"use_peft", "dataset_mixture", "max_length", "assistant_only_loss", "packing"}
        | {"model_name_or_path"},
    ),
    (
        "trainer",
        {"per_device_train_batch_size", "num_train_epochs", "output_dir", "learning_rate"}
        | {"gradient_accumulation_steps", "lr_scheduler_type", "max_steps", "bf16", "fp16"},
    ),
)


def recognise_tool(settings: Mapping[str, Any]) -> str | None:
    """Return the tool whose keys a config has.

    Args:
        settings: content of a YAML or JSON file, or the flags of a command.

    Returns:
        `OWN`, a key of `TITLES`, the name of a tool whose configs cannot be converted (see
        `is_convertible`), or None if no tool is recognised.
    """
    keys = {*map(str, settings)}
    if "_component_" in keys or any(
        isinstance(value, Mapping) and "_component_" in value for value in settings.values()
    ):
        return "torchtune"
    model = settings.get("model")
    if (keys and keys <= _SECTIONS | {"output_dir", "seed"}) or (
        isinstance(model, Mapping) and "name_or_path" in model
    ):
        return OWN
    if tool := _unconvertible(settings, keys):
        return tool
    return next((tool for tool, marks in _KEYS if marks & keys), None)


def is_convertible(tool: str | None) -> bool:
    """Return whether `toolkit convert-config` converts configs of the tool."""
    return tool in TITLES


def refuse_foreign_config(settings: Mapping[str, Any], file: object) -> None:
    """Raise ConfigError if a config of another tool is given to a recipe.

    Args:
        settings: content of the file.
        file: its path, for the message.
    """
    tool = recognise_tool(settings)
    foreign = [str(key) for key in settings if key not in _SECTIONS | _TOP]
    if tool in (None, OWN) or len(foreign) < _FEW:
        return
    shown = ", ".join(foreign[:_FEW]) + (", ..." if len(foreign) > _FEW else "")
    if is_convertible(tool):
        raise ConfigError(
            f"{file} is a config of {TITLES[str(tool)]} ({shown}), not of this toolkit; convert "
            f"it: toolkit convert-config {file} --output mine.yaml"
        )
    raise ConfigError(
        f"{file} is a config of {tool} ({shown}), which cannot be converted; `toolkit recipes "
        "--copy finetune` puts configs of this toolkit into the current folder"
    )


def _unconvertible(settings: Mapping[str, Any], keys: set[str]) -> str | None:
    """Return the recognised tool if its configs have a layout that is not converted."""
    sections = {key for key in keys if isinstance(settings.get(key), Mapping)}
    if "actor_rollout_ref" in keys or {"trainer", "data", "model"} <= sections:
        return "verl"
    if "exp_manager" in keys or {"policy", "cluster"} <= sections:
        return "NeMo"
    data = settings.get("data")
    if isinstance(data, Mapping) and "class_path" in data:
        return "LitGPT"
    peft = settings.get("peft_config")
    if {"model_class", "dist_config"} & keys or (isinstance(peft, Mapping) and "name" in peft):
        return "LLaMA-Factory v1"
    return None


ADAPTER_HINT = re.compile(r"lora|peft|adapter|dora\b|pissa|4bit|quant_?bits|quantization_bit")
"""Matches names of settings that ask for adapters or for a quantised base."""
OBJECTIVE_HINT = re.compile(
    r"(^|_)(dpo|kto|orpo|simpo|cpo|ipo|ppo|grpo|rloo|rlhf|pref|reward|rl|kd|distill|teacher)(_|$)"
)
"""Matches names of settings that ask for another objective than supervised training."""
