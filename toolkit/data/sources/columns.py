"""Parquet files, Arrow files and data sets by name, as rows of columns, read through `datasets`.

[Note: text as bytes]
Parquet and Arrow do not check that text is UTF-8, and reading one row that is not fails for its
whole batch. So columns of text are viewed as binary (the same bytes; nothing is copied), and each
row is decoded by itself.
"""

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.iterable_dataset import ArrowExamplesIterable
from datasets.table import table_cast

from toolkit.config.settings import SourceConfig
from toolkit.data.sources.files import Kind
from toolkit.data.sources.row_values import BadRow
from toolkit.errors import DataError

RowDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset

FILE, ROW = "_file", "_row"
"""Columns of a streamed row: the index of its file, and its number in it."""

_BATCH = 1000


def read_files(
    files: list[Path], kind: Kind, where: str, columns: Sequence[str]
) -> datasets.Dataset:
    """Return the rows of Parquet or Arrow `files`, cached; of Parquet only those of `columns`.

    Raises:
        DataError: a file cannot be read, or the columns of two do not fit together.
    """
    options: dict[str, Any] = {}
    try:
        if kind == "parquet":  # the others need not be copied into the cache
            names = pq.read_schema(files[0]).names
            wanted = [c for c in columns if c in names]
            options = {"columns": wanted} if wanted else {}
        escaped = [glob.escape(str(f)) for f in files]
        return datasets.load_dataset(kind, data_files=escaped, split="train", **options)
    except Exception as error:
        raise as_data_error(error, where) from error


def stream_files(
    files: list[Path], kind: Kind, where: str, columns: Sequence[str]
) -> datasets.IterableDataset:
    """Return the rows of Parquet or Arrow files as a stream, one shard a file, text as bytes.

    A row has those of `columns` that the first file with rows has, or all if it has none of them,
    and `FILE` and `ROW`. Skipping reads whole batches without making rows of them.

    Raises:
        DataError: there is no row, or the first cannot be read. (Any other: while iterating.)
    """
    try:
        indices = list(range(len(files)))
        first = next(_tables([str(f) for f in files], indices, kind, None), None)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if first is None:
        raise DataError(f"{where}: expected examples, found no row")
    kept = [name for name in first[1].column_names if name in {*columns, FILE, ROW}]
    table = first[1].select(kept) if len(kept) > 2 else first[1]
    schema = table.schema
    kwargs = {
        "files": [str(f) for f in files],
        "indices": indices,
        "kind": kind,
        "schema": schema,
    }
    return datasets.IterableDataset(
        ArrowExamplesIterable(_tables, kwargs),
        info=datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(schema)),
    )


def read_named(source: SourceConfig, where: str, *, streaming: bool = False) -> RowDataset:
    """Return the rows of a data set: a folder of `save_to_disk`, or an id on the Hub.

    Raises:
        DataError: it is not there, cannot be read, or has no such split.
    """
    name, split = str(source.dataset_name), source.dataset_split
    folder = Path(name).expanduser()
    if folder.is_file():
        raise DataError(f"{where} is a file, expected a data set; give it as files")
    saved = any((folder / f).is_file() for f in ("state.json", "dataset_dict.json"))
    try:
        if not saved:
            name = str(folder) if folder.is_dir() else name
            return datasets.load_dataset(
                name, source.dataset_config_name, split=split, streaming=streaming
            )
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise as_data_error(error, where) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(
                f"{where} has no split {split!r}, only {', '.join(loaded)}; set its dataset_split"
            )
        loaded = loaded[split]
    # A saved selection or shuffle is an index over the rows; what follows reads the rows in order.
    loaded = loaded if loaded._indices is None else loaded.flatten_indices()
    return loaded.to_iterable_dataset() if streaming else loaded


def rows_in(file: Path, kind: Kind) -> int:
    """Return how many rows a Parquet or Arrow file has; reads its metadata."""
    if kind == "parquet":
        return pq.read_metadata(file).num_rows
    return sum(batch.num_rows for batch in _batches(str(file), kind))


