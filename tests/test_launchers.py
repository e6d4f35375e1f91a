"""Which process this is: torchrun's variables, those of srun and mpirun, and what hosts tell."""

import contextlib
import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from conftest import ROOT, free_port
from distributed import _write_to, run_ranks

from toolkit import ranks
from toolkit.errors import LaunchError
from toolkit.training import device, launch, launchers, network

ALL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login1",
    "SLURMD_NODENAME": "gpu03",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
}


@pytest.fixture
def environment(monkeypatch) -> Any:
    """Return a function that makes the given variables the whole environment."""

    def make(**variables: str) -> None:
        monkeypatch.setattr(os, "environ", dict(variables))

    return make


# ---- What launchers say --------------------------------------------------------------------------


def test_a_slurm_step_is_a_run(environment) -> None:
    environment(**SLURM)
    launchers.adopt_launcher_variables()
    place = {name: os.environ.get(name) for name in ALL}
    assert place == {
        "RANK": "0",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": None,  # it may be another process's: the hosts tell
        "LOCAL_WORLD_SIZE": None,
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(15000 + 123458 % 15000),
    }
    assert launchers.read_rank_and_world_size() == (0, 16)
    assert launchers.read_local_rank() == (0, False)
    environment(**SLURM, MASTER_ADDR="10.0.0.1", MASTER_PORT="1")
    launchers.adopt_launcher_variables()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "1")
    environment(**SLURM, RANK="3", WORLD_SIZE="4")  # of a torchrun that srun started
    launchers.adopt_launcher_variables()
    assert launchers.read_rank_and_world_size() == (3, 4)
    assert "MASTER_ADDR" not in os.environ


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "set MASTER_ADDR to the host of its first process"),
        ({"SLURM_STEP_NODELIST": ""}, "srun started 16 processes (SLURM_STEP_NUM_TASKS)"),
        ({"SLURMD_NODENAME": "gpu04"}, "runs on gpu04, the first host of gpu[03-05,9],login1 is "
         "gpu03; set MASTER_ADDR=gpu04"),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "let it start one accelerate launch or torchrun"),
    ],
)  # fmt: skip
def test_a_slurm_step_that_does_not_say_where_it_meets(environment, changes, said) -> None:
    environment(**{**SLURM, **changes})
    with pytest.raises(LaunchError) as refused:
        launchers.adopt_launcher_variables()
    assert said in str(refused.value)
    assert "RANK" not in os.environ


def test_mpirun_is_asked_for_a_place_to_meet(environment) -> None:
    # mpirun's own daemons were started by srun: one a host.
    ours = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}
    ours |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    environment(**ours)
    with pytest.raises(LaunchError, match=r"mpirun started 8 processes .* set MASTER_ADDR"):
        launchers.adopt_launcher_variables()
    assert launchers.read_rank_text() == "5"
    assert not launchers.should_print_for_host()
    environment(**ours, MASTER_ADDR="node0", MASTER_PORT="29500")
    launchers.adopt_launcher_variables()
    assert launchers.read_rank_and_world_size() == (5, 8)
    assert launchers.read_local_rank() == (1, False)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu03", "gpu03"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("a,b[1-2]", "a"),
        ("rack[1-2]n[007,9]-ib,x", "rack1n007-ib"),
    ],
)
def test_the_first_host_of_slurms_list(nodes, first) -> None:
    assert launchers.parse_first_host(nodes) == first


# ---- What hosts tell -----------------------------------------------------------------------------


