"""Estimate seconds, host memory and traffic of a simulated step by the figures of a device.

A calibration corrects the estimates by a measured step. Calibrations are stored in
`toolkit/calibration.yaml` of the user's cache folder (XDG_CACHE_HOME, else ~/.cache), by device,
class of the model, dtype of the computation and version of torch.
"""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import yaml

from toolkit.config.settings import RunConfig
from toolkit.errors import ConfigError
from toolkit.formats.synced_files import replace_on_exit
from toolkit.mesh import data_ranks
from toolkit.parsing import read_yaml
from toolkit.planning.devices import KERNEL, LINKS, MEMORY, PRODUCTS, Device
from toolkit.planning.meter import Work
from toolkit.planning.simulation import REFERENCE_PASS, PlanningError, Simulation

RESERVE = 1_500_000_000
"""Assumed bytes of the device's context and of the allocator's fragments."""
NCCL = 1_000_000_000
"""Assumed bytes of a communicator's buffers, which no allocator of torch counts.

1.6 GB of a device are in use with one communicator and 6 GB with three, including the context
(https://github.com/NVIDIA/nccl/issues/864). The size grows with the number of channels, which
depends on the links (issue 986 of NCCL).
"""
_PROCESS = 1_000_000_000  # assumed bytes of host memory: Python with its libraries
_MAX_PLAUSIBLE_FACTOR = 5.0  # of a measurement over its plan; beyond, the step was another one
_MAX_STORED_FACTOR = 1e6


# ---- Calibration ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """Factors by which a measured step exceeded its plan. Later plans are multiplied by them."""

    memory: float = 1.0
    """Factor of the memory beyond parameters, gradients and optimizer state, which are exact."""
    time: float = 1.0
    """Factor of the time of computing."""
    source: str = ""
    """The step or the run that was measured."""

    def peak_bytes(self, sim: Simulation) -> int:
        """Compute the peak of a simulated step in bytes, corrected by the factor for memory."""
        peaks = sim.peaks.values()
        return max(p.nbytes + round((self.memory - 1) * p.working) for p in peaks)


def calibrate(
    sim: Simulation, peak_bytes: int, seconds: float, planned_seconds: float, source: str
) -> Calibration:
    """Compute the factors with which a plan agrees with a measurement. Stores nothing.

    Args:
        sim: the simulated step.
        peak_bytes: the measured peak of memory.
        seconds: the measured time.
        planned_seconds: the same time in the plan, without calibration.
        source: name of the measured step or run, for reports.

    Raises:
        PlanningError: the memory beyond parameters, gradients and optimizer state differs by a
            factor over 5, so another step was measured.
    """
    # The largest factor with which no phase exceeds the measured peak. What is measured is a step.
    peaks = [p for name, p in sim.peaks.items() if name != REFERENCE_PASS]
    memory = min((peak_bytes - (p.nbytes - p.working)) / p.working for p in peaks if p.working)
    if not 1 / _MAX_PLAUSIBLE_FACTOR <= memory <= _MAX_PLAUSIBLE_FACTOR:
        raise PlanningError(
            f"{source} peaked at {peak_bytes / 1e9:,.3f} GB and its plan at "
            f"{sim.peak.nbytes / 1e9:,.3f} GB, so it is not the step that was planned; measure a "
            "run with the same settings"
        )
    return Calibration(round(memory, 4), round(seconds / planned_seconds, 4), source)


