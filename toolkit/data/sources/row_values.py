"""Read and check the values of a row: text, lists and JSON text."""

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
    """A row that cannot be used. The caller adds its file and number to the message.

    Args:
        message: expected and actual content.
        reason: a short text under which such rows are counted.
    """

    def __init__(self, message: str, reason: str = "cannot be used") -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class SkippedRow(BadRow):
    """A row that is always skipped and counted, even with `data.on_bad_row: error`."""


def catch_bad_row(fn: Callable[[Any], T], value: Any) -> T | BadRow:
    """Return `fn(value)`; if it raises a BadRow, return that exception."""
    try:
        return fn(value)
    except BadRow as bad:
        return bad


def describe_value(value: Any) -> str:
    """Describe a value for a message: its type and shortened content, escaped and on one line."""
    return "null" if value is None else f"{type(value).__name__} {_short.repr(value)}"


def escape_text(text: str, keep: str = "\n") -> str:
    """Replace invisible characters, and those that control the terminal, by Python's escapes.

    Args:
        text: any text.
        keep: characters that are not replaced.
    """
    return "".join(
        c
        if c in keep or c.isprintable() or unicodedata.category(c) == "Zs"
        else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def list_names(keys: Any) -> str:
    """Format up to twelve names of columns or keys for a message, and the number of further ones.

    Returns "none" if there are none.
    """
    names = [_short.repr(key) for key in keys]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return (", ".join(names[:12]) + more) or "none"


def refuse_value(value: Any, where: str, expected: str, reason: str = "wrong type") -> NoReturn:
    """Raise a BadRow that says which value was expected and which was found.

    Args:
        value: the actual value.
        where: column, and position within it.
        expected: description of the expected value.
        reason: see `BadRow`.
    """
    raise BadRow(f"expected {expected} in {where!r}, got {describe_value(value)}", reason)


def read_list(value: Any, where: str) -> list[Any]:
    """Return a value that is a list, or parse it if it is JSON text of a list.

    Args:
        value: the value.
        where: column, and position within it, for the message.

    Raises:
        BadRow: the value is something else.
    """
    value = parse_json_text(value, where)
    if not isinstance(value, list):
        refuse_value(value, where, "a list")
    return value


def read_text(value: Any, where: str, *, nul: bool = False) -> str:
    """Return a text unchanged, after checking it with `check_text`.

    Raises:
        BadRow: the value is not text, or `check_text` refuses it.
    """
    if not isinstance(value, str):
        refuse_value(value, where, "text")
    check_text(value, where, nul=nul)
    return value


def read_optional_text(row: dict[str, Any], name: str) -> str:
    """Return the text of a column; "" if it is missing or null. Raises BadRow for other values."""
    return "" if row.get(name) is None else read_text(row[name], name)


def parse_json_text(value: Any, where: str) -> Any:
    """Parse JSON text and check its texts; return any other value unchanged.

    Raises:
        BadRow: the text is not JSON, or `check_text` refuses it.
    """
    if not isinstance(value, str):
        return value
    try:
        content = parse_json(value)
    except ValueError as error:
        raise BadRow(
            f"expected a list, a mapping or JSON text in {where!r}, got {describe_value(value)} "
            f"({error})",
            "not JSON",
        ) from error
    check_text(content, where)
    return content


def parse_json(text: str) -> Any:
    """Parse JSON text strictly: NaN and infinities are refused.

    Raises:
        ValueError: the text is not JSON.
    """

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def check_text(value: Any, where: str, *, nul: bool = False) -> None:
    """Raise BadRow if a text or number in a value, at any depth, is invalid.

    A text is invalid if it has a lone surrogate or a NUL character. A number is invalid if it is
    NaN or infinite.

    Args:
        value: a value of a row.
        where: column, for the message.
        nul: allow NUL characters.
    """
    if isinstance(value, str):
        if not nul and "\0" in value:
            message = f"expected text in {where!r}, got a NUL character at {value.index(chr(0))}"
            raise BadRow(message, "NUL character")
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
