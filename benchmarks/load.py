"""What loading a checkpoint into shards costs: memory, bytes asked for, time against a bare loop.

    python benchmarks/load.py [--layers 22] [--ranks 2] [--repeats 9] [--output FILE]

Writes a checkpoint with the shapes of TinyLlama-1.1B, then loads it on `ranks` gloo processes, in
random turn with a bare loop that reads the same rows with safetensors' `get_slice` into memory of
its own and does nothing else, and with that loop again as a control. Once with the dtypes equal (a
copy), once from bf16 to fp32 masters (a cast). The page cache is warm: the disk is not what is
measured.

Memory that a process has not had yet costs more than the copy, the same number of page faults on
both sides; what a virtual machine takes for one changes by half between two turns. So each is
measured twice: with fresh memory, as a run has it, and with memory that the process keeps, where
the difference stands out.
"""

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import describe
from memory import Peak, anonymous
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

from toolkit.config.settings import ModelConfig, ShardingConfig
from toolkit.formats import local_slices, read_weights, weight_files
from toolkit.loading.pretrained import load_pretrained
from toolkit.mesh import init_mesh
from toolkit.models.causal_lm import build_on_meta
from toolkit.sharding.fsdp import apply_fsdp

SIDES = ("bare", "again", "ours")
MALLOC = {  # of glibc: freed memory goes back to the system, or never
    "fresh": {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)},
    "kept": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/benchmarks/load.md"))
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in (torch.float32, torch.bfloat16):
            folder = write_checkpoint(Path(scratch, str(dtype)), args.layers, dtype)
            found = {}
            for memory, variables in MALLOC.items():
                with mock.patch.dict(os.environ, variables):
                    given = (args.ranks, str(folder), scratch, args.repeats)
                    mp.spawn(measure, given, nprocs=args.ranks)
                files = [Path(scratch, f"{r}.json") for r in range(args.ranks)]
                found[memory] = [json.loads(file.read_text()) for file in files]
            lines.append(row(str(dtype).removeprefix("torch."), found))
    text = report(lines, args)
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)


def write_checkpoint(folder: Path, layers: int, dtype: torch.dtype) -> Path:
    """Write a Llama with the shapes of TinyLlama-1.1B in `dtype`, in files of at most 2 GB."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="2GB")
    return folder


def measure(rank: int, world: int, folder: str, scratch: str, repeats: int) -> None:
    torch.set_num_threads(1)
    store = Path(f"{folder}.store")
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world
    )
    result: dict = {side: [] for side in SIDES}
    shapes = build(folder, world)
    slices = {n: local_slices(p) for n, p in shapes.named_parameters() if isinstance(p, DTensor)}
    order = random.Random(0)  # the same on all ranks
    for i in range(repeats + 1):
        model = build(folder, world)
        time_bare(folder, slices)  # whoever comes after a pause pays for it
        for side in order.sample(SIDES, len(SIDES)):
            gc.collect()
            dist.barrier()
            seconds = (
                time_load(model, folder, result) if side == "ours" else time_bare(folder, slices)
            )
            if i:  # the first round warms up
                result[side].append(seconds)
    model = build(folder, world)
    gc.collect()
    base = anonymous()
    with Peak() as peak:  # in a round of its own: watching takes time
        load_pretrained(model, folder, "cpu")
    result["peak"] = peak.highest - base
    result["shard"] = sum(p.to_local().nbytes for p in model.parameters())
    result["largest"] = max(e.nbytes for e in read_weights(weight_files(Path(folder))).values())
    Path(scratch, f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    store.unlink(missing_ok=True)


def time_bare(folder: str, slices: dict[str, tuple[slice, ...]]) -> float:
    begun = time.perf_counter()
    kept = bare(folder, slices)
    seconds = time.perf_counter() - begun
    del kept
    return seconds


def time_load(model: torch.nn.Module, folder: str, result: dict) -> float:
    begun = time.perf_counter()
    loaded = load_pretrained(model, folder, "cpu")
    seconds = time.perf_counter() - begun
    result["requested"], result["file"] = loaded.bytes_requested, loaded.file_bytes
    model.to("meta")  # frees what it loaded, as the other turn does
    return seconds


def build(folder: str, world: int):
    cfg = ShardingConfig(param_dtype="float32")
    model = build_on_meta(ModelConfig(folder))
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    return model


def bare(folder: str, slices: dict[str, tuple[slice, ...]]) -> list[torch.Tensor]:
    """Read the own rows of every tensor as fp32 into memory of their own."""
    kept = []
    for file in weight_files(Path(folder)):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                kept.append(handle.get_slice(name)[slices[name]].to(torch.float32, copy=True))
    return kept


def row(dtype: str, found: dict[str, list[dict]]) -> str:
    first, ranks = found["fresh"][0], found["fresh"]
    bound = max(f["peak"] / (1.1 * f["shard"] + f["largest"]) for f in ranks)
    cells = [
        dtype,
        f"{first['file'] / 1e9:.2f}",
        f"{sum(f['requested'] for f in ranks) / first['file']:.4f}",
        *(f"{value / 1e6:,.0f}" for value in (max(f["peak"] for f in ranks), first["shard"])),
        f"{bound:.2f}",
    ]
    for memory in MALLOC:
        # A load is as slow as its slowest rank; sides are compared within a round.
        times = {
            side: [max(round) for round in zip(*(f[side] for f in found[memory]), strict=True)]
            for side in SIDES
        }
        bare = times["bare"]
        cells += [f"{statistics.median(times[side]):.2f}" for side in ("ours", "bare")]
        for side in ("ours", "again"):
            ratios = [a / b for a, b in zip(times[side], bare, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    return f"| {' | '.join(cells)} |"


def report(lines: list[str], args: argparse.Namespace) -> str:
    timed = ["load s", "bare loop s", "ratio", "control"]
    head = ["file dtype", "file GB", "requested by all / file", "peak MB", "shard MB"]
    head += ["peak / bound", *(f"{memory}: {what}" for memory in MALLOC for what in timed)]
    return "\n".join(
        [
            "# Loading a checkpoint into shards",
            "",
            f"{args.ranks} gloo ranks, fp32 masters, warm page cache, {args.repeats} rounds in "
            "which `load_pretrained`, the bare `get_slice` loop over the same rows and that loop "
            "again (the control) take turns in random order, with memory that is fresh and with "
            "memory that the process kept. Seconds are medians, ratios medians over rounds with "
            "their quartiles. Peak is anonymous memory above what was there before the call; the "
            "bound is 1.1 x shard + largest tensor.",
            "",
            f"| {' | '.join(head)} |",
            "|---" * len(head) + "|",
            *lines,
            "",
            describe("load.py", "torch", "transformers", "safetensors"),
            "",
        ]
    )


if __name__ == "__main__":
    main()
