"""Stored values of a teacher: equal to the live teacher, resumable, checked like a checkpoint."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT
from distributed import run_recipe_ranks
from test_distillation import CASES, distill, folder, models, small_batch, write_config
from transformers import AutoModelForCausalLM

from toolkit import cli
from toolkit.checkpoint.reference_file import FILE, PARTS
from toolkit.formats.metrics_file import read_metrics
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
