"""Encoded rows as samples, padded, packed or wrapped, read from memory-mapped Arrow, not copied.

Owns how a sample is put together from rows and which of its labels count. Refuses to know the order
in which samples are drawn, and batches.

Rows are a data set with a column `input_ids` (lists of integers) and, where not everything is
learned, a column `spans`: begin, end, begin, end ... of the tokens that are. A token's label is its
id inside a span and `IGNORED` elsewhere; labels are unshifted, as transformers expects them. The
first token of a sample has nothing before it to be predicted from, so its label never counts.

Every kind here is a torch Dataset of dicts of int64 tensors, gives `FILLER` as a sample without a
label that counts, and pickles as the path of its file with its plan.
"""

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import Dataset

from toolkit.data.samples.fixed_length import FILLER, IGNORED, Samples
from toolkit.data.samples.packing import best_fit

Sample = dict[str, torch.Tensor]


class Rows:
    """Encoded rows, read one by one.

    Opening costs a step per record batch of the file, reading a row a binary search. It pickles as
    the path of the file.

    Args:
        tokens: the data set; `input_ids`, perhaps `spans`.
    """

    def __init__(self, tokens: datasets.Dataset) -> None:
        # A selection or shuffle is an index over the rows; the chunks below are read in file order.
        if tokens._indices is not None:
            tokens = tokens.flatten_indices()
        self.tokens = tokens
        self._open()

    def _open(self) -> None:
        self._ids = _Lists(self.tokens, "input_ids")
        self._spans = _Lists(self.tokens, "spans") if "spans" in self.tokens.column_names else None

    def __getstate__(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def supervised_in_part(self) -> bool:
        """Whether there are spans; without them every token counts."""
        return self._spans is not None

    def lengths(self) -> np.ndarray:
        """Return the tokens of every row; int64."""
        return self._ids.lengths()

    def ids(self, row: int) -> np.ndarray:
        """Return the token ids of a row: a view of the file."""
        return self._ids[row]

    def labels(self, row: int) -> np.ndarray:
        """Return the labels of a row, int64; that of its first token included."""
        ids = self._ids[row]
        if self._spans is None:
            return ids.astype(np.int64)
        return labels_of(ids, self._spans[row])


def labels_of(ids: np.ndarray, spans: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return `ids` where a span covers them and `IGNORED` elsewhere; int64."""
    labels = np.full(len(ids), IGNORED, np.int64)
    for begin, end in zip(spans[::2], spans[1::2], strict=True):
        labels[begin:end] = ids[begin:end]
    return labels


class _Lists:
    """A list column, by row."""

    def __init__(self, tokens: datasets.Dataset, name: str) -> None:
        chunks = [c for c in tokens.data.column(name).chunks if len(c)]
        self._values = [c.values.to_numpy(zero_copy_only=False) for c in chunks]
        self._offsets = [c.offsets.to_numpy() for c in chunks]
        self._ends = np.cumsum([len(c) for c in chunks], dtype=np.int64)

    def lengths(self) -> np.ndarray:
        parts = [np.diff(offsets) for offsets in self._offsets]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

    def __getitem__(self, row: int) -> np.ndarray:
        chunk = int(np.searchsorted(self._ends, row, side="right"))
        offsets = self._offsets[chunk]
        at = row - int(self._ends[chunk]) + len(offsets) - 1
        return self._values[chunk][offsets[at] : offsets[at + 1]]


class Pieces:
    """What packing and padding put into samples: rows, the long ones cut.

    A row of more than `limit` tokens becomes pieces of `limit` tokens and a rest, so no token is
    lost. Rows without a token become none.

    Args:
        rows: what is read.
        limit: tokens of a piece at most.
        chosen: the rows that are used; all where it is None.
    """

    def __init__(self, rows: Rows, limit: int, chosen: np.ndarray | None = None) -> None:
        self.rows, self.limit = rows, limit
        lengths = rows.lengths()
        self.of_row = np.arange(len(lengths)) if chosen is None else chosen
        lengths = lengths[self.of_row]
        pieces = -(-lengths // limit)
        self.empty, self.cut = int((pieces == 0).sum()), int((pieces > 1).sum())
        self.lengths = lengths.astype(np.int32)
        self.begins: np.ndarray | None = None
        if self.empty or self.cut:
            self.of_row = np.repeat(self.of_row, pieces)
            nth = np.arange(len(self.of_row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            self.begins = nth * limit
            left = np.repeat(lengths, pieces) - self.begins
            self.lengths = np.minimum(left, limit).astype(np.int32)

    def __len__(self) -> int:
        return len(self.of_row)

    def __getitem__(self, piece: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids (a view of the file) and the labels of a piece."""
        row = int(self.of_row[piece])
        ids, labels = self.rows.ids(row), self.rows.labels(row)
        if len(ids) > self.limit and self.begins is not None:
            begin = int(self.begins[piece])
            here = slice(begin, begin + self.limit)
            return ids[here], labels[here]
        return ids, labels


class Padded(Dataset):
    """One piece, one sample: `{"input_ids": [T], "labels": [T]}`, T its own length."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.order: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.pieces.lengths.sum(dtype=np.int64))

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of each of `samples`."""
        return self.pieces.lengths[samples]

    def by_length(self) -> "Padded":
        """Return the same samples from the shortest to the longest."""
        other = Padded(self.pieces)
        other.order = np.argsort(self.pieces.lengths, kind="stable")
        return other

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Sample:
        if index == FILLER:
            return {"input_ids": torch.zeros(1, dtype=torch.int64), "labels": _ignored(1)}
        _within(index, len(self))
        return padded_sample(*self.pieces[index if self.order is None else self.order[index]])


def padded_sample(ids: np.ndarray, labels: np.ndarray) -> Sample:
    """Return ids and labels as a sample of their own length."""
    labels[0] = IGNORED
    return {
        "input_ids": torch.from_numpy(ids.astype(np.int64)),
        "labels": torch.from_numpy(labels),
    }


class Packed(Dataset):
    """Whole pieces that share a sample of `sequence_length` tokens and do not see each other.

    `packed[i]` is `{"input_ids": [L], "labels": [L], "position_ids": [L]}`. Positions restart where
    a piece begins, by which transformers keeps the pieces apart where there is no attention mask.
    The rest of the sample is one more piece, of padding.

    Args:
        pieces: what is packed; their limit is L.
        pad_id: token that fills up.
    """

    def __init__(self, pieces: Pieces, pad_id: int = 0) -> None:
        self.pieces, self.pad_id = pieces, pad_id
        self.plan = best_fit(pieces.lengths, pieces.limit)

    @property
    def tokens(self) -> int:
        """Tokens of all samples, without padding."""
        return self.plan.tokens

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Sample:
        if index == FILLER:
            return packed_sample([], self.pieces.limit, self.pad_id)
        pieces = [self.pieces[p] for p in self.plan.bin(_within(index, len(self)))]
        return packed_sample(pieces, self.pieces.limit, self.pad_id)


def packed_sample(
    parts: list[tuple[np.ndarray, np.ndarray]], sequence_length: int, pad_id: int
) -> Sample:
    """Return (ids, labels) of pieces as one sample of `sequence_length` tokens; see `Packed`."""
    ids = np.full(sequence_length, pad_id, np.int64)
    labels = np.full(sequence_length, IGNORED, np.int64)
    positions = np.empty(sequence_length, np.int64)
    at = 0
    for part, wanted in parts:
        end = at + len(part)
        ids[at:end], labels[at:end] = part, wanted
        labels[at] = IGNORED
        positions[at:end] = np.arange(len(part))
        at = end
    positions[at:] = np.arange(sequence_length - at)
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions),
    }


