"""What consolidating a sharded checkpoint costs: time and memory, beside `cp` and its peers.

    python benchmarks/consolidate.py [--gigabytes 8] [--ranks 4] [--repeats 5] [--keep]
                                     [--scratch DIR]

Writes a Llama of random weights in fp32 from `ranks` gloo processes in the format each side reads:
the toolkit's own checkpoint, torch's sharded safetensors (transformers), a DCP folder (Accelerate).
Then, in turns, each in a process of its own: `cp` of the exported files, `toolkit consolidate`
without and with the cast to bf16, transformers' consolidate_distributed_checkpoint, Accelerate's
merge_fsdp_weights. Every input is on the disk and out of the page cache, every output is new, and
the clock stops after its fsync. Imports are not timed, nor how their libraries come into memory.
With `--keep` every output is on blocks that a thin disk has not seen yet.
"""

import argparse
import ctypes
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from machine import describe
from memory import Peak, anonymous, cache_libraries, fill_page_cache
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers import LlamaConfig

DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of the model in fp32")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max_shard_size", default="1GB")
    parser.add_argument("--sides", nargs="*", help="only these (default: all)")
    parser.add_argument("--keep", action="store_true", help="no output goes before the end")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure")
    parser.add_argument(
        "--output", type=Path, default=Path("docs/evidence/benchmarks/consolidate.md")
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folders", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        return one_side(args)
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        text = measure(args, Path(scratch))
    print(text)
    if args.sides is None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text)
    return None


# --------------------------------------------------------------------------------------------------
# The checkpoint
# --------------------------------------------------------------------------------------------------


def write_checkpoints(rank: int, world: int, gigabytes: float, root: str) -> None:
    from toolkit import checkpoint, formats
    from toolkit.config.settings import CheckpointConfig, ModelConfig, ShardingConfig
    from toolkit.loading.pretrained import materialise
    from toolkit.mesh import init_mesh
    from toolkit.models.causal_lm import build_on_meta
    from toolkit.sharding.fsdp import apply_fsdp

    torch.set_num_threads(1)
    folder = Path(root)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{root}/store", world), rank=rank, world_size=world
    )
    model = build_on_meta(ModelConfig(name_or_path=str(folder / "config"), init="random"))
    cfg = ShardingConfig(param_dtype="float32")
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    materialise(model, torch.device("cpu"))
    torch.manual_seed(rank)
    for parameter in model.parameters():
        formats.local_tensor(parameter.detach()).normal_(std=0.02)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    checkpoint.save(checkpoint.TrainState(model, step=1), folder / "run", CheckpointConfig())
    checkpoint.wait()
    writer = HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True)
    dcp.save(dict(state), storage_writer=writer)
    dcp.save({"model": dict(state)}, checkpoint_id=folder / "dcp")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that is going down


def config(gigabytes: float) -> LlamaConfig:
    """Return a Llama with TinyLlama's widths and as many layers as make up `gigabytes` in fp32."""
    fixed, layer = 2 * 32000 * 2048, 2048 * (2 * 2048 + 2 * 256 + 3 * 5632 + 2)
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=max(1, round((gigabytes * 1e9 / 4 - fixed) / layer)),
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        tie_word_embeddings=False,
    )


# --------------------------------------------------------------------------------------------------
# One measurement: a process of its own
# --------------------------------------------------------------------------------------------------


def one_side(args: argparse.Namespace) -> None:
    source, target = map(Path, args.folders)
    kind, _, dtype = args.side.partition(":")
    if kind == "toolkit":
        from transformers.models.llama import modeling_llama  # noqa: F401 - imports are not timed

        from toolkit.export import consolidate

        def work() -> None:
            consolidate(source, target, dtype=dtype, max_shard_size=args.max_shard_size)
    elif kind == "transformers":
        from transformers.distributed import consolidate_distributed_checkpoint

        def work() -> None:
            consolidate_distributed_checkpoint(str(source), str(target))
    elif kind == "accelerate":
        from accelerate.utils import merge_fsdp_weights

        def work() -> None:
            merge_fsdp_weights(str(source), str(target))
    else:

        def work() -> None:
            files = sorted(map(str, source.iterdir()))
            target.mkdir()
            subprocess.run(["cp", *files, str(target)], check=True)

    if args.memory:
        before = anonymous()
        with Peak() as peak:
            work()
        print(peak.highest - before)
        return
    cache_libraries()
    begun = time.perf_counter()
    work()
    for file in target.rglob("*"):
        if file.is_file():
            sync(file)
    print(time.perf_counter() - begun)


def sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# All of them, in turns
# --------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, scratch: Path) -> str:
    llama = config(args.gigabytes)
    llama.save_pretrained(scratch / "config")
    mp.spawn(write_checkpoints, (args.ranks, args.gigabytes, str(scratch)), nprocs=args.ranks)
    llama.save_pretrained(scratch / "hf")
    inputs = {
        "toolkit": scratch / "run",
        "transformers": scratch / "hf",
        "accelerate": scratch / "dcp",
    }
    sides = [f"{kind}:{dtype}" for dtype in DTYPES for kind in ("toolkit", "cp")]
    sides += ["transformers:", "accelerate:"]
    for dtype in DTYPES:  # what cp copies
        folder = inputs[f"cp:{dtype}"] = scratch / f"kept-{dtype}"
        run_side(args, f"toolkit:{dtype}", inputs["toolkit"], folder)
    if args.sides is not None:
        sides = [side for side in sides if side in args.sides]
    times: dict[str, list[float]] = {side: [] for side in sides}
    grown = dict.fromkeys(sides, 0.0)
    warmest, compacted = 0.0, False
    # The first round is of memory: a thread that samples it would take time of the others.
    for repeat in range(args.repeats + 1):
        # In turns that change: what a side wrote and freed still occupies the disk of the next.
        for side in random.Random(repeat).sample(sides, len(sides)):
            source = inputs.get(side) or inputs[side.partition(":")[0]]
            warmest = max(warmest, make_cold(source))
            compacted = fill_page_cache(scratch / "zeros")
            target = scratch / f"out-{repeat}-{side.replace(':', '-')}"
            found = run_side(args, side, source, target, memory=repeat == 0)
            if repeat == 0:
                grown[side] = found
            else:
                times[side].append(found)
            if not args.keep:
                shutil.rmtree(target)
            os.sync()
            print(side, found, file=sys.stderr, flush=True)
    sizes = {d: sum(p.stat().st_size for p in inputs[f"cp:{d}"].iterdir()) for d in DTYPES}
    files = {d: len(list(inputs[f"cp:{d}"].glob("*.safetensors"))) for d in DTYPES}
    return report(args, llama, times, grown, sizes, files, warmest, compacted)


def run_side(
    args: argparse.Namespace, side: str, source: Path, target: Path, memory: bool = False
) -> float:
    """Return the seconds that a side takes, or the bytes by which its memory grows."""
    command = [sys.executable, __file__, "--side", side, "--folders", str(source), str(target)]
    command += ["--max_shard_size", args.max_shard_size, *["--memory"] * memory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{side} failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def make_cold(folder: Path) -> float:
    """Drop every file below `folder` from the page cache; return the share that stayed."""
    stayed = total = 0
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size:
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            pages, resident = residency(descriptor, file.stat().st_size)
            total, stayed = total + pages, stayed + resident
            os.close(descriptor)
    if stayed > 0.01 * total:
        raise RuntimeError(f"{folder}: {stayed} of {total} pages stay cached: not a cold start")
    return stayed / total


def residency(descriptor: int, size: int) -> tuple[int, int]:
    """Return (pages, pages in the page cache) of an open file, as mincore(2) says."""
    libc = ctypes.CDLL(None, use_errno=True)
    content = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    pages = -(-size // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    start = ctypes.addressof(ctypes.c_char.from_buffer(content))
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), vector) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return pages, sum(byte & 1 for byte in bytes(vector))


def report(
    args: argparse.Namespace,
    llama: LlamaConfig,
    times: dict[str, list[float]],
    grown: dict[str, float],
    sizes: dict[str, int],
    files: dict[str, int],
    warmest: float,
    compacted: bool,
) -> str:
    def median(side: str) -> float:
        return statistics.median(times[side])

    def ratio(dtype: str, other: str) -> float:
        pairs = zip(times[f"toolkit:{dtype}"], times[other], strict=True)
        return statistics.median(a / b for a, b in pairs)

    rows, parts = [], []
    for dtype in DTYPES:
        side = f"toolkit:{dtype}"
        if side not in times:
            continue
        for other in (f"cp:{dtype}", "transformers:", "accelerate:"):
            if other in times:
                rows.append(
                    f"| {dtype} | {other.partition(':')[0]} | {median(other):.2f} | "
                    f"{median(side):.2f} | "
                    f"**{ratio(dtype, other):.2f}** | "
                    f"{grown[other] / 1e6:,.0f} |"
                )
        parts.append(
            f"| {dtype} | {sizes[dtype] / 1e9:.2f} in {files[dtype]} | {median(side):.2f} | "
            f"{grown[side] / 1e6:,.0f} |"
        )
    largest = 32000 * 2048 * 4 / 1e6
    return "\n".join(
        [
            "# Consolidating a sharded checkpoint",
            "",
            f"A Llama of {sizes['float32'] / 1e9:.2f} GB in fp32 ({llama.num_hidden_layers} "
            f"layers, largest tensor {largest:,.0f} MB), saved by {args.ranks} ranks. Cold input: "
            "each file fsynced and dropped with `posix_fadvise(DONTNEED)`, then asked of "
            f"`mincore`: at most {warmest:.2%} of the pages stayed; the page cache is full of "
            f"another file{', memory compacted before' if compacted else ''}, but for each side's "
            "libraries. New output every time"
            f"{', none removed before the end' if args.keep else ''}, its fsync timed. "
            f"{args.repeats} repeats, all sides in turns, in an order that is drawn each time; "
            "medians, the ratio is the median of the pairs. Peak is anonymous memory above what "
            "was there before the call, sampled every 2 ms in one more export, not timed, in the "
            "process that exports.",
            "",
            "Toolkit: all of `consolidate`, with what no peer does: hashes of what is written, and "
            "a comparison of what is read with the digests of the checkpoint. `cp` copies the "
            "exported files of the same dtype; transformers and Accelerate cannot cast: both write "
            "fp32 also in the bfloat16 rows, and one file.",
            "",
            "| export | peer | peer s | toolkit s | ratio | peer's peak MB |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "| export | GB, files | s | peak MB |",
            "|---|---|---|---|",
            *parts,
            "",
            describe("consolidate.py", "torch", "transformers", "accelerate", "safetensors"),
            "",
        ]
    )


if __name__ == "__main__":
    main()
