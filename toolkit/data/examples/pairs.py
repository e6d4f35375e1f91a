"""Rows of two answers to one prompt, of which one is preferred, as examples.

[Note: pairs] What is learned of a pair is its answers, the rest is the prompt of both:

    explicit   `prompt`, `chosen` and `rejected`: texts, or lists of turns
    implicit   `chosen` and `rejected`, each with the prompt in it: what both begin with
    compared   `prompt`, `response_1`, `response_2` and `preference`, a number: below 0 the first is
               better, above it the second (HelpSteer)

    labelled   `prompt`, `completion` and `label`, true or false: single answers, for KTO, which
               also evaluates the answer of a row with another prompt

Beside them `tools` and `chat_template_kwargs`, as in conversations, and of pairs `margin`: by how
much a reward model is to tell the answers apart. Where `chosen` and `rejected` hold the whole
conversation and a `prompt` stands beside them (UltraFeedback), they count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.data.examples import turns
from toolkit.data.examples.recognise import Conversation, Layout, PromptCompletion
from toolkit.data.sources.row_values import BadRow, LeftOut, Row, json_value, named, string, wrong

SIDES = ("chosen", "rejected")
COMPARED = ("response_1", "response_2", "preference")


@dataclass(frozen=True)
class Pair:
    """A preferred answer and another one; both begin with the same prompt."""

    chosen: PromptCompletion | Conversation
    rejected: PromptCompletion | Conversation
    desirable: bool | None = None
    """Of KTO, whose second answer is another row's: whether the first is wanted."""
    same_prompt: bool = False
    """Of KTO: whether the second answer, too, was given to this prompt."""
    margin: float | None = None
    """By how much the reward of the first is to be above that of the second."""


@dataclass(frozen=True)
class Answer:
    """An answer, and whether it is wanted."""

    example: PromptCompletion | Conversation
    desirable: bool

    def with_partner(self, other: "Answer | None") -> Pair | BadRow:
        """Return this answer paired with the answer `other`, put after this answer's prompt."""
        mine, theirs = self.example, other and other.example
        if isinstance(mine, Conversation) and isinstance(theirs, Conversation):
            messages = [*mine.messages[:-1], theirs.messages[-1]]
            return Pair(mine, replace(mine, messages=messages), self.desirable)
        if isinstance(mine, PromptCompletion) and isinstance(theirs, PromptCompletion):
            mixed = PromptCompletion(mine.prompt, theirs.completion)
            return Pair(mine, mixed, self.desirable)
        return LeftOut("no other row has an answer to compare with", "no answer to compare with")


def pair_layout(rows: Sequence[Row], *, text: bool = False) -> Layout:
    """Return the layout of the first rows of a source of pairs; of none it is a BadRow."""
    for columns in (SIDES, COMPARED):
        if any(all(name in row for name in columns) for row in rows):
            return Layout("pairs", columns)
    raise BadRow(
        f"expected pairs of answers ('chosen' and 'rejected', or 'response_1', 'response_2' and "
        f"'preference'), got {named(rows[0])}. Set data.columns, such as {{chosen: better, "
        "rejected: worse}; single answers with a label are for preference.loss_type kto",
        "unknown format",
    )


def pair_of(row: Row) -> Pair:
    """Return the pair in a row; raise BadRow for the first thing that is wrong, LeftOut where
    neither answer is preferred.
    """
    if all(name in row for name in COMPARED):
        row = row | dict(zip(SIDES, _ranked(row), strict=True))
    if missing := [name for name in SIDES if name not in row]:
        raise BadRow(f"expected a column {missing[0]!r}, got {named(row)}", "missing column")
    chosen, rejected = (_value(row[name], name) for name in SIDES)
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise BadRow("expected two texts or two lists of turns, got one of each", "mixed sides")
    pair = _of_turns(row, chosen, rejected) if isinstance(chosen, list) else _of_texts(row)
    if pair.chosen == pair.rejected:
        raise LeftOut("both answers are the same", "equal sides")
    return replace(pair, margin=_margin(row))


def _margin(row: Row) -> float | None:
    if (margin := row.get("margin")) is None:
        return None
    number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not (number and math.isfinite(margin)):
        wrong(margin, "margin", "a number", "wrong margin")
    return float(margin)


def _ranked(row: Row) -> tuple[Any, Any]:
    """Return the better and the worse of two answers."""
    preference = row["preference"]
    if isinstance(preference, bool) or not isinstance(preference, int | float):
        wrong(preference, "preference", "a number, below 0 where the first answer is better")
    if preference == 0:
        raise LeftOut("preference is 0: neither answer is better", "no preference")
    answers = row["response_1"], row["response_2"]
    return answers if preference < 0 else (answers[1], answers[0])


def _value(value: Any, name: str) -> Any:
    """Return a text, or a list of turns, which may be JSON text, or one turn alone."""
    if isinstance(value, dict):
        return [value]
    if isinstance(value, str) and value[:1] == "[":
        try:
            found = json_value(value)
        except (ValueError, RecursionError):
            return value
        return found if isinstance(found, list) else value
    return value


def _messages(value: Any, name: str) -> list[Row]:
    """Return turns, which ShareGPT calls `from` and `value`, as messages."""
    if any(isinstance(turn, dict) and "from" in turn for turn in value):
        return turns.from_sharegpt({name: value}, name)
    return turns.from_messages(value, name)


