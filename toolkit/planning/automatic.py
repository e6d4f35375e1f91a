"""`auto` batch size and recomputation: the first that fits by the plan, then tried on the device.

The global batch stays: a smaller batch of a device is accumulated more often. What is tried, in
this order: no recomputation, `selective`, `full`, and of each the largest batch first, down to one
sample. Recomputing costs a tenth to a third of the time, a smaller batch mostly less.
"""

import bisect
import itertools
import resource
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from toolkit.config.settings import RunConfig
from toolkit.data.order.position import accumulation_for
from toolkit.planning.changes import Plan, make_plan, with_settings
from toolkit.planning.devices import Device
from toolkit.planning.measuring import is_out_of_memory, measure
from toolkit.planning.simulation import PlanningError

_AUTO = (("sharding", "activation_checkpointing"), ("train", "per_device_train_batch_size"))


def chosen_names(cfg: RunConfig) -> list[tuple[str, str]]:
    """Return section and name of the settings that are to be chosen."""
    return [(s, n) for s, n in _AUTO if getattr(getattr(cfg, s), n) == "auto"]


def in_words(asked: RunConfig, cfg: RunConfig) -> str:
    """Return what `cfg` has where `asked` has `auto`."""
    names = chosen_names(asked)
    said = [f"{name} {getattr(getattr(cfg, section), name)}" for section, name in names]
    if ("train", "per_device_train_batch_size") in names:
        said.append(f"gradient_accumulation_steps {cfg.train.gradient_accumulation_steps}")
    return ", ".join(said)


def as_before(cfg: RunConfig, before: RunConfig | None, world_size: int) -> RunConfig:
    """Return `cfg` with what an earlier start of the run chose, where its batch still divides."""
    for section, name in chosen_names(cfg) if before is not None else ():
        value = getattr(getattr(before, section), name)
        whole = cfg.train.global_batch_size
        divides = section != "train" or not whole or whole % (value * world_size) == 0
        if value != "auto" and divides:
            cfg = with_settings(cfg, section, **{name: value})
    return cfg


def accumulated(cfg: RunConfig, world_size: int) -> RunConfig:
    """Return `cfg` with the accumulation that makes up `train.global_batch_size`, where that is
    set. DataError: it does not divide.
    """
    whole, size = cfg.train.global_batch_size, cfg.train.per_device_train_batch_size
    if whole is None or not isinstance(size, int):
        return cfg
    repeats = accumulation_for(whole, size, world_size)
    return with_settings(cfg, "train", gradient_accumulation_steps=repeats)


def candidates(cfg: RunConfig, world_size: int) -> list[list[RunConfig]]:
    """Return what `auto` may become, the best first: for each recomputation its batches."""
    recomputed, size = cfg.sharding.activation_checkpointing, cfg.train.per_device_train_batch_size
    modes = ["none", "selective", "full"] if recomputed == "auto" else [recomputed]
    if recomputed == "auto" and cfg.model.kernels == "liger":
        modes.remove("selective")  # which does not go with it
    sizes = [size]
    if size == "auto":
        each = accumulation_for(cfg.train.global_batch_size or 1, 1, world_size)
        sizes = [n for n in range(each, 0, -1) if each % n == 0]

    def one(mode: Any, size: Any) -> RunConfig:
        own = with_settings(cfg, "sharding", activation_checkpointing=mode)
        own = with_settings(own, "train", per_device_train_batch_size=size)
        return accumulated(own, world_size)

    return [[one(mode, size) for size in sizes] for mode in modes]


def choose(cfg: RunConfig, world_size: int, device: Device, memory: int) -> tuple[int, Plan]:
    """Return the place among all candidates of the first that fits by its plan, with that; where
    none does, of the last. What the model cannot be run with does not fit. Makes a fake world; a
    few plans of each recomputation. PlanningError: nor can it be run as the last.
    """
    groups, passed = candidates(cfg, world_size), 0
    plans: list[Plan] = []

    def fits(candidate: RunConfig) -> bool:
        try:
            plan = make_plan(candidate, world_size, device, memory)
        except PlanningError:
            return False
        plans.extend([plan] * plan.fits(memory))
        return plan.fits(memory)

    for group in groups:  # in each the larger batches, which do not fit, come first
        place = bisect.bisect_left(group, True, key=fits)
        if place < len(group):
            return passed + place, plans[-1]
        passed += len(group)
    return passed - 1, make_plan(groups[-1][-1], world_size, device, memory)


def tried(
    cfg: RunConfig, world_size: int, rank: int, device: torch.device, memory: int, reserve: int
) -> int | None:
    """Return the peak of a real step of `cfg` as one rank on `device`, which has an index; None
    where it does not fit beside `reserve` bytes. Makes a fake world, and limits this process
    meanwhile: call it in one apart.
    """
    api = torch.get_device_module(device)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
        share = min(1.0, memory / api.mem_get_info(device)[1])
        api.set_per_process_memory_fraction(share, device)
    elif sys.platform == "linux":
        most = psutil.Process().memory_info().data + memory
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        peak = measure(cfg, world_size, device, rank)[0]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:  # there must be room for the answer
        if device.type == "cpu" and sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_DATA, before)
    return peak if peak + reserve <= memory else None


def after(cfg: RunConfig, world_size: int, place: int) -> Iterator[RunConfig]:
    """Return the candidates from `place` on."""
    every = itertools.chain.from_iterable(candidates(cfg, world_size))
    return itertools.islice(every, place, None)
