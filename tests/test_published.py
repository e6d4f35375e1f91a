"""Well-known models by their published architectures: sizes, FLOPs, and the shipped configs."""

import functools
import itertools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from distributed import run_toolkit
from published import PUBLISHED, folder_of
from transformers import Llama4Config, Llama4ForConditionalGeneration

from toolkit.config import KINDS, FinetuneConfig, ModelConfig, PreferConfig, load
from toolkit.config.settings import RunConfig
from toolkit.models import build_on_meta
from toolkit.planning.devices import device_of
from toolkit.planning.search import make_plan
from toolkit.training.flops import flops_per_token


@functools.cache
def model_of(name: str) -> Any:
    folder = folder_of(name, Path(tempfile.mkdtemp()))
    return build_on_meta(ModelConfig(name_or_path=str(folder), init="random"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    assert sum(p.numel() for p in model_of(name).parameters()) == PUBLISHED[name].parameters


def test_the_hub_counts_the_layer_that_predicts_one_more_token() -> None:
    """Of Qwen3.5, whose `mtp.*` no class loads: an attention layer, a projection of two states to
    one, three norms. The figure is `safetensors.total` of the Hub's API for Qwen/Qwen3.5-9B.
    """
    name = "Qwen/Qwen3.5-9B"
    layer = model_of(name).model.language_model.layers[3]
    width = PUBLISHED[name].config["text_config"]["hidden_size"]
    mtp = sum(p.numel() for p in layer.parameters()) + 2 * width**2 + 3 * width
    assert PUBLISHED[name].parameters + mtp == 9_653_104_368


def test_the_hub_counts_the_tower_that_the_class_for_text_leaves_out() -> None:
    """Of Llama 4 Scout. The figure is `safetensors.total` of the Hub's API."""
    config = Llama4Config(**PUBLISHED["meta-llama/Llama-4-Scout-17B-16E-Instruct"].config)
    with torch.device("meta"):
        whole = Llama4ForConditionalGeneration(config)
    assert sum(p.numel() for p in whole.parameters()) == 108_641_793_536


def test_the_hub_counts_buffers() -> None:
    """Of Gemma 4: a scalar a layer, two vectors of the tower. The figure is `safetensors.total`."""
    name = "google/gemma-4-31B"
    model = model_of(name)
    stored = [b.numel() for n, b in model.named_buffers() if n in model.state_dict()]
    assert len(stored) == 60 + 2
    assert PUBLISHED[name].parameters + sum(stored) == 31_273_088_876


# ---- Model FLOPs ---------------------------------------------------------------------------------

LENGTH = 4096


def flops(weights: int, layers: int, heads: int) -> float:
    """Of a token: every weight that it is multiplied by, and attention over LENGTH tokens."""
    return 6.0 * weights + 12.0 * layers * heads * LENGTH


def test_flops_of_mixtures_count_the_experts_that_a_token_meets() -> None:
    """By hand, matrix by matrix; the norms, which are counted as matrices, are written apart."""
    width, inner = 2048, 768
    attention = width * 4096 * 2 + 2 * width * 512 + 2 * 128
    layer = attention + width * 128 + 8 * 3 * width * inner + 2 * width
    qwen3_moe = 48 * layer + width + 151936 * width
    found = flops_per_token(model_of("Qwen/Qwen3-30B-A3B"), LENGTH)
    assert found == pytest.approx(flops(qwen3_moe, 48, 4096), rel=1e-12)
    assert qwen3_moe + 151936 * width == pytest.approx(3.3e9, rel=0.02)  # as it is called

    width, inner = 4096, 14336
    attention = 2 * width * width + 2 * width * 1024
    layer = attention + width * 8 + 2 * 3 * width * inner + 2 * width
    mixtral = 32 * layer + width + 32000 * width
    found = flops_per_token(model_of("mistralai/Mixtral-8x7B-v0.1"), LENGTH)
    assert found == pytest.approx(flops(mixtral, 32, 4096), rel=1e-12)
    assert mixtral + 32000 * width == pytest.approx(12.9e9, rel=0.01)

    width = 2880
    attention = 2 * width * 4096 + 2 * width * 512 + 4096 + 2 * 512 + width + 64
    experts = 4 * (width * 2 * width + width * width + 2 * width + width)
    layer = attention + width * 32 + 32 + experts + 2 * width
    gpt_oss = 24 * layer + width + 201088 * width
    found = flops_per_token(model_of("unsloth/gpt-oss-20b-BF16"), LENGTH)
    assert found == pytest.approx(flops(gpt_oss, 24, 4096), rel=1e-12)
    assert gpt_oss == pytest.approx(3.6e9, rel=0.01)  # the model card counts one embedding


def test_flops_of_dense_models_leave_out_only_the_embedding() -> None:
    for name, tied, layers, heads in (
        ("meta-llama/Llama-3.1-8B", 0, 32, 4096),
        ("Qwen/Qwen3-0.6B", 1, 28, 2048),  # heads twice as wide as the model
    ):
        config = PUBLISHED[name].config
        looked_up = 0 if tied else config["vocab_size"] * config["hidden_size"]
        weights = PUBLISHED[name].parameters - looked_up
        assert flops_per_token(model_of(name), LENGTH) == flops(weights, layers, heads)
        forward = flops_per_token(model_of(name), LENGTH, forward_only=True)
        assert 3 * forward == pytest.approx(flops(weights, layers, heads), rel=1e-12)


def test_flops_count_the_wider_heads_of_some_layers() -> None:
    """Gemma 4: 50 layers of 32 heads of 256, 10 of 32 of 512; its embedding is its head, too."""
    name = "google/gemma-4-31B"
    tower = sum(p.numel() for n, p in model_of(name).named_parameters() if "vision" in n)
    weights = PUBLISHED[name].parameters - tower
    heads = 50 * 32 * 256 + 10 * 32 * 512
    assert flops_per_token(model_of(name), LENGTH) == flops(weights, 1, heads)


# ---- The shipped configs -------------------------------------------------------------------------

CONFIGS = sorted((ROOT / "recipes/configs").glob("*_*gpu.yaml")) + sorted(
    (ROOT / "recipes/configs").glob("*nodes.yaml")
)
# Those of small models with a published figure: tests/test_results.py.
CONFIGS = [file for file in CONFIGS if "# Published figure: " not in file.read_text("utf-8")]
CONTROL = "mistral_7b_full_8gpu"
_PLANNED = re.compile(
    r"# Planned: ([\d.]+) GB of each device's (\d+)GB \(toolkit plan FILE --world_size (\d+) "
    r"--device_memory (\d+)GB\)"
)
_COMMAND = re.compile(r"#   toolkit (train|finetune|prefer|distill) (recipes/configs/[\w.]+\.yaml)")
# Planning a preference run takes about a minute, so two of these configs are planned again.
PREFERENCES = [file for file in CONFIGS if "kind: prefer" in file.read_text("utf-8")]
PLANNED_PREFERENCES = {"qwen3_8b_dpo_full_8gpu", "qwen3_8b_kto_lora_1gpu"}
PLANNED = [file for file in CONFIGS if file not in PREFERENCES or file.stem in PLANNED_PREFERENCES]
# Of each kind of model, adapters and size, one config is planned; `make test-long` plans the rest.
PLANNED_OFTEN = {
    *("gemma3_1b_full_1gpu", "gpt_oss_20b_lora_1gpu", "llama3_8b_pretrain_8gpu", CONTROL),
    *("llama3_70b_full_4nodes", "qwen3_0.6b_distill_8gpu", "qwen3_30b_a3b_lora_8gpu"),
    *PLANNED_PREFERENCES,
}


def test_the_configs_are_those_of_the_table_and_say_how_they_start() -> None:
    assert len(CONFIGS) >= 15
    for file in CONFIGS:
        text = file.read_text("utf-8")
        command = _COMMAND.search(text)
        assert command is not None, file.name
        assert command[2] == f"recipes/configs/{file.name}"
        assert _PLANNED.search(text) is not None, file.name
        for word in (" Hyper-parameters: ", "# Change: "):
            assert word in text, file.name
        load(config_of_command(command[1]), file)


def config_of_command(command: str) -> type[RunConfig]:
    """Return the settings class of the kind that `toolkit COMMAND` starts."""
    (kind,) = (kind for kind in KINDS if kind.command == command)
    return kind.config


def test_preference_configs_cover_each_objective_on_both_models() -> None:
    covered = {
        (cfg.model.name_or_path, cfg.preference.loss_type.replace("sigmoid_norm", "sigmoid"))
        for cfg in (load(PreferConfig, file) for file in PREFERENCES)
    }
    models, objectives = ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"), ("sigmoid", "kto", "reward")
    assert covered == set(itertools.product(models, objectives))
    planned = (load(PreferConfig, f) for f in PLANNED if f in PREFERENCES)
    assert {cfg.preference.paired for cfg in planned} == {True, False}


@pytest.mark.plans
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(f, id=f.stem, marks=[pytest.mark.long] * (f.stem not in PLANNED_OFTEN))
        for f in PLANNED
    ],
)
def test_a_shipped_config_needs_what_it_says_and_fits(file: Path, tmp_path) -> None:
    text = file.read_text("utf-8")
    needed, memory, world, again = (float(n) for n in _PLANNED.search(text).groups())  # type: ignore[union-attr]
    assert memory == again
    local, content = tmp_path / "local.yaml", text
    name, *teachers = re.findall(r"^  name_or_path: (\S+)", text, re.MULTILINE)
    for each in (name, *teachers):
        folder = folder_of(each, tmp_path)
        content = content.replace(f"name_or_path: {each}\n", f"name_or_path: {folder}\n")
    local.write_text(content)
    command = _COMMAND.search(text)[1]  # type: ignore[index]
    load(config_of_command(command), local)
    argv = ["plan", str(local), "--world_size", f"{world:.0f}", "--json", "--device_memory"]
    # A process of its own, as a user's: what tests compiled before has changed a plan.
    done = run_toolkit(*argv, f"{memory:.0f}GB", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["memory"] / 1e9 == pytest.approx(needed, abs=max(0.1, 0.02 * needed))
    assert found["parameters"] >= PUBLISHED[name].parameters
    assert memory - needed > 0.02 * memory  # a margin
    if file.stem == CONTROL:  # a smaller device is said to be too small
        short = int(needed * 0.9e9)
        cfg = load(FinetuneConfig, local)
        assert not make_plan(cfg, int(world), device_of("rtx4090"), short).fits(short)
