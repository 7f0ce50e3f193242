"""From finished runs to cells, verdicts, and results.csv."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from xformer.data.errors import BadInput
from xformer.data.files import read_run_json
from xformer.study import registered
from xformer.study.notes import Notes
from xformer.study.plan import Plan, Work
from xformer.study.pool import Outcome
from xformer.study.report import events
from xformer.study.shapes import Shapes
from xformer.study.spec import METRIC, SEED, STATISTICS, Claim, Levels, Picture, Study, Table
from xformer.study.spec import Summary as SummaryTable
from xformer.study.statistics import LEVEL, Difference, Summary, compare, holm, summarise

ROUNDING = 5e-4  # of a score at chance
Replicate = tuple[tuple[str, str], ...]  # what one score of several belongs to: a seed


@dataclass(frozen=True)
class Cell:
    """One row and column of a table: our runs, and what the paper prints there."""

    row: str
    column: str
    runs: tuple[Work, ...]  # the finished ones
    summary: Summary | None  # None where none is finished
    published: float | None
    show: str = "mean"
    best: float | None = None  # the highest number, where the table shows it
    at_chance: int = 0  # of the runs, those that score no more than a model that has learnt nothing

    @property
    def value(self) -> float | None:
        """What the cell shows, in the units of the table; None where there is nothing."""
        if self.summary is None:
            return None
        return self.summary.deviation if self.show == "deviation" else self.summary.mean

    @property
    def difference(self) -> float | None:
        """Ours less the published, in the units of the table."""
        if self.value is None or self.published is None:
            return None
        return self.value - self.published


@dataclass(frozen=True)
class Described:
    """A statistic of a table's cells: ours, and the published one."""

    row: str
    column: str
    value: float | None
    published: float | None


@dataclass(frozen=True)
class Verdict:
    """What became of a claim: "holds", "fails", "undecided" or "no data", and on what ground."""

    claim: Claim
    state: str
    parts: tuple[tuple[str, Difference, float | None], ...]  # (level of each, difference, Holm's p)
    digits: int = 1
    registered: str = ""  # the commit that held the claim first, or "exploration"
    learnt: bool = True  # whether any of its runs is above chance


