"""Encoded rows as samples: windows, packed or padded; read from memory-mapped Arrow, not copied.

Rows are a data set with a column `input_ids` (lists of integers) and, where not everything is
learned, a column `spans`: begin, end, begin, end ... of the tokens that are. A token's label is its
id inside a span and `IGNORED` elsewhere; labels are unshifted, as transformers expects them. The
first token of a sample has nothing before it to be predicted from, so its label never counts.

Every kind here is a torch Dataset of dicts of int64 tensors, gives `FILLER` as a sample without a
label that counts, and pickles as the path of its file with its plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import Dataset

from toolkit.data.samples.packing import best_fit
from toolkit.errors import DataError

FILLER = -1
"""Index of the filler sample: no supervised token, where a batch must be filled up."""

IGNORED = -100
"""Label of a token that the loss leaves out, as in transformers."""

MULTIPLE = 8
"""Padded lengths are multiples of this: fewer different shapes, and aligned ones."""

Sample = dict[str, torch.Tensor]


class EncodedRows:
    """Encoded rows, read one by one or as one text.

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

    @property
    def total(self) -> int:
        """Tokens of all rows."""
        return self._ids.total

    @cached_property
    def ends(self) -> np.ndarray:
        """Tokens up to the end of each row; int64."""
        return np.cumsum(self.lengths())

    def lengths(self) -> np.ndarray:
        """Return the tokens of every row; int64."""
        return self._ids.lengths()

    def ids(self, row: int) -> np.ndarray:
        """Return the token ids of a row: a view of the file."""
        return self._ids[row]

    def joined(self, begin: int, count: int) -> np.ndarray:
        """Return `count` token ids of all rows joined, from `begin` on; int64, a copy."""
        return self._ids.joined(begin, count)

    def labels(self, row: int) -> np.ndarray:
        """Return the labels of a row, int64; that of its first token included."""
        ids = self._ids[row]
        return ids.astype(np.int64) if self._spans is None else labels_of(ids, self._spans[row])


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
        self._rows = np.cumsum([len(c) for c in chunks], dtype=np.int64)
        self._ends = np.cumsum([o[-1] - o[0] for o in self._offsets], dtype=np.int64)

    @property
    def total(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def lengths(self) -> np.ndarray:
        parts = [np.diff(offsets) for offsets in self._offsets]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

    def __getitem__(self, row: int) -> np.ndarray:
        chunk = int(np.searchsorted(self._rows, row, side="right"))
        offsets = self._offsets[chunk]
        at = row - int(self._rows[chunk]) + len(offsets) - 1
        return self._values[chunk][offsets[at] : offsets[at + 1]]

    def joined(self, begin: int, count: int) -> np.ndarray:
        out = np.empty(count, np.int64)
        filled, chunk = 0, int(np.searchsorted(self._ends, begin, side="right"))
        while filled < count:
            last = int(self._offsets[chunk][-1])
            first = last - (int(self._ends[chunk]) - begin - filled)
            part = self._values[chunk][first : min(last, first + count - filled)]
            out[filled : filled + len(part)] = part
            filled, chunk = filled + len(part), chunk + 1
        return out


class Windows(Dataset):
    """All rows joined and cut into windows of L tokens: `{"input_ids": [L], "labels": [L]}`.

    What is left after the last whole window is not used; `tokens_dropped` says how much.

    Args:
        rows: what is read.
        sequence_length: tokens per sample, L.

    Raises:
        DataError: the tokens do not fill one window.
    """

    def __init__(self, rows: EncodedRows, sequence_length: int) -> None:
        self.rows, self.sequence_length = rows, sequence_length
        self.first, self.last = 0, rows.total // sequence_length
        if not self.last:
            raise DataError(
                f"expected at least one sample of {sequence_length} tokens "
                f"(data.sequence_length), all documents together hold {rows.total}; give "
                f"more text or set data.sequence_length to at most {max(rows.total, 2)}"
            )

    @property
    def tokens_total(self) -> int:
        """Tokens of all documents."""
        return self.rows.total

    @property
    def tokens_dropped(self) -> int:
        """Tokens after the last whole window, which no sample holds."""
        return self.rows.total % self.sequence_length

    def view(self, first: int, last: int) -> "Windows":
        """Return the samples from `first` up to before `last` as Windows of their own; no copy."""
        if not 0 <= first <= last <= len(self):
            raise IndexError(f"no view from {first} to {last} of {len(self)} samples")
        other = object.__new__(Windows)
        other.__dict__.update(self.__dict__)
        other.first, other.last = self.first + first, self.first + last
        return other

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> Sample:
        length = self.sequence_length
        if index == FILLER:
            return {
                "input_ids": torch.zeros(length, dtype=torch.int64),
                "labels": torch.full((length,), IGNORED),
            }
        begin = (self.first + _within(index, len(self))) * length
        ids = self.rows.joined(begin, length)
        labels = self._labels(begin) if self.rows.supervised_in_part else ids.copy()
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}

    def _labels(self, begin: int) -> np.ndarray:
        labels = np.empty(self.sequence_length, np.int64)
        row, at = int(np.searchsorted(self.rows.ends, begin, side="right")), 0
        while at < len(labels):
            own = self.rows.labels(row)
            skipped = begin + at - (int(self.rows.ends[row]) - len(own))
            part = own[skipped : skipped + len(labels) - at]
            labels[at : at + len(part)] = part
            at, row = at + len(part), row + 1
        return labels


class Pieces:
    """What packing and padding put into samples: rows, the long ones cut.

    A row of more than `limit` tokens becomes pieces of `limit` tokens and a rest, so no token is
    lost. Rows without a token become none.

    Args:
        rows: what is read.
        limit: tokens of a piece at most.
        chosen: the rows that are used; all where it is None.
    """

    def __init__(self, rows: EncodedRows, limit: int, chosen: np.ndarray | None = None) -> None:
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
            return padded_sample(np.zeros(1, np.int64), np.zeros(1, np.int64))
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
        part = int(np.searchsorted(self._ends, _within(index, len(self)), side="right"))
        return self.parts[part][int(index) - int(self._ends[part]) + len(self.parts[part])]


@dataclass(frozen=True)
class PadCollate:
    """Put samples into one micro-batch, filled up on the right to the longest of them.

    The result is `{"input_ids", "labels", "attention_mask"}`, each int64 [samples, T]; T is the
    longest length rounded up to a multiple of 8, but not beyond `sequence_length`, which may be all
    the positions that a model has. Padding has the label `IGNORED` and attention 0.
    """

    pad_id: int
    """Token that fills up; which one does not matter to the loss."""
    sequence_length: int
    """Tokens of the longest sample there can be."""

    def __call__(self, samples: list[Sample]) -> Sample:
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


def _within(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise IndexError(f"no sample {index} of {count}")
    return int(index)
