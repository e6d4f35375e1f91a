"""Several ranks on one card: cases of `gpu.py`.

One rank of eight is alone in its process, with what the others would send in the place of the wire
(`one_rank`): memory, kernels, streams and host time are those of the rank. Two ranks that both
exist share the card over gloo, which NCCL refuses: they train, save, are killed and go on.
"""

import multiprocessing
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import one_rank
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpu_bench import bench
from gpu_cases import small
from gpu_common import (
    WARMUP,
    Clock,
    Place,
    ToolkitLoop,
    mixture_folder,
    peaks,
    redirect,
    reset_peak,
    synchronize,
)
from gpu_ledger import Case
from gpu_runs import committed, manifest
from torch.utils._python_dispatch import _disable_current_modes

from toolkit import adapters, checkpoint, loading, models, training
from toolkit.checkpoint.state import optimizer_tensors
from toolkit.config import FinetuneConfig, model_settings
from toolkit.config.settings import CheckpointConfig
from toolkit.data.samples.batch import Batch
from toolkit.data.samples.pieces import Piece
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.formats import local_tensor
from toolkit.formats.layout import slice_like
from toolkit.mesh import Mesh, init_mesh
from toolkit.models.attention import attend_within_documents
from toolkit.models.peft_model import model_tensors
from toolkit.sharding import Sharded, apply_fsdp
from toolkit.training import device, launch

# ---- One of eight --------------------------------------------------------------------------------

WORLD = 8
TIMED = 4
# What a rank sends a second: NVLink inside of a node, one 400 Gb/s card a GPU between nodes.
_LINKS = {"NVLink, 300 GB/s": 300e9, "InfiniBand, 45 GB/s": 45e9}


def one_of_8(place: Place, rows: int = 2, shape: str = "8b", **sharding: Any) -> None:
    """A model in full as the first and as the last rank of eight: peak memory, time of a step with
    and without a wire, host time; and the same collectives in the same order.

    Args:
        place: where the case runs.
        rows: rows of a micro-batch. With `context_parallel`, a row is as many times longer as ranks
            share it, so that the rank has as many tokens.
        shape: "8b", or "moe8b", a mixture of experts with random weights.
        **sharding: changes of the sharding settings.
    """
    orders = {}
    for rank in (0, WORLD - 1):
        context = multiprocessing.get_context("fork")  # as_rank: once a process
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            task = pool.submit(as_one_of_8, place, rank, rows, shape, sharding)
            orders[rank] = task.result()
    # Under HSDP, ranks 0 and 7 share few groups: they must do the same in groups of their own.
    first, last = ([one_rank.of_any_group(line) for line in order] for order in orders.values())
    differs = one_rank.differing(orders) or one_rank.first_difference(first, last)
    place.record("ranks 0 and 7 in one order", not differs, error=differs, count=len(first))


def as_one_of_8(
    place: Place, rank: int, rows: int, shape: str, sharding: dict[str, Any]
) -> list[str]:
    """Load and train as `rank` of eight; return its collectives, in their order."""
    sharding = {"activation_checkpointing": "full", **sharding}
    if place.tiny and "context_parallel" in sharding:
        sharding["context_parallel"] = 4  # the heads of the tiny model
    model = {}
    if shape == "moe8b":
        model = {"name_or_path": str(mixture_folder(place)), "init": "random"}
    cfg = bench(place, shape, sharding=sharding, model=model)
    if place.cuda:
        torch.cuda.set_device(0)
        torch.cuda.init()
    wire = Wire(place)
    with one_rank.as_rank(rank, WORLD) as noted, one_rank.local_all_to_all(wire):
        sharded, optimizer = build(place, cfg, wire)
        batch = batch_of(place, sharded.mesh, rows)

        def step() -> None:
            training.train_step(sharded, optimizer, [batch], max_grad_norm=1.0)

        # Compiled here: with the notes' dispatch mode nothing would be, and each operation would
        # cost the host a call of Python.
        with _disable_current_modes():
            found = timed_steps(place, step)
            count = batch.inputs["input_ids"].numel()
            speed = {"tokens_per_second": count / found["step_seconds"], **found}
            recomputed = cfg.sharding.activation_checkpointing
            check = "speed" if rank == 0 else f"rank {rank}"
            place.record(check, **speed, **peaks(place), recomputed=recomputed)
            for link, rate in _LINKS.items() if rank == 0 else ():
                wire.rate, wire.nbytes = rate, 0
                found = timed_steps(place, step, warmup=1)
                slower = found["step_seconds"] / speed["step_seconds"]
                place.record(f"wire: {link}", **found, times=slower, gb=wire.nbytes / 1e9)
            wire.rate = None
        step()
        synchronize(place)
    return noted.order


