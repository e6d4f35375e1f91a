"""Which process of how many this is, as what started it says in the environment.

torchrun and `accelerate launch` say all of it. srun and mpirun have variables of their own, which
become torch's; what nobody says of hosts the processes find out when they meet (`network.exchange_locations`).
"""

import os
import re
import socket
from pathlib import Path

import psutil

from toolkit import ranks
from toolkit.errors import LaunchError

# Launcher, its variables for: the rank, the number of processes, the rank on its host. mpirun may
# start its own daemons by srun, whose variables its processes then inherit.
_OTHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
_PORTS = range(15000, 30000)  # below those that Linux hands out


def adopt_launcher_variables() -> None:
    """Say in torch's variables what srun or mpirun say in theirs: RANK, WORLD_SIZE, and under srun
    also MASTER_ADDR and MASTER_PORT where they are not set. LaunchError: it does not say enough.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    for launcher, rank, size, _ in _OTHERS:
        if os.environ.get(size, "1") in ("0", "1"):
            continue
        found = {"RANK": os.environ.get(rank, ""), "WORLD_SIZE": os.environ[size]}
        if launcher == "srun":
            found |= _slurm_meets()
        found |= {n: os.environ[n] for n in ("MASTER_ADDR", "MASTER_PORT") if n in os.environ}
        # One that `accelerate launch` started alone, on each machine.
        if not found["RANK"] or len(found) < 4 or "ACCELERATE_MIXED_PRECISION" in os.environ:
            raise LaunchError(
                f"{launcher} started {os.environ[size]} processes ({size}), each of which would "
                "train on its own; set MASTER_ADDR to the host of its first process and "
                "MASTER_PORT to a free port there, or let it start one accelerate launch or "
                "torchrun a machine"
            )
        os.environ.update(found)
        return


def read_rank_and_world_size() -> tuple[int, int]:
    """Return (rank, number of processes) as the environment says; LaunchError where it says less
    than that, or nonsense.
    """
    if not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        if is_started_by_accelerate() and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise LaunchError(
                "accelerate launch was asked for several processes and started one, as it does "
                "with MULTI_CPU and --cpu. Use --config_file accelerate_configs/cpu.yaml, or "
                "torchrun"
            )
        return 0, 1
    said = {n: os.environ.get(n, "(not set)") for n in ("RANK", "WORLD_SIZE")}
    said |= {n: os.environ[n] for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if n in os.environ}
    if all(value.isdecimal() for value in said.values()):
        rank, world = int(said["RANK"]), int(said["WORLD_SIZE"])
        if rank < world:
            return rank, world
    raise LaunchError(
        f"{', '.join(f'{n} {v}' for n, v in said.items())} in the environment name no process "
        "of a run; start with accelerate launch or torchrun, or unset them for one process"
    )


def is_started_by_accelerate() -> bool:
    """Return whether `accelerate launch` started this process."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ


def read_rank_text() -> str:
    """Return this process's rank, for what it prints before ranks know each other."""
    names = ("RANK", *(rank for _, rank, _, _ in _OTHERS))
    return next((os.environ[name] for name in names if name in os.environ), "0")


def read_local_rank() -> tuple[int | None, bool]:
    """Return this process's number on its host, None where nobody says it; and whether it counts as
    it is: a variable of srun or mpirun may be that of a process further up.
    """
    for name in ("LOCAL_RANK", *(local for _, _, _, local in _OTHERS)):
        if (value := os.environ.get(name, "")).isdecimal():
            return int(value), name == "LOCAL_RANK"
    return None, False


def is_host_speaker() -> bool:
    """Return whether this process speaks for its host before the ranks know each other."""
    return (read_local_rank()[0] or 0) == 0


def count_cores_per_process(sharers: int) -> int:
    """Return how many processors are this process's, one at least, where `sharers` use the same. A
    container may have less of their time than there are (`docker run --cpus`).
    """
    count = float(len(ranks.available_cores()))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):  # no container, or an older kernel's
        quota = period = "max"
    if quota != "max":
        count = min(count, int(quota) / int(period))
    return max(1, int(count) // sharers)


def has_user_set_threads() -> bool:
    """Return whether the user, and not the launcher, set OMP_NUM_THREADS.

    torchrun and `accelerate launch` set 1 in their own environment where it is unset. What a
    process was started with the system still knows, so the launcher's shows whether they did.
    Where that cannot be read the user counts as the one who set it.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    marks = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # of what a launcher started
    if threads is None:
        return False
    if threads != "1" or not any(mark in os.environ for mark in marks):
        return True
    try:
        for parent in psutil.Process().parents():
            environment = parent.environ()
            if not any(mark in environment for mark in marks):  # the launcher
                asked = any("num_cpu_threads_per_process" in word for word in parent.cmdline())
                return asked or "OMP_NUM_THREADS" in environment
    except psutil.Error:
        return True
    return True


def _slurm_meets() -> dict[str, str]:
    """Return where the processes of a Slurm step meet: the host of its first one, and a port of the
    step. Nothing where the order of hosts is the user's own.
    """
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    if not nodes or "arbitrary" in os.environ.get("SLURM_DISTRIBUTION", ""):
        return {}
    first, own = parse_first_host(nodes), os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    is_first = os.environ.get("SLURM_PROCID") == "0" and "MASTER_ADDR" not in os.environ
    if is_first and first.partition(".")[0] != own.partition(".")[0]:
        raise LaunchError(
            f"the first process of this step runs on {own}, the first host of {nodes} is {first}; "
            f"set MASTER_ADDR={own} and a free MASTER_PORT for all processes"
        )
    step = sum(int(os.environ.get(f"SLURM_{n}_ID", "0")) for n in ("JOB", "STEP"))
    return {"MASTER_ADDR": first, "MASTER_PORT": str(_PORTS[step % len(_PORTS)])}


def parse_first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it: gpu03 of `gpu[03-05,9],login1`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else nodes)
