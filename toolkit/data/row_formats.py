"""The row formats: how the rows of each kind of run become training targets.

A config class names its row format (`RunConfig.rows`), and `find_row_format` looks it up. All other
code asks the format for its properties and never compares names. To train on rows of another kind,
register a `RowFormat` and return its name from the property `rows` of your config class.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import datasets

from toolkit.config.data import DataConfig
from toolkit.data.examples import pairs, preferences, recognise
from toolkit.data.examples.columns import NameMapping
from toolkit.data.examples.recognise import Example, Layout
from toolkit.data.samples.columns import Column
from toolkit.data.sources import instructions
from toolkit.data.sources.row_values import Row
from toolkit.data.tokens.encoded import EncodedExample, EncodedRow
from toolkit.data.tokens.pair_rows import encode_pair
from toolkit.errors import ConfigError

Parsed = Any
"""What `RowFormat.parse` returns: an `Example`, a pair of them, or an object of your own."""

_SAMPLE_FIELDS = ("input_ids", "labels", "used", "position_ids", "sequences", "ends", "lengths")


def one_text(example: Example) -> Sequence[Example]:
    """Return `[example]`: the `RowFormat.texts` of formats that tokenise a row as one text."""
    return [example]


def take_only_example(
    example: Example, encoded: Sequence[EncodedExample], cfg: DataConfig
) -> EncodedRow:
    """Return `encoded[0]`: the `RowFormat.encode` of formats that tokenise a row as one text."""
    return encoded[0]


@dataclass(frozen=True, eq=False)
class RowFormat:
    """How rows of one kind are recognised, parsed and encoded, and which values reach the batches.

    Functions are called in this order: `recognise` once for each source, with its first rows; then
    for every row `parse`, `texts` and `encode`. They must be functions of a module, because they
    are pickled for worker processes.

    Args:
        name: the value of `RunConfig.rows` that selects this format.
        title: description for messages, in the plural.
        recognise: determines which columns mean what, from the first rows of a source. Raises
            BadRow if the rows have another format.
        parse: reads one row. Raises BadRow if it cannot be used.
        standard_names: names of columns that `data.columns` may map.
        candidate_names: further columns that `recognise` looks at.
        texts: lists the examples of a parsed row that are tokenised separately, such as the two
            sides of a pair.
        encode: joins the encoded texts of a parsed row into one row, with the values of `columns`.
            It is not called for a row with a text that cannot be encoded.
        columns: values that accompany each row into micro-batches. See [Note: columns] in
            `samples/columns.py`.
        sequences_per_row: 0 if the loss is computed from single tokens; 1 or 2 if it needs the
            positions of each row, or of both sides of a pair.
        is_chat: True if a chat template and end-of-turn tokens may apply.
        is_documents: True if rows are documents to pretrain on: every token is supervised, and a
            row may be empty.
        compares_rows: True if each row is encoded with the answer of another row, which gets no
            gradient; micro-batches then hold the two in separate halves (`Batch.halves`).
        reads_text_files: True if a plain text file can be a source.
        built_in_rows: returns rows and their layout to use if no source is configured; None: a
            source is required. Documents use text files instead.
    """

    name: str
    title: str
    recognise: Callable[[Sequence[Row], NameMapping], Layout]
    parse: Callable[[Row, Layout], Parsed]
    standard_names: tuple[str, ...]
    candidate_names: tuple[str, ...]
    texts: Callable[[Parsed], Sequence[Example]] = one_text
    encode: Callable[[Parsed, Sequence[EncodedExample], DataConfig], EncodedRow] = take_only_example
    columns: Mapping[str, Column] = field(default_factory=dict)
    sequences_per_row: int = 0
    is_chat: bool = True
    is_documents: bool = False
    compares_rows: bool = False
    reads_text_files: bool = True
    built_in_rows: Callable[[], tuple[datasets.Dataset, Layout]] | None = None

    def __post_init__(self) -> None:
        if reserved := [name for name in self.columns if name in _SAMPLE_FIELDS]:
            raise ConfigError(
                f"the row format {self.name} declares a column {reserved[0]!r}, which every sample "
                "has: expected another name"
            )

    def has_fixed_width(self, packing: str) -> bool:
        """Return True if all micro-batches have the same number of tokens per row.

        Then layers compile only once. The width varies if rows are padded (packing `none`), and in
        formats that compare rows, whose halves are as wide as their fullest row.
        """
        return packing != "none" and not self.compares_rows


def _recognise_documents(rows: Sequence[Row], names: NameMapping) -> Layout:
    """Recognise the layout of documents; the `RowFormat.recognise` of this format."""
    return recognise.recognise_documents(rows, text="text" in names.columns)


def _recognise_examples(rows: Sequence[Row], names: NameMapping) -> Layout:
    """Recognise the layout of examples; the `RowFormat.recognise` of this format."""
    return recognise.recognise_layout(rows, text="text" in names.columns, names=names.columns)


def _built_in_conversations() -> tuple[datasets.Dataset, Layout]:
    """Build or load the built-in conversations; return them with their layout."""
    return instructions.build_conversations(), Layout("messages", ("messages",))


def _built_in_pairs() -> tuple[datasets.Dataset, Layout]:
    """Build or load the built-in pairs of answers; return them with their layout."""
    return instructions.build_preferences(), Layout("pairs", preferences.SIDES, prompt=("prompt",))


def _list_sides(pair: pairs.Pair) -> Sequence[Example]:
    """Return both sides of a pair, the chosen one first."""
    return [pair.chosen, pair.rejected]


_STANDARD = recognise.list_standard_columns()
_CANDIDATES = recognise.list_candidate_columns()
_PREFERENCES = (*_STANDARD, *preferences.SIDES, *preferences.COMPARED, "label", "margin")
_PREFERENCE_CANDIDATES = (*_CANDIDATES, *preferences.list_candidate_columns(), "margin")
_REFERENCE = Column("float32", per="sequence", late=True)

DOCUMENTS = RowFormat(
    name="documents",
    title="documents",
    recognise=_recognise_documents,
    parse=recognise.parse_example,
    standard_names=_STANDARD,
    candidate_names=_CANDIDATES,
    is_chat=False,
    is_documents=True,
)
"""Texts or token ids to pretrain on."""

EXAMPLES = RowFormat(
    name="examples",
    title="examples",
    recognise=_recognise_examples,
    parse=recognise.parse_example,
    standard_names=_STANDARD,
    candidate_names=_CANDIDATES,
    built_in_rows=_built_in_conversations,
)
"""Conversations, prompts with completions, texts or token ids; some tokens are supervised."""

PAIRS = RowFormat(
    name="pairs",
    title="pairs of answers",
    recognise=preferences.recognise_pairs,
    parse=pairs.parse_pair,
    standard_names=_PREFERENCES,
    candidate_names=_PREFERENCE_CANDIDATES,
    texts=_list_sides,
    encode=encode_pair,
    columns={"margin": Column("float32", per="row"), "reference": _REFERENCE},
    sequences_per_row=2,
    reads_text_files=False,
    built_in_rows=_built_in_pairs,
)
"""Two answers to one prompt, of which the first is preferred.

