"""Whole runs, killed at random and started again: the checkpoints of an undisturbed one."""

import itertools
import json
import random
import time
from pathlib import Path

import pytest
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks

pytestmark = pytest.mark.faults

STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model with dropout: each step draws random numbers."""
    folder = tmp_path_factory.mktemp("model")
    save_byte_tokenizer(folder)
    return save_tiny_model(folder, attention_dropout=0.1)


def flags(recipe: str, model: Path, data: Path, output: Path, *more: str) -> list[str]:
    return [
        "--model.name_or_path", str(model),
        "--data.train_files", str(data),
        "--data.sequence_length", "32",
        "--data.eval_split", "0.1",
        "--data.max_eval_samples", "8",
        "--sharding.param_dtype", "float32",
        "--train.per_device_train_batch_size", "2",
        "--train.max_steps", str(STEPS),
        "--train.eval_steps", "3",
        "--train.logging_steps", "1",
        "--checkpoint.save_steps", "1",
        "--checkpoint.save_total_limit", "null",
        "--output_dir", str(output),
        *more,
    ]  # fmt: skip


LORA = ["--lora.r", "4", "--lora.lora_dropout", "0.1", "--train.neftune_noise_alpha", "5"]


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("pretrain", ["--checkpoint.async_save", "true"]),
        ("finetune", LORA),
    ],
    ids=["saved behind the loop", "adapters, saved in the loop"],
)
def test_a_killed_run_writes_what_an_undisturbed_one_does(tmp_path, model, text_file, recipe, more):
    """Weights, random state of every rank, position of the data and losses; 3 kills."""
    data = text_file
    if recipe == "finetune":
        words = text_file.read_text().split()
        rows = [{"prompt": a, "completion": b} for a, b in itertools.pairwise(words)]
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[:400]))
    run, begun = tmp_path / "undisturbed", 0.0
    for _ in range(2):  # the first start of all has caches to fill
        begun = time.monotonic()
        whole = run_recipe_ranks(recipe, 2, *flags(recipe, model, data, run, *more), cwd=tmp_path)
        assert whole.returncode == 0, whole.stderr
        expected, took = checkpoints(run), time.monotonic() - begun
        run = tmp_path / "undisturbed again"
    assert len(expected) == STEPS
    assert checkpoints(tmp_path / "undisturbed") == expected
    chance, kills, attempt = random.Random(0), 0, 0
    while kills < 3:
        attempt += 1
        run = tmp_path / f"killed-{attempt}"
        arguments = flags(recipe, model, data, run, *more)
        while run_recipe_ranks(
            recipe, 2, *arguments, cwd=tmp_path, kill_after=took * chance.uniform(0.4, 0.95)
        ).returncode:
            kills += 1
        found = checkpoints(run)
        for step, content in expected.items():
            for name, value in content.items():
                assert found[step][name] == value, f"after {kills} kills, {step}: {name}"
        assert found.keys() == expected.keys()


def checkpoints(run: Path) -> dict[str, dict[str, object]]:
    """Return, for each checkpoint, what a kill must not change."""
    found: dict[str, dict[str, object]] = {}
    losses = {
        line["step"]: line["loss"]
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "loss" in line
    }
    for folder in sorted((run / "checkpoints").glob("step-*")):
        state = json.loads((folder / "state.json").read_text())
        manifest = json.loads((folder / "manifest.json").read_text())
        found[folder.name] = {
            "weights and moments": manifest["row_sums"],
            "position of the data": state["data"],
            "loss": losses[state["step"]],
        } | {file.name: file.read_bytes() for file in (folder / "rng").iterdir()}
    return found
