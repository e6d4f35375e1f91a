"""Samples equal a plain concatenation; splits and refusals."""

import pickle
import random
import types
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from feeds import samples
from torch.utils.data import DataLoader

from toolkit.data.feed.prepared import split_held_out
from toolkit.data.samples.batch import IGNORED
from toolkit.data.samples.pieces import cut_windows
from toolkit.data.samples.sample_shape import FILLER, SampleShape
from toolkit.data.tokens.encoded import EncodedSource
from toolkit.errors import DataError


def documents(lengths: list[int], rows_per_chunk: int, folder, dtype: str = "int32"):
    """Documents that count upwards, memory-mapped, in chunks of a few rows."""
    ids, next_id = [], 0
    for length in lengths:
        ids.append(list(range(next_id, next_id + length)))
        next_id += length
    features = datasets.Features(input_ids=datasets.List(datasets.Value(dtype)))
    rows = datasets.Dataset.from_dict({"input_ids": ids}, features=features)
    return rows.map(
        lambda row: row,
        features=features,
        cache_file_name=str(folder / f"{random.random()}.arrow"),
        writer_batch_size=rows_per_chunk,
    )


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_windows_equal_a_plain_concatenation(tmp_path, chunk, dtype):
    rng = random.Random(chunk)
    lengths = [rng.choice([0, 0, 1, 2, 5, 40]) for _ in range(60)]
    tokens = documents(lengths, chunk, tmp_path, dtype)
    assert len(tokens.data.column("input_ids").chunks) == -(-60 // chunk)
    flat = [i for row in tokens["input_ids"] for i in row]
    for length in (2, 7, 16, 101):
        cut_windows = samples(tokens, "wrapped", length)
        assert len(cut_windows) == len(flat) // length
        assert cut_windows.pieces.rows.total == len(flat)
        assert cut_windows.pieces.dropped == {"tokens": len(flat) % length}
        for i in range(len(cut_windows)):
            assert cut_windows[i]["input_ids"].tolist() == flat[i * length : (i + 1) * length]


def test_a_sample(tmp_path):
    cut_windows = samples(documents([10, 10], 1, tmp_path), "wrapped", 8)
    sample = cut_windows[np.int64(1)]
    assert sample["input_ids"].tolist() == list(range(8, 16))
    assert sample["labels"].tolist() == [IGNORED, *range(9, 16)]  # nothing predicts the first
    assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
    sample["input_ids"][1] = 5  # a copy: neither the labels nor the file change
    assert sample["labels"][1] == 9
    assert cut_windows[1]["input_ids"][1] == 9
    filler = cut_windows[FILLER]
    assert filler["input_ids"].tolist() == [0] * 8
    assert filler["labels"].tolist() == [IGNORED] * 8
    assert filler["labels"].dtype == torch.int64
    for index in (2, -2):
        with pytest.raises(IndexError, match=f"no sample {index} of 2"):
            cut_windows[index]


def test_a_selection_is_read_in_its_own_order(tmp_path):
    tokens = documents([3, 3, 3], 1, tmp_path).select([2, 0])
    assert samples(tokens, "wrapped", 6)[0]["input_ids"].tolist() == [6, 7, 8, 0, 1, 2]


def test_pickle_is_small_and_workers_read(tmp_path):
    cut_windows = samples(documents([100] * 200, 10, tmp_path), "wrapped", 50)
    dumped = pickle.dumps(cut_windows)
    assert len(dumped) < 8000  # a path, not 80,000 bytes of tokens
    again = pickle.loads(dumped)
    assert torch.equal(again[7]["input_ids"], cut_windows[7]["input_ids"])
    loader = DataLoader(cut_windows, batch_sampler=[[3, 1], [-1, 2]], num_workers=1)
    first, second = list(loader)
    assert first["input_ids"][:, 0].tolist() == [150, 50]
    assert second["labels"][:, 1].tolist() == [IGNORED, 101]


def test_too_little_text(tmp_path):
    with pytest.raises(DataError) as caught:
        samples(documents([3, 4], 1, tmp_path), "wrapped", 8)
    said = str(caught.value)
    assert "at least one sample of 8 tokens (data.sequence_length)" in said
    assert "all of its documents have 7 tokens" in said
    assert "set data.sequence_length to at most 7" in said


@pytest.mark.parametrize(
    ("n", "share", "max_eval", "train", "held"),
    [
        (100, 0.01, None, 99, 1),
        (100, 0.1, None, 90, 10),
        (100, 0.1, 3, 90, 3),
        (100, 0.0, None, 100, None),
        (2, 0.01, None, 1, 1),
        (2, 0.99, None, 1, 1),
        (1, 0.5, None, 1, None),
    ],
)
def test_split(tmp_path, n, share, max_eval, train, held):
    source = EncodedSource("one", documents([4 * n], 1, tmp_path))
    first, second = split_held_out(source, SampleShape("wrapped", 4), share, max_eval)
    assert len(first) == train
    assert (None if second is None else len(second)) == held
    assert first[0]["input_ids"][0] == 0
    if second is not None:
        assert second[0]["input_ids"][0] == 4 * train  # no window in both, none between
        assert torch.equal(pickle.loads(pickle.dumps(second))[0]["labels"], second[0]["labels"])
        with pytest.raises(IndexError):
            first[train]


def test_windows_of_a_large_corpus_take_no_memory() -> None:
    rows: Any = types.SimpleNamespace(total=10**13 + 7)
    for chosen, count in ((None, 10**13 // 1024), (range(5, 10**9), 10**9 - 5)):
        pieces = cut_windows(rows, 1024, chosen)
        assert len(pieces) == count
        assert len(pickle.dumps(pieces)) < 1000
    assert pieces.begins[0] == 5 * 1024
    assert pieces.dropped == {"tokens": (10**13 + 7) % 1024}
    few = cut_windows(rows, 1024, np.array([3, 9]))
    assert [int(begin) for begin in few.begins] == [3 * 1024, 9 * 1024]
    assert few.lengths.tolist() == [1024, 1024]
