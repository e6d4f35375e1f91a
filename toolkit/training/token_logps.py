"""Log-probabilities of targets inside the LM head, chunk by chunk; recomputed for a trained head.

Beside `head_loss`, whose head and map of logits it takes: there the loss is one sum, whose gradient
is known in the forward; here each token has a number, whose weight only the backward brings.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from toolkit.training.head_loss import (
    HeadLoss,
    LogitMap,
    add_product,
    chosen_rows,
    chunks,
    product,
)
from toolkit.training.loss_kernel import IGNORE_INDEX


@dataclass(frozen=True)
class HeadLogps:
    """The log-probability of each target behind a head; call it inside of the head's forward.

    The logits of one chunk of tokens exist at a time. A token's gradient of its hidden state is its
    own, so the forward leaves it, in fp32, and the backward scales it: a frozen head costs two
    products. The logits of a trained one are computed again in the backward: four products.
    """

    head: HeadLoss

    def __call__(
        self, hidden: torch.Tensor, targets: torch.Tensor, n_targets: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities [B, T] in fp32, 0 where there is no target, and an empty
        answer [B, T, 0] in place of the logits. Arguments as of `HeadLoss`.
        """
        own = self.head.parameters()
        found: Any = _GradientsOfTokens.apply(
            self.head, torch.is_grad_enabled(), n_targets, targets.flatten(), hidden, *own
        )
        return found[0].view(targets.shape), found[1]


class _GradientsOfTokens(torch.autograd.Function):
    """See `HeadLogps`."""

    @staticmethod
    def forward(
        ctx: Any,
        head: HeadLoss,
        with_gradients: bool,
        n_targets: int | None,
        targets: torch.Tensor,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat, count = hidden.flatten(0, 1), len(targets)
        rows, too_many = chosen_rows(targets, n_targets, head.device_type(hidden))
        if rows is not None:
            flat, targets = flat[rows], targets[rows]
        wanted = with_gradients and ctx.needs_input_grad[4]
        found = torch.zeros(len(flat), device=hidden.device)
        grad = torch.empty_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        for part in chunks(head, flat):
            found[part], of_logits, output, leaf = _chunk(
                head, parameters, flat[part], targets[part], wanted
            )
            if of_logits is None:
                continue
            if head.linear:
                grad[part] = product(of_logits, parameters[0], head.device_type(hidden))
            else:
                grad[part] = torch.autograd.grad(output, leaf, of_logits)[0]
        # All that the backward needs; a weight that was sharded is gathered again by then.
        kept = (flat, targets, *parameters) if any(ctx.needs_input_grad[5:]) else ()
        ctx.save_for_backward(grad if wanted else None, rows, *kept)
        ctx.head, ctx.shape, ctx.dtype = head, hidden.shape, hidden.dtype
        if rows is not None:
            found = found.new_zeros(count).index_copy_(0, rows, found)
        if too_many is not None:  # the host does not wait to know
            found.masked_fill_(too_many, torch.nan)
        return found, hidden.new_empty(*hidden.shape[:-1], 0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, incoming: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad, rows, *kept = ctx.saved_tensors
        weights = incoming if rows is None else incoming[rows]
        of_hidden = None
        if grad is not None:
            of_hidden = (grad * weights[:, None]).to(ctx.dtype)
            if rows is not None:
                whole = of_hidden.new_zeros(ctx.shape[:-1].numel(), ctx.shape[-1])
                of_hidden = whole.index_copy_(0, rows, of_hidden)
            of_hidden = of_hidden.view(ctx.shape)
        needed = ctx.needs_input_grad[5:]
        sums = _of_parameters(ctx.head, weights, needed, *kept) if kept else [None] * len(needed)
        return None, None, None, None, of_hidden, *sums


def _of_parameters(
    head: HeadLoss,
    weights: torch.Tensor,
    needed: tuple[bool, ...],
    flat: torch.Tensor,
    targets: torch.Tensor,
    *parameters: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter that needs one, from logits that are computed again."""
    sums = [
        torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) if need else None
        for p, need in zip(parameters, needed, strict=True)
    ]
    for part in chunks(head, flat):
        hidden, share = flat[part], weights[part][:, None]
        _, of_logits, output, _ = _chunk(head, parameters, hidden, targets[part], True)
        of_logits = (of_logits * share).to(of_logits.dtype)
        if head.linear:
            of_weight, *of_bias = sums
            if of_weight is not None:
                add_product(of_weight, of_logits.t(), hidden, head.device_type(hidden))
            if of_bias and of_bias[0] is not None:
                of_bias[0] += of_logits.sum(0, dtype=of_bias[0].dtype)
            continue
        found = torch.autograd.grad(output, head.parameters(), of_logits, allow_unused=True)
        for total, own in zip(sums, found, strict=True):
            if total is not None and own is not None:
                total += own
    pairs = zip(sums, parameters, strict=True)
    return [None if total is None else total.to(p.dtype) for total, p in pairs]


def _chunk(
    head: HeadLoss,
    parameters: tuple[torch.Tensor, ...],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    wanted: bool,
) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]:
    """Return a chunk's log-probabilities, and where `wanted` their gradient of the head's output;
    that output and its input, which have a graph where the head is more than a linear layer.
    """
    leaf = hidden
    if head.linear:
        output = F.linear(hidden, *parameters)
    else:
        with torch.set_grad_enabled(wanted):
            leaf = hidden.detach().requires_grad_(wanted)
            output = head.forward(leaf[None])[0]
    found, grad = _log_probabilities(output.detach(), targets, head.logit_map, wanted)
    return found, grad, output, leaf


def _log_probabilities(
    logits: torch.Tensor, targets: torch.Tensor, logit_map: LogitMap, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probabilities of `targets` [rows] in fp32, by a head's `logits` [rows, V], and
    each one's gradient of its row, in the dtype of the logits.
    """
    mapped = logits if logit_map == LogitMap() else logit_map(logits.float())
    log_p = torch.log_softmax(mapped, -1, dtype=torch.float32)
    valid = targets != IGNORE_INDEX
    at = torch.where(valid, targets, 0)[:, None]
    found = torch.where(valid, log_p.gather(1, at).squeeze(1), 0.0)
    if not wanted:
        return found, None
    grad = log_p.exp_().neg_()
    grad.scatter_add_(1, at, torch.ones_like(at, dtype=grad.dtype))
    if logit_map.cap is not None:  # d tanh = 1 - tanh^2
        grad *= 1.0 - (mapped / logit_map.cap).square()
    return found, (grad * (valid[:, None] * logit_map.scale)).to(logits.dtype)
