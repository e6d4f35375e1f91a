"""Rows as Arrow tables: of files, cached or streamed, and of data sets by name.

[Note: text as bytes]
Parquet and Arrow do not check that text is UTF-8, and reading one row that is not fails for its
whole batch. So columns of text are viewed as binary (the same bytes; nothing is copied), and each
row is decoded by itself.
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
from toolkit.formats.synced_files import replacing
from toolkit.tables import size_text

T = TypeVar("T")
RowDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset
Reader: TypeAlias = partial[Iterator[pa.Table]]  # file[, bounds] -> rows, with a column `PLACE`
Bounds: TypeAlias = tuple[int, int]  # of a part of a file, in bytes or row groups
Cut: TypeAlias = Callable[[str, int], list[tuple[Bounds, int]]]
"""A file and a number of parts -> bounds and lengths (compared with each other alone) of about so
many; none where it stays whole."""

FILE, PLACE = "_file", "_place"  # columns: the index of the file, where in it a row stands in words

_VERSION = 3  # part of the cache key: raise it when the same files give other rows
_TABLE_ROWS, _TABLE_BYTES = 1000, 8 << 20
_FIRST_VALUES = 20  # rows of columns that are not read, to see what they hold
# Shards of a stream, so that a rank reads little but its own: so many in all, of at least so much.
_SHARDS, _SHARD_BYTES = 256, 1 << 20


class FileShard(NamedTuple):
    """What a shard of a stream has of a file."""

    file: str
    number: int  # of the file, from 0
    size: int  # bytes
    bounds: Bounds | None = None  # None: all of it


def file_shards(files: Sequence[Path], cut: Cut | None) -> list[FileShard]:
    """Return the shards of a stream of `files`, in order: each a file, large ones in parts where
    there is a `cut`. What they are depends on names and sizes of the files alone.
    """
    sizes, found = [f.stat().st_size for f in files], list[FileShard]()
    for number, (file, size) in enumerate(zip(files, sizes, strict=True)):
        count = min(_SHARDS * size // max(1, sum(sizes)), size // _SHARD_BYTES)
        parts = cut(str(file), count) if cut and count > 1 else []
        total = sum(part for _, part in parts)  # which is not the file's size where it is packed
        found += [
            FileShard(str(file), number, part * size // total, bounds) for bounds, part in parts
        ] or [FileShard(str(file), number, size)]
    return found


def cache_folder() -> Path:
    """Return the folder of what was read and tokenised, beneath the cache of `datasets`."""
    return Path(datasets.config.HF_DATASETS_CACHE).expanduser() / "toolkit"


def compute_digest(*parts: Any) -> str:
    """Return a name for plain values, the same in every process."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def load_or_build(
    name: str, parts: Iterable[pa.Table], schema: pa.Schema, title: str, total: int | None = None
) -> datasets.Dataset:
    """Return the rows of `parts`, memory-mapped, as an earlier start wrote them under `name`, or
    written now with a progress bar of that `title`, up to `total` rows where that is known.
    """
    file = cache_folder() / f"{name}.arrow"
    if not (datasets.is_caching_enabled() and file.is_file()):
        with (
            replacing(file) as scratch,
            pa.ipc.new_stream(str(scratch), schema) as out,
            tqdm(desc=title, unit=" rows", total=total) as bar,
        ):
            for table in parts:
                out.write_table(table)
                bar.update(len(table))
    return datasets.Dataset(MemoryMappedTable.from_file(str(file)), fingerprint=name)


def groups(
    items: Iterable[T], size: Callable[[T], int], most: int, count: int | None = None
) -> Iterator[list[T]]:
    """Yield items in groups of at most `count`, whose sizes come to `most`, or of one item."""
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
    """Yield rows as tables of some megabytes, by the length of their first values."""
    for group in groups(rows, lambda row: len(row[0]), _TABLE_BYTES, _TABLE_ROWS):
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
    """Return the rows of `shards`, in order, with `FILE` and `PLACE`.

    A `Dataset` is read once, and cached until the content of a file changes. A stream reads while
    it is iterated; skipping reads tables without making rows of them. A `schema` of None is one
    that holds the first table of each file: where a file has null, or fewer keys, others may have
    more. A file that cannot be read or does not fit the schema is a DataError that names the row;
    of a stream while it is iterated.
    """
    if schema is None:
        schema = _common(shards, reader)
        if schema is None:
            raise DataError(f"{where}: expected examples, found no row")
    else:
        schema = schema.append(pa.field(FILE, pa.int32()))
    if not streaming:
        files = digest_contents([Path(shard.file) for shard in shards], where)
        key = compute_digest(_VERSION, reader.func.__qualname__, files, reader.keywords)
        tables = (table for _, table in _tables(shards, reader, schema))
        return load_or_build(f"rows-{key}", tables, schema, f"Reading {where}")
    kwargs = {"shards": shards, "reader": reader, "schema": schema}
    return datasets.IterableDataset(
        ArrowExamplesIterable(_tables, kwargs),
        info=datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(schema)),
    )


