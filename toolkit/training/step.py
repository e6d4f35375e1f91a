"""One optimizer step and one evaluation, correct for any number of ranks and micro-batches.

[Note: token weighting] The loss is the mean over the supervised tokens of the global batch. So the
tokens of all micro-batches of all ranks are counted first (one all-reduce of one integer), and each
micro-batch contributes its sum divided by that count. The gradients of ranks are summed, not
averaged (`apply_fsdp` sets this on every unit). A rank without supervised tokens contributes zero,
not the NaN of an empty mean.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.profiler import record_function

from toolkit.data.samples.batch import Batch
from toolkit.errors import TrainingError
from toolkit.formats import local_tensor, reshard
from toolkit.mesh import EP, View
from toolkit.models.float8 import gathers_float8, precompute_scales
from toolkit.sharding.fsdp import Sharded
from toolkit.training.guards import watchdog
from toolkit.training.guards.bad_steps import Spikes
from toolkit.training.loss import LossSum, causal_lm_loss
from toolkit.training.profiler import BACKWARD, FORWARD, OPTIMIZER
from toolkit.training.router import Balance, Router

EvalSets = Mapping[str, Iterable[Batch]]  # name of an evaluation set -> its batches
Loss = Callable[[nn.Module, Batch], LossSum]


@dataclass(frozen=True)
class StepStats:
    """Statistics of one step. They are tensors on the device, so that the host does not wait."""

    loss: torch.Tensor
    """Mean over the supervised tokens of the global batch, before the step."""
    grad_norm: torch.Tensor
    """Global gradient norm before clipping."""
    tokens: torch.Tensor
    """Number of supervised tokens in the global batch whose forward has a gradient."""
    skipped: torch.Tensor
    """bool: nothing was changed, because loss or gradient is not finite, or because of a spike."""
    bad_here: torch.Tensor
    """bool: this rank's part of the loss is NaN or infinite."""
    spike: torch.Tensor | None = None
    """bool: skipped because loss or norm is far above the last ones; None: not checked."""
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Metric -> its mean over the global batch; NaN if the metric has no terms there."""
    balance: Balance | None = None
    """How evenly the experts were loaded; None: not measured."""
    part_sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Metric -> sums and counts over the global batch, each 1-d, whose quotients give `parts`. They
    let `Metrics` average over several steps."""
    terms: torch.Tensor | None = None
    """Number of terms of the mean in `loss`, such as pairs of answers; None: `tokens`."""


