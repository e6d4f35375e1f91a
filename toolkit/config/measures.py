"""The metrics of evaluations: their names, and which direction is better.

A metric is logged as `eval_NAME`, and for each of several evaluation files as `eval_FILE_NAME`. An
objective lists its metrics (`toolkit.objectives`); everything that compares or shows them reads the
direction here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from toolkit.errors import ConfigError


@dataclass(frozen=True)
class Metric:
    """Description of an evaluation metric: its name, its better direction, and its format."""

    name: str
    """Its name, without the prefix `eval_`."""
    direction: Literal["max", "min"]
    """`max` if a larger value is better, `min` if a smaller one is."""
    format_spec: str = ""
    """Format in the progress bar and the summary, such as ".1%". Empty: only the log has it."""


LOSS = Metric("loss", "min")
PERPLEXITY = Metric("perplexity", "min", ",.1f")
ACCURACY = Metric("accuracy", "max", ".1%")
TOKEN_METRICS = (LOSS, PERPLEXITY, ACCURACY)
"""Metrics of a cross entropy of tokens."""
_REWARDS = (
    Metric("reward_chosen", "max"),
    Metric("reward_rejected", "min"),
    Metric("margin", "max", ".3f"),
)
_LOGPS = (Metric("logps_chosen", "max"), Metric("logps_rejected", "min"))


def preference_metrics(loss_type: str | Sequence[str]) -> tuple[Metric, ...]:
    """List the metrics of a preference objective, or of a weighted sum of several."""
    if loss_type == "reward":
        return (LOSS, *_REWARDS, ACCURACY)
    kl = (Metric("kl", "min"),) if loss_type == "kto" else ()
    return (LOSS, *_REWARDS, ACCURACY, *_LOGPS, *kl)


_declared = {metric.name: metric for metric in (*TOKEN_METRICS, *preference_metrics("kto"))}


def register_metrics(metrics: Iterable[Metric]) -> None:
    """Register the metrics of an objective, so that the direction and format of each are known.

    Raises:
        ConfigError: a metric of the same name is registered with the other direction.
    """
    for metric in metrics:
        registered = _declared.setdefault(metric.name, metric)
        if registered.direction != metric.direction:
            raise ConfigError(
                f"the metric {metric.name} of this objective is better when it is "
                f"{'larger' if metric.direction == 'max' else 'smaller'}, but the toolkit's metric "
                "of this name is better the other way; give it another name"
            )


def shown_metrics() -> list[Metric]:
    """List the registered metrics that the progress bar and the summary show."""
    return [metric for metric in _declared.values() if metric.format_spec]


def is_greater_better(name: str) -> bool:
    """Return True if a larger value of the metric `name` is better.

    The registered metric that `name` ends with decides, so `eval_FILE_loss` counts as `loss`. For
    an unregistered metric, larger is better unless its name ends in `loss` or `perplexity`.
    """
    matches = [metric for metric in _declared if f"_{name}".endswith(f"_{metric}")]
    if matches:
        return _declared[max(matches, key=len)].direction == "max"
    return not name.endswith(("loss", "perplexity"))
