"""Chunked cross entropy inside the LM head; its gradients are computed in the forward.

Owns the arithmetic: chunks of logits, their loss, and what it asks of hidden states and head. Knows
nothing of models; what one makes of its head's output, the caller says.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from toolkit.training.loss_kernel import IGNORE_INDEX, cross_entropy

# Logits of one chunk, in elements; they are held in fp32. Blocks above 32 MB malloc takes from the
# kernel each time, whose new pages cost as much as the arithmetic.
_CHUNK_ELEMENTS = {"cpu": 2**23}
_CHUNK_ELEMENTS_OF_AN_ACCELERATOR = 2**28
# Where the host can look at labels; elsewhere it would have to wait for the device.
_COUNTED = ("cpu",)
# Devices with products of bf16 that answer in fp32.
_WIDE_PRODUCTS = ("cuda",)
# Devices where loss and gradient of a chunk are one kernel.
_COMPILED = ("cuda",)


@dataclass(frozen=True)
class LogitMap:
    """What a model makes of its head's output z: `scale * z`, or `cap * tanh(scale * z / cap)`."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        if self.cap is not None:
            return torch.tanh(z * (self.scale / self.cap)).mul_(self.cap)
        return z if self.scale == 1.0 else z * self.scale


@dataclass(frozen=True)
class HeadLoss:
    """The summed cross entropy of `targets` behind a head; call it inside of the head's forward.

    The logits of one chunk of tokens exist at a time: on a CPU up to 32 MB in fp32. On an
    accelerator a chunk has up to 2^28 logits: 0.5 GB in bf16 and as much for their gradient. With
    the products, and what 16k targets leave for the backward, a step of 128,256 tokens and 4,096
    hidden values was measured at 2.5 GB above the model with a frozen head, and at 4.7 GB with a
    trained one.
    Where gradients are wanted, each chunk leaves its share before the next one: the hidden states'
    and, only where the head is trained, the head's; both are kept in fp32. The backward multiplies
    them by the gradient that comes in and casts them; it runs no product and needs no weight. So a
    trained model costs three products, a frozen head two, an evaluation one. Tokens without a label
    cost nothing where their number is known: on a CPU, or as the batch says it.

    The way of Liger's FusedLinearCrossEntropy (Hsu et al. 2024, arXiv:2410.10989).
    """

    module: nn.Module  # the head: it computes each token by itself, gathered where it was sharded
    forward: Callable[[torch.Tensor], torch.Tensor]  # for what is more than a linear layer
    vocabulary: int  # logits of a token
    logit_map: LogitMap = LogitMap()
    label_smoothing: float = 0.0
    on: str | None = None
    """Type of the device whose chunks and products it takes; empty: that of the hidden states."""
    correct: torch.Tensor | None = None
    """0-d integer, to which the tokens are added whose label has the largest logit. Costs a pass
    over the logits."""
    z_loss: float = 0.0
    """How much of the square of log Z, the logarithm of the sum of exponentials of the logits, is
    added for each token (PaLM, Chowdhery et al. 2022, section 5)."""

    def __call__(
        self, hidden: torch.Tensor, targets: torch.Tensor, n_targets: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, 0-d fp32, and an empty answer [B, T, 0] in place of the logits.

        Both go into the backward: the hooks of FSDP that begin it wait on the model's answer.

        Args:
            hidden: [B, T, H].
            targets: [B, T], the token that each position predicts; `IGNORE_INDEX` has no loss, and
                the last token of a row none.
            n_targets: how many there are, at most; with more of them the loss is NaN.
        """
        found: Any = _GradientsInForward.apply(
            self, torch.is_grad_enabled(), n_targets, targets.flatten(), hidden, *self.parameters()
        )
        return found

    def device_type(self, hidden: torch.Tensor) -> str:
        return self.on or hidden.device.type

    def has_kernel(self, tensor: torch.Tensor) -> bool:
        """Return whether what is computed of logits like `tensor` is one compiled kernel."""
        return tensor.dtype != torch.float64 and self.device_type(tensor) in _COMPILED

    @property
    def linear(self) -> bool:
        """Whether the head is no more than a linear layer."""
        return getattr(self.forward, "__func__", None) is nn.Linear.forward

    def parameters(self) -> list[torch.Tensor]:
        """Return weight and bias of a linear layer, of another module what is trained."""
        if not self.linear:
            return [p for p in self.module.parameters() if p.requires_grad]
        head: Any = self.module
        return [head.weight] if head.bias is None else [head.weight, head.bias]

    def add_chunk(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        parameters: tuple[torch.Tensor, ...],
        grads: list[torch.Tensor | None],
    ) -> torch.Tensor:
        """Return the loss of `hidden` [rows, H]; add to `grads`: of `hidden`, and of `parameters`,
        None where it is not wanted.
        """
        wanted = any(grad is not None for grad in grads)
        in_one = wanted and self.correct is None and self.has_kernel(hidden)

        def rule(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            made, smoothing, z = self.logit_map, self.label_smoothing, self.z_loss
            if in_one:
                return cross_entropy(logits, targets, made.scale, made.cap, smoothing, z)
            return _cross_entropy(logits, targets, made, smoothing, wanted, self.correct, z)

        if self.linear:
            loss, grad = rule(F.linear(hidden, *parameters))
            if grad is None:
                return loss
            of_hidden, of_weight, *of_bias = grads
            if of_hidden is not None:
                of_hidden += product(grad, parameters[0], self.device_type(hidden))
            if of_weight is not None:
                add_product(of_weight, grad.t(), hidden, self.device_type(hidden))
            if of_bias and of_bias[0] is not None:
                of_bias[0] += grad.sum(0, dtype=of_bias[0].dtype)
            return loss
        with torch.set_grad_enabled(wanted):
            leaf = hidden.detach().requires_grad_(wanted)
            output = self.forward(leaf[None])[0]
        loss, grad = rule(output.detach())
        if grad is not None:
            found = torch.autograd.grad(output, [leaf, *parameters], grad, allow_unused=True)
            for total, part in zip(grads, found, strict=True):
                if total is not None and part is not None:
                    total += part
        return loss


class _GradientsInForward(torch.autograd.Function):
    """See `HeadLoss`. One node of two outputs: its backward comes after the hooks on both."""

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
        flat, loss = hidden.flatten(0, 1), torch.zeros((), device=hidden.device)
        rows, too_many = chosen_rows(targets, n_targets, task.device_type(hidden))
        if too_many is not None:
            loss.masked_fill_(too_many, torch.nan)  # the host does not wait to know
        if rows is not None:
            flat, targets = flat[rows], targets[rows]
        of_hidden, *of_parameters = (with_gradients and w for w in ctx.needs_input_grad[4:])
        wanted = (of_hidden, *of_parameters)
        grad, *sums = map(accumulator, (flat, *parameters), wanted)
        for part in chunks(task, flat):
            own = [None if grad is None else grad[part], *sums]
            loss += task.add_chunk(flat[part], targets[part], parameters, own)
        ctx.save_for_backward(grad, rows, *sums)
        ctx.shape, ctx.dtypes = hidden.shape, [x.dtype for x in (hidden, *parameters)]
        return loss, hidden.new_empty(*hidden.shape[:-1], 0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, incoming: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grad, rows, *sums = ctx.saved_tensors
        # Rounded once, and scaled while they are cast, which is a pass over them anyway.
        grad, *sums = (
            None if x is None else torch.mul(x, incoming, out=torch.empty_like(x, dtype=dtype))
            for x, dtype in zip((grad, *sums), ctx.dtypes, strict=True)
        )
        if grad is not None and rows is not None:
            whole = grad.new_zeros(ctx.shape[:-1].numel(), ctx.shape[-1])
            grad = whole.index_copy_(0, rows, grad)
        return None, None, None, None, None if grad is None else grad.view(ctx.shape), *sums


def chosen_rows(
    targets: torch.Tensor, n_targets: int | None, device_type: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the rows that have a target, None for all where the host would have to ask the device;
    and whether there are more than `n_targets`, 0-d bool, where it was told.
    """
    valid = targets != IGNORE_INDEX
    if device_type in _COUNTED and n_targets is None:
        return valid.nonzero().squeeze(1), None
    if n_targets is None:
        return None, None
    last = len(targets) - 1  # fills up: the last token predicts nothing
    rows = torch.nonzero_static(valid, size=n_targets, fill_value=last).squeeze(1)
    return rows, valid.sum() > n_targets


def accumulator(like: torch.Tensor, wanted: bool) -> torch.Tensor | None:
    """Return zeros to add gradients up in, in fp32 at least; None where none is wanted."""
    if not wanted:
        return None
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def chunks(head: HeadLoss, flat: torch.Tensor) -> Iterator[slice]:
    """Give the rows of `flat` [rows, H] in chunks of one size, whose logits may exist at a time."""
    device_type = head.device_type(flat)
    elements = _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS_OF_AN_ACCELERATOR)
    number = -(-len(flat) * head.vocabulary // elements)
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
    """Return the summed loss of a chunk of the head's `logits` [rows, V], and their gradient in
    their dtype; count in `correct`. Nothing of their size is held twice in fp32, but where there is
    a cap.
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
    # Cast, scaled and cleared of tokens without a label in one pass.
    out = grad if grad.dtype == dtype else torch.empty_like(grad, dtype=dtype)
    return loss, torch.mul(grad, valid[:, None] * logit_map.scale, out=out)


def product(a: torch.Tensor, b: torch.Tensor, device_type: str) -> torch.Tensor:
    """Return `a @ b`, of bf16 in fp32 where the device has such a product."""
    if device_type in _WIDE_PRODUCTS and a.dtype == b.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, device_type: str) -> None:
    """Add `a @ b` to `total`, in fp32 where they are bf16: rounded to bf16 before they are added,
    the parts alone would be off by as much as the sum rounded once.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif device_type in _WIDE_PRODUCTS:
        torch.addmm(total, a, b.to(a.dtype), out_dtype=total.dtype, out=total)
    else:  # no product of this kind
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