class Update:
    """One optimizer step over the micro-batches of all ranks, which a recipe writes as a loop.

        update = Update(sharded, micro_batches)
        for batch in update:
            update.mean(loss(model, batch)).backward()
        stats = update.step(optimizer)

    Collective. See [Note: token weighting], which costs one small all-reduce at the start.
    `sharding.accumulation` decides which parameters are gathered and which gradients are reduced
    between micro-batches.

    Args:
        sharded: result of `apply_fsdp`, with the model in training mode.
        micro_batches: batches on the device; the same number on every rank.
        counts: number of terms of each micro-batch in the mean, on every rank or on none. An
            element is 0-d or, for losses with several means, 1-d. None: the number of targets.
        router: balances the experts of a mixture (`Metrics.router`).

    Raises:
        TrainingError: there are no micro-batches, or not one count for each of them.
    """

    def __init__(
        self,
        sharded: Sharded,
        micro_batches: Sequence[Batch],
        counts: Sequence[torch.Tensor] | None = None,
        router: Router | None = None,
    ) -> None:
        if not micro_batches:
            raise TrainingError("an update got no micro-batches; every rank needs at least one")
        if counts is not None and len(counts) != len(micro_batches):
            raise TrainingError(
                f"expected a count for each of the {len(micro_batches)} micro-batches of this "
                f"update, got {len(counts)}"
            )
        self._sharded = sharded
        self._batches = micro_batches
        self._ranks = sharded.mesh.loss
        self._router = router
        tokens = torch.stack([batch.trained.count for batch in micro_batches]).sum().double()
        terms = tokens if counts is None else torch.stack([*counts]).sum(0).double()
        routed = tokens
        if router is not None:
            routed = (
                torch.stack([batch.trained.real.sum() for batch in micro_batches]).sum().double()
            )
        # One all-reduce for all counts. A double holds any number of tokens exactly.
        totals = self._ranks.sum(torch.stack([tokens, routed, *terms.flatten()]))
        tokens, routed, *total_terms = totals
        self._tokens = tokens.long()
        terms = torch.stack(total_terms).view_as(terms)
        self._terms = terms.flatten()[0]
        if router is not None:
            router.start_step(routed)
        self._scale = 1.0 / torch.where(terms > 0, terms, 1).float()
        self._total = torch.zeros((), device=terms.device)
        self._parts: dict[str, torch.Tensor] = {}
        self._part_counts: dict[str, torch.Tensor] = {}
        # The range of the current phase (forward or backward) in a profile.
        self._phase = ExitStack()

    def __iter__(self) -> Iterator[Batch]:
        """Yield the micro-batches, after preparing the model's units for each of them."""
        for i, batch in enumerate(self._batches):
            watchdog.report_progress()
            self._sharded.accumulation.begin(batch.trained.targets, i, len(self._batches))
            with self._phase:
                self._phase.enter_context(record_function(FORWARD))
                if self._router is not None:
                    self._phase.enter_context(self._router.record_outputs(batch))
                yield batch

    def mean(self, loss: LossSum) -> torch.Tensor:
        """Return a micro-batch's part of the loss of the global batch, to call `backward` on.

        The part includes the routers' auxiliary loss, whose computation is collective.

        Args:
            loss: the sums of the micro-batch. Its metrics are added up for `StepStats`.

        Returns:
            A 0-d tensor. The parts of all ranks and micro-batches add up to the loss.
        """
        part = (loss.total * self._scale).sum()
        self._total += part.detach()
        for sums, values in (
            (self._parts, loss.parts),
            (self._part_counts, loss.all_part_counts()),
        ):
            for name, value in values.items():
                sums[name] = sums.get(name, 0) + value.flatten().float()
        self._phase.close()
        if self._router is not None:
            part = part + self._router.auxiliary_loss()
        self._phase.enter_context(record_function(BACKWARD))
        return part

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float = 1.0,
        spikes: Spikes | None = None,
    ) -> StepStats:
        """Clip the gradients, do the optimizer's step, and clear the gradients. Collective.

        The step is skipped on all ranks if the loss or a gradient is NaN or infinite on any rank,
        or if `spikes` finds a spike. In this case neither weights nor optimizer state change. A
        fused AdamW reads this decision on the device; with another optimizer the host waits for it.

        Args:
            optimizer: optimizer of the model's parameters.
            max_grad_norm: limit of the global gradient norm; 0: no clipping.
            spikes: detects spikes; None: spikes are not skipped.

        Returns:
            Statistics of the step, on the device.
        """
        model, total = self._sharded.model, self._total
        device = total.device
        bad_here = ~torch.isfinite(total)
        _sum_replicated(model, self._ranks)
        local = [total[None], *self._parts.values(), *self._part_counts.values()]
        sizes = [len(values) for values in local]
        loss, *summed = self._ranks.sum(torch.cat(local)).split(sizes)
        mean_loss = loss[0]
        names = [*self._parts]
        pairs = zip(summed[: len(names)], summed[len(names) :], strict=True)
        part_sums = dict(zip(names, pairs, strict=True))
        parts = {name: (sums / counts).sum() for name, (sums, counts) in part_sums.items()}
        with record_function(OPTIMIZER):
            grad_norm = clip_gradients(model, max_grad_norm, device, self._ranks)
            # Both are the same on every rank, also if the loss of another rank is not finite.
            is_good = torch.isfinite(mean_loss) & torch.isfinite(grad_norm)
            spike = None
            if spikes is not None:
                spike = spikes.is_spike(mean_loss, grad_norm)
                is_good &= ~spike
            _step_if_good(is_good, optimizer)
            optimizer.zero_grad()
            if gathers_float8(model):
                precompute_scales(model)
            balance = None if self._router is None else self._router.finish_step(is_good)
        self._sharded.accumulation.end(device, len(self._batches))
        return StepStats(
            loss=mean_loss,
            grad_norm=grad_norm,
            tokens=self._tokens,
            skipped=~is_good,
            bad_here=bad_here,
            spike=spike,
            parts=parts,
            balance=balance,
            part_sums=part_sums,
            terms=self._terms,
        )


