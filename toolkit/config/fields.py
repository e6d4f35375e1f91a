"""Names and number types of settings.

A dataclass cannot have a field called `from`, so the field is called `from_`. Users write and read
`from` everywhere: in files, flags, `--help`, errors and the run's config.yaml. Only this module
knows both names.
"""

import dataclasses
import keyword
import math
import typing
from typing import TYPE_CHECKING, Any

from jsonargparse import typing as restricted


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

WORDS: dict[Any, str] = {
    AtLeast1: "an integer of at least 1",
    AtLeast2: "an integer of at least 2",
    NotNegative: "an integer of at least 0",
    AllOrCount: "an integer of at least 1, or -1 for all",
    Positive: "a number above 0",
    NonNegative: "a number of at least 0",
    Fraction: "a number from 0 to below 1",
    UnitInterval: "a number from 0 to 1",
}