def said(host: str, local: int | None = None, **more: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": host, "host": host, "local_rank": local, "cores": "ff"}
    plain |= {"is_reliable": False, "local_world_size": 0, "master": None}
    return plain | {"loopback": False, "error": ""} | more


def test_what_is_not_said_follows_from_the_names_of_hosts() -> None:
    found = network.assign_locations(
        [said("a"), said("b"), said("a"), said("b", master="10.1.0.7")]
    )
    assert [one["local_rank"] for one in found] == [0, 0, 1, 1]
    assert {(one["local_world_size"], one["hosts"], one["sharers"]) for one in found} == {(2, 2, 2)}
    assert {one["master"] for one in found} == {"10.1.0.7"}


def test_a_launchers_number_counts_where_it_is_one() -> None:
    local = lambda every: [one["local_rank"] for one in network.assign_locations(every)]  # noqa: E731
    assert local([said("a", 1), said("a", 0)]) == [1, 0]
    assert local([said("a", 0), said("a", 0)]) == [0, 1]  # both their parent's
    assert local([said("a", 3), said("a")]) == [0, 1]
    by_user = {"is_reliable": True, "local_world_size": 1}  # two agents on one host
    found = network.assign_locations([said("a", 0, **by_user), said("a", 0, **by_user)])
    assert [(one["local_rank"], one["local_world_size"]) for one in found] == [(0, 1), (0, 1)]


def test_processors_of_each_its_own_are_not_divided() -> None:
    found = network.assign_locations(
        [said("a", cores="f"), said("a", cores="f0"), said("b", cores="f")]
    )
    assert [one["sharers"] for one in found] == [1, 1, 1]


def test_one_that_cannot_use_its_interface_ends_all() -> None:
    with pytest.raises(LaunchError, match=r"no such card \(on b, of 2 host\(s\)\)"):
        network.assign_locations([said("a"), said("b", error="no such card")])
    with pytest.raises(LaunchError, match="is a loopback interface, which leads to no other host"):
        network.assign_locations([said("a", loopback=True), said("b", loopback=True)])
    assert network.assign_locations(
        [said("a", loopback=True), said("a", loopback=True)]
    )  # one host


# ---- Threads -------------------------------------------------------------------------------------


class Parent:
    """A process further up, as psutil shows it."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.cmdline, self.environ = lambda: list(words), lambda: environment


def unreadable() -> Any:
    parent = Parent()
    parent.environ = mock.Mock(side_effect=psutil.AccessDenied)
    return parent


RUN = {"TORCHELASTIC_RUN_ID": "none"}
FLAG = "--num_cpu_threads_per_process"


@pytest.mark.parametrize(
    ("environment_", "parents", "users"),
    [
        ({}, [], False),  # srun: torch takes all processors in each
        ({"OMP_NUM_THREADS": "4"}, [], True),
        ({"OMP_NUM_THREADS": "1"}, [], True),  # nobody else sets it
        ({"OMP_NUM_THREADS": "1", **RUN}, [Parent("torchrun")], False),
        ({"OMP_NUM_THREADS": "1", **RUN}, [Parent("torchrun", OMP_NUM_THREADS="1")], True),
        ({"OMP_NUM_THREADS": "1", **RUN}, [Parent("accelerate", FLAG, "1")], True),
        (
            {"OMP_NUM_THREADS": "1", **RUN},
            [Parent("bash", OMP_NUM_THREADS="1", **RUN), Parent("torchrun")],
            False,
        ),
        ({"OMP_NUM_THREADS": "1", **RUN}, [unreadable()], True),
    ],
)
def test_whether_the_user_chose_the_threads(
    environment, monkeypatch, environment_, parents, users
) -> None:
    environment(**environment_)
    monkeypatch.setattr(psutil.Process, "parents", lambda _: parents)
    assert launchers.has_user_set_threads() is users


def threads_of(word: str) -> str:
    """Return what a process says that torchrun started as one of two."""
    script = (
        "from toolkit.training import launchers; print('chose', launchers.has_user_set_threads())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= dict([word.split("=")]) if word else {}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    port = ["--master_port", str(free_port()), "--no_python"]
    done = subprocess.run([*launcher, *port, sys.executable, "-c", script], env=environment,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_torchruns_own_choice_is_told_from_the_users() -> None:
    assert threads_of("") == "chose False\n" * 2
    assert threads_of("OMP_NUM_THREADS=1") == "chose True\n" * 2


def test_the_share_of_processors(monkeypatch) -> None:
    monkeypatch.setattr(ranks, "available_cores", lambda: set(range(128)))
    quota = mock.patch.object(Path, "read_text", autospec=True)
    with quota as read:
        read.return_value = "max 100000\n"
        assert launchers.count_cores_per_process(8) == 16
        read.return_value = "3200000 100000\n"  # docker run --cpus 32
        assert launchers.count_cores_per_process(8) == 4
        read.return_value = "50000 100000\n"
        assert launchers.count_cores_per_process(8) == 1
        read.side_effect = OSError
        assert launchers.count_cores_per_process(8) == 16


def threads_and_workers(rank: int, world: int, set_by_user: bool) -> list[Any]:
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    os.environ.pop(name, None)
    os.environ.pop("OMP_NUM_THREADS", None)
    if set_by_user:
        os.environ.update({name: "7", "OMP_NUM_THREADS": "1"})
    torch._inductor.config.compile_threads = 32
    ranks.available_cores = lambda: set(range(64))
    device.limit_compile_workers(8)
    line = device.set_host_threads(8)
    return [os.environ[name], torch._inductor.config.compile_threads, torch.get_num_threads(), line]


def test_the_hosts_work_is_shared_out_unless_the_user_did() -> None:
    ((workers, config, threads, line),) = run_ranks(threads_and_workers, 1, False, group=False)
    assert (workers, config, threads) == ("4", 4, 8)
    assert line.startswith(
        "threads    8 of the host per rank, for the optimizer of sharding.cpu_offload"
    )
    ((workers, config, threads, line),) = run_ranks(threads_and_workers, 1, True, group=False)
    assert (workers, config, threads) == ("7", 32, 1)
    assert line == "threads    1 of the host per rank, by OMP_NUM_THREADS"


# ---- Whole starts --------------------------------------------------------------------------------


def recipe(
    rank: int, world: int, variables: list[dict[str, str]], flags: list[str], folder: str
) -> dict[str, Any]:
    """Run the recipe as host node<rank>, with these variables and no others of a launcher; return
    how it ended.
    """
    for name in (*ALL, network.GLOO_INTERFACE, "TORCH_GLOO_LAZY_INIT"):
        os.environ.pop(name, None)
    os.environ.update(variables[rank])
    socket.gethostname = lambda: f"node{rank}"
    codes, watchers, popen = list[int](), list[list[Any]](), subprocess.Popen
    listens, create_server = list[str](), socket.create_server

    def listening(address: tuple[str, int], **more: Any) -> socket.socket:
        listens.append(address[0])
        return create_server(address, **more)

    def started(command: Any, *args: Any, **kwargs: Any) -> Any:
        if "watcher" in str(command):
            watchers.append(json.loads(command[-1]))
        return popen(command, *args, **kwargs)

    launch._exit_process = codes.append  # type: ignore[assignment]  # the real one ends the process
    sys.argv = ["pretrain.py", *flags]
    _write_to(folder, rank)
    with (
        mock.patch.object(subprocess, "Popen", started),
        mock.patch.object(socket, "create_server", listening),
        contextlib.suppress(SystemExit),
    ):
        runpy.run_path(str(ROOT / "recipes" / "pretrain.py"), run_name="__main__")
    sys.stdout.flush()
    place = {name: os.environ.get(name) for name in ALL}
    with mock.patch.object(torch.accelerator, "device_count", return_value=8):
        local, here = place["LOCAL_RANK"], place["LOCAL_WORLD_SIZE"]
        chosen = None if local is None else device.choose_device_index(int(local), int(here or 0))
    output = [Path(folder, f"{rank}.{kind}").read_text() for kind in ("out", "err")]
    seen = {"codes": codes, "place": place, "device": chosen, "said": output}
    return seen | {"watchers": watchers, "listens": listens}


def start(folder: Path, model: Path, text: Path, variables: list[dict[str, str]], *more: str):
    flags = ["--model.name_or_path", str(model), "--data.train_files", str(text)]
    flags += ["--data.sequence_length", "32", "--train.max_steps", "2"]
    flags += ["--output_dir", str(folder / "run"), *more]
    return run_ranks(recipe, len(variables), variables, flags, str(folder), group=False)


def plain(rank: int, port: int, **more: str) -> dict[str, str]:
    """Return what a user sets by hand for one of two processes."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": "2", **where, **more}


