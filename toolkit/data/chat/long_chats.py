"""Find the answers of long conversations from a few of them, if the template prints all alike.

[Note: long conversations] Finding the edges of one turn takes several renderings of the complete
conversation, so the cost would grow with the square of the number of turns. Instead, two renderings
with another word in place of each answer show the position of all answers. If the header before
each answer and the text after it are equal, the edges of the first, the last and a few other
answers determine the edges of all.
"""

from collections.abc import Sequence

from toolkit.data.chat.masks import NO_STOP, Rendered, Search
from toolkit.data.chat.traits import Span, only_content
from toolkit.data.examples.columns import REASONING

MANY = 16  # number of answers from which this is faster
_TRIED = 8  # number of answers that are searched one by one


def find_similar_answers(search: Search, wanted: Sequence[int]) -> Rendered | None:
    """Find the spans of answers like `Search.find_spans`, in time linear in the text.

    Returns:
        The rendering with its spans; None if the answers are few, have tool calls or reasoning, or
        are not printed alike.
    """
    if len(wanted) < MANY or any(_is_special(search, i) for i in wanted):
        return None
    places = _places(search, wanted)
    if places is None:
        return None
    count = len(wanted)
    some = sorted({0, 1, *(count * k // _TRIED for k in range(_TRIED)), count - 2, count - 1})
    tried, unended = {}, search.notes[NO_STOP]
    for k in some:
        before = places[k - 1][1] if k else 0
        low, end, _ = search.content(wanted[k])
        search.lows[wanted[k]] = low
        stop = search.end_of_turn(wanted[k], end, None)
        begin, exactly = search.start(wanted[k], low, end, before)
        if not exactly:
            search.compare_prompt(wanted[k], begin, stop)
        tried[k] = (begin - places[k][0], search.text[places[k][1] : stop], exactly)
    usual, header = tried[1], _header(search, wanted[1], *places[:2])
    if any(tried[k] != usual for k in some[1:-1]) or header is None or len(header) < -usual[0]:
        return None
    spans: list[Span] = []
    for k, (low, end) in enumerate(places):
        shift, closing, exactly = tried.get(k, usual)
        alike = k in tried or _header(search, wanted[k], *places[k - 1 : k + 1]) == header
        if not alike or not search.text.startswith(closing, end):
            return None
        spans.append((low + shift, end + len(closing)))
        search.check_span(wanted[k], *spans[-1], spans[-2][1] if k else 0, exactly)
    closings = [tried.get(k, usual)[1] for k in range(count)]
    unended += sum(not search.ends_turn(closing) for closing in closings)
    search.notes[NO_STOP] = unended
    return Rendered(search.text, spans, +search.notes)


def _is_special(search: Search, i: int) -> bool:
    message = search.messages[i]
    return any(message.get(key) for key in ("tool_calls", *REASONING))


def _places(search: Search, wanted: Sequence[int]) -> list[Span] | None:
    """Find the positions of the contents of the answers; None if they cannot be determined."""
    parts: list[list[str]] = []
    for word in search.words:
        words = {i: f"{word}q{i}q" for i in wanted}
        text = search.render_changed(
            {i: only_content(search.messages[i], w) for i, w in words.items()}
        )
        parts.append([])
        for answer_word in words.values():
            if text is None or text.count(answer_word) != 1:
                return None
            before, _, text = text.partition(answer_word)
            parts[-1].append(before)
        parts[-1].append(text or "")
    if parts[0] != parts[1] or not search.text.startswith(parts[0][0]):
        return None
    places: list[Span] = []
    at = len(parts[0][0])
    for i, after in zip(wanted, parts[0][1:], strict=True):
        content = search.messages[i].get("content") or ""
        ends = [at + len(c) for c in (content, content.strip()) if search.text.startswith(c, at)]
        end = next((end for end in ends if search.text.startswith(after, end)), None)
        if end is None:
            return None
        places.append((at, end))
        at = end + len(after)
    return places if at == len(search.text) else None


def _header(search: Search, i: int, before: Span, span: Span) -> str | None:
    """Extract the text between the turn before an answer and the answer; None if it is unknown."""
    content = (search.messages[i - 1].get("content") or "").strip()
    between = search.text[before[1] : span[0]]
    return between.rpartition(content)[2] if content and content in between else None
