"""The paper's claims, tested on our scores.

A claim is a paired t test over seeds. If it is registered, `xformer.study.registration` says since
when.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from scipy import stats

from xformer.study.plan import Plan
from xformer.study.registration import first_result, origins
from xformer.study.results import Results, half_width
from xformer.study.spec import SEED, Claim, ScoreTable, Study, levels_of_claim, seeds_of
from xformer.study.statistics import (
    LEVEL,
    MOST,
    POWER,
    detectable,
    holm,
    pairs_for_tie,
    pairs_needed,
    tie_test,
)

# -------------------------------------------------------------------------------------- the test


@dataclass(frozen=True)
class Difference:
    """The differences a - b of paired scores, and the p of a test of their mean; see `paired_test`
    and `tied_test`.

    With one pair there is no p. The same holds if all pairs differ by the same amount: zero
    variance, as with two models at chance, says nothing about another seed.
    """

    each: tuple[float, ...]
    p: float | None
    tests: int = 1  # that p must be corrected for

    @property
    def mean(self) -> float:
        return statistics.mean(self.each)

    @property
    def half(self) -> float | None:
        """Half the width of the t interval; None for fewer than three pairs, or without spread."""
        if self.p is None or len(self.each) < 3:
            return None
        return half_width(len(self.each)) * statistics.stdev(self.each)

    def detectable(self, tie: bool) -> float | None:
        """The distance from the margin that this many pairs with this spread detect with power 0.8.
        The tests of a tie are one-sided."""
        if self.p is None:
            return None
        tests = self.tests / 2 if tie else self.tests
        return detectable(len(self.each), tests) * statistics.stdev(self.each)

    def words(self, digits: int) -> str:
        """ "+4.2 ± 8.1"; of two pairs, which have no interval, "+4.2 (seeds: +3.1, +5.3)"."""
        text = f"{self.mean:+z.{digits}f}"
        if self.half is not None:
            return f"{text} ± {self.half:.{digits}f}"
        two = ", ".join(f"{one:+z.{digits}f}" for one in self.each)
        return f"{text} (seeds: {two})" if len(self.each) == 2 else text

    def needed(self, margin: float, tie: bool) -> int | None:
        """How many pairs would decide a claim with probability 0.8, if the true mean and spread are
        those of these pairs. None if there is no spread, or if not even 1,000 would."""
        if self.p is None:
            return None
        deviation = statistics.stdev(self.each)
        mean, margin = self.mean / deviation, margin / deviation
        if tie and abs(mean) < margin:
            return pairs_for_tie(mean, margin, self.tests)
        return pairs_needed(abs(mean) - margin if tie else mean - margin, self.tests)


def paired_test(a: Sequence[float], b: Sequence[float], margin: float = 0.0) -> Difference:
    """The paired t test (Student 1908) of a - b against `margin`. Raises ValueError if the two
    differ in length."""
    differences = tuple(x - y for x, y in zip(a, b, strict=True))
    deviation = statistics.stdev(differences) if len(differences) > 1 else 0.0
    if deviation < 1e-9 * max(1e-9, *map(abs, a), *map(abs, b)):  # one pair, or only rounding
        return Difference(differences, None)
    return Difference(differences, float(stats.ttest_1samp(differences, margin).pvalue))


def tied_test(a: Sequence[float], b: Sequence[float], margin: float) -> Difference:
    """The test of "a and b tie within ± margin". If the mean difference lies inside the margins,
    two one-sided tests can show a tie. If it lies outside, a t test against the nearer margin can
    refute it."""
    mean = statistics.mean(x - y for x, y in zip(a, b, strict=True))
    difference = paired_test(a, b, math.copysign(margin, mean))
    if difference.p is None or abs(mean) >= margin:
        return difference
    return replace(difference, p=tie_test(difference.each, margin))


# ---------------------------------------------------------------------------------- the verdicts


class ClaimPart(NamedTuple):
    """One test of a claim: at a level of `each`, or on average ("")."""

    level: str
    difference: Difference
    p: float | None  # that of the difference, corrected for the parts of the claim


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, "holds", "fails", "undecided" or "no data", and its evidence."""

    claim: Claim
    table: ScoreTable
    levels: tuple[str, ...]  # at each of which the claim is tested; one if on average
    parts: tuple[ClaimPart, ...]  # those that have scores
    learnt: bool = True  # whether any of its runs is above chance
    registered: str = ""  # the commit that held the claim first, or "exploratory"
    overall: tuple[float | None, ...] = ()  # Holm's p of each part over all tests of the study
    seeds: int = 0  # that are planned for its next test

    @property
    def margin(self) -> float:
        """The claim's margin in the units of its table."""
        return self.claim.margin * self.table.scale

    @property
    def scored(self) -> int:
        """How many seeds have all scores that the claim needs."""
        short = len(self.parts) < len(self.levels)
        return 0 if short else min(len(part.difference.each) for part in self.parts)

    @property
    def early(self) -> bool:
        """Whether it is registered, and scores of `seeds` are missing. Testing without them would
        be a test that nobody planned."""
        return bool(self.registered and self.parts) and self.scored < self.seeds

    @property
    def state(self) -> str:
        """The verdict of the study's test."""
        return self._state([part.p for part in self.parts])

    @property
    def state_overall(self) -> str:
        """What it would be with the p-values that are adjusted over the study."""
        return self._state(self.overall)

    def _state(self, ps: Sequence[float | None]) -> str:
        states = []
        for part, p in zip(self.parts, ps, strict=True):
            mean = part.difference.mean
            ahead = abs(mean) < self.margin if self.claim.tie else mean > self.margin
            decided = p is not None and p <= 1 - LEVEL
            states.append(("holds" if ahead else "fails") if decided else "undecided")
        if not states:
            return "no data"
        if self.early or not self.learnt or len(states) < len(self.levels):
            return "undecided"
        return next((state for state in ("fails", "undecided") if state in states), "holds")

    @property
    def needed(self) -> str:
        """How many seeds would decide an undecided claim, in words; else nothing."""
        if self.state != "undecided" or not self.learnt:
            return ""
        if self.early:
            return f"{self.seeds}, as planned"
        left = [one.difference for one in self.parts if one.p is None or one.p > 1 - LEVEL]
        if not left:  # a level of `each` has no scores yet
            return ""
        if any(difference.p is None for difference in left):
            return "-"
        numbers = [one.needed(self.margin, self.claim.tie) or math.inf for one in left]
        return f"more than {MOST:,}" if math.inf in numbers else f"{max(numbers)}"

    def evidence(self) -> str:
        """The differences that decided the claim, in words."""
        margin, parts = self.margin, []
        for level, difference, p in self.parts:
            against = f"p against {margin:g}:" if margin else "p"
            if self.claim.tie and abs(difference.mean) < margin:
                against = f"p of a tie within {margin:g}:"
            elif self.claim.tie:  # it is tested against the nearer margin
                against = f"p against {math.copysign(margin, difference.mean):g}:"
            unknown = "one pair" if len(difference.each) == 1 else "no spread"
            small = unknown if p is None else words_of(p, against)
            parts.append(f"{level} {difference.words(self.table.digits)} ({small})".lstrip())
        floor = "" if self.learnt else "no run is above chance: "
        if self.scored < self.seeds:
            floor += f"{self.scored} of {self.seeds} planned seeds have all their scores: "
        return floor + "; ".join(parts) if parts else "no runs to compare"