def train_step(
    sharded: Sharded,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    *,
    max_grad_norm: float = 1.0,
    loss: Loss = causal_lm_loss,
    spikes: Spikes | None = None,
    router: Router | None = None,
) -> StepStats:
    """Do one optimizer step over `micro_batches`: the loop of `Update` as a function. Collective.

    The learning-rate schedule does not advance. The statistics stay on the device, so the host does
    not wait.

    Args:
        sharded: result of `apply_fsdp`, with the model in training mode.
        optimizer: optimizer of the model's parameters.
        micro_batches: batches on the device; the same number on every rank.
        max_grad_norm: limit of the global gradient norm; 0: no clipping.
        loss: computes the sums of a micro-batch; their mean is over its targets.
        spikes: detects spikes; None: spikes are not skipped.
        router: balances the experts of a mixture.
    """
    update = Update(sharded, micro_batches, router=router)
    for batch in update:
        update.mean(loss(sharded.model, batch)).backward()
    return update.step(optimizer, max_grad_norm, spikes)


def _step_if_good(is_good: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Do the optimizer's step if `is_good`, a 0-d bool that is equal on all ranks, is True.

    Fused AdamW reads it on the device. For another optimizer the host waits for the value.
    """
    if type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]:
        # torch's GradScaler passes the decision in the same way; the kernels then write nothing.
        # It is copied to the device of the parameters: offloaded shards are updated on the host.
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        device = optimizer.param_groups[0]["params"][0].device
        optimizer.found_inf = (~is_good).float().to(device)  # type: ignore[attr-defined]
        optimizer.step()
    elif is_good:  # always true in a plan, whose tensors have no values
        optimizer.step()


def clip_gradients(
    model: nn.Module, max_norm: float, device: torch.device, ranks: View
) -> torch.Tensor:
    """Scale the gradients of a sharded model to a global norm of at most `max_norm`. Collective.

    In the norm, each sharded value and each replicated gradient counts once.

    Args:
        model: the sharded model, after the backward of the last micro-batch.
        max_norm: limit of the norm; 0: no clipping.
        device: the device on which the norm is computed.
        ranks: the ranks on which the norm must be bitwise identical.

    Returns:
        The norm before clipping, 0-d on `device`; 0 if there are no gradients.
    """
    # torch combines neither DTensors of different meshes nor DTensors and plain tensors.
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.grad is not None:
            mesh = p.grad.device_mesh if isinstance(p.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(p)
    norms = []
    for mesh, parameters in by_mesh.items():
        gradients = [p.grad for p in parameters if p.grad is not None]
        if mesh is not None and EP in (mesh.mesh_dim_names or ()):
            norms.append(_norm_of_divided(gradients, mesh, device))
            continue
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # With offloading, sharded gradients are in host memory.
        norms.append(norm.to(device))
    if not norms:
        return torch.zeros((), device=device)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if any(mesh is not None and mesh.ndim > 1 for mesh in by_mesh):
        # Each replica sums its shards separately, so the sums may differ in the last bit.
        ranks.broadcast(total)
    if max_norm > 0:
        for parameters in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _norm_of_divided(
    gradients: list[torch.Tensor], mesh: DeviceMesh, device: torch.device
) -> torch.Tensor:
    """Compute the norm of the gradients of divided experts. Collective.

    DTensor would do it, too, but warns that it adds up two axes one after the other.

    Args:
        gradients: DTensors on `mesh`.
        mesh: the mesh of divided experts.
        device: device of the result.

    Returns:
        The norm over all ranks that share a copy of the model, 0-d.
    """
    by_placements: dict[tuple[Placement, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        by_placements.setdefault(cast(DTensor, gradient).placements, []).append(gradient)
    total = torch.zeros((), device=device)
    for placements, group in by_placements.items():
        square = torch.nn.utils.get_total_norm([local_tensor(g) for g in group]).square()
        square = square.to(device)
        for axis, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(square, group=mesh.get_group(axis))
        total = total + square
    return total.sqrt()


def _sum_replicated(model: nn.Module, ranks: View) -> None:
    """Sum the gradients of the parameters that FSDP does not shard over the ranks.

    Collective, with one all-reduce. A rank that did not use a parameter adds zero. A parameter that
    no rank used gets no gradient. For this, the all-reduce also counts the ranks that used each
    parameter. Only a rank without a gradient reads that count, and its host waits for it.
    """
    parameters = [p for p in model.parameters() if not isinstance(p, DTensor) and p.requires_grad]
    if not parameters or ranks.size == 1:
        return
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    users = torch.tensor([float(p.grad is not None) for p in parameters], device=grads[0].device)
    flat = torch.cat([*(g.float().flatten() for g in grads), users])
    *totals, users = ranks.sum(flat).split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, total, count in zip(parameters, totals, users, strict=True):
        # A rank that has a gradient does not need to know if another rank has one.
        if parameter.grad is not None or bool(count > 0):
            parameter.grad = total.view_as(parameter).to(parameter.dtype)


with_accuracy: Loss = partial(causal_lm_loss, accuracy=True)


@dataclass(frozen=True)
class EvalStats:
    """Means of an evaluation as 0-d tensors on the device. A mean without terms is NaN."""

    loss: torch.Tensor
    """Mean over the supervised tokens of all ranks."""
    parts: dict[str, torch.Tensor]
    """Metric -> its mean."""
    part_counts: dict[str, torch.Tensor]
    """Metric -> number of terms of its mean; 0: it has no mean."""


@torch.no_grad()
def evaluate(
    sharded: Sharded, sources: EvalSets, loss: Loss | None = None
) -> tuple[EvalStats, dict[str, EvalStats]]:
    """Compute the loss and its metrics, over all evaluation sets together and over each set.

    Collective; costs the forwards and one all-reduce. Afterwards the model is resharded, and in
    training mode if it was before.

    Args:
        sharded: the sharded model.
        sources: name of a set -> its batches. Every rank must have the same names in the same
            order, and the same number of batches of each, because FSDP gathers in each forward. A
            rank with fewer batches can add batches without targets.
        loss: the loss; None: the cross entropy of tokens, with accuracy.

    Returns:
        The means over all sets together; and a dict of name of a set -> its means.

    Raises:
        TrainingError: there is no set, or a set has no batches.
    """
    if not sources:
        raise TrainingError("evaluate got no batches: there is no source to evaluate on")
    model, was_training = sharded.model, sharded.model.training
    model.eval()
    source_sums: list[torch.Tensor] = []
    names: list[str] = []
    sizes: list[int] = []
    try:
        for name, batches in sources.items():
            sums = [(loss or with_accuracy)(model, batch) for batch in batches]
            if not sums:
                raise TrainingError("evaluate got no batches" + f" of source {name}" * bool(name))
            names, sizes = [*sums[0].parts], [x.numel() for x in sums[0].sums()]
            # A double holds any count exactly.
            rows = [
                torch.cat([x.double().flatten() for x in batch_sums.sums()]) for batch_sums in sums
            ]
            source_sums.append(torch.stack(rows).sum(0))
    finally:
        model.train(was_training)
        reshard(model)
    by_source = sharded.mesh.loss.sum(torch.stack(source_sums))  # [sources, `LossSum.sums` values]
    losses, counts, *parts = torch.cat([by_source.sum(0)[None], by_source]).split(sizes, dim=1)
    pairs = zip([losses, *parts[: len(names)]], [counts, *parts[len(names) :]], strict=True)
    means = [((x / n).sum(1).float(), n.amin(1)) for x, n in pairs]  # each [1 + sources]
    total, *stats = [
        EvalStats(
            means[0][0][i],
            {name: mean[i] for name, (mean, _) in zip(names, means[1:], strict=True)},
            {name: count[i] for name, (_, count) in zip(names, means[1:], strict=True)},
        )
        for i in range(1 + len(sources))
    ]
    return total, dict(zip(sources, stats, strict=True))
