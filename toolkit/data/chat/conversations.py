"""Conversations to text: which chat template is used, and which turns are learned."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from toolkit.data.chat.masks import Rendered
from toolkit.data.chat.template import Template
from toolkit.data.examples.recognise import Conversation
from toolkit.data.sources.row_values import BadRow
from toolkit.errors import DataError

logger = logging.getLogger(__name__)

Supervise = Literal["auto", "completion", "assistant", "last_assistant", "all"]


class Chat:
    """Conversations to text: `chat.render(conversation)`.

    `supervise`: see `learned_turns`; `chat_template`, and what it raises: `chat_templates`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        supervise: Supervise = "auto",
        chat_template: str | None = None,
    ) -> None:
        self.supervise = supervise
        self.bos = tokenizer.bos_token
        added = tokenizer.added_tokens_decoder.values()
        marks = {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
        variables = dict(tokenizer.special_tokens_map)
        self.templates = {
            name: Template(text, variables, tuple(sorted(marks)))
            for name, text in chat_templates(tokenizer, chat_template).items()
        }

    def render(self, conversation: Conversation) -> Rendered | BadRow:
        """Return the text of a conversation, or what is wrong with it.

        Costs some five short renderings, about half a millisecond; more where turns must be
        searched for (see `masks.py`). Raises DataError where there is no template for it.
        """
        name = "tool_use" if conversation.tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise DataError(
                "the tokenizer has chat templates by name "
                f"({', '.join(sorted(self.templates))}), and none named default; choose one "
                "with data.chat_template"
            )
        try:
            rendered = self.templates[name].mark(
                conversation.messages,
                conversation.tools,
                conversation.template_kwargs,
                learned_turns(conversation, self.supervise),
            )
        except BadRow as bad:
            return bad
        except KeyboardInterrupt:  # a template may run without end
            logger.error("interrupted at the conversation %.200r", conversation.messages)
            raise
        if self.bos and rendered.text.startswith(self.bos * 2):  # further on it may begin each turn
            return BadRow(
                f"expected one {self.bos!r} where the text begins, got two from the chat template",
                "several begin-of-sequence tokens",
            )
        if self.supervise == "all":
            rendered = replace(rendered, spans=[(0, len(rendered.text))])
        return rendered


def learned_turns(conversation: Conversation, supervise: Supervise) -> list[int]:
    """Return the indices of the assistant's turns that are learned; of `all` none in particular."""
    turns = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    if supervise in ("all", "last_assistant"):
        return turns[-1:] if supervise == "last_assistant" else []
    first = 0 if supervise == "assistant" else conversation.supervised_from  # before: a prompt
    return [i for i in turns if i >= first]


def chat_templates(tokenizer: PreTrainedTokenizerBase, given: str | None) -> dict[str, str]:
    """Return name -> Jinja text of the chat templates to use, `default` and perhaps `tool_use`.

    `given`: Jinja text, the name of one of the tokenizer's, or a file; None: the tokenizer's.
    Raises DataError where there is none.
    """
    own = getattr(tokenizer, "chat_template", None)
    named = own if isinstance(own, dict) else {}
    if given is not None:
        text = named.get(given) or (given if "{" in given else _read(given, sorted(named)))
        return {"default": text}
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
