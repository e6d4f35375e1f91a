"""Streamed pretraining: the ids of each row are those of the same rows read before the run."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import pytest
from conftest import save_byte_tokenizer
from transformers import AutoTokenizer

from toolkit.config.data import DataConfig
from toolkit.config.settings import ModelConfig, PretrainConfig, TrainConfig
from toolkit.data.feed.stream import SourceStream
from toolkit.data.prepare import PackingChoice, build_feed
from toolkit.data.row_formats import DOCUMENTS
from toolkit.data.sources import file_readers
from toolkit.data.sources.row_values import BadRow
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens.encode import Encoder, encode_source
from toolkit.errors import DataError
from toolkit.models import causal_lm as models


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


def jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def streamed(cfg: DataConfig, tokenizer) -> list:
    """Return the ids of each row, or what is wrong with it."""
    (source,) = load_sources(cfg, row_format=DOCUMENTS)
    encode = partial(Encoder(tokenizer, cfg, 300).encode_row, source)
    found = [encode(stored, number) for number, stored in enumerate(source.rows)]
    for example in found:
        if not isinstance(example, BadRow):
            assert example.spans == [(0, len(example.input_ids))][: len(example.input_ids)]
    return [f if isinstance(f, BadRow) else f.input_ids.tolist() for f in found]


def prepared(cfg: DataConfig, tokenizer) -> list:
    (source,) = load_sources(cfg, row_format=DOCUMENTS)
    return encode_source(source, Encoder(tokenizer, cfg, 300)).tokens["input_ids"][:]


TEXT = [
    {"text": ""},
    {"text": "a\0b"},
    {"text": "x"},
    {"text": "  "},
    {"text": "Said twice. " * 40, "messages": [{"role": "user", "content": "no document"}]},
    {"text": "part", "start": False, "end": False},
    {"text": "<|endoftext|>"},
]
IDS = [
    {"input_ids": [7], "labels": [-100]},
    {"input_ids": [], "labels": []},
    {"input_ids": [5, 6, 7], "labels": [-100, -100, -100], "attention_mask": [1, 0, 1]},
]


@pytest.mark.parametrize("append_eos", [True, False])
@pytest.mark.parametrize("rows", [TEXT, IDS], ids=["text", "ids"])
def test_ids_of_rows(tokenizer, tmp_path, rows, append_eos):
    files = jsonl(tmp_path / "rows.jsonl", rows)
    cfg = DataConfig(train_files=files, append_eos=append_eos)
    wanted = prepared(cfg, tokenizer)
    cfg = replace(cfg, streaming=True)
    assert streamed(cfg, tokenizer) == wanted
    assert sorted(map(len, wanted))[:2] == [0, 1]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    cfg = replace(cfg, train_files=str(tmp_path / "rows.parquet"))
    assert streamed(cfg, tokenizer) == wanted


def test_ids_of_a_text_file_in_pieces(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(file_readers.read_pieces, "__defaults__", (64,))
    file = tmp_path / "a.txt"
    file.write_text("".join(f"Line {i}.\n" for i in range(50)) + "\0")
    cfg = DataConfig(train_files=str(file))
    wanted = prepared(cfg, tokenizer)
    cfg = replace(cfg, streaming=True)
    assert len(wanted) > 3
    assert streamed(cfg, tokenizer) == wanted


def test_a_run_streams_the_tokens_that_it_would_prepare(tokenizer, tmp_path, tiny_llama):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    named = ModelConfig(str(tiny_llama), tokenizer_name_or_path=str(tmp_path / "tokenizer"))
    model = models.build_on_meta(named)
    # No conversations: pretraining reads the text column whatever else is there.
    files = jsonl(tmp_path / "rows.jsonl", [row | {"messages": []} for row in TEXT])
    tokens = {}
    for streaming in (False, True):
        data = DataConfig(train_files=files, streaming=streaming, eval_split=0, sequence_length=16)
        cfg = PretrainConfig(model=named, data=data, train=TrainConfig(max_steps=9))
        encoder = Encoder(tokenizer, data, models.vocabulary_size(model), DOCUMENTS)
        feed = build_feed(cfg, encoder, PackingChoice("none", "asked"), 1)
        if streaming:
            (source,) = feed.sources
            streamed = SourceStream(source, 0, feed.shape, seed=0)
            read = [streamed.next() for _ in range(len(tokens[False]))]
            assert not streamed._next.rows  # that was the whole pass
            tokens[True] = [item.pieces[0][0].tolist() for item in read]
        else:
            tokens[False] = [sample["input_ids"].tolist() for sample in feed.data]
    assert sorted(tokens[True]) == sorted(tokens[False])


def test_rows_without_a_document(tokenizer, tmp_path):
    bad = [{"text": "a"}, {"text": None}, {"other": "b"}, {"text": 3}, {"text": "c"}]
    files = jsonl(tmp_path / "rows.jsonl", bad)
    cfg = DataConfig(train_files=files, streaming=True)
    with pytest.raises(DataError, match=r"rows\.jsonl line 2: expected text .*on_bad_row: skip"):
        streamed(cfg, tokenizer)
    cfg = replace(cfg, on_bad_row="skip")
    found = streamed(cfg, tokenizer)
    assert [isinstance(f, BadRow) for f in found] == [False, True, True, True, False]
    assert str(found[2]).startswith(f"{files} line 3: expected a column 'text'")
    with pytest.raises(DataError, match="expected a tokenizer, since the data is text"):
        streamed(cfg, None)
    cfg = replace(cfg, train_files=jsonl(tmp_path / "ids.jsonl", [{"input_ids": [1, 300]}]))
    with pytest.raises(DataError, match=r"line 1: expected token ids from 0 to 299 .* got 300"):
        streamed(cfg, None)
    cfg = replace(cfg, train_files=jsonl(tmp_path / "chat.jsonl", [{"messages": []}]))
    with pytest.raises(DataError, match=r"line 1: expected a column 'text' or 'input_ids'"):
        streamed(cfg, tokenizer)