def calibration_file() -> Path:
    """Return the path of the file that stores calibrations, in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "toolkit", "calibration.yaml")


def load_calibration(device: Device, model: str, dtype: str) -> Calibration | None:
    """Load the stored calibration for a device, model and dtype under the current torch version.

    Args:
        device: its name is a part of the key.
        model: class of the model.
        dtype: compute dtype.

    Returns:
        The calibration; None if none is stored.

    Raises:
        ConfigError: the file of calibrations is damaged.
    """
    entry = _read_calibrations().get(_calibration_key(device, model, dtype))
    if entry is None:
        return None
    try:
        calibration = Calibration(
            float(entry["memory"]), float(entry["time"]), str(entry["source"])
        )
        factors = (calibration.memory, calibration.time)
        if not all(1 / _MAX_STORED_FACTOR <= f <= _MAX_STORED_FACTOR for f in factors):
            raise ValueError(f"factors of {factors[0]} and {factors[1]}")
        return calibration
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{calibration_file()} is damaged ({error!r}); delete it") from error


def save_calibration(device: Device, model: str, dtype: str, calibration: Calibration) -> None:
    """Store a calibration in `calibration_file`, in place of an earlier one with the same key.

    The key consists of device, class of model, dtype and torch version.
    """
    entries = _read_calibrations() | {
        _calibration_key(device, model, dtype): asdict(calibration),
    }
    with replace_on_exit(calibration_file()) as scratch:
        scratch.write_text(yaml.safe_dump(entries, width=200), "utf-8")


def _calibration_key(device: Device, model: str, dtype: str) -> str:
    """Format the key of a calibration: device, model, dtype and torch version."""
    return f"{device.name}, {model}, {dtype}, torch {torch.__version__}"


def _read_calibrations() -> dict:
    """Read all stored calibrations; {} without a file. Raises a ConfigError if it is no mapping."""
    file = calibration_file()
    entries = read_yaml(file, ConfigError) if file.is_file() else {}
    if not isinstance(entries, dict):
        raise ConfigError(f"{file} is damaged (not a mapping); delete it")
    return entries


# ---- Estimates -----------------------------------------------------------------------------------


def list_reserves(device: Device, mesh: tuple[int, int]) -> dict[str, int]:
    """List assumed memory that no tensor takes, such as CUDA's context and NCCL's buffers.

    Args:
        device: the figures of the device.
        mesh: (dp_replicate, dp_shard).

    Returns:
        Name of a reserve, for reports -> bytes on each device.
    """
    if device.kind == "cpu":
        return {"process": _PROCESS}
    reserves = {"context, fragments": RESERVE}
    # One communicator for all ranks and, if the mesh has two dimensions, one for each of them.
    if mesh != (1, 1):
        communicators = 3 if mesh[0] > 1 else 1
        plural = "s" * (communicators > 1)
        reserves[f"NCCL, {communicators} communicator{plural}"] = communicators * NCCL
    return reserves


def reserved_bytes(device: Device, mesh: tuple[int, int]) -> int:
    """Sum the assumed bytes of `list_reserves`."""
    return sum(list_reserves(device, mesh).values())


@dataclass(frozen=True)
class Estimate:
    """Estimated memory (bytes), time (seconds) and traffic (bytes) of a run on a device.

    Assumes that a device reaches a fixed share of its peak speed; see `devices`.
    """

    memory: int
    """Bytes of a device: the calibrated peak of the simulated step, plus `reserved_bytes`."""
    compute: float
    """Seconds of a step for its operations alone."""
    communication: float
    """Seconds of a step for all collectives, one after the other."""
    copies: float
    """Seconds of a step for copies to host memory and back."""
    step: float
    """Seconds of a step. Operations, collectives and copies overlap in part."""
    gathered: int
    """Bytes that a rank sends in a step to gather parameters."""
    reduced: int
    """Bytes that a rank sends in a step to reduce gradients."""
    tokens_per_step: int
    """Positions of the global batch, including padding."""
    mfu: float
    host_at_load: int
    """Bytes of host memory of a process while it loads the model."""
    host_at_save: int
    """Bytes of host memory of a process while it saves a checkpoint."""
    world_size: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together, including padding."""
        return self.tokens_per_step / self.step

    @property
    def device_time(self) -> float:
        """Device-seconds per token: step time x devices / tokens. Plans are compared by it."""
        return self.step * self.world_size / self.tokens_per_step


@dataclass
class _Sent:
    """Traffic of one rank in a phase of a step."""

    seconds: list[float] = field(default_factory=list)
    """Time of each collective that overlaps with computation."""
    exchanging: float = 0.0
    """Seconds of all-to-alls. Attention waits for its heads, and experts for their tokens, so
    nothing overlaps with them."""
    gathered: int = 0
    """Bytes of all-gathers."""
    reduced: int = 0
    """Bytes of reductions."""


