"""What scores over seeds say: spread, bootstrap intervals, paired tests corrected for their number.

n seeds (or mappings) of one cell; two cells are compared seed by seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95  # of every interval; tests decide at 1 - LEVEL
RESAMPLES = 10_000


@dataclass(frozen=True)
class Summary:
    """Of n scores: mean, standard deviation (n - 1), median, and a bootstrap interval of the mean.

    The interval is bias-corrected and accelerated (Efron 1987); with fewer than 3 scores, or equal
    ones, there is none.
    """

    scores: tuple[float, ...]
    mean: float
    deviation: float | None
    median: float
    interval: tuple[float, float] | None


def summarise(scores: Sequence[float]) -> Summary:
    """The summary of at least one score; its resampling is seeded."""
    n = len(scores)
    interval = None
    if n >= 3 and len(set(scores)) > 1:
        found = stats.bootstrap(
            (np.asarray(scores, float),), np.mean, confidence_level=LEVEL, n_resamples=RESAMPLES,
            method="BCa", rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        interval = (float(found.low), float(found.high))
        if not np.isfinite(interval).all():
            interval = None
    deviation = statistics.stdev(scores) if n > 1 else None
    return Summary(tuple(scores), statistics.mean(scores), deviation, statistics.median(scores),
                   interval)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """Of paired scores a - b: the mean, its t interval, and the two-sided p of "it is `margin`".

    One pair, or none, has neither interval nor p. Pairs that all differ by the same have p = 0
    unless they differ by `margin` exactly.
    """

    mean: float
    half: float | None
    p: float | None


def compare(a: Sequence[float], b: Sequence[float], margin: float = 0.0) -> Difference:
    """The paired t test (Student 1908) of a - b against `margin`. Raises ValueError if the two
    have other lengths."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    n = len(differences)
    mean = statistics.mean(differences)
    if n < 2:
        return Difference(mean, None, None)
    error = statistics.stdev(differences) / n**0.5
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * error
    if error < 1e-15:
        return Difference(mean, 0.0, float(abs(mean - margin) < 1e-12))
    t = abs(mean - margin) / error
    return Difference(mean, half, float(2 * stats.t.sf(t, n - 1)))


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted for their number, stepping down (Holm 1979); in the order given."""
    adjusted = [0.0] * len(ps)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted
