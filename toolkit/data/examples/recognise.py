"""Recognise a row's format and make an example of it: text, pair, conversation, tokens.

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

A content in parts of text becomes one text, arguments of a tool call in JSON text a mapping, a
`function_call` one of `tool_calls`, other names of a role that role, as templates expect them. A
turn with a `weight` of 0, or `train: false`, is context. All else in a turn is passed on as it
came. Other names than these: see [Note: data.columns] in `columns.py`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from toolkit.data.examples import turns
from toolkit.data.examples.columns import suggest_example_columns
from toolkit.data.samples.batch import IGNORED
from toolkit.data.sources.row_values import (
    BadRow,
    Row,
    describe_value,
    list_names,
    parse_json,
    parse_json_text,
    read_list,
    read_text,
    refuse_value,
)

Format = Literal["text", "prompt_completion", "conversation", "tokenised", "preferences"]
ChatShape = Literal["turn_lists", "turn_texts", "messages", "sharegpt", "alpaca"]
Preferred = Literal["pairs", "answers"]  # see `pairs`
RowShape = ChatShape | Preferred | Literal["text", "pieces", "prompt_completion", "tokenised"]


class _Shape(NamedTuple):
    format: Format
    stated: str
    extras: tuple[str, ...] = ()  # columns that are read where they are there


_MASKS = ("labels", "completion_mask", "assistant_masks")  # columns that say what is learned
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
    """A text to learn as it is; whether a document starts and ends with it: big ones are cut."""

    text: str
    start: bool = True
    end: bool = True


@dataclass(frozen=True)
class PromptCompletion:
    """A text and how it goes on; no chat template stands around them."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Turns as a chat template takes them, with a turn of the assistant that says something."""

    # Each with `role` (one of `turns.ROLES`) and `content` (text; null or missing only beside
    # `tool_calls`, `{"function": {"name": text, "arguments": mapping}}`), and all else of its row.
    messages: list[Row]
    tools: list[dict[str, Any]] | None = None  # JSON schemas
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    supervised_from: int = 0  # turns before this index are a prompt, whatever their role
    context: frozenset[int] = frozenset()  # further turns that are not learned


@dataclass(frozen=True)
class Tokens:
    """Token ids; `labels` are unshifted, each its token's id or -100; None: learn all."""

    input_ids: list[int]
    labels: list[int] | None = None


Example = Text | PromptCompletion | Conversation | Tokens


class Remark(NamedTuple):
    """A decision on columns in words; `{}` in the text stands for their names."""

    text: str
    columns: tuple[str, ...] = ()  # standard names


@dataclass(frozen=True)
class Layout:
    """The format of a source, and the columns that it is read from. See [Note: formats].

    Recognised once, from the first rows; the run, its report and `toolkit inspect --data` use it.
    """

    shape: RowShape
    columns: tuple[str, ...]  # standard names that every row must have, the main one first
    whole: bool = False  # whether rows are documents to pretrain on, also empty ones
    unused: tuple[str, ...] = ()  # other columns that the first rows have
    prompt: tuple[str, ...] = ()  # of preferences: standard names of the columns of the prompt
    renamed: tuple[tuple[str, str], ...] = ()  # (standard name, name in the rows) that differ
    json_turns: tuple[str, ...] = ()  # columns whose JSON text is turns in all of the first rows
    dialogue: bool = False  # whether texts are turns after "Human:" and "Assistant:"
    system: bool = False  # whether a column has system texts; of preferences
    chat: bool = False  # whether prompt and answers of preferences that are texts become turns
    plain: bool = False  # whether all first rows of preferences are plain texts
    mostly_prompts: bool = False  # whether half of the first rows or more have a `prompt`
    remarks: tuple["Remark", ...] = ()  # decisions, for the report

    @property
    def format(self) -> Format:
        return _SHAPES[self.shape].format

    @property
    def title(self) -> str:
        return _SHAPES[self.shape].stated

    @property
    def optional(self) -> tuple[str, ...]:
        """Standard names of further columns that are read if a row has them."""
        if self.whole:
            return ()
        extras = _SHAPES[self.shape].extras
        if self.plain:  # tools are for chat templates
            extras = tuple(name for name in extras if name in ("margin", "system"))
        return (*self.prompt, *extras)

    @property
    def uses_template(self) -> bool:
        """Whether rows are rendered by a chat template."""
        return self.format == "conversation" or (self.format == "preferences" and not self.plain)

    def __str__(self) -> str:
        def join(names: Sequence[str]) -> str:
            return " and ".join(repr(renamed.get(name, name)) for name in names)

        renamed = dict(self.renamed)
        remarks = "".join(f"; {text.format(join(names))}" for text, names in self.remarks)
        unused = f"; not used: {list_names(self.unused)}" if self.unused else ""
        return f"{self.title}, in {join(self.columns)}{remarks}{unused}"


