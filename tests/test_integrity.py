"""A bit that changes where nothing writes is found, on its rank and by its tensor's name; so is a
rank that stands elsewhere. Nothing is found where nothing is wrong.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, save_byte_tokenizer, save_tiny_model
from distributed import run_ranks, run_recipe_ranks
from sharded import apply_fsdp, init_mesh, train_step
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.adapters.lora import add_adapters
from toolkit.checkpoint import TrainState
from toolkit.checkpoint.commit import committed_steps
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import ModelConfig, OptimConfig, ShardingConfig
from toolkit.data.order.position import Position
from toolkit.errors import TrainingError
from toolkit.formats.bit_sums import bit_sums
from toolkit.formats.metrics_file import read_metrics
from toolkit.loading.pretrained import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.training.guards.integrity import Integrity
from toolkit.training.optim import build_optimizer, build_scheduler
from toolkit.verify import verify_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"
HALF = {"dp_replicate": 2, "dp_shard": -1}  # HSDP


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
@pytest.mark.parametrize("size", [1, 3, 8, 101])
def test_any_bit_changes_one_sum(dtype, size) -> None:
    values = torch.randint(0, 256, (3, size * dtype.itemsize), dtype=torch.uint8)
    before = bit_sums(values.view(dtype))
    for byte in range(values.shape[1]):
        for bit in range(8):
            values[1, byte] ^= 1 << bit
            changed = bit_sums(values.view(dtype)) != before
            assert changed.tolist() == [False, True, False]
            values[1, byte] ^= 1 << bit
    assert torch.equal(bit_sums(values.view(dtype)), before)


def test_the_sum_of_a_part_that_begins_anywhere() -> None:
    values = torch.arange(40, dtype=torch.int32)
    for part in (values[1:][None], values.view(5, 8)[:, ::2], values.view(5, 8)[:, 1:4]):
        assert torch.equal(bit_sums(part), bit_sums(part.clone()))
    assert bit_sums(values[None, :0]).tolist() == [0]


# ---- On every rank -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {"untied": {}, "tied": {"tie_word_embeddings": True}, "half": {"dtype": torch.bfloat16}}
    dropout = {"num_hidden_layers": 2, "attention_dropout": 0.1}
    return {n: str(save_tiny_model(root / n, **dropout, **more)) for n, more in made.items()}


def flip(tensor: torch.Tensor, bit: int = 3) -> None:
    """Flip one bit of the last byte of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    with torch.no_grad():
        local.view(-1).view(torch.uint8)[-1] ^= 1 << bit


class Trained:
    """A tiny model on this rank, trained step by step under `Integrity`."""

    def __init__(self, world: int, folder: str, settings: dict[str, Any]) -> None:
        given = {"param_dtype": "float32"} | settings.get("sharding", {})
        cfg = ShardingConfig(**given)
        model: Any = build_on_meta(ModelConfig(folder, dtype=settings.get("dtype", "float32")))
        if settings.get("lora"):
            model = add_adapters(model, LoraConfig(r=4, lora_dropout=0.1))
        apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
        load_pretrained(model, folder, "cpu")
        optim = OptimConfig(optim=settings.get("optim", "adamw_torch_fused"), learning_rate=1e-3)
        optimizer = build_optimizer(model.train(), optim)
        scheduler = build_scheduler(optimizer, optim, 100)
        self.state = TrainState(model, optimizer, scheduler, Position(640, 0, 4))
        self.integrity = Integrity(self.state, settings.get("every", 1))
        self.parameters = dict(model.named_parameters())

    def step(self, step: int) -> None:
        ids = torch.randint(0, 300, (2, 17), generator=torch.manual_seed(8 * step + ranks.rank()))
        train_step(self.state.model, self.state.optimizer, [{"input_ids": ids, "labels": ids}])
        self.state.scheduler.step()
        self.state.data.advance()
        self.integrity.record(step)

    def look(self, step: int) -> str:
        """Return what is found, as a line of metrics would; empty: nothing."""
        try:
            self.integrity.compare_ranks(
                step, ranks.gather_integers(self.integrity.compute_checksums())
            )
        except TrainingError as error:
            return str(error)
        return ""


