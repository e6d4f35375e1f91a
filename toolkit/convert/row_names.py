"""Names of columns, keys of turns and roles in axolotl's data sets."""

from typing import Any

_ROLES = {"system", "developer", "user", "assistant", "tool"}

# axolotl's keys that name columns, or keys of turns -> the toolkit's name, and others that are
# recognised as it is.
_NAMES_OF_ROWS: dict[str, tuple[str, ...]] = {
    "field": ("text",),
    "field_messages": ("messages", "conversations"),
    "field_instruction": ("instruction",),
    "field_input": ("input",),
    "field_output": ("output",),
    "field_prompt": ("prompt",),
    "field_chosen": ("chosen",),
    "field_rejected": ("rejected",),
    "field_completion": ("completion",),
    "field_label": ("label",),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
}
# The function in axolotl's `type` of pairs or labelled answers, such as `chatml.intel` -> whether
# prompt and answers are plain texts here. Their columns are recognised by their names.
_PREFERRED = {
    **dict.fromkeys(("argilla", "icr", "intel", "ultra", "argilla_chat"), False),
    "prompt_pairs": True,
}


def columns_of(entry: dict[str, Any]) -> dict[str, str]:
    """Take the names of columns, keys of turns and roles out of an axolotl data set; return them
    as `data.columns`, without those that are recognised as they are.
    """
    found = dict[str, str]()
    given = {key: entry.pop(key) for key in _NAMES_OF_ROWS if key in entry}
    turns = entry.get("message_property_mappings")
    if isinstance(turns, dict) and {*turns} <= {"role", "content"}:
        del entry["message_property_mappings"]
        given |= {f"message_field_{key}": name for key, name in turns.items()}
    for key, name in given.items():
        if name not in _NAMES_OF_ROWS[key]:
            found[_NAMES_OF_ROWS[key][0]] = name
    roles = entry.get("roles")
    whole = isinstance(roles, dict) and all(isinstance(names, list) for names in roles.values())
    if isinstance(roles, dict) and whole and {*roles} <= _ROLES:
        del entry["roles"]
        found |= {name: role for role, names in roles.items() for name in names if name != role}
    return found


def preferred_columns(entry: dict[str, Any], objective: str) -> tuple[dict[str, str], str | None]:
    """Take the type out of an axolotl data set of pairs, or of answers with a label; return
    `data.columns` for it, and what is not carried.
    """
    given = entry.pop("type", None)
    if isinstance(given, dict):  # user_defined
        entry |= {k: v for k, v in given.items() if k.startswith("field_") and k != "field_system"}
        rest = [key for key in given if key not in entry]
        what = "texts are learned as they stand, turns as the chat template renders them"
        return {}, f"{', '.join(rest)}: {what}" if rest else None
    style, _, function = str(given).partition(".")
    if given is None:
        return {}, None
    if style == "chat_template" and function in ("", "default"):
        turns = entry.pop("field_messages", "messages")
        return {} if turns == "prompt" else {"prompt": turns}, None
    if style in ("chat_template", "orpo"):  # `prompt` and conversations
        return {}, None
    if style != "bradley_terry" and function not in _PREFERRED:
        return {}, "not known; pairs are prompt, chosen and rejected (docs/preference.md)"
    texts = _PREFERRED.get(function, False)
    if objective == "kto":  # `prompt` and a completion of text
        texts = function in ("prompt_pairs", "ultra")
    if texts:
        return {}, (
            f"texts are learned as they stand, without the turns that {style} puts around them, "
            "unless the rows have a column `system`; make lists of turns of them "
            "(docs/preference.md)"
        )
    return {}, f"rendered by the chat template, not as {style} there"
