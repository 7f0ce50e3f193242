"""What kept predictions add to a study's tests: multi-bootstraps, and the sources of variance.

A cell or a claim is a weighted sum of the scores of runs. `Shares` finds the weights, so that the
sum can be computed from other numbers too: here from scores under resampled test examples, and in
docs/verify.py from scores that are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from xformer.config import flat
from xformer.predictions import FOLDER, read
from xformer.study.claims import Verdict, published_difference
from xformer.study.plan import Job
from xformer.study.results import Replicate, Results
from xformer.study.spec import SEED, Levels, ScoreTable, Study
from xformer.study.statistics import (
    RESAMPLES,
    example_variance,
    interval,
    multibootstrap,
    nested_variances,
    rescored,
    seed_draws,
    two_sided,
)
from xformer.tasks.task import Predictions

ENOUGH = 3  # seeds that a multi-bootstrap needs
EXAMPLES = "test examples"  # a source of variance besides the factors of a study


@dataclass(frozen=True)
class Bootstrap:
    """A multi-bootstrap's interval, and its two-sided p."""

    interval: tuple[float, float]
    p: float


class Shares(Results):
    """A study's tables with a unit vector in place of each score. So the code that averages scores
    finds their weights: the share of each source."""

    def __init__(self, results: Results):
        vars(self).update(vars(results))  # a copy, without reading the results again
        self.sources = [  # key of the run, split, metric
            (key, split, metric)
            for key, splits in self.metrics.items()
            for split, scores in splits.items()
            for metric in scores
        ]
        self._place = {source: i for i, source in enumerate(self.sources)}
        self._drawn: dict[int, np.ndarray | str] = {}  # by number of the source

    def _value(self, job: Job, split: str, metric: str) -> np.ndarray:
        shares = np.zeros(len(self.sources))
        shares[self._place[job.key, split, metric]] = 1.0
        return shares

    def terms(self, shares: np.ndarray) -> list[tuple[float, str, str, str]]:
        """The sources of a sum: weight, key of the run, split, metric."""
        return [(float(shares[i]), *self.sources[i]) for i in np.flatnonzero(shares)]

    def pairs(self, table: ScoreTable, a: Levels, b: Levels) -> dict[Replicate, np.ndarray]:
        """The shares of the differences between two sides of a claim, by seed."""
        ours, theirs = self.replicates(table, a), self.replicates(table, b)
        return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}

    def bootstrap(self, seeds: Sequence[np.ndarray], margin: float = 0.0) -> Bootstrap | str:
        """The multi-bootstrap of the mean over seeds of some sums, or why there is none."""
        if len(seeds) < ENOUGH:
            return f"fewer than {ENOUGH} seeds"
        scores = []
        for shares in seeds:
            if isinstance(drawn := self.resampled(shares), str):
                return drawn
            scores.append(drawn)
        means = multibootstrap(np.array(scores), seed_draws(len(seeds)))
        return Bootstrap(interval(means), two_sided(means, margin))

    def resampled(self, shares: np.ndarray) -> np.ndarray | str:
        """A sum of scores under resampled test examples, (B,), or why it has none."""
        total = np.zeros(RESAMPLES)
        for number in map(int, np.flatnonzero(shares)):
            if number not in self._drawn:
                self._drawn[number] = self._resampled(*self.sources[number])
            if isinstance(drawn := self._drawn[number], str):
                return drawn
            total += shares[number] * drawn
        return total

    def _resampled(self, key: str, split: str, metric: str) -> np.ndarray | str:
        """A score of a run under resampled test examples, (B,), or why it has none."""
        path = self.plan.jobs[key].path / FOLDER / f"{split}.npz"
        if not path.is_file():
            return f"no predictions of {split} are kept"
        return resampled_score(read(path), metric)


