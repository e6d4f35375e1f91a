"""Recognise which columns of preference rows hold the prompt, the answers and the label.

[Note: preference columns] Tools name the same columns differently. Recognition happens once for a
source, from its first rows, and gives each column its standard name:

    chosen, rejected    also `chosen_response`, `chosen_conversations`, `chosen_messages` and
                        `preferred_output` with their counterparts; `response` and
                        `rejected_response`; a conversation in `messages` next to
                        `rejected_response` or `rejected_messages` ends with the chosen answer
    response_1, ...     also `response1`, `response2` and `overall_preference`
    completions         ranked answers: mappings of `rank` and `completion`
    completion, label   also `output`, `response` or a conversation in `messages`, and `kto_tag`
    prompt              the conversation up to the answer, if the answers do not hold it: `prompt`;
                        a list of turns in `messages`, `conversations`, `context` or `history`
    instruction, input  a question as Alpaca has it; also `question`, `query` or `input` alone
    system              also `system_prompt`

`prompt` next to answers that are texts is plain text. An `instruction` (or `question`, ...) is the
user's turn, and so is `prompt` next to a text in `system`, because only a chat template knows
system texts. Texts that begin with "Human:" are dialogues, as HH-RLHF has them.

A pair without a prompt next to a text that nothing uses is refused: the text may be the prompt.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toolkit.data.examples.columns import (
    NameMapping,
    format_mapping,
    suggest_answer_columns,
    suggest_pair_columns,
)
from toolkit.data.examples.prompt_checks import (
    is_conversation,
    refuse_earlier_turns,
    refuse_possible_prompt,
    refuse_repeated_prompts,
    warn_of_missing_prompts,
)
from toolkit.data.examples.recognise import (
    SYSTEM_REMARK,
    Layout,
    Remark,
    find_system_column,
    has_text,
)
from toolkit.data.examples.turns import SPELLINGS, TURN_COLUMNS, begins_with_prompt
from toolkit.data.sources.row_values import BadRow, Row, list_names

SIDES = ("chosen", "rejected")
COMPARED = ("response_1", "response_2", "preference")
RANKED = "completions"
PROMPT_COLUMNS = ("prompt", "instruction", "input", "history")

_SIDES = (
    SIDES,
    ("chosen_response", "rejected_response"),
    ("chosen_conversations", "rejected_conversations"),
    ("chosen_messages", "rejected_messages"),
    ("preferred_output", "non_preferred_output"),
    ("response", "rejected_response"),
)
_REJECTED_ALONE = ("rejected", "rejected_response", "rejected_messages")
_COMPARED = (
    COMPARED,
    ("response_1", "response_2", "preference_strength"),
    ("response1", "response2", "overall_preference"),
)
_ANSWERS = ("completion", "output", "response")
_LABELS = ("label", "kto_tag", "preference")
_PROMPT_TURNS = (*TURN_COLUMNS, "context", "history", "input")
_QUESTIONS = ("question", "query", "input")
_ENOUGH_ROWS = 4  # rows that suffice to tell numbers of answers from differences
_HUMAN = re.compile(r"\s*Human:")
_DIALOGUE = Remark("dialogues of 'Human:' and 'Assistant:', read as turns")
_DIALOGUE_TEXTS = Remark(
    "dialogues of 'Human:' and 'Assistant:', read as texts, since there is no chat template"
)


def list_candidate_columns() -> tuple[str, ...]:
    """List all column names, standard or not, that can mark a source as pairs or answers.

    They are the names that `recognise_pairs` and `recognise_answers` look up.
    """
    groups = (*_SIDES, *_COMPARED, _REJECTED_ALONE, _ANSWERS, _LABELS, _PROMPT_TURNS, _QUESTIONS)
    names = (*(name for group in groups for name in group), *PROMPT_COLUMNS, RANKED)
    return tuple(dict.fromkeys(names))


@dataclass
class _FirstRows:
    """The first rows of a source, and the fields of the `Layout` that is recognised from them.

    The functions of this module fill in the fields one after the other.
    """

    rows: Sequence[Row]
    names: NameMapping
    fields: dict[str, str] = field(default_factory=dict)
    """Standard name -> column of the rows."""
    json_turns: list[str] = field(default_factory=list)
    """Standard names of the columns with JSON text of turns."""
    remarks: list[Remark] = field(default_factory=list)
    warnings: tuple[str, ...] = ()
    prompt: list[str] = field(default_factory=list)
    """Standard names of the columns of the prompt."""
    system: bool = False
    chat: bool = False
    dialogue: bool = False

    def non_null_values(self, column: str) -> list[Any]:
        """List the values of a column, without nulls."""
        return [value for row in self.rows if (value := row.get(column)) is not None]

    def has_values(self, column: str) -> bool:
        """Return True if any row has a value in the column that is not null."""
        return bool(self.non_null_values(column))

    def most_values_pass(self, column: str, test: Callable[[Any], bool]) -> bool:
        """Return True if more than half of the non-null values of a column pass a test.

        Without such values, the result is False.
        """
        values = self.non_null_values(column)
        return bool(values) and 2 * sum(map(test, values)) > len(values)

    def are_all_texts(self, columns: Iterable[str]) -> bool:
        """Return True if the prompt and these columns have no value that is a list or a mapping.

        Args:
            columns: standard names of columns.
        """
        names = (self.fields.get(name, name) for name in ("prompt", *columns))
        return not any(
            isinstance(v, list | dict) for name in names for v in self.non_null_values(name)
        )

    def build_layout(self, shape: Any, columns: tuple[str, ...]) -> Layout:
        """Build the `Layout` of the source from the fields that were recognised so far.

        Args:
            shape: `pairs` or `answers`.
            columns: standard names of the columns that every row must have.
        """
        return Layout(
            shape,
            columns,
            prompt=tuple(self.prompt),
            renamed=tuple((n, c) for n, c in self.fields.items() if n != c),
            json_turns=tuple(self.json_turns),
            dialogue=self.dialogue,
            system=self.system,
            chat=self.chat,
            plain=not self.chat and self.are_all_texts(columns),
            mostly_prompts=2 * len(self.non_null_values("prompt")) >= max(1, len(self.rows)),
            remarks=tuple(self.remarks),
            warnings=self.warnings,
        )


def recognise_pairs(rows: Sequence[Row], names: NameMapping) -> Layout:
    """Recognise the layout of a source of pairs from its first rows.

    Args:
        rows: the first rows, with standard names; at least one.
        names: the setting `data.columns`.

    Raises:
        BadRow: the rows are not pairs, the prompt is missing or ambiguous, or a `preference` seems
            to be the number of the better answer.
    """
    first = _FirstRows(rows, names)
    columns = _find_answer_columns(first)
    if columns is None:
        raise BadRow(
            f"expected pairs of answers ('chosen' and 'rejected', or 'response_1', 'response_2' "
            f"and 'preference'), got {list_names(rows[0])}. {suggest_pair_columns(rows)}; single "
            "answers with a label are for preference.loss_type kto",
            "unknown format",
        )
    if columns == COMPARED:
        _refuse_answer_numbers(first)
    answers = columns[:2] if columns[0] not in TURN_COLUMNS else columns[1:2]
    if columns[0] in TURN_COLUMNS:
        first.remarks.append(Remark("the prompt and the chosen answer in {}", columns[:1]))
        _record_system_column(first, chat=True)
    elif columns == (RANKED,):
        _find_prompt_columns(first, (), within=False, texts=False)
    else:
        _detect_json_turns(first, answers)
        values = [value for name in answers for value in first.non_null_values(first.fields[name])]
        texts = 2 * sum(isinstance(value, str) for value in values) > len(values)
        if first.json_turns:
            texts = False
        within = bool(first.json_turns) and "prompt" not in first.json_turns
        within = within or all(
            first.most_values_pass(first.fields[name], lambda v: begins_with_prompt(v))
            for name in answers
        )
        if texts and not within and not _has_prompt_column(first) and _are_dialogues(values):
            first.dialogue = within = True
            first.remarks.append(_DIALOGUE)
        _find_prompt_columns(first, answers, within=within, texts=texts)
    return first.build_layout("pairs", columns)


def keep_dialogues_as_text(layout: Layout) -> Layout:
    """Change a layout of "Human:"/"Assistant:" dialogues so that they are read as plain text.

    This is for a tokenizer without a chat template. Other layouts, and dialogues in a source with
    system texts, are returned unchanged.
    """
    if not layout.dialogue or layout.system:
        return layout
    remarks = (_DIALOGUE_TEXTS if remark == _DIALOGUE else remark for remark in layout.remarks)
    return replace(layout, chat=False, plain=True, remarks=tuple(remarks))


def recognise_answers(rows: Sequence[Row], names: NameMapping) -> Layout:
    """Recognise the layout of a source of labelled answers from its first rows.

    Args:
        rows: the first rows, with standard names; at least one.
        names: the setting `data.columns`.

    Raises:
        BadRow: the rows are not labelled answers, or the prompt is missing or ambiguous.
    """
    first = _FirstRows(rows, names)
    label = next((name for name in _LABELS if first.has_values(name)), None)
    answer = next((name for name in _ANSWERS if first.has_values(name)), None)
    chat = next((name for name in TURN_COLUMNS if first.has_values(name)), None)
    _refuse_null_column(rows, label, _LABELS, "true or false")
    if chat is None:
        _refuse_null_column(rows, answer, _ANSWERS, "an answer")
    if label is None or (answer is None and chat is None):
        raise BadRow(
            f"expected answers with a label ('prompt', 'completion' and 'label'), got "
            f"{list_names(rows[0])}. {suggest_answer_columns([*rows[0]])}; pairs are for another "
            "preference.loss_type than kto",
            "unknown format",
        )
    first.fields["label"] = label
    if answer is None:
        assert chat is not None
        first.fields[chat] = chat
        first.remarks.append(Remark("the prompt and the answer in {}", (chat,)))
        _record_system_column(first, chat=True)
        return first.build_layout("answers", (chat, "label"))
    first.fields["completion"] = answer
    _detect_json_turns(first, ("completion",))
    texts = first.most_values_pass(answer, lambda v: isinstance(v, str)) and not first.json_turns
    within = bool(first.json_turns) and "prompt" not in first.json_turns
    within = within or first.most_values_pass(answer, begins_with_prompt)
    _find_prompt_columns(first, ("completion",), within=within, texts=texts)
    return first.build_layout("answers", ("completion", "label"))


def _refuse_null_column(
    rows: Sequence[Row], with_values: str | None, candidates: Sequence[str], expected: str
) -> None:
    """Raise BadRow if a column for the label or the answer exists but has only null values.

    Args:
        rows: the first rows of a source.
        with_values: the candidate that has values; None if none has any.
        candidates: possible names of the column.
        expected: description of its values, for the message.
    """
    name = next((name for name in candidates if any(name in row for row in rows)), None)
    if with_values is None and name is not None:
        raise BadRow(
            f"expected {expected} in {name!r}, got null in all of the first {len(rows)} row(s). "
            f"Write the values to {name!r}, or name the column that holds them in data.columns",
            "column of nulls",
        )


def _find_answer_columns(first: _FirstRows) -> tuple[str, ...] | None:
    """Find the columns of the two answers, and record their names in `first.fields`.

    Returns:
        Standard names of the columns from which both answers are read, such as (`chosen`,
        `rejected`) or (`response_1`, `response_2`, `preference`). None if there are none.
    """

    def together(names: Sequence[str]) -> bool:
        return any(all(row.get(name) is not None for name in names) for row in first.rows)

    for sides in _SIDES:
        if together(sides):
            first.fields |= dict(zip(SIDES, sides, strict=True))
            return SIDES
    for compared in _COMPARED:
        if together(compared):
            first.fields |= dict(zip(COMPARED, compared, strict=True))
            return COMPARED
    for chat in TURN_COLUMNS:
        for rejected in _REJECTED_ALONE:
            if together((chat, rejected)):
                first.fields |= {chat: chat, "rejected": rejected}
                return chat, "rejected"
    if first.most_values_pass(
        RANKED, lambda v: isinstance(v, list) and all(map(_is_ranked_answer, v))
    ):
        first.fields[RANKED] = RANKED
        return (RANKED,)
    return None


def _refuse_answer_numbers(first: _FirstRows) -> None:
    """Raise BadRow if `preference` seems to be the number of the better answer.

    That is, if its values are exactly 0 and 1, or 1 and 2. The toolkit reads a preference as a
    difference, so 1 and 2 would both prefer the second answer. Fewer than `_ENOUGH_ROWS` values
    pass without a check.
    """
    name = first.fields["preference"]
    values = first.non_null_values(name)
    numbers = sorted({v for v in values if isinstance(v, int | float)})
    if len(values) >= _ENOUGH_ROWS and numbers in ([0, 1], [1, 2]):
        values_text = " and ".join(f"{number:g}" for number in numbers)
        raise BadRow(
            f"expected numbers below 0 in {name!r} if the first answer is better, and above 0 if "
            f"the second is, got only {values_text}, which may be the number of the better answer. "
            "Write the better answer to 'chosen' and the other one to 'rejected'",
            "number of an answer",
        )


def _is_ranked_answer(value: Any) -> bool:
    """Return True if a value is a mapping with `rank` and `completion`."""
    return isinstance(value, dict) and {"rank", "completion"} <= {*value}


def _hold_ranked_prompts(first: _FirstRows) -> bool:
    """Return True if any ranked answer is a conversation that begins with the prompt."""
    answers = (a.get("completion") for v in first.non_null_values(RANKED) for a in v)
    return any(map(begins_with_prompt, answers))


def _detect_json_turns(first: _FirstRows, answers: Sequence[str]) -> None:
    """Set `first.json_turns` if the answers are JSON text of turns, and add a remark.

    All first rows must have such answers, each ending with the assistant's turn. The answers must
    contain the prompt, or the column `prompt` must have it. Otherwise nothing is set, and the
    answers are read as plain texts.

    Args:
        first: the first rows, whose `fields` name the answers.
        answers: standard names of the columns of the answers.
    """
    turns = [first.names.parse_json_turns(first.rows, first.fields[name]) for name in answers]
    if any(column is None for column in turns):
        return
    sides = [side for column in turns if column for side in column]
    if not all(_is_assistant_turn(side[-1]) for side in sides):
        return
    prompts = first.non_null_values("prompt")
    if not prompts and all(map(begins_with_prompt, sides)):
        first.json_turns = [*answers]
    elif _are_json_prompts(first):
        first.json_turns = ["prompt", *answers]
    elif len(prompts) == len(first.rows) and all(
        isinstance(prompt, str)
        and begins_with_prompt(side)
        and any(prompt.strip() == str(t.get("content", t.get("value"))).strip() for t in side)
        for column in turns
        for prompt, side in zip(prompts, column or [], strict=True)
    ):
        first.json_turns = [*answers]
    else:
        return
    first.remarks.append(Remark("{} are JSON text of turns", tuple(first.json_turns)))


def _are_json_prompts(first: _FirstRows) -> bool:
    """Return True if all prompts are JSON text of turns and none ends with the assistant's turn."""
    prompts = first.names.parse_json_turns(first.rows, "prompt")
    return prompts is not None and not any(_is_assistant_turn(p[-1]) for p in prompts)