class Results:
    """The scores of a study's finished runs."""

    def __init__(self, study: Study, plan: Plan):
        self.study, self.plan = study, plan
        words = Notes(plan, Shapes(plan))
        self.notes, self.deviations = words.notes, words.deviations
        self.metrics: dict[str, dict[str, dict[str, float]]] = {}
        logs = any(
            metric.startswith("train.") for table in study.tables for metric in _metrics(table)
        )
        for work in plan.works.values():
            if work.stage and work.done:
                content = read_run_json(work.proof)
                found = content.get("metrics") if isinstance(content, dict) else None
                if found is not None and "split" in content:  # evaluate.py scores one split
                    found = {content["split"]: found}
                if not _are_scores(found):
                    raise BadInput(f"{work.proof} is no result: it has no metrics")
                assert found is not None
                _check_finite(work, found)
                if logs and work.recipe is not None:
                    found = {**found, "train": _last(work.path)}
                    _check_finite(work, {"train": found["train"]})
                self.metrics[work.key] = found

    def score(self, work: Work, table: Table, column: str) -> float | None:
        """The run's score in a column of a table, in its units, less that of the run that `minus`
        names; None where it is not there yet."""
        value = self._score(work, table, column)
        if not table.minus or value is None:
            return value
        levels = {factor: work.levels[factor] for factor in self.study.factors(table.minus)}
        base = next((w for w in self.plan.runs(table.minus) if w.levels == levels), None)
        less = None if base is None else self._score(base, table, column)
        return None if less is None else value - less

    def _score(self, work: Work, table: Table, column: str) -> float | None:
        metric = table.metric[column] if isinstance(table.metric, dict) else table.metric
        named, _, metric = metric.rpartition(".")
        splits = self.metrics.get(work.key)
        if splits is None:
            return None
        found = []
        for split in (named or table.split).split("+"):
            if metric not in splits.get(split, {}):
                known = ", ".join(f"{s}.{m}" for s, scores in splits.items() for m in scores)
                raise BadInput(
                    f"{self.study.path}: table {table.name}: {work.name} has no "
                    f"{split}.{metric}; it has {known}"
                )
            found.append(splits[split][metric])
        return mean(found) * (100 if table.percent else 1)

    def _best(self, runs: Sequence[Work], table: Table, column: str) -> float | None:
        """The highest score of some runs, or of their validations where the table asks for it."""
        found = [score for work in runs if (score := self.score(work, table, column)) is not None]
        metric = table.metric[column] if isinstance(table.metric, dict) else table.metric
        split, _, metric = metric.rpartition(".")
        if table.best == "epoch" and (split or table.split) == "valid":
            for work in runs:
                log = work.path / "log.jsonl"
                every = events(work.path, "validation") if log.is_file() else []
                scores = [float(event[metric]) for event in every if metric in event]
                if not all(map(math.isfinite, scores)):
                    raise BadInput(f"{log}: {metric} of a validation is not finite")
                found += [score * (100 if table.percent else 1) for score in scores]
        return max(found) if found and table.best != "none" else None

    def _runs(self, table: Table, wanted: Levels) -> list[Work]:
        """The table's runs at these levels."""
        wanted = {**table.where, **wanted}
        return [w for w in self.plan.runs(table.stage) if wanted.items() <= w.levels.items()]

    def cells(self, table: Table) -> list[list[Cell]]:
        """The cells of a table, row by row: its columns, then their means."""
        columns = self.study.columns(table)
        means = self.means(table)
        return [
            [self._cell(table, row, column) for column in columns]
            + [self._mean(table, row, name, parts) for name, parts in means.items()]
            for row in self.study.factors(table.stage)[table.rows]
        ]

    def means(self, table: Table) -> dict[str, tuple[str, ...]]:
        """The columns of each mean that there are at this scale."""
        columns = self.study.columns(table)
        found = {
            name: tuple(part for part in parts if part in columns)
            for name, parts in table.means.items()
        }
        return {name: parts for name, parts in found.items() if parts}

    def _cell(self, table: Table, row: str, column: str) -> Cell:
        wanted = {table.rows: row}
        if table.columns != METRIC:
            wanted[table.columns] = column
        runs = tuple(
            work
            for work in self._runs(table, wanted)
            if self.score(work, table, column) is not None
        )
        scores = list(self._by_replicate(table, {**wanted, table.columns: column}).values())
        summary = summarise(scores) if scores else None
        published = self._published(table, row, column)
        best = self._best(runs, table, column)
        failed = sum(self._at_chance(work, table, column) for work in runs)
        return Cell(row, column, runs, summary, published, table.show, best, failed)

    def _at_chance(self, work: Work, table: Table, column: str) -> bool:
        """Whether a run scores no more than the table's `chance`, up to rounding."""
        score, chance = self._score(work, table, column), table.chance.get(column)
        scale = 100 if table.percent else 1
        return score is not None and chance is not None and score <= scale * (chance + ROUNDING)

    def _mean(self, table: Table, row: str, name: str, parts: tuple[str, ...]) -> Cell:
        """The mean of some columns of each replicate that has them all."""
        found = [self._by_replicate(table, {table.rows: row, table.columns: p}) for p in parts]
        scores = [
            mean(one[key] for one in found) for key in found[0] if all(key in one for one in found)
        ]
        summary = summarise(scores) if scores else None
        whole = len(parts) == len(table.means[name])
        published = self._published(table, row, name) if whole else None
        runs = tuple(w for p in parts for w in self._cell(table, row, p).runs) if scores else ()
        return Cell(row, name, runs, summary, published, table.show)

    def _published(self, table: Table, row: str, column: str) -> float | None:
        if table.published is None:
            return None
        names = (
            self.study.stands_for(table.rows, row),
            self.study.stands_for(table.columns, column),
        )
        return table.published.number(*names)

    def described(self, summary: SummaryTable) -> list[list[Described]]:
        """A summary's rows: the statistics of a table's cells at each level of a factor.

        A cell counts once, by its mean over runs. The deviation is that of a sample, the quartiles
        are interpolated, as pandas does. The differences of the papers.
        """
        table = next(t for t in self.study.tables if t.name == summary.table)
        width = len(self.study.columns(table))  # without the means
        cells = [cell for row in self.cells(table) for cell in row[:width]]
        by_row = summary.by == table.rows
        groups: dict[str, list[float]] = {}
        for cell in cells:
            group = groups.setdefault(cell.row if by_row else cell.column, [])
            if cell.summary is not None:
                group.append(cell.summary.mean)
        rows = []
        for level, values in groups.items():
            name = self.study.stands_for(summary.by, level)
            printed = summary.published
            rows.append(
                [
                    Described(level, what, value, printed.number(name, what) if printed else None)
                    for what, value in describe(values).items()
                ]
            )
        return rows

    def verdicts(self) -> list[Verdict]:
        """Every claim; its parts are tests corrected for their number (Holm)."""
        tables = {table.name: table for table in self.study.tables}
        found = [self._verdict(claim, tables[claim.table]) for claim in self.study.claims]
        if self.study.registration is None:
            return found
        first = registered.first_result(self.plan)
        of, runs = registered.origins(self.study.path, self.study.scale)
        return [replace(v, registered=o.words(first, runs)) for v, o in zip(found, of, strict=True)]

    def _verdict(self, claim: Claim, table: Table) -> Verdict:
        factors = self.study.factors(table.stage)
        levels = list(factors.get(claim.each) or [""])
        if claim.each == METRIC:
            levels = list(self.study.columns(table))
        found = []
        for level in levels:
            fixed = {claim.each: level} if claim.each else {}
            pair = [
                self._by_replicate(table, {**side, **fixed}) for side in (claim.better, claim.than)
            ]
            shared = [key for key in pair[0] if key in pair[1]]
            if shared:
                a, b = ([side[key] for key in shared] for side in pair)
                scale = 100 if table.percent else 1
                found.append((level, compare(a, b, claim.margin * scale)))
        tested = [d.p for _, d in found if d.p is not None]
        adjusted = iter(holm(tested))
        looks = self.study.registration.looks if self.study.registration else 1
        parts = tuple(
            (
                level,
                replace(d, tests=len(tested) * looks),
                None if d.p is None else min(1.0, looks * next(adjusted)),
            )
            for level, d in found
        )
        scale = 100 if table.percent else 1
        states = [_state(d, p, claim.margin * scale) for _, d, p in parts]
        learnt = self._learnt(claim, table)
        if not states:
            state = "no data"
        elif not learnt:
            state = "undecided"
        elif "fails" in states:
            state = "fails"
        elif "undecided" in states or len(states) < len(levels):
            state = "undecided"
        else:
            state = "holds"
        return Verdict(claim, state, parts, table.digits, learnt=learnt)

    def _learnt(self, claim: Claim, table: Table) -> bool:
        """Whether any run of a claim scores more than a model that has learnt nothing, as far as
        the table says what that scores. Otherwise a tie says nothing."""
        if not set(self.study.columns(table)) <= set(table.chance):
            return True
        for side in (claim.better, claim.than):
            levels = {factor: level for factor, level in side.items() if factor != METRIC}
            for work in self._runs(table, levels):
                column = {**work.levels, **side}.get(table.columns, "")
                known = self._score(work, table, column) is not None
                if known and not self._at_chance(work, table, column):
                    return True
        return False

    def _by_replicate(self, table: Table, wanted: Levels) -> dict[Replicate, float]:
        """Scores of the runs at these levels by seed, averaged over everything else: a seed that
        lacks a part of it is left out, lest unlike averages be compared. Where no seed varies, by
        all factors but the table's own."""
        inside = {table.rows, table.columns} | set(wanted)
        rest = [f for f in self.study.factors(table.stage) if f not in inside]
        replicates = [SEED] if SEED in rest else rest
        groups: dict[Replicate, list[float | None]] = {}
        levels = {factor: level for factor, level in wanted.items() if factor != METRIC}
        for work in self._runs(table, levels):
            column = {**work.levels, **wanted}[table.columns]
            key = tuple((factor, work.levels[factor]) for factor in replicates)
            groups.setdefault(key, []).append(self.score(work, table, column))
        whole = {k: [s for s in scores if s is not None] for k, scores in groups.items()}
        return {k: mean(s) for k, s in whole.items() if s and len(s) == len(groups[k])}


