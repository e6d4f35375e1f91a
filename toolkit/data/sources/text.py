"""Sources of documents: text files, JSON lines, Parquet, Arrow, data sets by name.

Owns reading them into one `datasets.Dataset` (cached on disk, memory-mapped) and the checks that a
source holds what training needs. Refuses to know the tokenizer.

[Note: documents]
A row is a document, with a column `text` or, where the source is tokenised already, `input_ids`.
Rows made of text files carry two more columns: a big file is cut into several rows, so that it is
tokenised in parallel and never sits whole in memory; `start` marks the first row of a document and
`end` the last. Where the columns are absent, every row is a document of its own.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import datasets

from toolkit import ranks
from toolkit.config.settings import DataConfig, SourceConfig
from toolkit.data.sources import raw_rows
from toolkit.data.sources.columnar import as_data_error, read_files, read_named
from toolkit.data.sources.files import (
    configured,
    find_files,
    kind_of,
    named_files,
    single,
    stdlib_files,
)
from toolkit.data.sources.raw_rows import RawKind, cut_rows, decoded, place, stamped
from toolkit.data.sources.row_values import BadRow, encodable, named, parsed, shown
from toolkit.data.sources.text_checks import checked, counted, emptied, faulty
from toolkit.data.sources.text_files import text_rows
from toolkit.errors import DataError

_VERSION = 1
"""Part of the cache key: raise it when the rows made from the same file change."""

_LOOK_AT = 100
"""Rows that are looked at to find the column."""

_FAULT = "fault"
"""Column of what was wrong with rows that were left out; gone before anybody sees them."""

_STRING = datasets.Value("string")

log = logging.getLogger(__name__)


def load_documents(
    cfg: DataConfig, files: str | list[str], *, what: str = "data.train_files"
) -> datasets.Dataset:
    """Return the documents of `files`, or of what else `cfg` names, or the built-in text.

    Where `files` is empty: `cfg.dataset_name`; else `cfg.sources`, one after the other; else
    Python's standard library. See `load_source` for one of them and [Note: documents] for the
    columns.

    Args:
        cfg: names data set and sources, the text column, and what a bad row does.
        files: one pattern or several; may be empty.
        what: the setting that `files` come from, for messages.

    Raises:
        DataError: as `load_source`; or some sources are text and others token ids.
    """
    if files or cfg.dataset_name:
        return load_source(single(cfg, files), cfg, what=what)
    if not cfg.sources:
        where = "the built-in text (Python's standard library)"
        return checked(text_rows(stdlib_files(), where), "text", where)
    parts = [load_source(source, cfg, what=setting) for setting, source in configured(cfg)]
    columns = {next(c for c in ("input_ids", "text") if c in part.column_names) for part in parts}
    if len(columns) > 1:
        raise DataError("data.sources: expected text or token ids in all of them, got both")
    # Rows without marks are documents of their own; joined, all need the same columns.
    marked = len({tuple(part.column_names) for part in parts}) > 1
    return datasets.concatenate_datasets([_whole(p) if marked else p for p in parts])


def load_source(
    source: SourceConfig, cfg: DataConfig, *, what: str = "data.train_files"
) -> datasets.Dataset:
    """Return the documents of one source.

    Files are paths, folders and globs, all of one kind: JSON, CSV, Parquet, Arrow, or text (every
    other ending; one file is one document, kept byte for byte but for a byte order mark). A data
    set is a folder of `save_to_disk`, or an id on the Hub. Read once and cached by `datasets`; a
    file that changed (path, size, time) is read anew.

    With `cfg.on_bad_row: skip` a row without text (null, a number, a line that is not JSON) becomes
    an empty document, which gives no token; the first rank says how many there were, and which. A
    text file that is not UTF-8 is an error in any case.

    Args:
        source: names files or a data set.
        cfg: `text_column` and `on_bad_row` are read.
        what: the setting that the files come from, for messages.

    Raises:
        DataError: a pattern matches nothing, kinds are mixed, a file cannot be read or is not
            UTF-8, the column is missing, a row holds no text, or there is no text at all.
    """
    if not source.files:
        where = f"{what.rpartition('.')[0]}.dataset_name {source.dataset_name}"
        return _documents(read_named(source, where), cfg, where)
    found = find_files(source.files, what)
    kind = kind_of(found, what)
    where = f"{what} ({named_files(found)})"
    if kind == "text":
        return checked(text_rows(found, where), "text", where)
    if kind == "csv" or (kind == "json" and cfg.on_bad_row == "skip"):
        return _documents(_row_by_row(found, kind, cfg, where), cfg, where)
    columns = ("input_ids", cfg.text_column)
    try:
        rows = read_files(found, kind, where, columns=columns)
    except DataError as error:
        line = _bad_line(found) if kind == "json" else None
        if line is None:
            raise
        raise DataError(f"{where}: {line}; repair or remove it") from error
    return _documents(rows, cfg, where)


def _whole(documents: datasets.Dataset) -> datasets.Dataset:
    """Return `documents` with the columns `start` and `end`, all true where they had none."""
    if "start" in documents.column_names or "input_ids" in documents.column_names:
        return documents
    ones = [True] * len(documents)
    marks = datasets.Features(start=datasets.Value("bool"), end=datasets.Value("bool"))
    return datasets.concatenate_datasets(
        [documents, datasets.Dataset.from_dict({"start": ones, "end": ones}, features=marks)],
        axis=1,
    )


# --------------------------------------------------------------------------------------------------
# Rows of JSON and CSV, one by one
# --------------------------------------------------------------------------------------------------


def _row_by_row(files: list[Path], kind: RawKind, cfg: DataConfig, where: str) -> datasets.Dataset:
    """Return JSON or CSV rows, each judged by itself: columns `input_ids` or text, and `fault`."""
    if not any(f.stat().st_size for f in files):
        raise DataError(f"{where}: expected rows with text, but every file is empty")
    names: dict[str, None] = {}
    try:
        for at, raw in enumerate(cut_rows([str(f) for f in files], kind)):
            names |= dict.fromkeys(_readable(raw))
            if at == _LOOK_AT:
                break
        column = _column(list(names), cfg.text_column, where)
        values = datasets.List(datasets.Value("int64")) if column == "input_ids" else _STRING
        return datasets.Dataset.from_generator(
            _judged,
            features=datasets.Features({column: values, _FAULT: _STRING}),
            gen_kwargs={
                "files": stamped(files),
                "kind": kind,
                "column": column,
                "skip": cfg.on_bad_row == "skip",
                "limit": raw_rows.ROW_BYTES,
                "version": _VERSION,
            },
        )
    except Exception as error:
        raise as_data_error(error, where) from error


def _readable(raw: dict) -> dict:
    try:
        return decoded(raw)
    except BadRow:
        return {}


def _judged(
    files: tuple[tuple[str, int, int], ...],
    kind: RawKind,
    column: str,
    skip: bool,
    limit: int,
    version: int,
) -> Iterator[dict]:
    paths = [file for file, _, _ in files]
    for raw in cut_rows(paths, kind, limit):
        try:
            yield {column: document_value(decoded(raw), column), _FAULT: None}
        except BadRow as bad:
            where = place(raw, paths)
            if not skip:
                raise DataError(
                    f"{where}: {bad}; repair or remove it, or set data.on_bad_row: skip"
                ) from bad
            yield {column: [] if column == "input_ids" else "", _FAULT: f"{where}: {bad}"}


def document_value(row: dict, column: str) -> str | list[int]:
    """Return the text of a row's document, or its token ids where `column` is `input_ids`.

    Empty ones and NUL characters are fine: they are for the tokenizer.

    Raises:
        BadRow: the column is missing, holds no text or ids, or text that is not UTF-8.
    """
    if column not in row:
        raise BadRow(f"expected a column {column!r}, got {named(row)}")
    value = row[column]
    if column != "input_ids":
        if not isinstance(value, str):
            raise BadRow(f"expected text in column {column!r}, got {shown(value)}")
        encodable(value, column)
        return value
    ids = parsed(value, column)
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise BadRow(f"expected a list of token ids in column {column!r}, got {shown(value)}")
    return ids


# --------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------


def _documents(dataset: datasets.Dataset, cfg: DataConfig, where: str) -> datasets.Dataset:
    column = _column(dataset.column_names, cfg.text_column, where)
    dataset = dataset.with_format(None)
    if cfg.on_bad_row == "skip":
        dataset = _faults_counted(dataset, column, where)
    dataset = checked(dataset.select_columns([column]), column, where)
    return dataset if column in ("input_ids", "text") else dataset.rename_column(column, "text")


def _column(names: list[str], text_column: str, where: str) -> str:
    column = next((c for c in ("input_ids", text_column) if c in names), None)
    if column is None:
        raise DataError(
            f"{where}: expected a column {text_column!r} (data.text_column) or 'input_ids', found "
            f"{', '.join(map(repr, names)) or 'no column'}; set data.text_column to the one that "
            "holds the text"
        )
    return column


def _faults_counted(dataset: datasets.Dataset, column: str, where: str) -> datasets.Dataset:
    """Return `dataset` with empty documents for rows that hold nothing; says how many there are."""
    if _FAULT in dataset.column_names:
        faults = dataset.data.column(_FAULT).drop_null()
        count, first = len(faults), faults[:3].to_pylist()
    else:
        found = list(faulty(dataset, column))
        count, first = len(found), [f"{counted(row)} {came}" for row, came in found[:3]]
        if found:
            dataset = dataset.select_columns([column]).with_format("arrow")
            options = {"column": column}
            title = "Leaving out rows"
            dataset = dataset.map(emptied, batched=True, fn_kwargs=options, desc=title)
            dataset = dataset.with_format(None)
    if count and ranks.rank() == 0:
        log.warning(
            "%s: %d of %d rows left out (data.on_bad_row: skip), the first: %s",
            where,
            count,
            len(dataset),
            "; ".join(first),
        )
    return dataset


def _bad_line(files: list[Path]) -> str | None:
    """Name the first row that is not JSON; reads the files until it meets one."""
    paths = [str(f) for f in files]
    for raw in cut_rows(paths, "json"):
        try:
            encodable(decoded(raw), "the row")
        except BadRow as bad:
            return f"{place(raw, paths)} is not JSON: {bad}"
    return None
