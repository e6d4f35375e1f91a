"""Connecting is tried at once and within a limit: gloo, NCCL, the shared memory of a host."""

import datetime
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hosts
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from rank_faults import prepare
from test_network import cards

from toolkit import ranks
from toolkit.errors import LaunchError
from toolkit.training import device, launch, network

__all__ = ["cards"]
NONE: Any = None
TIMEOUT = datetime.timedelta(minutes=15)
TWO = network.Location(local_world_size=2)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("mgmt", False),  # begins so
        ("ib0,eth", False),
        ("ib0:1", False),
        ("=mgmt0", False),
        ("^docker,lo", False),
        ("^=lo", False),
        ("", False),
        ("eno", True),
        ("=mgmt", True),
        ("down", True),  # without an address
        ("^lo,mgmt,ib,eth", True),
    ],
)
@pytest.mark.usefixtures("cards")
def test_cards_as_nccl_is_told_of_them(text, wrong) -> None:
    said = network.explain_interface_error({"NCCL_SOCKET_IFNAME": text}, nccl=True)
    assert bool(said) is wrong
    if wrong:
        assert said == (
            f"NCCL_SOCKET_IFNAME is {text}, which names no interface with an address on this host: "
            "lo 127.0.0.1, mgmt0 10.0.0.7, ib0 10.1.0.7, eth6 fd00::7"
        )
    assert not network.explain_interface_error({"NCCL_SOCKET_IFNAME": text}, nccl=False)  # on CPUs


@pytest.mark.usefixtures("cards")
def test_cards_as_gloo_is_told_of_them() -> None:
    for text, wrong in (("mgmt0", False), ("mgmt0,ib0", False), ("mgmt", True), ("ib0,x", True)):
        said = network.explain_interface_error({"GLOO_SOCKET_IFNAME": text}, nccl=False)
        assert said.startswith(f"GLOO_SOCKET_IFNAME is {text}, ") is wrong


# ---- A limit -------------------------------------------------------------------------------------


def test_what_does_not_connect_in_time_ends(monkeypatch) -> None:
    stuck = threading.Event()
    monkeypatch.setattr(network, "_CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: stuck.wait())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    begun = time.monotonic()
    with pytest.raises(LaunchError) as ended:
        network.create_process_group(NONE, 1, 2, network.Location(hosts=2), None, TIMEOUT)
    assert time.monotonic() - begun < 5
    stuck.set()
    said = str(ended.value)
    assert "process 1 of 2 found the others, but did not connect to them over gloo: not c" in said
    assert "after 1 s, at " in said
    assert "gloo uses the interface GLOO_SOCKET_IFNAME (ib7); this host has " in said


def test_the_time_to_connect_can_be_set(monkeypatch) -> None:
    stuck = threading.Event()
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: stuck.wait())
    with pytest.raises(LaunchError, match=r"after 1 s, at .* \(train\.connect_seconds sets the"):
        network.create_process_group(NONE, 1, 2, TWO, None, TIMEOUT, 0.6)
    stuck.set()
    connect = mock.Mock()
    monkeypatch.setattr(network, "create_process_group", connect)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    launch._connect_processes(0, 1, True, 90.0)
    assert connect.call_args.args[-1] == 90.0


def missing(rank: int, world: int, path: str) -> str:
    network._EXCHANGE_TIMEOUT = datetime.timedelta(seconds=1)
    store = dist.FileStore(path, world)
    if rank == 1:
        return ""
    try:
        network.exchange_locations(store, rank, world, nccl=False)
    except LaunchError as error:
        return str(error)
    return "met"


@pytest.mark.slow
def test_one_that_ends_before_it_told_its_place_is_not_waited_for(tmp_path) -> None:
    said = run_ranks(missing, 2, str(tmp_path / "store"), group=False)[0]
    assert said.startswith(
        "one of 2 processes ended or stopped before it sent its location to the others"
    )


# ---- Accelerators --------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch) -> Any:
    """Let there seem to be GPUs; record what the process group is asked for."""
    made = mock.Mock()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", made.set_device)
    monkeypatch.setattr(dist, "init_process_group", made.group)
    monkeypatch.setattr(ranks, "node_indices", lambda: [0, 0])
    monkeypatch.setattr(torch, "ones", lambda *_, device: made.ones(device) and torch.tensor([1.0]))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(2))
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)
    return made


GPU = torch.device("cuda", 1)


def test_a_number_is_summed_over_the_devices_before_anything_else(two_gpus) -> None:
    network.create_process_group(NONE, 1, 2, TWO, GPU, TIMEOUT)
    assert two_gpus.set_device.call_args_list == [mock.call(1)]  # a new thread's is 0
    ((backend,), asked) = two_gpus.group.call_args
    assert backend == "cpu:gloo,cuda:nccl"
    assert asked["device_id"] == GPU
    assert asked["timeout"] == TIMEOUT
    two_gpus.ones.assert_called_once_with(GPU)
    network.create_process_group(NONE, 0, 1, network.SINGLE, GPU, TIMEOUT)
    assert two_gpus.ones.call_count == 1  # one process has nobody to reach
    network.create_process_group(NONE, 0, 2, TWO, None, TIMEOUT)
    ((backend,), asked) = two_gpus.group.call_args
    assert (backend, asked["device_id"], two_gpus.ones.call_count) == ("gloo", None, 1)


