"""Finished runs: their scores, averaged and tabulated, and the small files that keep them."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import statistics
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from scipy import stats

from xformer import checkpoint as checkpoints
from xformer import provenance
from xformer.analysis.curves import average
from xformer.config import flat, read_recipe
from xformer.data.errors import BadInput
from xformer.data.files import (
    RUN_MANIFEST,
    atomic_directory,
    file_checksum,
    json_text,
    make_directory,
    read_json,
    read_run_json,
    write_bytes,
)
from xformer.monitor import events
from xformer.predictions import FOLDER, read
from xformer.study.launch import BAD, WARNINGS, Outcome, warnings_of, write_recipe
from xformer.study.plan import UNPACKED, Job, Plan
from xformer.study.spec import (
    RESERVED,
    SEED,
    STATISTICS,
    Curves,
    Levels,
    Picture,
    ScoreTable,
    Summary,
    is_safe_filename,
    replicate_factors,
)
from xformer.study.statistics import LEVEL

ROUNDING = 5e-4  # of a score at chance
CONFIG = "config.json"
OF_A_RUN = ("result.json", CONFIG, RUN_MANIFEST, "log.jsonl", "code.diff")
AGAIN = "again.json"  # beside a report, and kept: why runs were made again, by key
KEY = "key"  # the member that says which job it is
WEIGHTS = "model.sha256"  # in the form of the command sha256sum
ENDED = "ended.txt"  # when a command wrote its result, in seconds since 1970; a run has a log
MOST = 2**28  # bytes that one file may unpack to
BEGINNING = (1980, 1, 1, 0, 0, 0)  # timestamp of every member, so that equal content is equal bytes
Metrics = dict[str, dict[str, float]]  # {split: {metric: score}}
Replicate = tuple[str, ...]  # the levels that identify a replicate, such as its seed


# --------------------------------------------------------------------------------- a few scores


@dataclass(frozen=True)
class Sample:
    """Mean, standard deviation (n - 1) and median of n scores, and Student's interval of the mean.

    Two scores have no interval, because it would be 12.7 times as wide as the range of the two. One
    score and equal scores have none either.
    """

    scores: tuple[float, ...]
    mean: float
    deviation: float | None
    median: float
    interval: tuple[float, float] | None

    def words(self, digits: int) -> str:
        """ "83.6 ± 1.3 (6)"; for two scores "83.6 (82.1, 85.1)", the mean and both of them."""
        if len(self.scores) == 2:
            two = ", ".join(f"{score:.{digits}f}" for score in self.scores)
            return f"{self.mean:.{digits}f} ({two})"
        deviation = "" if self.deviation is None else f" ± {self.deviation:.{digits}f}"
        return f"{self.mean:.{digits}f}{deviation} ({len(self.scores)})"


def sample_of(scores: Sequence[float]) -> Sample:
    """The sample of one finite score or more."""
    deviation = statistics.stdev(scores) if len(scores) > 1 else None
    interval = None
    if deviation and len(scores) > 2:
        half = half_width(len(scores)) * deviation
        interval = (mean(scores) - half, mean(scores) + half)
    return Sample(tuple(scores), mean(scores), deviation, statistics.median(scores), interval)


def _whole(scores: Sequence[float | None]) -> list[float]:
    """Some scores; none if one of them is missing."""
    known = [score for score in scores if score is not None]
    return known if len(known) == len(scores) else []


def mean_of(values: Sequence[Any]) -> Any:
    """The mean of some numbers or arrays."""
    return np.mean(values, axis=0) if isinstance(values[0], np.ndarray) else mean(values)


def half_width(n: int) -> float:
    """Half the width of Student's interval of the mean of n scores with standard deviation 1."""
    return float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) / n**0.5


def statistics_of(values: Sequence[float]) -> dict[str, float | None]:
    """Each of STATISTICS by name; None if there are too few values for it."""
    if not values:
        return {"count": 0.0, **dict.fromkeys(STATISTICS[1:])}
    deviation = statistics.stdev(values) if len(values) > 1 else None
    quartiles = map(float, np.quantile(values, [0.25, 0.5, 0.75]))
    numbers = (len(values), mean(values), deviation, min(values), *quartiles, max(values))
    return dict(zip(STATISTICS, numbers, strict=True))


# -------------------------------------------------------------------------- tables of all scores


