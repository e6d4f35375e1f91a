"""Select the settings of a run that may be published: no secrets, no paths of a machine.

This happens on the machine that trains, because only there can a folder `models/base` be told from
a Hub id.
"""

import math
import re
from pathlib import Path
from typing import Any

from toolkit.config.kinds import is_extra_section, is_published
from toolkit.errors import ConfigError, is_secret_name, scrub
from toolkit.parsing import parse_yaml

# Settings that may contain a path or text of the user.
_PATHS = (
    *("name_or_path", "tokenizer_name_or_path", "train_files", "eval_files", "dataset_name"),
    *("sources", "eval_sources", "chat_template", "eval_prompts", "from"),
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def select_publishable_settings(config: dict[str, Any], run: Path) -> dict[str, Any]:
    """Select the settings of a run that a model card may show, without secrets or full paths.

    Args:
        config: the parsed config.yaml of the run, which is not trusted.
        run: folder of the run.

    Returns:
        Plain JSON: `base_model` (see `describe_base_model`), `data` (names of files and data
        sets) and `hyperparameters` (dotted setting -> value).
    """
    return to_publishable(
        {
            "base_model": describe_base_model(get_mapping(config, "model"), run),
            "data": _describe_data(get_mapping(config, "data"), run, finetuned="lora" in config),
            "hyperparameters": _select_hyperparameters(config, run),
        }
    )


def describe_base_model(model: dict[str, Any], run: Path = Path()) -> dict[str, Any]:
    """Describe a base model for a model card; of a local path only the last part is kept.

    Args:
        model: the section `model` of a config.
        run: folder of the run. A relative path is also searched in the parents of this folder.

    Returns:
        `name`, `hub_id` (None if the model is local), `revision`, `init` and `license`.
    """
    name_or_path = str(model.get("name_or_path") or "")
    local = is_path(name_or_path, run)
    return {
        "name": _last_path_part(name_or_path) if local else name_or_path,
        "hub_id": None if local else name_or_path,
        "revision": model.get("revision"),
        "init": model.get("init", "pretrained"),
        "license": _read_license(Path(name_or_path).expanduser() / "README.md") if local else None,
    }


def is_path(name: str, run: Path = Path()) -> bool:
    """Return True if a name is a path and not a Hub id (`name` or `org/name`).

    A name that could be a Hub id is a path if it exists relative to the current folder or to a
    parent of the folder `run`.
    """
    if not _HUB_ID.fullmatch(name) or ".." in name:
        return True
    return any((folder / name).exists() for folder in (Path(), *run.absolute().parents))


def get_mapping(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Get a section of an untrusted file; {} if it is missing or not a mapping."""
    section = content.get(name)
    return section if isinstance(section, dict) else {}


def to_publishable(value: Any) -> Any:
    """Convert a value to plain JSON: NaN becomes null, keys of secrets and tokens are removed."""
    if isinstance(value, dict):
        entries = {str(key): inner for key, inner in value.items()}
        return {scrub(k): to_publishable(v) for k, v in entries.items() if not is_secret_name(k)}
    if isinstance(value, list | tuple):
        return [to_publishable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | bool | None) else scrub(str(value))


def _read_license(card: Path) -> str | None:
    """Read the license in the front matter of a model card; None if it has none."""
    try:
        match = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---", card.read_text("utf-8"), re.DOTALL)
        front = parse_yaml(match[1], card, ConfigError) if match else None
    except (OSError, UnicodeDecodeError, ConfigError):
        # The card was written by others and may be broken.
        return None
    license = front.get("license") if isinstance(front, dict) else None
    return license if isinstance(license, str) else None


def _describe_data(data: dict[str, Any], run: Path, *, finetuned: bool) -> dict[str, Any]:
    """Describe the training and evaluation data of a run by names of files and data sets.

    Args:
        data: the section `data` of a config.
        run: folder of the run.
        finetuned: selects the text for built-in data: instructions if True, source code if False.
    """
    description = {
        "train_files": _list_file_names(data.get("train_files")),
        **_describe_dataset(data, run),
        "eval_files": _list_file_names(data.get("eval_files")),
        "sequence_length": data.get("sequence_length"),
    }
    if eval_sources := data.get("eval_sources"):
        description["eval_sources"] = [
            {"files": _list_file_names(source.get("files")), **_describe_dataset(source, run)}
            for source in _filter_mappings(eval_sources)
        ]
    if sources := data.get("sources"):
        description["sources"] = [
            {
                "files": _list_file_names(source.get("files")),
                **_describe_dataset(source, run),
                "weight": source.get("weight"),
            }
            for source in _filter_mappings(sources)
        ]
    elif not description["train_files"] and "dataset_name" not in description:
        description["built_in"] = (
            "instructions and answers made of Python's standard library"
            if finetuned
            else "the source of Python's standard library"
        )
    return description


def _filter_mappings(value: Any) -> list[dict[str, Any]]:
    """Return the entries of a list that are dicts; [] if `value` is not a list."""
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def _list_file_names(files: Any) -> list[str]:
    """List the file names of one path or a list of paths, without their folders."""
    if not files:
        return []
    return [_last_path_part(str(file)) for file in (files if isinstance(files, list) else [files])]


def _describe_dataset(data: dict[str, Any], run: Path) -> dict[str, Any]:
    """Describe the data set that a source names (`dataset_*` keys); {} if it names none."""
    name = str(data.get("dataset_name") or "")
    if not name:
        return {}
    hub = not is_path(name, run)
    return {
        "dataset_name": name if hub else _last_path_part(name),
        "dataset_is_on_the_hub": hub,
        "dataset_config_name": data.get("dataset_config_name"),
        "dataset_split": data.get("dataset_split"),
    }


def _select_hyperparameters(config: dict[str, Any], run: Path) -> dict[str, Any]:
    """Map the settings that shaped the weights to their values, without paths.

    This includes the sections that a user's recipe adds. The name of a frozen model, such as a
    teacher or the reference of preference tuning, is published like that of the base model.
    """
    selected: dict[str, Any] = {}
    for section, content in config.items():
        if not is_published(section):
            continue
        settings = content.items() if isinstance(content, dict) else [("", content)]
        for name, value in settings:
            if name not in _PATHS and not (is_extra_section(section) and _may_be_path(value)):
                selected[f"{section}.{name}".strip(".")] = value
        if is_extra_section(section) and isinstance(content, dict) and "name_or_path" in content:
            selected[f"{section}.name"] = describe_base_model(content, run)["name"]
        if section == "preference" and isinstance(content, dict) and content.get("reference"):
            reference = {"name_or_path": content["reference"]}
            selected["preference.reference"] = describe_base_model(reference, run)["name"]
    return selected


def _may_be_path(value: Any) -> bool:
    """Return True if a value, or an item of a list, contains a slash, a space or `~`.

    It may then be a path or a private text in a user's recipe.
    """
    texts = value if isinstance(value, list) else [value]
    return any(isinstance(text, str) and re.search(r"[\\/\s~]", text) for text in texts)


def _last_path_part(path: str) -> str:
    """Return the last part of a path or URL, without a query."""
    return re.split(r"[\\/]", path.split("?")[0].rstrip("/\\"))[-1]
