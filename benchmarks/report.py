"""The measurements as a Markdown table and as a figure, with the verdict on each target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bench import Row
from xformer.data import style
from xformer.data.errors import BadInput

BEGIN, END = "<!-- written by make bench -->", "<!-- until here -->"
# colours of the palette; a missed target is also hatched, so that it shows without colours
REACHED, MISSED = "C0", "C4"
FIGURE = "figures/beside-transformers"


@dataclass(frozen=True)
class Measured:
    """The rows of a part, and the date and load of their measurement."""

    part: str
    date: str
    load: float
    rows: list[Row]


def number(value: float) -> str:
    """A number with three significant digits, or all digits of its integer part."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def spread(values: list[float]) -> str:
    """The median of the values, with the smallest and largest in brackets if there are several."""
    if not values:
        return ""
    if len(values) == 1:
        return number(values[0])
    return f"{number(median(values))} ({number(min(values))} to {number(max(values))})"


def line(row: Row) -> str:
    """A row of the table."""
    factor = f"{spread(row.values)}x" if row.theirs else ""
    what = f"{row.what}{f' ({row.unit})' if row.unit else ''}"
    note = f"; {row.note}" if row.note else ""
    target, verdict = "", ""
    if row.target is not None:
        sign = "below " if row.goal == "below" else ""
        target = f"{sign}{row.target:g}{'x' if row.theirs else ''}"
        verdict = "reached" if row.reached else f"**not reached** ({row.share:.0%})"
    cells = (what, f"{row.other}{note}", spread(row.ours), spread(row.theirs), factor, target)
    return f"| {' | '.join((*cells, verdict))} |"


HEAD = [
    "| what | compared with | ours | theirs | ours over theirs | target | |",
    "|---|---|---|---|---|---|---|",
]


def section(
    machine: str,
    versions: str,
    measured: list[Measured],
    footnotes: list[Measured],
    missing: Iterable[str] = (),
) -> str:
    """The section of the page that each run replaces."""
    rows = [row for part in measured for row in part.rows]
    parts = [*measured, *footnotes]
    days = " to ".join(sorted({min(p.date for p in parts), max(p.date for p in parts)}))
    lines = [
        BEGIN,
        "",
        f"{machine}. {versions}. Measured {days}. The load average before a part was at most "
        f"{max(part.load for part in parts):.1f}.",
        "",
        "The table shows medians over the rounds, with the smallest and largest value in brackets. "
        "Each round is compared separately, so the median ratio can differ from the ratio of the "
        "medians. A ratio above 1 means that ours is faster, also in rows of seconds.",
        "",
    ]
    if absent := list(missing):
        lines += [f"Not measured yet: {', '.join(absent)}.", ""]
    if rows:
        lines += [*HEAD, *map(line, rows), ""]
        if drawable(rows):
            lines += [f"![Speed compared with transformers and the ceiling]({FIGURE}.png)", ""]
    missed = sorted(
        (r for r in rows if r.target is not None and not r.reached), key=lambda r: r.share
    )
    if missed:
        worst = missed[0]
        whom = f", compared with {worst.other}" if worst.other else ""
        lines += [f"Furthest from its target: {worst.what}{whom}, at {worst.share:.0%} of it.", ""]
    for part in footnotes:
        lines += [f"{TITLES[part.part]}:", "", *table(part.rows), ""]
    return "\n".join([*lines, END])


def table(rows: list[Row]) -> list[str]:
    """The table of a footnote, whose rows compare with nothing."""
    measured = (f"| {row.what} ({row.unit}) | {spread(row.ours)} |" for row in rows)
    return ["| what | measured |", "|---|---|", *measured]


TITLES = {"settings": "The Trainer with other settings, in real tokens per second (one round)"}


def write(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace the section of an existing page from the mark `begin` to the mark `end`, or start a
    page with it; `text` holds both marks. Raises BadInput if the page lacks them."""
    if not page.exists():
        page.write_text(f"# Benchmarks\n\n{text}\n", encoding="utf-8")
        return
    check_marks(page, begin, end)
    before, old = page.read_text(encoding="utf-8").split(begin, 1)
    after = old.split(end, 1)[1]
    page.write_text(f"{before}{text}{after}", encoding="utf-8")


def check_marks(page: Path, begin: str = BEGIN, end: str = END) -> None:
    """Raise BadInput if a page lacks the marks `begin` and `end`, in this order."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if end not in text.partition(begin)[2]:
        raise BadInput(f"{page} has no place for the table; add the lines {begin} and {end} to it")


def drawable(rows: list[Row]) -> list[Row]:
    """The rows that compare ours with another contestant."""
    return [row for row in rows if row.theirs]


def draw(rows: list[Row], path: Path) -> None:
    """Draw the ratios as bars with their targets, and write path.svg and path.png."""
    rows = drawable(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with style.colours(style.LIGHT):
        figure = style.new_figure(9.5, 1.4 + 0.5 * len(rows))
        axes = figure.subplots()
        limit = 1.12 * max(max(*row.values, row.target or 0) for row in rows)
        for place, row in enumerate(rows):
            _bar(axes, place, row, 0.06 * limit)
        names = [f"{row.what}\nvs. {_plain(row.other)}" for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.axvline(1, color=style.FAINT, linewidth=0.8, zorder=0)
        axes.set_xlabel(
            "ours over theirs (bar: median; thin line: smallest to largest round; "
            "black mark: target)",
            fontsize=8,
        )
        axes.set_xlim(0, limit)
        axes.legend(
            handles=_legend(), loc="lower center", bbox_to_anchor=(0.35, 1), ncols=3, fontsize=8
        )
        for ending in ("svg", "png"):
            style.write(figure, path.with_suffix(f".{ending}"))


def _bar(axes: Any, place: int, row: Row, width: float) -> None:
    """Draw one bar. Its number, `width` wide, moves to the right of a target that would cover
    it."""
    middle, reached = median(row.values), row.target is None or row.reached
    right = max(row.values)
    if row.target is not None and right <= row.target < right + width:
        right = row.target
    axes.barh(
        place,
        middle,
        0.55,
        color=REACHED if reached else MISSED,
        hatch=None if reached else "///",
        edgecolor="white",
        linewidth=0,
    )
    axes.plot([min(row.values), max(row.values)], [place, place], color=_ink(), linewidth=1)
    axes.annotate(
        f"{middle:.2f}",
        (right, place),
        xytext=(4, 7),
        fontsize=8,
        textcoords="offset points",
        va="center",
    )
    if row.target is not None:
        axes.plot([row.target] * 2, [place - 0.38, place + 0.38], color=_ink(), linewidth=2.5)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=REACHED, label="target reached"),
        Patch(facecolor=MISSED, hatch="///", edgecolor="white", label="not reached"),
        Line2D([], [], color=_ink(), linewidth=2.5, label="target"),
    ]


def _ink() -> Any:
    """The colour of texts and marks."""
    from matplotlib import rcParams

    return rcParams["text.color"]


def _plain(text: str) -> str:
    return text.replace("`", "")
