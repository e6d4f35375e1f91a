"""Recognise the format of rows, and parse them: texts, prompts, conversations, token ids.

[Note: formats]
    text               a column of text
    prompt/completion  `prompt` and `completion`: texts, or lists of turns. Two texts next to a
                       text in `system` are turns too: only a chat template knows system texts
    conversation       `messages`, `conversations` or `conversation`: a list of turns, each with
                       `role` and `content` (and `tool_calls`) or, after ShareGPT, `from` and
                       `value`; or Alpaca's `instruction`, `input`, and `output` or `tool_calls`. A
                       list may be JSON text, as in a CSV file. Optional columns: `system`, `tools`
                       or the older `functions`, `chat_template_kwargs`
    already tokenised  `input_ids`, with `labels`, `completion_mask` or `assistant_masks`

Apart from columns that hold lists by their name, a text is a text, also if it is JSON.

Turns are normalised to the form that chat templates expect. A content in parts of text becomes one
text, the arguments of a tool call in JSON text become a mapping, a `function_call` becomes an entry
of `tool_calls`, and other names of a role become that role. A turn with a `weight` of 0, or `train:
false`, is context. Everything else in a turn is passed on unchanged. For other names than these,
see [Note: data.columns] in `columns.py`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from toolkit.data.examples import turns
from toolkit.data.examples.columns import suggest_example_columns
from toolkit.data.examples.prompt_checks import (
    refuse_earlier_turns,
    refuse_repeated_prompts,
    refuse_unused_answers,
)
from toolkit.data.samples.batch import IGNORED
from toolkit.data.sources.row_values import (
    BadRow,
    Row,
    describe_value,
    list_names,
    parse_json,
    parse_json_text,
    read_list,
    read_optional_text,
    read_text,
    refuse_value,
)

Format = Literal["text", "prompt_completion", "conversation", "tokenised", "preferences"]
ChatShape = Literal["turn_lists", "turn_texts", "messages", "sharegpt", "alpaca"]
Preferred = Literal["pairs", "answers"]  # see `pairs`
RowShape = ChatShape | Preferred | Literal["text", "pieces", "prompt_completion", "tokenised"]


class _Shape(NamedTuple):
    """The format, title and optional columns of rows with one value of `RowShape`."""

    format: Format
    title: str
    extras: tuple[str, ...] = ()  # optional columns


_MASKS = ("labels", "completion_mask", "assistant_masks")  # columns that select supervised tokens
CHAT_COLUMNS = ("system", "tools", "functions", "chat_template_kwargs")
_OF_ALPACA = ("input", "history", "tool_calls")
_ANSWERS = ("output", "tool_calls")
_SYSTEM_NAMES = ("system", "system_prompt", "system_message")  # the first that has a text is read
OF_A_TREE = ("parent_id", "role")  # columns of a message that answers another row's
_SHAPES: dict[RowShape, _Shape] = {
    "text": _Shape("text", "text"),
    "pieces": _Shape("text", "text files"),
    "prompt_completion": _Shape("prompt_completion", "prompts and completions", ("system",)),
    "turn_lists": _Shape("conversation", "prompts and completions as lists of turns", CHAT_COLUMNS),
    "turn_texts": _Shape("conversation", "prompts and completions as turns", CHAT_COLUMNS),
    "messages": _Shape("conversation", "conversations (turns with role and content)", CHAT_COLUMNS),
    "sharegpt": _Shape("conversation", "conversations (ShareGPT)", CHAT_COLUMNS),
    "alpaca": _Shape("conversation", "instructions (Alpaca)", (*CHAT_COLUMNS, *_OF_ALPACA)),
    "tokenised": _Shape("tokenised", "token ids", (*_MASKS, "attention_mask")),
    "pairs": _Shape("preferences", "pairs of answers", ("margin", *CHAT_COLUMNS)),
    "answers": _Shape("preferences", "answers with a label", CHAT_COLUMNS),
}


@dataclass(frozen=True)
class Text:
    """A text, or a part of a large document. The loss covers all of it."""

    text: str
    start: bool = True
    """True if a document starts with this text."""
    end: bool = True
    """True if a document ends with this text."""


@dataclass(frozen=True)
class PromptCompletion:
    """A text and its continuation, which are trained on without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Turns in the form that chat templates take, with at least one answer of the assistant."""

    messages: list[Row]
    """Turns with `role` (one of `turns.ROLES`), `content` and all other keys of the row. The
    content is text; it may be null or missing if there are `tool_calls`, each `{"function":
    {"name": text, "arguments": mapping}}`."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    supervised_from: int = 0
    """Number of turns at the beginning that are the prompt, whatever their role."""
    context: frozenset[int] = frozenset()
    """Indices of further turns that are not supervised."""

    @property
    def has_prompt(self) -> bool:
        """True if any turn is the user's or a tool's."""
        return any(turn["role"] in ("user", "tool") for turn in self.messages)


