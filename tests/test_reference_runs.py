"""The reference across starts: preempted passes, more rows, another start, damage, moves."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from conftest import ROOT, save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks, run_toolkit
from test_prefer_recipe import TEMPLATE, pair, reference_of
from transformers import AutoModelForCausalLM

from toolkit.checkpoint.reference_file import FILE, PARTS
from toolkit.formats.metrics_file import read_metrics

pytestmark = pytest.mark.slow
LOG_2 = 0.693147
PASS_IS_DONE = "    optimizer = training.build_optimizer("
"""The line of the recipe after which a kill leaves a whole pass and no checkpoint."""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a model and rows."""
    save_tiny_model(tmp_path / "model", vocab_size=260, max_position_embeddings=512)
    save_byte_tokenizer(tmp_path / "model")
    for name, numbers in (("pairs", range(50)), ("others/pairs", range(50, 60))):
        file = tmp_path / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(pair(i)) + "\n" for i in numbers))
    return tmp_path


def run(
    here: Path, world: int = 1, recipe: str | Path = "prefer", **settings: Any
) -> subprocess.CompletedProcess[str]:
    given = {
        "model.name_or_path": "model",
        "output_dir": "run",
        "data.train_files": "pairs.jsonl",
        "data.chat_template": TEMPLATE,
        "data.sequence_length": 256,
        "data.packing": "none",
        "data.eval_split": 0.2,
        "sharding.param_dtype": "float32",
        "optim.learning_rate": 1e-3,
        "optim.warmup_steps": 0,
        "optim.lr_scheduler_type": "constant",
        "train.max_steps": 2,
        "train.eval_steps": 1,
        "train.logging_steps": 1,
        "train.per_device_train_batch_size": 1,
        "train.global_batch_size": 2,
        "checkpoint.save_steps": 1,
    } | {name.replace("__", "."): value for name, value in settings.items()}
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return run_recipe_ranks(recipe, world, *flags, cwd=here)


def killed_recipe(here: Path, *, after_parts: int | None = None) -> Path:
    """Return the recipe with a SIGKILL: after so many parts of the pass, or behind all of them."""
    text = (ROOT / "recipes/prefer.py").read_text()
    kill = "__import__('os').kill(__import__('os').getpid(), 9)\n"
    if after_parts is None:
        text = text.replace(PASS_IS_DONE, f"    {kill}{PASS_IS_DONE}")
    else:
        text = text.replace(
            "def prefer(",
            "from toolkit.objectives import reference as _kept\n"
            "from toolkit.objectives import reference_pass as _pass\n"
            "_pass.PART_SECONDS, _pass.FIRST_ROUNDS, _write = 0.0, 1, _kept.write_part\n"
            "def _written(root, number, *values):\n"
            "    _write(root, number, *values)\n"
            f"    if number == {after_parts}:\n        {kill}"
            "_kept.write_part = _written\n\n\ndef prefer(",
        )
    assert kill in text
    script = here / "killed.py"
    script.write_text(text)
    return script


def values(here: Path, step: int, output: str = "run") -> np.ndarray:
    """Return the rows and values of the only table of a checkpoint."""
    return np.array(
        [(row, *pair) for row, pair in sorted(reference_of(here / output, step).items())]
    )


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(content)


def test_only_the_rows_that_are_read_are_evaluated(here: Path) -> None:
    done = run(here, 2)
    assert done.returncode == 0, done.stderr
    assert "reference  14 of 50 pairs of answers: 28 answers evaluated" in done.stdout
    assert len(reference_of(here / "run", 2)) == 14
    first = read_metrics(here / "run")[0]
    assert first["loss"] == pytest.approx(LOG_2, abs=1e-5)


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_a_killed_pass_goes_on_with_its_parts_on_other_ranks(here: Path, packing: str) -> None:
    settings = {"data__packing": packing, "train__max_steps": 20}
    assert run(here, 1, output_dir="whole", **settings).returncode == 0
    killed = run(here, 2, killed_recipe(here, after_parts=2), **settings)
    assert killed.returncode != 0
    assert len(list((here / "run" / PARTS).glob("part-*"))) == 2
    flip(max((here / "run" / PARTS).glob("part-*")))
    done = run(here, 1, **settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is damaged; its rows are evaluated again") == 1
    assert "answers read from run/reference.parts; " in done.stdout
    assert not (here / "run" / PARTS).exists()
    np.testing.assert_allclose(values(here, 20), values(here, 20, "whole"), rtol=1e-5)
    assert read_metrics(here / "run")[0]["loss"] == pytest.approx(LOG_2, abs=1e-5)


def test_a_whole_pass_is_not_repeated(here: Path) -> None:
    assert run(here, 1, killed_recipe(here)).returncode != 0
    done = run(here, 2)
    assert done.returncode == 0, done.stderr
    assert (
        "reference  14 of 50 pairs of answers: 28 answers read from run/reference.parts\n"
        in done.stdout
    )


OTHER_STARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seed of a random start": ({"model__init": "random"}, {"seed": 7}),
    "dtype": ({"sharding__param_dtype": "bfloat16"}, {"sharding__param_dtype": "float32"}),
    "seed of an adapter": ({"lora__r": 4}, {"seed": 7}),
    "length": ({}, {"data__sequence_length": 250}),
}


