"""What the recipe adds to a step over a bare FSDP2 loop that does the same work.

    python benchmarks/step.py [--rounds 40] [--output FILE]

Two gloo ranks, two copies of one model with the same units and precision. In turn, one block of
steps by the recipe's parts (Accelerate's loader over the sample order, `train_step`, the schedule,
metrics with a line every 10 steps) and one by a loop as PyTorch's FSDP2 tutorial writes it (a plain
DataLoader with the same sampler, transformers' loss weighted by the tokens of the global batch,
clip, step, the mean loss over ranks, printed every 10 steps). Both see the same batches and
end with the same loss. The difference is taken per pair of blocks; its confidence interval over the
pairs.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import describe
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, default_collate
from transformers import AutoConfig, get_scheduler

from toolkit.config.settings import ModelConfig, OptimConfig, ShardingConfig
from toolkit.data.order.mixture import SampleOrder
from toolkit.data.order.position import train_batches
from toolkit.data.samples.batch import Batch
from toolkit.loading.pretrained import init_weights
from toolkit.mesh import init_mesh
from toolkit.models.causal_lm import build_on_meta
from toolkit.sharding.fsdp import apply_fsdp
from toolkit.training import launch
from toolkit.training.metrics import Metrics
from toolkit.training.optim import build_optimizer, build_scheduler
from toolkit.training.step import train_step

DEMO = Path(__file__).parent.parent / "recipes/configs/tiny_llama"
FP32 = ShardingConfig(param_dtype="float32")
BLOCK = 10


class Tokens(Dataset):
    """Random windows, the same on every rank."""

    def __init__(self, vocabulary: int, length: int):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, vocabulary, (512, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def collate(samples: list[dict[str, torch.Tensor]]) -> Batch:
    return Batch.of(**default_collate(samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/benchmarks/step.md"))
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        toy = toy_model(Path(scratch, "toy"))
        for name, folder, length, size, rounds in (
            ("toy (2 layers of 32)", toy, 32, 2, args.rounds),
            ("the demo's (3 layers of 256)", DEMO, 256, 8, max(4, args.rounds // 4)),
        ):
            mp.spawn(measure, (str(folder), length, size, rounds, scratch), nprocs=2)
            lines.append(row(name, json.loads(Path(scratch, "0.json").read_text())))
    text = report(lines)
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)


def toy_model(folder: Path) -> Path:
    """Write the config of a model of 2 layers of 32."""
    AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


def measure(rank: int, folder: str, length: int, size: int, rounds: int, scratch: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
    }
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{scratch}/{length}.store", 2), rank=rank, world_size=2
    )
    accelerator = launch.Accelerator(cpu=True)
    run = launch.Run(accelerator, torch.device("cpu"), rank, 2)
    steps = BLOCK * (rounds + 1)
    toolkit_loop = with_toolkit(run, folder, length, size, steps, Path(scratch))
    bare_loop = with_bare_fsdp(rank, folder, length, size, steps)
    losses: dict[str, list[float]] = {"ours": [], "bare": []}
    blocks: dict[str, list[float]] = {"ours": [], "bare": []}
    coin = random.Random(0)
    for i in range(rounds + 1):
        turns = [("ours", toolkit_loop), ("bare", bare_loop)]
        for name, loop in turns if coin.random() < 0.5 else turns[::-1]:
            dist.barrier()
            begun = time.perf_counter()
            losses[name].append(next(loop))
            if i > 0:  # the first block warms up
                blocks[name].append((time.perf_counter() - begun) / BLOCK)
    if rank == 0:
        Path(scratch, "0.json").write_text(json.dumps({"losses": losses, "blocks": blocks}))
    dist.barrier()
    dist.destroy_process_group()


def with_toolkit(run: launch.Run, folder: str, length: int, size: int, steps: int, scratch: Path):
    """Yield the loss after each block of steps by the recipe's parts."""
    model = build_on_meta(ModelConfig(folder, init="random"))
    sharded = apply_fsdp(model, init_mesh("cpu", 2, FP32), FP32)
    init_weights(model, "cpu", 0)
    cfg = OptimConfig(learning_rate=1e-3, weight_decay=0.1)
    optimizer = build_optimizer(model, cfg)
    scheduler = build_scheduler(optimizer, cfg, steps)
    data = Tokens(model.config.vocab_size, length)
    mine = train_batches(SampleOrder(len(data), 0), 0, steps, size, 1, run.rank, 2)
    loader = run.loader(data, mine, collate_fn=collate)
    metrics = Metrics(
        scratch,
        device=run.device,
        first_step=0,
        max_steps=steps,
        tokens_before=0,
        tokens_per_step=2 * size * length,
        flops_per_token=1.0,
        logging_steps=BLOCK,
    )
    model.train()
    stream = iter(loader)
    for step in range(1, steps + 1):
        micro_batches = list(islice(stream, 1))
        stats = train_step(sharded, optimizer, micro_batches)
        learning_rate = scheduler.get_last_lr()[0]
        scheduler.step()
        metrics.step(step, stats, learning_rate)
        if step % BLOCK == 0:
            yield float(stats.loss)


