"""Names and number types of settings.

A dataclass cannot have a field called `from`, so the field is called `from_`. Users write and read
`from` everywhere: in files, flags, `--help`, errors and the run's config.yaml. Only this module
knows both names.
"""

import dataclasses
import keyword
import math
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jsonargparse import typing as restricted


def setting_name(field: str) -> str:
    """Convert the name of a dataclass field to that of its setting: `from_` to `from`."""
    return field[:-1] if field.endswith("_") and keyword.iskeyword(field[:-1]) else field


def field_name(setting: str) -> str:
    """Convert the name of a setting to that of its dataclass field: `from` to `from_`."""
    return f"{setting}_" if keyword.iskeyword(setting) else setting


def setting_path(path: str) -> str:
    """Convert a dotted path of fields to user-facing names: `lora.from_` to `lora.from`."""
    return ".".join(map(setting_name, path.split(".")))


def field_path(path: str) -> str:
    """Convert a dotted user-facing setting to dataclass fields: `lora.from` to `lora.from_`."""
    return ".".join(map(field_name, path.split(".")))


def setting_types(cls: type) -> dict[str, Any]:
    """Map the user-facing name of each setting of the dataclass `cls` to its type."""
    return {setting_name(name): kind for name, kind in typing.get_type_hints(cls).items()}


def _map_field_types(cls: type) -> dict[str, Any]:
    """Map the name of each field of the dataclass `cls` to its type."""
    return typing.get_type_hints(cls)


def to_fields(cls: type, content: Any) -> Any:
    """Rename the keys of `content` from user-facing names to field names of `cls`, recursively.

    Sections are renamed too. Keys inside the value of a setting, such as
    `data.columns: {from: role}`, stay as they are. `content` is returned unchanged if it is not
    a dict.
    """
    return _rename_keys(cls, content, setting_types, field_name)


def to_settings(cls: type, content: Any) -> Any:
    """Rename the keys of `content` from field names of `cls` to user-facing names, recursively.

    This is the reverse of `to_fields`.
    """
    return _rename_keys(cls, content, _map_field_types, setting_name)


def _rename_keys(
    cls: type,
    content: Any,
    types_of: Callable[[type], dict[str, Any]],
    rename: Callable[[str], str],
) -> Any:
    """Apply `rename` to the keys of `content` that are in `types_of(cls)`, also in nested sections.

    A section is a value whose type in `types_of(cls)` is a dataclass. Other keys and values stay
    unchanged. If `content` is no dict, it is returned.
    """
    if not isinstance(content, dict):
        return content
    types = types_of(cls)
    renamed = {}
    for key, value in content.items():
        section = types.get(key) if isinstance(key, str) else None
        if dataclasses.is_dataclass(section):
            value = _rename_keys(section, value, types_of, rename)  # type: ignore[arg-type]
        renamed[rename(key) if key in types else key] = value
    return renamed


# For type checkers, a restricted number is a plain one. jsonargparse checks the range.
if TYPE_CHECKING:
    AtLeast1 = int
    AtLeast2 = int
    NotNegative = int
    AllOrCount = int
    Positive = float
    NonNegative = float
    Fraction = float
    UnitInterval = float
else:
    _FINITE = ("<", math.inf)
    AtLeast1 = restricted.PositiveInt
    AtLeast2 = restricted.restricted_number_type("AtLeast2", int, (">=", 2))
    NotNegative = restricted.NonNegativeInt
    _ALL_OR_COUNT = [("==", -1), (">=", 1)]
    AllOrCount = restricted.restricted_number_type("AllOrCount", int, _ALL_OR_COUNT, join="or")
    Positive = restricted.restricted_number_type("Positive", float, [(">", 0), _FINITE])
    NonNegative = restricted.restricted_number_type("NonNegative", float, [(">=", 0), _FINITE])
    Fraction = restricted.restricted_number_type("Fraction", float, [(">=", 0), ("<", 1)])
    UnitInterval = restricted.ClosedUnitInterval

RANGE_WORDS: dict[Any, str] = {
    AtLeast1: "an integer of at least 1",
    AtLeast2: "an integer of at least 2",
    NotNegative: "an integer of at least 0",
    AllOrCount: "an integer of at least 1, or -1 for all",
    Positive: "a number above 0",
    NonNegative: "a number of at least 0",
    Fraction: "a number from 0 to below 1",
    UnitInterval: "a number from 0 to 1",
}
"""Number type -> the description of its range in error messages."""
