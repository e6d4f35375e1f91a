"""Changes to a run that save memory, each planned anew, and layouts to compare."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from toolkit.config.data import FinetuneDataConfig
from toolkit.config.settings import (
    FinetuneConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    RunConfig,
)
from toolkit.errors import ConfigError, ToolkitError, one_line
from toolkit.planning.calibration import Calibration, remembered
from toolkit.planning.devices import Device
from toolkit.planning.estimates import Estimate, estimate, reserve_of
from toolkit.planning.simulation import Simulation, simulate

# Changes of what a step computes; what a rank holds between two steps stays with them.
_OF_STEPS = (
    *("per_device_train_batch_size", "reshard_after_forward", "accumulation"),
    *("activation_checkpointing", "activation_offload"),
)
# Sections and settings that both recipes have alike.
_SHARED = ("sharding", "optim", "checkpoint", "metrics", "hub", "output_dir", "seed")


@dataclass(frozen=True)
class Plan:
    """A run as it would be with one change, or several, or none."""

    change: str
    cfg: RunConfig
    world_size: int
    sim: Simulation
    estimate: Estimate
    kept: bool = True
    """Whether what is trained, and how it is rounded, stays as it is."""
    calibration: Calibration | None = None
    """What corrected the estimate."""

    def fits(self, memory: int | None) -> bool:
        return memory is None or self.estimate.memory <= memory


@dataclass(frozen=True)
class _Change:
    name: str
    cfg: RunConfig
    world_size: int
    kept: bool = True

    @property
    def kind(self) -> str:
        """The setting that it is about."""
        return self.name.split()[0]


def make_plan(
    cfg: RunConfig,
    world_size: int,
    device: Device,
    memory: int | None,
    change: str = "",
    kept: bool = True,
) -> Plan:
    """Return the plan of `cfg`; costs a simulation."""
    most = memory or int(device.memory)
    sim = simulate(cfg, world_size, device_type=device.kind, device_memory=most)
    calibration = remembered(device, sim.model, cfg.sharding.param_dtype)
    found = estimate(sim, cfg, world_size, device, calibration)
    return Plan(change, cfg, world_size, sim, found, kept, calibration)


def remedies(
    plan: Plan,
    device: Device,
    memory: int,
    say: Callable[[str], object],
    *,
    patience: float = math.inf,
    at_least_one: bool = False,
) -> tuple[list[Plan], list[tuple[str, str]]]:
    """Return changes of a run that does not fit, each planned anew, and those that cannot be
    planned with the reason.

    First what fits and keeps what is trained, the cheapest first. Where no single change fits, one
    is put on another, in the order of their usual cost, and each stage is returned. After
    `patience` seconds no further change is planned; with `at_least_one` not before one fits.
    """
    end = time.monotonic() + patience
    found, failed = list[Plan](), list[tuple[str, str]]()
    for change in _helpful(plan, device, memory):
        waits = at_least_one and not any(p.fits(memory) for p in found)
        if time.monotonic() > end and not waits:
            break
        say(change.name)
        try:
            new = make_plan(change.cfg, change.world_size, device, memory, change.name, change.kept)
        except ToolkitError as error:
            failed.append((change.name, one_line(error)))
            continue
        found.append(new)
    fitting = [p for p in found if p.fits(memory)]
    if not any(p.kept for p in fitting) and (
        (at_least_one and not fitting) or time.monotonic() < end
    ):
        fitting += _together(plan, found, device, memory, say)
    listed = fitting or sorted(found, key=lambda p: p.estimate.memory)
    return sorted(listed, key=lambda p: (not p.fits(memory), not p.kept, _cost(p))), failed


def _cost(plan: Plan) -> float:
    return plan.estimate.device_time


def _helpful(plan: Plan, device: Device, memory: int) -> list[_Change]:
    """Return the changes of a run without those that cannot make it fit: of a step, where what is
    held between two leaves no room; moving to the host what is there.
    """
    held = 0 if plan.cfg.sharding.cpu_offload else plan.sim.state.total
    futile = set() if held + reserve_of(device, plan.sim.mesh) < memory else {*_OF_STEPS}
    if device.kind == "cpu":
        futile |= {"cpu_offload", "activation_offload"}
    return [c for c in _changes(plan.cfg, plan.world_size) if c.kind not in futile]


def _together(
    plan: Plan, alone: list[Plan], device: Device, memory: int, say: Callable[[str], object]
) -> list[Plan]:
    """Return the run with one change after the other put on, up to the first that fits; `alone`
    are those with one.
    """
    now, names, refused = plan, list[str](), set[str]()
    while now.world_size < 64 * plan.world_size:
        possible = (c for c in _helpful(now, device, memory) if c.kept and c.name not in refused)
        if (change := next(possible, None)) is None:
            break
        put_on = [n for n in names if n.split()[0] != change.kind] + [change.name]
        same = (p for p in alone if (p.cfg, p.world_size) == (change.cfg, change.world_size))
        if (new := next(same, None)) is None:
            name = " + ".join(put_on)
            say(name)
            try:
                new = make_plan(change.cfg, change.world_size, device, memory, name)
            except ToolkitError as error:  # the next is put on what went before
                say(f"{change.name}: {one_line(error)}")
                refused.add(change.name)
                continue
        now, names = new, put_on
        if new.fits(memory):
            return [new]
    return []


def with_settings(cfg: Any, section: str, **settings: Any) -> Any:
    """Return a config with other settings of one of its sections."""
    return replace(cfg, **{section: replace(getattr(cfg, section), **settings)})


def as_finetuning(cfg: RunConfig) -> FinetuneConfig | None:
    """Return the same run by `toolkit finetune`, which has adapters; None: its weights are random,
    or one of its settings does not go with that.
    """
    if isinstance(cfg, FinetuneConfig) or cfg.model.init == "random":
        return cfg if isinstance(cfg, FinetuneConfig) else None
    with contextlib.suppress(ConfigError):
        return FinetuneConfig(
            model=FinetuneModelConfig(**vars(cfg.model)),
            data=FinetuneDataConfig(**vars(cfg.data)),
            train=FinetuneTrainConfig(**vars(cfg.train)),
            **{name: getattr(cfg, name) for name in _SHARED},
        )
    return None


def _changes(cfg: RunConfig, world: int) -> list[_Change]:
    """Return the changes of a run, by what they usually cost, the cheapest first, without those
    that its other settings refuse.
    """
    found = list[_Change]()

    def change(
        name: str, sections: dict[str, dict[str, Any]], ranks: int = world, kept: bool = True
    ) -> None:
        new = cfg
        with contextlib.suppress(ConfigError):
            for section, settings in sections.items():
                new = with_settings(new, section, **settings)
            found.append(_Change(name, new, ranks, kept))

    size, repeats = cfg.train.micro_batch, cfg.train.gradient_accumulation_steps
    if size > 1:  # the global batch stays
        factor = 2 if size % 2 == 0 else size
        less, more = size // factor, repeats * factor
        batch = {"per_device_train_batch_size": less, "gradient_accumulation_steps": more}
        change(f"per_device_train_batch_size {less}, accumulation {more}", {"train": batch})
    sharding = cfg.sharding
    if sharding.reshard_after_forward not in ("auto", True):
        change("reshard_after_forward true", {"sharding": {"reshard_after_forward": True}})
    elif repeats > 1 and sharding.accumulation != "reduce_each":
        change("accumulation reduce_each", {"sharding": {"accumulation": "reduce_each"}})
    if sharding.dp_replicate > 1 or sharding.dp_shard not in (-1, world):
        change(f"dp_shard {world}", {"sharding": {"dp_replicate": 1, "dp_shard": -1}})
    now, full = sharding.activation_checkpointing, {"activation_checkpointing": "full"}
    if now in (False, "none") and cfg.model.kernels == "none":
        selective = {"activation_checkpointing": "selective"}
        change("activation_checkpointing selective", {"sharding": selective})
    if now not in ("full", True, 1):
        change("activation_checkpointing full", {"sharding": full})
    if cfg.optim.optim == "adamw_torch_fused":
        change("optim adamw_8bit", {"optim": {"optim": "adamw_8bit"}}, kept=False)
    if not sharding.activation_offload and sharding.torch_compile in (False, "none", "auto"):
        name = "activation_offload with activation_checkpointing full"
        change(name, {"sharding": {**full, "activation_offload": True}})
    if not sharding.cpu_offload and sharding.frozen != "replicated":
        change("cpu_offload true", {"sharding": {"cpu_offload": True}})
    if sharding.dp_shard != 1:
        half, doubled = dict[str, int](), ""
        if repeats % 2 == 0:
            half = {"gradient_accumulation_steps": repeats // 2}
        elif size % 2 == 0:
            half = {"per_device_train_batch_size": size // 2}
        else:
            doubled = ", the global batch doubled"
        more_devices = {"sharding": {"dp_shard": -1}, "train": half}
        change(f"devices {2 * world}{doubled}", more_devices, ranks=2 * world)
    tuned = as_finetuning(cfg)
    if tuned is not None:
        cfg = tuned
        lora = dict[str, Any]() if cfg.lora.r else {"r": 16}
        model = dict[str, Any]() if cfg.lora.r else {"dtype": None}
        if lora:
            change("lora.r 16", {"lora": lora, "model": model}, kept=False)
        if not cfg.lora.load_in_4bit:
            four_bits = {"lora": {**lora, "load_in_4bit": True}, "model": model}
            change(f"lora.r {cfg.lora.r or 16}, lora.load_in_4bit", four_bits, kept=False)
    return found


def layouts(
    plan: Plan, device: Device, memory: int | None, say: Callable[[str], object]
) -> list[Plan]:
    """Return the run on other meshes and with other recomputation, the fastest that fit first."""
    world = plan.world_size
    shards = {world, 1, *(s for s in (device.per_node, world // 2) if s and world % s == 0)}
    found = []
    for shard in sorted(shards, reverse=True):
        for recomputed in ("none", "selective", "full"):
            settings: dict[str, Any] = {"dp_replicate": world // shard, "dp_shard": shard}
            name = f"{world // shard} x {shard}, recompute {recomputed}"
            say(name)
            offload = plan.cfg.sharding.activation_offload and recomputed != "none"
            settings |= {"activation_checkpointing": recomputed, "activation_offload": offload}
            try:
                cfg = with_settings(plan.cfg, "sharding", **settings)
                found.append(make_plan(cfg, world, device, memory, name))
            except ToolkitError as error:  # as of a model that one of them does not go with
                say(f"{name}: {one_line(error)}")
    return sorted(found, key=lambda p: (not p.fits(memory), _cost(p)))