def nccl_error(tensor: torch.Tensor, group: object) -> None:
    raise dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error\nLast error:\nError "
        "while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888)"
    )


def test_what_nccl_cannot_connect_names_what_to_set(two_gpus, monkeypatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", nccl_error)
    usage = SimpleNamespace(free=67_108_864)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_9")
    with pytest.raises(LaunchError) as ended:
        network.create_process_group(NONE, 1, 2, TWO, GPU, TIMEOUT)
    said = str(ended.value)
    assert "\n" not in said
    for part in (
        "process 1 of 2 found the others, but did not connect to them over nccl: DistBackendError",
        "Error while creating shared memory segment",
        "NCCL_SOCKET_IFNAME (not set), NCCL_IB_HCA (mlx5_9)",
        "67 MB of /dev/shm (--shm-size)",
        "NCCL_DEBUG=INFO",
        "this host has ",
    ):
        assert part in said
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor)
    with pytest.raises(LaunchError, match="the sum of ones over 2 processes is 1"):
        network.create_process_group(NONE, 1, 2, TWO, GPU, TIMEOUT)


# ---- Shared memory -------------------------------------------------------------------------------


def test_a_container_with_little_shared_memory_is_told(monkeypatch) -> None:
    monkeypatch.delenv("NCCL_SHM_DISABLE", raising=False)
    usage = SimpleNamespace(free=64 << 20)  # what docker gives
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert device.check_nccl_shared_memory(1) == device.check_nccl_shared_memory(2) == ""
    said = device.check_nccl_shared_memory(8)
    assert said.startswith(f"WARNING: /dev/shm of {socket.gethostname()} has 67.1 MB free, NCCL ")
    assert "between 8 devices may use 154 MB; start the container with a larger --shm-size" in said
    assert device.check_loader_shared_memory(8, 0) == ""
    assert "1 data.num_workers of each of 8 processes" in device.check_loader_shared_memory(8, 1)
    usage.free = 1 << 16
    with pytest.raises(LaunchError, match=r"^/dev/shm of .* --shm-size .*data.num_workers: 0$"):
        device.check_loader_shared_memory(8, 1)
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    assert device.check_nccl_shared_memory(8) == ""
    monkeypatch.setattr(shutil, "disk_usage", mock.Mock(side_effect=FileNotFoundError))
    assert device.check_loader_shared_memory(8, 1) == ""


@pytest.mark.faults
@pytest.mark.parametrize(
    ("size", "code", "words"),
    [
        ("64k", 1, "error: /dev/shm of {} has 0.1 MB free, 1 data.num_workers of each of 1"),
        ("8m", 0, "WARNING: /dev/shm of {} has 8.4 MB free, 1 data.num_workers of each of 1"),
        ("64m", 0, ""),
    ],
)
def test_a_start_with_little_shared_memory(tmp_path, size, code, words) -> None:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("mounts need root")
    prepare(tmp_path)
    script = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'
    command = [sys.executable, *hosts.settings(tmp_path, tmp_path / "run", 6)]
    command += ["--data.num_workers", "1", "--train.max_steps", "2"]
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script, "sh", *command],
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    if "mount: " in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == code, done.stderr
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "/dev/shm" in line]
    assert [line.startswith(words.format(socket.gethostname())) for line in lines] == [True] * bool(
        words
    )
    assert (tmp_path / "run").exists() is not code


# ---- Several hosts in namespaces -----------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("card", ["", "dead0"])
def test_hosts_whose_card_leads_nowhere_end_within_a_minute(tmp_path, card) -> None:
    """And the control: started by hand on two hosts, each of which knows itself as 127.0.1.1."""
    if why := hosts.available():
        pytest.skip(f"no hosts here: {why}")
    prepare(tmp_path)
    with hosts.hosts(2, tmp_path) as (_, made):
        begun, started = time.monotonic(), []
        for rank, host in enumerate(made):
            host._do("ip", "tuntap", "add", "dead0", "mode", "tap")
            host._do("ip", "addr", "add", f"10.77.{rank}.1/24", "dev", "dead0")
            host._do("ip", "link", "set", "dead0", "up")
            variables = [f"RANK={rank}", "WORLD_SIZE=2", "MASTER_ADDR=host0", "MASTER_PORT=29500"]
            variables += [f"GLOO_SOCKET_IFNAME={card}"] * bool(card)
            command = ["env", *variables, sys.executable]
            command += [*hosts.settings(tmp_path, tmp_path / "run", 2), "--train.max_steps", "2"]
            started.append(host.start(command, tmp_path / f"{host.name}.log"))
        codes = [process.wait(300) for process in started]
        seconds = time.monotonic() - begun
    said = hosts.said_by(tmp_path)
    if not card:
        assert codes == [0, 0], said
        assert "hosts      2, 1 of 2 ranks on this one; gloo over eth0" in said
        return
    assert codes == [1, 1], said
    assert seconds < 120  # two imports on one machine, and 45 s
    for rank in (0, 1):
        assert (
            f"process {rank} of 2 found the others, but did not connect to them over gloo" in said
        )
        assert f"dead0 10.77.{rank}.1" in said
    assert said.count("GLOO_SOCKET_IFNAME (dead0)") == 2
    assert not (tmp_path / "run").exists()
