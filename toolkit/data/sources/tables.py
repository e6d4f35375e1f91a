"""Read rows of files and data sets as Arrow tables, cached or as a stream.

[Note: text as bytes]
Parquet and Arrow do not check that text is UTF-8, and one row that is not makes its complete batch
fail. Therefore columns of text are viewed as binary (the same bytes; nothing is copied), and each
row is decoded separately.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from datasets.iterable_dataset import ArrowExamplesIterable
from datasets.table import MemoryMappedTable, table_cast
from datasets.utils import tqdm

from toolkit import ranks
from toolkit.config.data import SourceConfig
from toolkit.data.sources.files import Kind, is_saved_data_set
from toolkit.data.sources.row_values import BadRow
from toolkit.errors import DataError, one_line
from toolkit.formats.synced_files import replace_on_exit
from toolkit.tables import size_text

T = TypeVar("T")
RowDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset
Reader: TypeAlias = partial[Iterator[pa.Table]]  # file[, bounds] -> rows, with a column `PLACE`
Bounds: TypeAlias = tuple[int, int]  # of a part of a file, in bytes or row groups
Cut: TypeAlias = Callable[[str, int], list[tuple[Bounds, int]]]
"""Splits a file into about so many parts. Returns the bounds and the length of each, in any unit;
empty if the file cannot be split."""

# Columns: the index of the file, and the place of the row in it, in words.
FILE, PLACE = "_file", "_place"

_VERSION = 3  # part of the cache key: raise it when the same files give other rows
_TABLE_ROWS, _TABLE_BYTES = 1000, 8 << 20
_FIRST_VALUES = 20  # first rows of the unread columns, to see their content
# Number of shards of a stream, and their minimum size. With many shards, a rank reads little that
# belongs to others.
_SHARDS, _SHARD_BYTES = 256, 1 << 20


class FileShard(NamedTuple):
    """A shard of a stream: a file, or a range of bytes or row groups of it."""

    file: str
    number: int
    """Number of the file, from 0."""
    size: int
    """Size of the shard in bytes."""
    bounds: Bounds | None = None
    """Part of the file; None: the complete file."""


def file_shards(files: Sequence[Path], cut: Cut | None) -> list[FileShard]:
    """Divide files into the shards of a stream, in order.

    A file of at least 2 MiB may be split, so that there are up to 256 shards of about equal size.
    They depend only on the names, sizes and structure of the files.

    Args:
        files: the files of a source.
        cut: splits a file into parts; None: each file is one shard.
    """
    sizes = [file.stat().st_size for file in files]
    shards: list[FileShard] = []
    for number, (file, size) in enumerate(zip(files, sizes, strict=True)):
        count = min(_SHARDS * size // max(1, sum(sizes)), size // _SHARD_BYTES)
        parts = cut(str(file), count) if cut and count > 1 else []
        # Lengths of parts of a compressed file do not add up to its size, so they are scaled.
        total = sum(part for _, part in parts)
        shards += [
            FileShard(str(file), number, part * size // total, bounds) for bounds, part in parts
        ] or [FileShard(str(file), number, size)]
    return shards


def cache_folder() -> Path:
    """Return the folder for cached rows and tokens, `toolkit` in the cache of `datasets`."""
    return Path(datasets.config.HF_DATASETS_CACHE).expanduser() / "toolkit"


def compute_digest(*parts: Any) -> str:
    """Compute a hexadecimal digest of values by their `repr`, the same in every process."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def load_or_build(
    name: str, parts: Iterable[pa.Table], schema: pa.Schema, title: str, total: int | None = None
) -> datasets.Dataset:
    """Load rows from their cache file, after writing the file if it does not exist.

    If caching is turned off in `datasets`, the file is always written again.

    Args:
        name: name of the cache file without its ending, which identifies the rows.
        parts: tables of the rows, which are iterated only to write the file.
        schema: schema of the tables.
        title: text of the progress bar.
        total: number of rows for the progress bar, if it is known.

    Returns:
        The rows, memory-mapped.
    """
    file = cache_folder() / f"{name}.arrow"
    if not (datasets.is_caching_enabled() and file.is_file()):
        with (
            replace_on_exit(file) as scratch,
            pa.ipc.new_stream(str(scratch), schema) as out,
            tqdm(desc=title, unit=" rows", total=total) as bar,
        ):
            for table in parts:
                out.write_table(table)
                bar.update(len(table))
    return datasets.Dataset(MemoryMappedTable.from_file(str(file)), fingerprint=name)


