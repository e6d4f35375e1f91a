"""The loss of preference tuning: pairs of answers, single answers with a label, reward models.

The losses of pairs and the sources of all losses are in `toolkit.training.pair_losses`; see
[Note: preference objectives] there.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.config.preference import PreferenceConfig
from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.errors import TrainingError
from toolkit.mesh import View
from toolkit.models.peft_model import disabled_adapters, has_adapters
from toolkit.training.loss import LossSum, sequence_rewards, token_logps
from toolkit.training.pair_losses import PairLogps, RankPairs, pair_losses
from toolkit.training.row_parts import add_parts, count_once


def sequence_logps(
    model: nn.Module,
    batch: Batch,
    *,
    device_type: str | None = None,
    context: View | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the summed log-probability of the targets of each sequence, with gradients.

    Costs as much as `token_logps`.

    Args:
        model: a causal LM, sharded or not.
        batch: the micro-batch.
        device_type: type of the device whose loss head is used; None: that of the batch.
        context: ranks that share the rows, over which sums and numbers are added (`add_parts`);
            collective then. None: they cover the tokens of this batch.

    Returns:
        The sum of each sequence, followed by the sum over targets that belong to no sequence
        (prompts), fp32 [n_sequences + 1], or float64 if ranks share the rows; and the number of
        targets in each sum, int64 [n_sequences + 1].

    Raises:
        TrainingError: the batch does not say which sequence a token belongs to.
    """
    logps = token_logps(model, batch, device_type=device_type).flatten()
    sums = logps.new_zeros(batch.n_sequences + 1).index_add(
        0, _sequence_index_per_position(batch), logps
    )
    counts = _count_targets(batch)
    if context is None or context.size == 1:
        return sums, counts
    # A double holds any count exactly.
    sums, all_counts = add_parts(torch.stack([sums.double(), counts.double()]), context).unbind()
    return sums, all_counts.detach().long()


def base_model_logps(
    model: nn.Module,
    batch: Batch,
    *,
    device_type: str | None = None,
    context: View | None = None,
) -> torch.Tensor:
    """Compute the log-probability of each sequence by a forward with the adapters switched off.

    See `sequence_logps` for the arguments.

    Returns:
        [n_sequences], without a gradient; see `sequence_logps` for the dtype.

    Raises:
        TrainingError: the model has no adapters.
    """
    if not has_adapters(model):
        raise TrainingError("expected a batch with reference values, or a model with adapters")
    with torch.no_grad(), disabled_adapters(model):
        return sequence_logps(model, batch, device_type=device_type, context=context)[0][:-1]


def _sequence_index_per_position(batch: Batch) -> torch.Tensor:
    """Return the index of each position's sequence, [B * T]; `n_sequences` outside of sequences.

    Raises:
        TrainingError: the batch does not say which sequence a token belongs to.
    """
    if batch.sequences is None:
        raise TrainingError("expected a batch of pairs, got one without `sequences`")
    return batch.sequences.where(batch.sequences >= 0, batch.n_sequences).flatten()


