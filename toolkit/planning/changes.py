"""Changes to a run that save memory, each planned anew, and layouts to compare."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from toolkit.config.settings import FinetuneConfig
from toolkit.errors import ConfigError, ToolkitError, one_line
from toolkit.planning.calibration import Calibration, remembered
from toolkit.planning.devices import Device
from toolkit.planning.estimates import Estimate, estimate
from toolkit.planning.simulation import Config, Simulation, simulate

_NONE: tuple = (False, "none")


@dataclass(frozen=True)
class Plan:
    """A run as it would be with one change, or several, or none."""

    change: str
    cfg: Config
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
    cfg: Config
    world_size: int
    kept: bool = True


_Kind = Callable[[Config, int], Iterator[_Change]]


def make_plan(
    cfg: Config,
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
) -> tuple[list[Plan], list[tuple[str, str]]]:
    """Return changes of a run that does not fit, each planned anew, and those that cannot be
    planned with the reason.

    First what fits and keeps what is trained, the cheapest first. Where no single change fits, one
    is put on another, in the order of their usual cost, and each stage is returned. After
    `patience` seconds no further change is planned.
    """
    end = time.monotonic() + patience
    found, failed = list[Plan](), list[tuple[str, str]]()
    # What a rank holds between two steps stays with changes of what a step computes.
    of_steps = plan.cfg.sharding.cpu_offload or plan.sim.state.total < memory
    for change in _changes(plan.cfg, plan.world_size, of_steps):
        if time.monotonic() > end:
            break
        say(change.name)
        try:
            new = make_plan(change.cfg, change.world_size, device, memory, change.name, change.kept)
        except ToolkitError as error:
            failed.append((change.name, one_line(error)))
            continue
        found.append(new)
    fitting = [p for p in found if p.fits(memory)]
    if not any(p.kept for p in fitting) and time.monotonic() < end:
        fitting += _together(plan, device, memory, say)
    listed = fitting or sorted(found, key=lambda p: p.estimate.memory)
    return sorted(listed, key=lambda p: (not p.fits(memory), not p.kept, _cost(p))), failed


def _cost(plan: Plan) -> float:
    return plan.estimate.device_time


def _together(
    plan: Plan, device: Device, memory: int, say: Callable[[str], object]
) -> Iterator[Plan]:
    """Yield the run with one change after the other put on, up to the first that fits."""
    cfg, world, names = plan.cfg, plan.world_size, list[str]()
    for kind in _ORDER:
        while change := next((c for c in _possible(kind, cfg, world) if c.kept), None):
            put_on = [n for n in names if n.split()[0] != change.name.split()[0]] + [change.name]
            say(" + ".join(put_on))
            try:
                new = make_plan(change.cfg, change.world_size, device, memory, " + ".join(put_on))
            except ToolkitError as error:  # the next kind is put on what went before
                say(f"{change.name}: {one_line(error)}")
                break
            cfg, world, names = change.cfg, change.world_size, put_on
            if new.fits(memory):
                yield new
                return
            if kind is _more_devices and world >= 64 * plan.world_size:
                break


def _changes(cfg: Config, world: int, of_steps: bool) -> Iterator[_Change]:
    for kind in (*_ORDER, _adapters):
        if of_steps or kind not in _OF_STEPS:
            yield from _possible(kind, cfg, world)


def _possible(kind: _Kind, cfg: Config, world: int) -> Iterator[_Change]:
    """Yield the changes of a kind up to one that the other settings refuse."""
    with contextlib.suppress(ConfigError):
        yield from kind(cfg, world)


def with_settings(cfg: Any, section: str, **settings: Any) -> Any:
    """Return a config with other settings of one of its sections."""
    return replace(cfg, **{section: replace(getattr(cfg, section), **settings)})


def _smaller_batch(cfg: Config, world: int) -> Iterator[_Change]:
    size, repeats = (
        cfg.train.micro_batch,
        cfg.train.gradient_accumulation_steps,
    )
    if size > 1:  # the global batch stays
        factor = 2 if size % 2 == 0 else size
        new = {
            "per_device_train_batch_size": size // factor,
            "gradient_accumulation_steps": repeats * factor,
        }
        name = f"per_device_train_batch_size {size // factor}, accumulation {repeats * factor}"
        yield _Change(name, with_settings(cfg, "train", **new), world)


def _selective_recomputation(cfg: Config, world: int) -> Iterator[_Change]:
    if cfg.sharding.activation_checkpointing in _NONE and cfg.model.kernels == "none":
        new = with_settings(cfg, "sharding", activation_checkpointing="selective")
        yield _Change("activation_checkpointing selective", new, world)


def _recomputation(cfg: Config, world: int) -> Iterator[_Change]:
    now = cfg.sharding.activation_checkpointing
    if now not in ("full", True, 1):
        new = with_settings(cfg, "sharding", activation_checkpointing="full")
        yield _Change("activation_checkpointing full", new, world)


def _resharding(cfg: Config, world: int) -> Iterator[_Change]:
    sharding = cfg.sharding
    if sharding.reshard_after_forward not in ("auto", True):
        new = with_settings(cfg, "sharding", reshard_after_forward=True)
        yield _Change("reshard_after_forward true", new, world)
    elif cfg.train.gradient_accumulation_steps > 1 and sharding.accumulation != "reduce_each":
        new = with_settings(cfg, "sharding", accumulation="reduce_each")
        yield _Change("accumulation reduce_each", new, world)


def _fewer_replicas(cfg: Config, world: int) -> Iterator[_Change]:
    if cfg.sharding.dp_replicate > 1 or cfg.sharding.dp_shard not in (-1, world):
        new = with_settings(cfg, "sharding", dp_replicate=1, dp_shard=-1)
        yield _Change(f"dp_shard {world}", new, world)


def _offloaded_activations(cfg: Config, world: int) -> Iterator[_Change]:
    sharding = cfg.sharding
    if not sharding.activation_offload and sharding.torch_compile in (False, "none", "auto"):
        new = {"activation_checkpointing": "full", "activation_offload": True}
        name = "activation_offload with activation_checkpointing full"
        yield _Change(name, with_settings(cfg, "sharding", **new), world)


def _offloaded_state(cfg: Config, world: int) -> Iterator[_Change]:
    if not cfg.sharding.cpu_offload and cfg.sharding.frozen != "replicated":
        yield _Change("cpu_offload true", with_settings(cfg, "sharding", cpu_offload=True), world)


def _more_devices(cfg: Config, world: int) -> Iterator[_Change]:
    if cfg.sharding.dp_shard == 1:
        return
    own = with_settings(cfg, "sharding", dp_shard=-1)
    repeats, size = (
        cfg.train.gradient_accumulation_steps,
        cfg.train.micro_batch,
    )
    if repeats % 2 == 0:
        own = with_settings(own, "train", gradient_accumulation_steps=repeats // 2)
    elif size % 2 == 0:
        own = with_settings(own, "train", per_device_train_batch_size=size // 2)
    doubled = "" if repeats % 2 == 0 or size % 2 == 0 else ", the global batch doubled"
    yield _Change(f"devices {2 * world}{doubled}", own, 2 * world)


def _small_state(cfg: Config, world: int) -> Iterator[_Change]:
    if cfg.optim.optim == "adamw_torch_fused":
        new = with_settings(cfg, "optim", optim="adamw_8bit")
        yield _Change("optim adamw_8bit", new, world, kept=False)


def _adapters(cfg: Config, world: int) -> Iterator[_Change]:
    if not isinstance(cfg, FinetuneConfig):
        return
    if not cfg.lora.r:
        cfg = replace(cfg, lora=replace(cfg.lora, r=16), model=replace(cfg.model, dtype=None))
        yield _Change("lora.r 16", cfg, world, kept=False)
    if not cfg.lora.load_in_4bit:
        new = with_settings(cfg, "lora", load_in_4bit=True)
        yield _Change(f"lora.r {cfg.lora.r}, lora.load_in_4bit", new, world, kept=False)


# By what they usually cost, the cheapest first.
_ORDER = (
    _smaller_batch,
    _resharding,
    _fewer_replicas,
    _selective_recomputation,
    _recomputation,
    _small_state,
    _offloaded_activations,
    _offloaded_state,
    _more_devices,
)

_OF_STEPS = (
    _smaller_batch,
    _resharding,
    _selective_recomputation,
    _recomputation,
    _offloaded_activations,
)


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
