"""Preference tuning and saving on a GPU: cases of `gpu.py` that no CPU can show. Streamed DPO in
bf16, asynchronous saves while a model trains, and the groups that NCCL splits for replicas.
"""

import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_cases import small
from gpu_common import LORA, Place, ToolkitLoop, peaks, reset_peak, settings, synchronize
from gpu_ledger import Case
from torch.distributed.device_mesh import init_device_mesh

from toolkit import checkpoint, training
from toolkit.checkpoint import saving
from toolkit.checkpoint.shards import HashingWriter
from toolkit.config.preference import PreferenceConfig
from toolkit.config.settings import CheckpointConfig
from toolkit.data.row_formats import PAIRS
from toolkit.data.samples.batch import Batch
from toolkit.data.samples.pieces import Piece
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.models.dropout import disable_dropout
from toolkit.training import background, launch
from toolkit.training.preference import PreferenceLoss

STEPS = 4
LN_2 = 0.6931


def pairs_of(length: int, rows: int) -> Batch:
    """Return rows of two packed pairs each, without reference values, as a stream has them."""
    shape, drawn = (
        SampleShape("bfd", length, borders=True, row_format=PAIRS),
        torch.Generator().manual_seed(5),
    )

    def pair() -> Piece:
        ids = torch.randint(3, 300, (length // 2,), generator=drawn).numpy()
        return Piece(ids, ids.copy(), len(ids) // 2)

    return shape.batch([shape.sample([pair(), pair()]) for _ in range(rows)])


def streamed_dpo(place: Place) -> None:
    """DPO with adapters in bf16, the reference by a forward without them: it starts at ln 2, and
    the loss of a repeated batch falls. Its gradients are reduced in fp32.
    """
    cfg = small(place, lora=LORA, data={"packing": "bfd"}, optim={"learning_rate": 1e-3})
    with launch.start() as run:
        loop = ToolkitLoop(place, cfg, run)
        objective = PreferenceLoss(PreferenceConfig(beta=1.0), loop.sharded.mesh.loss)
        batch = pairs_of(cfg.data.sequence_length, cfg.train.micro_batch).to(run.device)
        loop.model.train()
        disable_dropout(loop.model)
        reset_peak(place)
        losses = []
        for _ in range(STEPS):
            update = training.Update(loop.sharded, [batch], [objective.counts(batch)])
            for micro_batch in update:
                update.mean(objective(loop.model, micro_batch)).backward()
            dtypes = {str(p.grad.dtype) for p in loop.model.parameters() if p.grad is not None}
            losses.append(float(update.step(loop.optimizer).loss))
        place.equal("first loss is ln 2", losses[:1], [LN_2], 1e-2)
        place.record(
            "loss falls on one batch", losses[-1] < losses[0], losses=losses, **peaks(place)
        )
        place.record("gradients are float32", dtypes == {"torch.float32"}, dtypes=sorted(dtypes))


def saving_while_training(place: Place) -> None:
    """A save behind the loop of 1b in full while it trains, with torch's copy-ahead of 10 MB and
    without: seconds until the commit, and the steps meanwhile.
    """
    most = 2 if place.tiny else 200
    changes: dict[str, Any] = {"sharding": {"torch_compile": "none"}}
    with launch.start() as run:
        cfg = settings(place, "1b", rows=1, each=1, steps=2 * most + 6, **changes)
        loop = ToolkitLoop(place, cfg, run)
        steps = loop.steps()
        for i, ahead in enumerate((10_000_000, 0)):

            def writer(*arguments: Any, ahead: int = ahead, **options: Any) -> HashingWriter:
                hashing = HashingWriter(*arguments, **options)
                hashing.per_thread_copy_ahead = ahead
                return hashing

            for _ in range(2):
                next(steps)
            synchronize(place)
            loop.state.step, count = i + 1, 0
            begun = time.perf_counter()
            with mock.patch.object(saving, "HashingWriter", writer):
                run_dir = place.work / place.name / str(ahead)
                run_dir.mkdir(parents=True)
                checkpoint.save(loop.state, run_dir, CheckpointConfig(async_save=True))
                blocked = time.perf_counter() - begun
                while background.is_running() and count < most:
                    next(steps)
                    count += 1
                checkpoint.wait()
            seconds = time.perf_counter() - begun
            place.record(
                f"save while it trains, copy-ahead {ahead}",
                seconds=seconds,
                blocked=blocked,
                steps=count,
                step=(seconds - blocked) / max(1, count),
            )


def nccl_split(place: Place) -> None:
    """The groups of a mesh with replicas, which NCCL splits off the group of all: a sum over each,
    bound to this process's device. One GPU shows the calls, not ranks that wait.
    """
    with launch.start() as run:
        mesh = init_device_mesh(run.device.type, (1, 1), mesh_dim_names=("replicas", "shards"))
        for name in ("replicas", "shards"):
            total = torch.ones(4, device=run.device)
            dist.all_reduce(total, group=mesh.get_group(name))
            on_host = torch.ones(4)
            dist.all_reduce(on_host, group=mesh.get_group(name))  # gloo, split too
            right = bool(total.sum() == on_host.sum() == 4)
            place.record(f"a sum over {name}", right, group=mesh.get_group(name).group_name)


CASES = (
    Case("saving_while_training", saving_while_training, 90, needs=("1b",), timed=True),
    Case("streamed_dpo", streamed_dpo, 15, needs=("small",)),
    Case("nccl_split", nccl_split, 8),
)
