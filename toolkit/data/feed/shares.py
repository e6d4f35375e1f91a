"""Rows of a stream dealt to lanes, and read once for all lanes of a rank.

[Note: dealing rows]
The files of a pass, large ones in parts (`tables.file_shards`; "file" here is either), stand in a
permuted order on a line, each as long as its size. The line is cut into equal parts, one for each
group of lanes. A file that lies in several parts is dealt out row by row: row k falls on the
fraction of k times the golden ratio, which fills the file evenly, so each group takes its part of
any stretch of rows. Of as many rows of a group as it has lanes each lane has one; which, is drawn
for each such stretch and pass, since rows may repeat with a period (questions and answers, say).
What is a lane's follows from the numbers of files and rows alone.

There are as many groups as divide the lanes and do not outnumber the files, so that a rank reads
few files but its own. Files whose size is not known count alike; where they are fewer than lanes
there is one group, since they could be very unlike. Who shares a file reads all of its rows, and
makes Python values of its own only.
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

READ_ROWS = 100  # rows that are read together
_WHOLE = 1 << 32  # of a file
_GOLDEN = np.uint64(2_654_435_769)  # of _WHOLE


class RowPlace(NamedTuple):
    """A row of a group: places compare in the order in which rows are read."""

    epoch: int = 0  # passes before
    file: int = 0  # files that the group has read of this pass
    row: int = 0  # rows of the next file that were read, also those of other groups
    number: int = 0  # rows of the group in this pass before

    def after(self) -> "RowPlace":
        """Return the place behind the row that is here."""
        return self._replace(row=self.row + 1, number=self.number + 1)


BEGINNING = RowPlace()


class _RowRange(NamedTuple):
    """What a group reads of a file: rows whose fraction lies in [begin, end) of `_WHOLE`."""

    file: int
    begin: int
    end: int


@dataclass(frozen=True)
class Shares:
    """How the rows of a stream are dealt to `lanes`. See [Note: dealing rows]."""

    rows: datasets.IterableDataset
    sizes: Sequence[int] | None  # of its shards, where they are known
    lanes: int
    seed: int  # of the order of the files, and of who has which row

    @property
    def groups(self) -> int:
        most = min(self.lanes, self.rows.num_shards)
        if self.sizes is None and most < self.lanes:
            return 1
        return max(n for n in range(1, most + 1) if self.lanes % n == 0)

    def parts(self, group: int, epoch: int) -> list[_RowRange]:
        """Return what a group reads in a pass, in order."""
        n = self.rows.num_shards
        order = permute(np.arange(n), n, self.seed, epoch).tolist()
        sizes = [1] * n if self.sizes is None else [max(1, size) for size in self.sizes]
        total, groups, found, before = sum(sizes), self.groups, [], 0
        for file in order:
            begin, end = (
                min(max(((total * g - before * groups) << 32) // (sizes[file] * groups), 0), _WHOLE)
                for g in (group, group + 1)
            )
            if begin < end:
                found.append(_RowRange(file, begin, end))
            before += sizes[file]
        return found


class GroupReader:
    """The rows of a group of lanes, read once for those of its lanes that are asked for.

    Name each lane's place by `begin_at` before the first `next`. What one lane has to wait for is
    kept for the others, as Arrow tables.
    """

    def __init__(self, shares: Shares, group: int) -> None:
        self.shares, self.group = shares, group
        self.turns = shares.lanes // shares.groups  # lanes of the group
        self._begins: dict[int, RowPlace] = {}
        self._waiting: dict[int, deque[tuple[list[RowPlace], pa.Table] | None]] = {}
        self._in_hand: dict[int, Iterator[tuple[RowPlace, dict[str, Any]]]] = {}
        self._reading: Iterator[None] | None = None
        self._formatter = PythonFormatter(features=shares.rows.features)

    def begin_at(self, turn: int, place: RowPlace) -> None:
        """Let the rows of a lane, the `turn`-th of the group, begin at a place."""
        self._begins[turn] = place
        self._waiting, self._in_hand, self._reading = {}, {}, None

    def next(self, turn: int) -> tuple[RowPlace, dict[str, Any]] | None:
        """Return the place and the columns of a lane's next row; None once at the end of a pass."""
        if self._reading is None:
            self._waiting = {lane: deque() for lane in self._begins}
            self._reading = self._read(min(self._begins.values()))
        while (found := next(self._in_hand.get(turn, iter(())), None)) is None:
            while not self._waiting[turn]:
                next(self._reading)
            chunk = self._waiting[turn].popleft()
            if chunk is None:
                return None
            places, table = chunk
            columns = self._formatter.format_batch(table)
            rows = [dict(zip(columns, r, strict=True)) for r in zip(*columns.values(), strict=True)]
            self._in_hand[turn] = zip(places, rows, strict=True)
        return found

    def _read(self, start: RowPlace) -> Iterator[None]:
        """Give each lane its rows from `start` on, pass after pass; yields when some were read."""
        epoch, first, skipped, number = start
        while True:
            parts = self.shares.parts(self.group, epoch)
            for at, part in enumerate(parts[first:], first):
                for row, table in _tables(self.shares.rows, part.file, skipped):
                    numbers = np.arange(row, row + len(table), dtype=np.uint64)
                    points = numbers * _GOLDEN & np.uint64(_WHOLE - 1)
                    mine = np.flatnonzero((points >= part.begin) & (points < part.end))
                    self._deal(table, mine, RowPlace(epoch, at, row, number))
                    number += len(mine)
                    yield
                skipped = 0
            for turn, waiting in self._waiting.items():
                if self._begins[turn].epoch <= epoch:
                    waiting.append(None)
            epoch, first, number = epoch + 1, 0, 0
            yield

    def _deal(self, table: pa.Table, mine: np.ndarray, first: RowPlace) -> None:
        """Give each lane its rows of a table, of which the group has those at `mine`."""
        numbers = first.number + np.arange(len(mine))
        begins = draw_below(numbers // self.turns, self.turns, self.shares.seed, first.epoch)
        turns = (numbers + begins) % self.turns
        for turn, waiting in self._waiting.items():
            numbers = np.flatnonzero(turns == turn)
            places = [
                first._replace(row=first.row + int(mine[n]), number=first.number + int(n))
                for n in numbers
            ]
            keep = [i for i, place in enumerate(places) if place >= self._begins[turn]]
            if keep:
                rows = table.take(pa.array(mine[numbers[keep]]))
                waiting.append(([places[i] for i in keep], rows))


def _tables(
    rows: datasets.IterableDataset, file: int, skipped: int
) -> Iterator[tuple[int, pa.Table]]:
    """Yield (the number of its first row, table) of a shard, after the rows that are skipped."""
    shard = rows if rows.num_shards == 1 else rows.shard(rows.num_shards, file)
    shard = shard.skip(skipped) if skipped else shard
    for table in shard.with_format("arrow").iter(READ_ROWS):
        yield skipped, table
        skipped += len(table)


def reduce_lanes(rows: Sequence[datasets.IterableDataset], most: int, each: int) -> int:
    """Return the greatest divisor of `most` of which each lane has `each` rows of every stream, at
    least 1. Reads up to `most` x `each` rows of each stream, without making rows of them.
    """
    for stream in rows:
        count = 0
        for table in stream.with_format("arrow").iter(READ_ROWS):
            count += len(table)
            if count >= most * each:
                break
        most = max(n for n in range(1, most + 1) if most % n == 0 and (n == 1 or n * each <= count))
    return most
