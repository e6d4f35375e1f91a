"""Further arguments of chat templates: which names the toolkit sets itself."""

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
    """Refuse arguments of `data.chat_template_kwargs` that the toolkit sets itself.

    Raises:
        ConfigError: names them.
    """
    if reserved := sorted(RESERVED_ARGUMENTS.intersection(kwargs)):
        raise ConfigError(
            f"data.chat_template_kwargs: {', '.join(reserved)} cannot be set, because the toolkit "
            "sets it for each rendering; expected variables of the template, such as "
            "{enable_thinking: false}"
        )
