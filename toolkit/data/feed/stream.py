"""A source that is read while training: rows of a lane to samples in windows, with an exact place.

[Note: streams]
A stream has a fixed number of lanes. Each row belongs to one of them in each pass (`shares.py`),
and a lane makes its samples of its own rows alone. Rows with the tokens of N samples are a window:
they are encoded, permuted, and packed (or cut, or left alone), and the samples permuted again. A
window ends with its pass; of rows that are joined and cut the last goes on in the next window.
Windows grow from few samples, so that the first batch waits for little. A lane's place is where its
window in hand begins, and how many of its samples were given. To continue, the lane skips to that
row, makes the same window again, and leaves those samples out.

The sample at position p of the run is the next of lane p % L, whatever the number W of ranks; where
W divides L, rank r reads the lanes r, r + W, ... and encodes nothing else. Lanes end their passes
by themselves: where they differ in samples, one begins the next pass a little before another.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import datasets
import numpy as np

from toolkit.data.feed.shares import BEGINNING, GroupReader, RowPlace, Shares
from toolkit.data.order.permutation import derived_seed, permute
from toolkit.data.samples.columns import Column, stored_columns
from toolkit.data.samples.packing import pack_best_fit
from toolkit.data.samples.pieces import Piece, join_pieces, labels_of
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.data.sources.row_values import BadRow
from toolkit.data.tokens.encoded import EncodedExample, EncodedRow
from toolkit.errors import DataError

WINDOW = 64  # samples' worth of a lane's tokens that are shuffled and packed together
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
FIRST_WINDOW = 8  # of a pass; the next ones are twice the one before


@dataclass
class StreamSource:
    """Rows that are read while training."""

    name: str
    rows: datasets.IterableDataset
    # (row as it is read, its number in its shard) -> what it becomes, which depends on nothing
    # else; a `BadRow`, which names the row, leaves it out.
    encode: Callable[[dict[str, Any], int], EncodedRow]
    weight: float | None = None
    max_repeats: float | None = None  # passes at most: whole ones
    sizes: Sequence[int] | None = None  # of its shards (files), where they are known
    # What else decides the rows and their tokens, by names for a message.
    facts: dict[str, str] = field(default_factory=dict)


@dataclass
class StreamPlace:
    """Where a window of a lane begins, and what was read before; a checkpoint keeps it."""

    at: RowPlace = BEGINNING
    cut: int = 0  # tokens of the row there that are in the window before
    # Of the lane in this pass, as far as it is read:
    rows: int = 0
    window: int = 0
    samples: int = 0
    # Of all its passes:
    all_samples: int = 0
    empty_passes: int = 0  # the last ones, without a sample
    rows_read: int = 0
    left_out: int = 0
    reasons: dict[str, int] = field(default_factory=dict)  # reason -> rows left out for it
    first: dict[str, str] = field(default_factory=dict)  # reason -> the first, and what is wrong
    truncated: int = 0  # rows whose end was cut off
    cut_off: int = 0  # tokens of these ends

    def count(self, at: RowPlace, row: EncodedRow) -> bool:
        """Count the row that was read at a place; return whether it is used."""
        if not isinstance(row, BadRow) and not len(row.input_ids):
            row = BadRow(f"row {at.row} of a shard (counted from 0)", "no token")
        self.at = at.after()
        self.rows, self.rows_read = self.rows + 1, self.rows_read + 1
        if isinstance(row, BadRow):
            self.left_out += 1
            self.reasons[row.reason] = self.reasons.get(row.reason, 0) + 1
            self.first.setdefault(row.reason, str(row))
            return False
        self.truncated += bool(row.cut_off)
        self.cut_off += row.cut_off
        return True

    def next_pass(self) -> "StreamPlace":
        """Return the place at the beginning of the pass after this one."""
        place = StreamPlace(BEGINNING._replace(epoch=self.at.epoch + 1), **self.read())
        place.all_samples = self.all_samples
        place.empty_passes = 0 if self.samples else self.empty_passes + 1
        return place

    def read(self) -> dict[str, Any]:
        """Return what is counted of rows over all passes, as JSON values."""
        counted = ("rows_read", "left_out", "reasons", "first", "truncated", "cut_off")
        return {name: value for name, value in asdict(self).items() if name in counted}


class StreamSample(NamedTuple):
    """A sample before it becomes tensors."""

    pieces: list[Piece]
    length: int  # tokens


class Lane(NamedTuple):
    """One of the lanes of a run."""

    number: int = 0
    of: int = 1
    batch: int = 1  # samples of a global batch


ONE_LANE = Lane()


class SourceStream:
    """The samples of a lane of one source, the `number`-th, one after another. See [Note: streams].

    `window` and `first` are samples' worth of tokens: of a window at most, and of the first of a
    pass. `readers` are those of the source by group, which the lanes of a rank share.
    """

    def __init__(
        self,
        source: StreamSource,
        number: int,
        shape: SampleShape,
        seed: int,
        window: int = WINDOW,
        lane: Lane = ONE_LANE,
        readers: dict[int, GroupReader] | None = None,
        first: int = FIRST_WINDOW,
    ) -> None:
        limit = source.max_repeats
        if limit is not None and (limit < 1 or limit != int(limit)):
            raise DataError(
                f"expected a whole number of passes as max_repeats of {source.name}, whose length "
                f"is not known before its end, got {limit}"
            )
        self.source, self.shape, self.lane = source, shape, lane
        self.window, self.first = window, first
        self._columns = stored_columns(shape.columns)
        shared = derived_seed(seed, "stream", number)  # by all lanes
        self.seed, self._lengths = derived_seed(shared, lane.number), derived_seed(shared, "length")
        shares = Shares(source.rows, source.sizes, lane.of, derived_seed(shared, "shards"))
        self._turn, group = divmod(lane.number, shares.groups)
        readers = {} if readers is None else readers
        self._reader = readers.setdefault(group, GroupReader(shares, group))
        self._start_at(StreamPlace(), 0, {})

    def _start_at(self, place: StreamPlace, given: int, read: dict[str, Any]) -> None:
        # The window in hand lies between two places; of its samples some were given. At first it is
        # not made yet, and what was read with it is what the checkpoint says.
        self._place = self._next = place
        self.items: list[StreamSample] = []
        self._given, self._read_before = given, read
        self._rest: Piece | None = None  # of the row at the end of the window in hand
        self._reader.begin_at(self._turn, place.at)

    def state_dict(self) -> dict[str, Any]:
        """Return the place as JSON values, and what was read (`read`) with the window in hand."""
        place = {name: value for name, value in asdict(self._place).items() if value}
        read = {name: value for name, value in self.read().items() if value}
        return {"place": place, "given": self._given, "read": read}

    def read(self) -> dict[str, Any]:
        """Return what came of the rows read so far, with those of the window in hand."""
        return self._next.read() if self.items or not self._given else self._read_before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a place; the next sample costs a skip to it and the making of its window."""
        place = state["place"] | {"at": RowPlace(*state["place"]["at"])}
        self._start_at(StreamPlace(**place), state["given"], state["read"])

    def next(self) -> StreamSample | None:
        """Return the next sample; None when all passes are over. Passes without a sample, and a
        row that is refused, are DataErrors.
        """
        if self._given and not self.items:  # the window again of which samples were given before
            self._fill()
            if len(self.items) < self._given:
                what = f"{self._given} samples or more, not {len(self.items)}, in a window from"
                raise self._other_rows(what)
        while self._given == len(self.items):
            limit = self.source.max_repeats
            if limit is not None and self._next.at.epoch >= limit:
                return None
            self._fill()
            self._given = 0
        self._given += 1
        return self.items[self._given - 1]

    def _fill(self) -> None:
        """Make the samples of the next window."""
        self._place = self._next
        pieces, after, ended = self._read(self._place)
        self.items = self._samples(self._permuted(pieces, "rows"))
        after.samples += len(self.items)
        after.all_samples += len(self.items)
        if ended:
            after = after.next_pass()
            # Each pass deals the rows anew: by now this lane had about as many as there are.
            if after.empty_passes == self.lane.of:
                raise DataError(
                    f"expected samples in {self.source.name}, {after.rows_read} rows read gave "
                    f"none: {after.left_out} were left out; see data.on_bad_row, data.too_long and "
                    "the format of the rows"
                )
        self._next = after

    def _permuted(self, items: list, what: str) -> list:
        seed, n = derived_seed(self.seed, what, self._place.window), len(items)
        return [items[i] for i in permute(np.arange(n), max(1, n), seed, self._place.at.epoch)]

    def _read(self, start: StreamPlace) -> tuple[list[Piece], StreamPlace, bool]:
        """Return the pieces of a window of rows, the place after it, and whether the pass ended.

        What is joined fills whole samples: the row that does not fit is cut, and goes on in the
        next window.
        """
        at = StreamPlace(**asdict(start))
        pieces: list[Piece] = []
        wrapped = self.shape.packing == "wrapped"  # joined with others, and cut then
        samples = min(self.window, self.first << min(start.window, 30))
        room = samples * self.shape.sequence_length  # tokens
        while room > 0:
            place, used = at.at, at.cut
            if used:
                piece = self._rest or self._rest_again(at)
                at.at, at.cut = place.after(), 0
            else:
                found = self._reader.next(self._turn)
                if found is None:
                    return pieces, at, True
                place, row = found
                example = self.source.encode(row, place.row)
                if not at.count(place, example) or not isinstance(example, EncodedExample):
                    continue
                piece = _piece_of(example, self._columns)
            taken = len(piece.ids)
            if wrapped and taken > room:
                taken = room
                at.at, at.cut = place, used + taken
                piece, self._rest = piece.part(0, taken), piece.part(taken)
            pieces += [piece] if wrapped else _cut(piece, self.shape.sequence_length)
            room -= taken
        at.window += 1
        return pieces, at, False

    def _rest_again(self, at: StreamPlace) -> Piece:
        """Return what is left of the row at a place from which a run goes on."""
        found = self._reader.next(self._turn)
        example = found and self.source.encode(found[1], found[0].row)
        if not isinstance(example, EncodedExample) or len(example.input_ids) <= at.cut:
            raise self._other_rows(f"a row of more than {at.cut} tokens at")
        return _piece_of(example, self._columns).part(at.cut)

    def _other_rows(self, what: str) -> DataError:
        return DataError(
            f"the checkpoint's position counts on {what} row {self._place.at.row} of a shard of "
            f"{self.source.name}: the stream gives other rows than before; give the same, or start "
            "anew in another output_dir"
        )

    def _samples(self, pieces: list[Piece]) -> list[StreamSample]:
        groups = [[piece] for piece in pieces]
        if self.shape.packing == "bfd":
            lengths = np.array([len(piece.ids) for piece in pieces], np.int64)
            plan = pack_best_fit(lengths, self.shape.sequence_length)
            groups = [[pieces[i] for i in plan.bin(b)] for b in range(len(plan))]
        elif self.shape.packing == "wrapped" and pieces:
            groups = [[p] for p in _cut(join_pieces(pieces), self.shape.sequence_length)]
        samples = [
            StreamSample(group, sum(len(piece.ids) for piece in group))
            for group in self._permuted(groups, "samples")
        ]
        return self._alike(samples) if self.shape.packing == "none" else samples

    def _alike(self, samples: list[StreamSample]) -> list[StreamSample]:
        """Return samples in an order in which those of a global batch are of like lengths in all
        lanes: the n-th of a lane is of a quantile of its window that n alone decides, the same
        where a batch takes several of a lane; lanes that the batch does not reach have another.
        """
        by_length, order = sorted(samples, key=lambda sample: sample.length), []
        number, lanes, batch = self.lane
        offset = derived_seed(self._lengths, number // batch) / (1 << 56)
        each = max(1, batch // lanes)
        for n in range(self._place.all_samples, self._place.all_samples + len(samples)):
            quantile = (offset + n // each * _GOLDEN_RATIO) % 1  # fills (0, 1) evenly
            order.append(by_length.pop(int(quantile * len(by_length))))
        return order


def _piece_of(example: EncodedExample, columns: Mapping[str, Column]) -> Piece:
    """Build the piece of a complete row, with its values of the stored `columns`."""
    ids = example.input_ids.astype(np.int32, copy=False)
    labels = labels_of(ids, [edge for span in example.spans for edge in span])
    per_token, per_row = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, column in columns.items():
        value = example.columns.get(name)
        if column.per == "token":
            values = column.blank(len(ids)) if value is None else column.as_array(value)
            per_token[name] = values
        elif value is not None:
            per_row[name] = column.as_array(value)
    return Piece(ids, labels.astype(np.int32), example.second or 0, per_token, per_row)


def _cut(piece: Piece, limit: int) -> list[Piece]:
    """Cut a piece into pieces of `limit` tokens and a shorter last one; a pair always fits."""
    return [piece.part(begin, begin + limit) for begin in range(0, len(piece.ids), limit)]