@dataclass(frozen=True)
class Score:
    """The score of a run in a column of a table, in the units of the table. If its columns are
    metrics, the column is one of the levels."""

    job: Job
    levels: Levels
    value: float | None  # None if the run, or the one that it is compared with, is not finished
    learnt: bool  # whether the run is above the table's `chance`, by more than its error


@dataclass(frozen=True)
class Cell:
    """One row and column of a table: our runs, and what the paper prints there."""

    row: str
    column: str
    runs: tuple[Job, ...]  # the finished ones
    sample: Sample | None  # None if none is finished
    published: float | None
    show: str = "mean"
    best: float | None = None  # the highest number, if the table shows it
    at_chance: int = 0  # how many of the runs are not above chance

    @property
    def value(self) -> float | None:
        """What the cell shows, in the units of the table; None if there is nothing."""
        if self.sample is None:
            return None
        return self.sample.deviation if self.show == "deviation" else self.sample.mean

    @property
    def difference(self) -> float | None:
        """Ours minus the published, in the units of the table."""
        if self.value is None or self.published is None:
            return None
        return self.value - self.published


@dataclass(frozen=True)
class Line:
    """Mean and standard deviation of a number of the log over some runs, by step."""

    name: str
    runs: int
    x: list[float]
    mean: list[float]
    deviation: list[float]


@dataclass(frozen=True)
class Panel:
    """The lines of one number of the log at one level of a factor."""

    name: str
    value: str
    lines: tuple[Line, ...]


