"""Give all answers of a conversation the same beginning.

[Note: beginnings of answers] Some templates begin an answer without reasoning with an empty block,
such as `<think></think>`, but only the last one: of a conversation with two answers the first is
rendered as `Paris.`, the second as `<think></think>It is 4.` Both follow the same prompt, so the
model would learn two beginnings for it. A server renders each earlier answer without the block. So
a block that only the last answer has is context in such a conversation: each answer is supervised
from its first word on. If the block is in the prompt, which a switch of the template does
(`enable_thinking: false`), all answers begin alike anyway.

A block that all supervised answers begin with, as that of a conversation with one answer, is
supervised: the model has to write it after the prompt that a server gives by default.
"""

import re
from collections import Counter
from collections.abc import Callable

from toolkit.data.chat.masks import Rendered, Search
from toolkit.data.chat.traits import Span, pattern_of, uncut

LEARNED = (
    "conversations learn an empty {} block, which the chat template adds to an answer without "
    "reasoning"
)
NOT_LEARNED = (
    "conversations whose last answer has an empty {} block from the chat template. The loss does "
    "not cover it, because their other answers have none"
)
BLOCK_NOTES = tuple(note.partition("{")[0] for note in (LEARNED, NOT_LEARNED))
"""Beginnings of the notes on empty blocks, which are counts of conversations."""
_EMPTY_BLOCK = re.compile(
    r"<([^<>\s/]+)>\s*</\1>|\[([A-Z_]+)\]\s*\[/\2\]|◁(\w+)▷\s*◁/\3▷|"
    r"<\|(?:START|BEGIN)_(\w+)\|>\s*<\|END_\4\|>"
)


def align_beginnings(
    search: Search, rendered: Rendered, turns: list[int], advice_for: Callable[[str, int], str]
) -> Rendered:
    """Return `rendered` with spans that begin alike, and with notes on empty blocks of reasoning.

    Costs a rendering for each answer that the template begins with tags alone.

    Args:
        turns: the turns of the spans, in order.
        advice_for: returns the sentence that tells how the prompt comes to hold a text that begins
            a turn.
    """
    spans, notes = list(rendered.spans), Counter[str]()
    if len(spans) != len(turns):  # spans of markers that could not be checked
        return rendered
    for at, i in enumerate(turns):
        inserted = _inserted(search, i, spans[at])
        block = _EMPTY_BLOCK.search(inserted)
        if block is None:
            continue
        note = LEARNED
        written = block.group() in (search.messages[i].get("content") or "")
        if not written and _only_last(search, i, spans[at], inserted):
            first = pattern_of(search.specials, tags=True).match(inserted, block.start())
            tag = inserted[: first.end()] if first else inserted
            have_tag = (search.text.startswith(tag, begin) for begin, _ in rendered.spans)
            if not all(have_tag):
                spans[at] = spans[at][0] + len(inserted), spans[at][1]
                note = NOT_LEARNED
        block_text = "".join(block.group().split())
        notes[f"{note.format(block_text)}. {advice_for(inserted, i)}"] = 1
    return Rendered(rendered.text, spans, rendered.notes + notes)


def _inserted(search: Search, i: int, span: Span) -> str:
    """Return the tags that begin turn `i` before anything that the turn says; else nothing."""
    low = search.lows.get(i)
    if low is None or low <= span[0]:
        return ""
    text = search.text[span[0] : uncut(search.text, low, search.specials)]
    is_bare = not pattern_of(search.specials, tags=True).sub("", text).strip()
    return text if is_bare else ""


def _only_last(search: Search, i: int, span: Span, inserted: str) -> bool:
    """Return whether turn `i` would begin otherwise if a question and an answer followed it."""
    more = [
        {"role": "user", "content": search.words[0]},
        {"role": "assistant", "content": search.words[1]},
    ]
    text = search.tried([*search.messages[: i + 1], *more])
    if text is None or not text.startswith(search.text[: span[0]]):
        return False
    return not text.startswith(inserted, span[0])
