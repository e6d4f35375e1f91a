"""Log-probabilities of targets inside the LM head, chunk by chunk, for losses that weight tokens.

In `head_loss` the loss is one sum, whose gradient is known in the forward. Here each token has a
separate number, and only the backward brings the weight of each.
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
    add_matmul,
    chunk_slices,
    find_target_rows,
    matmul_to_fp32,
    zeros_for_grad,
)
from toolkit.training.loss_kernel import IGNORE_INDEX, target_logps, weighted_logps


@dataclass(frozen=True)
class HeadLogps:
    """Computes the log-probability of each target inside the forward of the LM head.

    Only the logits of one chunk of tokens exist at a time. The forward also computes the gradient
    of each log-probability with respect to its hidden state, in fp32, and the backward scales it by
    the incoming gradient. This is possible because the log-probability of a token depends on its
    own hidden state only. A frozen head costs two matrix products, a trained head four, because its
    logits are computed again in the backward.
    """

    head: HeadLoss

    def __call__(
        self, hidden: torch.Tensor, targets: torch.Tensor, n_targets: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probabilities of the targets; see `HeadLoss.__call__` for the arguments.

        If there are more than `n_targets` targets, all results are NaN.

        Returns:
            The log-probabilities, fp32 [B, T], 0 at positions without a target; and an empty tensor
            [B, T, 0] in place of the logits.
        """
        parameters = self.head.parameters()
        logps_and_empty: Any = _HeadLogpsFunction.apply(
            self.head, torch.is_grad_enabled(), n_targets, targets.flatten(), hidden, *parameters
        )
        return logps_and_empty[0].view(targets.shape), logps_and_empty[1]


