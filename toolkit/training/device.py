"""The device of a process and its host: choice, environment, threads, memory, attention kernels.

torch reads these environment variables when the device is first used, so they are set before.
"""

import contextlib
import gc
import os
import socket
import time
import warnings
from collections import Counter
from collections.abc import Iterator

import torch
import torch._inductor.config

from toolkit import GC_BEFORE, GC_RAISED
from toolkit.errors import LaunchError
from toolkit.training import launchers, network

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_COLLECT_EVERY = 50
_SLOW_RATIO = 5.0  # a dtype is slow if it takes so many times as long as float32
# Bytes in shared memory. NCCL takes one segment of 9637888 bytes (as it reports) for each of the
# two neighbours of a process. A loader's worker holds one or two batches there.
_NCCL_BYTES = 2 * 9_637_888
_WORKER_BYTES = 16 << 20
_MIN_BYTES = 1 << 20


def prepare_environment(*, deterministic: bool) -> None:
    """Set the environment variables that torch reads when it first uses the accelerator.

    Variables that the user has set are not changed.

    Args:
        deterministic: also make torch use only deterministic algorithms, and NCCL a fixed order of
            sums. An operation that has no such algorithm raises a RuntimeError.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        # Samples of many lengths, and memory that FSDP2 frees, fragment fixed segments.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # Silences the profiler's own log lines.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # With warn_only, the efficient attention kernel would not be deterministic.
        torch.use_deterministic_algorithms(True)
        # By default NCCL chooses both by the topology, and with them the order of sums.
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NCCL_PROTO", "Simple")
        # Filling new memory helps to find errors, but costs a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_device_index(local_rank: int, local_world_size: int) -> int:
    """Return the device index of a process: its local rank, or 0 if it sees only one device.

    Args:
        local_rank: rank of the process among the processes of this machine.
        local_world_size: number of processes on this machine.

    Raises:
        LaunchError: there are several devices, but fewer devices than processes.
    """
    count = torch.accelerator.device_count()
    if count == 1:
        # Each process may see a different device (srun --gpus-per-task=1). `refuse_shared_devices`
        # checks that.
        return 0
    if local_world_size > count:
        raise LaunchError(
            f"{local_world_size} processes were started on this machine, which has {count} "
            "device(s); start at most one process per device (--num_processes)"
        )
    return local_rank


def identify_device(device: torch.device, rank: int) -> list[str]:
    """Return [host name, UUID of `device`]. If the device has no UUID, `rank` takes its place."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return [socket.gethostname(), str(getattr(properties, "uuid", rank))]


def refuse_shared_devices(identities: list[list[str]]) -> list[None]:
    """Raise a `LaunchError` if two processes use the same device.

    NCCL would at best report such a mistake by a bus address. The function is meant as the argument
    `decide` of `network.exchange_and_decide`, so it returns None for each rank.

    Args:
        identities: the results of `identify_device` on all ranks.
    """
    for identity, count in Counter(map(tuple, identities)).items():
        if count > 1:
            sharing = [str(rank) for rank, i in enumerate(identities) if tuple(i) == identity]
            raise LaunchError(
                f"processes {' and '.join(sharing)} use the same device of {identity[0]}; start at "
                "most one process per device (--num_processes)"
            )
    return [None] * len(identities)


