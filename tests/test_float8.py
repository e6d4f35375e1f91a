"""Linear layers in float8, emulated on the CPU: conversion, learning, saving.

torchao is not in `.venv`, because transformers and PEFT would import it everywhere. `make
test-rest` installs it into a separate folder, which the processes of these tests add to their path.
"""

import contextlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_ranks, tensor_sums
from tiny_models import tiny_model

from toolkit.config.data import DataConfig
from toolkit.config.distill import DistillConfig, TeacherConfig
from toolkit.config.lora import LoraConfig
from toolkit.config.outputs import CheckpointConfig
from toolkit.config.preference import PreferConfig
from toolkit.config.settings import (
    FinetuneConfig,
    FinetuneModelConfig,
    ModelConfig,
    OptimConfig,
    PretrainConfig,
    ShardingConfig,
)
from toolkit.errors import ConfigError
from toolkit.models import float8
from toolkit.planning.simulation import simulate

EXTRAS = Path(sys.prefix) / "extras" / "float8"
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
needs_torchao = pytest.mark.skipif(
    not EXTRAS.is_dir() and importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed; `make test-rest` installs it",
)
STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("models") / "llama"
    changes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 320}
    return str(save_tiny_model(path, "llama", **changes))


def train(
    rank: int,
    world: int,
    folder: str,
    recipe: str,
    run: str,
    recompute: Any = "none",
    replicas: int = 1,
) -> dict:
    """Train on fixed rows; return losses and what was printed, saved and exported."""
    sys.path.insert(0, str(EXTRAS))
    from sharded import apply_fsdp, init_mesh, train_step
    from transformers import AutoModelForCausalLM

    from toolkit import checkpoint, ranks
    from toolkit.export import consolidate
    from toolkit.loading import load_pretrained
    from toolkit.models.causal_lm import prepare
    from toolkit.training.optim import build_optimizer

    cfg = ShardingConfig(activation_checkpointing=recompute, dp_replicate=replicas)
    model = prepare(ModelConfig(folder, float8=recipe))
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    load_pretrained(model, folder, torch.device("cpu"))
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-2))
    state = checkpoint.TrainState(model, optimizer)
    start = 0
    if Path(run).is_dir():
        start = checkpoint.resume(state, run, CheckpointConfig()) or 0
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 300, (4, 33), generator=generator)
    losses = []
    for step in range(start, STEPS):
        stats = train_step(model, optimizer, [{"input_ids": ids, "labels": ids}])
        losses.append(stats.loss.item())
        state.step = step + 1
        if state.step in (STEPS // 2, STEPS):
            checkpoint.save(state, run, CheckpointConfig())
            checkpoint.wait()
    found = {"losses": losses, "start": start, "sums": tensor_sums(model)}
    found["kinds"] = {n: type(m).__name__ for n, m in model.named_modules()}
    weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    found["gathers"] = hasattr(weight.to_local(), "fsdp_pre_all_gather")
    ranks.gather(rank)  # all files are there
    if rank == 0:
        newest = sorted(Path(run).glob("checkpoints/step-*"))[-1]
        export = f"{run}-export-{start}"
        consolidate(str(newest), export, dtype="float32")
        read = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
        found["exported"] = tensor_sums(read)
    return found


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_learns_as_bf16_does_and_what_is_saved_is_what_was_trained(recipe, folder, tmp_path):
    plain = run_ranks(train, 2, folder, "none", str(tmp_path / "bf16"))[0]
    recompute = {"tensorwise": "none", "rowwise": "full"}.get(recipe, "selective")
    found = run_ranks(train, 2, folder, recipe, str(tmp_path / "run"), recompute)[0]
    first, last = plain["losses"][0], plain["losses"][-1]
    assert last < 0.75 * first, "the control learned nothing"
    assert abs(found["losses"][-1] - last) < 0.05 * first
    assert found["losses"] != plain["losses"]
    converted = [n for n, kind in found["kinds"].items() if kind == "Float8Linear"]
    assert len(converted) == 7 * sum(n.endswith("mlp") for n in found["kinds"])
    assert "lm_head" not in converted
    assert found["gathers"] == (recipe == "tensorwise")
    assert found["exported"] == found["sums"]
    assert found["sums"].keys() == plain["sums"].keys()


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize(("world", "replicas"), [(2, 2), (4, 2)])
def test_replicas_are_equal(world, replicas, folder, tmp_path):
    """The all-reduce of the scales covers all shards of a copy; copies must not drift apart."""
    run = str(tmp_path / "run")
    ranks = run_ranks(train, world, folder, "tensorwise", run, "none", replicas)
    assert ranks[0]["gathers"]
    assert ranks[0]["losses"][-1] < 0.75 * ranks[0]["losses"][0]
    assert all(found["sums"] == ranks[0]["sums"] for found in ranks)
    assert ranks[0]["exported"] == ranks[0]["sums"]


@needs_torchao
@pytest.mark.slow
def test_a_resumed_run_has_the_same_losses(folder, tmp_path):
    run = tmp_path / "run"
    whole = run_ranks(train, 2, folder, "tensorwise", str(run))[0]
    newest = sorted(run.glob("checkpoints/step-*"))[-1]
    shutil.rmtree(newest)
    again = run_ranks(train, 2, folder, "tensorwise", str(run))[0]
    assert again["start"] == STEPS // 2
    assert again["losses"] == whole["losses"][again["start"] :]
    assert again["sums"] == whole["sums"]


def place(rank: int, world: int, folder: str) -> list[bool]:
    """Return whether weights are gathered in float8, by the way in which they got their values."""
    sys.path.insert(0, str(EXTRAS))
    from sharded import apply_fsdp, init_mesh

    from toolkit.loading import init_weights, load_pretrained, materialise
    from toolkit.models.causal_lm import prepare

    ways = (
        lambda model: load_pretrained(model, folder, "cpu"),
        lambda model: init_weights(model, "cpu", 1),
        lambda model: materialise(model, "cpu"),
    )
    gathered = []
    for fill in ways:
        model = prepare(ModelConfig(folder, float8="tensorwise"))
        apply_fsdp(model, init_mesh("cpu", world, ShardingConfig()), ShardingConfig())
        fill(model)
        weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
        gathered.append(hasattr(weight.to_local(), "fsdp_pre_all_gather"))
    return gathered


@needs_torchao
@pytest.mark.slow
def test_weights_are_gathered_in_float8_however_they_got_their_values(folder):
    assert run_ranks(place, 1, folder) == [[True] * 3]


def convert(rank: int, world: int, folder: str, recipe: str, device: str) -> tuple[str, set[str]]:
    """Build a model for `device`; return what was printed, and the layers that were converted."""
    sys.path.insert(0, str(EXTRAS))
    from toolkit.models.causal_lm import prepare

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model = prepare(ModelConfig(folder, float8=recipe), device)
    modules = model.named_modules()
    return printed.getvalue(), {n for n, m in modules if type(m).__name__ == "Float8Linear"}


@needs_torchao
@pytest.mark.slow
def test_layers_that_do_not_gain_stay_and_are_counted(tmp_path):
    wide = save_tiny_model(
        tmp_path / "wide", "llama", hidden_size=1024, intermediate_size=2048, num_hidden_layers=1
    )
    [(printed, names)] = run_ranks(convert, 1, str(wide), "tensorwise", "cuda")
    assert names == {f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up")}
    assert "float8     tensorwise: 1 gate_proj, 1 up_proj; 5 too small to gain" in printed
    odd = save_tiny_model(tmp_path / "odd", "llama", intermediate_size=72)
    [(printed, names)] = run_ranks(convert, 1, str(odd), "rowwise", "cpu")
    assert not any("mlp" in name for name in names)
    assert "emulated on the CPU" in printed
    assert "whose widths are no multiples of 16" in printed
    with pytest.raises(
        Exception, match=r"no layer of LlamaForCausalLM gains from it \(.*too small"
    ):
        run_ranks(convert, 1, str(odd), "rowwise", "cuda")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("any_size", [False, True])
def test_routers_and_weights_that_kernels_read_stay(recipe, any_size):
    """DBRX's router is a module with a linear layer, and Mamba's kernel reads `out_proj`."""
    with torch.device("meta"):
        wide = {"d_model": 6144, "n_layers": 1, "ffn_config": {"moe_num_experts": 16}}
        mixture = tiny_model("dbrx", perturbed=False, **wide)
        recurrent = tiny_model("bamba", perturbed=False)
    names, excluded = float8._select_linears(mixture, recipe, any_size=any_size)
    assert mixture.transformer.blocks[0].ffn.router.layer.weight.shape == (16, 6144)
    assert names
    assert not any("router" in name for name in names)
    assert excluded["of routers"] == 1
    names, excluded = float8._select_linears(recurrent, recipe, any_size=True)
    assert any(name.endswith("o_proj") for name in names)
    assert not any(name.endswith("mamba.out_proj") for name in names)
    assert excluded["whose weights are used without their forward"] > 0


def test_refused_without_torchao_and_on_other_devices(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"needs torchao 0.18.*install fsdp2-toolkit.float8"):
        float8.check_float8("rowwise", "cpu")
    float8.check_float8("none", "cpu")  # the control
    monkeypatch.setattr(float8, "_load_torchao", lambda _: None)
    float8.check_float8("rowwise", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "L40S")
    float8.check_float8("tensorwise", "cuda")
    with pytest.raises(ConfigError, match=r"rowwise needs .* 9.0 or newer; L40S has 8.9"):
        float8.check_float8("rowwise", "cuda")
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        float8.check_float8("rowwise", "mps")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora": LoraConfig(r=4)}, "one scale per row. Set model.float8: rowwise"),
        ({"sharding": ShardingConfig(cpu_offload=True)}, "cpu_offload"),
        ({"sharding": ShardingConfig(param_dtype="float32")}, "param_dtype must be bfloat16"),
        ({"sharding": ShardingConfig(torch_compile="model")}, "torch_compile: model"),
        ({"sharding": ShardingConfig(context_parallel=2)}, "context_parallel was not tried"),
    ],
)
def test_settings_that_contradict_it_are_refused(changes, reason):
    model = FinetuneModelConfig("folder", float8="tensorwise")
    with pytest.raises(ConfigError, match=f"model.float8: tensorwise: .*{reason}"):
        FinetuneConfig(model, **changes)
    FinetuneConfig(model)  # the control