class Results:
    """The scores of a study's finished runs, or of some of its `jobs`. Raises BadInput naming a
    result that is damaged or holds a score that is not finite."""

    def __init__(self, plan: Plan, jobs: Iterable[Job] | None = None):
        self.study, self.plan = plan.study, plan
        self._examples: dict[Path, int] = {}  # by file of predictions
        tables = self.study.tables
        columns = [(t.split_of(metric), metric) for t in tables for metric in t.metrics]
        logged = {metric.rpartition(".")[2] for split, metric in columns if split == "train"}
        self.metrics: dict[str, Metrics] = {}  # by key
        self.seconds: dict[str, float] = {}  # that a run took, by key, as far as known
        for job in plan.jobs.values() if jobs is None else jobs:
            if job.stage and job.done:
                self.metrics[job.key], seconds = _read_result(job, logged)
                if isinstance(seconds, int | float):
                    self.seconds[job.key] = seconds

    def check(self) -> None:
        """Raise BadInput naming the first table that needs a score which a finished run lacks."""
        for table in self.study.tables:
            claims = [claim for claim in self.study.claims if claim.table == table.name]
            sides = [side for claim in claims for side in (claim.better, claim.than)]
            for wanted in ({}, *sides):
                for _ in self.scores(table, wanted):
                    pass

    def scores(self, table: ScoreTable, wanted: Levels) -> Iterator[Score]:
        """The scores of a table at these levels, in the order of its runs. A `wanted`
        level overrides the table's `where`, so claims can compare levels that it does not show."""
        minus = list(self.study.factors(table.minus)) if table.minus else []
        bases = {tuple(job.levels.values()): job for job in self.plan.runs(table.minus)}
        for job, levels in self.plan.runs_of(table, wanted):
            base = bases.get(tuple(job.levels[factor] for factor in minus))
            for column in self.study.columns_of(table, levels):
                value = self._score(job, table, column)
                learnt = value is None or value > self._floor(job, table, column)
                if table.minus and value is not None:
                    less = None if base is None else self._score(base, table, column)
                    value = None if less is None else value - less
                yield Score(job, {**job.levels, table.columns: column}, value, learnt)

    def _score(self, job: Job, table: ScoreTable, column: str) -> Any:
        """A run's score in a column of a table, in its units; None if the run is not finished."""
        whole, metric = table.source_of(column)
        splits = self.metrics.get(job.key)
        if splits is None:
            return None
        scores = []
        for split in whole.split("+"):
            if metric not in splits.get(split, {}):
                known = ", ".join(f"{s}.{m}" for s, values in splits.items() for m in values)
                raise BadInput(
                    f"{self.study.path}: table {table.name}: {job.name} has no "
                    f"{split}.{metric}; it has {known}"
                )
            scores.append(self._value(job, split, metric))
        return mean_of(scores) * table.scale

    def _floor(self, job: Job, table: ScoreTable, column: str) -> float:
        """What a score must exceed to be above chance: the chance level and its rounding, or for an
        accuracy 1.64 standard errors if its predictions are kept."""
        if (chance := table.chance.get(column)) is None:
            return -math.inf
        error, (split, metric) = ROUNDING, table.source_of(column)
        path = job.path / FOLDER / f"{split}.npz"
        if metric == "accuracy" and path.is_file():
            if path not in self._examples:
                predictions = read(path)
                weighted = predictions.task.weighted(predictions).get("accuracy")
                self._examples[path] = 0 if weighted is None else weighted.examples
            variance = max(0.0, chance * (1 - chance)) / (self._examples[path] or math.inf)
            error = max(ROUNDING, float(stats.norm.ppf(LEVEL)) * variance**0.5)
        return table.scale * (chance + error)

    def _value(self, job: Job, split: str, metric: str) -> Any:
        """A score of a finished run."""
        return self.metrics[job.key][split][metric]

    def replicates(self, table: ScoreTable, wanted: Levels) -> dict[Replicate, Any]:
        """Scores of the runs at these levels by seed, averaged over everything else. If no factor
        is called `seed`, each combination of the levels of the remaining factors (all but rows,
        columns and those of `wanted`) takes the place of a seed. Of a mean of columns these are the
        seeds that have scores in each column."""
        factors = replicate_factors(self.study, table, wanted)
        parts = [self.by_levels(table, at, factors) for at in self.study.parts(table, wanted)]
        seeds = [seed for seed in parts[0] if all(seed in part for part in parts)]
        return {seed: mean_of([part[seed] for part in parts]) for seed in seeds}

    def by_levels(
        self, table: ScoreTable, wanted: Levels, factors: Sequence[str]
    ) -> dict[Replicate, Any]:
        """The scores at some levels by the levels of some factors, averaged over all else. Levels
        that lack a score are left out, so that all averages are over the same runs."""
        groups: dict[Replicate, list[float | None]] = {}
        for score in self.scores(table, wanted):
            key = tuple(score.levels[factor] for factor in factors)
            groups.setdefault(key, []).append(score.value)
        return {k: mean_of(whole) for k, values in groups.items() if (whole := _whole(values))}

    def cells(self, table: ScoreTable) -> list[list[Cell]]:
        """The cells of a table, row by row: its columns, then the means of columns."""
        columns = (*self.study.columns(table), *self.study.means(table))
        rows = self.study.factors(table.stage)[table.rows]
        return [[self._cell(table, row, column) for column in columns] for row in rows]

    def _cell(self, table: ScoreTable, row: str, name: str) -> Cell:
        wanted = {table.rows: row, table.columns: name}
        means = [*self.replicates(table, wanted).values()]
        scores = [score for score in self.scores(table, wanted) if score.value is not None]
        is_mean = name in table.means
        whole = not is_mean or self.study.means(table)[name] == table.means[name]
        return Cell(
            row,
            name,
            tuple(score.job for score in scores),
            sample_of(means) if means else None,
            self.published(table, row, name) if whole else None,
            table.show,
            None if is_mean else self._best(scores, table, name),
            0 if is_mean else sum(not score.learnt for score in scores),
        )

    def published(self, table: ScoreTable, row: str, column: str) -> float | None:
        """The paper's number in a cell of a table; None if there is none."""
        if table.published is None:
            return None
        name = self.study.stands_for
        return table.published.number(name(table.rows, row), name(table.columns, column))

    def _best(self, runs: Sequence[Score], table: ScoreTable, column: str) -> float | None:
        """The highest score of some runs. If the table asks for it and shows the split valid, of
        all their validations too."""
        if table.best == "none":
            return None
        scores = [run.value for run in runs if run.value is not None]
        split, metric = table.source_of(column)
        if table.best == "epoch" and split == "valid":
            for run in runs:
                every = events(run.job.path, "validation")
                validations = [float(event[metric]) for event in every if metric in event]
                if not all(map(math.isfinite, validations)):
                    log = run.job.path / "log.jsonl"
                    raise BadInput(f"{log}: {metric} of a validation is not finite")
                scores += [score * table.scale for score in validations]
        return max(scores, default=None)

    def settings(self, stage: str, metric: str, sign: int) -> list[list[Cell]]:
        """A row of cells for each combination of the levels of a stage, a cell for each split with
        the metric, over the seeds. The runs of one seed with other `seed.*` are averaged first, and
        a seed that lacks one is left out. If the runs have a split valid, the row with the best
        mean there comes first."""
        scale = 100 if sign > 0 else 1
        random = self.study.random_factors(stage)
        groups: dict[str, list[Job]] = {}
        scores: dict[str, dict[str, float]] = {}  # by split and key
        for job in self.plan.runs(stage):
            parts = [f"{f}={level}" for f, level in job.levels.items() if f not in random]
            groups.setdefault(", ".join(parts) or "all runs", []).append(job)
            for split, numbers in self.metrics.get(job.key, {}).items():
                if metric in numbers:
                    scores.setdefault(split, {})[job.key] = scale * numbers[metric]

        def cell(name: str, jobs: list[Job], split: str) -> Cell:
            by_seed: dict[str, list[float | None]] = {}
            for job in jobs:
                score = scores[split].get(job.key)
                by_seed.setdefault(job.levels.get(SEED, job.key), []).append(score)
            means = [mean(some) for some in map(_whole, by_seed.values()) if some]
            runs = tuple(job for job in jobs if job.key in scores[split])
            return Cell(name, split, runs, sample_of(means) if means else None, None)

        splits = sorted(scores, key=lambda split: split != "valid")
        rows = [[cell(name, jobs, split) for split in splits] for name, jobs in groups.items()]
        if "valid" in scores:
            rows.sort(key=lambda row: math.inf if row[0].value is None else -sign * row[0].value)
        return rows

    def statistics(self, summary: Summary) -> dict[str, dict[str, float | None]]:
        """A summary: the statistics of a table's cells at each level of a factor.

        A cell counts once, by its mean over runs. As in the papers, the deviation is that of a
        sample and quartiles are interpolated, which is what pandas does.
        """
        table = self.study.table(summary.table)
        width = len(self.study.columns(table))  # without the means
        groups: dict[str, list[float]] = {}
        for cell in (cell for row in self.cells(table) for cell in row[:width]):
            group = groups.setdefault(cell.row if summary.by == table.rows else cell.column, [])
            if cell.sample is not None:
                group.append(cell.sample.mean)
        return {level: statistics_of(values) for level, values in groups.items()}

    # ------------------------------------------------------------------------ curves and pictures

    def panels(self, curves: Curves) -> list[Panel]:
        """The panels that have a finished run: those of training, then those of validation.

        Runs that do not log the number (a score task logs no accuracy) have no line.
        """
        factors = self.study.factors(curves.stage)
        alone = curves.panels == curves.lines  # one panel for all, which needs no name
        levels = [""] if alone else list(factors[curves.panels])
        logged = [("train", "", curves.value), ("validation", "validation ", curves.validation)]
        panels = []
        for (event, prefix, value), level in product(logged, levels):
            name = value if isinstance(value, str) else value.get(level, "")
            lines = []
            for line in factors[curves.lines] if name else ():
                wanted = {**curves.where, curves.panels: level, curves.lines: line}
                runs = [run for run in self.plan.runs(curves.stage, wanted) if run.done]
                lines.append(mean_line(line, runs, event, name))
            if drawn := tuple(line for line in lines if line is not None):
                panels.append(Panel(level, f"{prefix}{name}", drawn))
        return panels


