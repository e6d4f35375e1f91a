"""Small operations on text and turns for the search of turns in a rendering.

Owns runs of special tokens, common beginnings and ends, and turns with a word put in. Refuses to
know templates and what is searched for.
"""

import copy
import re
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_TAG = re.compile(r"<[^<>\s]+>\s*$")


def absent(word: str, text: str) -> str:
    while word in text:
        word = f"{word[0]}{word}"
    return word


def with_content(message: Message, content: str | None) -> Message:
    return message if content is None else {**message, "content": content}


def without_calls(message: Message) -> Message:
    return {k: v for k, v in message.items() if k != "tool_calls"}


def with_call(
    message: Message, at: int, where: str, word: str, number: int
) -> tuple[Message, str] | None:
    """Return the message with a word or number in a tool call, and the text to look for.

    Args:
        message: with tool calls.
        at: which of them.
        where: `name`, or `argument`: the last value in the arguments, however deep.
        word: takes the place of text.
        number: takes the place of an integer; other values are not replaced (None).
    """
    message = copy.deepcopy(message)
    function = message["tool_calls"][at]["function"]
    if where == "name":
        function["name"] = word
        return message, word
    inner: Any = function
    key: Any = "arguments"
    while isinstance(inner[key], dict | list) and inner[key]:
        inner, key = inner[key], (list(inner[key])[-1] if isinstance(inner[key], dict) else -1)
    value = inner[key]
    if isinstance(value, str):
        inner[key] = word
        return message, word
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    inner[key] = number
    return message, str(number)


def said_in(message: Message) -> str:
    reasons = (message.get(k) for k in ("reasoning_content", "reasoning", "thinking"))
    calls = [c["function"] for c in message.get("tool_calls") or []]
    return "\n".join([message.get("content") or "", *map(str, filter(None, reasons)), str(calls)])


def common_start(first: str, *others: str) -> int:
    """Return how many characters all texts begin with."""
    length = len(first)
    for other in others:
        length = min(length, len(other))
        if first[:length] == other[:length]:
            continue
        low, high = 0, length  # the texts agree up to low, and differ within high
        while high - low > 1:
            middle = (low + high) // 2
            if first[low:middle] == other[low:middle]:
                low = middle
            else:
                high = middle
        length = low
    return length


def common_end(first: str, second: str) -> int:
    return common_start(first[::-1], second[::-1])


def cuts(prompt: str) -> list[str]:
    """Return a generation prompt, and it without the tags at its end (an opened `<think>`)."""
    cuts = []
    while prompt.strip():
        cuts.append(prompt)
        shorter = _TAG.sub("", prompt)
        if shorter == prompt:
            break
        prompt = shorter
    return cuts


def pattern_of(words: Sequence[str]) -> re.Pattern:
    key = tuple(words)
    if key not in _patterns:
        longest_first = sorted(filter(None, key), key=len, reverse=True)
        _patterns[key] = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    return _patterns[key]


_patterns: dict[tuple[str, ...], re.Pattern] = {}


def run_of(words: Sequence[str], text: str) -> str:
    """Return white space and the unbroken row of `words` that `text` begins with; may be empty."""
    at = len(text) - len(text.lstrip())
    begin, pattern = at, pattern_of(words)
    while match := pattern.match(text, at):
        at = match.end()
    return text[:at] if at > begin else ""


def first_of(words: Sequence[str], text: str) -> str:
    at = len(text) - len(text.lstrip())
    match = pattern_of(words).match(text, at)
    return text[: match.end()] if match else ""


def each_of(words: Sequence[str], text: str) -> list[str]:
    return [match.group() for match in pattern_of(words).finditer(text)]
