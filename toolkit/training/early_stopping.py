"""When a run stops because its evaluations no longer get better."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit import ranks
from toolkit.config.settings import CheckpointConfig, FinetuneTrainConfig
from toolkit.errors import TrainingError

KEY = "early_stopping"  # where `TrainState.extra` keeps the state


@dataclass
class EarlyStopping:
    """The best value so far, and how many evaluations in a row were not better."""

    metric: str
    greater_is_better: bool
    patience: int | None  # evaluations without improvement that end the run; None: never
    best: float | None = None
    waited: int = 0  # evaluations since the best
    kept: dict[str, Any] = field(default_factory=dict)
    """`TrainState.extra`, whose `KEY` is what a checkpoint keeps of this."""

    @property
    def stop(self) -> bool:
        """Whether the run should end; also after a resume of a run that had ended so."""
        return self.patience is not None and self.waited >= self.patience

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Take one evaluation, return `stop`; not finite is no better, and an empty one, which a
        signal ended, is none. TrainingError: no metric.
        """
        if self.patience is None or not metrics:
            return self.stop
        if self.metric not in metrics:
            known = ", ".join(sorted(metrics)) or "none"
            error = TrainingError(
                f"expected the metric {self.metric} (checkpoint.metric_for_best_model) to stop "
                f"early by, the evaluation has {known}"
            )
            raise ranks.mark_collective(error)
        value = float(metrics[self.metric])
        sign = 1 if self.greater_is_better else -1
        better = self.best is None or sign * (value - self.best) > 0
        if math.isfinite(value) and better:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        self.kept[KEY] = self.state_dict()
        return self.stop

    def line(self, step: int) -> str:
        """Return what a run prints that ends here, or had ended here before, else nothing."""
        if not self.stop:
            return ""
        return (
            f"stopped early at step {step}: {self.metric} was not better than {self.best} in "
            f"{self.waited} evaluation(s)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps under `KEY` of `TrainState.extra`, in JSON's types."""
        if self.patience is None:
            return {}
        return {"metric": self.metric, "best": self.best, "waited": self.waited}


def build_early_stopping(
    train: FinetuneTrainConfig, saving: CheckpointConfig, kept: dict[str, Any]
) -> EarlyStopping:
    """Return the count, continued from a checkpoint's `extra`, where it keeps itself up to date;
    TrainingError: of another metric.
    """
    (metric, greater), state = saving.best_metric(), kept.get(KEY, {})
    patience = train.early_stopping_patience
    stopping = EarlyStopping(metric, greater, patience, kept=kept)
    if patience is not None and state:
        if state["metric"] != metric:
            error = TrainingError(
                f"this run stops early by {state['metric']} so far (best {state['best']}), and now "
                f"checkpoint.metric_for_best_model asks for {metric}, which has no best value yet; "
                "set it back, or give another output_dir"
            )
            raise ranks.mark_collective(error)
        stopping.best, stopping.waited = state["best"], state["waited"]
    kept[KEY] = stopping.state_dict()
    return stopping
