"""Loss and gradient of a chunk of logits in one compiled kernel: `head_loss` uses it on GPUs.

As plain operations they read and write the chunk about eight times, in fp32; here it is read two or
three times and its gradient written once, both in the dtype of the logits. A custom operation, so
that a plan, on tensors without bytes, knows what it allocates.
"""

import functools
from collections.abc import Callable

import torch

from toolkit import ranks
from toolkit.errors import one_line

IGNORE_INDEX = -100
_Rule = tuple[float, float | None, float, float]  # scale, soft cap, label smoothing, z-loss
_Found = tuple[torch.Tensor, torch.Tensor]
_TRIED = 4  # rows
_refused: set[torch.device] = set()  # which take the plain operations


@torch.library.custom_op("toolkit::cross_entropy", mutates_args=())
def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: float,
    cap: float | None,
    label_smoothing: float,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross entropy, 0-d fp32, and its gradient, like `logits`.

    Args:
        logits: [rows, vocabulary], of a head; the model makes `scale * z` of them, or
            `cap * tanh(scale * z / cap)`.
        targets: int64 [rows]; `IGNORE_INDEX` has no loss.
    """
    rule = (scale, cap, label_smoothing, z_loss)
    if logits.device in _refused:
        return loss_and_gradient(logits, targets, rule)
    for tensor in (logits, targets):  # one kernel for any number of rows
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _kernel(rule, logits.device)(logits, targets)


@cross_entropy.register_fake
def _(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: float,
    cap: float | None,
    label_smoothing: float,
    z_loss: float = 0.0,
) -> _Found:
    return logits.new_empty((), dtype=torch.float32), torch.empty_like(logits)


@functools.cache
def _kernel(rule: _Rule, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], _Found]:
    """Return the kernel, once it gives on a few rows what the plain operations give; else those,
    which rank 0 says.
    """
    plain = functools.partial(loss_and_gradient, rule=rule)
    compiled = torch.compile(plain)

    def first(logits: torch.Tensor, targets: torch.Tensor) -> _Found:
        if tried:
            return compiled(logits, targets)
        tried.append(True)
        try:
            few = logits[:_TRIED].clone(), targets[:_TRIED].clone()
            pairs = zip(plain(*few), compiled(*few), strict=True)
            why = "" if all(_close(a, b) for a, b in pairs) else "it gives other values"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # no compiler, no Triton, a fault of theirs
            why = one_line(error)
        if not why:
            return compiled(logits, targets)
        ranks.say(f"NOTE       the loss takes plain operations, not a kernel of its own: {why}")
        _refused.add(device)
        return plain(logits, targets)

    tried: list[bool] = []
    return first


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they agree but for rounding in their dtype."""
    within = 8 * torch.finfo(a.dtype).eps
    a, b = a.float(), b.float()
    return bool((a - b).norm() <= within * a.norm())


def loss_and_gradient(logits: torch.Tensor, targets: torch.Tensor, rule: _Rule) -> _Found:
    """Return what `cross_entropy` returns, by plain operations that fuse into one kernel."""
    scale, cap, label_smoothing, z_loss = rule
    z = logits.float() * scale
    bent = None if cap is None else torch.tanh(z / cap)
    mapped = z if cap is None or bent is None else bent * cap
    most = mapped.amax(-1, keepdim=True)
    shares = torch.exp(mapped - most)
    total = shares.sum(-1, keepdim=True)
    target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    log_z = most + total.log()
    losses = log_z.squeeze(-1)
    losses = losses - torch.where(target, mapped, 0.0).sum(-1) * (1.0 - label_smoothing)
    grad = shares / total - torch.where(target, 1.0 - label_smoothing, 0.0)
    if z_loss:
        losses = losses + z_loss * log_z.squeeze(-1).square()
        grad = grad + 2.0 * z_loss * log_z * (shares / total)
    if label_smoothing:
        losses = losses - mapped.mean(-1) * label_smoothing
        grad = grad - label_smoothing / logits.shape[-1]
    if bent is not None:  # d tanh = 1 - tanh^2
        grad = grad * (1.0 - bent * bent)
    valid = targets != IGNORE_INDEX
    loss = torch.where(valid, losses, 0.0).sum()
    return loss, torch.where(valid[:, None], grad * scale, 0.0).to(logits.dtype)
