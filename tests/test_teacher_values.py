"""Stored values of a teacher: equal to the live teacher, resumable, checked like a checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from distributed import run_recipe_ranks
from test_distillation import CASES, distill, folder, models, small_batch, write_config
from transformers import AutoModelForCausalLM

from toolkit import cli
from toolkit.checkpoint.reference_file import FILE, PARTS
from toolkit.config import DistillConfig, load
from toolkit.config.settings import model_settings
from toolkit.data.prepare import prepare_data
from toolkit.data.tokens.tokenizer import use_model_tokenizer
from toolkit.formats.metrics_file import read_metrics
from toolkit.mesh import View, init_mesh
from toolkit.models import build_on_meta
from toolkit.objectives import build, teacher_values
from toolkit.objectives.reference_pass import row_tables
from toolkit.objectives.teacher_values import (
    TeacherValues,
    count_rounds_in_memory,
    teacher_values_bytes,
)
from toolkit.planning.fake_ranks import fake_world
from toolkit.training import Run
from toolkit.training.distillation import distillation_loss, evaluate_teacher, run_teacher
from toolkit.training.head_divergence import Divergence, StoredTeacher, TopLogps

__all__ = ["folder", "models"]  # fixtures


@pytest.mark.parametrize("k", [1, 5, None])
def test_stored_values_have_the_loss_of_the_live_teacher(models: Path, k: int | None) -> None:
    model, teacher = (
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32)
        for name in ("model", "teacher")
    )
    teacher.eval().requires_grad_(False)
    width = model.config.vocab_size
    batch = small_batch(width)
    for case in (CASES[0], CASES[-1]):
        live = Divergence(case.temperature, case.kl_weight, case.is_reverse, k)
        stored = Divergence(case.temperature, case.kl_weight, case.is_reverse, k or width)
        top = evaluate_teacher(teacher, batch, stored, width)
        ids = torch.zeros(batch.targets.numel(), stored.top_k, dtype=torch.int64)
        logps = torch.zeros(batch.targets.numel(), stored.top_k + 1)
        supervised = batch.targets.flatten() != -100
        ids[supervised], logps[supervised] = top
        values = StoredTeacher(TopLogps(ids, logps), width)
        losses, grads = [], []
        for source in (run_teacher(teacher, batch, live), values):
            model.zero_grad()
            loss = distillation_loss(model, source, batch, live)
            loss.total.backward()
            losses.append(loss.total.item())
            grads.append(model.get_output_embeddings().weight.grad.clone())
        # A k equal to the vocabulary is the full divergence.
        assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-4)
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-4)


STORED = {"stored": True, "top_k": 8, "kl_weight": 0.8, "temperature": 2.0}


@pytest.mark.parametrize("packing", ["none", "bfd", "wrapped"])
def test_only_supervised_positions_have_values_and_count_on_the_disk(
    folder: Path, packing: str
) -> None:
    write_config(distill=STORED, data={"packing": packing, "eval_split": 0.5})
    cfg = load(DistillConfig, "run.yaml", ["--train.max_steps", "100"])
    model_cfg = use_model_tokenizer(model_settings(cfg))
    one_process: Any = Run(None, torch.device("cpu"), 0, 1)  # type: ignore[arg-type]
    mesh: Any = SimpleNamespace(data=View(), context=View())
    data = prepare_data(cfg, build_on_meta(model_cfg), model_cfg, one_process, mesh)
    width, k = 300, 8
    stored = TeacherValues(cfg, width, data, folder, None)
    drawn = np.random.default_rng(0)
    expected = {}
    for name, mask in stored._missing().items():
        positions = np.flatnonzero(mask)
        values = drawn.integers(0, width, (len(positions), 2 * k + 1)).astype(np.float32)
        expected[name] = (positions, values)
    stored._insert(expected)
    stored.attach()
    size = len(stored.files[FILE].content)
    assert size <= teacher_values_bytes(cfg, data) < 1.2 * size + 4096
    for table in row_tables(data):
        positions, values = expected[table.name]
        for samples in table.samples:
            ids, logps = (samples.pieces.rows._late[f"teacher_{x}"] for x in ("ids", "logps"))
            assert ids.dtype == np.int32
            np.testing.assert_array_equal(ids[positions], values[:, :k])
            np.testing.assert_array_equal(logps[positions], values[:, k:])
            unsupervised = np.setdiff1d(np.arange(len(ids)), positions)
            assert not ids[unsupervised].any()


def test_what_the_values_depend_on(folder: Path) -> None:
    """Values of a teacher in another dtype or with another attention are not those of this run."""
    write_config(distill=STORED)
    origins = []
    for flags in ((), ("--teacher.dtype", "bfloat16"), ("--teacher.attn_implementation", "eager")):
        cfg = load(DistillConfig, "run.yaml", list(flags))
        data: Any = SimpleNamespace(feed=SimpleNamespace(shape=SimpleNamespace()))
        data.feed.shape.packing, data.feed.shape.sequence_length = "bfd", 64
        origins.append(teacher_values._describe_origin(cfg, 300, [], data))
    first, half, eager = origins
    assert {name for name in first if first[name] != half[name]} == {"storage dtype"}
    assert {name for name in first if first[name] != eager[name]} == {"attention"}
    assert first["number of tokens"] == 300


def test_a_part_is_bounded_in_memory() -> None:
    for top_k, positions in ((1, 64), (32, 4096), (64, 8 * 4 * 4096), (64, 64 * 8 * 32768)):
        count = count_rounds_in_memory(top_k, positions)
        round_bytes = 8 * (2 * top_k + 2) * positions
        assert count * round_bytes <= 2**28 or count == 1
        assert (count + 1) * round_bytes > 2**28


def test_a_plan_reads_no_model_in_its_forward(folder: Path) -> None:
    write_config(distill=STORED)
    cfg = load(DistillConfig, "run.yaml")
    with fake_world(1):
        objective = build(cfg, init_mesh("cpu", 1, cfg.sharding))
        objective.shard_models()
    assert vars(objective)["_stored_width"] == 300


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["bfd", "none"])
def test_stored_is_live_and_every_checkpoint_holds_the_values(
    folder: Path, capsys: pytest.CaptureFixture, packing: str
) -> None:
    write_config(distill={"top_k": 8}, data={"packing": packing})
    live = distill(1, "live")
    write_config(distill=STORED, data={"packing": packing})
    stored = distill(2, "run")
    for a, b in zip(live, stored, strict=True):
        for name in ("loss", "kl", "agreement", "eval_kl", "eval_loss", "eval_agreement"):
            assert b.get(name, 0) == pytest.approx(a.get(name, 0), rel=1e-4), name
    checkpoint = Path("run/checkpoints/step-00000006")
    assert (checkpoint / FILE).is_file()
    assert not Path("run", PARTS).exists()
    assert cli.main(["verify", "run"]) == 0
    if packing == "none":
        return
    # A resumed run reads the values; other settings and damaged values are refused.
    content = bytearray((checkpoint / FILE).read_bytes())
    content[-1] ^= 1
    (checkpoint / FILE).write_bytes(content)
    assert cli.main(["verify", "run"]) == 1
    assert FILE in "".join(capsys.readouterr())
    content[-1] ^= 1
    (checkpoint / FILE).write_bytes(content)
    flags = ("--config", "run.yaml", "--train.max_steps", "8")
    done = run_recipe_ranks("distill", 1, *flags, cwd=Path.cwd())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each checkpoint holds the values" in done.stdout
    assert read_metrics(Path("run"))[-1]["step"] == 8
    refused = run_recipe_ranks("distill", 1, *flags, "--distill.temperature", "1", cwd=Path.cwd())
    assert "distill.temperature was 2.0, is 1.0" in refused.stderr


@pytest.mark.slow
def test_an_interrupted_pass_continues(folder: Path) -> None:
    write_config(distill=STORED)
    text = (ROOT / "recipes/distill.py").read_text()
    patch = """
from toolkit.objectives import teacher_values as _values

_write_part = _values.write_part
_values.FIRST_ROUNDS = 1


def _write_two(root, number, *values):
    if number > 2:
        raise SystemExit("interrupted")
    _write_part(root, number, *values)


_values.write_part = _write_two


def distill(cfg"""
    Path("recipes").mkdir()
    Path("recipes/interrupted.py").write_text(text.replace("\ndef distill(cfg", patch, 1))
    flags = ("--config", "run.yaml")
    recipe = Path("recipes/interrupted.py").absolute()
    assert run_recipe_ranks(recipe, 1, *flags, cwd=Path.cwd()).returncode != 0
    parts = Path("run", PARTS)
    assert len([*parts.glob("part-*")]) == 2
    damaged = sorted(parts.glob("part-*"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    done = run_recipe_ranks("distill", 2, *flags, cwd=Path.cwd())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{damaged.name} is damaged" in done.stdout + done.stderr
    assert "positions read from" in done.stdout
    losses = [x["loss"] for x in read_metrics(Path("run"))]
    undisturbed = [x["loss"] for x in distill(1, "undisturbed")]
    assert losses == pytest.approx(undisturbed, rel=1e-4)
