"""Chunked cross entropy inside the LM head; its gradients are computed in the forward.

This module owns the arithmetic: chunks of logits, their loss, and the gradients of hidden states
and head. It knows nothing of models. The caller says what a model does with the head's output.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from toolkit.training.loss_kernel import IGNORE_INDEX, cross_entropy

# Logits of one chunk, in elements, held in fp32. malloc takes blocks above 32 MB from the kernel
# each time, and touching their new pages costs as much as the arithmetic.
_CHUNK_ELEMENTS = {"cpu": 2**23}
_CHUNK_ELEMENTS_OF_AN_ACCELERATOR = 2**28
# Devices whose labels the host can read without waiting.
_DEVICES_WITH_HOST_COUNTS = ("cpu",)
# Devices that multiply bf16 matrices into an fp32 result.
_DEVICES_WITH_FP32_PRODUCTS = ("cuda",)
# Devices on which loss and gradient of a chunk are one kernel.
_DEVICES_WITH_KERNEL = ("cuda",)


@dataclass(frozen=True)
class LogitMap:
    """A function that maps the output z of a model's head to the model's logits.

    It is `scale * z`, or with a soft cap `cap * tanh(scale * z / cap)`.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        """Map the output of the head to logits."""
        if self.cap is not None:
            return torch.tanh(z * (self.scale / self.cap)).mul_(self.cap)
        return z if self.scale == 1.0 else z * self.scale