def drawn_first(plan: Plan, picture: Picture) -> tuple[Job, Path] | None:
    """The first finished run that drew the figure, and that figure; None if there is none."""
    for job in plan.runs(picture.stage, picture.where):
        path = job.path / picture.file
        if job.done and path.is_file():
            return job, path
    return None


def mean_line(name: str, runs: Sequence[Job], event: str, value: str) -> Line | None:
    """The line of some runs; None if there is no run, no log, or no such number in it."""
    try:
        curve = average([str(job.path) for job in runs], event, value)
    except (BadInput, OSError, LookupError, TypeError, ValueError, RecursionError):
        return None
    return Line(name, len(runs), curve["x"], curve["mean"], curve["deviation"])


def _read_result(job: Job, logged: Collection[str]) -> tuple[Metrics, Any]:
    """The scores of a finished job, and how long it took. If a table shows numbers of the log,
    which `logged` names, the last training line of the log becomes a split `train`. Its other
    numbers may not be finite, such as the norm of a gradient that was dropped."""
    content = read_run_json(job.proof)
    metrics = content.get("metrics") if isinstance(content, dict) else None
    if metrics is not None and "split" in content:  # evaluate.py scores one split
        metrics = {content["split"]: metrics}
    if not isinstance(metrics, dict) or not all(map(_are_scores, metrics.values())):
        raise BadInput(f"{job.proof} has no metrics; delete it to run {job.name} again")
    if logged and job.recipe is not None:
        last = (events(job.path, "train") or [{}])[-1]
        numbers = {k: float(v) for k, v in last.items() if isinstance(v, int | float)}
        shown = {k: v for k, v in numbers.items() if math.isfinite(v) or k in logged}
        metrics = {**metrics, "train": shown}
    for split, scores in metrics.items():
        for metric, value in scores.items():
            if not math.isfinite(value):
                file = job.path / "log.jsonl" if split == "train" and logged else job.proof
                raise BadInput(
                    f"{file}: {split}.{metric} of {job.name} is {value}, which no table can hold; "
                    "find out why, then delete its directory to run it again"
                )
    return metrics, content.get("seconds")