def words_of(p: float, name: str = "p") -> str:
    """ "p 0.012", or "p < 0.001"."""
    return f"{name} {p:.3f}" if p >= 0.0005 else f"{name} < 0.001"


def verdicts(results: Results) -> list[Verdict]:
    """Every claim of a study, tested. The p-values of one claim are Holm-corrected, and beside that
    those of all claims together."""
    study = results.study
    tested = [_verdict(results, claim, study.table(claim.table)) for claim in study.claims]
    every = _over_study(tested, _looks(study))
    if study.registration is None:
        return every
    return [
        replace(verdict, registered=origin.words(first_result(results.plan, verdict.table), runs))
        for verdict, (origin, runs) in zip(every, origins(study.path, study.scale), strict=True)
    ]


def _verdict(results: Results, claim: Claim, table: ScoreTable) -> Verdict:
    levels = levels_of_claim(results.study, table, claim)
    margin = claim.margin * table.scale
    test = tied_test if claim.tie else paired_test
    differences = {}
    for level in levels:
        a, b = (results.replicates(table, side) for side in claim.sides(level))
        if shared := [seed for seed in a if seed in b]:
            pairs = [a[seed] for seed in shared], [b[seed] for seed in shared]
            differences[level] = test(*pairs, margin)
    ps, looks = [difference.p for difference in differences.values()], _looks(results.study)
    tests = looks * sum(p is not None for p in ps)
    parts = [
        ClaimPart(level, replace(difference, tests=tests), p)
        for (level, difference), p in zip(differences.items(), _adjusted(ps, looks), strict=True)
    ]
    verdict = Verdict(claim, table, levels, tuple(parts), _learnt(results, claim, table))
    return replace(verdict, seeds=_seeds_due(results.study, verdict))