def _is_assistant_turn(turn: Row) -> bool:
    """Return True if the role of a turn, in any known spelling, is the assistant."""
    return SPELLINGS.get(str(turn.get("role", turn.get("from"))).lower()) == "assistant"


def _has_prompt_column(first: _FirstRows) -> bool:
    """Return True if a column that usually holds a prompt has a value."""
    names = ("prompt", "instruction", *_PROMPT_TURNS, *_QUESTIONS)
    return any(first.has_values(name) for name in names)


def _are_dialogues(values: Sequence[Any]) -> bool:
    """Return True if all values are texts with "Human:" at the start and "Assistant:" later."""
    return all(
        isinstance(value, str) and _HUMAN.match(value) and "\n\nAssistant:" in value
        for value in values
    )


def _find_prompt_columns(
    first: _FirstRows, answers: Sequence[str], *, within: bool, texts: bool
) -> None:
    """Find the columns of the prompt and of the system text, and record them in `first`.

    Args:
        first: the first rows. Sets its fields `prompt`, `fields`, `json_turns`, `chat`, `system`,
            `remarks` and `warnings`.
        answers: standard names of the columns of the answers.
        within: the answers are conversations that begin with the prompt.
        texts: the answers are texts.

    Raises:
        BadRow: several columns may be the prompt, an unused column may be it, a required prompt is
            missing, or the answers repeat the prompt.
    """
    chat = not texts
    if within:
        if first.has_values("prompt") and not first.dialogue:
            first.prompt.append("prompt")
    elif first.has_values("prompt"):
        first.prompt.append("prompt")
        if "prompt" not in first.json_turns and first.names.columns.get("prompt") in TURN_COLUMNS:
            first.json_turns.append("prompt")
            chat = True
        chat = chat or first.most_values_pass("prompt", lambda value: not isinstance(value, str))
        first.remarks.append(Remark("the prompt in {}", ("prompt",)))
        columns = [first.fields[name] for name in answers]
        if texts and not chat:
            cure = "set data.columns {prompt: null}, which takes the prompt out of them"
            if len(answers) == 1:
                cure = "write it without the prompt"
            refuse_repeated_prompts(first.rows, columns, cure)
        refuse_earlier_turns(first.rows, first.names.columns, ("prompt", *columns))
    elif (column := _find_conversation_column(first)) is not None:
        first.fields["prompt"] = column
        first.prompt.append("prompt")
        if column in TURN_COLUMNS:
            first.json_turns.append("prompt")
        chat = True
        first.remarks.append(Remark("the prompt in {}", ("prompt",)))
    elif (column := _find_question_column(first)) is not None:
        first.fields["instruction"] = column
        more = [name for name in ("input", "history") if name != column and first.has_values(name)]
        first.prompt += ["instruction", *more]
        chat = True
        first.remarks.append(Remark("the prompt in {}, the user's turn", tuple(first.prompt)))
    else:
        used = [*first.fields.values()]
        refuse_possible_prompt(first.rows, used, texts=texts)
        if len(answers) == 1:
            raise BadRow(
                f"expected a prompt next to the answer, got {list_names(first.rows[0])}. Set "
                "data.columns, such as {prompt: question}",
                "no prompt",
            )
        system, some = find_system_column(first.rows)
        implicit = "what both answers begin with" if texts and len(answers) == 2 else "none"
        first.remarks.append(Remark(f"the prompt: {implicit}"))
        if texts and some:
            raise BadRow(
                f"expected a prompt next to {system!r}, got texts that hold "
                "theirs. Name its column in data.columns (prompt or instruction), or set "
                "{system: null} to learn without the system texts",
                "no prompt",
            )
        columns = [first.fields[name] for name in answers]
        if columns or not _hold_ranked_prompts(first):
            first.warnings += warn_of_missing_prompts(first.rows, used, columns, texts=texts)
    _record_system_column(first, chat=chat)
    first.chat = first.dialogue or chat or first.system
    if texts and not chat and first.chat and not first.dialogue:
        text = "texts are turns, since only a chat template knows system texts"
        first.remarks.append(Remark(text))


