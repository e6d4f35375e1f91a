"""Operations on text and turns for the search of turns in a rendering."""

import copy
import re
from bisect import bisect_right
from functools import lru_cache
from typing import Any

Message = dict[str, Any]
Span = tuple[int, int]  # characters (begin, end)
_TAG = r"<[^<>\s]+>|\[/?[A-Z_]+\]"


def with_content(message: Message, content: str) -> Message:
    return {**message, "content": content}


def only_content(message: Message, content: str) -> Message:
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}


def with_call(
    message: Message, at: int, where: str, word: str, number: int
) -> tuple[Message, str] | None:
    """Return the message with its tool call `at` changed, and the text to look for.

    `where`: `name`, or `argument`: the last value in the arguments, however deep. `word` takes the
    place of text, `number` of an integer; None for other values.
    """
    message = copy.deepcopy(message)
    inner: Any = message["tool_calls"][at]["function"]
    key: Any = "name" if where == "name" else "arguments"
    while isinstance(inner[key], dict | list) and inner[key]:
        inner, key = inner[key], (list(inner[key])[-1] if isinstance(inner[key], dict) else -1)
    if isinstance(inner[key], bool) or not isinstance(inner[key], str | int):
        return None
    inner[key] = word if isinstance(inner[key], str) else number
    return message, str(inner[key])


def text_of(message: Message) -> str:
    """Return all that a turn says: content, reasoning, calls."""
    reasons = (message.get(k) for k in ("reasoning_content", "reasoning", "thinking"))
    calls = [c["function"] for c in message.get("tool_calls") or []]
    return "\n".join([message.get("content") or "", *map(str, filter(None, reasons)), str(calls)])


def common_start(first: str, *others: str) -> int:
    """Return how many characters all texts begin with."""

    def differ(length: int) -> bool:
        return not all(other.startswith(first[:length]) for other in others)

    return bisect_right(range(1, len(first) + 1), False, key=differ)


def loose_start(prompt: str, text: str) -> Span:
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


def uncut(text: str, at: int, specials: tuple[str, ...]) -> int:
    """Return `at`, or where the tag or special token begins that it lies within."""
    for match in pattern_of(specials, tags=True).finditer(text):
        if match.start() < at < match.end():
            return match.start()
    return at


def said_of(content: str) -> list[str]:
    """Return the content, and its rests where a template drops what a tag ends, as reasoning."""
    tags = pattern_of((), tags=True).finditer(content)
    rests = [content, *(content[tag.end() :] for tag in tags)]
    return [rest.strip() for rest in rests if rest.strip()]