def _of_texts(row: Row) -> Pair:
    chosen, rejected = (string(row[name], name) for name in SIDES)
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        messages = _messages(prompt, "prompt")
        return _conversations(row, messages, *([_answer(x)] for x in (chosen, rejected)))
    if prompt is None:
        prompt = _common(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    prompt = string(prompt, "prompt")
    for text, name in zip((chosen, rejected), SIDES, strict=True):
        if not text.strip():
            raise LeftOut(f"the {name} answer is empty", "empty answer")
    return Pair(PromptCompletion(prompt, chosen), PromptCompletion(prompt, rejected))


def _answer(text: str) -> Row:
    return {"role": "assistant", "content": text}


def _common(one: str, other: str) -> str:
    """Return what two texts begin with, up to the end of a word."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    at = min(len(one), len(other)) if at is None else at
    while at and not (one[at - 1].isspace() or one[at - 1] in ":\n"):
        at -= 1
    return one[:at]


def _of_turns(row: Row, chosen: Any, rejected: Any) -> Pair:
    sides = [_messages(x, n) for x, n in zip((chosen, rejected), SIDES, strict=True)]
    prompt = row.get("prompt")
    before: list[Row] = []
    if isinstance(prompt, list):
        before = _messages(prompt, "prompt")
        if all(side[: len(before)] == before for side in sides):  # they hold it already
            before = []
    elif isinstance(prompt, str) and not any(t["role"] == "user" for side in sides for t in side):
        before = [{"role": "user", "content": string(prompt, "prompt")}]
    sides = [[*before, *side] for side in sides]
    common = 0
    for one, other in zip(*sides, strict=False):
        if one != other:
            break
        common += 1
    if common == min(map(len, sides)):  # one goes on where the other ends
        common = max(0, common - 1)
    return _conversations(row, sides[0][:common], *(side[common:] for side in sides))


def _conversations(row: Row, prompt: list[Row], chosen: list[Row], rejected: list[Row]) -> Pair:
    tools, kwargs = turns.tools_of(row), turns.template_kwargs_of(row)
    made = list[Conversation]()
    for name, answer in zip(SIDES, (chosen, rejected), strict=True):
        _check_answer(answer[-1], name)
        messages = [{k: v for k, v in turn.items() if k != "weight"} for turn in (*prompt, *answer)]
        made.append(Conversation(messages, tools, kwargs, len(messages) - 1))
    if len(chosen) != len(rejected) or chosen[:-1] != rejected[:-1]:
        raise BadRow(
            "expected sides that differ in their last turn, the answer; these differ before it: "
            "prompts are not the same",
            "prompts that differ",
        )
    return Pair(made[0], made[1])


def answer_layout(rows: Sequence[Row], *, text: bool = False) -> Layout:
    """Return the layout of the first rows of a source of answers; of none it is a BadRow."""
    columns = ("prompt", "completion", "label")
    if any(all(name in row for name in columns) for row in rows):
        return Layout("answers", columns)
    raise BadRow(
        f"expected answers with a label ('prompt', 'completion' and 'label'), got {named(rows[0])}."
        " Set data.columns, such as {completion: answer, label: good}; pairs are for another "
        "preference.loss_type than kto",
        "unknown format",
    )


def answer_of(row: Row) -> Answer:
    """Return the answer in a row; raise BadRow for the first thing that is wrong."""
    if missing := [name for name in ("prompt", "completion", "label") if name not in row]:
        raise BadRow(f"expected a column {missing[0]!r}, got {named(row)}", "missing column")
    label = row["label"]
    if not isinstance(label, bool | int) or label not in (0, 1):
        wrong(label, "label", "true or false", "wrong label")
    prompt, completion = (_value(row[name], name) for name in ("prompt", "completion"))
    tools, kwargs = turns.tools_of(row), turns.template_kwargs_of(row)
    if isinstance(prompt, list) or isinstance(completion, list):
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": string(prompt, "prompt")}]
        before = _messages(prompt, "prompt")
        if isinstance(completion, list):
            after = _messages(completion, "completion")
        else:
            after = [_answer(string(completion, "completion"))]
        _check_answer(after[-1], "completion")
        messages = [{k: v for k, v in turn.items() if k != "weight"} for turn in (*before, *after)]
        return Answer(Conversation(messages, tools, kwargs, len(messages) - 1), bool(label))
    text = string(completion, "completion")
    if not text.strip():
        raise LeftOut("the answer is empty", "empty answer")
    return Answer(PromptCompletion(string(prompt, "prompt"), text), bool(label))


def _check_answer(turn: Row, where: str) -> None:
    """Refuse a last turn that is no answer, and leave out one that says nothing."""
    if turn["role"] != "assistant":
        raise BadRow(
            f"expected an answer of the assistant at the end of {where!r}, got a turn of "
            f"{turn['role']}",
            "no answer",
        )
    if turn.get("weight") == 0:
        raise BadRow(
            f"expected an answer to learn from at the end of {where!r}, got a turn that is marked "
            "as not to be learned (weight: 0, masked: true or the like)",
            "weight of 0",
        )
    if not (turn.get("tool_calls") or (turn.get("content") or "").strip()):
        raise LeftOut(f"the {where} answer is empty", "empty answer")
