"""Statistics of scores over seeds: spread, intervals, and paired tests corrected for their number.

n seeds (or mappings) of one cell; two cells are compared seed by seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.optimize import brentq

from xformer.data.errors import BadInput

LEVEL = 0.95  # of every interval; tests decide at 1 - LEVEL
ENOUGH = 8  # scores that a bootstrap needs: with three it only spans the smallest to the largest
RESAMPLES = 10_000
POWER = 0.8  # the probability with which a detectable difference is found


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (n - 1) and median of n scores, and an interval of the mean.

    From 8 scores on the interval is a bootstrap's, bias-corrected and accelerated (Efron 1987);
    below that it is Student's. One score, and equal scores, have no interval.
    """

    scores: tuple[float, ...]
    mean: float
    deviation: float | None
    median: float
    interval: tuple[float, float] | None


def summarise(scores: Sequence[float]) -> Summary:
    """The summary of one score or more; its resampling is seeded. Raises BadInput if a score is not
    finite."""
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
    """Half the width of Student's interval of the mean of n scores with standard deviation 1."""
    return float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) / n**0.5


@dataclass(frozen=True)
class Difference:
    """The mean of a - b over paired scores, half its t interval, the two-sided p of "it is margin".

    One pair has neither interval nor p. Nor do pairs that all differ by the same: a spread of zero,
    as with two models at chance, does not say how far another seed would move the mean.
    """

    mean: float
    half: float | None
    p: float | None
    pairs: int = 1
    tests: int = 1  # that p must be corrected for

    @property
    def detectable(self) -> float | None:
        """The true difference that this many pairs with this spread detect with power 0.8."""
        if self.half is None:
            return None
        return detectable(self.pairs, tests=self.tests) * self.half / _t_half(self.pairs)


def compare(a: Sequence[float], b: Sequence[float], margin: float = 0.0) -> Difference:
    """The paired t test (Student 1908) of a - b against `margin`. Raises ValueError if the two
    differ in length, and BadInput if a score is not finite."""
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


def detectable(pairs: int, tests: int = 1) -> float:
    """The true mean of differences, in standard deviations of the differences, that the two-sided
    paired t test of this many pairs finds with probability POWER (Cohen 1988, section 2.2). With
    several `tests` it is that of the strictest of them (Bonferroni). Infinite for one pair."""
    if pairs < 2:
        return math.inf
    bound = stats.t.ppf(1 - (1 - LEVEL) / 2 / tests, pairs - 1)

    def lacking(effect: float) -> float:
        return float(stats.nct.sf(bound, pairs - 1, effect * pairs**0.5)) - POWER

    return float(brentq(lacking, 0.0, 100.0))


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted for their number by stepping down (Holm 1979), in the order given."""
    adjusted = [0.0] * len(ps)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted
