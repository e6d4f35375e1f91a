"""Loads of experts: counted where they are logged or act; refused where they cannot be pooled."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import sharded_of
from test_router import batch_of, mixture, router_of, settings

from toolkit.errors import ModelError
from toolkit.training import router as router_module
from toolkit.training.metrics import Metrics
from toolkit.training.router import plan_router
from toolkit.training.step import train_step


def test_unequal_numbers_of_experts_are_refused_before_the_load() -> None:
    with torch.device("meta"):
        model = mixture("mixtral")
        gate = model.model.layers[1].mlp.gate
        gate.weight = torch.nn.Parameter(gate.weight.new_empty(len(gate.weight) + 2, 32))
    assert plan_router(model, settings(router_aux_loss="layer")) is not None
    for loss in ("pooled", "auto"):
        with pytest.raises(ModelError, match=r"pooled: layers have \[4, 6\] experts.*set layer"):
            plan_router(model, settings(router_aux_loss=loss))


@pytest.mark.parametrize("loss", ["none", "pooled"])
def test_loads_that_nobody_logs_are_not_counted(loss: str, monkeypatch: Any) -> None:
    model, counted = mixture("mixtral"), []
    router = router_of(model, loss=loss)
    load = router._count_load
    monkeypatch.setattr(router, "_count_load", lambda *given: counted.append(1) or load(*given))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for router.is_next_step_logged in (True, False, True):
        counted.clear()
        stats = train_step(sharded_of(model), optimizer, [batch_of([0, 1])], router=router)
        watched = router.is_next_step_logged or loss == "pooled"
        assert (stats.balance is not None, bool(counted)) == (watched, watched)


def test_metrics_say_which_steps_have_loads(tmp_path: Path) -> None:
    model, batch = mixture("mixtral"), batch_of([0, 1])
    router = router_of(model, loss="none")
    counts: dict[str, Any] = {"first_step": 0, "max_steps": 8, "tokens_before": 0}
    rates: dict[str, Any] = {"tokens_per_step": 9, "flops_per_token": 1.0, "logging_steps": 3}
    metrics = Metrics(tmp_path, device=torch.device("cpu"), router=router, **counts, **rates)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(1, 9):
        stats = train_step(sharded_of(model), optimizer, [batch], router=router)
        assert (stats.balance is not None) == (step in (1, 3, 6, 8))
        metrics.step(step, stats, 1e-3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "router_load" in line] == [1, 3, 6, 8]


def test_probabilities_of_experts_are_not_kept_for_the_backward() -> None:
    logits = torch.randn(2, 40, 8, requires_grad=True)
    real = torch.ones(80, dtype=torch.bool)
    answers = (router_module._RouterOutput(None, logits, 80, 8),)
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = router_module._sum_probabilities(answers, real)
    assert not any(t.is_floating_point() and t.shape == (80, 8) for t in kept)
    weights = torch.randn(8)
    gradients = [
        torch.autograd.grad((out * weights).sum(), logits)[0]
        for out in (found, logits.flatten(0, 1).softmax(-1).sum(0))
    ]
    torch.testing.assert_close(*gradients)