def with_bare_fsdp(rank: int, folder: str, length: int, size: int, steps: int):
    """Yield the loss after each block of steps of a plain FSDP2 loop."""
    model = build_on_meta(ModelConfig(folder, init="random"))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    mesh = init_mesh("cpu", 2, FP32).fsdp
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    init_weights(model, "cpu", 0)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    scheduler = get_scheduler("linear", optimizer, 0, steps)
    data = Tokens(model.config.vocab_size, length)
    mine = train_batches(SampleOrder(len(data), 0), 0, steps, size, 1, rank, 2)
    model.train()
    for step, batch in enumerate(DataLoader(data, batch_sampler=mine), start=1):
        tokens = (batch["labels"][:, 1:] != -100).sum()
        dist.all_reduce(tokens)
        loss = model(**batch, use_cache=False, num_items_in_batch=tokens / 2).loss
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm.full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if step % BLOCK == 0:
            if rank == 0:
                print(f"step {step} loss {mean.item() / 2:.4f}")
            yield mean.item() / 2


def row(name: str, found: dict) -> str:
    ours, bare = found["blocks"]["ours"], found["blocks"]["bare"]
    worst = max(
        abs(a - b) / b
        for a, b in zip(found["losses"]["ours"], found["losses"]["bare"], strict=True)
    )
    if worst > 1e-4:
        raise SystemExit(f"{name}: the two loops do not do the same work: losses differ by {worst}")
    differences = [1e3 * (a - b) for a, b in zip(ours, bare, strict=True)]
    low, high = interval(differences)
    step = 1e3 * statistics.median(bare)
    middle = statistics.median(differences)
    return (
        f"| {name} | {step:.2f} | {1e3 * statistics.median(ours):.2f} | {middle:+.2f} [{low:+.2f}, "
        f"{high:+.2f}] | "
        f"{middle / step:+.1%} | {worst:.0e} |"
    )


def interval(values: list[float], draws: int = 4000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    generator = random.Random(1)
    medians = sorted(
        statistics.median(generator.choices(values, k=len(values))) for _ in range(draws)
    )
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def report(lines: list[str]) -> str:
    return "\n".join(
        [
            "# What the recipe adds to a step",
            "",
            f"2 gloo ranks, 1 thread each, fp32; blocks of {BLOCK} steps in random turn with a "
            "bare FSDP2 loop over the "
            "same batches. Milliseconds a step, medians; the difference is the median over pairs "
            "of blocks, with "
            "its 95 % bootstrap interval.",
            "",
            "| model | bare ms | recipe ms | difference ms | share | losses differ by |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
            describe("step.py", "torch", "transformers", "accelerate"),
            "",
        ]
    )


if __name__ == "__main__":
    main()
