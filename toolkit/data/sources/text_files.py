"""Text files as rows: one file is one document, kept byte for byte but for a byte order mark.

Owns the cut of big files into pieces and the check that they are UTF-8. Refuses to know the
tokenizer. See [Note: documents] in `toolkit/data/text.py`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import datasets

from toolkit.data.sources.columnar import FILE, ROW, Rows, as_data_error
from toolkit.data.sources.raw_rows import stamped
from toolkit.errors import DataError

PIECE_BYTES = 1 << 17
"""A text file longer than this is cut: small enough that a few megabytes keep every core busy."""

_VERSION = 1
"""Part of the cache key: raise it when the rows made from the same file change."""

_TEXT_ROWS = datasets.Features(
    text=datasets.Value("string"), start=datasets.Value("bool"), end=datasets.Value("bool")
)


_PLACES = datasets.Features({FILE: datasets.Value("int32"), ROW: datasets.Value("int32")})


def text_rows(
    files: list[Path], where: str, *, streaming: bool = False, places: bool = False
) -> Rows:
    """Return text files as rows with `text`, `start` and `end`; see [Note: documents].

    With `places` they also have `FILE`, the index of their file, and `ROW`, their number in it.

    Raises:
        DataError: all are empty; or one is not UTF-8 (while iterating, where they are streamed).
    """
    # A tuple: `from_generator` takes lists for shards. Size and time are there for the cache key.
    files_stamped = stamped(files)
    if not any(size for _, size, _ in files_stamped):
        raise DataError(f"{where}: expected text, but every file is empty")
    options = {"files": files_stamped, "version": _VERSION}
    rows: Callable[..., Iterator[dict]] = _rows
    features = _TEXT_ROWS
    if places:
        options["indices"] = tuple(range(len(files)))
        rows, features = _placed_rows, datasets.Features(_TEXT_ROWS | _PLACES)
    if streaming:
        shards = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
        return datasets.IterableDataset.from_generator(rows, features=features, gen_kwargs=shards)
    try:
        return datasets.Dataset.from_generator(rows, features=features, gen_kwargs=options)
    except Exception as error:
        raise as_data_error(error, where) from error


def pieces(file: Path, size: int = PIECE_BYTES) -> Iterator[str]:
    """Yield a text file in pieces of about `size` bytes; joined they are the file's text.

    Pieces end where a tokenizer ends a token anyway: after a newline between two lines that neither
    end nor begin with white space; where there is none, after any newline, before a space, or at
    least between two characters. Holds at most three pieces in memory.

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
                end = _cut(rest) if block else len(rest)
                yield _decode(rest[:end], file, offset)
                rest = rest[end:]
                offset += end
            if rest:
                yield _decode(rest, file, offset)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error


def _cut(block: bytes) -> int:
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


def _rows(files: tuple[tuple[str, int, int], ...], version: int) -> Iterator[dict]:
    for file, _, _ in files:
        start, text = True, None
        for piece in pieces(Path(file)):
            if text is not None:
                yield {"text": text, "start": start, "end": False}
                start = False
            text = piece
        if text is not None:
            yield {"text": text, "start": start, "end": True}


def _placed_rows(
    files: tuple[tuple[str, int, int], ...], indices: tuple[int, ...], version: int
) -> Iterator[dict]:
    for file, index in zip(files, indices, strict=True):
        for number, row in enumerate(_rows((file,), version)):
            yield row | {FILE: index, ROW: number}
