"""Encoded rows as samples: windows, packed or padded; read from memory-mapped Arrow, not copied.

Rows are a data set with a column `input_ids` (lists of integers) and, where not everything is
learned, a column `spans`: begin, end, begin, end ... of the tokens that are. A token's label is its
id inside a span and `IGNORED` elsewhere; labels are unshifted, as transformers expects them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, default_collate

from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.data.samples.packing import BinPlan, best_fit
from toolkit.errors import DataError
from toolkit.models.attention import document_borders

FILLER = -1  # index of the sample without a supervised token that fills up a batch
MULTIPLE = 8  # padded lengths are multiples of this: fewer different shapes, and aligned ones

# Columns of a sample of pairs that stay behind.
_OF_PIECES = ("sequences", "ends", "lengths", "reference", "desirable", "margin")
Packing = Literal["wrapped", "bfd", "none"]
Sample = dict[str, torch.Tensor]
Chosen = range | np.ndarray | None  # numbers of the windows or rows that are used; None: all


class Piece(NamedTuple):
    """Token ids and labels of a row, or of a part of one."""

    ids: np.ndarray
    labels: np.ndarray
    second: int = 0  # of a pair: where its rejected side begins

    def sides(self) -> tuple["Piece", "Piece"]:
        """Return both sides of a pair."""
        (ids, labels, at) = self
        return Piece(ids[:at], labels[:at]), Piece(ids[at:], labels[at:])


@dataclass(frozen=True)
class SampleShape:
    """How pieces of rows become samples, and samples micro-batches."""

    packing: Packing  # `DataConfig.packing`, `auto` decided
    sequence_length: int  # tokens of a sample at most
    pad_id: int = 0
    borders: bool = False  # micro-batches carry where documents begin (`document_borders`)
    pairs: bool = False  # rows are pairs of answers, each side a piece; batches tell them apart
    prompts: bool = False  # of pairs: prompts of chosen answers are targets too, of no sequence

    def sample(self, pieces: Sequence[Piece]) -> Sample:
        """Return pieces as one sample: `{"input_ids": [T], "labels": [T], "used": []}`, int64. T is
        `sequence_length`, where rows are padded (`none`) their own length; the tokens of the pieces
        are `used`.

        Packed pieces (`bfd`) do not see each other: `position_ids` [T] restart where one begins, by
        which transformers keeps them apart where there is no attention mask. What fills a sample up
        is one more piece. Nothing predicts the first token of a piece: its label becomes `IGNORED`.
        """
        if self.pairs:
            pieces = [side for piece in pieces for side in piece.sides()]
        return self._joined(pieces)

    def answer(self, side: Piece) -> Sample:
        """Return one side of a pair as a sample, which has one sequence."""
        return self._joined([side])

    def _joined(self, pieces: Sequence[Piece]) -> Sample:
        """Return pieces as one sample, of which each side of a pair is one; see `sample`."""
        taken = sum(len(piece.ids) for piece in pieces)
        room = (max(1, taken) if self.packing == "none" else self.sequence_length) - taken
        pieces = [*pieces, Piece(np.full(room, self.pad_id), np.full(room, IGNORED))]
        for piece in pieces:
            piece.labels[:1] = IGNORED
        columns = ([piece[i] for piece in pieces] for i in range(2))
        arrays = (np.concatenate(column).astype(np.int64) for column in columns)
        sample = dict(zip(("input_ids", "labels"), map(torch.from_numpy, arrays), strict=True))
        lengths = [len(piece.ids) for piece in pieces]
        sample["used"] = torch.tensor(taken)
        if self.packing == "bfd":
            positions = np.concatenate([np.arange(length) for length in lengths])
            sample["position_ids"] = torch.from_numpy(positions)
        return self._marked(sample, lengths[:-1]) if self.pairs else sample

    def _marked(self, sample: Sample, lengths: list[int]) -> Sample:
        """Return a sample of pairs with `sequences` [T], the number of the piece whose answer each
        position predicts, `ends` [T], where each piece has its last token that fills nothing up, as
        classifiers of transformers look for it, and the `lengths` of its pieces.
        """
        labels, pieces = sample["labels"], torch.tensor(lengths, dtype=torch.int64)
        number = torch.arange(len(pieces)).repeat_interleave(pieces)
        number = F.pad(number, (0, len(labels) - len(number)), value=FILLER)
        answers = F.pad(labels[1:] != IGNORED, (0, 1))
        ends = torch.zeros(len(labels), dtype=torch.bool)
        for own in torch.arange(sum(lengths)).split(lengths):
            filled = sample["input_ids"][own] == self.pad_id
            ends[own[(own - own[0]).where(~filled, 0).argmax()]] = True
        sample |= {"sequences": number.where(answers, FILLER), "ends": ends, "lengths": pieces}
        if self.prompts:
            chosen = number % 2 == 0
            chosen[F.pad(pieces.cumsum(0), (1, 0))[: len(pieces)]] = False  # their first tokens
            sample["labels"] = sample["input_ids"].where(chosen & (number != FILLER), labels)
        return sample

    def batch(self, samples: list[Sample]) -> Batch:
        """Return samples as a micro-batch of [samples, T], with `n_targets` where not all positions
        may have a target.

        Rows are padded on the right, with an `attention_mask`: T is the longest length rounded up
        to a multiple of 8, but not beyond `sequence_length`, which may be all the positions that a
        model has. Of pairs each side is a row.
        """
        pairs: dict[str, Any] = {}
        halves = self._halves(samples)
        used = torch.stack([s["used"] for s in samples]) if self.packing == "bfd" else None
        samples = [{n: x for n, x in s.items() if n != "used"} for s in samples]
        if self.pairs:
            samples, pairs = self._of_pairs(samples)
        if self.packing == "none":
            longest = max(len(s["input_ids"]) for s in samples)
            width = max(longest, min(-(-longest // MULTIPLE) * MULTIPLE, self.sequence_length))
            fill = {"input_ids": self.pad_id, "labels": IGNORED, "attention_mask": 0}
            samples = [s | {"attention_mask": torch.ones_like(s["labels"])} for s in samples]
            samples = [
                {n: F.pad(s[n], (0, width - len(s[n])), value=value) for n, value in fill.items()}
                for s in samples
            ]
        columns: dict[str, Any] = default_collate(samples)
        if self.borders and self.packing != "none":
            columns |= document_borders(columns)
        made = replace(Batch.of(**columns, count=self.packing != "wrapped"), used=used)
        if not self.pairs:
            return made
        room = made.targets.shape[1] - pairs["sequences"].shape[1]
        pairs["sequences"] = F.pad(pairs["sequences"], (0, room), value=FILLER)
        return replace(made, halves=halves, **pairs)

    def _halves(self, samples: list[Sample]) -> tuple[Batch, Batch] | None:
        """Return the answers of samples that have labels as a micro-batch, and the answers that
        they are compared with as another; None for other samples.

        Packed rows are as long as the fullest of them, rounded up to a multiple of 8.
        """
        if not any(len(sample.get("desirable", ())) for sample in samples):
            return None
        batches = []
        for first in range(2):
            parts = [_pieces_of(sample)[first::2] for sample in samples]
            fullest = max(1, *(sum(len(piece.ids) for piece in pieces) for pieces in parts))
            width = min(-(-fullest // MULTIPLE) * MULTIPLE, self.sequence_length)
            shape = replace(self, sequence_length=width)
            batches.append(shape.batch([shape._joined(pieces) for pieces in parts]))
        return batches[0], batches[1]

    def _of_pairs(self, samples: list[Sample]) -> tuple[list[Sample], dict[str, Any]]:
        """Return samples as those of other rows, padded ones (`none`) one for each piece, and what
        tells pieces apart as fields of a batch; `sequences` are padded to the longest.
        """
        counts = [len(sample["lengths"]) for sample in samples]
        fields: dict[str, Any] = {"n_sequences": sum(counts)}
        for name in ("reference", "desirable", "margin"):
            if all(name in sample for sample in samples):
                fields[name] = torch.cat([sample[name] for sample in samples])
        before = np.cumsum([0, *counts])
        numbers = [
            sample["sequences"].where(
                sample["sequences"] == FILLER, sample["sequences"] + int(first)
            )
            for sample, first in zip(samples, before, strict=False)
        ]
        ends = [sample["ends"] for sample in samples]
        columns = [
            {name: x for name, x in sample.items() if name not in _OF_PIECES} for sample in samples
        ]
        if self.packing == "none":
            parts = [sample["lengths"].tolist() or [1] for sample in samples]
            columns = [
                dict(zip(own, pieces, strict=True))
                for own, lengths in zip(columns, parts, strict=True)
                for pieces in zip(
                    *(x[: sum(lengths)].split(lengths) for x in own.values()), strict=True
                )
            ]
            numbers, ends = (
                [x for n, own in zip(of, parts, strict=True) for x in n.split(own)]
                for of in (numbers, ends)
            )
        fields["sequences"] = torch.nn.utils.rnn.pad_sequence(numbers, True, FILLER)
        fields["ends"] = torch.nn.utils.rnn.pad_sequence(ends, True).nonzero()
        return columns, fields

    def __str__(self) -> str:
        if self.packing == "wrapped":
            return f"samples of {self.sequence_length} tokens"
        how = "packed" if self.packing == "bfd" else "padded"
        return f"samples of up to {self.sequence_length} tokens, {how}"


def _pieces_of(sample: Sample) -> list[Piece]:
    """Return the pieces of a sample of pairs: both sides of its first pair, and so on."""
    lengths = sample["lengths"].tolist()
    columns = (sample[name][: sum(lengths)].split(lengths) for name in ("input_ids", "labels"))
    # Copies: joining pieces changes their labels in place.
    return [Piece(ids.numpy(), labels.numpy().copy()) for ids, labels in zip(*columns, strict=True)]


class EncodedRows:
    """Encoded rows, read one by one or as one text."""

    def __init__(self, tokens: datasets.Dataset) -> None:
        # A selection or shuffle is an index over the rows; columns are read in file order.
        self.tokens = tokens.flatten_indices() if tokens._indices is not None else tokens
        self._ids = self.tokens.data.column("input_ids")
        spans = "spans" in self.tokens.column_names  # else every token counts
        self._spans = self.tokens.data.column("spans") if spans else None
        pairs = "second" in self.tokens.column_names
        self._seconds = self.tokens.data.column("second").to_numpy() if pairs else None
        self._desirable = self.tokens.data.column("desirable") if pairs else None
        self._margins = self.tokens.data.column("margin") if pairs else None
        self.reference: np.ndarray | None = None
        """float32 [rows, 2], of pairs: log-probability of both answers by the reference; NaN in
        rows that the run does not read."""
        chunks = [chunk.flatten() for chunk in self._ids.chunks]
        self._joined = pa.chunked_array(chunks, self._ids.type.value_type)

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedRows, (self.tokens,), {"reference": self.reference}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total(self) -> int:
        """Tokens of all rows."""
        return len(self._joined)

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

    def second(self, row: int) -> int:
        """Return where in a row of a pair its rejected side begins; 0: it is none."""
        return 0 if self._seconds is None else int(self._seconds[row])

    def side_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of tokens of both sides of `rows` of pairs, int64 [rows, 2]."""
        assert self._seconds is not None
        first = self._seconds[rows].astype(np.int64)
        return np.stack([first, self.lengths()[rows] - first], 1)

    def desirable(self, rows: Sequence[int]) -> list[bool]:
        """Return whether the first answer of rows is wanted, empty of pairs, which do not say."""
        if self._desirable is None or not len(self) or self._desirable[0].as_py() is None:
            return []
        return [self._desirable[row].as_py() for row in rows]

    def margins(self, rows: Sequence[int]) -> list[float]:
        """Return the margins of pairs, 0 where a row has none."""
        assert self._margins is not None
        return [self._margins[row].as_py() or 0.0 for row in rows]

    def rows_of(self, begin: int, count: int) -> tuple[int, int]:
        """Return the rows of the first and the last of `count` tokens of all rows joined."""
        first, last = self.ends.searchsorted([begin, begin + count - 1], "right").tolist()
        return first, last

    def joined(self, begin: int, count: int) -> Piece:
        """Return `count` tokens of all rows joined, from `begin` on, and their labels; copies."""
        ids = self._joined.slice(begin, count).to_numpy().astype(np.int64)
        if self._spans is None:
            return Piece(ids, ids.copy())
        first, last = self.rows_of(begin, count)
        labels = np.concatenate([self.labels(row) for row in range(first, last + 1)])
        begin -= int(self.ends[first - 1]) if first else 0
        return Piece(ids, labels[begin : begin + count], self.second(first))


