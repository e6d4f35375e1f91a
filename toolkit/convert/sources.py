"""Data sets of another tool's config as settings of the section `data`."""

from typing import Any

from toolkit.convert.keys import Keys
from toolkit.convert.tables_of_tools import why_left
from toolkit.errors import ConfigError

_OF_A_SOURCE = {"name": "dataset_config_name", "config": "dataset_config_name"} | {
    "split": "dataset_split"
}
_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")
_COLUMNS = {"messages", "text", "chat_template_kwargs", "prompt", "chosen", "rejected"} | {
    "completion",
    "label",
}
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


def take_sources(keys: Keys, objective: str) -> None:
    """Carry the data sets; `objective`: what is trained, see `preferences`."""
    where, entries = keys.take("dataset_mixture", "dataset_mixer", "datasets")
    if isinstance(entries, dict) and "datasets" in entries:
        more = {k: v for k, v in entries.items() if k != "datasets" and v is not None}
        if "test_split_size" in more:
            keys.unconverted["test_split_size"] = more.pop("test_split_size")
        keys.note_all(where, more, "no equivalent")
        entries = entries["datasets"]
    elif isinstance(entries, dict):  # name -> share
        entries = [{"path": name, "weight": share} for name, share in entries.items()]
    if where and not isinstance(entries, list):
        raise ConfigError(f"{where}: expected a list of data sets, got {entries!r}")
    found = [_source(keys, entry, i, objective) for i, entry in enumerate(entries or [])]
    if len(found) > 1:
        keys.settings["data.sources"] = found
    elif found:
        names = {"files": "train_files"}
        keys.settings |= {f"data.{names.get(k, k)}": v for k, v in found[0].items()}
    for setting, *others in (
        ("dataset_name", "dataset_id_or_path", "dataset_path"),
        ("dataset_config_name", "dataset_config"),
        ("dataset_split", "dataset_train_split"),
    ):
        key, value = keys.take(*others, setting)
        if key:
            keys.settings[f"data.{setting}"] = value
    key, value = keys.take("dataset_text_field", "text_field", "text_key", "text_column")
    if key and value != "text":
        keys.settings.setdefault("data.columns", {})["text"] = value
    name = keys.settings.get("data.dataset_name")
    if isinstance(name, str) and _is_file(name):
        keys.settings["data.train_files"] = keys.settings.pop("data.dataset_name")


def _source(keys: Keys, entry: Any, index: int, objective: str) -> dict[str, Any]:
    """Return one data set as a mapping of `data.sources`; names what of it is not carried."""
    entry = dict(entry) if isinstance(entry, dict) else {"path": entry}
    entry = {key: value for key, value in entry.items() if value is not None}
    path = entry.pop("path", None) or entry.pop("id", None)
    files = entry.pop("data_files", None)
    out: dict[str, Any] = {"dataset_name": path}
    if files or _is_file(str(path)):
        out = {"files": files or path}
        entry.pop("ds_type", None)
        if files and not _is_file(str(path)) and path not in ("json", "csv", "parquet", "text"):
            what = "its data_files are read from this machine"
            keys.note(f"datasets[{index}].path", what, path)
    out |= {name: entry.pop(key) for key, name in _OF_A_SOURCE.items() if key in entry}
    kind = entry.get("type")
    columns, why = preferred_columns(entry, objective) if objective else ({}, None)
    if why:
        keys.note(f"datasets[{index}].type", why, kind)
    if columns := columns | columns_of(entry):
        out["columns"] = columns
    for key, value in entry.items():
        if why := _why_left(key, value):
            keys.note(f"datasets[{index}].{key}", why, value)
    return out


def _why_left(key: str, value: Any) -> str | None:
    """Return why a key of a data set is not carried; None: it says what is recognised anyway."""
    kind = str(value).partition(".")[0]
    if key == "type" and kind == "alpaca":
        return "rendered by the chat template, not in Alpaca's own words"
    if key == "type" and kind in ("completion", "chat_template", "sharegpt"):
        return None  # texts: learned whole
    if key == "type":
        return "rows are recognised by their columns (docs/finetuning.md)"
    if key == "columns" and isinstance(value, list | dict) and {*map(str, value)} <= _COLUMNS:
        return None
    return why_left(key) or "no equivalent"


def _is_file(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(_FILES)


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
