"""Preference losses of pairs of answers, as functions of their log-probabilities.

[Note: preference objectives] S is the sum of the log-probabilities of the supervised tokens of an
answer, R the same sum by the reference model, n the number of these tokens. c is the chosen answer
of a pair and w the rejected one; r = S - R, d = r_c - r_w, m = S / n. Sources:

    sigmoid        DPO, Rafailov et al. 2023, arXiv:2305.18290; with label_smoothing cDPO
    robust         Chowdhury et al. 2024, arXiv:2403.00409
    hinge          SLiC, Zhao et al. 2023, arXiv:2305.10425
    ipo            Azar et al. 2023, arXiv:2310.12036, on means of tokens
    sigmoid_norm   DPO on means of tokens
    apo_zero       D'Oosterlinck et al. 2024, arXiv:2408.06266; also apo_down
    bco_pair       Jung et al. 2024, arXiv:2404.04656, on pairs and without the reward shift
    nca_pair       Chen et al. 2024, arXiv:2402.05369
    exo_pair       Ji et al. 2024, arXiv:2402.00856
    sppo_hard      Wu et al. 2024, arXiv:2405.00675, with win probabilities of 1 and 0
    aot            Melnyk et al. 2024, arXiv:2406.05882; also aot_unpaired
    discopop       Lu et al. 2024, arXiv:2406.08414
    simpo          Meng et al. 2024, arXiv:2405.14734; without a reference
    orpo           Hong et al. 2024, arXiv:2403.07691; without a reference
    kto            Ethayarajh et al. 2024, arXiv:2402.01306; single answers with a label
    reward         Bradley and Terry 1952, on rewards s; margins as in Touvron et al. 2023,
                   arXiv:2307.09288; centring as in Eisenstein et al. 2023, arXiv:2312.09244
    rpo_alpha      adds the cross entropy of chosen answers, Pang et al. 2024, arXiv:2404.19733
    a list         MPO, a weighted sum, Wang et al. 2024, arXiv:2411.10442

Names and definitions are those of TRL 1.16. Its `bco_pair` has no running mean of rewards (the
reward shift of the paper), so the loss has no state. Each loss is a mean over the pairs of the
global batch. The cross entropy in rpo_alpha, sft and orpo is a mean over the tokens of the chosen
answers; in orpo also over their prompts, as in its authors' code. Everything after the sums S is
computed in float64. These are a few numbers per pair, and float32 would round their differences by
up to 0.004 if S is -7e4.

[Note: sorted pairs] aot and aot_unpaired compare two distributions: they sort two lists of numbers
of all pairs and compare the numbers of equal rank. The lists cover the micro-batches that all ranks
compute at the same time. So the number of ranks does not change the loss of a global batch, but the
number of gradient accumulation steps does. (TRL sorts the pairs of one device.) Every rank gathers
the numbers of all pairs. It computes the complete loss, which has a gradient with respect to the
rank's own pairs only, and reports the terms whose first number is its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from toolkit.config.preference import PreferenceConfig
from toolkit.errors import TrainingError
from toolkit.mesh import View

_SMALLEST_FLOAT32 = 2.0**-149  # above zero
_LOG_2 = math.log(2.0)


@dataclass(frozen=True)
class PairLogps:
    """Summed log-probabilities and token counts of chosen and rejected answers, [pairs] each."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    n_chosen: torch.Tensor
    n_rejected: torch.Tensor

    @property
    def margin(self) -> torch.Tensor:
        """Value of the chosen answer minus that of the rejected answer, [pairs]."""
        return self.chosen - self.rejected

    def means(self) -> "PairLogps":
        """Return a copy with log-probabilities divided by the numbers of tokens."""
        return replace(
            self,
            chosen=self.chosen / self.n_chosen.clamp(min=1),
            rejected=self.rejected / self.n_rejected.clamp(min=1),
        )

    def minus(self, reference: torch.Tensor) -> "PairLogps":
        """Return a copy minus the reference's log-probabilities, [2 * pairs], sides in turn."""
        return replace(
            self, chosen=self.chosen - reference[::2], rejected=self.rejected - reference[1::2]
        )


