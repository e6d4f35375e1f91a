"""The logits of exports and checkpoints, computed as their readers would, in one process."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.adapters.peft_folder import attach_adapters, read_adapter_config
from toolkit.checkpoint.sources import Source
from toolkit.errors import CheckpointError
from toolkit.formats import whole
from toolkit.loading import materialise
from toolkit.models import allows_remote_code, model_on_meta, tied_names, vocabulary_size
from toolkit.models.classes import causal_lm_class
from toolkit.models.peft_model import copied_modules
from toolkit.models.reward import HEAD, reward_head
from toolkit.verify.proof import expected_of

# How far logits of equal weights may be apart: kernels may add in another order.
_NOISE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits of a few fixed tokens [2, length, vocabulary], in float32."""
    text = model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    length = min(16, limit) if isinstance(limit, int) and limit > 0 else 16
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary_size(model), (2, length), generator=generator)
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits.float()


def noise(model: nn.Module, logits: torch.Tensor) -> float:
    """Return how far the logits of equal weights may be apart."""
    share = max(_NOISE.get(p.dtype, 0.0) for p in model.parameters())
    return share * max(1.0, float(logits.abs().max()))


def load_export(
    folder: Path, like: PreTrainedModel, **config: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load an export as its readers do; return it and transformers' account of the keys. `config`:
    what they say of its config.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    mapped = causal_lm_class(like.config) is type(like) or allows_remote_code()
    loader: Any = AutoModelForCausalLM if mapped else type(like)
    loader = loader if reward_head(like) is None else AutoModelForSequenceClassification
    here: Any = {"local_files_only": True, "trust_remote_code": allows_remote_code()}
    return loader.from_pretrained(folder, output_loading_info=True, **here, **config)


def load_checkpoint(source: Source, like: PreTrainedModel) -> PreTrainedModel:
    """Return the model of a checkpoint with its weights, cast to the dtypes of `like`."""
    model, dtypes = model_on_meta(source.hf), {n: t.dtype for n, t in like.state_dict().items()}
    for name, parameter in model.named_parameters():
        parameter.data = torch.empty_like(parameter, dtype=dtypes[name])
    materialise(model, "cpu")
    first_name = tied_names(model)
    found = expected_of(source, model.state_dict())
    stored = {first_name.get(name, name): expected.stored for name, expected in found.items()}
    for name, tensor in model.state_dict().items():
        if (first := first_name.get(name, name)) not in stored:
            raise CheckpointError(f"{source.folder} lacks {name}")
        tensor.copy_(whole(stored[first]))
    return model


@torch.no_grad()
def set_buffers(model: PreTrainedModel, like: PreTrainedModel) -> list[str]:
    """Give buffers of `model` that no file holds the values of `like`; return which had others.

    Code that comes with a model may compute them where transformers builds it on meta: what it then
    loads is memory as it comes.
    """
    changed, saved, theirs = [], model.state_dict().keys(), dict(like.named_buffers())
    for name, buffer in model.named_buffers():
        if name not in saved and not torch.equal(buffer, theirs[name].to(buffer.dtype)):
            buffer.copy_(theirs[name])
            changed.append(name)
    return changed


def load_base(folder: Path, like: PreTrainedModel) -> PreTrainedModel:
    """Return the base in `folder` as a reader loads it, with as many rows as `like` has: adapters
    that were trained with new tokens hold the whole of embedding and head. Under those of a reward
    model a causal LM becomes one.
    """
    reward = reward_head(like) is not None
    base, _ = load_export(folder, like, **({"num_labels": 1} if reward else {}))
    if reward:
        pad = like.config.get_text_config().pad_token_id
        base.config.get_text_config().pad_token_id = pad
    rows = vocabulary_size(like)
    if vocabulary_size(base) != rows:
        base.resize_token_embeddings(rows, mean_resizing=False)
    return base


@torch.no_grad()
def share_head(model: nn.Module) -> None:
    """Give the base under the adapters of a reward model their head: a causal LM has none, and was
    given one at random.
    """
    original, trained = copied_modules(model).get(HEAD, (None, None))
    if original is not None and trained is not None and reward_head(model) is not None:
        original.load_state_dict(trained.state_dict())


def load_adapted(
    folder: Path, like: PreTrainedModel, source: Source, dtype: torch.dtype | None = None
) -> Any:
    """Return `load_base` with the adapter of a checkpoint, put in by name, without PEFT's way;
    rounded to the `dtype` that its export was asked for.
    """
    model = attach_adapters(load_base(folder, like), read_adapter_config(source.hf))
    tensors = dict(model.state_dict())
    with torch.no_grad():
        for name, expected in expected_of(source).items():
            tensors[name].copy_(whole(expected.stored).to(dtype))
    share_head(model)
    return model
