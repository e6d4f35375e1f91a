"""A source that is read while training: rows to samples in windows, with an exact place.

[Note: streams]
A shuffle buffer cannot be saved: its rows are lost or read twice. So rows are read in the order of
the stream, and its place is counted: pass, file, rows of that file. The files of a pass come in a
permuted order. N consecutive rows are a window; its rows are permuted, encoded, and packed (or cut,
or left alone), and its samples permuted again. A window ends with its pass, so each row is in
one window of each pass. A place in the stream is where the window in hand begins and how many of
its samples were given: to continue, the stream skips to that row, makes the same window again, and
leaves those samples out.

Every rank reads all rows, so that all see the same samples whatever their number, and each builds
the tensors of its own only.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import datasets
import numpy as np

from toolkit.data.order.permutation import derived_seed, permute
from toolkit.data.samples.packing import best_fit
from toolkit.data.samples.sequences import Piece, SampleShape, labels_of
from toolkit.data.sources.row_values import BadRow
from toolkit.data.tokens.encode import EncodedExample, EncodedRow
from toolkit.errors import DataError

WINDOW = 1000  # rows that are shuffled and packed together


@dataclass
class StreamSource:
    """Rows that are read while training."""

    name: str
    rows: datasets.IterableDataset
    # (row as it is read, its number in its pass) -> what it becomes, which depends on nothing else;
    # a `BadRow`, which names the row, leaves it out.
    encode: Callable[[dict[str, Any], int], EncodedRow]
    weight: float | None = None
    max_repeats: float | None = None  # passes at most: whole ones


@dataclass
class StreamPlace:
    """Where a window of a stream begins, and what was read before; a checkpoint keeps it."""

    epoch: int = 0  # passes that are done
    shard: int = 0  # files (shards) of this pass that are done
    row: int = 0  # rows read of the next one
    # Of this pass, as far as it is read:
    rows: int = 0
    window: int = 0
    samples: int = 0
    # Of all passes:
    rows_read: int = 0
    left_out: int = 0
    reasons: dict[str, int] = field(default_factory=dict)  # reason -> rows left out for it
    first: dict[str, str] = field(default_factory=dict)  # reason -> the first, and what is wrong
    truncated: int = 0  # rows whose end was cut off
    cut_off: int = 0  # tokens of these ends

    def count(self, row: EncodedRow) -> bool:
        """Count a row that was read; return whether it is used."""
        if not isinstance(row, BadRow) and not len(row.input_ids):
            row = BadRow(f"row {self.rows} of a pass (counted from 0)", "no token")
        self.row, self.rows, self.rows_read = self.row + 1, self.rows + 1, self.rows_read + 1
        if isinstance(row, BadRow):
            self.left_out += 1
            self.reasons[row.reason] = self.reasons.get(row.reason, 0) + 1
            self.first.setdefault(row.reason, str(row))
            return False
        self.truncated += bool(row.cut_off)
        self.cut_off += row.cut_off
        return True

    def read(self) -> dict[str, Any]:
        """Return what is counted over all passes, as JSON values."""
        of_pass = ("epoch", "shard", "row", "rows", "window", "samples")
        return {name: value for name, value in asdict(self).items() if name not in of_pass}


class StreamSample(NamedTuple):
    """A sample before it becomes tensors."""

    pieces: list[Piece]
    length: int  # tokens
    source: int
    epoch: int  # passes over its source that were done before


class SourceStream:
    """The samples of one source, the `number`-th, one after another. See [Note: streams]."""

    def __init__(
        self, source: StreamSource, number: int, shape: SampleShape, seed: int, window: int = WINDOW
    ) -> None:
        limit = source.max_repeats
        if limit is not None and (limit < 1 or limit != int(limit)):
            what = f"of {source.name}, whose length is not known before its end, got {limit}"
            raise DataError(f"expected a whole number of passes as max_repeats {what}")
        self.source, self.number, self.shape, self.window = source, number, shape, window
        self.seed = derived_seed(seed, "stream", number)
        self._start_at(StreamPlace())

    def _start_at(self, place: StreamPlace) -> None:
        # The window in hand lies between two places; of its samples some were given.
        self._place = self._next = place
        self.items: list[StreamSample] = []
        self._given = 0
        self._rows: Iterator[dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the place as JSON values."""
        return asdict(self._place) | {"given": self._given}

    def read(self) -> dict[str, Any]:
        """Return what came of the rows read so far, with those of the window in hand."""
        return {"passes": self._place.epoch} | self._next.read()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a place; the next sample costs a skip to it and the making of its window."""
        given = state["given"]
        self._start_at(StreamPlace(**{k: v for k, v in state.items() if k != "given"}))
        if given:
            self._fill()
            if len(self.items) < given:
                raise DataError(
                    f"the checkpoint's position counts on {given} samples or more from row "
                    f"{self._place.rows} of {self.source.name} on, there are {len(self.items)}: "
                    "the stream gives other rows than before; give the same, or start anew in "
                    "another output_dir"
                )
            self._given = given

    def next(self) -> StreamSample | None:
        """Return the next sample; None when all passes are over. A pass without a sample, and a
        row that is refused, are DataErrors.
        """
        while self._given == len(self.items):
            if self.source.max_repeats is not None and self._next.epoch >= self.source.max_repeats:
                return None
            self._fill()
        self._given += 1
        return self.items[self._given - 1]

    def _fill(self) -> None:
        """Make the samples of the next window."""
        self._place, self._given = self._next, 0
        pieces, after, ended = self._read(self._place)
        self.items = self._samples(self._permuted(pieces, "rows"))
        after.samples += len(self.items)
        if ended:
            if not after.samples:
                what = f"a pass of {after.rows} rows gave none: {after.left_out} were left out"
                advice = "see data.on_bad_row, data.too_long and the format of the rows"
                raise DataError(f"expected samples in {self.source.name}, {what}; {advice}")
            after = StreamPlace(epoch=after.epoch + 1, **after.read())
        self._next = after

    def _permuted(self, items: list, what: str) -> list:
        seed, n = derived_seed(self.seed, what, self._place.window), len(items)
        return [items[i] for i in permute(np.arange(n), max(1, n), seed, self._place.epoch)]

    def _read(self, start: StreamPlace) -> tuple[list[Piece], StreamPlace, bool]:
        """Return the pieces of a window of rows, the place after it, and whether the pass ended."""
        at = StreamPlace(**asdict(start))
        pieces: list[Piece] = []
        while at.rows - start.rows < self.window:
            if self._rows is None:
                if at.shard == self.source.rows.num_shards:
                    return pieces, at, True
                shard = self._shard(at)
                self._rows = iter(shard.skip(at.row) if at.row else shard)
            row = next(self._rows, None)
            if row is None:
                self._rows, at.shard, at.row = None, at.shard + 1, 0
                continue
            example = self.source.encode(row, at.rows)
            if at.count(example) and isinstance(example, EncodedExample):
                ids = example.input_ids
                labels = labels_of(ids, [edge for span in example.spans for edge in span])
                whole = self.shape.packing == "wrapped"  # joined with others, and cut then
                pieces += _cut(ids, labels, len(ids) if whole else self.shape.sequence_length)
        at.window += 1
        return pieces, at, False

    def _shard(self, at: StreamPlace) -> datasets.IterableDataset:
        rows = self.source.rows
        if rows.num_shards == 1:
            return rows
        seed = derived_seed(self.seed, "shards")
        return rows.shard(rows.num_shards, int(permute(at.shard, rows.num_shards, seed, at.epoch)))

    def _samples(self, pieces: list[Piece]) -> list[StreamSample]:
        groups = [[piece] for piece in pieces]
        if self.shape.packing == "bfd":
            lengths = np.array([len(ids) for ids, _ in pieces], np.int64)
            plan = best_fit(lengths, self.shape.sequence_length)
            groups = [[pieces[i] for i in plan.bin(b)] for b in range(len(plan))]
        elif self.shape.packing == "wrapped" and pieces:
            ids, labels = (np.concatenate(column) for column in zip(*pieces, strict=True))
            groups = [[piece] for piece in _cut(ids, labels, self.shape.sequence_length)]
        epoch = self._place.epoch
        return [
            StreamSample(group, sum(len(ids) for ids, _ in group), self.number, epoch)
            for group in self._permuted(groups, "samples")
        ]


def _cut(ids: np.ndarray, labels: np.ndarray, limit: int) -> list[Piece]:
    return [(ids[i : i + limit], labels[i : i + limit]) for i in range(0, len(ids), limit)]
