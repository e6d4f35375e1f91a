"""Samples of unequal length as one micro-batch.

Owns padding. Refuses to know which samples share a micro-batch.
"""

from dataclasses import dataclass

import torch

from toolkit.data.samples.fixed_length import IGNORED

MULTIPLE = 8
"""Padded lengths are multiples of this: fewer different shapes, and aligned ones."""


@dataclass(frozen=True)
class Pad:
    """Put samples into one micro-batch, filled up on the right to the longest of them.

    The result is `{"input_ids", "labels", "attention_mask"}`, each int64 [samples, T]; T is the
    longest length rounded up to a multiple of 8, but not beyond `sequence_length`, which may be all
    the positions that a model has. Padding has the label `IGNORED` and attention 0.
    """

    pad_id: int
    """Token that fills up; which one does not matter to the loss."""
    sequence_length: int
    """Tokens of the longest sample there can be."""

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        longest = max(len(s["input_ids"]) for s in samples)
        width = max(longest, min(-(-longest // MULTIPLE) * MULTIPLE, self.sequence_length))
        shape = (len(samples), width)
        ids = torch.full(shape, self.pad_id)
        labels = torch.full(shape, IGNORED)
        mask = torch.zeros(shape, dtype=torch.int64)
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            ids[row, :length] = sample["input_ids"]
            labels[row, :length] = sample["labels"]
            mask[row, :length] = 1
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}