def labels_of(ids: np.ndarray, spans: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return `ids` where a span covers them and `IGNORED` elsewhere; int64."""
    labels = np.full(len(ids), IGNORED, np.int64)
    for begin, end in zip(spans[::2], spans[1::2], strict=True):
        labels[begin:end] = ids[begin:end]
    return labels


@dataclass(frozen=True, eq=False)
class Pieces:
    """Stretches of encoded rows, which samples are made of; see `windows` and `cut_rows`."""

    rows: EncodedRows
    begins: range | np.ndarray  # in the tokens of all rows joined
    tokens: int | np.ndarray  # of each piece, or of every one
    dropped: dict[str, int]  # what is in no piece
    cut: int = 0  # rows that became several pieces

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each piece."""
        return np.full(len(self), self.tokens) if isinstance(self.tokens, int) else self.tokens

    def _place(self, piece: int) -> tuple[int, int]:
        length = self.tokens if isinstance(self.tokens, int) else self.tokens[piece]
        return int(self.begins[piece]), int(length)

    def __getitem__(self, piece: int) -> Piece:
        """Return the ids and the labels of a piece; copies."""
        return self.rows.joined(*self._place(piece))

    def rows_of(self, piece: int) -> tuple[int, int]:
        """Return the first and the last row that a piece holds a part of."""
        return self.rows.rows_of(*self._place(piece))


def windows(rows: EncodedRows, length: int, chosen: Chosen = None) -> Pieces:
    """Return all rows joined and cut into pieces of `length` tokens, and what is left dropped. They
    take no memory: a corpus has some hundred million.
    """
    count, rest = divmod(rows.total, length)
    begins: range | np.ndarray = range(0, count * length, length)
    if isinstance(chosen, range):
        begins = begins[chosen.start : chosen.stop : chosen.step]
    elif chosen is not None:
        begins = chosen * length
    return Pieces(rows, begins, length, {"tokens": rest})


def cut_rows(rows: EncodedRows, limit: int, chosen: Chosen = None) -> Pieces:
    """Return what packing and padding put into samples: rows, long ones as pieces of `limit` tokens
    and a rest; rows without a token become none and are dropped.
    """
    used = np.arange(len(rows)) if chosen is None else np.asarray(chosen)
    lengths = rows.lengths()[used]
    counts = -(-lengths // limit)
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    left = np.repeat(lengths, counts) - nth * limit
    begins = np.repeat(rows.ends[used], counts) - left
    dropped = {"empty rows": int((counts == 0).sum())}
    lengths = np.minimum(left, limit).astype(np.int32)
    return Pieces(rows, begins, lengths, dropped, int((counts > 1).sum()))


class Samples(Dataset):
    """Pieces of rows as samples of a shape, packed where it says so; see `SampleShape.sample`.

    `FILLER` gives one without a label that counts. Pickles as the path of its file, and its plan.
    """

    def __init__(self, pieces: Pieces, shape: SampleShape) -> None:
        self.pieces, self.shape = pieces, shape
        self.plan: BinPlan | None = None
        if shape.packing == "bfd":
            self.plan = best_fit(pieces.lengths, shape.sequence_length)

    def __len__(self) -> int:
        return len(self.pieces if self.plan is None else self.plan)

    def __getitem__(self, index: int) -> Sample:
        if index != FILLER and not 0 <= index < len(self):
            raise IndexError(f"no sample {index} of {len(self)}")
        numbers = [] if index == FILLER else [int(number) for number in self._numbers(index)]
        sample = self.shape.sample([self.pieces[number] for number in numbers])
        if not self.shape.pairs:
            return sample
        rows = [self.pieces.rows_of(number)[0] for number in numbers]  # a pair is one piece
        sample["desirable"] = torch.tensor(self.pieces.rows.desirable(rows), dtype=torch.bool)
        sample["margin"] = torch.tensor(self.pieces.rows.margins(rows), dtype=torch.float32)
        if (reference := self.pieces.rows.reference) is not None:
            values = reference[rows].reshape(-1)
            if not np.isfinite(values).all():
                raise DataError(
                    f"row {rows[int(np.isnan(values).argmax()) // 2]} has no reference value, and "
                    "a batch reads it: expected one for every row that the run reads; start the "
                    "run in another output_dir"
                )
            sample["reference"] = torch.from_numpy(values)
        return sample

    def first_rows(self, samples: np.ndarray) -> np.ndarray:
        """Return the first encoded row of each piece of `samples`, one after another; int64."""
        numbers = samples
        if self.plan is not None:
            bins = [self.plan.bin(index) for index in samples.tolist()]
            numbers = np.concatenate([np.zeros(0, np.int64), *bins])
        begins = np.asarray(self.pieces.begins, np.int64)[numbers]
        return self.pieces.rows.ends.searchsorted(begins, "right").astype(np.int64)

    def tokens(self, index: int) -> int:
        """Return the tokens of a sample, without padding."""
        return int(self.pieces.lengths[self._numbers(index)].sum())

    def rows(self, index: int) -> str:
        """Return the encoded rows that a sample holds a part of, counted from 0, in words."""
        held = [self.pieces.rows_of(int(number)) for number in self._numbers(index)]
        if self.plan is None and held[0][0] != held[0][1]:
            return f"rows {held[0][0]} to {held[0][1]}"
        rows = sorted({first for first, _ in held})
        return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))}"

    def _numbers(self, index: int) -> Sequence[int] | np.ndarray:
        return [index] if self.plan is None else self.plan.bin(index)