def _are_scores(scores: Any) -> bool:
    """Whether this is {metric: number}."""
    return isinstance(scores, dict) and all(type(s) in (int, float) for s in scores.values())


# ------------------------------------------------------------------------------------ results.csv


def state_of(job: Job, outcomes: dict[str, Outcome]) -> str:
    """The state of a job of a study: "done" (in this call or before), "to do", "failed", "not run"
    or "not needed". Empty for what is made for runs, unless it failed or was not run."""
    state = outcomes[job.key].state if job.key in outcomes else ""
    if state in BAD:
        return state
    if not job.stage:
        return ""
    return "done" if job.done else state or "to do"


def _csv_rows(results: Results, outcomes: dict[str, Outcome]) -> Iterator[dict[str, Any]]:
    """A row for each metric of each run, and one for each run that has none. A run that stages
    share is a run of each of them."""
    plan = results.plan
    place = {key: i for i, key in enumerate(plan.jobs)}
    runs = (job for stage in results.study.stages for job in plan.runs(stage))
    for job in sorted(runs, key=lambda job: place[job.key]):
        state = state_of(job, outcomes)
        common: dict[str, Any] = {"stage": job.stage, "run": job.name, "key": job.key}
        common |= {"state": state, **job.levels}
        metrics = results.metrics.get(job.key, {})
        if metrics:
            common["seconds"] = results.seconds.get(job.key, "")
        scores: list[tuple[str, str, float | str]]
        scores = [(s, m, v) for s, values in metrics.items() for m, v in values.items()]
        for split, metric, value in scores or [("", "", "")]:
            yield {**common, "split": split, "metric": metric, "value": value}


def write_csv(path: Path, results: Results, outcomes: dict[str, Outcome]) -> None:
    """results.csv: a line for each run, split and metric, with a column for each factor."""
    factors = dict.fromkeys(f for stage in results.study.stages.values() for f in stage.vary)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*RESERVED[:2], *factors, *RESERVED[2:]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(_csv_rows(results, outcomes))
    path.write_text(text.getvalue(), encoding="utf-8")


def with_scores(table: Path) -> dict[str, bool]:
    """Whether each run of a results.csv has scores, by name. A file that is missing or damaged has
    none: {}."""
    if not table.is_file():
        return {}
    try:
        with table.open(encoding="utf-8", newline="") as file:
            return {row["run"]: bool(row["value"]) for row in csv.DictReader(file)}
    except (UnicodeDecodeError, csv.Error, KeyError):
        return {}


def reruns(todo: Iterable[Job], directory: Path) -> dict[str, str]:
    """Why runs must be made again, by key: the settings that differ from those of the run that has
    the same name in the last report, which is in a directory."""
    if not (directory / "results.csv").is_file():
        return {}
    with (directory / "results.csv").open(encoding="utf-8", newline="") as file:
        before = {row.get("run"): row.get("key") for row in csv.DictReader(file)}
    why = {}
    for job in todo:
        key = before.get(job.name) or job.key
        earlier = job.path.with_name(f"{key}.toml")
        if job.recipe is not None and key != job.key and earlier.is_file():
            old, new = flat(read_recipe(earlier)), flat(job.recipe)
            names = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
            names = [name for name in names if name != "run"] or ["the content of data or init"]
            why[job.key] = f"key changed: {', '.join(names)}"
    return why


