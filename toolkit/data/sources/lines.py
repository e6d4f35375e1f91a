"""Rows of JSON lines, JSON lists and CSV files as bytes, each with its file and place.

[Note: raw rows]
Arrow has one type for a column, and the JSON readers on top of it guess one: text that looks like a
date becomes a date, and rows that differ get each other's keys. So rows of these files are kept as
they stand in the file, one binary each, and parsed when they are used. It also leaves it to each
row whether it is broken: a line that is not UTF-8 or longer than `ROW_BYTES` is one bad row with a
place, not a broken file.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

import datasets
import pyarrow as pa

from toolkit.data.sources.columns import RowDataset, as_data_error
from toolkit.data.sources.row_values import BadRow, named, shown
from toolkit.errors import DataError

LineKind = Literal["json", "csv"]

ROW_BYTES = 64 << 20
"""A longer row is bad: no sample is made of it, and reading it may take all memory."""
LIST_BYTES, LIST_VALUES = 512 << 20, 20_000_000
"""Bounds of a file with one JSON list, which is parsed as a whole."""

RAW = datasets.Features(
    raw=datasets.Value("large_binary"),
    file=datasets.Value("int32"),
    place=datasets.Value("string"),
    fault=datasets.Value("string"),
)
"""Columns of raw rows: the bytes (JSON), the index of the file, the place in it (`line 7`, or in a
JSON list `row 6 (counted from 0)`), and what is wrong with a row that was not even read."""

_VERSION = 1
"""Part of the cache key: raise it when the same file gives other rows."""
_BLOCK = 1 << 20

_Row = tuple[bytes, int, str | None]
"""Bytes of a row, its number, and what is wrong with it."""


def stamped(files: list[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return (path, bytes, time) of each file: what a cached result of reading them depends on."""
    return tuple((str(f), s.st_size, s.st_mtime_ns) for f in files for s in [f.stat()])


def read_lines(
    files: list[Path], kind: LineKind, where: str, *, streaming: bool = False
) -> RowDataset:
    """Return the rows of `files`, in order, with the columns `RAW`. Blank lines are no rows.

    A `Dataset` is read once and cached until a file changes; a stream reads while it is iterated,
    and skips without parsing. Memory: one row; of a JSON list the whole file.

    Raises:
        DataError: a file cannot be read, is a broken JSON list, or a CSV header names no or equal
            columns. (While iterating, where it is streamed.)
    """
    options = {"kind": kind, "limit": ROW_BYTES}
    if streaming:
        shards = {"files": [str(f) for f in files], "indices": list(range(len(files)))}
        return datasets.IterableDataset.from_generator(
            cut_rows, features=RAW, gen_kwargs=shards | options
        )
    key = {"files": stamped(files), "indices": None, "version": _VERSION}
    try:
        return datasets.Dataset.from_generator(cut_rows, features=RAW, gen_kwargs=key | options)
    except Exception as error:
        raise as_data_error(error, where) from error


