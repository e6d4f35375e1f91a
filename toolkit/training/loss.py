"""The loss of a micro-batch: what recipes call. Finds a model's scale and soft cap by a trial.

A sum over supervised tokens, computed inside the head, chunk by chunk. Where what a model makes of
its head's output is neither itself, a scale nor a soft cap, it comes from the model's logits.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.config.measures import Metric
from toolkit.data.samples.batch import Batch
from toolkit.errors import TrainingError, one_line
from toolkit.models.modes import forked_rng, replaced_forward
from toolkit.models.peft_model import base_of, trained_module
from toolkit.models.reward import reward_head
from toolkit.training.head_logps import HeadLogps
from toolkit.training.head_loss import IGNORE_INDEX, HeadLoss, LogitMap

_TRIED = 8  # tokens of the trial
_SMALL, _LARGE = 2.0**-30, 2.0**40  # values by which it tells a scale and a soft cap
_NOT_ONCE = "its head is not called once, with a hidden state for each token"
# The logits of a token and what a model makes of them; None: its own logits are used.
_Found = tuple[int, LogitMap] | None
_known: "weakref.WeakKeyDictionary[nn.Module, _Found]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class LossSum:
    """The sums of a micro-batch from which a step or an evaluation takes means."""

    total: torch.Tensor
    """0-d: the loss, summed; or 1-d: the sums of several means that are added up."""
    count: torch.Tensor
    """0-d: the number of terms in `total`; or 1-d: one number for each of its sums."""
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name of a metric -> its sum, without a gradient, 0-d or 1-d like `total`. Training and
    evaluation report its mean."""
    part_counts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name of a metric -> the number of its terms, of the shape of its sum. A metric that is not
    listed is a mean over the first `count`."""

    def all_part_counts(self) -> dict[str, torch.Tensor]:
        """Return the number of terms of every metric, each of the shape of its sum."""
        first = self.count.flatten()[0]
        return {
            name: self.part_counts.get(name, first.expand(value.shape))
            for name, value in self.parts.items()
        }

    def sums(self) -> list[torch.Tensor]:
        """Return everything that ranks add up: total, count, metrics, counts of metrics."""
        return [self.total, self.count, *self.parts.values(), *self.all_part_counts().values()]


@runtime_checkable
class EvaluatedLoss(Protocol):
    """A loss that lists its metrics, such as an objective of `toolkit.objectives`."""

    @property
    def metrics(self) -> Sequence[Metric]:
        """Metrics of an evaluation, the loss included."""

    def evaluation_loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Compute the loss of an evaluation, with a part for each of the other metrics."""


def causal_lm_loss(
    model: nn.Module,
    batch: Batch,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    device_type: str | None = None,
    accuracy: bool = False,
) -> LossSum:
    """Return the cross entropies of the supervised tokens of one micro-batch, summed, in fp32.

    The logits of one chunk of tokens exist at a time; see `HeadLoss` for what that costs. The
    first call tries the model on a few tokens, twice, and says in a line where it needs all logits
    at once. A batch without supervised tokens gives an exact 0 with a gradient of zeros.

    Args:
        model: a causal LM, sharded or not.
        batch: with `n_targets`, positions without a target are left out on GPUs too.
        label_smoothing: share of each target that is spread evenly over the vocabulary, as
            transformers' `LabelSmoother` does (Szegedy et al. 2016, arXiv:1512.00567).
        z_loss: how much of the square of log Z is added for each token; see `HeadLoss`.
        device_type: of the device whose way it takes; empty: that of the batch.
        accuracy: count the supervised tokens that the model ranks first, as the part `accuracy`.
    """
    inputs, targets, parts = batch.inputs, batch.targets, dict[str, torch.Tensor]()
    if accuracy:
        parts["accuracy"] = torch.zeros((), dtype=torch.int64, device=targets.device)
    if (found := _found(model, batch)) is None:
        logits, flat = model(**inputs).logits.flatten(0, 1), targets.flatten()
        if accuracy:
            parts["accuracy"] += (logits.argmax(-1) == flat).sum()
        total = F.cross_entropy(
            logits.float(),
            flat,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=label_smoothing,
        )
        if z_loss:
            log_z = logits.float().logsumexp(-1).where(flat != IGNORE_INDEX, 0.0)
            total = total + z_loss * log_z.square().sum()
        return LossSum(total, batch.count, parts)
    head = _head(model)
    task = HeadLoss(
        head,
        head.forward,
        *found,
        label_smoothing=label_smoothing,
        on=device_type,
        correct=parts.get("accuracy"),
        z_loss=z_loss,
    )
    inside = _InHead(task, targets, batch.n_targets)
    with replaced_forward(head, inside.forward):
        answer = model(**inputs).logits
    total = inside.found + answer.sum(dtype=torch.float32)
    return LossSum(total, batch.count, parts)