class Wrapped(Dataset):
    """`Samples` (all rows joined and cut) with the labels of rows that are learned in part.

    Args:
        samples: the windows.
        rows: the same rows, with spans.
    """

    def __init__(self, samples: Samples, rows: Rows) -> None:
        self.samples, self.rows = samples, rows
        self.sequence_length = samples.sequence_length
        self._ends = np.cumsum(rows.lengths())

    def view(self, first: int, last: int) -> "Wrapped":
        """Return the samples from `first` up to before `last` as Wrapped of their own; no copy."""
        other = object.__new__(Wrapped)
        other.__dict__.update(self.__dict__)
        other.samples = self.samples.view(first, last)
        return other

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        sample = self.samples[index]
        if index == FILLER:
            return sample
        length = self.sequence_length
        begin = (self.samples.first + int(index)) * length
        row = int(np.searchsorted(self._ends, begin, side="right"))
        at = 0
        labels = sample["labels"]
        while at < length:
            own = self.rows.labels(row)
            skipped = begin + at - (int(self._ends[row]) - len(own))
            part = own[skipped : skipped + length - at]
            labels[at : at + len(part)] = torch.from_numpy(part)
            at, row = at + len(part), row + 1
        return sample


class Joined(Dataset):
    """Several data sets numbered through, as `mixture.Mixture` and `SampleOrder` number samples."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self._ends = np.cumsum([len(p) for p in self.parts])

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of each of `samples`; of parts that tell them."""
        which = np.searchsorted(self._ends, samples, side="right")
        out = np.empty(len(samples), np.int64)
        for i, part in enumerate(self.parts):
            mask = which == i
            out[mask] = part.lengths(samples[mask] - int(self._ends[i]) + len(part))
        return out

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Sample:
        if index == FILLER:
            return self.parts[0][FILLER]
        _within(index, len(self))
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[part][int(index) - int(self._ends[part]) + len(self.parts[part])]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return [self[index] for index in indices]


def _within(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise IndexError(f"no sample {index} of {count}")
    return int(index)


def _ignored(length: int) -> torch.Tensor:
    return torch.full((length,), IGNORED)
