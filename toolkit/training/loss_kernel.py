"""Loss, or log-probabilities, and gradient of a chunk of logits in one compiled kernel.

`head_loss` and `head_logps` use these kernels on GPUs. Plain operations read and write the chunk
about eight times, in fp32. A kernel reads it two or three times and writes its gradient once, both
in the dtype of the logits. Each kernel is a custom operator, so that a plan, which runs on tensors
without values, knows what it allocates.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from toolkit import ranks
from toolkit.errors import one_line

IGNORE_INDEX = -100
_Rule = tuple[float, float | None, float, float]  # scale, soft cap, label smoothing, z-loss
_TwoTensors = tuple[torch.Tensor, torch.Tensor]
_TRIAL_ROWS = 4
_refused: set[torch.device] = set()  # devices that use plain operations


@torch.library.custom_op("toolkit::cross_entropy", mutates_args=())
def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: float,
    cap: float | None,
    label_smoothing: float,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the cross entropy of a chunk of logits, summed over its targets, and its gradient.

    Args:
        logits: output of a head, [rows, vocabulary].
        targets: int64 [rows]; `IGNORE_INDEX` has no loss.
        scale: factor by which the logits are multiplied.
        cap: soft cap of the logits: `cap * tanh(scale * z / cap)`; None: no cap.
        label_smoothing: share of each target that is spread evenly over the vocabulary.
        z_loss: factor of the square of log Z that is added for each token; see `HeadLoss`.

    Returns:
        The loss, 0-d fp32; and its gradient, with shape and dtype of `logits`.
    """
    rule = (scale, cap, label_smoothing, z_loss)
    return _run_compiled(loss_and_gradient, rule, logits, targets)


@cross_entropy.register_fake
def _fake_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: float,
    cap: float | None,
    label_smoothing: float,
    z_loss: float = 0.0,
) -> _TwoTensors:
    """Return uninitialised results of `cross_entropy` in their shapes, for fake tensors."""
    return logits.new_empty((), dtype=torch.float32), torch.empty_like(logits)


@torch.library.custom_op("toolkit::target_logps", mutates_args=())
def target_logps(
    logits: torch.Tensor, targets: torch.Tensor, scale: float, cap: float | None
) -> torch.Tensor:
    """Compute the log-probability of each target, fp32 [rows]; 0 for `IGNORE_INDEX`.

    See `cross_entropy` for the arguments.
    """
    return _run_compiled(compute_target_logps, (scale, cap), logits, targets)


@target_logps.register_fake
def _fake_target_logps(
    logits: torch.Tensor, targets: torch.Tensor, scale: float, cap: float | None
) -> torch.Tensor:
    """Return an uninitialised result of `target_logps` in its shape, for fake tensors."""
    return logits.new_empty(len(targets), dtype=torch.float32)


