"""Compute in bf16 with an fp32 reduction learns as fp32 does."""

import pytest
import torch
from conftest import save_tiny_model
from distributed import run_ranks
from sharded import train_step
from test_training_numbers import FP32, build

from toolkit.config.settings import OptimConfig, ShardingConfig
from toolkit.training.optim import build_optimizer

STEPS = 40
KINDS = {"llama": "llama", "experts": "qwen3_moe"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(save_tiny_model(root / name, kind)) for name, kind in KINDS.items()}


def text_rows(step: int, count: int = 16, length: int = 64) -> dict[str, torch.Tensor]:
    """Return fresh rows of real text, byte by byte: no row is seen twice."""
    import argparse
    import inspect

    raw = torch.tensor(list(inspect.getsource(argparse).encode()))
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(raw) - length, (count,), generator=generator)
    ids = torch.stack([raw[s : s + length] for s in starts.tolist()])
    return {"input_ids": ids, "labels": ids.clone()}


def learn(rank: int, world: int, folders: dict[str, str]) -> dict:
    found = {}
    bf16 = ShardingConfig()
    for kind in KINDS:
        for name, cfg, dtype in (
            ("fp32", FP32, "float32"),
            ("bf16", bf16, "float32"),
            ("bf16 storage", bf16, "bfloat16"),
        ):
            model = build(folders[kind], world, cfg, dtype)
            optimizer = build_optimizer(model, OptimConfig(learning_rate=3e-3))
            losses = [
                train_step(model, optimizer, [{k: v[rank::world] for k, v in text_rows(i).items()}])
                for i in range(STEPS)
            ]
            found[kind, name] = [float(s.loss) for s in losses]
    return found


@pytest.mark.slow
def test_bf16_compute_with_fp32_reduction_learns_as_fp32(folders):
    (found, _) = run_ranks(learn, 2, folders)
    for kind in KINDS:
        last = {
            name: sum(found[kind, name][-10:]) / 10 for name in ("fp32", "bf16", "bf16 storage")
        }
        print(kind, {k: round(v, 4) for k, v in last.items()})
        assert last["fp32"] < found[kind, "fp32"][0] - 2, "it must have learnt"
        assert abs(last["bf16"] - last["fp32"]) < 0.03, (kind, last)
        # The control: bf16 masters lose small updates, which these 40 steps show.
        assert abs(last["bf16 storage"] - last["fp32"]) > 2 * abs(last["bf16"] - last["fp32"])
