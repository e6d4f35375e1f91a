"""Settings whose names are keywords of Python, such as `lora.from`.

A field of a dataclass cannot be called `from`, so it is called `from_`. Users see and write `from`
everywhere: in files, flags, `--help`, errors and the run's config.yaml. This module alone knows
both names.
"""

import dataclasses
import keyword
import typing
from typing import Any


def setting_name(field: str) -> str:
    """Return the name that users see for a field of a dataclass: `from` for `from_`."""
    return field[:-1] if field.endswith("_") and keyword.iskeyword(field[:-1]) else field


def field_name(setting: str) -> str:
    """Return the field of a dataclass that holds a setting: `from_` for `from`."""
    return f"{setting}_" if keyword.iskeyword(setting) else setting


def setting_path(path: str) -> str:
    """Return a dotted path of fields as users see it."""
    return ".".join(map(setting_name, path.split(".")))


def field_path(path: str) -> str:
    """Return the dotted path of fields of a setting."""
    return ".".join(map(field_name, path.split(".")))


def setting_types(cls: type) -> dict[str, Any]:
    """Return setting -> type of a dataclass."""
    return {setting_name(name): kind for name, kind in typing.get_type_hints(cls).items()}


def to_fields(cls: type, content: Any) -> Any:
    """Return a mapping of settings with the names of the fields of `cls`.

    Keys inside of a setting's own value, such as `data.columns: {from: role}`, stay as they are.
    """
    return _rename(cls, content, setting_types(cls), field_name)


def to_settings(cls: type, content: Any) -> Any:
    """Return a mapping of the fields of `cls` with the names that users see."""
    return _rename(cls, content, typing.get_type_hints(cls), setting_name)


def _rename(cls: type, content: Any, types: dict[str, Any], rename: Any) -> Any:
    if not isinstance(content, dict):
        return content
    renamed = {}
    for key, value in content.items():
        kind = types.get(key) if isinstance(key, str) else None
        if dataclasses.is_dataclass(kind):
            again = setting_types if rename is field_name else typing.get_type_hints
            value = _rename(kind, value, again(kind), rename)  # type: ignore[arg-type]
        renamed[rename(key) if key in types else key] = value
    return renamed
