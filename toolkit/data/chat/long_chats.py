"""Find the answers of long conversations from a few of them, if the template prints all alike.

[Note: long conversations] Finding the edges of one turn takes several renderings of the complete
conversation, so the cost would grow with the square of the number of turns. Instead, two renderings
with another word in place of each answer show the position of all answers. If the header before
each answer and the text after it are equal, the edges of the first, the last and a few other
answers determine the edges of all.
"""

from collections.abc import Sequence

from toolkit.data.chat.masks import NO_STOP, EdgeSearch, Rendered
from toolkit.data.chat.traits import Span, only_content
from toolkit.data.examples.columns import REASONING

MANY = 16  # number of answers from which this search is faster
_SEARCHED = 8  # number of answers that are searched one by one


def find_spans_of_similar_answers(search: EdgeSearch, turns: Sequence[int]) -> Rendered | None:
    """Find the same spans as `EdgeSearch.find_spans`, in time linear in the text.

    Only about ten answers are searched; see [Note: long conversations].

    Args:
        search: the conversation and its rendering.
        turns: indices of the answers, ascending.

    Returns:
        The rendering with its spans; None if there are fewer than `MANY` answers, if one has tool
        calls or reasoning, or if they are not all printed in the same form.

    Raises:
        EdgesNotFound: the span of one of the searched answers cannot be found, or a span is wrong.
    """
    if len(turns) < MANY or any(_has_calls_or_reasoning(search, i) for i in turns):
        return None
    places = _find_content_spans(search, turns)
    if places is None:
        return None
    count = len(turns)
    some = sorted({0, 1, *(count * k // _SEARCHED for k in range(_SEARCHED)), count - 2, count - 1})
    edges = {}
    without_stop = search.notes[NO_STOP]
    for k in some:
        before = places[k - 1][1] if k else 0
        low, end, _ = search.find_content(turns[k])
        search.lows[turns[k]] = low
        stop = search.find_end(turns[k], end, None)
        begin, exactly = search.find_start(turns[k], low, end, before)
        if not exactly:
            search.check_prompt(turns[k], begin, stop)
        edges[k] = (begin - places[k][0], search.text[places[k][1] : stop], exactly)
    usual, header = edges[1], _find_answer_header(search, turns[1], *places[:2])
    if any(edges[k] != usual for k in some[1:-1]) or header is None or len(header) < -usual[0]:
        return None
    spans: list[Span] = []
    for k, (low, end) in enumerate(places):
        shift, closing, exactly = edges.get(k, usual)
        alike = (
            k in edges or _find_answer_header(search, turns[k], *places[k - 1 : k + 1]) == header
        )
        if not alike or not search.text.startswith(closing, end):
            return None
        spans.append((low + shift, end + len(closing)))
        search.check_span(turns[k], *spans[-1], spans[-2][1] if k else 0, exactly)
    closings = [edges.get(k, usual)[1] for k in range(count)]
    without_stop += sum(not search.ends_with_special(closing) for closing in closings)
    search.notes[NO_STOP] = without_stop
    return Rendered(search.text, spans, +search.notes)


def _has_calls_or_reasoning(search: EdgeSearch, i: int) -> bool:
    """Return True if turn `i` has tool calls or reasoning."""
    message = search.messages[i]
    return any(message.get(key) for key in ("tool_calls", *REASONING))


def _find_content_spans(search: EdgeSearch, turns: Sequence[int]) -> list[Span] | None:
    """Return the characters [begin, end) of each answer's content in the rendering.

    Costs two renderings.

    Returns:
        One span per index in `turns`; None if the positions are ambiguous or the template refuses
        the changed answers.
    """
    parts: list[list[str]] = []
    for word in search.words:
        words = {i: f"{word}q{i}q" for i in turns}
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
    for i, after in zip(turns, parts[0][1:], strict=True):
        content = search.messages[i].get("content") or ""
        ends = [at + len(c) for c in (content, content.strip()) if search.text.startswith(c, at)]
        end = next((end for end in ends if search.text.startswith(after, end)), None)
        if end is None:
            return None
        places.append((at, end))
        at = end + len(after)
    return places if at == len(search.text) else None


def _find_answer_header(search: EdgeSearch, i: int, before: Span, span: Span) -> str | None:
    """Return the text between the content of turn `i - 1` and the content of answer `i`.

    Args:
        search: the conversation and its rendering.
        i: index of the answer.
        before: span of the content of the previous answer, which is an earlier turn than `i - 1`.
        span: span of the content of this answer.

    Returns:
        The header; None if turn `i - 1` is empty or is not printed between the two spans.
    """
    content = (search.messages[i - 1].get("content") or "").strip()
    between = search.text[before[1] : span[0]]
    return between.rpartition(content)[2] if content and content in between else None