@dataclass(frozen=True)
class RankPairs:
    """The pairs of a rank's micro-batch, and the ranks whose pairs are sorted together."""

    rewards: PairLogps
    """Log-probabilities minus those of the reference, if the loss has one."""
    policy: PairLogps
    """Log-probabilities by the trained model."""
    among: View
    max_pairs: int
    """The largest number of pairs in a micro-batch of any rank; needed on several ranks."""


def pair_losses(cfg: PreferenceConfig, pairs: RankPairs) -> torch.Tensor:
    """Compute the weighted sum of the objectives in `preference.loss_type` over a micro-batch.

    The cross entropy is not included. Collective for aot and aot_unpaired.

    Args:
        cfg: settings of the objective.
        pairs: the pairs of this rank.

    Returns:
        The sum over the pairs, float64, 0-d; see [Note: preference objectives].
    """
    total = pairs.policy.chosen.new_zeros(())
    for name, weight in cfg.weighted_losses.items():
        if name in _SORTED:
            summed = _sorted_loss(cfg, *_SORTED[name](pairs), pairs)
        else:
            summed = _TERMS[name](cfg, pairs.rewards).sum()
        total = total + weight * summed
    return total


def _smoothed_sigmoid_loss(cfg: PreferenceConfig, logits: torch.Tensor) -> torch.Tensor:
    """Compute -log sigmoid, for labels that are wrong with probability `label_smoothing` (cDPO)."""
    e = cfg.label_smoothing
    return -(1 - e) * F.logsigmoid(logits) - e * F.logsigmoid(-logits)


def _robust_loss(cfg: PreferenceConfig, pairs: PairLogps) -> torch.Tensor:
    """Compute the robust DPO loss of each pair, [pairs]; see [Note: preference objectives]."""
    e, logits = cfg.label_smoothing, cfg.beta * pairs.margin
    return (-(1 - e) * F.logsigmoid(logits) + e * F.logsigmoid(-logits)) / (1 - 2 * e)


def _apo_zero_loss(cfg: PreferenceConfig, pairs: PairLogps) -> torch.Tensor:
    """Compute the APO-zero loss of each pair, [pairs]: raise chosen and lower rejected answers."""
    return torch.sigmoid(-cfg.beta * pairs.chosen) + torch.sigmoid(cfg.beta * pairs.rejected)


def _apo_down_loss(cfg: PreferenceConfig, pairs: PairLogps) -> torch.Tensor:
    """Compute the APO-down loss of each pair, [pairs]: lower both answers, rejected ones more."""
    return torch.sigmoid(cfg.beta * pairs.chosen) + torch.sigmoid(-cfg.beta * pairs.margin)


def _bco_loss(cfg: PreferenceConfig, pairs: PairLogps) -> torch.Tensor:
    """Compute the BCO loss of each pair, [pairs]: a classifier of chosen and rejected answers."""
    return -F.logsigmoid(cfg.beta * pairs.chosen) - F.logsigmoid(-cfg.beta * pairs.rejected)


def _nca_loss(cfg: PreferenceConfig, pairs: PairLogps) -> torch.Tensor:
    """Compute the NCA loss of each pair, [pairs]; both answers are also noise samples."""
    chosen, rejected = cfg.beta * pairs.chosen, cfg.beta * pairs.rejected
    return -F.logsigmoid(chosen) - (F.logsigmoid(-chosen) + F.logsigmoid(-rejected)) / 2


def _exo_loss(cfg: PreferenceConfig, pairs: PairLogps) -> torch.Tensor:
    """Compute the EXO loss of each pair, [pairs]: KL(model || labels) over the two answers.

    The model prefers the chosen answer with probability sigmoid(beta * margin). The labels prefer
    it with probability 1 - label_smoothing.
    """
    e, logits = cfg.label_smoothing, cfg.beta * pairs.margin
    chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-e))
    rejected = torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(e))
    return chosen + rejected


