"""Preference tuning as a user does it: runs, resumed on other ranks, refused, exported."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks
from transformers import AutoModelForCausalLM

from toolkit import cli
from toolkit.checkpoint.reference_file import FILE, PARTS, decode
from toolkit.formats.metrics_file import read_metrics

TEMPLATE = ROOT / "recipes/configs/chat_template.jinja"
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


NUMBERS = ("loss", "tokens", "margin", "accuracy", "logps_chosen")


def pair(i: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"After {WORDS[i % 10]}?"}]
    answers = WORDS[(i + 1) % 10], WORDS[(i + 4) % 10] * (1 + i % 3)
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def answer(i: int) -> dict[str, Any]:
    made = pair(i // 2)
    side = "rejected" if i % 2 else "chosen"
    return {"prompt": made["prompt"], "completion": made[side], "label": side == "chosen"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models and the rows."""
    folder = tmp_path_factory.mktemp("preferences")
    for seed, name in enumerate(("model", "other")):
        save_tiny_model(folder / name, seed=seed, vocab_size=260, max_position_embeddings=512)
        save_byte_tokenizer(folder / name)
    for name, make in (("pairs", pair), ("answers", answer)):
        rows = [json.dumps(make(i)) + "\n" for i in range(50)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


def run(
    here: Path, world: int, output: str, *flags: object, steps: int = 6, batch: int = 12
) -> Any:
    given = {
        "model.name_or_path": "model",
        "output_dir": output,
        "data.train_files": "pairs.jsonl",
        "data.chat_template": TEMPLATE,
        "data.sequence_length": 256,
        "data.packing": "none",
        "data.eval_split": 0.1,
        "sharding.param_dtype": "float32",
        "optim.learning_rate": 1e-3,
        "optim.warmup_steps": 0,
        "optim.lr_scheduler_type": "constant",
        "train.max_steps": steps,
        "train.eval_steps": 3,
        "train.logging_steps": 1,
        "train.per_device_train_batch_size": 2,
        "train.global_batch_size": batch,
        "checkpoint.save_steps": 3,
    }
    known = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return run_recipe_ranks("prefer", world, *known, *map(str, flags), cwd=here)


def lines(here: Path, output: str) -> list[dict[str, Any]]:
    return read_metrics(here / output)


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        names = {n for n in other if n in NUMBERS or n.startswith("eval_")}
        if abs(other["margin"]) < 1e-6:  # at first every margin is a rounding error, of any sign
            names.discard("accuracy")
        for name in sorted(names):
            assert one[name] == pytest.approx(other[name], rel=2e-5, abs=2e-5), (one["step"], name)


@pytest.fixture(scope="module")
def undisturbed(here: Path) -> list[dict[str, Any]]:
    done = run(here, 1, "undisturbed")
    assert done.returncode == 0, done.stderr
    assert "reference  50 of 50 pairs of answers: 100 answers evaluated in" in done.stdout
    return lines(here, "undisturbed")


def test_the_first_step_is_log_2_and_margins_grow(undisturbed: list[dict[str, Any]]) -> None:
    assert undisturbed[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert undisturbed[-1]["loss"] < 0.65
    margins = [line["margin"] for line in undisturbed]
    assert margins[0] == pytest.approx(0.0, abs=1e-5)
    assert margins[-1] > 0.05
    assert undisturbed[-1]["accuracy"] > 0.5
    evaluated = [line for line in undisturbed if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [3, 6]
    assert evaluated[1]["eval_margin"] > evaluated[0]["eval_margin"]
    assert "eval_perplexity" not in evaluated[0]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), ("--data.packing", "bfd", "--data.sequence_length", 96)])
def test_a_run_on_other_ranks_goes_on_as_if_undisturbed(
    here: Path, undisturbed: list[dict[str, Any]], changes: tuple[object, ...]
) -> None:
    output = f"resumed{len(changes)}"
    first = run(here, 3, output, *changes, steps=3)
    assert first.returncode == 0, first.stderr
    before = reference_of(here / output, 3)
    second = run(here, 2, output, *changes)
    assert second.returncode == 0, second.stderr
    # Three steps read 36 of 45 pairs to train on; the others are evaluated by the same start.
    assert f"read from {output}/checkpoints/step-00000003/{FILE}; " in second.stdout
    assert "by the model of the first step" in second.stdout
    after = reference_of(here / output, 6)
    for row, values in before.items():
        assert after[row] == values
    assert len(before) < len(after) == 50
    expected = undisturbed
    if changes:
        assert run(here, 1, f"{output}-alone", *changes).returncode == 0
        expected = lines(here, f"{output}-alone")
    assert_alike(lines(here, output), expected)


def reference_of(run: Path, step: int) -> dict[int, tuple[float, ...]]:
    """Return row -> both values, of the only table of a checkpoint's reference."""
    content = (run / "checkpoints" / f"step-{step:08d}" / FILE).read_bytes()
    ((answers, logps),) = decode(content, run)[1].values()
    values = dict(zip(answers.tolist(), logps.tolist(), strict=True))
    return {
        answer // 2: (values[answer], values[answer + 1]) for answer in values if not answer % 2
    }


@pytest.mark.slow
def test_a_resume_with_another_base_is_refused(here: Path, tmp_path: Path) -> None:
    for name in ("model", "other"):
        shutil.copytree(here / name, tmp_path / name)
    shutil.copy(here / "pairs.jsonl", tmp_path)
    assert run(tmp_path, 1, "run", steps=3).returncode == 0
    shutil.copy(tmp_path / "other/model.safetensors", tmp_path / "model/model.safetensors")
    done = run(tmp_path, 2, "run")
    assert done.returncode == 1
    assert done.stderr.count(f"{FILE} is of another base than this run has") == 1
    assert "start in another output_dir" in done.stderr


@pytest.mark.slow
def test_other_rows_are_refused(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here / "model", tmp_path / "model")
    shutil.copy(here / "pairs.jsonl", tmp_path)
    assert run(tmp_path, 1, "run", steps=3).returncode == 0
    rows = (tmp_path / "pairs.jsonl").read_text()
    for other, said in (
        ("After 1?", "counts on the lengths of the rows"),
        ("After owe?", "other rows"),
    ):
        (tmp_path / "pairs.jsonl").write_text(rows.replace("After one?", other))
        done = run(tmp_path, 1, "run")
        assert done.returncode == 1
        assert said in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sigmoid", "simpo", "orpo", "kto"])
def test_an_adapter_learns_and_is_exported(
    here: Path, tmp_path: Path, kind: str, capsys: Any
) -> None:
    output = f"lora-{kind}"
    flags = ["--lora.r", 4, "--preference.loss_type", kind, "--checkpoint.export_at_end", True]
    if kind == "kto":
        flags += ["--data.train_files", "answers.jsonl"]
    done = run(here, 2, output, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("adapter proven") == 2
    held = (here / output / "checkpoints/step-00000006" / FILE).exists()
    assert held == (kind in ("sigmoid", "kto"))
    found = lines(here, output)
    assert found[-1]["loss"] < found[0]["loss"]
    merged = tmp_path / "merged"
    assert cli.main(["consolidate", str(here / output), "--output", str(merged), "--merge"]) == 0
    assert cli.main(["verify", str(here / output), str(merged)]) == 0
    AutoModelForCausalLM.from_pretrained(merged)
    capsys.readouterr()


@pytest.mark.slow
def test_a_stream_asks_the_base_and_goes_on_on_other_ranks(here: Path) -> None:
    flags = ["--lora.r", 4, "--lora.modules_to_save", "[lm_head]", "--data.streaming", True]
    flags += ["--data.eval_split", 0, "--data.eval_files", "pairs.jsonl"]
    whole = run(here, 1, "stream-whole", *flags)
    assert whole.returncode == 0, whole.stderr
    assert "reference  the base, with adapters off" in whole.stdout
    assert lines(here, "stream-whole")[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert run(here, 3, "stream", *flags, steps=3).returncode == 0
    second = run(here, 2, "stream", *flags)
    assert second.returncode == 0, second.stderr
    assert not (here / "stream/checkpoints/step-00000006" / FILE).exists()
    assert_alike(lines(here, "stream"), lines(here, "stream-whole"))


def test_every_checkpoint_holds_the_reference(here: Path, undisturbed: object) -> None:
    contents = {file.read_bytes() for file in here.glob(f"undisturbed/checkpoints/*/{FILE}")}
    (content,) = contents
    origin, values = decode(content, here)
    assert set(origin) == {"rows", "base", "model", "dtype", "packing", "sequence_length"}
    ((answers, logps),) = values.values()
    assert sorted(answers) == list(range(100))
    assert (logps < 0).all()
    assert not (here / "undisturbed" / PARTS).exists()
    assert cli.main(["verify", str(here / "undisturbed")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_stream_trains_adapters_in_the_default_dtype(here: Path, world: int) -> None:
    output = f"stream-bf16-{world}"
    flags = ["--lora.r", 4, "--data.streaming", True, "--data.eval_split", 0]
    flags += ["--data.eval_files", "pairs.jsonl", "--sharding.param_dtype", "bfloat16"]
    done = run(here, world, output, *flags)
    assert done.returncode == 0, done.stderr
    found = lines(here, output)
    assert found[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert found[-1]["loss"] < found[0]["loss"]