def token_logps(model: nn.Module, batch: Batch, *, device_type: str | None = None) -> torch.Tensor:
    """Return the log-probability of each target of a micro-batch, [B, T] in fp32; 0 where there is
    none. What is made of them has a gradient, as a weight for each sequence; see `HeadLogps` for
    what they cost. The first call tries the model as `causal_lm_loss` does.
    """
    if (found := _found(model, batch)) is None:
        log_p = model(**batch.inputs).logits.log_softmax(-1, dtype=torch.float32)
        at = batch.targets.clamp(min=0)[..., None]
        return log_p.gather(-1, at).squeeze(-1).masked_fill(batch.targets == IGNORE_INDEX, 0.0)
    head = _head(model)
    task = HeadLogps(HeadLoss(head, head.forward, *found, on=device_type))
    inside = _InHead(task, batch.targets, batch.n_targets)
    with replaced_forward(head, inside.forward):
        answer = model(**batch.inputs).logits
    return inside.found + answer.sum(dtype=torch.float32)


def sequence_rewards(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return what the head of a reward model says of each sequence of a micro-batch, at its last
    token: [n_sequences] in fp32, from hidden states as the model computes them. The head runs on
    those tokens alone.
    """
    head, ends = reward_head(model), batch.ends
    if head is None or ends is None or len(ends) != batch.n_sequences:
        raise TrainingError(
            f"expected a reward model and a batch of {batch.n_sequences} sequences with their "
            f"ends, got {type(base_of(model)).__name__} and "
            f"{'none' if ends is None else len(ends)}"
        )

    def answer(hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        bias = None if head.bias is None else head.bias.float()
        found = F.linear(hidden[ends[:, 0], ends[:, 1]].float(), head.weight.float(), bias)
        return found.squeeze(1), found[:, :0].reshape(*hidden.shape[:-1], 0)

    inside = _InHead(answer, batch.targets)
    try:
        with replaced_forward(head, inside.forward):
            empty = model(**batch.inputs).logits
        return inside.found + empty.sum(dtype=torch.float32)
    except _OtherUse as error:
        raise TrainingError(f"{type(base_of(model)).__name__}: {error}") from error


def take_loss_from(copy: PreTrainedModel, model: nn.Module) -> None:
    """Let `model`, whose values cannot be looked at, compute its loss as a tiny `copy` of it does.
    Says in a line where that takes all logits.
    """
    ids = torch.arange(1, _TRIED + 1)[None]
    found = _find_out(copy, {"input_ids": ids}, ids)
    _known[model] = found and (int(getattr(_head(model), "out_features", found[0])), found[1])


def _found(model: nn.Module, batch: Batch) -> _Found:
    """Return what `_find_out` does, asked once for each model."""
    if model not in _known:
        _known[model] = _find_out(model, batch.inputs, batch.targets)
    return _known[model]


def _head(model: nn.Module) -> nn.Module:
    """Return the module that makes logits, the trained copy where there is one."""
    base = base_of(model)
    head = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
    if (trained := trained_module(head)) is None:
        raise _OtherUse("transformers knows no head of it")
    return trained


class _OtherUse(Exception):
    """The head is not used for one row of logits a token, or the model changes those."""


class _InHead:
    """A forward of the head that answers hidden states [B, T, H] with what a task finds: there FSDP
    has gathered the weight, which anywhere else may be a shard.
    """

    def __init__(
        self,
        task: Callable[[torch.Tensor, torch.Tensor, int | None], tuple[torch.Tensor, torch.Tensor]],
        targets: torch.Tensor,
        n_targets: int | None = None,
    ) -> None:
        self._task, self._targets, self._n_targets = task, targets, n_targets
        self._found: torch.Tensor | None = None

    @torch.compiler.disable
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._found is not None or hidden.shape[:-1] != self._targets.shape:
            raise _OtherUse(_NOT_ONCE)
        self._found, answer = self._task(hidden, self._targets, self._n_targets)
        return answer

    @property
    def found(self) -> torch.Tensor:
        if self._found is None:
            raise _OtherUse("its head is not called")
        return self._found


# ---- What a model makes of its head's output


def _find_out(model: nn.Module, inputs: dict[str, Any], targets: torch.Tensor) -> _Found:
    """Return the logits of a token and the map that `model` puts behind its head, None where the
    loss cannot be computed inside it. Every rank finds the same; the random state stays.
    """
    few = {  # inputs of one number a token can be cut
        name: value[:1, :_TRIED]
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.shape == targets.shape
    }
    forwards = list[nn.Module]()  # that began
    with (
        model.register_forward_pre_hook(lambda module, _: forwards.append(module)),
        torch.no_grad(),
        forked_rng(targets.device),
        torch.compiler.set_stance("force_eager"),  # not worth a compilation
    ):
        try:
            return _tried(model, few, targets[:1, :_TRIED])
        except (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError):
            raise
        except (_OtherUse, IndexError, TypeError, ValueError, RuntimeError) as error:
            # The model does something with its logits that others do not bear. Any other fault
            # shows itself again on the way that computes the loss from logits.
            why = str(error) if isinstance(error, _OtherUse) else one_line(error)
            # A forward that ended half-way leaves a sharded model in the middle of one. Before its
            # first forward FSDP2 has no state that could be reset.
            if forwards and callable(recover := getattr(model, "reset_iter_state", None)):
                recover()
    ranks.log_once(
        f"loss: from all logits of a micro-batch at once, which takes more memory: "
        f"{type(base_of(model)).__name__}: {why}"
    )
    return None


def _tried(model: nn.Module, inputs: dict[str, Any], targets: torch.Tensor) -> tuple[int, LogitMap]:
    head, probes = _head(model), list[torch.Tensor]()
    own = head.forward

    def probe(hidden: torch.Tensor) -> torch.Tensor:
        """Answer with numbers of which the model's map can be told."""
        if probes or hidden.shape[:-1] != targets.shape:
            raise _OtherUse(_NOT_ONCE)
        if any(isinstance(p, DTensor) for p in head.parameters()):
            raise _OtherUse("its head's weights are not gathered where it computes")
        real = own(hidden)
        values = torch.linspace(-100.0, 100.0, real.numel(), device=real.device)
        values[0], values[1] = _SMALL, _LARGE
        probes.append(values.view(real.shape))
        torch.set_grad_enabled(True)  # to see whether the map is trained, up to the forward's end
        return probes[0]

    with replaced_forward(head, probe):
        logits = model(**inputs).logits
    if not probes:
        raise _OtherUse("its head is not called")
    logit_map = _fitted(probes[0], logits)
    vocabulary = logits.shape[-1]
    inside = _InHead(HeadLoss(head, head.forward, vocabulary, logit_map), targets)
    with torch.no_grad(), replaced_forward(head, inside.forward):
        answer = model(**inputs).logits
    if answer.shape != (*targets.shape, 0):
        raise _OtherUse("it does something else with its logits")
    return vocabulary, logit_map


def _fitted(z: torch.Tensor, logits: torch.Tensor) -> LogitMap:
    """Return the map that made `logits` of the values `z` of a probe."""
    if logits.shape != z.shape or logits.requires_grad:
        raise _OtherUse("it makes other logits of its head's output, or has trained weights there")
    small, large = (float(value) for value in logits.flatten()[:2])
    scale = small / _SMALL
    linear = abs(large - scale * _LARGE) <= 1e-5 * abs(large)
    found = LogitMap(scale, None if linear else large or math.nan)
    # Rounded ones tell an identity, but no number exactly.
    exact = 1e-5 if logits.dtype == torch.float32 else torch.finfo(logits.dtype).eps
    same = torch.allclose(found(z), logits.float(), rtol=exact, atol=exact)
    if not same or (logits.dtype != torch.float32 and found != LogitMap()):
        raise _OtherUse("what it makes of its head's output is neither a scale nor a soft cap")
    return found
