"""The objectives of preference tuning: their loss, their metrics and the reference they need."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from toolkit import ranks
from toolkit.config.measures import preference_metrics
from toolkit.config.preference import PreferConfig
from toolkit.data.prepare import TrainingData
from toolkit.data.samples.batch import Batch
from toolkit.data.samples.sample_shape import Packing
from toolkit.mesh import Mesh, View
from toolkit.objectives.frozen_models import check_packed_rows
from toolkit.objectives.objective import Objective, register
from toolkit.objectives.reference import Reference, reference_bytes
from toolkit.objectives.reference_model import reference_settings, shard_reference
from toolkit.sharding import Sharded
from toolkit.training.loss import LossSum
from toolkit.training.pair_losses import SORTED_LOSSES
from toolkit.training.preference import PreferenceLoss


@register(PreferConfig)
class PreferenceTuning(Objective):
    """The objective of preference tuning, on pairs or labelled answers (`preference.loss_type`).

    Most losses compare the model with a reference, by default the model that training starts from.
    `restore`
    reads the reference's log-probabilities from the checkpoint. `prepare` computes those that are
    missing in a pass over the rows. See `toolkit.objectives.reference`.
    """

    supports_context_parallel = True
    # The model and its reference must be the same function.
    has_dropout = False

    def __init__(
        self, cfg: PreferConfig, mesh: Mesh | None = None, device_type: str | None = None
    ) -> None:
        super().__init__(cfg, mesh, device_type)
        self.loss = PreferenceLoss(
            cfg.preference,
            View() if mesh is None else mesh.data,
            device_type,
            # `restore` replaces this number: `auto` is decided when the rows are known.
            largest_pair_count(cfg, "bfd" if cfg.data.packing == "auto" else cfg.data.packing),
            continues_adapter=cfg.lora.from_ is not None,
            context=View() if mesh is None else mesh.context,
        )
        self.metrics = preference_metrics(cfg.preference.loss_type)
        self._reference: Reference | None = None

    @property
    def needs_start(self) -> bool:
        """Whether the checkpoint lacks reference values that only the initial weights give."""
        if self._reference is None or self.cfg.preference.reference is not None:
            return False
        return not self._reference.is_complete

    def check_packing(self, data: TrainingData) -> None:
        """Refuse a reference model that lets packed samples see each other; see `Objective`."""
        super().check_packing(data)
        if self.cfg.preference.reference is not None:
            settings, lora = ranks.on_main(lambda: reference_settings(self.cfg))
            if lora is None:  # an adapter is on the base of the run
                check_packed_rows("preference.reference", settings, data)

    def shard_temporary_models(self) -> list[Sharded]:
        """Build the model in `preference.reference` on meta, and shard it; [] without one."""
        if self.cfg.preference.reference is None:
            return []
        assert self.mesh is not None
        return [shard_reference(self.cfg, self.mesh)]

    def restore(self, model: nn.Module, data: TrainingData, root: Any, saved: Any) -> None:
        """Read the reference values of the checkpoint to resume from, if any. Collective.

        Raises:
            CheckpointError: the checkpoint has no reference values, or values for other rows,
                another base model or other settings.
        """
        self._reference = Reference(self.cfg, model, data, root, saved)
        max_pairs = largest_pair_count(self.cfg, data.feed.shape.packing)
        self.loss = replace(self.loss, max_pairs=max_pairs)

    def prepare(self, sharded: Sharded) -> str:
        """Compute missing reference values, and attach the values to the rows. Collective.

        Returns:
            A line for the log; empty if the loss needs no reference.

        Raises:
            RuntimeError: `restore` was not called.
            CheckpointError: missing values cannot be computed, because the run started from another
                model; or they cannot be written.
            TrainingError: a value is not finite.
        """
        if self._reference is None:
            raise RuntimeError("call restore before prepare")
        line = self._reference.complete(sharded)
        self.files = self._reference.files
        if SORTED_LOSSES & {*self.cfg.preference.loss_types}:
            packing = self._reference.data.feed.shape.packing
            ranks.log_once(*self._warn_of_short_lists(packing))
        return line

    def _warn_of_short_lists(self, packing: Packing) -> list[str]:
        """Return a warning if all ranks together have one pair per micro-batch; otherwise [].

        A loss that sorts pairs has no effect on one pair; the caller checks that such a loss is
        configured. With packing, the list is always empty.

        Args:
            packing: `data.packing`, with `auto` decided.
        """
        if packing != "none" or self.cfg.train.micro_batch * self.loss.among.size > 1:
            return []
        names = ", ".join(sorted(SORTED_LOSSES & {*self.cfg.preference.loss_types}))
        return [
            f"WARNING: preference.loss_type {names} sorts the pairs of a micro-batch of all ranks, "
            "which has one pair here, so its loss is that of single pairs. Set "
            "train.per_device_train_batch_size above 1, and gradient_accumulation_steps lower"
        ]

    def file_bytes(self, data: TrainingData) -> int:
        """Estimate an upper limit of the bytes of reference values in each checkpoint."""
        return reference_bytes(self.cfg, data)

    def counts(self, batch: Batch) -> torch.Tensor:
        """Count the terms of each mean in a micro-batch; see `PreferenceLoss.counts`."""
        return self.loss.counts(batch)

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """Compute the loss of a micro-batch and its metrics, as sums (`PreferenceLoss`)."""
        return self.loss(model, batch)


def largest_pair_count(cfg: PreferConfig, packing: Packing) -> int:
    """Compute an upper limit of the number of pairs in a micro-batch, the same on every rank.

    Args:
        cfg: settings of the run.
        packing: `data.packing`, with `auto` decided.
    """
    train = cfg.train
    rows = max(train.micro_batch, train.per_device_eval_batch_size or 0)
    # Each side of a pair has two tokens at least, since the first token of a row has no target.
    return rows if packing == "none" else rows * max(1, cfg.data.sequence_length // 4)
