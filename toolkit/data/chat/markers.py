"""Generation markers of a chat template, checked against what rendering tells.

Owns the comparison. Refuses to know how either was found.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from toolkit.data.chat.habits import Habits
from toolkit.data.chat.mask_text import pattern_of
from toolkit.data.chat.masks import Marked, Span
from toolkit.data.sources.row_values import BadRow


def with_markers(
    ours: Marked,
    markers: list[Span],
    wanted: Iterable[int],
    *,
    specials: Sequence[str],
    known: Habits,
) -> Marked:
    """Return the turns `wanted` as the template's own generation markers have them.

    `ours` holds every turn of the assistant. At the edges the two may differ in special tokens,
    tags, white space and the prompt (whether the newline after the stop token is learned is the
    author's choice); everything else is an error.

    Raises:
        BadRow: markers and rendering disagree, or a turn has no marker.
    """
    markers = [(begin, end) for begin, end in markers if ours.text[begin:end]]
    specials = [*specials, known.prompt]
    turns: dict[int, list[Span]] = {i: [] for i in ours.turns}
    last = None
    for begin, end in markers:
        overlap = [i for i, (b, e) in ours.turns.items() if begin < e and b < end]
        if len(overlap) == 1:
            last = overlap[0]
        elif overlap or last is None or not _only_marks(ours.text[begin:end], specials):
            said = ours.text[begin:end][:60]
            raise BadRow(
                "expected each generation marker of the chat template around one turn of the "
                f"assistant, got one around {said!r}; repair the template's markers, or remove "
                "them",
                "generation markers disagree",
            )
        turns[last].append((begin, end))
    out = Marked(ours.text, notes=ours.notes)
    for i in wanted:
        b, e = ours.turns[i]
        if not turns[i]:
            raise BadRow(
                f"expected a generation marker around turn {i} (assistant), the chat template has "
                "none there",
                "generation markers disagree",
            )
        begin, end = turns[i][0][0], turns[i][-1][1]
        edges = [(min(b, begin), max(b, begin)), (min(e, end), max(e, end))]
        gaps = [(x[1], y[0]) for x, y in pairwise(turns[i])]
        for low, high in [*edges, *gaps]:
            if not _only_marks(ours.text[low:high], specials):
                raise BadRow(
                    f"the generation markers of the chat template and turn {i} (assistant) differ "
                    f"by {ours.text[low:high][:60]!r}; repair the template's markers, or remove "
                    "them",
                    "generation markers disagree",
                )
        out.turns[i] = (begin, end)
    return out


def _only_marks(text: str, specials: Sequence[str]) -> bool:
    rest = pattern_of(tuple(specials)).sub("", text)
    return not re.sub(r"<[^<>\s]+>", "", rest).strip()
