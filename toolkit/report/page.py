"""The page of a report: curves drawn by plotly, with tables; plotly's JavaScript is embedded."""

import json
import time
from typing import Any

from toolkit import __version__
from toolkit.report import tables
from toolkit.report.curves import COLOURS, Curve, Panel, make_panels
from toolkit.report.runs import RunRecord

_GRID = "rgba(128, 128, 128, 0.22)"
_MARK = "rgba(128, 128, 128, 0.9)"
_STYLES: dict[str, dict[str, Any]] = {
    "logged": {"line": {"width": 1.2}},
    "smoothed": {"line": {"width": 2.2}},
    "evaluation": {"line": {"width": 1, "dash": "dot"}, "marker": {"size": 7}},
}


def render_page(runs: list[RunRecord], reload_seconds: float | None = None) -> str:
    """Render the runs as one HTML page that needs no network.

    Args:
        runs: the runs to draw.
        reload_seconds: interval at which the page reloads itself; None: never.
    """
    from jinja2 import Environment, PackageLoader
    from plotly.offline import get_plotlyjs

    panels = make_panels(runs)
    figures = [{"id": panel.key, **_make_figure(panel, runs)} for panel in panels]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.loader = PackageLoader("toolkit.report", ".")
    return environment.get_template("page.html.jinja").render(
        title=", ".join(run.name for run in runs),
        several=len(runs) > 1,
        notes=tables.list_notes(runs),
        overview=tables.make_overview(runs),
        evaluations=tables.make_evaluation_table(runs),
        panels=panels,
        settings=tables.make_settings_table(runs),
        starts=tables.make_start_table(runs),
        openings=[(run.name, tables.collect_start_texts(run)) for run in runs],
        answers=tables.make_answer_tables(runs),
        figures=_encode_for_script(figures),
        plotly=get_plotlyjs() if figures else "",
        reload_seconds=reload_seconds,
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        version=__version__,
    )


def _make_figure(panel: Panel, runs: list[RunRecord]) -> dict[str, Any]:
    """Make the figure of a panel for plotly.js: a dict of traces and layout.

    plotly validates it. The traces also mark checkpoints and restarts of the runs.
    """
    from plotly.graph_objects import Figure

    axis = {"gridcolor": _GRID, "zeroline": False, "linecolor": _GRID}
    figure = Figure(
        data=[_make_trace(panel, curve) for curve in panel.curves] + _make_event_traces(runs),
        layout={
            "template": "none",
            "paper_bgcolor": "rgba(0, 0, 0, 0)",
            "plot_bgcolor": "rgba(0, 0, 0, 0)",
            "margin": {"l": 56, "r": 12, "t": 8, "b": 48},
            "height": 420 if panel.key == "loss" else 260 + 20 * panel.has_legend,
            "hovermode": "x unified",
            "showlegend": panel.has_legend,
            # Above the curves: below them it would cover the title of the axis.
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "xaxis": {
                **axis,
                "title": {"text": "step"},
                "hoverformat": ",d",
                "tickformat": "~s",
                "rangemode": "tozero",
            },
            "yaxis": {
                **axis,
                "tickformat": panel.tick_format,
                "ticksuffix": panel.unit,
                **({"range": panel.share_range()} if panel.is_share else {}),
            },
            # Marks have a separate axis, so that they do not depend on the values.
            "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        },
    )
    return json.loads(figure.to_json())


def _make_trace(panel: Panel, curve: Curve) -> dict[str, Any]:
    """Make the plotly trace of a curve, as a dict."""
    style = _STYLES[curve.kind]
    has_no_line = sum(value is not None for value in curve.values) < 3  # a line needs two points
    is_behind = panel.key == "loss" and curve.kind == "logged"
    return {
        "type": "scatter",
        "name": curve.name,
        "x": curve.steps,
        "y": curve.values,
        "meta": curve.kind,
        "mode": "lines+markers" if has_no_line or "marker" in style else "lines",
        "opacity": 0.65 if is_behind else 1,
        "hovertemplate": f"%{{y:{panel.tick_format}}}{panel.unit}",
        # A constant share of 1 lies on the upper edge.
        **({"cliponaxis": False} if panel.is_share else {}),
        **style,
        "line": {**style["line"], "color": curve.colour},
    }


def _make_event_traces(runs: list[RunRecord]) -> list[dict[str, Any]]:
    """Make the plotly traces that mark checkpoints (triangles) and restarts (dashed lines)."""
    traces: list[dict[str, Any]] = []
    for i, run in enumerate(runs):
        colour = COLOURS[i % len(COLOURS)] if len(runs) > 1 else _MARK

        def add_mark(kind: str, name: str = run.curve_prefix(len(runs)), **options: Any) -> None:
            """Append a trace that marks steps; `options` are plotly's."""
            hover = {"yaxis": "y2", "hovertemplate": "after step %{x:,d}"}
            trace = {"type": "scatter", "name": name + kind, "meta": kind}
            traces.append({**trace, **hover, **options})

        if steps := run.checkpoints:
            symbol = {"symbol": "triangle-up", "size": 9, "color": colour}
            add_mark("checkpoint", mode="markers", marker=symbol, x=steps, y=[0.015] * len(steps))
        if steps := run.restarts:
            line = {"color": colour, "width": 1.5, "dash": "dash"}
            ends = [end for step in steps for end in (step, step, None)]
            add_mark("restart", mode="lines", line=line, x=ends, y=[0, 1, None] * len(steps))
    return traces


def _encode_for_script(value: Any) -> str:
    """Encode a value as JSON that cannot end an HTML script element."""
    return json.dumps(value).replace("<", "\\u003c")
