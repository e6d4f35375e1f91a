"""One optimizer step and one evaluation, right for any number of ranks and micro-batches.

[Note: token weighting] The loss is the mean over the supervised tokens of the global batch. So the
tokens of all micro-batches of all ranks are counted first (one all-reduce of one integer), and each
micro-batch contributes its sum divided by that count. The gradients of ranks are added up, not
averaged (`apply_fsdp` sets this on every unit). A rank without supervised tokens contributes zero,
not the NaN of an empty mean.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from toolkit.data.samples.batch import Batch
from toolkit.errors import TrainingError
from toolkit.formats import reshard
from toolkit.mesh import View
from toolkit.sharding.fsdp import Sharded
from toolkit.training.guards import watchdog
from toolkit.training.guards.bad_steps import Spikes
from toolkit.training.loss import LossSum, causal_lm_loss
from toolkit.training.profiler import BACKWARD, FORWARD, OPTIMIZER
from toolkit.training.router import Balance, Router

EvalSets = Mapping[str, Iterable[Batch]]  # source -> its batches
Loss = Callable[[nn.Module, Batch], LossSum]


@dataclass(frozen=True)
class StepStats:
    """What a step did; 0-d tensors on the device, so that nothing waits for them."""

    loss: torch.Tensor  # mean over the global batch (its supervised tokens), before the step
    grad_norm: torch.Tensor  # global gradient norm before clipping
    tokens: torch.Tensor  # supervised tokens of the global batch, whose forward has a gradient
    skipped: torch.Tensor  # bool: loss or gradient is not finite, or a spike: nothing was changed
    bad_here: torch.Tensor  # bool: this rank's part of the loss is NaN or infinite
    spike: torch.Tensor | None = None  # bool: skipped for being far above the last; None: not asked
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Metric -> its mean over the global batch; NaN if it has no terms there."""
    balance: Balance | None = None  # of the experts; None: not watched
    part_sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Metric -> the sums and the counts of which `parts` has the mean, over the global batch, each
    1-d; steps of a logging window are added up by them."""
    terms: torch.Tensor | None = None
    """Number of terms of the mean in `loss`, such as pairs of answers; None: `tokens`."""


class Update:
    """One optimizer step over the micro-batches of all ranks, spelled out by a loop. Collective.

        update = Update(sharded, micro_batches)
        for batch in update:
            update.mean(loss(model, batch)).backward()
        stats = update.step(optimizer)

    See [Note: token weighting], which costs one small all-reduce at the start. What is gathered and
    reduced between micro-batches is `sharding.accumulation`'s. TrainingError: no micro-batches.

    Args:
        sharded: what `apply_fsdp` returned, its model in training mode.
        micro_batches: on the device; every rank has as many.
        counts: by how much each micro-batch counts in the mean, 0-d or, for losses of several
            means, 1-d; on every rank or on none; None: by its targets.
        router: what balances the experts of a mixture (`Metrics.router`).
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
        self._sharded, self._batches, self._ranks = sharded, micro_batches, sharded.mesh.loss
        tokens = torch.stack([batch.trained.count for batch in micro_batches]).sum().double()
        count = tokens if counts is None else torch.stack([*counts]).sum(0).double()
        self._router, routed = router, tokens
        if router is not None:
            routed = (
                torch.stack([batch.trained.real.sum() for batch in micro_batches]).sum().double()
            )
        # In one exchange; a double holds any number of tokens exactly.
        tokens, routed, *of_means = self._ranks.sum(torch.stack([tokens, routed, *count.flatten()]))
        self._tokens, count = tokens.long(), torch.stack(of_means).view_as(count)
        self._terms = count.flatten()[0]
        if router is not None:
            router.begin(routed)
        self._scale = 1.0 / torch.where(count > 0, count, 1).float()
        self._total = torch.zeros((), device=count.device)
        self._parts: dict[str, torch.Tensor] = {}
        self._part_counts: dict[str, torch.Tensor] = {}
        self._phase = ExitStack()  # of a micro-batch, as profiles show it

    def __iter__(self) -> Iterator[Batch]:
        """Give the micro-batches, the units of the model set for each of them."""
        for i, batch in enumerate(self._batches):
            watchdog.report_progress()
            self._sharded.accumulation.begin(batch.trained.targets, i, len(self._batches))
            with self._phase:
                self._phase.enter_context(record_function(FORWARD))
                if self._router is not None:
                    self._phase.enter_context(self._router.watching(batch))
                yield batch

    def mean(self, loss: LossSum) -> torch.Tensor:
        """Return a micro-batch's part of the mean over the global batch, for its backward, and of
        the loss of routers.
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
            part = part + self._router.part()
        self._phase.enter_context(record_function(BACKWARD))
        return part

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float = 1.0,
        spikes: Spikes | None = None,
    ) -> StepStats:
        """Clip the gradients to a global norm (0 does not) and let the optimizer step.

        A step whose loss or gradient is NaN or infinite on any rank changes neither weights nor the
        optimizer's state, on all ranks; nor does one that `spikes` finds. A fused AdamW is told so
        on the device, before any other optimizer the host waits for it.
        """
        model, total, device = self._sharded.model, self._total, self._total.device
        bad_here = ~torch.isfinite(total)
        _sum_replicated(model, self._ranks)
        local = [total[None], *self._parts.values(), *self._part_counts.values()]
        sizes = [len(values) for values in local]
        loss, *summed = self._ranks.sum(torch.cat(local)).split(sizes)
        mean, names = loss[0], [*self._parts]
        pairs = zip(summed[: len(names)], summed[len(names) :], strict=True)
        part_sums = dict(zip(names, pairs, strict=True))
        parts = {name: (sums / counts).sum() for name, (sums, counts) in part_sums.items()}
        with record_function(OPTIMIZER):
            grad_norm = clip_gradients(model, max_grad_norm, device, self._ranks)
            fine, spike = torch.isfinite(total) & torch.isfinite(grad_norm), None
            if spikes is not None:
                spike = spikes.found(mean, grad_norm)
                fine &= ~spike
            _step_if(fine, optimizer)
            optimizer.zero_grad()
            balance = None if self._router is None else self._router.step(fine)
        self._sharded.accumulation.end(device, len(self._batches))
        return StepStats(
            *(mean, grad_norm, self._tokens, ~fine, bad_here, spike, parts, balance, part_sums),
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
    """Run the `Update` over `micro_batches` that a recipe's loop spells out. Collective."""
    update = Update(sharded, micro_batches, router=router)
    for batch in update:
        update.mean(loss(sharded.model, batch)).backward()
    return update.step(optimizer, max_grad_norm, spikes)


