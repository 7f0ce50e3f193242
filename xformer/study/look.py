"""The look of a report's figures: SVG that is read on white and on black."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INK = "#7a7a7a"  # readable on white and on black
# the rest of Okabe and Ito's palette, then four of Tol's: a study may have nine models
MORE = ("#56B4E9", "#D55E00", "#F0E442", "#999999", "#882255", "#44AA99", "#332288", "#DDCC77")


@contextmanager
def ink(salt: str) -> Iterator[Any]:
    """pyplot in the look of a report, which is read on white and on black; ids depend on `salt`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style: Any = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "legend.frameon": False,
        "text.parse_math": False,
    }
    with plt.rc_context(style):
        yield plt


def svg(figure: Any) -> str:
    """A figure as SVG without its preamble; the figure is closed."""
    from matplotlib import pyplot as plt

    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)
