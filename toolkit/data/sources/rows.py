"""Sources: which rows a config names, in which format, and where each of them stands."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, Literal, TypeAlias

import datasets

from toolkit.config.settings import DataConfig, SourceConfig
from toolkit.data.examples.recognise import (
    Example,
    Layout,
    document_layout,
    example_of,
    known_columns,
    recognise,
)
from toolkit.data.sources import instructions
from toolkit.data.sources.columns import (
    FILE,
    ROW,
    RowDataset,
    as_bytes,
    as_data_error,
    plain,
    read_files,
    read_named,
    rows_in,
    stream_files,
)
from toolkit.data.sources.files import (
    What,
    configured,
    find_files,
    kind_of,
    named_files,
    stdlib_files,
)
from toolkit.data.sources.lines import decoded, read_lines
from toolkit.data.sources.row_values import BadRow
from toolkit.data.sources.text_files import text_rows
from toolkit.errors import DataError

RowPlace: TypeAlias = int | dict[str, Any] | tuple[dict[str, Any], int]
"""A row of a source: its index, the stored row, or the latter and its number in a pass."""

LOOK_AT = 100
"""First rows of a source that its format is recognised by."""


@dataclass(frozen=True)
class DataSource:
    """Rows of one format, as they are stored.

    Attributes:
        name: what reports and metrics call it.
        where: the setting and the first file, for messages.
        rows: what is stored; `row` makes plain columns of one. A stream has a shard a file.
        layout: the format, and which columns hold what.
        weight: see `SourceConfig.weight`.
        max_repeats: see `SourceConfig.max_repeats`.
        files: the files, absolute, where it was made of files.
        firsts: the index of each file's first row, where rows are stored one file after another
            and do not say themselves where they come from.
        raw: whether rows are bytes; see [Note: raw rows] in `lines.py`.
    """

    name: str
    where: str
    rows: RowDataset
    layout: Layout
    weight: float | None = None
    max_repeats: float | None = None
    files: tuple[str, ...] = ()
    firsts: tuple[int, ...] = ()
    raw: bool = False

    def row(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a stored row.

        Raises:
            BadRow: it is not UTF-8, not JSON, no mapping, or too long.
        """
        return decoded(stored) if self.raw else plain(stored)

    def example(self, stored: dict[str, Any]) -> Example:
        """Return what is to be learned of a stored row.

        Raises:
            BadRow: see `row` and `recognise.example_of`.
        """
        return example_of(self.row(stored), self.layout)

    def place(self, at: RowPlace) -> str:
        """Return where a row stands: `data/a.jsonl line 7`, `b.parquet row 12 (counted from 0)`.

        A stored row tells it exactly where it comes from files but Parquet and Arrow that were read
        before the run; of others its index, or its number in a pass, is needed.
        """
        at, number = at if isinstance(at, tuple) else (at, None)
        if isinstance(at, int) and isinstance(self.rows, datasets.Dataset):
            at = self.rows[at] if self.raw or FILE in self.rows.column_names else at
        if isinstance(at, dict):
            if self.raw:
                return f"{self.files[at['file']]} {at['place']}"
            if FILE in at:
                what = "piece" if self.layout.shape == "pieces" else "row"
                return f"{self.files[at[FILE]]} {what} {at[ROW]} (counted from 0)"
            if number is None:
                return f"{self.where}, a row"
            return f"{self.where} row {number} of a pass (counted from 0)"
        if self.firsts:
            file = bisect_right(self.firsts, at) - 1
            return f"{self.files[file]} row {at - self.firsts[file]} (counted from 0)"
        return f"{self.where} row {at} (counted from 0)"

    def refusal(self, at: RowPlace, bad: BadRow) -> DataError:
        """Return the error that ends the run for a bad row."""
        return DataError(
            f"{self.place(at)}: {bad}. Repair or remove it, or set data.on_bad_row: skip"
        )


def load_sources(
    cfg: DataConfig,
    *,
    what: What = "train",
    builtin: Literal["instructions", "text"] | None = None,
    documents: bool = False,
) -> list[DataSource]:
    """Return the sources that `cfg` names to train on or to evaluate on.

    Files are JSON lines, JSON, CSV, Parquet, Arrow, or text (every other ending; one file is one
    document); a data set is a folder of `save_to_disk`, or an id on the Hub. Each entry of
    `eval_files` is a source of its own. With `cfg.streaming` the rows to train on are streams.
    Rows are read once and cached by `datasets`; nothing is tokenised.

    Args:
        cfg: what to read.
        what: `train` or `eval`.
        builtin: what to train on where nothing is named: pairs of instruction and answer made of
            Python's standard library, or its text. None: nothing is named, no source.
        documents: rows are text or token ids, whatever other columns they have, and are learned
            whole: pretraining.

    Raises:
        DataError: a pattern matches nothing, kinds are mixed, a file cannot be read, there is no
            row, or the first rows have no known format (with those of the first one).
    """
    streaming = cfg.streaming and what == "train"
    configs = configured(cfg, what)
    if not configs and what == "train" and builtin is not None:
        return [_builtin(builtin, streaming, documents)]
    return [_source(source, setting, cfg, streaming, documents) for setting, source in configs]


