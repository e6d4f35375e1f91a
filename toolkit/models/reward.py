"""Reward models: the body of a causal LM with a head that computes one number for a sequence.

The class is transformers' own for sequence classification, with one label. Its head computes a
number for each token. The model returns the number of the last token that is not `pad_token_id`,
which is the sequence's reward. A checkpoint of such a class is read as it is. Of a causal LM's
checkpoint the body is read, its head is skipped, and the new head is drawn from the run's seed.
"""

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.errors import ModelError
from toolkit.formats import HFAssets, conversion_mapping, map_source_keys
from toolkit.models.classes import (
    build_from_config,
    causal_lm_class,
    classifier_class,
    multimodal_class,
)
from toolkit.models.peft_model import base_of, trained_module

HEAD = "score"  # transformers' name for the head behind a causal LM's body
_OF_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def reward_head(model: nn.Module) -> nn.Linear | None:
    """Return the linear head of a reward model; None for other models.

    If adapters train a copy of the head (`modules_to_save`), the copy is returned.
    """
    base = base_of(model)
    if not isinstance(base, PreTrainedModel) or base.get_output_embeddings() is not None:
        return None
    head = trained_module(getattr(base, HEAD, None))
    return head if isinstance(head, nn.Linear) else None


def reward_class(config: PreTrainedConfig, name_or_path: str) -> type[PreTrainedModel]:
    """Return transformers' class of a reward model for `config`; set `config.num_labels` to 1.

    Raises:
        ModelError: transformers has no such class, or the checkpoint is neither a causal LM nor a
            reward model.
    """
    classifier = classifier_class(config)
    if classifier is None:
        raise ModelError(
            f"{name_or_path} is of model_type {config.model_type}, for which transformers "
            f"{transformers.__version__} has no class of sequence classification: it cannot be a "
            "reward model. Give another model.name_or_path"
        )
    class_name = next(iter(config.architectures or ()), None)
    expected_names = {
        getattr(kind, "__name__", None) for kind in (classifier, _find_causal_lm_class(config))
    }
    if class_name not in {None, *expected_names} and not str(class_name).endswith("Model"):
        raise ModelError(
            f"{name_or_path} is {class_name}, neither a causal language model nor "
            f"{classifier.__name__}; give another model.name_or_path"
        )
    if class_name == classifier.__name__ and config.num_labels != 1:
        raise ModelError(
            f"{name_or_path} is {class_name} of {config.num_labels} labels, a classifier; a reward "
            "model has one (config.json: id2label). Give another model.name_or_path"
        )
    config.num_labels = 1
    return classifier


def set_reward_assets(model: PreTrainedModel, config: PreTrainedConfig, assets: HFAssets) -> None:
    """Change `assets`, in place, from those of the source checkpoint to those of a reward model.

    If the source is a causal LM, the config gets the new class. Its head is not loaded, and the new
    head is listed as initialised at random. Sets the model's pad token to 0 if it has none.

    Args:
        model: the reward model.
        config: config of the source checkpoint.
        assets: assets of the source checkpoint.

    Raises:
        ModelError: the head is not a linear layer with one output.
    """
    name = type(model).__name__
    head = getattr(model, HEAD, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ModelError(
            f"{name} has no linear head `{HEAD}` behind its tokens, and cannot be a reward model; "
            "give another model.name_or_path"
        )
    text = model.config.get_text_config()
    # A placeholder until the tokenizer is known.
    if getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0
    # A reward model generates no text.
    assets.files.pop("generation_config.json", None)
    if assets.config.get("architectures") == [name]:
        return
    assets.config |= {"architectures": [name], **_OF_ONE_LABEL}
    if assets.source is None:
        return
    assets.head_left_out = _causal_lm_head_keys(config, assets)
    assets.source = {k: v for k, v in assets.source.items() if k not in assets.head_left_out}
    assets.drawn = [f"{HEAD}.{leaf}" for leaf, _ in head.named_parameters()]


def _find_causal_lm_class(config: PreTrainedConfig) -> Any:
    """Return the multimodal or causal LM class of the source checkpoint; None if it has none."""
    class_name = next(iter(config.architectures or ()), None)
    return multimodal_class(config, class_name) or causal_lm_class(config)


def _causal_lm_head_keys(config: PreTrainedConfig, assets: HFAssets) -> list[str]:
    """List the tensors of a causal LM's checkpoint that transformers loads into its head."""
    causal_class = _find_causal_lm_class(config)
    if causal_class is None:
        return []
    with torch.device("meta"):
        causal: Any = build_from_config(causal_class, config, torch.float32)
    causal.hf_assets = assets
    head = causal.get_output_embeddings()
    head_names = [n for n, module in causal.named_modules() if module is head and head is not None]
    names = {f"{n}.{leaf}" for n in head_names for leaf, _ in head.named_parameters()}
    targets = map_source_keys(causal, assets.source or (), conversion_mapping(causal))
    return [key for key, target, _ in targets if target in names]


def set_pad_token_id(model: PreTrainedModel, assets: HFAssets, pad: int) -> None:
    """Set the pad token in the model's config and in the config that exports contain.

    A reward model reads its output at the last token that is not this one.
    """
    model.config.get_text_config().pad_token_id = pad
    text = assets.config.get("text_config")
    (text if isinstance(text, dict) else assets.config)["pad_token_id"] = pad
