"""What 1,024 ranks cost rank 0: messages of start, save and resume, and the planning of a save.

    python benchmarks/many_ranks.py [--earlier WORKTREE] [--worlds 8 64 256 1024]
                                    [--torch-up-to 256] [--output FILE]

Two parts, each with what it simulates:

    messages  The pretrain demo on 2 real gloo processes: start, two saves, resume. Every exchange
              of objects or numbers through gloo is counted at rank 0: what it gets of one other
              rank it gets of each. For `--earlier` the same is run on an older checkout.
    planning  A checkpoint of an 8B Llama with AdamW's state (873 tensors) sharded over W ranks. The
              messages of all ranks are made here, as their plans would be; rank 0's part then runs
              as it is: torch's planner, as `dcp.save` calls it, and the toolkit's. Nothing is sent
              and no tensor is written: the time of the network and of the disk is not in it.
"""

import argparse
import contextlib
import json
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import describe
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

ROOT = Path(__file__).parent.parent
_REAL = 2  # processes: what rank 0 gets is then what each other rank sends
_HEADER = 1100  # bytes of a blob beside its tensor's
_PHASES = ("start", "first save", "second save", "resume")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--earlier", type=Path, help="a checkout to compare the messages with")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--torch-up-to", type=int, default=256, help="ranks; minutes above")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.record is not None:
        record(args.record, rest)
        return
    trees = {"now": ROOT} | ({"earlier": args.earlier} if args.earlier else {})
    counted = {name: messages(tree) for name, tree in trees.items()}
    rows = []
    for world in args.worlds:
        before = torchs(world) if world <= args.torch_up_to else None
        rows.append((world, before, ours(world)))
        print(json.dumps(rows[-1]), flush=True)
    text = report(counted, rows)
    print(text)
    if args.output:
        args.output.write_text(text, "utf-8")


# ---- Messages of real processes ------------------------------------------------------------------


def messages(tree: Path) -> dict[str, list[float]]:
    """Return phase -> exchanges, and bytes and objects that rank 0 gets, of a run of 2 ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch, "text.jsonl")
        text.write_text('{"text": "words that are learned, one after the other"}\n' * 400)
        found: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0])
        for steps in (2, 3):
            _launch(tree, _REAL, Path(scratch), steps)
            for line in Path(scratch, "calls").read_text().splitlines():
                phase, *numbers = json.loads(line)
                if steps == 2 and phase == "resume":
                    phase = "start"  # that looks for checkpoints
                if steps == 2 or phase == "resume":
                    for i, number in enumerate((1, *numbers)):
                        found[phase][i] += number
        return {phase: found[phase] for phase in _PHASES}


def _launch(tree: Path, world: int, scratch: Path, steps: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    flags = ["--config", "recipes/configs/pretrain_tiny.yaml", "--output_dir", scratch / "run"]
    flags += ["--train.max_steps", steps, "--checkpoint.save_steps", 1, "--optim.warmup_steps", 0]
    flags += ["--data.train_files", f"[{scratch / 'text.jsonl'}]"]
    command = [sys.executable, __file__, "--record", scratch / "calls", *flags]
    names = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    names |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": tree, "OMP_NUM_THREADS": 1}
    names |= {"HF_DATASETS_CACHE": scratch / "cache"}
    processes = []
    for rank in range(world):
        own = {k: str(v) for k, v in (names | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        with open(scratch / f"log-{rank}", "w") as log:
            processes.append(
                subprocess.Popen(
                    list(map(str, command)), cwd=tree, env=os.environ | own, stdout=log, stderr=log
                )
            )
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(Path(scratch, "log-0").read_text()[-2000:])


def record(file: Path, flags: list[str]) -> None:
    """Run the recipe on this rank; on rank 0 write a line for each exchange."""
    lock = threading.Lock()

    def note(received: list[Any]) -> None:
        if os.environ["RANK"] == "0":
            size = sum(map(_size, received))
            # A tensor of bytes is a pickle.
            objects = sum(getattr(one, "dtype", torch.uint8) == torch.uint8 for one in received)
            with lock, open(file, "a") as f:
                f.write(json.dumps([_phase(), size, objects]) + "\n")

    def wrapped(name: str, received: Any) -> None:
        inner = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = inner(*args, **kwargs)
            given = received(*args, **kwargs)
            if given is not None:
                note(given)
            return found

        setattr(dist, name, call)

    file.unlink(missing_ok=True)
    # What rank 0 gets of the others; of broadcasts nothing, and they are exchanges all the same.
    wrapped(
        "all_gather_object",
        lambda every=None, *_, object_list=None, **__: (every or object_list)[1:],
    )
    wrapped("gather_object", lambda **given: (given["object_gather_list"] or [0])[1:])
    wrapped("gather", lambda one, every=None, *_, **__: (every or [0])[1:])
    wrapped("broadcast_object_list", lambda *_, **__: [])
    wrapped("scatter_object_list", lambda *_, **__: [])
    wrapped("broadcast", lambda *_, **__: [])
    sys.argv = ["pretrain", *flags]
    runpy.run_path(str(Path.cwd() / "recipes" / "pretrain.py"), run_name="__main__")


def _size(received: Any) -> int:
    if isinstance(received, torch.Tensor):
        return received.nbytes
    return len(pickle.dumps(received))


def _phase() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        file, name = Path(frame.f_code.co_filename).name, frame.f_code.co_name
        if (file, name) == ("saving.py", "save"):
            return {1: "first save", 2: "second save"}.get(frame.f_locals["state"].step, "-")
        if file == "resuming.py":
            return "resume"
        frame = frame.f_back
    return "start"


# ---- Planning ------------------------------------------------------------------------------------


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of a checkpoint of Llama 3 8B in training."""
    layer = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "mlp.gate_proj": (14336, 4096),
        "mlp.up_proj": (14336, 4096),
        "mlp.down_proj": (4096, 14336),
        "input_layernorm": (4096,),
        "post_attention_layernorm": (4096,),
    }
    model = {"model.embed_tokens": (128256, 4096), "lm_head": (128256, 4096), "model.norm": (4096,)}
    model |= {f"model.layers.{i}.{n}": s for i in range(32) for n, s in layer.items()}
    model = {f"{name}.weight": shape for name, shape in model.items()}
    moments = {f"optimizer.{n}.{k}": s for n, s in model.items() for k in ("exp_avg", "exp_avg_sq")}
    return model | moments


