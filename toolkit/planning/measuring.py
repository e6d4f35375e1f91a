"""A step with real memory on this machine's device: what it peaks at, and how long it takes.

It runs as one rank of processes that do not exist, as the plan's does: what is sent goes nowhere,
and a device that is too small fails this process alone. No weights are read.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from toolkit.config.settings import RunConfig
from toolkit.errors import ConfigError
from toolkit.formats.metrics_file import STARTS, number, read_lines, read_metrics
from toolkit.models.peft_model import base_of
from toolkit.objectives import build
from toolkit.planning.calibration import calibration_of, remember
from toolkit.planning.changes import with_settings
from toolkit.planning.devices import Device, device_here, device_of, named_as
from toolkit.planning.estimates import estimate
from toolkit.planning.fake_ranks import planned_packing, sharded
from toolkit.planning.meter import Meter
from toolkit.planning.simulation import run_step, simulate


def measure(
    cfg: RunConfig, world_size: int, device: torch.device, rank: int = 0
) -> tuple[int, float]:
    """Return the bytes that tensors have at most in a step of `cfg` on `device` as `rank` of
    `world_size`, and its seconds without what ranks send, after one step to warm up.

    Needs the memory of the run, and seconds: weights are drawn, not read. Raises what torch does
    where there is too little memory.
    """
    found: list[tuple[int, float]] = []
    meter = Meter()

    def around(step: Callable[[], Any]) -> None:
        step()
        begun = time.perf_counter()
        if device.type == "cpu":
            step()
            seconds = time.perf_counter() - begun
            # What is held between two steps, which the meter was told of, and what a step adds.
            found.append((sum(meter.live.values()) + host_peak(step), seconds))
        else:
            api = torch.get_device_module(device)
            api.reset_peak_memory_stats(device)
            step()
            api.synchronize(device)
            seconds = time.perf_counter() - begun
            found.append((api.max_memory_allocated(device), seconds))

    where, backend = device.type, cfg.sharding.torch_compile_backend
    own = sharded(cfg, world_size, rank, where, mesh_type=where, compile_by=backend)
    with own as (made, _):
        objective = build(cfg, made.mesh, device.type)
        objective.shard_models()
        batch = objective.largest_batch(planned_packing(cfg, base_of(made.model)))
        run_step(made, objective, meter, device, batch, around=around)
    return found[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that a device, or the host, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def host_peak(step: Callable[[], Any]) -> int:
    """Return the most bytes that torch's allocator of host memory gives while `step` runs, above
    what it had given before. By torch's profiler, whose trace takes some 10 MB a layer.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = [e for e in events if e.get("name") == "[memory]"]
    first = min(memory, key=lambda e: e["ts"])["args"]
    before = first["Total Allocated"] - first["Bytes"]
    return max(e["args"]["Total Allocated"] for e in memory) - before


def calibrate_here(cfg: RunConfig, world_size: int, device_name: str | None = None) -> Device:
    """Measure a step of `cfg` on this machine's device, and remember what it says of the plan's;
    return the figures of the device. ConfigError: `device_name` is another device.

    Of many micro-batches two are run. Collectives, which go nowhere, are not corrected.
    """
    device, here = device_here(device_name)
    repeats = min(2, cfg.train.gradient_accumulation_steps)
    short = with_settings(cfg, "train", gradient_accumulation_steps=repeats)
    sim = simulate(short, world_size, device_type=here.type, gloo=False)
    peak, seconds = measure(short, world_size, here)
    planned = estimate(sim, short, world_size, device)
    batch = cfg.train.micro_batch, cfg.data.sequence_length
    source = f"a step of {batch[0]} x {batch[1]:,} tokens as one of {world_size} rank(s)"
    factors = calibration_of(sim, peak, seconds, planned.compute, source)
    remember(device, sim.model, cfg.sharding.param_dtype, factors)
    return device


def calibrate_by_run(run: Path, cfg: RunConfig, device_name: str | None = None) -> Device:
    """Remember what the metrics of a run with the settings `cfg` say of its plan; return the
    figures of its device. ConfigError: it has logged too little, or was on CPUs.
    """
    starts = read_lines(run / STARTS)
    measured = [(number(m, "memory_peak_bytes"), number(m, "step_time")) for m in read_metrics(run)]
    found = [(peak, seconds) for peak, seconds in measured if peak and seconds]
    if not starts or len(found) < 3:
        raise ConfigError(f"--calibrate {run}: expected a run with metrics of at least 3 steps")
    said, world = starts[-1].get("device"), starts[-1].get("world_size")
    if not isinstance(said, str) or type(world) is not int or world < 1:
        raise ConfigError(f"{run / STARTS} says of its last start no device and number of ranks")
    if said == "cpu":
        raise ConfigError(
            f"--calibrate {run} was on CPUs, where metrics hold the memory of the whole process; "
            "measure a step here: --calibrate alone"
        )
    known = device_name or named_as(said)
    if known is None:
        raise ConfigError(f"the figures of {said} are not known; give --device FILE")
    device = device_of(known)
    sim = simulate(cfg, world, device_type=device.kind, device_memory=int(device.memory))
    planned = estimate(sim, cfg, world, device)
    peak = round(max(peak for peak, _ in found))
    seconds = statistics.median(seconds for _, seconds in found[1:])  # the first warms up
    factors = calibration_of(sim, peak, seconds, planned.step, str(run))
    remember(device, sim.model, cfg.sharding.param_dtype, factors)
    return device
