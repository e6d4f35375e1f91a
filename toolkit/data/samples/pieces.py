"""Encoded rows, and the pieces of them that samples consist of; memory-mapped, not copied.

Encoded rows are a data set with a column `input_ids` (lists of integers) and, if not every token is
supervised, a column `spans`: begin, end, begin, end ... of those that are. The label of a token is
its id inside a span and `IGNORED` elsewhere. Labels are not shifted, as transformers expects them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from toolkit.data.samples.batch import IGNORED
from toolkit.data.samples.columns import Column, stored_columns
from toolkit.errors import DataError

Chosen = range | np.ndarray | None
"""Numbers of the windows or rows that are used; None: all."""

_NO_COLUMNS: Mapping[str, np.ndarray] = {}
_UNDECLARED: Mapping[str, Column] = {}


class Piece(NamedTuple):
    """A row or a part of a row: token ids, labels and column values.

    `second` is the position at which the rejected side of a pair begins; 0 for other rows.
    `per_token` has column values of shape [tokens, ...]. `per_row` has the values of the complete
    row, of shape [1, ...], or [sequences, ...] for columns with a value per sequence.
    """

    ids: np.ndarray
    labels: np.ndarray
    second: int = 0
    per_token: Mapping[str, np.ndarray] = _NO_COLUMNS
    per_row: Mapping[str, np.ndarray] = _NO_COLUMNS

    def part(self, begin: int, end: int | None = None) -> "Piece":
        """Return tokens [begin, end) with their labels and values; `per_row` stays complete."""
        per_token = {name: values[begin:end] for name, values in self.per_token.items()}
        return self._replace(
            ids=self.ids[begin:end], labels=self.labels[begin:end], per_token=per_token
        )

    def sides(self) -> tuple["Piece", "Piece"]:
        """Split a pair into its chosen and its rejected side, both without `per_row`."""
        bare = self._replace(second=0, per_row=_NO_COLUMNS)
        return bare.part(0, self.second), bare.part(self.second)


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """Concatenate one or more pieces. The result has no `per_row` values, and `second` is 0."""
    names = pieces[0].per_token
    return Piece(
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate([piece.labels for piece in pieces]),
        per_token={n: np.concatenate([piece.per_token[n] for piece in pieces]) for n in names},
    )


class EncodedRows:
    """Gives access to encoded rows, one by one or as one sequence of all their tokens.

    Args:
        tokens: the encoded rows, a data set with `input_ids` and, for some formats, other columns.
        columns: the columns that the row format declares, by name.
    """

    def __init__(
        self, tokens: datasets.Dataset, columns: Mapping[str, Column] = _UNDECLARED
    ) -> None:
        # A selection or shuffle is an index over the rows, but columns are read in file order.
        self.tokens = tokens.flatten_indices() if tokens._indices is not None else tokens
        self.columns = columns
        self._ids = self._stored_column("input_ids")
        self._spans = self._stored_column("spans")
        seconds = self._stored_column("second")
        self._seconds = None if seconds is None else seconds.to_numpy()
        self._numbers = {
            name: _fill_nulls(self._stored_column(name), column, len(self))
            for name, column in stored_columns(columns).items()
            if column.is_number
        }
        self._of_tokens = {
            name: _flatten(self._stored_column(name))
            for name, column in stored_columns(columns).items()
            if column.per == "token" and name in self.tokens.column_names
        }
        self._late: dict[str, np.ndarray] = {}
        self._joined = _flatten(self._ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedRows, (self.tokens, self.columns), {"_late": self._late}

    def __len__(self) -> int:
        return len(self.tokens)

    def _stored_column(self, name: str) -> Any:
        """Return a column of the data set as a chunked Arrow array; None if it does not exist."""
        return self.tokens.data.column(name) if name in self.tokens.column_names else None

    @property
    def total(self) -> int:
        """Number of tokens of all rows together."""
        return len(self._joined)

    @cached_property
    def ends(self) -> np.ndarray:
        """Cumulative number of tokens up to the end of each row; int64 [rows]."""
        return np.cumsum(self.lengths())

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of every row; int64 [rows]."""
        return pc.list_value_length(self._ids).to_numpy().astype(np.int64)

    def ids(self, row: int) -> np.ndarray:
        """Return the token ids of a row as a view of the memory-mapped file."""
        return self._ids[row].values.to_numpy()

    def labels(self, row: int) -> np.ndarray:
        """Compute the unshifted labels of a row; int64, `IGNORED` for unsupervised tokens."""
        ids = self.ids(row)
        if self._spans is None:
            return ids.astype(np.int64)
        return labels_of(ids, self._spans[row].values.to_numpy())

    def second(self, row: int) -> int:
        """Return the position at which the rejected side of a pair begins; 0 for other rows."""
        return 0 if self._seconds is None else int(self._seconds[row])

    def side_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the token counts of the chosen and rejected sides of pairs; int64 [rows, 2]."""
        assert self._seconds is not None
        first = self._seconds[rows].astype(np.int64)
        return np.stack([first, self.lengths()[rows] - first], 1)

    @property
    def column_names(self) -> list[str]:
        """Names of the columns that have values: stored ones, and those that `fill_column` set."""
        return [n for n, column in self.columns.items() if not column.late or n in self._late]

    def fill_column(self, name: str, values: np.ndarray) -> None:
        """Set the values of a column that is not stored (`late`); micro-batches then contain them.

        Args:
            name: a late column that the row format declares.
            values: array [rows, *shape] for a column per row, [rows, sequences, *shape] per
                sequence, or [tokens of all rows, *shape] per token. NaN marks values that no
                micro-batch reads.

        Raises:
            DataError: the number of values or their shape is wrong.
        """
        column = self.columns[name]
        units = self.total if column.per == "token" else len(self)
        inner = values.shape[2 if column.per == "sequence" else 1 :]
        if len(values) != units or inner != column.shape:
            raise DataError(
                f"expected values of {name} for {units} {column.per}s or their rows, of shape "
                f"{column.shape} each, got an array of shape {values.shape}"
            )
        self._late[name] = values

    def values_of_row(self, name: str, row: int) -> np.ndarray:
        """Return a row's values in a column per row or per sequence: [1 or sequences, *shape].

        A row without a stored value gets the fill value of the column.

        Raises:
            DataError: the column is late, and the row has no value.
        """
        column = self.columns[name]
        if column.late:
            values = self._late[name][row]
            values = values if column.per == "sequence" else values[None]
            self._check_complete(name, values, row)
            return values
        if column.is_number:
            return self._numbers[name][row : row + 1]
        stored = self._stored_column(name)
        if stored is None or not stored[row].is_valid:
            is_pair = column.per == "sequence" and self._seconds is not None
            return column.blank(2 if is_pair else 1)
        return column.as_array(stored[row].values.to_numpy())

    def _values_of_tokens(self, name: str, begin: int, count: int) -> np.ndarray:
        """Return the values of `count` tokens in a column per token: [count, *shape].

        Tokens are counted over all rows joined. If the column is not stored, all values are its
        fill value.

        Raises:
            DataError: the column is late, and a token has no value.
        """
        column = self.columns[name]
        if column.late:
            values = self._late[name][begin : begin + count]
            self._check_complete(name, values, self.rows_of(begin, count)[0])
            return values
        if name not in self._of_tokens:
            return column.blank(count)
        width = math.prod(column.shape)
        values = self._of_tokens[name].slice(begin * width, count * width)
        return column.as_array(values.to_numpy())

    def _check_complete(self, name: str, values: np.ndarray, row: int) -> None:
        """Raise DataError, with the number `row`, if a value of column `name` is not finite."""
        if not np.isfinite(values).all():
            raise DataError(
                f"row {row} has no {name} value, and a batch reads it: expected one for every row "
                "that the run reads; start the run in another output_dir"
            )

    def rows_of(self, begin: int, count: int) -> tuple[int, int]:
        """Return the numbers of the first and the last row of tokens [begin, begin + count).

        Tokens are counted over all rows joined.
        """
        first, last = self.ends.searchsorted([begin, begin + count - 1], "right").tolist()
        return first, last

    def piece(self, begin: int, count: int) -> Piece:
        """Read tokens [begin, begin + count) of all rows joined, as a piece with copied ids.

        Labels are copies, too. The fields `per_row` and `second` have the values of the row in
        which the piece begins.
        """
        ids = self._joined.slice(begin, count).to_numpy().astype(np.int64)
        first, last = self.rows_of(begin, count)
        per_token, per_row = dict[str, np.ndarray](), dict[str, np.ndarray]()
        for name in self.column_names:
            if self.columns[name].per == "token":
                per_token[name] = self._values_of_tokens(name, begin, count)
            else:
                per_row[name] = self.values_of_row(name, first)
        if self._spans is None:
            return Piece(ids, ids.copy(), 0, per_token, per_row)
        labels = np.concatenate([self.labels(row) for row in range(first, last + 1)])
        start = begin - (int(self.ends[first - 1]) if first else 0)
        labels = labels[start : start + count]
        return Piece(ids, labels, self.second(first), per_token, per_row)


def _flatten(lists: pa.ChunkedArray) -> pa.ChunkedArray:
    """Concatenate the lists of a list column into one chunked array without a copy."""
    return pa.chunked_array([chunk.flatten() for chunk in lists.chunks], lists.type.value_type)


def _fill_nulls(stored: pa.ChunkedArray | None, column: Column, rows: int) -> np.ndarray:
    """Convert a stored column of numbers to an array [rows]; nulls become the fill value.

    If `stored` is None, all values are the fill value.
    """
    if stored is None:
        return column.blank(rows)
    fill = pa.scalar(column.blank(1)[0].item(), stored.type)
    return pc.fill_null(stored, fill).to_numpy().astype(column.dtype, copy=False)


def labels_of(ids: np.ndarray, spans: Sequence[int] | np.ndarray) -> np.ndarray:
    """Compute the labels of a row, int64: the token id inside the spans, `IGNORED` elsewhere.

    Args:
        ids: token ids.
        spans: alternating begin and end positions of the supervised tokens; ends are excluded.
    """
    labels = np.full(len(ids), IGNORED, np.int64)
    for begin, end in zip(spans[::2], spans[1::2], strict=True):
        labels[begin:end] = ids[begin:end]
    return labels


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces that `cut_windows` or `cut_rows` made of encoded rows; indexing reads one."""

    rows: EncodedRows
    begins: range | np.ndarray
    """First token of each piece, counted in all rows joined."""
    tokens: int | np.ndarray
    """Number of tokens of each piece, or of every one."""
    dropped: dict[str, int]
    """What is in no piece: `tokens` or `empty rows`, and how many."""
    cut: int = 0
    """Number of rows that became several pieces."""

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each piece; an integer array [pieces]."""
        return np.full(len(self), self.tokens) if isinstance(self.tokens, int) else self.tokens

    def _token_range(self, number: int) -> tuple[int, int]:
        """Return (first token, number of tokens) of a piece; tokens count over all rows joined."""
        length = self.tokens if isinstance(self.tokens, int) else self.tokens[number]
        return int(self.begins[number]), int(length)

    def __getitem__(self, number: int) -> Piece:
        """Read a piece; its ids and labels are copies."""
        return self.rows.piece(*self._token_range(number))

    def rows_of(self, number: int) -> tuple[int, int]:
        """Return the numbers of the first and the last row from which piece `number` has tokens."""
        return self.rows.rows_of(*self._token_range(number))


def cut_windows(rows: EncodedRows, length: int, chosen: Chosen = None) -> Pieces:
    """Join all rows and cut them into pieces of `length` tokens; drop the remaining tokens.

    Without `chosen`, memory does not grow with the number of pieces, which may be 10^8.

    Args:
        rows: the encoded rows.
        length: number of tokens of a piece.
        chosen: numbers of the pieces to use; None: all.
    """
    count, remaining = divmod(rows.total, length)
    begins: range | np.ndarray = range(0, count * length, length)
    if isinstance(chosen, range):
        begins = begins[chosen.start : chosen.stop : chosen.step]
    elif chosen is not None:
        begins = chosen * length
    return Pieces(rows, begins, length, {"tokens": remaining})


def cut_rows(rows: EncodedRows, limit: int, chosen: Chosen = None) -> Pieces:
    """Cut each row into pieces of at most `limit` tokens; rows without tokens are dropped.

    All pieces of a row except the last have exactly `limit` tokens.

    Args:
        rows: the encoded rows.
        limit: maximum number of tokens of a piece.
        chosen: numbers of the rows to use; None: all.
    """
    numbers = np.arange(len(rows)) if chosen is None else np.asarray(chosen)
    lengths = rows.lengths()[numbers]
    counts = -(-lengths // limit)
    # Number of each piece within its row, and the tokens from there to the end of the row.
    number_in_row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens_to_end = np.repeat(lengths, counts) - number_in_row * limit
    begins = np.repeat(rows.ends[numbers], counts) - tokens_to_end
    dropped = {"empty rows": int((counts == 0).sum())}
    lengths = np.minimum(tokens_to_end, limit).astype(np.int32)
    return Pieces(rows, begins, lengths, dropped, int((counts > 1).sum()))
