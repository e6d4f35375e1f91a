"""From a simulated step to seconds, host memory and traffic: estimates, by a device's figures."""

from dataclasses import dataclass

from toolkit.config.settings import RunConfig
from toolkit.planning.calibration import Calibration
from toolkit.planning.devices import KERNEL, LINKS, MEMORY, PRODUCTS, Device
from toolkit.planning.simulation import Simulation

RESERVE = 1_500_000_000
"""Bytes, assumed: the device's context, fragments of the allocator."""
NCCL = 1_000_000_000
"""Bytes of a communicator's buffers, which no allocator of torch counts; assumed. 1.6 GB are in use
of a device with one, 6 GB with three (https://github.com/NVIDIA/nccl/issues/864), contexts with
them; it grows with the channels, which follow the links (issue 986 there).
"""
_PROCESS = 1_000_000_000  # bytes of host memory, assumed: Python with its libraries


def reserves(device: Device, mesh: tuple[int, int]) -> dict[str, int]:
    """Return what is assumed beside tensors on a device of a (dp_replicate, dp_shard) mesh: name ->
    bytes.
    """
    if device.kind == "cpu":
        return {"process": _PROCESS}
    # All ranks, and, where there are two, each dimension of the mesh.
    groups = 0 if mesh == (1, 1) else 3 if mesh[0] > 1 else 1
    communicators = f"NCCL, {groups} communicator{'s' * (groups > 1)}"
    return {"context, fragments": RESERVE} | ({communicators: groups * NCCL} if groups else {})


def reserve_of(device: Device, mesh: tuple[int, int]) -> int:
    """Return the bytes that are assumed beside tensors; see `reserves`."""
    return sum(reserves(device, mesh).values())


@dataclass(frozen=True)
class Estimate:
    """What a run takes on a device, by assumed shares of its peaks (`devices`). Bytes, seconds."""

    memory: int
    """Of a device: the peak of the simulated step, as calibrated, and `reserve_of`."""
    compute: float
    """Of a step: operations alone."""
    communication: float
    """Of a step: all collectives, one after the other."""
    copies: float
    """Of a step: to host memory and back, and an optimizer there."""
    step: float
    """What does not overlap added."""
    gathered: int
    """Sent by a rank in a step, to gather parameters."""
    reduced: int
    """Sent by a rank in a step, to reduce gradients."""
    tokens_per_step: int
    """Positions of the global batch, padding too."""
    mfu: float
    host_at_load: int
    """Of a process."""
    host_at_save: int
    world_size: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step

    @property
    def device_time(self) -> float:
        """Device-seconds of a token: what a change costs."""
        return self.step * self.world_size / self.tokens_per_step


def estimate(
    sim: Simulation,
    cfg: RunConfig,
    world_size: int,
    device: Device,
    calibration: Calibration | None = None,
) -> Estimate:
    """Return the memory and the time of a run, corrected by `calibration`; see `Estimate`."""
    measured = calibration or Calibration()
    compute = communication = step = copies = 0.0
    sent = {"gather": 0, "reduce": 0}
    for name, work in sim.work.items():
        slow = sim.sharding.cpu_offload and name == "step"  # the optimizer runs on the host
        bandwidth = device.host_bandwidth if slow else device.bandwidth * MEMORY
        computed = sum(
            count
            * max(
                flops / (PRODUCTS * (device.bf16 if half else device.fp32)),
                nbytes / bandwidth,
                KERNEL,
            )
            for (flops, nbytes, half), count in work.operations.items()
        )
        times = []
        for (kind, nbytes, ranks), count in work.traffic.items():
            over = ranks or (sim.mesh[0] if sim.mesh[0] > 1 else world_size)
            share = nbytes * (over - 1) / over * (2 if kind == "all_reduce" else 1)
            # Replicas lie on other nodes, where there are some.
            inside = (over if ranks else world_size) <= device.per_node
            link = LINKS * (device.link if inside else device.network)
            times += [share / link] * count
            sent["gather" if kind == "all_gather" else "reduce"] += int(share * count)
        moved = sum(times)
        computed *= measured.time
        # Gathering and reducing run beside the layers, but for the first and the last.
        together = max(computed, moved) + max(times, default=0.0) * (name != "step")
        compute, communication = compute + computed, communication + moved
        step += together
    parts = sim.state.parameters + sim.state.gradients if sim.sharding.cpu_offload else 0
    repeats = cfg.train.gradient_accumulation_steps
    activations = max(p.kinds.get("host", 0) for p in sim.peaks.values())
    copies = (parts + 2 * activations * repeats) / device.host_link
    step = max(step, copies) if not parts else step + copies
    tokens = cfg.train.micro_batch * cfg.data.sequence_length * repeats
    flops = sim.model_flops_per_token * tokens
    peak = device.bf16 if cfg.sharding.param_dtype == "bfloat16" else device.fp32
    held = _PROCESS + sim.offloaded
    copied = cfg.checkpoint.async_save
    if copied == "auto":  # where they fit, which a run sees
        copied = device.kind != "cpu" and not sim.sharding.cpu_offload and not cfg.adapters
    staged = sim.state.parameters + sim.state.optimizer if copied else 0
    return Estimate(
        memory=measured.peak(sim) + reserve_of(device, sim.mesh),
        compute=compute,
        communication=communication,
        copies=copies,
        step=step,
        gathered=sent["gather"],
        reduced=sent["reduce"],
        tokens_per_step=tokens * world_size,
        mfu=flops / (step * peak),
        host_at_load=held + sim.largest_tensor,
        host_at_save=held + (staged or sim.largest_tensor),
        world_size=world_size,
    )