def test_other_kinds_of_runs_and_teachers_are_refused():
    model = FinetuneModelConfig("folder", float8="rowwise")
    with pytest.raises(ConfigError, match=r"model.float8: the model and its reference must be"):
        PreferConfig(model)
    with pytest.raises(ConfigError, match=r"not tried in distillation"):
        DistillConfig(model, teacher=TeacherConfig("teacher"))
    PreferConfig(FinetuneModelConfig("folder"))  # the control
    with pytest.raises(ConfigError, match=r"teacher.float8 has no effect"):
        TeacherConfig("folder", float8="rowwise")


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "finetune"])
def test_the_command_trains_and_a_resume_has_the_same_losses(kind, tmp_path):
    """The path of a user: the command, a checkpoint, the same command again."""
    paths = [str(EXTRAS), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    configs = Path(__file__).parent.parent / "recipes" / "configs"
    config = configs / {"train": "pretrain_tiny.yaml", "finetune": "finetune_tiny.yaml"}[kind]
    settings = {
        "model.float8": "tensorwise",
        "model.name_or_path": str(configs / "tiny_llama"),
        "sharding.param_dtype": "bfloat16",
        "optim.lr_scheduler_type": "constant",
        "train.logging_steps": 1,
        "checkpoint.save_steps": 2,
    }
    if kind == "finetune":
        folder = save_tiny_model(
            tmp_path / "model", "llama", hidden_size=64, vocab_size=512, max_position_embeddings=256
        )
        save_byte_tokenizer(folder)
        settings["model.name_or_path"] = str(folder)
        content = yaml.safe_load(config.read_text())
        del content["lora"]  # the complete model is trained
        config = tmp_path / "finetune.yaml"
        config.write_text(yaml.safe_dump(content))
    losses = {}
    for name, lengths in {"whole": (4,), "stopped": (2, 4)}.items():
        for steps in lengths:
            changes = {**settings, "output_dir": tmp_path / name, "train.max_steps": steps}
            command = [sys.executable, "-m", "toolkit", kind, str(config)]
            command += [text for key, value in changes.items() for text in (f"--{key}", str(value))]
            ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            assert "float8     tensorwise, emulated on the CPU" in ended.stdout
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    assert len(losses["whole"]) == 4
    assert losses["whole"] == losses["stopped"]


def test_a_plan_says_that_it_leaves_it_out(folder):
    notes = {}
    for recipe in ("none", "tensorwise"):
        model = ModelConfig(folder, float8=recipe)
        cfg = PretrainConfig(model=model, data=DataConfig(sequence_length=16))
        notes[recipe] = [
            note for note in simulate(cfg, 2, device_type="cpu").notes if "float8" in note
        ]
    assert notes["none"] == []
    assert notes["tensorwise"] == [
        "model.float8 is not planned: time and gathered weights are of bfloat16"
    ]
