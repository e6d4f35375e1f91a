"""Preference objectives: what pairs of answers teach, by the log-probability of each answer.

[Note: preference objectives] S is the sum of the log-probabilities of an answer's learned tokens,
R the same by the reference, n their number; c is the chosen answer of a pair and w the rejected
one; r = S - R, d = r_c - r_w, m = S / n. Sources:

    sigmoid        DPO, Rafailov et al. 2023, arXiv:2305.18290; with label_smoothing cDPO
    robust         Chowdhury et al. 2024, arXiv:2403.00409
    hinge          SLiC, Zhao et al. 2023, arXiv:2305.10425
    ipo            Azar et al. 2023, arXiv:2310.12036, on means of tokens
    sigmoid_norm   DPO on means of tokens
    apo_zero       D'Oosterlinck et al. 2024, arXiv:2408.06266
    simpo          Meng et al. 2024, arXiv:2405.14734; without a reference
    orpo           Hong et al. 2024, arXiv:2403.07691; without a reference
    kto            Ethayarajh et al. 2024, arXiv:2402.01306; of single answers
    reward         Bradley and Terry 1952, of the rewards s; margins as Touvron et al. 2023,
                   arXiv:2307.09288, centring as Eisenstein et al. 2023, arXiv:2312.09244
    rpo_alpha      adds the cross entropy of chosen answers, Pang et al. 2024, arXiv:2404.19733

Each is a mean over the pairs of the global batch; the cross entropy in rpo_alpha and orpo is a mean
over the tokens of its chosen answers, in orpo of their prompts too, as its authors' code has it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.config.preference import PreferenceConfig
from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.errors import TrainingError
from toolkit.mesh import View
from toolkit.models.peft_model import disabled_adapters, has_adapters
from toolkit.training.loss import LossSum, sequence_rewards, token_logps

PARTS = (
    *("reward_chosen", "reward_rejected", "margin", "accuracy"),
    *("logps_chosen", "logps_rejected"),
)
"""Names of the parts of a preference loss, each a mean over pairs."""
METRICS = tuple(f"eval_{name}" for name in (*PARTS, "reward", "kl", "logps"))
"""Names of what an evaluation gives beside its loss."""


@dataclass(frozen=True)
class _Pairs:
    """The answers of a micro-batch, [pairs] each."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    n_chosen: torch.Tensor
    n_rejected: torch.Tensor

    @property
    def margin(self) -> torch.Tensor:
        return self.chosen - self.rejected

    def means(self) -> "_Pairs":
        """Return it per token."""
        return replace(
            self, chosen=self.chosen / self.n_chosen, rejected=self.rejected / self.n_rejected
        )


