"""Compute the MLPs of decoder layers in chunks of tokens (`sharding.mlp_chunk_tokens`).

An MLP computes each token by itself, and its inner activations are several times as wide as the
hidden states. For long rows they are most of the memory that the backward of a layer needs. So the
MLP runs once per chunk, and each chunk is recomputed in the backward: the inner activations of one
chunk exist at a time. Arctic Long Sequence Training (arXiv 2506.13996) calls it TiledMLP.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from toolkit.config.settings import ShardingConfig
from toolkit.errors import ShardingError
from toolkit.models.mlp_probe import find_mlps
from toolkit.models.modes import get_random_state
from toolkit.models.peft_model import base_of

_SETTING = "sharding.mlp_chunk_tokens"


def chunk_mlps(model: nn.Module, layers: Iterable[str], cfg: ShardingConfig) -> list[str]:
    """Replace the forward of each MLP by one that computes `mlp_chunk_tokens` tokens at a time.

    Nothing is changed if the setting is 0.

    Args:
        model: with or without adapters, changed in place.
        layers: names of its decoder layers.
        cfg: the sharding settings.

    Returns:
        Names of the MLPs that run in chunks.

    Raises:
        ShardingError: other settings contradict it, or no layer has such an MLP.
    """
    tokens = cfg.mlp_chunk_tokens
    if not tokens:
        return []
    if cfg.activation_checkpointing == "selective":
        raise ShardingError(
            f"{_SETTING} {tokens} recomputes the matrix products of MLPs, which "
            "activation_checkpointing: selective keeps; set sharding.activation_checkpointing: full"
        )
    if cfg.torch_compile not in (False, "none", "auto"):
        raise ShardingError(
            f"{_SETTING} {tokens} runs a loop in each layer, which is not compiled; set "
            "sharding.torch_compile: none"
        )
    names, reason = find_mlps(base_of(model), model, layers)
    if not names:
        raise ShardingError(f"{_SETTING} {tokens} is not possible: {reason}; set it to 0")
    for name in names:
        _run_in_chunks(model.get_submodule(name), tokens)
    return names


def describe_mlp_chunks(names: list[str], layers: int, tokens: int) -> str:
    """Format the line of the start about MLPs in chunks; "" if there are none.

    Args:
        names: names of the MLPs, from `chunk_mlps`.
        layers: number of decoder layers.
        tokens: value of `sharding.mlp_chunk_tokens`.
    """
    if not names:
        return ""
    return f"mlp        {len(names)} of {layers} layers compute it in chunks of {tokens:,} tokens"


def _run_in_chunks(module: nn.Module, tokens: int) -> None:
    """Replace `module.forward` by one that processes at most `tokens` tokens at a time.

    Outputs are those of the original forward, except that random numbers (dropout) are drawn once
    per chunk.

    Args:
        module: computes each token by itself; [B, T, H] -> [B, T, H].
        tokens: tokens of a chunk, counted over all rows of the batch.
    """
    forward: Callable[[torch.Tensor], torch.Tensor] = module.forward
    draws: bool | None = None  # the forward draws random numbers; None before the first forward

    @functools.wraps(forward)
    def in_chunks(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal draws
        if hidden.shape[:-1].numel() <= tokens:
            return forward(hidden)
        chunks = hidden.flatten(0, -2).split(tokens)
        if not (module.training and torch.is_grad_enabled()):
            outputs = [forward(chunk[None]) for chunk in chunks]
        else:
            # Dropout must drop the same values again. Without random draws nothing is restored.
            options: Any = {"use_reentrant": False, "preserve_rng_state": draws is not False}
            before = get_random_state() if draws is None else None
            outputs = [checkpoint(forward, chunk[None], **options) for chunk in chunks]
            if before is not None:
                draws = not all(map(torch.equal, before, get_random_state()))
        return torch.cat(outputs, dim=1).view(hidden.shape)

    module.forward = in_chunks  # type: ignore[method-assign]
