"""Files of others are parsed within bounds, and every refusal is one line."""

import json
from pathlib import Path

import pytest

from toolkit import parsing
from toolkit.errors import ConfigError


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"9" * 100_000,
        b"[" + b"[]," * 1_000_000 + b"[]]",
        b"\xff\xfe",
        b"{'a': 1}",
        b"",
    ],
    ids=["open", "lists", "objects", "digits", "many", "not UTF-8", "not JSON", "empty"],
)
def test_json_out_of_bounds(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        parsing.read_json(tmp_path / "x.json", ConfigError)
    assert "\n" not in str(caught.value)
    assert "x.json" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "a: " + "[" * 100_000,
        "a: " + "[" * 10_000 + "]" * 10_000,
        "a: !!int x",
        "a: !!timestamp 2001-01-01",
        "a: 0x" + "f" * 100_000,
        "a: " + "1:" * 100_000 + "1",
        "a: " + "1:" * 100_000 + "1.5",
        "{a: 1, a: 2}",
        "a: " + "9" * 100_000,
        "a: &x [1, 2]\nb: *x",
        "a: !!python/object/apply:os.system [ls]",
        "a: 1\n" * 300_000,
        "a: [" + "1," * 100_000 + "]",
        "a: [",
    ],
)
def test_yaml_out_of_bounds(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        parsing.read_yaml(tmp_path / "x.yaml", ConfigError)
    assert "\n" not in str(caught.value)


def test_what_is_sound_is_read(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": "2001-01-01"}}
    (tmp_path / "x.json").write_text(json.dumps(value))
    (tmp_path / "x.yaml").write_text("a: [1, 2.5, null, true, x]\nb: {c: 2001-01-01}\n")
    assert parsing.read_json(tmp_path / "x.json", ConfigError) == value
    assert parsing.read_yaml(tmp_path / "x.yaml", ConfigError) == value
    with pytest.raises(ConfigError, match=r"cannot be read"):
        parsing.read_json(tmp_path / "none.json", ConfigError)