def _step_if(fine: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take a step of the optimizer where all is `fine`, 0-d and the same on every rank."""
    if type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]:
        # As torch's GradScaler tells it; its kernels then write nothing. Copied to where they run
        # in time: offloaded shards are stepped on the host.
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        device = optimizer.param_groups[0]["params"][0].device
        optimizer.found_inf = (~fine).float().to(device)  # type: ignore[attr-defined]
        optimizer.step()
    elif fine:  # as a plan, which has no values, takes it
        optimizer.step()


def clip_gradients(
    model: nn.Module, max_norm: float, device: torch.device, among: View
) -> torch.Tensor:
    """Scale the gradients to a global norm of at most `max_norm` (0: not at all); return the norm
    before, 0-d on `device`, the same `among` the ranks. Collective. Each rank's shards count once,
    replicated gradients once.
    """
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}  # torch mixes neither two of them,
    for p in model.parameters():  # nor what is sharded and what is not
        if p.grad is not None:
            mesh = p.grad.device_mesh if isinstance(p.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(p)
    norms = []
    for part in by_mesh.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norms.append(norm.to(device))  # under offload sharded gradients are in host memory
    if not norms:
        return torch.zeros((), device=device)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if any(mesh is not None and mesh.ndim > 1 for mesh in by_mesh):
        # Each replica adds its shards up by itself; their sums may differ in the last bit.
        among.broadcast(total)
    if max_norm > 0:
        for part in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, total)
    return total


def _sum_replicated(model: nn.Module, among: View) -> None:
    """Add up over the ranks the gradients of what FSDP does not shard, by one all-reduce.

    A rank that did not use a parameter adds zero. A parameter that no rank used gets no gradient.
    The ranks that used each parameter are counted in the same all-reduce. Only a rank without a
    gradient reads that count, for which its host waits.
    """
    parameters = [p for p in model.parameters() if not isinstance(p, DTensor) and p.requires_grad]
    if not parameters or among.size == 1:
        return
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    users = torch.tensor([float(p.grad is not None) for p in parameters], device=grads[0].device)
    flat = torch.cat([*(g.float().flatten() for g in grads), users])
    *totals, users = among.sum(flat).split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, total, count in zip(parameters, totals, users, strict=True):
        # A rank that has a gradient need not look whether another one has.
        if parameter.grad is not None or bool(count > 0):
            parameter.grad = total.view_as(parameter).to(parameter.dtype)


with_accuracy: Loss = partial(causal_lm_loss, accuracy=True)


@dataclass(frozen=True)
class EvalStats:
    """The means of an evaluation, 0-d tensors on the device; NaN if a mean has no terms."""

    loss: torch.Tensor  # mean over the supervised tokens of all ranks
    parts: dict[str, torch.Tensor]  # metric -> its mean
    part_counts: dict[str, torch.Tensor]  # metric -> of how many terms; 0: it has no mean


@torch.no_grad()
def evaluate(
    sharded: Sharded, sources: EvalSets, loss: Loss | None = None
) -> tuple[EvalStats, dict[str, EvalStats]]:
    """Return loss and its parts over the supervised tokens of all `sources`, and of each source;
    `loss` None: the cross entropy of tokens, with its accuracy. Collective.

    Costs the forwards and one all-reduce. The model is left in the mode it was in, and sharded.
    Every rank brings the same names in the same order, and as many batches of each (pad with
    rows without a target): FSDP gathers in each forward. TrainingError names a source without any.
    """
    if not sources:
        raise TrainingError("evaluate got no batches: there is no source to evaluate on")
    model, was_training = sharded.model, sharded.model.training
    model.eval()
    found: list[torch.Tensor] = []
    names: list[str] = []
    sizes: list[int] = []
    try:
        for name, batches in sources.items():
            sums = [(loss or with_accuracy)(model, batch) for batch in batches]
            if not sums:
                raise TrainingError("evaluate got no batches" + f" of source {name}" * bool(name))
            names, sizes = [*sums[0].parts], [x.numel() for x in sums[0].sums()]
            rows = (torch.cat([x.double().flatten() for x in one.sums()]) for one in sums)
            # A double holds any count exactly.
            found.append(torch.stack([*rows]).sum(0))
    finally:
        model.train(was_training)
        reshard(model)
    each = sharded.mesh.loss.sum(torch.stack(found))  # [sources, values of `LossSum.sums`]
    losses, counts, *parts = torch.cat([each.sum(0)[None], each]).split(sizes, dim=1)
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