PIECE_LAYOUT = Layout("pieces", ("text", "start", "end"))  # of text files


def recognise_layout(rows: Sequence[Row], *, text: bool = False) -> Layout:
    """Return the layout that most of `rows` have, the first rows of a source.

    Of several formats, the first of these wins: `input_ids`, text where `data.columns` names it
    (`text`), turns, prompt and completion, Alpaca, text; of none it is a BadRow.
    """
    if all(name in row for row in rows for name in (*OF_A_TREE, "text")):
        raise BadRow(
            "expected conversations, got single messages of a tree (parent_id, role and 'text', as "
            "in oasst1); write each path from a root to a leaf as one row of 'messages', or leave "
            "parent_id out (data.columns) to learn each 'text'",
            "tree of messages",
        )
    layouts = Counter(layout for row in rows if (layout := _layout_of(row, text)) is not None)
    if layouts:
        return _with_system(layouts.most_common(1)[0][0], rows)
    if all(name in row for row in rows for name in ("chosen", "rejected")):
        raise BadRow(
            f"expected examples, got pairs of answers ({list_names(rows[0])}). `toolkit prefer` learns "
            "from both; data.columns {completion: chosen} learns the chosen ones alone",
            "pairs of answers",
        )
    raise BadRow(
        f"expected the columns of a format, got {list_names(rows[0])}. Known are: text ('text'); "
        "prompts and completions ('prompt' and 'completion'); conversations ('messages' or "
        "'conversations', or Alpaca's 'instruction' and 'output'); token ids ('input_ids', with "
        f"'labels', 'completion_mask' or 'assistant_masks'). {suggest_example_columns(rows)}",
        "unknown format",
    )


SYSTEM_REMARK = Remark("system texts in {}", ("system",))


def _with_system(layout: Layout, rows: Sequence[Row]) -> Layout:
    """Return the layout with the column of system texts, and what follows from it."""
    name, some = system_column(rows)
    if name is None or layout.format not in ("conversation", "prompt_completion"):
        return layout
    if layout.shape == "prompt_completion" and some:
        layout = replace(layout, shape="turn_texts")
    renamed = () if name == "system" else (("system", name),)
    return replace(layout, renamed=renamed, remarks=(SYSTEM_REMARK,) if some else ())


def system_column(rows: Sequence[Row]) -> tuple[str | None, bool]:
    """Return the column of system texts, None if there is none, and whether a row has a text."""
    for name in _SYSTEM_NAMES:
        if any(has_text(row, name) for row in rows):
            return name, True
    return next((name for name in _SYSTEM_NAMES if any(name in row for row in rows)), None), False


def refuse_system_text(row: Row) -> None:
    """Refuse a system text in a source that is read as plain text, since its first rows have none.

    Raises:
        BadRow: the row has a system text.
    """
    if has_text(row, "system"):
        raise BadRow(
            "expected no text in 'system', since the first rows have none and are read as plain "
            "text, got one. Put a row with a system text first, so that all rows become turns, or "
            "set data.columns {system: null}",
            "system text that the first rows do not have",
        )


def has_text(row: Row, name: str) -> bool:
    """Whether a column is text that is not blank."""
    return isinstance(value := row.get(name), str) and bool(value.strip())


