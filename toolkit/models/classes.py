"""Which class of transformers a config means, and a new model of one."""

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


def build(model_class: Any, config: Any, dtype: Any, **options: Any) -> Any:
    """Return a new model; the config stays as it is."""
    return model_class._from_config(copy.deepcopy(config), dtype=dtype, **options)


def original_class(model: nn.Module) -> Any:
    """Return the model's class as it was before sharding changed it."""
    return assets_of(model).model_class or type(model)


def model_class_name(model: nn.Module) -> str:
    """Return the name of that class."""
    return original_class(model).__name__


def causal_lm_names() -> set[str]:
    """Return the names of the causal LM classes of transformers."""
    return _names("MODEL_FOR_CAUSAL_LM_MAPPING")


def causal_lm_class(config: PreTrainedConfig) -> Any:
    """Return the causal LM class that transformers has for a kind of config; None: it has none."""
    return _mapped("MODEL_FOR_CAUSAL_LM_MAPPING", config)


def classifier_names() -> set[str]:
    """Return the names of the sequence classification classes of transformers."""
    return _names(_CLASSIFIERS)


def classifier_class(config: PreTrainedConfig) -> Any:
    """Return the sequence classification class for a kind of config; None: there is none."""
    return _mapped(_CLASSIFIERS, config)


def multimodal_class(config: PreTrainedConfig, named: str | None) -> type[PreTrainedModel] | None:
    """Return the class for text with images or sound that is `named`; of a config that names none
    the one that transformers has for it. None: there is none.
    """
    for table in _CONDITIONAL:
        if named is not None and named in _names(table):
            found = getattr(transformers, named)
            return found if isinstance(config, found.config_class) else None
        if named is None and (found := _mapped(table, config)) is not None:
            return found
    return None


def auto_class_name(named: str) -> str:
    """Return the name of the class of transformers that loads a checkpoint of the class `named`."""
    for table, auto in zip(_CONDITIONAL, ("ImageTextToText", "MultimodalLM"), strict=True):
        if named in _names(table) - causal_lm_names():
            return f"AutoModelFor{auto}"
    if named in classifier_names():
        return "AutoModelForSequenceClassification"
    return "AutoModelForCausalLM"


def reward_loading_code(auto: str, config: dict[str, Any]) -> tuple[str, str]:
    """Return the argument by which a reader of an adapter loads its base as `config` says that it
    was trained on, and a line for afterwards; empty where it is no reward model.
    """
    if auto != "AutoModelForSequenceClassification":
        return "", ""
    text = config.get("text_config")
    pad = (text if isinstance(text, dict) else config).get("pad_token_id")
    return ", num_labels=1", f"base.config.get_text_config().pad_token_id = {pad!r}"


def _names(table: str) -> set[str]:
    values = getattr(modeling_auto, f"{table}_NAMES").values()
    return {name for value in values for name in ([value] if isinstance(value, str) else value)}


def _mapped(table: str, config: PreTrainedConfig) -> Any:
    found: Any = getattr(modeling_auto, table).get(type(config), None)
    return found[0] if isinstance(found, tuple) else found
