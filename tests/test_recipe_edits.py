"""The changes of a recipe that docs/recipes.md shows: applied, run on 2 ranks, seen to work."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ROOT, save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks
from safetensors.torch import load_file
from test_recipe import flags, on_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

DOCUMENT = (ROOT / "docs" / "recipes.md").read_text("utf-8")
TITLES = {
    "Another term in the loss": "pretrain",
    "Frozen layers": "pretrain",
    "One more metric": "pretrain",
    "A metric of generated answers": "pretrain",
    "A weight for each sequence": "finetune",
}  # title -> the recipe that is changed
TERM, FROZEN, METRIC, ANSWERS, WEIGHT = TITLES


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


def changed_recipe(folder: Path, title: str | None) -> Path:
    """Copy the recipes and change one as the page says; return it."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    if title is None:
        return folder / "recipes" / "pretrain.py"
    recipe = folder / "recipes" / f"{TITLES[title]}.py"
    before = recipe.read_bytes()
    done = apply(documented(title), folder)
    assert done.returncode == 0, done.stderr
    assert recipe.read_bytes() != before
    return recipe


def run(
    folder: Path, model: Path, text: Path, title: str | None, *more: str
) -> list[dict[str, float]]:
    """Run pretraining with the change of `title`; return its metrics."""
    recipe = changed_recipe(folder, title)
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
    assert apply(documented(TERM), tmp_path).returncode != 0


@pytest.mark.parametrize("title", TITLES)
def test_every_diff_applies_as_it_is_written(title: str, tmp_path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    done = apply(documented(title), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    added = [x[1:] for x in documented(title).splitlines() if x[:1] == "+" and x[:3] != "+++"]
    changed = (tmp_path / f"recipes/{TITLES[title]}.py").read_text("utf-8")
    assert all(line in changed.splitlines() for line in added)


@pytest.mark.slow
def test_another_term_in_the_loss(plain, tmp_path, tiny_llama, text_file) -> None:
    changed = run(tmp_path, tiny_llama, text_file, TERM)
    normaliser = (changed[0]["loss"] - plain[1][0]["loss"]) / 1e-4  # the mean square of log Z
    assert 20 < normaliser < 60  # ln(300)^2 is 32.5, of logits near zero
    assert changed[2]["loss"] != plain[1][2]["loss"]


@pytest.mark.slow
def test_frozen_layers(plain, tmp_path, tiny_llama, text_file) -> None:
    run(tmp_path, tiny_llama, text_file, FROZEN)
    before = load_file(tiny_llama / "model.safetensors")
    name = "run/exports/step-00000003/model.safetensors"
    frozen, trained = load_file(tmp_path / name), load_file(plain[0] / name)
    for key in before:
        still = any(f"layers.{i}." in key for i in (0, 1))
        assert torch.equal(before[key], frozen[key]) == still, key
        assert not torch.equal(before[key], trained[key]), key


@pytest.mark.slow
def test_one_more_metric(plain, tmp_path, tiny_llama, text_file) -> None:
    changed = run(tmp_path, tiny_llama, text_file, METRIC)
    last = changed[-1]
    assert last["eval_accuracy"] < last["eval_top5"] < 0.8
    assert [line["loss"] for line in changed] == [line["loss"] for line in plain[1]]
    assert last["eval_accuracy"] == plain[1][-1]["eval_accuracy"]
    assert "eval_top5" not in plain[1][-1]


@pytest.mark.slow
def test_a_metric_of_generated_answers(plain, tmp_path, tiny_llama, text_file) -> None:
    best = ["--checkpoint.keep_best", "true", "--train.eval_steps", "3"]
    best += ["--checkpoint.metric_for_best_model", "expected"]
    changed = run(tmp_path, tiny_llama, text_file, ANSWERS, *best)
    assert changed[-1]["eval_expected"] in (0.0, 0.5, 1.0)
    assert [line["loss"] for line in changed] == [line["loss"] for line in plain[1]]
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(AssertionError, match="eval_expected: expected a metric that an evaluation"):
        run(other, tiny_llama, text_file, None, *best)  # the control: nobody told of it


def test_a_weight_for_each_sequence(tmp_path) -> None:
    """The loss of the first step is the mean over all rows of the mean of each."""
    save_byte_tokenizer(tmp_path / "model")
    save_tiny_model(tmp_path / "model")
    rows = [{"prompt": "again", "completion": " and again" * n} for n in (1, 2, 4, 5, 1, 3, 5, 2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = changed_recipe(tmp_path, WEIGHT)
    batch = {"train__per_device_train_batch_size": 2, "train__gradient_accumulation_steps": 2}
    more = on_rows(**batch, train__max_steps=2, train__logging_steps=1)
    done = run_recipe_ranks(recipe, 2, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    sums, counts = [], []
    for row in rows:
        prompt = len(tokenizer(row["prompt"])["input_ids"])
        ids = [*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * prompt + ids[prompt:]])
        counts.append(len(ids) - prompt)
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([ids]), labels=labels).loss
        sums.append(float(loss) * counts[-1])
    by_sequence = sum(s / n for s, n in zip(sums, counts, strict=True)) / len(rows)
    assert first["loss"] == pytest.approx(by_sequence, rel=1e-5)
    assert abs(sum(sums) / sum(counts) - by_sequence) > 1e-4  # the control: tokens count otherwise
    assert second["tokens"] == 2 * sum(counts)  # which are counted all the same
