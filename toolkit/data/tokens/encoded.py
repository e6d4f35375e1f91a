"""Encoded rows: token ids with the tokens that the loss covers, and counts of them by source."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np

from toolkit.data.chat import BLOCK_NOTES
from toolkit.data.sources.row_values import BadRow
from toolkit.data.tokens.text_ids import Span

_PLACES = 3  # rows that are reported for each reason

# Notes on encoded rows, which are counted by their text and shown in the data report.
LATE_COLUMN = "rows with a column {!r}, which the first rows do not have and nothing uses"
EMPTY_PROMPT = "examples whose prompt is empty"
OTHER_PROMPT = "pairs whose prompts end in other tokens"
WITH_MARGIN = "pairs with a margin, which preference.loss_type reward asks for"
LABELS = {True: "answers with the label true", False: "answers with the label false"}
SAME_PROMPT = (
    "answers whose KL reference point is another answer to the same prompt, because all rows have "
    "one prompt; add rows with other prompts"
)
WARNINGS = (SAME_PROMPT, *BLOCK_NOTES)
"""Beginnings of the notes that the report shows as warnings."""


class FatalRow(BadRow):
    """A row that always ends the run, even with `data.on_bad_row: skip`."""


@dataclass(frozen=True)
class EncodedExample:
    """The token ids of one row, and which of them the loss covers.

    Args:
        input_ids: int32 [n]; n is at most `data.sequence_length`, except for plain text.
        spans: ranges [begin, end) of supervised tokens, in order and disjoint.
        cut_off: number of tokens that were cut off at the end and are not in `input_ids`.
        notes: note for the data report -> number of times it applies to this row.
        piece: maximum length, in tokens, of the pieces into which packing cuts the row; None if it
            stays complete.
        second: for a pair, the position at which the tokens of the rejected side begin.
        columns: values of the columns that the row format declares, by name; None for no value.
        trains_second: False if the second side of a pair gets no gradient and serves only for
            comparison.
    """

    input_ids: np.ndarray
    spans: list[Span]
    cut_off: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    piece: int | None = None
    second: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    trains_second: bool = True

    @property
    def supervised(self) -> int:
        """Number of tokens that the loss covers.

        A token at the beginning of a piece (see `piece`) is not counted, because nothing predicts
        it. For a pair, the second side counts only if `trains_second` is true.
        """
        if self.second is not None:
            # Encoding leaves the first token of either side out of the spans.
            spans = [s for s in self.spans if self.trains_second or s[0] < self.second]
            return sum(end - begin for begin, end in spans)
        piece = self.piece or max(1, len(self.input_ids))
        firsts = [-(-end // piece) - -(-begin // piece) for begin, end in self.spans]
        return sum(end - begin for begin, end in self.spans) - sum(firsts)


EncodedRow = EncodedExample | BadRow
"""A row as token ids, or the reason why it is skipped."""


@dataclass
class Counts:
    """How many rows of a source were used, truncated and skipped.

    `rows` is the sum of `kept` and of all values of `dropped`.
    """

    rows: int = 0
    """Rows read."""
    kept: int = 0
    """Rows that became examples."""
    truncated: int = 0
    """Examples whose end was cut off."""
    cut_off: int = 0
    """Tokens that were cut off, which `tokens` does not include."""
    tokens: int = 0
    """Tokens of all examples."""
    supervised: int = 0
    """Tokens of all examples that the loss covers."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> number of rows that were skipped for it."""
    places: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> place and fault of the first rows that were skipped for it."""
    notes: dict[str, int] = field(default_factory=dict)
    """Note -> number of times it applies."""

    def add(self, encoded: EncodedRow) -> None:
        """Add one row: an example, or the BadRow for which it is skipped."""
        self.rows += 1
        if isinstance(encoded, BadRow):
            self.dropped[encoded.reason] = self.dropped.get(encoded.reason, 0) + 1
            places = self.places.setdefault(encoded.reason, [])
            places += [str(encoded)][: _PLACES - len(places)]
            return
        self.kept += 1
        self.truncated += bool(encoded.cut_off)
        self.cut_off += encoded.cut_off
        self.tokens += len(encoded.input_ids)
        self.supervised += encoded.supervised
        for note, count in encoded.notes.items():
            self.notes[note] = self.notes.get(note, 0) + count


@dataclass
class EncodedSource:
    """A source as token ids; `name`, `weight` and `max_repeats` are those of its `SourceConfig`.

    `tokens` has a row for each example, in the order of the source, with the columns

        input_ids   list<int32>
        spans       list<int32>: begin, end, begin, end ... of the supervised tokens
        row         int64: number of the row in the source
        second      int32, only for pairs: the position at which the rejected side begins

    and those that the row format declares. For documents to pretrain on, it has a row for every row
    of the source, and only the column `input_ids`, because all tokens are supervised.
    """

    name: str
    tokens: datasets.Dataset
    counts: Counts = field(default_factory=Counts)
    weight: float | None = None
    max_repeats: float | None = None
    format: str = "examples"
    """Description of the row format, for the report."""
