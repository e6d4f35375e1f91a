"""Mutations of a file's bytes: of any bytes, and of what a format means by them.

Each function takes the content and a source of chance and returns other content. Owns the formats
it breaks (JSON, YAML, safetensors, pickles, zips, Parquet), by their own libraries, none of the
toolkit's; knows nothing of who reads the result.
"""

import copy
import io
import json
import pickle
import pickletools
import random
import re
import struct
import zipfile
from collections.abc import Callable
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

Chance = random.Random
Mutation = Callable[[bytes, Chance], bytes]

_NUMBERS = (0, 1, -1, 2, 7, 255, 2**31, 2**31 - 1, 2**32, 2**63, 2**63 - 1, -(2**63), 2**64, 10**30)
_FLOATS = (0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    *("", " ", "a", "0", "null", "true", "1e9", "-1", "None", "auto", "cpu", "cuda", "bf16"),
    *("../../etc/passwd", "/etc/passwd", "..", ".", "/", "~", "a/../b", "C:\\x", "file:///etc"),
    *("a\nb", "\0", "\ud800", "\U0001f600", "\u202e", "\x1b[31m", "é" * 50, "%s%n", "{{x}}", "*"),
    *("x" * 300, "9" * 400, "1" * 5_000, "y" * 200_000),
)


# ---- Any bytes


def in_bytes(content: bytes, chance: Chance) -> bytes:
    """Flip, overwrite, delete, insert, cut, double, move or splice bytes, in one to four places."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(data) + 1)
        size = min(chance.choice((1, 1, 2, 4, 8, 64, 1000)), len(data) - at)
        kind = chance.randrange(9)
        if kind <= 1 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            data[at : at + size] = chance.randbytes(size)
        elif kind == 3:
            del data[at : at + size]
        elif kind == 4:
            data[at:at] = chance.randbytes(chance.choice((1, 1, 8, 1000)))
        elif kind == 5:
            del data[at:]
        elif kind == 6:
            data[at:at] = data[at : at + size] * chance.choice((1, 1, 50))
        elif kind == 7:
            begin = chance.randrange(len(data) + 1)
            data[at : at + size] = data[begin : begin + size]
        else:
            data[at : at + size] = chance.choice((b"\0", b"\xff", b"\n", b'"', b"9")) * size
    return bytes(data)


def whole(content: bytes, chance: Chance) -> bytes:
    """Return what has nothing, or little, to do with the content."""
    return chance.choice(
        (
            *(b"", b"\0", b"\n", b"{}", b"[]", b"null", b"0", b'""', b"\xff\xfe", b"[" * 10**5),
            *(b'{"a":' * 10**5, b"\0" * 10**6, b"PK\x03\x04", b"PAR1PAR1", b"\x80\x04."),
            *(content * 3, content[::-1], content[: len(content) // 2] * 2),
            chance.randbytes(chance.randrange(1, 3000)),
        )
    )


# ---- Values as JSON and YAML have them


def hostile(chance: Chance) -> Any:
    """Return a value that a reader may not expect."""
    kind = chance.randrange(10)
    if kind == 0:
        return chance.choice((None, True, False))
    if kind <= 3:
        return chance.choice(_NUMBERS)
    if kind == 4:
        return chance.choice(_FLOATS)
    if kind <= 6:
        return chance.choice(_TEXTS)
    if kind == 7:
        return chance.choice(([], {}, [[]], [None], {"": None}, [0], {"a": {"b": 1}}, [1, "a", {}]))
    if kind == 8:
        value: Any = chance.choice((1, "a", []))
        for _ in range(chance.choice((3, 90, 110, 400))):
            value = [value] if chance.random() < 0.5 else {"a": value}
        return value
    size = chance.choice((100, 3000, 30_000, 300_000))
    return chance.choice(([0] * size, ["a"] * size, {f"k{i}": i for i in range(size)}))


def _slots(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value below `value`."""
    found: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        inner: list[Any] = []
        for container in level:
            keys = container.keys() if isinstance(container, dict) else range(len(container))
            found += [(container, key) for key in keys]
            inner += [container[k] for k in keys if isinstance(container[k], dict | list)]
        level = inner
    return found