def _sppo_loss(cfg: PreferenceConfig, pairs: PairLogps) -> torch.Tensor:
    """Compute the SPPO loss of each pair, [pairs]: squared distances to gains of +-1 / (2 beta)."""
    gain = 1 / (2 * cfg.beta)
    return (pairs.chosen - gain) ** 2 + (pairs.rejected + gain) ** 2


def _discopop_loss(cfg: PreferenceConfig, pairs: PairLogps) -> torch.Tensor:
    """Compute the DiscoPOP loss of each pair, [pairs]: logistic and exponential loss, blended.

    The product exp(-x) sigmoid(x / tau) is computed as one exponential. Its exponent is at most 0
    for x < 0 if tau is at most 1, while exp(-x) alone would overflow.
    """
    logits = cfg.beta * pairs.margin
    scaled = logits / cfg.discopop_tau
    exponential = torch.exp(F.logsigmoid(scaled) - logits)
    return exponential - torch.sigmoid(-scaled) * F.logsigmoid(logits)


def _orpo_loss(cfg: PreferenceConfig, pairs: PairLogps) -> torch.Tensor:
    """Compute the odds-ratio term of ORPO for each pair, [pairs]."""
    means = pairs.means()
    ratio = log_odds(means.chosen) - log_odds(means.rejected)
    return -cfg.beta * F.logsigmoid(ratio)


