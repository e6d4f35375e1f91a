"""Long conversations: answers that a template prints alike are found by a few of them.

[Note: long conversations] To find the edges of a turn takes some renderings of the whole
conversation, so that its cost would grow with the square of the turns. Two renderings with another
word in each answer's place tell where all answers stand. Where the header before each and what
follows each are the same texts, the first, the last and some others tell the edges of all.
"""

from collections.abc import Sequence

from toolkit.data.chat.masks import NO_STOP, REASONING, Rendered, Search, only_content
from toolkit.data.chat.traits import Span

MANY = 16  # answers from which on this is worth while
_TRIED = 8  # of them that are looked at one by one


def find_similar_answers(search: Search, wanted: Sequence[int]) -> Rendered | None:
    """Return what `Search.found` does, in time that grows with the length alone; None where the
    answers are few, not plain, or not printed alike.
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
        stop = search.stop(wanted[k], end, None)
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
        search.check(wanted[k], *spans[-1], spans[-2][1] if k else 0, exactly)
    closings = [tried.get(k, usual)[1] for k in range(count)]
    unended += sum(not search.ends_turn(closing) for closing in closings)
    search.notes[NO_STOP] = unended
    return Rendered(search.text, spans, +search.notes)


def _is_special(search: Search, i: int) -> bool:
    message = search.messages[i]
    return any(message.get(key) for key in ("tool_calls", *REASONING))


def _places(search: Search, wanted: Sequence[int]) -> list[Span] | None:
    """Return where the contents of the answers stand."""
    parts: list[list[str]] = []
    for word in search.words:
        words = {i: f"{word}q{i}q" for i in wanted}
        text = search.changed({i: only_content(search.messages[i], w) for i, w in words.items()})
        parts.append([])
        for own in words.values():
            if text is None or text.count(own) != 1:
                return None
            before, _, text = text.partition(own)
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


def _header(search: Search, i: int, before: Span, own: Span) -> str | None:
    """Return what stands between the turn before an answer and it; None where that is unknown."""
    said = (search.messages[i - 1].get("content") or "").strip()
    between = search.text[before[1] : own[0]]
    return between.rpartition(said)[2] if said and said in between else None
