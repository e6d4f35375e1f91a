"""Steps that are not finite: nothing changes on any rank, their samples are told, too many of them
in a row end the run, and no value that is not finite is saved.
"""

import json
import math
import re
import shutil
from typing import Any

import pytest
import torch
from conftest import ROOT, save_byte_tokenizer, save_tiny_model
from distributed import run_ranks, run_recipe_ranks
from sharded import apply_fsdp, init_mesh, loss_sum, train_step
from test_recipe import on_rows
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from toolkit.checkpoint import TrainState
from toolkit.config.settings import ModelConfig, OptimConfig, ShardingConfig
from toolkit.errors import TrainingError
from toolkit.formats.metrics_file import read_metrics
from toolkit.loading.pretrained import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.training import step as stepping
from toolkit.training.guards.bad_steps import BadSteps
from toolkit.training.optim import build_optimizer
from toolkit.training.step import StepStats

OPTIMIZERS = ("adamw_torch_fused", "adamw_8bit", "muon", "adafactor")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2))


def rows(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(model: Any, optimizer: Any) -> list[torch.Tensor]:
    states = [v for p in model.parameters() for v in optimizer.state[p].values()]
    found = [*model.parameters(), *(v for v in states if isinstance(v, torch.Tensor))]
    return [local(t).detach().clone() for t in found]


def spoiled(kind: str, rank: int, where: int) -> Any:
    """Return a loss that is not finite on rank `where`, or whose gradient alone is not."""

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        total = loss_sum(model, batch)
        if rank != where:
            return total
        if kind == "value":  # its gradient is finite
            return total + math.inf
        # The square root of zero is finite, and its slope is not.
        return total * math.nan if kind == "loss" else total + (total * 0.0).sqrt()

    return loss


def skip(
    rank: int, world: int, folder: str, optim: str, kind: str, offload: bool, parts: int = 1
) -> dict[str, Any]:
    cfg = ShardingConfig(param_dtype="float32", cpu_offload=offload, expert_parallel=parts)
    model = build_on_meta(ModelConfig(folder))
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    load_pretrained(model, folder, "cpu")
    model.train()
    optimizer = build_optimizer(model, OptimConfig(optim=optim, learning_rate=1e-3))
    train_step(model, optimizer, [rows(rank)])
    before = bytes_of(model, optimizer)
    bad = train_step(model, optimizer, [rows(7 + rank)], loss=spoiled(kind, rank, 1))
    after = bytes_of(model, optimizer)
    train_step(model, optimizer, [rows(20 + rank)])
    return {
        "unchanged": all(map(torch.equal, before, after)) and len(before) > 30,
        "goes on": not all(map(torch.equal, after, bytes_of(model, optimizer))),
        "finite": all(bool(t.float().isfinite().all()) for t in bytes_of(model, optimizer)),
        "skipped": bool(bad.skipped),
        "here": bool(bad.bad_here),
    }


@pytest.mark.slow
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(folder, optim) -> None:
    found = run_ranks(skip, 2, folder, optim, "loss", False)
    assert [f.pop("here") for f in found] == [False, True]
    assert found == [dict.fromkeys(found[0], True)] * 2


@pytest.mark.parametrize(
    ("kind", "offload"), [("gradient", False), ("loss", True), ("value", False)]
)
def test_so_does_a_gradient_or_a_value_alone_and_a_step_on_the_host(folder, kind, offload) -> None:
    found = run_ranks(skip, 2, folder, "adamw_torch_fused", kind, offload)
    assert [f.pop("here") for f in found] == [False, kind != "gradient"]
    assert found == [dict.fromkeys(found[0], True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_so_does_a_step_of_divided_experts(tmp_path, kind) -> None:
    folder = str(save_tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=2))
    found = run_ranks(skip, 2, folder, "adamw_torch_fused", kind, False, 2)
    assert [f.pop("here") for f in found] == [False, kind == "loss"]
    assert found == [dict.fromkeys(found[0], True)] * 2


def test_the_control_an_optimizer_that_is_not_told_writes_nan(monkeypatch) -> None:
    def spoil() -> torch.nn.Parameter:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], fused=True)
        weight.grad = torch.full((3,), math.nan)
        stepping._step_if_good(torch.tensor(False), optimizer)
        return weight

    assert torch.equal(spoil().detach(), torch.ones(3))
    monkeypatch.setattr(stepping, "_step_if_good", lambda _, optimizer: optimizer.step())
    assert spoil().isnan().all()


