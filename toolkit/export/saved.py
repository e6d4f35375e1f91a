"""The tensors of a checkpoint by parameter name, compared with their digests when read."""

from collections.abc import Iterable, Iterator

import torch

from toolkit.checkpoint.commit import damaged_files, read_manifest
from toolkit.checkpoint.sources import Source, check_whole, damaged, parameter_names
from toolkit.errors import CheckpointError, ExportError
from toolkit.export.plan import TensorShapes
from toolkit.formats import (
    LANES,
    StoredTensor,
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
        manifest = {} if source.checkpoint is None else read_manifest(source.checkpoint)
        saved = manifest.get("tensors", {})
        self._digests: dict[str, str] = {
            name: saved[key]["digest"] for name, key in self.keys.items() if key in saved
        }

    def shapes(self) -> TensorShapes:
        """Return parameter name -> dtype and shape."""
        stored = {name: self.source.tensors[key] for name, key in self.keys.items()}
        return {name: (entry.dtype, entry.shape) for name, entry in stored.items()}

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
        without = [key for name, key in self.keys.items() if name not in self._digests]
        files = {chunk.file for key in without for chunk in self.source.locate(key)}
        names = sorted(str(file.relative_to(checkpoint)) for file in files)
        for name, fault in damaged_files(checkpoint, only=names):
            raise damaged(checkpoint / name, fault)

    def check_same(self, names: list[str]) -> None:
        """Check that tensors of which one is exported hold the same values.

        Raises:
            ExportError: they do not.
        """
        for other in names[1:]:
            left, right = self._stored(names[0]), self._stored(other)
            same = (left.dtype, left.shape) == (right.dtype, right.shape)
            if not same or first_difference(left, right)[0] is not None:
                raise ExportError(
                    f"{self.keys[names[0]]} and {self.keys[other]} are one parameter of the model, "
                    f"and differ in {self.source.folder}: the model was trained without its tie; "
                    "set tie_word_embeddings to false in the config given with --hf_assets"
                )

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the rows of a tensor in order, some at a time.

        Raises:
            CheckpointError: after the last one, that they are not what was saved.
        """
        stored = self._stored(name)
        if any(chunk.raw is None for chunk in stored.chunks):  # blobs that are read as a whole
            yield self.whole(name)
            return
        total = torch.zeros(LANES, dtype=torch.int64)
        for first, rows in blocks(stored):
            if name in self._digests:
                total += rows_digest(self.keys[name], rows, first)
            yield rows
        self._compare(name, total, stored)

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor in memory.

        Raises:
            CheckpointError: it is not what was saved.
        """
        stored = self._stored(name)
        tensor = whole(stored)
        total = torch.zeros(LANES, dtype=torch.int64)
        if tensor.numel() and name in self._digests:
            total = rows_digest(self.keys[name], tensor.reshape(stored.rows, -1), 0)
        self._compare(name, total, stored)
        return tensor

    def _stored(self, name: str) -> StoredTensor:
        entry = self.source.tensors[self.keys[name]]
        return StoredTensor(entry.dtype, entry.shape, tuple(self.source.locate(self.keys[name])))

    def _compare(self, name: str, total: torch.Tensor, stored: StoredTensor) -> None:
        if name in self._digests and hexadecimal(total) != self._digests[name]:
            files = sorted({str(chunk.file) for chunk in stored.chunks})
            raise CheckpointError(
                f"{self.keys[name]} has other bytes in {' or '.join(files[:2])} than were saved; "
                "use another checkpoint of the run"
            )
