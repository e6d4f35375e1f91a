"""What is drawn of runs, as numbers: panels with curves over steps, for any plotting library."""

from collections.abc import Iterable
from dataclasses import dataclass
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
    def of_evaluations(self) -> bool:
        """Whether it shows nothing else, several names of them perhaps."""
        return all(curve.kind == "evaluation" for curve in self.curves)


_PANELS = (
    ("loss", "Loss", ".4~g", ""),
    ("learning_rate", "Learning rate", ".3~g", ""),
    ("grad_norm", "Gradient norm, before clipping", ".3~g", ""),
    ("tokens_per_second", "Throughput, tokens/s", ".3~s", ""),
    ("router_load", "Largest load of an expert, over the mean", ".3~g", ""),
    ("mfu", "Model FLOPs utilisation", ".1%", ""),
    ("memory_peak_bytes", "Peak memory of rank 0", ".3~s", "B"),
)


def panels(runs: list[RunRecord]) -> list[Panel]:
    """Return a panel for each quantity that one of the runs logged."""
    found = []
    for key, title, tick_format, unit in _PANELS:
        curves = [curve for i, run in enumerate(runs) for curve in _curves(i, run, key, len(runs))]
        if curves:
            found.append(Panel(key, title, tick_format, unit, curves))
    measures = dict.fromkeys(m for run in runs for one in run.evaluations().values() for m in one)
    for measure in [m for m in measures if m not in ("loss", "perplexity")]:
        tick_format = ".1%" if measure == "accuracy" else ".4~g"
        curves = [c for i, run in enumerate(runs) for c in _evaluations(i, run, measure, len(runs))]
        title = f"Evaluation: {measure}"
        found.append(Panel(evaluation_key("", measure), title, tick_format, "", curves))
    return found


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
