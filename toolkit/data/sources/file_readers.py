"""Read JSON lines, JSON lists, CSV and text files as Arrow tables.

[Note: raw rows]
Arrow has one type per column, and its JSON readers guess it: text that looks like a date becomes a
date, and every row gets the keys of the others. Therefore a row is stored as the bytes of the file
and parsed when it is used. A line that is not UTF-8 or that is too long is one bad row, not a
broken file.

[Note: documents]
A text file is one document. Its bytes are kept, except for a byte order mark. A large file is cut
into several rows, so that it can be tokenised in parallel without holding all of it. `start` marks
the first row of a document, `end` the last one.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
from collections.abc import Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any, BinaryIO

import pyarrow as pa

from toolkit.data.sources.files import Kind
from toolkit.data.sources.row_values import (
    BadRow,
    catch_bad_row,
    describe_value,
    list_names,
    parse_json,
)
from toolkit.data.sources.tables import PLACE, Bounds, to_tables
from toolkit.errors import DataError

ROW_BYTES = 64 << 20  # a longer row is bad, because reading it may take all memory
# Limits of one JSON list, which is parsed at once.
LIST_BYTES, LIST_VALUES = 512 << 20, 20_000_000

# Columns: the bytes of a row (JSON), and the problem of one that cannot be read: its reason, a
# newline and the message.
RAW, FAULT = "_raw", "_fault"
LINES = pa.schema({RAW: pa.large_binary(), PLACE: pa.string(), FAULT: pa.string()})
_BLOCK = 1 << 20

_Rows = Iterator[tuple[int, bytes | BadRow]]  # number of a row or its line; its bytes or problem


def line_tables(
    file: str, bounds: Bounds | None = None, *, kind: Kind, limit: int
) -> Iterator[pa.Table]:
    """Read a file of JSON lines, a JSON list or CSV as tables with the schema `LINES`.

    Each row is stored as JSON bytes in the column `RAW`. If a row cannot be read or is too long,
    the reason is stored in the column `FAULT`, and `decode_row` raises it as an error. Takes a few
    megabytes of memory, but a JSON list is read completely. An empty file gives no table.

    Args:
        file: its path.
        bounds: [begin, end) in bytes. Read only the JSON lines that begin within them; None: all
            rows.
        kind: `csv` or `json`.
        limit: maximum number of bytes of a row.

    Raises:
        DataError: a JSON list or the header of a CSV file is broken.
    """
    if os.path.getsize(file) == 0:
        return
    iterate_rows = _iterate_csv if kind == "csv" else _iterate_lines
    if kind == "json" and not _is_named_json_lines(file):
        with _open_decompressed(file) as stream:
            iterate_rows = _iterate_json_list if _begins_with_list(stream) else _iterate_lines
    place = "row {} (counted from 0)" if iterate_rows is _iterate_json_list else "line {}"
    if bounds and bounds[0]:
        place = f"line {{}} of those after byte {bounds[0]}"
    with _open_decompressed(file) as stream:
        if bounds:
            iterate_rows = partial(_iterate_lines, bounds=bounds)
        stored = (
            (b"", place.format(number), f"{row.reason}\n{row}")
            if isinstance(row, BadRow)
            else (row, place.format(number), None)
            for number, row in iterate_rows(stream, file, limit)
        )
        yield from to_tables(stored, LINES)


def decode_row(stored: dict[str, Any]) -> dict[str, Any]:
    """Parse a row that `line_tables` has stored as bytes.

    Raises:
        BadRow: the row is not a JSON mapping, or has a fault that was stored with it.
    """
    if stored[FAULT] is not None:
        reason, _, message = stored[FAULT].partition("\n")
        raise BadRow(message, reason)
    raw = stored[RAW]
    try:
        row = parse_json(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8_error(raw[error.start], f" at offset {error.start} of the row") from error
    except RecursionError as error:
        raise BadRow("expected a JSON mapping, got one nested too deep", "nesting") from error
    except ValueError as error:
        raise BadRow(f"expected JSON, got {describe_value(raw)} ({error})", "not JSON") from error
    if not isinstance(row, dict):
        raise BadRow(f"expected a JSON mapping, got {describe_value(row)}", "no mapping")
    return row


def _is_named_json_lines(file: str) -> bool:
    """Return True if .jsonl or .ndjson is among the endings of a file's name, as in a.jsonl.gz."""
    return not {".jsonl", ".ndjson"}.isdisjoint(Path(file.lower()).suffixes)


