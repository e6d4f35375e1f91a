"""An interrupted run goes on as if nothing had happened, on the same ranks and on others.

Four processes form one world after the other, so that one start serves all of it.
"""

import random
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import save_tiny_model
from distributed import run_ranks, tensor_sums
from torch.distributed.tensor import DTensor

from toolkit.verify import verify_checkpoint

pytestmark = pytest.mark.slow

WORLDS = (1, 2, 3, 4)
GLOBAL_BATCH, ROWS, LENGTH = 12, 100, 17
BEFORE, AFTER = 2, 2
OPTIMIZERS = ("adamw", "sgd")


# ---- On every rank -------------------------------------------------------------------------------


class Trainer:
    """A run in small: model, optimizer, schedule and position, all from a seed."""

    def __init__(self, folder: str, world: int, kind: str, max_steps: int = BEFORE + AFTER) -> None:
        from sharded import apply_fsdp, init_mesh

        from toolkit import checkpoint
        from toolkit.config.settings import ModelConfig, OptimConfig, ShardingConfig
        from toolkit.data.order.mixture import SampleOrder
        from toolkit.data.order.position import Position
        from toolkit.loading import pretrained as loading
        from toolkit.models.causal_lm import build_on_meta
        from toolkit.training.optim import build_optimizer, build_scheduler

        cfg = ShardingConfig(param_dtype="float32")
        model = build_on_meta(ModelConfig(folder))
        apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
        loading.load_pretrained(model, folder, "cpu")
        model.train()
        optim = OptimConfig(learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=1)
        if kind == "adamw":
            optimizer = build_optimizer(model, optim)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=optim.learning_rate)
        position = Position(ROWS, 7, GLOBAL_BATCH)
        scheduler = build_scheduler(optimizer, optim, max_steps)
        self.state = checkpoint.TrainState(model, optimizer, scheduler, position)
        self.order = SampleOrder(ROWS, 7)
        self.data = torch.randint(
            0, 300, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3)
        )

    def steps(self, count: int) -> list[float]:
        from sharded import train_step

        losses = []
        for _ in range(count):
            drawn = self.order.indices(self.state.data.samples_seen, GLOBAL_BATCH)
            mine = self.data[drawn[dist.get_rank() :: dist.get_world_size()]]
            stats = train_step(
                self.state.model, self.state.optimizer, [{"input_ids": mine, "labels": mine}]
            )
            self.state.scheduler.step()
            self.state.data.advance()
            self.state.step += 1
            self.state.tokens += int(stats.tokens)
            losses.append(float(stats.loss))
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        values = {n: p.detach() for n, p in self.state.model.named_parameters()}
        return {
            n: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for n, v in values.items()
        }


def save_all(world: int, folders: dict[str, str], root: str) -> dict:
    """Train, save, and train on undisturbed; return what happened after the save."""
    from toolkit import checkpoint
    from toolkit.checkpoint import commit, shards
    from toolkit.config.settings import CheckpointConfig

    def late(self, *args):
        trained.wait()
        return write(self, *args)

    found, write, trained = {}, shards.HashingWriter.write_data, threading.Event()
    for kind in OPTIMIZERS:
        run = Trainer(folders["llama"], world, kind)
        run.steps(BEFORE)
        behind = kind == "adamw"
        expected = tensor_sums(run.state.model)
        with mock.patch.object(shards.HashingWriter, "write_data", late if behind else write):
            cfg = CheckpointConfig(async_save=behind)
            path = checkpoint.save(run.state, f"{root}/{kind}-{world}", cfg)
            found[kind] = (run.steps(AFTER), run.weights(), run.state.tokens)
            trained.set()
            checkpoint.wait()
        # Written after the loop had gone on, and still what was saved.
        sums = commit.read_manifest(Path(path))["row_sums"]
        assert {n: of for n, of in sums.items() if n.startswith("model.")} == expected
        assert tensor_sums(run.state.model) != expected
        assert verify_checkpoint(path).ok
    return found