def quiet(rank: int, world: int, folder: str, settings: dict[str, Any], steps: int) -> list[str]:
    trained = Trained(world, folder, settings)
    found = []
    for step in range(1, steps + 1):
        trained.step(step)
        if step % 3 == 0:
            found.append(trained.look(step))
    return found


QUIET: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dropout": ("untied", 2, {}),
    "LoRA, tied": ("tied", 2, {"lora": True}),
    "replicas": ("tied", 4, {"sharding": HALF}),
    "replicas of adapters": ("untied", 4, {"sharding": HALF, "lora": True}),
    "offload": ("untied", 2, {"sharding": {"cpu_offload": True}}),
    "bf16": ("half", 2, {"dtype": "bfloat16", "sharding": {"param_dtype": "bfloat16"}}),
    "Adafactor": ("untied", 2, {"optim": "adafactor"}),
    "Muon, replicas": ("untied", 4, {"optim": "muon", "sharding": HALF}),
    "kept gathered": ("untied", 2, {"sharding": {"reshard_after_forward": False}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUIET)
def test_the_control_nothing_is_found_where_nothing_is_wrong(folders, name) -> None:
    folder, world, settings = QUIET[name]
    found = run_ranks(quiet, world, folders[folder], settings, 30)
    assert found == [[""] * 10] * world


def flipped(rank: int, world: int, folder: str, settings: dict[str, Any], at: str) -> list[str]:
    """Flip a bit of rank 1 after a step, 2 if not set, where `at` says; return what is found after
    the two steps before and the two behind.
    """
    trained, found = Trained(world, folder, settings), []
    after = settings.get("after", 2)
    for step in range(1, after + 3):
        if step == after + 1 and rank == 1:
            name, _, part = at.partition(" / ")
            parameter = trained.parameters[name]
            flip(trained.state.optimizer.state[parameter][part] if part else parameter)
        trained.step(step)
        found.append(trained.look(step))
    return found[-4:]


MOMENT = f"{UP} / exp_avg_sq"
BASE = "base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"
AT_REST = (
    r"rank 1 \(\S+\): bits of {} changed between the optimizer's steps {} and {}\. This state is"
)
FLIPS: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "a weight": (2, {}, UP, AT_REST.format(UP, 2, 3)),
    "a moment": (2, {"after": 10}, MOMENT, AT_REST.format(f"exp_avg_sq of {UP}", 10, 11)),
    "a moment, looked at each time": (
        2, {"every": 1}, MOMENT, AT_REST.format(f"exp_avg_sq of {UP}", 2, 3),
    ),
    "offloaded": (2, {"sharding": {"cpu_offload": True}, "every": 1}, UP, AT_REST.format(UP, 2, 3)),
    "a frozen weight": (
        2, {"lora": True}, BASE,
        rf"rank 1 \(\S+\): bits of {BASE} changed since the start, though not trained",
    ),
    "of one replica, not looked at when it happened": (
        4, {"sharding": HALF, "every": 100}, UP,
        rf"rank 1 \(\S+\): bits of .*{UP}.* differ from the copies .* after step 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "a weight")) for n in FLIPS]
)
def test_a_flipped_bit_is_found_at_the_next_look(folders, name) -> None:
    world, settings, at, expected = FLIPS[name]
    found = run_ranks(flipped, world, folders["untied"], settings, at)
    assert found == [found[0]] * world  # all ranks end alike
    assert found[0][:2] == ["", ""]
    assert re.search(expected, found[0][2]), found[0][2]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "at"), [({"every": 100}, UP), ({"every": 100}, MOMENT)])
def test_the_control_a_flip_that_nothing_covers_is_not_found(folders, settings, at) -> None:
    """As the note says: a shard that no other rank holds, in a step that is not looked at."""
    found = run_ranks(flipped, 2, folders["untied"], settings, at)
    assert found == [[""] * 4] * 2


def elsewhere(rank: int, world: int, folder: str, what: str) -> str:
    trained = Trained(world, folder, {})
    trained.step(1)
    if rank == 1:
        if what == "position":
            trained.state.data.samples_seen += 1
        else:
            trained.state.scheduler.step()
    return trained.look(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("position", "rank 1: the position in the data is samples_seen 5"),
        ("schedule", "rank 1: the schedule's step is 2"),
    ],
)
def test_a_rank_that_stands_elsewhere_is_named(folders, what, expected) -> None:
    found = run_ranks(elsewhere, 3, folders["untied"], what)
    assert found == [found[0]] * 3
    assert expected in found[0]
    assert "rank 0" not in found[0]


