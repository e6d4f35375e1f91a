"""One optimizer step and one evaluation, right for any number of ranks and micro-batches.

[Note: token weighting] The loss is the mean over the supervised tokens of the global batch. So the
tokens of all micro-batches of all ranks are counted first (one all-reduce of one integer), and each
micro-batch contributes its sum divided by that count. FSDP averages gradients over ranks, where a
sum is meant: each contribution is multiplied by the number of ranks. A rank without supervised
tokens contributes zero, not the NaN of an empty mean.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from toolkit import ranks
from toolkit.errors import TrainingError
from toolkit.formats import reshard
from toolkit.sharding.accumulation import accumulation_of
from toolkit.training.faults import watchdog
from toolkit.training.faults.spikes import spikes_of
from toolkit.training.loss import loss_sum, supervised_tokens
from toolkit.training.trace import BACKWARD, FORWARD, OPTIMIZER

EvalSets = Mapping[str, Iterable[dict[str, torch.Tensor]]]  # source -> its batches
Loss = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class StepStats:
    """What a step did; 0-d tensors on the device, so that nothing waits for them."""

    loss: torch.Tensor  # mean over the supervised tokens of the global batch, before the step
    grad_norm: torch.Tensor  # global gradient norm before clipping
    tokens: torch.Tensor  # supervised tokens of the global batch
    skipped: torch.Tensor  # bool: loss or gradient is not finite, or a spike: nothing was changed
    bad_here: torch.Tensor  # bool: this rank's part of the loss is NaN or infinite
    spike: torch.Tensor | None = None  # bool: skipped for being far above the last; None: not asked


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[dict[str, torch.Tensor]],
    *,
    max_grad_norm: float = 1.0,
    sync_each: bool = False,
    loss: Loss = loss_sum,
) -> StepStats:
    """Run one optimizer step over `micro_batches`; the schedule is the caller's. Collective.

    See [Note: token weighting], which costs one small all-reduce. What is gathered and reduced
    between micro-batches is `sharding.accumulation`'s. A step whose loss or gradient is NaN or
    infinite on any rank changes neither weights nor the optimizer's state, on all ranks; a fused
    AdamW is told so on the device, before any other optimizer the host waits for it. So does a
    spike, where `faults.spikes` watches the model.

    Args:
        model: sharded by `apply_fsdp` (or plain, in one process), in training mode.
        micro_batches: dicts on the device with `input_ids` and unshifted `labels` [B, T]; every
            rank has as many.
        max_grad_norm: gradients are clipped to this global norm; 0 does not clip.
        sync_each: reduce gradients after every micro-batch, whatever `sharding.accumulation` is.
        loss: (model, micro-batch) -> the sum over its supervised tokens of what is minimised, 0-d.
    """
    if not micro_batches:
        raise TrainingError("train_step got no micro-batches; every rank needs at least one")
    accumulation, count = accumulation_of(model), len(micro_batches)
    world = dist.get_world_size() if accumulation is not None and dist.is_initialized() else 1
    tokens = torch.stack([supervised_tokens(b["labels"]) for b in micro_batches]).sum()
    if world > 1:
        dist.all_reduce(tokens)
    scale = world / tokens.clamp(min=1).float()
    total = torch.zeros((), device=tokens.device)
    for i, batch in enumerate(micro_batches):
        watchdog.progress()
        if accumulation is not None:
            accumulation.begin(batch["labels"], i, count, sync_each)
        with record_function(FORWARD):
            contribution = loss(model, batch) * scale
        with record_function(BACKWARD):
            contribution.backward()
        total += contribution.detach()
    bad_here = ~torch.isfinite(total)
    if world > 1:
        _average_replicated(model, world)
        dist.all_reduce(total)
    with record_function(OPTIMIZER):
        grad_norm = clip_gradients(model, max_grad_norm, tokens.device)
        fine = torch.isfinite(total) & torch.isfinite(grad_norm)
        spikes, spike = spikes_of(model), None
        if spikes is not None:
            spike = spikes.found(total / world, grad_norm)
            fine &= ~spike
        _step_if(fine, optimizer)
        optimizer.zero_grad()
    if accumulation is not None:
        accumulation.end(total.device, count)
    return StepStats(total / world, grad_norm, tokens, ~fine, bad_here, spike)


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


def clip_gradients(model: nn.Module, max_norm: float, device: torch.device) -> torch.Tensor:
    """Scale the gradients to a global norm of at most `max_norm` (0: not at all); return the norm
    before, 0-d on `device`. Collective. Each rank's shards count once, replicated gradients once.
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
        dist.broadcast(total, 0)
    if max_norm > 0:
        for part in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, total)
    return total


def _average_replicated(model: nn.Module, world: int) -> None:
    """Average over the ranks the gradients of what FSDP does not shard, by one all-reduce: zero if
    a rank did not use it, none where no rank did: the hosts tell each other, and no device waits.
    """
    parameters = [p for p in model.parameters() if not isinstance(p, DTensor) and p.requires_grad]
    if not parameters:
        return
    flags = ranks.any_of([p.grad is not None for p in parameters])
    used = [p for p, has_gradient in zip(parameters, flags, strict=True) if has_gradient]
    if not used:
        return
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
    flat = torch.cat([g.float().flatten() for g in grads])
    dist.all_reduce(flat)
    for parameter, total in zip(used, flat.split([p.numel() for p in used]), strict=True):
        parameter.grad = (total / world).view_as(parameter).to(parameter.dtype)


@dataclass(frozen=True)
class EvalStats:
    """What an evaluation found, 0-d tensors on the device; NaN without a supervised token."""

    loss: torch.Tensor  # mean over the supervised tokens of all ranks
    accuracy: torch.Tensor  # share of them that the model ranks first


@torch.no_grad()
def evaluate(model: nn.Module, sources: EvalSets) -> tuple[EvalStats, dict[str, EvalStats]]:
    """Return loss and accuracy over the supervised tokens of all `sources`, and of each source.
    Collective.

    Costs the forwards and one all-reduce. The model is left in the mode it was in, and sharded.
    Every rank brings the same names in the same order, and as many batches of each (pad with labels
    of -100): FSDP gathers in each forward. TrainingError names the source that has none.
    """
    if not sources:
        raise TrainingError("evaluate got no batches: there is no source to evaluate on")
    was_training = model.training
    model.eval()
    found: list[torch.Tensor] = []
    try:
        for name, batches in sources.items():
            sums = [_eval_sums(model, batch) for batch in batches]
            if not sums:
                raise TrainingError("evaluate got no batches" + f" of source {name}" * bool(name))
            found.append(torch.stack(sums).sum(0))
    finally:
        model.train(was_training)
        reshard(model)
    each = torch.stack(found)  # [sources, 3]; a double holds any count exactly
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(each)
    means = torch.cat([each.sum(0)[None], each])
    means = (means[:, :2] / means[:, 2:]).float()
    total, *stats = [EvalStats(loss, accuracy) for loss, accuracy in means]
    return total, dict(zip(sources, stats, strict=True))


def _eval_sums(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return [summed loss, correct tokens, supervised tokens] of a micro-batch, as doubles."""
    correct = torch.zeros((), dtype=torch.int64, device=batch["labels"].device)
    loss = loss_sum(model, batch, correct=correct)
    return torch.stack([x.double() for x in (loss, correct, supervised_tokens(batch["labels"]))])
