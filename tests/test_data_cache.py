"""Encoded rows are found again by what files hold, and by nothing that a copy may keep."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import save_byte_tokenizer
from test_pairs import TEMPLATE, assistant, user
from transformers import AutoTokenizer

from toolkit.config.data import FinetuneDataConfig
from toolkit.data.row_formats import find_row_format
from toolkit.data.sources import tables
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens.encode import Encoder, encode_source


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def encoded(file: Path, tokenizer: Any, learned: Any = "examples", **settings: Any) -> list[str]:
    settings = {"chat_template": str(TEMPLATE), "sequence_length": 100} | settings
    cfg = FinetuneDataConfig(train_files=str(file), **settings)
    (source,) = load_sources(cfg, row_format=find_row_format(learned))
    encoder = Encoder(tokenizer, cfg, 300, row_format=find_row_format(learned))
    return [tokenizer.decode(ids) for ids in encode_source(source, encoder).tokens["input_ids"]]


def write(file: Path, word: str) -> None:
    if file.suffix == ".parquet":
        pq.write_table(pa.table({"text": [f"a {word}."] * 3}), file, compression="none")
    elif file.suffix == ".csv":
        file.write_text(f"prompt,completion\na ,{word}\n")
    elif file.suffix == ".txt":
        file.write_text(f"a {word}.")
    else:
        sides = {"chosen": f"yes {word}", "rejected": "no"}
        row = {"prompt": "q: ", **sides} if "pairs" in file.name else {"text": f"a {word}."}
        file.write_text(json.dumps(row) + "\n")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv", "a.txt", "pairs.jsonl"])
def test_a_change_that_keeps_size_and_time_is_seen(
    tmp_path: Path, tokenizer: Any, name: str
) -> None:
    learned, file = "pairs" if "pairs" in name else "examples", tmp_path / name
    write(file, "first")
    before, stat = encoded(file, tokenizer, learned), file.stat()
    write(file, "other")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    after = encoded(file, tokenizer, learned)
    assert after == [text.replace("first", "other") for text in before] != before


def test_a_copy_with_another_time_is_found_again(
    tmp_path: Path, tokenizer: Any, cache: Path
) -> None:
    file = tmp_path / "a.jsonl"
    write(file, "first")
    encoded(file, tokenizer)
    made = sorted(path.name for path in cache.rglob("encoded-*.arrow"))
    os.utime(file, (1, 1))
    encoded(file, tokenizer)
    assert sorted(path.name for path in cache.rglob("encoded-*.arrow")) == made
    # Counts name the places of rows, so a copy in another folder has counts of its own.
    (tmp_path / "moved").mkdir()
    shutil.copy(file, tmp_path / "moved" / "a.jsonl")
    encoded(tmp_path / "moved" / "a.jsonl", tokenizer)
    assert len([*cache.rglob("encoded-*.arrow")]) == len(made) + 1


def test_another_template_for_pairs_is_seen(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "chats.jsonl"
    row = {"prompt": [user("q")], "chosen": [assistant("yes")], "rejected": [assistant("no")]}
    file.write_text(json.dumps(row) + "\n")
    other = "Now: " + TEMPLATE.read_text()
    texts = [encoded(file, tokenizer, "pairs", chat_template=t) for t in (str(TEMPLATE), other)]
    assert [text[0].startswith("Now:") for text in texts] == [False, True]
    switch = "{{ mood or 'calm' }}" + TEMPLATE.read_text()
    texts = [
        encoded(file, tokenizer, "pairs", chat_template=switch, chat_template_kwargs=kwargs)
        for kwargs in ({}, {"mood": "glad"})
    ]
    assert [text[0][:4] for text in texts] == ["calm", "glad"]


def test_of_large_files_samples_and_times_are_compared_and_reported(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(tables, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(tables, "_BLOCK", 16)
    monkeypatch.setattr(tables, "_SAMPLES", 4)
    file = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": f"row {i:03}"}) for i in range(80)]
    file.write_text("\n".join(rows))
    before, stat = tables.digest_contents([file], "here"), file.stat()
    assert "here: 1.6 kB are too much to read at each start" in capsys.readouterr().out
    for at in (0, 79):  # at the ends
        changed = [*rows]
        changed[at] = changed[at].replace("row", "now")
        file.write_text("\n".join(changed))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert tables.digest_contents([file], "here")[0][2] != before[0][2]
