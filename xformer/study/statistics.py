"""What scores over seeds say: spread, intervals, paired tests corrected for their number.

n seeds (or mappings) of one cell; two cells are compared seed by seed.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from xformer.data.errors import BadInput

LEVEL = 0.95  # of every interval; tests decide at 1 - LEVEL
ENOUGH = 8  # scores for a bootstrap: that of three covers no more than their smallest and largest
RESAMPLES = 10_000


@dataclass(frozen=True)
class Summary:
    """Of n scores: mean, standard deviation (n - 1), median, and an interval of the mean.

    From 8 scores on it is a bootstrap's, bias-corrected and accelerated (Efron 1987), below that
    Student's; of one score, or of equal ones, there is none.
    """

    scores: tuple[float, ...]
    mean: float
    deviation: float | None
    median: float
    interval: tuple[float, float] | None


def summarise(scores: Sequence[float]) -> Summary:
    """The summary of at least one score; its resampling is seeded. Raises BadInput where a score is
    not finite."""
    _check_finite(scores)
    n = len(scores)
    deviation = statistics.stdev(scores) if n > 1 else None
    interval = None
    if deviation and n < ENOUGH:
        half = _t_half(n) * deviation
        interval = (statistics.mean(scores) - half, statistics.mean(scores) + half)
    elif deviation:
        found = stats.bootstrap(
            (np.asarray(scores, float),),
            np.mean,
            confidence_level=LEVEL,
            n_resamples=RESAMPLES,
            method="BCa",
            rng=np.random.default_rng(0),
        ).confidence_interval
        interval = (float(found.low), float(found.high))
        if not np.isfinite(interval).all():
            interval = None
    return Summary(
        tuple(scores), statistics.mean(scores), deviation, statistics.median(scores), interval
    )


def _check_finite(scores: Sequence[float]) -> None:
    for place, score in enumerate(scores, 1):
        if not math.isfinite(score):
            raise BadInput(f"score {place} of {len(scores)} is {score}: scores must be finite")


def _t_half(n: int) -> float:
    """Half of Student's interval of the mean of n scores whose standard deviation is 1."""
    return float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) / n**0.5


@dataclass(frozen=True)
class Difference:
    """Of paired scores a - b: the mean, its t interval, and the two-sided p of "it is `margin`".

    One pair has neither interval nor p, nor have pairs that all differ by the same: a spread of
    zero (both models at chance, say) tells nothing of how far another seed would move it.
    """

    mean: float
    half: float | None
    p: float | None
    pairs: int = 1
    tests: int = 1  # that p must be corrected for

    @property
    def detectable(self) -> float | None:
        """The true difference that so many pairs of this spread detect with power 0.8."""
        if self.half is None:
            return None
        return detectable(self.pairs, tests=self.tests) * self.half / _t_half(self.pairs)


def compare(a: Sequence[float], b: Sequence[float], margin: float = 0.0) -> Difference:
    """The paired t test (Student 1908) of a - b against `margin`. Raises ValueError if the two
    have other lengths, and BadInput where a score is not finite."""
    _check_finite(a)
    _check_finite(b)
    differences = [x - y for x, y in zip(a, b, strict=True)]
    n = len(differences)
    mean = statistics.mean(differences)
    if n < 2:
        return Difference(mean, None, None)
    deviation = statistics.stdev(differences)
    if deviation < 1e-9 * max(1e-9, *map(abs, a), *map(abs, b)):  # nothing but rounding
        return Difference(mean, None, None, n)
    t = abs(mean - margin) / (deviation / n**0.5)
    return Difference(mean, _t_half(n) * deviation, float(2 * stats.t.sf(t, n - 1)), n)


def detectable(pairs: int, power: float = 0.8, tests: int = 1) -> float:
    """The true mean of differences, in their standard deviations, that the two-sided paired t test
    of this many pairs finds with this probability (Cohen 1988, section 2.2), if it is the strictest
    of several `tests` (Bonferroni). Infinite for one pair."""
    if pairs < 2:
        return math.inf
    bound = stats.t.ppf(1 - (1 - LEVEL) / 2 / tests, pairs - 1)

    def lacking(effect: float) -> float:
        return float(stats.nct.sf(bound, pairs - 1, effect * pairs**0.5)) - power

    return float(brentq(lacking, 0.0, 100.0))


def pairs_for(effect: float, power: float = 0.8, most: int = 1000) -> int | None:
    """The fewest pairs whose test finds a mean difference of `effect` standard deviations with this
    probability; None if even `most` do not."""
    counts = range(2, most + 1)
    place = bisect_left(counts, True, key=lambda n: detectable(n, power) <= effect)
    return counts[place] if place < len(counts) else None


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted for their number, stepping down (Holm 1979); in the order given."""
    adjusted = [0.0] * len(ps)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted
