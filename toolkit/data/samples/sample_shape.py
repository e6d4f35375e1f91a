"""Samples and micro-batches: pieces of rows, packed, padded or cut to one length."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

from toolkit.data.row_formats import EXAMPLES, RowFormat
from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.data.samples.columns import Column, stored_columns
from toolkit.data.samples.packing import BinPlan, pack_best_fit
from toolkit.data.samples.pieces import Piece, Pieces
from toolkit.errors import DataError
from toolkit.models.attention import ONE_DOCUMENT_A_ROW, document_borders

FILLER = -1
"""Index of the sample without a supervised token that completes a batch; in `Batch.sequences`, the
number of no sequence."""
MULTIPLE = 8
"""Padded lengths are multiples of this: fewer different shapes, and aligned ones."""

Packing = Literal["wrapped", "bfd", "none"]
"""`data.packing`, with `auto` decided."""
Sample = dict[str, torch.Tensor]
"""`input_ids`, `labels` and `used`; `position_ids` if packed; `sequences`, `ends` and `lengths` if
sequences are separate; and the columns that the row format declares."""


@dataclass(frozen=True)
class SampleShape:
    """How pieces of rows become samples, and samples become micro-batches.

    Args:
        packing: `wrapped` joins all rows and cuts them into windows, `bfd` packs several rows into
            a sample, and `none` pads each row.
        sequence_length: maximum number of tokens of a sample.
        pad_id: token id of padding.
        borders: True if micro-batches contain the borders of documents (`document_borders`), which
            separate packed documents in attention.
        row_format: the format of the rows, such as pairs of answers.
        prompts: for pairs, True if the prompts of chosen answers are supervised, too. Their targets
            belong to no sequence.
        context: (rank, size) of this process among the ranks that share each row. Micro-batches
            have this rank's part of every row (`Batch.cut`), and always the borders of documents.

    Raises:
        DataError: packing is `wrapped`, but the format has columns per row or per sequence.
    """

    packing: Packing
    sequence_length: int
    pad_id: int = 0
    borders: bool = False
    row_format: RowFormat = EXAMPLES
    prompts: bool = False
    context: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        of_rows = [name for name, column in self.columns.items() if column.per != "token"]
        if self.packing == "wrapped" and of_rows:
            raise DataError(
                f"data.packing wrapped cuts rows anywhere, but {of_rows[0]} belongs to complete "
                "rows: expected data.packing bfd or none"
            )

    @property
    def columns(self) -> dict[str, Column]:
        """The columns that the row format declares, by name."""
        return dict(self.row_format.columns)

    @property
    def _has_sequences(self) -> bool:
        """True if micro-batches number their sequences, such as the two sides of a pair."""
        return self.row_format.sequences_per_row > 0

    def sample(self, pieces: Sequence[Piece], names: Collection[str] | None = None) -> Sample:
        """Join pieces into one sample, a dict of tensors; see `Sample` for its keys.

        `input_ids` [T], `labels` [T] and `used` [] are int64; `used` is the number of tokens
        without padding. T is `sequence_length`, or `used` if packing is `none`. With `bfd`,
        `position_ids` [T] restart at each piece, by which transformers separates the pieces in
        attention. The first label of each piece becomes `IGNORED`, because nothing predicts it.

        Args:
            pieces: the pieces, whose labels are changed in place; empty for a sample of padding.
            names: columns to include; None: those stored with the token ids. Pieces without a value
                get the fill value of the column.
        """
        columns = self.columns
        names = stored_columns(columns) if names is None else names
        values = {
            name: self._values_per_row(name, columns[name], pieces)
            for name in names
            if columns[name].per != "token"
        }
        if self.row_format.sequences_per_row == 2:
            pieces = [side for piece in pieces for side in piece.sides()]
        return self._join_pieces(pieces, [n for n in names if columns[n].per == "token"]) | values

    def for_sides(self) -> "SampleShape":
        """Return a copy for samples whose pieces are single sides of pairs, one sequence each.

        The copy has only the columns per token.
        """
        of_tokens = {name: c for name, c in self.columns.items() if c.per == "token"}
        row_format = replace(
            self.row_format, columns=of_tokens, sequences_per_row=1, compares_rows=False
        )
        return replace(self, row_format=row_format)

    def dummy_sample(self, tokens: int, second: int = 0, *, late: bool = True) -> Sample:
        """Create a sample of one row, to measure memory.

        Token ids are 0, and columns have their fill values.

        Args:
            tokens: number of tokens, all of which are supervised.
            second: position at which the rejected side of a pair begins; 0 for other rows.
            late: include late columns.
        """
        per_token, per_row = dict[str, np.ndarray](), dict[str, np.ndarray]()
        for name, column in self.columns.items():
            if column.late and not late:
                continue
            if column.per == "token":
                per_token[name] = column.blank(tokens)
            else:
                per_row[name] = column.blank(self._units_per_row(column))
        piece = Piece(
            np.zeros(tokens, np.int64), np.zeros(tokens, np.int64), second, per_token, per_row
        )
        return self.sample([piece], [*per_token, *per_row])

    def _units_per_row(self, column: Column) -> int:
        """Return how many values of `column` a row has: one per sequence, or one per row."""
        return max(1, self.row_format.sequences_per_row) if column.per == "sequence" else 1

    def _values_per_row(self, name: str, column: Column, pieces: Sequence[Piece]) -> torch.Tensor:
        """Concatenate the pieces' values in a column per row or per sequence: [values, *shape].

        A piece without a value gets the fill value.
        """
        blank = column.blank(self._units_per_row(column))
        values = [piece.per_row.get(name, blank) for piece in pieces]
        return torch.from_numpy(np.concatenate([column.blank(0), *values]))

    def _join_pieces(self, pieces: Sequence[Piece], names: Sequence[str]) -> Sample:
        """Build a sample as `sample` describes it, without columns per row or per sequence.

        Args:
            pieces: the pieces; each side of a pair is a separate piece.
            names: columns per token to include.
        """
        used = sum(len(piece.ids) for piece in pieces)
        room = (max(1, used) if self.packing == "none" else self.sequence_length) - used
        pieces = [*pieces, Piece(np.full(room, self.pad_id), np.full(room, IGNORED))]
        for piece in pieces:
            piece.labels[:1] = IGNORED
        ids = np.concatenate([piece.ids for piece in pieces]).astype(np.int64)
        labels = np.concatenate([piece.labels for piece in pieces]).astype(np.int64)
        sample = {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "used": torch.tensor(used),
        }
        lengths = [len(piece.ids) for piece in pieces]
        if self.packing == "bfd":
            positions = np.concatenate([np.arange(length) for length in lengths])
            sample["position_ids"] = torch.from_numpy(positions)
        for name in names:
            column = self.columns[name]
            values = [p.per_token.get(name, column.blank(len(p.ids))) for p in pieces]
            sample[name] = torch.from_numpy(np.concatenate(values))
        return self._mark_sequences(sample, lengths[:-1]) if self._has_sequences else sample

    def _mark_sequences(self, sample: Sample, lengths: list[int]) -> Sample:
        """Add the tensors `sequences`, `ends` and `lengths` to a sample, in place, and return it.

        `sequences` [T] has the number of the sequence to which each position's target belongs, or
        -1. `ends` [T] is True at the last token of each sequence that is not the padding token,
        because classifiers of transformers read their output there. `lengths` [sequences] is in
        tokens. If `prompts` is set, the labels of chosen prompts are filled in, too.

        Args:
            sample: the sample.
            lengths: number of tokens of each piece; each piece is a sequence.
        """
        labels, pieces = sample["labels"], torch.tensor(lengths, dtype=torch.int64)
        number = torch.arange(len(pieces)).repeat_interleave(pieces)
        number = F.pad(number, (0, len(labels) - len(number)), value=FILLER)
        predicts = F.pad(labels[1:] != IGNORED, (0, 1))
        ends = torch.zeros(len(labels), dtype=torch.bool)
        for positions in torch.arange(sum(lengths)).split(lengths):
            is_padding = sample["input_ids"][positions] == self.pad_id
            last = (positions - positions[0]).where(~is_padding, 0).argmax()
            ends[positions[last]] = True
        sample |= {"sequences": number.where(predicts, FILLER), "ends": ends, "lengths": pieces}
        if self.prompts:
            chosen = number % 2 == 0
            # Nothing predicts the first token of a side.
            chosen[F.pad(pieces.cumsum(0), (1, 0))[: len(pieces)]] = False
            sample["labels"] = sample["input_ids"].where(chosen & (number != FILLER), labels)
        return sample

    def batch(self, samples: list[Sample]) -> Batch:
        """Collate samples into a micro-batch.

        Packed samples give rows [samples, T]. With packing `none`, rows are padded on the right to
        a common T and have an `attention_mask`. Each side of a pair is then a separate row. T is
        the longest length rounded up to a multiple of 8, but at most `sequence_length`. `n_targets`
        is set unless packing is `wrapped`.
        """
        halves = self._split_halves(samples)
        columns = {
            name: column
            for name, column in self.columns.items()
            if all(name in sample for sample in samples)
        }
        of_tokens = [name for name, column in columns.items() if column.per == "token"]
        values = {
            name: torch.cat([sample[name] for sample in samples])
            for name in columns
            if name not in of_tokens
        }
        used = torch.stack([s["used"] for s in samples]) if self.packing == "bfd" else None
        names = ["input_ids", "labels", "position_ids", *of_tokens]
        rows = [{name: s[name] for name in names if name in s} for s in samples]
        if self._has_sequences and self.packing == "none":
            rows = [
                side
                for row, sample in zip(rows, samples, strict=True)
                for side in _split_row(row, _row_lengths(sample))
            ]
        if self.packing == "none":
            rows = self._pad(rows, {name: columns[name] for name in of_tokens})
        tensors: dict[str, Any] = default_collate(rows)
        if self.context[1] > 1:
            fills = {name: columns[name].fill for name in of_tokens}
            tensors, used = self._prepare_cut(tensors, fills, used)
        values |= {name: tensors.pop(name) for name in of_tokens}
        if self.borders and (self.packing != "none" or self.context[1] > 1):
            tensors |= document_borders(tensors)
        batch = Batch.of(**tensors, count=self.packing != "wrapped")
        batch = replace(batch, used=used, columns=values)
        if self._has_sequences:
            batch = replace(batch, **self._sequence_fields(samples, batch))
        if self.context[1] > 1:
            batch = batch.cut(*self.context, token_columns=of_tokens)
        # With `context`, the halves have this rank's part of their rows already.
        return replace(batch, halves=halves)

    def _prepare_cut(
        self, tensors: dict[str, Any], fills: dict[str, float], used: torch.Tensor | None
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        """Pad rows to a multiple of the ranks that share them, and replace their attention mask.

        No mask is needed: attention is causal, and padding is on the right.

        Args:
            tensors: tensors [B, T, ...] by name.
            fills: fill value of each column per token, by name.
            used: tokens of each row without padding; None: see `Batch.used`.

        Returns:
            The changed tensors with `ONE_DOCUMENT_A_ROW`, and the new `used`.
        """
        rows, length = tensors["labels"].shape
        mask = tensors.pop("attention_mask", None)
        if mask is not None:
            used = mask.sum(-1)
        missing = -length % self.context[1]
        is_packed = "position_ids" in tensors
        if missing:
            fills = {"input_ids": self.pad_id, "labels": IGNORED} | fills
            padded = {
                name: _pad_positions(tensors[name], missing, fill) for name, fill in fills.items()
            }
            if is_packed:
                # The padding is a separate document.
                more = torch.arange(missing).expand(rows, missing)
                padded["position_ids"] = torch.cat([tensors["position_ids"], more], 1)
            else:
                # The model may have no positions beyond `sequence_length`.
                positions = torch.arange(length + missing).clamp(max=length - 1)
                padded["position_ids"] = positions.expand(rows, -1)
            tensors = tensors | padded
            used = torch.full((rows,), length) if used is None else used
        return tensors | {ONE_DOCUMENT_A_ROW: not is_packed}, used

    def _pad(self, rows: list[Sample], columns: dict[str, Column]) -> list[Sample]:
        """Pad rows on the right to a common length, and add their attention masks.

        Args:
            rows: tensors of each row, by name.
            columns: the columns per token that the rows contain.
        """
        longest = max(len(row["input_ids"]) for row in rows)
        width = max(longest, min(-(-longest // MULTIPLE) * MULTIPLE, self.sequence_length))
        fills: dict[str, float] = {"input_ids": self.pad_id, "labels": IGNORED, "attention_mask": 0}
        fills |= {name: column.fill for name, column in columns.items()}
        rows = [row | {"attention_mask": torch.ones_like(row["labels"])} for row in rows]
        return [
            {name: _pad_first(row[name], width, fill) for name, fill in fills.items()}
            for row in rows
        ]

    def _sequence_fields(self, samples: list[Sample], batch: Batch) -> dict[str, Any]:
        """Build the `Batch` fields `n_sequences`, `sequences` and `ends` of a micro-batch.

        Sequences are numbered from 0 through all samples.
        """
        counts = [len(sample["lengths"]) for sample in samples]
        numbers, ends = list[torch.Tensor](), list[torch.Tensor]()
        for sample, before in zip(samples, np.cumsum([0, *counts]), strict=False):
            local = sample["sequences"]
            number = local.where(local == FILLER, local + int(before))
            if self.packing == "none":
                lengths = _row_lengths(sample)
                numbers += number.split(lengths)
                ends += sample["ends"].split(lengths)
            else:
                numbers.append(number)
                ends.append(sample["ends"])
        sequences = pad_sequence(numbers, True, FILLER)
        room = batch.targets.shape[1] - sequences.shape[1]
        return {
            "n_sequences": sum(counts),
            "sequences": F.pad(sequences, (0, room), value=FILLER),
            "ends": pad_sequence(ends, True).nonzero(),
        }

    def _split_halves(self, samples: list[Sample]) -> tuple[Batch, Batch] | None:
        """Build one micro-batch of the rows' own answers, and one of the answers to compare with.

        These are the first and the second sides of the pairs in the samples. Packed rows are as
        long as the fullest one, rounded up to a multiple of 8.

        Returns:
            (own answers, other answers); None if the row format does not compare rows, or if all
            samples are padding.
        """
        if not self.row_format.compares_rows or not any(len(s["lengths"]) for s in samples):
            return None
        shape, batches = self.for_sides(), list[Batch]()
        names = [name for name in shape.columns if name in samples[0]]
        for first in range(2):
            parts = [_split_pairs(sample, names)[first::2] for sample in samples]
            fullest = max(1, *(sum(len(piece.ids) for piece in pieces) for pieces in parts))
            width = min(-(-fullest // MULTIPLE) * MULTIPLE, self.sequence_length)
            shape = replace(shape, sequence_length=width)
            batches.append(shape.batch([shape.sample(pieces, names) for pieces in parts]))
        return batches[0], batches[1]

    def __str__(self) -> str:
        if self.packing == "wrapped":
            return f"samples of {self.sequence_length} tokens"
        kind = "packed" if self.packing == "bfd" else "padded"
        return f"samples of up to {self.sequence_length} tokens, {kind}"


def _row_lengths(sample: Sample) -> list[int]:
    """Return the lengths of a sample's sequences, each of which becomes a padded row.

    A sample of padding gives [1].
    """
    return sample["lengths"].tolist() or [1]


def _split_row(row: Sample, lengths: list[int]) -> list[Sample]:
    """Split the tensors of a sample into one dict per row, with rows of the given lengths.

    Tokens after the last row are dropped.
    """
    if not lengths:
        return []
    parts = {name: tensor[: sum(lengths)].split(lengths) for name, tensor in row.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(lengths))]


def _pad_first(tensor: torch.Tensor, length: int, fill: float) -> torch.Tensor:
    """Pad the first dimension of a tensor with `fill`, at its end, to `length`."""
    before = [0, 0] * (tensor.ndim - 1)
    return F.pad(tensor, (*before, 0, length - len(tensor)), value=fill)


def _pad_positions(tensor: torch.Tensor, missing: int, fill: float) -> torch.Tensor:
    """Append `missing` positions of `fill` to every row of a tensor [B, T, ...]."""
    return F.pad(tensor, (*[0, 0] * (tensor.ndim - 2), 0, missing), value=fill)


def _split_pairs(sample: Sample, names: Sequence[str]) -> list[Piece]:
    """Split a sample of pairs into pieces, alternating between chosen and rejected sides.

    For labelled answers, the rejected side is the answer of another row. `names` are the columns
    per token whose values the pieces keep.
    """
    lengths = sample["lengths"].tolist()
    row = {name: sample[name] for name in ("input_ids", "labels", *names)}
    return [
        Piece(
            side["input_ids"].numpy(),
            # A copy, because joining pieces changes their labels in place.
            side["labels"].numpy().copy(),
            per_token={name: side[name].numpy() for name in names},
        )
        for side in _split_row(row, lengths)
    ]


class Samples(Dataset):
    """A PyTorch data set of samples. A sample has one piece or, if `bfd` packs, several pieces.

    Indexing gives a dict of tensors; see `SampleShape.sample`. Index `FILLER` gives a sample of
    padding. Pickling stores the path of the Arrow file instead of its tokens.
    """

    def __init__(self, pieces: Pieces, shape: SampleShape) -> None:
        self.pieces, self.shape = pieces, shape
        self.plan: BinPlan | None = None
        if shape.packing == "bfd":
            self.plan = pack_best_fit(pieces.lengths, shape.sequence_length)

    def __len__(self) -> int:
        return len(self.pieces if self.plan is None else self.plan)

    def __getitem__(self, index: int) -> Sample:
        if index != FILLER and not 0 <= index < len(self):
            raise IndexError(f"no sample {index} of {len(self)}")
        numbers = [] if index == FILLER else self._piece_numbers(index)
        pieces = [self.pieces[int(number)] for number in numbers]
        return self.shape.sample(pieces, self.pieces.rows.column_names)

    def first_rows(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of the row in which each piece of these samples begins; int64.

        A sample that packs several pieces has a number for each, so the result may be longer than
        `samples`.
        """
        numbers = samples
        if self.plan is not None:
            bins = [self.plan.bin(index) for index in samples.tolist()]
            numbers = np.concatenate([np.zeros(0, np.int64), *bins])
        begins = np.asarray(self.pieces.begins, np.int64)[numbers]
        return self.pieces.rows.ends.searchsorted(begins, "right").astype(np.int64)

    def tokens(self, index: int) -> int:
        """Return the number of tokens of a sample, without padding."""
        return int(self.pieces.lengths[self._piece_numbers(index)].sum())

    def describe_rows(self, index: int) -> str:
        """Format the numbers of the encoded rows in a sample, from 0, such as "rows 3, 8".

        Rows that are joined and cut are given as a range, such as "rows 3 to 5".
        """
        spans = [self.pieces.rows_of(int(number)) for number in self._piece_numbers(index)]
        first, last = spans[0]
        if self.plan is None and first != last:
            return f"rows {first} to {last}"
        rows = sorted({first for first, _ in spans})
        return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows))}"

    def _piece_numbers(self, index: int) -> Sequence[int] | np.ndarray:
        """Return the indices of the pieces in a sample."""
        return [index] if self.plan is None else self.plan.bin(index)