def _over_study(verdicts: Sequence[Verdict], looks: int) -> list[Verdict]:
    """The verdicts, each with the p-values that are Holm-adjusted over all tests of the study."""
    ps = [part.difference.p for verdict in verdicts for part in verdict.parts]
    every = iter(_adjusted(ps, looks))
    return [replace(one, overall=tuple(next(every) for _ in one.parts)) for one in verdicts]


def _adjusted(ps: Sequence[float | None], looks: int) -> list[float | None]:
    """The p-values corrected for the number of tests (Holm) and of looks. Those that are missing
    stay missing, and do not count."""
    adjusted = iter(holm([p for p in ps if p is not None]))
    return [None if p is None else min(1.0, looks * next(adjusted)) for p in ps]


def published_difference(results: Results, verdict: Verdict, level: str) -> float | None:
    """What the paper's table says of a part of a claim: the mean difference of its numbers over all
    rows and columns that both sides cover. None if the paper lacks a number, or if the claim
    compares something that the table does not show."""
    study, table, means = results.study, verdict.table, []
    for side in verdict.claim.sides(level):
        parts, others = study.parts(table, side), side.keys() - {table.rows, table.columns}
        if table.published is None or table.show != "mean":
            return None
        if any(table.where.get(f) != side[f] for f in others):
            return None
        rows, columns = (
            {part[factor] for part in parts} if factor in side else study.levels_of(table)[factor]
            for factor in (table.rows, table.columns)
        )
        numbers = [results.published(table, row, column) for row in rows for column in columns]
        name = side.get(table.columns, "")
        if None in numbers and study.means(table).get(name) == table.means.get(name, ""):
            numbers = [results.published(table, row, name) for row in rows]  # of the mean itself
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            return None
        means.append(statistics.mean(known))
    return means[0] - means[1]


def _looks(study: Study) -> int:
    """How often each claim may be tested."""
    return study.registration.looks if study.registration else 1


def _seeds_due(study: Study, verdict: Verdict) -> int:
    """How many seeds the next test of a claim needs: all that it has at this scale or, before a
    planned extension begins, those of the registration."""
    if study.registration is not None and study.registration.looks > 1:
        registered = study.registration.seeds[SEED]
        if all(len(part.difference.each) <= registered for part in verdict.parts):
            return registered
    return _pairs(study, verdict.claim)


def _pairs(study: Study, claim: Claim) -> int:
    """The number of seeds that both sides of a claim have at this scale."""
    table = study.table(claim.table)
    return min(
        len(set.intersection(*(seeds_of(study, table, side, SEED) for side in claim.sides(level))))
        for level in levels_of_claim(study, table, claim)
    )


def _learnt(results: Results, claim: Claim, table: ScoreTable) -> bool:
    """Whether any run of a claim is above chance. True if some column of the table has no chance
    level. Models that are all at chance say nothing about the claim."""
    if not set(results.study.columns(table)) <= set(table.chance):
        return True
    scores = [score for side in (claim.better, claim.than) for score in results.scores(table, side)]
    return any(score.learnt for score in scores if score.value is not None)


# ------------------------------------------------------------------- before there are results


def registration_lines(plan: Plan) -> list[str]:
    """What --dry-run says of registered claims: margin, seeds, power and commit of each."""
    study = plan.study
    if study.registration is None:
        return []
    lines = ["", f"registered: {study.registration.words()}"]
    every = origins(study.path, study.scale)
    for claim, (origin, runs) in zip(study.claims, every, strict=True):
        since = origin.words(first_result(plan, study.table(claim.table)), runs)
        lines.append(f"  {claim.text} ({_power(study, claim)}): {since}")
    return [*lines, ""]


def _power(study: Study, claim: Claim) -> str:
    """The size of the difference that a registered claim's seeds find with probability 0.8, in
    words."""
    assert study.registration is not None
    table, pairs = study.table(claim.table), _pairs(study, claim)
    tests = len(levels_of_claim(study, table, claim)) * study.registration.looks
    distance = detectable(pairs, tests / 2 if claim.tie else tests)  # those of a tie are one-sided
    return (
        f"margin {claim.margin * table.scale:g}; with power {POWER:g}, {pairs} pairs detect a "
        f"difference {distance:.2f} standard deviations from the margin"
    )
