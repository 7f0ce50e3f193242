"""Figures of the analyses: one look, light and dark, as SVG and PNG."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xformer.data.files import sync

LONGEST = 28  # characters of a name in a legend


@dataclass(frozen=True)
class Theme:
    """Colours of a figure. `colours` follow Okabe and Ito, whose palette the colour-blind can tell
    apart; those of the dark theme are lighter. `scale` is the colour map of quantities."""

    name: str
    paper: str
    ink: str
    faint: str
    colours: tuple[str, ...]
    scale: str = "cividis"


THEMES = (
    Theme(
        "",
        "#ffffff",
        "#1a1a1a",
        "#8c8c8c",
        ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#1a1a1a"),
    ),
    Theme(
        "dark",
        "#16181d",
        "#e8e8e8",
        "#8c8c8c",
        ("#56B4E9", "#FF8C42", "#33C79B", "#E39AC6", "#F0C24B", "#A6D8F7", "#e8e8e8"),
    ),
)
Draw = Callable[[dict[str, Any], Theme], Any]


def figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """(figure, axes) in inches; to be called within `style`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made, made.subplots(rows, columns, **options)


def mosaic(width: float, height: float, names: list[list[str]], **options: Any) -> Any:
    """(figure, axes by name), laid out as the rows of names say."""
    made, axes = figure(width, height)
    axes.remove()
    return made, made.subplot_mosaic(names, **options)


@contextmanager
def style(theme: Theme) -> Iterator[None]:
    """The house's look in the colours of a theme."""
    import matplotlib

    settings: Any = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "figure.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "text.color": theme.ink,
        "axes.edgecolor": theme.ink,
        "axes.labelcolor": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "grid.color": theme.faint,
        "svg.hashsalt": "xformer",
        "text.parse_math": False,
        "axes.axisbelow": True,
    }
    with matplotlib.rc_context(settings):
        yield


def save(found: dict[str, Any], draw: Draw, directory: Path, name: str) -> list[Path]:
    """Draw a result as NAME.svg, NAME.png and, for dark pages, NAME-dark.svg and NAME-dark.png.

    Each file is written whole or not at all. Returns the files.
    """
    written = []
    for theme in THEMES:
        with style(theme):
            made = draw(found, theme)
            for ending, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 160})):
                stem = f"{name}-{theme.name}" if theme.name else name
                path = directory / f"{stem}.{ending}"
                temporary = path.with_name(f".{path.name}.{os.getpid()}")
                try:
                    made.savefig(temporary, format=ending, facecolor=theme.paper, **options)
                    sync(temporary)
                    temporary.replace(path)
                finally:
                    temporary.unlink(missing_ok=True)
                written.append(path)
    return written


def plain_ticks(axis: Any) -> None:
    """Plain numbers on a logarithmic axis (`axes.xaxis`). Such an axis would write powers in
    mathematical notation, which `style` turns off because names may hold any character."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def many(count: int, noun: str) -> str:
    """1 example, 2 examples."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def of_stores(name: str) -> str:
    """A store's name without its directory; of stores that are read as one, all their names."""
    return " and ".join(Path(part).name for part in name.split(" and "))


def spread(mean: float, deviation: float, runs: int) -> str:
    """6.474 ± 0.012; 6.474 for one run."""
    return f"{mean:.4g}" + (f" ± {deviation:.2g}" if runs > 1 else "")


def short(name: str) -> str:
    """A name that fits a legend."""
    return name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"


def heat_map(axes: Any, values: Any, theme: Theme, title: str) -> Any:
    """Draw a matrix (rows, columns) of numbers from 0 to 1 as colours.

    A matrix of at most 8 by 8 shows its numbers too.
    """
    rows, columns = len(values), len(values[0])
    image = axes.imshow(
        values,
        cmap=theme.scale,
        vmin=0.0,
        vmax=1.0,
        origin="lower",
        aspect="auto" if rows != columns else "equal",
    )
    axes.grid(False)
    axes.set_title(title)
    if max(rows, columns) <= 8:
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                bright = value > 0.55
                axes.text(
                    j,
                    i,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="#000000" if bright else "#ffffff",
                )
    return image
