"""Exchange tokens for heads between the ranks that share a row (Ulysses, arXiv:2309.14509).

Each rank holds a part of a row with all heads. Before attention, an all-to-all gives each rank the
complete row with a part of the heads; after attention, a second one restores the first layout.
"""

import math
from typing import Any, cast

import torch
import torch.distributed as dist

from toolkit.errors import ModelError


def exchange(
    tensor: torch.Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int
) -> torch.Tensor:
    """Split a tensor among ranks along one dimension, and join their parts along another one.

    Collective, also in the backward, which exchanges the gradient in the opposite direction.

    Args:
        tensor: the tensor of this rank.
        group: the ranks; their number divides `split_dim`.
        split_dim: dimension whose part number i is sent to rank i.
        join_dim: dimension along which the received parts are joined, in rank order.
    """
    return cast(torch.Tensor, _Exchange.apply(tensor, group, split_dim, join_dim))


class _Exchange(torch.autograd.Function):
    """The autograd function of `exchange`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int
    ) -> torch.Tensor:
        ctx.arguments = group, join_dim, split_dim
        parts = torch.stack(tensor.chunk(group.size(), split_dim))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(0), join_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Exchange.apply(gradients[0], *ctx.arguments), None, None, None


def repeat_key_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat key and value heads until `size` ranks can divide them.

    Args:
        query: [B, heads, T, width].
        key: [B, key heads, T, width].
        value: [B, key heads, T, value width].
        size: number of ranks.

    Returns:
        Key and value, with as many heads as the least common multiple of key heads and ranks.

    Raises:
        ModelError: the ranks do not divide the query heads.
    """
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % size:
        raise ModelError(
            f"sharding.context_parallel {size} must divide the attention heads, but a layer has "
            f"{heads}; set it to a divisor of {heads}"
        )
    repeats = math.lcm(key_heads, size) // key_heads
    if repeats == 1:
        return key, value
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
