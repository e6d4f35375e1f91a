"""NEFTune: noise on the input embeddings while a model trains (Jain et al. 2023, arXiv:2310.05914).

Owns how much noise each token gets. Knows nothing of the loop, the loss or how the model is
sharded: it hooks the embedding's output and changes nothing that a checkpoint holds.

[Note: length of a sample] The noise is uniform in +-alpha / sqrt(L * d), with L the tokens of the
sample and d the width. transformers takes the length of the row for L, padding included, so that a
sample's noise depends on what it is batched with. Here L is the sample's own: the ones of its
attention mask, or where positions restart, the run of positions that it is in.
"""

from typing import Any

import torch
from torch import nn

from toolkit.errors import TrainingError
from toolkit.models.peft_model import base_of


def add_embedding_noise(model: nn.Module, alpha: float | None) -> None:
    """Let noise be added to the input embeddings of a model in training mode.

    Each rank draws from its own default generator, which checkpoints keep: a resumed run draws the
    noise of an undisturbed one. Costs one draw of the size of the embeddings a forward. `alpha` is
    5, 10 or 15 in the paper; None: no noise.
    """
    if alpha is None:
        return
    inputs: dict[str, Any] = {}

    # None of it is compiled, as FSDP2's own hooks are not: it would be traced with the first batch.
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
    """Return each token's number of tokens in its sample, [B, T]; None where each row is one. The
    mask [B, T] is 0 for padding, positions [B, T] restart with each sample. TrainingError: others.
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
