"""What a template puts around answers, told from renderings of a short conversation."""

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

Message = dict[str, Any]
Span = tuple[int, int]  # characters (begin, end)
Marks = tuple[str, ...]  # special tokens, or other texts that stand around turns
_TAG = r"<[^<>\s]+>|\[/?[A-Z_]+\]"
Render = Callable[..., str]  # render(messages, prompt=False) -> text; raises `TEMPLATE_ERRORS`
TEMPLATE_ERRORS = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""What the expressions of a template raise. Others (memory, files) are not the template's."""
WORDS = ("Qz4vKx7Wb", "h9MtUe3Ry", "Jw8dNp2Ls")  # unlike, which occur in no template
_USER, _ANSWER, _NEXT = WORDS


def common_start(first: str, *others: str) -> int:
    """Return how many characters all texts begin with."""

    def differ(length: int) -> bool:
        return not all(other.startswith(first[:length]) for other in others)

    return bisect_right(range(1, len(first) + 1), False, key=differ)


@lru_cache(maxsize=64)
def pattern_of(words: Marks, tags: bool = False) -> re.Pattern[str]:
    """Return what matches any of `words`, the longest first; with `tags`, `<think>` and such."""
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    either = [*map(re.escape, longest_first), *([_TAG] if tags else [])]
    return re.compile("|".join(either) or "(?!)")


def uncut(text: str, at: int, specials: Marks) -> int:
    """Return `at`, or where the tag or special token begins that it lies within."""
    for match in pattern_of(specials, tags=True).finditer(text):
        if match.start() < at < match.end():
            return match.start()
    return at


@dataclass(frozen=True)
class TemplateTraits:
    """What a template does with a question, an answer, a question."""

    # What `add_generation_prompt` adds to a question; where it adds nothing, the header of the
    # answer, if it is built as that of the question is.
    prompt: str = ""
    header: str = ""  # what of `prompt` the answer begins with, where no more comes before it
    unasked: bool = False  # a generation prompt ends every text, asked for or not
    closings: tuple[str, ...] = ()  # what may follow an answer, up to and with its stop token
    openers: Marks = ()  # special tokens that begin a turn or end its header


def find_traits(
    render: Render, specials: Marks, bos: str | None, eos: str | None
) -> TemplateTraits:
    """Return the traits of a template: none where it takes no such conversation."""
    user, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}
    following = {"role": "user", "content": _NEXT}
    for before in ([], [{"role": "system", "content": "Answer."}]):
        try:
            bare, asked = render([*before, user]), render([*before, user], prompt=True)
            last = render([*before, user, answer])
            middle = render([*before, user, answer, following])
        except TEMPLATE_ERRORS:
            continue
        if all(word in middle for word in (_USER, _ANSWER, _NEXT)) and _ANSWER in last:
            break
    else:
        return TemplateTraits()
    marks = [match.group() for match in pattern_of(specials).finditer(bare.partition(_USER)[0])]
    begins = [special for special in marks if special != bos][:1]
    ends = last.rpartition(_ANSWER)[2]
    before_next = middle.partition(_ANSWER)[2].partition(_NEXT)[0]
    between = last.partition(_USER)[2].partition(_ANSWER)[0]
    header = {
        *marks[:1],
        *begins,
        *marks[-1:],
        *_answer_opener(between, ends, before_next, specials),
    }
    openers = tuple(header - {eos})
    closings = closings_of(ends, before_next, specials, openers, only_amid=True)
    prompt = asked[uncut(asked, common_start(asked, bare), specials) :]
    if prompt.strip():
        shared = (k for k in range(len(prompt), 0, -1) if between.endswith(prompt[:k]))
        return TemplateTraits(prompt, prompt[: next(shared, 0)], False, closings, openers)
    try:
        other = render([*before, user, following])  # a question that no answer follows
    except TEMPLATE_ERRORS:
        other = ""
    for text, longer in ((ends, before_next), (bare, other)):
        rest = text[uncut(text, common_start(text, longer), specials) :] if longer else ""
        if pattern_of((eos or "",)).sub("", rest).strip() and last.startswith(bare):
            return TemplateTraits(rest, "", True, closings, openers)
    prompt = last.removeprefix(bare).partition(_ANSWER)[0]
    same = _shape(bare.partition(_USER)[0]).endswith(_shape(prompt))
    built = other.startswith(bare) and last.startswith(bare) and same
    return TemplateTraits(prompt if built else "", "", False, closings, openers)


def _answer_opener(between: str, ends: str, before_next: str, specials: Marks) -> list[str]:
    """Return the special token that ends the header of an answer, in a list, or an empty list.

    It is the last one `between` a question and its answer. If it also follows an answer, at the end
    (`ends`) or before the next turn (`before_next`), it is a stop token and no header has one.
    """
    pattern = pattern_of(specials)
    stops = {match.group() for text in (ends, before_next) if (match := pattern.search(text))}
    return [m.group() for m in pattern.finditer(between) if m.group() not in stops][-1:]


def closings_of(
    last: str,
    middle: str,
    specials: Marks,
    openers: Marks,
    *,
    calls: bool = False,
    only_amid: bool = False,
) -> Marks:
    """Return what may close a turn, stop token at its end; empty where nothing does.

    `last` follows the turn at the end of a conversation, `middle` amid it. With `calls`, special
    tokens apart from each other may end the turn. With `only_amid`, where a turn follows that one
    of `openers` begins, its stop token may be one that the last turn does not have.
    """
    whole = last.rstrip()
    ends = any(s and whole.endswith(s) and s not in openers for s in specials)
    if ends and middle.startswith(whole) and pattern_of(specials).sub("", whole).strip():
        return (whole,)  # words between special tokens, which close the turn together
    both = last[: uncut(last, common_start(last, middle), specials)]
    end = None
    for special in pattern_of(specials).finditer(both):
        apart = not calls and special.start() != end
        if end is not None and (special.group() in openers or apart):
            break
        end = special.end()
    else:
        if calls and both[end:].strip():  # the end of a call that is no special token
            end = len(both.rstrip())
    if end is not None:
        after = [pattern_of(specials).match(text, end) for text in (last, middle)]
        other = all(m is not None and m.group() not in openers for m in after)
        return () if calls and other else (both[:end],)  # which of them is the stop token?
    if both.strip():
        return (both.rstrip(),) if len(both) >= len(last.rstrip()) else ()
    firsts = []  # another stop token at the end than amid, or only there
    for text in (last, middle):
        match = pattern_of(specials).match(text, len(text) - len(text.lstrip()))
        if match is not None and match.group() not in openers:
            firsts.append(text[: match.end()])
    return tuple(firsts) if only_amid or last.strip() else ()


def _shape(header: str) -> str:
    """Return a header with a letter for each word."""
    return re.sub(r"[^\W_]+", "w", header)
