"""Which characters of a rendered conversation are the assistant's, found by rendering it.

Owns the search for the turns' edges and the checks that every turn is printed. Refuses to know
templates, tokenizers and processes: it gets a function that renders.

[Note: masks from the template]
A chat template says nothing about which characters are whose, unless it has generation markers. But
it can be asked, by rendering changed conversations:

end     the content of a turn is replaced by a word that occurs nowhere else. What then follows the
        word must end the true rendering: so the place where that begins is where the content ends.
        Two unlike words must agree. A turn with tool calls is replaced as a whole by such a content
        or, where the template does not take that, the word is put into the last argument.
stop    the special tokens that follow, as far as they end a conversation that ends there.
start   where the prompt ends that the template makes for this turn (`add_generation_prompt`): as a
        prefix of the whole, or else the nearest one before the content.

A first try replaces the contents of all turns at once: where the true rendering is exactly what
stands around the words with the true contents between, nothing is left to search. That makes a
handful of renderings for a conversation of any length; the search takes four for each turn.

The words are plain letters and digits, so that a template that escapes or trims does not change
them. What cannot be found is refused: a mask that is wrong by one turn trains without an error.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from toolkit.data.chat.mask_text import (
    Message,
    common_end,
    common_start,
    cuts,
    each_of,
    first_of,
    pattern_of,
    run_of,
    said_in,
    with_call,
    with_content,
    without_calls,
)
from toolkit.data.chat.printed import check_printed
from toolkit.data.chat.rendering import Render, Rendering
from toolkit.data.sources.row_values import BadRow

Span = tuple[int, int]
NO_STOP = "assistant turns without a stop token"
UNCHECKED = "conversations whose generation markers could not be checked"

_WORD = "Qz4vKx7Wb"
_NUMBERS = (4017293651, 9382650747)
_SURELY = 12
"""Others' contents of so many characters are looked for in a span."""


class NotFound(BadRow):
    """The edges of a turn cannot be found; generation markers may still tell them."""


@dataclass(frozen=True)
class Habits:
    """What a template does whatever the conversation: see `habits`.

    Attributes:
        prompt: what `add_generation_prompt` puts after a user's turn.
        stops: the special tokens right after the content of a last turn; where there are none, the
            text there.
    """

    prompt: str = ""
    stops: tuple[str, ...] = ()


@dataclass
class Marked:
    """A rendered conversation.

    Attributes:
        text: the whole rendering.
        turns: index of each supervised turn -> its characters (begin, end), in order, disjoint.
        notes: kind -> how often, of what deserves a warning.
    """

    text: str
    turns: dict[int, Span] = field(default_factory=dict)
    notes: Counter = field(default_factory=Counter)


def habits(render: Render, specials: Sequence[str], eos: str | None) -> Habits:
    """Return what the template puts around an answer, from renderings of a smallest conversation.

    A template that does not take that conversation (one that wants a system turn, say) gives the
    end-of-sequence token alone.
    """
    user = {"role": "user", "content": "Hello"}
    default = (eos,) if eos else ()
    try:
        bare, asked = render([user]), render([user], prompt=True)
        told = render([user, {"role": "assistant", "content": _WORD}])
    except Exception:
        return Habits(stops=default)
    tail = told.rpartition(_WORD)[2] if _WORD in told else ""
    prompt = asked[len(bare) :] if asked.startswith(bare) else ""
    ends = each_of(specials, run_of(specials, tail)) or [*filter(None, [tail.strip()])]
    return Habits(prompt, tuple(dict.fromkeys([*ends, *default])))


def mark(
    render: Render,
    messages: list[Message],
    wanted: Iterable[int],
    *,
    specials: Sequence[str],
    known: Habits,
    has_tools: bool = False,
) -> Marked:
    """Return the rendering of `messages` with the characters of the turns `wanted`.

    The characters of a turn are what a model is to write after the prompt for it: its reasoning
    where the template prints that, content, tool calls, and the stop token. See [Note: masks from
    the template].

    Args:
        render: renders messages; `render(..., tools=False)` leaves the tools out.
        messages: the turns, those of the assistant with content or tool calls.
        wanted: indices of turns of the assistant, ascending; empty to check only.
        specials: special tokens, as text.
        known: of `habits`.
        has_tools: whether there are tools that must be printed.

    Raises:
        BadRow: the template raises, or prints nothing (or twice) of a turn, or the tools.
        NotFound: the edges of a turn cannot be told.
    """
    view = Rendering(render, messages)
    check_printed(view, has_tools)
    return _Search(view, list(wanted), specials, known).found()