@torch.library.custom_op("toolkit::weighted_logps", mutates_args=())
def weighted_logps(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-probability of each target, and the gradient of their weighted sum.

    `weights` is [rows, 1]; see `cross_entropy` for the other arguments.

    Returns:
        The log-probabilities without weights, fp32 [rows]; and the gradient, with shape and dtype
        of `logits`.
    """
    return _run_compiled(logps_and_gradient, (scale, cap), logits, targets, weights)


@weighted_logps.register_fake
def _fake_weighted_logps(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    cap: float | None,
) -> _TwoTensors:
    """Return uninitialised results of `weighted_logps` in their shapes, for fake tensors."""
    return logits.new_empty(len(targets), dtype=torch.float32), torch.empty_like(logits)


def _run_compiled(function: Callable[..., Any], rule: tuple, *tensors: torch.Tensor) -> Any:
    """Call `function(*tensors, rule=rule)` compiled, or uncompiled if that failed on this device.

    Args:
        function: one of `loss_and_gradient`, `compute_target_logps` and `logps_and_gradient`.
        rule: numbers that are constants of the kernel: scale, soft cap or None and, for the loss,
            label smoothing and z-loss.
        tensors: tensors of [rows, ...]; one kernel serves any number of rows.
    """
    device = tensors[0].device
    if device in _refused:
        return function(*tensors, rule=rule)
    for tensor in tensors:
        # One kernel serves any number of rows.
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled_kernel(function, rule, device)(*tensors)


@functools.cache
def _compiled_kernel(
    function: Callable[..., Any], rule: tuple, device: torch.device
) -> Callable[..., Any]:
    """Return a compiled version of `function` that checks itself at its first call. Cached.

    The check compares compiled and uncompiled results on the first 4 rows. If they differ or the
    compilation fails, this is logged, and all kernels are uncompiled on this device from then on.
    """
    plain = functools.partial(function, rule=rule)
    compiled = torch.compile(plain)
    is_compared = False

    def compare_first(*tensors: torch.Tensor) -> Any:
        nonlocal is_compared
        if is_compared:
            return compiled(*tensors)
        is_compared = True
        try:
            few = [tensor[:_TRIAL_ROWS].clone() for tensor in tensors]
            expected, actual = plain(*few), compiled(*few)
            if isinstance(expected, torch.Tensor):
                expected, actual = (expected,), (actual,)
            pairs = zip(expected, actual, strict=True)
            size = _largest_logit(few[0], rule)
            why = "" if all(_is_close(a, b, size) for a, b in pairs) else "it gives other values"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # There is no compiler or no Triton, or one of them failed.
            why = one_line(error)
        if not why:
            return compiled(*tensors)
        ranks.log_once(
            f"NOTE       the loss uses plain operations instead of a compiled kernel: {why}"
        )
        _refused.add(device)
        return plain(*tensors)

    return compare_first


def _largest_logit(logits: torch.Tensor, rule: tuple) -> float:
    """Return an upper limit of the absolute logits after scale and soft cap."""
    size, cap = abs(rule[0]) * float(logits.abs().max()), rule[1]
    return size if cap is None else min(size, cap)


def _is_close(a: torch.Tensor, b: torch.Tensor, size: float) -> bool:
    """Return True if two results are equal up to rounding in their dtype.

    A gradient (2-d) is compared with the rounding error of its values. A result with fewer
    dimensions, such as a loss, is a difference of numbers of the magnitude `size`. So it is
    compared with the rounding error of such numbers.
    """
    # Processors sum a row in different orders: 1,003 values are up to 11 eps of fp32 from fp64.
    tolerance = max(8 * torch.finfo(a.dtype).eps, 64 * torch.finfo(torch.float32).eps)
    scale = a.float().norm() + (size * math.sqrt(a.numel()) if a.ndim < 2 else 0.0)
    return bool((a.float() - b.float()).norm() <= tolerance * scale)


def loss_and_gradient(logits: torch.Tensor, targets: torch.Tensor, rule: _Rule) -> _TwoTensors:
    """Compute the results of `cross_entropy` by operations that compile to one kernel."""
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


def compute_target_logps(
    logits: torch.Tensor, targets: torch.Tensor, rule: tuple[float, float | None]
) -> torch.Tensor:
    """Compute the result of `target_logps` by operations that compile to one kernel."""
    mapped, _ = _map_logits(logits, rule)
    most = mapped.amax(-1, keepdim=True)
    log_z = (most + torch.exp(mapped - most).sum(-1, keepdim=True).log()).squeeze(-1)
    target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    logps = torch.where(target, mapped, 0.0).sum(-1) - log_z
    return torch.where(targets != IGNORE_INDEX, logps, 0.0)


def logps_and_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    rule: tuple[float, float | None],
) -> _TwoTensors:
    """Compute the results of `weighted_logps` by operations that compile to one kernel."""
    mapped, bent = _map_logits(logits, rule)
    most = mapped.amax(-1, keepdim=True)
    shares = torch.exp(mapped - most)
    total = shares.sum(-1, keepdim=True)
    target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    logps = torch.where(target, mapped, 0.0).sum(-1) - (most + total.log()).squeeze(-1)
    grad = torch.where(target, 1.0, 0.0) - shares / total
    if bent is not None:  # d tanh = 1 - tanh^2
        grad = grad * (1.0 - bent * bent)
    valid = targets != IGNORE_INDEX
    grad = torch.where(valid[:, None], grad * (rule[0] * weights), 0.0)
    return torch.where(valid, logps, 0.0), grad.to(logits.dtype)


def _map_logits(
    logits: torch.Tensor, rule: tuple[float, float | None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply scale and soft cap to logits.

    Args:
        logits: output of a head, [rows, vocabulary].
        rule: (scale, soft cap or None).

    Returns:
        The mapped logits in fp32; and the tanh of the soft cap, which its derivative needs (None
        without a cap).
    """
    scale, cap = rule
    z = logits.float() * scale
    bent = None if cap is None else torch.tanh(z / cap)
    return z if cap is None or bent is None else bent * cap, bent
