"""What a checkpoint costs: saving against a plain write, the loop's wait, loading on other ranks.

    python benchmarks/checkpoint.py [--gigabytes 4] [--ranks 4] [--repeats 5] [--moments] [--keep]
                                    [--scratch DIR] [--output FILE]

`ranks` gloo processes hold a Llama of `gigabytes` of fp32 parameters, with `--moments` AdamW's
state too. Round for round, in turn, each on fresh files that are removed afterwards (with `--keep`
at the end: a thin disk takes blocks that were just freed several times as fast as new ones):

    plain     every rank writes the bytes of its shards into one file and fsyncs it
    one       one process writes as many bytes into one file and fsyncs it, as `cp` does
    save      `checkpoint.save`: shards, hashes, digests, manifest, commit
    unproven  the same without the sums that prove what was written
    unhashed  without these and without any hash
    async     the same with `async_save`: how long the loop waits, and until it is committed

Then 1, 2 and 4 ranks resume what was saved, from a cold page cache where the system lets files go
(Linux), and say how many bytes they asked for; verification is timed apart. Saves and loads begin
when the rest of memory is full of another file (`memory.fill_page_cache`).
"""

import argparse
import contextlib
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import describe
from memory import fill_page_cache
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

from toolkit import checkpoint
from toolkit.checkpoint import resuming, saving, shards
from toolkit.config.settings import CheckpointConfig, ModelConfig, OptimConfig, ShardingConfig
from toolkit.loading.pretrained import materialise
from toolkit.mesh import init_mesh
from toolkit.models.causal_lm import build_on_meta
from toolkit.sharding.fsdp import apply_fsdp
from toolkit.training.optim import build_optimizer

KINDS = ("plain", "one", "save", "unproven", "unhashed", "async")
_WITHOUT = {"unproven": 1, "unhashed": 2}  # the proof; the hashes, too
_WIDTH = 2048
_LAYER = (4 * _WIDTH**2 + 3 * _WIDTH * 5632) * 4  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of parameters, all ranks")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--moments", action="store_true", help="AdamW's state too: three times it")
    parser.add_argument("--keep", action="store_true", help="no file goes before the end")
    parser.add_argument("--scratch", type=Path, help="on the disk to measure")
    parser.add_argument(
        "--output", type=Path, default=Path("docs/evidence/benchmarks/checkpoint.md")
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        write_config(Path(scratch, "model"), args.gigabytes)
        found = on_ranks(args.ranks, saves, scratch, args.repeats, args.moments, args.keep)
        loads = {}
        for world in (1, 2, 4):
            forget(Path(scratch, "kept"))
            fill_page_cache(Path(scratch, "zeros"))
            loads[world] = on_ranks(world, load, scratch, args.moments)
    text = report(found, loads, args)
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)


def write_config(folder: Path, gigabytes: float) -> None:
    """Write the config of a Llama whose fp32 parameters take about `gigabytes`."""
    vocabulary = 32000 if gigabytes >= 1 else 4000
    layers = max(1, round((gigabytes * 1e9 - 2 * vocabulary * _WIDTH * 4) / _LAYER))
    LlamaConfig(
        hidden_size=_WIDTH,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    ).save_pretrained(folder)


def on_ranks(world: int, fn, scratch: str, *args) -> list[dict]:
    mp.spawn(_entry, (fn, world, scratch, args), nprocs=world)
    return [json.loads(Path(scratch, f"{r}.json").read_text()) for r in range(world)]


def _entry(rank: int, fn, world: int, scratch: str, args: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{scratch}/store-{world}-{fn.__name__}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    Path(scratch, f"{rank}.json").write_text(json.dumps(fn(rank, world, scratch, *args)))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def build(world: int, scratch: str, moments: bool) -> checkpoint.TrainState:
    cfg = ShardingConfig(param_dtype="float32")
    model = build_on_meta(ModelConfig(f"{scratch}/model", init="random"))
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    materialise(model, torch.device("cpu"))
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-3)) if moments else None
    return checkpoint.TrainState(model, optimizer, step=1)