def group_by_size(
    items: Iterable[T], size: Callable[[T], int], most: int, count: int | None = None
) -> Iterator[list[T]]:
    """Yield groups of consecutive items whose sizes add up to at most `most`.

    An item that is larger than `most` is a group by itself.

    Args:
        items: any items.
        size: returns the size of an item.
        most: maximum total size of a group.
        count: maximum number of items of a group; None: no limit.
    """
    group: list[T] = []
    total = 0
    for item in items:
        length = size(item)
        if group and (total + length > most or len(group) == count):
            yield group
            group, total = [], 0
        group.append(item)
        total += length
    if group:
        yield group


def to_tables(rows: Iterable[tuple], schema: pa.Schema) -> Iterator[pa.Table]:
    """Convert row tuples to tables of at most 1000 rows and 8 MiB.

    Only the first column counts towards the 8 MiB. A larger row is a table by itself.
    """
    for group in group_by_size(rows, lambda row: len(row[0]), _TABLE_BYTES, _TABLE_ROWS):
        columns = zip(zip(*group, strict=True), schema, strict=True)
        yield pa.table([pa.array(values, f.type) for values, f in columns], schema=schema)


def read_files(
    reader: Reader,
    shards: list[FileShard],
    where: str,
    schema: pa.Schema | None,
    *,
    streaming: bool,
) -> RowDataset:
    """Open the rows of shards in order, as a stream or as a cached data set.

    Each row gets the columns `FILE` (number of its file) and `PLACE` (its position as text).

    Args:
        reader: yields the tables of a file.
        shards: shards of the source.
        where: the source, for messages.
        schema: schema of the tables; None: determine one that fits the first table of each file.
        streaming: return a stream, which reads files while it is iterated. Otherwise all rows are
            read once, and cached until the content of a file changes.

    Raises:
        DataError: a file cannot be read or does not fit the schema; the error names the row. A
            stream raises it while it is iterated.
    """
    if schema is None:
        schema = _common_schema(shards, reader)
        if schema is None:
            raise DataError(f"{where}: expected examples, found no row")
    else:
        schema = schema.append(pa.field(FILE, pa.int32()))
    if not streaming:
        files = digest_contents([Path(shard.file) for shard in shards], where)
        key = compute_digest(_VERSION, reader.func.__qualname__, files, reader.keywords)
        tables = (table for _, table in _iterate_tables(shards, reader, schema))
        return load_or_build(f"rows-{key}", tables, schema, f"Reading {where}")
    kwargs = {"shards": shards, "reader": reader, "schema": schema}
    return datasets.IterableDataset(
        ArrowExamplesIterable(_iterate_tables, kwargs),
        info=datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(schema)),
    )


def _common_schema(shards: list[FileShard], reader: Reader) -> pa.Schema | None:
    """Return a schema that fits the first table of every file; None if no file has a row.

    Raises:
        DataError: a column has incompatible types in two files.
    """
    schema: pa.Schema | None = None
    for shard in {shard.number: shard for shard in shards}.values():
        for _, table in itertools.islice(_iterate_tables([shard], reader, None), 1):
            # `_iterate_tables` refuses files with other columns when the rows are read.
            if schema is None or schema.names != table.schema.names:
                schema = schema or table.schema
                continue
            try:
                schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
            except pa.ArrowException as error:
                raise DataError(
                    f"{shard.file} has other types than the files before it: {one_line(error)}; "
                    "make it a separate source"
                ) from error
    return schema


