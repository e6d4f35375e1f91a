"""Exchanges between ranks: what they give back, where they fail, and what they cost rank 0."""

import datetime
import pickle
import socket
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch.multiprocessing.spawn import ProcessRaisedException

from toolkit import ranks
from toolkit.errors import DataError, ToolkitError
from toolkit.planning.fake_ranks import fake_world

WORLD = 4


def fails_on(failing: tuple[int, ...], error: Exception) -> Any:
    def fn() -> str:
        if ranks.rank() in failing:
            raise error
        return f"of {ranks.rank()}"

    return fn


def outcome(call: Any) -> tuple[str, str, bool]:
    try:
        return "", repr(call()), False
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "already_reported", False)


def exchanged(rank: int, world: int) -> dict[str, Any]:
    alone, two = fails_on((2,), DataError("bad row")), fails_on((1, 3), KeyError("k"))
    unfit = (lambda: lambda: 0) if rank == 1 else (lambda: "fits")
    return {
        "least": (ranks.min_over_ranks(7 - rank), ranks.min_over_ranks(2.5 * (rank + 1))),
        "large": ranks.min_over_ranks(2**52 + rank),
        "any_of": ranks.any_over_ranks([False, rank == 2, True]),
        "same": (
            ranks.all_equal({"a": [1, 2]}),
            ranks.all_equal({"a": rank}),
            ranks.all_equal({"a": rank == 3}),
        ),
        "gather": ranks.gather({"rank": rank}),
        "to_main": ranks.gather_to_main("x" * 10**rank),
        "results": ranks.gather_results(lambda: rank**2),
        "results_to_main": ranks.gather_results_to_main(lambda: torch.tensor([rank])),
        "on_main": ranks.on_main(lambda: f"by {rank}"),
        "on_all": ranks.on_all(lambda: rank),
        "one_fails": outcome(lambda: ranks.on_all(alone)),
        "two_fail": outcome(lambda: ranks.gather_results(two)),
        "unfit": outcome(lambda: ranks.gather_results_to_main(unfit)),
        "main_fails": outcome(lambda: ranks.on_main(fails_on((0,), DataError("no file")))),
        "alike": getattr(ranks.mark_collective(DataError("all have it")), "already_reported", None),
        "after": ranks.gather(rank),  # nobody is left in another exchange
    }


def test_what_exchanges_give_and_where_they_fail() -> None:
    found = run_ranks(exchanged, WORLD)
    for rank, of in enumerate(found):
        assert of["least"] == (4, 2.5)
        assert of["large"] == 2**52
        assert of["any_of"] == [False, True, True]
        assert of["same"] == (True, False, False)
        assert of["gather"] == [{"rank": r} for r in range(WORLD)]
        assert of["to_main"] == ["x" * 10**r for r in range(WORLD)] * (rank == 0)
        assert of["results"] == [0, 1, 4, 9]
        assert of["results_to_main"] == [torch.tensor([r]) for r in range(WORLD)] * (rank == 0)
        assert (of["on_main"], of["on_all"], of["after"]) == ("by 0", rank, [0, 1, 2, 3])
        # The first that failed says it; the others have its class, where it is one of ours.
        own = rank == 2
        assert of["one_fails"] == ("DataError", "bad row" + " (on rank 2)" * (not own), not own)
        kind, text, reported = of["two_fail"]
        assert reported is (rank != 1)
        assert (kind, text) == (
            ("KeyError", "'k'") if rank in (1, 3) else ("ToolkitError", "KeyError: 'k' (on rank 1)")
        )
        assert "pickle" in of["unfit"][1]
        assert of["alike"] is (rank > 0)
        assert of["main_fails"] == ("DataError", "no file" + " (on rank 0)" * bool(rank), rank > 0)


