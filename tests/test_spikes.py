"""A step far above those before it changes nothing, where that is asked for; a resumed run decides
the same.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, save_byte_tokenizer, save_tiny_model
from distributed import run_ranks, run_recipe_ranks
from sharded import apply_fsdp, init_mesh, loss_sum, train_step
from test_bad_steps import bytes_of, rows
from test_recipe import on_rows
from test_run_kills import checkpoints
from transformers import AutoTokenizer

from toolkit.checkpoint.commit import committed_steps
from toolkit.config.settings import ModelConfig, OptimConfig, ShardingConfig
from toolkit.formats.metrics_file import read_metrics
from toolkit.loading.pretrained import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.training.guards.bad_steps import Spikes
from toolkit.training.optim import build_optimizer

CPU = torch.device("cpu")


def steps_found(losses: list[float], spikes: Spikes, norms: list[float] | None = None) -> list[int]:
    """Return the steps, counted from 0, that are spikes."""
    pairs = zip(losses, norms or [1.0] * len(losses), strict=True)
    return [
        i
        for i, (loss, norm) in enumerate(pairs)
        if bool(spikes.is_spike(torch.tensor(loss), torch.tensor(norm)))
    ]


def around(level: float, count: int, seed: int = 0) -> list[float]:
    noise = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return (level * (1 + 0.03 * noise)).tolist()


def test_a_spike_is_found_after_the_window_is_full_and_lifts_no_limit() -> None:
    losses = around(3.0, 100)
    losses[10] = losses[40] = losses[41] = losses[60] = 9.0
    assert steps_found(losses, Spikes(6.0, CPU, {}, window=32)) == [40, 41, 60]


def test_so_is_one_of_the_gradient_norm_alone() -> None:
    norms = around(0.4, 60)
    norms[50] = 4.0
    norms[55] = 0.6  # half as much again is none
    assert steps_found(around(2.0, 60), Spikes(6.0, CPU, {}, window=32), norms) == [50]


def test_noise_a_falling_loss_and_one_that_stands_still_are_none() -> None:
    falling = [10.0 * 0.99**i * (1 + 0.02 * (i % 3)) for i in range(200)]
    still = [1.0 + 1e-6 * (i % 2) for i in range(200)]
    for losses in (around(3.0, 2000), falling, still):
        assert steps_found(losses, Spikes(6.0, CPU, {}, window=128)) == []


def test_what_is_not_finite_is_no_spike_and_not_in_the_window() -> None:
    losses = around(3.0, 60)
    losses[35] = float("nan")
    losses[36], losses[37] = float("inf"), 9.0
    spikes = Spikes(6.0, CPU, {}, window=32)
    assert steps_found(losses, spikes) == [37]
    assert len(spikes.state_dict()["loss"]) == 32


def test_a_level_that_stays_up_becomes_the_normal_one() -> None:
    found = steps_found(around(2.0, 40) + around(4.0, 60), Spikes(6.0, CPU, {}, window=32))
    assert found == list(range(40, 40 + 16))  # half a window


@pytest.mark.parametrize("at", [3, 20, 33, 50])
def test_a_window_goes_through_json_without_losing_a_bit(at) -> None:
    losses, norms = around(3.0, 80), around(0.3, 80, seed=1)
    losses[60] = 3.7  # near the limit
    whole = Spikes(6.0, CPU, {}, window=32)
    first = Spikes(6.0, CPU, {}, window=32)
    expected = steps_found(losses, whole, norms)
    before = steps_found(losses[:at], first, norms[:at])
    again = Spikes(6.0, CPU, json.loads(json.dumps(first.state_dict())), window=32)
    after = steps_found(losses[at:], again, norms[at:])
    assert [*before, *(at + i for i in after)] == expected
    assert again.state_dict() == whole.state_dict()


def step_with_spike(rank: int, world: int, folder: str, optim: str, watched: bool) -> list[Any]:
    cfg = ShardingConfig(param_dtype="float32")
    model = build_on_meta(ModelConfig(folder))
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    load_pretrained(model, folder, "cpu")
    optimizer = build_optimizer(model.train(), OptimConfig(optim=optim, learning_rate=1e-4))
    spikes = Spikes(6.0, CPU, {}, window=4) if watched else None
    for i in range(5):
        train_step(model, optimizer, [rows(10 * i + rank)], spikes=spikes)
    before = bytes_of(model, optimizer)
    stats = train_step(
        model,
        optimizer,
        [rows(99 + rank)],
        loss=lambda m, b: loss_sum(m, b) * (1 + 20 * rank),
        spikes=spikes,
    )
    after = bytes_of(model, optimizer)
    return [bool(stats.skipped), all(map(torch.equal, before, after))]


@pytest.mark.parametrize(
    ("optim", "watched"),
    [
        ("adamw_torch_fused", True),
        pytest.param("muon", True, marks=pytest.mark.slow),
        pytest.param("adamw_torch_fused", False, marks=pytest.mark.slow),  # the control
    ],
)
def test_a_spike_of_one_rank_changes_nothing_on_any(tmp_path, optim, watched) -> None:
    folder = str(save_tiny_model(tmp_path, num_hidden_layers=2))
    assert run_ranks(step_with_spike, 2, folder, optim, watched) == [[watched, watched]] * 2


# ---- Whole runs ----------------------------------------------------------------------------------

SPIKY = """
import runpy
from toolkit import training
from toolkit.objectives import causal_lm
from toolkit.training.guards.bad_steps import Spikes