def as_bytes(rows: RowDataset, columns: Sequence[str]) -> RowDataset:
    """Return those of `columns` that `rows` have, or all if none, text as bytes; nothing is copied.

    See [Note: text as bytes].
    """
    rows = rows.with_format(None)
    if rows.features is None:  # of a stream, where the first rows tell
        rows = rows._resolve_features()
    kept = [name for name in rows.column_names if name in columns]
    rows = rows.select_columns(kept) if kept else rows
    binary = datasets.Features({name: _binary(inner) for name, inner in rows.features.items()})
    if isinstance(rows, datasets.IterableDataset):
        return rows.cast(binary)
    return datasets.Dataset(
        rows.data.cast(binary.arrow_schema),
        info=datasets.DatasetInfo(features=binary),
        split=rows.split,
        fingerprint=f"{rows._fingerprint}-bytes",
    )


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `as_bytes` with text again, and without the nulls that Arrow filled in.

    Arrow gives all mappings of a column the same keys, so keys below a column that are null are
    left out, but for a turn's `content`: an assistant that only calls tools says null.

    Raises:
        BadRow: text is not UTF-8; with its place in the row.
    """
    return {name: _plain(row[name], name) for name in row if name not in (FILE, ROW)}


def as_data_error(error: BaseException, where: str) -> DataError:
    """Return the DataError within `error`, or a new one with the cause that `datasets` hid."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(inner)
    for cause in chain:
        if isinstance(cause, DataError):
            return cause
    said = list(dict.fromkeys(" ".join(str(e).split()) for e in (error, chain[-1])))
    if "corresponds to no data" in said[0]:  # how `datasets` says that a split has no rows
        return DataError(f"{where}: expected documents, found no row")
    return DataError(f"{where} cannot be read: {'; '.join(said)[:600]}")


def _tables(
    files: list[str], indices: list[int], kind: Kind, schema: pa.Schema | None
) -> Iterator[tuple[str, pa.Table]]:
    for file, at in zip(files, indices, strict=True):
        row = 0
        try:
            for batch in _batches(file, kind, schema and schema.names):
                table = pa.Table.from_batches([batch])
                features = datasets.Features.from_arrow_schema(table.schema)
                binary = {name: _binary(feature) for name, feature in features.items()}
                table = table_cast(table, datasets.Features(binary).arrow_schema)
                count = table.num_rows
                rows = pa.array(range(row, row + count), pa.int64())
                table = table.append_column(FILE, pa.array([at] * count, pa.int32()))
                table = table.append_column(ROW, rows)
                if schema is not None:
                    if missing := set(schema.names).difference(table.column_names):
                        raise ValueError(f"expected the columns of the first file, {missing} lack")
                    table = table_cast(table.select(schema.names), schema)
                yield f"{at}_{row}", table
                row += count
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read from row {row} on: {error}") from error


def _batches(
    file: str, kind: Kind, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    if kind == "parquet":
        with pq.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            wanted = None if columns is None else [name for name in names if name in columns]
            yield from opened.iter_batches(batch_size=_BATCH, columns=wanted)
        return
    with pa.memory_map(file) as stream:
        try:
            batches = iter(pa.ipc.open_stream(stream))
        except pa.ArrowInvalid:  # the other of Arrow's two file formats
            table = pa.ipc.open_file(stream)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        yield from batches


def _binary(feature: Any) -> Any:
    if isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string"):
        return datasets.Value(feature.dtype.replace("string", "binary"))
    if isinstance(feature, dict):
        return {name: _binary(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List):
        return datasets.List(_binary(feature.feature), length=feature.length)
    if isinstance(feature, datasets.LargeList):
        return datasets.LargeList(_binary(feature.feature))
    return feature


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRow(
                f"expected UTF-8 in {where!r}, got byte 0x{value[error.start]:02x} at offset "
                f"{error.start} of it",
                "not UTF-8",
            ) from error
    if isinstance(value, list):
        if value and isinstance(value[0], int):  # token ids: many, and nothing to decode
            return value
        return [_plain(inner, f"{where}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, dict):
        return {
            key: _plain(inner, f"{where}.{key}")
            for key, inner in value.items()
            if inner is not None or (key == "content" and "role" in value)
        }
    return value
