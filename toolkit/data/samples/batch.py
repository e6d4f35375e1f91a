"""A micro-batch of a rank: the inputs of the model, and the token that each position predicts."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from toolkit.errors import DataError

IGNORED = -100
"""Label of a token that the loss does not cover, as in transformers."""


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch: inputs of the model, and the target token of each position.

    In the shapes, B is the number of rows and T the number of positions in a row.
    """

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
    padding token. A reward model reads its reward there. In a part of the rows (`cut`), a position
    outside of it belongs to another part."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values of the columns that the row format declares, by name: [B, T, ...] for values per
    token, [n_sequences, ...] per sequence, [rows, ...] per row."""
    halves: "tuple[Batch, Batch] | None" = None
    """If each row is compared with the answer of another row: the rows' own answers, and the
    answers that they are compared with, which get no gradient. Each half has half of the sequences,
    and of the columns only those with values per token."""

    @classmethod
    def of(cls, labels: torch.Tensor, *, count: bool = False, **inputs: Any) -> "Batch":
        """Create a batch from `labels` that are not shifted, as in transformers.

        The target of each position is the label of the next position; the last one has no target.

        Args:
            labels: int64 [B, T]; `IGNORED` for tokens that the loss does not cover.
            count: set `n_targets`. If `labels` are on an accelerator, the host waits for it.
            inputs: arguments of the model's forward.
        """
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return cls(inputs, targets, int((targets != IGNORED).sum()) if count else None)

    @property
    def count(self) -> torch.Tensor:
        """Number of positions with a target; 0-d int64 on the device of `targets`."""
        return (self.targets != IGNORED).sum()

    @property
    def real(self) -> torch.Tensor:
        """Mask of positions that are not padding; bool [B, T]."""
        if self.used is not None:
            positions = torch.arange(self.targets.shape[-1], device=self.targets.device)
            return positions < self.used[:, None]
        mask = self.inputs.get("attention_mask")
        return torch.ones_like(self.targets, dtype=torch.bool) if mask is None else mask.bool()

    @property
    def trained(self) -> "Batch":
        """The batch whose forward gets a gradient: `halves[0]`, or this batch without halves."""
        return self if self.halves is None else self.halves[0]

    def tensors(self) -> list[torch.Tensor]:
        """List all tensors of the batch, including those of its `halves`."""
        values = [*self.inputs.values(), self.targets, self.used, self.sequences, self.ends]
        values += self.columns.values()
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        return tensors + [tensor for half in self.halves or () for tensor in half.tensors()]

    def cut(self, rank: int, size: int, token_columns: Collection[str] = ()) -> "Batch":
        """Return an equal part of every row, for ranks that share rows (context parallelism).

        Targets were shifted on complete rows, so the last position of a part predicts the first
        token of the next part. Positions are explicit. Document borders, `n_sequences` and columns
        per sequence or per row stay those of complete rows. `halves` are divided, too.

        Args:
            rank: number of the part, from 0.
            size: number of parts.
            token_columns: names of the columns with values per token.

        Raises:
            DataError: the rows do not divide, or have an attention mask.
        """
        rows, length = self.targets.shape
        if length % size or "attention_mask" in self.inputs:
            raise DataError(
                f"expected rows of a multiple of {size} tokens, with document borders and without "
                f"attention_mask, for sharding.context_parallel; got {length} tokens with "
                f"{', '.join(self.inputs)}"
            )
        width = length // size
        begin = rank * width

        def take_positions(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:, begin : begin + width].contiguous()

        def take(value: Any) -> Any:
            is_of_tokens = isinstance(value, torch.Tensor) and value.shape[:2] == (rows, length)
            return take_positions(value) if is_of_tokens else value

        positions = torch.arange(length).expand(rows, length)
        inputs = {"position_ids": positions} | self.inputs
        targets, sequences, ends = take(self.targets), self.sequences, self.ends
        halves = self.halves
        if halves is not None:
            first, second = (half.cut(rank, size, token_columns) for half in halves)
            halves = first, second
        return replace(
            self,
            inputs={name: take(value) for name, value in inputs.items()},
            targets=targets,
            n_targets=None if self.n_targets is None else int((targets != IGNORED).sum()),
            used=None if self.used is None else (self.used - begin).clamp(0, width),
            sequences=None if sequences is None else take_positions(sequences),
            ends=None if ends is None else ends - ends.new_tensor([0, begin]),
            columns={
                name: take_positions(tensor) if name in token_columns else tensor
                for name, tensor in self.columns.items()
            },
            halves=halves,
        )

    def to(self, device: torch.device | str, **options: Any) -> "Batch":
        """Return a copy on `device`; `options` are passed to `Tensor.to`."""
        return self._map(lambda tensor: tensor.to(device, **options))

    def pin_memory(self) -> "Batch":
        """Return a copy in page-locked memory; called by PyTorch's `DataLoader`."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Return a batch with `fn` applied to every tensor, including those of `halves`."""

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
