"""`lora.from` with 4 bits, reward models and object stores, and with the same command again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import bucket
import peft
import pytest
import torch
import transformers
from conftest import save_tiny_model
from safetensors.torch import load_file

from toolkit import checkpoint, config
from toolkit.adapters.lora import add_adapters, prepare_adapters
from toolkit.checkpoint.adapter_source import apply_adapter_settings
from toolkit.checkpoint.run_folder import save_config, validate_run_folders
from toolkit.config import FinetuneConfig, PreferConfig
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import (
    CheckpointConfig,
    FinetuneModelConfig,
    ModelConfig,
    model_settings,
)
from toolkit.errors import ConfigError, ModelError
from toolkit.export import load_adapter
from toolkit.loading.pretrained import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.packed_linear import packed_weights
from toolkit.models.peft_model import trained_tensors
from toolkit.start_checks import check_continued_adapter

WEIGHTS = "adapter_model.safetensors"


def save_adapter(
    root: Path, name: str, model: Any, task: str = "CAUSAL_LM", **settings: Any
) -> Path:
    """Write an adapter of PEFT with values everywhere."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type=task, r=3, **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    adapted.save_pretrained(root / name)
    return root / name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and adapters of it: of some modules, of all, of a reward model."""
    root = tmp_path_factory.mktemp("combinations")
    save_tiny_model(root / "base", hidden_size=64, intermediate_size=64, num_hidden_layers=2)

    def base() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(root / "base")

    save_adapter(root, "adapter", base(), target_modules=["v_proj", "q_proj"])
    absent = {"exclude_modules": ["vision_tower"], "target_modules": ["k_proj", "qkv"]}
    save_adapter(root, "absent", base(), **absent)
    save_adapter(root, "everywhere", base(), target_modules="all-linear")
    wide = base()
    wide.resize_token_embeddings(wide.config.vocab_size + 8)
    save_adapter(root, "wide", wide, target_modules=["q_proj"])
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(
        root / "base", num_labels=1
    )
    save_adapter(root, "reward", reward, "SEQ_CLS", target_modules=["q_proj"])
    return root


def config_of(made: Path, source: object, **lora: Any) -> FinetuneConfig:
    model = FinetuneModelConfig(str(made / "base"), dtype="float32")
    own = LoraConfig(from_=str(source), **lora)
    return FinetuneConfig(model=model, lora=own, output_dir=str(made / "new"))


def continued(cfg: Any) -> Any:
    """Return the model of a run that continues the adapter of `cfg`, as the recipes build it."""
    cfg = apply_adapter_settings(cfg)
    base = build_on_meta(model_settings(cfg))
    assert "continues" in check_continued_adapter(cfg, base, resumes=False)
    model = prepare_adapters(base, cfg.adapters, "float32")
    load_pretrained(model, cfg.model.name_or_path, "cpu")
    assert "bit sums equal" in load_adapter(model, cfg)[0]
    return model


def assert_values(model: Any, folder: Path) -> None:
    """Compare every trained tensor with the file of a PEFT folder."""
    stored, tensors = load_file(folder / WEIGHTS), trained_tensors(model)
    assert len(stored) == len(tensors) > 0
    for name, tensor in tensors.items():
        key = name.replace(".default.", ".").replace(".modules_to_save.weight", ".weight")
        assert torch.equal(tensor, stored[key.replace(".modules_to_save.", ".")]), name


def test_an_adapter_is_continued_on_a_base_in_4_bits(made: Path) -> None:
    model = continued(config_of(made, made / "adapter", load_in_4bit=True))
    assert packed_weights(model)
    assert_values(model, made / "adapter")


def test_the_adapter_of_a_reward_model_is_continued_with_its_head(made: Path) -> None:
    flags = ["--model.name_or_path", str(made / "base"), "--lora.from", str(made / "reward")]
    cfg = config.parse(PreferConfig, [*flags, "--preference.loss_type", "reward"])
    model = continued(cfg)
    assert any("score" in name for name in trained_tensors(model))
    assert_values(model, made / "reward")
    with pytest.raises(ConfigError, match=r"is an adapter of a reward model .*, this run trains a"):
        apply_adapter_settings(config.parse(PreferConfig, flags))


def test_names_in_an_adapter_that_the_model_lacks_change_nothing(made: Path) -> None:
    model = continued(config_of(made, made / "absent"))
    assert_values(model, made / "absent")
    own = LoraConfig(r=2, exclude_modules=["vision_tower"])
    with pytest.raises(ModelError, match="'vision_tower' matches no module"):
        add_adapters(build_on_meta(ModelConfig(str(made / "base"))), own)


def test_a_run_on_a_store_is_continued(made: Path, tmp_path: Path) -> None:
    bucket.Store.quiet()
    live: Any = add_adapters(build_on_meta(ModelConfig(str(made / "base"))), LoraConfig(r=2))
    load_pretrained(live, made / "base", "cpu", seed=5)
    url = f"bucket://{tmp_path}/run"
    checkpoint.save(checkpoint.TrainState(live, step=3), url, CheckpointConfig())
    model = continued(config_of(made, url))
    for name, tensor in trained_tensors(live).items():
        assert torch.equal(trained_tensors(model)[name], tensor), name
    assert model.hf_assets.continued["step"] == 3
    with pytest.raises(ConfigError, match=r"^lora.from bucket://.*nothing"):
        apply_adapter_settings(config_of(made, f"bucket://{tmp_path}/nothing"))


def test_a_matrix_of_another_vocabulary_is_refused_before_the_base_is_read(made: Path) -> None:
    """PEFT saves a resized embedding along; no rank may wait for one of another size."""
    assert any("embed_tokens" in key for key in load_file(made / "wide" / WEIGHTS))
    with pytest.raises(ConfigError, match=r"has .*embed_tokens.* of shape .* model.resize_embed"):
        continued(config_of(made, made / "wide"))


def test_an_adapter_that_was_replaced_since_the_first_start_is_refused(made: Path) -> None:
    """A resume whose reference lacks rows reads the adapter again."""
    cfg = apply_adapter_settings(config_of(made, made / "adapter"))
    model = prepare_adapters(build_on_meta(cfg.model), cfg.adapters, "float32")
    load_pretrained(model, cfg.model.name_or_path, "cpu")
    other = replace(cfg, lora=replace(cfg.lora, from_=str(made / "everywhere")))
    with pytest.raises(ConfigError, match=r"holds base_model.* which this model with its adapters"):
        load_adapter(model, other)


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("adapter", "[v_proj, q_proj]"),
        ("everywhere", "all-linear"),
        ("adapter", "[q_proj, v_proj]"),
    ],
)
def test_the_same_command_resumes_with_targets_in_any_spelling(
    made: Path, tmp_path: Path, source: str, targets: str
) -> None:
    file, run = tmp_path / "config.yaml", tmp_path / "run"

    def parsed(targets: str) -> Any:
        file.write_text(
            f"model: {{name_or_path: {made / 'base'}}}\noutput_dir: {run}\n"
            f"lora: {{from: {made / source}, target_modules: {targets}}}\n"
        )
        return config.parse(FinetuneConfig, ["--config", str(file)])

    first = apply_adapter_settings(parsed(targets))
    run.mkdir()
    (run / "metrics.jsonl").touch()
    save_config(first)
    validate_run_folders(parsed(targets))
    again = apply_adapter_settings(parsed(targets))
    assert again.lora == first.lora
    base = build_on_meta(again.model)
    assert "that of the run's checkpoint" in check_continued_adapter(again, base, resumes=True)
    with pytest.raises(ConfigError, match=r"lora\.target_modules was"):
        validate_run_folders(parsed("[k_proj]"))
    if source == "adapter":  # which modules `all-linear` means is known once there is a model
        wider = parsed("all-linear")
        validate_run_folders(wider)
        with pytest.raises(ConfigError, match="adapts other modules"):
            check_continued_adapter(
                apply_adapter_settings(apply_adapter_settings(wider)), base, resumes=True
            )