class Traffic:
    """Counts what the collectives of this process move."""

    def __init__(self) -> None:
        self.calls, self.received, self.pickles = Counter[str](), 0, 0
        self._gather, self._broadcast, self._dumps = dist.gather, dist.broadcast, pickle.dumps
        dist.gather, dist.broadcast, pickle.dumps = self.gather, self.broadcast, self.dumps

    def gather(self, tensor: torch.Tensor, every: Any = None, **kwargs: Any) -> Any:
        self.calls["gather"] += 1
        self.received += sum(one.nbytes for one in every or ())
        return self._gather(tensor, every, **kwargs)

    def broadcast(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls["broadcast"] += 1
        self.received += tensor.nbytes
        return self._broadcast(tensor, *args, **kwargs)

    def dumps(self, *args: Any, **kwargs: Any) -> bytes:
        self.pickles += 1
        return self._dumps(*args, **kwargs)


def traffic(rank: int, world: int) -> list[Any]:
    ranks.object_group()
    dist.all_gather = dist.all_gather_object = dist.all_to_all = None  # W * W
    counted = Traffic()
    ranks.on_all(lambda: None)
    agreed = (counted.received, counted.pickles, dict(counted.calls))
    before = counted.received
    ranks.gather_to_main(b"x" * 1000)
    return [agreed, counted.received - before]


def test_an_agreement_moves_bytes_and_no_object_and_only_rank_0_gets_what_is_for_it() -> None:
    found = run_ranks(traffic, WORLD)
    once = {"gather": 1, "broadcast": 1}
    assert found[0][0] == (16 * WORLD + 16, 0, once)
    assert [agreed for agreed, _ in found[1:]] == [(16, 0, once)] * (WORLD - 1)
    assert 1000 * WORLD < found[0][1] < 1100 * WORLD
    assert [received for _, received in found[1:]] == [8] * (WORLD - 1)


def by_node(rank: int, world: int) -> tuple[list[int], int, list[int]]:
    socket.gethostname = lambda: "ab"[rank // 2]
    order: list[int] = []
    store = dist.distributed_c10d._get_default_store()
    ranks.main_first(lambda: order.append(store.add("turn", 1)))
    return ranks.node_indices(), ranks.local_world_size(), order


def test_one_rank_of_each_machine_goes_before_the_others_of_it() -> None:
    found = run_ranks(by_node, WORLD)
    assert [nodes for nodes, _, _ in found] == [[0, 0, 1, 1]] * WORLD
    assert [here for _, here, _ in found] == [2] * WORLD
    turns = [turn for _, _, (turn,) in found]  # every rank once
    assert (turns[0], turns[2]) == (1, 2)  # rank 0, then the first of the other machine
    assert sorted((turns[1], turns[3])) == [3, 4]


def second_node_fails(rank: int, world: int) -> tuple[str, str, bool]:
    socket.gethostname = lambda: "ab"[rank // 2]
    return outcome(lambda: ranks.main_first(fails_on((2,), DataError("no room"))))


def test_what_fails_on_one_machine_fails_on_all() -> None:
    texts = [text for _, text, _ in run_ranks(second_node_fails, WORLD)]
    assert texts == ["no room" + " (on rank 2)" * (r != 2) for r in range(WORLD)]


def late(rank: int, world: int, before_the_group: bool) -> int:
    """Exchange with a rank that is late by more than groups may take to connect."""
    ranks._CONNECT_TIMEOUT = datetime.timedelta(seconds=1)
    if not before_the_group:
        ranks.object_group()
    if rank == 1:
        time.sleep(3)
    return ranks.min_over_ranks(rank)


@pytest.mark.slow
def test_a_group_is_made_within_minutes_and_then_waits_for_a_day() -> None:
    assert run_ranks(late, 2, False) == [0, 0]
    with pytest.raises(ProcessRaisedException, match=r"[Tt]ime(d )?out"):
        run_ranks(late, 2, True)


def second_channel(rank: int, world: int) -> list[int]:
    ranks._CONNECT_TIMEOUT = datetime.timedelta(seconds=1)
    ranks.object_group()
    if rank == 1:
        time.sleep(3)  # work of its own before all make the next one
    ranks.object_group("checkpoint")
    with ranks.use_channel("checkpoint"):
        return ranks.gather(rank)


@pytest.mark.slow
def test_further_groups_wait_for_the_last_before_they_are_made() -> None:
    assert run_ranks(second_channel, 2) == [[0, 1]] * 2


def test_hosts_of_one_name_are_told_apart(monkeypatch, tmp_path) -> None:
    found = set()
    for boot in ("1", "2"):
        (tmp_path / boot).write_text(boot)
        monkeypatch.setattr(ranks, "Path", lambda _, boot=boot: tmp_path / boot)
        found.add(ranks.host_id())
    monkeypatch.setattr(ranks, "Path", lambda _: tmp_path / "none")
    found.add(ranks.host_id())  # not Linux
    assert len(found) == 3
    assert all(socket.gethostname() in host for host in found)


def test_a_world_that_does_not_exist_agrees() -> None:
    with fake_world(8, 3):
        assert ranks.gather(5) == ranks.gather_to_main(5) == [5] * 8
        assert (ranks.min_over_ranks(5), ranks.any_over_ranks([False]), ranks.all_equal(5)) == (
            5,
            [False],
            True,
        )
        assert ranks.gather_results_to_main(lambda: 1) == [1] * 8
        assert ranks.main_first(lambda: ranks.rank()) == 3
        assert (ranks.node_indices(), ranks.local_world_size()) == ([0] * 8, 8)
        with pytest.raises(ToolkitError, match="bad"):
            ranks.on_all(fails_on((3,), DataError("bad")))
