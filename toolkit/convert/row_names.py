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
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
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