def plan_of(rank: int, world: int) -> tuple[list[WriteItem], list[WriteResult]]:
    """Return what `rank` plans and what it has written, as FSDP2 shards: by rows."""
    items, results, at = [], [], 0
    for name, shape in shapes().items():
        most = -(-shape[0] // world)
        first = min(rank * most, shape[0])
        sizes = torch.Size((min(most, shape[0] - first), *shape[1:]))
        offsets = torch.Size((first, *[0] * (len(shape) - 1)))
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties(torch.float32), torch.Size(shape)
        )
        items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        length = sizes.numel() * 4 + _HEADER
        place = _StorageInfo(f"__{rank}_0.distcp", at, length)
        results.append(WriteResult(MetadataIndex(name, offsets), length, place))
        at += length
    return items, results


def torchs(world: int) -> dict[str, float]:
    """Return what `dcp.save` costs rank 0: gather, plan, scatter, gather, write and tell all."""
    from toolkit.formats import read_metadata

    paths = {name: (name,) for name in shapes()}
    plans, written = [], []
    for rank in range(world):
        items, results = plan_of(rank, world)
        plans.append(pickle.dumps(SavePlan(items, planner_data=paths)))
        written.append(pickle.dumps(results))
    with tempfile.TemporaryDirectory() as folder, contextlib.nullcontext(_Laps()) as seconds:
        writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
        every, metadata = planner.create_global_plan([pickle.loads(plan) for plan in plans])
        back = [pickle.dumps(plan) for plan in writer.prepare_global_plan(every)]
        writer.finish(metadata, [pickle.loads(results) for results in written])
        told = pickle.dumps(metadata)
        file = Path(folder, ".metadata").stat().st_size
        seconds["save"] = seconds.now()
        read_metadata(folder, blobs=False)
        seconds["read"] = seconds.now()
    received = sum(map(len, (*plans, *written)))
    return {
        "received": received,
        "objects": 2 * world * len(shapes()),
        "sent": sum(map(len, back)) + len(told) * (world - 1),
        "seconds": seconds["save"],
        "file": file,
        "read": seconds["read"],
    }


