"""The loss of a micro-batch, which recipes call: a sum over the supervised tokens.

It is computed inside the LM head, chunk by chunk, so that the logits of a micro-batch never exist
at once. A model may scale the output of its head or apply a soft cap; a trial forward finds out.
If the model does anything else with it, the loss is computed from the model's own logits.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
HeadTask = Callable[[torch.Tensor, torch.Tensor, int | None], tuple[torch.Tensor, torch.Tensor]]
"""Function such as `HeadLoss`, called with the head's input, the targets and their number. It
returns its result, and an empty tensor in place of the logits."""
_logit_maps: "weakref.WeakKeyDictionary[nn.Module, _HeadFacts]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class LossSum:
    """The sums of a micro-batch, from which a step or an evaluation computes means.

    A loss may be the sum of several means, such as a preference loss and a cross entropy. In this
    case `total` and `count` are 1-d with one element per mean.
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
        """Map every metric in `parts` to the number of its terms, in the shape of its sum."""
        first = self.count.flatten()[0]
        return {
            name: self.part_counts.get(name, first.expand(value.shape))
            for name, value in self.parts.items()
        }

    def sums(self) -> list[torch.Tensor]:
        """List the tensors that ranks must add up.

        Returns:
            `total`, `count`, then the sums of all metrics, then the counts of all metrics.
        """
        return [self.total, self.count, *self.parts.values(), *self.all_part_counts().values()]


@runtime_checkable
class EvaluatedLoss(Protocol):
    """Protocol of a loss that computes further evaluation metrics; see `toolkit.objectives`."""

    @property
    def metrics(self) -> Sequence[Metric]:
        """The metrics of an evaluation, including the loss."""

    def evaluation_loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Compute the evaluation loss of a micro-batch, with the other metrics in `parts`."""


def causal_lm_loss(
    model: nn.Module,
    batch: Batch,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    device_type: str | None = None,
    accuracy: bool = False,
) -> LossSum:
    """Compute the cross entropy of one micro-batch in fp32, summed over the supervised tokens.

    Only the logits of one chunk of tokens exist at a time; see `HeadLoss` for the cost. The first
    call for a model runs it twice on a few tokens to find out what it does with the head's output.
    If the model needs all logits at once, this is logged. A batch without supervised tokens gives a
    loss of exactly 0 and gradients of zeros.

    Args:
        model: a causal LM, sharded or not.
        batch: the micro-batch. If it has `n_targets`, positions without a target cost nothing on
            GPUs, as on a CPU.
        label_smoothing: share of each target that is spread evenly over the vocabulary, as in
            transformers' `LabelSmoother` (Szegedy et al. 2016, arXiv:1512.00567).
        z_loss: factor of the square of log Z that is added for each token; see `HeadLoss`.
        device_type: device type whose chunk sizes and kernels are used; None: that of the batch.
        accuracy: also count the supervised tokens whose target has the largest logit, as the metric
            `accuracy` in `parts`.
    """
    inputs, targets, parts = batch.inputs, batch.targets, dict[str, torch.Tensor]()
    if accuracy:
        parts["accuracy"] = torch.zeros((), dtype=torch.int64, device=targets.device)
    if (head_loss := find_head_loss(model, batch, device_type)) is None:
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
    task = replace(
        head_loss, label_smoothing=label_smoothing, correct=parts.get("accuracy"), z_loss=z_loss
    )
    total, empty_logits = run_in_head(model, batch, task)
    # The sum is 0; it makes the backward run through the model's output, where FSDP's hooks wait.
    return LossSum(total + empty_logits.sum(dtype=torch.float32), batch.count, parts)


def token_logps(model: nn.Module, batch: Batch, *, device_type: str | None = None) -> torch.Tensor:
    """Compute the log-probability of each target of a micro-batch, with gradients.

    See `HeadLogps` for the cost. As in `causal_lm_loss`, the first call runs the model on a few
    tokens.

    Args:
        model: a causal LM, sharded or not.
        batch: the micro-batch.
        device_type: device type whose chunk sizes and kernels are used; None: that of the batch.

    Returns:
        fp32 [B, T]; 0 at positions without a target.
    """
    if (head_loss := find_head_loss(model, batch, device_type)) is None:
        log_p = model(**batch.inputs).logits.log_softmax(-1, dtype=torch.float32)
        at = batch.targets.clamp(min=0)[..., None]
        return log_p.gather(-1, at).squeeze(-1).masked_fill(batch.targets == IGNORE_INDEX, 0.0)
    logps, empty_logits = run_in_head(model, batch, HeadLogps(head_loss))
    return logps + empty_logits.sum(dtype=torch.float32)


def find_head_loss(
    model: nn.Module, batch: Batch, device_type: str | None = None
) -> HeadLoss | None:
    """Return the cross entropy inside the head of a model, which other losses adapt.

    The first call runs the model twice on a few tokens, as in `causal_lm_loss`.

    Args:
        model: a causal LM, sharded or not.
        batch: a micro-batch for this first call.
        device_type: device type whose chunk sizes and kernels are used; None: that of the batch.

    Returns:
        The cross entropy without smoothing and z-loss. None if the model does something else with
        its logits, so that a loss needs all logits of a micro-batch at once.
    """
    if (head_facts := _get_head_facts(model, batch)) is None:
        return None
    head = _find_output_head(model)
    return HeadLoss(head, head.forward, *head_facts, on=device_type)


def run_in_head(
    model: nn.Module, batch: Batch, task: HeadTask
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the forward of a model with `task` in place of the forward of its head.

    Args:
        model: a causal LM for which `find_head_loss` is not None.
        batch: the micro-batch.
        task: called where FSDP has gathered the weight of the head.

    Returns:
        The result of the task, and the model's logits, which are an empty tensor [B, T, 0].
    """
    head = _find_output_head(model)
    inside = _HeadReplacement(task, batch.targets, batch.n_targets)
    with replaced_forward(head, inside.forward):
        empty_logits = model(**batch.inputs).logits
    return inside.result, empty_logits


