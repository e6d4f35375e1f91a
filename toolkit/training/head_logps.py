"""Log-probabilities of targets inside the LM head, chunk by chunk, for losses that weight tokens.

Beside `head_loss`, whose head and map of logits it takes: there the loss is one sum, whose gradient
is known in the forward; here each token has a number, whose weight only the backward brings.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from toolkit.models.modes import forked_rng, get_random_state
from toolkit.training.head_loss import (
    HeadLoss,
    LogitMap,
    accumulator,
    add_product,
    chosen_rows,
    chunks,
    product,
)
from toolkit.training.loss_kernel import IGNORE_INDEX, target_logps, weighted_logps


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
        grad = None
        if wanted:
            grad = torch.empty_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        # A head may draw (an adapter's dropout): the backward draws the same once more.
        ctx.drawn = None if head.linear else get_random_state()
        for part in chunks(head, flat):
            found[part], own = _of_hidden(head, parameters, flat[part], targets[part], wanted)
            if grad is not None and own is not None:
                grad[part] = own
        # All that the backward needs; a weight that was sharded is gathered again by then.
        kept = (flat, *parameters) if any(ctx.needs_input_grad[5:]) else ()
        ctx.save_for_backward(grad, rows, targets, *kept)
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
        grad, rows, targets, *kept = ctx.saved_tensors
        weights = incoming if rows is None else incoming[rows]
        # Where there is no target nothing comes back, whatever was made of the 0 there.
        weights = weights.masked_fill(targets == IGNORE_INDEX, 0.0)[:, None]
        of_hidden = None
        if grad is not None:
            of_hidden = torch.mul(grad, weights, out=torch.empty_like(grad, dtype=ctx.dtype))
            if rows is not None:
                whole = of_hidden.new_zeros(ctx.shape[:-1].numel(), ctx.shape[-1])
                of_hidden = whole.index_copy_(0, rows, of_hidden)
            of_hidden = of_hidden.view(ctx.shape)
        sums: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad[5:])
        if kept:
            flat, *parameters = kept
            sums = [*map(accumulator, parameters, ctx.needs_input_grad[5:])]
            with _drawing_again(ctx.drawn, flat.device):
                for part in chunks(ctx.head, flat):
                    given = flat[part], targets[part], weights[part]
                    _add_of_parameters(ctx.head, parameters, sums, *given)
            pairs = zip(sums, parameters, strict=True)
            sums = [None if total is None else total.to(p.dtype) for total, p in pairs]
        return None, None, None, None, of_hidden, *sums


def _of_hidden(
    head: HeadLoss,
    parameters: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a chunk's log-probabilities [rows], and where `wanted` the gradient of each one of its
    own hidden state [rows, H].
    """
    if head.linear:
        logits = F.linear(hidden, *parameters)
        found, grad = _log_probabilities(head, logits, targets, wanted)
        if grad is None:
            return found, None
        return found, product(grad, parameters[0], head.device_type(hidden))
    with torch.set_grad_enabled(wanted):
        leaf = hidden.detach().requires_grad_(wanted)
        output = head.forward(leaf[None])[0]
    found, grad = _log_probabilities(head, output.detach(), targets, wanted)
    return found, None if grad is None else torch.autograd.grad(output, leaf, grad)[0]


def _add_of_parameters(
    head: HeadLoss,
    parameters: Sequence[torch.Tensor],
    sums: list[torch.Tensor | None],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Add the gradients of the `parameters` by a chunk, whose logits are computed again, to `sums`,
    which have None for those that need none.
    """
    if head.linear:
        logits = F.linear(hidden, *parameters)
        _, grad = _log_probabilities(head, logits, targets, True, weights)
        of_weight, *of_bias = sums
        if grad is not None and of_weight is not None:
            add_product(of_weight, grad.t(), hidden, head.device_type(hidden))
        if grad is not None and of_bias and of_bias[0] is not None:
            of_bias[0] += grad.sum(0, dtype=of_bias[0].dtype)
        return
    with torch.enable_grad():
        output = head.forward(hidden[None])[0]
    _, grad = _log_probabilities(head, output.detach(), targets, True, weights)
    found = torch.autograd.grad(output, head.parameters(), grad, allow_unused=True)
    for total, own in zip(sums, found, strict=True):
        if total is not None and own is not None:
            total += own


@contextlib.contextmanager
def _drawing_again(states: list[torch.Tensor] | None, device: torch.device) -> Iterator[None]:
    """Let what is drawn be what was drawn from `states` (`random_state`); None: draw nothing."""
    if states is None:
        yield
        return
    with forked_rng(device):
        torch.set_rng_state(states[0])
        if device.type != "cpu":
            torch.get_device_module(device).set_rng_state(states[1])
        yield


def _log_probabilities(
    head: HeadLoss,
    logits: torch.Tensor,
    targets: torch.Tensor,
    wanted: bool,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-probabilities of `targets` [rows] in fp32, by a head's `logits` [rows, V],
    and if `wanted` each one's gradient of its row times its weight [rows, 1], 1 without `weights`,
    in the dtype of the logits. One compiled kernel on GPUs.
    """
    logit_map = head.logit_map
    if head.has_kernel(logits):
        scale, cap = logit_map.scale, logit_map.cap
        if not wanted:
            return target_logps(logits, targets, scale, cap), None
        if weights is None:
            weights = torch.ones(len(logits), 1, device=logits.device)
        return weighted_logps(logits, targets, weights, scale, cap)
    return _by_plain_operations(logits, targets, logit_map, wanted, weights)


def _by_plain_operations(
    logits: torch.Tensor,
    targets: torch.Tensor,
    logit_map: LogitMap,
    wanted: bool,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute what `_log_probabilities` computes, without a kernel of its own."""
    dtype = logits.dtype
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
        grad *= mapped.div_(logit_map.cap).square_().neg_().add_(1.0)
    out = grad if grad.dtype == dtype else torch.empty_like(grad, dtype=dtype)
    factor = valid[:, None] * logit_map.scale
    return found, torch.mul(grad, factor if weights is None else factor * weights, out=out)
