"""cuDNN's attention as a custom operation, which compiled layers can call: a candidate.

inductor stops at the layout of the softmax statistics that cuDNN's own fake kernel gives. Here they
leave the operation as plain memory, and come back into the backward with the strides that they had.
`make gpu` compares it with flash attention, forward and gradients, and times both within
torch.compile. It moves into the toolkit once a card has shown that it is right and faster.
"""

from typing import Any

import torch

_aten: Any = torch.ops.aten
# Shape of a query -> shape and strides of its statistics.
_layouts: dict[torch.Size, tuple[torch.Size, tuple[int, ...]]] = {}
_Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("toolkit_candidates::cudnn_attention", mutates_args=())
def cudnn_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return causal attention, laid out as the query [B, heads, T, width], and what its backward
    takes: statistics, seed, offset.
    """
    found = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scale
    )
    out, statistics, seed, offset = found[0], found[1], found[6], found[7]
    _layouts[query.shape] = statistics.shape, statistics.stride()
    flat = statistics.as_strided((statistics.numel(),), (1,), statistics.storage_offset())
    return _like(out, query), flat, seed, offset


@cudnn_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> _Four:
    rows = query.shape[0] * query.shape[1] * query.shape[2]
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    return torch.empty_like(query), query.new_empty(rows, dtype=torch.float32), seed, offset


@torch.library.custom_op("toolkit_candidates::cudnn_attention_backward", mutates_args=())
def _backward_of(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    flat: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape, strides = _layouts[query.shape]
    statistics = flat.as_strided(shape, strides, flat.storage_offset())
    lengths = query.shape[2], key.shape[2]
    found = _aten._scaled_dot_product_cudnn_attention_backward(
        _like(grad, out), query, key, value, out, statistics, seed, offset,
        None, None, None, *lengths, 0.0, True, scale=scale,
    )  # fmt: skip
    return _like(found[0], query), _like(found[1], key), _like(found[2], value)


@_backward_of.register_fake
def _(grad: Any, query: Any, key: Any, value: Any, *_: Any) -> _Three:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: _Four) -> None:
    query, key, value, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    return *_backward_of(grad, *ctx.saved_tensors, ctx.scale), None


cudnn_attention.register_autograd(_backward, setup_context=_keep)


def _like(tensor: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with the strides that `torch.empty_like(reference)` has."""
    wanted = torch.empty_like(reference)
    return tensor if tensor.stride() == wanted.stride() else wanted.copy_(tensor)
