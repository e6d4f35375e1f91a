"""Losses of complete sequences on ranks that share rows (context parallelism).

[Note: sequences in parts] A rank has a part of every row, so it knows only its own targets of a
sequence. A loss such as DPO is not a sum over targets: it is a function of sums over each sequence.
So these sums are added over the ranks of the group before that function is applied. Every rank of
the group then computes the same loss of the complete sequences.

The derivative of the loss with respect to a rank's own sum is that with respect to the complete
sum, so the backward of the addition passes the gradient on unchanged. A backward that added the
gradients of the ranks would make them as many times too large as there are ranks. FSDP adds the
gradients of all ranks, which belong to different targets. The value of the loss is counted on the
first rank of each group only.
"""

from dataclasses import replace
from typing import Any, cast

import torch

from toolkit.mesh import View
from toolkit.training.loss import LossSum


def add_parts(values: torch.Tensor, context: View) -> torch.Tensor:
    """Add values over the ranks that share rows, with gradients for each rank's own. Collective.

    The backward is not collective; see [Note: sequences in parts].

    Args:
        values: this rank's part of each sum.
        context: the ranks (`Mesh.context`).

    Returns:
        The sums, bitwise identical on these ranks; `values` itself if there is one rank.
    """
    if context.size == 1:
        return values
    return cast(torch.Tensor, _AddParts.apply(values, context))


class _AddParts(torch.autograd.Function):
    """The autograd function of `add_parts`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, context: View) -> torch.Tensor:
        return context.sum(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def count_once(loss: LossSum, context: View) -> LossSum:
    """Set the values of a loss to 0 on all ranks that share rows but the first. Not collective.

    Gradients and `count` do not change. A value that is not finite becomes NaN instead of 0.

    Args:
        loss: the loss of complete sequences, the same on these ranks.
        context: the ranks (`Mesh.context`).
    """
    if context.rank == 0:
        return loss
    return replace(
        loss,
        total=loss.total - loss.total.detach(),
        parts={name: torch.zeros_like(value) for name, value in loss.parts.items()},
        part_counts={name: torch.zeros_like(count) for name, count in loss.part_counts.items()},
    )
