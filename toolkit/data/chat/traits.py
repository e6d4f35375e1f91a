"""Determine the text that a template puts around answers, from a short test conversation."""

import copy
import json
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from toolkit.data.examples.columns import REASONING

Message = dict[str, Any]
Span = tuple[int, int]  # characters (begin, end)
Marks = tuple[str, ...]  # special tokens, or other texts around turns
_TAG = r"<[^<>\s]+>|\[/?[A-Z_]+\]"
Render = Callable[..., str]  # render(messages, prompt=False) -> text; raises `TEMPLATE_ERRORS`
TEMPLATE_ERRORS = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""Errors that the expressions of a template raise. Other errors have another cause."""
WORDS = ("Qz4vKx7Wb", "h9MtUe3Ry", "Jw8dNp2Ls")  # different words that occur in no template
_USER, _ANSWER, _NEXT = WORDS


def common_prefix_length(first: str, *texts: str) -> int:
    """Return the length in characters of the longest prefix that all texts share."""

    def differ(length: int) -> bool:
        return not all(text.startswith(first[:length]) for text in texts)

    return bisect_right(range(1, len(first) + 1), False, key=differ)


@lru_cache(maxsize=64)
def compile_marks(words: Marks, tags: bool = False) -> re.Pattern[str]:
    """Compile a pattern that matches any of `words` and, if `tags`, any tag such as `<think>`.

    Without words and tags, the pattern matches nothing. Cached.
    """
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    either = [*map(re.escape, longest_first), *([_TAG] if tags else [])]
    return re.compile("|".join(either) or "(?!)")


def align_to_mark(text: str, at: int, specials: Marks) -> int:
    """Return the offset `at`, moved to the start of the tag or special token that contains it.

    An offset that is not inside of one is returned unchanged.
    """
    for match in compile_marks(specials, tags=True).finditer(text):
        if match.start() < at < match.end():
            return match.start()
    return at


@dataclass(frozen=True)
class TemplateTraits:
    """The texts that a template prints around the answers of a conversation."""

    prompt: str = ""
    """Text that `add_generation_prompt` adds to a question. If it adds nothing: the header of the
    answer, if it has the same form as that of the question."""
    header: str = ""
    """Part of `prompt` that an answer begins with, if nothing else is before the answer."""
    unasked: bool = False
    """True if every text ends with a generation prompt, requested or not."""
    closings: tuple[str, ...] = ()
    """Texts that may follow an answer, up to and including its stop token."""
    openers: Marks = ()
    """Special tokens that begin a turn or end its header."""


def find_traits(
    render: Render, specials: Marks, bos: str | None, eos: str | None
) -> TemplateTraits:
    """Determine the texts that a template prints around answers, by rendering a short test chat.

    The chat is a question, an answer and a question. If the template refuses it, it is rendered
    with a system text before it. If that fails too, the result has no texts.

    Args:
        render: renders messages with the template.
        specials: special tokens.
        bos: the begin-of-sequence token, if there is one.
        eos: the end-of-sequence token, if there is one.
    """
    user, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}
    following = {"role": "user", "content": _NEXT}
    for before in ([], [{"role": "system", "content": "Answer."}]):
        try:
            bare, prompted = render([*before, user]), render([*before, user], prompt=True)
            last = render([*before, user, answer])
            middle = render([*before, user, answer, following])
        except TEMPLATE_ERRORS:
            continue
        if all(word in middle for word in (_USER, _ANSWER, _NEXT)) and _ANSWER in last:
            break
    else:
        return TemplateTraits()
    marks = [match.group() for match in compile_marks(specials).finditer(bare.partition(_USER)[0])]
    begins = [special for special in marks if special != bos][:1]
    ends = last.rpartition(_ANSWER)[2]
    before_next = middle.partition(_ANSWER)[2].partition(_NEXT)[0]
    between = last.partition(_USER)[2].partition(_ANSWER)[0]
    header = {
        *marks[:1],
        *begins,
        *marks[-1:],
        *_find_answer_opener(between, ends, before_next, specials),
    }
    openers = tuple(header - {eos})
    closings = find_closings(ends, before_next, specials, openers, only_amid=True)
    prompt = prompted[align_to_mark(prompted, common_prefix_length(prompted, bare), specials) :]
    if prompt.strip():
        shared = (k for k in range(len(prompt), 0, -1) if between.endswith(prompt[:k]))
        return TemplateTraits(prompt, prompt[: next(shared, 0)], False, closings, openers)
    try:
        other = render([*before, user, following])  # a question that no answer follows
    except TEMPLATE_ERRORS:
        other = ""
    for text, longer in ((ends, before_next), (bare, other)):
        added = (
            text[align_to_mark(text, common_prefix_length(text, longer), specials) :]
            if longer
            else ""
        )
        if compile_marks((eos or "",)).sub("", added).strip() and last.startswith(bare):
            return TemplateTraits(added, "", True, closings, openers)
    prompt = last.removeprefix(bare).partition(_ANSWER)[0]
    same = _replace_words(bare.partition(_USER)[0]).endswith(_replace_words(prompt))
    built = other.startswith(bare) and last.startswith(bare) and same
    return TemplateTraits(prompt if built else "", "", False, closings, openers)


def _find_answer_opener(between: str, ends: str, before_next: str, specials: Marks) -> list[str]:
    """Return [the last special token of an answer's header], or [] if the header has none.

    Args:
        between: text between a question and its answer, which is searched.
        ends: text after an answer at the end of a chat. Its first special token is excluded.
        before_next: text between an answer and the next turn. Its first special token is excluded.
        specials: special tokens.
    """
    pattern = compile_marks(specials)
    stops = {match.group() for text in (ends, before_next) if (match := pattern.search(text))}
    return [m.group() for m in pattern.finditer(between) if m.group() not in stops][-1:]


def find_closings(
    last: str,
    middle: str,
    specials: Marks,
    openers: Marks,
    *,
    calls: bool = False,
    only_amid: bool = False,
) -> Marks:
    """Find the texts that may follow a turn, up to and including its stop token.

    Args:
        last: text after the turn at the end of a conversation.
        middle: text between the turn and the next one.
        specials: special tokens.
        openers: special tokens that begin a turn; they are no stop tokens.
        calls: the turn has tool calls, so its special tokens need not be adjacent.
        only_amid: if `last` is blank, accept a stop token that is only in `middle`.

    Returns:
        One or two texts; two if the stop token at the end differs from the one before a turn. Empty
        if there is no stop token, or if it is ambiguous.
    """
    whole = last.rstrip()
    ends = any(s and whole.endswith(s) and s not in openers for s in specials)
    if ends and middle.startswith(whole) and compile_marks(specials).sub("", whole).strip():
        # Words between special tokens close the turn together with these tokens.
        return (whole,)
    both = last[: align_to_mark(last, common_prefix_length(last, middle), specials)]
    end = None
    for special in compile_marks(specials).finditer(both):
        apart = not calls and special.start() != end
        if end is not None and (special.group() in openers or apart):
            break
        end = special.end()
    else:
        if calls and both[end:].strip():  # the end of a call that is no special token
            end = len(both.rstrip())
    if end is not None:
        after = [compile_marks(specials).match(text, end) for text in (last, middle)]
        other = all(m is not None and m.group() not in openers for m in after)
        # If another special token follows, the stop token of a turn with calls is ambiguous.
        return () if calls and other else (both[:end],)
    if both.strip():
        return (both.rstrip(),) if len(both) >= len(last.rstrip()) else ()
    # The stop token at the end differs from the one within a conversation, or only one exists.
    firsts = []
    for text in (last, middle):
        match = compile_marks(specials).match(text, len(text) - len(text.lstrip()))
        if match is not None and match.group() not in openers:
            firsts.append(text[: match.end()])
    return tuple(firsts) if only_amid or last.strip() else ()


def _replace_words(header: str) -> str:
    """Replace each word of a header by the letter w, to compare the form of headers."""
    return re.sub(r"[^\W_]+", "w", header)


def with_content(message: Message, content: str) -> Message:
    """Return a copy of a message with this content."""
    return {**message, "content": content}


def only_content(message: Message, content: str) -> Message:
    """Return a copy of a message with this content and without tool calls."""
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}


def change_call(
    message: Message, at: int, where: str, word: str, number: int
) -> tuple[Message, str]:
    """Return a copy of a message with one changed value in one of its tool calls, and that value.

    Args:
        message: a turn with tool calls.
        at: index of the call.
        where: `name` changes the name of the function. `argument` changes the last value in the
            arguments, at any depth. If they are empty, an argument is added.
        word: the new value in place of a text, or the name of the added argument.
        number: the new value in place of anything else.

    Returns:
        (changed copy, new value as text).
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


def without_reasoning(message: Message) -> Message | None:
    """Return a copy of a turn without its reasoning keys; None if it has none."""
    silent = {k: v for k, v in message.items() if k not in REASONING}
    return silent if silent != message else None


def join_texts(message: Message) -> str:
    """Join all texts of a turn with newlines: content, reasoning, and tool calls.

    Arguments of calls are included as Python text and as JSON, since templates print either.
    """
    texts = [message.get("content"), *(message.get(key) for key in REASONING)]
    for call in message.get("tool_calls") or []:
        texts += [call["function"], *_list_printed_forms(call["function"]["arguments"])]
    return "\n".join(map(str, filter(None, texts)))


def _list_printed_forms(value: Any) -> list[str]:
    """List the Python text and the JSON text of a value and of all values within it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    as_json = [json.dumps(value, ensure_ascii=ascii, default=str) for ascii in (True, False)]
    return [str(value), *as_json] + [text for part in inner for text in _list_printed_forms(part)]


def common_prefix_ignoring_space(prompt: str, text: str) -> Span:
    """Compute the common prefix of two texts, ignoring white space.

    Returns:
        (its length in `prompt`, its length in `text`); each includes the white space there.
    """
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


def printable_parts(content: str) -> list[str]:
    """List a content and, for each tag in it, the text after the tag. Blank texts are omitted.

    A template may print only such a part, because it drops reasoning before a tag.
    """
    tags = compile_marks((), tags=True).finditer(content)
    parts = [content, *(content[tag.end() :] for tag in tags)]
    return [part.strip() for part in parts if part.strip()]
