"""Columns of rows: declared once, they are stored, packed, padded and collated."""

import pickle
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import save_byte_tokenizer
from transformers import AutoTokenizer

from toolkit.config.data import FinetuneDataConfig
from toolkit.data.examples.recognise import Text
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.feed.stream import SourceStream, StreamSource
from toolkit.data.row_formats import (
    ANSWERS,
    EXAMPLES,
    PAIRS,
    RowFormat,
    find_row_format,
    register_row_format,
)
from toolkit.data.samples.columns import Column
from toolkit.data.samples.sample_shape import FILLER, SampleShape
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens.encode import Encoder, encode_source
from toolkit.errors import ConfigError, DataError

TEACHER = Column("int32", per="token", shape=(2,), fill=-1, late=True)
WEIGHT = Column("float32", per="token", fill=0.5)
LABEL = Column("int64", per="row", fill=-100)


@dataclass(frozen=True)
class Labelled:
    text: Text
    label: int | None


def parse_labelled(row: dict[str, Any], layout: Any) -> Labelled:
    return Labelled(
        EXAMPLES.parse(row, layout), len(row["text"]) % 3 if row["text"] != "bb" else None
    )


def texts_of(row: Labelled) -> list[Any]:
    return [row.text]


def encode_labelled(row: Labelled, encoded: Any, cfg: Any) -> Any:
    (example,) = encoded
    weights = example.input_ids / 256
    return replace(example, columns={"label": row.label, "weight": weights})


CLASSES = replace(
    EXAMPLES,
    name="classes",
    parse=parse_labelled,
    texts=texts_of,
    encode=encode_labelled,
    columns={"label": LABEL, "weight": WEIGHT, "teacher": TEACHER},
    sequences_per_row=1,
)
TEXTS = ["abc", "bb", "defgh", "xy", "longer text", "q" * 9]


@pytest.fixture
def encoded(tmp_path: Path) -> Any:
    save_byte_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"text": "{text}"}}\n' for text in TEXTS))
    cfg = FinetuneDataConfig(train_files=str(file), sequence_length=16, append_eos=False)

    def of(row_format: RowFormat) -> Any:
        (source,) = load_sources(cfg, row_format=row_format)
        return source, Encoder(tokenizer, cfg, 300, row_format)

    return of


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_a_new_column_reaches_the_batch(encoded: Any, packing: Any) -> None:
    source = encode_source(*encoded(CLASSES))
    shape = SampleShape(packing, 16, 299, row_format=CLASSES)
    feed = PreparedFeed([source], shape, seed=0, global_batch=3)
    (samples,) = feed.train
    rows = samples.pieces.rows
    ids = np.concatenate([rows.ids(row) for row in range(len(rows))])
    for filled in (False, True):
        if filled:
            rows.fill_column("teacher", np.stack([ids, ids + 1], 1).astype(np.int32))
        copy = pickle.loads(pickle.dumps(samples))
        batch = shape.batch([copy[index] for index in [*range(len(samples)), FILLER]])
        tokens, columns = batch.inputs["input_ids"], batch.columns
        is_token = tokens != 299
        padding = ~is_token
        assert set(columns) == {"label", "weight"} | ({"teacher"} if filled else set())
        assert torch.equal(columns["weight"][is_token], (tokens[is_token] / 256).float())
        assert (columns["weight"][padding] == 0.5).all()
        if filled:
            expected = torch.stack([tokens, tokens + 1], -1)[is_token].int()
            assert torch.equal(columns["teacher"][is_token], expected)
            assert (columns["teacher"][padding] == -1).all()
        # A label for each sequence, in their order.
        assert batch.n_sequences == len(columns["label"]) == len(TEXTS)
        last = tokens[batch.ends[:, 0], batch.ends[:, 1]].tolist()
        labels = [len(text) % 3 if text != "bb" else -100 for text in TEXTS]
        by_end = {int(rows.ids(row)[-1]): label for row, label in enumerate(labels)}
        assert columns["label"].tolist() == [by_end[token] for token in last]
        assert {tensor.data_ptr() for tensor in columns.values()} <= {
            tensor.data_ptr() for tensor in batch.tensors()
        }
        assert batch.to("meta").columns["label"].device.type == "meta"


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_a_stream_has_the_stored_columns(encoded: Any, packing: Any) -> None:
    source, encoder = encoded(CLASSES)
    shape = SampleShape(packing, 16, 299, row_format=CLASSES)
    rows = source.rows.to_iterable_dataset()
    stream = SourceStream(
        StreamSource("one", rows, partial(encoder.encode_row, source)), 0, shape, 3
    )
    sample = stream.next()
    assert sample is not None
    batch = shape.batch([shape.sample(sample.pieces)])
    assert set(batch.columns) == {"label", "weight"}
    assert len(batch.columns["label"]) == batch.n_sequences == len(sample.pieces)
    tokens = batch.inputs["input_ids"]
    is_token = batch.real
    assert torch.equal(batch.columns["weight"][is_token], (tokens[is_token] / 256).float())


def test_values_of_tokens_follow_the_halves_of_compared_rows() -> None:
    row_format = replace(ANSWERS, columns={**ANSWERS.columns, "teacher": TEACHER})
    shape = SampleShape("bfd", 32, row_format=row_format)
    sample = shape.dummy_sample(10, 4)
    sample["teacher"] = torch.arange(64, dtype=torch.int32).view(32, 2)
    batch = shape.batch([sample])
    assert batch.halves is not None
    first, second = batch.halves
    assert first.columns["teacher"][0, :4].flatten().tolist() == list(range(8))
    assert second.columns["teacher"][0, :6].flatten().tolist() == list(range(8, 20))
    assert set(first.columns) == {"teacher"}
    assert set(batch.columns) == {"desirable", "reference", "teacher"}


def test_dummy_samples_have_all_columns() -> None:
    for row_format in (CLASSES, PAIRS, ANSWERS):
        shape = SampleShape("none", 16, row_format=row_format)
        assert set(shape.batch([shape.dummy_sample(8, 4)]).columns) == set(row_format.columns)
        stored = {name for name, column in row_format.columns.items() if not column.late}
        assert set(shape.batch([shape.dummy_sample(8, 4, late=False)]).columns) == stored


def test_wrong_values_and_names_are_refused(encoded: Any) -> None:
    source = encode_source(*encoded(CLASSES))
    shape = SampleShape("none", 16, row_format=CLASSES)
    (samples,) = PreparedFeed([source], shape, seed=0, global_batch=1).train
    with pytest.raises(DataError, match=r"expected values of teacher .* shape \(2,\)"):
        samples.pieces.rows.fill_column("teacher", np.zeros((3, 2), np.int32))
    with pytest.raises(DataError, match="wrapped cuts rows anywhere, but label"):
        SampleShape("wrapped", 16, row_format=CLASSES)
    with pytest.raises(ConfigError, match="declares a column 'labels'"):
        replace(EXAMPLES, columns={"labels": LABEL})
    with pytest.raises(ConfigError, match="expected one of the row formats documents, examples"):
        find_row_format("classes")
    with pytest.raises(ConfigError, match="there is a row format pairs already"):
        register_row_format(replace(PAIRS))
