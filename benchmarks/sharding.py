"""What sharding costs and saves against plain data parallelism, and each knob against the default.

    python benchmarks/sharding.py [--rounds 9] [--ranks 2] [--output FILE]

Gloo ranks on one machine. Every setting is a copy of one model in the same processes; a round runs
one step of each in a random order, so that a busy moment hits all alike. Times are medians, given
as the ratio to plain data parallelism in the same round (`DistributedDataParallel`, the peer).
Memory: bytes of parameters, gradients and AdamW's state that one rank holds between steps, and what
the end of a forward adds: activations kept for the backward and gathered parameters. Losses are
compared: all settings train alike.
"""

import argparse
import dataclasses
import gc
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import describe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig

from toolkit.config.settings import ModelConfig, OptimConfig, ShardingConfig
from toolkit.data.samples.batch import Batch
from toolkit.formats import reshard
from toolkit.loading.pretrained import init_weights
from toolkit.mesh import init_mesh
from toolkit.models.causal_lm import build_on_meta
from toolkit.sharding.fsdp import apply_fsdp
from toolkit.training.loss import causal_lm_loss
from toolkit.training.optim import build_optimizer
from toolkit.training.step import train_step

FP32 = ShardingConfig(param_dtype="float32")
PEER = "DistributedDataParallel"
SETTINGS: dict[str, dict[str, Any]] = {
    "dp_shard: 1 (plain data parallelism)": {"dp_shard": 1},
    "dp_shard: 1, reshard_after_forward: false": {"dp_shard": 1, "reshard_after_forward": False},
    "sharded (the default)": {},
    "reshard_after_forward: true": {"reshard_after_forward": True},
    "reshard_after_forward: false": {"reshard_after_forward": False},
    "embedding_units": {"embedding_units": True},
    "forward_prefetch: 2, backward_prefetch: 2": {"forward_prefetch": 2, "backward_prefetch": 2},
    "activation_checkpointing: full": {"activation_checkpointing": "full"},
    "activation_checkpointing: 2": {"activation_checkpointing": 2},
    "activation_checkpointing: selective": {"activation_checkpointing": "selective"},
    "cpu_offload": {"cpu_offload": True},
    "param_dtype: bfloat16": {"param_dtype": "bfloat16"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    default = Path(__file__).parent.parent / "docs/evidence/benchmarks/sharding.md"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shapes = LlamaConfig(
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=6,
            vocab_size=8192,
            tie_word_embeddings=False,
        )
        shapes.save_pretrained(folder)
        mp.spawn(measure, (args.ranks, folder, args.rounds), nprocs=args.ranks)
        found = json.loads(Path(folder, "found.json").read_text())
    report = render(found, args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(report, encoding="utf-8")
    print(report)


def measure(rank: int, world: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    steps = {PEER: Peer(folder, world)} | {
        name: ByToolkit(folder, world, dataclasses.replace(FP32, **changes))
        for name, changes in SETTINGS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):  # two to warm up
        batch = rows(world, rank, turn)
        order = random.Random(turn).sample(list(steps), len(steps))
        for name in order:
            dist.barrier()
            begun = time.perf_counter()
            losses[name].append(steps[name].step(batch))
            dist.barrier()
            if turn > 1:
                times[name].append(time.perf_counter() - begun)
    memory = {name: steps[name].memory(rows(world, rank, 0)) for name in steps}
    if rank == 0:
        parameters = sum(p.numel() for p in steps[PEER].model.parameters())
        found = {"times": times, "losses": losses, "memory": memory, "parameters": parameters}
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that is going down


def rows(world: int, rank: int, turn: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(turn)
    ids = torch.randint(0, 8192, (2 * world, 256), generator=generator)[rank::world]
    return {"input_ids": ids, "labels": ids.clone()}


class ByToolkit:
    """A copy of the model under one setting, stepped by the toolkit."""

    def __init__(self, folder: str, world: int, cfg: ShardingConfig):
        self.model: Any = build_on_meta(ModelConfig(folder, init="random"))
        self.sharded = apply_fsdp(self.model, init_mesh("cpu", world, cfg), cfg)
        init_weights(self.model, "cpu", seed=0)
        self.model.train()
        self.optimizer = build_optimizer(self.model, OptimConfig(learning_rate=1e-4))

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        return float(train_step(self.sharded, self.optimizer, [Batch.of(**batch)]).loss)

    def memory(self, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
        return held(self.model, self.optimizer), added(self.model, batch)


class Peer:
    """The same model under DistributedDataParallel."""

    def __init__(self, folder: str, world: int):
        self.model = build_on_meta(ModelConfig(folder, init="random"))
        init_weights(self.model, "cpu", seed=0)
        self.wrapped = DistributedDataParallel(self.model.train())
        self.optimizer = build_optimizer(self.model, OptimConfig(learning_rate=1e-4))
        self.world = world

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        loss = self.wrapped(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return float(total) / self.world

    def memory(self, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
        # Gradients live in the reducer's buckets, one more copy of the parameters.
        return held(self.model, self.optimizer), added(self.model, batch)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, their gradients and the optimizer's state on this rank."""
    tensors = [local(p) for p in model.parameters()]
    state = [local(t) for s in optimizer.state.values() for t in s.values()]
    return sum(t.nbytes for t in tensors) * 2 + sum(t.nbytes for t in state if t.ndim)


def added(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Return the bytes that the end of a forward holds beyond that: kept and gathered."""
    before = alive({})
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = causal_lm_loss(model, Batch.of(**batch)).total
    after = alive(kept)
    del loss
    reshard(model)
    return sum(size for pointer, size in after.items() if before.get(pointer) != size)


def alive(others: dict[int, int]) -> dict[int, int]:
    """Return address -> bytes of the storage of every tensor that Python knows, and of `others`."""
    gc.collect()
    found = dict(others)
    for tensor in gc.get_objects():
        # By type: deprecated objects answer `isinstance` with a warning.
        if issubclass(type(tensor), torch.Tensor) and not tensor.is_meta:
            storage = local(tensor.detach()).untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def render(found: dict[str, Any], args: argparse.Namespace) -> str:
    peer = found["times"][PEER]
    lines = [
        "# Sharding, and each knob, against plain data parallelism",
        "",
        f"{args.ranks} gloo ranks, 1 thread each; Llama of {found['parameters'] / 1e6:.1f} M "
        "parameters, fp32 where not said otherwise, 512 tokens a rank; one step of every setting "
        f"in turn, {args.rounds} rounds. Time: median of the ratio to {PEER} in the same round, "
        "with the quartiles. Held: parameters, gradients and AdamW's state of one rank. Added: "
        "what a forward leaves for its backward, activations and gathered parameters (host memory "
        "of activation_offload included).",
        "",
        "| setting | time, x DDP | held, MB | added, MB | last loss |",
        "|---|---|---|---|---|",
    ]
    for name, times in found["times"].items():
        ratios = sorted(a / b for a, b in zip(times, peer, strict=True))
        low, _, high = statistics.quantiles(ratios, n=4)
        held_bytes, added_bytes = found["memory"][name]
        lines.append(
            f"| {name} | {statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}] | "
            f"{held_bytes / 1e6:.0f} | {added_bytes / 1e6:.0f} | {found['losses'][name][-1]:.4f} |"
        )
    lines += ["", describe("sharding.py", "torch", "transformers"), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
