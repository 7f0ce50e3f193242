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
from difflib import get_close_matches
from functools import partial
from inspect import getdoc
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator
from pydantic.fields import FieldInfo

from xformer.config import (
    SHORT,
    Settings,
    each_text,
    find_recipe,
    flat,
    merge,
    nearest,
    read_recipe,
    type_and_default,
    validate,
    wrapped,
)
from xformer.data.errors import BadInput, typed
from xformer.recipe import Recipe


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
        if twice := _twice(self.columns):
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
    higher number counts, too."""
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

    def stands_for(self, factor: str, level: str) -> str:
        """The published name of a level."""
        return self.like.get(f"{factor}={level}", self.like.get(level, level))

    @property
    def extends(self) -> bool:
        """Whether the study has a base."""
        return "base" in tomllib.loads(self.path.read_text(encoding="utf-8"))

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


PARTS: dict[str, type[Settings]] = {
    "needs": Need,
    "made": Made,
    "stages": Stage,
    "tables": ScoreTable,
    "summaries": Summary,
    "curves": Curves,
    "pictures": Picture,
    "headline": Headline,
    "claims": Claim,
    "registration": Registration,
    "deviations": Deviation,
}
NAMED, ALONE = ("needs", "made", "stages"), ("headline", "registration")
SEVERAL = tuple(part for part in PARTS if part not in ALONE)  # named ones, and lists
PART = re.compile(rf"\b(?:({'|'.join(SEVERAL)})\.([\w-]+)|({'|'.join(ALONE)}))\.")


@contextmanager
def within(place: object) -> Iterator[None]:
    """Prefix each line of a BadInput with "PLACE: "."""
    try:
        yield
    except BadInput as error:
        raise BadInput(*(f"{place}: {line}" for line in error.lines)) from None


def read_study(path: str | Path, scale: str) -> Study:
    """The study in a file at a scale. Raises BadInput with a line for each mistake in it."""
    path = Path(path)
    values = read_recipe(path, what="study file")
    if not {"stages", "scales"} & values.keys():
        door = typed("train.py")
        raise BadInput(f"{path} is not a study: it has no stages; a recipe is run with {door}")
    scales = values.pop("scales", {})
    if not isinstance(scales, dict) or not all(isinstance(one, dict) for one in scales.values()):
        raise BadInput(f"{path}: scales must be groups of keys: [scales.NAME]")
    if scales and not scale:
        raise BadInput(f"give a scale of {path}: scale={' or scale='.join(scales)}")
    if scale and (scale not in scales or not is_safe_filename(scale)):
        has = f"it has {', '.join(scales)}" if scales else "it has none; leave scale= out"
        raise BadInput(f"{path} has no scale {scale!r}; {has}")
    own = scales.get(scale, {})
    merged = {**merge(values, own), "path": path, "scale": scale}
    lists = [part.get("deviations", []) for part in (values, own)]
    if all(isinstance(one, list) for one in lists):
        merged["deviations"] = [*lists[0], *lists[1]]
    with within(path):
        return _checked(merged)


def _as_in_toml(line: str) -> str:
    """A complaint about a key, which is named as on a command line, in the terms of a study file:
    "claims.0.text must be given: ..." becomes "[[claims]] number 1: text must be given"."""
    line = re.sub(r" must be given: .*", " must be given", line)
    line = re.sub(r"(give a list, such as ).*='(.*)'", r"\1\2", line)
    name = line.partition("=")[0]
    if name in PARTS:
        other = f"[[{name}]]" if name in (*ALONE, *NAMED) else f"[{name}]"
        return f"write {_form(name)}, not {other}"
    if vary := re.match(r"[\w.-]+\.vary\.([^.=]+)(\.[^.=]+)?=(\[?)", line):
        what = "give a list of values, or a group of levels"
        if vary[2]:
            what = "give a group of settings"
            what += f', or write vary."{vary[1]}{vary[2]}" = [...]' if vary[3] else ""
        return f"{line.partition(': ')[0]}: {what}"
    if not (part := PART.search(line)):
        return line
    kind, one = part[1] or part[3], part[2] or ""
    place = f"[{kind}]" if kind in ALONE else f"[{kind}.{one}]"
    if kind not in (*ALONE, *NAMED):
        place = f"[[{kind}]] number {int(one) + 1}"
    line = line.replace(part[0], "").removesuffix("; --help lists the keys")
    if (key := line.removeprefix("unknown key ")) != line:
        key, keys = key.partition(";")[0], [*PARTS[kind].model_fields]
        keys += [f"published.{name}" for name in Published.model_fields if "published" in keys]
        line = f"unknown key {key}{nearest(key, keys)}"
    return f"{place}: {line}"


def _form(name: str) -> str:
    """How the heading of a part is written."""
    return f"[{name}]" if name in ALONE else f"[{name}.NAME]" if name in NAMED else f"[[{name}]]"


def _checked(values: dict[str, Any]) -> Study:
    """The study with these values. If one part cannot be parsed, the others are still checked, so
    that the user sees all mistakes at once."""
    mistakes: list[str] = []
    readable = set(Study.model_fields) - {"title", "question", "paper"}
    for parts in (set(values), readable, {"needs", "made", "stages", "path", "scale"}):
        some = {key: value for key, value in values.items() if key in parts}
        try:
            whole = validate(Study, {"title": "-", **some} if mistakes else some)
        except BadInput as error:
            mistakes = mistakes or [_as_in_toml(line) for line in error.lines]
            continue
        study = _at_scale(whole)
        mistakes += _mistakes(study, whole)
        break
    if mistakes:
        raise BadInput(*dict.fromkeys(mistakes))
    return study


def _at_scale(study: Study) -> Study:
    """The study without the tables and figures whose `where` names a level that `levels` leaves
    out, and without the summaries of those tables."""

    def there(shown: Shown) -> bool:
        vary = study.stages[shown.stage].vary if shown.stage in study.stages else {}
        return all(
            level in study.levels.get(factor, (level,))
            or level not in map(str, vary.get(factor, ()))
            for factor, level in shown.where.items()
        )

    kinds = ("tables", "curves", "pictures")
    kept: dict[str, Any] = {kind: tuple(filter(there, getattr(study, kind))) for kind in kinds}
    gone = {table.name for table in study.tables if table not in kept["tables"]}
    kept["summaries"] = tuple(one for one in study.summaries if one.table not in gone)
    return study.model_copy(update=kept)


# ------------------------------------------------------------------ do its parts fit together?


def _mistakes(study: Study, whole: Study) -> Iterator[str]:
    """A line for each part of a study that does not fit the others. `whole` has the parts that the
    scale leaves out, too."""
    yield from _bad_file_names(study)
    yield from _bad_names(study, whole)
    yield from _bad_like(whole)
    levels = {factor: (*_bad_levels(study, factor),) for factor in study.levels}
    yield from (f"levels.{factor}: {line}" for factor in levels for line in levels[factor])
    # a wrong level must not cause further errors in the tables that show it
    right = {factor: kept for factor, kept in study.levels.items() if not levels[factor]}
    study = study.model_copy(update={"levels": right})
    for name in study.stages:
        yield from (f"stages.{name}: {line}" for line in _bad_stage(study, name))
    for shown in study.shows():
        lines = _bad_shown(study, shown)
        yield from (f"{shown.kind} {shown.name}: {line}" for line in lines)
    for summary in study.summaries:
        yield from (f"summary {summary.title!r}: {line}" for line in _bad_summary(study, summary))
    if study.headline is not None:
        yield from (f"headline: {line}" for line in _bad_headline(study, study.headline))
    if twice := _twice(claim.text for claim in study.claims):
        yield f"two claims have the text {twice!r}; give each its own, which overviews know it by"
    for claim in study.claims:
        yield from (f"claim {claim.text!r}: {line}" for line in _bad_claim(study, claim))


def _unknown(names: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """A line for each of the names that is not known."""
    for name in names:
        if name not in known:
            number = _number(name)
            equal = [one for one in known if number is not None and _number(one) == number]
            near = f"; did you mean {equal[0]}?" if equal else nearest(name, sorted(known))
            yield f"there is no {name!r}{near}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _bad_levels(study: Study, factor: str) -> Iterator[str]:
    """The wrong names in levels.FACTOR."""
    stages = study.stages.values()
    lines = [*_unknown([factor], {name for stage in stages for name in stage.vary})]
    known = {str(level) for stage in stages for level in stage.vary.get(factor, ())}
    yield from lines or _unknown(study.levels[factor], known)


def _bad_names(study: Study, whole: Study) -> Iterator[str]:
    """The wrong names in deviations and in places such as {made.X}."""
    # a deviation that comes from the base of a study may name a table that only the base shows
    own = not study.extends
    for one, kind in product(study.deviations if own else (), ("tables", "curves", "pictures")):
        lines = [*_unknown(getattr(one, kind), {shown.name for shown in getattr(whole, kind)})]
        yield from (f"deviation {one.what!r}: {kind}: {line}" for line in lines)
    sources: dict[str, Collection[str]]
    sources = {"need": study.needs, "made": study.made, "stage": study.stages}
    for kind, name, *_ in PLACE.findall(study.model_dump_json()):
        other = [f"{{{k}.{name}}}" for k, names in sources.items() if k != kind and name in names]
        lines = [*_unknown([name], sources[kind])]
        if lines and other:
            lines = [f"there is no {name!r}; did you mean {' or '.join(other)}?"]
        yield from (f"{{{kind}.{name}}}: {line}" for line in lines)


def _bad_like(whole: Study) -> Iterator[str]:
    """The wrong levels in `like`. Their published numbers would be missing from the report."""
    known = {(f, str(one)) for s in whole.stages.values() for f in s.vary for one in s.vary[f]}
    for table in whole.tables:
        metrics = () if isinstance(table.metric, str) else tuple(table.metric)
        known |= {(table.columns, name) for name in (*metrics, *table.means)}
    names = {level for _, level in known} | {"=".join(pair) for pair in known}
    yield from (f"like: {line}" for line in _unknown(whole.like, names))


def _bad_headline(study: Study, shown: Headline) -> Iterator[str]:
    """What is wrong with the names in a headline."""
    tables = {table.name: table for table in study.tables}
    yield from _unknown([shown.table], tables)
    yield from _unknown(filter(None, [shown.curves]), {one.name for one in study.curves})
    if shown.table in tables:
        table = tables[shown.table]
        rows = study.levels_of(table).get(table.rows, ())
        yield from (f"labels: {line}" for line in _unknown(shown.labels, rows))


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


def _bad_file_names(study: Study) -> Iterator[str]:
    """Names that would put a file outside the study's directories, and names that are used
    twice."""
    names = {"stages": list(study.stages), "made": list(study.made)}
    names |= {k: [s.name for s in getattr(study, k)] for k in ("tables", "curves", "pictures")}
    for kind, every in names.items():
        if twice := _twice(every):
            yield f"two of the {kind} are named {twice!r}; give one another name"
        for name in every:
            if not is_safe_filename(name):
                good = "give letters, digits, - and _"
                yield f"{kind}: the name {name!r} is not a plain file name; {good}"
    written = [f"{one.name}.svg" for one in (*study.curves, *study.pictures)]
    written += [f"table-{table.name}.svg" for table in study.tables]
    written += [f"claim-{number}.svg" for number, _ in enumerate(study.claims, start=1)]
    written += [f"{study.headline.name}.svg"] if study.headline else []
    if (twice := _twice(written)) and not any(map(_twice, names.values())):
        yield f"two figures of the report are written to {twice!r}; give one another name"
    files = {f"stages.{name}: result": stage.result for name, stage in study.stages.items()}
    files |= {f"pictures: {picture.name}: file": picture.file for picture in study.pictures}
    for place, file in files.items():
        if not all(map(is_safe_filename, file.split("/"))):
            yield f"{place}={file!r} does not lie inside {{out}}"


def _bad_stage(study: Study, name: str) -> Iterator[str]:
    stage, owner = study.stages[name], dict[str, str]()
    if bool(stage.recipe) == bool(stage.command):
        others = [other for other in study.stages if other != name]
        near = "" if stage.recipe or stage.command else nearest(name, others)
        yield f"give either a recipe or a command{near}"
    written = stage.model_dump_json(include={"command", "settings", "vary"})
    if stage.command and "{out}" not in written:
        yield f"its command needs {{out}}, the directory in which it writes {stage.result}"
    for some in stage.without:
        for factor, level in some.items():
            known = map(str, stage.vary.get(factor, [level]))
            lines = [*_unknown([factor], stage.vary), *_unknown([level], [*known])]
            yield from (f"without: {line}" for line in lines)
    listed = [factor for factor, levels in stage.vary.items() if isinstance(levels, list)]
    names = [f for f in listed if "." not in f and f not in {*Recipe.model_fields, *RESERVED}]
    for factor in names if stage.recipe else ():
        yield (
            f"vary.{factor}: a list has values of a key, and recipes have no {factor!r}; levels "
            "without settings are written { 0 = {}, 20 = {} }"
        )
    factors = study.factors(name)
    for factor, levels in factors.items():
        if not levels and name in study.shown_stages():
            yield f"vary.{factor} has no level left"
        if twice := _twice(map(str, stage.vary[factor])):
            yield f"vary.{factor} has the level {twice!r} twice; give each level once"
        if factor in RESERVED:
            why = "give the factor another name: results.csv has a column of this one"
            yield f"vary.{factor}: {why}"
        keys = {key for settings in levels.values() for key in flat(settings)}
        for key in sorted(f"{key}.{SHORT[key]}" if key in SHORT else key for key in keys):
            if key in owner:  # one of them would overrule the other
                yield f"the factors {owner[key]} and {factor} both set {key}; let one of them do it"
            owner[key] = factor
    try:
        if stage.recipe and not factors.keys() & {*RESERVED, *names}:
            yield from _bad_settings(study, name)
    except BadInput as error:
        yield from error.lines


def _bad_settings(study: Study, name: str) -> Iterator[str]:
    """What is wrong in the settings of a stage's runs. Only enough runs are checked to cover each
    level once."""
    recipe = read_recipe(find_recipe(study.stages[name].recipe, study.path.parent))
    needed, seen = {"data": "-", "run": "-", "head": "mlm"}, set[tuple[str, str]]()
    for levels in study.combinations(name):
        if not seen or not levels.items() <= seen:
            seen |= levels.items()
            settings = needed | merge(recipe, study.settings(name, levels))
            try:
                validate(Recipe, each_text(settings, partial(with_levels, levels=levels)))
            except BadInput as error:
                yield from error.lines


def _bad_shown(study: Study, shown: Shown) -> Iterator[str]:
    """What is wrong in a table, a figure or a picture."""
    if lines := [*_unknown([shown.stage], study.stages)]:
        yield from lines
        return
    factors = study.factors(shown.stage)
    lines = [*_unknown((*shown.factors(), *shown.where), factors)]
    for factor, level in shown.where.items():
        lines += _unknown([level], factors.get(factor, {level}))
        if factor in shown.factors():
            what = f"all levels of {factor} are shown; levels.{factor} chooses some for the study"
            lines.append(f"where.{factor}: {what}")
    if isinstance(shown, Curves) and study.stages[shown.stage].command:
        lines.append(f"stages.{shown.stage} runs a command, and commands write no log")
    yield from lines
    if isinstance(shown, ScoreTable) and not lines:
        yield from _bad_table(study, shown)
    if isinstance(shown, Curves) and isinstance(shown.validation, dict) and not lines:
        panels = [*map(str, study.stages[shown.stage].vary[shown.panels])]
        yield from (f"validation: {line}" for line in _unknown(shown.validation, panels))
        if shown.panels == shown.lines:
            yield f"validation: all levels of {shown.lines} share one panel; give one name for all"


def _bad_table(study: Study, table: ScoreTable) -> Iterator[str]:
    stage = study.stages[table.stage]
    every = set(map(str, stage.vary.get(table.columns, table.metric)))
    yield from (f"chance: {line}" for line in _unknown(table.chance, every))
    for name, columns in table.means.items():
        yield from (f"means.{name}: {line}" for line in _unknown(columns, every))
        if name in every:
            yield f"means.{name}: a column has this name, which the mean would replace; rename it"
    for column, chance in table.chance.items():
        if table.percent and abs(chance) >= 1:
            fraction = f"{chance:g} points are {chance / 100:g}"
            yield f"chance.{column}={chance:g} must be a fraction: {fraction}"
    if table.minus:
        lines = [*_unknown([table.minus], study.stages)]
        yield from lines or _unknown(study.stages[table.minus].vary, stage.vary)
    if table.rows == table.columns:
        yield f"rows and columns are both {table.rows!r}"
    if table.metric == {}:
        yield "metric is empty; give metric.NAME=METRIC"
    if table.columns == METRIC and isinstance(table.metric, str):
        yield f'columns="{METRIC}" needs metric.NAME=METRIC'
    elif isinstance(table.metric, dict):
        for column in study.columns(table):
            if column not in table.metric:
                yield f"metric.{column} must be given"
    for splits in (table.split_of(metric).split("+") for metric in table.metrics):
        if "train" in splits and len(splits) > 1:
            yield (
                f"split {'+'.join(splits)!r}: train is the last training line of the log and "
                "cannot be averaged with a split; give it a table of its own"
            )
    if table.minus and table.best != "none":
        yield "a table of differences (minus) has no best; leave one of them out"


def doubts(study: Study) -> Iterator[str]:
    """A line for each published name that no cell shows, although a cell has nearly this name, and
    for each published table that may be in another unit."""
    for table in study.tables:
        if table.published is not None:
            lines = _doubts(study, table, table.published)
            yield from (f"table {table.name}: {line}" for line in lines)


def _doubts(study: Study, table: ScoreTable, published: Published) -> Iterator[str]:
    vary = study.stages[table.stage].vary
    every = {table.columns: [*table.means, *vary.get(table.columns, table.metric)]}
    every |= {table.rows: [*vary.get(table.rows, ())]}
    for factor, names in ((table.rows, published.rows), (table.columns, published.columns)):
        ours = {study.stands_for(factor, str(level)): str(level) for level in every[factor]}
        left = [name for name in ours if name not in names]
        for name in names:
            own = [one for one in left if not name.startswith(one)]
            if name not in ours and (near := get_close_matches(name, own, 1, cutoff=0.8)):
                level = ours[near[0]]
                yield (
                    f"no cell shows the published {name!r}; if it belongs to {level}, say "
                    f'like."{level}" = "{name}"'
                )
    numbers = [abs(n) for row in published.rows.values() for n in row if isinstance(n, float)]
    of_scores = table.percent and table.show == "mean" and not table.minus
    if of_scores and len(numbers) > 1 and 0.2 < max(numbers) <= 1:
        yield f"no published number is above {max(numbers):g}, but the table shows percent"


def _bad_summary(study: Study, summary: Summary) -> Iterator[str]:
    tables = {table.name: {table.rows, table.columns} for table in study.tables}
    lines = [*_unknown([summary.table], tables)]
    yield from lines or _unknown([summary.by], tables[summary.table])
    if summary.published is not None:
        lines = [*_unknown(summary.published.columns, STATISTICS)]
        yield from (f"published.columns: {line}" for line in lines)


def _bad_claim(study: Study, claim: Claim) -> Iterator[str]:
    """What is wrong in a claim, such as that it compares nothing, or has fewer seeds at this scale
    than its registration says."""
    tables = {table.name: table for table in study.tables}
    table = tables.get(claim.table)
    if table is None or [*_bad_shown(study, table)]:  # the table's own mistakes have lines already
        yield from _unknown([claim.table], tables)
        return
    sides, levels = (claim.better, claim.than), study.levels_of(table)
    each = [claim.each] if claim.each else []
    lines = [*_unknown(dict.fromkeys((*claim.better, *claim.than, *each)), levels)]
    for factor, level in (pair for side in sides for pair in side.items()):
        if factor == table.columns and level in table.means:
            lines.append(f"{level} is a mean of columns, which no claim can name")
        else:
            unknown = [*_unknown([level], levels.get(factor, (level,)))]
            varied = [stage.vary.get(factor, ()) for stage in study.stages.values()]
            if unknown and factor in study.levels and level in {str(v) for v in chain(*varied)}:
                unknown = [f"levels.{factor} leaves out {level!r}"]
            lines += unknown
    needed = study.registration.seeds if study.registration is not None else {}
    factors = study.factors(table.stage)
    wrong = [f"registration.seeds: {line}" for line in _unknown(needed, factors)]
    lines += wrong
    if study.registration is not None and SEED not in needed and not wrong:
        lines.append(f"registration.seeds must say how many levels the factor {SEED!r} has")
    yield from lines
    if lines:
        return
    if table.columns == METRIC and not all(METRIC in (*side, claim.each) for side in sides):
        yield f"say which {METRIC} of table {table.name}"
    if claim.tie and claim.margin <= 0:
        yield f"a tie needs a margin above 0, not {claim.margin:g}: how far apart the sides may be"
    if table.percent and abs(margin := claim.margin) >= 1:
        yield f"margin={margin:g} must be a fraction: {margin:g} points are {margin / 100:g}"
    if one_sided := claim.better.keys() ^ claim.than.keys():
        factor = min(one_sided)
        yield (
            f"only one of better and than names {factor}; the other would be the mean over all its "
            f"levels: name one of {', '.join(levels[factor])}"
        )
    elif alone := _unpaired(study, table, claim):
        yield (
            f"only one of better and than has runs at {alone}, so their means would be over "
            "different runs: leave these levels out of both sides, or name others"
        )
    if claim.better == claim.than or claim.each in {**claim.better, **claim.than}:
        yield "it compares a level with itself"
    elif needed and SEED in (table.rows, table.columns, claim.each):
        yield f"its scores are paired by {SEED}, which therefore cannot be rows, columns or each"
    else:
        yield from _bad_seeds(study, table, claim, needed)


def _bad_seeds(
    study: Study, table: ScoreTable, claim: Claim, needed: dict[str, int]
) -> Iterator[str]:
    """The first factor that has too few levels: fewer than registered on one side, or fewer on both
    sides at once, where scores are paired by it. Without a registration some level of `each` must
    have a pair."""
    paired = replicate_factors(study, table, (*claim.better, claim.each))
    levels = levels_of_claim(study, table, claim)
    pairs = dict.fromkeys(paired, 0)
    for level, factor in product(levels, dict.fromkeys((*needed, *paired))):
        number, sides = needed.get(factor, 0), claim.sides(level)
        have = [seeds_of(study, table, side, factor) for side in sides]
        for side, some in zip(sides, have, strict=True):
            if len(some) < number:
                at = ", ".join(one for name, one in side.items() if name != METRIC) or "one side"
                yield f"registration.seeds.{factor}={number}, but {at} has {len(some)} levels of it"
                return
        if factor in paired:
            both = len(have[0] & have[1])
            pairs[factor] = max(pairs[factor], both)
            if both < number:
                at = f"at {level} " if level else ""
                yield (
                    f"registration.seeds.{factor}={number}, but {at}only {both} levels of it have "
                    "both sides"
                )
                return
    for factor in (factor for factor, both in pairs.items() if not both):
        yield f"no {factor} has both sides, so no two scores can be compared"


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


def _unpaired(study: Study, table: ScoreTable, claim: Claim) -> str:
    """Levels over which only one side of a claim is averaged, or "". A replicate, or a level of
    `each`, that only one side has does not count, because it is not compared."""
    over: list[dict[tuple[str, ...], set[str]]] = []  # by replicate and level of `each`
    for side in (claim.better, claim.than):
        fixed = table.at(side)
        own = replicate_factors(study, table, (*side, claim.each))
        own += [claim.each] if claim.each not in ("", METRIC) else []
        over.append({})
        for levels in study.combinations(table.stage, fixed):
            rest = [f"{f}={v}" for f, v in levels.items() if f not in (*own, *fixed)]
            key = tuple(levels[factor] for factor in own)
            over[-1].setdefault(key, set()).add(", ".join(rest))
    ours, theirs = over
    alone = (ours[key] ^ theirs[key] for key in ours.keys() & theirs.keys())
    return min(set().union(*alone), default="")


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
    """The levels of a random factor at which a table has runs for one side of a claim, and the
    runs that it subtracts from them."""
    every = [*study.combinations(table.stage, table.at(side))]
    if table.minus:
        less, bases = study.factors(table.minus), [*study.combinations(table.minus)]
        every = [at for at in every if {name: at[name] for name in less} in bases]
    return {at.get(factor, "") for at in every}


def _twice(names: Iterable[str]) -> str:
    """A name that occurs more than once, or ""."""
    return next((name for name, number in Counter(names).items() if number > 1), "")


# ------------------------------------------------------------------------------- help and settings


def keys_text() -> str:
    """What `python -m xformer.study keys` prints: every key of a study file."""
    lines = [(__doc__ or "").strip(), ""]
    own = [name for name, field in Study.model_fields.items() if field.description]
    for name in own:
        lines += key_lines(name, Study.model_fields[name])
    parts: dict[str, type[Settings]] = {_form(name): part for name, part in PARTS.items()}
    parts["[tables.published]"] = Published
    for place, part in parts.items():
        lines += ["", *wrapped(f"{place}: {getdoc(part)}", 0), ""]
        for name in part.model_fields:
            lines += key_lines(name, part.model_fields[name])
    return "\n".join(lines)


def key_lines(name: str, field: FieldInfo) -> list[str]:
    """The lines of help for one key."""
    return [f"    {name}: {type_and_default(field)}", *wrapped(field.description, 8)]


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
