"""What is drawn of runs, as numbers: panels with curves over steps, for any plotting library."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from toolkit.report.runs import RunRecord, evaluation_key, number

# Of runs, in their order; a second hue for the evaluations of a run that stands alone.
COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#ca8a04", "#0891b2", "#db2777")
_WINDOWS = 25  # of smoothing, as wide as a part of the logged steps


@dataclass(frozen=True)
class Curve:
    """Values over steps: as logged, smoothed, or of evaluations. None is a gap."""

    name: str
    kind: Literal["logged", "smoothed", "evaluation"]
    steps: list[int]
    values: list[float | int | None]
    colour: str


@dataclass(frozen=True)
class Panel:
    """Curves that share axes."""

    key: str
    title: str
    tick_format: str  # of d3, as plotly takes it
    unit: str
    curves: list[Curve]

    @property
    def has_legend(self) -> bool:
        """Whether the names of the curves are shown: of several, or of evaluations."""
        return len(self.curves) > 1 or all(curve.kind == "evaluation" for curve in self.curves)

    @property
    def is_share(self) -> bool:
        """Whether the values are shares, from 0 to 1."""
        return self.key.rpartition("_")[2] == "accuracy"

    def share_range(self) -> tuple[float, float]:
        """Return the limits of the vertical axis of shares: never above 100 %, and wide enough to
        see a constant value.
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
# Numbers of a line that are no curve of their own: the clock, what `_PANELS` draws, and details.
_NO_PANEL = {key for key, *_ in _PANELS} | {
    *("step", "time", "tokens", "epoch", "mean_loss", "step_time", "skipped"),
    *("data_time", "data_time_max"),
}
_TITLES = {
    "margin": "Margin of rewards, chosen over rejected",
    "reward": "Rewards",
    "logps": "Log-probabilities of answers",
    "accuracy": "Accuracy",
    "kl": "KL to the reference",
}


def panels(runs: list[RunRecord]) -> list[Panel]:
    """Return a panel for each quantity that one of the runs logged.

    After the loss come the metrics that the objective, or the user's own recipe, logs at each
    step, with their evaluations. `X_chosen` and `X_rejected` share the panel `X`.
    """
    drawn = []
    for key, title, tick_format, unit in _PANELS:
        curves = [curve for i, run in enumerate(runs) for curve in _curves(i, run, key, len(runs))]
        if curves:
            drawn.append(Panel(key, title, tick_format, unit, curves))
    groups = _groups(runs)
    steps = [_group_panel(runs, name, keys) for name, keys in groups.items()]
    grouped = {key for keys in groups.values() for key in keys}
    measures = dict.fromkeys(m for run in runs for one in run.evaluations().values() for m in one)
    for measure in [m for m in measures if m not in ("loss", "perplexity", *grouped)]:
        curves = [c for i, run in enumerate(runs) for c in _evaluations(i, run, measure, len(runs))]
        tick_format = ".1%" if measure == "accuracy" else ".4~g"
        title = f"Evaluation: {measure}"
        drawn.append(Panel(evaluation_key("", measure), title, tick_format, "", curves))
    first = 1 if drawn and drawn[0].key == "loss" else 0
    return [*drawn[:first], *steps, *drawn[first:]]


def _groups(runs: list[RunRecord]) -> dict[str, list[str]]:
    """Return the metrics of steps that are no part of every run: name of a panel -> keys of it.

    Keys that differ in their last word alone, such as reward_chosen and reward_rejected, are one
    group, named by what they share.
    """
    keys = dict.fromkeys(
        key
        for run in runs
        for line in run.lines
        for key in line
        if key not in _NO_PANEL
        and not key.startswith(("eval_", "router_"))
        and number(line, key) is not None
    )
    by_stem: dict[str, list[str]] = {}
    for key in keys:
        by_stem.setdefault(key.rpartition("_")[0] or key, []).append(key)
    groups: dict[str, list[str]] = {}
    for stem, members in by_stem.items():
        together = len(members) > 1
        groups |= {stem: members} if together else {key: [key] for key in members}
    return groups


def _group_panel(runs: list[RunRecord], name: str, keys: list[str]) -> Panel:
    """Return the panel of metrics of steps, with those of evaluations under the same names."""
    curves: list[Curve] = []
    alone = len(runs) == 1
    for index, run in enumerate(runs):
        for place, key in enumerate(keys):
            colour = COLOURS[(place if alone else index) % len(COLOURS)]
            if any(key in line for line in run.lines):
                label = f"{run.label(len(runs))}{key}"
                curves.append(Curve(label, "logged", *_logged(run, key), colour))
            evaluated = _evaluations(index, run, key, len(runs))
            is_pair = alone and len(keys) > 1  # each side has one colour
            curves += [replace(c, colour=colour) if is_pair else c for c in evaluated]
    tick_format = ".1%" if name.rpartition("_")[2] == "accuracy" else ".4~g"
    return Panel(name, _TITLES.get(name, name), tick_format, "", curves)


def smoothed(values: list[float | int | None]) -> list[float | int | None]:
    """Return the mean of `values` around each, over a window that is as wide on both sides, so that
    the curve does not lag; towards the ends it narrows. Gaps stay gaps and count for nothing.
    """
    half, last = round(max(2.0, len(values) / _WINDOWS / 2)), len(values) - 1
    found: list[float | int | None] = []
    for at, value in enumerate(values):
        reach = min(half, at, last - at)
        around = [v for v in values[at - reach : at + reach + 1] if v is not None]
        found.append(None if value is None else sum(around) / len(around))
    return found


def _curves(index: int, run: RunRecord, key: str, runs: int) -> Iterable[Curve]:
    colour, prefix = COLOURS[index % len(COLOURS)], run.label(runs)
    steps, values = _logged(run, key)
    if not steps:
        return
    yield Curve(f"{prefix}{key}", "logged", steps, values, colour)
    if key != "loss":
        return
    means = [number(line, "mean_loss") for line in run.lines if key in line]
    filled = [value if mean is None else mean for value, mean in zip(values, means, strict=True)]
    yield Curve(f"{prefix}{key}, smoothed", "smoothed", steps, smoothed(filled), colour)
    yield from _evaluations(index, run, key, runs)


def _evaluations(index: int, run: RunRecord, measure: str, runs: int) -> Iterable[Curve]:
    """Return the curves of one measure of the evaluations, one for each source."""
    names = [name for name, found in run.evaluations().items() if measure in found]
    for i, name in enumerate(names):
        key = evaluation_key(name, measure)
        own = COLOURS[(index if runs > 1 else i + 1) % len(COLOURS)]
        yield Curve(f"{run.label(runs)}{key}", "evaluation", *_logged(run, key), own)


def _logged(run: RunRecord, key: str) -> tuple[list[int], list[float | int | None]]:
    lines = [line for line in run.lines if key in line]
    return [line["step"] for line in lines], [number(line, key) for line in lines]
