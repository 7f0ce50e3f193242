"""A study file: which runs, what varies, what to tabulate, what was published, what to check.

    [needs.NAME]             what the user brings: a checkpoint, a directory of data
    [made.NAME]              what a command makes from it: a store, a tokenizer, a checkpoint
    [stages.NAME]            runs: a recipe (or a command), its settings, and what `vary`s them
    [[tables]] [[summaries]] [[curves]] [[pictures]] [headline] [[claims]]
                             what to show, and the paper's statements, checked
    notes, [[deviations]]    what a reader must know, and how the study differs from the paper
    [scales.NAME]            overrides any of the above: scale=mini, scale=paper
    base = "other.toml"      another study, which this one extends; equal runs are shared

In any string {need.X}, {made.X} and {stage.X} stand for a path, and {FACTOR} for the name of a
level. Names may depend on levels too: {made.{model}} is made for each model that some run needs.
In a run's settings {stage.X} is the run of the stage X at the same levels, and
{stage.X(corpus=english)} is the one at another level.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from xformer.config import Settings, flat, merge
from xformer.data.errors import BadInput


def _level(value: Any) -> Any:
    """The name of a level that is given as a number, such as seed = 0."""
    return str(value) if isinstance(value, int | float) else value


Level = Annotated[str, BeforeValidator(_level)]
Levels = dict[str, Level]  # {factor: level}
METRIC = "metric"  # stands for the columns of a table whose columns are not a factor
SEED = "seed"  # the factor over whose levels scores are compared in pairs
# columns of results.csv, before and after those of the factors
RESERVED = ("stage", "run", "state", "key", "seconds", "split", METRIC, "value")
STATISTICS = ("count", "mean", "std", "min", "25%", "50%", "75%", "max")
FACTOR = re.compile(r"\{[A-Za-z][\w.-]*\}")
PLACE = re.compile(r"\{(need|made|stage)\.([\w-]+)(?:\(([\w-]+)=([^(){}]+)\))?\}")


class Need(Settings):
    """Something that the user brings."""

    about: str
    """What it is."""
    get: str = ""
    """How to get it."""
    path: str = ""
    """Where it is, unless the command line says needs.NAME=PATH."""


class Made(Settings):
    """Something made from the needs before any run."""

    command: tuple[str, ...] = ()
    """The arguments of `python`; `{out}` is where the result goes."""
    same: str = ""
    """Instead of a command: the name of another [made] that this one stands for."""


class Stage(Settings):
    """Runs that differ by the levels of their factors."""

    recipe: str = ""
    """The recipe that train.py runs: a path relative to the study file, or a name."""
    command: tuple[str, ...] = ()
    """Instead of a recipe: the arguments of `python`; `{out}` is its directory."""
    processes: int = Field(1, ge=1)
    """Processes (ranks) of each run of a recipe, started by torchrun."""
    result: str = "result.json"
    """The JSON file of `metrics` that a command writes into the directory `{out}`. The study makes
    that directory first."""
    settings: dict[str, Any] = Field({})
    """Settings of every run, which override the recipe's. In a command, a setting takes the place
    of {KEY}; without such a place it is added as KEY=VALUE."""
    vary: dict[str, dict[str, dict[str, Any]] | list[Any]] = Field({})
    """Factors, each with its levels and their settings. A plain list holds values of the key that
    has the factor's name."""
    without: tuple[Levels, ...] = ()
    """Combinations to leave out. {task = "cola"} leaves out all combinations with this level."""


class Published(Settings):
    """A table as the paper prints it."""

    source: str
    """Paper and table."""
    columns: tuple[str, ...]
    """Names of its columns. One that is a level of the table's column factor is shown next to that
    level."""
    rows: dict[str, tuple[float | str, ...]]
    """Its numbers by row; "" if the paper has none."""

    def number(self, row: str, column: str) -> float | None:
        """The number in a row and column; None if there is none."""
        if row not in self.rows or column not in self.columns:
            return None
        number = self.rows[row][self.columns.index(column)]
        return number if isinstance(number, float) else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        place = f"published by {self.source!r}"
        if twice := duplicate(self.columns):
            raise ValueError(f"{place}: two published columns are named {twice!r}; rename one")
        for row, numbers in self.rows.items():
            if len(numbers) != len(self.columns):
                raise ValueError(
                    f"{place}: the row {row!r} has {len(numbers)} numbers, but there are "
                    f"{len(self.columns)} columns"
                )
            for number in numbers:
                if isinstance(number, str) and number:
                    raise ValueError(
                        f"{place}: the row {row!r} has {number!r}, which is not a number; "
                        'give "" if the paper has none'
                    )
        return self


