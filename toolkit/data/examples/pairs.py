"""Parse rows of two answers to one prompt, one of which is preferred.

[Note: pairs] The loss covers the answers of a pair. The rest is the prompt of both:

    explicit   a prompt in columns next to `chosen` and `rejected`: texts, or lists of turns
    implicit   `chosen` and `rejected`, each with the prompt in it: their common beginning
    compared   `prompt`, `response_1`, `response_2` and `preference`, a number: below 0 the first is
               better, above it the second (HelpSteer)
    labelled   a prompt, `completion` and `label`, true or false: single answers, for KTO, which
               also evaluates the answer of a row with another prompt

Columns have standard names here; [Note: preference columns] in `preferences.py` lists which others
are recognised. Optional columns: `system`, `tools`, `chat_template_kwargs` and, for pairs,
`margin`: by how much a reward model is to tell the answers apart. If answers are complete
conversations, a `prompt` next to them has to be in them (UltraFeedback).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.data.examples import turns
from toolkit.data.examples.columns import NameMapping
from toolkit.data.examples.preferences import (
    COMPARED,
    RANKED,
    SIDES,
    recognise_answers,
    recognise_pairs,
)
from toolkit.data.examples.prompt_checks import find_common_prompt, find_possible_prompts
from toolkit.data.examples.recognise import (
    Conversation,
    Layout,
    PromptCompletion,
    refuse_system_text,
)
from toolkit.data.sources.row_values import (
    BadRow,
    Row,
    SkippedRow,
    list_names,
    read_list,
    read_text,
    refuse_value,
)

_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_OTHER_PROMPT = "prompts that differ"


@dataclass(frozen=True)
class Pair:
    """Two answers to the same prompt, each including the prompt. The first answer is preferred."""

    chosen: PromptCompletion | Conversation
    rejected: PromptCompletion | Conversation
    desirable: bool | None = None
    """KTO, whose second answer is from another row: true if the first answer is desirable."""
    same_prompt: bool = False
    """KTO: true if the second answer was also given to this prompt."""
    margin: float | None = None
    """Target difference of the rewards of the first and the second answer."""


@dataclass(frozen=True)
class Answer:
    """A prompt with one answer, and a label that says if the answer is desirable."""

    example: PromptCompletion | Conversation
    desirable: bool

    def with_partner(self, other: "Answer | None") -> Pair | BadRow:
        """Build a pair of this answer and another row's answer, both after this row's prompt.

        Returns:
            The pair, with this answer first. If `other` is None, or only one of the two is a
            conversation, a `SkippedRow` is returned (not raised).
        """
        example = self.example
        partner = other and other.example
        if isinstance(example, Conversation) and isinstance(partner, Conversation):
            messages = [*example.messages[:-1], partner.messages[-1]]
            return Pair(example, replace(example, messages=messages), self.desirable)
        if isinstance(example, PromptCompletion) and isinstance(partner, PromptCompletion):
            mixed = PromptCompletion(example.prompt, partner.completion)
            return Pair(example, mixed, self.desirable)
        return SkippedRow("no other row has an answer to compare with", "no answer to compare with")


def parse_pair(row: Row, layout: Layout | None = None) -> Pair:
    """Convert a row to a pair of answers.

    Args:
        row: a row with standard names.
        layout: the layout of the source. None: recognise the layout from this row.

    Raises:
        SkippedRow: the pair has no training signal, for example because its answers are equal.
        BadRow: anything else is wrong with the row.
    """
    layout = layout or recognise_pairs([row], NameMapping({}, {}, {}, ()))
    if missing := [name for name in layout.columns if row.get(name) is None]:
        raise BadRow(f"expected a column {missing[0]!r}, got {list_names(row)}", "missing column")
    row = _add_sides(_unpack_prompt(row), layout)
    chosen, rejected = (_read_answer(row[name], name, layout) for name in SIDES)
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise BadRow("expected two texts or two lists of turns, got one of each", "mixed sides")
    prompt = _read_prompt(row, layout, [chosen, rejected])
    if isinstance(chosen, str) and isinstance(rejected, str):
        pair = _parse_text_pair(row, layout, prompt, chosen, rejected)
    else:
        pair = _parse_turn_pair(row, prompt, [chosen, rejected])
    if pair.chosen == pair.rejected:
        raise SkippedRow("both answers are the same", "equal sides")
    return replace(pair, margin=_read_margin(row))


def _unpack_prompt(row: Row) -> Row:
    """Unpack a prompt that is a mapping with `messages` and `tools`, as in OpenAI's API.

    The column `prompt` gets the messages. The prompt's tools are used if the row has none. Rows
    with another prompt are returned unchanged.
    """
    prompt = row.get("prompt")
    if not isinstance(prompt, dict) or "messages" not in prompt:
        return row
    messages, tools = prompt["messages"], row.get("tools") or prompt.get("tools")
    messages = None if messages is None else read_list(messages, "prompt.messages")
    return row | {"prompt": messages, "tools": tools}


def _add_sides(row: Row, layout: Layout) -> Row:
    """Return the row with its answers in the columns `chosen` and `rejected`.

    In other layouts, the answers are in a list of ranked answers, in `response_1` and `response_2`,
    or partly in a conversation.

    Raises:
        SkippedRow: a preference or the ranks prefer neither answer.
        BadRow: an answer, a preference or a rank is invalid.
    """
    if layout.columns == COMPARED:
        return row | dict(zip(SIDES, _sort_by_preference(row), strict=True))
    if layout.columns == (RANKED,):
        return row | dict(zip(SIDES, _sort_by_rank(row[RANKED]), strict=True))
    chat = layout.columns[0]
    if chat in turns.TURN_COLUMNS:
        messages = turns.read_turns(row[chat], chat)
        answers = _read_answer(row["rejected"], "rejected", layout)
        if isinstance(answers, str):
            answers = [_assistant_turn(answers)]
        if not turns.begins_with_prompt(answers):
            answers = [*messages[:-1], *answers]
        return row | {"chosen": messages, "rejected": answers}
    return row


def _read_margin(row: Row) -> float | None:
    """Read the column `margin`; None if it is null or missing.

    Raises BadRow if it is not a finite number.
    """
    if (margin := row.get("margin")) is None:
        return None
    if not _is_number(margin):
        refuse_value(margin, "margin", "a number", "wrong margin")
    return float(margin)


def _is_number(value: Any) -> bool:
    """Return True if a value is a finite number, and not a boolean."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _sort_by_preference(row: Row) -> tuple[Any, Any]:
    """Return `response_1` and `response_2`, the better one first.

    The first is better if the number in the column `preference` is below 0.

    Raises:
        SkippedRow: the preference is 0.
        BadRow: the preference is not a number.
    """
    preference = row["preference"]
    if not _is_number(preference):
        refuse_value(preference, "preference", "a number, below 0 if the first answer is better")
    if preference == 0:
        raise SkippedRow("preference is 0: neither answer is better", "no preference")
    answers = row["response_1"], row["response_2"]
    return answers if preference < 0 else (answers[1], answers[0])


