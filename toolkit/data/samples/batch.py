"""A micro-batch of a rank: what goes into a model, and what each position is to predict."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

_OF_SEQUENCES = ("sequences", "reference", "desirable", "ends", "margin")
IGNORED = -100  # label of a token that the loss leaves out, as in transformers


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of token ids, and the token that follows each position."""

    inputs: dict[str, Any]
    """What the model's forward takes: `input_ids` [B, T] and other tensors by name; of the borders
    of documents two whole numbers."""
    targets: torch.Tensor
    """int64 [B, T]: the token that each position is to predict; `IGNORED`, as at the end of every
    row: none."""
    n_targets: int | None = None
    """How many positions have a target, where some others than the last of a row may have none: the
    host knows it before `targets` are on a device."""
    used: torch.Tensor | None = None
    """int64 [B]: the tokens of each row before what fills it up; None: those of the attention mask,
    all where there is none."""
    sequences: torch.Tensor | None = None
    """int64 [B, T]: the sequence of each position, counted through the batch, -1: of none. In
    preference tuning two that follow each other are a pair, the chosen one first."""
    n_sequences: int = 0
    reference: torch.Tensor | None = None
    """float32 [n_sequences]: log-probability of the targets of each by the reference."""
    desirable: torch.Tensor | None = None
    """bool [n_sequences / 2]: whether the first of each two is wanted; empty of pairs."""
    ends: torch.Tensor | None = None
    """int64 [n_sequences, 2]: row and position of each one's last token that is no padding token,
    at which a reward model reads its reward."""
    margin: torch.Tensor | None = None
    """float32 [n_sequences / 2]: by how much the first reward is to be above the second."""

    @classmethod
    def of(cls, labels: torch.Tensor, *, count: bool = False, **inputs: Any) -> "Batch":
        """Return the batch of `labels` [B, T] as transformers has them, each at its own token;
        `count`: with `n_targets`.
        """
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return cls(inputs, targets, int((targets != IGNORED).sum()) if count else None)

    @property
    def count(self) -> torch.Tensor:
        """The positions with a target, 0-d int64 on the device."""
        return (self.targets != IGNORED).sum()

    @property
    def real(self) -> torch.Tensor:
        """Which positions hold tokens of the data, bool [B, T]: not what fills rows up."""
        if self.used is not None:
            places = torch.arange(self.targets.shape[-1], device=self.targets.device)
            return places < self.used[:, None]
        mask = self.inputs.get("attention_mask")
        return torch.ones_like(self.targets, dtype=torch.bool) if mask is None else mask.bool()

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the batch: inputs, targets and what marks sequences."""
        fields = [getattr(self, name) for name in ("targets", "used", *_OF_SEQUENCES)]
        return [x for x in (*self.inputs.values(), *fields) if isinstance(x, torch.Tensor)]

    def to(self, device: torch.device | str, **how: Any) -> "Batch":
        """Return the batch on `device`, as `Tensor.to` moves a tensor."""
        return self._each(lambda tensor: tensor.to(device, **how))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory; called by PyTorch's `DataLoader`."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        inputs = {n: fn(x) if isinstance(x, torch.Tensor) else x for n, x in self.inputs.items()}
        others = {n: getattr(self, n) for n in ("used", *_OF_SEQUENCES)}
        moved: dict[str, Any] = {name: fn(x) for name, x in others.items() if x is not None}
        return replace(self, inputs=inputs, targets=fn(self.targets), **moved)