class Shown(Settings):
    """What a report shows of one stage's runs: a table, curves or a picture."""

    kind: ClassVar[str]
    name: str
    """A name of its own, by which files and other parts of the study call it."""
    title: str
    """Its heading in the report."""
    stage: str
    """The stage whose runs it shows."""
    where: Levels = Field({})
    """Only the runs at these levels."""

    def factors(self) -> tuple[str, ...]:
        """The factors that it is laid out by."""
        return ()


class ScoreTable(Shown):
    """Scores of one stage by two of its factors, averaged over every other factor."""

    kind = "table"
    rows: str
    """A factor of the stage."""
    columns: str
    """Another factor. Or "metric", which makes a column for each name in `metric`."""
    metric: str | dict[str, str] = "accuracy"
    """Name of the metric, or one for each column. "train.loss" names the split too; train stands
    for the last training line of the log. "valid+valid_mismatched.accuracy" is the mean over two
    splits."""
    split: str = "test"
    """The split that is scored."""
    percent: bool = True
    """Show 100 times the score, as the papers do."""
    minus: str = ""
    """A stage whose scores are subtracted, each at the same levels of its factors."""
    show: Literal["mean", "deviation"] = "mean"
    """What a cell is: the mean over runs, or their standard deviation."""
    best: Literal["none", "run", "epoch"] = "none"
    """Also show the maximum, because some papers report no mean: over the runs ("run"), or over all
    validations of all runs ("epoch"). If the split is not valid, "epoch" means "run"."""
    means: dict[str, tuple[str, ...]] = Field({})
    """Further columns, each the mean of some columns, taken within each seed."""
    chance: dict[str, float] = Field({})
    """The chance level of a column: the majority-class share, or for a correlation over n rows its
    95 % quantile under independence, 1.64 / sqrt(n). Runs that are not above it are counted,
    because fine-tuning on small sets often fails (Mosbach et al. 2021). An accuracy must exceed it
    by 1.64 standard errors if predictions are kept. If every column has a chance level and every
    run of a claim is at chance, the claim stays undecided."""
    published: Published | None = None
    """The paper's table, as [tables.published]."""

    def factors(self) -> tuple[str, ...]:
        return (self.rows,) if self.columns == METRIC else (self.rows, self.columns)

    @property
    def digits(self) -> int:
        """Decimals that are shown."""
        return 1 if self.percent else 3

    @property
    def scale(self) -> int:
        """What a score is multiplied by."""
        return 100 if self.percent else 1

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metric, or that of each column."""
        return (self.metric,) if isinstance(self.metric, str) else tuple(self.metric.values())

    def at(self, side: Levels) -> Levels:
        """The levels of factors on one side of a claim. They override those of `where`."""
        return {f: level for f, level in {**self.where, **side}.items() if f != METRIC}

    def metric_of(self, column: str) -> str:
        """The metric of a column."""
        return self.metric if isinstance(self.metric, str) else self.metric[column]

    def split_of(self, metric: str) -> str:
        """The split of one of its metrics, such as "valid" or "valid+valid_mismatched"."""
        return metric.rpartition(".")[0] or self.split

    def source_of(self, column: str) -> tuple[str, str]:
        """Split and name of the metric of a column: ("valid+valid_mismatched", "accuracy")."""
        metric = self.metric_of(column)
        return self.split_of(metric), metric.rpartition(".")[2]

    @property
    def place(self) -> str:
        """The split of all its metrics; "" if they have several."""
        first, *others = dict.fromkeys(map(self.split_of, self.metrics))
        return "" if others else first


class Summary(Settings):
    """Count, mean, deviation, extremes and quartiles of a table's cells by row, or by column."""

    title: str
    """Its heading in the report."""
    table: str
    """Name of the table."""
    by: str
    """Its row factor, or its column factor."""
    published: Published | None = None
    """The paper's table, as [summaries.published], with some of the columns count, mean, std, min,
    25%, 50%, 75% and max."""


class Curves(Shown):
    """Curves from the logs of one stage's runs: a panel for each level of one factor, a line for
    each level of another. A line is the mean over all other factors, in a band of one standard
    deviation."""

    kind = "curves"
    panels: str
    """The factor with a panel for each level."""
    lines: str
    """The factor with a line for each level, which may be the same."""
    value: str = "loss"
    """A number of the log's training lines."""
    validation: str | dict[str, str] = ""
    """A number of the log's validation lines, or one for each panel. Its panels follow those of
    training."""

    def factors(self) -> tuple[str, ...]:
        return self.panels, self.lines