def recognise_documents(rows: Sequence[Row], *, text: bool = False) -> Layout:
    """Return the layout of documents: token ids where rows have any, else text, else BadRow."""
    if any("input_ids" in row for row in rows):
        return Layout("tokenised", ("input_ids",), whole=True)
    if any("text" in row for row in rows):
        return Layout("text", ("text",), whole=True)
    advice = "set data.columns to {text: NAME} of the one that holds the text"
    if (other := _layout_of(rows[0], text)) is not None:
        advice = f"these are {other}: recipes/finetune.py learns from them, pretraining from text"
    raise BadRow(
        f"expected a column 'text' or 'input_ids', got {list_names(rows[0])}; {advice}",
        "unknown format",
    )


def standard_columns() -> tuple[str, ...]:
    """Return the columns that documents and examples use under these names."""
    extras = (name for shape in _SHAPES.values() for name in shape.extras if name != "margin")
    needed = ("input_ids", *turns.TURN_COLUMNS, "prompt", "completion", "instruction", "output")
    return tuple(dict.fromkeys(("text", *needed, *extras)))


def read_columns() -> tuple[str, ...]:
    """Return the columns that recognition looks at, under any name that it knows."""
    return (*standard_columns(), *OF_A_TREE, *_SYSTEM_NAMES)


def _layout_of(row: Row, text: bool) -> Layout | None:
    if "input_ids" in row:
        masks = [name for name in _MASKS if row.get(name) is not None]
        return Layout("tokenised", ("input_ids", *masks))
    if text and "text" in row:
        return Layout("text", ("text",))
    if column := next((c for c in turns.TURN_COLUMNS if c in row), None):
        return Layout(_turn_style(row[column], column), (column,))
    if "prompt" in row and "completion" in row:
        lists = any(isinstance(row[name], list) for name in ("prompt", "completion"))
        return Layout("turn_lists" if lists else "prompt_completion", ("prompt", "completion"))
    if "instruction" in row and (answer := next((n for n in _ANSWERS if n in row), None)):
        return Layout("alpaca", ("instruction", answer))
    return Layout("text", ("text",)) if "text" in row else None