@dataclass(frozen=True)
class HeadLoss:
    """Computes the summed cross entropy inside the forward of the LM head.

    Only the logits of one chunk of tokens exist at a time. On a CPU a chunk takes up to 32 MB in
    fp32. On an accelerator it has up to 2^28 logits: 0.5 GB in bf16, and as much for their
    gradient.

    Measured with a vocabulary of 128,256, a hidden size of 4,096 and 16k targets: a step took 2.5
    GB above the model with a frozen head, and 4.7 GB with a trained head. That includes the
    gradients kept for the backward.

    The forward computes the gradients, too. Each chunk adds its gradients to sums in fp32: those of
    the hidden states and, if the head is trained, those of the head. The backward only multiplies
    these sums by the incoming gradient and casts them, so it needs neither a matrix product nor the
    weight. A trained head costs three matrix products, a frozen head two, an evaluation one. Tokens
    without a label cost nothing if their number is known: on a CPU, or if the batch has
    `n_targets`.

    The method is that of Liger's FusedLinearCrossEntropy (Hsu et al. 2024, arXiv:2410.10989).
    """

    module: nn.Module
    """The head, with gathered weights. It computes each token separately."""
    forward: Callable[[torch.Tensor], torch.Tensor]
    """The forward of the head, for heads that are more than a linear layer."""
    vocabulary: int
    """Number of logits per token."""
    logit_map: LogitMap = LogitMap()
    label_smoothing: float = 0.0
    on: str | None = None
    """Type of the device whose chunks and kernels are used; None: that of the hidden states."""
    correct: torch.Tensor | None = None
    """0-d integer, to which the number of tokens is added whose label has the largest logit. Costs
    a pass over the logits."""
    z_loss: float = 0.0
    """Factor of the square of log Z that is added for each token. Z is the sum of the exponentials
    of the logits (PaLM, Chowdhery et al. 2022, section 5)."""

    def __call__(
        self, hidden: torch.Tensor, targets: torch.Tensor, n_targets: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the cross entropy, summed over the targets.

        Both results must take part in the backward, because FSDP starts its backward by hooks on
        the model's output.

        Args:
            hidden: hidden states [B, T, H].
            targets: [B, T], the token that each position predicts; `IGNORE_INDEX` has no loss. The
                last position of a row has no target.
            n_targets: upper limit of the number of targets. If there are more, the loss is NaN.

        Returns:
            The loss, 0-d fp32; and an empty tensor [B, T, 0] in place of the logits.
        """
        loss_and_empty: Any = _HeadLossFunction.apply(
            self, torch.is_grad_enabled(), n_targets, targets.flatten(), hidden, *self.parameters()
        )
        return loss_and_empty

    def device_type(self, hidden: torch.Tensor) -> str:
        """Return `on`, or the device type of `hidden` if `on` is None.

        The result selects the chunk size and the kernels.
        """
        return self.on or hidden.device.type

    def has_kernel(self, tensor: torch.Tensor) -> bool:
        """Return True if a compiled kernel supports the dtype and the device type of `tensor`."""
        return tensor.dtype != torch.float64 and self.device_type(tensor) in _DEVICES_WITH_KERNEL

    @property
    def logits_per_token(self) -> int:
        """Number of logits per token. A larger number gives chunks of fewer tokens."""
        return self.vocabulary

    @property
    def is_linear(self) -> bool:
        """True if `forward` is that of `nn.Linear`: no adapters, and no replaced forward."""
        return getattr(self.forward, "__func__", None) is nn.Linear.forward

    def parameters(self) -> list[torch.Tensor]:
        """List the head's tensors that `add_chunk` needs.

        Returns:
            Weight and bias of a linear head, trained or not; the trained parameters of any other
            head.
        """
        if not self.is_linear:
            return [p for p in self.module.parameters() if p.requires_grad]
        head: Any = self.module
        return [head.weight] if head.bias is None else [head.weight, head.bias]

    def add_chunk(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | slice,
        parameters: tuple[torch.Tensor, ...],
        grads: list[torch.Tensor | None],
    ) -> torch.Tensor:
        """Compute the loss of a chunk of tokens, and add its gradients to `grads` in place.

        Args:
            hidden: hidden states of the chunk, [rows, H].
            targets: [rows].
            positions: index of the chunk in the flattened positions of the micro-batch.
            parameters: result of the method `parameters`.
            grads: sum of gradients for `hidden`, followed by one for each of `parameters`; None if
                a tensor needs no gradient.

        Returns:
            The summed loss of the chunk, 0-d.
        """
        needs_grad = any(grad is not None for grad in grads)
        if self.is_linear:
            loss, grad = self.loss_and_logit_grad(
                F.linear(hidden, *parameters), targets, positions, needs_grad
            )
            if grad is None:
                return loss
            hidden_grad, weight_grad, *bias_grads = grads
            if hidden_grad is not None:
                hidden_grad += matmul_to_fp32(grad, parameters[0], self.device_type(hidden))
            if weight_grad is not None:
                add_matmul(weight_grad, grad.t(), hidden, self.device_type(hidden))
            if bias_grads and bias_grads[0] is not None:
                bias_grads[0] += grad.sum(0, dtype=bias_grads[0].dtype)
            return loss
        with torch.set_grad_enabled(needs_grad):
            leaf = hidden.detach().requires_grad_(needs_grad)
            output = self.forward(leaf[None])[0]
        loss, grad = self.loss_and_logit_grad(output.detach(), targets, positions, needs_grad)
        if grad is not None:
            chunk_grads = torch.autograd.grad(output, [leaf, *parameters], grad, allow_unused=True)
            for total, part in zip(grads, chunk_grads, strict=True):
                if total is not None and part is not None:
                    total += part
        return loss

    def loss_and_logit_grad(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | slice,
        needs_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the summed loss of a chunk of head outputs [rows, V], and its gradient.

        A subclass that overrides it computes another loss of the same logits.

        Args:
            logits: output of the head, which may be overwritten.
            targets: [rows].
            positions: index of the chunk in the flattened positions of the micro-batch.
            needs_grad: whether the gradient is needed.

        Returns:
            The summed loss, 0-d; and its gradient with respect to `logits`, in their dtype, None
            without `needs_grad`.
        """
        logit_map, smoothing, z = self.logit_map, self.label_smoothing, self.z_loss
        if needs_grad and self.correct is None and self.has_kernel(logits):
            return cross_entropy(logits, targets, logit_map.scale, logit_map.cap, smoothing, z)
        return _cross_entropy(logits, targets, logit_map, smoothing, needs_grad, self.correct, z)


class _HeadLossFunction(torch.autograd.Function):
    """The autograd function of `HeadLoss`.

    Loss and empty tensor come from one node, so its backward runs after the hooks on both of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        task: HeadLoss,
        with_gradients: bool,
        n_targets: int | None,
        targets: torch.Tensor,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the loss chunk by chunk, and save the summed gradients for the backward."""
        flat, loss = hidden.flatten(0, 1), torch.zeros((), device=hidden.device)
        rows, too_many = find_target_rows(targets, n_targets, task.device_type(hidden))
        if too_many is not None:
            # A NaN instead of an error, because the host must not wait for the device.
            loss.masked_fill_(too_many, torch.nan)
        if rows is not None:
            flat, targets = flat[rows], targets[rows]
        needs_grad = [with_gradients and needed for needed in ctx.needs_input_grad[4:]]
        grad, *sums = map(zeros_for_grad, (flat, *parameters), needs_grad)
        for part in chunk_slices(task, flat):
            grads = [None if grad is None else grad[part], *sums]
            positions = part if rows is None else rows[part]
            loss += task.add_chunk(flat[part], targets[part], positions, parameters, grads)
        ctx.save_for_backward(grad, rows, *sums)
        ctx.shape, ctx.dtypes = hidden.shape, [x.dtype for x in (hidden, *parameters)]
        return loss, hidden.new_empty(*hidden.shape[:-1], 0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, incoming: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Multiply the saved gradients by the incoming gradient, and cast them."""
        grad, rows, *sums = ctx.saved_tensors
        # Scaled while they are cast: one pass, and one rounding.
        grad, *sums = (
            None if x is None else torch.mul(x, incoming, out=torch.empty_like(x, dtype=dtype))
            for x, dtype in zip((grad, *sums), ctx.dtypes, strict=True)
        )
        if grad is not None and rows is not None:
            all_rows = grad.new_zeros(ctx.shape[:-1].numel(), ctx.shape[-1])
            grad = all_rows.index_copy_(0, rows, grad)
        return None, None, None, None, None if grad is None else grad.view(ctx.shape), *sums


def find_target_rows(
    targets: torch.Tensor, n_targets: int | None, device_type: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Find the rows of `targets` [rows] that have a target, without waiting for the device.

    Args:
        targets: [rows].
        n_targets: upper limit of the number of targets; None: unknown.
        device_type: on a CPU, the rows can also be found without `n_targets`.

    Returns:
        Indices of the rows, filled up to `n_targets` with the last row. They are None, which means
        all rows, if they cannot be found without waiting. Second, a 0-d bool that is True if there
        are more than `n_targets` targets; None without `n_targets`.
    """
    valid = targets != IGNORE_INDEX
    if device_type in _DEVICES_WITH_HOST_COUNTS and n_targets is None:
        return valid.nonzero().squeeze(1), None
    if n_targets is None:
        return None, None
    # The last position predicts nothing, so it may fill up the list.
    last = len(targets) - 1
    rows = torch.nonzero_static(valid, size=n_targets, fill_value=last).squeeze(1)
    return rows, valid.sum() > n_targets


def zeros_for_grad(like: torch.Tensor, needs_grad: bool) -> torch.Tensor | None:
    """Return zeros of the shape of `like` to sum its gradients; None without `needs_grad`.

    The dtype is that of `like`, but at least fp32.
    """
    if not needs_grad:
        return None
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def chunk_slices(head: HeadLoss, flat: torch.Tensor) -> Iterator[slice]:
    """Yield slices that divide the rows of `flat` [rows, H] into chunks of about equal size.

    The logits of a chunk have at most about 2^23 elements on a CPU, and 2^28 on an accelerator.
    """
    device_type = head.device_type(flat)
    elements = _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS_OF_AN_ACCELERATOR)
    number = -(-len(flat) * head.logits_per_token // elements)
    count = max(1, -(-len(flat) // max(1, number)))
    for begin in range(0, len(flat), count):
        yield slice(begin, begin + count)


def _cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    logit_map: LogitMap,
    label_smoothing: float,
    with_gradient: bool,
    correct: torch.Tensor | None,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the summed loss of a chunk of head outputs [rows, V] with plain torch operations.

    Only one fp32 tensor of that size exists at a time, or two with a soft cap.

    Args:
        logits: output of the head, before `logit_map`.
        targets: [rows].
        logit_map: maps the output to logits.
        label_smoothing: share of each target that is spread evenly over the vocabulary.
        with_gradient: also compute the gradient.
        correct: 0-d counter, to which the number of tokens is added whose target has the largest
            logit. None: they are not counted.
        z_loss: factor of the square of log Z that is added for each token; see `HeadLoss`.

    Returns:
        The summed loss, 0-d; and its gradient with respect to `logits`, in their dtype, or None
        without `with_gradient`.
    """
    dtype, vocabulary = logits.dtype, logits.shape[-1]
    mapped = logits if logit_map == LogitMap() else logit_map(logits.float())
    del logits
    if correct is not None:
        correct += (mapped.argmax(-1) == targets).sum()
    log_p = torch.log_softmax(mapped, -1, dtype=torch.float32)
    valid = targets != IGNORE_INDEX
    at = torch.where(valid, targets, 0)[:, None]
    losses, slope = log_p.gather(1, at).squeeze(1), None
    log_z = mapped.gather(1, at).squeeze(1) - losses if z_loss else None
    losses = losses * (label_smoothing - 1.0)
    if with_gradient and logit_map.cap is not None:  # d tanh = 1 - tanh^2
        slope = mapped.div_(logit_map.cap).square_().neg_().add_(1.0)
    del mapped
    if label_smoothing:
        losses -= log_p.mean(-1) * label_smoothing
    if log_z is not None:
        losses += z_loss * log_z.square()
    loss = torch.where(valid, losses, 0.0).sum()
    if not with_gradient:
        return loss, None
    grad = log_p.exp_()
    if log_z is not None:
        grad *= 1.0 + 2.0 * z_loss * log_z[:, None]
    if label_smoothing:
        grad -= label_smoothing / vocabulary
    grad.scatter_(1, at, grad.gather(1, at) - (1.0 - label_smoothing))
    if slope is not None:
        grad *= slope
    # One pass casts and scales the gradient, and clears rows without a label.
    out = grad if grad.dtype == dtype else torch.empty_like(grad, dtype=dtype)
    return loss, torch.mul(grad, valid[:, None] * logit_map.scale, out=out)


def matmul_to_fp32(a: torch.Tensor, b: torch.Tensor, device_type: str) -> torch.Tensor:
    """Compute `a @ b`, for bf16 matrices on CUDA with an fp32 result, otherwise in their dtype."""
    if device_type in _DEVICES_WITH_FP32_PRODUCTS and a.dtype == b.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def add_matmul(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, device_type: str) -> None:
    """Add `a @ b` to `total` in place, in the dtype of `total`.

    A product of bf16 matrices is added without rounding it to bf16 first. Rounding each chunk would
    add an error as large as that of rounding the final sum.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif device_type in _DEVICES_WITH_FP32_PRODUCTS:
        torch.addmm(total, a, b.to(a.dtype), out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
