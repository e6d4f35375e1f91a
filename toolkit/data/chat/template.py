"""Render conversations with chat templates, in the sandbox of transformers.

[Note: the same text on every day] `strftime_now`, with which templates print the date, returns a
fixed day, and `random` is seeded, so that a resumed run reads the same tokens.

[Note: defaults in the template] The values of `data.chat_template_kwargs` are written into the
template, before its first line, for callers that do not set the variable. Training, answers to
`train.eval_prompts` and servers of the export then render the same text without further settings,
and a value of the caller takes precedence.
"""

import copy
import datetime
import difflib
import json
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateSyntaxError, meta
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from toolkit.data.chat.checks import align_beginnings, check_all_printed
from toolkit.data.chat.long_chats import find_spans_of_similar_answers
from toolkit.data.chat.masks import REFUSED, EdgeSearch, EdgesNotFound, Rendered
from toolkit.data.chat.traits import (
    TEMPLATE_ERRORS,
    Marks,
    Message,
    Span,
    TemplateTraits,
    align_to_mark,
    common_prefix_length,
    compile_marks,
    find_traits,
)
from toolkit.data.examples.recognise import Conversation
from toolkit.data.sources.row_values import BadRow, check_text
from toolkit.errors import ConfigError, DataError
from toolkit.formats import MAX_TEMPLATE_BYTES
from toolkit.formats.private import transformers_private

Supervise = Literal["auto", "completion", "assistant", "last_assistant", "all"]
# The date that the templates of Llama print if they are given none.
TODAY = datetime.datetime(2024, 7, 26, 12)
UNCHECKED = "conversations whose generation markers could not be checked"
_SWITCHES = tuple((n, v) for v in (True, False) for n in ("thinking", "enable_thinking"))
_MARKERS = re.compile(r"\{\%[-+]?\s*generation\s*[-+]?\%\}")
_UTILS = "utils.chat_template_utils"
_transformers_render: Callable[..., tuple[list[str], list]]
_transformers_render = chat_template_utils.render_jinja_template  # type: ignore[assignment]

logger = logging.getLogger(__name__)


