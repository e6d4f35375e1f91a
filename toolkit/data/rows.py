"""Sources of examples: which rows a config names, in which format, and where each of them stands.

Owns the way from a config to sources, and from a stored row to an example. Refuses to know
tokenizers and what a bad row does to the run: it says which one is bad, and why.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, Literal

import datasets

from toolkit.config import DataConfig, SourceConfig
from toolkit.data import instructions
from toolkit.data.columnar import (
    FILE,
    ROW,
    Rows,
    as_bytes,
    as_data_error,
    plain,
    read_files,
    read_named,
    rows_in,
    stream_files,
)
from toolkit.data.examples import PIECES, Example, Layout, example_of, known_columns, recognise
from toolkit.data.files import What, configured, find_files, kind_of, named_files, stdlib_files
from toolkit.data.raw_rows import decoded, read_raw
from toolkit.data.raw_rows import place as raw_place
from toolkit.data.row_values import BadRow
from toolkit.data.text_files import text_rows
from toolkit.errors import DataError

LOOK_AT = 100
"""First rows of a source that its format is recognised by."""


@dataclass(frozen=True)
class Source:
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
        raw: whether rows are bytes; see [Note: raw rows] in `toolkit/data/raw_rows.py`.
    """

    name: str
    where: str
    rows: Rows
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
            BadRow: see `row` and `examples.example_of`.
        """
        return example_of(self.row(stored), self.layout)

    def place(self, at: int | dict[str, Any]) -> str:
        """Return where a row stands: `data/a.jsonl line 7`, `b.parquet row 12 (counted from 0)`.

        Args:
            at: its index in `rows`, or the stored row. Only where rows say where they come from is
                the latter exact: raw ones, and those of streamed files.
        """
        if isinstance(at, dict):
            if self.raw:
                return raw_place(at, self.files)
            if FILE in at:
                return f"{self.files[at[FILE]]} row {at[ROW]} (counted from 0)"
            return f"{self.where}, a row"
        if self.raw and isinstance(self.rows, datasets.Dataset):
            return raw_place(self.rows[at], self.files)
        if self.firsts:
            file = bisect_right(self.firsts, at) - 1
            return f"{self.files[file]} row {at - self.firsts[file]} (counted from 0)"
        return f"{self.where} row {at} (counted from 0)"

    def refusal(self, at: int | dict[str, Any], bad: BadRow) -> DataError:
        """Return the error that ends the run for a bad row."""
        return DataError(
            f"{self.place(at)}: {bad}. Repair or remove it, or set data.on_bad_row: skip"
        )


def load_sources(
    cfg: DataConfig, *, what: What = "train", builtin: Literal["instructions", "text"] | None = None
) -> list[Source]:
    """Return the sources that `cfg` names to train on or to evaluate on.

    Files are JSON lines, JSON, CSV, Parquet, Arrow, or text (every other ending; a document is an
    example); a data set is a folder of `save_to_disk`, or an id on the Hub. Each entry of
    `eval_files` is a source of its own. With `cfg.streaming` the rows to train on are streams.
    Rows are read once and cached by `datasets`; nothing is tokenised.

    Args:
        cfg: what to read.
        what: `train` or `eval`.
        builtin: what to train on where nothing is named: pairs of instruction and answer made of
            Python's standard library, or its text. None: nothing is named, no source.

    Raises:
        DataError: a pattern matches nothing, kinds are mixed, a file cannot be read, there is no
            row, or the first rows have no known format (with those of the first one).
    """
    streaming = cfg.streaming and what == "train"
    named = configured(cfg, what)
    if not named and what == "train" and builtin is not None:
        return [_builtin(builtin, streaming)]
    return [_source(source, setting, cfg, streaming) for setting, source in named]


def examples(source: Source) -> Iterator[tuple[int, dict[str, Any], Example | BadRow]]:
    """Yield (index, stored row, its example or what is wrong with it) in order."""
    for index, stored in enumerate(source.rows):
        try:
            yield index, stored, source.example(stored)
        except BadRow as bad:
            yield index, stored, bad


def _builtin(kind: Literal["instructions", "text"], streaming: bool) -> Source:
    if kind == "text":
        where = "the built-in text (Python's standard library)"
        return Source(
            "stdlib", where, text_rows(stdlib_files(), where, streaming=streaming), PIECES
        )
    where = "the built-in instructions (Python's standard library)"
    rows = instructions.pairs()
    stored = rows.to_iterable_dataset() if streaming else rows
    return Source("stdlib-instructions", where, stored, Layout("messages", ("messages",)))


def _source(source: SourceConfig, setting: str, cfg: DataConfig, streaming: bool) -> Source:
    """Return a source, recognised; it is put together in the order of what is known of it."""
    settings: dict[str, Any] = {
        "name": str(source.name),
        "weight": source.weight,
        "max_repeats": source.max_repeats,
    }
    known = known_columns(cfg.text_column)
    if source.dataset_name:
        where = f"{setting.rpartition('.')[0]}.dataset_name {source.dataset_name}"
        rows = as_bytes(read_named(source, where, streaming=streaming), known)
        return _recognised(cfg, where=where, rows=rows, **settings)
    files = find_files(source.files, setting)
    kind = kind_of(files, setting)
    settings["where"] = where = f"{setting} ({named_files(files)})"
    if kind == "text":
        return Source(rows=text_rows(files, where, streaming=streaming), layout=PIECES, **settings)
    settings["files"] = tuple(map(str, files))
    if kind in ("json", "csv"):
        stored = read_raw(files, kind, where, streaming=streaming)
        return _recognised(cfg, rows=stored, raw=True, **settings)
    if streaming:
        return _recognised(cfg, rows=stream_files(files, kind, where, known), **settings)
    rows = as_bytes(read_files(files, kind, where, columns=known), known)
    firsts = accumulate((rows_in(file, kind) for file in files[:-1]), initial=0)
    return _recognised(cfg, rows=rows, firsts=tuple(firsts), **settings)


def _recognised(cfg: DataConfig, **parts: Any) -> Source:
    """Return the source made of `parts`, with the layout that its first rows have."""
    source = Source(layout=Layout("text", ()), **parts)
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
    try:
        layout = recognise([row for _, row in readable], cfg.text_column)
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


def _at(source: Source, index: int, stored: dict[str, Any]) -> int | dict[str, Any]:
    """Return what `Source.place` tells the most of."""
    return stored if source.raw or FILE in stored else index
