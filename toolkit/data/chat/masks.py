"""Find the characters of a rendered conversation that the assistant wrote, by further renderings.

[Note: masks from the template]
The supervised part of a turn is what a model has to write after the prompt for it
(`add_generation_prompt`), including the stop token. A template without generation markers does not
mark these characters, but renderings of changed conversations reveal them:

end     the content of a turn is replaced by a word that occurs nowhere else. The text after this
        word must also end the true rendering. The content ends at the start of that text. Two
        different words must agree, and the content must stand before that place. A complete turn
        with tool calls is replaced by such a content. If the template refuses that, the word is put
        into the last argument.
stop    the text that follows the turn both at the end of a conversation and before another turn, up
        to its special tokens.
start   the end of the prompt for this turn, if the rendering begins with that prompt. If it does
        not (for example, because it drops earlier reasoning), the texts after the previous turn are
        compared. They must share the prompt except for white space, or its header, which is the
        part that all answers share with it.

This takes four to nine renderings per turn. If the edges of a turn cannot be found, the row is
refused, because a mask that is wrong by one turn would train without an error.
"""

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
    align_to_mark,
    change_call,
    common_prefix_ignoring_space,
    common_prefix_length,
    compile_marks,
    find_closings,
    join_texts,
    only_content,
    printable_parts,
    with_content,
    without_reasoning,
)
from toolkit.data.sources.row_values import BadRow

REFUSED = "refused by template"
NO_STOP = "assistant turns without a stop token"
_LONGEST_PROMPT = 1000  # characters of the text that a template adds to request an answer
SURELY = 12  # a longer text that occurs in the rendering was printed there, not by chance
NUMBERS = (4017293651, 9382650747)  # two different integers, for arguments of tool calls
OTHER_PROMPT = "last turns before which the chat template prints something else than their prompt"


class EdgesNotFound(BadRow):
    """The begin or end of a turn cannot be found. Generation markers may still give its span."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "no edges")


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation. Its text has all special tokens, so a tokenizer must not add any."""

    text: str
    spans: list[Span]
    """Supervised characters (begin, end), in order and disjoint."""
    notes: Counter[str] = field(default_factory=Counter)
    """Text of a warning -> number of occurrences."""