# ---- Whole runs ----------------------------------------------------------------------------------

PLANTED = """
import os, runpy
import torch
from toolkit import training

plain, calls = training.Update.__init__, [0]

def planted(self, sharded, *given, **more):
    calls[0] += 1
    if calls[0] == {nth} and os.environ["RANK"] == "1":
        with torch.no_grad():
            parameter = dict(sharded.model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
            {plant}
    plain(self, sharded, *given, **more)

training.Update.__init__ = planted
runpy.run_path({recipe!r}, run_name="__main__")
"""
FLIP = "parameter.to_local().view(-1).view(torch.int32)[5] ^= 1 << 20"
NAN = "parameter.to_local().view(-1)[5] = float('nan')"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("model")
    save_byte_tokenizer(folder)
    file = folder / "text.txt"
    file.write_text((ROOT / "LICENSE").read_text() * 4)
    return save_tiny_model(folder, num_hidden_layers=2), file


def run(tmp_path: Path, text: tuple[Path, Path], world: int, plant: str, **flags: Any) -> Any:
    """Run pretraining of 8 steps with a save after each second, where rank 1 is harmed before
    step 4.
    """
    recipe = tmp_path / "planted.py"
    recipe.write_text(
        PLANTED.format(nth=4, plant=plant, recipe=str(ROOT / "recipes" / "pretrain.py"))
    )
    given = {
        "model.name_or_path": text[0],
        "data.train_files": text[1],
        "data.sequence_length": 32,
        "data.eval_split": 0.0,
        "sharding.param_dtype": "float32",
        "train.per_device_train_batch_size": 2,
        "train.max_steps": 8,
        "train.logging_steps": 8,
        "train.check_steps": 1,
        "checkpoint.save_steps": 2,
        "checkpoint.save_total_limit": 9,
        "output_dir": tmp_path / "run",
    } | {name.replace("__", "."): value for name, value in flags.items()}
    more = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return run_recipe_ranks(recipe, world, *more, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "sharding"), [(2, {}), (4, {"sharding__dp_replicate": 2})])
def test_a_run_saves_nothing_of_a_flipped_bit(tmp_path, text, world, sharding) -> None:
    ended = run(tmp_path, text, world, FLIP, **sharding)
    assert ended.returncode == 1
    what = f"bits of {UP} changed between the optimizer's steps 3 and 4"
    assert re.search(rf"error: rank 1 \(\S+\): {re.escape(what)}", ended.stderr)
    assert ended.stderr.count("error: ") == 1  # also where rank 0, which has the store, left first
    assert "Traceback" not in ended.stderr
    assert max(committed_steps(tmp_path / "run")) == 2
    # The same command goes on from before, and ends well.
    again = run(tmp_path, text, world, "pass", **sharding)
    assert again.returncode == 0, again.stderr
    lines = read_metrics(tmp_path / "run")
    assert lines[-1]["step"] == 8
    assert {"data_time", "data_time_max"} <= lines[-1].keys()


@pytest.mark.slow
def test_the_control_without_checks_it_is_saved(tmp_path, text) -> None:
    ended = run(tmp_path, text, 2, FLIP, train__check_steps=0)
    assert ended.returncode == 0, ended.stderr
    assert max(committed_steps(tmp_path / "run")) == 8


@pytest.mark.slow
@pytest.mark.parametrize("checks", [1, 0])
def test_nan_in_a_weight_of_one_rank_is_saved_by_none(tmp_path, text, checks) -> None:
    ended = run(tmp_path, text, 2, NAN, train__check_steps=checks)
    assert ended.returncode == 1
    expected = "between the optimizer's steps 3 and 4" if checks else "values are NaN"
    assert expected in ended.stderr
    assert UP in ended.stderr
    assert ended.stderr.count("error: ") == 1
    saved = committed_steps(tmp_path / "run")
    assert max(saved) == 2
    assert all(verify_checkpoint(str(folder)).ok for folder in saved.values())
    content = json.loads((saved[2] / "state.json").read_text())
    assert content["step"] == 2