class Picture(Shown):
    """A figure that the first finished run of a stage drew, such as one of python -m
    xformer.analysis."""

    kind = "picture"
    file: str
    """The SVG in `{out}`. If NAME-dark.svg lies beside it, dark screens show that one."""


class Headline(Settings):
    """The picture at the top of the report, made of one table and, beside it, some curves. It is
    also a file of its own, and the study prints it as text when it ends."""

    name: ClassVar[str] = "headline"  # of its files, without ending
    title: str
    """The question that the table answers."""
    table: str
    """Name of the table: every score of its first column is a dot."""
    curves: str = ""
    """Name of the curves; empty: none."""
    labels: dict[str, str] = Field({})
    """What the picture calls a level of the table's rows."""


class Claim(Settings):
    """A statement to test: `better` has the higher score, by more than `margin`, in `each`."""

    text: str
    """The statement in words."""
    table: str
    """Name of the table whose scores decide."""
    better: Levels
    """The levels of the side with the higher score, such as { start = "english" }. Of a loss the
    higher number counts, too. Both sides may name a mean of the table in place of a column."""
    than: Levels
    """The levels of the other side. Both must name the same factors, and `metric` if the table's
    columns are metrics."""
    each: str = ""
    """A factor. The claim must hold at each of its levels. Empty: on average."""
    margin: float = 0.0
    """By how much, in the units of the metric. A negative margin makes it a non-inferiority
    claim."""
    tie: bool = False
    """Instead: both score the same, up to the margin in either direction."""

    def sides(self, level: str = "") -> tuple[Levels, Levels]:
        """The levels of `better` and of `than`, at a level of `each`."""
        fixed = {self.each: level} if self.each else {}
        return {**self.better, **fixed}, {**self.than, **fixed}


class Registration(Settings):
    """How the claims are tested, written down before the first run: by Student's two-sided test of
    differences that are paired by the factor `seed`, or two one-sided tests for a tie. Scores are
    first averaged over everything else. The report shows the commit that holds each claim; a claim
    that is younger than the first result is exploratory."""

    seeds: dict[str, PositiveInt]
    """The minimum number of levels of each random factor, for each side of a claim: seeds.seed = 5
    pre-trainings, seeds.draw = 2 fine-tunings of each."""
    unit: str = Field(min_length=1)
    """What a level of `seed` is, such as "a pre-training". The claims are about these."""
    extension: str = Field(min_length=1)
    """The one extension that is planned, and when it is made; or "none". With an extension every p
    is doubled, because the claims are then tested twice."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.extension != "none" and self.extension.strip(" .").lower() in ("none", "no", ""):
            raise ValueError(f'extension: to plan none, write "none", not {self.extension!r}')
        return self

    @property
    def looks(self) -> int:
        """How often a claim may be tested."""
        return 1 if self.extension == "none" else 2

    def words(self) -> str:
        """The registration as one line of text."""
        twice = " (so every p is doubled)" if self.looks == 2 else ""
        unit = f"paired t over seed; a seed is {self.unit}"
        return f"{unit}; planned extension: {self.extension}{twice}"


class Deviation(Settings):
    """Where a study does not do what the paper did. Reports show it below what it concerns."""

    what: str = Field(min_length=1)
    """What differs, such as "weight decay of fine-tuning"."""
    paper: str = Field(min_length=1)
    """What the paper did; "not said" if it does not tell."""
    ours: str = Field(min_length=1)
    """What the study does. Its numbers are placeholders, as in `notes`."""
    why: str = Field(min_length=1)
    """The reason."""
    tables: tuple[str, ...] = ()
    """Names of the tables that it concerns."""
    curves: tuple[str, ...] = ()
    """Names of the curves that it concerns."""
    pictures: tuple[str, ...] = ()
    """Names of the pictures that it concerns. If tables, curves and pictures are all empty, it
    concerns everything."""

    def cells(self) -> tuple[str, str, str, str]:
        """What a report says of it, in the order of a table's columns."""
        return self.what, self.paper, self.ours, self.why

    def concerns(self, shown: Shown) -> bool:
        """Whether a report shows it below a table or figure."""
        named = {"table": self.tables, "curves": self.curves, "picture": self.pictures}
        return shown.name in named[shown.kind] or not any(named.values())


