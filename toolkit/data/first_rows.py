"""Check some rows of a source before a run: the first ones, and others spread over its files."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import datasets

from toolkit.data.report import check_supervised
from toolkit.data.sources import file_readers
from toolkit.data.sources.rows import DataSource
from toolkit.data.sources.tables import to_data_error
from toolkit.data.tokens.encode import Encoder
from toolkit.data.tokens.encoded import Counts, EncodedSource

LOOK_ROWS = 1000
"""Maximum number of rows that are checked at the beginning of a source."""
LOOK_SHARDS = 20
"""Number of places in a source of several files, or of a large one, at which rows are checked."""
SHARD_ROWS = 5
"""Number of rows that are checked at each of these places."""
_LOOK_BYTES = 4 << 20
_BATCH = 50
# If so many rows were checked and none can be used, the source is refused.
_MIN_ROWS_TO_REFUSE = 200


@dataclass
class RowCheck:
    """Counts of the rows of a source that were encoded as a check."""

    counts: Counts = field(default_factory=Counts)
    is_complete: bool = False
    """Whether the source has no other rows."""

    def check(self, source: DataSource, sequence_length: int) -> None:
        """Raise DataError if none of the checked rows can be used.

        The error lists reasons and counts. Does nothing if fewer than 200 rows were checked and the
        source has more rows.
        """
        if self.is_complete or self.counts.rows >= _MIN_ROWS_TO_REFUSE:
            no_rows = datasets.Dataset.from_dict({})
            check_supervised(EncodedSource(source.name, no_rows, self.counts), sequence_length)


def check_some_rows(source: DataSource, encoder: Encoder, seconds: float) -> RowCheck:
    """Encode the first rows of a source and a few rows of its other shards, and count the results.

    At most `LOOK_ROWS` first rows and 4 MiB are read. Of JSON and CSV files, the last rows are
    read, too, because they show a truncated copy.

    Args:
        source: the source, usually a stream.
        encoder: encodes the rows.
        seconds: time after which no further rows are read.

    Raises:
        DataError: a row ends the run, or a file cannot be read.
    """
    check, end = RowCheck(), time.monotonic() + seconds
    rows = iter(source.rows)
    bytes_left = _LOOK_BYTES
    try:
        while batch := list(islice(rows, min(_BATCH, LOOK_ROWS - check.counts.rows))):
            _encode_and_count(check, source, encoder, batch, check.counts.rows)
            bytes_left -= sum(len(str(row)) for row in batch)
            if bytes_left <= 0 or time.monotonic() > end:
                break
        check.is_complete = next(rows, None) is None
        shards = 0 if check.is_complete else getattr(source.rows, "num_shards", 1)
        for number in range(1, min(LOOK_SHARDS, shards)):
            if time.monotonic() > end:
                break
            at = number * (shards - 1) // (min(LOOK_SHARDS, shards) - 1)
            shard = source.rows.shard(num_shards=shards, index=at)
            _encode_and_count(check, source, encoder, islice(iter(shard), SHARD_ROWS), 0)
        if not check.is_complete and file_readers.RAW in (source.rows.column_names or ()):
            last = source.rows.shard(num_shards=shards, index=shards - 1)
            _encode_and_count(check, source, encoder, _last_rows(last, end), 0)
    except Exception as error:
        raise to_data_error(error, source.where) from error
    return check


def _last_rows(rows: Iterable[dict[str, Any]], end: float) -> list[dict[str, Any]]:
    """Return the last `SHARD_ROWS` rows of a shard; [] if reading takes too long.

    Reads the complete shard. `end` is the latest time, as given by `time.monotonic`.
    """
    last = deque[dict[str, Any]](maxlen=SHARD_ROWS)
    for number, row in enumerate(rows):
        last.append(row)
        if number % 1000 == 0 and time.monotonic() > end:
            return []
    return [*last]


def _encode_and_count(
    check: RowCheck,
    source: DataSource,
    encoder: Encoder,
    rows: Iterable[dict[str, Any]],
    first: int,
) -> None:
    """Encode rows and add the results to `check.counts`; `first` is the number of the first row."""
    for row in encoder.encode_rows(source, list(rows), first):
        check.counts.add(row)