def _turn_style(value: Any, column: str) -> RowShape:
    try:
        value = parse_json(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        value = None  # judged with the row
    found = value if isinstance(value, list) else []
    keys = {key for turn in found if isinstance(turn, dict) for key in turn}
    sharegpt = "role" not in keys and ("from" in keys or column == "conversations")
    return "sharegpt" if sharegpt else "messages"


def parse_example(row: Row, layout: Layout) -> Example:
    """Return what is to be learned of `row`; raise BadRow for the first thing that is wrong."""
    # A row without the mask that others have would be learned whole.
    empty = [name for name in _MASKS if name in row and row[name] is None]
    if missing := [name for name in layout.columns if name not in row or name in empty]:
        raise BadRow(
            f"expected a column {missing[0]!r} ({layout}), got {list_names(row)}", "missing column"
        )
    try:
        return _example(row, layout)
    except RecursionError as error:
        raise BadRow("expected plain values, got lists in lists without end", "nesting") from error


def _example(row: Row, layout: Layout) -> Example:
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
            return Tokens(*_ids_and_labels(row))
        case "prompt_completion":
            refuse_system_text(row)
            prompt, completion = (read_text(row[name], name) for name in layout.columns)
            if not completion.strip():
                refuse_value(completion, "completion", "text", "empty completion")
            return PromptCompletion(prompt, completion)
        case "turn_lists" | "turn_texts":
            prompt, completion = (row[name] for name in layout.columns)
            return _conversation(row, *_prompt_and_answer(prompt, completion))
        case "messages":
            return _conversation(row, turns.from_messages(row[column], column))
        case "sharegpt":
            return _conversation(row, turns.from_sharegpt(row[column], column))
        case "alpaca":
            return _conversation(row, turns.from_alpaca(row))
    raise AssertionError(layout.shape)


def _prompt_and_answer(prompt: Any, completion: Any) -> tuple[list[Row], int]:
    """Return the turns of a prompt and its completion, and how many of them are the prompt."""
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
        before = turns.split_prompt(read_text(prompt, "prompt"), answer)
        return [*before, *answer], len(before)
    if not isinstance(prompt, list):
        refuse_value(prompt, "prompt", "text or a list of turns")
    messages = turns.read_turns(prompt, "prompt")
    return [*turns.split_prompt(messages, answer), *answer], len(messages)


def _conversation(row: Row, messages: list[Row], supervised_from: int = 0) -> Conversation:
    turns_before = len(messages)
    messages = turns.add_system(row, messages)
    if supervised_from:
        supervised_from += len(messages) - turns_before
    for i, turn in enumerate(messages):
        said = turn.get("tool_calls") or (turn.get("content") or "").strip()
        if turn["role"] == "assistant" and not said:
            content = describe_value(turn.get("content"))
            raise BadRow(
                f"expected an answer in turn {i} (assistant), got content {content} and no "
                "tool_calls",
                "empty assistant turn",
            )
    context = frozenset(i for i, turn in enumerate(messages) if turn.pop("weight", 1) == 0)
    learned = [turn["role"] for turn in messages[supervised_from:]]
    if not any(
        turn["role"] == "assistant" and i >= supervised_from and i not in context
        for i, turn in enumerate(messages)
    ):
        roles = f"{', '.join(learned)}{' in the completion' if supervised_from else ''}"
        weights = f", and a weight of 0 for turns {sorted(context)}" if context else ""
        raise BadRow(
            f"expected a turn of the assistant to learn from, got the roles {roles}{weights}",
            "no assistant turn",
        )
    tools, kwargs = turns.tools_of(row), turns.template_kwargs_of(row)
    return Conversation(messages, tools, kwargs, supervised_from, context)


def _ids_and_labels(row: Row) -> tuple[list[int], list[int] | None]:
    """Return the token ids of a row and their unshifted labels; None: all are learned.

    Each of `_MASKS` narrows what is learned; what `attention_mask` leaves out is padding.
    """
    ids = _integers(row["input_ids"], "input_ids")
    if not ids:
        raise BadRow("expected token ids in 'input_ids', got an empty list", "empty text")
    if (low := min(ids)) < 0:
        raise BadRow(f"expected token ids from 0 up, got {low}", "negative token id")
    given = [name for name in (*_MASKS, "attention_mask") if row.get(name) is not None]
    masks = {name: _mask(row[name], name, ids) for name in given}
    kept = masks.pop("attention_mask", [True] * len(ids))
    learned = [all(at) for at in zip(kept, *masks.values(), strict=True)]
    if not any(learned):
        raise BadRow(
            f"expected a token to learn, got {' and '.join(given)} that leave none",
            "no supervised token",
        )
    labels = [token if yes else IGNORED for token, yes in zip(ids, learned, strict=True)]
    left = [i for i, yes in enumerate(kept) if yes]
    return [ids[i] for i in left], [labels[i] for i in left] if masks else None


def _mask(value: Any, name: str, ids: list[int]) -> list[bool]:
    """Return which of `ids` the labels or the mask in column `name` leave."""
    values = _integers(value, name)
    if len(values) != len(ids):
        said = f"expected as many {name} as input_ids ({len(ids)}), got {len(values)}"
        raise BadRow(said, "lengths that differ")
    if name != "labels":
        if other := set(values) - {0, 1}:
            raise BadRow(f"expected 0 and 1 in {name!r}, got {min(other)}", "wrong mask")
        return [bool(value) for value in values]
    for i, (label, token) in enumerate(zip(values, ids, strict=True)):
        if label not in (IGNORED, token):
            raise BadRow(
                f"expected 'labels[{i}]' to be its token's id {token} or {IGNORED}, got {label}; "
                "labels stand at the place of their token, the loss shifts them",
                "labels that are not the tokens",
            )
    return [label != IGNORED for label in values]


def _integers(value: Any, where: str) -> list[int]:
    values = read_list(value, where)
    allowed = {int} if where in ("input_ids", "labels") else {int, bool}
    if not set(map(type, values)) <= allowed:
        i = next(i for i, v in enumerate(values) if type(v) not in allowed)
        refuse_value(values[i], f"{where}[{i}]", "an integer")
    return values