def _metrics(table: Table) -> tuple[str, ...]:
    return tuple(table.metric.values()) if isinstance(table.metric, dict) else (table.metric,)


def _last(run: Path) -> dict[str, float]:
    """The numbers of the last training line of a run's log."""
    line = (events(run, "train") or [{}])[-1]
    return {name: float(value) for name, value in line.items() if isinstance(value, int | float)}


def describe(values: Sequence[float]) -> dict[str, float | None]:
    """STATISTICS of some numbers, by name; None for what so few numbers have not."""
    if not values:
        return {"count": 0.0, **dict.fromkeys(STATISTICS[1:])}
    quartiles = np.quantile(values, [0.25, 0.5, 0.75])
    spread = stdev(values) if len(values) > 1 else None
    found = (len(values), mean(values), spread, min(values), *map(float, quartiles), max(values))
    return dict(zip(STATISTICS, found, strict=True))


def _state(difference: Difference, p: float | None, margin: float) -> str:
    if p is None or p > 1 - LEVEL:
        return "undecided"
    return "holds" if difference.mean > margin else "fails"


def drawn(results: Results, picture: Picture) -> tuple[Work, Path] | None:
    """The run whose figure a report shows, and that figure; None where none is finished."""
    for work in results.plan.runs(picture.stage):
        path = work.path / picture.file
        if picture.where.items() <= work.levels.items() and work.done and path.is_file():
            return work, path
    return None