def sequence_rewards(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Compute the reward of each sequence of a micro-batch at its last token, with gradients.

    The head of the reward model runs in fp32, and only on these tokens.

    Returns:
        fp32 [n_sequences]; 0 for a sequence whose last token is in another part of its row
        (`Batch.cut`).

    Raises:
        TrainingError: the model is not a reward model, or the batch lacks the ends of its
            sequences.
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
        rows, positions = ends.unbind(1)
        last = hidden.shape[1] - 1
        is_here = (positions >= 0) & (positions <= last)
        at_ends = hidden[rows, positions.clamp(0, last)]
        rewards = F.linear(at_ends.float(), head.weight.float(), bias)
        return torch.where(is_here, rewards.squeeze(1), 0.0), rewards[:, :0].reshape(
            *hidden.shape[:-1], 0
        )

    inside = _HeadReplacement(compute_rewards, batch.targets)
    try:
        with replaced_forward(head, inside.forward):
            empty = model(**batch.inputs).logits
        return inside.result + empty.sum(dtype=torch.float32)
    except _UnsupportedHeadError as error:
        raise TrainingError(f"{type(base_of(model)).__name__}: {error}") from error


def probe_loss_on_copy(copy: PreTrainedModel, model: nn.Module) -> None:
    """Find out how to compute the loss of `model` by running a tiny `copy`, and store the result.

    Needed for a model on meta, which cannot run. If the loss needs all logits at once, this is
    logged.
    """
    ids = torch.arange(1, _TRIAL_TOKENS + 1)[None]
    head_facts = _try_head(copy, {"input_ids": ids}, ids)
    if head_facts is not None:
        vocabulary = getattr(_find_output_head(model), "out_features", head_facts[0])
        head_facts = int(vocabulary), head_facts[1]
    _logit_maps[model] = head_facts


def _get_head_facts(model: nn.Module, batch: Batch) -> _HeadFacts:
    """Return the result of `_try_head` for a model, which is computed once and cached."""
    if model not in _logit_maps:
        _logit_maps[model] = _try_head(model, batch.inputs, batch.targets)
    return _logit_maps[model]


def _find_output_head(model: nn.Module) -> nn.Module:
    """Return the module that computes logits. If adapters train a copy of it, return the copy.

    Raises:
        _UnsupportedHeadError: the model has no output embeddings.
    """
    base = base_of(model)
    head = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
    if (trained := trained_module(head)) is None:
        raise _UnsupportedHeadError("transformers knows no head of it")
    return trained


class _UnsupportedHeadError(Exception):
    """The loss cannot be computed inside the model's head; the message says why."""


class _HeadReplacement:
    """Replaces the head's forward, so that the loss is computed inside the model's forward.

    There, FSDP has gathered the weight of the head; elsewhere it may be a shard. The task is a
    function such as `HeadLoss`, which is called with hidden states, targets and `n_targets`. It
    returns its result, and an empty tensor in place of the logits.
    """

    def __init__(
        self,
        task: HeadTask,
        targets: torch.Tensor,
        n_targets: int | None = None,
    ) -> None:
        self._task, self._targets, self._n_targets = task, targets, n_targets
        self._result: torch.Tensor | None = None

    @torch.compiler.disable
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the task on hidden states [B, T, H]; return empty logits [B, T, 0].

        Raises:
            _UnsupportedHeadError: this is a second call, or hidden states and targets differ in
                shape.
        """
        if self._result is not None or hidden.shape[:-1] != self._targets.shape:
            raise _UnsupportedHeadError(_NOT_ONCE)
        self._result, empty_logits = self._task(hidden, self._targets, self._n_targets)
        return empty_logits

    @property
    def result(self) -> torch.Tensor:
        """The tensor that the task computed in the forward.

        Raises:
            _UnsupportedHeadError: the forward did not run.
        """
        if self._result is None:
            raise _UnsupportedHeadError("its head is not called")
        return self._result


# ---- What a model does with the output of its head


def _try_head(model: nn.Module, inputs: dict[str, Any], targets: torch.Tensor) -> _HeadFacts:
    """Find out what a model does with its head's output, by running it on up to 8 tokens.

    Every rank gets the same result. The random state does not change.

    Returns:
        The number of logits per token, and the map from the head's output to the model's logits.
        None if the loss cannot be computed inside the head, which is logged.
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
        except (_UnsupportedHeadError, IndexError, TypeError, ValueError, RuntimeError) as error:
            # The model does something with its logits that works only with real ones. Any other
            # fault occurs again when the loss is computed from the model's logits.
            why = str(error) if isinstance(error, _UnsupportedHeadError) else one_line(error)
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
    """Run the model with known values as the head's output, and then with a loss inside the head.

    The first run shows what the model does with the values.

    Returns:
        The number of logits per token, and the map from the head's output to the model's logits.

    Raises:
        _UnsupportedHeadError: the loss cannot be computed inside the head.
    """
    head, probes = _find_output_head(model), list[torch.Tensor]()
    head_forward = head.forward

    def probe(hidden: torch.Tensor) -> torch.Tensor:
        """Return values from which the map of the model can be inferred."""
        if probes or hidden.shape[:-1] != targets.shape:
            raise _UnsupportedHeadError(_NOT_ONCE)
        if any(isinstance(p, DTensor) for p in head.parameters()):
            raise _UnsupportedHeadError("its head's weights are not gathered where it computes")
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
        raise _UnsupportedHeadError("its head is not called")
    logit_map = _infer_logit_map(probes[0], logits)
    vocabulary = logits.shape[-1]
    inside = _HeadReplacement(HeadLoss(head, head.forward, vocabulary, logit_map), targets)
    with torch.no_grad(), replaced_forward(head, inside.forward):
        empty_logits = model(**inputs).logits
    if empty_logits.shape != (*targets.shape, 0):
        raise _UnsupportedHeadError("it does something else with its logits")
    return vocabulary, logit_map


def _infer_logit_map(z: torch.Tensor, logits: torch.Tensor) -> LogitMap:
    """Infer the scale and soft cap with which the model turned the probe values `z` into `logits`.

    Raises:
        _UnsupportedHeadError: the model changed the values in another way.
    """
    if logits.shape != z.shape or logits.requires_grad:
        raise _UnsupportedHeadError(
            "it makes other logits of its head's output, or has trained weights there"
        )
    small, large = (float(value) for value in logits.flatten()[:2])
    scale = small / _SMALL
    linear = abs(large - scale * _LARGE) <= 1e-5 * abs(large)
    logit_map = LogitMap(scale, None if linear else large or math.nan)
    # Rounded logits show an identity, but not the exact number of a scale.
    tolerance = 1e-5 if logits.dtype == torch.float32 else torch.finfo(logits.dtype).eps
    agrees = torch.allclose(logit_map(z), logits.float(), rtol=tolerance, atol=tolerance)
    if not agrees or (logits.dtype != torch.float32 and logit_map != LogitMap()):
        raise _UnsupportedHeadError(
            "it changes the output of its head by more than a scale or a soft cap"
        )
    return logit_map