def batch_of(place: Place, mesh: Mesh, rows: int) -> Batch:
    """Return a micro-batch of this rank: complete rows, or its part of longer ones."""
    parts = mesh.context.size
    ids = torch.randint(0, 256, (rows, place.length * parts))
    if parts == 1:
        ids = ids.to(place.device)
        return Batch.of(ids, input_ids=ids)
    context = (mesh.context.rank, parts)
    shape = SampleShape("wrapped", place.length * parts, borders=True, context=context)
    samples = [shape.sample([Piece(row, row.copy())]) for row in ids.numpy()]
    return shape.batch(samples).to(torch.device(place.device))


def build(place: Place, cfg: FinetuneConfig, wire: "Wire") -> tuple[Sharded, Any]:
    """Return the sharded model and the optimizer of this rank, with their values."""
    model = models.prepare(model_settings(cfg))
    mesh = init_mesh(place.device, WORLD, cfg.sharding)
    if mesh.context.size > 1:
        attend_within_documents(model, mesh.context)
    model = adapters.prepare_adapters(model, cfg.adapters, cfg.sharding.param_dtype)
    sharded = apply_fsdp(model, mesh, cfg.sharding, fixed_length=True)
    one_rank.local_collectives(model, wire)
    if cfg.sharding.dp_replicate > 1:
        share = 2 * (cfg.sharding.dp_replicate - 1) / cfg.sharding.dp_replicate  # of a ring
        for unit in (m for m in model.modules() if hasattr(m, "set_all_reduce_hook")):
            unit.set_all_reduce_hook(lambda output: wire(int(share * output.nbytes)))
    here = torch.device(place.device, 0) if place.cuda else torch.device("cpu")
    loading.load_or_init(sharded, cfg.model, here, cfg.seed, say=print)
    model.train()
    return sharded, training.build_optimizer(model, cfg.optim)


class Wire:
    """Holds up the current stream for as long as bytes take at `rate` bytes a second."""

    def __init__(self, place: Place) -> None:
        self.rate: float | None = None
        self.nbytes = 0  # sent, in all
        self._cycles = 0.0  # a second
        if place.cuda:
            torch.cuda._sleep(1_000_000)  # the first one is loaded
            clock, cycles = Clock(place), 100_000_000
            clock.mark()
            torch.cuda._sleep(cycles)
            clock.mark()
            self._cycles = cycles / clock.seconds()[0]

    def __call__(self, nbytes: int) -> None:
        if self.rate is not None:
            self.nbytes += nbytes
            if cycles := int(self._cycles * nbytes / self.rate):
                torch.cuda._sleep(cycles)


def timed_steps(place: Place, step: Callable[[], None], warmup: int = WARMUP) -> dict[str, Any]:
    """Return the median time of a step on the device, and for how long the host issues it."""
    for _ in range(warmup):
        step()
    reset_peak(place)
    clock, issuing = Clock(place), []
    clock.mark()
    for _ in range(TIMED):
        begun = time.perf_counter()
        step()
        issuing.append(time.perf_counter() - begun)
        clock.mark()
        synchronize(place)  # a host that is ahead of its device waits for it in the next step
    seconds = clock.seconds()
    middle = statistics.median(seconds)
    return {
        "step_seconds": middle,
        "spread": (max(seconds) - min(seconds)) / middle,
        "host_seconds": statistics.median(issuing),
    }


# ---- Two that exist ------------------------------------------------------------------------------

STEPS = 4


