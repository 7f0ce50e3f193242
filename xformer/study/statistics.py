"""The statistics of a study, as functions of arrays. No file is read, and every draw is seeded.

S seeds, N test examples, B resamples. A score under resampling is an array (B,), one number for
each resample of the test examples. `weights` (B, N) say how often a resample draws each example.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats
from scipy.optimize import brentq

LEVEL = 0.95  # of every interval; tests decide at 1 - LEVEL
POWER = 0.8  # numbers of seeds are those that find a difference with this probability
RESAMPLES = 1000  # of test examples and seeds
MOST = 1000  # pairs; a study that would need more is not worth a number
AT_ONCE = 4_000_000  # weights that are held at once

# ------------------------------------------------------------------------ tests of paired scores


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted for their number by stepping down (Holm 1979), in the order given. Raises
    ValueError if one is NaN."""
    if np.isnan(ps).any():
        raise ValueError("a p-value is NaN: leave its test out")
    adjusted = [0.0] * len(ps)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted


def tie_test(differences: Sequence[float], margin: float) -> float:
    """The p of two one-sided t tests (Schuirmann 1987) of "the mean lies outside ± margin". If it
    is small, the two sides of the pairs tie. Without any spread it is 0 or 1, and for one pair
    NaN."""
    if len(differences) < 2:
        return math.nan
    if np.ptp(differences) == 0:
        return float(abs(differences[0]) >= margin)
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    return float(max(above, below))


def detectable(pairs: int, tests: float = 1) -> float:
    """The true mean of differences, in standard deviations of the differences, that the two-sided
    paired t test of this many pairs finds with probability POWER (Cohen 1988, section 2.2). With
    several `tests` it is that of the strictest of them (Bonferroni), with 0.5 that of a one-sided
    test. Infinite for one pair."""
    if pairs < 2:
        return math.inf
    high = 100.0
    while _power(pairs, high, tests) < POWER:  # two pairs and many tests
        high *= 2
    return float(brentq(lambda effect: _power(pairs, effect, tests) - POWER, 0.0, high))


def _power(pairs: int, effect: float, tests: float) -> float:
    """The probability that the t test finds a difference of `effect` standard deviations."""
    bound, away = stats.t.ppf(1 - (1 - LEVEL) / 2 / tests, pairs - 1), effect * pairs**0.5
    return 1.0 if away > 10 * bound + 100 else float(stats.nct.sf(bound, pairs - 1, away))


def tie_power(pairs: int, effect: float, margin: float, tests: int = 1) -> float:
    """The probability that two one-sided tests find a tie. The true mean `effect` and the margin
    are in standard deviations of the differences.

    Given the deviation of a sample, the mean must lie within certain bounds, which is a normal
    probability. It is averaged over the quantiles of that deviation.
    """
    freedom = pairs - 1
    deviations = np.sqrt(stats.chi2.ppf((np.arange(2000) + 0.5) / 2000, freedom) / freedom)
    bound = stats.t.ppf(1 - (1 - LEVEL) / tests, freedom)
    reach, mean = margin * pairs**0.5 - bound * deviations, effect * pairs**0.5
    inside = stats.norm.cdf(reach - mean) - stats.norm.cdf(-reach - mean)
    return float(np.where(reach > 0, inside, 0.0).mean())


def pairs_needed(effect: float, tests: int = 1) -> int | None:
    """The smallest number of pairs with which the t test finds a difference of `effect` standard
    deviations with probability POWER. None if it is above MOST."""
    return _smallest(lambda pairs: _power(pairs, abs(effect), tests))


def pairs_for_tie(effect: float, margin: float, tests: int = 1) -> int | None:
    """The same for two one-sided tests: the number of pairs that finds a tie."""
    if abs(effect) >= margin:
        return None
    return _smallest(lambda pairs: tie_power(pairs, effect, margin, tests))


def _smallest(power: Callable[[int], float]) -> int | None:
    """The smallest number of pairs with this power; power grows with their number."""
    place = bisect_left(range(2, MOST + 1), True, key=lambda pairs: power(pairs) >= POWER)
    return place + 2 if place + 2 <= MOST else None


# ------------------------------------------------------------------------------- multi-bootstrap


def rescored(score: Callable[[np.ndarray], np.ndarray], examples: int, seed: int) -> np.ndarray:
    """A score under resampling, (B,). `score` maps weights (b, N) to scores (b,). Equal `examples`
    and `seed` draw the same examples, so that scores on one test set are paired."""
    rng, few = np.random.default_rng(seed), max(1, AT_ONCE // examples)
    parts = [min(few, RESAMPLES - done) for done in range(0, RESAMPLES, few)]
    even = np.full(examples, 1 / examples)
    return np.concatenate([score(rng.multinomial(examples, even, part)) for part in parts])


def seed_draws(seeds: int) -> np.ndarray:
    """Seeds drawn with replacement, (B, S): the numbers of those of each resample."""
    return np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))


def multibootstrap(a: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Mean scores over resampled seeds and test examples (Sellam et al. 2022), (B,).

    `a` (S, B) has the scores of each seed under resampling, `drawn` (B, S) the seeds of each
    resample. If two models share their seeds, `a` has the differences of their scores, so that both
    are resampled as pairs. For a mean over tasks it has the means of the tasks' scores: a seed is
    drawn for all tasks at once and test examples within each task, as strata. Raises ValueError if
    `drawn` is for another number of seeds.
    """
    if drawn.shape[1] != len(a):
        raise ValueError(f"`drawn` is for {drawn.shape[1]} seeds, but there are {len(a)}")
    return a[drawn.T, np.arange(len(drawn))].mean(0)


def interval(drawn: np.ndarray) -> tuple[float, float]:
    """The percentile interval of resampled numbers (B,)."""
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def two_sided(drawn: np.ndarray, margin: float = 0.0) -> float:
    """The two-sided p of "the mean is margin", from resampled means (B,). Twice the share of means
    on the far side of the margin. One is added to the count, because B resamples cannot show that
    p = 0. Raises ValueError if a mean is NaN."""
    if np.isnan(drawn).any():
        raise ValueError("a resampled mean is NaN")
    fewest = min((drawn <= margin).sum(), (drawn >= margin).sum())
    return float(min(1.0, 2 * (fewest + 1) / (len(drawn) + 1)))


# ------------------------------------------------------------------------- where variance is from


def nested_variances(scores: np.ndarray) -> list[float]:
    """The variance that each random factor adds to a score; scores (n1, n2, ...).

    Each factor is nested in those before it, such as fine-tunings of a pre-training, and has at
    least two levels. These are the unbiased estimates of the analysis of variance (Searle, Casella
    & McCulloch 1992, chapter 3). With few levels an estimate can be below 0.
    """
    estimates, of_mean = list[float](), 0.0
    while scores.ndim:
        variance = float(scores.var(axis=-1, ddof=1).mean())  # its own and that of means below it
        estimates.insert(0, variance - of_mean)
        of_mean = variance / scores.shape[-1]
        scores = scores.mean(-1)
    return estimates


def example_variance(scores: np.ndarray) -> float:
    """The variance that the choice of test examples adds to the scores of all runs alike, from
    scores under resampling (runs, B): the mean covariance of two runs. With one run it is that
    run's variance. What examples add to a single run is part of the variance between runs."""
    runs = len(scores)
    alone, together = scores.var(1, ddof=1).mean(), scores.mean(0).var(ddof=1)
    return float(alone if runs == 1 else (runs * together - alone) / (runs - 1))