def resume_all(world: int, folders: dict[str, str], root: str) -> dict:
    """Go on from what every world saved; and, as a control, without the optimizer's state."""
    from toolkit import checkpoint
    from toolkit.config.settings import CheckpointConfig

    found = {}
    for kind in OPTIMIZERS:
        run = Trainer(folders["llama"], world, kind)
        for source in WORLDS:
            step = checkpoint.resume(run.state, f"{root}/{kind}-{source}", CheckpointConfig())
            assert step == BEFORE
            found[kind, source] = (run.steps(AFTER), run.weights(), run.state.tokens)
    run = Trainer(folders["llama"], world, "adamw")
    optimizer, run.state.optimizer = run.state.optimizer, None
    checkpoint.resume(run.state, f"{root}/adamw-1", CheckpointConfig())
    run.state.optimizer = optimizer
    found["forgetful"] = run.steps(AFTER)
    return found


def storm(world: int, folders: dict[str, str], root: str) -> dict:
    """Dropout on: eight steps at once, and with three interruptions."""
    from toolkit import checkpoint
    from toolkit.checkpoint import resuming
    from toolkit.config.settings import CheckpointConfig
    from toolkit.training.launch import seed_everything

    def run(name: str, interruptions: int) -> tuple[list[float], dict]:
        seed_everything(5, dist.get_rank())
        losses: list[float] = []
        for part in range(4):
            if part <= interruptions:  # another process would start with another random state
                current = Trainer(folders["gpt2"], world, "adamw", 8)
                if part:
                    seed_everything(100 + part, dist.get_rank())
                checkpoint.resume(current.state, f"{root}/{name}", CheckpointConfig())
            losses += current.steps(2)
            cfg = CheckpointConfig(async_save=part % 2 == 0)
            checkpoint.save(current.state, f"{root}/{name}", cfg)
            # What the loop draws while the save is in flight must not reach the checkpoint.
            if part < interruptions:
                random.random(), torch.rand(1)
        checkpoint.wait()
        return losses, current.weights()

    found = {"calm": run("calm", 0), "stormy": run("stormy", 3)}
    with mock.patch.object(resuming, "restore_rng"):
        found["without rng"] = run("amnesic", 3)
    return found


def every_world(rank: int, _: int, folders: dict[str, str], root: str) -> dict:
    meeting = dist.FileStore(f"{root}/meeting", len(WORLDS))
    results = {}
    for number, (fn, world) in enumerate(
        [*((save_all, w) for w in WORLDS), *((resume_all, w) for w in WORLDS), (storm, 2)]
    ):
        if rank < world:
            store = dist.FileStore(f"{root}/store-{number}", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            results[fn.__name__, world] = fn(world, folders, root)
            dist.barrier()
            dist.destroy_process_group()
        # The next world begins when all have left this one.
        meeting.add(f"done-{number}", 1)
        while meeting.add(f"done-{number}", 0) < len(WORLDS):
            time.sleep(0.02)
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("models")
    dropout = {"n_layer": 2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    folders = {
        "llama": str(save_tiny_model(folder / "llama", num_hidden_layers=2)),
        "gpt2": str(save_tiny_model(folder / "gpt2", "gpt2", **dropout)),
    }
    with tempfile.TemporaryDirectory() as root:
        return run_ranks(every_world, len(WORLDS), folders, root, group=False)


# ---- Tests ---------------------------------------------------------------------------------------


def off(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))


@pytest.mark.parametrize("target", WORLDS)
@pytest.mark.parametrize("source", WORLDS)
def test_any_number_of_ranks_goes_on_with_what_any_other_saved(found, source, target):
    expected = found[0]["save_all", 1]
    for rank in found[:target]:
        losses, _, tokens = rank["resume_all", target]["adamw", source]
        assert off(losses, expected["adamw"][0]) < 5e-6
        assert tokens == expected["adamw"][2]
        _, weights, _ = rank["resume_all", target]["sgd", source]
        for name, weight in expected["sgd"][1].items():
            assert (weights[name] - weight).abs().max() < 1e-6, name


@pytest.mark.parametrize("world", WORLDS)
def test_without_optimizer_state_the_comparison_fails(found, world):
    expected = found[0]["save_all", 1]["adamw"][0]
    assert off(found[0]["resume_all", world]["forgetful"], expected) > 5e-5


@pytest.mark.parametrize("rank", [0, 1])
def test_three_interruptions_with_dropout_change_no_bit(found, rank):
    result = found[rank]["storm", 2]
    losses, weights = result["calm"]
    assert result["stormy"][0] == losses
    assert all(torch.equal(w, result["stormy"][1][n]) for n, w in weights.items())
    assert result["without rng"][0] != losses, "without the random state it must be another run"
    assert any(not torch.equal(w, result["without rng"][1][n]) for n, w in weights.items())
