"""The plan within a run: what cannot fit in memory is refused before weights are read.

What may not fit is said, and an out-of-memory error ends with the changes that would fit.

[Note: apart] A plan needs a process group of processes that do not exist, which cannot stand beside
the run's own. So plans are made in a process of their own, of rank 0 or of the rank that failed;
it costs 6 s for its imports and some seconds a plan.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, ParamSpec, TypeVar

import psutil
import torch
from torch import nn

from toolkit import ranks
from toolkit.checkpoint import RunFolder
from toolkit.config.settings import RunConfig, ShardingConfig
from toolkit.errors import ToolkitError, one_line
from toolkit.formats.container_memory import container_memory, peak_host_memory
from toolkit.mesh import mesh_shape
from toolkit.parsing import parse_size
from toolkit.planning import automatic
from toolkit.planning.changes import Plan, make_plan, remedies
from toolkit.planning.devices import Device, figures_of, with_index
from toolkit.planning.estimates import reserve_of
from toolkit.planning.measuring import is_out_of_memory
from toolkit.tables import size_text
from toolkit.training.guards import watchdog
from toolkit.training.launch import Run

T = TypeVar("T")
P = ParamSpec("P")

_LISTED = 3  # changes
_PATIENCE = 60.0  # seconds that changes are planned for
_PATIENCE_FAILED = 15.0  # the same where others wait for a rank without memory, and one fits
_LONGEST = 60  # seconds after which that one ends without
# Of a device's memory, for parameters, gradients and optimizer state: activations take the rest.
_HELD_SHARE = 0.4
# Bytes of state for each of a trained parameter, at least.
_STATE = {"adamw_torch_fused": 2.0, "adamw_8bit": 0.5, "muon": 1.0, "adafactor": 0.0}


class MemoryShortageError(ToolkitError):
    """A device, or the host, has less memory than the run takes."""


@dataclass(frozen=True)
class Outlook:
    """What a plan says of a run in so much memory."""

    needs: int
    phase: str
    """Of the step, at whose peak it needs that."""
    remedies: str
    """The cheapest changes with their costs; empty where it fits."""


def resolve_auto(cfg: RunConfig, model: nn.Module, run: Run, folder: RunFolder) -> Any:
    """Return the settings of the run with the batch and the recomputation that `auto` becomes (see
    `automatic`); refuse a run whose shards alone do not fit, warn of one whose step may not, and
    let an out-of-memory error of the rest of the run say what would fit. Collective.

    `model` is on meta, before adapters and sharding. Milliseconds; on accelerators, and where the
    shards take more than half of the memory, a step is planned too; see [Note: apart]. A resumed
    run keeps what its first start chose. MemoryShortageError: parameters, gradients and optimizer
    state take more than there is, or no candidate fits.
    """
    ranks.on_all(lambda: mesh_shape(run.world_size, cfg.sharding))
    memory = ranks.min_over_ranks(memory_for(cfg.sharding, run.device))
    device, parts = figures_of(run.device), least_bytes(cfg, model, run.world_size, run.device.type)
    least = sum(parts.values())
    if least > memory:
        ranks.on_main(lambda: _refuse(cfg, run.world_size, device, memory, parts))
    asked, cfg = cfg, automatic.as_before(cfg, folder.before, run.world_size)
    cfg = shard_within_machines(cfg, model, run, memory)
    if automatic.chosen_names(cfg):
        cfg = choose_candidate(cfg, run, device, memory)
    elif run.device.type != "cpu" or least > memory / 2:
        run.log(ranks.on_main(lambda: _prediction(cfg, run.world_size, device, memory)))
    cfg = ranks.on_all(lambda: automatic.accumulated(cfg, run.world_size))
    if asked != cfg and automatic.chosen_names(asked):
        run.log(f"auto       {automatic.in_words(asked, cfg)}")
    # The mesh belongs to the machines of this start, not to the run.
    mesh = {name: getattr(asked.sharding, name) for name in ("dp_replicate", "dp_shard")}
    folder.use(replace(cfg, sharding=replace(cfg.sharding, **mesh)))
    run.at_end.enter_context(_told_if_out_of_memory(cfg, run, device, memory))
    return cfg


def shard_within_machines(cfg: RunConfig, model: nn.Module, run: Run, memory: int) -> RunConfig:
    """Return the settings with a copy of the model on each machine, so that only gradients go from
    one to the other, where the mesh is left open, accelerators of several machines take part, and
    what a rank then holds leaves room for a step; see `sharding.dp_shard`. Says what it chose.
    """
    sharding, machines = cfg.sharding, ranks.node_indices()
    count, world = max(machines) + 1, run.world_size
    here = world // count
    open_ = sharding.dp_replicate == sharding.dp_shard == -1 and not sharding.cpu_offload
    resharded = {sharding.reshard_after_forward, *sharding.reshard_after_forward_overrides.values()}
    by_machine = machines == [rank // here for rank in range(world)]
    if count == 1 or here == 1 or run.device.type == "cpu" or not (open_ and by_machine):
        return cfg
    if any(type(value) is int for value in resharded):  # meant for one mesh
        return cfg
    own = replace(cfg, sharding=replace(sharding, dp_replicate=count, dp_shard=here))
    needs = sum(least_bytes(own, model, world, run.device.type).values())
    sizes = f"{size_text(needs)} of {size_text(memory)}"
    if needs > _HELD_SHARE * memory:
        run.log(
            f"mesh       one copy over all {world} ranks: over the {here} of a machine each would "
            f"hold {sizes} (sharding.dp_shard: {here} asks for that)"
        )
        return cfg
    run.log(
        f"mesh       {count} copies, each over the {here} ranks of a machine, which hold {sizes} "
        f"each (sharding.dp_shard: {world} makes one over all)"
    )
    return own


def choose_candidate(cfg: RunConfig, run: Run, device: Device, memory: int) -> RunConfig:
    """Return the first candidate that fits by the plan and whose step, tried by each rank on its
    own device, fits on all of them. Collective.
    """
    world = run.world_size
    reserve = reserve_of(device, mesh_shape(world, cfg.sharding))
    own, here = memory_for(cfg.sharding, run.device), with_index(run.device)
    place, plan = ranks.on_main(lambda: in_subprocess(_place, cfg, world, device, memory))
    for candidate in automatic.after(cfg, world, place):
        args = candidate, world, run.rank, here, own, reserve
        peaks = ranks.gather_results(lambda args=args: _survived(*args))  # type: ignore[misc]
        found = [peak for peak in peaks if peak is not None]
        if len(found) == world:
            most = f"{size_text(max(found) + reserve)} of {size_text(memory)}"
            run.log(f"memory     {most}, as tried on the device, {size_text(plan)} by the plan")
            return candidate
    raise MemoryShortageError(
        f"no setting that `auto` may choose fits into {size_text(memory)} of each device; the last "
        f"that was tried is {automatic.in_words(cfg, candidate)}, planned to take {size_text(plan)}"
    )


def _place(cfg: RunConfig, world_size: int, device: Device, memory: int) -> tuple[int, int]:
    place, plan = automatic.choose(cfg, world_size, device, memory)
    return place, plan.estimate.memory


def _survived(*args: Any) -> int | None:
    """Return what `automatic.tried` does, None where the system ended its process."""
    try:
        return in_subprocess(automatic.tried, *args)
    except BrokenProcessPool:
        return None


def memory_for(cfg: ShardingConfig, device: torch.device) -> int:
    """Return the bytes that this rank may take of its device, of a CPU its part of the free host
    memory: `sharding.device_memory` where that is set. Collective.
    """
    here = ranks.local_world_size()
    given = cfg.device_memory and parse_size(cfg.device_memory)
    if given:
        return given
    if device.type == "cpu":
        return int(min(psutil.virtual_memory().available, container_memory().free) // here)
    api = torch.get_device_module(device)
    return api.mem_get_info(device)[0] + api.memory_reserved(device)


def least_bytes(
    cfg: RunConfig, model: nn.Module, world_size: int, device_type: str
) -> dict[str, int]:
    """Return what a rank of the run holds at least, of an unsharded `model` on any device: name of
    the part -> bytes. Of adapters the base alone, of 4-bit bases half a byte a value.
    """
    shards = mesh_shape(world_size, cfg.sharding)[1]
    lora = cfg.adapters
    parameters = list(model.parameters())
    size = sum(p.numel() * (0.5 if lora and lora.load_in_4bit else p.itemsize) for p in parameters)
    trained = sum(p.numel() * p.itemsize for p in parameters if p.requires_grad and not lora)
    state = trained * _STATE[cfg.optim.optim]
    held = {"parameters": size, "gradients": trained, "optimizer state": state}
    if cfg.sharding.cpu_offload and device_type != "cpu":
        held = {}
    compute = getattr(torch, cfg.sharding.param_dtype).itemsize
    gathered = max(p.numel() for p in parameters) * compute if shards > 1 and not lora else 0
    return {k: int(n / shards) for k, n in held.items()} | {"gathered parameters": gathered}


def in_subprocess(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `fn` gives in a fresh process; see [Note: apart]."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(fn, *args, **kwargs).result()


def outlook(cfg: RunConfig, world_size: int, device: Device, memory: int, failed: bool) -> Outlook:
    """Return what the plan of a run says, with changes where it does not fit, or has `failed`: then
    changes whose step peaks a tenth lower. Makes a fake world.
    """
    patience = _PATIENCE_FAILED if failed else _PATIENCE
    plan = make_plan(cfg, world_size, device, memory)
    needs = plan.estimate.memory
    memory = min(memory, needs - plan.sim.peak.nbytes // 10) if failed else memory
    if plan.fits(memory):
        return Outlook(needs, plan.sim.phase, "")
    begun = time.monotonic()
    # One that failed is bounded by its caller.
    found, _ = remedies(
        plan, device, memory, lambda _: None, patience=patience, at_least_one=failed
    )
    said = _in_words(plan, [p for p in found if p.fits(memory)])
    took = time.monotonic() - begun
    none = f"none that was found within {took:.0f} s; `toolkit plan` takes as long as it needs"
    return Outlook(needs, plan.sim.phase, said or none)


def _in_words(plan: Plan, found: list[Plan]) -> str:
    now = plan.estimate.device_time
    said = [
        f"{p.change} (needs {size_text(p.estimate.memory)}, time x "
        f"{p.estimate.device_time / now:.2f}{'' if p.kept else ', another training'})"
        for p in found[:_LISTED]
    ]
    return "; ".join(said)


def _refuse(cfg: RunConfig, world: int, device: Device, memory: int, parts: dict[str, int]) -> None:
    listed = ", ".join(f"{name} {size_text(n)}" for name, n in parts.items() if n)
    missing = size_text(sum(parts.values()) - memory)
    raise MemoryShortageError(
        f"the run cannot fit: each of {world} rank(s) holds at least {listed}; {size_text(memory)} "
        f"are free, {missing} are missing. Cheapest changes: {_advice(cfg, world, device, memory)}"
    )


def _prediction(cfg: RunConfig, world: int, device: Device, memory: int) -> str:
    try:
        found = in_subprocess(outlook, cfg, world, device, memory, False)
    except Exception as error:  # the run may fit, whatever the plan cannot do
        return f"note: the memory of a step could not be planned: {one_line(error)}"
    said = f"{size_text(found.needs)} of {size_text(memory)} by the plan, at most in {found.phase}"
    if not found.remedies:
        return f"memory     {said}"
    return f"WARNING    a step may not fit: {said}. Cheapest changes: {found.remedies}"


def _advice(cfg: RunConfig, world: int, device: Device, memory: int) -> str:
    try:
        return in_subprocess(_soon, cfg, world, device, memory)
    except BrokenProcessPool:
        return f"not planned (over {_LONGEST} s, or no memory for it); ask `toolkit plan`"
    except Exception as error:  # the shortage is to be told, whatever becomes of the advice
        return f"not planned: {one_line(error)}"


def _soon(cfg: RunConfig, world: int, device: Device, memory: int) -> str:
    """Return what would fit; end this process where that takes too long."""
    signal.alarm(_LONGEST)
    return outlook(cfg, world, device, memory, True).remedies


@contextlib.contextmanager
def _told_if_out_of_memory(cfg: RunConfig, run: Run, device: Device, memory: int) -> Iterator[None]:
    """Turn an out-of-memory error into a MemoryShortageError that says when, how much and what to
    change. Each rank that fails says its own at once; the first of them plans the changes.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        peak = peak_host_memory()
        if run.device.type != "cpu":
            peak = torch.get_device_module(run.device).max_memory_allocated(run.device)
        train = cfg.train
        batch = f"{train.per_device_train_batch_size} x {cfg.data.sequence_length:,} tokens"
        said = (
            f"out of memory on rank {run.rank}: {one_line(error)} (batch {batch}; "
            f"{size_text(peak)} at the peak, {size_text(memory)} given)"
        )
        if not ranks.is_first_to_report("out of memory"):
            ranks.print_line(f"[rank {run.rank}] {said}", sys.stderr)
            with watchdog.extend_timeout("out of memory"):
                time.sleep(2 * _LONGEST)  # the launcher ends this one when the first has spoken
            raise MemoryShortageError(said) from error
        ranks.print_line(f"{said}; planning what would fit ...", sys.stderr)
        with watchdog.extend_timeout("planning what would fit"):
            advice = _advice(cfg, run.world_size, device, memory)
        raise MemoryShortageError(f"{said}. Cheapest changes: {advice}") from error
