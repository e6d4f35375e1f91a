"""Columns that accompany the token ids of a row, from its encoding to the micro-batch.

[Note: columns] A kind of rows (`toolkit.data.row_formats.RowFormat`) declares its columns once.
Encoding, storage, packing, padding, collation and the planner's batches follow the declaration, so
a new column costs a declaration, the code that produces its values and the code that uses them:

    Column("float32", per="row")                          by how much a pair's rewards should differ
    Column("int64", per="row", fill=-100)                 the class of a row
    Column("float32", per="sequence", late=True)          the reference's log-probability of answers
    Column("int32", per="token", shape=(8,), late=True)   a teacher's 8 most likely next tokens

Encoding produces the values of a column (`EncodedExample.columns`) and stores them with the token
ids. A late column gets its values after encoding, from a pass of a model over the rows
(`EncodedRows.fill_column`); micro-batches carry it from then on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Column:
    """A declared column: extra values per token, sequence or row that micro-batches contain.

    See [Note: columns].

    Args:
        dtype: NumPy's name of the dtype, such as "float32".
        per: the object to which each value belongs. A row that is a pair of answers has two
            sequences. The value of a token is at the token's own position; it is not shifted.
        shape: shape of one value; () for a number.
        fill: value for padding, and for rows without a value.
        late: False if encoding produces the values and stores them with the token ids. True if
            `EncodedRows.fill_column` sets them afterwards; then NaN marks a missing value, and a
            micro-batch that reads it raises an error.
    """

    dtype: str
    per: Literal["token", "sequence", "row"]
    shape: tuple[int, ...] = ()
    fill: float = 0
    late: bool = False

    @property
    def is_number(self) -> bool:
        """True if each row has a single number, which is stored as such instead of in a list."""
        return self.per == "row" and not self.shape

    @property
    def arrow_type(self) -> pa.DataType:
        """The Arrow type of a row's values: a number, or one flat list of numbers."""
        number = pa.from_numpy_dtype(np.dtype(self.dtype))
        return number if self.is_number else pa.list_(number)

    def to_arrow(self, values: list[Any]) -> pa.Array:
        """Convert the values of several rows to an Arrow array; None is stored as null."""
        if not self.is_number:
            dtype = np.dtype(self.dtype)
            values = [None if v is None else np.asarray(v, dtype).ravel() for v in values]
        return pa.array(values, self.arrow_type)

    def blank(self, count: int) -> np.ndarray:
        """Create an array of `count` fill values, of shape [count, *shape]."""
        return np.full((count, *self.shape), self.fill, np.dtype(self.dtype))

    def as_array(self, value: Any) -> np.ndarray:
        """Convert the values of one row to an array [number of values, *shape].

        `value` may be flat, as it is stored.
        """
        return np.asarray(value, np.dtype(self.dtype)).reshape(-1, *self.shape)


def stored_columns(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns that are stored with the token ids: all columns that are not late."""
    return {name: column for name, column in columns.items() if not column.late}