class EdgeSearch:
    """Finds where turns begin and end in a rendering, by rendering changed conversations.

    Args:
        render: renders messages; see `traits.Render`.
        messages: turns of the conversation.
        specials: special tokens of the tokenizer.
        traits: the texts that the template prints around answers.

    Raises:
        BadRow: the template refuses the conversation.
    """

    def __init__(
        self,
        render: Render,
        messages: list[Message],
        specials: Marks,
        traits: TemplateTraits,
    ) -> None:
        self.render, self.messages, self.specials = render, messages, specials
        self.traits = traits
        self.notes: Counter[str] = Counter()
        self.prompt = ""  # the prompt for the turn that is being searched
        self.lows: dict[int, int] = {}  # turn -> offset at which its first content is printed
        try:
            self.text = render(messages)
        except TEMPLATE_ERRORS as error:
            raise self._describe_refusal(error) from error
        # Two different words that do not occur in the text. They consist of letters and digits, so
        # that no template escapes or trims them.
        self.words = [_make_absent_word(word, self.text) for word in WORDS[:2]]

    def find_spans(self, turns: list[int]) -> Rendered:
        """Find the supervised characters of assistant turns: from the prompt to the stop token.

        Args:
            turns: indices of the turns, ascending. The result has one span [begin, end) for each.

        Raises:
            EdgesNotFound: the begin or end of a turn cannot be determined.
            BadRow: the template prints a turn several times.
        """
        spans, before = [], 0
        for i in turns:
            low, end, call = self.find_content(i)
            self.lows[i] = low
            stop = self.find_end(i, end, call)
            begin, exactly = self.find_start(i, low, end, before)
            self.check_span(i, begin, stop, before, exactly)
            if not exactly:
                self.check_prompt(i, begin, stop)
            spans.append((begin, stop))
            before = stop
        return Rendered(self.text, spans, +self.notes)

    def make_words_like(self, content: str) -> list[str]:
        """Return two unused words of the length of `content`; [] if there are none."""
        words = [(word * (1 + len(content) // len(word)))[: len(content)] for word in self.words]
        return words if len(content) > 3 and not any(w in self.text for w in words) else []

    def describe_turn(self, i: int) -> str:
        """Describe turn `i` for a message, as "turn 3 (user)"."""
        return f"turn {i} ({self.messages[i].get('role')})"

    def render_changed(self, changes: dict[int, Message]) -> str | None:
        """Render the conversation with turns replaced by `changes`; None if the template raises."""
        return self.try_render([changes.get(i, message) for i, message in enumerate(self.messages)])

    def try_render(self, messages: list[Message], **options: Any) -> str | None:
        """Render messages; None if the template raises, because it may refuse changed turns."""
        try:
            return self.render(messages, **options)
        except TEMPLATE_ERRORS:
            return None

    def _describe_refusal(self, error: Exception) -> BadRow:
        """Create the error for a refused conversation, which names the turn that is refused."""
        message = " ".join(str(error).split())[:200] or type(error).__name__
        for turn in range(len(self.messages)):
            try:
                self.render(self.messages[: turn + 1])
            except TEMPLATE_ERRORS as earlier:
                if str(earlier) == str(error):
                    break
        refuses = f"the chat template refuses {self.describe_turn(turn)}: {message}"
        return BadRow(f"{refuses}{self._advice_on_first_turn()}", REFUSED)

    def _advice_on_first_turn(self) -> str:
        """Return advice if the first turn other than system texts is the assistant's; else ""."""
        roles = [m.get("role") for m in self.messages if m.get("role") != "system"]
        return ". Let it begin with a turn of the user" if roles[:1] == ["assistant"] else ""

    # ---- Contents

    def find_content(self, i: int) -> tuple[int, int, tuple[Message, str] | None]:
        """Find where the content of turn `i`, including its tool calls, begins and ends.

        Returns:
            (lower bound of the begin, end without the stop token, call). `call` is None, or, if the
            end was found by changing a tool call, (changed turn, new text in its call). Raises
            EdgesNotFound if the end is not clear.
        """
        message = self.messages[i]
        content, calls = message.get("content") or "", message.get("tool_calls")
        like = self.make_words_like(content)
        for words in (self.words, like) if like and not calls else (self.words,):
            try:
                low, end = self._find_changed_part(
                    i, [(only_content(message, w), w) for w in words]
                )
            except EdgesNotFound:
                if words is like or not (like or calls):
                    raise
                continue
            if not calls:
                self._check_content(i, content, end)
            elif not self._is_next_turn_after(i, low, end):
                continue
            elif not self.traits.closings:
                end = self._find_calls_end(i, self._find_arguments_end(i, end), end)
            return low, end, None
        before, after = self.messages[:i], self.messages[i + 1 :]
        plain = [f(message, w) for f in (with_content, only_content) for w in self.words]
        texts = [
            self.try_render([*before, m, *following]) for m in plain for following in (after, [])
        ]
        low = common_prefix_length(self.text, *(text for text in texts if text is not None))
        changes = self._change_last_call(i)
        inner, end = self._find_changed_part(i, changes, new_argument=self._is_bare_call(i))
        low = min(low, inner)
        if self._is_next_turn_after(i, low, end):
            return low, end, changes[0]
        raise EdgesNotFound(f"cannot tell where {self.describe_turn(i)} ends in the rendering")

    def _find_arguments_end(self, i: int, end: int) -> int:
        """Return the offset after the last tool-call argument of turn `i`; `end` if unknown."""
        try:
            bare = self._is_bare_call(i)
            return self._find_changed_part(i, self._change_last_call(i), new_argument=bare)[1]
        except EdgesNotFound:
            # A call without arguments may be printed in another form than one with arguments.
            return end

    def _find_calls_end(self, i: int, inner: int, end: int) -> int:
        """Return the end of the tool calls of turn `i`, for a template without stop tokens.

        It is the end of the last tag within `self.text[inner:end]`, or `end` if there is no tag.
        `inner` is the end of the last argument. Raises EdgesNotFound if text follows the tag.
        """
        marks = [*compile_marks(self.specials, tags=True).finditer(self.text, inner, end)]
        if not marks:
            return end
        if after := self.text[marks[-1].end() : end].strip():
            raise EdgesNotFound(
                f"cannot tell where {self.describe_turn(i)} ends: {after[:60]!r} follows its tool "
                "calls"
            )
        return marks[-1].end()

    def _change_last_call(self, i: int) -> list[tuple[Message, str]]:
        """Return two copies of turn `i` with a changed last tool call, as (copy, new text)."""
        pairs = zip(self.words, NUMBERS, strict=True)
        return [change_call(self.messages[i], -1, "argument", *pair) for pair in pairs]

    def _find_changed_part(
        self, i: int, changes: list[tuple[Message, str]], *, new_argument: bool = False
    ) -> Span:
        """Find the characters [begin, end) of `self.text` that change if turn `i` is changed.

        Args:
            i: index of the turn.
            changes: two pairs (changed turn, word to find in its rendering).
            new_argument: the word is in an argument that the original turn does not have.

        Raises:
            EdgesNotFound: a changed turn is refused or not printed, or the end is not clear.
            BadRow: the template prints the turn more than once.
        """
        renderings = (self.render_changed({i: message}) for message, _ in changes)
        texts = [text for text in renderings if text is not None]
        if len(texts) < len(changes):
            raise EdgesNotFound(f"the chat template refuses {self.describe_turn(i)} changed")
        tails: list[str] = []
        for text, (_, word) in zip(texts, changes, strict=True):
            if text.count(word) > 1 and not self.messages[i].get("tool_calls"):
                raise BadRow(
                    f"the chat template prints {self.describe_turn(i)} {text.count(word)} times; "
                    "use another (data.chat_template)",
                    "turn printed twice",
                )
            if word not in text:
                raise EdgesNotFound(f"the chat template does not print {self.describe_turn(i)}")
            tails.append(text.rpartition(word)[2])
        follows = len(tails[0])
        if not self.text.endswith(tails[0]) and new_argument:
            follows = common_prefix_length(self.text[::-1], *(text[::-1] for text in texts))
        elif tails[0] != tails[1] or not self.text.endswith(tails[0]):
            raise EdgesNotFound(
                f"cannot tell where {self.describe_turn(i)} ends: what follows varies"
            )
        return common_prefix_length(self.text, *texts), len(self.text) - follows

    def _is_bare_call(self, i: int) -> bool:
        """Return True if the last tool call of turn `i` has no arguments; False without calls."""
        calls = self.messages[i].get("tool_calls") or []
        return bool(calls) and calls[-1]["function"]["arguments"] in ({}, "{}")

    def _is_next_turn_after(self, i: int, low: int, end: int) -> bool:
        """Return True if turn `i` is the last one, or turn `i + 1` is printed after offset `end`.

        The text must change only after `end` if turn `i + 1` gets another content or becomes a
        user's turn. The latter test is ignored if the text changes before `low` already.
        """
        if i == len(self.messages) - 1:
            return True
        following = (with_content(self.messages[i + 1], word) for word in self.words)
        texts = [self.render_changed({i + 1: message}) for message in following]
        if end > common_prefix_length(self.text, *(text for text in texts if text is not None)):
            return False
        user = {"role": "user", "content": self.words[0]}
        text = self.try_render([*self.messages[: i + 1], user])
        agreed = len(self.text) if text is None else common_prefix_length(self.text, text)
        return end <= agreed or agreed <= low

    def _check_content(self, i: int, content: str, end: int) -> None:
        """Raise EdgesNotFound if the template prints another text than `content` before `end`."""
        before = self.text[:end].rstrip()
        if any(before.endswith(part) for part in printable_parts(content)):
            return
        # The template may escape characters, so a word of the same length is rendered instead.
        word = (self.make_words_like(content) or [""])[0]
        text = self.render_changed({i: with_content(self.messages[i], word)}) if word else None
        if content.strip() and (text is None or word not in text):
            raise EdgesNotFound(
                f"the chat template prints something else for {self.describe_turn(i)}"
            )

    # ---- Stop tokens

    def find_end(self, i: int, end: int, call: tuple[Message, str] | None) -> int:
        """Find the offset after turn `i` and its stop token; count turns without one in `notes`.

        Args:
            i: index of the turn.
            end: offset after its content.
            call: (changed turn, new text) if `find_content` had to change a tool call; else None.

        Raises:
            EdgesNotFound: the text after the content does not show the end of the turn.
        """
        following = self.text[end:]
        closings = [c for c in self.traits.closings if following.startswith(c)]
        if call is not None or not closings:
            last, middle = self._find_texts_after(i, following, call)
            calls = call is not None
            candidates = find_closings(
                last, middle, self.specials, self.traits.openers, calls=calls
            )
            closings = [c for c in candidates if following.startswith(c)]
            if not closings and compile_marks(self.specials).sub("", last).strip():
                raise EdgesNotFound(
                    f"cannot tell where {self.describe_turn(i)} ends: {last[:60]!r} follows it at "
                    f"the end, {middle[:60]!r} amid a conversation"
                )
        closing = max(closings, key=len, default="")
        self.notes[NO_STOP] += not self.ends_with_special(closing)
        stop = end + len(closing)
        return stop if call is None or self.traits.closings else self._find_calls_end(i, end, stop)

    def ends_with_special(self, closing: str) -> bool:
        """Return True if a text ends with a special token."""
        return closing.endswith(tuple(filter(None, self.specials)))

    def _find_texts_after(
        self, i: int, following_text: str, call: tuple[Message, str] | None
    ) -> tuple[str, str]:
        """Return (text after turn `i` as the last turn, text after it if another turn follows).

        One is `following_text`, which is the text after the turn in `self.text`; the other costs a
        rendering. Raises EdgesNotFound if no conversation can end with the turn.
        """
        amid = i < len(self.messages) - 1
        if amid and self.messages[i].get("tool_calls"):
            ended = self.try_render(self.messages[: i + 1]) or ""
            text_before = self.text[: len(self.text) - len(following_text)]
            if ended.startswith(text_before):
                return ended[len(text_before) :], following_text
        word = [*self.make_words_like(self.messages[i].get("content") or ""), self.words[0]][0]
        message, word = call or (only_content(self.messages[i], word), word)
        turns = [*self.messages[:i], message]
        user_turn = [] if amid else [{"role": "user", "content": self.words[1]}]
        text = self.try_render([*turns, *user_turn])
        if text is not None and word in text:
            text = text.rpartition(word)[2].partition(self.words[1])[0]
        elif amid:
            raise EdgesNotFound(
                f"the chat template lets no conversation end with {self.describe_turn(i)}"
            )
        else:
            text = following_text
        return (text, following_text) if amid else (following_text, text)

    # ---- Starts

    def find_start(self, i: int, low: int, end: int, before: int) -> tuple[int, bool]:
        """Find the offset at which the prompt for turn `i` ends; set `self.prompt` to the prompt.

        `low` and `end` are the result of `find_content`; `before` is the end of the previous span.

        Returns:
            (offset, True if `self.text` begins with the exact prompt for this turn). Raises
            EdgesNotFound if the offset is not clear.
        """
        prompt_text = self.try_render(self.messages[:i], prompt=True)
        self.prompt = prompt_text or ""
        if prompt_text is not None and i and not self.text.startswith(prompt_text):
            return self._find_start_after_previous(i), False
        if prompt_text is None or not self.text.startswith(prompt_text):
            header = self.traits.header or self.traits.prompt
            at = self.text.find(header, before, low) + len(header)
            single = header.strip() and self.text.count(header, before, low) == 1
            prompt = header == self.traits.prompt and (
                i or not self._remove_marks(self.text[at:low])
            )
            if single and (at == low or prompt):
                return at, False
            raise EdgesNotFound(
                "the chat template gives no prompt for "
                f"{self.describe_turn(i)}{self._advice_on_first_turn()}"
            )
        if not before <= len(prompt_text) <= end:
            raise EdgesNotFound(f"the prompt for {self.describe_turn(i)} ends in another turn")
        constant = self.text[len(prompt_text) : low]
        if constant.strip() and (silent := without_reasoning(self.messages[i])):
            text = self.render_changed({i: silent})
            # Reasoning that is printed before the content is not a header.
            if text is not None and text.startswith(prompt_text):
                constant = constant[: common_prefix_length(self.text, text) - len(prompt_text)]
        bare = prompt_text if not constant.strip() else self.try_render(self.messages[:i])
        return len(prompt_text) + self._count_header_characters(
            i, constant, prompt_text != bare
        ), True

    def _count_header_characters(self, i: int, constant: str, prompted: bool) -> int:
        """Return the number of leading characters of `constant` that belong to the prompt.

        If `constant` begins with the generation prompt, that beginning does. If the generation
        prompt ends with `constant`, all of it does. Whitespace, and text that the model must write
        after a prompt, give 0. Raises EdgesNotFound if the template shows none of these.

        Args:
            i: index of the turn.
            constant: the text that the template prints before the content of the turn.
            prompted: True if the generation prompt has added text before `constant`.
        """
        if not constant.strip():
            return 0
        if self.traits.prompt.strip() and constant.startswith(self.traits.prompt):
            return len(self.traits.prompt)
        if self.traits.prompt.endswith(constant):
            # The prompt printed so far only ended the previous turn.
            return len(constant)
        if (prompted or self.traits.unasked) and (i or not self._remove_marks(constant)):
            # After a prompt, the model has to write all of this text.
            return 0
        raise EdgesNotFound(
            f"the chat template prints {constant[:60]!r} before {self.describe_turn(i)}, and no "
            "generation prompt that tells whether the assistant says it"
        )

    def _remove_marks(self, text: str) -> str:
        """Remove special tokens, tags and surrounding white space from a text."""
        return compile_marks(self.specials, tags=True).sub("", text).strip()

    def _find_start_after_previous(self, i: int) -> int:
        """Find the start of turn `i` by comparing the texts that can follow the previous turn.

        In the code, a marker word replaces the content of the previous turn. `full`, `prompt` and
        `bare` are the texts after it in the conversation, in the prompt for turn `i`, and in the
        conversation before turn `i`. `tries` are the texts up to another marker word in turn `i`.
        """
        word = f"{self.words[0]}b"
        turns = [*self.messages]
        turns[i - 1] = with_content(turns[i - 1], word)

        def after(messages: list[Message], prompt: bool = False) -> str | None:
            text = self.try_render(messages, prompt=prompt)
            return text.partition(word)[2] if text is not None and text.count(word) == 1 else None

        full, prompt, bare = after(turns), after(turns[:i], True), after(turns[:i])
        # A word in place of tool calls may not be followed by their results, so the search is
        # repeated without the turns after it.
        for following in (turns[i + 1 :], []):
            plain = [{"role": turns[i]["role"], "content": w} for w in self.words]
            answers = [[*turns[:i], answer, *following] for answer in plain]
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
            raise EdgesNotFound(
                f"cannot tell where {self.describe_turn(i)} begins in the rendering"
            )
        return len(self.text) - len(full) + self._find_prompt_end(i, full, prompt, bare, tries)

    def _find_prompt_end(self, i: int, full: str, prompt: str, bare: str, tries: list[str]) -> int:
        """Return the length of the prompt in `full`; `_find_start_after_previous` has the texts.

        Raises EdgesNotFound if the prompt and the conversation continue differently.
        """
        if full.startswith(prompt):
            constant = tries[0][len(prompt) :] if tries[0].startswith(prompt) else ""
            return len(prompt) + self._count_header_characters(i, constant, prompt != bare)
        of_prompt, at = common_prefix_ignoring_space(prompt, full)
        if of_prompt == len(prompt):  # they differ in white space only
            of_prompt, place = common_prefix_ignoring_space(prompt, tries[0])
            space = tries[0][place:] if of_prompt == len(prompt) else ""
            return at + (len(space) if not space.strip() and full.startswith(space, at) else 0)
        shared = align_to_mark(prompt, common_prefix_length(prompt, *tries), self.specials)
        shared = align_to_mark(tries[0], shared, self.specials)
        header = align_to_mark(prompt, common_prefix_length(prompt, bare), self.specials)
        prompt_shared = align_to_mark(prompt, common_prefix_length(prompt, full), self.specials)
        constant = tries[0][shared:]
        if (
            len({*tries}) != 1
            or (
                self._remove_marks(prompt[shared:]) and self._remove_marks(constant)
            )  # the headers differ
            or not prompt[header:shared].strip()
            or prompt_shared < shared
            or (constant and not constant.strip())
            or compile_marks(self.specials, tags=True).search(prompt[shared:prompt_shared])
        ):
            raise EdgesNotFound(
                f"the chat template's prompt for {self.describe_turn(i)} continues with "
                f"{prompt[prompt_shared:][:60]!r}, the conversation does not; other "
                "chat_template_kwargs may fit it (enable_thinking, say)"
            )
        return shared

    # ---- Checks

    def check_prompt(self, i: int, begin: int, end: int) -> None:
        """Raise EdgesNotFound if `self.prompt` ends with tags that the span [begin, end) repeats.

        If turn `i` is the last one and its prompt is not in the text, add a note.
        """
        prompt, inside = self.prompt, self.text[begin:end]
        most = min(len(inside), _LONGEST_PROMPT)
        shared = next((k for k in range(most, 0, -1) if prompt.endswith(inside[:k])), 0)
        if compile_marks(self.specials, tags=True).search(inside[:shared]):
            raise EdgesNotFound(
                f"the prompt for {self.describe_turn(i)} holds {inside[:shared][:60]!r} already, "
                "the conversation prints it once"
            )
        if i == len(self.messages) - 1 and common_prefix_ignoring_space(prompt, self.text)[0] < len(
            prompt
        ):
            self.notes[OTHER_PROMPT] += 1

    def check_span(self, i: int, begin: int, end: int, before: int, exactly: bool) -> None:
        """Check that the span [begin, end) can be right for turn `i`.

        Args:
            i: index of the turn.
            begin: offset at which the span begins.
            end: offset at which it ends.
            before: end of the previous span.
            exactly: all text before the span equals the prompt for the turn.

        Raises:
            EdgesNotFound: the span is empty, overlaps the previous one, contains the text of other
                turns, or lacks the name of a tool call.
        """
        turn_text, inside = join_texts(self.messages[i]), self.text[begin:end]
        # If the text before the span equals the prompt, no earlier turn can be within the span.
        turns = self.messages[i + 1 :] if exactly else self.messages
        foreign = [(m.get("content") or "").strip() for m in turns if m["role"] != "assistant"]
        plain = compile_marks(self.specials)
        foreign = [o for o in foreign if len(plain.sub("", o)) > SURELY and o not in turn_text]
        calls = self.messages[i].get("tool_calls") or []
        names = [call["function"]["name"] for call in calls]
        contents = printable_parts(self.messages[i].get("content") or "") if calls else []
        if (
            begin < before
            or end <= begin
            or (not exactly and self._has_other_header(i, inside, turn_text))
            or any(content in inside for content in foreign)
            or (contents and not any(content in inside for content in contents))
        ):
            raise EdgesNotFound(
                f"cannot tell {self.describe_turn(i)} from what is rendered around it"
            )
        if missing := [name for name in names if name not in inside]:
            raise EdgesNotFound(
                f"the name {missing[0]!r} of a call of {self.describe_turn(i)} is not printed"
            )

    def _has_other_header(self, i: int, inside: str, turn_text: str) -> bool:
        """Return True if text `inside` has more answer headers than a rendering of turn `i` alone.

        Returns False if the header is shorter than 3 characters or is in `turn_text`.
        """
        header = self.traits.prompt.strip()
        if len(header) < 3 or header not in inside or header in turn_text:
            return False
        alone = (
            self.try_render([{"role": "user", "content": self.words[0]}, self.messages[i]]) or ""
        )
        return inside.count(header) >= max(1, alone.count(header))


def _make_absent_word(word: str, text: str) -> str:
    """Return `word`, with its first letter repeated in front until `text` does not contain it."""
    while word in text:
        word = word[0] + word
    return word
