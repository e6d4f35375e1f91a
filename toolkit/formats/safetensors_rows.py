"""Rows of a safetensors tensor for transformers' loader, copied or cast out of the mapped file."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from toolkit.formats.safetensors_header import DTYPE_NAMES, TensorEntry


class OpenFiles(contextlib.ExitStack):
    """The open files of a checkpoint, and how many of their bytes were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.requested = 0
        self._files: dict[Path, Any] = {}
        self._lock = threading.Lock()

    def tensor(self, name: str, entry: TensorEntry) -> Any:
        """Return safetensors' slice of a tensor; nothing is read yet."""
        if entry.file not in self._files:
            self._files[entry.file] = self.enter_context(safe_open(entry.file, framework="pt"))
        return self._files[entry.file].get_slice(name)

    def count(self, nbytes: int) -> None:
        """Add to the bytes asked for; from any thread."""
        with self._lock:
            self.requested += nbytes


class FileTensor:
    """A tensor in a file, with the interface of safetensors' slice that transformers' loader uses.

    Args:
        dtype: to cast floating values to while copying; None keeps the file's.
        copy: False returns what may point into the file, uncast, for a caller that moves it to
            another device at once.
        rows: number of rows to pretend to have: an embedding that was resized. New rows are the
            mean of the old ones.
    """

    def __init__(
        self,
        reader: OpenFiles,
        name: str,
        entry: TensorEntry,
        dtype: torch.dtype | None = None,
        rows: int | None = None,
        copy: bool = True,
    ):
        self._reader, self._inner, self._entry = reader, reader.tensor(name, entry), entry
        self._dtype = dtype if dtype and entry.dtype.is_floating_point else entry.dtype
        self._copy = copy
        self._shape = entry.shape if rows is None else (rows, *entry.shape[1:])

    def get_shape(self) -> list[int]:
        """Return the shape, as safetensors' slices do."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return the dtype in the file by its safetensors name."""
        return DTYPE_NAMES[self._entry.dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a part of the tensor; only that part is read."""
        piece = self._inner[index] if self._shape == self._entry.shape else self._resized(index)
        self._reader.count(piece.numel() * self._entry.dtype.itemsize)
        if not self._copy:
            return piece
        return torch.empty(piece.shape, dtype=self._dtype).copy_(piece)

    def _resized(self, index: Any) -> torch.Tensor:
        index = index if isinstance(index, tuple) else (index,)
        rows = index[0] if isinstance(index[0], slice) else slice(None)
        begin, end, _ = rows.indices(self._shape[0])
        old = self._entry.shape[0]
        kept = self._inner[(slice(min(begin, old), min(end, old)), *index[1:])]
        fresh = end - max(begin, old)
        if fresh <= 0:
            return kept
        total = torch.zeros(self._entry.shape[1:], dtype=torch.float64)
        for start in range(0, old, 4096):
            total += self._inner[start : min(start + 4096, old)].double().sum(0)
        mean = (total / old).to(self._entry.dtype)
        return torch.cat([kept, mean.expand(fresh, *mean.shape)[(slice(None), *index[1:])]])