def sequence_logps(
    model: nn.Module, batch: Batch, *, device_type: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of the targets of each sequence, summed, and last that of targets
    of none (prompts): [n_sequences + 1] in fp32; and how many targets each has, int64.

    Costs what `token_logps` does.
    """
    found = token_logps(model, batch, device_type=device_type).flatten()
    sums = found.new_zeros(batch.n_sequences + 1).index_add(0, _owners(batch), found)
    return sums, _counts(batch)


def base_model_logps(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Compute the log-probability of each sequence with the adapters switched off, [n_sequences].

    Costs a forward. Raises TrainingError for a model without adapters.
    """
    if not has_adapters(model):
        raise TrainingError("expected reference values in a batch, or a model with adapters")
    with torch.no_grad(), disabled_adapters(model):
        return sequence_logps(model, batch)[0][:-1]


def _owners(batch: Batch) -> torch.Tensor:
    """Return the sequence of each position, `n_sequences` for none, [B * T]; TrainingError for a
    batch without any.
    """
    if batch.sequences is None:
        raise TrainingError("expected a batch of pairs, got one without `sequences`")
    return batch.sequences.where(batch.sequences >= 0, batch.n_sequences).flatten()


def _counts(batch: Batch) -> torch.Tensor:
    """Return how many targets each sequence has, and last those of none, int64."""
    targets = (batch.targets != IGNORED).flatten().long()
    return targets.new_zeros(batch.n_sequences + 1).index_add(0, _owners(batch), targets)


@dataclass(frozen=True)
class Objective:
    """The loss of a micro-batch of pairs; see [Note: preference objectives]."""

    cfg: PreferenceConfig
    among: View
    """The ranks whose batches are one (`Mesh.loss`)."""
    device_type: str | None = None
    """Of the device whose way the head takes; None: that of the batch."""

    def counts(self, batch: Batch) -> torch.Tensor:
        """Return by how much a micro-batch counts in each mean, int64 [2]: pairs, and tokens of
        the cross entropy; of reward models [1], pairs.
        """
        counts = _counts(batch)
        pairs = counts.new_tensor(batch.n_sequences // 2)
        if self.cfg.loss_type == "reward":
            return pairs[None]
        return torch.stack([pairs, counts[:-1:2].sum() + counts[-1]])

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """Return the sums of both means' terms, [2] with counts [2], of reward models [1] each, and
        parts of each pair's.

        A batch without pairs gives exact zeros with gradients of zeros.
        """
        if self.cfg.loss_type == "reward":
            return self._rewarded(model, batch)
        asked = self.cfg.needs_reference and batch.reference is None
        reference = base_model_logps(model, batch) if asked else batch.reference
        sums, counts = sequence_logps(model, batch, device_type=self.device_type)
        policy = _Pairs(*(x[at:-1:2] for x in (sums, counts) for at in (0, 1)))
        rewards = policy
        if self.cfg.needs_reference and reference is not None:
            reference = reference.view(-1, 2)
            rewards = replace(
                policy,
                chosen=policy.chosen - reference[:, 0],
                rejected=policy.rejected - reference[:, 1],
            )
        if not self.cfg.paired:
            terms, parts = self._unpaired(rewards, policy, batch)
        else:
            terms = _TERMS[self.cfg.loss_type](self.cfg, rewards)
            parts = self._parts(rewards, policy)
        weight = 1.0 if self.cfg.loss_type == "orpo" else self.cfg.rpo_alpha
        cross_entropy = -weight * (policy.chosen.sum() + sums[-1])
        return LossSum(torch.stack([terms.sum(), cross_entropy]), self.counts(batch), parts)

    def _rewarded(self, model: nn.Module, batch: Batch) -> LossSum:
        """Return the terms of a reward model, and their parts."""
        chosen, rejected = sequence_rewards(model, batch).view(-1, 2).unbind(1)
        margin = 0.0 if batch.margin is None else batch.margin
        terms = -F.logsigmoid(chosen - rejected - margin)
        terms = terms + self.cfg.center_rewards_coefficient * (chosen + rejected) ** 2
        shown = _shown(chosen.detach(), rejected.detach())
        parts = dict(zip(PARTS, (v.sum() for v in shown), strict=False))
        return LossSum(terms.sum()[None], self.counts(batch), parts)

    def _parts(self, rewards: _Pairs, policy: _Pairs) -> dict[str, torch.Tensor]:
        """Return the sums over pairs of what `PARTS` name."""
        shown = rewards.means() if self.cfg.loss_type in _BY_TOKEN else rewards
        chosen, rejected = (self.cfg.beta * r.detach() for r in (shown.chosen, shown.rejected))
        values = (
            *_shown(chosen, rejected),
            *(policy.chosen.detach(), policy.rejected.detach()),
        )
        return dict(zip(PARTS, (v.sum() for v in values), strict=True))

    def _unpaired(
        self, rewards: _Pairs, policy: _Pairs, batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return KTO's terms: the first of two sequences is an answer, the second, of the same
        prompt, another row's, whose mean reward in the micro-batches of all ranks is the point from
        which gains and losses count.
        """
        cfg, good, others = self.cfg, batch.desirable, rewards.rejected.detach()
        if good is None or len(good) != len(others):
            raise TrainingError("preference.loss_type kto needs answers with a label, not pairs")
        total, count = self.among.sum(torch.stack([others.sum(), others.new_tensor(len(good))]))
        point = (total / count.clamp(min=1)).clamp(min=0)
        gain = torch.sigmoid(cfg.beta * (rewards.chosen - point))
        loss = torch.sigmoid(cfg.beta * (point - rewards.chosen))
        terms = torch.where(
            good, cfg.desirable_weight * (1 - gain), cfg.undesirable_weight * (1 - loss)
        )
        reward = cfg.beta * rewards.chosen.detach()
        right = ((reward > cfg.beta * point) == good).float()
        parts = {"reward": reward, "kl": point.expand_as(reward), "accuracy": right}
        parts["logps"] = policy.chosen.detach()
        return terms, {name: value.sum() for name, value in parts.items()}


def _shown(chosen: torch.Tensor, rejected: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the first four of `PARTS` of each pair, by its rewards."""
    return chosen, rejected, chosen - rejected, (chosen > rejected).float()


def _smoothed(cfg: PreferenceConfig, logits: torch.Tensor) -> torch.Tensor:
    """Return -log sigmoid, labels being wrong with the probability `label_smoothing`."""
    e = cfg.label_smoothing
    return -(1 - e) * F.logsigmoid(logits) - e * F.logsigmoid(-logits)


def _robust(cfg: PreferenceConfig, pairs: _Pairs) -> torch.Tensor:
    e, logits = cfg.label_smoothing, cfg.beta * pairs.margin
    return (-(1 - e) * F.logsigmoid(logits) + e * F.logsigmoid(-logits)) / (1 - 2 * e)


def _apo_zero(cfg: PreferenceConfig, pairs: _Pairs) -> torch.Tensor:
    chosen, rejected = cfg.beta * pairs.chosen, cfg.beta * pairs.rejected
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


def _orpo(cfg: PreferenceConfig, pairs: _Pairs) -> torch.Tensor:
    means = pairs.means()
    chosen, rejected = (m - torch.log1p(-m.exp()) for m in (means.chosen, means.rejected))
    return -cfg.beta * F.logsigmoid(chosen - rejected)


_TERMS: dict[str, Callable[[PreferenceConfig, _Pairs], torch.Tensor]] = {
    "sigmoid": lambda cfg, p: _smoothed(cfg, cfg.beta * p.margin),
    "sigmoid_norm": lambda cfg, p: _smoothed(cfg, cfg.beta * p.means().margin),
    "robust": _robust,
    "hinge": lambda cfg, p: torch.relu(1 - cfg.beta * p.margin),
    "ipo": lambda cfg, p: (p.means().margin - 1 / (2 * cfg.beta)) ** 2,
    "apo_zero": _apo_zero,
    "simpo": lambda cfg, p: _smoothed(cfg, cfg.beta * p.means().margin - cfg.simpo_gamma),
    "orpo": _orpo,
}
_BY_TOKEN = ("sigmoid_norm", "ipo", "simpo", "orpo")


def disable_dropout(model: nn.Module) -> None:
    """Let `model` drop nothing while it trains, in place: modules that drop, and the shares that
    attention and others hold as numbers.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(module, name, 0.0)
