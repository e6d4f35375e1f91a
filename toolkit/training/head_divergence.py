"""The divergence of a model from its teacher inside the LM head, with gradients in the forward.

The logits of model and teacher exist for one chunk of tokens at a time, as in `head_loss`, whose
chunks and gradients of hidden states and head this module uses.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from toolkit.training.head_loss import HeadLoss, LogitMap
from toolkit.training.loss_kernel import IGNORE_INDEX

# A finite stand-in for the logarithm of 0, so that 0 x log 0 is 0. Its exponential is exactly 0.
_LOG_ZERO = -1e4
# Tensors of the size of the logits that exist at the same time, which make chunks smaller.
_TENSORS_PER_CHUNK = 4


@dataclass(frozen=True)
class Divergence:
    """The loss of a token: `(1 - kl_weight) x cross entropy + kl_weight x temperature^2 x KL`.

    With p of the teacher and q of the model, both softmax(logits / temperature), the KL is KL(p||q)
    (forward) or KL(q||p) (reverse). The loss is that of Hinton et al. 2015 (arXiv:1503.02531); the
    two directions are compared by Gu et al. 2023 (arXiv:2306.08543).
    """

    temperature: float = 1.0
    kl_weight: float = 0.5
    is_reverse: bool = False
    top_k: int | None = None
    """Number of tokens that are compared one by one; None: all. See `TopLogps`."""


class TopLogps(NamedTuple):
    """The teacher's most likely tokens of each position, and the total of all other tokens."""

    ids: torch.Tensor
    """int64 [rows, k], the most likely token first."""
    logps: torch.Tensor
    """[rows, k + 1]: their log-probabilities, and the log-probability of all other tokens."""

    @classmethod
    def of(cls, logps: torch.Tensor, k: int) -> "TopLogps":
        """Select the `k` largest of the log-probabilities [rows, V]."""
        top, ids = logps.topk(min(k, logps.shape[-1]), -1)
        return cls(ids, torch.cat([top, _sum_others(logps, ids)], -1))


class Teacher(Protocol):
    """The teacher's distributions of a micro-batch, at the temperature of the loss."""

    @property
    def vocabulary(self) -> int:
        """Number of the teacher's logits per token."""

    def gathered(self) -> contextlib.AbstractContextManager[object]:
        """Return a context within which `logps` may be called. Collective."""

    def logps(self, positions: torch.Tensor | slice, width: int) -> torch.Tensor | TopLogps:
        """Compute the log-probabilities at some positions of the flattened micro-batch.

        Args:
            positions: index of the positions.
            width: the distribution covers the first `width` tokens of the vocabulary.

        Returns:
            [rows, width], or those of the most likely tokens.
        """


@dataclass(frozen=True)
class TeacherHead:
    """A teacher whose logits are computed from stored hidden states, one chunk at a time."""

    hidden: torch.Tensor
    """Input of the head at every position, [B x T, H]."""
    forward: Callable[[torch.Tensor], torch.Tensor]
    vocabulary: int
    logit_map: LogitMap
    divergence: Divergence
    gathered: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Makes the weights of a sharded head available."""

    def logps(self, positions: torch.Tensor | slice, width: int) -> torch.Tensor | TopLogps:
        """Compute the teacher's log-probabilities; see `Teacher`."""
        logits = self.forward(self.hidden[positions][None])[0]
        logps = _log_softmax(self.logit_map, logits, width, self.divergence.temperature)
        k = self.divergence.top_k
        return logps if k is None else TopLogps.of(logps, k)


@dataclass(frozen=True)
class StoredTeacher:
    """The stored top-k log-probabilities of a teacher at every position of a micro-batch."""

    top: TopLogps
    """Of the flattened positions, [B x T, ...]."""
    vocabulary: int

    def gathered(self) -> contextlib.AbstractContextManager[object]:
        """Return a context without effect."""
        return contextlib.nullcontext()

    def logps(self, positions: torch.Tensor | slice, width: int) -> TopLogps:
        """Select the values of some positions; see `Teacher`."""
        return TopLogps(self.top.ids[positions].long(), self.top.logps[positions])


@dataclass(frozen=True)
class HeadDivergence(HeadLoss):
    """Compute the loss of `Divergence` inside the forward of the model's head.

    Costs the matrix products of `HeadLoss` and one more for the teacher's logits. The chunks are
    four times smaller, because four tensors of the size of the logits exist at the same time.
    """

    teacher: Teacher | None = None
    divergence: Divergence = Divergence()
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name of a metric -> 0-d fp32, to which the sum over the targets is added: `kl` (without the
    factor temperature^2), `cross_entropy`, `agreement` (number of targets for which model and
    teacher have the same most likely token) and, if it is present, `accuracy`."""

    @property
    def logits_per_token(self) -> int:
        """Number of values per token in memory at once: four tensors of logits; see `HeadLoss`."""
        return _TENSORS_PER_CHUNK * self.vocabulary

    def __call__(
        self, hidden: torch.Tensor, targets: torch.Tensor, n_targets: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the loss, summed over the targets; see `HeadLoss.__call__`."""
        assert self.teacher is not None
        with self.teacher.gathered():
            return super().__call__(hidden, targets, n_targets)

    def loss_and_logit_grad(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | slice,
        needs_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the summed loss of a chunk of head outputs, and its gradient; see `HeadLoss`."""
        assert self.teacher is not None
        d, width = self.divergence, min(self.vocabulary, self.teacher.vocabulary)
        teacher = self.teacher.logps(positions, width)
        best = teacher.ids[:, 0] if isinstance(teacher, TopLogps) else teacher.argmax(-1)
        logps = _log_softmax(self.logit_map, logits, width, d.temperature)
        valid = targets != IGNORE_INDEX
        kl, grad = divergence_and_grad(logps, teacher, d.is_reverse, needs_grad)
        self._add("agreement", (logps.argmax(-1) == best) & valid)
        self._add("kl", torch.where(valid, kl, 0.0))
        if d.temperature != 1.0 or width != self.vocabulary:
            del logps
            logps = _log_softmax(self.logit_map, logits, self.vocabulary, 1.0)
        at = torch.where(valid, targets, 0)[:, None]
        cross_entropy = torch.where(valid, -logps.gather(1, at).squeeze(1), 0.0)
        self._add("cross_entropy", cross_entropy)
        if "accuracy" in self.sums:
            self._add("accuracy", logps.argmax(-1) == targets)
        scale = d.kl_weight * d.temperature**2
        loss = (1.0 - d.kl_weight) * cross_entropy.sum() + scale * torch.where(valid, kl, 0.0).sum()
        if grad is None:
            return loss, None
        # d (z / temperature) = 1 / temperature.
        grad *= scale / d.temperature
        total = logps.exp_().mul_(1.0 - d.kl_weight)
        total.scatter_(1, at, total.gather(1, at) - (1.0 - d.kl_weight))
        total[:, :width] += grad
        if self.logit_map.cap is not None:  # d tanh = 1 - tanh^2
            mapped = self.logit_map(logits.to(total.dtype))
            total *= mapped.div_(self.logit_map.cap).square_().neg_().add_(1.0)
        total *= valid[:, None] * self.logit_map.scale
        return loss, total.to(logits.dtype)

    def _add(self, name: str, values: torch.Tensor) -> None:
        """Add the sum of `values` to the metric `name`."""
        total = self.sums.setdefault(name, torch.zeros((), device=values.device))
        total += values.sum()


def divergence_and_grad(
    logps: torch.Tensor, teacher: torch.Tensor | TopLogps, is_reverse: bool, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the divergence of each token, and its gradient in closed form.

    With p of the teacher, q of the model, l_i = log q_i - log p_i and x the model's logits divided
    by the temperature:

        forward  sum p_i (-l_i)     gradient for x_i:  q_i - p_i
        reverse  sum q_i l_i = L    gradient for x_i:  q_i (l_i - L)

    If only the teacher's top-k tokens are known, the sums run over them and over all other tokens
    as one event r. An other token i then has the gradient q_i - p_r q_i / q_r, or q_i (l_r - L).

    Args:
        logps: log q, [rows, V].
        teacher: log p, [rows, V], or its largest values.
        is_reverse: whether to compute KL(q||p) instead of KL(p||q).
        needs_grad: whether the gradient is needed.

    Returns:
        The divergence, [rows]; and its gradient for x, [rows, V], None without `needs_grad`.
    """
    if not isinstance(teacher, TopLogps):
        return _event_divergence(logps, teacher, is_reverse, needs_grad)
    ids = teacher.ids
    rest_logp = _sum_others(logps, ids)
    events = torch.cat([logps.gather(1, ids), rest_logp], -1)
    kl, event_grad = _event_divergence(
        events, teacher.logps.to(logps.dtype), is_reverse, needs_grad
    )
    if event_grad is None:
        return kl, None
    # The gradient of an event of several tokens is divided in proportion to their probabilities.
    # The maximum concerns only the top-k tokens, whose values are replaced.
    grad = (logps - rest_logp).clamp_(max=0.0).exp_().mul_(event_grad[:, -1:])
    return kl, grad.scatter_(1, ids, event_grad[:, :-1])


def _event_divergence(
    logps: torch.Tensor, teacher: torch.Tensor, is_reverse: bool, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the divergence of two lists of log-probabilities [rows, events], and its gradient."""
    if is_reverse:
        q, difference = logps.exp(), logps - teacher
        kl = (q * difference).sum(-1)
        return kl, difference.sub_(kl[:, None]).mul_(q) if needs_grad else None
    p = teacher.exp()
    kl = (p * (teacher - logps)).sum(-1)
    return kl, logps.exp().sub_(p) if needs_grad else None


def _sum_others(logps: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Compute the log of the total probability of all tokens except `ids`; [rows, 1].

    It is the log of a sum of small numbers, because 1 minus a sum near 1 would have no exact digit.
    """
    rest_logp = logps.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return rest_logp.clamp_(min=_LOG_ZERO)


def _log_softmax(
    logit_map: LogitMap, logits: torch.Tensor, width: int, temperature: float
) -> torch.Tensor:
    """Compute log-probabilities of the first `width` tokens, at least in fp32; [rows, width]."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    mapped = logit_map(logits.to(dtype))[:, :width]
    if temperature != 1.0:
        mapped = mapped / temperature
    return torch.log_softmax(mapped, -1, dtype=dtype).clamp_(min=_LOG_ZERO)