class _Search:
    def __init__(
        self, view: Rendering, wanted: list[int], specials: Sequence[str], known: Habits
    ) -> None:
        self.view, self.wanted, self.specials, self.known = view, wanted, specials, known
        self.text, self.messages, self.words = view.text, view.messages, view.words
        self.notes: Counter = Counter()

    def found(self) -> Marked:
        """Return the turns with their edges, after the checks on them."""
        contents = self._all_at_once()
        marked = Marked(self.text, notes=self.notes)
        before = 0
        for i in self.wanted:
            if i in contents:
                low, end = contents[i]
                stop = self._stop(i, end, None)
            else:
                low, stop = self._one_by_one(i)
            begin, proven = self._start(i, low, before)
            self._check(i, begin, stop, before, proven)
            marked.turns[i] = (begin, stop)
            before = stop
        return marked

    def _all_at_once(self) -> dict[int, Span]:
        """Return turn -> its characters in the text, found for all turns by one rendering.

        What stands around the words must make up the true rendering, with the true contents
        between; a turn with tool calls ends where what follows it comes for the only time.
        """
        calls = {i for i in self.wanted if self.messages[i].get("tool_calls")}
        for turns in (self.wanted, [i for i in self.wanted if i not in calls]):
            changes = {
                i: with_content(without_calls(self.messages[i]), self.view.word(i)) for i in turns
            }
            text = self.view.changed(changes) if turns else None
            if text is not None and (found := self._filled(text, turns, calls)):
                return found
            if not calls:
                break
        return {}

    def _filled(self, text: str, turns: list[int], calls: set[int]) -> dict[int, Span]:
        parts, found = [], {}
        for i in turns:
            around, word, text = text.partition(self.view.word(i))
            if not word:
                return {}
            parts.append(around)
        parts.append(text)
        if any(self.words[0] in part for part in parts) or not self.text.startswith(parts[0]):
            return {}
        at = len(parts[0])
        for i, following in zip(turns, parts[1:], strict=True):
            end = self._end_of(i, at, following, i in calls)
            if end is None:
                return {}
            found[i] = (at, end)
            at = end + len(following)
        return found if at == len(self.text) else {}

    def _end_of(self, i: int, at: int, following: str, calls: bool) -> int | None:
        if calls:
            end = self.text.find(following, at) if following else -1
            return end if end >= 0 and self.text.find(following, end + 1) < 0 else None
        content = self.messages[i].get("content") or ""
        for said in (content, content.strip(), content.rstrip(), content.lstrip()):
            if self.text.startswith(said + following, at):
                return at + len(said)
        return None

    def _one_by_one(self, i: int) -> Span:
        """Return a bound for the start of turn `i`, and its end with the stop token."""
        message = self.messages[i]
        # As a whole: what follows a turn that only says the word.
        plain = [(with_content(without_calls(message), word), word) for word in self.words]
        try:
            low, end = self._between(i, plain)
            return low, self._stop(i, end, None)
        except NotFound:
            if not message.get("tool_calls"):
                raise
        beside = [(with_content(message, word), word) for word in self.words]
        tried = [self.view.changed({i: changed}) for changed, _ in (*plain, *beside)]
        low = common_start(self.text, *(text for text in tried if text is not None))
        for where in ("argument", "name"):
            pairs = zip(self.words, _NUMBERS, strict=True)
            tries = (with_call(message, -1, where, word, number) for word, number in pairs)
            changes = [change for change in tries if change is not None]
            if not changes:
                continue
            try:
                inner, end = self._between(i, changes)
            except NotFound:
                continue
            return min(low, inner), self._stop(i, end, changes[0])
        raise NotFound(f"cannot tell where {self.view.named(i)} ends in the rendering", "no edges")

    def _between(self, i: int, changes: list[tuple[Message, str]]) -> Span:
        """Return how far all renderings agree, and where what follows the words begins."""
        tried = (self.view.changed({i: message}) for message, _ in changes)
        texts = [text for text in tried if text is not None]
        if len(texts) < len(changes):
            raise NotFound(f"the chat template refuses {self.view.named(i)} changed", "no edges")
        tails = []
        for text, (_, word) in zip(texts, changes, strict=True):
            if text.count(word) > 1 and not self.messages[i].get("tool_calls"):
                raise BadRow(
                    f"the chat template prints {self.view.named(i)} {text.count(word)} times; use "
                    "another one (data.chat_template)",
                    "turn printed twice",
                )
            if word not in text:
                raise NotFound(f"the chat template does not print {self.view.named(i)}", "no edges")
            tails.append(text.rpartition(word)[2])
        if tails[0] != tails[1] or not self.text.endswith(tails[0]):
            raise NotFound(
                f"cannot tell where {self.view.named(i)} ends: what follows it depends on it",
                "no edges",
            )
        return common_start(self.text, *texts), len(self.text) - len(tails[0])

    def _stop(self, i: int, end: int, call: tuple[Message, str] | None) -> int:
        """Return where turn `i` ends with its stop token; `end` is where the part known ends."""
        if call is None and (run := run_of(self.known.stops, self.text[end:])):
            if not each_of(self.specials, run):
                self.notes[NO_STOP] += 1
            return end + len(run)
        tail = self._tail(i, end, call)
        if call is not None:
            for stop in sorted(self.known.stops, key=len, reverse=True):
                closed = tail.partition(stop)[0] + stop
                if stop in tail and self.text.startswith(closed, end):
                    return end + len(closed) + len(run_of(self.known.stops, tail[len(closed) :]))
            shared = tail[: common_start(tail, self.text[end:])]
            lasts = [m.end() for m in pattern_of(self.specials).finditer(shared)]
            if lasts:
                return end + lasts[-1]
            self.notes[NO_STOP] += 1
            return end + len(shared.rstrip())
        # Where the last turn ends in a special token, the one that stands here is of its kind.
        if run_of(self.specials, tail) and (run := first_of(self.specials, self.text[end:])):
            return end + len(run)
        self.notes[NO_STOP] += 1
        return end

    def _tail(self, i: int, end: int, call: tuple[Message, str] | None) -> str:
        """Return what follows the known part of turn `i` where the conversation ends with it."""
        if i == len(self.messages) - 1:
            return self.text[end:]
        message, word = call or (with_content(self.messages[i], self.words[0]), self.words[0])
        text = self.view.tried([*self.messages[:i], message])
        return text.rpartition(word)[2] if text is not None and word in text else ""

    def _start(self, i: int, low: int, before: int) -> tuple[int, bool]:
        """Return where turn `i` begins: after the prompt for it, at `low` at the latest.

        And whether the text before is just what the template prints of the turns before.
        """
        prompt = self.known.prompt
        if prompt and self.text.endswith(prompt, before, low):
            return low, False
        asked, bare = (
            self.view.tried(self.messages[:i], prompt=True),
            self.view.tried(self.messages[:i]),
        )
        if asked and self.text.startswith(asked) and before <= len(asked) <= low:
            return len(asked), True
        prompts = {prompt}
        if asked and bare is not None and asked.startswith(bare):
            prompts.add(asked[len(bare) :])
        headers = {cut for p in prompts for cut in cuts(p)}
        for bare_ends in (False, True):  # last, where white space after it differs: what both have
            ends = []
            for header in headers:
                looked_for = header.rstrip() if bare_ends else header
                at = self.text.rfind(looked_for, before, low)
                if at >= 0:
                    ends.append(at + common_start(header, self.text[at:low]))
            if ends:
                return max(ends), False
        if asked:  # no prompt of its own: what ends the turn before it starts the answer
            ends = [m.end() for m in pattern_of(self.specials).finditer(self.text, before, low)]
            spaces = before + len(self.text[before:low].rstrip())  # before those of the content
            shared = {at: common_end(self.text[before:at], asked) for at in (low, spaces, *ends)}
            at = max(shared, key=lambda place: shared[place])
            if pattern_of(self.specials).search(self.text, at - shared[at], at):
                return at, False
        raise NotFound(
            f"cannot tell where {self.view.named(i)} begins in the rendering", "no edges"
        )

    def _check(self, i: int, begin: int, end: int, before: int, proven: bool) -> None:
        """Refuse a span that is empty, overlaps the one before, or holds what others said."""
        own = said_in(self.messages[i])
        inside = self.text[begin:end]
        prompt = self.known.prompt
        others = [
            (m.get("content") or "").strip()
            for j, m in self.view.turns()
            if m["role"] != "assistant"
        ]
        others = [said for said in others if len(said) > _SURELY and said not in own]
        if (
            begin < before
            or end <= begin
            or (not proven and len(prompt) > 2 and prompt in inside and prompt not in own)
            or any(said in inside for said in others)
        ):
            raise NotFound(
                f"the rendering of {self.view.named(i)} cannot be told from the turns around it",
                "no edges",
            )
