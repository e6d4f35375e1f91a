"""Frozen models, such as teachers: checked before a run like the trained model."""

import json
from pathlib import Path

import pytest
from conftest import save_byte_tokenizer, save_tiny_model

from toolkit.config import DistillConfig, parse
from toolkit.errors import ToolkitError
from toolkit.start_checks import RunStart, check_start, run_checks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained model and teachers, most of them faulty."""
    folder = tmp_path_factory.mktemp("models")
    for name, kind, changes in (
        ("model", "llama", {"max_position_embeddings": 128}),
        ("teacher", "llama", {"max_position_embeddings": 128, "num_hidden_layers": 1}),
        ("short", "llama", {}),
        ("learned", "gpt2", {}),
        ("weightless", "llama", {"max_position_embeddings": 128}),
        ("lacking", "llama", {"max_position_embeddings": 128}),
        ("adapted", "llama", {"max_position_embeddings": 128}),
    ):
        save_tiny_model(folder / name, kind, **changes)
        save_byte_tokenizer(folder / name)
    (folder / "weightless" / "model.safetensors").unlink()
    config = json.loads((folder / "lacking" / "config.json").read_text())
    (folder / "lacking" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    (folder / "adapted" / "adapter_config.json").write_text("{}")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    rows = [{"prompt": f"{i} + {i} = ", "completion": f"{2 * i}."} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(models: Path, output: Path, teacher: str, *flags: str) -> DistillConfig:
    every = {
        "model.name_or_path": models / "model",
        "teacher.name_or_path": models / teacher,
        "data.train_files": models / "rows.jsonl",
        "data.sequence_length": 128,
        "train.max_steps": 2,
        "output_dir": output,
    }
    words = [word for name, value in every.items() for word in (f"--{name}", str(value))]
    return parse(DistillConfig, [*words, *flags])


def test_a_sound_teacher_passes(models: Path, tmp_path: Path) -> None:
    assert "20 rows" in check_start(settings(models, tmp_path / "run", "teacher"), 1, "cpu")


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("weightless", "safetensors"),
        ("lacking", "model.layers.3."),
        ("short", "data.sequence_length is 128, the model has 64 positions"),
        ("learned", "data.sequence_length is 128, the model has 64 positions"),
        ("adapted", "holds an adapter (adapter_config.json)"),
        ("adapter", "merge it into its base"),
        ("absent", "absent"),
    ],
)
def test_a_teacher_that_cannot_be_loaded_is_refused(
    models: Path, tmp_path: Path, teacher: str, message: str
) -> None:
    """Before processes start, and again on the ranks of a recipe."""
    cfg = settings(models, tmp_path / "run", teacher)
    with pytest.raises(ToolkitError) as refused:
        check_start(cfg, 1, "cpu")
    text = str(refused.value)
    assert text.startswith("teacher: ")
    assert message in text
    assert "\n" not in text
    with pytest.raises(ToolkitError) as again:
        run_checks(RunStart(cfg, 1), "build", "model")
    assert str(again.value) == text
