"""The order of samples: a permutation, the same for every number of ranks, resumable anywhere."""

import json

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Dataset

from toolkit.data.order.mixture import SampleOrder
from toolkit.data.order.permutation import permute
from toolkit.data.order.position import Position, accumulation_for, eval_batches, train_batches
from toolkit.errors import DataError


class Numbers(Dataset):
    """Sample i is the number i."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


# The permutation


def test_every_small_n_is_permuted():
    for n in range(1, 201):
        assert sorted(permute(np.arange(n), n, seed=n, epoch=1)) == list(range(n)), n


@pytest.mark.parametrize("n", [255, 256, 257, 4096, 65_537, 100_003, 1 << 18])
def test_larger_n_are_permuted(n):
    assert np.array_equal(np.sort(permute(np.arange(n), n, 7, 3)), np.arange(n))


def test_shapes_scalars_and_huge_n():
    n = 10**15
    index = np.array([[0, 1], [n - 1, n // 2]])
    out = permute(index, n, 0, 0)
    assert out.shape == (2, 2)
    assert out.min() >= 0
    assert out.max() < n
    assert len(set(out.ravel().tolist())) == 4
    assert int(permute(n - 1, n, 0, 0)) == out[1, 0]
    for bad in (-1, 5):
        with pytest.raises(IndexError, match="expected 0 <= index < n"):
            permute(bad, 5, 0, 0)


def test_the_order_is_fixed_and_depends_on_seed_and_epoch():
    base = permute(np.arange(1000), 1000, 0, 0)
    # Written down: a change of the permutation would silently reorder every resumed run.
    assert base[:8].tolist() == [6, 991, 634, 303, 556, 774, 888, 501]
    for seed, epoch in ((0, 1), (1, 0), (1, 1), (-1, 0), (2**40, 0)):
        other = permute(np.arange(1000), 1000, seed, epoch)
        assert (other == base).mean() < 0.01


def test_it_looks_random():
    n = 20_000
    out = permute(np.arange(n), n, 3, 0).astype(float)
    assert abs(np.corrcoef(np.arange(n), out)[0, 1]) < 0.03
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.03
    # Every place of a small n gets every value equally often, over epochs (chi square, 99.99 %).
    counts = np.zeros((6, 6))
    for epoch in range(300):
        counts[np.arange(6), permute(np.arange(6), 6, 0, epoch)] += 1
    assert ((counts - 50) ** 2 / 50).sum() < 60


def test_positions_run_across_epochs():
    order = SampleOrder(7, seed=5)
    straight = order.indices(0, 50)
    for epoch in range(7):
        assert sorted(straight[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert straight[:7].tolist() != straight[7:14].tolist()
    for start in range(0, 40, 3):
        assert order.indices(start, 10).tolist() == straight[start : start + 10].tolist()
    assert order.indices(3, 0).tolist() == []
    assert SampleOrder(1, 0).indices(0, 3).tolist() == [0, 0, 0]


# Batches


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_global_batch_is_the_same_for_every_layout(world, accumulation):
    order, start, steps, size = SampleOrder(100, 1), 13, 9, 16
    each = size // world // accumulation
    ranks = [
        list(train_batches(order, start, steps, each, accumulation, rank, world))
        for rank in range(world)
    ]
    assert {len(r) for r in ranks} == {steps * accumulation}
    for step in range(steps):
        expected = order.indices(start + step * size, size)
        for rank in range(world):
            micro = ranks[rank][step * accumulation : (step + 1) * accumulation]
            assert [len(m) for m in micro] == [each] * accumulation
            assert [i for m in micro for i in m] == expected[rank::world].tolist()


def test_resuming_continues_exactly():
    order = SampleOrder(50, 2)
    whole = list(train_batches(order, 0, 10, 2, 2, 1, 2))
    position = Position(50, 2, global_batch=8)
    for _ in range(4):
        position.advance()
    rest = list(train_batches(order, position.samples_seen, 6, 2, 2, 1, 2))
    assert whole[8:] == rest


def test_eval_batches_are_even_and_read_each_sample_once():
    for n in (1, 5, 8, 9, 16, 17):
        for world in (1, 2, 4):
            ranks = [eval_batches(range(n), 2, r, world) for r in range(world)]
            assert len({len(r) for r in ranks}) == 1
            assert all(len(batch) == 2 for rank in ranks for batch in rank)
            seen = [i for rank in ranks for batch in rank for i in batch if i != -1]
            assert sorted(seen) == list(range(n))


def test_through_accelerate():
    for rank in range(2):
        loaders = [
            train_batches(SampleOrder(100, 0), 0, 3, 2, 2, rank, 2),
            DataLoader(
                Numbers(), batch_sampler=train_batches(SampleOrder(100, 0), 0, 3, 2, 2, rank, 2)
            ),
        ]
        loaders[1] = prepare_data_loader(loaders[1], num_processes=1, process_index=0)
        plain, through = ([list(map(int, batch)) for batch in loader] for loader in loaders)
        assert plain == through
        assert len(plain) == 6


# The position


def test_position_goes_through_json():
    position = Position(100, 3, global_batch=8)
    position.advance()
    position.advance()
    other = Position(100, 3, global_batch=16)
    other.load_state_dict(json.loads(json.dumps(position.state_dict())))
    assert (other.samples_seen, other.global_batch) == (16, 8)


def test_position_refuses_other_data():
    state = Position(100, 3, 8).state_dict() | {"samples_seen": 24}
    for n, seed, expected in (
        (99, 3, "counts on the number of training samples 100, this run has 99"),
        (100, 4, "counts on the seed 3, this run has 4"),
    ):
        position = Position(n, seed, 8)
        with pytest.raises(DataError) as caught:
            position.load_state_dict(state)
        assert expected in str(caught.value)
        assert position.samples_seen == 0


@pytest.mark.parametrize(
    ("total", "each", "world", "accumulation"), [(16, 2, 4, 2), (16, 16, 1, 1), (24, 1, 8, 3)]
)
def test_accumulation(total, each, world, accumulation):
    assert accumulation_for(total, each, world) == accumulation


def test_accumulation_that_does_not_divide():
    with pytest.raises(DataError) as caught:
        accumulation_for(16, 3, 4)
    said = str(caught.value)
    assert "global batch of 16 samples" in said
    assert "micro-batches of 3 (train.per_device_train_batch_size) on 4 processes" in said
    assert "use 4 process(es) with train.per_device_train_batch_size 2" in said
    for given, fitting in (((16, 2, 3), (2, 2)), ((4, 1, 8), (4, 1)), ((4, 8, 1), (1, 4))):
        cure = r"use {} process\(es\) with train.per_device_train_batch_size {}$".format(*fitting)
        with pytest.raises(DataError, match=cure):
            accumulation_for(*given)
    with pytest.raises(IndexError):
        permute(0, 0, 0, 0)
