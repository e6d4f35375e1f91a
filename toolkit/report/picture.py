"""The picture: the same panels as a PNG, drawn by matplotlib without a browser or a display."""

from typing import Any

from toolkit.report.curves import COLOURS, Panel, panels
from toolkit.report.runs import RunRecord

_STYLES: dict[str, dict[str, Any]] = {
    "logged": {"linewidth": 1.0},
    "smoothed": {"linewidth": 1.8},
    "evaluation": {"linewidth": 1.0, "linestyle": ":", "marker": "o", "markersize": 4},
}


def draw(runs: list[RunRecord], file: Any) -> None:
    """Write the panels of `runs` to `file` (a path or a binary stream) as a PNG of 1400 pixels."""
    from matplotlib.figure import Figure

    found = panels(runs)
    others = [panel for panel in found if panel.key != "loss"]
    rows = (len(others) + 1) // 2
    heights = [1.5] + [1.0] * rows
    figure = Figure(figsize=(14, 0.6 + 2.9 * sum(heights)), dpi=100, layout="constrained")
    figure.suptitle(", ".join(run.name for run in runs), fontsize=13, parse_math=False)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    first = figure.add_subplot(grid[0, :])
    if not found:
        first.text(0.5, 0.5, "no step is logged yet", ha="center", transform=first.transAxes)
    for panel in found:
        place = others.index(panel) if panel in others else -1
        axes = first if place < 0 else figure.add_subplot(grid[1 + place // 2, place % 2])
        _panel(axes, panel, runs)
    if found and found[0].key == "loss":
        _legend(first, fontsize=8, ncols=2)
    figure.savefig(file, format="png")


def _legend(axes: Any, **style: Any) -> None:
    for text in axes.legend(**style).get_texts():
        text.set_parse_math(False)  # names of folders may hold a dollar sign


def _panel(axes: Any, panel: Panel, runs: list[RunRecord]) -> None:
    from matplotlib.ticker import EngFormatter, PercentFormatter

    for curve in panel.curves:
        behind = panel.key == "loss" and curve.kind == "logged"
        values = [float("nan") if value is None else value for value in curve.values]
        style = _STYLES[curve.kind] | ({"marker": "o"} if len(values) < 3 else {})
        style |= {"color": curve.colour, "alpha": 0.4 if behind else 1, "label": curve.name}
        axes.plot(curve.steps, values, **style)
    for i, run in enumerate(runs):
        colour = COLOURS[i % len(COLOURS)] if len(runs) > 1 else "0.45"
        name = run.label(len(runs))
        foot: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": colour}
        if steps := run.checkpoints:
            foot |= {"markersize": 5, "label": f"{name}checkpoint"}
            axes.plot(steps, [0.02] * len(steps), "^", **foot)
        for number, step in enumerate(run.restarts):
            label = f"{name}restart" if number == 0 else None
            axes.axvline(step, color=colour, linestyle="--", linewidth=1, label=label)
    if panel.tick_format.endswith("s"):
        axes.yaxis.set_major_formatter(EngFormatter(unit=panel.unit))
    elif panel.tick_format.endswith("%"):
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    if panel.is_share:
        axes.set_ylim(*panel.share_range())
    if panel.has_legend and panel.key != "loss":
        _legend(axes, fontsize=7)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel("step", fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
