"""Parse JSON and YAML of unknown origin within bounds on size, depth and number of values.

A file beyond the bounds is refused before it is parsed, so none costs more than a few seconds and
200 MB.
"""

import collections
import json
import re
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import ToolkitError, one_line

MAX_JSON_BYTES = 64 * 2**20
MAX_JSON_VALUES = 1_000_000  # a manifest of 1,000 ranks and 100,000 tensors has 600,000
MAX_YAML_BYTES = 2**20
MAX_YAML_EVENTS = 50_000
MAX_DEPTH = 100
# Possibly half of a surrogate pair, as an escape (\ud800) or in bytes; no file could hold it.
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
# Of a number in YAML: integers to the base 60 take quadratic time.
MAX_DIGITS = 100


def read_json(file: Path, error: type[ToolkitError], *, strict: bool = False) -> Any:
    """Read a JSON file; raise `error` if it is missing, too large, too deeply nested, or no JSON.

    Args:
        file: the file.
        error: class of the error; its message names the file.
        strict: also refuse NaN, infinity, and a name that occurs twice in one object.
    """
    return parse_json(read_bounded(file, MAX_JSON_BYTES, error), file, error, strict=strict)


def parse_json(
    content: bytes | str, source: object, error: type[ToolkitError], *, strict: bool = False
) -> Any:
    """Parse a JSON text; raise `error` as `read_json` does.

    Args:
        content: the text.
        source: name of the text in errors, such as its file.
        error: class of the error.
        strict: also refuse NaN, infinity, and a name that occurs twice in one object. Parsers
            differ in which of the two values they take.
    """
    encoded = content.encode() if isinstance(content, str) else content
    _check_limit(len(encoded), MAX_JSON_BYTES, "bytes", source, error)
    values = sum(encoded.count(mark) for mark in (b",", b"[", b"{"))
    _check_limit(values, MAX_JSON_VALUES, "values", source, error)
    hooks: dict[str, Any] = {"object_pairs_hook": _unique_names, "parse_constant": _refuse_constant}
    try:
        value = json.loads(encoded, **hooks if strict else {})
        if _HALF_PAIR.search(encoded):
            json.dumps(value, ensure_ascii=False).encode()  # raises for half a pair
        too_deep = _is_deep(value)
    except RecursionError:
        too_deep = True
    except ValueError as problem:  # not UTF-8, not JSON, or an integer of thousands of digits
        raise error(f"{source} is not readable JSON: {one_line(str(problem))}") from None
    if too_deep:
        raise error(f"{source} is nested too deeply to be read")
    return value


def parse_size(text: str) -> int | None:
    """Parse a size such as `5GB` (10^9 bytes each), `5GiB` (2^30) or `800000`.

    Returns:
        The number of bytes; None if the text is no size, or less than one byte.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?", text.strip().upper())
    digits, unit, binary = size.groups() if size else ("0", None, None)
    limit = float(digits) * (1024 if binary else 1000) ** " KMGT".index(unit or " ")
    return int(limit) if limit >= 1 else None


def _check_limit(
    count: int, limit: int, unit: str, source: object, error: type[ToolkitError]
) -> None:
    """Raise `error` if `count` exceeds `limit`; `unit` is "bytes" or "values"."""
    if count > limit:
        raise error(f"{source} holds {count:,} {unit}, more than the {limit:,} expected")


def read_yaml(file: Path, error: type[ToolkitError]) -> Any:
    """Read a YAML file of plain values, within bounds on size, depth and number of values.

    Raises `error` if it is missing, beyond the bounds, no YAML, or has tags, aliases or repeated
    keys. A date is read as text.
    """
    content = read_bounded(file, MAX_YAML_BYTES, error)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        raise error(f"{file} is not text in UTF-8; save it as UTF-8") from None
    return parse_yaml(content, file, error)


def parse_yaml(content: bytes | str, source: object, error: type[ToolkitError]) -> Any:
    """Parse a YAML text of plain values; raises `error` as `read_yaml` does.

    `source` is the name of the text in errors.
    """
    _check_limit(len(content), MAX_YAML_BYTES, "bytes", source, error)
    depth = 0
    try:
        for count, event in enumerate(yaml.parse(content, Loader=yaml.CSafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH or count > MAX_YAML_EVENTS:
                raise error(f"{source} is nested too deeply, or holds too many values, to be read")
            if isinstance(event, yaml.AliasEvent):
                raise error(f"{source} repeats a value by an alias (*{event.anchor}): write it out")
            if tag := getattr(event, "tag", None):
                raise error(f"{source} has a value with a tag ({tag}): write it without one")
        return yaml.load(content, Loader=_PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise error(f"{source} is not readable YAML: {one_line(str(problem))}") from None


def read_bounded(file: Path, limit: int, error: type[ToolkitError]) -> bytes:
    """Read the bytes of a file; raise `error` if it is unreadable or larger than `limit` bytes."""
    try:
        with open(file, "rb") as opened:
            content = opened.read(limit + 1)
    except OSError as problem:
        raise error(f"{file} cannot be read: {problem.strerror}") from None
    if len(content) > limit:
        raise error(f"{file} is larger than the {limit:,} bytes expected")
    return content


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from (name, value) pairs; raise ValueError if a name occurs twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        duplicate = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{duplicate[:80]!r} occurs twice")
    return values


def _refuse_constant(constant: str) -> Any:
    """Raise ValueError for `NaN`, `Infinity` or `-Infinity` in a JSON text."""
    raise ValueError(f"{constant} is no number of JSON")


def _is_deep(value: Any) -> bool:
    """Return True if lists and objects are nested more than `MAX_DEPTH` levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH + 1):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
        if not level:
            return False
    return True


class _PlainLoader(yaml.CSafeLoader):
    """YAML loader for plain values: dates are read as text, and a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """Build a dict from a mapping node; raise YAMLError if a key occurs twice."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise yaml.YAMLError(
                    f"{key.value!r} occurs twice in one mapping, in lines {lines[key.value]} and "
                    f"{line}; join them into one"
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Build a number; raise YAMLError if its text is longer than `MAX_DIGITS` characters."""
        if len(node.value) > MAX_DIGITS:
            raise yaml.YAMLError(f"a number of {len(node.value):,} characters")
        is_int = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)


_TAG = "tag:yaml.org,2002:"
for _kind, _constructor in (
    ("timestamp", _PlainLoader.construct_yaml_str),
    ("int", _PlainLoader.construct_number),
    ("float", _PlainLoader.construct_number),
):
    _PlainLoader.add_constructor(_TAG + _kind, _constructor)  # type: ignore[type-var]  # of a stub