def _sort_by_rank(completions: Any) -> tuple[Any, Any]:
    """Return (better, worse), the two answers in a list of ranked answers. A low rank is better.

    Raises:
        SkippedRow: the ranks are equal.
        BadRow: the list does not hold two mappings of `rank` and `completion`, or a rank is not a
            number.
    """
    answers = read_list(completions, RANKED)
    mappings = all(isinstance(a, dict) and {"rank", "completion"} <= {*a} for a in answers)
    if len(answers) != 2 or not mappings:
        raise BadRow(
            f"expected two mappings of 'rank' and 'completion' in {RANKED!r}, got {len(answers)} "
            "entries; write the pairs to train on, such as the best and the worst answer, as "
            "rows of 'prompt', 'chosen' and 'rejected'",
            "not two answers",
        )
    for answer in answers:
        if not _is_number(answer["rank"]):
            refuse_value(answer["rank"], f"{RANKED}.rank", "a number", "wrong rank")
    better, worse = sorted(answers, key=lambda answer: answer["rank"])
    if better["rank"] == worse["rank"]:
        raise SkippedRow("both ranks are the same: neither answer is better", "no preference")
    return better["completion"], worse["completion"]


def _read_answer(value: Any, name: str, layout: Layout) -> str | list[Row]:
    """Read the answer in column `name` as text or as a list of messages.

    A single turn (a mapping) becomes a list.

    Raises:
        BadRow: the value is something else, or is text in a column that should have turns.
    """
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        return turns.read_turns(value, name)
    if name in layout.json_turns:
        refuse_value(value, name, "turns as in the first rows", "no turns")
    if name in turns.TURN_COLUMNS:
        refuse_value(value, name, "a list of turns", "no turns")
    return read_text(value, name)


