"""Decide `auto` of the batch size and of recomputation: by plans, then by a step on the device.

The global batch does not change: a smaller micro-batch is accumulated more often. The order of
preference is no recomputation, `selective`, `full`; within each, the largest micro-batch that fits.
Recomputing costs a tenth to a third of the time, a smaller micro-batch mostly less.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from toolkit.config.settings import RunConfig
from toolkit.data.order.position import accumulation_for
from toolkit.mesh import data_ranks
from toolkit.planning.devices import Device
from toolkit.planning.search import Plan, make_plan, search, with_settings
from toolkit.planning.simulation import PlanningError

_MAY_BE_AUTO = (("sharding", "activation_checkpointing"), ("train", "per_device_train_batch_size"))


def auto_settings(cfg: RunConfig) -> list[tuple[str, str]]:
    """List which of the micro-batch and activation checkpointing are set to `auto`.

    Returns:
        (section, name) of each such setting, such as ("sharding", "activation_checkpointing").
    """
    return [(s, n) for s, n in _MAY_BE_AUTO if getattr(getattr(cfg, s), n) == "auto"]


def format_decision(cfg: RunConfig, decided: RunConfig) -> str:
    """List as text the values in `decided` of all settings that are `auto` in `cfg`."""
    names = auto_settings(cfg)
    texts = [f"{name} {getattr(getattr(decided, section), name)}" for section, name in names]
    if ("train", "per_device_train_batch_size") in names:
        texts.append(f"gradient_accumulation_steps {decided.train.gradient_accumulation_steps}")
    return ", ".join(texts)


def reuse_decision(cfg: RunConfig, recorded: RunConfig | None, world_size: int) -> RunConfig:
    """Replace each `auto` in `cfg` by the value that an earlier start of the run chose.

    A recorded micro-batch is not used if it no longer divides the global batch; then `auto` stays.

    Args:
        cfg: the settings of this start.
        recorded: the settings of the earlier start, with its choices. If it is None, `cfg` is
            returned.
        world_size: the number of ranks of this start.
    """
    if recorded is None:
        return cfg
    for section, name in auto_settings(cfg):
        value = getattr(getattr(recorded, section), name)
        global_batch = cfg.train.global_batch_size
        if section == "train" and global_batch and value != "auto":
            samples = value * data_ranks(world_size, cfg.sharding)
            if global_batch % samples:
                continue
        if value != "auto":
            cfg = with_settings(cfg, section, **{name: value})
    return cfg


def set_accumulation(cfg: RunConfig, world_size: int) -> RunConfig:
    """Return a config in which a step has `train.global_batch_size` samples.

    Only `gradient_accumulation_steps` changes. If the global batch is not set, or the micro-batch
    is `auto`, `cfg` is returned unchanged.

    Raises:
        DataError: micro-batch times ranks does not divide the global batch.
    """
    global_batch = cfg.train.global_batch_size
    micro_batch = cfg.train.per_device_train_batch_size
    if global_batch is None or not isinstance(micro_batch, int):
        return cfg
    ranks = data_ranks(world_size, cfg.sharding)
    accumulation = accumulation_for(global_batch, micro_batch, ranks)
    return with_settings(cfg, "train", gradient_accumulation_steps=accumulation)


def list_candidates(cfg: RunConfig, world_size: int) -> list[list[RunConfig]]:
    """List the configs that a config with `auto` may become, grouped by activation checkpointing.

    A setting that is not `auto` keeps its value, so there may be one group or one config per group.

    Returns:
        One list per mode of activation checkpointing (none, selective, full), the fastest mode
        first. Each list has the config with the largest micro-batch first.
    """
    recomputation = cfg.sharding.activation_checkpointing
    modes = [recomputation]
    if recomputation == "auto":
        # `selective` works neither with Liger's kernels nor with MLPs in chunks.
        has_selective = cfg.model.kernels != "liger" and not cfg.sharding.mlp_chunk_tokens
        modes = ["none", "selective", "full"] if has_selective else ["none", "full"]
    sizes: Sequence[Any] = [cfg.train.per_device_train_batch_size]
    if sizes == ["auto"]:
        ranks = data_ranks(world_size, cfg.sharding)
        rank_samples = accumulation_for(cfg.train.global_batch_size or 1, 1, ranks)
        sizes = [n for n in range(rank_samples, 0, -1) if rank_samples % n == 0]
    groups = []
    for mode in modes:
        recomputing = with_settings(cfg, "sharding", activation_checkpointing=mode)
        configs = (
            with_settings(recomputing, "train", per_device_train_batch_size=size) for size in sizes
        )
        groups.append([set_accumulation(config, world_size) for config in configs])
    return groups


def candidates_from(cfg: RunConfig, world_size: int, place: int) -> Iterator[RunConfig]:
    """Yield the configs of all groups of `list_candidates` in order, from index `place` on."""
    flat = itertools.chain.from_iterable(list_candidates(cfg, world_size))
    return itertools.islice(flat, place, None)


def choose(cfg: RunConfig, world_size: int, device: Device, memory: int) -> tuple[int, Plan]:
    """Find the first candidate for `auto` whose plan fits; if none fits, the last candidate.

    The order is that of `candidates_from`. A candidate that cannot be planned does not fit. Creates
    a fake process group. Each mode of activation checkpointing takes a few plans, and each plan
    takes seconds.

    Args:
        cfg: settings, some of them `auto`.
        world_size: the number of ranks.
        device: the figures of their devices.
        memory: bytes of each device.

    Returns:
        The candidate's index in the sequence of `candidates_from`, and its plan.

    Raises:
        PlanningError: no candidate fits, and the last one cannot be planned.
    """
    groups = list_candidates(cfg, world_size)
    place = 0
    for group in groups:
        plans: dict[int, Plan] = {}

        def needs(index: int, group: Any = group, plans: dict[int, Plan] = plans) -> float:
            try:
                plans[index] = make_plan(group[index], world_size, device, memory)
            except PlanningError:
                return math.inf
            return plans[index].estimate.memory

        smallest_first = range(len(group) - 1, -1, -1)
        if fitting := search(smallest_first, needs, memory):
            index = len(group) - fitting
            return place + index, plans[index]
        place += len(group)
    return place - 1, make_plan(groups[-1][-1], world_size, device, memory)
