"""Measure a step with real memory on this machine's device: its peak and its time.

The step runs as one rank of processes that do not exist, as in a plan. So collectives move nothing,
and a device that is too small fails this process alone. No weights are read.
"""

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from toolkit.config.settings import RunConfig
from toolkit.errors import ConfigError
from toolkit.formats.metrics_file import STARTS, get_finite_number, read_lines, read_metrics
from toolkit.objectives import build
from toolkit.planning.devices import Device, device_here, device_of, find_device_name
from toolkit.planning.estimates import calibrate, estimate, save_calibration
from toolkit.planning.fake_ranks import attend_as_run, sharded
from toolkit.planning.meter import Meter
from toolkit.planning.search import with_settings
from toolkit.planning.simulation import allocate_and_run_step, simulate


def measure(
    cfg: RunConfig, world_size: int, device: torch.device, rank: int = 0
) -> tuple[int, float]:
    """Run real steps as one rank of a fake process group, and measure one after a warm-up step.

    Needs the memory of the run, and takes seconds. Weights are random. Without enough memory,
    torch's error is raised; see `is_out_of_memory`.

    Returns:
        (peak of memory in bytes, seconds of a step without communication).
    """
    measured: list[tuple[int, float]] = []
    meter = Meter()

    def measure_step(step: Callable[[], Any]) -> None:
        step()
        start_time = time.perf_counter()
        if device.type == "cpu":
            step()
            seconds = time.perf_counter() - start_time
            # The meter knows what is held between two steps; the profiler adds what a step needs.
            measured.append((sum(meter.live.values()) + measure_host_peak(step), seconds))
        else:
            api = torch.get_device_module(device)
            api.reset_peak_memory_stats(device)
            step()
            api.synchronize(device)
            seconds = time.perf_counter() - start_time
            measured.append((api.max_memory_allocated(device), seconds))

    kind = device.type
    backend = cfg.sharding.torch_compile_backend
    with sharded(cfg, world_size, rank, kind, mesh_type=kind, compile_by=backend) as (
        sharded_model,
        _,
    ):
        objective = build(cfg, sharded_model.mesh, kind)
        objective.shard_models()
        batch = objective.largest_batch(attend_as_run(cfg, sharded_model))
        allocate_and_run_step(sharded_model, objective, meter, device, batch, around=measure_step)
    return measured[0]


def try_step(
    cfg: RunConfig, world_size: int, rank: int, device: torch.device, memory: int, reserve: int
) -> int | None:
    """Run a real step as one rank on a device, and check that it fits into limited memory.

    Call it in a separate process, because it creates a fake process group and limits the memory of
    its process.

    Args:
        cfg: the settings to try.
        world_size: the number of ranks of the run.
        rank: the rank to run as.
        device: the device, with an index unless it is the CPU.
        memory: bytes that the step may allocate.
        reserve: bytes of `memory` that must remain free at the peak.

    Returns:
        The peak in bytes; None if the step does not fit.
    """
    api = torch.get_device_module(device)
    limits_host = device.type == "cpu" and sys.platform == "linux"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
        share = min(1.0, memory / api.mem_get_info(device)[1])
        api.set_per_process_memory_fraction(share, device)
    if limits_host:
        limit = psutil.Process().memory_info().data + memory
        previous = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, previous[1]))
    try:
        peak = measure(cfg, world_size, device, rank)[0]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        # Sending the result to the parent process needs memory, too.
        if limits_host:
            resource.setrlimit(resource.RLIMIT_DATA, previous)
    return peak if peak + reserve <= memory else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error says that a device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    messages = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in messages)


def measure_host_peak(step: Callable[[], Any]) -> int:
    """Run `step`, and measure the most host memory that torch holds for it at one time, in bytes.

    Memory that was allocated before does not count. Uses torch's profiler, whose trace takes about
    10 MB per decoder layer.
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
    """Measure a step on this machine's device, and store a calibration for later plans.

    The step has at most two micro-batches. Communication is not measured, so it is not corrected.

    Args:
        cfg: the settings of the run.
        world_size: the number of ranks of the run.
        device_name: name or file of the device's figures; None: look them up.

    Returns:
        The figures of the device.

    Raises:
        ConfigError: torch sees no accelerator for `device_name`, or the figures are not known.
        PlanningError: the step cannot be planned, or its measurement does not match the plan.
    """
    figures, device = device_here(device_name)
    accumulation = min(2, cfg.train.gradient_accumulation_steps)
    short = with_settings(cfg, "train", gradient_accumulation_steps=accumulation)
    sim = simulate(short, world_size, device_type=device.type, gloo=False)
    peak, seconds = measure(short, world_size, device)
    planned = estimate(sim, short, world_size, figures)
    shape = f"{cfg.train.micro_batch} x {cfg.data.sequence_length:,} tokens"
    source = f"a step of {shape} as one of {world_size} rank(s)"
    calibration = calibrate(sim, peak, seconds, planned.compute, source)
    save_calibration(figures, sim.model, cfg.sharding.param_dtype, calibration)
    return figures


def calibrate_by_run(run: Path, cfg: RunConfig, device_name: str | None = None) -> Device:
    """Compare the logged metrics of a run with its plan, and store a calibration for later plans.

    Uses the largest peak and the median step time, without the first step.

    Args:
        run: the run's output_dir.
        cfg: the run's settings.
        device_name: name or file of the device's figures; None: look them up.

    Returns:
        The figures of the run's device.

    Raises:
        ConfigError: the run has metrics of fewer than three steps, used CPUs, or its device is not
            known.
        PlanningError: the run cannot be planned, or its metrics do not match the plan.
    """
    starts = read_lines(run / STARTS)
    numbers = [
        (get_finite_number(m, "memory_peak_bytes"), get_finite_number(m, "step_time"))
        for m in read_metrics(run)
    ]
    measured = [(peak, seconds) for peak, seconds in numbers if peak and seconds]
    if not starts or len(measured) < 3:
        raise ConfigError(f"--calibrate {run}: expected a run with metrics of at least 3 steps")
    torch_name = starts[-1].get("device")
    world_size = starts[-1].get("world_size")
    if not isinstance(torch_name, str) or type(world_size) is not int or world_size < 1:
        raise ConfigError(
            f"{run / STARTS}: expected device and number of ranks of the last start; give another "
            "run"
        )
    if torch_name == "cpu":
        raise ConfigError(
            f"--calibrate {run} was on CPUs, whose metrics hold the memory of the entire process; "
            "measure a step here: --calibrate alone"
        )
    known_name = device_name or find_device_name(torch_name)
    if known_name is None:
        raise ConfigError(f"the figures of {torch_name} are not known; give --device FILE")
    device = device_of(known_name)
    sim = simulate(cfg, world_size, device_type=device.kind, device_memory=int(device.memory))
    planned = estimate(sim, cfg, world_size, device)
    peak = round(max(peak for peak, _ in measured))
    # The first step warms up.
    seconds = statistics.median(seconds for _, seconds in measured[1:])
    calibration = calibrate(sim, peak, seconds, planned.step, str(run))
    save_calibration(device, sim.model, cfg.sharding.param_dtype, calibration)
    return device
