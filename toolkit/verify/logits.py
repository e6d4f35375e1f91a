"""Compute the logits of exports and checkpoints as their readers would, in one process."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.adapters.peft_folder import attach_adapters, read_adapter_config
from toolkit.checkpoint.sources import Source
from toolkit.errors import CheckpointError
from toolkit.formats import read_tensor
from toolkit.loading import materialise
from toolkit.models import allows_remote_code, model_on_meta, tied_names, vocabulary_size
from toolkit.models.classes import causal_lm_class
from toolkit.models.peft_model import copied_modules
from toolkit.models.reward import HEAD, reward_head
from toolkit.verify.proof import find_expected_tensors

# Largest relative difference of logits of equal weights, because kernels may add in another order.
_NOISE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def compute_logits(model: PreTrainedModel) -> torch.Tensor:
    """Compute the logits of two fixed random prompts: float32 [2, length, vocabulary].

    The length is 16 tokens, or less if the model's maximum is smaller. Sets the model to eval mode.
    """
    text = model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    length = min(16, limit) if isinstance(limit, int) and limit > 0 else 16
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary_size(model), (2, length), generator=generator)
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits.float()


def rounding_tolerance(model: nn.Module, logits: torch.Tensor) -> float:
    """Estimate the largest absolute difference that rounding alone can cause in `logits`.

    It depends on the dtypes of the parameters of `model` and on the largest logit.
    """
    relative = max(_NOISE.get(p.dtype, 0.0) for p in model.parameters())
    return relative * max(1.0, float(logits.abs().max()))


def load_export(
    folder: Path, like: PreTrainedModel, **config: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load an export by `from_pretrained`, without network.

    Args:
        folder: folder of the export.
        like: a model of the same architecture; its class decides which auto class loads the export.
        config: settings of the config to override.

    Returns:
        (model, loading info). The info has transformers' `missing_keys`, `unexpected_keys` and
        `mismatched_keys`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    mapped = causal_lm_class(like.config) is type(like) or allows_remote_code()
    loader: Any = AutoModelForCausalLM if mapped else type(like)
    loader = loader if reward_head(like) is None else AutoModelForSequenceClassification
    options: Any = {"local_files_only": True, "trust_remote_code": allows_remote_code()}
    return loader.from_pretrained(folder, output_loading_info=True, **options, **config)


def load_checkpoint_model(source: Source, like: PreTrainedModel) -> PreTrainedModel:
    """Load a checkpoint into an unsharded model on the CPU, cast to the dtypes of `like`.

    Raises:
        CheckpointError: a tensor is missing.
        ExportError: a tensor is incomplete.
    """
    model = model_on_meta(source.hf)
    dtypes = {n: t.dtype for n, t in like.state_dict().items()}
    for name, parameter in model.named_parameters():
        parameter.data = torch.empty_like(parameter, dtype=dtypes[name])
    materialise(model, "cpu")
    first_name = tied_names(model)
    expected = find_expected_tensors(source, model.state_dict())
    stored = {first_name.get(name, name): tensor.stored for name, tensor in expected.items()}
    for name, tensor in model.state_dict().items():
        if (first := first_name.get(name, name)) not in stored:
            raise CheckpointError(f"{source.folder} lacks {name}")
        tensor.copy_(read_tensor(stored[first]))
    return model


@torch.no_grad()
def copy_unsaved_buffers(model: PreTrainedModel, like: PreTrainedModel) -> list[str]:
    """Copy buffers that are not in the state dict from `like` into `model`, if they differ.

    A model's own code may compute such a buffer in its constructor. transformers runs that on meta,
    so the loaded `model` would have uninitialised memory there.

    Returns:
        Names of the buffers that were copied.
    """
    changed = []
    saved = model.state_dict().keys()
    expected = dict(like.named_buffers())
    for name, buffer in model.named_buffers():
        if name not in saved and not torch.equal(buffer, expected[name].to(buffer.dtype)):
            buffer.copy_(expected[name])
            changed.append(name)
    return changed


def load_base(folder: Path, like: PreTrainedModel) -> PreTrainedModel:
    """Load the base model of an adapter by `from_pretrained`, with the vocabulary of `like`.

    If the vocabulary differs, the embedding is resized, because adapters that were trained with new
    tokens hold the complete embedding and head. If `like` is a reward model, the base is loaded as
    a reward model.
    """
    is_reward = reward_head(like) is not None
    base, _ = load_export(folder, like, **({"num_labels": 1} if is_reward else {}))
    if is_reward:
        pad = like.config.get_text_config().pad_token_id
        base.config.get_text_config().pad_token_id = pad
    rows = vocabulary_size(like)
    if vocabulary_size(base) != rows:
        base.resize_token_embeddings(rows, mean_resizing=False)
    return base


@torch.no_grad()
def copy_head_to_base(model: nn.Module) -> None:
    """Copy the trained head of an adapted reward model over the head of its base, in place.

    A causal LM has no such head, so its base got a random one when it was loaded. Does nothing for
    other models.
    """
    original, trained = copied_modules(model).get(HEAD, (None, None))
    if original is not None and trained is not None and reward_head(model) is not None:
        original.load_state_dict(trained.state_dict())


def load_adapted_model(
    folder: Path, like: PreTrainedModel, source: Source, dtype: torch.dtype | None = None
) -> Any:
    """Load a base model, attach adapters, and copy a checkpoint's adapter tensors into them.

    PEFT's loader is not used, so that its mistakes are found by a comparison.

    Args:
        folder: folder of the base model.
        like: a model of the same architecture, with the vocabulary that was trained.
        source: the checkpoint.
        dtype: dtype to which the adapter is rounded first; None: no rounding.

    Returns:
        The PEFT model.
    """
    model = attach_adapters(load_base(folder, like), read_adapter_config(source.hf))
    tensors = dict(model.state_dict())
    with torch.no_grad():
        for name, expected in find_expected_tensors(source).items():
            tensors[name].copy_(read_tensor(expected.stored).to(dtype))
    copy_head_to_base(model)
    return model
