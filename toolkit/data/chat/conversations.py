"""Conversations as text in the tokenizer's chat template, and which of its characters are learned.

Owns which template is used, which turns are learned, and the check on the text for the tokenizer.
Refuses to know how the turns are found (`masks.py`), and where templates run (`sandbox.py`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from toolkit.data.chat.sandbox import Renderers, Template
from toolkit.data.examples.recognise import Conversation
from toolkit.data.sources.row_values import BadRow
from toolkit.errors import DataError

Supervise = Literal["auto", "completion", "assistant", "last_assistant", "all"]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: with all special tokens; to be tokenised without adding any.
        spans: characters (begin, end) that are learned, in order, disjoint.
        notes: kind -> how often, of what deserves a warning.
    """

    text: str
    spans: list[tuple[int, int]]
    notes: dict[str, int] = field(default_factory=dict)


class Chat:
    """Conversations to text: `chat.render(conversations)`.

    Args:
        tokenizer: its chat template and special tokens are used.
        supervise: which turns are learned; see `learned_turns`.
        chat_template: Jinja text, or a file that holds it, instead of the tokenizer's own.
        renderers: the processes that render; empty: one, which this object starts and ends.

    Raises:
        DataError: there is no template, or the file cannot be read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        supervise: Supervise = "auto",
        chat_template: str | None = None,
        renderers: Renderers | None = None,
    ) -> None:
        self.supervise = supervise
        self.bos, self.eos = tokenizer.bos_token, tokenizer.eos_token
        specials = special_tokens(tokenizer)
        variables = json.loads(json.dumps(tokenizer.special_tokens_map, default=str))
        self.templates = {
            name: Template(text, variables, specials)
            for name, text in chat_templates(tokenizer, chat_template).items()
        }
        self._renderers = renderers or Renderers()

    def render(self, conversations: Sequence[Conversation]) -> list[Rendered | BadRow]:
        """Return the text of each conversation, or what is wrong with it, in order.

        The same for any number of processes. Costs some five short renderings, about half a
        millisecond; more where turns must be searched for (see `masks.py`).

        Raises:
            DataError: the template is no template, or no process can be started.
        """
        out: list[Rendered | BadRow] = [BadRow("not rendered")] * len(conversations)
        by_name: dict[str, list[int]] = {}
        for at, conversation in enumerate(conversations):
            name = "tool_use" if conversation.tools and "tool_use" in self.templates else "default"
            if name not in self.templates:
                raise DataError(
                    "the tokenizer has chat templates by name "
                    f"({', '.join(sorted(self.templates))}), and none named default; choose one "
                    "with data.chat_template"
                )
            by_name.setdefault(name, []).append(at)
        for name, places in by_name.items():
            jobs = [self._job(conversations[at]) for at in places]
            results = self._renderers.run(self.templates[name], jobs)
            for at, result in zip(places, results, strict=True):
                out[at] = self._rendered(result)
        return out

    def close(self) -> None:
        """End the processes that render; they start anew when needed."""
        self._renderers.close()

    def _job(self, conversation: Conversation) -> dict:
        return {
            "messages": conversation.messages,
            "tools": conversation.tools,
            "kwargs": conversation.template_kwargs,
            "wanted": learned_turns(conversation, self.supervise),
        }

    def _rendered(self, result: dict | BadRow) -> Rendered | BadRow:
        if isinstance(result, BadRow):
            return result
        text, bos = result["text"], self.bos
        # Where one token both begins and ends a text, it may stand anywhere.
        if bos and (text.startswith(bos * 2) or (bos != self.eos and text.count(bos) > 1)):
            return BadRow(
                f"expected one {bos!r} (the token that begins a text), got {text.count(bos)}: from "
                "the chat template, or from a turn that holds it as text",
                "several begin-of-sequence tokens",
            )
        spans = [(begin, end) for begin, end in result["spans"]]
        if self.supervise == "all":
            spans = [(0, len(text))]
        return Rendered(text, spans, result["notes"])


def render_and_mask(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    supervise: Supervise = "auto",
    chat_template: str | None = None,
) -> Rendered:
    """Return one conversation as text, with the characters that are learned.

    Starts a process, which takes about a second; many conversations go through `Chat`.

    Raises:
        BadRow: the template refuses the conversation, does not print all of it, takes too long, or
            the turns cannot be told apart.
        DataError: there is no template, or it is no template.
    """
    chat = Chat(tokenizer, supervise=supervise, chat_template=chat_template)
    try:
        (result,) = chat.render([conversation])
    finally:
        chat.close()
    if isinstance(result, BadRow):
        raise result
    return result


def learned_turns(conversation: Conversation, supervise: Supervise) -> list[int]:
    """Return the indices of the assistant's turns that are learned.

    `auto` and `completion`: those that are no prompt; `assistant`: all; `last_assistant`: the last;
    `all`: none in particular.
    """
    turns = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    if supervise == "all":
        return []
    if supervise == "last_assistant":
        return turns[-1:]
    first = 0 if supervise == "assistant" else conversation.supervised_from
    return [i for i in turns if i >= first]


def chat_templates(tokenizer: PreTrainedTokenizerBase, given: str | None) -> dict[str, str]:
    """Return name -> Jinja text of the chat templates to use, `default` and perhaps `tool_use`.

    Args:
        tokenizer: whose template is taken where none is given.
        given: data.chat_template: Jinja text, the name of one of the tokenizer's, or a file.

    Raises:
        DataError: there is none, or the file cannot be read.
    """
    own = getattr(tokenizer, "chat_template", None)
    named = own if isinstance(own, dict) else {}
    if given is not None:
        if given in named:
            return {"default": named[given]}
        return {"default": given if "{" in given else _read(given, sorted(named))}
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path} renders conversations by code of its own "
            f"({type(tokenizer).__name__}), so that what is the assistant's cannot be told; give a "
            "Jinja template with data.chat_template"
        )
    if not own:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template, and the data holds "
            "conversations; set data.chat_template to a Jinja template or a file that holds one, "
            "or give prompts and completions as text"
        )
    return named or {"default": own}


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the special tokens as text, sorted."""
    added = tokenizer.added_tokens_decoder.values()
    return sorted({*tokenizer.all_special_tokens, *(t.content for t in added if t.special)})


def _read(name: str, names: list[str]) -> str:
    file = Path(name).expanduser()
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or error
        known = f", nor a template of the tokenizer ({', '.join(names)})" if names else ""
        raise DataError(
            f"data.chat_template {name!r} is no Jinja text, and cannot be read as a file{known}: "
            f"{said}"
        ) from error