def resampled_score(predictions: Predictions, metric: str) -> np.ndarray | str:
    """A score of some predictions under resampled test examples, (B,), or why it has none. Runs
    that were scored on equal labels have the same examples in each resample."""
    weighted = predictions.task.weighted(predictions).get(metric)
    if weighted is None:
        return f"{metric} is not computed for resampled examples"
    seed = crc32(np.ascontiguousarray(weighted.labels).tobytes())
    drawn = rescored(weighted.score, weighted.examples, seed)
    if np.isnan(drawn).any():
        return f"{metric} is not defined for every resample"
    return drawn


def claim_records(shares: Shares, verdict: Verdict) -> list[dict[str, Any]]:
    """A record of each part of a claim, for the overview of a report and of docs/findings.md. For
    each seed it has the terms of the difference, so that docs/verify.py can compute the numbers
    again."""
    claim, table = verdict.claim, verdict.table
    terms = [  # of each part, by seed
        [shares.terms(pair) for pair in shares.pairs(table, *claim.sides(part.level)).values()]
        for part in verdict.parts
    ]
    hours = _hours(shares, {key for of_part in terms for pair in of_part for _, key, *_ in pair})
    return [
        {
            "text": claim.text,
            "part": part.level,
            "verdict": verdict.state,  # of all parts together, as are the hours
            "registered": verdict.registered or "exploratory",
            "tie": claim.tie,
            "margin": verdict.margin,
            "shown": part.difference.words(table.digits),
            "effect": part.difference.mean,
            "half": part.difference.half,
            "p": part.difference.p,  # before every correction
            "published": published_difference(shares, verdict, part.level),
            "digits": table.digits,
            "hours": hours,
            "pairs": of_part,
        }
        for part, of_part in zip(verdict.parts, terms, strict=True)
    ]


def _hours(results: Results, keys: set[str]) -> float:
    """How long some runs took, and the runs that they started from."""
    left, every = list(keys), dict[str, None]()
    while left:
        key = left.pop()
        if key not in every:
            every[key] = None
            left += results.plan.jobs[key].waits
    return math.fsum(results.seconds.get(key, 0.0) for key in every) / 3600  # in any order


# ------------------------------------------------------------------------- where variance is from


def random_factors(study: Study, stage: str) -> dict[str, str]:
    """The random factors of a stage, each with what a level of it is."""
    factors = {}
    for factor in study.random_factors(stage):
        keys = {key for some in study.factors(stage)[factor].values() for key in flat(some)}
        factors[factor] = ", ".join(sorted(keys)) or factor
    if SEED in factors and study.registration is not None:
        factors[SEED] = study.registration.unit.partition(";")[0]  # without its limits
    return factors


def variances(
    results: Results, shares: Shares, table: ScoreTable, row: str, column: str
) -> dict[str, float]:
    """The variances that seeds and test examples add to one score of a cell, by name: the random
    factors with several levels, and EXAMPLES if all predictions are kept. Empty if there are
    fewer than two seeds."""
    factors = list(random_factors(results.study, table.stage))
    wanted = {table.rows: row, table.columns: column}
    scores = results.by_levels(table, wanted, factors)
    levels = [list(dict.fromkeys(key[i] for key in scores)) for i in range(len(factors))]
    several = [i for i, some in enumerate(levels) if len(some) > 1]
    if not several:
        return {}
    grid = np.full([len(levels[i]) for i in several], np.nan)
    for key, value in scores.items():
        grid[tuple(levels[i].index(key[i]) for i in several)] = value
    grid = grid[~np.isnan(grid.reshape(len(grid), -1)).any(1)]  # seeds with all their runs
    if len(grid) < 2:
        return {}
    parts = dict(zip((factors[i] for i in several), nested_variances(grid), strict=True))
    sums = shares.by_levels(table, wanted, factors).values()
    drawn = [shares.resampled(shares_of) for shares_of in sums]
    if not any(isinstance(one, str) for one in drawn):
        parts[EXAMPLES] = example_variance(np.array(drawn))
    return parts