def cut_rows(
    files: Sequence[str | tuple[str, int, int]],
    indices: list[int] | None,
    kind: LineKind,
    limit: int = ROW_BYTES,
    version: int = _VERSION,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `files` as they are stored; see `read_lines`."""
    for at, file in zip(indices or range(len(files)), files, strict=True):
        yield from _cut_file(file if isinstance(file, str) else file[0], at, kind, limit)


def decoded(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping that a raw row stands for.

    Raises:
        BadRow: it is not UTF-8, not JSON, no mapping, too long or too deep.
    """
    if raw["fault"] is not None:
        reason, _, said = raw["fault"].partition("\n")
        raise BadRow(said, reason)
    try:
        row = json.loads(raw["raw"].decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _not_utf8(error.object[error.start], error.start) from error
    except RecursionError as error:
        raise BadRow("expected a JSON mapping, got one nested too deep", "nesting") from error
    except ValueError as error:
        raise BadRow(f"expected JSON, got {shown(raw['raw'])} ({error})", "not JSON") from error
    if not isinstance(row, dict):
        raise BadRow(f"expected a JSON mapping, got {shown(row)}", "no mapping")
    return row


def _cut_file(file: str, at: int, kind: LineKind, limit: int) -> Iterator[dict[str, Any]]:
    if os.path.getsize(file) == 0:
        return
    try:
        cut = _csv if kind == "csv" else _lines
        if kind == "json" and ".jsonl" not in Path(file).suffixes:
            with _open(file) as stream:
                cut = _list if _is_list(stream) else _lines
        with _open(file) as stream:
            for raw, number, fault in cut(stream, file, limit):
                spot = f"row {number} (counted from 0)" if cut is _list else f"line {number}"
                yield {"raw": raw, "file": at, "place": spot, "fault": fault}
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        said = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {file}: {said}") from error


def _open(file: str) -> IO[bytes]:
    """Open a file behind its compression."""
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    ending = Path(file).suffix.lower()
    if ending == ".zst":
        return io.BufferedReader(pa.input_stream(file, compression="zstd"), _BLOCK)
    return openers.get(ending, open)(file, "rb")


def _lines(stream: IO[bytes], file: str, limit: int) -> Iterator[_Row]:
    for number, line in _bounded_lines(stream, limit):
        if line is None:
            yield b"", number, _too_long(limit)
        elif line := line.strip():
            yield line, number, None


def _bounded_lines(stream: IO[bytes], limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number, line); None for a line beyond `limit`, whose rest is read and forgotten."""
    number = 0
    while line := stream.readline(limit + 2):
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        part = line
        while part and not part.endswith(b"\n"):
            part = stream.readline(_BLOCK)
        yield number, line if len(line.rstrip(b"\r\n")) <= limit else None


def _is_list(stream: IO[bytes]) -> bool:
    block = stream.read(_BLOCK).removeprefix(codecs.BOM_UTF8)
    while block and not block.strip():
        block = stream.read(_BLOCK)
    return block.lstrip()[:1] == b"["


def _list(stream: IO[bytes], file: str, limit: int) -> Iterator[_Row]:
    content = stream.read(LIST_BYTES + 1)
    if len(content) > LIST_BYTES or sum(map(content.count, b",[{")) > LIST_VALUES:
        raise DataError(
            f"{file}: expected a JSON list of at most {LIST_BYTES:,} bytes and {LIST_VALUES:,} "
            "values, got more; write JSON lines, which are read one by one"
        )
    try:
        rows = json.loads(content.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: expected a JSON list of mappings, got a broken one ({error}); repair the "
            "file, or write JSON lines, of which broken ones can be left out"
        ) from error
    for index, row in enumerate(rows):
        raw = json.dumps(row).encode()
        yield (raw, index, None) if len(raw) <= limit else (b"", index, _too_long(limit))


def _csv(stream: IO[bytes], file: str, limit: int) -> Iterator[_Row]:
    """Read a header and rows after RFC 4180, all values text; a row becomes a JSON mapping."""
    last, cut = 0, set()

    def lines() -> Iterator[str]:
        nonlocal last
        for number, line in _bounded_lines(stream, limit):
            last = number
            if line is None:
                cut.add(number)
            yield "\n" if line is None else line.decode("utf-8", "surrogateescape")

    csv.field_size_limit(max(csv.field_size_limit(), limit))
    reader = csv.reader(lines(), strict=True)
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{file}: expected a CSV header, got one that breaks ({error})") from error
    text = "".join(header)
    broken = text.encode("utf-8", "replace") != text.encode("utf-8", "surrogateescape")
    if not header or len(set(header)) < len(header) or not all(header) or broken:
        raise DataError(
            f"{file}: expected a CSV header of different names in UTF-8 in its first line, got "
            f"{named(header)}"
        )
    while True:
        first = last + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            yield b"", first, f"not CSV\nexpected a CSV row, got one that breaks ({error})"
            continue
        if fields is None:
            return
        if cut.intersection(range(first, last + 1)) or sum(map(len, fields)) > limit:
            yield b"", first, _too_long(limit)
        elif len(fields) == len(header):
            yield _as_json(dict(zip(header, fields, strict=True)), first)
        elif fields:
            said = f"expected {len(header)} fields ({named(header)}), got {len(fields)}"
            yield b"", first, f"wrong number of fields\n{said}"


def _as_json(row: dict[str, str], number: int) -> _Row:
    try:
        return json.dumps(row, ensure_ascii=False).encode("utf-8"), number, None
    except UnicodeEncodeError as error:
        bad = _not_utf8(ord(error.object[error.start]) - 0xDC00, None)
        return b"", number, f"{bad.reason}\n{bad.said}"


def _too_long(limit: int) -> str:
    return f"too long\nexpected a row of at most {limit:,} bytes, got a longer one"


def _not_utf8(byte: int, offset: int | None) -> BadRow:
    where = "" if offset is None else f" at offset {offset} of the row"
    return BadRow(f"expected UTF-8, got byte 0x{byte:02x}{where}", "not UTF-8")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
