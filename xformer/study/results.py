"""From finished runs to cells, verdicts, and results.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.study.plan import Plan, Work
from xformer.study.pool import Outcome
from xformer.study.spec import Claim, Levels, Study, Table
from xformer.study.statistics import LEVEL, Difference, Summary, compare, holm, summarise

Replicate = tuple[tuple[str, str], ...]  # a level of each factor that is averaged over


@dataclass(frozen=True)
class Cell:
    """One row and column of a table: our runs, and what the paper prints there."""

    row: str
    column: str
    runs: tuple[Work, ...]  # the finished ones
    summary: Summary | None  # None where none is finished
    published: float | None

    @property
    def difference(self) -> float | None:
        """Ours less the published, in the units of the table."""
        if self.summary is None or self.published is None:
            return None
        return self.summary.mean - self.published


@dataclass(frozen=True)
class Verdict:
    """What became of a claim: "holds", "fails", "undecided" or "no data", and on what ground."""

    claim: Claim
    state: str
    parts: tuple[tuple[str, Difference, float | None], ...]  # (level of each, difference, Holm's p)


class Results:
    """The scores of a study's finished runs."""

    def __init__(self, study: Study, plan: Plan):
        self.study, self.plan = study, plan
        self.metrics: dict[str, dict[str, dict[str, float]]] = {}
        for work in plan.works.values():
            if work.stage and work.done:
                content = read_json(work.proof)
                if not isinstance(content, dict) or not _are_scores(content.get("metrics")):
                    raise BadInput(f"{work.proof} is no result: it has no metrics")
                self.metrics[work.key] = content["metrics"]

    def score(self, work: Work, table: Table) -> float | None:
        """The run's score in a table, in its units; None where it is not there yet."""
        metric = table.metric
        if isinstance(metric, dict):
            metric = metric[work.levels[table.columns]]
        splits = self.metrics.get(work.key)
        if splits is None:
            return None
        if metric not in splits.get(table.split, {}):
            known = ", ".join(f"{s}.{m}" for s, scores in splits.items() for m in scores)
            raise BadInput(
                f"{self.study.path}: table {table.name}: {work.name} has no "
                f"{table.split}.{metric}; it has {known}"
            )
        return splits[table.split][metric] * (100 if table.percent else 1)

    def cells(self, table: Table) -> list[list[Cell]]:
        """The cells of a table, row by row."""
        factors = self.study.factors(table.stage)
        return [
            [self._cell(table, row, column) for column in factors[table.columns]]
            for row in factors[table.rows]
        ]

    def _cell(self, table: Table, row: str, column: str) -> Cell:
        runs, scores = [], []
        for work in self.plan.runs(table.stage):
            if work.levels[table.rows] == row and work.levels[table.columns] == column:
                score = self.score(work, table)
                if score is not None:
                    runs.append(work)
                    scores.append(score)
        summary = summarise(scores) if scores else None
        return Cell(row, column, tuple(runs), summary, self._published(table, row, column))

    def _published(self, table: Table, row: str, column: str) -> float | None:
        printed, like = table.published, self.study.like
        if printed is None:
            return None
        row, column = like.get(row, row), like.get(column, column)
        if row not in printed.rows or column not in printed.columns:
            return None
        number = printed.rows[row][printed.columns.index(column)]
        return number if isinstance(number, float) else None

    def verdicts(self) -> list[Verdict]:
        """Every claim; its parts are tests corrected for their number (Holm)."""
        tables = {table.name: table for table in self.study.tables}
        return [self._verdict(claim, tables[claim.table]) for claim in self.study.claims]

    def _verdict(self, claim: Claim, table: Table) -> Verdict:
        factors = self.study.factors(table.stage)
        levels = list(factors[claim.each]) if claim.each else [""]
        found = []
        for level in levels:
            fixed = {claim.each: level} if claim.each else {}
            pair = [self._by_replicate(table, {**side, **fixed})
                    for side in (claim.better, claim.than)]  # fmt: skip
            shared = [key for key in pair[0] if key in pair[1]]
            if shared:
                a, b = ([side[key] for key in shared] for side in pair)
                scale = 100 if table.percent else 1
                found.append((level, compare(a, b, claim.margin * scale)))
        tested = [d.p for _, d in found if d.p is not None]
        adjusted = iter(holm(tested))
        parts = tuple((level, d, None if d.p is None else next(adjusted)) for level, d in found)
        scale = 100 if table.percent else 1
        states = [_state(d, p, claim.margin * scale) for _, d, p in parts]
        if not states:
            state = "no data"
        elif "fails" in states:
            state = "fails"
        elif "undecided" in states or len(states) < len(levels):
            state = "undecided"
        else:
            state = "holds"
        return Verdict(claim, state, parts)

    def _by_replicate(self, table: Table, wanted: Levels) -> dict[Replicate, float]:
        """Scores of the runs at these levels by seed (or mapping), averaged over the rest of the
        table: one that lacks a part of it is left out, lest unlike averages be compared."""
        inside = {table.rows, table.columns} | set(wanted)
        groups: dict[Replicate, list[float | None]] = {}
        for work in self.plan.runs(table.stage):
            if wanted.items() <= work.levels.items():
                key = tuple((f, v) for f, v in work.levels.items() if f not in inside)
                groups.setdefault(key, []).append(self.score(work, table))
        whole = {k: [s for s in scores if s is not None] for k, scores in groups.items()}
        return {k: mean(s) for k, s in whole.items() if s and len(s) == len(groups[k])}


def _state(difference: Difference, p: float | None, margin: float) -> str:
    if p is None or p > 1 - LEVEL:
        return "undecided"
    return "holds" if difference.mean > margin else "fails"


def _are_scores(value: Any) -> bool:
    """Whether this is {split: {metric: number}}."""
    splits = value.values() if isinstance(value, dict) else [None]
    return all(
        isinstance(scores, dict) and all(type(score) in (int, float) for score in scores.values())
        for scores in splits
    )


COLUMNS = ("stage", "run", "state", "key", "seconds", "split", "metric", "value")


def rows(results: Results, outcomes: dict[str, Outcome]) -> Iterator[dict[str, Any]]:
    """A row for each metric of each run, and one for each run without any."""
    for work in results.plan.works.values():
        if not work.stage:
            continue
        outcome = outcomes.get(work.key)
        common = {"stage": work.stage, "run": work.name, "key": work.key,
                  "state": outcome.state if outcome else "", **work.levels}  # fmt: skip
        metrics = results.metrics.get(work.key, {})
        if metrics:
            common["seconds"] = read_json(work.proof).get("seconds", "")
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