def check_two_hosts(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        assert one["codes"] == [0], one["said"]
        assert one["device"] == 0
        assert (one["place"]["LOCAL_RANK"], one["place"]["LOCAL_WORLD_SIZE"]) == ("0", "1")
        (watcher,) = one["watchers"]
        assert watcher[1] == rank
        # The judge listens to other hosts.
        assert one["listens"] == ([] if rank else [""])
    out = found[0]["said"][0]
    assert "hosts      2, 1 of 2 ranks on this one" in out
    assert "step 2/2" in out


def test_without_local_world_size_two_hosts_are_two(tmp_path, tiny_llama, text_file) -> None:
    port = free_port()
    check_two_hosts(start(tmp_path, tiny_llama, text_file, [plain(r, port) for r in (0, 1)]))


def test_a_local_rank_that_is_the_rank_is_not_made_up(tmp_path, tiny_llama, text_file) -> None:
    """As srun sets it up by hand, with Slurm's number of each host: both are 0."""
    port = free_port()
    variables = [plain(r, port, SLURM_LOCALID="0") for r in (0, 1)]
    check_two_hosts(start(tmp_path, tiny_llama, text_file, variables))


def test_with_slurms_variables_alone(tmp_path, tiny_llama, text_file) -> None:
    step = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost,node1"}
    step["SLURM_JOB_ID"] = str(free_port() - 15000)
    variables = [
        {**step, "SLURM_PROCID": str(r), "SLURMD_NODENAME": ("localhost", "node1")[r]}
        for r in (0, 1)
    ]
    found = start(tmp_path, tiny_llama, text_file, variables, "--sharding.cpu_offload", "true")
    check_two_hosts(found)
    assert "\nthreads    1 of the host per rank, by OMP_NUM_THREADS\n" in found[0]["said"][0]


@pytest.mark.parametrize(
    ("rank", "chosen", "words"),
    [
        (1, "nowhere0", "GLOO_SOCKET_IFNAME is nowhere0, which names no interface with an address "
         "on this host: lo 127.0.0.1"),
        (0, "lo", "GLOO_SOCKET_IFNAME is a loopback interface, which leads to no other host"),
    ],
)  # fmt: skip
def test_a_card_that_leads_nowhere(tmp_path, tiny_llama, text_file, rank, chosen, words) -> None:
    """Each host says so, though one alone has it."""
    port = free_port()
    variables = [plain(r, port) for r in (0, 1)]
    variables[rank][network.GLOO_INTERFACE] = chosen
    for one in start(tmp_path, tiny_llama, text_file, variables):
        assert one["codes"] == [1]
        (line,) = [text for text in one["said"][1].splitlines() if "error: " in text]
        assert words in line
        assert f"(on node{rank}, of 2 host(s))" in line
        assert not (tmp_path / "run").exists()
