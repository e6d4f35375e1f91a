"""The panels of a report as numbers: curves over steps, for any plotting library."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from toolkit.report.runs import RunRecord, evaluation_key, get_finite_number

# Of the runs, in their order. A single run's evaluations take the colours after the first.
COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#ca8a04", "#0891b2", "#db2777")
# The smoothing window is the number of logged steps divided by this.
_WINDOWS = 25


@dataclass(frozen=True)
class Curve:
    """One line of a panel: values over steps; a value of None is a gap."""

    name: str
    kind: Literal["logged", "smoothed", "evaluation"]
    steps: list[int]
    values: list[float | int | None]
    colour: str


@dataclass(frozen=True)
class Panel:
    """One plot of the report: curves that share their axes."""

    key: str
    title: str
    tick_format: str  # in the format language of d3, which plotly uses
    unit: str
    curves: list[Curve]

    @property
    def has_legend(self) -> bool:
        """True if the panel needs a legend: it has several curves, or only evaluations."""
        return len(self.curves) > 1 or all(curve.kind == "evaluation" for curve in self.curves)

    @property
    def is_share(self) -> bool:
        """True if the values are fractions between 0 and 1, such as an accuracy."""
        return _is_share(self.key)

    def share_range(self) -> tuple[float, float]:
        """Compute the (lower, upper) limits of the vertical axis for a panel of fractions.

        The upper limit is 1. The lower limit is 0.05 below the lowest value, but between 0 and 0.9,
        so that a constant value is visible.
        """
        values = [v for curve in self.curves for v in curve.values if v is not None]
        lowest = min(values, default=0.0)
        return max(0.0, min(0.9, lowest - 0.05)), 1.0


_PANELS = (
    ("loss", "Loss", ".4~g", ""),
    ("learning_rate", "Learning rate", ".3~g", ""),
    ("grad_norm", "Gradient norm, before clipping", ".3~g", ""),
    ("tokens_per_second", "Throughput, tokens/s", ".3~s", ""),
    ("router_load", "Largest load of an expert, over the mean", ".3~g", ""),
    ("mfu", "Model FLOPs utilisation", ".1%", ""),
    ("memory_peak_bytes", "Peak memory of rank 0", ".3~s", "B"),
)
# Numbers of a line without a panel of their own: what `_PANELS` draws, the clock, and details.
_NO_PANEL = {key for key, *_ in _PANELS} | {
    *("step", "time", "tokens", "epoch", "mean_loss", "step_time", "skipped"),
    *("data_time", "data_time_max"),
}
_TITLES = {
    "margin": "Margin of rewards, chosen over rejected",
    "reward": "Rewards",
    "logps": "Log-probabilities of answers",
    "accuracy": "Accuracy",
    "kl": "KL to the reference or teacher",
    "agreement": "Agreement with the teacher's most likely token",
    "cross_entropy": "Cross entropy of the data",
}


def _is_share(key: str) -> bool:
    """Return True if a metric is a fraction between 0 and 1."""
    return key.rpartition("_")[2] in ("accuracy", "agreement")


def make_panels(runs: list[RunRecord]) -> list[Panel]:
    """Make one panel for each quantity that any of the runs logged.

    The loss comes first, then the metrics that the objective or a user's recipe logs at each step,
    with their values in evaluations. `X_chosen` and `X_rejected` share the panel `X`. Further
    metrics of evaluations come last.
    """
    panels = []
    for key, title, tick_format, unit in _PANELS:
        curves = [
            curve for i, run in enumerate(runs) for curve in _make_curves(i, run, key, len(runs))
        ]
        if curves:
            panels.append(Panel(key, title, tick_format, unit, curves))
    groups = _group_step_metrics(runs)
    step_panels = [_group_panel(runs, name, keys) for name, keys in groups.items()]
    grouped = {key for keys in groups.values() for key in keys}
    measures = dict.fromkeys(m for run in runs for ms in run.evaluations().values() for m in ms)
    for measure in [m for m in measures if m not in ("loss", "perplexity", *grouped)]:
        curves = [
            c
            for i, run in enumerate(runs)
            for c in _make_evaluation_curves(i, run, measure, len(runs))
        ]
        tick_format = ".1%" if _is_share(measure) else ".4~g"
        title = f"Evaluation: {measure}"
        panels.append(Panel(evaluation_key("", measure), title, tick_format, "", curves))
    first = 1 if panels and panels[0].key == "loss" else 0
    return [*panels[:first], *step_panels, *panels[first:]]


def _group_step_metrics(runs: list[RunRecord]) -> dict[str, list[str]]:
    """Group the metrics that an objective or recipe logs at each step into panels.

    Keys that differ only in their last word, such as reward_chosen and reward_rejected, share a
    panel.

    Returns:
        Name of a panel -> the keys of its metrics. The name of a shared panel is the common part.
    """
    keys = dict.fromkeys(
        key
        for run in runs
        for line in run.lines
        for key in line
        if key not in _NO_PANEL
        and not key.startswith(("eval_", "router_"))
        and get_finite_number(line, key) is not None
    )
    by_stem: dict[str, list[str]] = {}
    for key in keys:
        by_stem.setdefault(key.rpartition("_")[0] or key, []).append(key)
    groups: dict[str, list[str]] = {}
    for stem, members in by_stem.items():
        groups |= {stem: members} if len(members) > 1 else {key: [key] for key in members}
    return groups


def _group_panel(runs: list[RunRecord], name: str, keys: list[str]) -> Panel:
    """Make the panel `name` with the curves of `keys` and of their evaluations."""
    curves: list[Curve] = []
    is_single = len(runs) == 1
    for index, run in enumerate(runs):
        for place, key in enumerate(keys):
            colour = COLOURS[(place if is_single else index) % len(COLOURS)]
            if any(key in line for line in run.lines):
                label = f"{run.curve_prefix(len(runs))}{key}"
                curves.append(Curve(label, "logged", *_logged_values(run, key), colour))
            evaluated = _make_evaluation_curves(index, run, key, len(runs))
            is_pair = is_single and len(keys) > 1  # each side has one colour
            curves += [replace(c, colour=colour) if is_pair else c for c in evaluated]
    tick_format = ".1%" if _is_share(name) else ".4~g"
    return Panel(name, _TITLES.get(name, name), tick_format, "", curves)


def moving_average(values: list[float | int | None]) -> list[float | int | None]:
    """Compute the moving average of `values` over a centred window.

    The window has about 1/25 of the values, and at least 5. It is symmetric, so the curve does not
    lag, and narrows towards both ends. A gap (None) stays a gap, and is not counted in other
    averages.
    """
    half_window = round(max(2.0, len(values) / _WINDOWS / 2))
    means: list[float | int | None] = []
    for i, value in enumerate(values):
        reach = min(half_window, i, len(values) - 1 - i)
        window = [v for v in values[i - reach : i + reach + 1] if v is not None]
        means.append(None if value is None else sum(window) / len(window))
    return means


def _make_curves(index: int, run: RunRecord, key: str, runs: int) -> Iterable[Curve]:
    """Yield the curves of one logged quantity of a run; nothing if it was not logged.

    For the loss, also yield the smoothed curve and those of its evaluations.

    Args:
        index: index of the run, which decides the colour.
        run: the run.
        key: the quantity's key in metrics.jsonl.
        runs: number of runs in the report.
    """
    colour = COLOURS[index % len(COLOURS)]
    prefix = run.curve_prefix(runs)
    steps, values = _logged_values(run, key)
    if not steps:
        return
    yield Curve(f"{prefix}{key}", "logged", steps, values, colour)
    if key != "loss":
        return
    means = [get_finite_number(line, "mean_loss") for line in run.lines if key in line]
    filled = [value if mean is None else mean for value, mean in zip(values, means, strict=True)]
    yield Curve(f"{prefix}{key}, smoothed", "smoothed", steps, moving_average(filled), colour)
    yield from _make_evaluation_curves(index, run, key, runs)


def _make_evaluation_curves(index: int, run: RunRecord, measure: str, runs: int) -> Iterable[Curve]:
    """Yield one curve of the metric `measure` for each evaluation source that has it.

    Args:
        index: index of the run, which decides the colour if there are several runs.
        run: the run.
        measure: name of the metric, such as `loss`.
        runs: number of runs in the report.
    """
    names = [name for name, measures in run.evaluations().items() if measure in measures]
    for i, name in enumerate(names):
        key = evaluation_key(name, measure)
        colour = COLOURS[(index if runs > 1 else i + 1) % len(COLOURS)]
        yield Curve(
            f"{run.curve_prefix(runs)}{key}", "evaluation", *_logged_values(run, key), colour
        )


def _logged_values(run: RunRecord, key: str) -> tuple[list[int], list[float | int | None]]:
    """Return (steps at which a key was logged, its values at these steps).

    A value that is not a finite number is None.
    """
    lines = [line for line in run.lines if key in line]
    return [line["step"] for line in lines], [get_finite_number(line, key) for line in lines]