def _iterate_tables(
    shards: list[FileShard], reader: Reader, schema: pa.Schema | None
) -> Iterator[tuple[str, pa.Table]]:
    """Yield (key, table) for each table of the shards, with the column `FILE`.

    The key is unique in the source; `datasets` requires one. If `schema` is not None, tables are
    cast to it. `shards` must be a list, because `datasets` divides lists among readers.

    Raises:
        DataError: a file cannot be read, or has other columns than the schema.
    """
    for file, at, _, bounds in shards:
        row = 0
        try:
            for table in reader(file, *([bounds] if bounds else [])):
                table = table.append_column(FILE, pa.array([at] * len(table), pa.int32()))
                if schema is not None:
                    if different := set(schema.names).symmetric_difference(table.column_names):
                        names = ", ".join(sorted(different))
                        raise DataError(
                            f"{file} has other columns than the first file: {names}; make it a "
                            "separate source"
                        )
                    table = table_cast(table.select(schema.names), schema)
                yield f"{at}_{bounds}_{row}", table
                row += len(table)
        except DataError:
            raise
        except Exception as error:
            # The file comes from outside and may contain anything.
            part = f" of part {bounds}" if bounds else ""
            raise DataError(
                f"{file} cannot be read from row {row}{part} on: {one_line(error)}"
            ) from error


