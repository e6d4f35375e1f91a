"""The device of a process and its host: choice, environment, threads, memory, attention kernels.

torch reads these variables when the device is first used, so they are set before.
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
_SLOW = 5.0  # times the seconds of float32, from where a run is told
# Bytes there: one of NCCL's segments for a neighbour, of which a process has two (9637888 in what
# it reports); what a loader's worker lays there at a time is a batch or two.
_OF_NCCL, _OF_WORKER, _LEAST = 2 * 9_637_888, 16 << 20, 1 << 20


def prepare_environment(*, deterministic: bool) -> None:
    """Set what must be set before the accelerator starts; what the user has set stays.
    `deterministic`: operations give the same bits each time, or raise a RuntimeError.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        # Samples of many lengths, and what FSDP2 frees, else leave pieces that nothing fits in.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own lines, none of use here
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Not as a warning: the efficient attention kernel takes its deterministic way only so.
        torch.use_deterministic_algorithms(True)
        # Else both follow what connects the devices, and with them the order of sums.
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NCCL_PROTO", "Simple")
        # Filling fresh memory finds faults, and costs a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_device_index(local: int, here: int) -> int:
    """Return the device of this machine's process `local` of `here`; LaunchError: too few."""
    count = torch.accelerator.device_count()
    if count == 1:  # each may see one of its own (srun --gpus-per-task=1): `refuse_shared` looks
        return 0
    if here > count:
        raise LaunchError(
            f"{here} processes were started on this machine, which has {count} device(s); start at "
            "most one process per device (--num_processes)"
        )
    return local


def identify_device(device: torch.device, rank: int) -> list[str]:
    """Return what tells this process's device from those of the others, after its host's name."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return [socket.gethostname(), str(getattr(properties, "uuid", rank))]


def refuse_shared_devices(every: list[list[str]]) -> list[None]:
    """Refuse two processes on one device, by the `identity` of each rank's; LaunchError. NCCL would
    name a bus address, if it says anything.
    """
    for one, count in Counter(map(tuple, every)).items():
        if count > 1:
            others = " and ".join(str(rank) for rank, two in enumerate(every) if tuple(two) == one)
            raise LaunchError(
                f"processes {others} were given the same device of {one[0]}; start at most one "
                "process per device (--num_processes)"
            )
    return [None] * len(every)


def limit_compile_workers(sharers: int) -> None:
    """Let each process compile with its share of the processors: inductor starts up to 32 workers,
    in each of the `sharers` that use the same ones. What the user has set stays.
    """
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    if name not in os.environ:
        count = max(2, launchers.count_cores_per_process(sharers) // 2)
        os.environ[name] = str(count)
        torch._inductor.config.compile_threads = count  # it has read the variable already


def set_host_threads(sharers: int) -> str:
    """Let this process compute on its share of the processors, for optimizer steps on the host,
    unless the user set OMP_NUM_THREADS; return a line that says so. Launchers set 1.
    """
    if launchers.has_user_set_threads():
        return f"threads    {torch.get_num_threads()} of the host a rank, by OMP_NUM_THREADS"
    count = launchers.count_cores_per_process(sharers)
    torch.set_num_threads(count)
    why = "for sharding.cpu_offload, whose optimizer steps there (OMP_NUM_THREADS sets another)"
    return f"threads    {count} of the host a rank, {why}"


def check_nccl_shared_memory(here: int) -> str:
    """Return a warning where `here` accelerators of this host have less shared memory than NCCL may
    take for them, which it does where they do not reach each other directly; else an empty string.
    """
    unused = here < 2 or os.environ.get("NCCL_SHM_DISABLE") == "1"
    return "" if unused else _shared_memory(f"NCCL between {here} devices", here * _OF_NCCL)


def check_loader_shared_memory(here: int, workers: int) -> str:
    """Return a warning where this host has little shared memory for the loaders' `workers` of each
    of `here` processes, empty where it is enough; LaunchError: too little for any batch.
    """
    if workers == 0:
        return ""
    line = _shared_memory(f"{workers} data.num_workers of each of {here} processes",
                          here * workers * _OF_WORKER)  # fmt: skip
    if line and network.free_shared_memory_bytes() < _LEAST:
        raise LaunchError(f"{line.removeprefix('WARNING: ')}; or set data.num_workers: 0")
    return line


def _shared_memory(user: str, needed: int) -> str:
    free, place = network.free_shared_memory_bytes(), network.SHARED_MEMORY
    if free >= needed:
        return ""
    return (
        f"WARNING: {place} of {socket.gethostname()} has {free / 1e6:.1f} MB free, {user} may use "
        f"{needed / 1e6:.0f} MB; start the container with a larger --shm-size (Kubernetes: an "
        f"emptyDir of medium Memory at {place})"
    )


def check_dtype_speed(device: torch.device, dtype: str) -> str:
    """Return a warning where a CPU computes much slower in `dtype` than in float32, as one without
    instructions for bfloat16 does. Measured, in half a second there.
    """
    if device.type != "cpu" or dtype == "float32":
        return ""
    times = _layer_seconds(getattr(torch, dtype)) / _layer_seconds(torch.float32)
    if times < _SLOW:
        return ""
    return (
        f"WARNING: linear layers take {times:.0f} times as long in {dtype} as in float32 on this "
        "CPU; for a run on it: --sharding.param_dtype float32"
    )


def _layer_seconds(dtype: torch.dtype) -> float:
    """Return the seconds of a linear layer, forward and backward, by ones: nothing is drawn."""
    weight, batch = (torch.ones(n, 256, dtype=dtype, requires_grad=True) for n in (512, 128))
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        torch.nn.functional.linear(batch, weight).sum().backward()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


@contextlib.contextmanager
def prefer_cudnn_attention(device: torch.device, *, deterministic: bool) -> Iterator[None]:
    """Have SDPA try cuDNN first on Hopper: the fastest, with a backward that varies in its bits."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if deterministic or not hopper or torch.version.hip:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # Else each new length would build a plan.
    os.environ.setdefault("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    order = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    warnings.filterwarnings("ignore", message="TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 is")
    with sdpa_kernel([getattr(SDPBackend, name) for name in order], set_priority=True):
        yield


@contextlib.contextmanager
def restore_garbage_collection() -> Iterator[None]:
    """Have Python collect garbage after the block as before the toolkit was imported, whatever
    `collect_garbage` did.
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        yield
    finally:
        if not frozen:  # what others froze is not to be told from what was frozen here
            gc.unfreeze()
        if enabled:
            gc.enable()
        if gc.get_threshold() == GC_RAISED:  # and not the program's own
            gc.set_threshold(*GC_BEFORE)


def collect_garbage(step: int) -> None:
    """Collect reference cycles after every 50th step only, on all ranks at once: a collection at
    random holds up the others, and a full one takes a tenth of a second and more.
    """
    if gc.isenabled():  # the first step
        gc.collect()
        gc.freeze()  # modules, model and data: they stay
        gc.disable()
    elif step % _COLLECT_EVERY == 0:
        gc.collect(1)
