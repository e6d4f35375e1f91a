"""Run a function on several gloo ranks and hand back what each returned."""

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(fn: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Call `fn(rank, world, *args)` on `world` fresh processes; return their results in rank order.

    `fn` must be importable. What it returns is pickled, so plain values and CPU tensors.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_entry, (fn, world, folder, args), nprocs=world)
        return [pickle.loads(Path(folder, f"{r}.pkl").read_bytes()) for r in range(world)]


def _entry(rank: int, fn: Callable[..., Any], world: int, folder: str, args: tuple) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world
    )
    try:
        result = fn(rank, world, *args)
    except BaseException:
        traceback.print_exc()
        raise
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads may abort an interpreter that is going down: see `launch._leave`.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
