"""Encoded rows as samples: windows, packed or padded; read from memory-mapped Arrow, not copied.

Rows are a data set with a column `input_ids` (lists of integers) and, where not everything is
learned, a column `spans`: begin, end, begin, end ... of the tokens that are. A token's label is its
id inside a span and `IGNORED` elsewhere; labels are unshifted, as transformers expects them. The
first token of a sample has nothing before it to be predicted from, so its label never counts.

Every kind here is a torch Dataset of dicts of int64 tensors, gives `FILLER` as a sample without a
label that counts, and pickles as the path of its file with its plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, default_collate

from toolkit.data.samples.packing import best_fit
from toolkit.errors import DataError
from toolkit.models.attention import document_borders

FILLER = -1  # index of the sample without a supervised token that fills up a batch
IGNORED = -100  # label of a token that the loss leaves out, as in transformers
MULTIPLE = 8  # padded lengths are multiples of this: fewer different shapes, and aligned ones

Sample = dict[str, torch.Tensor]
Piece = tuple[np.ndarray, np.ndarray]  # token ids and labels of a row, or of a part of one
Chosen = range | np.ndarray | None  # numbers of the windows or rows that are used; None: all


class EncodedRows:
    """Encoded rows, read one by one or as one text."""

    def __init__(self, tokens: datasets.Dataset) -> None:
        # A selection or shuffle is an index over the rows; columns are read in file order.
        self.tokens = tokens.flatten_indices() if tokens._indices is not None else tokens
        self._ids = self.tokens.data.column("input_ids")
        spans = "spans" in self.tokens.column_names  # else every token counts
        self._spans = self.tokens.data.column("spans") if spans else None
        self._texts = [chunk.flatten().to_numpy() for chunk in self._ids.chunks]
        self._text_ends = np.cumsum([len(text) for text in self._texts], dtype=np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedRows, (self.tokens,)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total(self) -> int:
        """Tokens of all rows."""
        return int(self._text_ends[-1]) if len(self._text_ends) else 0

    @cached_property
    def ends(self) -> np.ndarray:
        """Tokens up to the end of each row; int64."""
        return np.cumsum(self.lengths())

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of every row; int64."""
        return pc.list_value_length(self._ids).to_numpy().astype(np.int64)

    def ids(self, row: int) -> np.ndarray:
        """Return the token ids of a row: a view of the file."""
        return self._ids[row].values.to_numpy()

    def labels(self, row: int) -> np.ndarray:
        """Return the labels of a row, int64; that of its first token included."""
        ids = self.ids(row)
        if self._spans is None:
            return ids.astype(np.int64)
        return labels_of(ids, self._spans[row].values.to_numpy())

    def joined(self, begin: int, count: int) -> Piece:
        """Return `count` tokens of all rows joined, from `begin` on, and their labels; copies."""
        ids = _joined(begin, count, self._text_ends, self._texts.__getitem__)
        if self._spans is None:
            return ids, ids.copy()
        return ids, _joined(begin, count, self.ends, self.labels)


def _joined(
    begin: int, count: int, ends: np.ndarray, part: Callable[[int], np.ndarray]
) -> np.ndarray:
    """Return `count` values from `begin` on of all parts joined; `ends` is where each part ends."""
    found, at = [], int(np.searchsorted(ends, begin, side="right"))
    while count:
        values = part(at)
        first = begin - int(ends[at]) + len(values)
        found.append(values[first : first + count])
        begin, count, at = begin + len(found[-1]), count - len(found[-1]), at + 1
    return np.concatenate(found).astype(np.int64)


