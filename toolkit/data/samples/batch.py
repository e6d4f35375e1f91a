"""A micro-batch of a rank: the inputs of the model, and the token that each position predicts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

IGNORED = -100
"""Label of a token that the loss does not cover, as in transformers."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of token ids, and the token that follows each position."""

    inputs: dict[str, Any]
    """Arguments of the model's forward: `input_ids` [B, T] and other tensors by name. The borders
    of documents include two integers."""
    targets: torch.Tensor
    """int64 [B, T]: the token that each position predicts; `IGNORED` for none, as in the last
    position of every row."""
    n_targets: int | None = None
    """Number of positions with a target, which the host needs before `targets` are on a device;
    None if only the last position of each row has no target."""
    used: torch.Tensor | None = None
    """int64 [B]: tokens of each row before its padding. None: the attention mask tells, or there is
    no padding."""
    sequences: torch.Tensor | None = None
    """int64 [B, T]: the sequence to which each position belongs, counted through the micro-batch;
    -1 for none. Two consecutive sequences are a pair, of which the first is the chosen one."""
    n_sequences: int = 0
    """Number of sequences."""
    ends: torch.Tensor | None = None
    """int64 [n_sequences, 2]: row and position of the last token of each sequence that is not the
    padding token. A reward model reads its reward there."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values of the columns that the row format declares, by name: [B, T, ...] for values per
    token, [n_sequences, ...] per sequence, [rows, ...] per row."""
    halves: "tuple[Batch, Batch] | None" = None
    """If each row is compared with the answer of another row: the rows' own answers, and the
    answers that they are compared with, which get no gradient. Each half has half of the sequences,
    and of the columns only those with values per token."""

    @classmethod
    def of(cls, labels: torch.Tensor, *, count: bool = False, **inputs: Any) -> "Batch":
        """Create a batch from `labels` [B, T] as transformers has them, each at its own token.

        Args:
            labels: int64 [B, T], not shifted; `IGNORED` for tokens outside of the loss.
            count: whether to count `n_targets`.
            inputs: arguments of the model's forward.
        """
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return cls(inputs, targets, int((targets != IGNORED).sum()) if count else None)

    @property
    def count(self) -> torch.Tensor:
        """Number of positions with a target, 0-d int64 on the device."""
        return (self.targets != IGNORED).sum()

    @property
    def real(self) -> torch.Tensor:
        """Mask of the positions that hold tokens of the data and no padding; bool [B, T]."""
        if self.used is not None:
            positions = torch.arange(self.targets.shape[-1], device=self.targets.device)
            return positions < self.used[:, None]
        mask = self.inputs.get("attention_mask")
        return torch.ones_like(self.targets, dtype=torch.bool) if mask is None else mask.bool()

    @property
    def trained(self) -> "Batch":
        """The part of the batch whose forward gets a gradient: the first half, or all of it."""
        return self if self.halves is None else self.halves[0]

    def tensors(self) -> list[torch.Tensor]:
        """List all tensors of the batch and of its halves."""
        values = [*self.inputs.values(), self.targets, self.used, self.sequences, self.ends]
        values += self.columns.values()
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        return tensors + [tensor for half in self.halves or () for tensor in half.tensors()]

    def to(self, device: torch.device | str, **options: Any) -> "Batch":
        """Copy the batch to `device`, with the options of `Tensor.to`."""
        return self._map(lambda tensor: tensor.to(device, **options))

    def pin_memory(self) -> "Batch":
        """Copy the batch to page-locked memory; called by PyTorch's `DataLoader`."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Apply `fn` to every tensor of the batch and of its halves."""

        def apply(value: Any) -> Any:
            return fn(value) if isinstance(value, torch.Tensor) else value

        halves = self.halves
        if halves is not None:
            first, second = halves
            halves = first._map(fn), second._map(fn)
        return replace(
            self,
            inputs={name: apply(value) for name, value in self.inputs.items()},
            targets=fn(self.targets),
            used=apply(self.used),
            sequences=apply(self.sequences),
            ends=apply(self.ends),
            columns={name: fn(tensor) for name, tensor in self.columns.items()},
            halves=halves,
        )
