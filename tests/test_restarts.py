"""Ranks that a launcher starts again meet apart from those before; who is not started again."""

import datetime
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from toolkit import recipes
from toolkit.errors import EXIT_CODE_PREEMPTED, ConfigError
from toolkit.training import network
from toolkit.training.guards import preemption


def meet(store: dist.Store, rank: int, world: int = 2, seconds: float = 30.0) -> dist.Store:
    return network.scope_store_to_start(store, rank, world, datetime.timedelta(seconds=seconds))


def meet_all(store: dist.Store, world: int) -> list[dist.Store]:
    with ThreadPoolExecutor(world) as pool:
        return [*pool.map(lambda rank: meet(store, rank, world), range(world))]


def test_a_start_does_not_see_the_keys_of_the_last() -> None:
    store = dist.HashStore()
    meet_all(store, 2)[0].set("address", "gone")
    first, second = meet_all(store, 2)
    assert not first.check(["address"])
    first.set("address", "here")
    assert second.get("address") == b"here"
    assert len(meet_all(store, 3)) == 3  # another number of ranks


def test_a_rank_leaves_a_start_whose_rank_0_is_gone() -> None:
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="not all ranks arrived"):
        meet(store, 0, seconds=0.1)  # rank 1 was killed before it came
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, store, 1)  # has the free place there
        while not store.check(["start-1/rank-1"]):
            time.sleep(0.001)
        meet(store, 0).set("address", "here")
        assert waiting.result().get("address") == b"here"


def test_a_place_is_taken_once() -> None:
    """The last start is complete; a later process must not join it."""
    store = dist.HashStore()
    meet_all(store, 2)
    with pytest.raises(RuntimeError, match="not all ranks arrived"):
        meet(store, 1, seconds=0.1)


def test_one_process_meets_itself() -> None:
    meet(dist.HashStore(), 0, world=1, seconds=0.0)


@pytest.fixture
def killed(monkeypatch, tmp_path) -> list[tuple[int, int]]:
    """The signals that are sent, as a rank of the first of two starts under torch's agent."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    for rank in range(2):
        (tmp_path / "attempt_0" / str(rank)).mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "1" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    return sent


def test_the_launcher_is_told_once(killed) -> None:
    preemption.stop_launcher()
    preemption.stop_launcher()
    assert killed == [(os.getppid(), signal.SIGTERM)]


@pytest.mark.parametrize(
    ("name", "value"), [("TORCHELASTIC_RESTART_COUNT", "1"), ("TORCHELASTIC_MAX_RESTARTS", "0")]
)
def test_a_launcher_that_starts_nothing_more_is_not_told(killed, monkeypatch, name, value) -> None:
    monkeypatch.setenv(name, value)
    preemption.stop_launcher()
    assert not killed


def test_only_the_launcher_is_told(killed, monkeypatch) -> None:
    """Not whoever took its place."""
    monkeypatch.setattr(os, "getppid", lambda: 1)
    preemption.stop_launcher()
    assert not killed


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([1, EXIT_CODE_PREEMPTED], EXIT_CODE_PREEMPTED),  # one lost the other, which was stopped
        ([0, 2, 1], 2),
        ([-signal.SIGKILL, 1], 128 + signal.SIGKILL),
        ([143, 143], 143),
    ],
)
def test_the_exit_code_of_the_ranks(codes, code) -> None:
    assert recipes._choose_exit_code(dict(enumerate(codes))) == code


def test_restarts_are_counted_from_0() -> None:
    config = Path(__file__).parent.parent / "recipes/configs/pretrain_tiny.yaml"
    with pytest.raises(ConfigError, match="expected 0 or more"):
        recipes.start_recipe("pretrain", [str(config), "--max_restarts", "-1"])
