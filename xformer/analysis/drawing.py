"""Shared by the figures and messages of the analyses: names, spreads, heat maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

NAME_LENGTH = 28  # characters of a name in a figure


def of_stores(name: str) -> str:
    """The name of a store without its directory, or of joined stores with "and" between them."""
    return " and ".join(Path(part).name for part in name.split(" and "))


def spread(values: Any) -> dict[str, float]:
    """The mean of some numbers and, of two or more, their standard deviation (n - 1)."""
    mean = {"mean": float(np.mean(values))}
    return mean | {"deviation": float(np.std(values, ddof=1))} if len(values) > 1 else mean


def plus_minus(mean: float, deviation: float, runs: int) -> str:
    """A mean and its deviation: 6.474 ± 0.012; for two runs the mean and both numbers, 6.474
    (6.462, 6.486); for a single run 6.474."""
    if runs == 2:
        half = deviation / 2**0.5  # the deviation of a sample of two is their distance / sqrt(2)
        return f"{mean:.4g} ({mean - half:.4g}, {mean + half:.4g})"
    return f"{mean:.4g}" + (f" ± {deviation:.2g}" if runs > 2 else "")


def short(name: str) -> str:
    """A name that fits in a legend: if it is too long, only its end is kept."""
    return plain(name if len(name) <= NAME_LENGTH else f"…{name[1 - NAME_LENGTH :]}")


def plain(name: str) -> str:
    """A name for a legend. Matplotlib leaves a label that begins with _ out."""
    return f" {name}" if name.startswith("_") else name


def as_call(operation: dict[str, Any]) -> str:
    """An operation on weights as the user types it, such as keep_layers(first=6)."""
    given = {k: v for k, v in operation.items() if k != "op" and v is not None}
    arguments = ", ".join(f"{key}={value}" for key, value in given.items())
    return f"{operation.get('op', '?')}({arguments})" if arguments else operation.get("op", "?")


def heat_map(axes: Any, values: Any, title: str) -> Any:
    """Draw a matrix (rows, columns) of numbers from 0 to 1 as colours, row 0 at the bottom.

    A matrix of at most 8 by 8 shows its numbers too. Returns the image, for a colour bar.
    """
    rows, columns = len(values), len(values[0])
    image = axes.imshow(
        values, vmin=0.0, vmax=1.0, origin="lower", aspect="auto" if rows != columns else "equal"
    )
    axes.grid(False)
    axes.set_title(title)
    if max(rows, columns) <= 8:
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                ink = "#000000" if value > 0.55 else "#ffffff"  # black on bright colours
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
    return image