Spikes.__init__.__kwdefaults__["window"] = 6
plain = training.causal_lm_loss

def spiky(m, b, **more):
    factor = 1.0 + 50.0 * (b.inputs["input_ids"] == {mark}).any()
    return training.LossSum(plain(m, b, **more).total * factor, b.count)

causal_lm.causal_lm_loss = spiky
runpy.run_path({recipe!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_resumed_run_skips_the_same_steps(tmp_path) -> None:
    save_byte_tokenizer(tmp_path / "model")
    save_tiny_model(tmp_path / "model", attention_dropout=0.1)
    mark = AutoTokenizer.from_pretrained(tmp_path / "model").convert_tokens_to_ids("#")
    recipe = tmp_path / "spiky.py"
    recipe.write_text(SPIKY.format(mark=mark, recipe=str(ROOT / "recipes" / "finetune.py")))
    content = [
        {"prompt": f"{i} {'#' if i % 9 == 4 else '+'} 1 = ", "completion": str(i + 1)}
        for i in range(64)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))

    def start(run: str, steps: int, *more: str) -> str:
        flags = on_rows(
            train__per_device_train_batch_size=1,
            train__max_steps=steps,
            train__logging_steps=4,
            train__max_bad_steps=9,
            optim__lr_scheduler_type="constant",
            checkpoint__save_steps=4,
            checkpoint__save_total_limit=9,
            output_dir=run,
        )
        done = run_recipe_ranks(recipe, 2, *flags, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = r"WARNING: step (\d+) is skipped: loss \S+ or gradient norm \S+ is far above p"
    on = ("--train.skip_spikes", "6")
    whole = re.findall(told, start("whole", 24, *on))
    assert len(whole) >= 3
    assert max(map(int, whole)) > 12
    parts = re.findall(told, start("parts", 12, *on)) + re.findall(told, start("parts", 24, *on))
    assert parts == whole
    assert checkpoints(tmp_path / "parts") == checkpoints(tmp_path / "whole")
    lines = read_metrics(tmp_path / "whole")
    assert sum(line.get("skipped", 0) for line in lines) == len(whole)
    kept = json.loads((committed_steps(tmp_path / "whole")[24] / "state.json").read_text())["extra"]
    assert len(kept["spikes"]["loss"]) == 6
    # A checkpoint from before the setting: the window fills anew. One that turns it off: no window.
    assert not re.findall(told, start("late", 8))
    assert min(map(int, re.findall(told, start("late", 24, *on)))) > 8 + 6
    start("whole", 25)
    kept = json.loads((committed_steps(tmp_path / "whole")[25] / "state.json").read_text())["extra"]
    assert "spikes" not in kept
    assert Path(tmp_path / "whole").is_dir()
