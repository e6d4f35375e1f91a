"""Further arguments of chat templates: which names the toolkit sets itself, and which values are
possible.
"""

import math
from typing import Any

from toolkit.errors import ConfigError

RESERVED_ARGUMENTS = frozenset(
    (
        *("conversation", "conversations", "messages", "tools", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
        *("tokenize", "tokenizer_kwargs", "return_dict", "return_tensors"),
        *("padding", "truncation", "max_length", "processor_kwargs"),
    )
)
"""Arguments that `apply_chat_template` or the toolkit gives a meaning of their own."""


def check_template_kwargs(kwargs: dict[str, Any]) -> None:
    """Refuse arguments of `data.chat_template_kwargs` that the toolkit sets itself, and names and
    values that no template can hold.

    Raises:
        ConfigError: names them.
    """
    for name, value in kwargs.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"data.chat_template_kwargs: expected names of variables, got {name!r}"
            )
        if not _is_writable(value):
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: expected texts, finite numbers, true, false, "
                f"null, and lists and mappings of them, got {value!r}"
            )
    if reserved := sorted(RESERVED_ARGUMENTS.intersection(kwargs)):
        raise ConfigError(
            f"data.chat_template_kwargs: {', '.join(reserved)} cannot be set, because the toolkit "
            "sets it for each rendering; expected variables of the template, such as "
            "{enable_thinking: false}"
        )


def _is_writable(value: Any) -> bool:
    """Return whether a value can be written as JSON."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_writable(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_writable, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)