def _record_system_column(first: _FirstRows, *, chat: bool) -> None:
    """Find the column of system texts, and set `first.fields`, `system` and `remarks`.

    Also sets `first.chat` to `chat`.
    """
    column, first.system = find_system_column(first.rows)
    if column is not None:
        first.fields["system"] = column
    if first.system:
        first.remarks.append(SYSTEM_REMARK)
    first.chat = chat


def _find_conversation_column(first: _FirstRows) -> str | None:
    """Return the name of the column with the turns before the answers; None if there is none."""
    for name in _PROMPT_TURNS:
        if name in TURN_COLUMNS and first.has_values(name):
            return name
        if first.most_values_pass(name, is_conversation):
            return name
    return None


def _find_question_column(first: _FirstRows) -> str | None:
    """Return the name of the column with the user's question; None if there is none.

    `instruction` wins over the other names.

    Raises:
        BadRow: several other columns may be the question.
    """
    if first.most_values_pass("instruction", lambda value: isinstance(value, str)):
        return "instruction"
    columns = [name for name in _QUESTIONS if any(has_text(row, name) for row in first.rows)]
    if len(columns) > 1:
        question, other = columns[:2]
        raise BadRow(
            f"expected one prompt, got {list_names(columns)}. Set data.columns: "
            f"{format_mapping({'instruction': question, 'input': other})} to use both, or "
            f"{{instruction: {question}, {other}: null}}",
            "several prompts",
        )
    return columns[0] if columns else None
