"""Give variables of a chat template a default: `data.chat_template_kwargs`.

[Note: defaults in the template] The values are written into the template, before its first line,
for callers that do not set the variable. So training, answers to `train.eval_prompts` and whoever
serves the export render the same text without further settings, and a caller's own value wins.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateSyntaxError, meta

from toolkit.errors import ConfigError
from toolkit.formats.private import transformers_private

_UTILS = "utils.chat_template_utils"
_OF_ALL = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}


def with_defaults(templates: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, str]:
    """Return named templates in which variables have default values.

    Raises:
        ConfigError: no template has such a variable.
    """
    used = {name: _variables(text) for name, text in templates.items()}
    variables = set().union(*used.values())
    for name in values:
        if name not in variables:
            choices = sorted(variables - _OF_ALL)
            near = difflib.get_close_matches(name, choices, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"data.chat_template_kwargs: the chat template has no variable {name!r}, only "
                f"{', '.join(choices) or 'none'}{hint}"
            )
    return {
        name: _with_defaults(text, {k: v for k, v in values.items() if k in used[name]})
        for name, text in templates.items()
    }


def _variables(text: str) -> set[str]:
    """Return the names that a template reads from outside; none if it cannot be parsed, which
    whoever renders it reports.
    """
    try:
        compiled = transformers_private(_UTILS, "_compile_jinja_template")(text)
        return meta.find_undeclared_variables(compiled.environment.parse(text))
    except TemplateSyntaxError:
        return set()


def _with_defaults(text: str, values: Mapping[str, Any]) -> str:
    # The newline after a block is not printed, and the template's own first line stays the first.
    blocks = (
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n"
        for name, value in values.items()
    )
    return "".join(blocks) + text


def _literal(value: Any) -> str:
    """Return a value of YAML as Jinja writes it."""
    if isinstance(value, dict):
        inner = ", ".join(f"{_literal(str(k))}: {_literal(v)}" for k, v in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    # Jinja does not join the two escapes by which ASCII writes a character above U+FFFF.
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
