"""Tokenised documents as samples of equal length.

Owns the concatenation of all documents and its cut into windows, read from the memory-mapped Arrow
file without a copy of the data set. Refuses to know the order in which samples are drawn.
"""

from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import Dataset

from toolkit.errors import DataError

FILLER = -1
"""Index of the filler sample: zeros with no supervised token, where a batch must be filled up."""

IGNORED = -100
"""Label of a token that the loss leaves out, as in transformers."""


class Samples(Dataset):
    """The concatenation of all documents, cut into windows of `sequence_length` tokens.

    `samples[i]` is `{"input_ids": [L], "labels": [L]}`, int64; labels are the unshifted input ids,
    as transformers expects them. `samples[FILLER]` is zeros whose labels are all `IGNORED`. What is
    left after the last whole window is not used; `tokens_dropped` says how much.

    Opening costs a step per record batch of the file, reading a window a binary search and a copy
    of L tokens. It pickles as the path of the file, not as its content.

    Args:
        tokens: one list column `input_ids` of integers, as `tokenise` returns it.
        sequence_length: tokens per sample, L.

    Raises:
        DataError: the tokens do not fill one window.
    """

    def __init__(self, tokens: datasets.Dataset, sequence_length: int) -> None:
        # A selection or shuffle is an index over the rows; the chunks below are read in file order.
        if tokens._indices is not None:
            tokens = tokens.flatten_indices()
        self.tokens = tokens
        self.sequence_length = sequence_length
        self._open()
        self.first, self.last = 0, self.tokens_total // sequence_length
        if not self.last:
            raise DataError(
                f"expected at least one sample of {sequence_length} tokens "
                f"(data.sequence_length), all documents together hold {self.tokens_total}; give "
                f"more text or set data.sequence_length to at most {max(self.tokens_total, 2)}"
            )

    def _open(self) -> None:
        column = self.tokens.data.column("input_ids")
        flat = (chunk.flatten() for chunk in column.chunks)
        self._chunks = [chunk.to_numpy() for chunk in flat if len(chunk)]
        self._ends = np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_chunks", "_ends")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @property
    def tokens_total(self) -> int:
        """Tokens of all documents."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def tokens_dropped(self) -> int:
        """Tokens after the last whole window, which no sample holds."""
        return self.tokens_total % self.sequence_length

    def view(self, first: int, last: int) -> "Samples":
        """Return the samples from `first` up to before `last` as Samples of their own; no copy."""
        if not 0 <= first <= last <= len(self):
            raise IndexError(f"no view from {first} to {last} of {len(self)} samples")
        other = object.__new__(Samples)
        other.__dict__.update(self.__dict__)
        other.first, other.last = self.first + first, self.first + last
        return other

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.sequence_length
        if index == FILLER:
            return {
                "input_ids": torch.zeros(length, dtype=torch.int64),
                "labels": torch.full((length,), IGNORED),
            }
        if not 0 <= index < len(self):
            raise IndexError(f"no sample {index} of {len(self)}")
        ids = torch.from_numpy(self._read((self.first + int(index)) * length))
        return {"input_ids": ids, "labels": ids.clone()}

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        return [self[index] for index in indices]

    def _read(self, start: int) -> np.ndarray:
        """Copy one window, from `start` on, out of the chunks that hold it."""
        window = np.empty(self.sequence_length, np.int64)
        filled = 0
        at = int(np.searchsorted(self._ends, start, side="right"))
        while filled < len(window):
            chunk = self._chunks[at]
            offset = start + filled - (int(self._ends[at]) - len(chunk))
            part = chunk[offset : offset + len(window) - filled]
            window[filled : filled + len(part)] = part
            filled += len(part)
            at += 1
        return window


def split(
    samples: Samples, share: float, max_eval: int | None = None
) -> tuple[Samples, Samples | None]:
    """Return training and evaluation samples: the last `share` of the windows is held out.

    At least one is held out where `share` is above 0, and at least one is left for training; a
    single sample is not split. The held-out part does not depend on `max_eval`, which only limits
    how much of it is evaluated (its first samples).
    """
    held = min(max(1, round(len(samples) * share)), len(samples) - 1) if share > 0 else 0
    if not held:
        return samples, None
    cut = len(samples) - held
    used = held if max_eval is None else min(held, max_eval)
    return samples.view(0, cut), samples.view(cut, cut + used)


def check_enough(samples: Any, world_size: int) -> None:
    """Refuse to train on fewer samples than there are ranks.

    Args:
        samples: what has a length and a `sequence_length`.
        world_size: number of ranks.

    Raises:
        DataError: there are fewer; ranks would train on the same sample at the same time.
    """
    if len(samples) < world_size:
        raise DataError(
            f"expected at least one training sample for each of the {world_size} ranks, got "
            f"{len(samples)} of {samples.sequence_length} tokens; give more text, or set a smaller "
            "data.sequence_length or fewer processes"
        )