def again_files(plan: Plan, directory: Path) -> list[Path]:
    """Where it is written why runs were made again: in the directory of the report, and beside the
    kept results if there are any."""
    kept = [] if plan.kept is None else [plan.kept / f"{directory.name}.{AGAIN}"]
    return [directory / AGAIN, *kept]


def made_again(plan: Plan, directory: Path) -> dict[str, str]:
    """Why runs were made again, by key."""
    files = [file for file in again_files(plan, directory) if file.exists()]
    return {key: why for file in files for key, why in read_json(file).items()}


# ----------------------------------------------------------------------------------- kept results


class Ledger:
    """Finished jobs as small files, KEY.zip each, so no result depends on a directory of runs.

    For a run a file holds scores, settings, log, predictions and the checksum of the weights, but
    not the weights; for a command its result; for both the pictures that the study shows. Without a
    directory the ledger is empty. Raises BadInput naming the first file that is damaged or holds
    something that it may not hold.
    """

    def __init__(self, directory: Path | None, plan: Plan):
        self.directory, self.plan = directory, plan
        if directory is not None and directory.exists() and not directory.is_dir():
            raise BadInput(f"kept={directory} is a file; give a directory")
        self.results: dict[str, Any] = {}  # by key, of the jobs it holds that are not here
        for job in plan.jobs.values():
            path = self._file(job)
            if path is not None and path.exists():
                result = _checked_result(path, _read_zip(path), job)
                if not _holds_anything(job.path):
                    self.results[job.key] = result

    def unpack(self) -> None:
        """Unpack each file whose job is not here into that job's directory, atomically."""
        for key in self.results:
            job = self.plan.jobs[key]
            try:
                self._unpack(job)
            except (BadInput, OSError):
                if not _holds_anything(job.path):  # else another study has been faster
                    raise

    def _unpack(self, job: Job) -> None:
        path = self._file(job)
        assert path is not None
        with suppress(FileNotFoundError):
            job.path.rmdir()  # it is empty
        with atomic_directory(job.path) as directory:
            for name, content in _read_zip(path).items():
                make_directory((directory / name).parent)
                (directory / name).write_bytes(content)
            if job.recipe is not None:
                write_recipe(job)
            else:
                (directory / UNPACKED).touch()
                proof = directory / job.proof.relative_to(job.path)
                if (ended := directory / ENDED).is_file():
                    os.utime(proof, (float(ended.read_text()),) * 2)

    def keep(self, job: Job, again: bool) -> str:
        """Write the file of a finished job, unless there is one. Returns a line for a run that was
        made `again`, which says whether it has the same weights as the first time; else nothing."""
        path = self._file(job)
        if path is None:
            return ""
        if not path.exists():
            make_directory(path.parent, "kept=")
            _write_zip(path, self._members(job))
            return ""
        if not again or job.recipe is None:
            return ""
        both = (_read_zip(path).get(WEIGHTS, b""), _checksum(job))
        before, now = (line.decode(errors="replace").split(" ")[0] or "none" for line in both)
        if before == now:
            return f"{job.name}: made again, with the weights that {path} records"
        return (
            f"{job.name}: made again, with other weights than {path} records: {before}, now {now}"
        )

    def _file(self, job: Job) -> Path | None:
        if self.directory is None or not job.stage:
            return None
        return self.directory / f"{job.key}.zip"

    def _members(self, job: Job) -> dict[str, bytes]:
        """What is kept of a finished job: {name: content}."""
        paths = [job.proof]
        if job.recipe is not None:
            paths += [job.path / name for name in OF_A_RUN]
            paths += (job.path / FOLDER).rglob("*")
        for picture in self.plan.study.pictures:
            drawn = drawn_first(self.plan, picture)
            if drawn is not None and drawn[0].key == job.key:  # the report shows it
                shown = job.path / picture.file
                paths += [shown, shown.with_name(f"{shown.stem}-dark.svg")]
        files = [path for path in paths if path.is_file()]
        members = {path.relative_to(job.path).as_posix(): path.read_bytes() for path in files}
        if job.recipe is not None and (line := _checksum(job)):
            members[WEIGHTS] = line
        if job.recipe is None:
            members[ENDED] = f"{job.proof.stat().st_mtime:.0f}\n".encode()
        if lines := warnings_of(job):
            members[WARNINGS] = "\n".join([*lines, ""]).encode()
        name = CONFIG if job.recipe is not None else job.proof.relative_to(job.path).as_posix()
        for changed in {name, WARNINGS} & members.keys():
            self._forget_places(members, changed)
        return {**members, KEY: f"{job.key}\n".encode()}

    def _forget_places(self, members: dict[str, bytes], name: str) -> None:
        """Replace the directories of this machine in the settings of a run, or in the result of a
        command, by the names OUTPUT and XFORMER. The manifest of a run gets the new checksum."""
        text = members[name].decode()
        places = {str(self.plan.root.absolute()): "OUTPUT", str(provenance.ROOT): "XFORMER"}
        for place in sorted(places, key=len, reverse=True):  # one may lie inside the other
            written = re.escape(json.dumps(place, ensure_ascii=False)[1:-1])
            text = re.sub(rf"(?<![\w./-]){written}(?![\w.-])", places[place], text)
        members[name] = text.encode()
        if RUN_MANIFEST in members:
            manifest = json.loads(members[RUN_MANIFEST])
            manifest["sha256"][name] = sha256(members[name]).hexdigest()
            members[RUN_MANIFEST] = json_text(manifest).encode()


