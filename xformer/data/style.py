"""The style of every figure: style.mplstyle, with colours for light pages, dark pages, or both.

    with style.colours(style.DARK):
        figure = style.new_figure(6, 4)
        axes = figure.subplots()
        axes.plot(x, y, color="C0")  # C0, C1, ... are the colours of the palette
        style.write(figure, path)

Draw and write a figure inside the `with`, because matplotlib looks up C0 only when it writes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xformer.data.files import owner, sync

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("style.mplstyle")
FAINT = "#8c8c8c"  # for guides and notes; readable on every page


def _colours(ink: str, paper: str, palette: str) -> dict[str, Any]:
    """The settings for text of the colour `ink` on `paper`, with lines in the palette's colours."""
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(names, ink),
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "axes.prop_cycle": f"cycler('color', {palette.split()})",
    }


LIGHT: dict[str, Any] = {}  # the style sheet's own colours
# the same palette, lighter
DARK = _colours("#e8e8e8", "#16181d", "56B4E9 FF8C42 33C79B E39AC6 F0C24B A6D8F7 e8e8e8")
# Transparent, and readable on white and on black. Okabe and Ito's yellow, a grey and four colours
# of Tol's are added, because a study may compare more than seven models.
BOTH = _colours(
    "#7a7a7a",
    "none",
    "0072B2 D55E00 009E73 CC79A7 E69F00 56B4E9 F0E442 999999 882255 44AA99 332288 DDCC77",
)


@contextmanager
def colours(page: dict[str, Any]) -> Iterator[None]:
    """Draw in the project's style, in the colours of a page: LIGHT, DARK or BOTH."""
    from matplotlib import style as sheets

    with sheets.context([STYLE, page]):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of width x height inches, laid out so that nothing overlaps.

    The figure is made without pyplot, so no display is needed and the figure need not be closed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write(figure: Figure, path: str | Path) -> None:
    """Write a figure atomically. The path's ending decides the format, such as .png, .svg or .pdf.

    SVG and PDF files contain no date, so the same figure always gives the same file.
    """
    path = Path(path)
    ending = path.suffix[1:].lower()
    dates = {"svg": "Date", "pdf": "CreationDate"}
    options: Any = {kind: {"metadata": {date: None}} for kind, date in dates.items()}
    temporary = path.with_name(f".{path.name}.{owner()}")
    try:
        figure.savefig(temporary, format=ending, **options.get(ending, {"dpi": 160}))
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_light_and_dark(
    draw: Callable[[], Figure], directory: str | Path, name: str
) -> list[Path]:
    """Draw a figure twice and write NAME.svg, NAME.png and NAME.pdf, and NAME-dark.svg and
    NAME-dark.png.

    Returns the paths.
    """
    written = []
    for stem, page, endings in ((name, LIGHT, "svg png pdf"), (f"{name}-dark", DARK, "svg png")):
        with colours(page):
            figure = draw()
            for ending in endings.split():
                written.append(Path(directory) / f"{stem}.{ending}")
                write(figure, written[-1])
    return written


def svg(figure: Figure, salt: str) -> str:
    """A figure as an <svg> element for an HTML page, with its text as <text> elements.

    `salt` must differ between the figures of a page, so that the ids of their elements differ.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)


def plain_ticks(axis: Any) -> None:
    """Plain numbers, such as 0.01 and 10,000, on an axis (`axes.xaxis`), which may be logarithmic.

    By default matplotlib writes powers in mathematical notation, which the style switches off.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())
