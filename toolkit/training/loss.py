"""The loss of a micro-batch, which recipes call: a sum over the supervised tokens.

It is computed inside the LM head, chunk by chunk, so that the logits of a micro-batch never exist
at once. A model may scale the output of its head or apply a soft cap; a trial forward finds out.
If the model does anything else with it, the loss is computed from the model's own logits.
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

_TRIAL_TOKENS = 8
# Values that tell a scale from a soft cap: a soft cap changes the large one only.
_SMALL = 2.0**-30
_LARGE = 2.0**40
_NOT_ONCE = "its head is not called once, with a hidden state for each token"
# The number of logits per token, and what the model does with them. None: the loss is computed from
# the model's own logits.
_HeadFacts = tuple[int, LogitMap] | None
_logit_maps: "weakref.WeakKeyDictionary[nn.Module, _HeadFacts]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class LossSum:
    """The sums of a micro-batch, from which a step or an evaluation computes means.

    A loss may consist of several means, such as a preference loss and a cross entropy. Then `total`
    and `count` are 1-d, with an element for each mean, and the loss is the sum of these means.
    """

    total: torch.Tensor
    """The summed loss, 0-d or 1-d."""
    count: torch.Tensor
    """The number of terms in `total`, of its shape."""
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name of a metric -> its sum, without a gradient, 0-d or 1-d. Training and evaluation report
    the mean."""
    part_counts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name of a metric -> the number of its terms, of the shape of its sum. A metric that is not
    listed is a mean over the first element of `count`."""

    def all_part_counts(self) -> dict[str, torch.Tensor]:
        """Collect the number of terms of every metric, each of the shape of its sum."""
        first = self.count.flatten()[0]
        return {
            name: self.part_counts.get(name, first.expand(value.shape))
            for name, value in self.parts.items()
        }

    def sums(self) -> list[torch.Tensor]:
        """List everything that ranks add up: total, count, metrics, counts of metrics."""
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
    """Sum the cross entropy over the supervised tokens of one micro-batch, in fp32.

    The logits of one chunk of tokens exist at a time; see `HeadLoss` for the cost. The first call
    runs the model twice on a few tokens, and logs a line if the model needs all logits at once. A
    batch without supervised tokens gives an exact 0 and gradients of zeros.

    Args:
        model: a causal LM, sharded or not.
        batch: if it has `n_targets`, positions without a target cost nothing on GPUs, either.
        label_smoothing: share of each target that is spread evenly over the vocabulary, as in
            transformers' `LabelSmoother` (Szegedy et al. 2016, arXiv:1512.00567).
        z_loss: factor of the square of log Z that is added for each token; see `HeadLoss`.
        device_type: type of the device whose chunks and kernels are used; None: that of the batch.
        accuracy: count the supervised tokens that the model ranks first, as the part `accuracy`.
    """
    inputs, targets, parts = batch.inputs, batch.targets, dict[str, torch.Tensor]()
    if accuracy:
        parts["accuracy"] = torch.zeros((), dtype=torch.int64, device=targets.device)
    if (head_facts := _find_head_facts(model, batch)) is None:
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
        *head_facts,
        label_smoothing=label_smoothing,
        on=device_type,
        correct=parts.get("accuracy"),
        z_loss=z_loss,
    )
    inside = _InHead(task, targets, batch.n_targets)
    with replaced_forward(head, inside.forward):
        empty_logits = model(**inputs).logits
    # The sum is 0; it makes the backward run through the model's output, where FSDP's hooks wait.
    total = inside.result + empty_logits.sum(dtype=torch.float32)
    return LossSum(total, batch.count, parts)


def token_logps(model: nn.Module, batch: Batch, *, device_type: str | None = None) -> torch.Tensor:
    """Compute the log-probability of each target of a micro-batch.

    A loss of them has a gradient, such as a mean with a weight for each sequence. See `HeadLogps`
    for the cost. The first call tries the model as `causal_lm_loss` does.

    Returns:
        fp32 [B, T]; 0 at positions without a target.
    """
    if (head_facts := _find_head_facts(model, batch)) is None:
        log_p = model(**batch.inputs).logits.log_softmax(-1, dtype=torch.float32)
        at = batch.targets.clamp(min=0)[..., None]
        return log_p.gather(-1, at).squeeze(-1).masked_fill(batch.targets == IGNORE_INDEX, 0.0)
    head = _head(model)
    task = HeadLogps(HeadLoss(head, head.forward, *head_facts, on=device_type))
    inside = _InHead(task, batch.targets, batch.n_targets)
    with replaced_forward(head, inside.forward):
        empty_logits = model(**batch.inputs).logits
    return inside.result + empty_logits.sum(dtype=torch.float32)


def sequence_rewards(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Compute the reward of each sequence of a micro-batch, at its last token.

    The head of the reward model runs in fp32, and only on these tokens.

    Returns:
        fp32 [n_sequences].

    Raises:
        TrainingError: the model is no reward model, or the batch does not say where its sequences
            end.
    """
    head, ends = reward_head(model), batch.ends
    if head is None or ends is None or len(ends) != batch.n_sequences:
        raise TrainingError(
            f"expected a reward model and a batch of {batch.n_sequences} sequences with their "
            f"ends, got {type(base_of(model)).__name__} and "
            f"{'none' if ends is None else len(ends)}"
        )

    def compute_rewards(hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        bias = None if head.bias is None else head.bias.float()
        rewards = F.linear(hidden[ends[:, 0], ends[:, 1]].float(), head.weight.float(), bias)
        return rewards.squeeze(1), rewards[:, :0].reshape(*hidden.shape[:-1], 0)

    inside = _InHead(compute_rewards, batch.targets)
    try:
        with replaced_forward(head, inside.forward):
            empty = model(**batch.inputs).logits
        return inside.result + empty.sum(dtype=torch.float32)
    except _OtherUse as error:
        raise TrainingError(f"{type(base_of(model)).__name__}: {error}") from error


def take_loss_from(copy: PreTrainedModel, model: nn.Module) -> None:
    """Try a tiny `copy` of a model without values, and compute the loss of `model` as it shows.

    Logs a line if the loss needs all logits at once.
    """
    ids = torch.arange(1, _TRIAL_TOKENS + 1)[None]
    head_facts = _try_head(copy, {"input_ids": ids}, ids)
    if head_facts is not None:
        vocabulary = getattr(_head(model), "out_features", head_facts[0])
        head_facts = int(vocabulary), head_facts[1]
    _logit_maps[model] = head_facts


def _find_head_facts(model: nn.Module, batch: Batch) -> _HeadFacts:
    """Return the result of `_try_head`, which runs once for each model."""
    if model not in _logit_maps:
        _logit_maps[model] = _try_head(model, batch.inputs, batch.targets)
    return _logit_maps[model]


def _head(model: nn.Module) -> nn.Module:
    """Return the module that computes logits; with adapters its trained copy, if there is one."""
    base = base_of(model)
    head = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
    if (trained := trained_module(head)) is None:
        raise _OtherUse("transformers knows no head of it")
    return trained


class _OtherUse(Exception):
    """The head does not compute one row of logits per token, or the model changes these rows."""


class _InHead:
    """A replacement of the head's forward that runs a task on the hidden states [B, T, H].

    Inside the forward FSDP has gathered the weight of the head; elsewhere it may be a shard.
    """

    def __init__(
        self,
        task: Callable[[torch.Tensor, torch.Tensor, int | None], tuple[torch.Tensor, torch.Tensor]],
        targets: torch.Tensor,
        n_targets: int | None = None,
    ) -> None:
        self._task, self._targets, self._n_targets = task, targets, n_targets
        self._result: torch.Tensor | None = None

    @torch.compiler.disable
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the task; return an empty tensor [B, T, 0] in place of the logits."""
        if self._result is not None or hidden.shape[:-1] != self._targets.shape:
            raise _OtherUse(_NOT_ONCE)
        self._result, empty_logits = self._task(hidden, self._targets, self._n_targets)
        return empty_logits

    @property
    def result(self) -> torch.Tensor:
        """The tensor that the task computed in the forward."""
        if self._result is None:
            raise _OtherUse("its head is not called")
        return self._result


# ---- What a model does with the output of its head


def _try_head(model: nn.Module, inputs: dict[str, Any], targets: torch.Tensor) -> _HeadFacts:
    """Find out by a forward of a few tokens what `model` does with the output of its head.

    Every rank gets the same result. The random state does not change.

    Returns:
        The number of logits per token, and the map from the head's output to the model's logits;
        None if the loss cannot be computed inside the head.
    """
    # Only inputs with one number per token can be cut.
    few_inputs = {
        name: value[:1, :_TRIAL_TOKENS]
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.shape == targets.shape
    }
    started_forwards = list[nn.Module]()
    with (
        model.register_forward_pre_hook(lambda module, _: started_forwards.append(module)),
        torch.no_grad(),
        forked_rng(targets.device),
        torch.compiler.set_stance("force_eager"),  # not worth a compilation
    ):
        try:
            return _probe_head(model, few_inputs, targets[:1, :_TRIAL_TOKENS])
        except (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError):
            raise
        except (_OtherUse, IndexError, TypeError, ValueError, RuntimeError) as error:
            # The model does something with its logits that works only with real ones. Any other
            # fault occurs again when the loss is computed from the model's logits.
            why = str(error) if isinstance(error, _OtherUse) else one_line(error)
            # A sharded model whose forward failed half-way must be reset before the next one.
            # Before its first forward FSDP2 has no state to reset.
            if started_forwards and callable(recover := getattr(model, "reset_iter_state", None)):
                recover()
    ranks.log_once(
        f"loss: from all logits of a micro-batch at once, which takes more memory: "
        f"{type(base_of(model)).__name__}: {why}"
    )
    return None


def _probe_head(
    model: nn.Module, inputs: dict[str, Any], targets: torch.Tensor
) -> tuple[int, LogitMap]:
    """Run the model with probe values in place of the head's output, then once as in a loss.

    Raises:
        _OtherUse: the loss cannot be computed inside the head.
    """
    head, probes = _head(model), list[torch.Tensor]()
    head_forward = head.forward

    def probe(hidden: torch.Tensor) -> torch.Tensor:
        """Return values from which the map of the model can be inferred."""
        if probes or hidden.shape[:-1] != targets.shape:
            raise _OtherUse(_NOT_ONCE)
        if any(isinstance(p, DTensor) for p in head.parameters()):
            raise _OtherUse("its head's weights are not gathered where it computes")
        real = head_forward(hidden)
        values = torch.linspace(-100.0, 100.0, real.numel(), device=real.device)
        values[0], values[1] = _SMALL, _LARGE
        probes.append(values.view(real.shape))
        # If the logits then require a gradient, there are trained weights behind the head.
        torch.set_grad_enabled(True)
        return probes[0]

    with replaced_forward(head, probe):
        logits = model(**inputs).logits
    if not probes:
        raise _OtherUse("its head is not called")
    logit_map = _infer_logit_map(probes[0], logits)
    vocabulary = logits.shape[-1]
    inside = _InHead(HeadLoss(head, head.forward, vocabulary, logit_map), targets)
    with torch.no_grad(), replaced_forward(head, inside.forward):
        empty_logits = model(**inputs).logits
    if empty_logits.shape != (*targets.shape, 0):
        raise _OtherUse("it does something else with its logits")
    return vocabulary, logit_map


def _infer_logit_map(z: torch.Tensor, logits: torch.Tensor) -> LogitMap:
    """Infer the map that turned the probe values `z` into `logits`.

    Raises:
        _OtherUse: it is neither a scale nor a soft cap.
    """
    if logits.shape != z.shape or logits.requires_grad:
        raise _OtherUse("it makes other logits of its head's output, or has trained weights there")
    small, large = (float(value) for value in logits.flatten()[:2])
    scale = small / _SMALL
    linear = abs(large - scale * _LARGE) <= 1e-5 * abs(large)
    logit_map = LogitMap(scale, None if linear else large or math.nan)
    # Rounded logits show an identity, but not the exact number of a scale.
    tolerance = 1e-5 if logits.dtype == torch.float32 else torch.finfo(logits.dtype).eps
    agrees = torch.allclose(logit_map(z), logits.float(), rtol=tolerance, atol=tolerance)
    if not agrees or (logits.dtype != torch.float32 and logit_map != LogitMap()):
        raise _OtherUse("it changes the output of its head by more than a scale or a soft cap")
    return logit_map
