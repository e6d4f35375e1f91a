"""Between machines: gloo's interface, limits of open files, connections made late, timeouts."""

import datetime
import os
import resource
import socket
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from toolkit import ranks
from toolkit.errors import LaunchError
from toolkit.training import launch, network
from toolkit.training.guards import watchdog, watcher

CARDS = {"lo": "127.0.0.1", "mgmt0": "10.0.0.7", "ib0": "10.1.0.7", "eth6": "fd00::7"}


@pytest.fixture
def cards(monkeypatch) -> None:
    """Give this host the interfaces of CARDS."""
    made = {
        name: [
            SimpleNamespace(family=psutil.AF_LINK, address="aa:bb:cc:dd:ee:ff"),
            SimpleNamespace(
                family=socket.AF_INET6 if ":" in at else socket.AF_INET, address=at + "%1"
            ),
        ]
        for name, at in CARDS.items()
    }
    made["down0"] = [SimpleNamespace(family=psutil.AF_LINK, address="aa:bb:cc:dd:ee:00")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: made)


@pytest.mark.parametrize(
    ("routes", "known_as", "expected"),
    [
        ({"node0": "10.1.0.7"}, "10.0.0.7", "ib0"),  # not on the master's host
        ({"node0": "fd00::7"}, None, "eth6"),
        ({"node0": "127.0.1.1", "192.0.2.1": "10.0.0.7"}, None, "mgmt0"),  # Debian's own name
        ({"node0": "127.0.1.1", "192.0.2.1": "10.0.0.7"}, "10.1.0.7", "ib0"),  # others know better
        ({"node0": "127.0.1.1", "192.0.2.1": "10.0.0.7"}, "10.9.9.9", "mgmt0"),  # of a gateway
        ({"node0": "127.0.1.1"}, None, None),  # and nothing leads outside
        ({"node0": "10.9.9.9"}, None, None),
        ({}, None, None),
    ],
)
@pytest.mark.usefixtures("cards")
def test_gloo_takes_the_interface_that_leads_to_the_master(
    monkeypatch, routes, known_as, expected
) -> None:
    monkeypatch.setattr(network, "_find_source_address", routes.get)
    monkeypatch.setattr(os, "environ", {})
    assert network.find_interface_towards("node0", known_as) == expected
    network.prepare_sockets(16, 8, "node0", known_as)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    asked = {"GLOO_SOCKET_IFNAME": "bond0", "TORCH_GLOO_LAZY_INIT": "0"}
    monkeypatch.setattr(os, "environ", asked)
    network.prepare_sockets(16, 8, "node0")
    assert asked == {"GLOO_SOCKET_IFNAME": "bond0", "TORCH_GLOO_LAZY_INIT": "0"}
    monkeypatch.setattr(os, "environ", {})
    network.prepare_sockets(8, 8, "node0")  # one machine
    assert not os.environ


def test_this_machines_own_addresses() -> None:
    assert network._find_source_address("127.0.0.1") == "127.0.0.1"
    assert network._find_source_address("no-such-host.invalid") is None