def _read_prompt(
    row: Row, layout: Layout, answers: Sequence[str | list[Row]]
) -> str | list[Row] | None:
    """Read the prompt of a row as text or messages; None if no separate prompt is needed.

    That is the case if the answers begin with the prompt, or if the source has no prompts.

    Args:
        row: the row.
        layout: the layout of the source.
        answers: the answers of the row, which may begin with the prompt.

    Raises:
        BadRow: the row lacks a prompt although the layout has one, or an unused column may be the
            prompt.
    """
    if "instruction" in layout.prompt:
        if row.get("instruction") is None:
            raise BadRow(
                f"expected a column 'instruction', got {list_names(row)}", "missing column"
            )
        return turns.convert_instruction(row)
    value = row.get("prompt") if "prompt" in layout.prompt else None
    is_within = layout.dialogue or all(map(turns.begins_with_prompt, answers))
    as_turns = layout.chat or any(isinstance(answer, list) for answer in answers)
    if isinstance(value, str) and not value.strip() and as_turns and not is_within:
        refuse_value(value, "prompt", "text", "empty prompt")
    if isinstance(value, list) and value:
        return turns.read_turns(value, "prompt")
    if value is not None and value != []:
        if "prompt" in layout.json_turns:
            refuse_value(value, "prompt", "turns as in the first rows", "no turns")
        return read_text(value, "prompt")
    if is_within:
        return None
    possible = find_possible_prompts([row], (*layout.columns, *layout.optional, *SIDES))
    neighbours = f" next to {list_names(possible)}" if possible else ""
    missing = "prompt" in layout.prompt and ("prompt" in row or layout.mostly_prompts)
    if missing and not all(map(_has_user_turn, answers)):
        actual = "none" if row.get("prompt") is None else "an empty one"
        message = f"expected a prompt in 'prompt', as in the first rows, got {actual}{neighbours}"
        raise BadRow(message, "no prompt")
    if possible:
        raise BadRow(f"expected a prompt, got an answer without one{neighbours}", "no prompt")
    return None


def _has_user_turn(answer: str | list[Row]) -> bool:
    """Return True if an answer is a conversation with a turn of the user."""
    return isinstance(answer, list) and any(turn["role"] == "user" for turn in answer)