def _common(shards: list[FileShard], reader: Reader) -> pa.Schema | None:
    """Return a schema of all files; None where none has a row."""
    found: pa.Schema | None = None
    for shard in {shard.number: shard for shard in shards}.values():
        for _, table in itertools.islice(_tables([shard], reader, None), 1):
            if found is None or found.names != table.schema.names:  # which `_tables` refuses
                found = found or table.schema
                continue
            try:
                found = pa.unify_schemas([found, table.schema], promote_options="permissive")
            except pa.ArrowException as error:
                raise DataError(
                    f"{shard.file} has other types than the files before it: {one_line(error)}; "
                    "give it as a source of its own"
                ) from error
    return found


def _tables(
    shards: list[FileShard], reader: Reader, schema: pa.Schema | None
) -> Iterator[tuple[str, pa.Table]]:
    """Yield (key, table); a list is what `datasets` takes for shards."""
    for file, at, _, bounds in shards:
        row = 0
        try:
            for table in reader(file, *([bounds] if bounds else [])):
                table = table.append_column(FILE, pa.array([at] * len(table), pa.int32()))
                if schema is not None:
                    if unlike := set(schema.names).symmetric_difference(table.column_names):
                        names = ", ".join(sorted(unlike))
                        raise DataError(
                            f"{file} has other columns than the first file: {names}; give it as a "
                            "source of its own"
                        )
                    table = table_cast(table.select(schema.names), schema)
                yield f"{at}_{bounds}_{row}", table
                row += len(table)
        except DataError:
            raise
        except Exception as error:  # the file comes from outside: it may hold anything
            of_part = f" of part {bounds}" if bounds else ""
            raise DataError(
                f"{file} cannot be read from row {row}{of_part} on: {one_line(error)}"
            ) from error