def _are_scores(value: Any) -> bool:
    """Whether this is {split: {metric: number}}."""
    splits = value.values() if isinstance(value, dict) else [None]
    return all(
        isinstance(scores, dict) and all(type(score) in (int, float) for score in scores.values())
        for scores in splits
    )


def _check_finite(work: Work, metrics: dict[str, dict[str, float]]) -> None:
    """Raise BadInput that names the first score which is not finite."""
    for split, scores in metrics.items():
        for metric, value in scores.items():
            if not math.isfinite(value):
                raise BadInput(
                    f"{work.proof}: {split}.{metric} of {work.name} is {value}, which no table "
                    "can hold; find out why, then delete its directory to run it again"
                )


def state_of(work: Work, outcomes: dict[str, Outcome]) -> str:
    """How a work of a study stands: "done", in this call or before, "to do", "failed" or "not
    run". What is made for runs is not spoken of where it did not fail."""
    state = outcomes[work.key].state if work.key in outcomes else ""
    if state in ("failed", "not run"):
        return state
    if not work.stage:
        return ""
    return "done" if work.done else state or "to do"


COLUMNS = ("stage", "run", "state", "key", "seconds", "split", "metric", "value")


def rows(results: Results, outcomes: dict[str, Outcome]) -> Iterator[dict[str, Any]]:
    """A row for each metric of each run, and one for each run without any."""
    for work in results.plan.works.values():
        if not work.stage:
            continue
        common = {
            "stage": work.stage,
            "run": work.name,
            "key": work.key,
            "state": state_of(work, outcomes),
            **work.levels,
        }
        metrics = results.metrics.get(work.key, {})
        if metrics:
            result = read_run_json(work.proof)  # a dict, since it has scores
            common["seconds"] = result.get("seconds", "")
        scores: list[tuple[str, str, float | str]]
        scores = [(s, m, v) for s, values in metrics.items() for m, v in values.items()]
        for split, metric, value in scores or [("", "", "")]:
            yield {**common, "split": split, "metric": metric, "value": value}


def write_csv(path: Path, results: Results, outcomes: dict[str, Outcome]) -> None:
    """results.csv: a line for each run, split and metric, with a column for each factor."""
    factors = dict.fromkeys(f for stage in results.study.stages.values() for f in stage.vary)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS[:2], *factors, *COLUMNS[2:]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(results, outcomes))
    path.write_text(text.getvalue(), encoding="utf-8")
