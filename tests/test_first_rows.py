"""Mistakes in the data are found before a process is started, by some of the rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import save_byte_tokenizer, save_tiny_model

from toolkit.config.preference import PreferConfig
from toolkit.config.settings import FinetuneConfig, FinetuneDataConfig, FinetuneModelConfig
from toolkit.data.first_rows import LOOK_ROWS
from toolkit.errors import DataError
from toolkit.start_checks import check_start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    save_byte_tokenizer(folder)
    return folder


def checked(folder: Path, output: Path, rows: list[Any], kind: type = FinetuneConfig) -> str:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file = output / "rows.jsonl"
    file.write_text("".join(line + "\n" for line in lines))
    data = FinetuneDataConfig(train_files=str(file), sequence_length=60)
    model = FinetuneModelConfig(str(folder))
    cfg = kind(model=model, data=data, output_dir=str(output / "run"))
    return check_start(cfg, 1, "cpu")


def good(count: int, size: int = 1) -> list[Any]:
    return [{"prompt": f"q{i}: ", "completion": "a" * size} for i in range(count)]


def pairs(count: int, rejected: str) -> list[Any]:
    return [{"prompt": "q", "chosen": "a", "rejected": rejected} for _ in range(count)]


BAD = {
    "a broken line": ([*good(57), "{broken", *good(9)], FinetuneConfig, "line 58: expected JSON"),
    "null content": (
        [*good(30), {"prompt": "q", "completion": None}],
        FinetuneConfig,
        "line 31: expected text in 'completion', got null",
    ),
    "too short a length": (
        [{"prompt": "q" * 100, "completion": "a"}] * 40,
        FinetuneConfig,
        "got none: 40 rows gave 0 examples, .*40 rows were skipped .no supervised token",
    ),
    "equal pairs": (pairs(40, "a"), PreferConfig, "40 rows were skipped .equal sides"),
    "the end of a cut file": (
        [*good(4000, 30), '{"prompt": "q", "compl'],
        FinetuneConfig,
        "line 4001: expected JSON",
    ),
    "far within a large file": (
        [*good(LOOK_ROWS + 9, 3000), *["{broken" + "x" * 1000] * 3000, *good(900, 3000)],
        FinetuneConfig,
        "of those after byte .*expected JSON",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_found_before_the_start(folder: Path, tmp_path: Path, case: str) -> None:
    rows, kind, said = BAD[case]
    with pytest.raises(DataError, match=said):
        checked(folder, tmp_path, rows, kind)


def test_the_line_says_what_was_looked_at(folder: Path, tmp_path: Path) -> None:
    assert checked(folder, tmp_path, good(70)) == "checked    70 rows, which are all rows"
    line = checked(folder, tmp_path, good(LOOK_ROWS + 500))
    assert f"checked    {LOOK_ROWS + 5:,} rows: up to {LOOK_ROWS:,} at the beginning" in line
    assert "toolkit inspect --data" in line
    assert checked(folder, tmp_path, pairs(9, "b"), PreferConfig).startswith("checked    9 rows")
