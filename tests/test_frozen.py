"""What is not trained lies whole on every rank where that is asked for or fits: no step gathers it,
and losses, checkpoints and exports are those of a sharded base.
"""

import dataclasses
import filecmp
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_ranks
from sharded import apply_fsdp, init_mesh, sharded_of, train_step
from test_sharding_knobs import Collectives
from torch.distributed.tensor import DTensor

from toolkit import checkpoint, loading
from toolkit.adapters import prepare_adapters
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import (
    CheckpointConfig,
    ModelConfig,
    OptimConfig,
    ShardingConfig,
)
from toolkit.errors import ConfigError, ShardingError
from toolkit.export import consolidate
from toolkit.models.causal_lm import prepare
from toolkit.planning.fake_ranks import fake_world
from toolkit.sharding import accumulation, fsdp
from toolkit.sharding.unit_table import dtype_ledger, format_unit_table
from toolkit.training.optim import build_optimizer

FP32 = ShardingConfig(param_dtype="float32", accumulation="reduce_once")
HOW = ("sharded", "replicated")
CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "head in full": {"modules_to_save": ["lm_head"]},
    "no adapters": {"r": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = save_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")
    save_byte_tokenizer(path)
    return str(path)


def build(folder: str, case: str, world: int, cfg: ShardingConfig, fill: bool = True) -> Any:
    lora = LoraConfig(**({"r": 4} | CASES[case]))
    frozen = [] if lora.r else ["*.mlp.*", "*embed_tokens*"]
    model_cfg = ModelConfig(folder, frozen_parameters=frozen)
    model = prepare_adapters(prepare(model_cfg), lora, cfg.param_dtype)
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    if fill:
        loading.load_or_init(sharded_of(model), model_cfg, "cpu", 7)
    return model.train()


def train(rank: int, world: int, folder: str, root: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    ids = torch.randint(0, 300, (4, 16), generator=torch.Generator().manual_seed(1))[rank::world]
    micro = [{"input_ids": ids, "labels": ids}] * 2
    for case in CASES:
        for how in HOW:
            run = Path(root, f"{case}-{how}")
            model = build(folder, case, world, dataclasses.replace(FP32, frozen=how))
            optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-2))
            state = checkpoint.TrainState(model, optimizer)
            step = checkpoint.resume(state, run, CheckpointConfig()) or 0
            steps = [train_step(model, optimizer, micro)]  # the first tries the head, too
            with Collectives() as comms:
                steps.append(train_step(model, optimizer, micro))
            state.step = step + 2
            checkpoint.save(state, run, CheckpointConfig())
            trained = [p for p in model.parameters() if p.requires_grad]
            found[case, how] = {
                "losses": [(float(s.loss), float(s.grad_norm)) for s in steps],
                "moved": comms.elements["all_gather"],
                "trained": sum(p.numel() for p in trained),
                "whole": {isinstance(p, DTensor) for p in trained},
            }
    return found


def digests(run: Path, step: int) -> Any:
    return json.loads((run / f"checkpoints/step-{step:08}/manifest.json").read_text())["row_sums"]


@pytest.mark.slow
def test_no_step_gathers_what_lies_whole(folder, tmp_path):
    two, (one,) = (run_ranks(train, world, folder, str(tmp_path)) for world in (2, 1))
    for case in CASES:
        for found in two:
            sharded, whole = (found[case, how] for how in HOW)
            assert whole["losses"] == sharded["losses"]  # to the bit
            assert whole["losses"][1][0] < whole["losses"][0][0]
            assert whole["whole"] == {True}  # what is trained stays sharded
            # In each of 2 micro-batches a forward and a backward; torch prefetches one unit more.
            # What is trained in full lies beside what it stands for.
            most = 5 * whole["trained"] * (2 if case == "head in full" else 1)
            assert whole["trained"] <= whole["moved"] <= most
            assert sharded["moved"] > 4 * whole["moved"] or case in ("head in full", "no adapters")
            assert sharded["moved"] > whole["moved"]
        assert one[case, "replicated"]["losses"] == one[case, "sharded"]["losses"]  # resumed on one
        runs = [tmp_path / f"{case}-{how}" for how in HOW]
        for step in (2, 4):
            assert digests(runs[0], step) == digests(runs[1], step)
        outs = [tmp_path / f"{case}-{how}-hf" for how in HOW]
        for run, out in zip(runs, outs, strict=True):
            consolidate(run, out, merge=CASES[case].get("r") != 0)
        assert filecmp.cmp(*(out / "model.safetensors" for out in outs), shallow=False)


@pytest.mark.parametrize(
    ("changes", "device", "free", "chosen", "why"),
    [
        ({}, "cpu", 10**9, False, "cpu"),
        ({}, "cuda", 10**9, True, "GB more, 1.00 GB are free"),
        ({}, "cuda", 10**5, False, "GB more, 0.00 GB are free"),
        ({"frozen": "sharded"}, "cuda", 10**9, False, ""),
        ({"cpu_offload": True}, "cuda", 10**9, False, "cpu_offload"),
        ({"param_dtype": "bfloat16"}, "cuda", 10**9, False, "is stored in torch.float32"),
        ({"param_dtype_overrides": {"mlp": "bfloat16"}}, "cuda", 10**9, False, "mlp.*in torch.bfl"),
    ],
)
def test_what_auto_decides_by(changes, device, free, chosen, why, folder):
    cfg = dataclasses.replace(FP32, **changes)
    model = prepare_adapters(prepare(ModelConfig(folder)), LoraConfig(r=4), cfg.param_dtype)
    with mock.patch.object(accumulation, "_measure_memory", return_value=(free, free, 0)):
        found, said = fsdp.should_replicate_frozen(model, cfg, 8, device)
    assert found is chosen
    assert re.search(why, said)


def test_the_start_says_what_auto_chose(folder):
    with fake_world(8):
        model = build(folder, "lora", 8, ShardingConfig(), fill=False)
        assert sharded_of(model).auto_line == (
            "embedding_units false (cpu), torch_compile none (cpu), frozen sharded (cpu)"
        )
        cfg = dataclasses.replace(FP32, frozen="replicated")
        model = build(folder, "lora", 8, cfg, fill=False)
        assert "frozen" not in sharded_of(model).auto_line  # it was asked for
        assert dtype_ledger(sharded_of(model), cfg)["reduction"] == "float32"
        assert "(replicated)" in format_unit_table(sharded_of(model), cfg)
        assert all(
            "lora" in name for unit in sharded_of(model).plan.units for name in unit.parameters
        )


def test_what_cannot_lie_whole_is_refused(folder):
    with pytest.raises(
        ConfigError, match="replicated keeps parameters on the device that cpu_offload moves"
    ):
        ShardingConfig(frozen="replicated", cpu_offload=True)
    cfg = ShardingConfig(frozen="replicated")  # bf16, of a base in fp32
    with fake_world(8), pytest.raises(ShardingError, match=r"stored in torch.float32 and computes"):
        build(folder, "lora", 8, cfg, fill=False)
