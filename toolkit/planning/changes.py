"""Changes to a run that save memory, each with a plan, and layouts to compare."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from toolkit.config.data import FinetuneDataConfig
from toolkit.config.settings import (
    FinetuneConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    RunConfig,
)
from toolkit.errors import ConfigError
from toolkit.planning.devices import Device
from toolkit.planning.estimates import reserved_bytes
from toolkit.planning.search import Change, Plan, Planner, Report, with_settings

# Changes of what a step computes. They do not change what a rank holds between two steps.
_STEP_CHANGES = {
    *("per_device_train_batch_size", "reshard_after_forward", "accumulation"),
    *("activation_checkpointing", "activation_offload", "mlp_chunk_tokens", "context_parallel"),
}
# Sections and settings that pretraining and fine-tuning share.
_SHARED = ("sharding", "optim", "checkpoint", "metrics", "hub", "output_dir", "seed")
_MLP_CHUNK = 8192  # tokens
_CONTEXT_PARALLEL = (2, 8)  # ranks that share each row
_MAX_DEVICE_FACTOR = 64  # of more devices that combined changes may ask for


def find_remedies(
    plan: Plan,
    device: Device,
    memory: int,
    report: Report,
    *,
    patience: float = math.inf,
    at_least_one: bool = False,
) -> tuple[list[Plan], dict[str, str]]:
    """Plan changes to a run that does not fit into `memory` bytes of each device.

    If no change that keeps the training the same fits alone, such changes are combined until the
    combination fits. The usually cheapest changes come first.

    Args:
        plan: plan of the run without changes.
        device: the figures of the run's device.
        memory: bytes of each device.
        report: called with a line before each plan.
        patience: seconds after which no further change is planned.
        at_least_one: continue beyond `patience` until one change fits.

    Returns:
        First the plans that fit: those that keep the training the same, then the others, each
        sorted by device-seconds per token. If none fits, all plans. Second, a dict: name of each
        change that cannot be planned -> the reason.
    """
    end = time.monotonic() + patience
    planner = Planner(device, memory, report)
    plans: list[Plan] = []
    for change in _useful_changes(plan, device, memory):
        is_urgent = at_least_one and not any(p.fits(memory) for p in plans)
        if time.monotonic() > end and not is_urgent:
            break
        if (changed := planner.plan(change)) is not None:
            plans.append(changed)
    fitting = [p for p in plans if p.fits(memory)]
    has_time = (at_least_one and not fitting) or time.monotonic() < end
    if has_time and not any(p.same_training for p in fitting):
        fitting += _combine_changes(plan, plans, replace(planner, failed={}))
    listed = fitting or sorted(plans, key=lambda p: p.estimate.memory)
    listed.sort(key=lambda p: (not p.fits(memory), not p.same_training, _device_seconds(p)))
    return listed, planner.failed


def _device_seconds(plan: Plan) -> float:
    """Return the planned device-seconds per token."""
    return plan.estimate.device_time


def _useful_changes(plan: Plan, device: Device, memory: int) -> list[Change]:
    """List the changes of a plan's settings that can lower the memory of its device.

    If parameters, gradients and optimizer state alone fill `memory`, changes that only affect the
    memory within a step are dropped. On a CPU, offloading is dropped.
    """
    useless: set[str] = set()
    held_bytes = 0 if plan.cfg.sharding.cpu_offload else plan.sim.state.total
    if held_bytes + reserved_bytes(device, plan.sim.mesh) >= memory:
        # What a rank holds between two steps leaves no room for any step.
        useless |= _STEP_CHANGES
    if device.kind == "cpu":
        # Everything is in host memory already.
        useless |= {"cpu_offload", "activation_offload"}
    return [c for c in list_changes(plan.cfg, plan.world_size) if c.setting not in useless]


def _combine_changes(plan: Plan, single_plans: list[Plan], planner: Planner) -> list[Plan]:
    """Apply changes one after the other, each on top of the previous ones, until a plan fits.

    Only changes that keep the training the same are used. The search ends at 64 times the devices.

    Args:
        plan: plan of the run without changes.
        single_plans: existing plans with one change, which are not made again.
        planner: makes the other plans; its `memory` must be set.

    Returns:
        A list with the plan that fits; empty if none does.
    """
    memory = planner.memory
    assert memory is not None
    current = plan
    names: list[str] = []
    while current.world_size < _MAX_DEVICE_FACTOR * plan.world_size:
        change = next(
            (
                c
                for c in _useful_changes(current, planner.device, memory)
                if c.same_training and c.name not in planner.failed
            ),
            None,
        )
        if change is None:
            break
        # A further change of the same setting replaces the earlier one.
        new_names = [n for n in names if n.split()[0] != change.setting] + [change.name]
        key = (change.cfg, change.world_size)
        changed = next((p for p in single_plans if (p.cfg, p.world_size) == key), None)
        if changed is None:
            changed = planner.plan(change, " + ".join(new_names))
        if changed is None:
            continue
        if changed.fits(memory):
            return [changed]
        current = changed
        names = new_names
    return []


def as_finetuning(cfg: RunConfig) -> FinetuneConfig | None:
    """Convert a config to a FinetuneConfig, which can train adapters.

    Returns:
        `cfg` itself if it is a FinetuneConfig. None if the weights are random, or if fine-tuning
        refuses one of the settings.
    """
    if isinstance(cfg, FinetuneConfig):
        return cfg
    if cfg.model.init == "random":
        return None
    with contextlib.suppress(ConfigError):
        return FinetuneConfig(
            model=FinetuneModelConfig(**vars(cfg.model)),
            data=FinetuneDataConfig(**vars(cfg.data)),
            train=FinetuneTrainConfig(**vars(cfg.train)),
            **{name: getattr(cfg, name) for name in _SHARED},
        )
    return None


def list_changes(cfg: RunConfig, world_size: int) -> list[Change]:
    """List changes of a run's settings that save memory, the usually cheapest first. Plans nothing.

    Changes that contradict the run's other settings are omitted. Some changes use more devices or
    train the model differently; the fields `world_size` and `same_training` say so.
    """
    changes: list[Change] = []

    def add(
        name: str,
        sections: dict[str, dict[str, Any]],
        ranks: int = world_size,
        same_training: bool = True,
        base: RunConfig = cfg,
    ) -> None:
        changed = base
        with contextlib.suppress(ConfigError):
            for section, settings in sections.items():
                changed = with_settings(changed, section, **settings)
            changes.append(Change(name, changed, ranks, same_training))

    micro_batch = cfg.train.micro_batch
    accumulation = cfg.train.gradient_accumulation_steps
    sharding = cfg.sharding
    preference = getattr(cfg, "preference", None)
    is_divisible = preference is None or not preference.compares_micro_batch
    if micro_batch > 1:  # the global batch does not change
        factor = 2 if micro_batch % 2 == 0 else micro_batch
        size = micro_batch // factor
        repeats = accumulation * factor
        batch = {"per_device_train_batch_size": size, "gradient_accumulation_steps": repeats}
        name = f"per_device_train_batch_size {size}, accumulation {repeats}"
        add(name, {"train": batch}, same_training=is_divisible)
    if sharding.reshard_after_forward not in ("auto", True):
        add("reshard_after_forward true", {"sharding": {"reshard_after_forward": True}})
    elif accumulation > 1 and sharding.accumulation != "reduce_each":
        add("accumulation reduce_each", {"sharding": {"accumulation": "reduce_each"}})
    if sharding.dp_replicate > 1 or sharding.dp_shard not in (-1, world_size):
        add(f"dp_shard {world_size}", {"sharding": {"dp_replicate": 1, "dp_shard": -1}})
    recomputation = sharding.activation_checkpointing
    full = {"activation_checkpointing": "full"}
    has_selective = cfg.model.kernels == "none" and not sharding.mlp_chunk_tokens
    if recomputation in (False, "none") and has_selective:
        selective = {"activation_checkpointing": "selective"}
        add("activation_checkpointing selective", {"sharding": selective})
    if recomputation not in ("full", True, 1):
        add("activation_checkpointing full", {"sharding": full})
    if cfg.optim.optim == "adamw_torch_fused":
        add("optim adamw_8bit", {"optim": {"optim": "adamw_8bit"}}, same_training=False)
    if not sharding.activation_offload and sharding.torch_compile in (False, "none", "auto"):
        name = "activation_offload with activation_checkpointing full"
        add(name, {"sharding": {**full, "activation_offload": True}})
    for name, sections in _changes_for_long_rows(cfg, world_size):
        add(name, sections, same_training=is_divisible or "train" not in sections)
    if not sharding.cpu_offload and sharding.frozen != "replicated":
        add("cpu_offload true", {"sharding": {"cpu_offload": True}})
    if sharding.dp_shard != 1:
        half: dict[str, int] = {}
        note = ""
        if accumulation % 2 == 0:
            half = {"gradient_accumulation_steps": accumulation // 2}
        elif micro_batch % 2 == 0:
            half = {"per_device_train_batch_size": micro_batch // 2}
        else:
            note = ", the global batch doubled"
        ranks = 2 * world_size
        add(f"devices {ranks}{note}", {"sharding": {"dp_shard": -1}, "train": half}, ranks)
    if (finetuning := as_finetuning(cfg)) is not None:
        for name, sections in _changes_to_adapters(finetuning):
            add(name, sections, same_training=False, base=finetuning)
    return changes


def _changes_to_adapters(cfg: FinetuneConfig) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Yield (name, sections of settings) of changes that train adapters, or store their base."""
    rank = cfg.lora.r
    lora: dict[str, Any] = {} if rank else {"r": 16}
    # A trained model has a storage dtype, which the base of adapters takes from its files.
    model: dict[str, Any] = {} if rank else {"dtype": None, "float8": "none"}
    if lora:
        yield "lora.r 16", {"model": model, "lora": lora}
    if not cfg.lora.load_in_4bit:
        sections = {"model": {**model, "float8": "none"}, "lora": {**lora, "load_in_4bit": True}}
        yield f"lora.r {rank or 16}, lora.load_in_4bit", sections


