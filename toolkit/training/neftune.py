"""NEFTune: noise on the input embeddings while a model trains (Jain et al. 2023, arXiv:2310.05914).

A hook on the output of the embedding adds the noise. It changes nothing that a checkpoint holds.

[Note: length of a sample] The noise is uniform in +-alpha / sqrt(L * d), with L the number of
tokens of the sample and d the width. transformers uses the length of the padded row as L, so the
noise of a sample depends on the samples it is batched with. Here L is the length of the sample
itself: the number of ones in its attention mask or, if positions restart, the length of its run of
positions.
"""

from typing import Any

import torch
from torch import nn

from toolkit.errors import TrainingError
from toolkit.models.peft_model import base_of


def add_embedding_noise(model: nn.Module, alpha: float | None) -> None:
    """Register hooks that add NEFTune noise to the input embeddings while the model trains.

    Each rank draws from torch's default generator, whose state is part of checkpoints. So a resumed
    run draws the same noise as an uninterrupted one. A forward draws as many numbers as the
    embeddings have values.

    Args:
        model: a causal LM with or without adapters, sharded or not.
        alpha: scale of the noise, 5, 10 or 15 in the paper. None: do nothing.
    """
    if alpha is None:
        return
    inputs: dict[str, Any] = {}

    # The hooks are not compiled, like those of FSDP2: a trace would contain the first batch.
    @torch.compiler.disable
    def remember(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        inputs.update(kwargs)

    @torch.compiler.disable
    def forget(*_: Any) -> None:
        inputs.clear()

    @torch.compiler.disable
    def add(embedding: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not embedding.training:
            return None
        batch, length, width = output.shape
        lengths = sample_lengths(inputs.get("attention_mask"), inputs.get("position_ids"))
        if lengths is None:
            lengths = torch.full((batch, length), length, device=output.device)
        # A token that belongs to no sample gets none.
        bound = torch.where(lengths > 0, alpha / (lengths * width).clamp(min=1).sqrt(), 0.0)
        noise = torch.empty_like(output).uniform_(-1, 1)
        return output + noise * bound.unsqueeze(-1).to(output.dtype)

    model.register_forward_pre_hook(remember, with_kwargs=True)
    base_of(model).get_input_embeddings().register_forward_hook(add)
    model.register_forward_hook(forget, always_call=True)


def sample_lengths(
    attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> torch.Tensor | None:
    """Compute for each token the length, in tokens, of the sample to which it belongs.

    Args:
        attention_mask: [B, T], 0 for padding. If it is given, each row is one sample.
        position_ids: [B, T]. A new sample begins at each position that is not the previous one plus
            1.

    Returns:
        [B, T], 0 for padding. None if both arguments are None; then each row is one sample.

    Raises:
        TrainingError: an argument is not 2-d.
    """
    for name, value in (("attention_mask", attention_mask), ("position_ids", position_ids)):
        if value is not None and value.ndim != 2:
            raise TrainingError(
                f"NEFTune needs the {name} as [batch, tokens] to know how long each sample is, got "
                f"{list(value.shape)}"
            )
    if attention_mask is not None:
        real = attention_mask != 0
        return real * real.sum(-1, keepdim=True)
    if position_ids is None:
        return None
    steps = torch.diff(position_ids, dim=-1, prepend=position_ids[:, :1] - 1)
    sample = (steps != 1).cumsum(-1)  # [B, T], counted within the row
    counts = torch.zeros_like(sample).scatter_add_(-1, sample, torch.ones_like(sample))
    return counts.gather(-1, sample)
