"""The accelerator of a process: its choice, environment, attention kernels, garbage collection.

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

from toolkit import ranks
from toolkit.errors import LaunchError
from toolkit.training.faults import watchdog

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_COLLECT_EVERY = 50
_SLOW = 5.0  # times the seconds of float32, from where a run is told


def prepare(*, deterministic: bool) -> None:
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
        # Filling fresh memory finds faults, and costs a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose(local: int, here: int) -> int:
    """Return the device of this machine's process `local` of `here`; LaunchError: too few."""
    count = torch.accelerator.device_count()
    if count == 1:  # each may see one of its own (srun --gpus-per-task=1): `refuse_shared` looks
        return 0
    if here > count:
        what = f"{here} processes were started on this machine, which has {count} device(s)"
        raise LaunchError(f"{what}; start at most one process per device (--num_processes)")
    return local


def refuse_shared(device: torch.device) -> None:
    """Refuse two processes on one device; LaunchError. Collective."""
    properties = torch.get_device_module(device).get_device_properties(device)
    mine = socket.gethostname(), str(getattr(properties, "uuid", ranks.rank()))
    every = ranks.gather_to_main(mine)

    def check() -> None:
        for one, count in Counter(every).items():
            if count > 1:
                others = " and ".join(str(rank) for rank, two in enumerate(every) if two == one)
                what = f"processes {others} were given the same device of {one[0]}"
                raise LaunchError(f"{what}; start at most one process per device (--num_processes)")

    ranks.on_main(check)


def slow_dtype(device: torch.device, dtype: str) -> str:
    """Return a warning where a CPU computes much slower in `dtype` than in float32, as one without
    instructions for bfloat16 does. Measured, in half a second there.
    """
    if device.type != "cpu" or dtype == "float32":
        return ""
    times = _layer_seconds(getattr(torch, dtype)) / _layer_seconds(torch.float32)
    if times < _SLOW:
        return ""
    what = f"linear layers take {times:.0f} times as long in {dtype} as in float32 on this CPU"
    return f"WARNING: {what}; for a run on it: --sharding.param_dtype float32"


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
def attention_order(device: torch.device, *, deterministic: bool) -> Iterator[None]:
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


def collect_garbage(step: int) -> None:
    """Collect reference cycles after every 50th step only, on all ranks at once: a collection at
    random holds up the others, and a full one takes a tenth of a second and more. From the first
    step of a run on accelerators on collectives have the timeout of steady steps, too.
    """
    watchdog.fit_timeouts()
    if gc.isenabled():  # the first step
        gc.collect()
        gc.freeze()  # modules, model and data: they stay
        gc.disable()
    elif step % _COLLECT_EVERY == 0:
        gc.collect(1)
