"""Find the transformers class that a config means, and build a model of it."""

import copy
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from toolkit.formats import assets_of

# Classes that take text with images or sound, by the names of transformers' tables of them.
_CONDITIONAL = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING")
_CLASSIFIERS = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"


def build_from_config(model_class: Any, config: Any, dtype: Any, **options: Any) -> Any:
    """Build a model of `model_class` from a copy of `config`, with random weights.

    Other `options` are passed to transformers' `_from_config`.
    """
    return model_class._from_config(copy.deepcopy(config), dtype=dtype, **options)


def original_class(model: nn.Module) -> Any:
    """Return the class that the model had before FSDP2 replaced it by sharding."""
    return assets_of(model).model_class or type(model)


def model_class_name(model: nn.Module) -> str:
    """Return the name of the model's class before sharding."""
    return original_class(model).__name__


def causal_lm_names() -> set[str]:
    """Return the names of transformers' causal LM classes."""
    return _class_names("MODEL_FOR_CAUSAL_LM_MAPPING")


def causal_lm_class(config: PreTrainedConfig) -> Any:
    """Return transformers' causal LM class for this type of config; None if there is none."""
    return _find_class("MODEL_FOR_CAUSAL_LM_MAPPING", config)


def classifier_names() -> set[str]:
    """Return the names of transformers' sequence classification classes."""
    return _class_names(_CLASSIFIERS)


def classifier_class(config: PreTrainedConfig) -> Any:
    """Return transformers' sequence classification class for this type of config, or None."""
    return _find_class(_CLASSIFIERS, config)


def multimodal_class(
    config: PreTrainedConfig, class_name: str | None
) -> type[PreTrainedModel] | None:
    """Return transformers' class for a checkpoint of text with images or sound.

    Args:
        config: config of the checkpoint.
        class_name: class in the config's `architectures`; None: search by the type of `config`.

    Returns:
        The class; None if the checkpoint is not multimodal or `class_name` does not fit the config.
    """
    for table in _CONDITIONAL:
        if class_name is not None and class_name in _class_names(table):
            candidate = getattr(transformers, class_name)
            return candidate if isinstance(config, candidate.config_class) else None
        if class_name is None and (candidate := _find_class(table, config)) is not None:
            return candidate
    return None


def auto_class_name(class_name: str) -> str:
    """Return the name of the Auto class that loads a checkpoint of class `class_name`.

    It is `AutoModelForCausalLM` unless the class is known as multimodal or as a classifier.
    """
    for table, auto in zip(_CONDITIONAL, ("ImageTextToText", "MultimodalLM"), strict=True):
        if class_name in _class_names(table) - causal_lm_names():
            return f"AutoModelFor{auto}"
    if class_name in classifier_names():
        return "AutoModelForSequenceClassification"
    return "AutoModelForCausalLM"


def reward_loading_code(auto: str, config: dict[str, Any]) -> tuple[str, str]:
    """Return Python code that users need to load the base of a reward model's adapter.

    Args:
        auto: name of the Auto class that loads the base.
        config: content of the config.json with which the base was trained.

    Returns:
        (text to append to the arguments of `from_pretrained`, line of code to run after it). Both
        are "" if `auto` is not that of a classifier.
    """
    if auto != "AutoModelForSequenceClassification":
        return "", ""
    text = config.get("text_config")
    pad = (text if isinstance(text, dict) else config).get("pad_token_id")
    return ", num_labels=1", f"base.config.get_text_config().pad_token_id = {pad!r}"


def _class_names(table: str) -> set[str]:
    """Return all class names in a table of transformers' Auto classes."""
    values = getattr(modeling_auto, f"{table}_NAMES").values()
    return {name for value in values for name in ([value] if isinstance(value, str) else value)}


def _find_class(table: str, config: PreTrainedConfig) -> Any:
    """Return the class for this type of config in one of transformers' Auto tables, or None."""
    classes: Any = getattr(modeling_auto, table).get(type(config), None)
    return classes[0] if isinstance(classes, tuple) else classes
