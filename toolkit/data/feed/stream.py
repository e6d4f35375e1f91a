"""Samples of a stream: rows are read while training, in windows, and the position is exact.

[Note: streams]
A stream has a fixed number of lanes. In each pass, every row belongs to one lane (`shares.py`), and
a lane builds its samples from its own rows only. The rows of a lane are read in windows. A window
holds the tokens of N samples: its rows are encoded, permuted, and packed (or cut, or left as they
are), and then the samples are permuted. A window ends at the end of a pass. If rows are joined and
cut, the rest of the last row becomes part of the next window. Windows start small and grow, so that
the first batch is ready soon.

The place of a lane is the row at which its current window begins, and how many samples of that
window were used. To resume, the lane skips to that row, builds the same window again, and skips the
used samples.

The sample at position p of the run is the next one of lane p % L, for any number W of ranks. If W
divides L, rank r reads the lanes r, r + W, ... and encodes no other rows. Each lane ends its passes
on its own: if lanes have different numbers of samples, one starts the next pass before another.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import datasets
import numpy as np

from toolkit.data.feed.shares import BEGINNING, GroupReader, LaneAssignment, RowPlace
from toolkit.data.order.permutation import derived_seed, permute
from toolkit.data.samples.columns import Column, stored_columns
from toolkit.data.samples.packing import pack_best_fit
from toolkit.data.samples.pieces import Piece, join_pieces, labels_of
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.data.sources.row_values import BadRow
from toolkit.data.tokens.encoded import EncodedExample, EncodedRow
from toolkit.errors import DataError

WINDOW = 64
"""Maximum size of a window, in samples."""
FIRST_WINDOW = 8
"""Size of the first window of a pass, in samples. Each window is twice as large as the last one."""
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass
class StreamSource:
    """A source whose rows are read and encoded while training."""

    name: str
    rows: datasets.IterableDataset
    encode: Callable[[dict[str, Any], int], EncodedRow]
    """Encodes a stored row; also takes its number in its shard. The result depends on nothing else.
    A `BadRow` names the row, which is skipped."""
    weight: float | None = None
    max_repeats: float | None = None
    """Maximum number of passes, a whole number."""
    sizes: Sequence[int] | None = None
    """Bytes of each shard (file), if they are known."""
    facts: dict[str, str] = field(default_factory=dict)
    """What else determines the rows and their tokens, by descriptions for messages."""


@dataclass
class StreamPlace:
    """The row at which a lane's current window begins, and counts of the lane's earlier rows.

    A window is a group of rows that is shuffled together. Checkpoints store this object, so the
    names of the fields are part of the checkpoint format.
    """

    at: RowPlace = BEGINNING
    """The first row of the window."""
    cut: int = 0
    """Number of tokens of that row that belong to the window before."""

    # Counts of the lane in this pass.
    rows: int = 0
    window: int = 0
    samples: int = 0

    # Counts of the lane over all passes.
    all_samples: int = 0
    empty_passes: int = 0
    """Number of passes without a sample since the last sample."""
    rows_read: int = 0
    left_out: int = 0
    """Number of rows that were skipped."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Reason -> number of rows that were skipped for it."""
    first: dict[str, str] = field(default_factory=dict)
    """Reason -> the first row that was skipped for it, and its fault."""
    truncated: int = 0
    """Number of rows whose end was cut off."""
    cut_off: int = 0
    """Number of tokens that were cut off."""

    def count_row(self, at: RowPlace, row: EncodedRow) -> bool:
        """Count the row at place `at`, and set `self.at` to the place after it.

        A row without tokens counts as skipped.

        Returns:
            True if the row is used, False if it is skipped.
        """
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
        """Return the place at which the next pass begins. It keeps the counts over all passes."""
        place = StreamPlace(BEGINNING._replace(epoch=self.at.epoch + 1), **self.row_counts())
        place.all_samples = self.all_samples
        place.empty_passes = 0 if self.samples else self.empty_passes + 1
        return place

    def row_counts(self) -> dict[str, Any]:
        """Return the counts of read, skipped and truncated rows over all passes, as JSON values."""
        names = ("rows_read", "left_out", "reasons", "first", "truncated", "cut_off")
        return {name: value for name, value in asdict(self).items() if name in names}


class StreamSample(NamedTuple):
    """The pieces of rows that form one sample, and their number of tokens."""

    pieces: list[Piece]
    length: int
    """Number of tokens."""


class Lane(NamedTuple):
    """One of the lanes (independent sequences of rows) into which a stream is divided.

    The sample at position p of the run comes from the lane with number p modulo `of`.
    """

    number: int = 0
    of: int = 1
    """Number of lanes."""
    batch: int = 1
    """Number of samples in a global batch."""


