"""The metrics of evaluations: their names, and whether more of each is better.

A metric of an evaluation is logged as `eval_NAME`, and per evaluation file as `eval_FILE_NAME`.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A value that an evaluation returns, by its name without `eval_`."""

    name: str
    direction: Literal["max", "min"]
    """Whether a larger value is better, or a smaller one."""


LOSS, PERPLEXITY, ACCURACY = (
    Metric("loss", "min"),
    Metric("perplexity", "min"),
    Metric("accuracy", "max"),
)
TOKEN_METRICS = (LOSS, PERPLEXITY, ACCURACY)
"""Metrics of a cross entropy of tokens."""
_REWARDS = (
    Metric("reward_chosen", "max"),
    Metric("reward_rejected", "min"),
    Metric("margin", "max"),
)
_LOGPS = (Metric("logps_chosen", "max"), Metric("logps_rejected", "min"))


def preference_metrics(loss_type: str) -> tuple[Metric, ...]:
    """Return the metrics that an evaluation of a preference objective gives."""
    if loss_type == "reward":
        return (LOSS, *_REWARDS, ACCURACY)
    kl = (Metric("kl", "min"),) if loss_type == "kto" else ()
    return (LOSS, *_REWARDS, ACCURACY, *_LOGPS, *kl)


_DIRECTIONS = {
    metric.name: metric.direction for metric in (*TOKEN_METRICS, *preference_metrics("kto"))
}


def is_greater_better(name: str) -> bool:
    """Return whether more of a metric is better, by the last words of its name (`eval_FILE_NAME`).

    Metrics that are not known here, as those of a recipe of the user's own, are better when larger,
    unless their name ends in `loss` or `perplexity`.
    """
    matches = [metric for metric in _DIRECTIONS if f"_{name}".endswith(f"_{metric}")]
    if matches:
        return _DIRECTIONS[max(matches, key=len)] == "max"
    return not name.endswith(("loss", "perplexity"))