def labels_of(ids: np.ndarray, spans: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return `ids` where a span covers them and `IGNORED` elsewhere; int64."""
    labels = np.full(len(ids), IGNORED, np.int64)
    for begin, end in zip(spans[::2], spans[1::2], strict=True):
        labels[begin:end] = ids[begin:end]
    return labels


class Windows(Dataset):
    """All rows joined and cut into windows of L tokens: `{"input_ids": [L], "labels": [L]}`.

    The `tokens_dropped` after the last whole window are not used; no whole window is a DataError.
    """

    def __init__(self, rows: EncodedRows, sequence_length: int, chosen: Chosen = None) -> None:
        count, self.tokens_dropped = divmod(rows.total, sequence_length)
        if not count:
            raise DataError(
                f"expected at least one sample of {sequence_length} tokens "
                f"(data.sequence_length), all documents together hold {rows.total}; give "
                f"more text or set data.sequence_length to at most {max(rows.total, 2)}"
            )
        self.rows, self.sequence_length = rows, sequence_length
        self.chosen = range(count) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Sample:
        length = self.sequence_length
        if index == FILLER:
            return padded_sample(np.zeros(length, np.int64), np.full(length, IGNORED))
        begin = self.chosen[_within(index, len(self))] * length
        ids, labels = self.rows.joined(begin, length)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


class Pieces:
    """What packing and padding put into samples: rows, long ones as pieces of `limit` tokens and a
    rest; rows without a token become none.
    """

    def __init__(self, rows: EncodedRows, limit: int, chosen: Chosen = None) -> None:
        self.rows, self.limit = rows, limit
        used = np.arange(len(rows)) if chosen is None else np.asarray(chosen)
        lengths = rows.lengths()[used]
        pieces = -(-lengths // limit)
        self.empty, self.cut = int((pieces == 0).sum()), int((pieces > 1).sum())
        self.of_row = np.repeat(used, pieces)
        nth = np.arange(len(self.of_row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self.begins = (nth * limit).astype(np.int32)
        left = np.repeat(lengths, pieces) - self.begins
        self.lengths = np.minimum(left, limit).astype(np.int32)

    def __len__(self) -> int:
        return len(self.of_row)

    def __getitem__(self, piece: int) -> Piece:
        """Return the ids (a view of the file) and the labels of a piece."""
        row, begin = int(self.of_row[piece]), int(self.begins[piece])
        here = slice(begin, begin + self.limit)
        return self.rows.ids(row)[here], self.rows.labels(row)[here]


class Padded(Dataset):
    """One piece, one sample: `{"input_ids": [T], "labels": [T]}`, T its own length."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Sample:
        if index == FILLER:
            return padded_sample(np.zeros(1, np.int64), np.zeros(1, np.int64))
        return padded_sample(*self.pieces[_within(index, len(self))])


def padded_sample(ids: np.ndarray, labels: np.ndarray) -> Sample:
    """Return ids and labels as a sample of their own length."""
    labels[0] = IGNORED
    return {
        "input_ids": torch.from_numpy(ids.astype(np.int64)),
        "labels": torch.from_numpy(labels),
    }


class Packed(Dataset):
    """Whole pieces that share a sample of `sequence_length` tokens and do not see each other.

    `packed[i]` is `{"input_ids": [L], "labels": [L], "position_ids": [L]}`, L the limit of the
    pieces. Positions restart where a piece begins, by which transformers keeps the pieces apart
    where there is no attention mask. The rest of the sample is one more piece, of padding.
    """

    def __init__(self, pieces: Pieces, pad_id: int = 0) -> None:
        self.pieces, self.pad_id = pieces, pad_id
        self.plan = best_fit(pieces.lengths, pieces.limit)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Sample:
        chosen = () if index == FILLER else self.plan.bin(_within(index, len(self)))
        pieces = [self.pieces[piece] for piece in chosen]
        return packed_sample(pieces, self.pieces.limit, self.pad_id)


def packed_sample(pieces: list[Piece], sequence_length: int, pad_id: int) -> Sample:
    """Return pieces as one sample of `sequence_length` tokens; see `Packed`."""
    room = sequence_length - sum(len(ids) for ids, _ in pieces)
    pieces = [*pieces, (np.full(room, pad_id), np.full(room, IGNORED))]
    for _, labels in pieces:
        labels[:1] = IGNORED
    ids, labels = (np.concatenate(column) for column in zip(*pieces, strict=True))
    positions = np.concatenate([np.arange(len(piece)) for piece, _ in pieces])
    return {
        "input_ids": torch.from_numpy(ids.astype(np.int64)),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions),
    }


def collate_documents(samples: list[Sample]) -> dict[str, Any]:
    """Stack windows or packed samples into a micro-batch that carries `document_borders`."""
    batch = default_collate(samples)
    return batch | document_borders(batch)


@dataclass(frozen=True)
class PadCollate:
    """Put samples into one micro-batch: `{"input_ids", "labels", "attention_mask"}`, each int64
    [samples, T], padded on the right with label `IGNORED` and attention 0.

    T is the longest length rounded up to a multiple of 8, but not beyond `sequence_length`, which
    may be all the positions that a model has.
    """

    pad_id: int
    sequence_length: int

    def __call__(self, samples: list[Sample]) -> Sample:
        longest = max(len(s["input_ids"]) for s in samples)
        width = max(longest, min(-(-longest // MULTIPLE) * MULTIPLE, self.sequence_length))

        def filled(rows: list[torch.Tensor], value: int) -> torch.Tensor:
            return torch.stack([F.pad(row, (0, width - len(row)), value=value) for row in rows])

        ids, labels = ([s[name] for s in samples] for name in ("input_ids", "labels"))
        return {
            "input_ids": filled(ids, self.pad_id),
            "labels": filled(labels, IGNORED),
            "attention_mask": filled([torch.ones_like(row) for row in ids], 0),
        }


def _within(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise IndexError(f"no sample {index} of {count}")
    return int(index)