def _count_sent(
    work: Work, sim: Simulation, cfg: RunConfig, world_size: int, device: Device
) -> _Sent:
    """Count what a rank sends in a phase, and estimate how long that takes."""
    result = _Sent()
    # The settings exclude each other.
    parts = max(cfg.sharding.context_parallel, cfg.sharding.expert_parallel)
    for (kind, nbytes, ranks), count in work.traffic.items():
        if kind == "all_to_all":
            link = LINKS * _link_between(parts, device)
            result.exchanging += count * nbytes * (parts - 1) / parts / link
            continue
        group = ranks or (sim.mesh[0] if sim.mesh[0] > 1 else world_size)
        sent = nbytes * (group - 1) / group * (2 if kind == "all_reduce" else 1)
        # Replicas are on other nodes, if there are several nodes.
        span = group if ranks else world_size
        if ranks * cfg.sharding.expert_parallel == sim.mesh[1]:
            # Ranks that shard the same experts are not consecutive; see `mesh`.
            span = sim.mesh[1]
        result.seconds += [sent / (LINKS * _link_between(span, device))] * count
        if kind == "all_gather":
            result.gathered += int(sent * count)
        else:
            result.reduced += int(sent * count)
    return result


def _link_between(span: int, device: Device) -> float:
    """Return the bytes per second between ranks of a group; `span`: consecutive ranks around it."""
    return device.link if span <= device.per_node else device.network


def estimate(
    sim: Simulation,
    cfg: RunConfig,
    world_size: int,
    device: Device,
    calibration: Calibration | None = None,
) -> Estimate:
    """Estimate the memory and the time of a run from one simulated step.

    Args:
        sim: the simulated step.
        cfg: the settings of the run.
        world_size: the number of ranks.
        device: the figures of their devices.
        calibration: factors that correct memory and time; None: no correction.
    """
    factors = calibration or Calibration()
    compute = communication = step = 0.0
    gathered = reduced = 0
    for name, work in sim.work.items():
        # With `cpu_offload` the optimizer runs on the host.
        on_host = sim.sharding.cpu_offload and name == "step"
        computing = factors.time * _compute_seconds(work, device, on_host)
        sent = _count_sent(work, sim, cfg, world_size, device)
        gathered += sent.gathered
        reduced += sent.reduced
        sending = sum(sent.seconds)
        # Collectives overlap with the layers, except the first and the last one.
        exposed = max(sent.seconds, default=0.0) * (name != "step")
        compute += computing
        communication += sending + sent.exchanging
        step += max(computing, sending) + exposed + sent.exchanging
    offloaded = 0
    if sim.sharding.cpu_offload:
        offloaded = sim.state.parameters + sim.state.gradients
    accumulation = cfg.train.gradient_accumulation_steps
    host_activations = max(p.kinds.get("host", 0) for p in sim.peaks.values())
    copies = (offloaded + 2 * host_activations * accumulation) / device.host_link
    step = step + copies if offloaded else max(step, copies)
    rank_tokens = cfg.train.micro_batch * cfg.data.sequence_length * accumulation
    flops = sim.model_flops_per_token * rank_tokens / cfg.sharding.context_parallel
    peak_flops = device.bf16 if cfg.sharding.param_dtype == "bfloat16" else device.fp32
    host_bytes = _PROCESS + sim.offloaded
    stages = cfg.checkpoint.async_save
    if stages == "auto":
        # A run stages the tensors of a save if host memory has room for them.
        stages = device.kind != "cpu" and not sim.sharding.cpu_offload and not cfg.adapters
    staged = sim.state.parameters + sim.state.optimizer if stages else 0
    return Estimate(
        memory=factors.peak_bytes(sim) + reserved_bytes(device, sim.mesh),
        compute=compute,
        communication=communication,
        copies=copies,
        step=step,
        gathered=gathered,
        reduced=reduced,
        tokens_per_step=rank_tokens * data_ranks(world_size, cfg.sharding),
        mfu=flops / (step * peak_flops),
        host_at_load=host_bytes + sim.largest_tensor,
        host_at_save=host_bytes + (staged or sim.largest_tensor),
        world_size=world_size,
    )


def _compute_seconds(work: Work, device: Device, on_host: bool) -> float:
    """Estimate the seconds of all operations, one after the other.

    An operation takes as long as its arithmetic, its memory access or the least time of a kernel,
    whichever is longest.

    Args:
        work: the operations.
        device: the figures of the device.
        on_host: use the bandwidth of host memory.
    """
    bandwidth = device.host_bandwidth if on_host else device.bandwidth * MEMORY
    seconds = 0.0
    for (flops, nbytes, is_half), count in work.operations.items():
        peak_flops = device.bf16 if is_half else device.fp32
        seconds += count * max(flops / (PRODUCTS * peak_flops), nbytes / bandwidth, KERNEL)
    return seconds
