"""Rows of JSON lines, JSON and CSV files as their raw bytes, with file and number.

Owns the cut of a file into rows, and a row's way from bytes to a mapping. Refuses to know what the
columns mean.

[Note: raw rows]
Arrow has one type for a column. Made of rows that differ, it joins their keys and fills in nulls:
each tool call gets the arguments of all others, and a chat template prints them. So rows of these
files are kept as they stand in the file, one binary each, and parsed when they are used. That also
leaves it to each row whether it is broken: a line that is not UTF-8 is one bad row, not a broken
file, and a line beyond `ROW_BYTES` is one too, without ever being in memory as a whole.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

import datasets
import pyarrow as pa

from toolkit.data.sources.columnar import as_data_error
from toolkit.data.sources.row_values import BadRow, named, shown
from toolkit.errors import DataError

RawKind = Literal["json", "csv"]

ROW_BYTES = 64 << 20
"""A row longer than this is bad: no sample is made of it, and reading it may take all memory."""

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
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_IN_ROW = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+", re.DOTALL)
_IN_LIST = re.compile(rb'(?:[^"\[\]{},]++|' + _STRING + rb")*+", re.DOTALL)

_Row = tuple[bytes, int, str | None]
"""Bytes of a row, its number, and what is wrong with it."""


def stamped(files: list[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return (path, bytes, time) of each file: what a cached result of reading them depends on."""
    return tuple((str(f), s.st_size, s.st_mtime_ns) for f in files for s in [f.stat()])


def read_raw(
    files: list[Path],
    kind: RawKind,
    where: str,
    *,
    streaming: bool = False,
    limit: int | None = None,
) -> datasets.Dataset | datasets.IterableDataset:
    """Return the rows of `files` as raw rows, in order; see `RAW` and [Note: raw rows].

    A `Dataset` is read once and cached until a file changes (path, size, time); streaming reads
    while it is iterated, and skips by cutting rows without parsing them. Blank lines are no rows.
    Memory: one row, at most `limit` bytes.

    Raises:
        DataError: a file cannot be read, holds a JSON list that breaks off, or a CSV header that
            names no or equal columns. (While iterating, where it is streamed.)
    """
    limit = ROW_BYTES if limit is None else limit
    if streaming:
        shards = {"files": [str(f) for f in files], "indices": list(range(len(files)))}
        return datasets.IterableDataset.from_generator(
            _streamed, features=RAW, gen_kwargs={**shards, "kind": kind, "limit": limit}
        )
    key = {"files": stamped(files), "kind": kind, "limit": limit, "version": _VERSION}
    try:
        return datasets.Dataset.from_generator(_cached, features=RAW, gen_kwargs=key)
    except Exception as error:
        raise as_data_error(error, where) from error


