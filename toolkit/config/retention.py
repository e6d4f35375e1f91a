"""Which checkpoints stay, as the settings say it; `checkpoint` carries it out."""

from dataclasses import dataclass

from toolkit.config.settings import CheckpointConfig


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: those that any of the rules names, and never fewer than two."""

    last: int | None = 2  # the newest so many; None: all
    every: int | None = None  # steps that this divides, for good
    best: int = 0  # so many with the best `metric`; of equals the newer
    metric: str = "eval_loss"
    greater_is_better: bool = False


def retention(cfg: CheckpointConfig) -> Retention:
    """Return the policy of a config."""
    name = cfg.metric_for_best_model
    name = name if name.startswith("eval_") else f"eval_{name}"
    greater = cfg.greater_is_better
    if greater is None:
        greater = not name.endswith(("loss", "perplexity"))
    last, every = cfg.save_total_limit, cfg.save_permanent_steps
    return Retention(last, every, int(cfg.keep_best), name, greater)