def _changes_for_long_rows(
    cfg: RunConfig, world_size: int
) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Yield (name, sections of settings) of changes that save activations of long rows."""
    sharding, train = cfg.sharding, cfg.train
    present = sharding.context_parallel
    tokens = cfg.data.sequence_length * train.micro_batch
    if tokens // present <= _MLP_CHUNK:
        return
    if not sharding.mlp_chunk_tokens:
        chunks = {"activation_checkpointing": "full", "mlp_chunk_tokens": _MLP_CHUNK}
        name = f"mlp_chunk_tokens {_MLP_CHUNK} with activation_checkpointing full"
        yield name, {"sharding": {**chunks, "torch_compile": "none"}}
    for parts in _CONTEXT_PARALLEL if train.micro_batch == 1 else ():
        if parts > present and parts % present == 0 and world_size % parts == 0:
            # Fewer groups of ranks read rows, and the global batch does not change.
            steps = train.gradient_accumulation_steps * parts // present
            sections = {"sharding": {"context_parallel": parts}}
            sections["train"] = {"gradient_accumulation_steps": steps}
            yield f"context_parallel {parts}, accumulation {steps}", sections


def compare_layouts(plan: Plan, device: Device, memory: int | None, report: Report) -> list[Plan]:
    """Plan a run on several meshes, each with `none`, `selective` and `full` recomputation.

    The meshes shard over all ranks, over half of them, over the devices of a node, and over one.
    Layouts that the run would refuse are reported and omitted.

    Args:
        plan: plan of the run as it is.
        device: the figures of the run's device.
        memory: bytes of each device; None: every plan counts as fitting.
        report: called with a line before each plan, and with the reason for each omitted layout.

    Returns:
        The plans that fit, then those that do not. Each group is sorted by device-seconds per
        token.
    """
    planner = Planner(device, memory, report)
    world_size = plan.world_size
    sizes = {world_size, 1}
    for size in (device.per_node, world_size // 2):
        if size and world_size % size == 0:
            sizes.add(size)
    plans = []
    for shards in sorted(sizes, reverse=True):
        replicas = world_size // shards
        for recomputation in ("none", "selective", "full"):
            offload = plan.cfg.sharding.activation_offload and recomputation != "none"
            settings: dict[str, Any] = {
                "dp_replicate": replicas,
                "dp_shard": shards,
                "activation_checkpointing": recomputation,
                "activation_offload": offload,
            }
            name = f"{replicas} x {shards}, recompute {recomputation}"
            try:
                cfg = with_settings(plan.cfg, "sharding", **settings)
            except ConfigError as error:
                report(f"{name}: {error}")
                continue
            if (changed := planner.plan(Change(name, cfg, world_size))) is not None:
                plans.append(changed)
    return sorted(plans, key=lambda p: (not p.fits(memory), _device_seconds(p)))
