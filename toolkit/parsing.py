"""JSON and YAML that others wrote, parsed within bounds: size, depth and number of values.

What is beyond is refused before it is parsed: no file costs more than seconds and 200 MB.
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
# May be half of a surrogate pair, which is no character: \ud800 as an escape, or in bytes.
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
MAX_DIGITS = 100  # of a number in YAML: integers to the base 60 take quadratic time


def read_json(file: Path, error: type[ToolkitError], *, strict: bool = False) -> Any:
    """Return the value that a JSON file holds; raise `error`, on one line, where the file is not
    there, too large, too deeply nested, or not JSON.
    """
    return parse_json(read_bounded(file, MAX_JSON_BYTES, error), file, error, strict=strict)


def parse_json(
    content: bytes | str, source: object, error: type[ToolkitError], *, strict: bool = False
) -> Any:
    """Return the value of a JSON text; `source` names it in errors. Raises as `read_json` does.

    `strict` refuses a name that is there twice, which readers take differently, and NaN.
    """
    given = content.encode() if isinstance(content, str) else content
    _refuse_more(len(given), MAX_JSON_BYTES, "bytes", source, error)
    values = sum(given.count(mark) for mark in (b",", b"[", b"{"))
    _refuse_more(values, MAX_JSON_VALUES, "values", source, error)
    hooks: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _refuse}
    try:
        value = json.loads(given, **hooks if strict else {})
        if _HALF_PAIR.search(given):
            json.dumps(value, ensure_ascii=False).encode()  # what no file could be written with
        too_deep = _is_deep(value)
    except RecursionError:
        too_deep = True
    except ValueError as problem:  # not UTF-8, not JSON, or an integer of thousands of digits
        raise error(f"{source} is not readable JSON: {one_line(str(problem))}") from None
    if too_deep:
        raise error(f"{source} is nested too deeply to be read")
    return value


def parse_size(text: str) -> int | None:
    """Return the bytes of a size such as `5GB` (10^9), `5GiB` (2^30) or `800000`; None of another
    text, and of less than a byte.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?", text.strip().upper())
    digits, unit, binary = size.groups() if size else ("0", None, None)
    limit = float(digits) * (1024 if binary else 1000) ** " KMGT".index(unit or " ")
    return int(limit) if limit >= 1 else None


def _refuse_more(n: int, most: int, what: str, source: object, error: type[ToolkitError]) -> None:
    if n > most:
        raise error(f"{source} holds {n:,} {what}, more than the {most:,} expected")


def read_yaml(file: Path, error: type[ToolkitError]) -> Any:
    """Return the value that a YAML file holds: no dates, no tags. Raises as `read_json` does."""
    content = read_bounded(file, MAX_YAML_BYTES, error)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        raise error(f"{file} is not text in UTF-8; save it as UTF-8") from None
    return parse_yaml(content, file, error)


def parse_yaml(content: bytes | str, source: object, error: type[ToolkitError]) -> Any:
    """Return the value of a YAML text; `source` names it in errors. Raises as `read_yaml` does."""
    _refuse_more(len(content), MAX_YAML_BYTES, "bytes", source, error)
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
    """Return the bytes of a file; raise `error` where it cannot be read or is beyond `limit`."""
    try:
        with open(file, "rb") as opened:
            content = opened.read(limit + 1)
    except OSError as problem:
        raise error(f"{file} cannot be read: {problem.strerror}") from None
    if len(content) > limit:
        raise error(f"{file} is larger than the {limit:,} bytes expected")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:80]!r} is there twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _is_deep(value: Any) -> bool:
    """Whether lists and objects lie more than `MAX_DEPTH` levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH + 1):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
        if not level:
            return False
    return True


class _PlainLoader(yaml.CSafeLoader):
    """YAML's plain values: a date stays the text that it is, no key stands twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise yaml.YAMLError(
                    f"{key.value!r} stands twice in one mapping, in lines {lines[key.value]} and "
                    f"{line}; join them into one"
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
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
