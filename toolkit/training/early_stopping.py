"""Early stopping: end a run whose evaluations no longer improve."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit import ranks
from toolkit.config.settings import CheckpointConfig, FinetuneTrainConfig
from toolkit.errors import TrainingError

KEY = "early_stopping"  # key of the state in `TrainState.extra`


@dataclass
class EarlyStopping:
    """Tracks the best value of a metric, and counts the evaluations since then."""

    metric: str
    greater_is_better: bool
    patience: int | None
    """Number of evaluations without improvement that end the run; None: never."""
    best: float | None = None
    evaluations_since_best: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    """`TrainState.extra`. Its entry `KEY` is kept up to date, so checkpoints contain this state."""

    @property
    def should_stop(self) -> bool:
        """True if `patience` evaluations in a row did not improve the metric.

        The count is restored from a checkpoint, so a run that stopped early stops again after a
        resume.
        """
        return self.patience is not None and self.evaluations_since_best >= self.patience

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Record the metrics of one evaluation; return True if the run should stop.

        A value that is NaN or infinite is no improvement. Empty metrics, which an interrupted
        evaluation returns, are ignored. The state in `extra` is updated, too.

        Raises:
            TrainingError: the metrics do not include `metric`. Raised on all ranks alike.
        """
        if self.patience is None or not metrics:
            return self.should_stop
        if self.metric not in metrics:
            available = ", ".join(sorted(metrics)) or "none"
            error = TrainingError(
                "early stopping expects the metric "
                f"{self.metric} (checkpoint.metric_for_best_model), the evaluation has {available}"
            )
            raise ranks.mark_collective(error)
        value = float(metrics[self.metric])
        sign = 1 if self.greater_is_better else -1
        is_better = self.best is None or sign * (value - self.best) > 0
        if math.isfinite(value) and is_better:
            self.best, self.evaluations_since_best = value, 0
        else:
            self.evaluations_since_best += 1
        self.extra[KEY] = self.state_dict()
        return self.should_stop

    def summarize(self, step: int) -> str:
        """Format a log line with the reason to stop at `step`; "" if there is no early stop."""
        if not self.should_stop:
            return ""
        return (
            f"stopped early at step {step}: {self.metric} was not better than {self.best} in "
            f"{self.evaluations_since_best} evaluation(s)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint as JSON values; empty if early stopping is off."""
        if self.patience is None:
            return {}
        state = {"metric": self.metric, "best": self.best}
        return state | {"waited": self.evaluations_since_best}


def build_early_stopping(
    train: FinetuneTrainConfig, saving: CheckpointConfig, extra: dict[str, Any]
) -> EarlyStopping:
    """Build the early stopping of a run, with the counts from its checkpoint if there are any.

    Args:
        train: the section `train` of the config; `early_stopping_patience` is used.
        saving: the section `checkpoint`; `best_metric()` gives the metric, and if greater is
            better.
        extra: `TrainState.extra` after the resume. Its entry is set here, and the returned object
            keeps it up to date.

    Raises:
        TrainingError: the checkpoint compares another metric.
    """
    metric, greater_is_better = saving.best_metric()
    patience = train.early_stopping_patience
    state = extra.get(KEY, {})
    stopping = EarlyStopping(metric, greater_is_better, patience, extra=extra)
    if patience is not None and state:
        if state["metric"] != metric:
            error = TrainingError(
                f"early stopping of this run compares {state['metric']} so far (best "
                f"{state['best']}), but checkpoint.metric_for_best_model is now {metric}, which "
                "has no best value yet; set it back, or set another output_dir"
            )
            raise ranks.mark_collective(error)
        stopping.best = state["best"]
        stopping.evaluations_since_best = state["waited"]
    extra[KEY] = stopping.state_dict()
    return stopping