`margin` is by how much a reward model should tell them apart; `reference` are the log-probabilities
of both answers by the reference model.
"""

ANSWERS = RowFormat(
    name="answers",
    title="answers with a label",
    recognise=preferences.recognise_answers,
    parse=pairs.parse_answer,
    standard_names=_PREFERENCES,
    candidate_names=_PREFERENCE_CANDIDATES,
    texts=_list_sides,
    encode=encode_pair,
    columns={"desirable": Column("bool", per="row"), "reference": _REFERENCE},
    sequences_per_row=2,
    compares_rows=True,
    reads_text_files=False,
)
"""Single answers with a label (`desirable`), each paired with the answer of another row."""

_FORMATS = {row_format.name: row_format for row_format in (DOCUMENTS, EXAMPLES, PAIRS, ANSWERS)}


def register_row_format(row_format: RowFormat) -> RowFormat:
    """Add a row format to those that a config class can name; return it unchanged.

    Raises:
        ConfigError: another row format has this name.
    """
    if _FORMATS.setdefault(row_format.name, row_format) is not row_format:
        raise ConfigError(f"expected a new name, there is a row format {row_format.name} already")
    return row_format


@functools.cache
def _examples_with_teacher(k: int) -> RowFormat:
    """Return the format of examples with a teacher's `k` most likely tokens at each position."""
    columns = {
        "teacher_ids": Column("int32", per="token", shape=(k,), late=True),
        "teacher_logps": Column("float32", per="token", shape=(k + 1,), late=True),
    }
    return replace(EXAMPLES, name=f"{EXAMPLES.name}+top{k}", columns=columns)


def find_row_format(name: str) -> RowFormat:
    """Look up a row format by its name.

    `examples+topK`, such as `examples+top8`, are examples with the K most likely tokens of a
    teacher at each position, and the log-probabilities of these and of all other tokens.

    Raises:
        ConfigError: no row format has this name; the message lists the known ones.
    """
    if match := re.fullmatch(r"examples\+top([0-9]+)", name):
        return _examples_with_teacher(int(match[1]))
    if name not in _FORMATS:
        raise ConfigError(
            f"expected one of the row formats {', '.join(_FORMATS)}, got {name!r}; call "
            "`register_row_format` before the data is prepared"
        )
    return _FORMATS[name]