def _count_targets(batch: Batch) -> torch.Tensor:
    """Count the targets of each sequence, then those of no sequence: int64 [n_sequences + 1]."""
    targets = (batch.targets != IGNORED).flatten().long()
    return targets.new_zeros(batch.n_sequences + 1).index_add(
        0, _sequence_index_per_position(batch), targets
    )


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of a micro-batch of pairs or labelled answers; see [Note: preference objectives].

    If ranks share rows, see also [Note: sequences in parts] in `row_parts`.
    """

    cfg: PreferenceConfig
    among: View
    """The ranks whose micro-batches make up the global batch (`Mesh.data`)."""
    device_type: str | None = None
    """Type of the device whose loss head is used, such as "cuda"; None: that of the batch."""
    max_pairs: int = 0
    """The largest number of pairs in a micro-batch of any rank; for losses that sort the pairs of
    several ranks (`pair_losses.SORTED_LOSSES`)."""
    continues_adapter: bool = False
    """True if training starts from a trained adapter (`lora.from`), so that the base model alone is
    not the reference."""
    context: View = field(default_factory=View)
    """The ranks that share the tokens of each row (`Mesh.context`)."""

    def counts(self, batch: Batch) -> torch.Tensor:
        """Return the number of terms of each mean in a micro-batch, for `Update`.

        Of ranks that share rows, the first one counts the pairs, and each one its own tokens.

        Returns:
            int64 [2]: the number of pairs, and the number of tokens in the cross entropy. For KTO,
            labelled answers count instead of pairs. For reward models int64 [1]: only the pairs.
        """
        pairs = _int_tensor(batch.n_sequences // 2 if self.context.rank == 0 else 0, batch)
        if self.cfg.loss_type == "reward":
            return pairs[None]
        counts = _count_targets(batch)
        return torch.stack([pairs, counts[:-1:2].sum() + counts[-1]])

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """Compute the loss and its metrics, summed over a micro-batch.

        Collective for KTO, aot and aot_unpaired, and if ranks share rows. If a reference is needed
        and the batch has none, it is computed by a forward with the adapters switched off, unless
        the base model is not the reference.

        Returns:
            The summed preference loss and cross entropy, [2], with their counts, [2]. For reward
            models, the loss and the count of the pairs only, [1] each. A batch without pairs gives
            exact zeros, and gradients of zeros. Of ranks that share rows, the first one has the
            values, and all have gradients.

        Raises:
            TrainingError: a reference is needed, and neither the batch nor the model has one.
        """
        return count_once(self._loss_of_sequences(model, batch), self.context)

    def _loss_of_sequences(self, model: nn.Module, batch: Batch) -> LossSum:
        """Compute the loss of a micro-batch on every rank that shares its rows; see `__call__`."""
        if self.cfg.loss_type == "reward":
            return self._reward_loss(model, batch)
        reference = batch.columns.get("reference")
        if self.cfg.needs_reference and reference is None:
            reference = self._base_reference(model, batch)
        if not self.cfg.paired:
            assert reference is not None
            return self._kto_loss(model, batch, reference.view(-1, 2))
        sums, counts = self._sequence_logps(model, batch)
        sums = sums.double()  # see [Note: preference objectives] in `pair_losses`
        policy = PairLogps(sums[0:-1:2], sums[1:-1:2], counts[0:-1:2], counts[1:-1:2])
        rewards = policy
        if self.cfg.needs_reference and reference is not None:
            rewards = policy.minus(reference)
        loss = pair_losses(self.cfg, RankPairs(rewards, policy, self.among, self.max_pairs))
        weight = self.cfg.cross_entropy_weight
        cross_entropy = -weight * (policy.chosen.sum() + sums[-1]) if weight else _zero_loss(batch)
        total = torch.stack([loss, cross_entropy]).float()
        return LossSum(total, self.counts(batch), self._pair_metrics(rewards, policy))

    def _sequence_logps(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the result of `sequence_logps` for complete rows."""
        return sequence_logps(model, batch, device_type=self.device_type, context=self.context)

    def _base_reference(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Compute the log-probabilities of a batch by the base model, [n_sequences].

        Raises:
            TrainingError: the reference is another model, or the model has no adapters.
        """
        if self.cfg.reference is not None or self.continues_adapter:
            setting = "preference.reference" if self.cfg.reference is not None else "lora.from"
            raise TrainingError(
                f"expected a batch with reference values, got one without: with {setting}, the "
                "base model is not the reference. Call `prepare` of the objective before the first "
                "step, and use the data that it was given"
            )
        return base_model_logps(model, batch, device_type=self.device_type, context=self.context)

    def _reward_loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Compute the Bradley-Terry loss of a reward model, with its metrics."""
        # The last token of a sequence is in one part, and its reward is 0 in all other parts.
        rewards = add_parts(sequence_rewards(model, batch), self.context)
        chosen, rejected = rewards.double().view(-1, 2).unbind(1)
        margin = batch.columns.get("margin", 0.0)
        terms = -F.logsigmoid(chosen - rejected - margin)
        # Without a coefficient the square, which may overflow, has no part in the loss.
        if coefficient := self.cfg.center_rewards_coefficient:
            terms = terms + coefficient * (chosen + rejected) ** 2
        metrics = _reward_metrics(chosen.detach(), rejected.detach())
        return LossSum(terms.sum()[None].float(), self.counts(batch), metrics)

    def _pair_metrics(self, rewards: PairLogps, policy: PairLogps) -> dict[str, torch.Tensor]:
        """Compute the metrics of a loss of pairs: rewards, margin, accuracy, logps, each summed.

        Args:
            rewards: log-probabilities minus those of the reference, if the loss has one.
            policy: log-probabilities by the trained model.
        """
        if self.cfg.loss_type in ("simpo", "orpo"):
            # These losses have no reference and compare means over tokens.
            rewards, policy = rewards.means(), policy.means()
        chosen, rejected = (self.cfg.beta * r.detach() for r in (rewards.chosen, rewards.rejected))
        return _reward_metrics(chosen, rejected) | {
            "logps_chosen": policy.chosen.detach().sum(),
            "logps_rejected": policy.rejected.detach().sum(),
        }

    def _kto_loss(self, model: nn.Module, batch: Batch, reference: torch.Tensor) -> LossSum:
        """Compute the KTO loss of answers with a label (desirable or not), with its metrics.

        In the batch, each answer is followed by a partner: the same prompt with the answer of
        another row. The mean reward of the partners over the micro-batches of all ranks estimates
        the KL divergence, from which gains and losses are measured. This estimate has no gradient,
        so partners are computed in the forward but not in the backward. Collective.

        Args:
            model: the trained model.
            batch: answers and partners in turn.
            reference: log-probabilities of answers and partners by the reference model, [answers,
                2].

        Raises:
            TrainingError: the batch has no labels.
        """
        cfg, desirable, beta = self.cfg, batch.columns.get("desirable"), self.cfg.beta
        answers = batch.n_sequences // 2
        if desirable is None or len(desirable) != answers:
            raise TrainingError("preference.loss_type kto needs answers with a label, not pairs")
        logps, partners = self._answer_logps(model, batch)
        rewards = logps - reference[:, 0]
        gains = (partners - reference[:, 1]).sum()
        total, count = self.among.sum(
            torch.stack([gains, _int_tensor(answers, batch).to(gains.dtype)])
        )
        point = (total / count.clamp(min=1)).clamp(min=0)
        # 1 - sigmoid(x) is computed as sigmoid(-x), which is exact even if sigmoid(x) rounds to 1.
        terms = torch.where(
            desirable,
            cfg.desirable_weight * torch.sigmoid(beta * (point - rewards)),
            cfg.undesirable_weight * torch.sigmoid(beta * (rewards - point)),
        )
        metrics, counts = _label_metrics(desirable, beta * rewards.detach(), logps.detach())
        metrics["kl"] = point.expand_as(rewards).sum()
        metrics["accuracy"] = ((rewards.detach() > point) == desirable).float().sum()
        total = torch.stack([terms.sum(), _zero_loss(batch)]).float()
        return LossSum(total, self.counts(batch), metrics, counts)

    def _answer_logps(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probabilities of answers, and those of their partners without gradients.

        This always takes two forwards, even for an empty batch or a batch that was not split into
        halves, because all ranks must run the same number.

        Returns:
            Log-probabilities of answers and of partners, float64 [answers] each.
        """
        answers, partners = batch.halves or (batch, batch)
        with torch.no_grad():
            second = self._sequence_logps(model, partners)[0][:-1]
        first = self._sequence_logps(model, answers)[0][:-1]
        first, second = first.double(), second.double()
        return (first, second) if batch.halves is not None else (first[::2], second[1::2])


def _int_tensor(value: int, batch: Batch) -> torch.Tensor:
    """Create a 0-d int64 tensor on the device of a batch, without waiting for the device."""
    return torch.full((), value, dtype=torch.int64, device=batch.targets.device)


def _zero_loss(batch: Batch) -> torch.Tensor:
    """Create a 0-d float64 zero on the device of a batch."""
    return torch.zeros((), dtype=torch.float64, device=batch.targets.device)


def _reward_metrics(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sum rewards and margins over the pairs; count pairs whose chosen answer has more reward."""
    return {
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
        "margin": (chosen - rejected).sum(),
        "accuracy": (chosen > rejected).float().sum(),
    }


def _label_metrics(
    desirable: torch.Tensor, rewards: torch.Tensor, logps: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Sum rewards and log-probabilities separately for desirable and undesirable answers.

    The metric `margin` is the mean reward of desirable answers minus that of undesirable ones.

    Returns:
        Name of a metric -> its 0-d sum; and name -> the number of its terms. `margin` has two sums
        and two counts, [2]: desirable, then undesirable with a negative sum.
    """
    sums, counts = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for side, members in (("chosen", desirable), ("rejected", ~desirable)):
        for name, values in (("reward", rewards), ("logps", logps)):
            sums[f"{name}_{side}"] = torch.where(members, values, 0.0).sum()
            counts[f"{name}_{side}"] = members.sum()
    sides = ("reward_chosen", "reward_rejected")
    sums["margin"] = torch.stack([sums[sides[0]], -sums[sides[1]]])
    counts["margin"] = torch.stack([counts[side] for side in sides])
    return sums, counts