def test_as_many_files_may_be_open_as_the_system_lets() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
        network.prepare_sockets(1, 1, None)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def on_two_machines(rank: int, world: int, port: int) -> list[Any]:
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE="2")
    socket.gethostname = lambda: f"node{rank // 2}"
    launch._connect_processes(rank, world, True, None)
    store = dist.distributed_c10d._get_default_store()
    ranks.object_group("checkpoint")
    ranks.gather(0)
    before = store.num_keys()
    ranks.gather(0)

    def exchange() -> list[Any]:
        try:
            ranks.on_all(lambda: 1 // (rank != 2))
        except Exception as error:
            said = type(error).__name__
        return [ranks.min_over_ranks(rank), ranks.gather(rank), ranks.on_main(lambda: rank), said]

    found = exchange()
    with ranks.use_channel("checkpoint"):
        found += exchange()
    ranks.gather(0)
    met_again = store.num_keys() - before
    ranks.gather(0)
    dist.barrier(dist.new_group(backend="gloo"))  # the control: one that is new
    ranks.gather(0)
    lazy, new = os.environ["TORCH_GLOO_LAZY_INIT"], store.num_keys() > before
    ranks.gather(0)  # rank 0 has the store
    return [ranks.node_indices(), lazy, found, met_again == 0, new]


def test_ranks_of_two_machines_connect_to_those_they_speak_to_and_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    for rank, found in enumerate(run_ranks(on_two_machines, 4, port, group=False)):
        error = "ZeroDivisionError" if rank == 2 else "ToolkitError"
        exchanged = [0, [0, 1, 2, 3], 0, error]
        assert found == [[0, 0, 1, 1], "1", exchanged * 2, True, True]


def test_the_error_names_gloos_interface(monkeypatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed")

    monkeypatch.setattr(dist, "rendezvous", lambda *a, **k: iter([(dist.HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setattr(network, "scope_store_to_start", lambda store, *_: store)
    two_hosts = network.Location(hosts=2)
    monkeypatch.setattr(network, "exchange_and_decide", lambda *_: vars(two_hosts))
    environment = {"MASTER_ADDR": "node0", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "mgmt0"}
    monkeypatch.setattr(os, "environ", environment)
    with pytest.raises(LaunchError, match=r"uses the interface GLOO_SOCKET_IFNAME \(mgmt0\)"):
        launch._connect_processes(0, 2, True, None)
    two_hosts = network.Location(local_world_size=2)
    with pytest.raises(LaunchError) as one_machine:
        launch._connect_processes(0, 2, True, None)
    assert "GLOO" not in str(one_machine.value)
    assert "this host has lo 127.0.0.1" in str(one_machine.value)


def waits(rank: int, world: int) -> tuple[bool, float]:
    group = dist.new_group(backend="gloo")  # as one of a mesh
    ranks.gather(0)
    ranks.set_timeouts(datetime.timedelta(seconds=0.5))
    if rank == 1:
        time.sleep(2)  # longer than that
    ranks.on_all(lambda: None)  # those that wait for one rank's work still do
    if rank == 1:
        time.sleep(2)
        dist.barrier = dist.destroy_process_group = lambda: None
        return True, 0.0
    dist.barrier = dist.destroy_process_group = lambda: None  # the group is broken now
    begun = time.perf_counter()
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError as error:
        return "imed out" in str(error), time.perf_counter() - begun
    return False, time.perf_counter() - begun


@pytest.mark.faults
def test_after_the_first_step_a_stuck_rank_holds_up_the_others_for_less() -> None:
    (timed_out, seconds), _ = run_ranks(waits, 2)
    assert timed_out
    assert seconds < 1.5


@pytest.mark.parametrize(
    ("accelerated", "patience", "expected"),
    [(False, 300.0, []), (True, 10.0, [600.0]), (True, 1000.0, [2000.0])],
)
def test_the_timeout_of_steps_is_beyond_the_watchdogs_and_set_on_accelerators_only(
    monkeypatch, accelerated, patience, expected
) -> None:
    asked = list[float]()
    monkeypatch.setattr(ranks, "set_timeouts", lambda to: asked.append(to.total_seconds()))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerated)
    watch = object.__new__(watchdog._Watch)
    watch.timeout, watch.progress_count, watch.activity = patience, 0, "start"
    watch.exit_code, watch.exit_reason, watch.shared = (
        watcher.RUNNING,
        "",
        bytearray(watcher.BEAT.size),
    )
    monkeypatch.setattr(watchdog, "_watch", watch)
    for step in range(2, 6):
        watchdog.set_activity(f"step {step}")
    assert asked == expected
    assert launch._COLLECTIVE_TIMEOUT.total_seconds() > 600  # shorter, by default


def test_for_a_debugger_collectives_wait_a_day(monkeypatch, tmp_path) -> None:
    asked = list[datetime.timedelta]()
    monkeypatch.setattr(ranks, "set_timeouts", asked.append)
    watchdog.start(0, tmp_path, lambda: False)
    assert asked == [datetime.timedelta(days=1)]
    watchdog.set_activity("step 2")
    assert len(asked) == 1


def test_where_torch_lets_no_timeout_be_set_it_is_said(monkeypatch, capsys) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_set_pg_timeout")
    ranks.set_timeouts(datetime.timedelta(seconds=1))
    assert "NOTE: the timeout of collectives stays as it is: torch" in capsys.readouterr().out