def ours(world: int) -> dict[str, float]:
    """Return what the toolkit's save and resume cost rank 0."""
    from toolkit.checkpoint import shards
    from toolkit.formats import read_metadata, table_from_metadata

    known = {
        name: TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), [])
        for name, shape in shapes().items()
    }
    told = []
    for rank in range(world):
        items, results = plan_of(rank, world)
        held = [i for i, item in enumerate(items) if item.tensor_data.chunk.sizes.numel()]  # type: ignore[union-attr]
        own = [items[i] for i in held], [results[i] for i in held]
        told.append(shards.encode_written_chunks(known, *own))
    with tempfile.TemporaryDirectory() as folder, contextlib.nullcontext(_Laps()) as seconds:
        content = shards.build_metadata(known, told)
        Path(folder, ".metadata").write_bytes(content)
        seconds["save"] = seconds.now()
        Path(folder, ".metadata").write_bytes(content)
        seconds["again"] = seconds.now()
        metadata = read_metadata(folder, blobs=False)
        table = pickle.dumps(table_from_metadata(metadata))
        seconds["read"] = seconds.now()
        del metadata
        items, _ = plan_of(world - 1, world)
        boxes = {
            i.index.fqn: (i.tensor_data.chunk.offsets, i.tensor_data.chunk.sizes) for i in items
        }  # type: ignore[union-attr]
        seconds.now()
        pickle.loads(table).metadata_of_boxes(boxes)
        seconds["part"] = seconds.now()
    return {
        "received": sum(map(len, told)),
        "objects": world,
        "seconds": seconds["save"],
        "again": seconds["again"],
        "file": len(content),
        "read": seconds["read"],
        "table": len(table),
        "part": seconds["part"],
    }


class _Laps(dict[str, float]):
    """Seconds of a core, by name; `now` returns those since it was called last."""

    def __init__(self) -> None:
        self.begun = time.process_time()

    def now(self) -> float:
        before, self.begun = self.begun, time.process_time()
        return self.begun - before


# ---- Report --------------------------------------------------------------------------------------


def report(counted: dict[str, dict[str, list[float]]], rows: list[Any]) -> str:
    """Return the page."""
    text = f"""# Many ranks

{_WHAT}
## Messages

| phase | tree | calls | bytes to rank 0 from each other rank | objects from each |
|---|---|---|---|---|
"""
    for phase in _PHASES:
        for tree, found in counted.items():
            exchanges, size, objects = found[phase]
            text += f"| {phase} | {tree} | {exchanges:.0f} | {size:,.0f} | {objects:.0f} |\n"
    text += f"""
{_EACH}
## Planning

| ranks | blobs | way | to rank 0 | objects | to others | save | next | `.metadata` | resume |
|---|---|---|---|---|---|---|---|---|---|
"""
    for world, before, now in rows:
        blobs = f"{world * len(shapes()):,}"
        if before is not None:
            text += (
                f"| {world:,} | {blobs} | torch's `dcp.save` | {_mb(before['received'])} | "
                f"{before['objects']:,.0f} | {_mb(before['sent'])} | {before['seconds']:.1f} s | "
                f"the same | {_mb(before['file'])} | {before['read']:.1f} s on every rank |\n"
            )
        text += (
            f"| {world:,} | {blobs} | the toolkit | {_mb(now['received'])}, then 0 | "
            f"{now['objects']:,.0f} | {now['table'] / 1e6:,.1f} MB at resume | "
            f"{now['seconds']:.1f} s | {now['again']:.2f} s | {_mb(now['file'])} | "
            f"{now['read']:.1f} s on rank 0, {now['part']:.2f} s on the others |\n"
        )
    run = [(world, before) for world, before, _ in rows if before is not None]
    if run and run[-1][0] < rows[-1][0]:
        world, before = run[-1]
        blob = before["seconds"] / world / len(shapes())
        text += (
            f"\ntorch's planning takes {blob * 1e6:.0f} microseconds a blob on {world} ranks; on "
            "more it was not run. `to others`: torch's way in all at each save, the toolkit's to "
            "each at a resume.\n"
        )
    return text + f"\n{describe('many_ranks.py', 'torch')}\n"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


_WHAT = """What the number of ranks costs rank 0, for which all others wait. Nothing here was run on
1,024 processes: the first table counts what a few real ones exchange; the second makes the messages
of all ranks, and runs rank 0's part of planning on them. Seconds are those of a core.
"""
_EACH = """Of the pretraining demo on 2 gloo processes, so of one other rank; resume with the search
for a checkpoint and its verification. Objects are pickles, which rank 0 has to read. Earlier nearly
all of them went to every rank (`all_gather_object`, one call, which goes twice around a ring of all
ranks); now an agreement is two calls, a gather of numbers to rank 0 and a broadcast. The demo's
tensors are few: what a save sends grows with them, see below. The hashes of files and tensors that
a manifest has are in the bytes of every save.
"""


if __name__ == "__main__":
    main()