class _HeadLogpsFunction(torch.autograd.Function):
    """The autograd function of `HeadLogps`."""

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
        """Compute the log-probabilities by chunks, and save their gradients for the backward."""
        flat, count = hidden.flatten(0, 1), len(targets)
        rows, too_many = find_target_rows(targets, n_targets, head.device_type(hidden))
        if rows is not None:
            flat, targets = flat[rows], targets[rows]
        needs_grad = with_gradients and ctx.needs_input_grad[4]
        logps = torch.zeros(len(flat), device=hidden.device)
        grad = None
        if needs_grad:
            grad = torch.empty_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        # A head may draw random numbers (an adapter's dropout). The backward must draw the same.
        ctx.rng_states = None if head.is_linear else get_random_state()
        for part in chunk_slices(head, flat):
            logps[part], chunk_grad = _logps_and_hidden_grad(
                head, parameters, flat[part], targets[part], needs_grad
            )
            if grad is not None and chunk_grad is not None:
                grad[part] = chunk_grad
        # Only a trained head needs hidden states and weights again. FSDP has gathered a sharded
        # weight again by then.
        for_head_grad = (flat, *parameters) if any(ctx.needs_input_grad[5:]) else ()
        ctx.save_for_backward(grad, rows, targets, *for_head_grad)
        ctx.head, ctx.shape, ctx.dtype = head, hidden.shape, hidden.dtype
        if rows is not None:
            logps = logps.new_zeros(count).index_copy_(0, rows, logps)
        if too_many is not None:
            # A NaN instead of an error, because the host must not wait for the device.
            logps.masked_fill_(too_many, torch.nan)
        return logps, hidden.new_empty(*hidden.shape[:-1], 0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, incoming: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Scale the saved gradients of hidden states, and compute those of a trained head."""
        grad, rows, targets, *for_head_grad = ctx.saved_tensors
        weights = incoming if rows is None else incoming[rows]
        # A position without a target gets no gradient, whatever the loss does with its 0.
        weights = weights.masked_fill(targets == IGNORE_INDEX, 0.0)[:, None]
        hidden_grad = None
        if grad is not None:
            hidden_grad = torch.mul(grad, weights, out=torch.empty_like(grad, dtype=ctx.dtype))
            if rows is not None:
                all_rows = hidden_grad.new_zeros(ctx.shape[:-1].numel(), ctx.shape[-1])
                hidden_grad = all_rows.index_copy_(0, rows, hidden_grad)
            hidden_grad = hidden_grad.view(ctx.shape)
        sums: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad[5:])
        if for_head_grad:
            flat, *parameters = for_head_grad
            sums = [*map(zeros_for_grad, parameters, ctx.needs_input_grad[5:])]
            with _replayed_rng(ctx.rng_states, flat.device):
                for part in chunk_slices(ctx.head, flat):
                    _add_parameter_grads(
                        ctx.head, parameters, sums, flat[part], targets[part], weights[part]
                    )
            pairs = zip(sums, parameters, strict=True)
            sums = [None if total is None else total.to(p.dtype) for total, p in pairs]
        return None, None, None, None, hidden_grad, *sums


def _logps_and_hidden_grad(
    head: HeadLoss,
    parameters: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    needs_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-probabilities of a chunk, and their gradients for the hidden states.

    Args:
        head: the head.
        parameters: result of `HeadLoss.parameters`.
        hidden: hidden states of the chunk, [rows, H].
        targets: [rows].
        needs_grad: compute gradients.

    Returns:
        The log-probabilities [rows]; and the gradient of each with respect to its hidden state,
        [rows, H], or None without `needs_grad`.
    """
    if head.is_linear:
        logits = F.linear(hidden, *parameters)
        logps, grad = _logps_and_logit_grad(head, logits, targets, needs_grad)
        if grad is None:
            return logps, None
        return logps, matmul_to_fp32(grad, parameters[0], head.device_type(hidden))
    with torch.set_grad_enabled(needs_grad):
        leaf = hidden.detach().requires_grad_(needs_grad)
        output = head.forward(leaf[None])[0]
    logps, grad = _logps_and_logit_grad(head, output.detach(), targets, needs_grad)
    return logps, None if grad is None else torch.autograd.grad(output, leaf, grad)[0]


def _add_parameter_grads(
    head: HeadLoss,
    parameters: Sequence[torch.Tensor],
    sums: list[torch.Tensor | None],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Compute the logits of a chunk again, and add the parameters' gradients to `sums` in place.

    Args:
        head: the head.
        parameters: result of `HeadLoss.parameters`.
        sums: sum of gradients for each parameter; None if a parameter needs none.
        hidden: hidden states of the chunk, [rows, H].
        targets: [rows].
        weights: incoming gradient of each log-probability, [rows, 1].
    """
    if head.is_linear:
        logits = F.linear(hidden, *parameters)
        _, grad = _logps_and_logit_grad(head, logits, targets, True, weights)
        weight_grad, *bias_grads = sums
        if grad is not None and weight_grad is not None:
            add_matmul(weight_grad, grad.t(), hidden, head.device_type(hidden))
        if grad is not None and bias_grads and bias_grads[0] is not None:
            bias_grads[0] += grad.sum(0, dtype=bias_grads[0].dtype)
        return
    with torch.enable_grad():
        output = head.forward(hidden[None])[0]
    _, grad = _logps_and_logit_grad(head, output.detach(), targets, True, weights)
    grads = torch.autograd.grad(output, head.parameters(), grad, allow_unused=True)
    for total, part in zip(sums, grads, strict=True):
        if total is not None and part is not None:
            total += part


@contextlib.contextmanager
def _replayed_rng(states: list[torch.Tensor] | None, device: torch.device) -> Iterator[None]:
    """Within the block, set the random state to `states`; afterwards restore it.

    Args:
        states: result of `get_random_state`. None: the random state is not touched.
        device: the device whose generator is set in addition to the CPU's.
    """
    if states is None:
        yield
        return
    with forked_rng(device):
        torch.set_rng_state(states[0])
        if device.type != "cpu":
            torch.get_device_module(device).set_rng_state(states[1])
        yield


def _logps_and_logit_grad(
    head: HeadLoss,
    logits: torch.Tensor,
    targets: torch.Tensor,
    needs_grad: bool,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-probabilities of targets from the head's output [rows, V].

    On CUDA devices one compiled kernel does this.

    Args:
        head: the head.
        logits: output of the head, before its logit map.
        targets: [rows].
        needs_grad: compute gradients.
        weights: factor of each gradient, [rows, 1]; None: 1.

    Returns:
        The log-probabilities, fp32 [rows]; and the weighted gradient of each with respect to its
        row of `logits`, in their shape and dtype, or None without `needs_grad`.
    """
    logit_map = head.logit_map
    if head.has_kernel(logits):
        scale, cap = logit_map.scale, logit_map.cap
        if not needs_grad:
            return target_logps(logits, targets, scale, cap), None
        if weights is None:
            weights = torch.ones(len(logits), 1, device=logits.device)
        return weighted_logps(logits, targets, weights, scale, cap)
    return _uncompiled_logps_and_logit_grad(logits, targets, logit_map, needs_grad, weights)


def _uncompiled_logps_and_logit_grad(
    logits: torch.Tensor,
    targets: torch.Tensor,
    logit_map: LogitMap,
    needs_grad: bool,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the results of `_logps_and_logit_grad` with plain torch operations."""
    dtype = logits.dtype
    mapped = logits if logit_map == LogitMap() else logit_map(logits.float())
    log_p = torch.log_softmax(mapped, -1, dtype=torch.float32)
    valid = targets != IGNORE_INDEX
    at = torch.where(valid, targets, 0)[:, None]
    logps = torch.where(valid, log_p.gather(1, at).squeeze(1), 0.0)
    if not needs_grad:
        return logps, None
    grad = log_p.exp_().neg_()
    grad.scatter_add_(1, at, torch.ones_like(at, dtype=grad.dtype))
    if logit_map.cap is not None:  # d tanh = 1 - tanh^2
        grad *= mapped.div_(logit_map.cap).square_().neg_().add_(1.0)
    out = grad if grad.dtype == dtype else torch.empty_like(grad, dtype=dtype)
    factor = valid[:, None] * logit_map.scale
    return logps, torch.mul(grad, factor if weights is None else factor * weights, out=out)