def _parse_text_pair(
    row: Row, layout: Layout, prompt: str | list[Row] | None, chosen: str, rejected: str
) -> Pair:
    """Build a pair from two answers that are texts.

    `layout` says if the texts are dialogues, answers of the assistant or plain text. Without a
    prompt, the common beginning of two plain texts becomes their prompt.

    Raises:
        SkippedRow: an answer is empty, or the prompts of two dialogues differ.
        BadRow: the row has a system text although its texts are plain, or a text is not a dialogue
            as the layout expects.
    """
    if layout.dialogue and not layout.chat:
        prompt, chosen = _split_dialogue(chosen, "chosen")
        other, rejected = _split_dialogue(rejected, "rejected")
        if prompt != other:
            raise SkippedRow("the prompts of both sides are not the same", _OTHER_PROMPT)
    elif layout.dialogue:
        sides = [
            _parse_dialogue(text, name)
            for text, name in zip((chosen, rejected), SIDES, strict=True)
        ]
        try:
            return _parse_turn_pair(row, None, sides)
        except BadRow as bad:
            if bad.reason != _OTHER_PROMPT:
                raise
            raise SkippedRow(str(bad), bad.reason) from bad  # some rows of HH-RLHF are like this
    if layout.chat or isinstance(prompt, list):
        return _parse_turn_pair(
            row, prompt, [[_assistant_turn(text)] for text in (chosen, rejected)]
        )
    refuse_system_text(row)
    if prompt is None:
        prompt = find_common_prompt(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    for text, name in zip((chosen, rejected), SIDES, strict=True):
        if not text.strip():
            raise SkippedRow(f"the {name} answer is empty", "empty answer")
    return Pair(PromptCompletion(prompt, chosen), PromptCompletion(prompt, rejected))


def _assistant_turn(text: str) -> Row:
    """Return a message of the assistant with this text as content."""
    return {"role": "assistant", "content": text}


def _parse_dialogue(text: str, name: str) -> list[Row]:
    """Split a text at "Human:" and "Assistant:" into messages of the roles user and assistant.

    The space after the colon is dropped.

    Args:
        text: the text.
        name: its column, for messages.

    Raises:
        BadRow: the text does not begin with "Human:" or "Assistant:".
    """
    before, *parts = _SPEAKER.split(text)
    if before.strip() or not parts:
        refuse_value(text, name, "a dialogue that begins with 'Human:'", "no dialogue")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": content.removeprefix(" ")}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def _split_dialogue(text: str, name: str) -> tuple[str, str]:
    """Split the text of a dialogue into (prompt, answer) after the last "Assistant:".

    The prompt includes this mark, and the answer keeps the space after it. `name` is the column,
    for messages.

    Raises:
        BadRow: the text does not end with a turn of the assistant.
    """
    prompt, mark, answer = text.rpartition("\n\nAssistant:")
    if not mark or _parse_dialogue(text, name)[-1]["role"] != "assistant":
        refuse_value(text, name, "a dialogue that ends with a turn of 'Assistant:'", "no dialogue")
    return prompt + mark, answer


def _parse_turn_pair(row: Row, prompt: str | list[Row] | None, sides: Sequence[Any]) -> Pair:
    """Build a pair from two lists of turns that differ only in their last turn, the answer.

    Args:
        row: the row, for system text, tools and arguments of the template.
        prompt: text or turns to put before both lists, unless they repeat it; None if there is no
            separate prompt.
        sides: the turns of the chosen side and of the rejected side.

    Raises:
        SkippedRow: an answer is empty.
        BadRow: an answer is not a turn of the assistant, or the sides differ before the answer.
    """
    messages = [_join_turns(prompt, side, sides[0]) for side in sides]
    messages = [turns.add_system(row, side) for side in messages]
    common = 0
    for turn, other in zip(*messages, strict=False):
        if turn != other:
            break
        common += 1
    # If one side continues where the other ends, their common last turn is the shorter answer.
    if common == min(map(len, messages)):
        common = max(0, common - 1)
    chosen, rejected = (side[common:] for side in messages)
    for name, answer in zip(SIDES, (chosen, rejected), strict=True):
        _check_answer(answer[-1], name)
    if len(chosen) != len(rejected) or chosen[:-1] != rejected[:-1]:
        raise BadRow(
            "expected sides that differ only in their last turn, the answer; these differ before "
            "it: prompts are not the same",
            _OTHER_PROMPT,
        )
    return Pair(_make_conversation(row, messages[0]), _make_conversation(row, messages[1]))


def _join_turns(prompt: str | list[Row] | None, answer: list[Row], chosen: list[Row]) -> list[Row]:
    """Return the turns of a prompt followed by `answer`, without turns that both contain.

    If the prompt ends with the chosen answer, this last turn of the prompt is dropped.

    Raises:
        BadRow: the prompt ends with another turn of the assistant.
    """
    before = turns.find_missing_prompt_turns(prompt, answer)
    if before and before[-1]["role"] == "assistant" and answer[0]["role"] == "assistant":
        calls = before[-1].get("tool_calls")
        if calls or before[-1].get("content") != chosen[-1].get("content"):
            raise BadRow(
                "expected a prompt that ends before the answer, got one that ends with a turn of "
                "the assistant",
                "prompt that ends with an answer",
            )
        before = before[:-1]
    return [*before, *answer]


def _make_conversation(row: Row, messages: list[Row]) -> Conversation:
    """Build a conversation with the row's tools, in which the loss covers only the last turn."""
    messages = [{k: v for k, v in turn.items() if k != "weight"} for turn in messages]
    tools, kwargs = turns.read_tools(row), turns.read_template_kwargs(row)
    return Conversation(messages, tools, kwargs, len(messages) - 1)


def parse_answer(row: Row, layout: Layout | None = None) -> Answer:
    """Convert a row to an answer with a label.

    Args:
        row: a row with standard names.
        layout: the layout of the source. None: recognise the layout from this row.

    Raises:
        SkippedRow: the answer is empty.
        BadRow: anything else is wrong with the row.
    """
    layout = layout or recognise_answers([row], NameMapping({}, {}, {}, ()))
    if missing := [name for name in layout.columns if row.get(name) is None]:
        raise BadRow(f"expected a column {missing[0]!r}, got {list_names(row)}", "missing column")
    row, desirable = _unpack_prompt(row), _read_label(row["label"])
    column = layout.columns[0]
    answer = _read_answer(row[column], column, layout)
    prompt = _read_prompt(row, layout, [answer])
    if isinstance(answer, str) and not (layout.chat or isinstance(prompt, list)):
        refuse_system_text(row)
        if not answer.strip():
            raise SkippedRow("the answer is empty", "empty answer")
        return Answer(PromptCompletion(prompt or "", answer), desirable)
    messages = [_assistant_turn(answer)] if isinstance(answer, str) else answer
    messages = turns.add_system(row, _join_turns(prompt, messages, messages))
    _check_answer(messages[-1], column)
    return Answer(_make_conversation(row, messages), desirable)


def _read_label(value: Any) -> bool:
    """Convert a label to a boolean, or raise BadRow.

    True, 1 and "chosen" are desirable; False, 0 and "rejected" are not. They may be text.
    """
    text = str(value).strip().lower()
    if text in ("true", "1", "1.0", "chosen"):
        return True
    if text not in ("false", "0", "0.0", "rejected"):
        refuse_value(value, "label", "true or false", "wrong label")
    return False


def _check_answer(turn: Row, where: str) -> None:
    """Raise an error if the last turn of a conversation is not an answer to train on.

    Args:
        turn: the last turn.
        where: its column, for messages.

    Raises:
        SkippedRow: the answer is empty.
        BadRow: the turn has another role than assistant, or is marked as not supervised.
    """
    if turn["role"] != "assistant":
        raise BadRow(
            f"expected an answer of the assistant at the end of {where!r}, got a turn of "
            f"{turn['role']}",
            "no answer",
        )
    if turn.get("weight") == 0:
        raise BadRow(
            f"expected an answer to train on at the end of {where!r}, got a turn that is marked "
            "as not supervised (weight: 0, masked: true or the like)",
            "weight of 0",
        )
    if not (turn.get("tool_calls") or (turn.get("content") or "").strip()):
        raise SkippedRow(f"the {where} answer is empty", "empty answer")