def limit_compile_workers(sharers: int) -> None:
    """Limit inductor's compile workers to half of this process's share of the cores, at least 2.

    By default inductor starts up to 32 workers in each process. Sets the environment variable
    `TORCHINDUCTOR_COMPILE_THREADS` and inductor's config. If the user has set the variable, nothing
    is done.

    Args:
        sharers: number of processes that share the cores.
    """
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    if name not in os.environ:
        count = max(2, launchers.count_cores_per_process(sharers) // 2)
        os.environ[name] = str(count)
        # Inductor has read the variable already.
        torch._inductor.config.compile_threads = count


def set_host_threads(sharers: int) -> str:
    """Set torch's threads to this process's share of the cores, for optimizer steps on the host.

    Launchers set one thread per process. If the user has set OMP_NUM_THREADS, nothing is changed.

    Args:
        sharers: number of processes that share the cores.

    Returns:
        A log line with the number of threads.
    """
    if launchers.has_user_set_threads():
        return f"threads    {torch.get_num_threads()} of the host per rank, by OMP_NUM_THREADS"
    count = launchers.count_cores_per_process(sharers)
    torch.set_num_threads(count)
    reason = "for the optimizer of sharding.cpu_offload (OMP_NUM_THREADS overrides it)"
    return f"threads    {count} of the host per rank, {reason}"


def check_nccl_shared_memory(local_world_size: int) -> str:
    """Return a warning if /dev/shm of this host may have too little free space for NCCL.

    NCCL uses shared memory between devices that cannot reach each other directly. The text is empty
    if there is enough space, for a single process, or if NCCL_SHM_DISABLE is 1.

    Args:
        local_world_size: number of processes with an accelerator on this host.
    """
    if local_world_size < 2 or os.environ.get("NCCL_SHM_DISABLE") == "1":
        return ""
    user = f"NCCL between {local_world_size} devices"
    return _format_memory_warning(user, local_world_size * _NCCL_BYTES)


def check_loader_shared_memory(local_world_size: int, workers: int) -> str:
    """Return a warning if /dev/shm of this host may have too little free space for data loaders.

    The text is empty if there is enough space, or without workers.

    Args:
        local_world_size: number of processes on this host.
        workers: number of data loader workers per process.

    Raises:
        LaunchError: less than 1 MB is free, which is too little for any batch.
    """
    if workers == 0:
        return ""
    user = f"{workers} data.num_workers of each of {local_world_size} processes"
    warning = _format_memory_warning(user, local_world_size * workers * _WORKER_BYTES)
    if warning and network.free_shared_memory_bytes() < _MIN_BYTES:
        raise LaunchError(f"{warning.removeprefix('WARNING: ')}; or set data.num_workers: 0")
    return warning


def _format_memory_warning(user: str, needed_bytes: int) -> str:
    """Format a warning if `needed_bytes` of shared memory are not free; otherwise return "".

    Args:
        user: what needs the memory, as text.
        needed_bytes: bytes that it may use.
    """
    free_bytes, folder = network.free_shared_memory_bytes(), network.SHARED_MEMORY
    if free_bytes >= needed_bytes:
        return ""
    return (
        f"WARNING: {folder} of {socket.gethostname()} has {free_bytes / 1e6:.1f} MB free, {user} "
        f"may use {needed_bytes / 1e6:.0f} MB; start the container with a larger --shm-size "
        f"(Kubernetes: an emptyDir of medium Memory at {folder})"
    )


def check_dtype_speed(device: torch.device, dtype: str) -> str:
    """Return a warning if linear layers on this CPU are much slower in `dtype` than in float32.

    The limit is a factor of 5. It is exceeded on CPUs without bfloat16 instructions, on which the
    measurement takes half a second.

    Args:
        device: the device of this process. For other devices than a CPU, nothing is measured.
        dtype: the compute dtype.

    Returns:
        The warning, or an empty string.
    """
    if device.type != "cpu" or dtype == "float32":
        return ""
    ratio = _measure_layer_seconds(getattr(torch, dtype)) / _measure_layer_seconds(torch.float32)
    if ratio < _SLOW_RATIO:
        return ""
    return (
        f"WARNING: linear layers take {ratio:.0f} times as long in {dtype} as in float32 on this "
        "CPU; set --sharding.param_dtype float32 for a run on it"
    )


def _measure_layer_seconds(dtype: torch.dtype) -> float:
    """Measure the seconds that a linear layer takes for forward and backward: the best of 3 runs.

    All values are ones, so no random number is drawn.
    """
    weight, batch = (torch.ones(n, 256, dtype=dtype, requires_grad=True) for n in (512, 128))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        torch.nn.functional.linear(batch, weight).sum().backward()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@contextlib.contextmanager
def prefer_cudnn_attention(device: torch.device, *, deterministic: bool) -> Iterator[None]:
    """Within the block, prefer cuDNN's attention kernel on Hopper GPUs, on which it is the fastest.

    On other devices nothing is changed.

    Args:
        device: the device of this process.
        deterministic: change nothing, because the kernel's backward is not deterministic.
    """
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if deterministic or not is_hopper or torch.version.hip:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # By default cuDNN would build a plan for each new length.
    os.environ.setdefault("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    order = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    warnings.filterwarnings("ignore", message="TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 is")
    with sdpa_kernel([getattr(SDPBackend, name) for name in order], set_priority=True):
        yield


@contextlib.contextmanager
def restore_garbage_collection() -> Iterator[None]:
    """Restore Python's garbage collection after the block.

    This undoes the changes of `collect_garbage` and of `import toolkit`.
    """
    was_enabled = gc.isenabled()
    freeze_count = gc.get_freeze_count()
    try:
        yield
    finally:
        # If the program has frozen objects, they cannot be separated from those frozen here.
        if not freeze_count:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
        # Another threshold was set by the program.
        if gc.get_threshold() == GC_RAISED:
            gc.set_threshold(*GC_BEFORE)


def collect_garbage(step: int) -> None:
    """Collect reference cycles after every 50th step, and never automatically in between.

    A collection at a random time on one rank delays all ranks, and a full one takes a tenth of a
    second or more. If every rank calls this function after each step, all ranks collect together.
    The first call turns automatic collection off and freezes all existing objects, so later
    collections skip them.

    Args:
        step: number of the step that is just done.
    """
    if gc.isenabled():
        # The first step. Modules, model and data live until the end.
        gc.collect()
        gc.freeze()
        gc.disable()
    elif step % _COLLECT_EVERY == 0:
        gc.collect(1)
