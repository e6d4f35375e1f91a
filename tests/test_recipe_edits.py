"""The changes of a recipe that docs/recipes.md shows: applied, run on 2 ranks, seen to work."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from distributed import run_recipe_ranks
from safetensors.torch import load_file
from test_recipe import flags

DOCUMENT = (ROOT / "docs" / "recipes.md").read_text("utf-8")
TITLES = (
    "Another term in the loss",
    "Frozen layers",
    "One more metric",
    "A metric of generated answers",
)


def apply(patch: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Apply a patch in a folder with `recipes/`, by the very command that the page gives."""
    (folder / "change.patch").write_text(patch, "utf-8")
    (command,) = re.findall(r"```bash\n(git apply .*)\n```", DOCUMENT)
    return subprocess.run(
        shlex.split(command), cwd=folder, capture_output=True, text=True, check=False
    )


def documented(title: str) -> str:
    found = re.search(rf"## {title}\n.*?```diff\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found, title
    return found[1]


def run(
    folder: Path, model: Path, text: Path, title: str | None, *more: str
) -> list[dict[str, float]]:
    """Run pretraining with the change of `title`; return its metrics."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    recipe = folder / "recipes" / "pretrain.py"
    if title is not None:
        before = recipe.read_bytes()
        done = apply(documented(title), folder)
        assert done.returncode == 0, done.stderr
        assert recipe.read_bytes() != before
    few = ["--train.max_steps", "3", "--data.eval_split", "0.05", "--checkpoint.save_steps", "3"]
    batch = ["--train.per_device_train_batch_size", "2", "--checkpoint.export_at_end", "true"]
    output = folder / "run"
    done = run_recipe_ranks(recipe, 2, *flags(model, text, output, *few, *batch, *more), cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny_llama, text_file) -> tuple[Path, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, run(folder, tiny_llama, text_file, None)


def test_every_diff_of_the_document_is_tested(tmp_path) -> None:
    assert DOCUMENT.count("```diff") == len(TITLES)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/pretrain.py").write_text("another recipe\n", "utf-8")
    assert apply(documented(TITLES[0]), tmp_path).returncode != 0


@pytest.mark.parametrize("title", TITLES)
def test_every_diff_applies_as_it_is_written(title: str, tmp_path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    done = apply(documented(title), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    added = [x[1:] for x in documented(title).splitlines() if x[:1] == "+" and x[:3] != "+++"]
    changed = (tmp_path / "recipes/pretrain.py").read_text("utf-8")
    assert all(line in changed.splitlines() for line in added)


def test_another_term_in_the_loss(plain, tmp_path, tiny_llama, text_file) -> None:
    changed = run(tmp_path, tiny_llama, text_file, TITLES[0])
    normaliser = (changed[0]["loss"] - plain[1][0]["loss"]) / 1e-4  # the mean square of log Z
    assert 20 < normaliser < 60  # ln(300)^2 is 32.5, of logits near zero
    assert changed[2]["loss"] != plain[1][2]["loss"]


@pytest.mark.slow
def test_frozen_layers(plain, tmp_path, tiny_llama, text_file) -> None:
    run(tmp_path, tiny_llama, text_file, TITLES[1])
    before = load_file(tiny_llama / "model.safetensors")
    name = "run/exports/step-00000003/model.safetensors"
    frozen, trained = load_file(tmp_path / name), load_file(plain[0] / name)
    for key in before:
        still = any(f"layers.{i}." in key for i in (0, 1))
        assert torch.equal(before[key], frozen[key]) == still, key
        assert not torch.equal(before[key], trained[key]), key


@pytest.mark.slow
def test_one_more_metric(plain, tmp_path, tiny_llama, text_file) -> None:
    changed = run(tmp_path, tiny_llama, text_file, TITLES[2])
    last = changed[-1]
    assert last["eval_accuracy"] < last["eval_top5"] < 0.8
    assert [line["loss"] for line in changed] == [line["loss"] for line in plain[1]]
    assert last["eval_accuracy"] == plain[1][-1]["eval_accuracy"]
    assert "eval_top5" not in plain[1][-1]


@pytest.mark.slow
def test_a_metric_of_generated_answers(plain, tmp_path, tiny_llama, text_file) -> None:
    best = ["--checkpoint.keep_best", "true", "--train.eval_steps", "3"]
    best += ["--checkpoint.metric_for_best_model", "expected"]
    changed = run(tmp_path, tiny_llama, text_file, TITLES[3], *best)
    assert changed[-1]["eval_expected"] in (0.0, 0.5, 1.0)
    assert [line["loss"] for line in changed] == [line["loss"] for line in plain[1]]
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(AssertionError, match="eval_expected is none of what an evaluation gives"):
        run(other, tiny_llama, text_file, None, *best)  # the control: nobody told of it
