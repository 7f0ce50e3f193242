"""Curves of a study's runs from their logs, and the figure of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xformer.analysis.curves import CurvesConfig, average
from xformer.data.errors import BadInput
from xformer.study.look import MORE, ink, svg
from xformer.study.report import COLOURS
from xformer.study.results import Results
from xformer.study.spec import Curves

WIDE = 4  # panels side by side


@dataclass(frozen=True)
class Line:
    """Mean and standard deviation over some runs, by step."""

    name: str
    runs: int
    x: list[float]
    mean: list[float]
    deviation: list[float]


@dataclass(frozen=True)
class Panel:
    """The lines of one level, of one number of the log."""

    name: str
    value: str
    lines: tuple[Line, ...]


def averaged(results: Results, curves: Curves) -> list[Panel]:
    """The panels of which some run is finished: those of training, then those of validation.

    Runs that do not log the number (a score task logs no accuracy) have no line.
    """
    levels = _levels(results, curves)
    panels = _panels(results, curves, "train", dict.fromkeys(levels, curves.value))
    if wanted := curves.validation:
        wanted = dict.fromkeys(levels, wanted) if isinstance(wanted, str) else wanted
        panels += _panels(results, curves, "validation", wanted)
    return panels


def _levels(results: Results, curves: Curves) -> list[str]:
    """The panels' levels; one for all where the lines have the same factor."""
    if curves.panels == curves.lines:
        return [f"by {curves.lines}"]
    return list(results.study.factors(curves.stage)[curves.panels])


def _panels(results: Results, curves: Curves, event: str, values: dict[str, str]) -> list[Panel]:
    found = []
    for level in _levels(results, curves):
        lines = []
        for name in results.study.factors(curves.stage)[curves.lines]:
            wanted = {**curves.where, curves.panels: level, curves.lines: name}
            runs = [
                w.path
                for w in results.plan.runs(curves.stage)
                if wanted.items() <= w.levels.items() and w.done
            ]
            line = _line(name, runs, event, values.get(level, ""))
            if line is not None:
                lines.append(line)
        if lines:
            what = "" if event == "train" else f"{event} "
            found.append(Panel(level, f"{what}{values[level]}", tuple(lines)))
    return found


def _line(name: str, runs: list[Path], event: str, value: str) -> Line | None:
    try:
        found = average([str(run) for run in runs], event, value, CurvesConfig(out="-"))
    except (BadInput, OSError, TypeError):  # no run, no log, no such number
        return None
    return Line(name, len(runs), found["x"], found["mean"], found["deviation"])


def curves_figure(panels: list[Panel]) -> str:
    """An SVG of the panels, with a band of one standard deviation where a line has several runs."""
    colours = (*COLOURS, *MORE)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    with ink("curves") as plt:
        wide = min(WIDE, len(panels))
        high = -(-len(panels) // wide)
        figure, axes = plt.subplots(
            high,
            wide,
            figsize=(0.5 + 2.9 * wide, 0.5 + 2.3 * high),
            layout="constrained",
            squeeze=False,
        )
        figure.patch.set_alpha(0)
        for one in axes.flat[len(panels) :]:
            one.remove()
        for one, panel in zip(axes.flat, panels, strict=False):
            one.patch.set_alpha(0)
            for line in panel.lines:
                colour = colours[names.index(line.name) % len(colours)]
                low, high_ = (
                    [m + sign * d for m, d in zip(line.mean, line.deviation, strict=True)]
                    for sign in (-1, 1)
                )
                one.plot(
                    line.x,
                    line.mean,
                    color=colour,
                    lw=1.6,
                    label=line.name,
                    marker="o" if len(line.x) < 8 else None,
                    ms=3.5,
                )
                if line.runs > 1:
                    one.fill_between(line.x, low, high_, color=colour, alpha=0.2, lw=0)
            one.set_title(panel.name, fontsize=10)
            one.set(xlabel="step", ylabel=panel.value)
            one.grid(alpha=0.3)
        shown: dict[str, Any] = {}
        for one in figure.axes:
            drawn, labels = one.get_legend_handles_labels()
            shown |= dict(zip(labels, drawn, strict=True))
        figure.legend(
            list(shown.values()), list(shown), loc="outside upper center", ncols=min(6, len(shown))
        )
        return svg(figure)
