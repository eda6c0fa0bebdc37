"""PNG plots for a paper, one a chart of the page, from the same numbers."""

import re
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from lightning_collider.report.page import charts
from lightning_collider.report.read import read_runs

COLORS = ("#2458c5", "#cf5518", "#16805f", "#8a3fc2", "#9a7600", "#bf2f60")
STYLES = ("-", "--", ":")
SIZE = (3.4, 2.4)  # inches: a column of a two-column paper
DOTS = 300  # an inch


def write_plots(folders: list[Path], target: Path) -> list[Path]:
    """Draw every chart of some runs over input tokens; return the files, NAME.png.

    Raises FileNotFoundError as read_run does.
    """
    arms = [arm for run in read_runs(folders) for arm in run.arms]
    names = [arm.name for arm in arms]
    target.mkdir(parents=True, exist_ok=True)
    return [draw(chart, names, target) for chart in charts(arms)]


def draw(chart: dict[str, Any], names: list[str], target: Path) -> Path:
    """One chart as a PNG file."""
    figure = Figure(SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for series in chart["series"]:
        number = series["arm"]
        axes.plot(
            [point[0] for point in series["points"]],
            [point[2] for point in series["points"]],
            STYLES[number // len(COLORS) % len(STYLES)],
            color=COLORS[number % len(COLORS)],
            linewidth=1.2,
            label=names[number],
        )
    if chart["level"] is not None:
        axes.axhline(chart["level"], color="#777777", linewidth=0.8, linestyle="--", label="chance")
    axes.set_ylim(*limits(chart))
    axes.set_title(chart["title"], fontsize=8)
    axes.set_xlabel("input tokens", fontsize=7)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if chart["percent"]:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.tick_params(labelsize=7)
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=6, frameon=False)
    path = target / f"{re.sub(r'[^a-z0-9]+', '-', chart['title'].lower())}.png"
    figure.savefig(path, dpi=DOTS)
    return path


def limits(chart: dict[str, Any]) -> tuple[float, float]:
    """Lowest and highest value shown: without what the first tenth adds above the rest."""
    points = [point for series in chart["series"] for point in series["points"]]
    right = max(point[0] for point in points)
    late = [point[2] for point in points if point[0] >= right / 10] or [p[2] for p in points]
    late += [] if chart["level"] is None else [chart["level"]]
    room = 0.06 * (max(late) - min(late)) or 0.05
    return min(late) - room, max(late) + room