def saves(rank: int, world: int, scratch: str, repeats: int, moments: bool, keep: bool) -> dict:
    state = build(world, scratch, moments)
    torch.manual_seed(rank)
    for parameter in state.model.parameters():
        local(parameter).normal_()
    if state.optimizer is not None:
        for parameter in state.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        state.optimizer.step()
        state.optimizer.zero_grad()
    seconds: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "blocked")}
    busy: dict[str, list[float]] = {kind: [] for kind in KINDS}
    shards = [local(p) for p in state.model.parameters()]
    if state.optimizer is not None:
        values = (v for s in state.optimizer.state.values() for v in s.values() if v.ndim)
        shards += [local(v) for v in values]
    for i in range(repeats + 1):
        for kind in KINDS if i % 2 else KINDS[::-1]:
            gc.collect()
            run = Path(scratch, f"run-{kind}-{i}")
            if rank == 0:
                fill_page_cache(Path(scratch, "zeros"))
                os.sync()
            dist.barrier()
            begun, worked = time.perf_counter(), time.process_time()
            if kind == "plain":
                plain(run, rank, shards)
            elif kind == "one":
                if rank == 0:
                    plain(run, rank, shards * world)
            else:
                with without(_WITHOUT.get(kind, 0)):
                    checkpoint.save(state, run, CheckpointConfig(async_save=kind == "async"))
                    if kind == "async":
                        blocked = time.perf_counter() - begun
                        checkpoint.wait()
            worked = time.process_time() - worked
            dist.barrier()
            if i:  # the first round warms up: imports, and the copies' memory
                seconds[kind].append(time.perf_counter() - begun)
                busy[kind].append(worked)
                if kind == "async":
                    seconds["blocked"].append(blocked)
            if rank == 0 and not keep:
                shutil.rmtree(run)
            dist.barrier()
    checkpoint.save(state, Path(scratch, "kept"), CheckpointConfig())
    return {"seconds": seconds, "busy": busy, "bytes": sum(s.nbytes for s in shards)}


