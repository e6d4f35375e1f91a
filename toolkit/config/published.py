"""Select the settings of a run that may be published: no secret, no path of a machine.

Decided where the run trains: elsewhere nobody can tell a folder `models/base` from a Hub id.
"""

import math
import re
from pathlib import Path
from typing import Any

from toolkit.config.kinds import is_published, is_special
from toolkit.errors import ConfigError, is_secret_name, scrub
from toolkit.parsing import parse_yaml

# Settings that may hold a path, or words of the user's own.
_PATHS = (
    *("name_or_path", "tokenizer_name_or_path", "train_files", "eval_files", "dataset_name"),
    *("sources", "eval_sources", "chat_template", "eval_prompts", "from"),
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def publishable_settings(config: dict[str, Any], run: Path) -> dict[str, Any]:
    """Return what a model card says of settings, as plain JSON values; of paths the last part.

    `config` are a run's sections, in a file that anybody may have written, and `run` its folder.

    Returns:
        `base_model` {name, hub_id, revision, init, license}, `data` {name: ...} and
        `hyperparameters` {dotted setting: value}.
    """
    found = {
        "base_model": base_model(mapping(config, "model"), run),
        "data": _data(mapping(config, "data"), run, finetuned="lora" in config),
        "hyperparameters": _settings(config, run),
    }
    return publishable(found)


def base_model(model: dict[str, Any], run: Path = Path()) -> dict[str, Any]:
    """Return what is published of a base model, which may lie beside the `run`."""
    given = str(model.get("name_or_path") or "")
    local = is_path(given, run)
    return {
        "name": _last_part(given) if local else given,
        "hub_id": None if local else given,
        "revision": model.get("revision"),
        "init": model.get("init", "pretrained"),
        "license": _license(Path(given).expanduser() / "README.md") if local else None,
    }


def is_path(given: str, run: Path = Path()) -> bool:
    """Return whether a name is a path, here or beside the run, and not `name` or `org/name`."""
    if not _HUB_ID.fullmatch(given) or ".." in given:
        return True
    return any((folder / given).exists() for folder in (Path(), *run.absolute().parents))


def mapping(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a part of a file that anybody may have written; {} where it is no mapping."""
    found = content.get(name)
    return found if isinstance(found, dict) else {}


def publishable(value: Any) -> Any:
    """Return `value` as JSON can hold it (NaN becomes null), without secrets."""
    if isinstance(value, dict):
        named = {str(key): inner for key, inner in value.items()}
        return {scrub(k): publishable(v) for k, v in named.items() if not is_secret_name(k)}
    if isinstance(value, list | tuple):
        return [publishable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | bool | None) else scrub(str(value))


def _license(card: Path) -> str | None:
    """Return the license that a model card names in its front matter."""
    try:
        match = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---", card.read_text("utf-8"), re.DOTALL)
        front = parse_yaml(match[1], card, ConfigError) if match else None
    except (OSError, UnicodeDecodeError, ConfigError):  # somebody else's card: no license known
        return None
    license = front.get("license") if isinstance(front, dict) else None
    return license if isinstance(license, str) else None


def _data(data: dict[str, Any], run: Path, *, finetuned: bool) -> dict[str, Any]:
    found = {
        "train_files": _names(data.get("train_files")),
        **_dataset(data, run),
        "eval_files": _names(data.get("eval_files")),
        "sequence_length": data.get("sequence_length"),
    }
    if evaluated := data.get("eval_sources"):
        found["eval_sources"] = [
            {"files": _names(s.get("files")), **_dataset(s, run)} for s in _mappings(evaluated)
        ]
    if sources := data.get("sources"):
        found["sources"] = [
            {"files": _names(s.get("files")), **_dataset(s, run), "weight": s.get("weight")}
            for s in _mappings(sources)
        ]
    elif not found["train_files"] and "dataset_name" not in found:
        found["built_in"] = (
            "instructions and answers made of Python's standard library"
            if finetuned
            else "the source of Python's standard library"
        )
    return found


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def _names(files: Any) -> list[str]:
    listed = files if isinstance(files, list) else [files] if files else []
    return [_last_part(str(file)) for file in listed]


def _dataset(data: dict[str, Any], run: Path) -> dict[str, Any]:
    name = str(data.get("dataset_name") or "")
    if not name:
        return {}
    hub = not is_path(name, run)
    return {
        "dataset_name": name if hub else _last_part(name),
        "dataset_is_on_the_hub": hub,
        "dataset_config_name": data.get("dataset_config_name"),
        "dataset_split": data.get("dataset_split"),
    }


def _settings(config: dict[str, Any], run: Path) -> dict[str, Any]:
    """Select the settings that shaped the weights: dotted name -> value, without paths.

    Sections that a user's recipe adds are included. Of a frozen model, such as a teacher, the name
    is published as that of the base model is.
    """
    selected: dict[str, Any] = {}
    for section, content in config.items():
        if not is_published(section):
            continue
        settings = content.items() if isinstance(content, dict) else [("", content)]
        for name, value in settings:
            if name not in _PATHS and not (is_special(section) and _may_be_path(value)):
                selected[f"{section}.{name}".strip(".")] = value
        if is_special(section) and isinstance(content, dict) and "name_or_path" in content:
            selected[f"{section}.name"] = base_model(content, run)["name"]
    return selected


def _may_be_path(value: Any) -> bool:
    """Return True if a setting of a user's recipe may hold a path, or text of the user's own."""
    texts = value if isinstance(value, list) else [value]
    return any(isinstance(text, str) and re.search(r"[\\/\s~]", text) for text in texts)


def _last_part(path: str) -> str:
    return re.split(r"[\\/]", path.split("?")[0].rstrip("/\\"))[-1]