def _other(value: Any, chance: Chance) -> Any:
    """Return something like `value`: another type, another size, another sign, other letters."""
    if isinstance(value, bool):
        return chance.choice((not value, int(value), str(value), None))
    if isinstance(value, int | float) and chance.random() < 0.8:
        shift = chance.choice((1, -1, value, -2 * value, 2**20, value * 999, value / 3, -value - 1))
        return value + (int(shift) if isinstance(value, int) and chance.random() < 0.8 else shift)
    if isinstance(value, str) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        letter = chance.choice(("", "/", ".", "\0", "\ud800", "x", "0", "\n", value[at] * 2))
        return value[:at] + letter + value[at + 1 :]
    if isinstance(value, list) and value and chance.random() < 0.7:
        return chance.choice((value[:-1], value * 2, value[::-1], [*value, None], value[:1] * 3))
    return chance.choice((str(value), [value], {"a": value}, [value, value], None))


def in_tree(value: Any, chance: Chance) -> Any:
    """Change one to three values, keys or places of what JSON or YAML has parsed."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if not (slots := _slots(value)) or chance.random() < 0.02:
            return hostile(chance)
        container, key = chance.choice(slots)
        if chance.random() < 0.3:  # few values are near the top, and those are read first
            container, key = chance.choice(_slots_of(value))
        kind = chance.randrange(8)
        if kind <= 1:
            container[key] = hostile(chance)
        elif kind <= 4:
            container[key] = _other(container[key], chance)
        elif kind == 5:
            del container[key]
        elif kind == 6:
            source, name = chance.choice(slots)
            container[key] = copy.deepcopy(source[name]) if _has(source, name) else None
        elif isinstance(container, dict):
            new = _other(key, chance) if isinstance(key, str) else "x"
            container[new if isinstance(new, str) else "x"] = container.pop(key)
        else:
            container.insert(key, copy.deepcopy(container[key]))
    return value


def _slots_of(value: Any) -> list[tuple[Any, Any]]:
    return [(value, key) for key in (value if isinstance(value, dict) else range(len(value)))]


def _has(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def as_json(value: Any, chance: Chance | None = None, **options: Any) -> bytes:
    """Return JSON, now and then with a key of the outermost object twice. A lone surrogate stays
    the escape that it is in JSON.
    """
    text = json.dumps(value, **options)
    if chance and isinstance(value, dict) and value and chance.random() < 0.05:
        twice = {chance.choice([*value]): hostile(chance)}
        text = text[:-1] + "," + json.dumps(twice)[1:]
    return text.encode("utf-8", "surrogatepass")


def _loaded(content: bytes) -> Any:
    return json.loads(content)


def in_json(content: bytes, chance: Chance) -> bytes:
    options: dict[str, Any] = {"indent": chance.choice((None, 2))}
    return as_json(in_tree(_loaded(content), chance), chance, **options)


def in_lines(content: bytes, chance: Chance) -> bytes:
    """Change a line of JSON lines as JSON, or their order and number."""
    lines = content.split(b"\n")
    kind, at = chance.randrange(8), chance.randrange(max(1, len(lines) - 1))
    if kind == 0:
        chance.shuffle(lines)
    elif kind == 1:
        lines[at:at] = [chance.choice((b"", b"{}", b"[]", b"null", b"1", b"\xff", b'{"step":1}'))]
    elif kind == 2:
        lines = lines * chance.choice((2, 50))
    elif kind == 3:
        lines[at] = in_bytes(lines[at], chance)
    elif lines[at]:
        for _ in range(chance.choice((1, 1, 3))):
            at = chance.randrange(len(lines))
            if lines[at].startswith(b"{"):
                lines[at] = as_json(in_tree(_loaded(lines[at]), chance))
    return b"\n".join(lines)


_YAML = (
    *("a: &a [1]\nb: *a\n", "&x [*x]\n", "!!python/object/apply:os.getcwd []\n", "? [a]\n: b\n"),
    *("a: 1\na: 2\n", "x: " + "1:" * 3000 + "1\n", "x: 2024-01-01\n", "x: !!binary aGk=\n"),
    *("<<: {a: 1}\n", "--- a\n--- b\n", "\t- a\n", "x: .nan\n", "x: 0x" + "f" * 5000 + "\n"),
    *("[" * 5000, "{a: " * 5000, "- " * 5000, "%YAML 9.9\n---\n", "x: >\n a\n", "1: 2\n", "~: ~\n"),
    *("x: 1_000__0\n", "x: 0b\n", "x: 0o9\n", "x: !!int a\n", "x: 9" + "9" * 5000 + "\n", "=: =\n"),
)
_LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def in_yaml(content: bytes, chance: Chance) -> bytes:
    if chance.random() < 0.25:
        planted = chance.choice((*_YAML, _LAUGHS)).encode()
        lines = content.splitlines(keepends=True)
        at = chance.randrange(len(lines) + 1)
        indent = b"  " * chance.randrange(2)
        return b"".join([*lines[:at], indent + planted, *lines[at:]])
    value = in_tree(yaml.safe_load(content), chance)
    style = chance.choice((None, False))
    try:
        text = yaml.safe_dump(value, sort_keys=False, default_flow_style=style)
    except RecursionError:  # deeper than PyYAML writes
        return in_bytes(content, chance)
    return text.encode("utf-8", "surrogatepass")


_JINJA = (
    *("{{ x.y.z }}", "{% for m in messages %}", "{% endfor %}", "{{ messages[9] }}"),
    *("{% include 'a' %}", "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}"),
    *("{{ 1 / 0 }}", "{{ bos_token }}", "{% set x = messages %}", "{{ messages | nothing }}"),
    *("{% generation %}", "{{ range(10**9) }}", "{{ strftime_now('%') }}", "{{ messages }}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ lipsum() }}", "{{ tools[0].x }}"),
    *("{# ", "{% raw %}", "{{ '\\ud800' }}", "{{ none + 1 }}"),
)


def in_template(content: bytes, chance: Chance) -> bytes:
    """Put a piece of Jinja anywhere, or in the place of one that is there."""
    text = content.decode()
    at = chance.randrange(len(text) + 1)
    end = at + chance.choice((0, 0, 5, 40))
    return (text[:at] + chance.choice(_JINJA) + text[end:]).encode()


def in_table(content: bytes, chance: Chance) -> bytes:
    """Change text that has lines and fields: CSV, or any other."""
    text = content.decode("utf-8", "surrogateescape")
    signs = (",", '"', "\n", "\r", '""', '"\n', "\0", "\ufeff", "\t", ";", "x" * 200_000, "\ud800")
    for _ in range(chance.choice((1, 1, 3))):
        at = chance.randrange(len(text) + 1)
        text = text[:at] + chance.choice(signs) + text[at + chance.choice((0, 0, 1, 30)) :]
    return text.encode("utf-8", "surrogatepass" if chance.random() < 0.5 else "replace")


# ---- Tensors


def in_safetensors(content: bytes, chance: Chance) -> bytes:
    """Change the header as JSON, or its length."""
    length = struct.unpack("<Q", content[:8])[0]
    header, rest = content[8 : 8 + length], content[8 + length :]
    if chance.random() < 0.15:
        said = chance.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, 10**8 + 1))
        return struct.pack("<Q", said) + header + rest
    value = json.loads(header)
    if chance.random() < 0.5:  # one tensor's entry, which most of the tree is not
        name = chance.choice([name for name in value if name != "__metadata__"])
        field = chance.choice(("dtype", "shape", "data_offsets"))
        kinds = ("F32", "BF16", "I8", "BOOL", "F4", "F8_E8M0", "C64", "U64", 3)
        value[name][field] = (
            chance.choice(kinds) if field == "dtype" else _other(value[name][field], chance)
        )
    else:
        value = in_tree(value, chance)
    made = as_json(value, chance)
    return struct.pack("<Q", len(made)) + made + rest


_ARGUMENTS: dict[type, Callable[[Any, Chance], Any]] = {
    int: lambda value, chance: chance.choice((*_NUMBERS, value + 1, value - 1)),
    str: lambda value, chance: chance.choice((*_TEXTS[:-1], value + "x", value[:-1])),
}


def in_pickle(content: bytes, chance: Chance) -> bytes:
    """Change numbers and texts of the records in a pickle, or its operations."""
    if chance.random() < 0.5:
        return _in_operations(content, chance)
    root = pickle.loads(content)
    found: list[tuple[Any, str]] = []
    seen: set[int] = set()
    level = [root]
    while level:
        value = level.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            level += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            level += value
        elif hasattr(value, "__dict__"):
            found += [(value, name) for name in vars(value) if name != "memory_format"]
            level += vars(value).values()
    for _ in range(chance.choice((1, 1, 3))):
        value, name = chance.choice(found)
        old = getattr(value, name)
        if isinstance(old, tuple) and old:  # sizes
            at = chance.randrange(len(old))
            new = (*old[:at], chance.choice((0, 1, 2**62, 2**31, old[at] + 1)), *old[at + 1 :])
            changed: Any = chance.choice((new, old[:-1], old + old, ()))
            changed = type(old)(changed)
        elif isinstance(old, dict) and old:
            key = chance.choice([*old])
            changed = {k: v for k, v in old.items() if k != key}
        elif type(old) in _ARGUMENTS:
            changed = _ARGUMENTS[type(old)](old, chance)
        else:
            changed = hostile(chance)
        object.__setattr__(value, name, changed)
    return pickle.dumps(root, protocol=chance.choice((2, 4, 4, 5)))


_HUGE = struct.pack("<I", 2**31 - 1)
_OPERATIONS = (
    *(b"N", b"}", b"]", b")", b"0", b"2", b"(", b"t", b"R", b"b", b"\x85", b"Q", b"r" + _HUGE),
    *(b"X" + _HUGE, b"\x8a\xff" + b"\x7f" * 255, b"cos\nsystem\n", b"j" + _HUGE),
)


def _in_operations(content: bytes, chance: Chance) -> bytes:
    places = [place for _, _, place in pickletools.genops(content) if place is not None]
    pieces = [content[a:b] for a, b in zip(places, [*places[1:], len(content)], strict=True)]
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, other = chance.randrange(len(pieces)), chance.randrange(len(pieces))
        kind = chance.randrange(5)
        if kind == 0:
            del pieces[at]
        elif kind == 1:
            pieces.insert(at, pieces[other])
        elif kind == 2:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif kind == 3:
            pieces[at] = in_bytes(pieces[at], chance)
        else:
            pieces[at] = chance.choice(_OPERATIONS)
    return b"".join(pieces)


def in_zips(content: bytes, chance: Chance) -> bytes:
    """Write one of the zips that a DCP shard consists of anew: other records, or compressed ones.

    What follows it moves, as far as its size has changed.
    """
    begins = [match.start() for match in re.finditer(b"PK\x03\x04", content)]
    ends = [match.start() for match in re.finditer(b"PK\x05\x06", content)]
    if not ends:
        return in_bytes(content, chance)
    at = chance.randrange(len(ends))
    begin = next(b for b in begins if at == 0 or b > ends[at - 1])
    end = ends[at] + 22
    kind = chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content[begin:end])) as old,
        zipfile.ZipFile(made, "w", kind) as new,
    ):
        for record in old.infolist():
            record.CRC = cast(int, None)  # torch leaves it out of some
        records = [(record.filename, old.read(record)) for record in old.infolist()]
        name, value = chance.choice(records)
        is_pickle = name.endswith("data.pkl")
        changed = (_in_operations if is_pickle else in_bytes)(value, chance) if value else b"x"
        records[records.index((name, value))] = (name + "x" * chance.randrange(2), changed)
        for name, value in records:
            new.writestr(name, value)
    return content[:begin] + made.getvalue() + content[end:]


# ---- Columns


def in_columns(content: bytes, chance: Chance) -> bytes:
    """Write a Parquet file anew with other columns, types, codecs, or group sizes."""
    table = pq.read_table(io.BytesIO(content))
    for _ in range(chance.choice((1, 1, 2))):
        table = _other_column(table, chance)
    out = io.BytesIO()
    codec = chance.choice(("none", "snappy", "zstd", "gzip"))
    pq.write_table(table, out, compression=codec, row_group_size=chance.choice((1, 1000)))
    return out.getvalue()


def _other_column(table: pa.Table, chance: Chance) -> pa.Table:
    rows = len(table)
    values: pa.Array = chance.choice(
        (
            *(pa.nulls(rows), pa.array([chance.choice(_NUMBERS[:8])] * rows, pa.int64())),
            *(pa.array([[1, None]] * rows), pa.array([{"a": [None]}] * rows)),
            *(pa.array([b"\xff\xfe"] * rows), pa.array(["x"] * rows).dictionary_encode()),
            *(pa.array([b"\xff"] * rows).cast(pa.string(), safe=False), pa.array([0.5] * rows)),
            *(pa.array([[[{"role": None}]]] * rows), pa.array(["x" * 50_000] * rows)),
            pa.array([{"role": "user", "content": None}] * rows),
        )
    )
    names = table.column_names
    if not names:
        return table.append_column("x", values)
    at = chance.randrange(len(names))
    kind = chance.randrange(5)
    if kind <= 1:
        return table.set_column(at, names[at], values)
    if kind == 2:
        return table.append_column(chance.choice(("x", "text", "input_ids", names[0])), values)
    if kind == 3:
        return table.remove_column(at)
    return table.slice(0, chance.randrange(rows + 1))
