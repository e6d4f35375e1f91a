"""Which characters of a rendered conversation are the assistant's, found by rendering it.

[Note: masks from the template]
What is learned of a turn is what a model would have to write after the prompt for it
(`add_generation_prompt`), stop token included. A template without generation markers does not say
which characters these are, but it can be asked, by rendering changed conversations:

end     the content of a turn is replaced by a word that occurs nowhere else. What then follows the
        word must end the true rendering: where that begins, the content ends. Two unlike words must
        agree, and the content must stand before that place. A turn with tool calls is replaced as a
        whole by such a content or, where the template does not take that, the word is put into the
        last argument.
stop    what follows both where the conversation ends with the turn and where another turn comes
        after it, up to its special tokens.
start   where the prompt for this turn ends, if the rendering begins with it. If it does not (it
        drops earlier reasoning, say), what follows the turn before is compared: all of the prompt
        but white space, or what all answers share with it: its header.

It takes four to nine renderings for each turn. What cannot be found is refused: a mask that is
wrong by one turn trains without an error.
"""

import copy
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from toolkit.data.chat.traits import (
    TEMPLATE_ERRORS,
    WORDS,
    Marks,
    Message,
    Render,
    Span,
    TemplateTraits,
    closings_of,
    common_start,
    pattern_of,
    uncut,
)
from toolkit.data.examples.columns import REASONING
from toolkit.data.sources.row_values import BadRow

REFUSED = "refused by template"
NO_STOP = "assistant turns without a stop token"
_LONGEST_PROMPT = 1000  # characters of what a template adds to ask for an answer
SURELY = 12  # a text of more characters that stands in the rendering was printed there
NUMBERS = (4017293651, 9382650747)  # unlike integers, for arguments of tool calls
OTHER_PROMPT = "last turns before which the chat template prints something else than their prompt"