def decoded(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping that a raw row stands for.

    Raises:
        BadRow: it is not UTF-8, not JSON, no mapping, too long or too deep.
    """
    if raw["fault"] is not None:
        reason, _, said = raw["fault"].partition("\n")
        raise BadRow(said, reason)
    try:
        row = json.loads(raw["raw"].decode("utf-8"), parse_constant=_refused)
    except UnicodeDecodeError as error:
        raise _not_utf8(error.object[error.start], error.start) from error
    except RecursionError as error:
        raise BadRow("expected a JSON mapping, got one that is nested too deep", "nesting") from (
            error
        )
    except ValueError as error:
        raise BadRow(f"expected JSON, got {shown(raw['raw'])} ({error})", "not JSON") from error
    if not isinstance(row, dict):
        raise BadRow(f"expected a JSON mapping, got {shown(row)}", "no mapping")
    return row


def place(raw: dict[str, Any], files: Sequence[str]) -> str:
    """Return where a raw row stands: `data/a.jsonl line 7`."""
    return f"{files[raw['file']]} {raw['place']}"


def cut_rows(
    files: Sequence[str], kind: RawKind, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the raw rows of `files`, in order; what `read_raw` keeps.

    Raises:
        DataError: see `read_raw`.
    """
    limit = ROW_BYTES if limit is None else limit
    for at, file in enumerate(files):
        yield from _cut_file(file, at, kind, limit)


def _cached(
    files: tuple[tuple[str, int, int], ...], kind: RawKind, limit: int, version: int
) -> Iterator[dict[str, Any]]:
    yield from cut_rows([file for file, _, _ in files], kind, limit)


def _streamed(
    files: list[str], indices: list[int], kind: RawKind, limit: int
) -> Iterator[dict[str, Any]]:
    for file, at in zip(files, indices, strict=True):
        yield from _cut_file(file, at, kind, limit)


def _cut_file(file: str, at: int, kind: RawKind, limit: int) -> Iterator[dict[str, Any]]:
    if os.path.getsize(file) == 0:
        return
    try:
        if kind == "csv":
            cut = _csv
        elif ".jsonl" in Path(file).suffixes:
            cut = _lines
        else:
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


# --------------------------------------------------------------------------------------------------
# Lines
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# A list
# --------------------------------------------------------------------------------------------------


def _is_list(stream: IO[bytes]) -> bool:
    block = stream.read(_BLOCK).removeprefix(codecs.BOM_UTF8)
    while block and not block.strip():
        block = stream.read(_BLOCK)
    return block.lstrip()[:1] == b"["


def _list(stream: IO[bytes], file: str, limit: int) -> Iterator[_Row]:
    """Cut a JSON list at the commas of its own level.

    Brackets and quotes are single bytes that occur in no other character of UTF-8, so bytes that
    are not UTF-8, or a comma too many within a row, stay that row's own.
    """
    element, depth, index, too_long = bytearray(), 0, 0, False
    for token, is_mark in _tokens(stream):
        opens, closes = (is_mark and token in marks for marks in (b"[{", b"]}"))
        if depth == 0 and (index or not opens) and token.strip():
            raise _broken_list(file, index, f"{shown(token)} outside of it")
        if depth == 1 and is_mark and token in b",]}":
            if token == b"}":
                raise _broken_list(file, index, "a } that closes nothing")
            raw = bytes(element.strip())
            if too_long:
                yield b"", index, _too_long(limit)
            elif raw or index or token == b",":  # else the list is empty
                yield raw, index, None
            element, index, too_long = bytearray(), index + 1, False
        elif depth:
            element += token
            if len(element) > limit:
                element, too_long = bytearray(), True
        depth += opens - closes
    if depth:
        raise _broken_list(file, index, "the end of the file within it")


def _tokens(stream: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield brackets, and commas outside of rows, as (mark, True), all between as (bytes, False).

    What is between comes in pieces that end anywhere but between a backslash and what it escapes.
    """
    in_string, depth, rest = False, 0, b""
    block = stream.read(_BLOCK).removeprefix(codecs.BOM_UTF8)
    while block:
        block, at, rest = rest + block, 0, b""
        while at < len(block):
            between = _IN_STRING if in_string else _IN_ROW if depth > 1 else _IN_LIST
            found = between.match(block, at)
            end = at if found is None else found.end()
            if end > at:
                yield block[at:end], False
            mark, at = block[end : end + 1], end + 1
            if mark == b"\\":  # what it escapes is in the next block
                rest = mark
            elif mark == b'"':  # of a string that goes on in the next block
                in_string = not in_string
                yield mark, False
            elif mark:
                depth += (mark in b"[{") - (mark in b"]}")
                yield mark, True
        block = stream.read(_BLOCK)
    if rest:
        yield rest, False


def _broken_list(file: str, index: int, came: str) -> DataError:
    return DataError(
        f"{file}: expected a JSON list of mappings, got {came}, at row {index} (counted from 0); "
        "the rows after it cannot be told apart. Repair the file, or write JSON lines"
    )


# --------------------------------------------------------------------------------------------------
# CSV
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# What is said
# --------------------------------------------------------------------------------------------------


def _too_long(limit: int) -> str:
    return f"too long\nexpected a row of at most {limit:,} bytes, got a longer one"


def _not_utf8(byte: int, offset: int | None) -> BadRow:
    where = "" if offset is None else f" at offset {offset} of the row"
    return BadRow(f"expected UTF-8, got byte 0x{byte:02x}{where}", "not UTF-8")


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