def first_row(file: Path) -> dict[str, Any] | None:
    """Parse the first line of a file that is not blank, as a JSON mapping.

    Returns None if the line is longer than 1 MiB or is something else, or if there is none.
    """
    with open(file, "rb") as stream:
        for _, line in _iterate_bounded_lines(stream, _BLOCK):
            if line is None:
                return None
            if line.strip():
                row = catch_bad_row(decode_row, {FAULT: None, RAW: line})
                return row if isinstance(row, dict) else None
    return None


def _open_decompressed(file: str) -> IO[bytes]:
    """Open a file to read its bytes; .gz, .bz2, .xz and .zst are decompressed."""
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    ending = Path(file).suffix.lower()
    if ending == ".zst":
        return io.BufferedReader(pa.input_stream(file, compression="zstd"), _BLOCK)
    return openers.get(ending, open)(file, "rb")


def cut_lines(file: str, count: int) -> list[tuple[Bounds, int]]:
    """Split a file of JSON lines into `count` byte ranges of equal length.

    Returns:
        ((begin, end), number of bytes) of each range [begin, end). Empty for a compressed file, a
        JSON list or a file that cannot be opened.
    """
    try:
        with _open_decompressed(file) as stream:
            packed = not isinstance(stream, io.BufferedReader) or file.lower().endswith(".zst")
            if packed or (not _is_named_json_lines(file) and _begins_with_list(stream)):
                return []
    except OSError:
        # The reader of the rows reports the error.
        return []
    edges = [os.path.getsize(file) * i // count for i in range(count + 1)]
    return [((begin, end), end - begin) for begin, end in pairwise(edges)]


def _iterate_lines(stream: IO[bytes], file: str, limit: int, bounds: Bounds | None = None) -> _Rows:
    """Yield (number from 1, bytes) of each JSON line that is not blank.

    For a line longer than `limit` bytes, a `BadRow` takes the place of the bytes. If there are
    `bounds`, only lines that begin within these bytes [begin, end) are read and counted.
    """
    for number, line in _iterate_bounded_lines(stream, limit, bounds):
        if line is None:
            yield number, _too_long_error(limit)
        elif line := line.strip():
            yield number, line


def _iterate_bounded_lines(
    stream: IO[bytes], limit: int, bounds: Bounds | None = None
) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number from 1, bytes) of each line that begins at a byte in [begin, end) of `bounds`.

    Without bounds, all lines are read. The bytes are None for a line longer than `limit` bytes.
    """
    begin, end = bounds or (0, None)
    if begin:
        # If a line ends just before `begin`, the next one is the first.
        stream.seek(begin - 1)
        _skip_line(stream)
    number = 0
    while (end is None or stream.tell() < end) and (line := stream.readline(limit + 2)):
        number += 1
        if number == 1 and not begin:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line and not line.endswith(b"\n"):
            _skip_line(stream)
        yield number, line if len(line.rstrip(b"\r\n")) <= limit else None


def _skip_line(stream: IO[bytes]) -> None:
    """Advance a stream to the beginning of the next line."""
    while (part := stream.readline(_BLOCK)) and not part.endswith(b"\n"):
        pass


def _begins_with_list(stream: IO[bytes]) -> bool:
    """Return True if the first character of a stream that is not white space is "[".

    The position of the stream changes.
    """
    block = stream.read(_BLOCK).removeprefix(codecs.BOM_UTF8)
    while block and not block.strip():
        block = stream.read(_BLOCK)
    return block.lstrip()[:1] == b"["


def _iterate_json_list(stream: IO[bytes], file: str, limit: int) -> _Rows:
    """Read a JSON list completely; yield (index, row as JSON bytes) for each row.

    The bytes are formatted again, so they may differ from those of the file. For a row of more than
    `limit` bytes, a `BadRow` takes the place of the bytes.

    Raises:
        DataError: the list is broken, or has more than `LIST_BYTES` bytes or `LIST_VALUES` values.
    """
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
            "file, or write JSON lines, of which broken ones can be skipped"
        ) from error
    for index, row in enumerate(rows):
        raw = json.dumps(row).encode()
        yield index, raw if len(raw) <= limit else _too_long_error(limit)


def _iterate_csv(stream: IO[bytes], file: str, limit: int) -> _Rows:
    """Yield (number of its first line, row as JSON bytes) for each row of a CSV file (RFC 4180).

    For a row that is broken or longer than `limit`, a `BadRow` takes the place of the bytes. Lines
    are counted from 1, including the header. All values are texts. In a .tsv file, tabs separate
    the fields.

    Raises:
        DataError: the header is broken, or has empty or repeated names.
    """
    csv.field_size_limit(max(csv.field_size_limit(), limit))
    read = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="\n")
    tabs = ".tsv" in Path(file.lower()).suffixes
    reader = csv.reader(read, strict=True, delimiter="\t" if tabs else ",")
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{file}: expected a CSV header, got one that breaks ({error})") from error
    text = "".join(header)
    broken = text.encode("utf-8", "replace") != text.encode("utf-8", "surrogateescape")
    if not header or len(set(header)) < len(header) or not all(header) or broken:
        raise DataError(
            f"{file}: expected a CSV header of different names in UTF-8 in its first line, got "
            f"{list_names(header)}"
        )
    while True:
        first = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            yield first, BadRow(f"expected a CSV row, got one that breaks ({error})", "not CSV")
            continue
        if fields is None:
            return
        if sum(map(len, fields)) > limit:
            yield first, _too_long_error(limit)
        elif len(fields) == len(header):
            row = json.dumps(dict(zip(header, fields, strict=True)), ensure_ascii=False)
            try:
                yield first, row.encode("utf-8")
            except UnicodeEncodeError as error:
                yield first, _not_utf8_error(ord(row[error.start]) - 0xDC00)
        elif fields:
            message = f"expected {len(header)} fields ({list_names(header)}), got {len(fields)}"
            yield first, BadRow(message, "wrong number of fields")


def _too_long_error(limit: int) -> BadRow:
    """Create the error for a row of more than `limit` bytes."""
    return BadRow(f"expected a row of at most {limit:,} bytes, got a longer one", "too long")


def _not_utf8_error(byte: int, where: str = "") -> BadRow:
    """Create the error for a byte that is not UTF-8."""
    return BadRow(f"expected UTF-8, got byte 0x{byte:02x}{where}", "not UTF-8")


PIECE_BYTES = 1 << 17  # a longer text is cut: a few megabytes keep every core busy

_TEXT, _FLAG = pa.string(), pa.bool_()
PIECES = pa.schema({"text": _TEXT, "start": _FLAG, "end": _FLAG, PLACE: _TEXT})


def text_tables(file: str) -> Iterator[pa.Table]:
    """Read a text file as tables with the schema `PIECES`, one row per piece of about 128 KiB.

    The columns `start` and `end` tell if the document begins or ends with the piece.
    """
    texts = enumerate(pairwise(chain(read_pieces(Path(file)), [None])))
    rows = (
        (text or "", not number, following is None, f"piece {number} (counted from 0)")
        for number, (text, following) in texts
    )
    return to_tables(rows, PIECES)


def read_pieces(file: Path, size: int = PIECE_BYTES) -> Iterator[str]:
    """Yield the text of a file in pieces of about `size` bytes; see `find_cut_offset`.

    An empty file gives one empty piece.

    Raises:
        DataError: the file is not UTF-8; the error gives the offset in bytes.
    """
    with open(file, "rb") as stream:
        offset = len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0
        stream.seek(offset)
        for block in _split_at_cuts(stream, size):
            try:
                yield block.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file} is not UTF-8 text: byte 0x{block[error.start]:02x} at offset "
                    f"{offset + error.start}. Convert it (iconv -f latin1 -t utf-8) or remove it"
                ) from error
            offset += len(block)


def split_text(text: str, size: int = PIECE_BYTES) -> Iterator[str]:
    """Split a text into parts of about `size` bytes of UTF-8; see `find_cut_offset`."""
    return (block.decode() for block in _split_at_cuts(io.BytesIO(text.encode()), size))


def _split_at_cuts(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the bytes of a stream in pieces of about `size` bytes, cut at `find_cut_offset`.

    An empty stream gives one empty piece.
    """
    buffer = b""
    while len(block := stream.read(size)) == size:
        buffer += block
        end = find_cut_offset(buffer)
        yield buffer[:end]
        buffer = buffer[end:]
    if buffer or block:
        yield buffer + block


def find_cut_offset(block: bytes) -> int:
    """Find the offset at which to cut UTF-8 bytes so that a token is unlikely to be cut.

    It is the first of these that exists: after the last newline without white space on either side;
    after the last newline; before the last space; between the last two characters.
    """
    at = block.rfind(b"\n", 1, -1)
    while at > 0 and (block[at - 1 : at].isspace() or block[at + 1 : at + 2].isspace()):
        at = block.rfind(b"\n", 1, at)
    if at > 0:
        return at + 1
    if (at := block.rfind(b"\n")) >= 0:
        return at + 1
    if (at := block.rfind(b" ")) > 0:
        return at
    at = len(block) - 1
    while at > len(block) - 4 and at > 0 and block[at] & 0xC0 == 0x80:
        at -= 1
    return at or len(block)
