"""Sources of documents: text files, JSON lines, Parquet, Arrow, data sets by name.

Owns reading them into one `datasets.Dataset` (cached on disk, memory-mapped) and the checks that a
source holds what training needs. Refuses to know the tokenizer.

[Note: documents]
A row is a document, with a column `text` or, where the source is tokenised already, `input_ids`.
Rows made of text files carry two more columns: a big file is cut into several rows, so that it is
tokenised in parallel and never sits whole in memory; `start` marks the first row of a document and
`end` the last. Where the columns are absent, every row is a document of its own.
"""

import glob
import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from toolkit.config import DataConfig
from toolkit.data.files import Kind, find_files, kind_of, stdlib_files
from toolkit.errors import DataError

PIECE_BYTES = 1 << 17
"""A text file longer than this is cut: small enough that a few megabytes keep every core busy."""

_VERSION = 1
"""Part of the cache key: raise it when the rows made from the same file change."""

_TEXT_ROWS = datasets.Features(
    text=datasets.Value("string"), start=datasets.Value("bool"), end=datasets.Value("bool")
)


def load_documents(
    cfg: DataConfig, files: str | list[str], *, what: str = "data.train_files"
) -> datasets.Dataset:
    """Return the documents of `files`, or of the data set that `cfg` names, or the built-in text.

    `files` are paths, folders and globs, all of one kind: JSON lines, Parquet, Arrow, or text
    (every other ending; one file is one document, kept byte for byte but for a byte order mark).
    Where `files` is empty: `cfg.dataset_name` (a folder of `save_to_disk`, or an id on the Hub);
    where that is empty too: Python's standard library. Read once and cached by `datasets`; a file
    that changed (path, size, time) is read anew. See [Note: documents] for the columns.

    Args:
        cfg: names the data set and the text column.
        files: one pattern or several; may be empty.
        what: the setting that `files` come from, for messages.

    Raises:
        DataError: a pattern matches nothing, kinds are mixed, a file cannot be read or is not
            UTF-8, the column is missing, a row holds no text, or there is no text at all.
    """
    if files:
        found = find_files(files, what)
        kind = kind_of(found, what)
        where = f"{what} ({_named(found)})"
        if kind == "text":
            return _checked(_text(found, where), "text", where)
        return _documents(_rows_of(found, kind, cfg.text_column, where), cfg.text_column, where)
    if cfg.dataset_name:
        where = f"data.dataset_name {cfg.dataset_name}"
        return _documents(_by_name(cfg, where), cfg.text_column, where)
    where = "the built-in text (Python's standard library)"
    return _checked(_text(stdlib_files(), where), "text", where)


# --------------------------------------------------------------------------------------------------
# Text files
# --------------------------------------------------------------------------------------------------


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


def _text(files: list[Path], where: str) -> datasets.Dataset:
    # A tuple: `from_generator` takes lists for shards. Size and time are there for the cache key.
    stamped = tuple((str(f), s.st_size, s.st_mtime_ns) for f in files for s in [f.stat()])
    if not any(size for _, size, _ in stamped):
        raise DataError(f"{where}: expected text, but every file is empty")
    try:
        return datasets.Dataset.from_generator(
            _rows, features=_TEXT_ROWS, gen_kwargs={"files": stamped, "version": _VERSION}
        )
    except Exception as error:
        raise _as_data_error(error, where) from error


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


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------


def _rows_of(files: list[Path], kind: Kind, text_column: str, where: str) -> datasets.Dataset:
    if not any(f.stat().st_size for f in files):
        raise DataError(f"{where}: expected rows with text, but every file is empty")
    options = {}
    try:
        if kind == "parquet":  # the other columns need not be copied into the cache
            names = pq.read_schema(files[0]).names
            wanted = next((c for c in ("input_ids", text_column) if c in names), None)
            options = {"columns": [wanted]} if wanted else {}
        escaped = [glob.escape(str(f)) for f in files]
        return datasets.load_dataset(kind, data_files=escaped, split="train", **options)
    except Exception as error:
        line = _bad_line(files) if kind == "json" else None
        if line is not None:
            raise DataError(f"{where}: {line}; repair or remove it") from error
        raise _as_data_error(error, where) from error


def _by_name(cfg: DataConfig, where: str) -> datasets.Dataset:
    name, split = str(cfg.dataset_name), cfg.dataset_split
    folder = Path(name).expanduser()
    if folder.is_file():
        raise DataError(f"{where} is a file, expected a data set; give it as data.train_files")
    saved = any((folder / f).is_file() for f in ("state.json", "dataset_dict.json"))
    try:
        if not saved:
            name = str(folder) if folder.is_dir() else name
            return datasets.load_dataset(name, cfg.dataset_config_name, split=split)
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise _as_data_error(error, where) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(
                f"{where} has no split {split!r}, only {', '.join(loaded)}; set data.dataset_split"
            )
        loaded = loaded[split]
    # A saved selection or shuffle is an index over the rows; what follows reads the rows in order.
    return loaded if loaded._indices is None else loaded.flatten_indices()


def _documents(dataset: datasets.Dataset, text_column: str, where: str) -> datasets.Dataset:
    names = dataset.column_names
    column = next((c for c in ("input_ids", text_column) if c in names), None)
    if column is None:
        raise DataError(
            f"{where}: expected a column {text_column!r} (data.text_column) or 'input_ids', found "
            f"{', '.join(map(repr, names)) or 'no column'}; set data.text_column to the one that "
            "holds the text"
        )
    dataset = _checked(dataset.with_format(None).select_columns([column]), column, where)
    return dataset if column in ("input_ids", "text") else dataset.rename_column(column, "text")


def _checked(dataset: datasets.Dataset, column: str, where: str) -> datasets.Dataset:
    """Return `dataset` when its rows are usable; costs no more than the chunks' metadata."""
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
        f"(counted from 0) holds {came[:80]}; remove or repair such rows"
    )


def _as_data_error(error: BaseException, where: str) -> DataError:
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


def _bad_line(files: list[Path]) -> str | None:
    """Name the first line that is not JSON; reads the files until it meets one."""
    for file in files:
        if file.suffix.lower() != ".jsonl":
            continue
        with open(file, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    if line.strip():
                        json.loads(line)
                except ValueError as error:
                    return f"{file} line {number} is not JSON: {error}"
    return None


def _named(files: list[Path]) -> str:
    return str(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
