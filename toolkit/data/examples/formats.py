"""The kinds of rows that runs learn from: how each recognises a source and reads a row of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit.config.settings import Learned
from toolkit.data.examples import pairs, preferences, recognise
from toolkit.data.examples.columns import Names
from toolkit.data.examples.recognise import Example, Layout
from toolkit.data.sources.row_values import Row

Parsed = Example | pairs.Pair | pairs.Answer


@dataclass(frozen=True)
class RowFormat:
    """One kind of rows.

    `recognise` decides once for a source, from its first rows, which columns mean what. `parse`
    reads each row by that layout.
    """

    recognise: Callable[[Sequence[Row], Names], Layout]
    parse: Callable[[Row, Layout], Parsed]
    columns: tuple[str, ...]  # standard names, which data.columns may map
    candidates: tuple[str, ...]  # columns that `recognise` looks at, under any name it knows


def _documents(rows: Sequence[Row], names: Names) -> Layout:
    return recognise.document_layout(rows, text="text" in names.columns)


def _examples(rows: Sequence[Row], names: Names) -> Layout:
    return recognise.recognise(rows, text="text" in names.columns)


_STANDARD, _CANDIDATES = recognise.standard_columns(), recognise.read_columns()
_PREFERENCES = (*_STANDARD, *preferences.SIDES, *preferences.COMPARED, "label", "margin")
_LOOKED_AT = (*_CANDIDATES, *preferences.read_columns(), "margin")

FORMATS: dict[Learned, RowFormat] = {
    "documents": RowFormat(_documents, recognise.example_of, _STANDARD, _CANDIDATES),
    "examples": RowFormat(_examples, recognise.example_of, _STANDARD, _CANDIDATES),
    "pairs": RowFormat(preferences.pair_layout, pairs.pair_of, _PREFERENCES, _LOOKED_AT),
    "answers": RowFormat(preferences.answer_layout, pairs.answer_of, _PREFERENCES, _LOOKED_AT),
}


def format_of(layout: Layout) -> RowFormat:
    """Return the format of rows with this layout."""
    if layout.shape in ("pairs", "answers"):
        return FORMATS[layout.shape]
    return FORMATS["examples"]
