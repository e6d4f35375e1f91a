"""What the guards of a run (`toolkit.training.guards`) add to a step.

    python benchmarks/guards.py [--rounds 40] [--output FILE]

Two gloo ranks, one model a side with the same weights and batches. In random turn one block of
steps by each side: with nothing watched, with what a run has by default (bits of weights at every
step and of the optimizer's state at every 10th, ranks compared and timed at each line, every 10
steps; the ranks asked for a signal at each step, a watchdog beside each), and with spikes skipped
too. What `train_step` itself does of a NaN is in all of them. One more side is the first again:
what differs between two equal sides is noise. The difference to the first side is taken per round;
its confidence interval is over the rounds. The processor's time, which a machine with other work to
do measures too, is that of rank 0's process.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import describe
from step import DEMO, FP32, Tokens, interval, toy_model

from toolkit.checkpoint import TrainState
from toolkit.config.settings import ModelConfig, OptimConfig
from toolkit.data.samples.batch import Batch
from toolkit.loading.pretrained import init_weights
from toolkit.mesh import init_mesh
from toolkit.models.causal_lm import build_on_meta
from toolkit.sharding.fsdp import apply_fsdp
from toolkit.training.guards import preemption, watchdog
from toolkit.training.guards.bad_steps import BadSteps, Spikes
from toolkit.training.guards.integrity import Integrity
from toolkit.training.guards.run_guards import Guards
from toolkit.training.metrics import Metrics
from toolkit.training.optim import build_optimizer, build_scheduler
from toolkit.training.step import train_step

BLOCK = 10  # as train.logging_steps by default
BARE, AGAIN = "nothing is watched", "nothing, once more"


def nothing(state: TrainState) -> Guards:
    return Guards(BadSteps(3), state=state)


def default(state: TrainState) -> Guards:
    return Guards(BadSteps(3), Integrity(state), lambda: 0.0, state)


def and_spikes(state: TrainState) -> Guards:
    spikes = Spikes(1e6, torch.device("cpu"), {})  # decides, and skips none
    return Guards(BadSteps(3), Integrity(state), lambda: 0.0, state, spikes)


SIDES: dict[str, Callable[[TrainState], Guards]] = {
    BARE: nothing,
    AGAIN: nothing,
    "as by default": default,
    "and train.skip_spikes": and_spikes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/benchmarks/guards.md"))
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        toy = toy_model(Path(scratch, "toy"))
        for name, folder, length, size, rounds in (
            ("toy (2 layers of 32)", toy, 32, 2, args.rounds),
            ("the demo's (3 layers of 256)", DEMO, 128, 8, max(4, args.rounds // 2)),
        ):
            mp.spawn(measure, (str(folder), length, size, rounds, scratch), nprocs=2)
            lines += rows(name, json.loads(Path(scratch, "0.json").read_text()))
    text = report(lines)
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)


def measure(rank: int, folder: str, length: int, size: int, rounds: int, scratch: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    store = dist.FileStore(f"{scratch}/{length}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    steps = BLOCK * (rounds + 1)
    watchdog.start(300.0, Path(scratch), lambda: False)
    watch = watchdog._watch
    loops = {
        side: trained(folder, length, size, steps, Path(scratch), side, guards)
        for side, guards in SIDES.items()
    }
    losses: dict[str, list[float]] = {side: [] for side in SIDES}
    wall: dict[str, list[float]] = {side: [] for side in SIDES}
    processor: dict[str, list[float]] = {side: [] for side in SIDES}
    chance = random.Random(0)
    for i in range(rounds + 1):
        for side in chance.sample([*SIDES], len(SIDES)):
            watchdog._watch = watch if SIDES[side] is not nothing else None
            dist.barrier()
            begun = time.perf_counter(), time.process_time()
            losses[side].append(next(loops[side]))
            if i > 0:  # the first block warms up
                wall[side].append((time.perf_counter() - begun[0]) / BLOCK)
                processor[side].append((time.process_time() - begun[1]) / BLOCK)
    if rank == 0:
        found = {"losses": losses, "wall": wall, "processor": processor}
        Path(scratch, "0.json").write_text(json.dumps(found))
    dist.barrier()
    watchdog._watch = watch
    watchdog.report_exit(0)
    dist.destroy_process_group()


def trained(
    folder: str,
    length: int,
    size: int,
    steps: int,
    scratch: Path,
    side: str,
    guards: Callable[[TrainState], Guards],
) -> Iterator[float]:
    """Yield the loss after each block of steps."""
    model = build_on_meta(ModelConfig(folder, init="random"))
    sharded = apply_fsdp(model, init_mesh("cpu", 2, FP32), FP32)
    init_weights(model, "cpu", 0)
    cfg = OptimConfig(learning_rate=1e-3, weight_decay=0.1)
    optimizer = build_optimizer(model, cfg)
    scheduler = build_scheduler(optimizer, cfg, steps)
    data = Tokens(model.config.vocab_size, length)
    metrics = Metrics(
        scratch,
        device=torch.device("cpu"),
        first_step=0,
        max_steps=steps,
        tokens_before=0,
        tokens_per_step=2 * size * length,
        flops_per_token=1.0,
        logging_steps=BLOCK,
        guards=guards(TrainState(model, optimizer, scheduler)),
    )
    model.train()
    for step in range(1, steps + 1):
        first = (2 * step + dist.get_rank()) * size
        ids = data.ids[torch.arange(first, first + size) % len(data)]
        batch = Batch.of(ids, input_ids=ids)
        stats = train_step(sharded, optimizer, [batch], spikes=metrics.guards.spikes)
        learning_rate = scheduler.get_last_lr()[0]
        scheduler.step()
        metrics.step(step, stats, learning_rate)
        if SIDES[side] is not nothing:
            preemption.stop_requested()
        if step % BLOCK == 0:
            yield float(stats.loss)


def rows(name: str, found: dict[str, dict[str, list[float]]]) -> list[str]:
    if any(losses != found["losses"][BARE] for losses in found["losses"].values()):
        raise SystemExit(f"{name}: the sides do not do the same work: their losses differ")
    lines = []
    for side in SIDES:
        cells = [name if side == BARE else "", side]
        for clock in ("wall", "processor"):
            own, base = found[clock][side], found[clock][BARE]
            cells.append(f"{1e3 * statistics.median(own):.2f}")
            if side == BARE:
                cells += ["", ""]
                continue
            differences = [1e3 * (a - b) for a, b in zip(own, base, strict=True)]
            low, high = interval(differences)
            middle = statistics.median(differences)
            cells.append(f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]")
            cells.append(f"{middle / (1e3 * statistics.median(base)):+.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def report(lines: list[str]) -> str:
    return "\n".join(
        [
            "# What the guards add to a step",
            "",
            f"2 gloo ranks, 1 thread each, fp32, a line of metrics every {BLOCK} steps; blocks of "
            f"{BLOCK} steps in random turn. Milliseconds a step, medians; the difference to a run "
            "in which nothing is watched is the median over the rounds, with its 95 % bootstrap "
            "interval. All losses are equal, to the bit. A step of the first model has 64 tokens "
            "a rank, of the second 1,024, as in the demo.",
            "",
            "| model | watched | ms | difference | share | processor's ms | difference | share |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
            "",
            f"Load average while it ran: {os.getloadavg()[1]:.0f}. "
            + describe("guards.py", "torch", "transformers"),
            "",
        ]
    )


if __name__ == "__main__":
    main()
