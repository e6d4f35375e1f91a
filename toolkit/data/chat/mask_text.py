"""Small operations on text and turns for the search of turns in a rendering.

Owns common beginnings, edges that cut no tag, and turns with a word put in. Refuses to know
templates and what is searched for.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

Message = dict[str, Any]

_TAG = r"<[^<>\s]+>|\[/?[A-Z_]+\]"


def absent(word: str, text: str) -> str:
    while word in text:
        word = f"{word[0]}{word}"
    return word


def with_content(message: Message, content: str) -> Message:
    return {**message, "content": content}


def only_content(message: Message, content: str) -> Message:
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}


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


def text_of(message: Message) -> str:
    """Return all that a turn says: content, reasoning, calls."""
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


def loose_start(prompt: str, text: str) -> tuple[int, int]:
    """Return how far both agree but for white space: characters of `prompt`, and of `text`."""
    a = b = 0
    while a < len(prompt):
        if b < len(text) and prompt[a] == text[b]:
            a, b = a + 1, b + 1
        elif prompt[a].isspace():
            a += 1
        elif b < len(text) and text[b].isspace():
            b += 1
        else:
            break
    return a, b


@lru_cache(maxsize=64)
def pattern_of(words: tuple[str, ...], tags: bool = False) -> re.Pattern[str]:
    """Return what matches any of `words`, the longest first; with `tags`, `<think>` and such."""
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    either = [*map(re.escape, longest_first), *([_TAG] if tags else [])]
    return re.compile("|".join(either) or "(?!)")


def uncut(text: str, at: int, specials: Sequence[str]) -> int:
    """Return `at`, or where the tag or special token begins that it lies within."""
    for match in pattern_of(tuple(specials), tags=True).finditer(text):
        if match.start() < at < match.end():
            return match.start()
    return at


def spellings(content: str) -> Iterator[str]:
    """Yield the content as a template may print it: as it is, or stripped."""
    yield from dict.fromkeys((content, content.strip(), content.rstrip(), content.lstrip()))


def said_of(content: str) -> list[str]:
    """Return the content, and what of it a template prints that leaves out what a tag ends, such as
    reasoning; stripped.
    """
    tags = pattern_of((), tags=True).finditer(content)
    rests = [content, *(content[tag.end() :] for tag in tags)]
    return [rest.strip() for rest in rests if rest.strip()]
