"""JSON schemas of configs, for editors that complete and check YAML files."""

import json
from typing import Any

from toolkit.config.fields import setting_name
from toolkit.config.kinds import kind_of
from toolkit.config.parse import config_parser

_EDITOR_KEY = "$schema"  # jsonargparse accepts it in JSON configs; YAML files have a comment for it


def json_schema(config: type) -> dict[str, Any]:
    """Build the JSON schema (draft 2020-12) of the configs of a kind of run.

    jsonargparse derives it from the dataclasses. The schema refuses unknown settings, wrong types
    and numbers out of their range, except for ranges such as "-1 or at least 1". Settings that
    contradict each other are found by the toolkit only.

    Args:
        config: class of the settings, such as `FinetuneConfig`.
    """
    schema = json.loads(config_parser(config).get_completion_script("jsonschema"))
    schema = _rename_settings(schema)
    kind = kind_of(config)
    schema["title"] = f"Config of {kind.title}"
    schema["properties"]["kind"] = {
        "description": "Kind of run.",
        "enum": [kind.name, None],
    }
    return schema


def _rename_settings(node: Any) -> Any:
    """Rename dataclass fields to settings (`from_` to `from`), and fold the descriptions' lines."""
    if isinstance(node, list):
        return [_rename_settings(item) for item in node]
    if not isinstance(node, dict):
        return node
    renamed = {key: _rename_settings(value) for key, value in node.items()}
    if isinstance(renamed.get("properties"), dict):
        renamed["properties"] = {
            setting_name(name): value
            for name, value in renamed["properties"].items()
            if name != _EDITOR_KEY
        }
    if isinstance(renamed.get("required"), list):
        renamed["required"] = [setting_name(name) for name in renamed["required"]]
    if isinstance(renamed.get("description"), str):
        renamed["description"] = " ".join(renamed["description"].split())
    return renamed