def arrow_tables(
    file: str, bounds: Bounds | None = None, *, kind: Kind, columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield those of `columns` that a Parquet or Arrow file has, or all if none; text as bytes.
    `bounds`: row groups of Parquet.
    """
    for row, batch in _batches(file, bounds, kind, columns):
        table = pa.Table.from_batches([batch])
        binary = datasets.Features.from_arrow_schema(table.schema)
        table = table_cast(table, datasets.Features(_binary(binary)).arrow_schema)
        places = [f"row {n} (counted from 0)" for n in range(row, row + len(table))]
        yield table.append_column(PLACE, pa.array(places, pa.string()))


def _batches(
    file: str,
    bounds: Bounds | None,
    kind: Kind,
    columns: Sequence[str],
    size: int = _TABLE_ROWS,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (the number of its first row in the file, batch)."""
    if kind == "parquet":
        with pq.ParquetFile(file) as opened:
            kept = _kept(opened.schema_arrow.names, columns)
            first, end = bounds or (0, opened.num_row_groups)
            row = sum(opened.metadata.row_group(i).num_rows for i in range(first))
            for batch in opened.iter_batches(size, range(first, end), kept):
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
            batch.validate(full=True)  # a place beyond the buffers would end this process
            yield row, batch.select(_kept(batch.schema.names, columns))
            row += len(batch)


def read_first_values(file: str, kind: Kind, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the first rows of the columns of a Parquet or Arrow file that are not among `columns`.

    Only texts and lists of them are read; None stands for other values. A file that cannot be read
    has no such columns: the reader of its rows reports the reason.
    """
    try:
        schema = _schema(file, kind)
        if not any(name in columns for name in schema.names):  # all columns are read
            return []
        unread = [name for name in schema.names if name not in columns]
        texts = [name for name in unread if _holds_text(schema.field(name).type)]
        first = next(_batches(file, None, kind, texts, _FIRST_VALUES), None) if texts else None
        rows = [] if first is None else first[1].slice(0, _FIRST_VALUES).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return []
    empty = dict.fromkeys(unread)
    return [empty | row for row in rows] or ([empty] if unread else [])


def _schema(file: str, kind: Kind) -> pa.Schema:
    if kind == "parquet":
        return pq.read_schema(file)
    with pa.memory_map(file) as stream:
        try:
            return pa.ipc.open_stream(stream).schema
        except pa.ArrowInvalid:
            return pa.ipc.open_file(stream).schema


def _holds_text(kind: pa.DataType) -> bool:
    """Whether a type is text, or made of text alone."""
    if pa.types.is_struct(kind):
        return all(_holds_text(kind.field(i).type) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def cut_parquet(file: str, count: int) -> list[tuple[Bounds, int]]:
    """Return row groups in about `count` parts; see `Cut`."""
    try:
        with pq.ParquetFile(file) as opened:
            meta = opened.metadata
            sizes = [meta.row_group(i).total_byte_size for i in range(meta.num_row_groups)]
    except (pa.ArrowException, OSError):  # its reader names what is wrong
        return []
    parts = groups(range(len(sizes)), sizes.__getitem__, max(1, sum(sizes) // count))
    return [((p[0], p[-1] + 1), sum(sizes[p[0] : p[-1] + 1])) for p in parts]


def _kept(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    return [name for name in names if name in columns] or list(names)


def read_named(
    source: SourceConfig, where: str, columns: Sequence[str], *, streaming: bool
) -> tuple[RowDataset, list[dict[str, Any]]]:
    """Return those of `columns` that a data set has, or all if none, text as bytes; and the first
    rows of its other columns.
    """
    name, split = str(source.dataset_name), source.dataset_split
    folder = Path(name).expanduser()
    if folder.is_file():
        raise DataError(f"{where} is a file, expected a data set; give it as files")
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
    unread = _unread_values(rows, [name for name in names if name not in _kept(names, columns)])
    rows = rows.select_columns(_kept(names, columns))
    binary = datasets.Features(_binary(rows.features))
    if isinstance(rows, datasets.IterableDataset):
        return rows.cast(binary), unread
    made = datasets.Dataset(
        rows.data.cast(binary.arrow_schema),
        info=datasets.DatasetInfo(features=binary),
        split=rows.split,
        fingerprint=f"{rows._fingerprint}-bytes",
    )
    return made, unread


def _unread_values(rows: RowDataset, names: list[str]) -> list[dict[str, Any]]:
    """Return the first values of columns of a data set, as `first_values` does of a file."""
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
    """Return the DataError within `error`, or a new one with the cause that `datasets` hid."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, DataError):
        last, cause = cause, cause.__cause__ or cause.__context__
    if cause is not None:
        return cause
    said = "; ".join(dict.fromkeys(map(one_line, (error, last))))
    return DataError(f"{where} cannot be read: {said}")


def _binary(feature: Any) -> Any:
    if isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string"):
        return datasets.Value(feature.dtype.replace("string", "binary"))
    if isinstance(feature, dict):
        return {name: _binary(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_binary(feature.feature))
    return feature


def decode_and_drop_nulls(value: Any, where: str, feature: Any = None) -> Any:
    """Return the value of a column with bytes as text, without the keys that Arrow filled with null
    to give all mappings the same: all but a turn's `content`, which is null beside tool calls, and
    those of a `feature` that keeps JSON as it is.
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
    """Return for each file its name, size and a digest of its content.

    Up to `WHOLE_BYTES` the digest covers every byte, and depends on nothing else: a file that is
    copied or touched has the same one, and one that changed has another, even if size and time of
    change are the same. Of larger sources it covers the first and the last megabyte and others in
    between, and the times of the file, which a log line says.
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
        digest = _digest(str(file), stat.st_size, times, stat.st_ino, whole)
        digests.append((file.name, stat.st_size, digest, *(() if whole else times)))
    return digests


# A start asks several times. What a process has read does not change under another time or inode.
@lru_cache(maxsize=10_000)
def _digest(file: str, size: int, times: tuple[int, int], inode: int, whole: bool) -> str:
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
