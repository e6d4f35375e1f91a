"""Settings that are mappings to any value, such as `data.chat_template_kwargs`, as YAML holds them.

jsonargparse parses the texts in such a mapping again, so it would read `"1.10"` as 1.1.
"""

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config.fields import field_path, setting_types
from toolkit.errors import ConfigError
from toolkit.parsing import parse_yaml, read_yaml


def restore_mappings(cls: type, values: Mapping[str, Any], args: Sequence[str]) -> dict[str, Any]:
    """Replace the settings of type `dict[str, Any]` by the values of the files and flags.

    Args:
        cls: class of the settings.
        values: field of `cls` -> its value, as jsonargparse has read it.
        args: arguments of the command line, whose files and flags are known to be valid.

    Returns:
        A copy of `values`. If a setting occurs several times in `args`, the last one wins.

    Raises:
        ConfigError: a section refuses the mapping.
    """
    restored = dict(values)
    for setting, mapping in _read_mappings(list(_find_settings(cls)), args).items():
        section, _, name = field_path(setting).partition(".")
        restored[section] = _replace_field(restored[section], name, mapping)
    return restored


def _find_settings(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted settings of type `dict[str, Any]`."""
    for name, kind in setting_types(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from _find_settings(typing.cast(type, kind), f"{prefix}{name}.")
        elif kind == dict[str, Any]:
            yield f"{prefix}{name}"


def _read_mappings(settings: Sequence[str], args: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Map dotted settings to the last mapping that the files and flags in `args` give them."""
    values: dict[str, Any] = {}
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        flag, equals, text = arg.partition("=")
        text = text if equals else following
        if flag == "--config":
            values |= _find_values(read_yaml(Path(text), ConfigError), settings)
        elif flag.startswith("--") and flag[2:] in settings:
            values[flag[2:]] = text
    parsed = {
        setting: parse_yaml(value, setting, ConfigError) if isinstance(value, str) else value
        for setting, value in values.items()
    }
    return {setting: value for setting, value in parsed.items() if isinstance(value, dict)}


def _find_values(content: Any, settings: Sequence[str]) -> dict[str, Any]:
    """Map the dotted settings that occur in the content of a file to their values."""
    values = {}
    for setting in settings:
        *sections, name = setting.split(".")
        section = content
        for part in sections:
            section = section.get(part) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping) and name in section:
            values[setting] = section[name]
    return values


def _replace_field(section: Any, path: str, value: Any) -> Any:
    """Return a copy of a section with another value at a dotted path; "" is the section itself."""
    if not path:
        return value
    name, _, inner_path = path.partition(".")
    inner = _replace_field(getattr(section, name), inner_path, value)
    return dataclasses.replace(section, **{name: inner})
