"""Packed, padded and joined samples: nothing split, nothing lost, labels where they belong."""

import pickle

import datasets
import numpy as np
import pytest
import torch
from feeds import APART, FEATURES, rows, samples, source
from sharded import COUNT, columns
from torch.utils.data import DataLoader

from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.order import mixture
from toolkit.data.order.mixture import ByLength, SampleOrder
from toolkit.data.samples.batch import IGNORED
from toolkit.data.samples.packing import pack_best_fit
from toolkit.data.samples.pieces import EncodedRows
from toolkit.data.samples.sample_shape import FILLER, SampleShape
from toolkit.errors import DataError


def realistic(n: int, seed: int = 0, longest: int = 2048) -> np.ndarray:
    """Lengths like those of instruction data: log-normal, 245 tokens in the middle."""
    drawn = np.random.default_rng(seed).lognormal(5.5, 1.0, n)
    return np.clip(drawn.astype(np.int64), 1, longest)


def one_by_one(lengths: list[int], capacity: int) -> int:
    """Return the bins of best-fit decreasing, as the books have it."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [f for f in free if f >= length]
        if fitting:
            free[free.index(min(fitting))] -= length
        else:
            free.append(capacity - length)
    return len(free)


# The plan


def test_every_sample_lies_in_one_bin_and_bins_are_as_few_as_by_the_plain_rule():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        capacity = int(rng.integers(1, 60))
        lengths = rng.integers(1, capacity + 1, int(rng.integers(0, 150)))
        plan = pack_best_fit(lengths, capacity)
        assert sorted(plan.samples.tolist()) == list(range(len(lengths)))
        bins = [plan.bin(i) for i in range(len(plan))]
        assert sum(map(len, bins)) == len(lengths)
        assert all(0 < lengths[b].sum() <= capacity for b in bins)
        assert all((np.diff(b) > 0).all() for b in bins)
        assert len(plan) == one_by_one(lengths.tolist(), capacity), seed


@pytest.mark.parametrize("capacity", [2048, 8192, 65_536])
def test_density_is_within_a_hundredth_of_the_bound(capacity):
    lengths = realistic(50_000)
    plan = pack_best_fit(lengths, capacity)
    bound = -(-lengths.sum() // capacity)  # all tokens, shared out without a gap
    assert bound <= len(plan) <= 1.01 * bound
    # Windows of 1000 samples, as streams have them: still dense.
    windows = sum(len(pack_best_fit(lengths[i : i + 1000], 2048)) for i in range(0, 50_000, 1000))
    bound = -(-lengths.sum() // 2048)
    assert windows <= 1.01 * bound
    # The bound tells: next-fit, which is what a plain loop does, is far from it.
    room, bins = 0, 0
    for length in lengths.tolist():
        if length > room:
            room, bins = 2048, bins + 1
        room -= length
    assert bins > 1.05 * bound


def test_a_plan_is_fixed():
    lengths = np.arange(300) ** 2 * 37 % 2000 + 1
    plan = pack_best_fit(lengths, 2048)
    assert np.array_equal(plan.samples, pack_best_fit(lengths, 2048).samples)
    # Written down: another plan would silently reorder every resumed run.
    assert len(plan) == 155
    assert [plan.bin(i).tolist() for i in (0, 60, 120)] == [[259], [44, 293], [140, 201]]


def test_neighbours_of_one_length_do_not_share_a_bin():
    plan = pack_best_fit(np.full(1000, 5), 20)
    assert len(plan) == 250
    assert min(np.diff(np.sort(plan.bin(i))).min() for i in range(250)) > 10


def test_no_sample_needs_no_bin():
    assert len(pack_best_fit(np.array([], np.int64), 16)) == 0


# Packed samples


def test_a_packed_sample():
    features = FEATURES
    table = {
        "input_ids": [[11, 12, 13], [21, 22, 23, 24], [31]],
        "spans": [[1, 3], [0, 2, 3, 4], []],
    }
    packed = samples(datasets.Dataset.from_dict(table, features=features), "bfd", 10, pad=9)
    assert len(packed) == 1
    sample = packed[0]
    assert set(sample) == {"input_ids", "labels", "position_ids", "used"}
    assert sample["used"] == 8
    assert all(value.dtype == torch.int64 for value in sample.values())
    assert sample["input_ids"].tolist() == [11, 12, 13, 21, 22, 23, 24, 31, 9, 9]
    # 21 is in a span, but it is the first token of its row: nothing predicts it.
    assert sample["labels"].tolist() == [-100, 12, 13, -100, 22, -100, 24, -100, -100, -100]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 0, 1]
    filler = packed[FILLER]
    assert filler["labels"].tolist() == [IGNORED] * 10
    assert filler["position_ids"].tolist() == list(range(10))
    for index in (1, -2):
        with pytest.raises(IndexError, match=f"no sample {index} of 1"):
            packed[index]


def test_rows_stay_whole_and_long_ones_are_cut_without_a_loss():
    rng = np.random.default_rng(0)
    lengths = rng.choice([0, 1, 3, 7, 16, 17, 32, 50], 200).tolist()
    packed = samples(rows(lengths), "bfd", 16)
    pieces = packed.pieces
    tokens, starts = [], 0
    ends = set(np.cumsum(lengths).tolist())
    for i in range(len(packed)):
        sample = packed[i]
        ids, positions = sample["input_ids"], sample["position_ids"]
        real = ids != 0
        tokens += ids[real].tolist()
        inside = real & (positions > 0)
        assert (ids[inside] == ids[torch.nonzero(inside)[:, 0] - 1] + 1).all()
        assert torch.equal(sample["labels"][inside], ids[inside])
        assert (sample["labels"][~inside] == IGNORED).all()
        # Each run of positions is a whole row, or a piece of a long one.
        firsts = torch.nonzero(real & (positions == 0))[:, 0].tolist()
        for first, last in zip(firsts, [*firsts[1:], int(real.sum())], strict=True):
            end = int(ids[last - 1]) - APART + 1
            assert end in ends or last - first == 16
            starts += 1
    assert sorted(tokens) == list(range(APART, APART + sum(lengths)))
    assert starts == len(pieces) == sum(-(-n // 16) for n in lengths)
    assert pieces.dropped == {"empty rows": lengths.count(0)}
    assert pieces.cut == sum(n > 16 for n in lengths)


# Padded samples


def test_a_padded_batch():
    padded = samples(rows([3, 0, 9, 5]), "none", 16, pad=7)
    assert len(padded) == 3
    assert padded.pieces.dropped == {"empty rows": 1}
    assert padded.pieces.lengths.tolist() == [3, 9, 5]
    batch = columns(padded.shape.batch([padded[0], padded[1], padded[FILLER]]))
    assert batch.pop(COUNT) == 10
    assert [tuple(v.shape) for v in batch.values()] == [(3, 16)] * 3
    assert batch["attention_mask"].sum(1).tolist() == [3, 9, 1]
    assert batch["input_ids"][0].tolist() == [APART, APART + 1, APART + 2] + [7] * 13
    assert batch["labels"][0].tolist() == [-100, APART + 1, APART + 2] + [-100] * 13
    assert (batch["labels"][2] == IGNORED).all()
    # A multiple of 8, but not beyond the positions that the model may have.
    assert SampleShape("none", 16).batch([padded[2]]).targets.shape == (1, 8)
    assert SampleShape("none", 10).batch([padded[1]]).targets.shape == (1, 10)
    assert SampleShape("none", 9).batch([padded[1]]).targets.shape == (1, 9)


def padding(batches: np.ndarray, lengths: np.ndarray) -> float:
    """Return the share of a padded run that is padding."""
    longest = lengths[batches].max(1)
    return 1 - lengths[batches].sum() / (longest.sum() * batches.shape[1])


def test_batches_of_like_length_hold_the_same_samples_with_little_padding():
    lengths, order = realistic(4000), SampleOrder(4000, 3)
    grouped = ByLength(order, lengths, 32, seed=3)
    read = grouped.indices(0, 9600).reshape(-1, 32)
    for window in range(3):
        here = slice(window * 1600, (window + 1) * 1600)
        assert sorted(read.reshape(-1)[here]) == sorted(order.indices(window * 1600, 1600))
    assert padding(order.indices(0, 9600).reshape(-1, 32), lengths) > 0.6
    assert padding(read, lengths) < 0.15
    # Long batches are spread over the window, not gathered at its end.
    assert abs(np.corrcoef(np.arange(50), lengths[read[:50]].mean(1))[0, 1]) < 0.5
    for start in (0, 32, 1568, 1600, 3232):
        again = ByLength(order, lengths, 32, seed=3)
        assert np.array_equal(again.indices(start, 64), grouped.indices(start, 64))
    other = ByLength(order, lengths, 32, seed=4)
    assert not np.array_equal(other.indices(0, 320), grouped.indices(0, 320))


def test_a_pass_is_over_before_the_next_begins_however_batches_are_grouped(monkeypatch):
    monkeypatch.setattr(mixture, "GROUPED_BATCHES", 5)
    for n, size in ((7, 4), (50, 4), (101, 8)):
        grouped = ByLength(SampleOrder(n, 0), np.arange(n) * 7 % 13, size, seed=0)
        read = grouped.indices(0, 4 * n // size * size)
        for start in range(0, len(read) - n, n):
            assert sorted(read[start : start + n]) == list(range(n))


# Reading


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16"])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_rows_are_read_from_the_file(tmp_path, dtype, chunk):
    rng = np.random.default_rng(chunk)
    ids = [rng.integers(0, 60_000, n).tolist() for n in rng.choice([0, 1, 5, 30], 90)]
    features = datasets.Features(input_ids=datasets.List(datasets.Value(dtype)))
    stored = datasets.Dataset.from_dict({"input_ids": ids}, features=features).map(
        lambda row: row,
        features=features,
        cache_file_name=str(tmp_path / "rows.arrow"),
        writer_batch_size=chunk,
    )
    read = EncodedRows(stored)
    assert [read.ids(i).tolist() for i in range(90)] == ids
    assert read.lengths().tolist() == [len(row) for row in ids]
    assert read.labels(80).tolist() == ids[80]
    part = EncodedRows(stored.select(range(30, 50)))  # a slice of the file, no index
    assert [part.ids(i).tolist() for i in range(20)] == ids[30:50]
    chosen = EncodedRows(stored.select([80, 3, 41]))
    assert [chosen.ids(i).tolist() for i in range(3)] == [ids[80], ids[3], ids[41]]
    again = pickle.loads(pickle.dumps(read))
    assert [again.ids(i).tolist() for i in range(90)] == ids
    assert len(pickle.dumps(read)) < 8000


def test_workers_read_packed_and_padded_samples(tmp_path):
    packed = samples(rows([5, 9, 3, 12, 7]), "bfd", 16)
    padded = samples(rows([5, 9, 3]), "none", 16)
    for data in (packed, padded):
        here, there = (
            list(
                DataLoader(
                    data,
                    batch_sampler=[[1, 0], [2, FILLER]],
                    num_workers=n,
                    collate_fn=data.shape.batch,
                )
            )
            for n in (0, 1)
        )
        for a, b in zip(here, there, strict=True):
            assert a.n_targets == b.n_targets == int(a.count) > 0
            assert torch.equal(a.targets, b.targets)
            assert a.inputs.keys() == b.inputs.keys()
            assert all(torch.equal(a.inputs[k], b.inputs[k]) for k in a.inputs)
    for index in (3, -2):
        with pytest.raises(IndexError, match=f"no sample {index} of 3"):
            padded[index]


def test_joined_rows_keep_the_labels_of_their_spans():
    rng = np.random.default_rng(1)
    table: dict[str, list] = {"input_ids": [], "spans": []}
    ids, labels = [], []
    for _ in range(60):
        row = rng.integers(1, 1000, int(rng.choice([0, 1, 4, 40]))).tolist()
        cut = sorted(rng.choice(len(row) + 1, 2, replace=False).tolist()) if row else []
        table["input_ids"].append(row)
        table["spans"].append(cut)
        ids += row
        labels += [t if cut and cut[0] <= i < cut[1] else IGNORED for i, t in enumerate(row)]
    stored = datasets.Dataset.from_dict(table, features=FEATURES)
    wrapped = samples(stored, "wrapped", 17)
    assert len(wrapped) == len(ids) // 17
    for i in range(len(wrapped)):
        assert wrapped[i]["input_ids"].tolist() == ids[17 * i : 17 * i + 17]
        assert wrapped[i]["labels"].tolist() == [IGNORED, *labels[17 * i + 1 : 17 * i + 17]]
    later = samples(stored, "wrapped", 17, range(3, 5))
    assert torch.equal(later[1]["labels"], wrapped[4]["labels"])
    assert later[FILLER]["labels"].tolist() == [IGNORED] * 17


def test_what_a_source_became_is_counted():
    lengths = [5, 0, 16, 40, 3]
    feed = PreparedFeed([source(lengths)], SampleShape("bfd", 16), seed=0, global_batch=1)
    (part,) = feed.parts
    assert (part.samples, part.tokens, part.cut) == (4, 64, 1)
    assert part.density == 1.0
    assert part.dropped == {"empty rows": 1}
    feed = PreparedFeed([source(lengths)], SampleShape("none", 16), seed=0, global_batch=1)
    assert (feed.parts[0].samples, feed.parts[0].tokens, feed.parts[0].density) == (6, 64, None)
    feed = PreparedFeed([source(lengths)], SampleShape("wrapped", 15), seed=0, global_batch=1)
    assert (feed.parts[0].samples, feed.parts[0].dropped) == (4, {"tokens": 4})
    with pytest.raises(
        DataError, match="at least one row with a token in the source source 0, got none"
    ):
        PreparedFeed([source([0, 0])], SampleShape("bfd", 16), seed=0, global_batch=1)


@pytest.mark.parametrize("packing", ["wrapped", "bfd", "none"])
def test_a_sample_names_the_rows_that_it_holds(packing) -> None:
    lengths = [5, 23, 3, 0, 12, 7, 1, 9]
    table = {"input_ids": [[100 + row] * length for row, length in enumerate(lengths)]}
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    found = samples(datasets.Dataset.from_dict(table, features=features), packing, 10)
    named = set()
    for index in range(len(found)):
        held = sorted({token - 100 for token in found[index]["input_ids"].tolist() if token})
        numbers = [
            int(n) for n in found.describe_rows(index).replace(",", "").split() if n.isdigit()
        ]
        if " to " in found.describe_rows(index):
            numbers = [n for n in range(numbers[0], numbers[1] + 1) if lengths[n]]
        assert numbers == held, found.describe_rows(index)
        named |= {*numbers}
    assert len(named) >= 6
