"""Load the sources of a config, and read their rows with the place of each row in its file."""

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import datasets

from toolkit import ranks
from toolkit.config.data import DataConfig, SourceConfig
from toolkit.data.examples import preferences, recognise
from toolkit.data.examples.columns import NameMapping
from toolkit.data.examples.prompt_checks import has_lost_text
from toolkit.data.examples.turns import TURN_COLUMNS
from toolkit.data.row_formats import EXAMPLES, Parsed, RowFormat
from toolkit.data.sources import file_readers, tables
from toolkit.data.sources.file_readers import PIECES, text_tables
from toolkit.data.sources.files import (
    Purpose,
    common_file_kind,
    find_files,
    find_split,
    find_stdlib_files,
    list_sources,
)
from toolkit.data.sources.row_values import BadRow, Row, catch_bad_row
from toolkit.errors import DataError

_PLACE_COLUMNS = (tables.FILE, tables.PLACE)

_PROMPT_NAMES = (
    *("prompt", "instruction", "question", "query", "input", "context", "passage", "history"),
    *TURN_COLUMNS,
)
_ANSWER_NAMES = ("completion", "output", "response")

LOOK_AT = 100  # number of first rows that determine the format of a source


@dataclass(frozen=True)
class DataSource:
    """The rows of one source, their layout and format, and the source's weight in a mixture."""

    name: str
    where: str
    """The setting and the first file, for messages."""
    rows: tables.RowDataset
    """Rows as they are stored. `read` decodes one."""
    layout: recognise.Layout
    weight: float | None = None
    max_repeats: float | None = None
    files: tuple[str, ...] = ()
    sizes: tuple[int, ...] | None = None
    """Bytes of each shard of a stream of files."""
    names: NameMapping = NameMapping({}, {}, {}, ())  # noqa: RUF009 - it is frozen
    reported_columns: frozenset[str] = frozenset()
    """Columns that are used, or that the report lists as unused."""
    row_format: RowFormat = EXAMPLES

    def files_digest(self) -> str:
        """Compute a digest of the names and sizes of the files, without their folders."""
        return tables.compute_digest([(Path(f).name, os.path.getsize(f)) for f in self.files])

    @cached_property
    def _features(self) -> dict[str, Any]:
        """Type of each column of the stored rows, by name; {} if not known."""
        return dict(self.rows.features or {})

    def read(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Decode a stored row to values with the column names of the file.

        Raises:
            BadRow: the row cannot be decoded.
        """
        if file_readers.RAW in stored:
            return file_readers.decode_row(stored)
        return {
            name: tables.decode_and_drop_nulls(value, name, self._features.get(name))
            for name, value in stored.items()
            if name not in _PLACE_COLUMNS
        }

    def row(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Decode a stored row and rename its columns to standard names.

        Raises:
            BadRow: the row cannot be decoded.
        """
        return self.names.rename_row(self.read(stored), self.layout.json_turns)

    def example(self, stored: dict[str, Any]) -> Parsed:
        """Decode a stored row and parse it to an example, a pair or an answer.

        Raises:
            BadRow: the row cannot be used.
        """
        return self.parse_example(self.read(stored))

    def parse_example(self, row: dict[str, Any]) -> Parsed:
        """Parse a row, as `read` returns it, to an example, a pair or an answer.

        Raises:
            BadRow: the row cannot be used.
        """
        row = self.names.rename_row(row, self.layout.json_turns)
        return self.row_format.parse(row, self.layout)

    def describe_place(self, stored: dict[str, Any], number: int) -> str:
        """Describe the position of a row for messages: its file and line, or its number.

        Args:
            stored: the row as it is stored.
            number: its number in the source, or in a shard of a stream, from 0.
        """
        if tables.FILE in stored:
            return f"{self.files[stored[tables.FILE]]} {stored[tables.PLACE]}"
        of_shard = "" if isinstance(self.rows, datasets.Dataset) else " of a shard"
        return f"{self.where} row {number}{of_shard} (counted from 0)"

    def make_error(self, stored: dict[str, Any], number: int, bad: BadRow) -> DataError:
        """Create the error that ends the run for a bad row, with its position and advice."""
        return DataError(
            f"{self.describe_place(stored, number)}: {bad}. Repair or remove the row, or set "
            "data.on_bad_row: skip"
        )


def load_sources(
    cfg: DataConfig,
    *,
    purpose: Purpose = "train",
    row_format: RowFormat = EXAMPLES,
    has_template: bool = True,
    streaming: bool | None = None,
) -> list[DataSource]:
    """Load the sources of a config to train on or to evaluate on; their rows are not tokenised.

    Files are JSON lines, JSON, CSV, Parquet, Arrow, or text (every other ending; one file is one
    document). A named data set is a folder of `save_to_disk`, or an id on the Hub. If no source to
    train on is configured, documents are the files of Python's standard library. Examples are then
    questions about these files, if the row format has built-in rows.

    Args:
        cfg: section `data` of the settings.
        purpose: `train` or `eval`.
        row_format: format of the rows.
        has_template: the tokenizer has a chat template. Without one, dialogues remain texts.
        streaming: True: load the rows as streams; False: read them once, and cache them. None:
            stream the training rows if `cfg.streaming` is set.

    Raises:
        DataError: a file is missing or cannot be read, kinds of files are mixed, there is no row,
            the format of the rows is not known, or a required source is not configured.
    """
    if streaming is None:
        streaming = cfg.streaming and purpose == "train"
    configs = list_sources(cfg, purpose)
    if not configs and purpose == "train":
        if not row_format.is_documents:
            if row_format.built_in_rows is None:
                title = row_format.title
                raise DataError(f"expected {title}: set data.train_files or dataset_name")
            built_in, layout = row_format.built_in_rows()
            rows = built_in.to_iterable_dataset() if streaming else built_in
            where = "the built-in instructions (Python's standard library)"
            return [DataSource("stdlib-instructions", where, rows, layout, row_format=row_format)]
        source = SourceConfig(files=[str(f) for f in find_stdlib_files()], name="stdlib")
        configs = [("the built-in text", source)]
    sources = [
        _load_source(source, setting, cfg, streaming, row_format) for setting, source in configs
    ]
    if has_template:
        return sources
    return [replace(s, layout=preferences.keep_dialogues_as_text(s.layout)) for s in sources]


def _load_source(
    source: SourceConfig, setting: str, cfg: DataConfig, streaming: bool, row_format: RowFormat
) -> DataSource:
    """Load one source, recognise its layout, and open its rows as a data set or as a stream.

    Args:
        source: settings of the source.
        setting: name of the setting, for messages.
        cfg: section `data` of the settings.
        streaming: load the rows as a stream.
        row_format: format of the rows.

    Raises:
        DataError: the files cannot be read, are empty, or do not fit the row format.
    """
    standard = row_format.standard_names
    renamed = NameMapping.from_setting(source.columns or cfg.columns, standard)
    columns = (*standard, *row_format.candidate_names, *renamed.columns.values())
    columns = tuple(dict.fromkeys(columns))
    files, schema, kind, shards = list[Path](), None, None, list[tables.FileShard]()
    unread = list[Row]()  # first values of columns that are not read
    if source.dataset_name:
        where = f"{setting.rpartition('.')[0]}.dataset_name {source.dataset_name}"
        rows, unread = tables.load_named_data_set(source, where, columns, streaming=streaming)
    else:
        files = find_files(source.files, setting)
        kind = common_file_kind(files, setting)
        _log_splits(source.files, setting)
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        where = f"{setting} ({files[0]}{more})"
        if not any(f.stat().st_size for f in files):
            raise DataError(f"{where}: expected text or rows, but every file is empty")
        if kind == "text":
            renamed.find_absent_names([{"text": ""}], where)
            _check_text_files(files, where)
            reader, schema = partial(text_tables), PIECES
        elif kind in ("json", "csv"):
            reader = partial(file_readers.line_tables, kind=kind, limit=file_readers.ROW_BYTES)
            schema = file_readers.LINES
        else:
            reader = partial(tables.arrow_tables, kind=kind, columns=columns)
            unread = tables.read_first_values(str(files[0]), kind, columns)
        cuts: dict[str, tables.Cut] = {
            "json": file_readers.cut_lines,
            "parquet": tables.cut_parquet,
        }
        shards = tables.file_shards(files, cuts.get(kind) if streaming else None)
        rows = tables.read_files(reader, shards, where, schema, streaming=streaming)
    data_source = DataSource(
        name=str(source.name),
        where=where,
        rows=rows,
        layout=replace(recognise.PIECE_LAYOUT, whole=row_format.is_documents),
        weight=source.weight,
        max_repeats=source.max_repeats,
        files=tuple(map(str, files)),
        sizes=tuple(shard.size for shard in shards) or None,
        names=renamed,
        row_format=row_format,
    )
    if kind == "text" and not row_format.reads_text_files:
        title = row_format.title
        raise DataError(f"{where}: expected {title}, got text files; give rows (.jsonl)")
    return data_source if kind == "text" else _recognise_source(data_source, unread)


def _log_splits(patterns: str | list[str], setting: str) -> None:
    """Log which split is read from each folder, if there are several or it is not `train`."""
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        folder = Path(pattern).expanduser()
        split = find_split(folder, setting) if folder.is_dir() else None
        if split is not None and (split.other_splits or split.name != "train"):
            other_splits = ", ".join(
                f"{name} ({count})" for name, count in split.other_splits.items()
            )
            remark = f", not {other_splits}" if other_splits else ""
            ranks.log_once(
                f"data       {setting} {pattern}: split {split.name} ({len(split.files)} "
                f"file(s)){remark}"
            )


def _check_text_files(files: list[Path], where: str) -> None:
    """Raise DataError if a text file has JSON lines of a known format.

    Logs a warning if a file begins with a JSON mapping of an unknown format.
    """
    for file in files[:LOOK_AT]:
        if (row := file_readers.first_row(file)) is None:
            continue
        layout = catch_bad_row(recognise.recognise_layout, [row])
        advice = "let its name end in .jsonl, or put texts that look so into a column 'text'"
        if isinstance(layout, recognise.Layout):
            raise DataError(f"{where}: {file}: expected text, got JSON lines ({layout}); {advice}")
        ranks.log_once(f"WARNING: {file} looks like JSON lines and is read as plain text; {advice}")


def _warn_of_unused_columns(
    where: str, layout: recognise.Layout, used: Collection[str], rows: list[Row]
) -> None:
    """Log a warning for each unused column that seems to hold a part of the prompt or answer.

    A column counts if it is named like such a part, and has a text that no used column contains.
    Token ids cannot be compared with texts, so columns next to them are not checked.

    Args:
        where: the source, for messages.
        layout: its layout.
        used: names in the file of the columns that are used.
        rows: the first rows, with their original names.
    """
    if layout.format == "tokenised":
        return
    is_answer_read = layout.format != "preferences"  # other answers may be next to a pair
    for name in layout.unused:
        part = "prompt" if name in _PROMPT_NAMES else ""
        if is_answer_read and name in _ANSWER_NAMES:
            part = "answer"
        if part and any(has_lost_text(row, name, used) for row in rows):
            ranks.log_once(
                f"WARNING: {where}: the column {name!r} is not used, and its name is that of a "
                f"part of the {part}. Map it in data.columns, or set {{{name}: null}} if the "
                f"{part} is complete without it"
            )


def _recognise_source(source: DataSource, unread: list[Row]) -> DataSource:
    """Recognise the layout of a source from its first rows, and select the columns that it uses.

    Logs names of `data.columns` that the first rows lack, and warnings about unused columns.

    Args:
        source: the source, whose layout is not known yet.
        unread: first values of columns that are in the file but not in `source.rows`.

    Returns:
        A copy of the source with its layout, names and columns.

    Raises:
        DataError: no row can be read, the rows have no known layout, or `data.columns` does not
            fit.
    """
    try:
        first = [
            (stored, catch_bad_row(source.read, stored)) for stored in islice(source.rows, LOOK_AT)
        ]
    except Exception as error:
        raise tables.to_data_error(error, source.where) from error
    if not first:
        raise DataError(f"{source.where}: expected examples, found no row")
    readable = [(i, row) for i, (_, row) in enumerate(first) if isinstance(row, dict)]
    if not readable:
        raise DataError(
            f"{source.describe_place(first[0][0], 0)}: {first[0][1]}, and none of the first "
            f"{len(first)} rows can be read. Is this the right file?"
        )
    names = source.names
    no_values = dict.fromkeys(unread[0]) if unread else {}
    padded = chain(unread, repeat(no_values))
    rows = [{**more, **row} for more, (_, row) in zip(padded, readable, strict=False)]
    for name in names.find_absent_names(rows, source.where):
        ranks.log_once(
            f"data       {source.where}: no row of the first has {name!r} (data.columns)"
        )
    try:
        renamed = [names.rename_row(row) for row in rows]
        layout = source.row_format.recognise(renamed, names)
    except BadRow as bad:
        number = readable[0][0]
        raise DataError(f"{source.describe_place(first[number][0], number)}: {bad}") from bad
    used = (*layout.columns, *layout.optional)
    names.check_used(used, renamed, source.where, layout.title)
    names = names.with_columns(dict(layout.renamed))
    used = tuple(names.columns.get(name, name) for name in used)
    existing = dict.fromkeys(name for row in rows for name in row)
    unused = tuple(name for name in existing if name not in {*used, *names.skipped})
    layout = replace(
        layout,
        renamed=tuple((name, names.columns[name]) for name in names.columns),
        unused=() if source.row_format.is_documents else unused,
    )
    _warn_of_unused_columns(source.where, layout, used, rows)
    for warning in layout.warnings:
        ranks.log_once(f"WARNING: {source.where}: {warning}")
    stored_columns = dict.fromkeys((*used, file_readers.RAW, file_readers.FAULT, *_PLACE_COLUMNS))
    columns = [name for name in stored_columns if name in source.rows.column_names]
    return replace(
        source,
        names=names,
        layout=layout,
        rows=source.rows.select_columns(columns),
        reported_columns=frozenset((*used, *existing, *names.skipped)),
    )
