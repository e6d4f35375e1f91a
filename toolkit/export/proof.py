"""Proof that the files of an export hold what memory, or a checkpoint, held.

[Note: proof of an export] Each written file is read back and its tensors are summed as
`formats.bit_sums` does. The sums must be those of the source. Of a running model, each rank sums
its part on its device, before anything is gathered, cast as the export casts it. Of a checkpoint,
the manifest holds them. Tensors that were converted (fused experts) are first loaded again the way
transformers loads them. So a byte that changed in a gather, a copy, a cast, a conversion or a write
is an error that names the tensor, and no folder is left.

If the source has no sum of its own (a merged adapter, tensors that no parameter takes, a
conversion into several dtypes), the sum of the values that reached the writer is compared. This
covers the cast and the write.

Costs one pass over the source and one over the files, which the page cache still holds.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toolkit.errors import ExportError, LoadingError
from toolkit.export.plan import ExportPlan
from toolkit.export.weight_file import TensorValues
from toolkit.formats import BLOCK, ExportGroup, StoredTensor, block_sum, row_sum
from toolkit.formats.bit_sums import sums_of_rows, wrapped
from toolkit.loading import load_group, plan_load_groups

SourceSum = Callable[[str, torch.dtype], int | None]
"""Returns the row sum of a stored tensor, given by name and cast to a dtype; None if unknown."""


@dataclass
class ExportProof:
    """The comparison of the written files of `plan` with the sums of their source."""

    plan: ExportPlan
    source_sum: SourceSum
    wrong: list[str] = field(default_factory=list)  # exported names
    _written: dict[str, int] = field(default_factory=dict)  # exported name -> sum of its values

    def record(self, group: ExportGroup, name: str, values: TensorValues) -> TensorValues:
        """Return the values of an exported tensor; sum them on their way without a source sum."""
        if self._is_known(group):
            return values
        return self._summed(name, values)

    def check(self, folder: Path, group: ExportGroup) -> None:
        """Compare the written tensors of `group` in `folder`; note those that differ in `wrong`."""
        names = [self.plan.names[name] for name in group.outputs]
        entries = {name: _in_folder(self.plan.tensors[name], folder) for name in names}
        if not self._is_known(group):
            sums = {name: row_sum(entry) for name, entry in entries.items()}
            self.wrong += [name for name in names if sums[name] != self._written.pop(name)]
        elif group.converted:
            self.wrong += names[:1] * (not self._is_loaded_right(group, entries))
        else:
            stored = self.plan.stored[group.sources[0]]
            for name, entry in entries.items():
                if row_sum(entry) != self.source_sum(stored, entry.dtype):
                    self.wrong.append(name)

    def finish(self) -> None:
        """Raise an ExportError if a written tensor is not that of the source."""
        if self.wrong:
            first_names = ", ".join(self.wrong[:3]) + ", ..." * (len(self.wrong) > 3)
            raise ExportError(
                f"other bytes were written of {len(self.wrong)} tensor(s) than their source held: "
                f"{first_names}. A device, its driver, the disk or this machine's memory is at "
                "fault, or something wrote to the weights during the export; nothing was left. "
                "Export again, on another machine if it happens again"
            )

    def _is_known(self, group: ExportGroup) -> bool:
        """Return whether the source has a sum for each parameter of `group` as it is exported."""
        dtypes = {self.plan.tensors[self.plan.names[name]].dtype for name in group.outputs}
        if not group.sources or (group.converted and len(dtypes) > 1):
            return False
        stored = [self.plan.stored[name] for name in group.sources]
        return all(self.source_sum(name, dtype) is not None for name in stored for dtype in dtypes)

    def _is_loaded_right(self, group: ExportGroup, entries: dict[str, StoredTensor]) -> bool:
        """Return whether transformers loads the source's parameters from a converted group."""
        (dtype,) = {entry.dtype for entry in entries.values()}
        parameters: dict[str, torch.Tensor] = {}
        try:
            for part in plan_load_groups(self._reader, entries):
                parameters |= load_group(self._reader, part, entries)
        except LoadingError:
            return False
        for name in group.sources:
            expected = self.source_sum(self.plan.stored[name], dtype)
            if name not in parameters or _sum_of(parameters[name].to(dtype)) != expected:
                return False
        return True

    @cached_property
    def _reader(self) -> PreTrainedModel:
        return copy.deepcopy(self.plan.model)  # reading changes a model's dtypes

    def _summed(self, name: str, values: TensorValues) -> Iterator[torch.Tensor]:
        """Yield the rows of a tensor, and keep the sum of what they are cast to."""
        place, first, total = self.plan.tensors[name], 0, 0
        for part in [values] if isinstance(values, torch.Tensor) else values:
            rows = part if len(place.shape) > 1 else part.reshape(1, -1)
            for block in rows.split(max(1, BLOCK * len(rows) // max(1, rows.nbytes))):
                total += block_sum(place, first, block.to(place.dtype))
                first += len(block)
            yield part
        self._written[name] = wrapped(total)


def _in_folder(place: StoredTensor, folder: Path) -> StoredTensor:
    (chunk,) = place.chunks
    return replace(place, chunks=(replace(chunk, file=folder / chunk.file),))


def _sum_of(tensor: torch.Tensor) -> int:
    """Return the sum of the rows of a tensor in memory; see [Note: bit sums]."""
    return int(sums_of_rows(tensor if tensor.ndim > 1 else tensor.reshape(-1, 1), 0)[1])
