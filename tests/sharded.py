"""What the toolkit does with a sharded model and a `Batch`, for tests that hold a model and dicts.

A dict is a batch as transformers has it: `labels` at their own tokens, beside what a forward takes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.config.settings import ShardingConfig
from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.mesh import Mesh, View, init_mesh
from toolkit.sharding import fsdp
from toolkit.sharding.accumulation import Accumulation
from toolkit.sharding.fsdp import Sharded
from toolkit.sharding.units import UnitPlan
from toolkit.training import step
from toolkit.training.loss import LossSum, causal_lm_loss

__all__ = [
    "CLOSE",
    "KeepGradients",
    "apply_fsdp",
    "assert_same_steps",
    "init_mesh",
    "relative_difference",
    "sharded_of",
    "sums_of_gradients",
]
# Two orders of the same fp32 additions differ by less than this, relative to the largest value.
# Processors choose the order by their vector width and by a tensor's strides and alignment.
CLOSE = 1e-6
COUNT = "num_items_in_batch"  # of a dict: as `Batch.n_targets`


class Idle:
    """Stands for `Accumulation` where a model is not sharded."""

    begin = end = staticmethod(lambda *_: None)


def apply_fsdp(model: nn.Module, mesh: Mesh, cfg: ShardingConfig, **more: Any) -> Sharded:
    """Shard `model`, of which `sharded_of` then knows."""
    made = fsdp.apply_fsdp(model, mesh, cfg, **more)
    vars(model)["of_tests"] = made
    return made


def sharded_of(model: nn.Module) -> Sharded:
    """Return what `apply_fsdp` made of a model; of a plain one, or one that others sharded, what
    stands for it.
    """
    if "of_tests" not in vars(model):
        by_others = hasattr(model, "unshard")
        mesh = alone()
        if by_others and dist.is_initialized():
            mesh = alone(View(dist.get_rank(), dist.get_world_size(), dist.group.WORLD))
        idle: Any = Accumulation(model, ShardingConfig()) if by_others else Idle()
        return Sharded(model, mesh, UnitPlan((), (), (), None), idle)
    return vars(model)["of_tests"]


def alone(view: View = View()) -> Mesh:  # noqa: B008
    """Return the mesh of one process, or of a view, that shards nothing."""
    return Mesh(None, {}, data=view, loss=view)  # type: ignore[arg-type]


def as_batch(batch: Mapping[str, Any] | Batch) -> Batch:
    """Return a dict as the batch that a run would read."""
    if isinstance(batch, Batch):
        return batch
    inputs = {k: v for k, v in batch.items() if k not in ("labels", COUNT)}
    made = Batch.of(batch["labels"], **inputs)
    return Batch(made.inputs, made.targets, batch.get(COUNT))


class KeepGradients(torch.optim.SGD):
    """An optimizer whose step changes no parameter and keeps copies of the full gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.gradients: dict[str, torch.Tensor] = {}
        self._named = dict(model.named_parameters())

    def step(self, *_: Any) -> None:  # type: ignore[override]
        for name, p in self._named.items():
            if p.grad is not None:
                whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                self.gradients[name] = whole.clone()


def columns(batch: Batch) -> dict[str, Any]:
    """Return a batch as a dict."""
    labels = torch.full_like(batch.targets, IGNORED)
    labels[:, 1:] = batch.targets[:, :-1]
    count = {} if batch.n_targets is None else {COUNT: batch.n_targets}
    return {**batch.inputs, "labels": labels, **count}


def loss_sum(model: nn.Module, batch: Mapping[str, Any] | Batch, **how: Any) -> torch.Tensor:
    """Return the summed loss of a batch."""
    return causal_lm_loss(model, as_batch(batch), **how).total


def train_step(
    model: nn.Module,
    optimizer: Any,
    micro_batches: Sequence[Any],
    *,
    loss: Callable[[nn.Module, dict[str, Any]], torch.Tensor] | None = None,
    **how: Any,
) -> step.StepStats:
    """Run one step on batches as dicts; `loss` gets them as dicts and returns a sum."""

    def own(module: nn.Module, batch: Batch) -> LossSum:
        assert loss is not None
        return LossSum(loss(module, columns(batch)), batch.count)

    more = how if loss is None else {**how, "loss": own}
    batches = [as_batch(batch) for batch in micro_batches]
    return step.train_step(sharded_of(model), optimizer, batches, **more)


def evaluate(
    model: nn.Module, sources: Mapping[str, Iterable[Any]]
) -> tuple[step.EvalStats, dict[str, step.EvalStats]]:
    """Evaluate on batches as dicts."""
    as_batches = {name: [as_batch(b) for b in batches] for name, batches in sources.items()}
    return step.evaluate(sharded_of(model), as_batches)


def supervised_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of unshifted labels are predicted."""
    return Batch.of(labels).count


def relative_difference(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to the largest value of all.

    A bound for each tensor by itself would compare noise: some gradients are zero but for rounding.
    """
    pairs = list(zip(actual, expected, strict=True))
    scale = max(float(right.abs().max()) for _, right in pairs)
    return max(float((left - right).abs().max()) for left, right in pairs) / scale


Steps = dict[str, tuple[float, dict[str, tuple[float, float]]]]
"""Objective -> its loss, and the gradient of each parameter as `sums_of_gradients` has it."""


def sums_of_gradients(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return sum and sum of squares of the whole gradient of each trained parameter. Collective."""
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad and p.grad is not None:
            whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            found[name] = (whole.double().sum().item(), whole.double().square().sum().item())
    return found


def assert_same_steps(found: Steps, expected: Steps) -> None:
    """Compare losses and gradients of ranks with those of one process."""
    for name, (loss, sums) in expected.items():
        assert found[name][0] == pytest.approx(loss, rel=1e-5), name
        assert found[name][1].keys() == sums.keys()
        largest = max(abs(total) for total, _ in sums.values())
        for parameter, (total, square) in sums.items():
            other = found[name][1][parameter]
            assert other[0] == pytest.approx(total, rel=1e-4, abs=1e-5 * largest), parameter
            assert other[1] == pytest.approx(square, rel=1e-4, abs=1e-9), parameter
