"""The headline of a study: its main table as one picture, and as a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xformer.analysis import drawing
from xformer.data import style
from xformer.study.claims import Verdict
from xformer.study.notes import listed
from xformer.study.results import Cell, Line, Panel, Results
from xformer.study.spec import METRIC, Headline, ScoreTable
from xformer.study.statistics import LEVEL

BAR = {"capsize": 4, "lw": 2.2, "ms": 8, "zorder": 3}  # how means and intervals look


def rows(results: Results, headline: Headline) -> list[tuple[str, Cell]]:
    """The first column of the headline's table: the label and the cell of each row that has
    scores."""
    cells = [row[0] for row in results.cells(results.study.table(headline.table))]
    return [(headline.labels.get(c.row, c.row), c) for c in cells if c.sample is not None]


def draw(results: Results, headline: Headline) -> Any:
    """A figure with the curves, if the headline has any, and the scores of all runs beside them. If
    the panels of the curves are the columns of the table, only that of the first column is
    drawn."""
    table = results.study.table(headline.table)
    columns = results.study.columns(table)
    curves = next((c for c in results.study.curves if c.name == headline.curves), None)
    panels = results.panels(curves) if curves is not None else []
    panels = [panel for panel in panels if panel.name == columns[0] or panel.name not in columns]
    figure = style.new_figure(11 if panels else 7, 3.6)
    widths = [1, 1.9] if panels else [1]
    *left, right = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    shown = rows(results, headline)
    if panels and curves is not None:
        _curve(left[0], panels, curves.title, [cell.row for _, cell in shown])
    _dots(right, shown, table, columns)
    right.set_title(headline.title)
    return figure


def _curve(axes: Any, panels: list[Panel], title: str, rows: list[str]) -> None:
    """The curves of training as lines, and those of validation as dots. Of several curves, one that
    has the name of a row of the table has its colour."""
    several = len({panel.name for panel in panels}) > 1

    def name(panel: Panel, line: Line) -> tuple[str, str]:
        return panel.name if several else "", line.name

    names = list(dict.fromkeys(name(panel, line) for panel in panels for line in panel.lines))
    colours = list(dict.fromkeys([*(("", row) for row in rows), *names]))  # those of rows first
    values = dict.fromkeys(panel.value.removeprefix("validation ") for panel in panels)
    for panel in panels:
        validation = panel.value.startswith("validation")
        look = {"ls": "none", "marker": "o", "ms": 5, "zorder": 3} if validation else {"lw": 1.4}
        for line in panel.lines:
            own = name(panel, line)
            words = ("validation" if validation else "training", *(own if len(names) > 1 else ()))
            label = drawing.plain(" ".join(filter(None, words)))
            colour = f"C{colours.index(own) if len(names) > 1 else int(validation)}"
            axes.plot(line.x, line.mean, color=colour, label=label, **look)
    axes.set(xlabel="step", ylabel=" and ".join(values))
    axes.set_title(title)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2, "fontsize": 8}
    axes.legend(**(below if len(names) > 1 else {}))


def _dots(
    axes: Any, shown: list[tuple[str, Cell]], table: ScoreTable, columns: Sequence[str]
) -> None:
    """A line for each row: its label, a dot for each run, the mean with its interval, and the mean
    as a number."""
    for place, (_, cell) in enumerate(reversed(shown)):
        assert cell.sample is not None
        scores, colour = np.array(cell.sample.scores), f"C{len(shown) - 1 - place}"
        shift = 0.14 * (np.arange(len(scores)) % 3 - 1)  # so that equal scores do not overlap
        axes.plot(scores, place + shift, "o", color=colour, alpha=0.4, ms=5, mew=0)
        ends = cell.sample.interval or (cell.sample.mean, cell.sample.mean)
        bars = [[cell.sample.mean - ends[0]], [ends[1] - cell.sample.mean]]
        axes.errorbar(cell.sample.mean, place, xerr=bars, fmt="D", color=colour, **BAR)
        number = f"{cell.sample.mean:.{table.digits}f}"
        look = {"textcoords": "offset points", "ha": "center", "color": colour, "weight": "bold"}
        axes.annotate(number, (cell.sample.mean, place), (0, 11), **look)
    if (chance := table.chance.get(columns[0])) is not None:
        axes.axvline(table.scale * chance, color="0.5", ls=":", zorder=1)
        axes.annotate(
            "guessing",
            (table.scale * chance, -0.55),
            (4, 0),
            textcoords="offset points",
            color="0.4",
        )
    axes.set_yticks(range(len(shown)), [label for label, _ in reversed(shown)], fontsize=11)
    axes.set_ylim(-0.6, len(shown) - 0.3)
    axes.grid(axis="y", visible=False)
    seeds = listed(len(cell.sample.scores) for _, cell in shown if cell.sample is not None)
    unit = ", %" if table.percent else ""
    what = f"dots: {seeds} seeds; diamonds: their mean and its {LEVEL:.0%} interval"
    gap = "\n" if columns[1:] else "   "
    axes.set_xlabel(f"{_metric(table, columns)}{unit}{gap}({what})")


def _metric(table: ScoreTable, columns: Sequence[str]) -> str:
    """The first column's metric and split, and if there are others, which column it is."""
    first, *others = columns
    split, metric = table.source_of(first)
    if table.columns == METRIC:
        return f"{first} on {split}"
    column = f", {table.columns} {first}" if others else ""
    return f"{metric} on {split}{column}"


def lines(results: Results, headline: Headline, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The headline as text: a line for each row of the table and one for each claim."""
    table = results.study.table(headline.table)
    metric = _metric(table, results.study.columns(table))
    yield f"{headline.title} {metric}, mean and {LEVEL:.0%} interval:"
    shown = rows(results, headline)
    if not shown:
        yield "  no scores yet"
    for label, cell in shown:
        assert cell.sample is not None
        d, scores = table.digits, cell.sample.scores
        spread = " to " if cell.sample.interval else ", "
        ends = spread.join(f"{x:.{d}f}" for x in cell.sample.interval or scores)
        seeds = "one seed" if len(scores) == 1 else f"{len(scores)} seeds"
        numbers = f"{cell.sample.mean:5.{d}f}  ({ends}; {seeds})"
        yield f"  {' '.join(label.split()):<44} {numbers}"
    if verdicts:
        yield "Claims of the study, by paired t tests over seeds:"
    for verdict in verdicts:
        yield f"  {verdict.state:<10} {verdict.claim.text}: {verdict.evidence()}"