def examples(source: DataSource) -> Iterator[tuple[int, dict[str, Any], Example | BadRow]]:
    """Yield (index, stored row, its example or what is wrong with it) in order."""
    for index, stored in enumerate(source.rows):
        try:
            yield index, stored, source.example(stored)
        except BadRow as bad:
            yield index, stored, bad


def _builtin(kind: Literal["instructions", "text"], streaming: bool, documents: bool) -> DataSource:
    if kind == "text":
        where = "the built-in text (Python's standard library)"
        files = stdlib_files()
        rows = text_rows(files, where, streaming=streaming)
        return DataSource("stdlib", where, rows, _pieces(documents), files=tuple(map(str, files)))
    where = "the built-in instructions (Python's standard library)"
    pairs = instructions.pairs()
    stored = pairs.to_iterable_dataset() if streaming else pairs
    return DataSource("stdlib-instructions", where, stored, Layout("messages", ("messages",)))


def _pieces(documents: bool) -> Layout:
    return Layout("pieces", ("text", "start", "end"), whole=documents)


def _source(
    source: SourceConfig, setting: str, cfg: DataConfig, streaming: bool, documents: bool
) -> DataSource:
    """Return a source, recognised; it is put together in the order of what is known of it."""
    parts: dict[str, Any] = {
        "name": str(source.name),
        "weight": source.weight,
        "max_repeats": source.max_repeats,
    }
    known = known_columns(cfg.text_column)
    if source.dataset_name:
        where = f"{setting.rpartition('.')[0]}.dataset_name {source.dataset_name}"
        rows = as_bytes(read_named(source, where, streaming=streaming), known)
        return _recognised(cfg, documents, where=where, rows=rows, **parts)
    files = find_files(source.files, setting)
    kind = kind_of(files, setting)
    parts["where"] = where = f"{setting} ({named_files(files)})"
    parts["files"] = tuple(map(str, files))
    if kind == "text":
        rows = text_rows(files, where, streaming=streaming)
        return DataSource(rows=rows, layout=_pieces(documents), **parts)
    if not any(f.stat().st_size for f in files):
        raise DataError(f"{where}: expected rows, but every file is empty")
    if kind in ("json", "csv"):
        stored = read_lines(files, kind, where, streaming=streaming)
        return _recognised(cfg, documents, rows=stored, raw=True, **parts)
    if streaming:
        rows = stream_files(files, kind, where, known)
        return _recognised(cfg, documents, rows=rows, **parts)
    rows = as_bytes(read_files(files, kind, where, known), known)
    firsts = accumulate((rows_in(file, kind) for file in files[:-1]), initial=0)
    return _recognised(cfg, documents, rows=rows, firsts=tuple(firsts), **parts)


def _recognised(cfg: DataConfig, documents: bool, **parts: Any) -> DataSource:
    """Return the source made of `parts`, with the layout that its first rows have."""
    source = DataSource(layout=Layout("text", ()), **parts)
    first: list[tuple[dict[str, Any], dict[str, Any] | BadRow]] = []
    try:
        for stored in islice(source.rows, LOOK_AT):
            try:
                first.append((stored, source.row(stored)))
            except BadRow as bad:
                first.append((stored, bad))
    except Exception as error:
        raise as_data_error(error, source.where) from error
    if not first:
        raise DataError(f"{source.where}: expected examples, found no row")
    readable = [(stored, row) for stored, row in first if isinstance(row, dict)]
    if not readable:
        stored, wrong = first[0]
        raise DataError(
            f"{source.place(_at(source, 0, stored))}: {wrong}, and none of the first {len(first)} "
            "rows can be read. Is this the right file?"
        )
    layout_of = document_layout if documents else recognise
    try:
        layout = layout_of([row for _, row in readable], cfg.text_column)
    except BadRow as bad:
        stored = readable[0][0]
        index = next(i for i, (other, _) in enumerate(first) if other is stored)
        raise DataError(f"{source.place(_at(source, index, stored))}: {bad}") from bad
    source = replace(source, layout=layout)
    if source.raw:
        return source
    wanted = {*layout.columns, *layout.optional, FILE, ROW}
    columns = [name for name in source.rows.column_names or [] if name in wanted]
    return replace(source, rows=source.rows.select_columns(columns))


def _at(source: DataSource, index: int, stored: dict[str, Any]) -> int | dict[str, Any]:
    """Return what `DataSource.place` tells the most of."""
    return stored if source.raw or FILE in stored else index
