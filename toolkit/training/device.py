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
    """Set the environment variables that must be set before the accelerator starts.

    Variables that the user has set are unchanged.

    Args:
        deterministic: operations produce the same bits each time, or raise a RuntimeError.
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
    """Choose the device of a process: its local rank.

    Args:
        local_rank: number of the process on this machine.
        local_world_size: number of processes on this machine.

    Raises:
        LaunchError: the machine has fewer devices than processes.
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
    """Return the host name and a text that identifies this process's device on that host."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return [socket.gethostname(), str(getattr(properties, "uuid", rank))]


def refuse_shared_devices(identities: list[list[str]]) -> list[None]:
    """Raise a `LaunchError` if two processes use one device.

    NCCL would report only a bus address, if anything.

    Args:
        identities: result of `identify_device` on each rank.
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
    """Limit the compile workers of this process to half of its share of the cores, at least 2.

    By default inductor starts up to 32 workers in each process. A limit that the user has set is
    unchanged.

    Args:
        sharers: number of processes that use the same processors.
    """
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    if name not in os.environ:
        count = max(2, launchers.count_cores_per_process(sharers) // 2)
        os.environ[name] = str(count)
        # Inductor has read the variable already.
        torch._inductor.config.compile_threads = count


def set_host_threads(sharers: int) -> str:
    """Let this process use its share of the processors, for optimizer steps on the host.

    Launchers set one thread per process. A number that the user set with OMP_NUM_THREADS is
    unchanged.

    Args:
        sharers: number of processes that use the same processors.

    Returns:
        A log line.
    """
    if launchers.has_user_set_threads():
        return f"threads    {torch.get_num_threads()} of the host per rank, by OMP_NUM_THREADS"
    count = launchers.count_cores_per_process(sharers)
    torch.set_num_threads(count)
    reason = "for the optimizer of sharding.cpu_offload (OMP_NUM_THREADS overrides it)"
    return f"threads    {count} of the host per rank, {reason}"


def check_nccl_shared_memory(local_world_size: int) -> str:
    """Check that this host has enough shared memory for NCCL.

    NCCL uses shared memory between devices that cannot reach each other directly.

    Args:
        local_world_size: number of processes with an accelerator on this host.

    Returns:
        A warning if there may be too little, else an empty string.
    """
    if local_world_size < 2 or os.environ.get("NCCL_SHM_DISABLE") == "1":
        return ""
    user = f"NCCL between {local_world_size} devices"
    return _warn_of_little_memory(user, local_world_size * _NCCL_BYTES)


def check_loader_shared_memory(local_world_size: int, workers: int) -> str:
    """Check that this host has enough shared memory for the workers of data loaders.

    Args:
        local_world_size: number of processes on this host.
        workers: number of workers per process.

    Returns:
        A warning if there may be too little, else an empty string.

    Raises:
        LaunchError: there is too little for any batch.
    """
    if workers == 0:
        return ""
    user = f"{workers} data.num_workers of each of {local_world_size} processes"
    warning = _warn_of_little_memory(user, local_world_size * workers * _WORKER_BYTES)
    if warning and network.free_shared_memory_bytes() < _MIN_BYTES:
        raise LaunchError(f"{warning.removeprefix('WARNING: ')}; or set data.num_workers: 0")
    return warning


def _warn_of_little_memory(user: str, needed_bytes: int) -> str:
    free_bytes, folder = network.free_shared_memory_bytes(), network.SHARED_MEMORY
    if free_bytes >= needed_bytes:
        return ""
    return (
        f"WARNING: {folder} of {socket.gethostname()} has {free_bytes / 1e6:.1f} MB free, {user} "
        f"may use {needed_bytes / 1e6:.0f} MB; start the container with a larger --shm-size "
        f"(Kubernetes: an emptyDir of medium Memory at {folder})"
    )


def check_dtype_speed(device: torch.device, dtype: str) -> str:
    """Check that a CPU is not much slower in `dtype` than in float32.

    A CPU without instructions for bfloat16 is. The check measures it, which takes half a second on
    such a CPU.

    Returns:
        A warning if it is slow; else, and for other devices, an empty string.
    """
    if device.type != "cpu" or dtype == "float32":
        return ""
    ratio = _layer_seconds(getattr(torch, dtype)) / _layer_seconds(torch.float32)
    if ratio < _SLOW_RATIO:
        return ""
    return (
        f"WARNING: linear layers take {ratio:.0f} times as long in {dtype} as in float32 on this "
        "CPU; set --sharding.param_dtype float32 for a run on it"
    )


def _layer_seconds(dtype: torch.dtype) -> float:
    """Measure a linear layer, forward and backward, in seconds.

    Its values are ones, so that no random number is drawn.
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
    """Let SDPA prefer cuDNN on Hopper: the fastest, with a backward that is not deterministic.

    Args:
        device: the device of this process.
        deterministic: keep the default order.
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
    """After the block, let Python collect garbage as before the toolkit was imported.

    Undoes the changes of `collect_garbage` and of the import.
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
    """Collect reference cycles after every 50th step only, on all ranks at the same time.

    A collection at a random time on one rank delays all ranks, and a full one takes a tenth of a
    second or more. The first call also freezes all existing objects.

    Args:
        step: the step that has just been done.
    """
    if gc.isenabled():
        # The first step. Modules, model and data live until the end.
        gc.collect()
        gc.freeze()
        gc.disable()
    elif step % _COLLECT_EVERY == 0:
        gc.collect(1)
