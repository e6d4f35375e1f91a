"""The plan within a run: it refuses what cannot fit in memory before weights are read.

It also warns of a step that may not fit, decides `auto`, and completes an out-of-memory error with
the changes that would fit.

[Note: separate process] A plan needs a process group of processes that do not exist, which cannot
be initialised next to the run's own. So plans are made in a separate process, of rank 0 or of
the rank that failed. It takes 6 s for its imports and some seconds for a plan.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
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
from toolkit.models.expert_parallel import gathered_shares
from toolkit.parsing import parse_size
from toolkit.planning import automatic
from toolkit.planning.changes import find_remedies
from toolkit.planning.devices import Device, figures_of, with_index
from toolkit.planning.estimates import reserved_bytes
from toolkit.planning.measuring import is_out_of_memory, try_step
from toolkit.planning.search import Plan, make_plan
from toolkit.tables import size_text
from toolkit.training.guards import watchdog
from toolkit.training.launch import Run

T = TypeVar("T")
P = ParamSpec("P")

_MAX_LISTED = 3  # changes in a message
_PATIENCE = 60.0  # seconds for planning changes
# The same if a rank has run out of memory and the other ranks wait for it.
_PATIENCE_FAILED = 15.0
_ADVICE_TIMEOUT = 60  # seconds after which the process that plans changes is stopped
# Share of a device's memory for parameters, gradients and optimizer state, if a copy of the model
# shall stay within a machine. Activations take the rest.
_STATE_SHARE = 0.4
# Lower bound of the optimizer state, as a multiple of the trained parameters' bytes.
_STATE_FACTOR = {"adamw_torch_fused": 2.0, "adamw_8bit": 0.5, "muon": 1.0, "adafactor": 0.0}


class MemoryShortageError(ToolkitError):
    """The run needs more memory than a device or the host has."""


@dataclass(frozen=True)
class Prediction:
    """The memory that a run needs according to its plan, and changes that reduce it."""

    memory: int
    """Bytes that the run needs."""
    phase: str
    """Phase of the step that needs the most."""
    remedies: str
    """The cheapest changes with their costs, as text; empty if the run fits."""


def resolve_auto(cfg: RunConfig, model: nn.Module, run: Run, folder: RunFolder) -> Any:
    """Decide the settings that are `auto`, and refuse a run that cannot fit into the memory.

    Decides the micro-batch and the recomputation (see `automatic`) and, with several machines, the
    mesh. A resumed run keeps the choices of its first start, which the run folder records. Logs a
    warning if a step may not fit. If the run later fails with an out-of-memory error, the error
    will name changes that would fit.

    Collective. Takes milliseconds. On accelerators, or if parameters, gradients and optimizer state
    take over half of the memory, it also plans a step, which takes seconds. See [Note: separate
    process].

    Args:
        cfg: the settings of the run.
        model: the model on meta, before adapters and sharding.
        run: the processes of the run.
        folder: the run folder.

    Returns:
        The settings without `auto`.

    Raises:
        MemoryShortageError: parameters, gradients and optimizer state take more memory than there
            is, or no candidate for `auto` fits.
        ToolkitError: mesh or global batch do not fit the number of ranks.
    """
    world_size = run.world_size

    def check_settings() -> int:
        memory = free_memory(cfg.sharding, run.device)
        mesh_shape(world_size, cfg.sharding)
        automatic.set_accumulation(cfg, world_size)
        return memory

    memory = ranks.min_result(check_settings)
    device = figures_of(run.device)
    parts = minimum_bytes(cfg, model, world_size, run.device.type)
    needed = sum(parts.values())
    if needed > memory:
        ranks.on_main(lambda: _raise_shortage(cfg, world_size, device, memory, parts))
    decided = automatic.reuse_decision(cfg, folder.before, world_size)
    decided = shard_within_machines(decided, model, run, memory)
    if automatic.auto_settings(decided):
        decided = choose_candidate(decided, run, device, memory)
    elif run.device.type != "cpu" or needed > memory / 2:
        predict_line = partial(_format_prediction, decided, world_size, device, memory)
        run.log(ranks.on_main(predict_line))
    decided = automatic.set_accumulation(decided, world_size)
    if cfg != decided and automatic.auto_settings(cfg):
        run.log(f"auto       {automatic.format_decision(cfg, decided)}")
    # The mesh belongs to the machines of this start, so the run does not record it.
    mesh = {name: getattr(cfg.sharding, name) for name in ("dp_replicate", "dp_shard")}
    folder.set_config(replace(decided, sharding=replace(decided.sharding, **mesh)))
    run.at_end.enter_context(_advise_if_out_of_memory(decided, run, device, memory))
    return decided


def shard_within_machines(cfg: RunConfig, model: nn.Module, run: Run, memory: int) -> RunConfig:
    """Set the mesh to one copy of the model on each machine, if possible, and log the choice.

    With this mesh, only gradients are sent between machines. It is chosen if the settings leave the
    mesh open, several machines have several accelerators each, and a copy leaves room for a step.
    See `sharding.dp_shard`.

    Args:
        cfg: the settings of the run.
        model: the model on meta, before sharding.
        run: the processes of the run.
        memory: bytes that each rank may use.

    Returns:
        The settings with that mesh, or `cfg` itself.
    """
    sharding = cfg.sharding
    world_size = run.world_size
    machines = ranks.node_indices()
    count = max(machines) + 1
    local_size = world_size // count
    if count == 1 or local_size == 1 or run.device.type == "cpu" or sharding.cpu_offload:
        return cfg
    is_open = sharding.dp_replicate == sharding.dp_shard == -1
    is_contiguous = machines == [rank // local_size for rank in range(world_size)]
    resharding = {
        sharding.reshard_after_forward,
        *sharding.reshard_after_forward_overrides.values(),
    }
    # A number of ranks to reshard over is meant for the mesh of all ranks.
    has_group_size = any(type(value) is int for value in resharding)
    divides_experts = local_size % sharding.expert_parallel == 0
    if not (is_open and is_contiguous and divides_experts) or has_group_size:
        return cfg
    mesh = replace(sharding, dp_replicate=count, dp_shard=local_size)
    changed = replace(cfg, sharding=mesh)
    needed = sum(minimum_bytes(changed, model, world_size, run.device.type).values())
    sizes = f"{size_text(needed)} of {size_text(memory)}"
    if needed > _STATE_SHARE * memory:
        run.log(
            f"mesh       one copy over all {world_size} ranks: over the {local_size} of a machine "
            f"each would hold {sizes} (sharding.dp_shard: {local_size} asks for that)"
        )
        return cfg
    run.log(
        f"mesh       {count} copies, each over the {local_size} ranks of a machine, which hold "
        f"{sizes} each (sharding.dp_shard: {world_size} makes one over all)"
    )
    return changed


def choose_candidate(cfg: RunConfig, run: Run, device: Device, memory: int) -> RunConfig:
    """Replace `auto` by the first values with which a step fits, by its plan and in a real trial.

    The plan finds where to start. Then candidates are tried in order: each rank runs a step on its
    own device, and all must succeed. Logs the measured memory. Collective.

    Args:
        cfg: settings, some of them `auto`.
        run: the processes of the run.
        device: the figures of their devices.
        memory: bytes that each rank may use.

    Raises:
        MemoryShortageError: no candidate fits.
    """
    world_size = run.world_size
    reserve = reserved_bytes(device, mesh_shape(world_size, cfg.sharding))
    local_memory = free_memory(cfg.sharding, run.device)
    local_device = with_index(run.device)
    place, planned = ranks.on_main(
        lambda: in_subprocess(_choose_by_plan, cfg, world_size, device, memory)
    )
    for candidate in automatic.candidates_from(cfg, world_size, place):
        args = (candidate, world_size, run.rank, local_device, local_memory, reserve)
        all_peaks = ranks.gather_results(partial(_try_in_subprocess, *args))
        peaks = [peak for peak in all_peaks if peak is not None]
        if len(peaks) == world_size:
            measured = f"{size_text(max(peaks) + reserve)} of {size_text(memory)}"
            plan = size_text(planned)
            run.log(f"memory     {measured}, as tried on the device, {plan} by the plan")
            return candidate
    raise MemoryShortageError(
        f"no setting that `auto` may choose fits into {size_text(memory)} of each device; the last "
        f"one tried is {automatic.format_decision(cfg, candidate)}, planned to need "
        f"{size_text(planned)}"
    )


def _choose_by_plan(
    cfg: RunConfig, world_size: int, device: Device, memory: int
) -> tuple[int, int]:
    """Return the index of the candidate that `automatic.choose` finds, and its planned bytes."""
    place, plan = automatic.choose(cfg, world_size, device, memory)
    return place, plan.estimate.memory


def _try_in_subprocess(*args: Any) -> int | None:
    """Call `try_step` with `args` in a new process, and return its result.

    Returns None if the system killed that process, which happens when memory runs out.
    """
    try:
        return in_subprocess(try_step, *args)
    except BrokenProcessPool:
        return None


def free_memory(cfg: ShardingConfig, device: torch.device) -> int:
    """Return the bytes that this rank may use: `sharding.device_memory`, or else the free bytes.

    On an accelerator, memory that torch has reserved counts as free. On a CPU, the ranks of a
    machine share the free host memory equally. The first call is collective.
    """
    local_size = ranks.local_world_size()
    limit = cfg.device_memory and parse_size(cfg.device_memory)
    if limit:
        return limit
    if device.type == "cpu":
        host_bytes = min(psutil.virtual_memory().available, container_memory().free)
        return int(host_bytes // local_size)
    api = torch.get_device_module(device)
    return api.mem_get_info(device)[0] + api.memory_reserved(device)


def minimum_bytes(
    cfg: RunConfig, model: nn.Module, world_size: int, device_type: str
) -> dict[str, int]:
    """Compute a lower bound of the bytes that each rank holds, from an unsharded model.

    With adapters, only the base counts; a value takes half a byte in a 4-bit base and a byte in one
    of float8. Offloaded parts do not count.

    Returns:
        Part (`parameters`, `gradients`, `optimizer state`, `gathered parameters`) -> bytes.
    """
    shards = mesh_shape(world_size, cfg.sharding)[1]
    lora = cfg.adapters
    parameters = list(model.parameters())
    packed_itemsize = 0.5 if lora and lora.load_in_4bit else None
    if lora and cfg.model.float8 != "none":
        packed_itemsize = 1.0
    size = sum(p.numel() * (packed_itemsize or p.itemsize) for p in parameters)
    trained = sum(p.numel() * p.itemsize for p in parameters if p.requires_grad and not lora)
    state = trained * _STATE_FACTOR[cfg.optim.optim]
    parts = {"parameters": size, "gradients": trained, "optimizer state": state}
    if cfg.sharding.cpu_offload and device_type != "cpu":
        parts = {}
    compute_itemsize = getattr(torch, cfg.sharding.param_dtype).itemsize
    gathered = 0
    if shards > 1 and not lora:
        gathered = int(_count_largest_gathered(cfg.sharding, model, shards) * compute_itemsize)
    sharded_parts = {name: int(nbytes / shards) for name, nbytes in parts.items()}
    return sharded_parts | {"gathered parameters": gathered}


def _count_largest_gathered(cfg: ShardingConfig, model: nn.Module, shards: int) -> float:
    """Count the values of the largest parameter that a rank gathers, from an unsharded model.

    With `expert_parallel`, a rank gathers only its part of the experts; nothing of it if no other
    rank of its copy holds the same experts.
    """
    shares = gathered_shares(model, cfg.expert_parallel)
    is_alone = cfg.expert_parallel >= shards
    return max(
        p.numel() * (0.0 if share < 1 and is_alone else share) for p, share in shares.items()
    )


def in_subprocess(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `fn` in a new process, and return its result or raise its error.

    See [Note: separate process].
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(fn, *args, **kwargs).result()


def predict(
    cfg: RunConfig, world_size: int, device: Device, memory: int, failed: bool
) -> Prediction:
    """Plan a run and, if it does not fit, changes that make it fit. Creates a fake process group.

    Args:
        cfg: the settings of the run.
        world_size: the number of ranks.
        device: the figures of their devices.
        memory: bytes of each device.
        failed: True if the run has already run out of memory. Then its plan was too low, so a
            change must lower the planned peak by a tenth to count as fitting.
    """
    patience = _PATIENCE_FAILED if failed else _PATIENCE
    plan = make_plan(cfg, world_size, device, memory)
    needed = plan.estimate.memory
    if failed:
        memory = min(memory, needed - plan.sim.peak.nbytes // 10)
    if plan.fits(memory):
        return Prediction(needed, plan.sim.phase, "")
    start_time = time.monotonic()
    # After a failure the caller limits the time, so the search may continue until a change fits.
    remedies, _ = find_remedies(
        plan, device, memory, lambda _: None, patience=patience, at_least_one=failed
    )
    text = _format_remedies(plan, [p for p in remedies if p.fits(memory)])
    seconds = time.monotonic() - start_time
    fallback = f"none found within {seconds:.0f} s; `toolkit plan` takes as long as it needs"
    return Prediction(needed, plan.sim.phase, text or fallback)


def _format_remedies(plan: Plan, remedies: list[Plan]) -> str:
    """Format up to three changed plans: needed memory, and time relative to `plan`."""
    cost = plan.estimate.device_time
    texts = []
    for remedy in remedies[:_MAX_LISTED]:
        needed = size_text(remedy.estimate.memory)
        factor = remedy.estimate.device_time / cost
        note = "" if remedy.same_training else ", another training"
        texts.append(f"{remedy.change} (needs {needed}, time x {factor:.2f}{note})")
    return "; ".join(texts)


def _raise_shortage(
    cfg: RunConfig, world_size: int, device: Device, memory: int, parts: dict[str, int]
) -> None:
    """Plan the cheapest changes, and raise a MemoryShortageError with them and the needed memory.

    Args:
        cfg: the settings of the run.
        world_size: the number of ranks.
        device: the figures of their devices.
        memory: bytes that each rank may use.
        parts: the result of `minimum_bytes`.
    """
    listed = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in parts.items() if nbytes)
    missing = size_text(sum(parts.values()) - memory)
    advice = _plan_advice(cfg, world_size, device, memory)
    raise MemoryShortageError(
        f"the run cannot fit: each of {world_size} rank(s) holds at least {listed}; "
        f"{size_text(memory)} are free, {missing} are missing. Cheapest changes: {advice}"
    )


def _format_prediction(cfg: RunConfig, world_size: int, device: Device, memory: int) -> str:
    """Plan a run in a new process, and return a log line with the memory that a step needs.

    The line is a warning with changes if the step does not fit, or a note if planning fails.
    """
    try:
        prediction = in_subprocess(predict, cfg, world_size, device, memory, False)
    except Exception as error:  # the run may fit, even if it cannot be planned
        return f"note: the memory of a step could not be planned: {one_line(error)}"
    sizes = f"{size_text(prediction.memory)} of {size_text(memory)}"
    text = f"{sizes} by the plan, with its peak in {prediction.phase}"
    if not prediction.remedies:
        return f"memory     {text}"
    return f"WARNING    a step may not fit: {text}. Cheapest changes: {prediction.remedies}"


def _plan_advice(cfg: RunConfig, world_size: int, device: Device, memory: int) -> str:
    """Plan changes with which the run would fit, in a new process, and return them as text.

    If planning fails or takes too long, the text says so. No error is raised.
    """
    try:
        return in_subprocess(_plan_remedies, cfg, world_size, device, memory)
    except BrokenProcessPool:
        return f"not planned (over {_ADVICE_TIMEOUT} s, or out of memory); run `toolkit plan`"
    except Exception as error:  # the user needs the shortage's message in any case
        return f"not planned: {one_line(error)}"


def _plan_remedies(cfg: RunConfig, world_size: int, device: Device, memory: int) -> str:
    """Return the changes of the settings with which the run would fit in memory, as text.

    Call it in a child process: it sets an alarm that kills its process after a minute.
    """
    signal.alarm(_ADVICE_TIMEOUT)
    return predict(cfg, world_size, device, memory, True).remedies


@contextlib.contextmanager
def _advise_if_out_of_memory(
    cfg: RunConfig, run: Run, device: Device, memory: int
) -> Iterator[None]:
    """Within the context, turn an out-of-memory error into a MemoryShortageError with advice.

    Each rank that fails prints its error. The first of them also plans changes that would fit; the
    others wait two minutes for it and then raise the error without advice.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        peak = peak_host_memory()
        if run.device.type != "cpu":
            peak = torch.get_device_module(run.device).max_memory_allocated(run.device)
        batch = f"{cfg.train.per_device_train_batch_size} x {cfg.data.sequence_length:,} tokens"
        message = (
            f"out of memory on rank {run.rank}: {one_line(error)} (batch {batch}; "
            f"{size_text(peak)} at the peak, {size_text(memory)} available)"
        )
        if not ranks.is_first_to_report("out of memory"):
            ranks.print_line(f"[rank {run.rank}] {message}", sys.stderr)
            with watchdog.extend_timeout("out of memory"):
                # The launcher ends this process when the first one has reported its error.
                time.sleep(2 * _ADVICE_TIMEOUT)
            raise MemoryShortageError(message) from error
        ranks.print_line(f"{message}; planning what would fit ...", sys.stderr)
        with watchdog.extend_timeout("planning what would fit"):
            advice = _plan_advice(cfg, run.world_size, device, memory)
        raise MemoryShortageError(f"{message}. Cheapest changes: {advice}") from error
