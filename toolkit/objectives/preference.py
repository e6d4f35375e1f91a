"""The objectives of preference tuning: their loss, their metrics and the reference they need."""

from typing import Any

import torch
from torch import nn

from toolkit.config.measures import preference_metrics
from toolkit.config.preference import PreferConfig
from toolkit.data.prepare import TrainingData
from toolkit.data.samples.batch import Batch
from toolkit.mesh import Mesh, View
from toolkit.objectives.objective import Objective, register
from toolkit.objectives.reference import Reference, reference_bytes
from toolkit.sharding import Sharded
from toolkit.training.loss import LossSum
from toolkit.training.preference import PreferenceLoss


@register(PreferConfig)
class PreferenceTuning(Objective):
    """A loss of pairs of answers, or of single answers with a label (`preference.loss_type`).

    Most losses compare the model with its reference, the model that training starts from. `restore`
    and `prepare` get the log-probabilities of the reference, from the checkpoint or by a pass over
    the rows; see `toolkit.objectives.reference`.
    """

    # The model and its reference must be the same function.
    has_dropout = False

    def __init__(
        self, cfg: PreferConfig, mesh: Mesh | None = None, device_type: str | None = None
    ) -> None:
        super().__init__(cfg, mesh, device_type)
        among = View() if mesh is None else mesh.loss
        self.loss = PreferenceLoss(cfg.preference, among, device_type)
        self.metrics = preference_metrics(cfg.preference.loss_type)
        self._reference: Reference | None = None

    @property
    def needs_start(self) -> bool:
        """True if rows of the run have no reference values in the checkpoint yet."""
        return self._reference is not None and not self._reference.is_complete

    def restore(self, model: nn.Module, data: TrainingData, root: Any, saved: Any) -> None:
        """Read the reference values of the checkpoint that the run resumes from. Collective.

        Raises:
            CheckpointError: the checkpoint has none, or those of other rows or another base.
        """
        self._reference = Reference(self.cfg, model, data, root, saved)

    def prepare(self, sharded: Sharded) -> str:
        """Compute the reference values that are missing, and give every row its own. Collective."""
        if self._reference is None:
            raise RuntimeError("call restore before prepare")
        line = self._reference.complete(sharded)
        self.files = self._reference.files
        return line

    def file_bytes(self, data: TrainingData) -> int:
        """Estimate the bytes of the reference values in each checkpoint."""
        return reference_bytes(self.cfg, data)

    def counts(self, batch: Batch) -> torch.Tensor:
        """Count pairs, and the tokens of the cross entropy; see `PreferenceLoss.counts`."""
        return self.loss.counts(batch)

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """Compute the loss of a micro-batch and its metrics; see `PreferenceLoss`."""
        return self.loss(model, batch)