# ---- Told, counted, ended


def stats(skipped: bool, here: bool = False) -> StepStats:
    one = torch.tensor(1.0)
    return StepStats(one, one, one, torch.tensor(skipped), torch.tensor(here))


def test_too_many_in_a_row_end_the_run_and_others_do_not(capsys) -> None:
    steps = BadSteps(2, lambda step: [f"notes row {step}"])
    for step, skipped in enumerate([True, True, False, True, True], 1):
        steps.record(step, stats(skipped, here=step == 2))
    steps.report_skipped()  # as before a save, between two lines
    assert steps.take_skipped_count() == 4
    assert steps.take_skipped_count() == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        "WARNING: step 1 is skipped: gradient is NaN or infinite; samples: notes row 1"
    )
    assert "step 2 is skipped: loss on rank 0 is NaN or infinite; samples: notes row 2" in said[1]
    steps.record(6, stats(True))
    with pytest.raises(TrainingError, match=r"3 step\(s\) in a row, up to 6, .*max_bad_steps: 2"):
        steps.report_skipped()


@pytest.mark.parametrize("what", ["weight", "optimizer"])
def test_a_value_that_is_not_finite_is_not_saved(what) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    steps = BadSteps(3, state=TrainState(model, optimizer))
    steps.check_values(1)
    with torch.no_grad():
        values = model.weight if what == "weight" else optimizer.state[model.weight]["exp_avg_sq"]
        values[1, 2] = math.inf
    named = {"weight": "rank 0: weight", "optimizer": "rank 0: exp_avg_sq of weight"}[what]
    with pytest.raises(TrainingError, match=rf"after step 5 values are NaN .*\({named}\)"):
        steps.check_values(5)


# ---- A whole run


@pytest.fixture
def run(tmp_path, monkeypatch) -> Any:
    """A function that runs fine-tuning on two ranks, where rows with a `#` have no finite loss."""
    save_byte_tokenizer(tmp_path / "model")
    save_tiny_model(tmp_path / "model")
    mark = AutoTokenizer.from_pretrained(tmp_path / "model").convert_tokens_to_ids("#")
    text = (ROOT / "recipes" / "finetune.py").read_text("utf-8")
    loss = "loss = objective(model, batch)"
    assert text.count(loss) == 1
    factor = f"(float('nan') if (batch.inputs['input_ids'] == {mark}).any() else 1.0)"
    edit = f"loss = training.LossSum(objective(model, batch).total * {factor}, batch.count)"
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    recipe = tmp_path / "recipes" / "finetune.py"
    recipe.write_text(text.replace(loss, edit), "utf-8")
    given = {
        "train__per_device_train_batch_size": 2,
        "train__num_train_epochs": 1,
        "train__logging_steps": 4,
        "checkpoint__save_steps": 4,
    }

    def start(marked: set[int], **flags: Any) -> Any:
        rows = [
            {"prompt": f"{i} {'#' if i in marked else '+'} 1 = ", "completion": str(i + 1)}
            for i in range(64)
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run_recipe_ranks(recipe, 2, *on_rows(**given | flags), cwd=tmp_path)

    return start


def test_a_run_skips_the_step_names_its_rows_and_goes_on(run, tmp_path) -> None:
    done = run({17})
    assert done.returncode == 0, done.stderr
    told = re.findall(
        r"WARNING: step (\d+) is skipped: loss on rank (\d) is NaN or infinite; "
        r"samples: rows row (\d+), rows row (\d+)\n",
        done.stdout,
    )
    assert len(told) == 1
    assert "17" in told[0][2:]
    lines = read_metrics(tmp_path / "run")
    assert sum(line.get("skipped", 0) for line in lines) == 1
    assert all(math.isfinite(line["mean_loss"]) for line in lines)
    assert lines[-1]["step"] == 16


def test_a_run_of_bad_steps_ends_before_it_saves(run, tmp_path) -> None:
    done = run(set(range(64)), train__max_bad_steps=2)
    assert done.returncode != 0
    assert "3 step(s) in a row, up to 3, had no finite loss and gradient" in done.stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
