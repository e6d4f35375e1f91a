"""Data sets of another tool's config as settings of the section `data`."""

from typing import Any

from toolkit.convert.keys import Keys
from toolkit.convert.row_names import columns_of, preferred_columns
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


def take_sources(keys: Keys, objective: str) -> None:
    """Carry the data sets; `objective`: what is trained, see `preferences`."""
    where, entries = keys.take("dataset_mixture", "dataset_mixer", "datasets")
    if isinstance(entries, dict) and "datasets" in entries:
        more = {k: v for k, v in entries.items() if k != "datasets" and v is not None}
        if "test_split_size" in more:
            keys.left["test_split_size"] = more.pop("test_split_size")
        for key, value in more.items():
            keys.note(f"{where}.{key}", "no equivalent", value)
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