class Study(Settings):
    """A question, the runs that answer it, and what a paper found, if it is a paper's question."""

    title: str
    """The heading of the report."""
    question: str = ""
    """What the study asks."""
    paper: str = ""
    """The paper whose experiment it is."""
    needs: dict[str, Need] = Field({})
    made: dict[str, Made] = Field({})
    stages: dict[str, Stage]
    tables: tuple[ScoreTable, ...] = ()
    summaries: tuple[Summary, ...] = ()
    curves: tuple[Curves, ...] = ()
    pictures: tuple[Picture, ...] = ()
    headline: Headline | None = None
    claims: tuple[Claim, ...] = ()
    registration: Registration | None = None
    levels: dict[str, tuple[Level, ...]] = Field({})
    """For a factor, the only levels that are kept."""
    like: dict[str, str] = Field({})
    """By level, or by FACTOR=LEVEL: the published row or column that it is shown next to."""
    notes: tuple[str, ...] = ()
    """What a reader of the results must know. Numbers are placeholders, such as {finetune:
    optim.lr}, which are filled in from the planned runs."""
    deviations: tuple[Deviation, ...] = ()
    """Where the study does not do what the paper did. Those of a scale are added to these."""
    path: Path = Field(exclude=True)
    scale: str = Field("", exclude=True)

    def factors(self, stage: str) -> dict[str, dict[str, dict[str, Any]]]:
        """The factors of a stage: for each level, in order, its settings."""
        factors = {}
        for factor, levels in self.stages[stage].vary.items():
            if isinstance(levels, list):
                levels = {str(value): {factor: value} for value in levels}
            wanted = self.levels.get(factor, tuple(levels))
            factors[factor] = {level: levels[level] for level in wanted if level in levels}
        return factors

    def random_factors(self, stage: str) -> list[str]:
        """The factors of a stage that only set seeds, or that the registration calls random. SEED
        comes first: the others are nested in it."""
        known = {SEED, *(self.registration.seeds if self.registration else ())}
        factors = []
        for factor, levels in self.factors(stage).items():
            groups = {key.split(".")[0] for some in levels.values() for key in flat(some)}
            if factor in known or groups == {SEED}:
                factors.append(factor)
        return sorted(factors, key=lambda factor: factor != SEED)

    def table(self, name: str) -> ScoreTable:
        """The table of a name."""
        return next(table for table in self.tables if table.name == name)

    def levels_of(self, table: ScoreTable) -> dict[str, tuple[str, ...]]:
        """The levels of each factor of a table's scores. METRIC is one if the columns are
        metrics."""
        levels = {factor: tuple(levels) for factor, levels in self.factors(table.stage).items()}
        return levels | ({METRIC: tuple(table.metric)} if table.columns == METRIC else {})

    def columns(self, table: ScoreTable) -> tuple[str, ...]:
        """The columns of a table, without its means."""
        return self.levels_of(table)[table.columns]

    def columns_of(self, table: ScoreTable, levels: Levels) -> tuple[str, ...]:
        """The columns in which a run at these levels has a score: one, or all if it does not vary
        by them."""
        own = levels.get(table.columns)
        return tuple(column for column in self.columns(table) if own in (None, column))

    def means(self, table: ScoreTable) -> dict[str, tuple[str, ...]]:
        """The columns that each mean of columns has at this scale."""
        columns = self.columns(table)
        parts = {n: tuple(p for p in every if p in columns) for n, every in table.means.items()}
        return {name: some for name, some in parts.items() if some}

    def parts(self, table: ScoreTable, side: Levels) -> tuple[Levels, ...]:
        """The levels whose scores one side of a claim averages, each with the same weight: those of
        every part if it names a mean of columns, else its own."""
        columns = self.means(table).get(side.get(table.columns, ""))
        return tuple({**side, table.columns: c} for c in columns) if columns else (side,)

    def stands_for(self, factor: str, level: str) -> str:
        """The published name of a level."""
        return self.like.get(f"{factor}={level}", self.like.get(level, level))

    @property
    def extends(self) -> bool:
        """Whether the study has a base."""
        return "base" in tomllib.loads(self.path.read_text(encoding="utf-8-sig"))

    def shows(self) -> tuple[Shown, ...]:
        """Every table and figure."""
        return (*self.tables, *self.curves, *self.pictures)

    def shown_stages(self) -> tuple[str, ...]:
        """The stages that a table or figure shows; all if there is no table or figure."""
        stages = {shown.stage for shown in self.shows()} | {table.minus for table in self.tables}
        return tuple(name for name in self.stages if name in stages or not any(stages))

    def combinations(self, stage: str, at: Levels | None = None) -> Iterator[Levels]:
        """Every combination of levels that a stage does not leave out; with `at` those at these
        levels."""
        factors = self.factors(stage)
        for levels in product(*factors.values()):
            combination = dict(zip(factors, levels, strict=True))
            left_out = self.stages[stage].without
            if (at or {}).items() <= combination.items() and not any(
                some.items() <= combination.items() for some in left_out
            ):
                yield combination

    def settings(self, stage: str, levels: Levels) -> dict[str, Any]:
        """The settings of a stage's run at these levels."""
        settings: dict[str, Any] = dict(self.stages[stage].settings)
        factors = self.factors(stage)
        for factor, level in levels.items():
            settings = merge(settings, nested(factors[factor][level]))
        return settings


