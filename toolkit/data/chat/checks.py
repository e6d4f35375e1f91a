"""Check what a chat template omits from a conversation, and align the beginnings of its answers.

[Note: omitted parts] A part that is long enough and occurs in the rendering was printed. A shorter
part is replaced by a marker word, which must then be printed: templates trim and escape their
input, so the part itself may not occur literally.

[Note: beginnings of answers] Some templates begin an answer without reasoning with an empty block,
such as `<think></think>`, but only the last one. In a conversation with two answers, the first is
rendered as `Paris.`, the second as `<think></think>It is 4.` Both follow the same prompt, so the
model would learn two beginnings for it. A server renders each earlier answer without the block.
Therefore the loss does not cover a block that only the last answer has: each answer is supervised
from its first word on. If the block is part of the prompt, which a switch of the
template can do (`enable_thinking: false`), all answers begin alike anyway.

A block that all supervised answers begin with is supervised, as in a conversation with one answer:
the model has to write it after the prompt that a server gives by default.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from toolkit.data.chat.masks import NUMBERS, SURELY, EdgeSearch, Rendered
from toolkit.data.chat.traits import (
    Message,
    Span,
    align_to_mark,
    change_call,
    compile_marks,
    with_content,
)
from toolkit.data.examples.columns import REASONING
from toolkit.data.sources.row_values import BadRow

EARLIER_REASONING = (
    "earlier answers whose reasoning the chat template does not print, so that they are supervised "
    "without it; data.supervise: last_assistant trains on the last answers alone"
)
NOT_PRINTED = "conversations with a key {!r} of turns that the chat template does not print"
Changed = Callable[[str], Message]  # word -> the turn with this word in place of one of its parts
_MANY = 8  # number of short contents from which they are checked in one rendering
_KEYS = {"role", "content", "tool_calls", "tool_call_id", *REASONING}
_END_OF_THOUGHT = re.compile(r"</[^<>\s]+>|\[/[A-Z_]+\]|◁/\w+▷")
_TAG = re.compile(r"^\s*(<[^<>\s/]+>|\[[A-Z_]+\]|◁\w+▷)")


def check_all_printed(
    search: EdgeSearch, supervised: Sequence[int], *, has_tools: bool
) -> Counter[str]:
    """Raise an error if the template does not print a part of the conversation.

    Costs one rendering per tool call, per short text, for the tools, and for unusual keys of turns.

    Args:
        search: the conversation and its rendering.
        supervised: indices of the supervised turns.
        has_tools: the conversation has tools.

    Returns:
        Warning -> count. The warnings are about unprinted reasoning of supervised turns before the
        last one, and about unprinted keys such as `weight`. They are not errors.

    Raises:
        BadRow: the template omits or truncates the content of a turn, a tool call, the tools, or
            the reasoning of the last supervised turn.
    """
    printed_turns = _find_printed_short_contents(search)
    for i, message in enumerate(search.messages):
        content = (message.get("content") or "").strip()
        if i not in printed_turns and not _is_printed(
            search, i, content, partial(with_content, message)
        ):
            suffix = " next to its tool calls" if message.get("tool_calls") else ""
            raise _not_printed_error(f"content of {search.describe_turn(i)}{suffix}", "content")
    for i, message in enumerate(search.messages):
        for at in range(len(message.get("tool_calls") or [])):
            _check_call(search, i, at)
    if has_tools and search.try_render(search.messages, tools=False) == search.text:
        raise BadRow(
            "the chat template prints nothing of the tools; use one that knows tools "
            "(data.chat_template), or omit the column",
            "tools not printed",
        )
    return _check_reasoning(search, supervised) + _count_unused_keys(search)


def _is_printed(search: EdgeSearch, i: int, part: str, changed_to: Changed) -> bool:
    """Return True if the rendering contains `part`, which is a text of turn `i`.

    An empty part counts as printed. If a part is short or absent, the turn is rendered again with
    a marker word in its place, and the word must be printed.

    Args:
        search: the conversation and its rendering.
        i: index of the turn.
        part: content or reasoning of the turn.
        changed_to: function from a word to a copy of the turn with this word in place of `part`.
    """
    if not part or (len(part) >= SURELY and part in search.text):
        return True
    # The template may cut long parts, so the word should be as long as the part.
    word = [*search.make_words_like(part), search.words[0]][0]
    text = search.render_changed({i: changed_to(word)})
    return part in search.text if text is None else word in text


def _find_printed_short_contents(search: EdgeSearch) -> set[int]:
    """Return the indices of turns with a short content that is printed; costs one rendering.

    A content is short if it has fewer than `SURELY` characters. If there are fewer than `_MANY`
    short contents, the result is an empty set, and the caller checks each turn separately.
    """
    contents = {i: (m.get("content") or "").strip() for i, m in enumerate(search.messages)}
    words = {i: f"{search.words[0]}q{i}q" for i, c in contents.items() if 0 < len(c) < SURELY}
    if len(words) < _MANY:
        return set()
    text = search.render_changed({i: with_content(search.messages[i], w) for i, w in words.items()})
    return {i for i, word in words.items() if text is not None and word in text}


def _check_call(search: EdgeSearch, i: int, at: int) -> None:
    """Raise BadRow if a tool call is not printed, or its arguments are printed as a Python dict.

    Args:
        search: the conversation and its rendering.
        i: index of the turn.
        at: index of the call within the turn.
    """
    function = search.messages[i]["tool_calls"][at]["function"]
    text, mark = search.text, (name := function["name"])
    for where in ("argument", "name"):
        message, changed_to = change_call(
            search.messages[i], at, where, search.words[0], NUMBERS[0]
        )
        if (changed := search.render_changed({i: message})) is not None:
            text, mark = changed, changed_to
            break
    if mark not in text:
        raise _not_printed_error(f"tool call {name!r} of {search.describe_turn(i)}", "tool call")
    arguments = function["arguments"]
    if (
        isinstance(arguments, dict)
        and len(str(arguments)) >= SURELY
        and str(arguments) in search.text
    ):
        raise BadRow(
            f"the chat template prints the arguments of the call {name!r} of "
            f"{search.describe_turn(i)} as Python does ({str(arguments)[:60]}), not as JSON; use "
            "another (data.chat_template)",
            "arguments as Python",
        )


def _check_reasoning(search: EdgeSearch, supervised: Sequence[int]) -> Counter[str]:
    """Raise BadRow if the reasoning of the last supervised turn is not printed.

    Returns:
        {`EARLIER_REASONING`: number of earlier supervised turns with unprinted reasoning}; empty if
        there are none.
    """
    notes = Counter[str]()
    for i in supervised:
        if all(
            _is_printed(search, i, *thought)
            for thought in _iterate_reasoning(search, search.messages[i])
        ):
            continue
        if i != supervised[-1]:
            notes[EARLIER_REASONING] += 1
            continue
        raise BadRow(
            f"the chat template prints nothing of the reasoning of {search.describe_turn(i)}; use "
            "another "
            "(data.chat_template), or train without it (data.columns: {reasoning_content: null})",
            "reasoning not printed",
        )
    return notes


def _iterate_reasoning(search: EdgeSearch, message: Message) -> Iterator[tuple[str, Changed]]:
    """Yield (text, replace) for each reasoning text of a turn.

    The text is the value of a key in `REASONING`. If the content is not printed as it is, the text
    before an end tag such as `</think>` is reasoning, too. `replace(word)` returns a copy of the
    turn with `word` in place of the text.
    """
    for key in REASONING:
        if isinstance(thought := message.get(key), str):
            yield thought.strip(), partial(_replace_key, message, key)
    content = message.get("content") or ""
    ends = [] if content.strip() in search.text else [*_END_OF_THOUGHT.finditer(content)]
    if ends:
        before = content[: ends[-1].start()]
        tag = _TAG.match(before)
        thought = before[tag.end() if tag else 0 :].strip()
        yield thought, lambda word: with_content(message, content.replace(thought, word, 1))


def _replace_key(message: Message, key: str, word: str) -> Message:
    """Return a copy of a message in which `key` has the value `word`."""
    return {**message, key: word}


def _count_unused_keys(search: EdgeSearch) -> Counter[str]:
    """Return a warning with count 1 for each key of turns that does not change the rendering.

    Keys of the standard format, such as `role` and `tool_calls`, are not tested.
    """
    keys = dict.fromkeys(
        key
        for message in search.messages
        for key in message
        if key not in _KEYS and (key, message["role"]) != ("name", "tool")
    )

    def unused(without: Sequence[str]) -> bool:
        messages = [{k: v for k, v in m.items() if k not in without} for m in search.messages]
        return search.try_render(messages) == search.text

    if keys and not unused([*keys]):
        keys = {key: None for key in keys if unused([key])}
    return Counter(map(NOT_PRINTED.format, keys))


def _not_printed_error(part: str, kind: str) -> BadRow:
    """Create the error for an unprinted part of a conversation.

    Args:
        part: description of the part, for the message.
        kind: "content" or "tool call". Skipped rows are counted under this word.
    """
    return BadRow(
        f"the chat template prints nothing, or only a part, of the {part}; use another template "
        "(data.chat_template), or skip such rows (data.on_bad_row: skip)",
        f"{kind} not printed",
    )


LEARNED = (
    "conversations learn an empty {} block, which the chat template adds to an answer without "
    "reasoning"
)
NOT_LEARNED = (
    "conversations whose last answer has an empty {} block from the chat template. The loss does "
    "not cover it, because their other answers have none"
)
BLOCK_NOTES = tuple(note.partition("{")[0] for note in (LEARNED, NOT_LEARNED))
"""How the notes on empty blocks begin. Each note counts conversations."""
_EMPTY_BLOCK = re.compile(
    r"<([^<>\s/]+)>\s*</\1>|\[([A-Z_]+)\]\s*\[/\2\]|◁(\w+)▷\s*◁/\3▷|"
    r"<\|(?:START|BEGIN)_(\w+)\|>\s*<\|END_\4\|>"
)


def align_beginnings(
    search: EdgeSearch, rendered: Rendered, turns: list[int], advice_for: Callable[[str, int], str]
) -> Rendered:
    """Exclude an empty reasoning block from the loss if only the last answer begins with it.

    Such a block is, for example, `<think></think>`; see [Note: beginnings of answers]. If all
    answers begin with the block, it stays supervised. Costs one rendering for each answer that
    begins with such a block.

    Args:
        search: the conversation and its rendering.
        rendered: the rendering with one span per turn. With another number of spans, it is returned
            unchanged.
        turns: indices of the turns to which the spans belong.
        advice_for: function of (text, turn index). It returns a sentence that explains how to make
            the generation prompt for this turn end with the text.

    Returns:
        The rendering with the new spans, and with a note for each empty block.
    """
    spans, notes = list(rendered.spans), Counter[str]()
    # Spans of unchecked generation markers do not belong to turns.
    if len(spans) != len(turns):
        return rendered
    for at, i in enumerate(turns):
        inserted = _find_inserted_tags(search, i, spans[at])
        block = _EMPTY_BLOCK.search(inserted)
        if block is None:
            continue
        note = LEARNED
        written = block.group() in (search.messages[i].get("content") or "")
        if not written and _is_added_to_last_only(search, i, spans[at], inserted):
            first = compile_marks(search.specials, tags=True).match(inserted, block.start())
            tag = inserted[: first.end()] if first else inserted
            have_tag = (search.text.startswith(tag, begin) for begin, _ in rendered.spans)
            if not all(have_tag):
                spans[at] = spans[at][0] + len(inserted), spans[at][1]
                note = NOT_LEARNED
        block_text = "".join(block.group().split())
        notes[f"{note.format(block_text)}. {advice_for(inserted, i)}"] = 1
    return Rendered(rendered.text, spans, rendered.notes + notes)


def _find_inserted_tags(search: EdgeSearch, i: int, span: Span) -> str:
    """Return the tags that the template prints between the start of a span and the turn's content.

    Returns "" if that text is empty, or if it holds more than tags, special tokens and whitespace.

    Args:
        search: the conversation and its rendering.
        i: index of the turn.
        span: supervised characters [begin, end) of the turn.
    """
    low = search.lows.get(i)
    if low is None or low <= span[0]:
        return ""
    text = search.text[span[0] : align_to_mark(search.text, low, search.specials)]
    is_bare = not compile_marks(search.specials, tags=True).sub("", text).strip()
    return text if is_bare else ""


def _is_added_to_last_only(search: EdgeSearch, i: int, span: Span, inserted: str) -> bool:
    """Return True if the tags `inserted` are no longer printed when further turns follow turn `i`.

    The conversation is rendered up to turn `i` and two more turns. If the template refuses it, or
    prints something else before the span, the result is False.
    """
    more = [
        {"role": "user", "content": search.words[0]},
        {"role": "assistant", "content": search.words[1]},
    ]
    text = search.try_render([*search.messages[: i + 1], *more])
    if text is None or not text.startswith(search.text[: span[0]]):
        return False
    return not text.startswith(inserted, span[0])