class Chat:
    """Renders conversations with the chat template of a tokenizer, and marks supervised spans.

    Args:
        tokenizer: supplies special tokens, and the template if `chat_template` is None.
        supervise: the setting `data.supervise`.
        chat_template: Jinja text, a file, or the name of a template of the tokenizer.
        template_kwargs: further arguments of the template. Those of a row take precedence.

    Raises:
        DataError: there is no usable template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        supervise: Supervise = "auto",
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.supervise, self.template_kwargs = supervise, template_kwargs or {}
        self.bos = tokenizer.bos_token
        added = tokenizer.added_tokens_decoder.values()
        marks = {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
        variables = dict(tokenizer.special_tokens_map)
        self.templates = {
            name: Template(text, variables, tuple(sorted(marks)))
            for name, text in load_chat_templates(tokenizer, chat_template).items()
        }

    def render(self, conversation: Conversation) -> Rendered | BadRow:
        """Render a conversation to text with supervised spans.

        Costs about four renderings per supervised turn (see `masks.py`), half a millisecond for a
        short chat.

        Returns:
            The text with its spans, or a BadRow, not raised, if the conversation cannot be used.

        Raises:
            DataError: the tokenizer has several templates, and none fits.
        """
        name = "tool_use" if conversation.tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            names = ", ".join(sorted(self.templates))
            raise DataError(
                f"the tokenizer has chat templates by name ({names}), and none named default; "
                "choose one with data.chat_template"
            )
        try:
            kwargs = {**self.template_kwargs, **conversation.template_kwargs}
            conversation = replace(conversation, template_kwargs=kwargs)
            turns = select_supervised_turns(conversation, self.supervise)
            rendered = self.templates[name].render_and_mark(conversation, turns)
            if isinstance(rendered, BadRow):
                return rendered
            # A template may print characters that are not allowed in rows.
            check_text(rendered.text, "the rendered conversation", nul=True)
        except BadRow as bad:
            return bad
        except KeyboardInterrupt:
            # A template may run forever, so the log names the conversation.
            logger.error("interrupted at the conversation %.200r", conversation.messages)
            raise
        # Only the start is checked, because some templates begin each turn with this token.
        if self.bos and rendered.text.startswith(self.bos * 2):
            return BadRow(
                f"expected one {self.bos!r} where the text begins, got two from the chat template",
                "several begin-of-sequence tokens",
            )
        if self.supervise == "all":
            rendered = replace(rendered, spans=[(0, len(rendered.text))])
        return rendered


class Template:
    """A chat template, with the special tokens of its tokenizer.

    Args:
        text: Jinja text.
        variables: variable of the template, such as `bos_token` -> text of the special token.
        specials: texts of all special tokens.

    Raises:
        DataError: the text is not valid Jinja.
    """

    def __init__(self, text: str, variables: dict[str, Any], specials: tuple[str, ...]) -> None:
        self.text, self.variables, self.specials = text, variables, specials
        self.has_markers = bool(_MARKERS.search(text))
        self._traits: dict[str, TemplateTraits] = {}
        self._advice: dict[tuple[str, str], str] = {}
        transformers_private(_UTILS, "datetime")  # see `_fixed_clock_and_random`
        try:
            transformers_private(_UTILS, "_compile_jinja_template")(text)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template cannot be used: line {error.lineno}: {error.message}; give "
                "another with data.chat_template"
            ) from error

    def render_and_mark(self, conversation: Conversation, turns: list[int]) -> Rendered | BadRow:
        """Render a conversation and find the characters of its supervised turns.

        Args:
            conversation: messages, tools and arguments of the template.
            turns: indices of the supervised turns.

        Returns:
            The text with its spans, or a BadRow with the reason. The BadRow suggests a value of
            `enable_thinking` or `thinking` if that would help.
        """
        rendered = self._mark_any_spelling(conversation, turns)
        if isinstance(rendered, Rendered):
            return rendered
        kwargs = conversation.template_kwargs
        for name, value in _SWITCHES:
            if name in self.text and name not in kwargs:
                switched = replace(conversation, template_kwargs={**kwargs, name: value})
                if isinstance(self._mark_any_spelling(switched, turns), Rendered):
                    setting = f"data.chat_template_kwargs: {_format_yaml_mapping({name: value})}"
                    message = (
                        f"{rendered}. {setting}, or such a column, makes it one that can be used"
                    )
                    return BadRow(message, rendered.reason)
        return rendered

    def _mark_any_spelling(self, conversation: Conversation, turns: list[int]) -> Rendered | BadRow:
        """Render the first form of a conversation that the template accepts, and find its spans.

        Returns a BadRow if no form can be used. `_iterate_spellings` gives the forms.
        """
        refusal: BadRow | None = None
        for messages in _iterate_spellings(conversation.messages):
            try:
                return self._mark_spelling(replace(conversation, messages=messages), turns)
            except EdgesNotFound as error:
                # The template accepts this spelling. Another one would render another text.
                return error
            except BadRow as error:
                if refusal is None or refusal.reason == REFUSED:
                    refusal = error
        return refusal or BadRow("no messages")

    def _mark_spelling(self, conversation: Conversation, turns: list[int]) -> Rendered:
        """Render one form of a conversation and find the spans of `turns`; may raise BadRow."""
        messages, tools = conversation.messages, conversation.tools
        traits = self._find_traits(conversation.template_kwargs)
        render = partial(self._render_text, tools=tools, kwargs=conversation.template_kwargs)
        search = EdgeSearch(render, messages, self.specials, traits)
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        search.notes += check_all_printed(search, turns or answers, has_tools=bool(tools))
        advice_for = partial(self._find_advice, conversation)
        rendered: Rendered | None = None
        if not (self.has_markers and turns):
            rendered = find_spans_of_similar_answers(search, turns) or search.find_spans(turns)
            return align_beginnings(search, rendered, turns, advice_for)
        try:
            rendered = find_spans_of_similar_answers(search, answers) or search.find_spans(answers)
        except EdgesNotFound:
            if answers != turns:
                raise
        kwargs = conversation.template_kwargs
        markers = self._render_with_markers(
            messages, tools, kwargs, return_assistant_tokens_mask=True
        )[1]
        if rendered is None:
            # The search failed, so the markers are used unchecked, without the prompts in them.
            texts = (search.try_render(messages[:i], prompt=True) for i in answers)
            prompts = [len(p) for p in texts if p is not None and search.text.startswith(p)]
            spans = [self._shrink_marker(search.text, span, prompts, traits) for span in markers]
            search.notes[UNCHECKED] += 1
            return Rendered(search.text, spans, +search.notes)
        all_spans = dict(zip(answers, rendered.spans, strict=True))
        around = (*self.specials, traits.prompt, traits.header)
        spans = _check_markers(rendered.text, all_spans, markers, turns, around)
        rendered = Rendered(rendered.text, spans, rendered.notes)
        return align_beginnings(search, rendered, turns, advice_for)

    def _find_advice(self, conversation: Conversation, inserted: str, turn: int) -> str:
        """Explain in a sentence how to make the prompt for a turn end with `inserted`. Cached."""
        kwargs = conversation.template_kwargs
        key = inserted, json.dumps(kwargs, sort_keys=True, default=repr)
        if key not in self._advice:
            self._advice[key] = "No switch of the template puts it into the prompt"
            before = conversation.messages[:turn]
            for name, value in reversed(_SWITCHES):
                if name not in self.text or name in kwargs:
                    continue
                render = partial(
                    self._render_text, tools=conversation.tools, kwargs=kwargs | {name: value}
                )
                with suppress(*TEMPLATE_ERRORS):
                    if render(before, prompt=True).rstrip().endswith(inserted.strip()):
                        self._advice[key] = (
                            "To put it into the prompt, as a server does with the same setting, "
                            f"set data.chat_template_kwargs: {_format_yaml_mapping({name: value})}"
                        )
        return self._advice[key]

    def _shrink_marker(
        self, text: str, span: Span, prompts: list[int], traits: TemplateTraits
    ) -> Span:
        """Shorten the span between two generation markers; return its new [begin, end).

        The prompt is removed, as is white space after a stop token.
        """
        begin, end = max([span[0], *(at for at in prompts if span[0] < at < span[1])]), span[1]
        marked_text = text[begin:end]
        header = traits.prompt[
            : align_to_mark(
                traits.prompt, common_prefix_length(traits.prompt, marked_text), self.specials
            )
        ]
        ended = marked_text.rstrip().endswith(tuple(filter(None, self.specials)))
        return (
            begin + (len(header) if header.strip() else 0),
            begin + len(marked_text.rstrip()) if ended else end,
        )

    def _find_traits(self, kwargs: dict[str, Any]) -> TemplateTraits:
        """Return the texts around answers that the template prints with these arguments. Cached."""
        key = json.dumps(kwargs, sort_keys=True, default=repr)
        if key not in self._traits:
            if len(self._traits) > 100:
                self._traits.clear()
            bos, eos = map(self.variables.get, ("bos_token", "eos_token"))
            render = partial(self._render_text, tools=None, kwargs=kwargs)
            self._traits[key] = find_traits(render, self.specials, bos, eos)
        return self._traits[key]

    def _render_text(
        self, turns: list[Message], prompt: bool = False, *, tools: Any, kwargs: Any
    ) -> str:
        """Render turns to text, with a generation prompt if `prompt` is True."""
        return self._render_with_markers(turns, tools, kwargs, add_generation_prompt=prompt)[0]

    def _render_with_markers(
        self, messages: list[Message], tools: Any, kwargs: dict[str, Any], **options: bool
    ) -> tuple[str, list[Span]]:
        """Render with a fixed date and seed; return (text, spans between generation markers)."""
        with _fixed_clock_and_random():
            texts, markers = _transformers_render(
                conversations=[messages],
                tools=tools or None,
                chat_template=self.text,
                **options,
                **{**self.variables, **kwargs},
            )
        return texts[0], [tuple(span) for span in (markers or [[]])[0]]


def _format_yaml_mapping(values: dict[str, bool]) -> str:
    """Format a mapping as in a config: `{enable_thinking: false}`."""
    inner = ", ".join(f"{name}: {json.dumps(value)}" for name, value in values.items())
    return f"{{{inner}}}"


def _check_markers(
    text: str, turns: dict[int, Span], markers: list[Span], supervised: list[int], specials: Marks
) -> list[Span]:
    """Compare the spans of turns with those that the template's generation markers enclose.

    At the edges the two may differ in special tokens, tags, white space and the prompt. Markers
    often begin within the prompt, or end before or after the stop token.

    Args:
        text: the rendered conversation.
        turns: index -> span, for all turns of the assistant.
        markers: spans of the generation markers.
        supervised: indices of the supervised turns.
        specials: texts that may differ at the edges.

    Returns:
        The spans of the supervised turns, unchanged.

    Raises:
        BadRow: spans and markers disagree.
    """

    def only_marks(begin: int, end: int) -> bool:
        remaining = compile_marks(specials).sub("", text[begin:end])
        return not re.sub(r"<[^<>\s]+>", "", remaining).strip()

    def disagreement(fault: str) -> BadRow:
        return BadRow(
            f"the generation markers of the chat template {fault}; repair or remove them",
            "generation markers disagree",
        )

    marked: dict[int, list[Span]] = {i: [] for i in turns}
    last = None
    for begin, end in markers:
        if not text[begin:end]:
            continue
        overlap = [i for i, (b, e) in turns.items() if begin < e and b < end]
        if len(overlap) == 1:
            last = overlap[0]
        elif overlap or last is None or not only_marks(begin, end):
            raise disagreement(f"enclose {text[begin:end][:60]!r}, no single turn of the assistant")
        marked[last].append((begin, end))
    spans = []
    for i in supervised:
        if not marked[i]:
            raise disagreement(f"leave out turn {i} (assistant)")
        (b, e), (begin, end) = turns[i], (marked[i][0][0], marked[i][-1][1])
        spans.append((b, e))
        gaps = [(x[1], y[0]) for x, y in pairwise(marked[i])]
        for low, high in [(min(b, begin), max(b, begin)), (min(e, end), max(e, end)), *gaps]:
            if not only_marks(low, high):
                raise disagreement(f"and turn {i} (assistant) differ by {text[low:high][:60]!r}")
    return spans


def _iterate_spellings(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield a conversation in all forms that templates may expect, the usual one first.

    They differ only in turns with tool calls: arguments are a mapping or JSON text, and a missing
    content stays missing, or is null or empty.
    """
    plain = [{k: v for k, v in m.items() if v is not None} for m in messages]
    yield plain
    if not any(m.get("tool_calls") for m in plain):
        return
    for silent in ({}, {"content": None}, {"content": ""}):
        for as_text in (False, True):
            if silent or as_text:
                yield [_spell_calls(m, silent, as_text) for m in plain]


