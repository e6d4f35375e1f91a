"""Text files as rows: one file is one document, kept byte for byte but for a byte order mark.

[Note: documents]
A big file is cut into several rows, to tokenise it in parallel without holding all of it. `start`
marks the first row of a document, `end` the last.
"""

import codecs
import io
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from toolkit.data.sources.tables import PLACE, in_tables
from toolkit.errors import DataError

PIECE_BYTES = 1 << 17  # a longer text is cut: a few megabytes keep every core busy

_TEXT, _FLAG = pa.string(), pa.bool_()
PIECES = pa.schema({"text": _TEXT, "start": _FLAG, "end": _FLAG, PLACE: _TEXT})


def text_tables(file: str) -> Iterator[pa.Table]:
    """Yield a text file as tables of `PIECES`; see `pieces`."""
    texts = enumerate(pairwise(chain(pieces(Path(file)), [None])))
    rows = (
        (text or "", not number, following is None, f"piece {number} (counted from 0)")
        for number, (text, following) in texts
    )
    return in_tables(rows, PIECES)


def pieces(file: Path, size: int = PIECE_BYTES) -> Iterator[str]:
    """Yield the text of a file in pieces of about `size` bytes; what is not UTF-8 is a DataError
    that names the offset.
    """
    with open(file, "rb") as stream:
        offset = len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0
        stream.seek(offset)
        for block in _pieces(stream, size):
            try:
                yield block.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file} is not UTF-8 text: byte 0x{block[error.start]:02x} at offset "
                    f"{offset + error.start}. Convert it (iconv -f latin1 -t utf-8) or leave it out"
                ) from error
            offset += len(block)


def parts_of(text: str, size: int = PIECE_BYTES) -> Iterator[str]:
    """Yield `text` in parts of about `size` bytes, cut as a file is."""
    return (block.decode() for block in _pieces(io.BytesIO(text.encode()), size))


def _pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    rest = b""
    while len(block := stream.read(size)) == size:
        rest += block
        end = cut(rest)
        yield rest[:end]
        rest = rest[end:]
    if rest or block:
        yield rest + block


def cut(block: bytes) -> int:
    """Return where to end a piece of UTF-8 text: where a tokenizer ends a token anyway.

    After a newline between two lines that neither end nor begin with white space; where there is
    none, after any newline, before a space, or at least between two characters.
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
