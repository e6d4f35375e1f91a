"""Renderings of a conversation and of changed ones: what a template puts around answers."""

import copy
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from toolkit.data.sources.row_values import BadRow

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
REFUSED = "refused by template"
SURELY = 12  # a text of more characters that stands in the rendering was printed there
NUMBERS = (4017293651, 9382650747)  # unlike integers, for arguments of tool calls
_USER, _ANSWER, _NEXT = "Qz4vKx7Wb", "h9MtUe3Ry", "Jw8dNp2Ls"


class Rendering:
    """The true rendering of a conversation, `text`, or BadRow where the template refuses it; and
    changed ones.
    """

    def __init__(self, render: Render, messages: list[Message]) -> None:
        self.render, self.messages = render, messages
        try:
            self.text = render(messages)
        except TEMPLATE_ERRORS as error:
            raise self._refusal(error) from error
        # Two unlike words that are not in it, plain, so that no template escapes or trims them.
        self.words = [_absent(word, self.text) for word in (_USER, _ANSWER)]

    def words_like(self, content: str) -> list[str]:
        """Return two words as long as `content`; none where it is too short."""
        words = [(word * (1 + len(content) // len(word)))[: len(content)] for word in self.words]
        return words if len(content) > 3 and not any(w in self.text for w in words) else []

    def named(self, i: int) -> str:
        return f"turn {i} ({self.messages[i].get('role')})"

    def changed(self, changes: dict[int, Message]) -> str | None:
        """Return the rendering with some turns replaced; None where the template raises."""
        return self.tried([changes.get(i, message) for i, message in enumerate(self.messages)])

    def tried(self, messages: list[Message], **options: Any) -> str | None:
        """Return the rendering, None where the template raises: it may judge what it is given."""
        try:
            return self.render(messages, **options)
        except TEMPLATE_ERRORS:
            return None

    def _refusal(self, error: Exception) -> BadRow:
        """Name the turn that the template does not take: the first that makes it raise."""
        said = " ".join(str(error).split())[:200] or type(error).__name__
        for turn in range(len(self.messages)):
            try:
                self.render(self.messages[: turn + 1])
            except TEMPLATE_ERRORS as earlier:
                if str(earlier) == str(error):
                    break
        return BadRow(f"the chat template refuses {self.named(turn)}: {said}", REFUSED)


def check_printed(view: Rendering, has_tools: bool) -> None:
    """Raise BadRow where the template leaves out a content, a tool call, or the tools.

    Costs a rendering for each tool call, each content too short to be looked for, and the tools.
    """
    calls = []
    for i, message in enumerate(view.messages):
        calls += [(i, at, call) for at, call in enumerate(message.get("tool_calls") or [])]
        content = (message.get("content") or "").strip()
        if not content or (len(content) >= SURELY and content in view.text):
            continue
        text = view.changed({i: with_content(message, view.words[0])})
        if (content not in view.text) if text is None else (view.words[0] not in text):
            beside = " beside its tool calls" if message.get("tool_calls") else ""
            raise _not_printed(f"content of {view.named(i)}{beside}", "content")
    for i, at, call in calls:
        text, mark = view.text, (name := call["function"]["name"])
        for where in ("argument", "name"):
            message, changed_to = with_call(view.messages[i], at, where, view.words[0], NUMBERS[0])
            if (changed := view.changed({i: message})) is not None:
                text, mark = changed, changed_to
                break
        if mark not in text:
            raise _not_printed(f"tool call {name!r} of {view.named(i)}", "tool call")
    if has_tools and view.tried(view.messages, tools=False) == view.text:
        advice = "use one that knows tools (data.chat_template), or leave out the column"
        what = f"the chat template prints nothing of the tools; {advice}"
        raise BadRow(what, "tools not printed")


def _not_printed(what: str, kind: str) -> BadRow:
    return BadRow(
        f"the chat template prints nothing of the {what}; use another template "
        "(data.chat_template), or leave out such rows (data.on_bad_row: skip)",
        f"{kind} not printed",
    )


def _absent(word: str, text: str) -> str:
    while word in text:
        word = word[0] + word
    return word


def with_content(message: Message, content: str) -> Message:
    return {**message, "content": content}


def only_content(message: Message, content: str) -> Message:
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}


def with_call(message: Message, at: int, where: str, word: str, number: int) -> tuple[Message, str]:
    """Return the message with its tool call `at` changed, and the text to look for.

    `where`: `name`, or `argument`: the last value in the arguments, however deep, a new one where
    there are none. `word` takes the place of text, `number` of any other value.
    """
    message = copy.deepcopy(message)
    inner: Any = message["tool_calls"][at]["function"]
    key: Any = "name" if where == "name" else "arguments"
    while isinstance(inner[key], dict | list) and inner[key]:
        inner, key = inner[key], (list(inner[key])[-1] if isinstance(inner[key], dict) else -1)
    if inner[key] == {}:
        inner, key = inner[key], word
        inner[key] = number
    else:
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


def said_of(content: str) -> list[str]:
    """Return the content, and its rests where a template drops what a tag ends, as reasoning."""
    tags = pattern_of((), tags=True).finditer(content)
    rests = [content, *(content[tag.end() :] for tag in tags)]
    return [rest.strip() for rest in rests if rest.strip()]


@dataclass(frozen=True)
class Habits:
    """What a template does with a question, an answer, a question."""

    # What `add_generation_prompt` adds to a question; where it adds nothing, the header of the
    # answer, if it is built as that of the question is.
    prompt: str = ""
    header: str = ""  # what of `prompt` the answer begins with, where no more comes before it
    unasked: bool = False  # a generation prompt ends every text, asked for or not
    closings: tuple[str, ...] = ()  # what may follow an answer, up to and with its stop token
    openers: Marks = ()  # special tokens that begin a turn or end its header


def habits(render: Render, specials: Marks, bos: str | None, eos: str | None) -> Habits:
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
    last: str, middle: str, specials: Marks, openers: Marks, calls: bool = False
) -> Marks:
    """Return what may close a turn, stop token at its end; empty where nothing does.

    `last` follows the turn at the end of a conversation, `middle` amid it. With `calls`, special
    tokens apart from each other may end the turn.
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