def _spell_calls(message: Message, silent: Message, as_text: bool) -> Message:
    """Return a turn with its tool calls in another form; return a turn without calls unchanged.

    Args:
        message: the turn.
        silent: a mapping with the content that replaces a blank one; {} removes it.
        as_text: write arguments as JSON text.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not (message.get("content") or "").strip():
        message = {**{k: v for k, v in message.items() if k != "content"}, **silent}
    if as_text:
        calls = copy.deepcopy(calls)
        for call in calls:
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**message, "tool_calls": calls}


class _FixedDatetime(datetime.datetime):
    """A `datetime` whose `now` is always `TODAY`."""

    @classmethod
    def now(cls, tz: Any = None) -> "_FixedDatetime":
        """Return `TODAY` with this time zone."""
        return cls(*TODAY.timetuple()[:6], tzinfo=tz)


@contextmanager
def _fixed_clock_and_random() -> Iterator[None]:
    """Within the context, give templates a fixed date and a seeded `random`; then restore both."""
    clock, state = chat_template_utils.datetime, random.getstate()
    chat_template_utils.datetime = _FixedDatetime  # type: ignore[misc]
    random.seed(0)
    try:
        yield
    finally:
        chat_template_utils.datetime = clock  # type: ignore[misc]
        random.setstate(state)


def select_supervised_turns(conversation: Conversation, supervise: Supervise) -> list[int]:
    """Return the indices of the turns that the loss covers; [] if `supervise` is `all`.

    Raises:
        BadRow: `supervise` is `all`, and some turns are marked as not supervised.
    """
    turns = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    if supervise == "all" and conversation.context:
        raise BadRow(
            "expected turns that all count (data.supervise all), got a weight of 0 for turns "
            f"{sorted(conversation.context)}",
            "weight of 0",
        )
    if supervise == "all":
        return []
    if supervise == "last_assistant":
        return [i for i in turns[-1:] if i not in conversation.context]
    # Turns before `supervised_from` belong to the prompt.
    first = 0 if supervise == "assistant" else conversation.supervised_from
    return [i for i in turns if i >= first and i not in conversation.context]


def load_chat_templates(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None
) -> dict[str, str]:
    """Return the chat templates to use as name -> Jinja text.

    Args:
        tokenizer: the tokenizer of the run.
        chat_template: Jinja text, the name of a template of the tokenizer, or a file. If it is
            None, all templates of the tokenizer are used.

    Returns:
        `default` -> text if there is one template; else the tokenizer's names.

    Raises:
        DataError: there is no template, it is too long, or it cannot be read.
    """
    tokenizer_template = getattr(tokenizer, "chat_template", None)
    named_templates = tokenizer_template if isinstance(tokenizer_template, dict) else {}
    if chat_template is not None:
        text = named_templates.get(chat_template) or (
            chat_template
            if "{" in chat_template
            else _read_template_file(chat_template, sorted(named_templates))
        )
        templates = {"default": text}
    elif type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path} renders conversations with custom code "
            f"({type(tokenizer).__name__}): what is the assistant's cannot be told; give a "
            "template with data.chat_template"
        )
    elif not tokenizer_template:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template, and the data holds "
            "conversations; set data.chat_template to a Jinja template or a file that holds one, "
            "or give prompts and completions as text"
        )
    else:
        templates = named_templates or {"default": tokenizer_template}
    for name, text in templates.items():
        # Jinja needs hundreds of times the size of a template to parse it.
        if len(text) > MAX_TEMPLATE_BYTES:
            raise DataError(
                f"the chat template {name!r} has {len(text):,} characters, more than the "
                f"{MAX_TEMPLATE_BYTES:,} expected; give another (data.chat_template)"
            )
    return templates


def _read_template_file(name: str, names: list[str]) -> str:
    """Read the template file `name`; the DataError for a failure also lists `names`."""
    file = Path(name).expanduser()
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        no_name = f", nor a template of the tokenizer ({', '.join(names)})" if names else ""
        raise DataError(
            f"data.chat_template {name!r} is no Jinja text, and cannot be read as a file{no_name}: "
            f"{reason}"
        ) from error


# Variables that every template may use, so they are no choices for a setting.
_COMMON_VARIABLES = {
    "messages",
    "tools",
    "add_generation_prompt",
    "raise_exception",
    "strftime_now",
}


def add_template_defaults(
    templates: Mapping[str, str], values: Mapping[str, Any]
) -> dict[str, str]:
    """Write default values of variables into templates; see [Note: defaults in the template].

    Args:
        templates: name -> Jinja text.
        values: variable -> default value.

    Returns:
        Name -> Jinja text with the defaults of those variables that it uses.

    Raises:
        ConfigError: a variable of `values` is in no template.
    """
    used = {name: _find_variables(text) for name, text in templates.items()}
    variables = set().union(*used.values())
    for name in values:
        if name not in variables:
            choices = sorted(variables - _COMMON_VARIABLES)
            near = difflib.get_close_matches(name, choices, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"data.chat_template_kwargs: the chat template has no variable {name!r}, only "
                f"{', '.join(choices) or 'none'}{hint}"
            )
    return {
        name: _prepend_defaults(text, {k: v for k, v in values.items() if k in used[name]})
        for name, text in templates.items()
    }


def _find_variables(text: str) -> set[str]:
    """List the variables that a template reads but does not set.

    The set is empty if the template cannot be parsed; rendering reports that error.
    """
    try:
        compiled = transformers_private(_UTILS, "_compile_jinja_template")(text)
        return meta.find_undeclared_variables(compiled.environment.parse(text))
    except TemplateSyntaxError:
        return set()


def _prepend_defaults(text: str, values: Mapping[str, Any]) -> str:
    """Prepend Jinja statements to a template that set undefined variables to these values."""
    # Jinja does not print the newline after a block, so the output begins as before.
    blocks = (
        f"{{% if {name} is not defined %}}{{% set {name} = {_jinja_literal(value)} %}}"
        "{% endif %}\n"
        for name, value in values.items()
    )
    return "".join(blocks) + text


def _jinja_literal(value: Any) -> str:
    """Format a value from YAML (a mapping, list or scalar) as a Jinja literal."""
    if isinstance(value, dict):
        inner = ", ".join(
            f"{_jinja_literal(str(k))}: {_jinja_literal(v)}" for k, v in value.items()
        )
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_jinja_literal, value))}]"
    # Jinja does not join the two escapes by which ASCII writes a character above U+FFFF.
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
