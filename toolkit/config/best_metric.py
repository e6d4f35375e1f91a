"""By which metric an evaluation is better than another, as the settings say it."""

from toolkit.config.settings import CheckpointConfig


def best_metric(cfg: CheckpointConfig) -> tuple[str, bool]:
    """Return the name of `metric_for_best_model` in a metrics line, and whether more is better."""
    name = cfg.metric_for_best_model
    name = name if name.startswith("eval_") else f"eval_{name}"
    greater = cfg.greater_is_better
    return name, not name.endswith(("loss", "perplexity")) if greater is None else greater