@dataclass(frozen=True)
class Tokens:
    """Token ids of a row that is already tokenised."""

    input_ids: list[int]
    labels: list[int] | None = None
    """Unshifted labels: the id of the token, or -100. None: all tokens are supervised."""


Example = Text | PromptCompletion | Conversation | Tokens


class Remark(NamedTuple):
    """A sentence for the data report that tells how some columns are read."""

    text: str
    """The decision; `{}` is replaced by the names of the columns."""
    columns: tuple[str, ...] = ()
    """Standard names of the columns."""


@dataclass(frozen=True)
class Layout:
    """The format of a source, and the columns from which its rows are read. See [Note: formats].

    It is recognised once from the first rows, and used to parse every row.
    """

    shape: RowShape
    columns: tuple[str, ...]
    """Standard names of the columns that every row must have, the main one first."""
    whole: bool = False
    """True if rows are documents to pretrain on, which may be empty."""
    unused: tuple[str, ...] = ()
    """Other columns of the first rows."""
    prompt: tuple[str, ...] = ()
    """Preferences: standard names of the columns of the prompt."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(standard name, name in the rows) of columns whose names differ."""
    json_turns: tuple[str, ...] = ()
    """Columns whose values are JSON text of turns in all of the first rows."""
    dialogue: bool = False
    """True if texts are dialogues with "Human:" and "Assistant:"."""
    system: bool = False
    """Preferences: true if a column has system texts."""
    chat: bool = False
    """Preferences: true if a prompt and answers that are texts become turns."""
    plain: bool = False
    """Preferences: true if all first rows are plain texts."""
    mostly_prompts: bool = False
    """True if at least half of the first rows have a `prompt`."""
    remarks: tuple["Remark", ...] = ()
    """Decisions that the report lists."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """Sentences about the first rows, which are logged once when the source is loaded."""

    @property
    def format(self) -> Format:
        """Type of the examples that rows become, such as `conversation`."""
        return _SHAPES[self.shape].format

    @property
    def title(self) -> str:
        """Plural description of the rows for messages, such as "pairs of answers"."""
        return _SHAPES[self.shape].title

    @property
    def optional(self) -> tuple[str, ...]:
        """Standard names of the columns that a row may have in addition to `columns`."""
        if self.whole:
            return ()
        extras = _SHAPES[self.shape].extras
        # Plain texts have no chat template, which alone uses tools.
        if self.plain:
            extras = tuple(name for name in extras if name in ("margin", "system"))
        return (*self.prompt, *extras)

    @property
    def uses_template(self) -> bool:
        """True if a chat template renders the rows."""
        return self.format == "conversation" or (self.format == "preferences" and not self.plain)

    def __str__(self) -> str:
        def join(names: Sequence[str]) -> str:
            return " and ".join(repr(renamed.get(name, name)) for name in names)

        renamed = dict(self.renamed)
        remarks = "".join(f"; {text.format(join(names))}" for text, names in self.remarks)
        unused = f"; not used: {list_names(self.unused)}" if self.unused else ""
        return f"{self.title}, in {join(self.columns)}{remarks}{unused}"


PIECE_LAYOUT = Layout("pieces", ("text", "start", "end"))  # of text files


def recognise_layout(
    rows: Sequence[Row], *, text: bool = False, names: Mapping[str, str] | None = None
) -> Layout:
    """Recognise the layout of a source: the one that most of its first rows have.

    If a row fits several formats, the first of these wins: `input_ids`, a `text` that
    `data.columns` names, turns, prompt and completion, Alpaca, text.

    Args:
        rows: first rows of the source, with standard names; at least one.
        text: `data.columns` maps the column `text`.
        names: standard name -> name in the file, of columns that `data.columns` maps.

    Raises:
        BadRow: the rows have no known format, or reading them would lose a part of the prompt or
            of the answer; see [Note: lost prompts] in `prompt_checks.py`.
    """
    if all(name in row for row in rows for name in (*OF_A_TREE, "text")):
        raise BadRow(
            "expected conversations, got single messages of a tree (parent_id, role and 'text', as "
            "in oasst1); write each path from a root to a leaf as one row of 'messages', or skip "
            "parent_id (data.columns) to train on each 'text'",
            "tree of messages",
        )
    layouts = Counter(layout for row in rows if (layout := _recognise_row(row, text)) is not None)
    if layouts:
        layout = _add_system_column(layouts.most_common(1)[0][0], rows)
        _refuse_lost_parts(layout, rows, names or {})
        return layout
    if all(name in row for row in rows for name in ("chosen", "rejected")):
        raise BadRow(
            f"expected examples, got pairs of answers ({list_names(rows[0])}). `toolkit prefer` "
            "trains "
            "on both; data.columns {completion: chosen} trains on the chosen ones alone",
            "pairs of answers",
        )
    raise BadRow(
        f"expected the columns of a format, got {list_names(rows[0])}. Known formats: text "
        "('text'); prompts and completions ('prompt' and 'completion'); conversations ('messages' "
        "or 'conversations', or Alpaca's 'instruction' and 'output'); token ids ('input_ids', with "
        f"'labels', 'completion_mask' or 'assistant_masks'). {suggest_example_columns(rows)}",
        "unknown format",
    )


def _refuse_lost_parts(layout: Layout, rows: Sequence[Row], names: Mapping[str, str]) -> None:
    """Raise BadRow if completions repeat their prompts, or if turns or answers would not be used.

    Args:
        layout: the layout of the rows.
        rows: the first rows of the source, with standard names.
        names: standard name -> name in the file, of columns that `data.columns` maps.
    """
    if layout.shape in ("prompt_completion", "turn_texts"):
        completion = names.get("completion", "completion")
        advice = (
            "write it without the prompt, or set data.columns "
            f"{{text: {completion}}} to train on the prompt too"
        )
        refuse_repeated_prompts(rows, ("completion",), advice)
        refuse_earlier_turns(rows, names, layout.columns, output="completion")
    elif layout.columns[0] in turns.TURN_COLUMNS:
        refuse_unused_answers(rows, names, layout.columns[0])


SYSTEM_REMARK = Remark("system texts in {}", ("system",))


def _add_system_column(layout: Layout, rows: Sequence[Row]) -> Layout:
    """Return the layout with the column of system texts, if the rows have such a column.

    Plain prompts and completions with system texts become conversations. Layouts of texts and token
    ids are returned unchanged.
    """
    name, some = find_system_column(rows)
    if name is None or layout.format not in ("conversation", "prompt_completion"):
        return layout
    if layout.shape == "prompt_completion" and some:
        layout = replace(layout, shape="turn_texts")
    renamed = () if name == "system" else (("system", name),)
    return replace(layout, renamed=renamed, remarks=(SYSTEM_REMARK,) if some else ())


def find_system_column(rows: Sequence[Row]) -> tuple[str | None, bool]:
    """Find the column of system texts.

    Returns:
        (name of the column, True if any row has a text in it). The name is None if there is no
        such column.
    """
    for name in _SYSTEM_NAMES:
        if any(has_text(row, name) for row in rows):
            return name, True
    return next((name for name in _SYSTEM_NAMES if any(name in row for row in rows)), None), False


def refuse_system_text(row: Row) -> None:
    """Raise BadRow if a row that is read as plain text has a `system` that is not blank."""
    if read_optional_text(row, "system").strip():
        raise BadRow(
            "expected no text in 'system', since the first rows have none and are read as plain "
            "text, got one. Put a row with a system text first, so that all rows become turns, or "
            "set data.columns {system: null}",
            "system text that the first rows do not have",
        )


def has_text(row: Row, name: str) -> bool:
    """Return True if a column contains text that is not blank."""
    return isinstance(value := row.get(name), str) and bool(value.strip())


def recognise_documents(rows: Sequence[Row], *, text: bool = False) -> Layout:
    """Return the layout of documents to pretrain on: token ids if any row has them, else text.

    Args:
        rows: first rows of the source, with standard names; at least one.
        text: `data.columns` maps the column `text`. It affects only the error.

    Raises:
        BadRow: the rows have neither `input_ids` nor `text`.
    """
    if any("input_ids" in row for row in rows):
        return Layout("tokenised", ("input_ids",), whole=True)
    if any("text" in row for row in rows):
        return Layout("text", ("text",), whole=True)
    advice = "set data.columns to {text: NAME} of the one that holds the text"
    if (other := _recognise_row(rows[0], text)) is not None:
        advice = f"these are {other}: recipes/finetune.py trains on them, pretraining only on text"
    raise BadRow(
        f"expected a column 'text' or 'input_ids', got {list_names(rows[0])}; {advice}",
        "unknown format",
    )


def list_standard_columns() -> tuple[str, ...]:
    """List the standard names of the columns of documents and examples."""
    extras = (name for shape in _SHAPES.values() for name in shape.extras if name != "margin")
    needed = ("input_ids", *turns.TURN_COLUMNS, "prompt", "completion", "instruction", "output")
    return tuple(dict.fromkeys(("text", *needed, *extras)))


def list_candidate_columns() -> tuple[str, ...]:
    """List all column names that the recognition of documents and examples looks up."""
    return (*list_standard_columns(), *OF_A_TREE, *_SYSTEM_NAMES)


def _recognise_row(row: Row, text: bool) -> Layout | None:
    """Return the layout of a single row, judged by its columns; None if its format is not known.

    If `text` is True, a column `text` wins over turns and prompts.
    """
    if "input_ids" in row:
        masks = [name for name in _MASKS if row.get(name) is not None]
        return Layout("tokenised", ("input_ids", *masks))
    if text and "text" in row:
        return Layout("text", ("text",))
    if column := next((c for c in turns.TURN_COLUMNS if c in row), None):
        return Layout(_recognise_turn_style(row[column], column), (column,))
    if "prompt" in row and "completion" in row:
        lists = any(isinstance(row[name], list) for name in ("prompt", "completion"))
        return Layout("turn_lists" if lists else "prompt_completion", ("prompt", "completion"))
    if "instruction" in row and (answer := next((n for n in _ANSWERS if n in row), None)):
        return Layout("alpaca", ("instruction", answer))
    return Layout("text", ("text",)) if "text" in row else None


def _recognise_turn_style(value: Any, column: str) -> RowShape:
    """Return `sharegpt` if turns have `from` and no `role`, else `messages`.

    Turns that have neither key are `sharegpt` if the column is `conversations`.
    """
    try:
        value = parse_json(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        value = None  # reported when the row is parsed
    values = value if isinstance(value, list) else []
    keys = {key for turn in values if isinstance(turn, dict) for key in turn}
    sharegpt = "role" not in keys and ("from" in keys or column == "conversations")
    return "sharegpt" if sharegpt else "messages"


def parse_example(row: Row, layout: Layout) -> Example:
    """Convert a row to an example, as the layout of its source says.

    Raises:
        BadRow: a required column is missing, or a value is invalid.
    """
    # A row without the mask that other rows have would be supervised completely.
    empty = [name for name in _MASKS if name in row and row[name] is None]
    if missing := [name for name in layout.columns if name not in row or name in empty]:
        raise BadRow(
            f"expected a column {missing[0]!r} ({layout}), got {list_names(row)}", "missing column"
        )
    try:
        return _parse_by_shape(row, layout)
    except RecursionError as error:
        raise BadRow("expected plain values, got lists in lists without end", "nesting") from error


def _parse_by_shape(row: Row, layout: Layout) -> Example:
    """Convert a row that has all required columns to an example.

    The result is a Text, Tokens, PromptCompletion or Conversation, depending on `layout.shape`.
    Raises BadRow if a value is invalid.
    """
    column = layout.columns[0]
    match layout.shape:
        case "text" | "pieces":
            text = read_text(row[column], column, nul=layout.whole)
            if layout.shape == "pieces":
                return Text(text, row["start"], row["end"])
            if not layout.whole and not text.strip():
                refuse_value(text, column, "text", "empty text")
            return Text(text)
        case "tokenised" if layout.whole:
            ids = parse_json_text(row[column], column)
            if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
                refuse_value(ids, column, "a list of token ids")
            return Tokens(ids)
        case "tokenised":
            return Tokens(*_read_ids_and_labels(row))
        case "prompt_completion":
            refuse_system_text(row)
            prompt, completion = (read_text(row[name], name) for name in layout.columns)
            if not completion.strip():
                refuse_value(completion, "completion", "text", "empty completion")
            return PromptCompletion(prompt, completion)
        case "turn_lists" | "turn_texts":
            prompt, completion = (row[name] for name in layout.columns)
            return _make_conversation(row, *_join_prompt_and_answer(prompt, completion))
        case "messages":
            return _make_conversation(row, turns.convert_messages(row[column], column))
        case "sharegpt":
            return _make_conversation(row, turns.convert_sharegpt(row[column], column))
        case "alpaca":
            return _make_conversation(row, turns.convert_alpaca(row))
    raise AssertionError(layout.shape)


def _join_prompt_and_answer(prompt: Any, completion: Any) -> tuple[list[Row], int]:
    """Join a prompt and a completion, each text or turns, to one list of messages.

    Returns:
        (messages, number of messages of the prompt).

    Raises:
        BadRow: the completion is blank, or a value is neither text nor a list of turns.
    """
    if isinstance(completion, str):
        text = read_text(completion, "completion")
        if not text.strip():
            refuse_value(completion, "completion", "text", "empty completion")
        answer = [{"role": "assistant", "content": text}]
    elif isinstance(completion, list):
        answer = turns.read_turns(completion, "completion")
    else:
        refuse_value(completion, "completion", "text or a list of turns")
    if isinstance(prompt, str):
        before = turns.find_missing_prompt_turns(read_text(prompt, "prompt"), answer)
        return [*before, *answer], len(before)
    if not isinstance(prompt, list):
        refuse_value(prompt, "prompt", "text or a list of turns")
    messages = turns.read_turns(prompt, "prompt")
    return [*turns.find_missing_prompt_turns(messages, answer), *answer], len(messages)


def _make_conversation(row: Row, messages: list[Row], supervised_from: int = 0) -> Conversation:
    """Build a conversation from messages and from the system text, tools and arguments of a row.

    Args:
        row: the row.
        messages: normalised messages.
        supervised_from: number of messages at the beginning that are the prompt.

    Raises:
        BadRow: a turn of the assistant is empty, or there is no turn to train on.
    """
    turns_before = len(messages)
    messages = turns.add_system(row, messages)
    if supervised_from:
        supervised_from += len(messages) - turns_before
    for i, turn in enumerate(messages):
        has_answer = turn.get("tool_calls") or (turn.get("content") or "").strip()
        if turn["role"] == "assistant" and not has_answer:
            content = describe_value(turn.get("content"))
            raise BadRow(
                f"expected an answer in turn {i} (assistant), got content {content} and no "
                "tool_calls",
                "empty assistant turn",
            )
    context = frozenset(i for i, turn in enumerate(messages) if turn.pop("weight", 1) == 0)
    candidates = [turn["role"] for turn in messages[supervised_from:]]
    if not any(
        turn["role"] == "assistant" and i >= supervised_from and i not in context
        for i, turn in enumerate(messages)
    ):
        roles = f"{', '.join(candidates)}{' in the completion' if supervised_from else ''}"
        weights = f", and a weight of 0 for turns {sorted(context)}" if context else ""
        raise BadRow(
            f"expected a turn of the assistant to train on, got the roles {roles}{weights}",
            "no assistant turn",
        )
    tools, kwargs = turns.read_tools(row), turns.read_template_kwargs(row)
    return Conversation(messages, tools, kwargs, supervised_from, context)


def _read_ids_and_labels(row: Row) -> tuple[list[int], list[int] | None]:
    """Read the token ids of a row and their unshifted labels.

    A token is supervised if every column of `_MASKS` in the row selects it. Tokens that
    `attention_mask` excludes are padding and are removed.

    Returns:
        (token ids, labels). `labels` is None if no column of `_MASKS` is in the row; then all
        tokens are supervised.

    Raises:
        BadRow: a column is invalid, or no token is supervised.
    """
    ids = _read_integers(row["input_ids"], "input_ids")
    if not ids:
        raise BadRow("expected token ids in 'input_ids', got an empty list", "empty text")
    if (low := min(ids)) < 0:
        raise BadRow(f"expected token ids from 0 up, got {low}", "negative token id")
    mask_columns = [name for name in (*_MASKS, "attention_mask") if row.get(name) is not None]
    masks = {name: _read_mask(row[name], name, ids) for name in mask_columns}
    attended = masks.pop("attention_mask", [True] * len(ids))
    supervised = [all(flags) for flags in zip(attended, *masks.values(), strict=True)]
    if not any(supervised):
        raise BadRow(
            f"expected a supervised token, got {' and '.join(mask_columns)} that leave none",
            "no supervised token",
        )
    labels = [token if flag else IGNORED for token, flag in zip(ids, supervised, strict=True)]
    places = [i for i, flag in enumerate(attended) if flag]
    return [ids[i] for i in places], [labels[i] for i in places] if masks else None


def _read_mask(value: Any, name: str, ids: list[int]) -> list[bool]:
    """Convert the labels or the mask in column `name` to one boolean per token of `ids`.

    True means that the token is supervised, or attended in `attention_mask`.

    Raises:
        BadRow: the lengths differ, a mask has values other than 0 and 1, or a label is neither -100
            nor the id of its token.
    """
    values = _read_integers(value, name)
    if len(values) != len(ids):
        message = f"expected as many {name} as input_ids ({len(ids)}), got {len(values)}"
        raise BadRow(message, "lengths that differ")
    if name != "labels":
        if other := set(values) - {0, 1}:
            raise BadRow(f"expected 0 and 1 in {name!r}, got {min(other)}", "wrong mask")
        return [bool(value) for value in values]
    for i, (label, token) in enumerate(zip(values, ids, strict=True)):
        if label not in (IGNORED, token):
            raise BadRow(
                f"expected 'labels[{i}]' to be its token's id {token} or {IGNORED}, got {label}; "
                "each label belongs at the place of its token, and the loss shifts them",
                "labels that are not the tokens",
            )
    return [label != IGNORED for label in values]


def _read_integers(value: Any, where: str) -> list[int]:
    """Read a list of integers from column `where`; raise BadRow for any other value.

    Booleans are allowed, except in `input_ids` and `labels`.
    """
    values = read_list(value, where)
    allowed = {int} if where in ("input_ids", "labels") else {int, bool}
    if not set(map(type, values)) <= allowed:
        i = next(i for i, v in enumerate(values) if type(v) not in allowed)
        refuse_value(values[i], f"{where}[{i}]", "an integer")
    return values
