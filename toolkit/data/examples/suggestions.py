"""Suggest the `data.columns` for rows whose columns have other names than the standard ones."""

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.data.sources.row_values import Row

# Names that public data sets give to a column, the most telling first.
QUESTIONS = ("question", "query", "input", "inputs", "problem", "user", "human")
_PROMPTS = ("instruction", "prompt", *QUESTIONS)
_RESPONSES = (
    *("output", "response", "answer", "completion", "targets", "target", "solution"),
    *("answers", "assistant", "generation"),
)
_CONTEXTS = ("input", "context", "passage")
_TEXTS = ("body", "content", "document", "article", "passage", "story", "code", "raw_content")
_TURNS = ("dialog", "dialogue", "chat", "turns", "conversation_history")
_ROLE_KEYS = ("speaker", "who", "sender", "author", "name")
_CONTENT_KEYS = ("text", "says", "utterance", "message", "body")
_SIDES = (
    ("response_j", "response_k"),
    ("response_w", "response_l"),
    ("better", "worse"),
    ("preferred", "dispreferred"),
    ("preferred", "rejected"),
    ("accepted", "rejected"),
    ("winner", "loser"),
    ("win", "lose"),
    ("positive", "negative"),
    ("good", "bad"),
    ("chosen_answer", "rejected_answer"),
    ("answer_chosen", "answer_rejected"),
    ("chosen_text", "rejected_text"),
)
# Two answers, the column that tells the better one, and how.
_NUMBERED = (
    (("response_0", "response_1"), "better_response_id", "0 or 1, the number of the better answer"),
    (("human_ref_A", "human_ref_B"), "labels", "1 where human_ref_A is the better answer"),
)
_LABELS = ("kto_tag", "is_good", "good", "desirable", "feedback", "thumbs_up", "preferred")


def suggest_example_columns(rows: Sequence[Row]) -> str:
    """Return the sentence that tells how to map the columns of rows without a known format."""
    names = {name for row in rows for name in row}
    prompt, response = _first(_PROMPTS, names), _first(_RESPONSES, names)
    if turns := next((n for n in _TURNS if any(_holds_turns(row.get(n)) for row in rows)), None):
        keys = {key for row in rows for turn in row.get(turns) or () for key in turn}
        mapping = {"messages": turns}
        for name, spellings in (("role", _ROLE_KEYS), ("content", _CONTENT_KEYS)):
            if name not in keys and (other := _first(spellings, keys)) is not None:
                mapping[name] = other
        return f"Set data.columns: {shown_mapping(mapping)}"
    if prompt and response:
        if response == "answers" and "tools" in names:  # calls of functions, as xLAM has them
            mapping = {"instruction": prompt, "tool_calls": response}
            return f"Set data.columns: {shown_mapping(mapping)}"
        mapping = {"instruction": prompt, "output": response}
        if (context := _first(_CONTEXTS, names - {prompt, response})) is not None:
            mapping["input"] = context
        if "system_prompt" in names and "system" not in names:
            mapping["system"] = "system_prompt"
        as_text = shown_mapping({"prompt": prompt, "completion": response})
        return (
            f"Set data.columns: {shown_mapping(mapping)} (in the chat template), or {as_text} (as "
            "plain text)"
        )
    if (text := _first(_TEXTS, names)) is not None:
        return f"Set data.columns: {shown_mapping({'text': text})}"
    return "Set data.columns, such as {prompt: question, completion: answer} or {text: body}"


def suggest_pair_columns(rows: Sequence[Row]) -> str:
    """Return the sentence that tells how to map the columns of rows that are no pairs, or how to
    write pairs of them where no mapping makes some.
    """
    names = {name for row in rows for name in row}
    pair = next((sides for sides in _SIDES if {*sides} <= names), None)
    if pair is None:
        for columns, number, better in _NUMBERED:
            if {*columns, number} <= names:
                first, second = columns
                return (
                    f"No mapping reads {number!r}, which is {better}: write the better one of "
                    f"{first!r} and {second!r} to 'chosen' and the other one to 'rejected'"
                )
        if ranked := next((name for name, v in rows[0].items() if _holds_ranks(v)), None):
            return (
                f"No mapping reads {ranked!r}, which are several answers with a rank: write the "
                "pairs to learn from, such as the best and the worst answer, to 'chosen' and "
                "'rejected'"
            )
        return "Set data.columns, such as {chosen: better, rejected: worse}"
    mapping = dict(zip(("chosen", "rejected"), pair, strict=True))
    if not {"prompt", "instruction"} & names and (ask := _first(QUESTIONS, names)):
        mapping["instruction"] = ask
    return f"Set data.columns: {shown_mapping(mapping)}"


def suggest_answer_columns(names: Sequence[str]) -> str:
    """Return the sentence that tells how to map the columns of rows that have no label."""
    label = "label" if "label" in names else _first(_LABELS, {*names})
    response = _first(("completion", *_RESPONSES), {*names})
    if label is None or response is None:
        return "Set data.columns, such as {completion: answer, label: good}"
    mapping = {"completion": response, "label": label}
    if not {"prompt", "instruction"} & {*names} and (ask := _first(QUESTIONS, {*names})):
        mapping["instruction"] = ask
    return f"Set data.columns: {shown_mapping(mapping)}"


def shown_mapping(mapping: Mapping[str, str]) -> str:
    """Return a mapping as it stands in YAML, without names that map to themselves."""
    pairs = (f"{name}: {other}" for name, other in mapping.items() if name != other)
    return "{" + ", ".join(pairs) + "}"


def _first(candidates: Sequence[str], names: set[Any]) -> str | None:
    return next((name for name in candidates if name in names), None)


def _holds_ranks(value: Any) -> bool:
    return _holds_turns(value) and all("rank" in answer for answer in value)


def _holds_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(t, dict) for t in value)
