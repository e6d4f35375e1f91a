"""Assign the rows of a stream to lanes, so that each rank reads every file only once.

[Note: dealing rows]
In each pass, the files stand on a line in a permuted order, each as long as its size. (A large file
is split into parts by `tables.file_shards`; "file" here also means such a part.) The line is cut
into equal ranges, one for each group of lanes. If a file lies in several ranges, its rows are
assigned one by one: row k belongs to the range at the fractional part of k times the golden ratio.
These points fill the file evenly, so each group has its share of any run of consecutive rows.

Within a group, each lane gets one of as many consecutive rows as there are lanes. Which one is
drawn for each such block and pass, because the rows of a file may alternate, such as questions and
answers. The lane of a row depends only on the numbers of the file and of the row.

The number of groups divides the number of lanes and is at most the number of files, so that a rank
reads few files of other ranks. Files of unknown size count equally. If there are fewer of them than
lanes, there is one group, since their sizes could differ a lot. Ranks that share a file read all of
its rows, but convert only their own to Python values.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from datasets.formatting import PythonFormatter

from toolkit.data.order.permutation import draw_below, permute

READ_ROWS = 100
"""Number of rows that are read together."""
# Ranges of a file are fractions of this number, and so is the golden ratio.
_WHOLE = 1 << 32
_GOLDEN = np.uint64(2_654_435_769)


class RowPlace(NamedTuple):
    """The position of a row in a stream: the pass, and the file and row within the pass.

    Positions are those of one group of lanes; a group reads a part of the files. Comparing two
    places tells which row is read first.
    """

    epoch: int = 0
    """Number of complete passes before the row."""
    file: int = 0
    """Number of files that the group has read in this pass."""
    row: int = 0
    """Number of the row in its file, counting those of other groups."""
    number: int = 0
    """Number of rows of the group before it in this pass."""

    def after(self) -> "RowPlace":
        """Return the place directly after this row; its file stays the same."""
        return self._replace(row=self.row + 1, number=self.number + 1)


BEGINNING = RowPlace()


class _RowRange(NamedTuple):
    """The rows of one file that a group of lanes reads.

    The number of each row determines a point in [0, 2^32); see [Note: dealing rows]. The group
    reads the rows whose points are in [begin, end).
    """

    file: int
    begin: int
    end: int


@dataclass(frozen=True)
class LaneAssignment:
    """The rule that assigns each row of a stream to a lane. See [Note: dealing rows].

    A lane is one of the independent sequences of rows into which a stream is divided. Lanes that
    share the same files form a group.
    """

    rows: datasets.IterableDataset
    sizes: Sequence[int] | None
    """Bytes of each shard, if they are known."""
    lanes: int
    seed: int
    """Seed of the order of the files, and of the lane of each row."""

    @property
    def groups(self) -> int:
        """Number of groups of lanes; it divides `lanes` and is at most the number of files.

        It is 1 if there are fewer files than lanes and their sizes are not known.
        """
        most = min(self.lanes, self.rows.num_shards)
        if self.sizes is None and most < self.lanes:
            return 1
        return max(n for n in range(1, most + 1) if self.lanes % n == 0)

    def row_ranges(self, group: int, epoch: int) -> list[_RowRange]:
        """List the files, and their rows, that a group reads in pass `epoch`, in reading order.

        The files are in a random order for each pass. All groups read about the same number of
        bytes.
        """
        n = self.rows.num_shards
        order = permute(np.arange(n), n, self.seed, epoch).tolist()
        sizes = [1] * n if self.sizes is None else [max(1, size) for size in self.sizes]
        total, groups, before = sum(sizes), self.groups, 0
        ranges = list[_RowRange]()
        for file in order:
            begin, end = (
                min(max(((total * g - before * groups) << 32) // (sizes[file] * groups), 0), _WHOLE)
                for g in (group, group + 1)
            )
            if begin < end:
                ranges.append(_RowRange(file, begin, end))
            before += sizes[file]
        return ranges


class GroupReader:
    """Reads the rows of a group of lanes once, for all of its lanes that this rank uses.

    Call `begin_at` for each of these lanes before the first `next`. Rows that belong to another of
    these lanes are buffered as Arrow tables until that lane asks for them.
    """

    def __init__(self, assignment: LaneAssignment, group: int) -> None:
        self.assignment, self.group = assignment, group
        # Number of lanes of the group.
        self.turns = assignment.lanes // assignment.groups
        self._begins: dict[int, RowPlace] = {}
        self._waiting: dict[int, deque[tuple[list[RowPlace], pa.Table] | None]] = {}
        self._in_hand: dict[int, Iterator[tuple[RowPlace, dict[str, Any]]]] = {}
        self._reading: Iterator[None] | None = None
        self._formatter = PythonFormatter(features=assignment.rows.features)

    def begin_at(self, turn: int, place: RowPlace) -> None:
        """Set the place at which a lane begins, and discard the buffered rows of all lanes.

        Afterwards, call it for all other lanes of this rank, too, before `next` is called again.

        Args:
            turn: number of the lane within the group.
            place: the first row that `next` returns for this lane.
        """
        self._begins[turn] = place
        self._waiting, self._in_hand, self._reading = {}, {}, None

    def next(self, turn: int) -> tuple[RowPlace, dict[str, Any]] | None:
        """Read the next row of a lane.

        Args:
            turn: number of the lane within the group.

        Returns:
            (place of the row, its columns by name). At the end of each pass, None is returned once,
            and the next call starts the next pass.
        """
        if self._reading is None:
            self._waiting = {lane: deque() for lane in self._begins}
            self._reading = self._read(min(self._begins.values()))
        while (row := next(self._in_hand.get(turn, iter(())), None)) is None:
            while not self._waiting[turn]:
                next(self._reading)
            chunk = self._waiting[turn].popleft()
            if chunk is None:
                return None
            places, table = chunk
            columns = self._formatter.format_batch(table)
            rows = [dict(zip(columns, r, strict=True)) for r in zip(*columns.values(), strict=True)]
            self._in_hand[turn] = zip(places, rows, strict=True)
        return row

    def _read(self, start: RowPlace) -> Iterator[None]:
        """Read the rows of the group from `start` on into the buffers of their lanes, without end.

        Yields None after each table of rows, and at the end of each pass. At the end of a pass,
        None is also appended to the buffer (`_waiting`) of each lane.
        """
        epoch, first, skipped, number = start
        while True:
            ranges = self.assignment.row_ranges(self.group, epoch)
            for at, rows in enumerate(ranges[first:], first):
                for row, table in _read_tables(self.assignment.rows, rows.file, skipped):
                    numbers = np.arange(row, row + len(table), dtype=np.uint64)
                    points = numbers * _GOLDEN & np.uint64(_WHOLE - 1)
                    of_group = np.flatnonzero((points >= rows.begin) & (points < rows.end))
                    self._assign_rows(table, of_group, RowPlace(epoch, at, row, number))
                    number += len(of_group)
                    yield
                skipped = 0
            for turn, waiting in self._waiting.items():
                if self._begins[turn].epoch <= epoch:
                    waiting.append(None)
            epoch, first, number = epoch + 1, 0, 0
            yield

    def _assign_rows(self, table: pa.Table, of_group: np.ndarray, first: RowPlace) -> None:
        """Append the rows of a table that belong to the group to the buffers of their lanes.

        Args:
            table: consecutive rows of a file.
            of_group: indices of the table's rows that belong to the group.
            first: the place of the first row of the table.
        """
        numbers = first.number + np.arange(len(of_group))
        begins = draw_below(numbers // self.turns, self.turns, self.assignment.seed, first.epoch)
        turns = (numbers + begins) % self.turns
        for turn, waiting in self._waiting.items():
            numbers = np.flatnonzero(turns == turn)
            places = [
                first._replace(row=first.row + int(of_group[n]), number=first.number + int(n))
                for n in numbers
            ]
            keep = [i for i, place in enumerate(places) if place >= self._begins[turn]]
            if keep:
                rows = table.take(pa.array(of_group[numbers[keep]]))
                waiting.append(([places[i] for i in keep], rows))


def _read_tables(
    rows: datasets.IterableDataset, file: int, skipped: int
) -> Iterator[tuple[int, pa.Table]]:
    """Yield (number of the first row, table) for one shard, from row number `skipped` on.

    A table holds up to `READ_ROWS` rows.
    """
    shard = rows if rows.num_shards == 1 else rows.shard(rows.num_shards, file)
    shard = shard.skip(skipped) if skipped else shard
    for table in shard.with_format("arrow").iter(READ_ROWS):
        yield skipped, table
        skipped += len(table)


def reduce_lanes(rows: Sequence[datasets.IterableDataset], lanes: int, lane_rows: int) -> int:
    """Return the largest number of lanes for which every stream has enough rows.

    Reads up to `lanes` x `lane_rows` rows of each stream to count them.

    Args:
        rows: the streams.
        lanes: maximum number of lanes.
        lane_rows: minimum number of rows of each stream in a lane.

    Returns:
        A divisor of `lanes`; 1 if no larger divisor has enough rows.
    """
    for stream in rows:
        count = 0
        for table in stream.with_format("arrow").iter(READ_ROWS):
            count += len(table)
            if count >= lanes * lane_rows:
                break
        divisors = [n for n in range(1, lanes + 1) if lanes % n == 0]
        lanes = max(n for n in divisors if n == 1 or n * lane_rows <= count)
    return lanes
