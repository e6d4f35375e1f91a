"""A rank that holds up the others is named, with what it is slow in; where all are alike, none."""

import time
from typing import Any

import pytest
import torch
from conftest import save_tiny_model
from distributed import run_ranks

from toolkit import ranks
from toolkit.config.settings import ModelConfig, OptimConfig, ShardingConfig
from toolkit.loading.pretrained import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.sharding.collective_times import CollectiveTimes, times_of
from toolkit.sharding.fsdp import apply_fsdp, init_mesh
from toolkit.training.faults.stragglers import Stragglers, _slow
from toolkit.training.loss import loss_sum
from toolkit.training.optim import build_optimizer
from toolkit.training.step import evaluate, train_step

STEPS, LINES = 4, 5


def times(
    rank: int, world: int, folder: str, kind: str, slow: int, sharding: dict[str, Any]
) -> tuple[list[str], dict[str, float]]:
    """Train, with rank `slow` held up by 60 ms a step; return what is said, and the last times."""
    cfg = ShardingConfig(param_dtype="float32", **sharding)
    model = build_on_meta(ModelConfig(folder))
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    load_pretrained(model, folder, "cpu")
    optimizer = build_optimizer(model.train(), OptimConfig(learning_rate=1e-4))
    said: list[str] = []
    ranks.say = lambda *lines: said.extend(lines)  # type: ignore[assignment]
    waited = [0.0]
    found: dict[str, float] = {}
    ids = torch.randint(0, 300, (2, 17), generator=torch.manual_seed(rank))
    batch = {"input_ids": ids, "labels": ids}

    def hold_up(when: str) -> None:
        if when == kind and rank == slow:
            time.sleep(0.06)

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hold_up("compute")
        return loss_sum(model, batch)

    train_step(model, optimizer, [batch])
    stragglers = Stragglers(times_of(model), lambda: waited[0])
    stragglers.numbers(None)
    step = 0
    for _ in range(LINES):
        begun, paused = time.perf_counter(), 0.0
        for _ in range(STEPS):
            step += 1
            read = time.perf_counter()
            hold_up("data")
            waited[0] += time.perf_counter() - read
            train_step(model, optimizer, [batch], loss=loss)
            stragglers.take(step)
        pause = time.perf_counter()
        with stragglers.pause():
            hold_up("pause")
            evaluate(model, {"": [batch]})
        paused += time.perf_counter() - pause
        step_time = (time.perf_counter() - begun - paused) / STEPS
        found = stragglers.judge(ranks.gather_integers(stragglers.numbers(step_time)))
    return said, found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "slow", "world", "sharding"),
    [
        ("compute", 1, 3, {}),
        ("data", 2, 3, {}),
        ("compute", 0, 2, {}),
        ("compute", 3, 4, {"dp_replicate": 2}),
        ("data", 3, 4, {"dp_replicate": 2}),
    ],
)
def test_the_slow_rank_is_named(folder, kind, slow, world, sharding) -> None:
    every = run_ranks(times, world, folder, kind, slow, sharding)
    said, found = every[0]
    assert len(said) == 1, said  # after three lines in a row, and not again in the next two
    verb = {"compute": "computes", "data": "waits"}[kind]
    assert f"WARNING: rank {slow} (" in said[0]
    assert f") {verb} " in said[0]
    assert all(one[1] == found for one in every)
    assert found[f"{kind}_time_max"] > 0.06
    assert found["wait_time_max"] - found["wait_time_min"] > 0.03


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nothing", "pause"])
def test_the_control_where_all_are_alike_none_is_named(folder, kind) -> None:
    said, found = run_ranks(times, 2, folder, kind, 1, {})[0]
    assert said == []
    assert found["compute_time"] > 0


def test_who_costs_the_others_time() -> None:
    assert _slow(1.0, [0.0, 0.0, 0.0], [0.5, 0.1, 0.5]) == (1, "compute")
    assert _slow(1.0, [0.0, 0.4, 0.0], [0.5, 0.1, 0.5]) == (1, "data")
    assert _slow(1.0, [0.0, 0.0, 0.0], [0.5, 0.4, 0.5]) is None  # too little to be told from noise
    # Slow data that nobody waits for, since the device had work to do.
    assert _slow(1.0, [0.0, 0.4, 0.0], [0.1, 0.1, 0.1]) is None
    assert _slow(1.0, [0.4], [0.0]) is None


def test_where_computing_hides_collectives_no_time_of_computing_is_told(monkeypatch) -> None:
    said = list[str]()
    monkeypatch.setattr(ranks, "say", lambda *lines: said.extend(lines))
    monkeypatch.setattr(ranks, "gather", lambda name: ["one", "two"])
    rows = [[10**9, 0, 9 * 10**8], [10**9, 0, 10**8]]
    for hidden in (False, True):
        times = CollectiveTimes()
        times.hidden = hidden
        stragglers = Stragglers(times, lambda: 0.0)
        for _ in range(3):
            found = stragglers.judge(rows)
        assert ("compute_time" in found) is not hidden
        assert found["wait_time_max"] == 0.9
    assert said == [
        "WARNING: rank 1 (two) computes 9.0 x as long as the others, which costs them 0.8 s a step "
        "(80%)",
        "WARNING: rank 1 (two) comes late to collectives, which costs them, less what their "
        "computing hides, 0.8 s a step (80%)",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_events_are_read_when_they_are_asked_for() -> None:
    times, device = CollectiveTimes(), torch.device("cuda")
    large = torch.ones(4096, 4096, device=device)
    for on in (False, True):
        times.on = on
        with times.measure(device):
            for _ in range(20):
                large @ large
        assert (times.take() > 1e-4) is on
    assert times.take() == 0.0


def test_nothing_is_counted_while_it_is_off() -> None:
    times, device = CollectiveTimes(), torch.device("cpu")
    for on in (False, True):
        times.on = on
        with times.measure(device):
            time.sleep(0.01)
        assert (times.take() >= 0.01) is on
    # An all-reduce counts from the end of the reduce-scatter before it, where there was one.
    times.after_all_reduce(torch.ones(1))
    assert times.take() == 0.0
    with times.measure_reduction(device):
        pass
    time.sleep(0.01)
    times.after_all_reduce(torch.ones(1))
    times.after_all_reduce(torch.ones(1))
    assert times.take() >= 0.01