def two_on_one_card(place: Place) -> None:
    """Two ranks share the card: killed after a save they go on, to the state of an undisturbed run,
    to the bit; what both ranks saved is what their memory held.
    """
    base = place.work / place.name
    base.mkdir()
    calm, killed = base / "calm", base / "killed"
    end_well(begin(place, calm))
    first = begin(place, killed, stops=STEPS // 2 + 1)
    marks = [killed / f"stopped-{rank}" for rank in range(2)]
    while not all(mark.exists() for mark in marks):
        if any(one.exitcode is not None for one in first):
            raise RuntimeError("a rank ended before it was killed; see the logs")
        time.sleep(0.02)
    for one in first:
        os.kill(one.pid, signal.SIGKILL)
        one.join()
    left = len(committed(killed))
    end_well(begin(place, killed))
    ours, theirs = manifest(killed)["row_sums"], manifest(calm)["row_sums"]
    unlike = [name for name in theirs if ours.get(name) != theirs[name]]
    same = not unlike and len(ours) == len(theirs) > 0
    check = "killed and resumed: weights and optimizer, to the bit"
    place.record(check, same, unlike=unlike[:20])
    place.record("killed after one save", left == 1, checkpoints=left)


def begin(place: Place, run: Path, stops: int = 0) -> list[Any]:
    """Start both ranks; they stop after step `stops`, to be killed there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    context = multiprocessing.get_context("fork")
    started = []
    for rank in range(2):
        arguments = (place, rank, port, run, stops)
        started.append(context.Process(target=as_one_of_2, args=arguments))
        started[-1].start()
    return started


def end_well(started: list[Any]) -> None:
    for one in started:
        one.join()
    if codes := [one.exitcode for one in started if one.exitcode]:
        raise RuntimeError(f"ranks ended with {codes}; see the logs")


def as_one_of_2(place: Place, rank: int, port: int, run_dir: Path, stops: int) -> None:
    redirect(place.logs / f"{place.name}-rank-{rank}.log")
    with two_ranks(place, rank, port) as run:
        cfg = small(place, train={"max_steps": STEPS})
        loop = ToolkitLoop(place, cfg, run)
        resumed = checkpoint.resume(loop.state, str(run_dir), CheckpointConfig())
        kind = "resumed" if resumed else "to be killed" if stops else "undisturbed"
        for done, _ in enumerate(loop.steps(after=loop.state.step), loop.state.step + 1):
            if done == stops:
                synchronize(place)
                (run_dir / f"stopped-{rank}").touch()
                time.sleep(600)
            if done % (STEPS // 2) == 0:
                loop.state.step = done
                path = checkpoint.save(loop.state, str(run_dir), CheckpointConfig())
                unlike = unlike_on_disk(loop.state, Path(path))
                check = f"rank {rank}, {kind}: what step {done} saved is in memory"
                place.record(check, not unlike, unlike=unlike[:20])
            if done == STEPS:
                break


@contextmanager
def two_ranks(place: Place, rank: int, port: int) -> Iterator[launch.Run]:
    """Be `rank` of two on one device. `launch.start` refuses that: its place is taken here."""
    names = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device.prepare_environment(deterministic=True)
    if place.cuda:
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:gloo" if place.cuda else "gloo")
    here = torch.device("cuda", 0) if place.cuda else torch.device("cpu")
    try:
        accelerator: Any = None  # it makes no loader
        yield launch.Run(accelerator, here, rank, 2)
    finally:
        checkpoint.wait()
        dist.destroy_process_group()


# ---- What a save wrote ---------------------------------------------------------------------------


def late_copies(place: Place) -> None:
    """A save right after a step, while the device still works on it: the bytes on the disk are
    those in the device's memory, tensor by tensor, also where it copies behind the loop.
    """
    cfg = bench(place, "300m")
    with launch.start() as run:
        loop = ToolkitLoop(place, cfg, run)
        steps = loop.steps()
        next(steps)
        for step, behind in ((2, False), (3, True)):
            next(steps)
            loop.state.step = step
            output = place.work / place.name / str(step)
            path = checkpoint.save(loop.state, str(output), CheckpointConfig(async_save=behind))
            checkpoint.wait()
            unlike = unlike_on_disk(loop.state, Path(path))
            kind = "behind the loop" if behind else "at once"
            tensors = {**model_tensors(loop.state.model), **optimizer_tensors(loop.state)}
            size = sum(local_tensor(t).nbytes for t in tensors.values()) / 1e9
            place.record(f"saved {kind}", not unlike, unlike=unlike[:20], gb=size)
        # The control: what a further step changes is not what was saved.
        next(steps)
        changed_since = len(unlike_on_disk(loop.state, Path(path)))
        place.record("control: a step later it differs", changed_since > 0, tensors=changed_since)


def unlike_on_disk(state: checkpoint.TrainState, path: Path) -> list[str]:
    """Return the tensors of this rank that are not those of a checkpoint, read by torch's DCP."""
    tensors = {**model_tensors(state.model), **optimizer_tensors(state)}
    reader = dcp.FileSystemReader(path / "dcp")
    unlike = []
    for name, tensor in tensors.items():
        stored = {name: torch.empty(tensor.shape, dtype=tensor.dtype)}
        dcp.load(stored, storage_reader=reader, no_dist=True)
        if not torch.equal(slice_like(stored[name], tensor), local_tensor(tensor).detach().cpu()):
            unlike.append(name)
    return unlike


def _one_of_8(name: str, seconds: float, **changes: Any) -> Case:
    needs = () if "shape" in changes else ("8b",)
    return Case(f"one_of_8_{name}", partial(one_of_8, **changes), seconds, needs=needs, timed=True)


_SELECTIVE = {"activation_checkpointing": "selective", "rows": 1}
_HSDP = {"dp_replicate": 2, "dp_shard": 4}
CASES = (
    _one_of_8("full", 40),
    _one_of_8("compiled", 60, torch_compile="layer"),
    Case("two_on_one_card", two_on_one_card, 60, needs=("small",)),
    Case("late_copies", late_copies, 40, needs=("300m",)),
    _one_of_8("selective", 40, **_SELECTIVE),
    _one_of_8("hsdp_2x4", 40, **_HSDP),
    _one_of_8("compiled_selective", 60, torch_compile="layer", **_SELECTIVE),
    _one_of_8("context_8", 60, context_parallel=WORLD),
    _one_of_8("experts_sharded", 40, shape="moe8b"),
    _one_of_8("experts_8", 40, shape="moe8b", expert_parallel=WORLD),
)