def log_odds(logps: torch.Tensor) -> torch.Tensor:
    """Compute log(p / (1 - p)) for log-probabilities log p <= 0, in float64.

    Value and gradient are finite and exact for all float32 numbers below 0. A log-probability of 0
    is treated as the largest number below 0 and gets no gradient. Near p = 1 the gradient grows as
    1 / |log p|; it is clamped to the largest float32 number. log(1 - p) uses `expm1` for large p
    and with `log1p` for small p: Mächler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    wide = logps.double().clamp(max=-_SMALLEST_FLOAT32)
    if wide.requires_grad:
        largest = torch.finfo(torch.float32).max
        wide.register_hook(lambda grad: grad.clamp(-largest, largest))
    # Each branch sees only values that it handles, since an infinity times 0 would be NaN.
    near = wide.clamp(min=-_LOG_2)
    far = wide.clamp(max=-_LOG_2)
    log_complement = torch.where(wide > -_LOG_2, (-near.expm1()).log(), (-far.exp()).log1p())
    return wide - log_complement


_TERMS: dict[str, Callable[[PreferenceConfig, PairLogps], torch.Tensor]] = {
    "sigmoid": lambda cfg, p: _smoothed_sigmoid_loss(cfg, cfg.beta * p.margin),
    "sigmoid_norm": lambda cfg, p: _smoothed_sigmoid_loss(cfg, cfg.beta * p.means().margin),
    "robust": _robust_loss,
    "hinge": lambda cfg, p: torch.relu(1 - cfg.beta * p.margin),
    "ipo": lambda cfg, p: (p.means().margin - 1 / (2 * cfg.beta)) ** 2,
    "apo_zero": _apo_zero_loss,
    "apo_down": _apo_down_loss,
    "bco_pair": _bco_loss,
    "nca_pair": _nca_loss,
    "exo_pair": _exo_loss,
    "sppo_hard": _sppo_loss,
    "discopop": _discopop_loss,
    "simpo": lambda cfg, p: _smoothed_sigmoid_loss(
        cfg, cfg.beta * p.means().margin - cfg.simpo_gamma
    ),
    "orpo": _orpo_loss,
}
_SORTED: dict[str, Callable[[RankPairs], tuple[torch.Tensor, torch.Tensor]]] = {
    # The margins S_c - S_w by the model and by the reference.
    "aot": lambda p: (p.policy.margin, p.policy.margin.detach() - p.rewards.margin.detach()),
    # The rewards of chosen and of rejected answers.
    "aot_unpaired": lambda p: (p.rewards.chosen, p.rewards.rejected),
}
SORTED_LOSSES = frozenset(_SORTED)
"""Objectives that sort the pairs of a micro-batch; see [Note: sorted pairs]."""


# ---- Sorted pairs


def _sorted_loss(
    cfg: PreferenceConfig, first: torch.Tensor, second: torch.Tensor, pairs: RankPairs
) -> torch.Tensor:
    """Compute the loss of differences between two sorted lists. Collective on several ranks.

    See [Note: sorted pairs].

    Args:
        cfg: settings of the objective.
        first: one number of each pair of this rank, [pairs].
        second: numbers to subtract, [pairs].
        pairs: says which ranks sort together.

    Returns:
        This rank's share of the sum over the pairs of all ranks, 0-d. Its gradient is that of the
        complete sum with respect to `first` and `second` of this rank. It is NaN if a number of
        this rank is not finite, and finite on the other ranks, so that the error names the rank.
    """
    # Equal numbers keep the order of the pairs, because their gradients may differ.
    if pairs.among.size == 1:
        difference = first.sort(stable=True).values - second.sort(stable=True).values
        return _smoothed_sigmoid_loss(cfg, cfg.beta * difference).sum()
    is_finite_here = torch.stack([first, second]).isfinite().all()
    first, second, count = _gather_pairs(first, second, pairs)
    # Unused places hold infinity and are last, in both lists equally many.
    ordered, places = first.sort(stable=True)
    used = torch.arange(len(first), device=first.device) < count
    other = second.sort(stable=True).values
    difference = torch.where(used, ordered, 0.0) - torch.where(used, other, 0.0)
    terms = torch.where(used, _smoothed_sigmoid_loss(cfg, cfg.beta * difference), 0.0)
    is_local = places // pairs.max_pairs == pairs.among.rank
    # Only numbers of other ranks can make a term of finite local numbers infinite or NaN.
    finite_terms = torch.where(is_local & terms.isfinite(), terms.detach(), 0.0)
    local = torch.where(is_finite_here, finite_terms.sum(), math.nan)
    return _LocalValue.apply(terms.sum(), local)


class _LocalValue(torch.autograd.Function):
    """Give a rank's share as the value, and pass the gradient on to the sum over all ranks.

    The usual `local + total - total.detach()` is NaN on every rank if one term is.
    """

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return a copy of `local`."""
        return local.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the value as that of `total`."""
        return grads[0], None


def _gather_pairs(
    first: torch.Tensor, second: torch.Tensor, pairs: RankPairs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gather two numbers of every pair from all ranks. Collective.

    Every rank has `max_pairs` places, so that the host need not wait for the numbers of pairs.

    Returns:
        Both lists, float64 [ranks * max_pairs], with infinity in unused places and a gradient for
        this rank's numbers; and the number of pairs of all ranks, 0-d.

    Raises:
        TrainingError: this rank has more than `max_pairs` pairs.
    """
    among, places, count = pairs.among, pairs.max_pairs, len(first)
    if count > places:
        raise TrainingError(f"expected at most {places:,} pairs in a micro-batch, got {count:,}")
    unused = places - count
    local = torch.stack([F.pad(x, (0, unused), value=math.inf) for x in (first, second)])
    # A sum must not contain infinities, because they would reach the other ranks' places.
    everywhere = local.new_zeros(3, among.size, places)
    everywhere[:2, among.rank, :count] = local[:, :count].detach()
    everywhere[2, among.rank, :count] = 1.0
    everywhere = among.sum(everywhere)
    gathered = torch.where(everywhere[2] > 0, everywhere[:2], math.inf)
    rank = among.rank
    lists = torch.cat([gathered[:, :rank], local[:, None], gathered[:, rank + 1 :]], 1).flatten(1)
    return lists[0], lists[1], everywhere[2].sum()
