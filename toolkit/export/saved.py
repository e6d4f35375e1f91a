"""The tensors of a checkpoint by parameter name, compared with their digests when read."""

from collections.abc import Iterable, Iterator, Mapping

import torch

from toolkit.checkpoint.commit import damaged_files
from toolkit.checkpoint.sources import Source, check_whole, damaged, parameter_names
from toolkit.errors import CheckpointError, ExportError
from toolkit.export.plan import ExportPlan, TensorShapes
from toolkit.export.writer import TensorValues
from toolkit.formats import (
    LANES,
    ExportGroup,
    blocks,
    first_difference,
    hexadecimal,
    rows_digest,
    whole,
)


class SavedTensors:
    """The weights of one checkpoint.

    Args:
        names: parameter names of the model, where the prefix of the keys must be found.
    """

    def __init__(self, source: Source, names: Iterable[str] = ()):
        self.source = source
        self.prefix, self.keys = parameter_names(source, names)
        self._digests = source.digests()

    def shapes(self) -> TensorShapes:
        """Return parameter name -> dtype and shape."""
        return {name: self.source.tensors[key] for name, key in self.keys.items()}

    def check(self) -> None:
        """Check that each tensor is whole, and the files of those that have no digest.

        Raises:
            ExportError: chunks of a tensor overlap or leave a gap.
            CheckpointError: a file has other bytes than were saved.
        """
        check_whole(self.source, self.keys.values())
        checkpoint = self.source.checkpoint
        if checkpoint is None:
            return  # of another tool: there is nothing to compare with
        without = [key for key in self.keys.values() if key not in self._digests]
        files = {chunk.file for key in without for chunk in self.source.stored(key).chunks}
        names = sorted(str(file.relative_to(checkpoint)) for file in files)
        for name, fault in damaged_files(checkpoint, only=names):
            raise damaged(checkpoint / name, fault)

    def check_same(self, names: list[str]) -> None:
        """Refuse tensors of which one is exported and that do not hold the same values."""
        for other in names[1:]:
            keys = self.keys[names[0]], self.keys[other]
            left, right = map(self.source.stored, keys)
            same = (left.dtype, left.shape) == (right.dtype, right.shape)
            if not same or first_difference(left, right)[0] is not None:
                raise ExportError(
                    f"{keys[0]} and {keys[1]} are one parameter of the model, and differ in "
                    f"{self.source.folder}: the model was trained without its tie; set "
                    "tie_word_embeddings to false in the config given with --hf_assets"
                )

    def read_group(self, plan: ExportPlan, group: ExportGroup) -> Mapping[str, TensorValues]:
        """Return the outputs of a group; raises as `blocks` does."""
        if group.converted:
            parameters = {name: self.whole(plan.stored[name]) for name in group.sources}
            return plan.convert(group, parameters)
        (name,), (output,) = group.sources, group.outputs
        return {output: self.blocks(plan.stored[name])}

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the rows of a tensor in order, some at a time.

        Raises:
            CheckpointError: after the last one, that they are not what was saved.
        """
        key = self.keys[name]
        total = torch.zeros(LANES, dtype=torch.int64)
        for first, rows in blocks(self.source.stored(key)):
            if key in self._digests:
                total += rows_digest(key, rows, first)
            yield rows
        self._compare(key, total)

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor in memory; raises as `blocks` does."""
        key = self.keys[name]
        stored = self.source.stored(key)
        tensor, total = whole(stored), torch.zeros(LANES, dtype=torch.int64)
        if tensor.numel() and key in self._digests:
            total = rows_digest(key, tensor.reshape(stored.rows, -1), 0)
        self._compare(key, total)
        return tensor

    def _compare(self, key: str, total: torch.Tensor) -> None:
        if self._digests.get(key) not in (None, hexadecimal(total)):
            files = sorted({str(chunk.file) for chunk in self.source.stored(key).chunks})
            raise CheckpointError(
                f"{key} has other bytes in {' or '.join(files[:2])} than were saved; use another "
                "checkpoint of the run"
            )