def _checked_result(path: Path, members: dict[str, bytes], job: Job) -> Any:
    """A job's result among the members of its file. Raises BadInput unless the file holds this
    job, and all that a run's manifest lists."""
    name = job.proof.relative_to(job.path).as_posix()
    key = members.get(KEY, b"without a key").decode(errors="replace").strip()
    try:
        result = json.loads(members[name])
        name = RUN_MANIFEST  # runs of early versions have none
        sums = dict(json.loads(members[name])["sha256"] if name in members else {})
    except (KeyError, TypeError, ValueError, RecursionError):
        raise _damaged(path, f"it holds no {name} that can be read") from None
    if key != job.key:
        raise _damaged(path, f"it holds the job {key}")
    for name, expected in sums.items():
        if name not in members:
            raise _damaged(path, f"it holds no {name}")
        if sha256(members[name]).hexdigest() != expected:
            raise _damaged(path, f"its {name} is not as the run wrote it")
    return result


def _holds_anything(directory: Path) -> bool:
    """Whether there is anything in a directory."""
    return directory.exists() and (not directory.is_dir() or any(directory.iterdir()))


def _checksum(job: Job) -> bytes:
    """A line with the checksum of the weights that a run selected. For a run that comes from the
    kept results it is the line that they have. Nothing if the weights are gone."""
    weights, known = checkpoints.resolve(job.path) / "model.safetensors", job.path / WEIGHTS
    if not weights.is_file():
        return known.read_bytes() if known.is_file() else b""
    return f"{file_checksum(weights)}  {weights.relative_to(job.path).as_posix()}\n".encode()


def kept_ends(path: Path) -> list[float]:
    """When the job of a kept result ended, in seconds since 1970; [] if the file does not say."""
    members = _read_zip(path)
    times = [json.loads(line)["time"] for line in members.get("log.jsonl", b"").splitlines()]
    return [max(times)] if times else [float(members[ENDED])] if ENDED in members else []


def _write_zip(path: Path, members: dict[str, bytes]) -> None:
    """Write a zip atomically; the same members make the same bytes."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as file:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, BEGINNING)
            info.create_system, info.external_attr = 3, 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, members[name])
    write_bytes(path, memory.getvalue())


def _read_zip(path: Path) -> dict[str, bytes]:
    """The members of a zip, their checksums compared. Raises BadInput naming the file."""
    try:
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
            for member in members:
                if not all(map(is_safe_filename, member.filename.split("/"))):
                    raise _damaged(path, f"it holds a file of the name {member.filename!r}")
            if sum(member.file_size for member in members) > MOST:
                raise _damaged(path, f"it holds more than {MOST // 2**20} MiB")
            return {member.filename: file.read(member) for member in members}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, why: str) -> BadInput:
    return BadInput(
        f"{path} is damaged: {why}; restore it from a copy, or delete it, and its job is run again"
    )