@pytest.mark.parametrize("what", OTHER_STARTS)
def test_a_start_with_another_model_does_not_use_what_the_first_left(here: Path, what: str) -> None:
    first, second = OTHER_STARTS[what]
    assert run(here, 1, killed_recipe(here), **first).returncode != 0
    assert list((here / "run" / PARTS).glob("part-*"))
    done = run(here, 1, **first | second)
    assert done.returncode == 0, done.stderr
    assert "are of another model, other rows or another dtype" in done.stdout
    assert "answers read from" not in done.stdout
    assert read_metrics(here / "run")[0]["loss"] == pytest.approx(LOG_2, abs=1e-5)


def test_other_weights_in_the_same_folder_are_seen_before_the_first_step(here: Path) -> None:
    assert run(here, 1, killed_recipe(here)).returncode != 0
    change_a_weight(here / "model")
    done = run(here, 1)
    assert done.returncode == 0, done.stderr
    assert "answers read from" not in done.stdout
    assert read_metrics(here / "run")[0]["loss"] == pytest.approx(LOG_2, abs=1e-5)


def change_a_weight(model: Path) -> None:
    """Change bytes in the middle of the embedding, which no sample of its bytes covers."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding.reshape(-1)[1100:1200] += 3.0
    save_file(weights, model / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("lora", [{}, {"lora__r": 4}])
def test_rows_that_a_resume_reads_anew_are_evaluated_by_the_start(
    here: Path, lora: dict[str, Any]
) -> None:
    """More steps, and more to evaluate on: values as if it had been so from the beginning."""
    more = {"train__max_steps": 6, "data__max_eval_samples": 8} | lora
    whole = run(here, 1, output_dir="whole", **more)
    assert whole.returncode == 0, whole.stderr
    assert run(here, 2, data__max_eval_samples=3, **lora).returncode == 0
    assert len(reference_of(here / "run", 2)) == 7
    done = run(here, 1, **more)
    assert done.returncode == 0, done.stderr
    assert f"read from run/checkpoints/step-00000002/{FILE}; " in done.stdout
    assert "by the model of the first step" in done.stdout
    np.testing.assert_allclose(values(here, 6), values(here, 6, "whole"), rtol=1e-5)
    for now, then in zip(read_metrics(here / "run")[2:], read_metrics(here / "whole")[2:]):  # noqa: B905
        for name in ("loss", "margin", "eval_loss", "eval_accuracy"):
            assert now[name] == pytest.approx(then[name], rel=2e-5, abs=2e-5)


def test_rows_that_a_resume_reads_anew_are_evaluated_with_lora_from(here: Path) -> None:
    """The start is the base with the adapter that the run continues, not the base."""
    base = AutoModelForCausalLM.from_pretrained(here / "model")
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(here / "adapter")
    lora = {"lora__from": "adapter", "lora__target_modules": "[v_proj, q_proj]"}
    assert run(here, 1, output_dir="whole", train__max_steps=4, **lora).returncode == 0
    assert run(here, 1, **lora).returncode == 0
    done = run(here, 1, train__max_steps=4, **lora)
    assert done.returncode == 0, done.stderr
    assert "by the model of the first step" in done.stdout
    np.testing.assert_allclose(values(here, 4), values(here, 4, "whole"), rtol=1e-5)
    shutil.rmtree(here / "adapter")
    lost = run(here, 1, train__max_steps=6, **lora)
    assert lost.returncode == 2
    assert "lora.from adapter" in lost.stderr
    assert lost.stderr.strip().count("\n") == 0


def test_rows_are_refused_when_the_start_cannot_be_built_again(here: Path) -> None:
    assert run(here, 1, data__max_eval_samples=3).returncode == 0
    change_a_weight(here / "model")
    more = {"data__max_eval_samples": 8}
    done = run(here, 2, train__max_steps=3, **more)
    assert done.returncode == 1
    said = f"step-00000002/{FILE} has no values of 2 rows to train on (train.max_steps) and 5 rows"
    assert done.stderr.count(said) == 1
    assert "to evaluate on (data.max_eval_samples), and this start does not build" in done.stderr
    assert done.stderr.strip().count("\n") == 0
    finished = run(here, 1, **more)  # nothing is left to do, so nothing is lacking
    assert finished.returncode == 0, finished.stderr


def test_an_eval_file_of_the_same_name_has_its_own_reference(here: Path) -> None:
    done = run(here, 1, data__eval_files="others/pairs.jsonl", optim__learning_rate=1e-9)
    assert done.returncode == 0, done.stderr
    evaluated = read_metrics(here / "run")[-1]
    assert evaluated["eval_margin"] == pytest.approx(0.0, abs=1e-5)
    assert evaluated["eval_loss"] == pytest.approx(LOG_2, abs=1e-5)


def delete(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [flip, delete])
def test_a_damaged_reference_is_a_damaged_checkpoint(
    here: Path, damage: Callable[[Path], None]
) -> None:
    assert run(here).returncode == 0
    expected = read_metrics(here / "run")
    file = here / f"run/checkpoints/step-00000002/{FILE}"
    damage(file)
    verified = run_toolkit("verify", "run", cwd=here)
    assert verified.returncode == 1
    assert f"checkpoints/step-00000002/{FILE}: " in verified.stdout
    done = run(here, 2, train__max_steps=2)
    assert done.returncode == 0, done.stderr
    said = f"WARNING: checkpoint step-00000002 is damaged and not used ({FILE} "
    assert done.stdout.count(said) == 1
    again = read_metrics(here / "run")
    assert again[-1]["step"] == 2
    assert again[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=1e-5)
    # With no whole one left the run ends, and says so once.
    for step in (1, 2):
        damage(here / f"run/checkpoints/step-{step:08d}/{FILE}")
    done = run(here, 2, train__max_steps=4)
    assert done.returncode == 1
    assert done.stderr.count("no checkpoint of run verifies") == 1


def test_a_resume_with_another_dtype_is_refused(here: Path) -> None:
    assert run(here).returncode == 0
    done = run(here, 2, train__max_steps=4, sharding__param_dtype="bfloat16")
    assert done.returncode == 1
    said = "was computed with sharding.param_dtype float32, this run has bfloat16: set it as it was"
    assert done.stderr.count(said) == 1


def test_a_resume_from_a_run_without_a_reference_is_refused(here: Path) -> None:
    assert run(here, preference__loss_type="simpo", preference__beta=2.0).returncode == 0
    shutil.copytree(here / "run/checkpoints", here / "copy/checkpoints")
    done = run(here, output_dir="copy", train__max_steps=4)
    assert done.returncode == 1
    assert f"step-00000002 holds no {FILE}, which a loss that compares" in done.stderr


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("preference.beta", 0.3, "preference.beta was 0.1, is 0.3"),
        ("preference.loss_type", "ipo", "preference.loss_type was 'sigmoid', is 'ipo'"),
        ("preference.rpo_alpha", 1.0, "preference.rpo_alpha was 0.0, is 1.0"),
    ],
)
def test_another_objective_is_another_run(
    here: Path, setting: str, value: object, said: str
) -> None:
    assert run(here, train__max_steps=1).returncode == 0
    done = run(here, train__max_steps=4, **{setting: value})
    assert done.returncode == 2
    assert done.stderr.count(f"output_dir run holds another run: {said}. Give another") == 1


def test_checkpoints_that_moved_as_the_message_says_have_their_reference(here: Path) -> None:
    assert run(here, checkpoint__root="one").returncode == 0
    there = {"checkpoint__root": "two", "train__max_steps": 4}
    refused = run(here, **there)
    assert refused.returncode == 2
    assert "Copy checkpoints and config.yaml from there to two" in refused.stderr
    shutil.copytree(here / "one/checkpoints", here / "two/checkpoints")
    shutil.copy(here / "one/config.yaml", here / "two")
    shutil.rmtree(here / "one")
    done = run(here, 2, **there)
    assert done.returncode == 0, done.stderr
    assert f"read from two/checkpoints/step-00000002/{FILE}" in done.stdout


def test_one_checkpoint_alone_can_be_gone_on_from(here: Path) -> None:
    assert run(here).returncode == 0
    copy = here / "copy/checkpoints/step-00000002"
    shutil.copytree(here / "run/checkpoints/step-00000002", copy)
    assert run_toolkit("verify", str(copy), cwd=here).returncode == 0
    done = run(here, output_dir="copy", train__max_steps=2)
    assert done.returncode == 0, done.stderr
    assert f"read from copy/checkpoints/step-00000002/{FILE}" in done.stdout
