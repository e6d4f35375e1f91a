"""Convert the data sets of another tool's config to settings of the section `data`."""

from typing import Any

from toolkit.convert.keys import Keys
from toolkit.convert.tables_of_tools import reason_not_converted
from toolkit.errors import ConfigError

# Key of a data set -> setting of a source.
_SOURCE_SETTINGS = {"name": "dataset_config_name", "config": "dataset_config_name"} | {
    "split": "dataset_split"
}
_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")
_COLUMNS = {"messages", "text", "chat_template_kwargs", "prompt", "chosen", "rejected"} | {
    "completion",
    "label",
}
_ROLES = {"system", "developer", "user", "assistant", "tool"}

# axolotl's keys that name columns, or keys of turns -> the toolkit's name, and further names that
# the toolkit recognises.
_ROW_NAMES: dict[str, tuple[str, ...]] = {
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
# The function in axolotl's `type` of pairs or labelled answers, such as `chatml.intel` -> True if
# prompt and answers are plain texts here. The toolkit recognises their columns by name.
_PAIR_FUNCTIONS = {
    **dict.fromkeys(("argilla", "icr", "intel", "ultra", "argilla_chat"), False),
    "prompt_pairs": True,
}


def take_sources(keys: Keys, objective: str) -> None:
    """Remove the data sets and their columns from `keys`, and set `data.*` in `keys.settings`.

    The data sets may be a list, a dict name -> share, or a dict with the list under `datasets`. A
    single data set becomes settings of `data`; several become the list `data.sources`.

    Args:
        keys: the keys of the config.
        objective: the preference objective; "" for supervised training.

    Raises:
        ConfigError: the data sets have another form.
    """
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
    sources = [_convert_source(keys, entry, i, objective) for i, entry in enumerate(entries or [])]
    if len(sources) > 1:
        keys.settings["data.sources"] = sources
    elif sources:
        names = {"files": "train_files"}
        keys.settings |= {f"data.{names.get(k, k)}": v for k, v in sources[0].items()}
    for setting, *aliases in (
        ("dataset_name", "dataset_id_or_path", "dataset_path"),
        ("dataset_config_name", "dataset_config"),
        ("dataset_split", "dataset_train_split"),
    ):
        key, value = keys.take(*aliases, setting)
        if key:
            keys.settings[f"data.{setting}"] = value
    key, value = keys.take("dataset_text_field", "text_field", "text_key", "text_column")
    if key and value != "text":
        keys.settings.setdefault("data.columns", {})["text"] = value
    name = keys.settings.get("data.dataset_name")
    if isinstance(name, str) and _is_file(name):
        keys.settings["data.train_files"] = keys.settings.pop("data.dataset_name")


def _convert_source(keys: Keys, entry: Any, index: int, objective: str) -> dict[str, Any]:
    """Convert one data set to an entry of `data.sources`; add notes on unconverted keys.

    Args:
        keys: the keys of the config, which receive the notes.
        entry: the data set: its name, or a mapping of its settings.
        index: its position in the list, for the notes.
        objective: the preference objective; "" for supervised training.
    """
    entry = dict(entry) if isinstance(entry, dict) else {"path": entry}
    entry = {key: value for key, value in entry.items() if value is not None}
    path = entry.pop("path", None) or entry.pop("id", None)
    files = entry.pop("data_files", None)
    out: dict[str, Any] = {"dataset_name": path}
    if files or _is_file(str(path)):
        out = {"files": files or path}
        entry.pop("ds_type", None)
        if files and not _is_file(str(path)) and path not in ("json", "csv", "parquet", "text"):
            path_reason = "its data_files are read from this machine"
            keys.note(f"datasets[{index}].path", path_reason, path)
    out |= {name: entry.pop(key) for key, name in _SOURCE_SETTINGS.items() if key in entry}
    kind = entry.get("type")
    columns, reason = take_pair_columns(entry, objective) if objective else ({}, None)
    if reason:
        keys.note(f"datasets[{index}].type", reason, kind)
    if columns := columns | take_columns(entry):
        out["columns"] = columns
    for key, value in entry.items():
        if key_reason := _reason_not_converted(key, value):
            keys.note(f"datasets[{index}].{key}", key_reason, value)
    return out


def _reason_not_converted(key: str, value: Any) -> str | None:
    """Return why a key of a data set is not converted; None if it can be dropped without a note."""
    kind = str(value).partition(".")[0]
    if key == "type" and kind == "alpaca":
        return "rendered by the chat template, not in Alpaca's own words"
    if key == "type" and kind in ("completion", "chat_template", "sharegpt"):
        # The toolkit recognises such rows; every token of texts is supervised.
        return None
    if key == "type":
        return "rows are recognised by their columns (docs/finetuning.md)"
    if key == "columns" and isinstance(value, list | dict) and {*map(str, value)} <= _COLUMNS:
        return None
    return reason_not_converted(key) or "no equivalent"


def _is_file(name: str) -> bool:
    """Return True if the name of a data set is a path, judged by its beginning or its ending."""
    return name.startswith((".", "/", "~")) or name.endswith(_FILES)


def take_columns(entry: dict[str, Any]) -> dict[str, str]:
    """Remove the names of columns, turn keys and roles from `entry`, and return `data.columns`.

    `entry` is an axolotl data set. Names that the toolkit recognises anyway are omitted.
    """
    columns = dict[str, str]()
    axolotl_names = {key: entry.pop(key) for key in _ROW_NAMES if key in entry}
    turns = entry.get("message_property_mappings")
    if isinstance(turns, dict) and {*turns} <= {"role", "content"}:
        del entry["message_property_mappings"]
        axolotl_names |= {f"message_field_{key}": name for key, name in turns.items()}
    for key, name in axolotl_names.items():
        if name not in _ROW_NAMES[key]:
            columns[_ROW_NAMES[key][0]] = name
    roles = entry.get("roles")
    has_lists = isinstance(roles, dict) and all(isinstance(n, list) for n in roles.values())
    if isinstance(roles, dict) and has_lists and {*roles} <= _ROLES:
        del entry["roles"]
        columns |= {name: role for role, names in roles.items() for name in names if name != role}
    return columns


def take_pair_columns(entry: dict[str, Any], objective: str) -> tuple[dict[str, str], str | None]:
    """Remove the `type` of an axolotl data set of preference rows from `entry`, and convert it.

    Returns:
        (`data.columns`, reason). The reason tells why the type is not converted exactly; None if it
        is.
    """
    row_type = entry.pop("type", None)
    if isinstance(row_type, dict):  # axolotl's user_defined type
        entry |= {
            k: v for k, v in row_type.items() if k.startswith("field_") and k != "field_system"
        }
        unused = [key for key in row_type if key not in entry]
        reason = "texts are used unchanged, turns as the chat template renders them"
        return {}, f"{', '.join(unused)}: {reason}" if unused else None
    style, _, function = str(row_type).partition(".")
    if row_type is None:
        return {}, None
    if style == "chat_template" and function in ("", "default"):
        turns = entry.pop("field_messages", "messages")
        return {} if turns == "prompt" else {"prompt": turns}, None
    if style in ("chat_template", "orpo"):  # `prompt` and conversations
        return {}, None
    if style != "bradley_terry" and function not in _PAIR_FUNCTIONS:
        return {}, "not known; pairs are prompt, chosen and rejected (docs/preference.md)"
    texts = _PAIR_FUNCTIONS.get(function, False)
    if objective == "kto":  # `prompt` and a completion of text
        texts = function in ("prompt_pairs", "ultra")
    if texts:
        return {}, (
            f"texts are used unchanged, without the turns that {style} puts around them, "
            "unless the rows have a column `system`; make lists of turns of them "
            "(docs/preference.md)"
        )
    return {}, f"rendered by the chat template, not as {style} there"