class NotFound(BadRow):
    """The edges of a turn cannot be found; generation markers may still tell them."""

    def __init__(self, said: str) -> None:
        super().__init__(said, "no edges")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with all special tokens; to be tokenised without adding any."""

    text: str
    spans: list[Span]  # characters (begin, end) that are learned, in order, disjoint
    notes: Counter[str] = field(default_factory=Counter)  # kind -> how often: worth a warning


class Search:
    """The true rendering of a conversation, `text`, and what changed ones tell of its turns.

    BadRow: the template refuses the conversation. What it leaves out: see `checks.py`.
    """

    def __init__(
        self,
        render: Render,
        messages: list[Message],
        specials: Marks,
        known: TemplateTraits,
    ) -> None:
        self.render, self.messages, self.specials, self.known = render, messages, specials, known
        self.notes: Counter[str] = Counter()
        self.asked = ""  # the prompt for the turn that is looked at
        self.lows: dict[int, int] = {}  # turn -> where the first thing that it says is printed
        try:
            self.text = render(messages)
        except TEMPLATE_ERRORS as error:
            raise self._refusal(error) from error
        # Two unlike words that are not in it, plain, so that no template escapes or trims them.
        self.words = [_absent(word, self.text) for word in WORDS[:2]]

    def found(self, wanted: list[int]) -> Rendered:
        """Return the rendering with the characters of the turns `wanted`, indices of turns of the
        assistant, ascending. NotFound where the edges of one cannot be told.
        """
        spans, before = [], 0
        for i in wanted:
            low, end, call = self.content(i)
            self.lows[i] = low
            stop = self.stop(i, end, call)
            begin, exactly = self.start(i, low, end, before)
            self.check(i, begin, stop, before, exactly)
            if not exactly:
                self.compare_prompt(i, begin, stop)
            spans.append((begin, stop))
            before = stop
        return Rendered(self.text, spans, +self.notes)

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
        refuses = f"the chat template refuses {self.named(turn)}: {said}"
        return BadRow(f"{refuses}{self._begins_with_answer()}", REFUSED)

    def _begins_with_answer(self) -> str:
        roles = [m.get("role") for m in self.messages if m.get("role") != "system"]
        return ". Let it begin with a turn of the user" if roles[:1] == ["assistant"] else ""

    # ---- Contents

    def content(self, i: int) -> tuple[int, int, tuple[Message, str] | None]:
        """Return a bound for the start of turn `i`, its end but for the stop token, and the change
        of a tool call that found it.
        """
        message = self.messages[i]
        content, calls = message.get("content") or "", message.get("tool_calls")
        like = self.words_like(content)
        for words in (self.words, like) if like and not calls else (self.words,):
            try:
                low, end = self._between(i, [(only_content(message, w), w) for w in words])
            except NotFound:
                if words is like or not (like or calls):
                    raise
                continue
            if not calls:
                self._check_content(i, content, end)
            elif not self._before_next(i, low, end):
                continue
            elif not self.known.closings:
                end = self._call_end(i, self._arguments_end(i, end), end)
            return low, end, None
        before, after = self.messages[:i], self.messages[i + 1 :]
        plain = [f(message, w) for f in (with_content, only_content) for w in self.words]
        tried = [self.tried([*before, m, *rest]) for m in plain for rest in (after, [])]
        low = common_start(self.text, *(text for text in tried if text is not None))
        changes = self._changed_calls(i)
        inner, end = self._between(i, changes, new_argument=self._is_bare_call(i))
        low = min(low, inner)
        if self._before_next(i, low, end):
            return low, end, changes[0]
        raise NotFound(f"cannot tell where {self.named(i)} ends in the rendering")

    def _arguments_end(self, i: int, end: int) -> int:
        try:
            bare = self._is_bare_call(i)
            return self._between(i, self._changed_calls(i), new_argument=bare)[1]
        except NotFound:
            return end  # a call without arguments may be printed otherwise than one with them

    def _call_end(self, i: int, inner: int, end: int) -> int:
        """Return where the tool calls of turn `i` end, of a template whose answers have no stop
        token: with the last tag that is printed between `inner`, the end of their last argument,
        and `end`. What follows it may be the beginning of their results.
        """
        marks = [*pattern_of(self.specials, tags=True).finditer(self.text, inner, end)]
        if not marks:
            return end
        if after := self.text[marks[-1].end() : end].strip():
            raise NotFound(
                f"cannot tell where {self.named(i)} ends: {after[:60]!r} follows its tool calls"
            )
        return marks[-1].end()

    def _changed_calls(self, i: int) -> list[tuple[Message, str]]:
        pairs = zip(self.words, NUMBERS, strict=True)
        return [with_call(self.messages[i], -1, "argument", *pair) for pair in pairs]

    def _between(
        self, i: int, changes: list[tuple[Message, str]], *, new_argument: bool = False
    ) -> Span:
        """Return how far all renderings agree, and where the text after the words begins.

        With `new_argument` the words are in an argument that the true rendering does not have. What
        ends the argument is new, too, so the end is where all renderings begin to agree again.
        """
        tried = (self.changed({i: message}) for message, _ in changes)
        texts = [text for text in tried if text is not None]
        if len(texts) < len(changes):
            raise NotFound(f"the chat template refuses {self.named(i)} changed")
        tails: list[str] = []
        for text, (_, word) in zip(texts, changes, strict=True):
            if text.count(word) > 1 and not self.messages[i].get("tool_calls"):
                raise BadRow(
                    f"the chat template prints {self.named(i)} {text.count(word)} times; use "
                    "another (data.chat_template)",
                    "turn printed twice",
                )
            if word not in text:
                raise NotFound(f"the chat template does not print {self.named(i)}")
            tails.append(text.rpartition(word)[2])
        follows = len(tails[0])
        if not self.text.endswith(tails[0]) and new_argument:
            follows = common_start(self.text[::-1], *(text[::-1] for text in texts))
        elif tails[0] != tails[1] or not self.text.endswith(tails[0]):
            raise NotFound(f"cannot tell where {self.named(i)} ends: what follows varies")
        return common_start(self.text, *texts), len(self.text) - follows

    def _is_bare_call(self, i: int) -> bool:
        """Return whether turn `i` ends with a call without arguments."""
        calls = self.messages[i].get("tool_calls") or []
        return bool(calls) and calls[-1]["function"]["arguments"] in ({}, "{}")

    def _before_next(self, i: int, low: int, end: int) -> bool:
        """Return whether the turn after turn `i` is printed after `end`, with its header.

        Positions tell it: where the text changes if the next turn says something else, and where it
        changes if a user turn takes its place. The latter counts only if turn `i`, from `low` on,
        is printed alike before both.
        """
        if i == len(self.messages) - 1:
            return True
        following = (with_content(self.messages[i + 1], word) for word in self.words)
        texts = [self.changed({i + 1: message}) for message in following]
        if end > common_start(self.text, *(text for text in texts if text is not None)):
            return False
        user = {"role": "user", "content": self.words[0]}
        asked = self.tried([*self.messages[: i + 1], user])
        agreed = len(self.text) if asked is None else common_start(self.text, asked)
        return end <= agreed or agreed <= low

    def _check_content(self, i: int, content: str, end: int) -> None:
        """Refuse a turn in whose place the template prints something else, such as a stub."""
        before = self.text[:end].rstrip()
        if any(before.endswith(said) for said in said_of(content)):
            return
        # Letters may be escaped: then a word as long is asked for.
        word = (self.words_like(content) or [""])[0]
        text = self.changed({i: with_content(self.messages[i], word)}) if word else None
        if content.strip() and (text is None or word not in text):
            raise NotFound(f"the chat template prints something else for {self.named(i)}")

    # ---- Stop tokens

    def stop(self, i: int, end: int, call: tuple[Message, str] | None) -> int:
        """Return where turn `i` ends with its stop token; `end` is where its content ends."""
        rest = self.text[end:]
        closings = [c for c in self.known.closings if rest.startswith(c)]
        if call is not None or not closings:
            last, middle = self._tails(i, rest, call)
            calls = call is not None
            found = closings_of(last, middle, self.specials, self.known.openers, calls=calls)
            closings = [c for c in found if rest.startswith(c)]
            if not closings and pattern_of(self.specials).sub("", last).strip():
                raise NotFound(
                    f"cannot tell where {self.named(i)} ends: {last[:60]!r} follows it at the end, "
                    f"{middle[:60]!r} amid a conversation"
                )
        closing = max(closings, key=len, default="")
        self.notes[NO_STOP] += not self.ends_turn(closing)
        stop = end + len(closing)
        return stop if call is None or self.known.closings else self._call_end(i, end, stop)

    def ends_turn(self, closing: str) -> bool:
        """Whether a text ends with a special token."""
        return closing.endswith(tuple(filter(None, self.specials)))

    def _tails(self, i: int, rest: str, call: tuple[Message, str] | None) -> tuple[str, str]:
        """Return what follows the content of turn `i` at the end of a conversation, and amid it."""
        amid = i < len(self.messages) - 1
        if amid and self.messages[i].get("tool_calls"):
            ended = self.tried(self.messages[: i + 1]) or ""
            known = self.text[: len(self.text) - len(rest)]
            if ended.startswith(known):
                return ended[len(known) :], rest
        word = [*self.words_like(self.messages[i].get("content") or ""), self.words[0]][0]
        message, word = call or (only_content(self.messages[i], word), word)
        turns = [*self.messages[:i], message]
        following = [] if amid else [{"role": "user", "content": self.words[1]}]
        text = self.tried([*turns, *following])
        if text is not None and word in text:
            text = text.rpartition(word)[2].partition(self.words[1])[0]
        elif amid:
            raise NotFound(f"the chat template lets no conversation end with {self.named(i)}")
        else:
            text = rest
        return (text, rest) if amid else (rest, text)

    # ---- Starts

    def start(self, i: int, low: int, end: int, before: int) -> tuple[int, bool]:
        """Return where turn `i` begins, after its prompt, and whether all before is that prompt."""
        asked = self.tried(self.messages[:i], prompt=True)
        self.asked = asked or ""
        if asked is not None and i and not self.text.startswith(asked):
            return self._after_the_turn_before(i), False
        if asked is None or not self.text.startswith(asked):
            header = self.known.header or self.known.prompt
            at = self.text.find(header, before, low) + len(header)
            single = header.strip() and self.text.count(header, before, low) == 1
            prompt = header == self.known.prompt and (i or not self._words(self.text[at:low]))
            if single and (at == low or prompt):
                return at, False
            raise NotFound(
                f"the chat template gives no prompt for {self.named(i)}{self._begins_with_answer()}"
            )
        if not before <= len(asked) <= end:
            raise NotFound(f"the prompt for {self.named(i)} ends in another turn")
        constant = self.text[len(asked) : low]
        if constant.strip() and (silent := without_reasoning(self.messages[i])):
            text = self.changed({i: silent})
            if text is not None and text.startswith(asked):  # a reasoning is no header
                constant = constant[: common_start(self.text, text) - len(asked)]
        bare = asked if not constant.strip() else self.tried(self.messages[:i])
        return len(asked) + self._header(i, constant, asked != bare), True

    def _header(self, i: int, constant: str, prompted: bool) -> int:
        """Return how much of what stands before any content of turn `i` is its header."""
        if not constant.strip():
            return 0
        if self.known.prompt.strip() and constant.startswith(self.known.prompt):
            return len(self.known.prompt)
        if self.known.prompt.endswith(constant):  # the prompt only ended the turn before
            return len(constant)
        if (prompted or self.known.unasked) and (i or not self._words(constant)):
            return 0  # after a prompt the model is to write all of it
        raise NotFound(
            f"the chat template prints {constant[:60]!r} before {self.named(i)}, and no "
            "generation prompt that tells whether the assistant says it"
        )

    def _words(self, text: str) -> str:
        """Return a text without special tokens, tags, and white space around it."""
        return pattern_of(self.specials, tags=True).sub("", text).strip()

    def _after_the_turn_before(self, i: int) -> int:
        """Return where turn `i` begins, from what follows the turn before, here and in the prompt.

        Each is what follows a word in place of that turn's content: `full` in the conversation,
        `prompt` in the prompt for turn `i`, `bare` without the prompt, `tries` with a word in the
        place of turn `i`, and what stands before that word.
        """
        word = f"{self.words[0]}b"
        turns = [*self.messages]
        turns[i - 1] = with_content(turns[i - 1], word)

        def after(messages: list[Message], prompt: bool = False) -> str | None:
            text = self.tried(messages, prompt=prompt)
            return text.partition(word)[2] if text is not None and text.count(word) == 1 else None

        full, prompt, bare = after(turns), after(turns[:i], True), after(turns[:i])
        for rest in (turns[i + 1 :], []):  # a word for tool calls: their results may not follow
            plain = [{"role": turns[i]["role"], "content": w} for w in self.words]
            answers = [[*turns[:i], answer, *rest] for answer in plain]
            pairs = [(w, after(answer)) for w, answer in zip(self.words, answers, strict=True)]
            tries = [text.partition(w)[0] for w, text in pairs if text is not None and w in text]
            if len(tries) == len(pairs):
                break
        if (
            full is None
            or prompt is None
            or bare is None
            or not self.text.endswith(full)
            or not tries
        ):
            raise NotFound(f"cannot tell where {self.named(i)} begins in the rendering")
        return len(self.text) - len(full) + self._prompt_end(i, full, prompt, bare, tries)

    def _prompt_end(self, i: int, full: str, prompt: str, bare: str, tries: list[str]) -> int:
        if full.startswith(prompt):
            constant = tries[0][len(prompt) :] if tries[0].startswith(prompt) else ""
            return len(prompt) + self._header(i, constant, prompt != bare)
        of_prompt, at = loose_start(prompt, full)
        if of_prompt == len(prompt):  # but for white space
            of_prompt, place = loose_start(prompt, tries[0])
            space = tries[0][place:] if of_prompt == len(prompt) else ""
            return at + (len(space) if not space.strip() and full.startswith(space, at) else 0)
        shared = uncut(prompt, common_start(prompt, *tries), self.specials)
        shared = uncut(tries[0], shared, self.specials)
        header = uncut(prompt, common_start(prompt, bare), self.specials)
        held = uncut(prompt, common_start(prompt, full), self.specials)
        constant = tries[0][shared:]
        if (
            len({*tries}) != 1
            or (self._words(prompt[shared:]) and self._words(constant))  # the headers differ
            or not prompt[header:shared].strip()
            or held < shared
            or (constant and not constant.strip())
            or pattern_of(self.specials, tags=True).search(prompt[shared:held])
        ):
            raise NotFound(
                f"the chat template's prompt for {self.named(i)} goes on with "
                f"{prompt[held:][:60]!r}, the conversation does not; other chat_template_kwargs "
                "may fit it (enable_thinking, say)"
            )
        return shared

    # ---- Checks

    def compare_prompt(self, i: int, begin: int, end: int) -> None:
        """Refuse a turn of which the prompt holds the beginning; note a last one whose prompt the
        text does not hold: earlier ones may be printed otherwise than they were asked for.
        """
        asked, inside = self.asked, self.text[begin:end]
        most = min(len(inside), _LONGEST_PROMPT)
        shared = next((k for k in range(most, 0, -1) if asked.endswith(inside[:k])), 0)
        if pattern_of(self.specials, tags=True).search(inside[:shared]):
            raise NotFound(
                f"the prompt for {self.named(i)} holds {inside[:shared][:60]!r} already, the "
                "conversation prints it once"
            )
        if i == len(self.messages) - 1 and loose_start(asked, self.text)[0] < len(asked):
            self.notes[OTHER_PROMPT] += 1

    def check(self, i: int, begin: int, end: int, before: int, exactly: bool) -> None:
        """Refuse a span that is empty, overlaps the one before, or holds what others said."""
        own, inside = text_of(self.messages[i]), self.text[begin:end]
        # All before a turn that begins after its very prompt is that prompt.
        turns = self.messages[i + 1 :] if exactly else self.messages
        others = [(m.get("content") or "").strip() for m in turns if m["role"] != "assistant"]
        plain = pattern_of(self.specials)
        others = [o for o in others if len(plain.sub("", o)) > SURELY and o not in own]
        calls = self.messages[i].get("tool_calls") or []
        names = [call["function"]["name"] for call in calls]
        contents = said_of(self.messages[i].get("content") or "") if calls else []
        if (
            begin < before
            or end <= begin
            or (not exactly and self._holds_header(i, inside, own))
            or any(said in inside for said in others)
            or (contents and not any(said in inside for said in contents))
        ):
            raise NotFound(f"cannot tell {self.named(i)} from what is rendered around it")
        if missing := [name for name in names if name not in inside]:
            raise NotFound(f"the name {missing[0]!r} of a call of {self.named(i)} is not printed")

    def _holds_header(self, i: int, inside: str, own: str) -> bool:
        """Whether more headers of answers stand in `inside` than turn `i` prints by itself."""
        header = self.known.prompt.strip()
        if len(header) < 3 or header not in inside or header in own:
            return False
        alone = self.tried([{"role": "user", "content": self.words[0]}, self.messages[i]]) or ""
        return inside.count(header) >= max(1, alone.count(header))


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


def without_reasoning(message: Message) -> Message | None:
    """Return the turn without its reasoning; None where it has none."""
    silent = {k: v for k, v in message.items() if k not in REASONING}
    return silent if silent != message else None


def text_of(message: Message) -> str:
    """Return all that a turn says: content, reasoning, calls; their arguments as templates print
    them, each by itself or together.
    """
    said = [message.get("content"), *(message.get(key) for key in REASONING)]
    for call in message.get("tool_calls") or []:
        said += [call["function"], *_parts(call["function"]["arguments"])]
    return "\n".join(map(str, filter(None, said)))


def _parts(value: Any) -> list[str]:
    """Return a value as text and as JSON, and so each that it holds."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    as_json = [json.dumps(value, ensure_ascii=ascii, default=str) for ascii in (True, False)]
    return [str(value), *as_json] + [text for part in held for text in _parts(part)]


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


def said_of(content: str) -> list[str]:
    """Return the content, and its rests where a template drops what a tag ends, as reasoning."""
    tags = pattern_of((), tags=True).finditer(content)
    rests = [content, *(content[tag.end() :] for tag in tags)]
    return [rest.strip() for rest in rests if rest.strip()]
