"""Frozen models, such as teachers: checked before a run like the trained model."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from toolkit import objectives
from toolkit.config import DistillConfig, PreferConfig, parse
from toolkit.data.prepare import choose_packing
from toolkit.errors import DataError, ModelError, ToolkitError
from toolkit.mesh import init_mesh
from toolkit.models import build_on_meta
from toolkit.planning.fake_ranks import fake_world, sharded
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


def test_a_frozen_model_may_be_stored_in_float16(models: Path, tmp_path: Path) -> None:
    """It has no optimizer; a model that is trained is refused by run and plan."""
    half = save_tiny_model(tmp_path / "half", dtype=torch.float16, max_position_embeddings=128)
    save_byte_tokenizer(half)
    cfg = settings(models, tmp_path / "run", str(half))
    check_start(cfg, 1, "cpu")
    with fake_world(1):
        objective = objectives.build(cfg, init_mesh("cpu", 1, cfg.sharding))
        objective.shard_models()
    assert {p.dtype for p in objective.frozen["teacher"].model.parameters()} == {torch.float16}
    trained = replace(cfg, model=replace(cfg.model, name_or_path=str(half), dtype="auto"))
    with pytest.raises(ModelError, match=r"stored in float16.*set model\.dtype: float32"):
        check_start(trained, 1, "cpu")
    with pytest.raises(ModelError, match="stored in float16"), sharded(trained, 1):
        pass


# ---- Packed rows


def save_recurrent_model(folder: Path) -> Path:
    """Write a tiny model with a layer of linear attention, whose state crosses documents."""
    config = CONFIG_MAPPING["qwen3_next"](
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        vocab_size=300,
        max_position_embeddings=128,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def data_of(cfg: Any) -> Any:
    """The data of a run as far as its packing is concerned."""
    choice = choose_packing(cfg.data, build_on_meta(cfg.model), cfg.train.micro_batch)
    return SimpleNamespace(cfg=cfg, choice=choice, run=SimpleNamespace(device=torch.device("cpu")))


def check_packing(cfg: Any) -> None:
    objectives.build(cfg).check_packing(data_of(cfg))


@pytest.mark.parametrize("packing", ["auto", "bfd", "none"])
def test_a_teacher_that_lets_packed_samples_see_each_other_is_refused(
    models: Path, tmp_path: Path, packing: str
) -> None:
    recurrent = save_recurrent_model(tmp_path / "recurrent")
    flags = ("--data.packing", packing)
    check_packing(settings(models, tmp_path / "run", "teacher", *flags))
    cfg = settings(models, tmp_path / "run", str(recurrent), *flags)
    if packing == "none":
        check_packing(cfg)
    else:
        with pytest.raises(DataError, match=r"teacher: Qwen3Next.*apart.*data\.packing: none"):
            check_packing(cfg)


def test_a_teacher_that_needs_another_separation_of_documents_is_refused(
    models: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    flags = {
        "teacher": ("--teacher.attn_implementation", "eager"),
        "model": ("--model.attn_implementation", "eager"),
    }
    with pytest.raises(DataError, match=r"needs a mask .*eager.*data\.packing: none"):
        check_packing(settings(models, output, "teacher", *flags["teacher"]))
    with pytest.raises(DataError, match=r"by their borders.*eager.*data\.packing: none"):
        check_packing(settings(models, output, "teacher", *flags["model"]))
    check_packing(settings(models, output, "teacher", *flags["model"], *flags["teacher"]))


def test_a_reference_of_another_architecture_is_tried_on_packed_rows(
    models: Path, tmp_path: Path
) -> None:
    every = {
        "model.name_or_path": models / "model",
        "data.train_files": models / "rows.jsonl",
        "data.sequence_length": 128,
        "output_dir": tmp_path / "run",
    }
    words = [word for name, value in every.items() for word in (f"--{name}", str(value))]
    flag = "--preference.reference"
    check_packing(parse(PreferConfig, [*words, flag, str(models / "teacher")]))
    recurrent = save_recurrent_model(tmp_path / "recurrent")
    with pytest.raises(DataError, match=r"preference\.reference: Qwen3Next.*packing: none"):
        check_packing(parse(PreferConfig, [*words, flag, str(recurrent)]))


@pytest.mark.slow
def test_a_recipe_refuses_a_recurrent_teacher_on_packed_rows(models: Path, tmp_path: Path) -> None:
    recurrent = save_recurrent_model(tmp_path / "recurrent")
    cfg = settings(models, tmp_path / "run", str(recurrent))
    words = ["--model.name_or_path", cfg.model.name_or_path]
    words += ["--teacher.name_or_path", cfg.teacher.name_or_path]
    words += ["--data.train_files", str(models / "rows.jsonl"), "--train.max_steps", "2"]
    words += ["--data.sequence_length", "128", "--output_dir", cfg.output_dir]
    result = run_recipe_ranks("distill", 2, *words, cwd=tmp_path)
    assert result.returncode != 0
    (line,) = [x for x in result.stderr.splitlines() if "see each other" in x]
    assert "teacher: Qwen3Next" in line
    assert "weights " not in result.stdout