def plain(folder: Path, rank: int, shards: list[torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    with open(folder / str(rank), "wb", buffering=0) as f:
        for shard in shards:
            left = memoryview(shard.reshape(-1).view(torch.uint8).numpy())
            while left:
                left = left[f.write(left) :]
        os.fsync(f.fileno())


def without(what: int) -> contextlib.ExitStack:
    """Return a context in which a save proves nothing of what it wrote (1), and does not hash its
    shards either (2).
    """

    class Nothing:
        def update(self, content: object) -> None:
            pass

        def hexdigest(self) -> str:
            return "0" * 64

    def no_sums(tensors: dict) -> dict:
        return dict.fromkeys(tensors, (0, 0, 0))

    stack = contextlib.ExitStack()
    if what:
        stack.enter_context(mock.patch.object(saving, "_sum_local_parts", no_sums))
        stack.enter_context(mock.patch.object(shards, "bytes_sum", return_value=0))
    if what < 2:
        return stack
    stack.enter_context(mock.patch.object(shards, "hashlib", SimpleNamespace(sha256=Nothing)))
    return stack


def forget(folder: Path) -> None:
    """Let the page cache go of all files below `folder`."""
    if hasattr(os, "posix_fadvise"):
        for file in folder.rglob("*"):
            if file.is_file():
                with open(file, "rb") as f:
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(rank: int, world: int, scratch: str, moments: bool) -> dict:
    state = build(world, scratch, moments)
    path = Path(scratch, "kept", "checkpoints", "step-00000001")
    dist.barrier()
    proof, read, found = resuming._check_bit_sums, resuming.read_tensors, dict[str, float]()

    def timed(*args: Any) -> None:
        begun = time.perf_counter()
        proof(*args)
        found["proof"] = time.perf_counter() - begun

    def counted(folder: Path, table: Any, tensors: dict) -> None:
        found["own_bytes"] = sum(local(tensor).nbytes for tensor in tensors.values())
        found["bytes_requested"] = read(folder, table, tensors)

    begun = time.perf_counter()
    with (
        mock.patch.object(resuming, "_check_bit_sums", timed),
        mock.patch.object(resuming, "read_tensors", counted),
    ):
        checkpoint.restore(state, path)
    found["seconds"] = time.perf_counter() - begun
    if rank == 0:
        forget(Path(scratch, "kept"))
    dist.barrier()
    begun = time.perf_counter()
    assert checkpoint.find_newest(f"{scratch}/kept") is not None
    return {**found, "verified": time.perf_counter() - begun}


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def report(found: list[dict], loads: dict[int, list[dict]], args: argparse.Namespace) -> str:
    # All ranks leave a round together; the slowest counts.
    times = {
        kind: [max(f["seconds"][kind][i] for f in found) for i in range(args.repeats)]
        for kind in found[0]["seconds"]
    }

    def ratio(kind: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(times[kind], times[to], strict=True))

    def work(kind: str) -> str:
        if kind not in found[0]["busy"]:
            return ""
        rounds = zip(*(f["busy"][kind] for f in found), strict=True)
        return f"{statistics.median(sum(spent) for spent in rounds):.2f}"

    total = sum(f["bytes"] for f in found)
    rows = [
        f"| {what} | {statistics.median(times[kind]):.2f} | "
        f"{min(times[kind]):.2f} to {max(times[kind]):.2f} | {work(kind)} | "
        f"{ratio(kind, 'plain'):.2f} | {ratio(kind, 'one'):.2f} |"
        for kind, what in (
            ("plain", "plain write and fsync, each rank its shards"),
            ("one", "plain write and fsync, one process all bytes"),
            ("save", "save, committed"),
            ("unproven", "save without the proof"),
            ("unhashed", "save without proof and hashes"),
            ("async", "asynchronous save, committed"),
            ("blocked", "asynchronous save, the loop's wait"),
        )
    ]
    reads = [
        f"| {world} | {sum(r['own_bytes'] for r in ranks) / 1e9:.3f} | "
        f"{sum(r['bytes_requested'] for r in ranks) / 1e9:.3f} | "
        f"{max(r['bytes_requested'] / r['own_bytes'] for r in ranks):.4f} | "
        f"{max(r['seconds'] for r in ranks):.2f} | {max(r['proof'] for r in ranks):.2f} | "
        f"{max(r['verified'] for r in ranks):.2f} |"
        for world, ranks in loads.items()
    ]
    return "\n".join(
        [
            "# Saving and loading checkpoints",
            "",
            f"{args.ranks} gloo ranks, {total / 1e9:.2f} GB "
            f"({'parameters and AdamW state' if args.moments else 'parameters'}, fp32), fresh "
            f"files{', none removed before the end' if args.keep else ''}, fsync included, "
            f"{args.repeats} rounds in which the kinds take turns; medians, "
            "and ratios taken per round.",
            "",
            "| | s | from, to | processor s, all ranks | against plain | against one process |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "The proof (the bits of each tensor summed in memory, and again as they are written) "
            f"makes a save {ratio('save', 'unproven'):.2f} x as long; with hashing (sha256 of the "
            f"files, digests of the tensors) it is {ratio('save', 'unhashed'):.2f} x.",
            "",
            f"Loading what {args.ranks} ranks saved, cold page cache:",
            "",
            "| ranks | own GB, all ranks | requested GB | requested / own, worst rank | load s | "
            "of it the proof s | verification s |",
            "|---|---|---|---|---|---|---|",
            *reads,
            "",
            describe("checkpoint.py", "torch", "xxhash"),
            "",
        ]
    )


if __name__ == "__main__":
    main()
