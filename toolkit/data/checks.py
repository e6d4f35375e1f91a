"""What both recipes ask of their data before training: the same on every rank, and evaluation data
where a setting needs it.

Owns these refusals. Knows neither how the data is read nor the loop.
"""

from typing import Any

from toolkit import ranks
from toolkit.config.retention import retention
from toolkit.data.packing_choice import AnyFeed
from toolkit.errors import ConfigError, DataError


def check_feed(cfg: Any, feed: AnyFeed) -> None:
    """Refuse data that cannot be trained on as `cfg` asks. Collective.

    Raises:
        DataError: there are fewer samples than ranks, or ranks read different data.
        ConfigError: a setting compares or shows evaluations, and there is nothing to evaluate on.
    """
    ranks.on_all(lambda: feed.check_enough(ranks.world_size()))
    states = ranks.gather(feed.position.state_dict())
    other = [rank for rank, state in enumerate(states) if state != states[0]]
    if other:
        theirs, ours = states[other[0]], states[0]
        names = [n for n in ours if theirs.get(n) != ours[n]]
        raise DataError(
            f"expected the same data on every rank, rank {other[0]} reads another than rank 0 "
            f"({', '.join(names)}: {[theirs.get(n) for n in names]} and "
            f"{[ours[n] for n in names]}); the files of all machines must be equal, or on storage "
            "that they share"
        )
    _check_evaluations(cfg, feed)


def _check_evaluations(cfg: Any, feed: AnyFeed) -> None:
    needing = {
        "checkpoint.keep_best": bool(cfg.checkpoint.keep_best),
        "train.early_stopping_patience": getattr(cfg.train, "early_stopping_patience", None),
        "train.eval_prompts": getattr(cfg.train, "eval_prompts", None),
    }
    asked = [name for name, value in needing.items() if value]
    if not feed.eval_sets and asked:
        raise ConfigError(
            f"{' and '.join(asked)} need evaluations, and there is nothing to evaluate on: set "
            "data.eval_files, or a data.eval_split above 0 (nothing is split off a stream)"
        )
    kinds = ("loss", "perplexity")
    known = {f"eval_{kind}" for kind in kinds}
    if len(feed.eval_sets) > 1:
        known |= {f"eval_{name}_{kind}" for name in feed.eval_sets for kind in kinds}
    metric = retention(cfg.checkpoint).metric
    if metric not in known and {*asked} - {"train.eval_prompts"}:
        raise ConfigError(
            f"checkpoint.metric_for_best_model {metric} is none of what an evaluation gives: "
            f"{', '.join(sorted(known))}"
        )