# ------------------------------------------------------------------ what follows from its parts


def replicate_factors(study: Study, table: ScoreTable, fixed: Collection[str]) -> list[str]:
    """The factors whose levels tell the replicates of a table's scores apart if some factors are
    fixed: `seed`, or without it all but the rows and the columns. Scores are averaged over the
    others."""
    inside = {table.rows, table.columns, *fixed}
    rest = [factor for factor in study.factors(table.stage) if factor not in inside]
    return [SEED] if SEED in rest else rest


def averaged_factors(study: Study, table: ScoreTable) -> list[str]:
    """The factors over which a score of a table's cell is a mean, besides the parts of a mean of
    columns."""
    own = (table.rows, table.columns, *replicate_factors(study, table, ()))
    levels: dict[tuple[str, ...], set[str]] = {}  # by factor, cell and replicate
    for run in study.combinations(table.stage, table.where):
        place = [run.get(factor, "") for factor in own]
        for factor in run.keys() - {*own}:
            levels.setdefault((factor, *place), set()).add(run[factor])
    several = {factor for (factor, *_), every in levels.items() if len(every) > 1}
    return [factor for factor in study.factors(table.stage) if factor in several]


def levels_of_claim(study: Study, table: ScoreTable, claim: Claim) -> tuple[str, ...]:
    """The levels of a claim's `each` at which any of its runs are planned; one if the claim is
    tested on average."""
    every = study.levels_of(table).get(claim.each) or ("",)
    return tuple(
        level
        for level in every
        if any(seeds_of(study, table, side, SEED) for side in claim.sides(level))
    )


def seeds_of(study: Study, table: ScoreTable, side: Levels, factor: str) -> set[str]:
    """The levels of a random factor at which a table has all runs for one side of a claim, and the
    runs that it subtracts from them."""
    seeds = []
    for part in study.parts(table, side):
        every = [*study.combinations(table.stage, table.at(part))]
        if table.minus:
            less, bases = study.factors(table.minus), [*study.combinations(table.minus)]
            every = [at for at in every if {name: at[name] for name in less} in bases]
        seeds.append({at.get(factor, "") for at in every})
    return set.intersection(*seeds)


def with_levels(text: str, levels: Levels) -> str:
    """A text with the name of the level in place of each {FACTOR}. Raises BadInput for a factor
    that is not among them."""
    if "{" not in text:
        return text
    for factor, level in levels.items():
        text = text.replace(f"{{{factor}}}", level)
    for unknown in FACTOR.findall(PLACE.sub("", text)):
        if unknown != "{out}":
            has = ", ".join(levels) or "none"
            other = "; paths are {need.X}, {made.X} and {stage.X}" if "." in unknown else ""
            raise BadInput(f"{text!r}: {unknown} is not one of its factors: {has}{other}")
    return text


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """{"optim": {"lr": 1e-4}} from {"optim.lr": 1e-4}; whole groups stay."""
    groups: dict[str, Any] = {}
    for key, value in flat(settings).items():
        for part in reversed(key.split(".")):
            value = {part: value}
        groups = merge(groups, value)
    return groups


def is_safe_filename(name: str) -> bool:
    """Whether a file may have this name: it names no directory, is not hidden, is at most 200 bytes
    long, and contains only printable characters."""
    return (
        not name.startswith(".")
        and "/" not in name
        and "\\" not in name
        and name.isprintable()
        and 0 < len(name.encode()) <= 200
    )


def duplicate(names: Iterable[str]) -> str:
    """A name that occurs more than once, or ""."""
    return next((name for name, number in Counter(names).items() if number > 1), "")


@contextmanager
def within(place: object) -> Iterator[None]:
    """Prefix each line of a BadInput with "PLACE: "."""
    try:
        yield
    except BadInput as error:
        raise BadInput(*(f"{place}: {line}" for line in error.lines)) from None
