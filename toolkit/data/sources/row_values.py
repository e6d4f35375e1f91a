"""The values of a row: text that is text, lists that are lists, JSON text parsed."""

import json
import reprlib
import unicodedata
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxdict = 4

T = TypeVar("T")
Row = dict[str, Any]  # column -> value; a turn of a conversation has this form too


class BadRow(Exception):
    """What is wrong with one row; whoever knows its file and number adds them."""

    def __init__(self, said: str, reason: str = "cannot be used") -> None:
        super().__init__(said, reason)
        self.reason = reason  # the same for all rows of this kind, to count them by

    def __str__(self) -> str:
        return str(self.args[0])


class SkippedRow(BadRow):
    """A row that is left out and counted, whatever `on_bad_row` says."""


def catch_bad_row(fn: Callable[[Any], T], value: Any) -> T | BadRow:
    """Return what `fn` makes of a value, or the BadRow that it raises."""
    try:
        return fn(value)
    except BadRow as bad:
        return bad


def describe_value(value: Any) -> str:
    """Return a value for a message: its type and its beginning, on one line, escaped."""
    return "null" if value is None else f"{type(value).__name__} {_short.repr(value)}"


def escape_text(text: str, keep: str = "\n") -> str:
    """Return text in which nothing moves the cursor, changes colours or cannot be seen."""
    return "".join(
        c
        if c in keep or c.isprintable() or unicodedata.category(c) == "Zs"
        else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def list_names(keys: Any) -> str:
    """Return the names of columns or keys for a message, at most a dozen."""
    names = [_short.repr(key) for key in keys]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return (", ".join(names[:12]) + more) or "none"


def refuse_value(value: Any, where: str, expected: str, reason: str = "wrong type") -> NoReturn:
    """Raise a BadRow for a value that is not what was expected."""
    raise BadRow(f"expected {expected} in {where!r}, got {describe_value(value)}", reason)


def read_list(value: Any, where: str) -> list[Any]:
    """Return `value`, which must be a list, or JSON text of one."""
    value = parse_json_text(value, where)
    if not isinstance(value, list):
        refuse_value(value, where, "a list")
    return value


def read_text(value: Any, where: str, *, nul: bool = False) -> str:
    """Return `value`, which must be clean text; see `clean`."""
    if not isinstance(value, str):
        refuse_value(value, where, "text")
    check_text(value, where, nul=nul)
    return value


def read_optional_text(row: dict[str, Any], name: str) -> str:
    """Return the text of a column; empty where it is missing or null."""
    return "" if row.get(name) is None else read_text(row[name], name)


def parse_json_text(value: Any, where: str) -> Any:
    """Return what JSON text stands for, checked by `clean`; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        content = parse_json(value)
    except ValueError as error:
        raise BadRow(
            f"expected a list, a mapping or JSON text in {where!r}, got {describe_value(value)} ({error})",
            "not JSON",
        ) from error
    check_text(content, where)
    return content


def parse_json(text: str) -> Any:
    """Return what JSON text stands for; NaN and infinities, which are no JSON, raise ValueError."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def check_text(value: Any, where: str, *, nul: bool = False) -> None:
    """Refuse text, however deep in `value`, that is not Unicode or, without `nul`, has a NUL."""
    if isinstance(value, str):
        if not nul and "\0" in value:
            said = f"expected text in {where!r}, got a NUL character at {value.index(chr(0))}"
            raise BadRow(said, "NUL character")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRow(
                f"expected Unicode text in {where!r}, got the lone surrogate "
                f"{value[error.start]!r} at {error.start}",
                "lone surrogate",
            ) from error
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_text(key, where, nul=nul)
            check_text(inner, f"{where}.{key}", nul=nul)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            check_text(inner, f"{where}[{i}]", nul=nul)
    elif isinstance(value, float) and value - value != 0:
        raise BadRow(f"expected a finite number in {where!r}, got {value}", "not JSON")
