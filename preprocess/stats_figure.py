"""A store in one figure: ids by rank, rows by length, and rows by class if there are classes."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data import style
from xformer.data.errors import BadInput

BINS = 40  # the most bins in the histogram of lengths
CLASSES = 24  # the most classes shown; all rarer classes share one bar
POINTS = 1000  # the most points of the curve of ids by rank, evenly spaced on its logarithmic axis


def check_figure(path: Path) -> None:
    """Raise BadInput if a figure cannot be written with the ending of this path."""
    from matplotlib.figure import Figure

    endings = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in endings:
        raise BadInput(f"{path}: no figure can have this ending; give .png, .pdf or .svg")


def draw_store(
    path: Path,
    about: dict[str, Any],
    counts: dict[str, np.ndarray],
    lengths: dict[str, Counter[int]],
) -> None:
    """Draw a store: the counts of ids, the rows by length and, if there are classes, their rows.

    `about` is the result of `stats.describe_store`; `counts` and `lengths` have one entry for each
    split. Ids are drawn for the training split if there is one. The file appears only once it is
    complete.
    """
    classes = _classes(about)
    panels, height = (3 if classes else 2), max(4.0, 1.4 + 0.24 * len(classes))
    with style.colours(style.LIGHT):
        figure = style.new_figure(4.6 * panels, height)
        axes = figure.subplots(1, panels)
        split = "train" if "train" in counts else next(iter(counts))
        _draw_ranks(axes[0], split, counts[split])
        _draw_lengths(axes[1], lengths)
        if classes:
            _draw_classes(axes[2], about, classes)
        rows, tokens = (
            sum(s[unit] for s in about["splits"].values()) for unit in ("rows", "tokens")
        )
        figure.suptitle(
            f"{about['store']}: {rows:,} rows, {tokens:,} tokens, "
            f"vocabulary {about['vocab_size']:,}"
        )
        style.write(figure, path)


def _draw_ranks(axes: Any, split: str, counts: np.ndarray) -> None:
    from matplotlib.ticker import FixedLocator

    ordered = np.sort(counts[counts > 0])[::-1]
    number = len(ordered)
    axes.set(title=f"Ids by rank ({split})", xlabel="rank of the id", ylabel="occurrences")
    if not number:
        return
    ranks = np.unique(np.round(np.geomspace(1, number, POINTS)).astype(np.int64))
    guide = ordered.sum() / (1 / np.arange(1, number + 1)).sum() / ranks
    marks = "o" if number <= BINS else "-"
    axes.loglog(
        ranks,
        ordered[ranks - 1],
        marks,
        color="C0",
        ms=4,
        lw=2,
        label=f"{number:,} ids that occur",
    )
    axes.loglog(ranks, guide, "--", color=style.FAINT, lw=1.2, label="1 / rank (Zipf)")
    least, most = min(ordered[-1], guide[-1]), max(ordered[0], guide[0])
    # Whole decades, so that at least two of them are labelled and nothing between them.
    bottom, top = math.floor(math.log10(least)), math.ceil(math.log10(most * 1.05))
    axes.set_ylim(0.7 * 10.0**bottom, 10.0 ** max(top, bottom + 1))
    axes.set_xlim(0.85, max(number, 2) * 1.2)
    style.plain_ticks(axes.yaxis)
    style.plain_ticks(axes.xaxis)
    if number <= 200:
        few = range(1, number + 1) if number < 9 else (1, 2, 3, 5, 10, 20, 50, 100, 200)
        axes.xaxis.set_major_locator(FixedLocator([rank for rank in few if rank <= number]))
        axes.xaxis.set_minor_locator(FixedLocator([]))
    axes.legend(fontsize=8.5, loc="lower left")


def edges(least: int, most: int, median: float) -> np.ndarray:
    """The bounds of histogram bins, which lie between whole numbers.

    The bins have equal widths. If a few rows are far longer than most, the widths grow instead.
    """
    if least > 0 and most > 20 * median:
        return np.unique(np.round(np.geomspace(least, most + 1, BINS + 1))) - 0.5
    width = math.ceil((most - least + 1) / BINS)
    return np.arange(least, most + width + 1, width) - 0.5


def _draw_lengths(axes: Any, lengths: dict[str, Counter[int]]) -> None:
    from matplotlib.ticker import MaxNLocator

    together = sum(lengths.values(), Counter())
    values = np.array(sorted(together))
    places = np.cumsum([together[value] for value in values])
    median = float(values[np.searchsorted(places, places[-1] / 2)])
    bounds = edges(int(values[0]), int(values[-1]), median)
    heights = []
    for i, (name, rows) in enumerate(lengths.items()):
        height, _ = np.histogram(list(rows), bounds, weights=list(rows.values()))
        heights.append(height)
        colour = f"C{i}"  # the palette starts again after its last colour
        axes.stairs(height, bounds, color=colour, lw=1.6, label=f"{name}, {rows.total():,} rows")
        axes.stairs(height, bounds, color=colour, alpha=0.15, fill=True)
    axes.set(title="Rows by length", xlabel="tokens in a row", ylabel="rows")
    all_heights = np.concatenate(heights)
    if all_heights.max() > 50 * all_heights[all_heights > 0].min():
        axes.set_yscale("log")
        axes.set_ylim(0.7, 10.0 ** math.ceil(math.log10(all_heights.max() * 1.5)))
    else:
        axes.set_ylim(0, all_heights.max() * 1.25)
    style.plain_ticks(axes.yaxis)
    if np.ptp(np.diff(bounds)) > 0:
        axes.set_xscale("log")
    else:
        middle, reach = (bounds[0] + bounds[-1]) / 2, max(bounds[-1] - bounds[0], 8.0)
        axes.set_xlim(middle - 0.55 * reach, middle + 0.55 * reach)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    style.plain_ticks(axes.xaxis)
    axes.legend(fontsize=8.5)


def _classes(about: dict[str, Any]) -> list[str]:
    """The labels to draw, most frequent first; none if the store's labels cannot be counted."""
    if about["kind"] not in ("class", "span", "tag", "choice"):
        return []
    total: Counter[str] = Counter()
    for split in about["splits"].values():
        total.update(split.get("labels", {}))
    return [label for label, _ in total.most_common(CLASSES)]


def _draw_classes(axes: Any, about: dict[str, Any], classes: list[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    splits = {name: split["labels"] for name, split in about["splits"].items() if "labels" in split}
    rest = {
        name: sum(labels.values()) - sum(labels.get(label, 0) for label in classes)
        for name, labels in splits.items()
    }
    others = len(set().union(*splits.values()) - set(classes))
    names = [label if len(label) <= 24 else f"{label[:23]}…" for label in classes]
    names += [f"{others} others"] if others else []
    places, width = np.arange(len(names)), 0.8 / len(splits)
    values = []
    for i, (split, labels) in enumerate(splits.items()):
        counts = [labels.get(label, 0) for label in classes] + ([rest[split]] if others else [])
        values += counts
        axes.barh(places + (i + 0.5) * width - 0.4, counts, width * 0.9, color=f"C{i}")
    if max(values) > 50 * min(value for value in values if value):
        axes.set_xscale("log")
        axes.set_xlim(left=0.7)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    style.plain_ticks(axes.xaxis)
    axes.set_yticks(places, names, fontsize=8.5)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    what = {"tag": "words", "choice": "questions"}.get(about["kind"], "rows")
    axes.set(title=f"{what.title()} by label (colours as in the plot on the left)", xlabel=what)
