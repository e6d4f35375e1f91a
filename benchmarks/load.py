"""What loading a checkpoint into shards costs: memory, bytes asked for, time against a bare loop.

    python benchmarks/load.py [--layers 22] [--ranks 2] [--repeats 9] [--output FILE]

Writes a checkpoint with the shapes of TinyLlama-1.1B, then loads it on `ranks` gloo processes,
alternating with a bare loop that reads the same rows with safetensors' `get_slice` into memory of
its own and does nothing else. Once with the dtypes equal (a copy), once from bf16 to fp32 masters
(a cast). The page cache is warm: the disk is not what is measured.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

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
from toolkit.models.causal_lm import build_on_meta
from toolkit.sharding.fsdp import apply_fsdp, init_mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/load.md"))
    args = parser.parse_args()
    lines = []
    # Freed memory goes back to the system: each side pays for the pages that it fills.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(128 * 1024)
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in (torch.float32, torch.bfloat16):
            folder = write_checkpoint(Path(scratch, str(dtype)), args.layers, dtype)
            mp.spawn(measure, (args.ranks, str(folder), scratch, args.repeats), nprocs=args.ranks)
            found = [json.loads(Path(scratch, f"{r}.json").read_text()) for r in range(args.ranks)]
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
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}.store", world), rank=rank, world_size=world
    )
    result: dict = {"ours": [], "bare": [], "peak": 0}
    shapes = build(folder, world)
    slices = {n: local_slices(p) for n, p in shapes.named_parameters() if isinstance(p, DTensor)}
    for i in range(repeats + 1):
        # Built before both: on a virtual machine memory that is free for seconds has to be fetched
        # from the host again, and whoever comes after the building would pay for it.
        model = build(folder, world)
        turns = [partial(time_bare, folder, slices), partial(time_load, model, folder, result)]
        seconds = {}
        for name, turn in list(zip(("bare", "ours"), turns, strict=True))[:: 1 if i % 2 else -1]:
            gc.collect()
            dist.barrier()
            seconds[name] = turn()
        del model, turns
        for name, value in seconds.items() if i else ():  # the first round warms up
            result[name].append(value)
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


def row(dtype: str, found: list[dict]) -> str:
    # A load is as slow as its slowest rank; the rounds alternate, so ratios are taken per round.
    ours = [max(times) for times in zip(*(f["ours"] for f in found), strict=True)]
    loop = [max(times) for times in zip(*(f["bare"] for f in found), strict=True)]
    ratio = statistics.median(a / b for a, b in zip(ours, loop, strict=True))
    bound = max(f["peak"] / (1.1 * f["shard"] + f["largest"]) for f in found)
    first = found[0]
    return (
        f"| {dtype} | {first['file'] / 1e9:.2f} | "
        f"{sum(f['requested'] for f in found) / first['file']:.4f} | "
        f"{max(f['peak'] for f in found) / 1e6:,.0f} | {first['shard'] / 1e6:,.0f} | "
        f"{first['largest'] / 1e6:,.0f} | "
        f"{bound:.2f} | {statistics.median(ours):.2f} | {statistics.median(loop):.2f} | "
        f"{ratio:.2f} |"
    )


def report(lines: list[str], args: argparse.Namespace) -> str:
    return "\n".join(
        [
            "# Loading a checkpoint into shards",
            "",
            f"{args.ranks} gloo ranks, fp32 masters, warm page cache, {args.repeats} rounds in "
            "which the bare "
            "`get_slice` loop over the same rows and `load_pretrained` take turns; medians. Peak "
            "is anonymous "
            "memory above what was there before the call; the bound is 1.1 x shard + largest "
            "tensor.",
            "",
            "| file dtype | file GB | requested by all / file | peak MB | shard MB | largest "
            "tensor MB | peak / bound "
            "| load s | bare loop s | ratio |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *lines,
            "",
            describe("load.py", "torch", "transformers", "safetensors"),
            "",
        ]
    )


if __name__ == "__main__":
    main()