def arrow_tables(
    file: str, bounds: Bounds | None = None, *, kind: Kind, columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Read a Parquet or Arrow file as tables, with texts as bytes and a column `PLACE`.

    `PLACE` has the position of each row as text.

    Args:
        file: its path.
        bounds: row groups [begin, end) of a Parquet file; None: the complete file.
        kind: `parquet` or `arrow`.
        columns: columns to read; columns that the file lacks are ignored. If it has none of them,
            all of its columns are read.
    """
    for row, batch in _iterate_batches(file, bounds, kind, columns):
        table = pa.Table.from_batches([batch])
        binary = datasets.Features.from_arrow_schema(table.schema)
        table = table_cast(table, datasets.Features(_text_as_binary(binary)).arrow_schema)
        places = [f"row {n} (counted from 0)" for n in range(row, row + len(table))]
        yield table.append_column(PLACE, pa.array(places, pa.string()))


def _iterate_batches(
    file: str,
    bounds: Bounds | None,
    kind: Kind,
    columns: Sequence[str],
    size: int = _TABLE_ROWS,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (number of the first row, record batch) of a Parquet or Arrow file.

    For the arguments see `arrow_tables`; `size` is the number of rows per batch of Parquet.
    """
    if kind == "parquet":
        with pq.ParquetFile(file) as opened:
            names = _select_existing(opened.schema_arrow.names, columns)
            first, end = bounds or (0, opened.num_row_groups)
            row = sum(opened.metadata.row_group(i).num_rows for i in range(first))
            for batch in opened.iter_batches(size, range(first, end), names):
                yield row, batch
                row += len(batch)
        return
    row = 0
    with pa.memory_map(file) as stream:
        try:
            batches = iter(pa.ipc.open_stream(stream))
        except pa.ArrowInvalid:  # the other of Arrow's two file formats
            table = pa.ipc.open_file(stream)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        for batch in batches:
            batch.validate(full=True)  # an offset beyond the buffers would crash this process
            yield row, batch.select(_select_existing(batch.schema.names, columns))
            row += len(batch)


def read_first_values(file: str, kind: Kind, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Read up to 20 first rows of a Parquet or Arrow file, only with columns not in `columns`.

    Columns without text, or with bytes (such as images), are not read; their values are None. The
    list is empty if `arrow_tables` reads all columns anyway. It is also empty if the file cannot be
    read, because `arrow_tables` reports that error.
    """
    try:
        schema = _read_schema(file, kind)
        if not any(name in columns for name in schema.names):  # all columns are read
            return []
        unread = [name for name in schema.names if name not in columns]
        texts = [name for name in unread if _holds_text(schema.field(name).type)]
        first = (
            next(_iterate_batches(file, None, kind, texts, _FIRST_VALUES), None) if texts else None
        )
        rows = [] if first is None else first[1].slice(0, _FIRST_VALUES).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return []
    empty = dict.fromkeys(unread)
    return [empty | row for row in rows] or ([empty] if unread else [])


def _read_schema(file: str, kind: Kind) -> pa.Schema:
    """Read the schema of a Parquet or Arrow file."""
    if kind == "parquet":
        return pq.read_schema(file)
    with pa.memory_map(file) as stream:
        try:
            return pa.ipc.open_stream(stream).schema
        except pa.ArrowInvalid:
            return pa.ipc.open_file(stream).schema


def _holds_text(kind: pa.DataType) -> bool:
    """Return True if a type is or contains text, and contains no bytes (such as an image)."""
    types = [*_list_plain_types(kind)]
    has_bytes = any(pa.types.is_binary(t) or pa.types.is_large_binary(t) for t in types)
    return not has_bytes and any(
        pa.types.is_string(t) or pa.types.is_large_string(t) for t in types
    )


def _list_plain_types(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield the types of the innermost values in nested structs and lists.

    Any other type is yielded itself. That includes maps and fixed-size lists.
    """
    if pa.types.is_struct(kind):
        for i in range(kind.num_fields):
            yield from _list_plain_types(kind.field(i).type)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from _list_plain_types(kind.value_type)
    else:
        yield kind


def cut_parquet(file: str, count: int) -> list[tuple[Bounds, int]]:
    """Split a Parquet file into about `count` ranges of row groups.

    Returns:
        ((first, end), bytes) of each range [first, end); empty if the file cannot be read.
    """
    try:
        with pq.ParquetFile(file) as opened:
            meta = opened.metadata
            sizes = [meta.row_group(i).total_byte_size for i in range(meta.num_row_groups)]
    except (pa.ArrowException, OSError):
        # The reader of the rows reports the error.
        return []
    parts = group_by_size(range(len(sizes)), sizes.__getitem__, max(1, sum(sizes) // count))
    return [((p[0], p[-1] + 1), sum(sizes[p[0] : p[-1] + 1])) for p in parts]


def _select_existing(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the names that are in `columns`; all names if none is."""
    return [name for name in names if name in columns] or list(names)


def load_named_data_set(
    source: SourceConfig, where: str, columns: Sequence[str], *, streaming: bool
) -> tuple[RowDataset, list[dict[str, Any]]]:
    """Load a data set by its name: a folder of `save_to_disk`, or an id on the Hub.

    Args:
        source: names the data set and its split.
        where: the source, for messages.
        columns: columns to read; all if the data set has none of them.
        streaming: load a stream.

    Returns:
        (rows, first values). `rows` has texts as bytes. The second element has the columns that are
        not read, for up to 20 rows.

    Raises:
        DataError: the data set cannot be loaded, is a file, or lacks the split.
    """
    name, split = str(source.dataset_name), source.dataset_split
    folder = Path(name).expanduser()
    if folder.is_file():
        raise DataError(f"{where} is a file, expected a data set; set it as files")
    try:
        if is_saved_data_set(folder):
            rows = datasets.load_from_disk(str(folder))
        else:
            name = str(folder) if folder.is_dir() else name
            config = source.dataset_config_name
            rows = datasets.load_dataset(name, config, split=split, streaming=streaming)
            if rows.features is None:  # of a stream, where the first rows tell
                rows = rows._resolve_features()
    except Exception as error:
        raise to_data_error(error, where) from error
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise DataError(
                f"{where} has no split {split!r}, only {', '.join(rows)}; set its dataset_split"
            )
        rows = rows[split]
    if streaming and isinstance(rows, datasets.Dataset):
        rows = rows.to_iterable_dataset()
    rows = rows.with_format(None)
    names = list(rows.column_names)
    unread = _read_first_unread_values(
        rows, [name for name in names if name not in _select_existing(names, columns)]
    )
    rows = rows.select_columns(_select_existing(names, columns))
    binary = datasets.Features(_text_as_binary(rows.features))
    if isinstance(rows, datasets.IterableDataset):
        return rows.cast(binary), unread
    dataset = datasets.Dataset(
        rows.data.cast(binary.arrow_schema),
        info=datasets.DatasetInfo(features=binary),
        split=rows.split,
        fingerprint=f"{rows._fingerprint}-bytes",
    )
    return dataset, unread


def _read_first_unread_values(rows: RowDataset, names: list[str]) -> list[dict[str, Any]]:
    """Read up to 20 first rows of a data set, only with the columns `names`.

    Columns without text, or with bytes (such as images), are not read; their values are None.
    """
    schema = datasets.Features(rows.features or {}).arrow_schema
    texts = [name for name in names if name in schema.names]
    texts = [name for name in texts if _holds_text(schema.field(name).type)]
    first: list[dict[str, Any]] = []
    if texts:
        try:
            first = list(itertools.islice(iter(rows.select_columns(texts)), _FIRST_VALUES))
        except (pa.ArrowException, UnicodeDecodeError):  # the reader of the rows reports it
            first = []
    empty = dict.fromkeys(names)
    return [empty | row for row in first] or ([empty] if names else [])


def to_data_error(error: BaseException, where: str) -> DataError:
    """Return the DataError among the causes of `error`; if there is none, create one.

    The new error has the messages of `error` and of its deepest cause. This is needed because
    `datasets` wraps exceptions in others.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, DataError):
        last, cause = cause, cause.__cause__ or cause.__context__
    if cause is not None:
        return cause
    reasons = "; ".join(dict.fromkeys(map(one_line, (error, last))))
    return DataError(f"{where} cannot be read: {reasons}")


def _text_as_binary(feature: Any) -> Any:
    """Return a column's type with every text type in it, at any depth, replaced by binary."""
    if isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string"):
        return datasets.Value(feature.dtype.replace("string", "binary"))
    if isinstance(feature, dict):
        return {name: _text_as_binary(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_text_as_binary(feature.feature))
    return feature


def decode_and_drop_nulls(value: Any, where: str, feature: Any = None) -> Any:
    """Decode the bytes in a value to text, and drop null values of mappings, at any depth.

    Arrow adds null keys to give all mappings the same keys. The `content` of a turn with a `role`
    is kept, because it may be null next to tool calls.

    Args:
        value: a value of a row.
        where: column, for the message.
        feature: type of the column. Values of type JSON are returned unchanged.

    Raises:
        BadRow: bytes are not UTF-8.
    """
    if isinstance(feature, datasets.Json):
        return value
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
        of_each = getattr(feature, "feature", None)
        return [
            decode_and_drop_nulls(inner, f"{where}[{i}]", of_each) for i, inner in enumerate(value)
        ]
    if isinstance(value, dict):
        of = feature if isinstance(feature, dict) else {}
        return {
            key: decode_and_drop_nulls(inner, f"{where}.{key}", of.get(key))
            for key, inner in value.items()
            if inner is not None or (key == "content" and "role" in value)
        }
    return value


WHOLE_BYTES = 4 << 30
"""Files of a source that are together at most so large are read in full: a second for each GB."""
_BLOCK = 1 << 20
_SAMPLES = 64  # blocks of each file of a larger source, its first and last among them


def digest_contents(files: Sequence[Path], where: str) -> list[tuple[str | int, ...]]:
    """Return (name, size in bytes, content digest) of each file, as a cache key.

    If the files have at most `WHOLE_BYTES` together, the digest covers every byte. Otherwise it
    covers 64 blocks of 1 MiB per file. Each tuple then also has the times of modification and
    change in ns, and a note is logged.
    """
    stats = [os.stat(file) for file in files]
    total = sum(stat.st_size for stat in stats)
    whole = total <= WHOLE_BYTES
    if not whole:
        ranks.log_once(
            f"cache      {where}: {size_text(total)} are too much to read at each start. Encoded "
            f"rows are found again by size, times and {_SAMPLES} MiB of each file; after a change "
            "of a few bytes elsewhere that keeps the times of a file, delete the cache"
        )
    digests = list[tuple[str | int, ...]]()
    for file, stat in zip(files, stats, strict=True):
        times = stat.st_mtime_ns, stat.st_ctime_ns
        digest = _digest_file(str(file), stat.st_size, times, stat.st_ino, whole)
        digests.append((file.name, stat.st_size, digest, *(() if whole else times)))
    return digests


# A start asks several times. What a process has read does not change under another time or inode.
@lru_cache(maxsize=10_000)
def _digest_file(file: str, size: int, times: tuple[int, int], inode: int, whole: bool) -> str:
    """Return a digest of a file: of every byte if `whole`, else of 64 blocks of 1 MiB.

    `times` and `inode` serve only as keys of the cache in memory.
    """
    digest = xxhash.xxh3_128()
    with open(file, "rb") as stream:
        if whole or size <= _SAMPLES * _BLOCK:
            while block := stream.read(_BLOCK):
                digest.update(block)
        else:
            for number in range(_SAMPLES):
                stream.seek((size - _BLOCK) * number // (_SAMPLES - 1))
                digest.update(stream.read(_BLOCK))
    return digest.hexdigest()
