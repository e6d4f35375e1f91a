"""Rank and world size of this process, from the environment variables of its launcher.

torchrun and `accelerate launch` set all of torch's variables. The variables of srun and mpirun are
translated to torch's. What they do not say about hosts, the processes exchange when they connect
(`network.exchange_locations`).
"""

import os
import re
import socket
from pathlib import Path

import psutil

from toolkit import ranks
from toolkit.errors import LaunchError

# Launcher, and its variables for rank, number of processes, and local rank. mpirun comes first: it
# may start its daemons with srun, whose variables its processes then inherit.
_LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
_PORTS = range(15000, 30000)  # below the ports that Linux assigns automatically


def adopt_launcher_variables() -> None:
    """Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the variables of srun or mpirun.

    Does nothing if RANK or WORLD_SIZE is set, or for a single process. Under srun the address is
    computed unless the user has set it. Under mpirun the user must set it.

    Raises:
        LaunchError: rank or address is not known, or each process is an `accelerate launch`.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    for launcher, rank, size, _ in _LAUNCHERS:
        if os.environ.get(size, "1") in ("0", "1"):
            continue
        variables = {"RANK": os.environ.get(rank, ""), "WORLD_SIZE": os.environ[size]}
        if launcher == "srun":
            variables |= _slurm_rendezvous()
        variables |= {n: os.environ[n] for n in ("MASTER_ADDR", "MASTER_PORT") if n in os.environ}
        # With this variable, `accelerate launch` has started a single process on each machine.
        is_single = "ACCELERATE_MIXED_PRECISION" in os.environ
        if not variables["RANK"] or len(variables) < 4 or is_single:
            raise LaunchError(
                f"{launcher} started {os.environ[size]} processes ({size}), each of which would "
                "train separately; set MASTER_ADDR to the host of its first process and "
                "MASTER_PORT to a free port there, or let it start one accelerate launch or "
                "torchrun per machine"
            )
        os.environ.update(variables)
        return


def read_rank_and_world_size() -> tuple[int, int]:
    """Read the rank and the world size of this process from RANK and WORLD_SIZE.

    Returns:
        (rank, world size); (0, 1) if neither variable is set.

    Raises:
        LaunchError: only one variable is set, a value is not valid, or `accelerate launch` was to
            start several processes and started one.
    """
    if not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        if is_started_by_accelerate() and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise LaunchError(
                "accelerate launch should start several processes and started one, as it does with "
                "MULTI_CPU and --cpu. Use --config_file accelerate_configs/cpu.yaml, or torchrun"
            )
        return 0, 1
    variables = {n: os.environ.get(n, "(not set)") for n in ("RANK", "WORLD_SIZE")}
    variables |= {n: os.environ[n] for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if n in os.environ}
    if all(value.isdecimal() for value in variables.values()):
        rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        if rank < world:
            return rank, world
    listing = ", ".join(f"{name} {value}" for name, value in variables.items())
    raise LaunchError(
        f"{listing} in the environment name no process of a run; start with accelerate launch or "
        "torchrun, or unset them for one process"
    )


def is_started_by_accelerate() -> bool:
    """Return True if `accelerate launch` started this process, by its environment."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ


def read_rank_text() -> str:
    """Return the rank as text for messages, from any launcher's variables; "0" if none is set."""
    names = ("RANK", *(rank for _, rank, _, _ in _LAUNCHERS))
    return next((os.environ[name] for name in names if name in os.environ), "0")


def read_local_rank() -> tuple[int | None, bool]:
    """Read the local rank of this process from its launcher's variables.

    Returns:
        The local rank, or None if no launcher set it. Second, True if it comes from LOCAL_RANK. The
        variables of srun and mpirun are not reliable, because a parent process may have left them.
    """
    for name in ("LOCAL_RANK", *(local for _, _, _, local in _LAUNCHERS)):
        if (value := os.environ.get(name, "")).isdecimal():
            return int(value), name == "LOCAL_RANK"
    return None, False


def should_print_for_host() -> bool:
    """Return True if this process prints for its host: its local rank is 0 or unknown.

    Works before the process group exists.
    """
    return (read_local_rank()[0] or 0) == 0


def count_cores_per_process(sharers: int) -> int:
    """Return the number of cores for this process, at least one.

    A container's limit of CPU time (`docker run --cpus`) is respected.

    Args:
        sharers: number of processes that share the cores.
    """
    count = float(len(ranks.available_cores()))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):  # not in a container, or an older kernel
        quota = period = "max"
    if quota != "max":
        count = min(count, int(quota) / int(period))
    return max(1, int(count) // sharers)


def has_user_set_threads() -> bool:
    """Return True if OMP_NUM_THREADS was set by the user, not by the launcher.

    torchrun and `accelerate launch` set it to 1 if it is unset. So the environment of the
    launcher's own process is read from the operating system. If it cannot be read, the result is
    True.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    # Variables of processes that a launcher started.
    marks = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
    if threads is None:
        return False
    if threads != "1" or not any(mark in os.environ for mark in marks):
        return True
    try:
        for parent in psutil.Process().parents():
            environment = parent.environ()
            if not any(mark in environment for mark in marks):
                # This parent is the launcher.
                has_flag = any("num_cpu_threads_per_process" in word for word in parent.cmdline())
                return has_flag or "OMP_NUM_THREADS" in environment
    except psutil.Error:
        return True
    return True


def _slurm_rendezvous() -> dict[str, str]:
    """Compute the address at which the processes of a Slurm step connect.

    Returns:
        MASTER_ADDR, which is the first host, and MASTER_PORT, which depends on job and step id.
        Empty without a list of hosts, or if the user chose an arbitrary order of hosts.

    Raises:
        LaunchError: the first process does not run on the first host.
    """
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    if not nodes or "arbitrary" in os.environ.get("SLURM_DISTRIBUTION", ""):
        return {}
    first = parse_first_host(nodes)
    this_host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    is_first = os.environ.get("SLURM_PROCID") == "0" and "MASTER_ADDR" not in os.environ
    if is_first and first.partition(".")[0] != this_host.partition(".")[0]:
        raise LaunchError(
            f"the first process of this step runs on {this_host}, the first host of {nodes} is "
            f"{first}; set MASTER_ADDR={this_host} and a free MASTER_PORT for all processes"
        )
    step = sum(int(os.environ.get(f"SLURM_{n}_ID", "0")) for n in ("JOB", "STEP"))
    return {"MASTER_ADDR": first, "MASTER_PORT": str(_PORTS[step % len(_PORTS)])}


def parse_first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's notation: gpu03 for `gpu[03-05,9],login1`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else nodes)
