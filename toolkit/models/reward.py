"""Reward models: the body of a causal LM with a head that answers one number for a sequence.

The class is transformers' own for sequence classification, with one label. Its head answers a
number for each token, of which the model gives out that of the last token that is not
`pad_token_id`: the sequence's reward. Such a checkpoint is read as it is; of one of a causal LM the
body is read, its head left out, and the new head drawn from the run's seed.
"""

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.errors import ModelError
from toolkit.formats import HFAssets, conversion_mapping, loaded_as
from toolkit.models.classes import build, causal_lm_class, classifier_class, multimodal_class
from toolkit.models.peft_model import base_of, trained_module

HEAD = "score"  # what transformers calls the head behind a causal LM's body
_OF_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def reward_head(model: nn.Module) -> nn.Linear | None:
    """Return the head of a reward model, the trained copy where there is one; None: it is none."""
    base = base_of(model)
    if not isinstance(base, PreTrainedModel) or base.get_output_embeddings() is not None:
        return None
    head = trained_module(getattr(base, HEAD, None))
    return head if isinstance(head, nn.Linear) else None


def reward_class(config: PreTrainedConfig, name_or_path: str) -> type[PreTrainedModel]:
    """Return the class of a reward model for `config`, and give that one label. ModelError: there
    is none, or the checkpoint is neither a causal LM nor a reward model.
    """
    found = classifier_class(config)
    if found is None:
        raise ModelError(
            f"{name_or_path} is of model_type {config.model_type}, for which transformers "
            f"{transformers.__version__} has no class of sequence classification: it cannot be a "
            "reward model. Give another model.name_or_path"
        )
    named = next(iter(config.architectures or ()), None)
    known = {getattr(kind, "__name__", None) for kind in (found, _source_class(config))}
    if named not in {None, *known} and not str(named).endswith("Model"):
        raise ModelError(
            f"{name_or_path} is {named}, neither a causal language model nor {found.__name__}; "
            "give another model.name_or_path"
        )
    if named == found.__name__ and config.num_labels != 1:
        raise ModelError(
            f"{name_or_path} is {named} of {config.num_labels} labels, a classifier; a reward "
            "model has one (config.json: id2label). Give another model.name_or_path"
        )
    config.num_labels = 1
    return found


def set_reward_assets(model: PreTrainedModel, config: PreTrainedConfig, assets: HFAssets) -> None:
    """Note in the `assets` of a reward model what becomes of a causal LM's: its config is that of
    the new class, its head is left out. ModelError: the class has another head than one matrix.

    `config`: of the model, as it was built.
    """
    name, head = type(model).__name__, getattr(model, HEAD, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ModelError(
            f"{name} has no linear head `{HEAD}` behind its tokens, and cannot be a reward model; "
            "give another model.name_or_path"
        )
    text = model.config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:  # until the tokenizer is known
        text.pad_token_id = 0
    assets.files.pop("generation_config.json", None)  # it generates nothing
    if assets.config.get("architectures") == [name]:
        return
    assets.config |= {"architectures": [name], **_OF_ONE_LABEL}
    if assets.source is None:
        return
    assets.head_left_out = _of_head(config, assets)
    assets.source = {k: v for k, v in assets.source.items() if k not in assets.head_left_out}
    assets.drawn = [f"{HEAD}.{leaf}" for leaf, _ in head.named_parameters()]


def _source_class(config: PreTrainedConfig) -> Any:
    """Return the class of models that answer with tokens, of which a reward model may be made."""
    named = next(iter(config.architectures or ()), None)
    return multimodal_class(config, named) or causal_lm_class(config)


def _of_head(config: PreTrainedConfig, assets: HFAssets) -> list[str]:
    """Return the tensors of a causal LM's checkpoint that are its head, tied or not."""
    causal_class = _source_class(config)
    if causal_class is None:
        return []
    with torch.device("meta"):
        causal: Any = build(causal_class, config, torch.float32)
    causal.hf_assets, head = assets, causal.get_output_embeddings()
    own = [n for n, module in causal.named_modules() if module is head and head is not None]
    names = {f"{n}.{leaf}" for n in own for leaf, _ in head.named_parameters()}
    found = loaded_as(causal, assets.source or (), conversion_mapping(causal))
    return [key for key, target, _ in found if target in names]


def set_pooling_token(model: PreTrainedModel, assets: HFAssets, pad: int) -> None:
    """Let a reward model give out the number of the last token that is not `pad`."""
    model.config.get_text_config().pad_token_id = pad
    text = assets.config.get("text_config")
    (text if isinstance(text, dict) else assets.config)["pad_token_id"] = pad