ONE_LANE = Lane()


class SourceStream:
    """The samples of one source in one lane, in order. See [Note: streams].

    A window is a group of consecutive rows of the lane that is shuffled and packed together.

    Args:
        source: the rows.
        number: index of the source among all sources of the run.
        shape: how rows become samples.
        seed: seed of the run.
        window: maximum size of a window, in samples.
        lane: the lane that this stream belongs to.
        readers: group number -> reader, for this source. All lanes of a rank share this dict, and a
            missing reader is added to it. None: the lane has a separate reader.
        first: size of the first window of a pass, in samples. Each later window is twice as large,
            up to `window`.

    Raises:
        DataError: `max_repeats` is not a whole number of at least 1.
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
        # All lanes of the source share this seed.
        shared = derived_seed(seed, "stream", number)
        self.seed, self._lengths = derived_seed(shared, lane.number), derived_seed(shared, "length")
        assignment = LaneAssignment(
            source.rows, source.sizes, lane.of, derived_seed(shared, "shards")
        )
        self._turn, group = divmod(lane.number, assignment.groups)
        readers = {} if readers is None else readers
        self._reader = readers.setdefault(group, GroupReader(assignment, group))
        self._start_at(StreamPlace(), 0, {})

    def _start_at(self, place: StreamPlace, used: int, read: dict[str, Any]) -> None:
        """Move the stream to the window at `place`. The following `next` builds the window.

        Args:
            place: the beginning of the window.
            used: number of samples of the window that were already returned.
            read: the counts that `row_counts` returns until the window is built.
        """
        # The current window lies between `_place` and `_next`. It is not built yet; until then, the
        # counts of its rows are those of the checkpoint.
        self._place = self._next = place
        self.items: list[StreamSample] = []
        self._used, self._read_before = used, read
        # What is left of the row at the end of the current window.
        self._rest: Piece | None = None
        self._reader.begin_at(self._turn, place.at)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values for `load_state_dict`.

        `place` is the beginning of the current window. `given` is the number of its samples that
        were returned. `read` has the counts of rows up to its end.
        """
        place = {name: value for name, value in asdict(self._place).items() if value}
        read = {name: value for name, value in self.row_counts().items() if value}
        return {"place": place, "given": self._used, "read": read}

    def row_counts(self) -> dict[str, Any]:
        """Return the counts of all rows up to the end of the current window, as JSON values."""
        return self._next.row_counts() if self.items or not self._used else self._read_before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned.

        The next call of `next` skips to the stored place and builds the window again.
        """
        place = state["place"] | {"at": RowPlace(*state["place"]["at"])}
        self._start_at(StreamPlace(**place), state["given"], state["read"])

    def next(self) -> StreamSample | None:
        """Return the next sample; None after the last pass that `max_repeats` allows.

        Raises:
            DataError: a row is refused, the rows have changed since the checkpoint was saved, or
                as many passes in a row as there are lanes gave no sample.
        """
        if self._used and not self.items:
            # Build the window again of which some samples were used before the resume.
            self._build_window()
            if len(self.items) < self._used:
                raise self._changed_rows_error(
                    f"{self._used} samples or more, not {len(self.items)}, in a window from"
                )
        while self._used == len(self.items):
            limit = self.source.max_repeats
            if limit is not None and self._next.at.epoch >= limit:
                return None
            self._build_window()
            self._used = 0
        self._used += 1
        return self.items[self._used - 1]

    def _build_window(self) -> None:
        """Read the next window, and set `items` to its samples in shuffled order.

        `items` becomes empty if the rest of the pass has no usable row.

        Raises:
            DataError: as many passes in a row as there are lanes gave no sample. A lane gets other
                rows in each pass.
        """
        self._place = self._next
        pieces, after, ended = self._read_window(self._place)
        self.items = self._build_samples(self._permute_items(pieces, "rows"))
        after.samples += len(self.items)
        after.all_samples += len(self.items)
        if ended:
            after = after.next_pass()
            # Each pass assigns the rows to lanes again. After as many passes as there are lanes,
            # this lane has had about as many rows as there are.
            if after.empty_passes == self.lane.of:
                raise DataError(
                    f"expected samples in {self.source.name}, got none from {after.rows_read} rows "
                    f"({after.left_out} were skipped); check data.on_bad_row, data.too_long and "
                    "the format of the rows"
                )
        self._next = after

    def _permute_items(self, items: list, purpose: str) -> list:
        """Shuffle items. The order depends on the lane, the pass, the window and `purpose`."""
        seed, n = derived_seed(self.seed, purpose, self._place.window), len(items)
        return [items[i] for i in permute(np.arange(n), max(1, n), seed, self._place.at.epoch)]

    def _read_window(self, start: StreamPlace) -> tuple[list[Piece], StreamPlace, bool]:
        """Read and encode rows from `start` on until a window is full or the pass ends.

        With packing `wrapped`, a window is filled exactly. The row that does not fit is split, and
        its remaining tokens begin the next window.

        Returns:
            (pieces of the rows, place after the window, True if the pass ended).
        """
        at = StreamPlace(**asdict(start))
        pieces: list[Piece] = []
        is_wrapped = self.shape.packing == "wrapped"
        samples = min(self.window, self.first << min(start.window, 30))
        # In tokens.
        room = samples * self.shape.sequence_length
        while room > 0:
            place, used = at.at, at.cut
            if used:
                piece = self._rest or self._read_rest_again(at)
                at.at, at.cut = place.after(), 0
            else:
                next_row = self._reader.next(self._turn)
                if next_row is None:
                    return pieces, at, True
                place, row = next_row
                example = self.source.encode(row, place.row)
                if not at.count_row(place, example) or not isinstance(example, EncodedExample):
                    continue
                piece = _build_piece(example, self._columns)
            length = len(piece.ids)
            if is_wrapped and length > room:
                length = room
                at.at, at.cut = place, used + length
                piece, self._rest = piece.part(0, length), piece.part(length)
            pieces += [piece] if is_wrapped else _split_piece(piece, self.shape.sequence_length)
            room -= length
        at.window += 1
        return pieces, at, False

    def _read_rest_again(self, at: StreamPlace) -> Piece:
        """Read again the row that was split between two windows, and return its unused tokens.

        This is needed if a resumed run starts inside the row.

        Raises:
            DataError: the row has changed since the checkpoint was saved.
        """
        next_row = self._reader.next(self._turn)
        example = next_row and self.source.encode(next_row[1], next_row[0].row)
        if not isinstance(example, EncodedExample) or len(example.input_ids) <= at.cut:
            raise self._changed_rows_error(f"a row of more than {at.cut} tokens at")
        return _build_piece(example, self._columns).part(at.cut)

    def _changed_rows_error(self, expected: str) -> DataError:
        """Create the error for a stream whose rows do not match the checkpoint."""
        return DataError(
            f"the checkpoint's position expects {expected} row {self._place.at.row} of a shard of "
            f"{self.source.name}, but the rows of the stream have changed; use the same rows, or "
            "start in another output_dir"
        )

    def _build_samples(self, pieces: list[Piece]) -> list[StreamSample]:
        """Pack, join or pad the pieces of a window as packing says, and shuffle the samples.

        Samples that will be padded (packing `none`) are then ordered by `_order_by_length`.
        """
        groups = [[piece] for piece in pieces]
        if self.shape.packing == "bfd":
            lengths = np.array([len(piece.ids) for piece in pieces], np.int64)
            plan = pack_best_fit(lengths, self.shape.sequence_length)
            groups = [[pieces[i] for i in plan.bin(b)] for b in range(len(plan))]
        elif self.shape.packing == "wrapped" and pieces:
            groups = [[p] for p in _split_piece(join_pieces(pieces), self.shape.sequence_length)]
        samples = [
            StreamSample(group, sum(len(piece.ids) for piece in group))
            for group in self._permute_items(groups, "samples")
        ]
        return self._order_by_length(samples) if self.shape.packing == "none" else samples

    def _order_by_length(self, samples: list[StreamSample]) -> list[StreamSample]:
        """Reorder samples so that all lanes give similar lengths to the same global batch.

        For each global batch, a pseudo-random quantile is computed that is the same in all lanes.
        The next sample is the one at this quantile of the lengths that remain in the window.
        """
        by_length, order = sorted(samples, key=lambda sample: sample.length), []
        number, lanes, batch = self.lane
        offset = derived_seed(self._lengths, number // batch) / (1 << 56)
        samples_per_batch = max(1, batch // lanes)
        for n in range(self._place.all_samples, self._place.all_samples + len(samples)):
            # Multiples of the golden ratio fill (0, 1) evenly.
            quantile = (offset + n // samples_per_batch * _GOLDEN_RATIO) % 1
            order.append(by_length.pop(int(quantile * len(by_length))))
        return order


def _build_piece(example: EncodedExample, columns: Mapping[str, Column]) -> Piece:
    """Convert an encoded row to a piece with its token ids, labels and column values.

    Missing values of a column per token are filled; other columns without a value are omitted.
    """
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


def _split_piece(piece: Piece, limit: int) -> list[Piece]:
    """Split a piece into pieces of `limit` tokens; the last one may be shorter."""
    return [piece.part(begin, begin + limit) for begin in range(0, len(piece.ids), limit)]
