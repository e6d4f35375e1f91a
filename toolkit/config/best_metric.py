"""Check that evaluations have the metric that `checkpoint.metric_for_best_model` names."""

import ast
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from toolkit.config.distill import DISTILL_METRICS, DistillConfig
from toolkit.config.measures import TOKEN_METRICS, Metric, preference_metrics
from toolkit.config.outputs import CheckpointConfig
from toolkit.config.preference import PreferConfig
from toolkit.config.settings import RunConfig
from toolkit.errors import ConfigError

# Statements of the toolkit's recipes that decide which metrics an evaluation has.
_BUILDS_OBJECTIVE = "objective = objectives.build(cfg, mesh)"
_PREPARES_DATA = {
    f"data = prepare_data(cfg, {model}, model_cfg, run, mesh, objective.metrics)"
    for model in ("model", "base")
}


def check_best_metric(
    checkpoint: CheckpointConfig,
    sources: Sequence[str],
    metrics: Iterable[Metric],
    *,
    is_used: bool,
) -> None:
    """Raise ConfigError if no evaluation has the metric `checkpoint.metric_for_best_model`.

    Args:
        checkpoint: settings of the checkpoints.
        sources: names of the sources that are evaluated on.
        metrics: metrics that an evaluation computes.
        is_used: True if a setting uses the metric, also when it has its default.
    """
    prefixes = ["eval", *(f"eval_{name}" for name in sources if len(sources) > 1)]
    available = {f"{prefix}_{metric.name}" for prefix in prefixes for metric in metrics}
    metric, _ = checkpoint.best_metric()
    is_set = checkpoint.metric_for_best_model != type(checkpoint).metric_for_best_model
    if metric not in available and (is_set or is_used):
        raise ConfigError(
            f"checkpoint.metric_for_best_model {metric}: expected a metric that an evaluation of "
            f"this run has: {', '.join(sorted(available))}"
        )


def recipe_metrics(cfg: RunConfig, script: Path) -> tuple[Metric, ...] | None:
    """Determine the evaluation metrics of a recipe without running it.

    Args:
        cfg: settings of the run.
        script: file of the recipe.

    Returns:
        The metrics; None if the script may have others than the toolkit's recipes, because it
        imports further modules, registers an objective or passes further metrics.
    """
    tree = ast.parse(script.read_bytes(), str(script))
    modules = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
    statements = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    if (
        modules - {"toolkit", *sys.stdlib_module_names}
        or any(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
        or _BUILDS_OBJECTIVE not in statements
        or not {*_PREPARES_DATA} & statements
    ):
        return None
    if isinstance(cfg, DistillConfig):
        return DISTILL_METRICS
    if isinstance(cfg, PreferConfig):
        return preference_metrics(cfg.preference.loss_type)
    return TOKEN_METRICS
