"""The picture of a claim: a row for each of its parts, with the difference of every seed as a dot.

It is a small SVG of its own, readable on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from matplotlib.ticker import MaxNLocator

from xformer.data.style import FAINT
from xformer.study.claims import Verdict

WIDTH, EDGE, ROW = 420, 30, 44  # pixels: the picture, its margin on both sides, a row
OURS, THEIRS = "#0072B2", "#D55E00"  # the first colours of the style
LEGEND = (
    "Each dot is the difference of one seed. The diamond is their mean, and the bar is the 95 % "
    "interval of the mean (from three seeds on). The solid line marks 0, and dashed lines the "
    "margin."
)
LEGEND_THEIRS = " Orange triangles mark the published difference."


def draw(verdict: Verdict, published: Sequence[float | None]) -> str:
    """An SVG of a claim's differences, with the paper's difference of each part if it is known."""
    claim, margin = verdict.claim, verdict.margin
    margins = [margin, -margin] if claim.tie else [margin] if margin else []
    shown = [0.0, *margins, *(number for number in published if number is not None)]
    for one in (part.difference for part in verdict.parts):
        shown += [*one.each, one.mean - (one.half or 0), one.mean + (one.half or 0)]
    low, high = min(shown), max(shown)
    if high - low < 1e-9:
        low, high = low - 1, high + 1
    ticks = [round(float(tick), 9) for tick in MaxNLocator(5).tick_values(low, high)]
    bottom = ROW * len(verdict.parts)
    middles = range(30, bottom, ROW)

    def x(value: float) -> str:
        share = (value - ticks[0]) / (ticks[-1] - ticks[0])
        return f"{EDGE + share * (WIDTH - 2 * EDGE):.1f}"

    def parts() -> Iterator[str]:
        for value in (0.0, *margins):
            dashes = " stroke-dasharray='5 3'" if value else ""
            yield f"<path d='M{x(value)} 4V{bottom}' stroke='{FAINT}'{dashes}/>"
        yield f"<path d='M{EDGE} {bottom}H{WIDTH - EDGE}' stroke='{FAINT}'/>"
        for tick in ticks:
            text = f"{tick:+g}" if tick else "0"
            yield f"<text x='{x(tick)}' y='{bottom + 14}' text-anchor='middle'>{text}</text>"
        for y, (level, one, _), theirs in zip(middles, verdict.parts, published, strict=True):
            yield f"<text x='2' y='{y - 18}'>{escape(level)}</text>"
            for i, value in enumerate(one.each):  # equal differences do not overlap
                spot = f"cx='{x(value)}' cy='{y - 8 + 2 * (i % 3 - 1)}'"
                yield f"<circle {spot} r='3' fill='{OURS}' fill-opacity='.45'/>"
            if one.half is not None:
                ends = f"M{x(one.mean - one.half)} {y}H{x(one.mean + one.half)}"
                yield f"<path d='{ends}' stroke='{OURS}' stroke-width='2'/>"
            yield f"<path d='M{x(one.mean)} {y - 5}l5 5l-5 5l-5-5z' fill='{OURS}'/>"
            if theirs is not None:
                yield f"<path d='M{x(theirs)} {y + 2}l5 9h-10z' fill='{THEIRS}'/>"

    size = f"width='{WIDTH}' height='{bottom + 20}' viewBox='0 0 {WIDTH} {bottom + 20}'"
    look = f"font-family='sans-serif' font-size='11' fill='{FAINT}'"
    name = escape(f"{claim.text}: {verdict.evidence()}")
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {look} role='img' aria-label='{name}'>"
    return "\n".join([head, *parts(), "</svg>\n"])
