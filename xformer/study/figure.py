"""The picture of a table: each run a point, means beside what was published."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.study.look import INK, MORE, ink, svg
from xformer.study.report import COLOURS
from xformer.study.results import Cell
from xformer.study.spec import Table
from xformer.study.write import head


def table_figure(table: Table, cells: list[list[Cell]]) -> str:
    """An SVG: a group a column, a colour a row, a dashed line for each published number."""
    columns = len(cells[0])
    with ink(table.name) as plt:
        figure, axes = plt.subplots(
            figsize=(min(13.0, 2.5 + 0.28 * columns * (len(cells) + 1)), 3.8), layout="constrained"
        )
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        width = 0.8 / len(cells)
        colours = (*COLOURS, *MORE)
        for r, row in enumerate(cells):
            places = np.arange(columns) - 0.4 + width * (r + 0.5)
            _row(axes, places, row, width, colours[r % len(colours)])
        axes.set_xticks(range(columns), [head(table, cell.column) for cell in cells[0]])
        unit = ", 100 times" if table.percent else ""
        name = table.metric if isinstance(table.metric, str) else "score"
        axes.set(ylabel=f"{name} on {table.split}{unit}", xlabel=table.columns)
        axes.grid(axis="y", alpha=0.3)
        if any(cell.published is not None for row in cells for cell in row):
            axes.plot([], [], "--", color=INK, lw=1.2, label="published")
        axes.legend(ncols=min(len(cells), 4), loc="lower center", bbox_to_anchor=(0.5, 1.0))
        return svg(figure)


def _row(axes: Any, places: np.ndarray, row: list[Cell], width: float, colour: str) -> None:
    first = True
    for x, cell in zip(places, row, strict=True):
        if cell.published is not None:
            axes.plot(
                [x - width / 2, x + width / 2], [cell.published] * 2, "--", color=colour, lw=1.2
            )
        if cell.summary is None:
            continue
        scores = cell.summary.scores
        spots = x + width * 0.2 * (np.linspace(-1, 1, len(scores)) if len(scores) > 1 else 0)
        axes.plot(np.atleast_1d(spots), scores, "o", color=colour, alpha=0.45, ms=4, mew=0)
        name = cell.row if first else None
        axes.errorbar(
            x,
            cell.summary.mean,
            cell.summary.deviation or 0,
            fmt="o",
            ms=6.5,
            color=colour,
            capsize=3,
            lw=1.5,
            label=name,
        )
        first = False
