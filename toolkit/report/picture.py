"""The picture of a report: the panels as a PNG, drawn by matplotlib without a display."""

from typing import Any

from toolkit.report.curves import COLOURS, Panel, make_panels
from toolkit.report.runs import RunRecord

_STYLES: dict[str, dict[str, Any]] = {
    "logged": {"linewidth": 1.0},
    "smoothed": {"linewidth": 1.8},
    "evaluation": {"linewidth": 1.0, "linestyle": ":", "marker": "o", "markersize": 4},
}


def draw_picture(runs: list[RunRecord], file: Any) -> None:
    """Draw the panels of the runs as a PNG that is 1400 pixels wide.

    Without any panel, it only says that no step is logged.

    Args:
        runs: the runs to draw.
        file: a path or a binary stream to write to.
    """
    from matplotlib.figure import Figure

    panels = make_panels(runs)
    small_panels = [panel for panel in panels if panel.key != "loss"]
    rows = (len(small_panels) + 1) // 2
    heights = [1.5] + [1.0] * rows
    figure = Figure(figsize=(14, 0.6 + 2.9 * sum(heights)), dpi=100, layout="constrained")
    figure.suptitle(", ".join(run.name for run in runs), fontsize=13, parse_math=False)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    first = figure.add_subplot(grid[0, :])
    if not panels:
        first.text(0.5, 0.5, "no step is logged yet", ha="center", transform=first.transAxes)
    for panel in panels:
        place = small_panels.index(panel) if panel in small_panels else -1
        axes = first if place < 0 else figure.add_subplot(grid[1 + place // 2, place % 2])
        _draw_panel(axes, panel, runs)
    if panels and panels[0].key == "loss":
        _draw_legend(first, fontsize=8, ncols=2)
    figure.savefig(file, format="png")


def _draw_legend(axes: Any, **style: Any) -> None:
    """Draw the legend of `axes`; dollar signs in its texts are not read as formulas.

    `style` is passed to matplotlib.
    """
    for text in axes.legend(**style).get_texts():
        text.set_parse_math(False)  # the name of a folder may contain a dollar sign


def _draw_panel(axes: Any, panel: Panel, runs: list[RunRecord]) -> None:
    """Draw the curves, checkpoints and restarts of one panel."""
    from matplotlib.ticker import EngFormatter, PercentFormatter

    for curve in panel.curves:
        is_behind = panel.key == "loss" and curve.kind == "logged"
        values = [float("nan") if value is None else value for value in curve.values]
        style = _STYLES[curve.kind] | ({"marker": "o"} if len(values) < 3 else {})
        style |= {"color": curve.colour, "alpha": 0.4 if is_behind else 1, "label": curve.name}
        axes.plot(curve.steps, values, **style)
    for i, run in enumerate(runs):
        colour = COLOURS[i % len(COLOURS)] if len(runs) > 1 else "0.45"
        name = run.curve_prefix(len(runs))
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
        _draw_legend(axes, fontsize=7)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel("step", fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
