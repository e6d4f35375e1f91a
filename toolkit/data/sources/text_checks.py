"""What rows of documents must be: text that is UTF-8, or lists of token ids, and not all empty.

Owns the checks of a whole column at a time, and which rows fail them. Refuses to know where the
rows come from.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from toolkit.errors import DataError


def faulty(dataset: datasets.Dataset, column: str) -> Iterator[tuple[int, str]]:
    """Yield (row, what it holds) where `column` holds null or text that is not UTF-8.

    Looks at single rows only where their chunk has such; that a chunk has none is remembered in
    the cache, since Arrow does not check it and finding out reads all text.
    """
    seen = Path(datasets.config.HF_DATASETS_CACHE).expanduser() / "toolkit"
    seen /= f"utf8-{_column_key(dataset, column)}"
    if datasets.is_caching_enabled() and seen.is_file():
        return
    first, whole = 0, True
    for chunk in dataset.data.column(column).chunks:
        if chunk.null_count or not _is_unicode(chunk):
            for row, value in enumerate(_as_binary(chunk).to_pylist(), start=first):
                if (came := _fault_of(value)) is not None:
                    whole = False
                    yield row, came
        first += len(chunk)
    if whole:
        seen.parent.mkdir(parents=True, exist_ok=True)
        seen.touch()


def _column_key(dataset: datasets.Dataset, column: str) -> str:
    """Return a file name that stands for the content of one column."""
    return hashlib.blake2b(f"{dataset._fingerprint} {column}".encode(), digest_size=16).hexdigest()


def _is_unicode(chunk: pa.Array) -> bool:
    try:
        chunk.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _as_binary(values: pa.Array) -> pa.Array:
    kinds = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    return values.cast(kinds.get(values.type, values.type))


def _fault_of(value: Any) -> str | None:
    if value is None:
        return "holds null"
    if isinstance(value, bytes):
        try:
            value.decode("utf-8")
        except UnicodeDecodeError as error:
            return f"is not UTF-8: byte 0x{value[error.start]:02x} at offset {error.start}"
    return None


def emptied(table: pa.Table, column: str) -> pa.Table:
    """Return `column` with nothing in the rows that `faulty` names."""
    values = table.column(column)
    rows = [None if _fault_of(v) else v for v in _as_binary(values).to_pylist()]
    empty: object = [] if pa.types.is_nested(values.type) else b""
    filled = pa.array([empty if row is None else row for row in rows], _as_binary(values).type)
    return pa.table({column: filled.cast(values.type)})


def counted(row: int) -> str:
    """Return a row's name for messages."""
    return f"row {row} (counted from 0)"


def checked(dataset: datasets.Dataset, column: str, where: str) -> datasets.Dataset:
    """Return `dataset` when its rows are usable; reads all text where that is new."""
    if not len(dataset):
        raise DataError(f"{where}: expected documents, found no row")
    tokens = column == "input_ids"
    values = dataset.data.column(column)
    kind = values.type
    if tokens:
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        # A list of nulls is what empty lists alone come as.
        integer = is_list and pa.types.is_integer(kind.value_type)
        usable = integer or (is_list and pa.types.is_null(kind.value_type))
    else:
        usable = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not usable or values.null_count:
        raise DataError(f"{where}: {_first_bad(dataset, column)} (the column's type is {kind})")
    if not tokens and (found := next(faulty(dataset, column), None)) is not None:
        raise DataError(
            f"{where}: expected text in column {column!r}, {counted(found[0])} {found[1]}; remove "
            "or repair such rows, or set data.on_bad_row: skip"
        )
    length = pc.list_value_length if tokens else pc.binary_length
    if not any(pc.max(length(chunk)).as_py() for chunk in values.chunks):
        raise DataError(f"{where}: expected text, but all {len(dataset)} rows are empty")
    return dataset


def _first_bad(dataset: datasets.Dataset, column: str) -> str:
    """Name the first row that is not of the expected type; reads rows until it meets one."""
    tokens = column == "input_ids"

    def good(value: object) -> bool:
        if tokens:
            return isinstance(value, list) and all(isinstance(i, int) for i in value)
        return isinstance(value, str)

    rows = ((row, example[column]) for row, example in enumerate(dataset))
    row, value = next(((row, value) for row, value in rows if not good(value)), (0, None))
    came = "null" if value is None else f"{type(value).__name__} {value!r}"
    return (
        f"expected {'a list of token ids' if tokens else 'text'} in column {column!r}, row {row} "
        f"(counted from 0) holds {came[:80]}; remove or repair such rows, or set "
        "data.on_bad_row: skip"
    )
