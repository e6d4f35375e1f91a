"""The loss of distillation: a model imitates the distribution of a frozen teacher.

The teacher runs first. Only the inputs of its head are kept. The teacher's head is gathered again
while the model's head computes, so that both have the logits of one chunk of tokens at a time.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from toolkit.data.samples.batch import Batch
from toolkit.training.head_divergence import (
    Divergence,
    HeadDivergence,
    Teacher,
    TeacherHead,
    TopLogps,
)
from toolkit.training.head_loss import IGNORE_INDEX, HeadLoss, LogitMap
from toolkit.training.loss import LossSum, find_head_loss, run_in_head

# Positions whose logits exist at the same time in a pass of the teacher.
_POSITIONS_PER_CHUNK = 512


def distillation_loss(
    model: nn.Module,
    teacher: Teacher,
    batch: Batch,
    divergence: Divergence,
    *,
    device_type: str | None = None,
    accuracy: bool = False,
) -> LossSum:
    """Compute the loss of distillation of one micro-batch, summed over the supervised tokens.

    Args:
        model: a causal LM, sharded or not.
        teacher: the result of `run_teacher` for this micro-batch.
        batch: the micro-batch.
        divergence: the loss of a token.
        device_type: device type whose chunk sizes are used; None: that of the batch.
        accuracy: also count the targets that the model predicts correctly (argmax).

    Returns:
        The loss, with the metrics `kl`, `cross_entropy`, `agreement` and maybe `accuracy`.
    """
    sums = {
        name: torch.zeros((), device=batch.targets.device)
        for name in ("kl", "cross_entropy", "agreement", *(["accuracy"] if accuracy else []))
    }
    options: dict[str, Any] = {"teacher": teacher, "divergence": divergence, "sums": sums}
    head = find_head_loss(model, batch, device_type)
    if head is None:
        # The logits of the model take the place of the head's input.
        logits = model(**batch.inputs).logits
        task = HeadDivergence(nn.Identity(), _identity, logits.shape[-1], **options)
        total, empty_logits = task(logits, batch.targets, batch.n_targets)
    else:
        task = HeadDivergence(
            head.module, head.forward, head.vocabulary, head.logit_map, on=device_type, **options
        )
        total, empty_logits = run_in_head(model, batch, task)
    # The sum is 0; it makes the backward run through the model's output, where FSDP's hooks wait.
    return LossSum(total + empty_logits.sum(dtype=torch.float32), batch.count, sums)


@torch.no_grad()
def run_teacher(
    teacher: nn.Module, batch: Batch, divergence: Divergence, device_type: str | None = None
) -> TeacherHead:
    """Run the forward of a frozen teacher on a micro-batch, up to its head. Collective.

    Its logits are computed later, chunk by chunk. If the teacher does something else with its
    logits, all logits of the micro-batch are kept instead.

    Args:
        teacher: a causal LM in eval mode, sharded or not.
        batch: the micro-batch.
        divergence: the loss of a token.
        device_type: device type whose chunk sizes are used; None: that of the batch.
    """
    head = find_head_loss(teacher, batch, device_type)
    if head is None:
        logits = teacher(**batch.inputs).logits.flatten(0, 1)
        return TeacherHead(logits, _identity, logits.shape[-1], LogitMap(), divergence)
    hidden, _ = run_in_head(teacher, batch, _keep_input)
    gathered: Callable[[], Any] = partial(_gathered, teacher, head)
    flat = hidden.flatten(0, 1)
    return TeacherHead(flat, head.forward, head.vocabulary, head.logit_map, divergence, gathered)


@torch.no_grad()
def evaluate_teacher(
    model: nn.Module, batch: Batch, divergence: Divergence, width: int
) -> TopLogps:
    """Compute the teacher's top-k log-probabilities at the supervised positions. Collective.

    Args:
        model: the teacher, in eval mode.
        batch: the micro-batch.
        divergence: the loss of a token; its `top_k` is set.
        width: number of tokens of the vocabulary that the distribution covers.

    Returns:
        The values at the positions with a target, in their order.
    """
    teacher = run_teacher(model, batch, divergence)
    positions = (batch.targets.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    assert divergence.top_k is not None
    ids = [positions.new_zeros(0, divergence.top_k)]
    logps = [teacher.hidden.new_zeros(0, divergence.top_k + 1, dtype=torch.float32)]
    with teacher.gathered():
        for chunk in positions.split(_POSITIONS_PER_CHUNK):
            top = teacher.logps(chunk, width)
            assert isinstance(top, TopLogps)
            ids.append(top.ids)
            logps.append(top.logps.float())
    return TopLogps(torch.cat(ids), torch.cat(logps))


def _keep_input(
    hidden: torch.Tensor, targets: torch.Tensor, n_targets: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the head, and an empty tensor [B, T, 0] in place of the logits."""
    return hidden, hidden.new_empty(*hidden.shape[:-1], 0)


def _identity(x: torch.Tensor) -> torch.Tensor:
    """Return `x`."""
    return x


@contextlib.contextmanager
def _gathered(model: nn.Module, head: HeadLoss) -> Iterator[None]:
    """Gather the parameters of the head of a sharded model within the context. Collective."""
    unit = _find_unit(model, head.module)
    if unit is None:
        yield
        return
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def _find_unit(model: nn.Module, module: nn.Module) -> Any:
    """Return the FSDP unit that holds the parameters of `module`; None if it is not sharded."""
    name = next(name for name, candidate in model.named_modules() if candidate is module)
    parts = name.split(".")
    ancestors = [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
    units = (model.get_submodule(ancestor) for ancestor in ancestors)
    return next((unit for unit in units if hasattr(unit, "unshard")), None)
