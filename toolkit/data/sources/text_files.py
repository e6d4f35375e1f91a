"""Text files as rows: one file is one document, kept byte for byte but for a byte order mark.

[Note: documents]
A big file is cut into several rows, so that it is tokenised in parallel and never sits whole in
memory. `start` marks the first row of a document and `end` the last; rows of other files are
documents of their own.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets

from toolkit.data.sources.columns import FILE, ROW, RowDataset, as_data_error
from toolkit.data.sources.lines import stamped
from toolkit.errors import DataError

PIECE_BYTES = 1 << 17
"""A text longer than this is cut: small enough that a few megabytes keep every core busy."""

_VERSION = 1
"""Part of the cache key: raise it when the rows made from the same file change."""

_TEXT_ROWS = datasets.Features(
    {
        "text": datasets.Value("string"),
        "start": datasets.Value("bool"),
        "end": datasets.Value("bool"),
        FILE: datasets.Value("int32"),
        ROW: datasets.Value("int32"),
    }
)


def text_rows(files: list[Path], where: str, *, streaming: bool = False) -> RowDataset:
    """Return text files as rows with `text`, `start`, `end`, and `FILE` and `ROW`.

    Raises:
        DataError: all are empty; or one is not UTF-8 (while iterating, where they are streamed).
    """
    # A tuple: `from_generator` takes lists for shards. Size and time are there for the cache key.
    files_stamped = stamped(files)
    if not any(size for _, size, _ in files_stamped):
        raise DataError(f"{where}: expected text, but every file is empty")
    if streaming:
        shards = {"files": list(files_stamped), "indices": list(range(len(files)))}
        return datasets.IterableDataset.from_generator(
            _rows, features=_TEXT_ROWS, gen_kwargs=shards | {"version": _VERSION}
        )
    key = {"files": files_stamped, "indices": None, "version": _VERSION}
    try:
        return datasets.Dataset.from_generator(_rows, features=_TEXT_ROWS, gen_kwargs=key)
    except Exception as error:
        raise as_data_error(error, where) from error


def pieces(file: Path, size: int = PIECE_BYTES) -> Iterator[str]:
    """Yield a text file in pieces of about `size` bytes; joined they are the file's text.

    Holds at most three pieces in memory. See `cut` for where they end.

    Raises:
        DataError: the file is not UTF-8 (with the offset of the byte) or cannot be read.
    """
    try:
        with open(file, "rb") as stream:
            block = stream.read(size)
            offset = 3 if block.startswith(b"\xef\xbb\xbf") else 0
            rest = b""
            block = block[offset:]
            while block:
                rest += block
                block = stream.read(size)
                end = cut(rest) if block else len(rest)
                yield _decode(rest[:end], file, offset)
                rest = rest[end:]
                offset += end
            if rest:
                yield _decode(rest, file, offset)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error


def parts_of(text: str, size: int = PIECE_BYTES) -> Iterator[str]:
    """Yield `text` in parts of about `size` bytes, ended as those of a file are."""
    content, begin = text.encode(), 0
    while len(content) - begin > 2 * size:
        end = begin + cut(content[begin : begin + size])
        yield content[begin:end].decode()
        begin = end
    yield content[begin:].decode()


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


def _decode(block: bytes, file: Path, offset: int) -> str:
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text: byte 0x{block[error.start]:02x} at offset "
            f"{offset + error.start}. Convert it (iconv -f latin1 -t utf-8) or leave it out"
        ) from error


def _rows(
    files: Sequence[tuple[str, int, int]], indices: list[int] | None, version: int
) -> Iterator[dict]:
    for (file, _, _), index in zip(files, indices or range(len(files)), strict=True):
        number, text = 0, None
        for piece in pieces(Path(file)):
            if text is not None:
                yield {"text": text, "start": not number, "end": False, FILE: index, ROW: number}
                number += 1
            text = piece
        if text is not None:
            yield {"text": text, "start": not number, "end": True, FILE: index, ROW: number}
