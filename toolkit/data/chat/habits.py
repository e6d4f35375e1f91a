"""What a chat template puts around an answer, whatever the conversation."""

import re
from dataclasses import dataclass

from toolkit.data.chat.rendering import TEMPLATE_ERRORS, Render, common_start, pattern_of, uncut

_USER, _ANSWER, _NEXT = "Qz4vKx7Wb", "h9MtUe3Ry", "Jw8dNp2Ls"


@dataclass(frozen=True)
class Habits:
    """What a template does with a question, an answer, a question."""

    # What `add_generation_prompt` adds to a question; where it adds nothing, the header of the
    # answer, if it is built as that of the question is.
    prompt: str = ""
    header: str = ""  # what of `prompt` the answer begins with, where no more comes before it
    unasked: bool = False  # a generation prompt ends every text, asked for or not
    closings: tuple[str, ...] = ()  # what may follow an answer, up to and with its stop token
    openers: tuple[str, ...] = ()  # special tokens that begin a turn or end its header


def habits(render: Render, specials: tuple[str, ...], bos: str | None, eos: str | None) -> Habits:
    """Return the habits of a template: none where it takes no such conversation."""
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
        return Habits()
    marks = [match.group() for match in pattern_of(specials).finditer(bare.partition(_USER)[0])]
    begins = [special for special in marks if special != bos][:1]
    openers = tuple({*marks[:1], *begins, *marks[-1:]} - {eos})
    ends = last.rpartition(_ANSWER)[2]
    before_next = middle.partition(_ANSWER)[2].partition(_NEXT)[0]
    closings = closings_of(ends, before_next, specials, openers)
    prompt = asked[uncut(asked, common_start(asked, bare), specials) :]
    if prompt.strip():
        between = last.partition(_USER)[2].partition(_ANSWER)[0]
        shared = (k for k in range(len(prompt), 0, -1) if between.endswith(prompt[:k]))
        return Habits(prompt, prompt[: next(shared, 0)], False, closings, openers)
    try:
        other = render([*before, user, following])  # a question that no answer follows
    except TEMPLATE_ERRORS:
        other = ""
    for text, longer in ((ends, before_next), (bare, other)):
        rest = text[uncut(text, common_start(text, longer), specials) :] if longer else ""
        if pattern_of((eos or "",)).sub("", rest).strip() and last.startswith(bare):
            return Habits(rest, "", True, closings, openers)
    prompt = last.removeprefix(bare).partition(_ANSWER)[0]
    same = _shape(bare.partition(_USER)[0]).endswith(_shape(prompt))
    built = other.startswith(bare) and last.startswith(bare) and same
    return Habits(prompt if built else "", "", False, closings, openers)


def closings_of(
    last: str, middle: str, specials: tuple[str, ...], openers: tuple[str, ...], calls: bool = False
) -> tuple[str, ...]:
    """Return what may close a turn, stop token at its end; empty where nothing does.

    `last` follows the turn at the end of a conversation, `middle` amid it. With `calls`, special
    tokens apart from each other may end the turn.
    """
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
        return (both[:end],)
    if both.strip():
        return (both.rstrip(),) if len(both) >= len(last.rstrip()) else ()
    firsts = []  # another stop token at the end than amid, or only there
    for text in (last, middle):
        match = pattern_of(specials).match(text, len(text) - len(text.lstrip()))
        if match is not None and match.group() not in openers:
            firsts.append(text[: match.end()])
    return tuple(firsts) if last.strip() else ()


def _shape(header: str) -> str:
    """Return a header with a letter for each word."""
    return re.sub(r"[^\W_]+", "w", header)
