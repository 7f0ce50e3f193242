"""The figures of a report: the scores of a table, and curves. Draw them in `style.colours`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xformer.analysis.drawing import plain
from xformer.data import style
from xformer.study.results import Cell, Panel
from xformer.study.spec import ScoreTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 4  # panels side by side
AXES = {"probe.layer": "layer (0: the output of the embeddings)"}  # the axis of some columns


def table_figure(
    table: ScoreTable, cells: Sequence[Sequence[Cell]], names: Sequence[str], joined: bool = False
) -> Figure:
    """A figure of a table: a group for each column, labelled by `names`, and a colour for each row.
    Every score is a point beside the mean, which has the standard deviation of three scores or
    more. A published number is a dashed line. With `joined`, the columns are numbers, which are
    places on the horizontal axis, and a line joins the means of a row."""
    columns, width = len(names), 0.8 / len(cells)
    numbers = np.array([float(name) for name in names]) if joined else np.arange(columns)
    figure = style.new_figure(min(13.0, 2.5 + 0.28 * columns * (len(cells) + 1)), 3.8)
    axes = figure.subplots()
    for number, row in enumerate(cells):
        left = 0.0 if joined else width * (number + 0.5 - len(cells) / 2)
        places = numbers + left
        _row(axes, places, row, 0.0 if joined else width, f"C{number}")
        if joined:
            means = [math.nan if cell.sample is None else cell.sample.mean for cell in row]
            axes.plot(places, means, color=f"C{number}", lw=1.2)
            published = [math.nan if c.published is None else c.published for c in row]
            axes.plot(places, published, "--", color=f"C{number}", lw=1.2)
    if joined and numbers[0] > 0 and numbers[-1] > 20 * numbers[0]:  # such as learning rates
        axes.set_xscale("log")
    axes.set_xticks(numbers, names)
    axes.minorticks_off()
    unit = ", times 100" if table.percent else ""
    name = table.metric.rpartition(".")[2] if isinstance(table.metric, str) else "score"
    place = f" on {table.place}" if table.place else ""
    across = AXES.get(table.columns, table.columns)
    axes.set(ylabel=f"{name}{place}{unit}", xlabel=across)
    axes.grid(axis="y", alpha=0.3)
    if any(cell.published is not None for row in cells for cell in row):
        axes.plot([], [], "--", color=style.FAINT, lw=1.2, label="published")
    handles, labels = axes.get_legend_handles_labels()
    _legend(figure, dict(zip(labels, handles, strict=True)), 4)
    return figure


def _row(axes: Any, places: np.ndarray, row: Sequence[Cell], width: float, colour: str) -> None:
    label: str | None = plain(row[0].row)  # once in the legend
    for x, cell in zip(places, row, strict=True):
        if cell.published is not None:
            ends = [x - width / 2, x + width / 2]
            axes.plot(ends, [cell.published] * 2, "--", color=colour, lw=1.2)
        if cell.sample is None:
            continue
        scores = cell.sample.scores
        deviation = (cell.sample.deviation if len(scores) > 2 else 0) or 0
        spots = x + width * 0.2 * np.linspace(-1, 1, len(scores)) if len(scores) > 1 else [x]
        axes.plot(spots, scores, "o", color=colour, alpha=0.45, ms=4, mew=0)
        look = {"fmt": "o", "ms": 6.5, "color": colour, "capsize": 3, "lw": 1.5}
        axes.errorbar(x, cell.sample.mean, deviation, label=label, **look)
        label = None


def curves_figure(panels: Sequence[Panel]) -> Figure:
    """A figure of panels of curves, with a band of one standard deviation if a line is the mean of
    several runs."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    wide = min(WIDE, len(panels))
    high = -(-len(panels) // wide)
    figure = style.new_figure(0.5 + 2.9 * wide, 0.5 + 2.3 * high)
    grid = figure.subplots(high, wide, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    shown: dict[str, Any] = {}  # a line for each name of the legend
    for axes, panel in zip(grid.flat, panels, strict=False):
        for line in panel.lines:
            colour = f"C{names.index(line.name)}"
            mean, deviation = np.array(line.mean), np.array(line.deviation)
            marker = "o" if len(line.x) < 8 else None
            (drawn,) = axes.plot(line.x, mean, color=colour, lw=1.6, marker=marker, ms=3.5)
            shown.setdefault(plain(line.name), drawn)
            if line.runs > 1:  # of two, the band is their range
                deviation = deviation / 2**0.5 if line.runs == 2 else deviation
                low, top = mean - deviation, mean + deviation
                axes.fill_between(line.x, low, top, color=colour, alpha=0.2, lw=0)
        axes.set_title(panel.name, fontsize=10)
        axes.set(xlabel="step", ylabel=panel.value)
        axes.grid(alpha=0.3)
    _legend(figure, shown, 6)
    return figure


def _legend(figure: Figure, shown: dict[str, Any], most: int) -> None:
    """A legend above the axes, with as many columns as fit into the width, but no more than
    `most`."""
    for columns in range(min(most, len(shown)), 0, -1):
        legend = figure.legend(
            list(shown.values()), list(shown), loc="outside upper center", ncols=columns
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
