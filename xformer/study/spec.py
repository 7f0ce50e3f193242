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
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from xformer.config import (
    SHORT,
    Settings,
    flat,
    merge,
    nearest,
    read_recipe,
    refuse_moved,
    validate,
)
from xformer.data.errors import BadInput, typed
from xformer.data.files import is_safe_filename

Levels = dict[str, str]  # {factor: level}
METRIC = "metric"  # stands for the columns of a table whose columns are not a factor
SEED = "seed"  # the factor over whose levels scores are compared in pairs
RESERVED = ("stage", "run", "state", "key", "seconds", "split", METRIC, "value")  # in results.csv
STATISTICS = ("count", "mean", "std", "min", "25%", "50%", "75%", "max")
PLACE = re.compile(r"\{(need|made|stage)\.([\w-]+)(?:\(([\w-]+)=([^(){}]+)\))?\}")


class Need(Settings):
    """Something that the user brings."""

    # What it is.
    about: str
    # How to get it.
    get: str
    # Where it is, unless the command line says needs.NAME=PATH.
    path: str = ""


class Made(Settings):
    """Something made from the needs before any run."""

    # The arguments of `python`; `{out}` is where the result goes.
    command: tuple[str, ...] = ()
    # Instead of a command: the name of another [made], of which this one is an alias.
    same: str = ""


class Stage(Settings):
    """Runs that differ by the levels of their factors."""

    # The recipe that train.py runs: a path relative to the study file, or a name.
    recipe: str = ""
    # Instead of a recipe: the arguments of `python`; `{out}` is its directory.
    command: tuple[str, ...] = ()
    # Processes (ranks) of each run of a recipe, started by torchrun.
    processes: int = Field(1, ge=1)
    # The JSON file of `metrics` that a command writes into the directory `{out}`. The study makes
    # that directory first.
    result: str = "result.json"
    # Settings of every run, which override the recipe's. In a command, a setting takes the place of
    # {KEY}; without such a place it is added as KEY=VALUE.
    settings: dict[str, Any] = Field({})
    # Factors, each with its levels and their settings. A plain list holds values of the key that
    # has the factor's name.
    vary: dict[str, dict[str, dict[str, Any]] | list[Any]] = Field({})
    # Combinations to leave out, each given by some of its levels.
    without: tuple[Levels, ...] = ()


class Published(Settings):
    """A table as the paper prints it."""

    # Paper and table.
    source: str
    # Names of its columns. One that is a level of the table's column factor is shown next to
    # that level.
    columns: tuple[str, ...]
    # Its numbers by row; "" if the paper has none.
    rows: dict[str, tuple[float | str, ...]]

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
                    f"{place}: the row {row!r} has {len(numbers)} numbers, its columns are "
                    f"{len(self.columns)}"
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
    title: str
    stage: str
    # Only the runs at these levels.
    where: Levels = Field({})

    def factors(self) -> tuple[str, ...]:
        """The factors that it is laid out by."""
        return ()


class ScoreTable(Shown):
    """Scores of one stage by two of its factors, averaged over every other factor."""

    kind = "table"
    rows: str
    # A factor; or "metric": then there is a column for each name in `metric`.
    columns: str
    # Name of the metric, or one for each column. "train.loss" names the split too; train stands for
    # the last training line of the log. "valid+valid_mismatched.accuracy" is the mean over two
    # splits.
    metric: str | dict[str, str] = "accuracy"
    # The split that is scored.
    split: str = "test"
    # Show 100 times the score, as the papers do.
    percent: bool = True
    # A stage whose scores are subtracted, each at the same levels of its factors.
    minus: str = ""
    # What a cell is: the mean over runs, or their standard deviation.
    show: Literal["mean", "deviation"] = "mean"
    # Also show the maximum, as papers do that report no mean: over the runs, or over all
    # validations of all runs. The latter needs the split valid; for another split "epoch" is "run".
    best: Literal["none", "run", "epoch"] = "none"
    # Further columns, each the mean of some columns, taken within each seed.
    means: dict[str, tuple[str, ...]] = Field({})
    # The chance level of a column: the majority-class share, or for a correlation over n rows its
    # 95 % quantile under independence, 1.64 / sqrt(n). Runs at or below it are counted, because
    # fine-tuning on small sets often fails (Mosbach et al. 2021). If every column has a chance
    # level and every run of a claim is at chance, the claim stays undecided.
    chance: dict[str, float] = Field({})
    published: Published | None = None

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

    def metric_of(self, column: str) -> str:
        """The metric of a column."""
        return self.metric if isinstance(self.metric, str) else self.metric[column]


class Summary(Settings):
    """Count, mean, deviation, extremes and quartiles of a table's cells by row, or by column."""

    title: str
    # Name of the table.
    table: str
    # Its row factor, or its column factor.
    by: str
    # Its columns: count, mean, std, min, 25%, 50%, 75%, max.
    published: Published | None = None


class Curves(Shown):
    """Curves from the logs of one stage's runs: a panel for each level of one factor, a line for
    each level of another. A line is the mean over all other factors, in a band of one standard
    deviation."""

    kind = "curves"
    panels: str
    lines: str
    # A number of the log's training lines.
    value: str = "loss"
    # A number of the log's validation lines, or one for each panel. Its panels follow those of
    # training.
    validation: str | dict[str, str] = ""

    def factors(self) -> tuple[str, ...]:
        return self.panels, self.lines


class Picture(Shown):
    """A figure that the first finished run of a stage drew, such as one of python -m
    xformer.analysis."""

    kind = "picture"
    # The SVG in `{out}`. If NAME-dark.svg lies beside it, dark screens show that one.
    file: str


class Headline(Settings):
    """The picture at the top of the report, made of one table and, beside it, some curves. It is
    also a file of its own, and the study prints it as text when it ends."""

    # The question that the table answers.
    title: str
    # Name of the table: every score of its first column is a dot.
    table: str
    # Name of the curves; empty: none.
    curves: str = ""
    # What the picture calls a level of the table's rows.
    labels: dict[str, str] = Field({})


class Claim(Settings):
    """A statement of the paper: `better` scores more than `than`, by `margin`, in `each`."""

    # The statement in words.
    text: str
    # Name of the table whose scores decide.
    table: str
    better: Levels
    than: Levels
    # The factor at each level of which the claim must hold; empty: on average.
    each: str = ""
    # By how much, in the units of the metric. A negative margin makes it a non-inferiority claim.
    margin: float = 0.0


class Registration(Settings):
    """How the claims are tested, written down before the first run. The report shows the commit
    that holds each claim; a claim that is younger than the first result is exploratory."""

    # The minimum number of levels of each random factor, for each side of a claim: seeds.seed = 5
    # pre-trainings, seeds.draw = 2 fine-tunings of each.
    seeds: dict[str, int]
    # Student's two-sided test of differences that are paired by the factor `seed`. Scores are first
    # averaged over everything else.
    test: Literal["paired t over seed"] = "paired t over seed"
    # What a level of `seed` is, such as "a pre-training". The claims are about these.
    unit: str = Field(min_length=1)
    # The one extension that is planned, and when it is made; or "none". With an extension every p
    # is doubled, because the claims are then tested twice.
    extension: str = Field(min_length=1)

    @property
    def looks(self) -> int:
        """How often a claim may be tested."""
        return 1 if self.extension == "none" else 2

    def words(self) -> str:
        """All of it in a line."""
        twice = " (so every p is doubled)" if self.looks == 2 else ""
        return f"{self.test}; a seed is {self.unit}; planned extension: {self.extension}{twice}"


class Deviation(Settings):
    """Where a study does not do what the paper did. Reports show it below what it concerns."""

    # What differs, such as "weight decay of fine-tuning".
    what: str = Field(min_length=1)
    # What the paper did; "not said" if it does not tell.
    paper: str = Field(min_length=1)
    # What the study does. Its numbers are placeholders (see xformer.study.forecast.Notes).
    ours: str = Field(min_length=1)
    # The reason.
    why: str = Field(min_length=1)
    # Names of the tables that it concerns.
    tables: tuple[str, ...] = ()
    # Names of the curves that it concerns.
    curves: tuple[str, ...] = ()
    # Names of the pictures that it concerns. If tables, curves and pictures are all empty, it
    # concerns everything.
    pictures: tuple[str, ...] = ()

    def cells(self) -> tuple[str, str, str, str]:
        """What a report says of it, in the order of a table's columns."""
        return self.what, self.paper, self.ours, self.why

    def concerns(self, shown: Shown) -> bool:
        """Whether a report shows it below a table or figure."""
        named = {"table": self.tables, "curves": self.curves, "picture": self.pictures}
        return shown.name in named[shown.kind] or not any(named.values())


class Study(Settings):
    """A question, the runs that answer it, and what the paper found."""

    title: str
    question: str
    paper: str
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
    # For a factor, the only levels that are kept.
    levels: dict[str, tuple[str, ...]] = Field({})
    # Our level, or FACTOR=LEVEL -> the published row or column that it is shown next to.
    like: dict[str, str] = Field({})
    # What a reader of the results must know. Numbers are placeholders (xformer.study.forecast).
    notes: tuple[str, ...] = ()
    # Where the study does not do what the paper did. Those of a scale are added to these.
    deviations: tuple[Deviation, ...] = ()
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

    def stands_for(self, factor: str, level: str) -> str:
        """The published name of a level."""
        return self.like.get(f"{factor}={level}", self.like.get(level, level))

    def shows(self) -> tuple[Shown, ...]:
        """Every table and figure."""
        return (*self.tables, *self.curves, *self.pictures)

    def shown_stages(self) -> tuple[str, ...]:
        """The stages that a table or figure shows; all if there is no table or figure."""
        stages = {shown.stage for shown in self.shows()} | {table.minus for table in self.tables}
        return tuple(name for name in self.stages if name in stages or not any(stages))

    def combinations(self, stage: str) -> Iterator[Levels]:
        """Every combination of levels that a stage does not leave out."""
        factors = self.factors(stage)
        for levels in product(*factors.values()):
            combination = dict(zip(factors, levels, strict=True))
            left_out = self.stages[stage].without
            if not any(some.items() <= combination.items() for some in left_out):
                yield combination


@contextmanager
def within(place: object) -> Iterator[None]:
    """Prefix the message of a BadInput with "PLACE: "."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{place}: {error}") from None


def read_study(path: Path, scale: str) -> Study:
    """The study in a file at a scale. Raises BadInput naming what is wrong in it."""
    values = read_recipe(path)
    scales = values.pop("scales", {})
    if not isinstance(scales, dict) or not scales:
        door = typed("train.py")
        raise BadInput(f"{path} is not a study: it has no scales; a recipe is run with {door}")
    if not scale:
        raise BadInput(f"give a scale of {path}: scale={' or scale='.join(scales)}")
    if scale not in scales or not is_safe_filename(scale):
        raise BadInput(f"{path} has no scale {scale!r}; it has {', '.join(scales)}")
    merged = {**merge(values, scales[scale]), "path": path, "scale": scale}
    lists = [part.get("deviations", []) for part in (values, scales[scale])]
    if all(isinstance(one, list) for one in lists):
        merged["deviations"] = [*lists[0], *lists[1]]
    with within(path):
        whole = validate(Study, merged)
        study = _at_scale(whole)
        _check(study, whole)
    return study


def _at_scale(study: Study) -> Study:
    """The study without the tables and figures whose `where` names a level that `levels` leaves
    out, and without the summaries of those tables."""

    def there(shown: Shown) -> bool:
        vary = study.stages[shown.stage].vary if shown.stage in study.stages else {}
        return all(
            level in study.levels.get(factor, (level,)) or level not in vary.get(factor, ())
            for factor, level in shown.where.items()
        )

    kinds = ("tables", "curves", "pictures")
    kept: dict[str, Any] = {kind: tuple(filter(there, getattr(study, kind))) for kind in kinds}
    gone = {table.name for table in study.tables if table not in kept["tables"]}
    kept["summaries"] = tuple(one for one in study.summaries if one.table not in gone)
    return study.model_copy(update=kept)


# ------------------------------------------------------------------ do its parts fit together?


def _check(study: Study, whole: Study) -> None:
    """Refuse a study whose parts do not fit together. `whole` has the parts that the scale leaves
    out, too."""
    _check_file_names(study)
    for place, name, names in _references(study, whole):
        if name not in names:
            raise BadInput(f"{place}: there is no {name!r}{nearest(name, sorted(names))}")
    for name in study.stages:
        with within(f"stages.{name}"):
            _check_stage(study, name)
    for table in study.tables:
        with within(f"table {table.name}"):
            _check_table(study, table)
    for claim in study.claims:
        with within(f"claim {claim.text!r}"):
            _check_claim(study, claim, study.table(claim.table))


def _references(study: Study, whole: Study) -> Iterator[tuple[str, str, Collection[str]]]:
    """Every name by which one part of a study refers to another: where it stands, the name, and
    the names that there are. Check each name before you ask for the next: later ones are found by
    way of earlier ones."""
    stages, tables = study.stages, {table.name: table for table in study.tables}
    for factor, levels in study.levels.items():
        place = f"levels.{factor}"
        yield place, factor, {name for stage in stages.values() for name in stage.vary}
        known = {str(value) for stage in stages.values() for value in stage.vary.get(factor, ())}
        yield from ((place, level, known) for level in levels)
    # a deviation that comes from the base of a study may name a table that only the base shows
    own = "base" not in tomllib.loads(study.path.read_text(encoding="utf-8"))
    for one, kind in product(study.deviations if own else (), ("tables", "curves", "pictures")):
        names = {shown.name for shown in getattr(whole, kind)}
        place = f"deviation {one.what!r}: {kind}"
        yield from ((place, name, names) for name in getattr(one, kind))
    sources: dict[str, Collection[str]]
    sources = {"need": study.needs, "made": study.made, "stage": stages}
    for kind, name, *_ in PLACE.findall(study.model_dump_json()):
        yield f"{{{kind}.{name}}}", name, sources[kind]
    for shown in study.shows():
        place = f"{shown.kind} {shown.name}"
        yield place, shown.stage, stages
        factors = study.factors(shown.stage)
        yield from ((place, factor, factors) for factor in (*shown.factors(), *shown.where))
        yield from ((place, level, factors[factor]) for factor, level in shown.where.items())
    for table in study.tables:
        place, factors = f"table {table.name}", study.factors(table.stage)
        every = set(map(str, stages[table.stage].vary.get(table.columns, table.metric)))
        yield from ((f"{place}: chance", column, every) for column in table.chance)
        if table.minus:
            yield place, table.minus, stages
            yield from ((place, factor, factors) for factor in stages[table.minus].vary)
    for summary in study.summaries:
        place = f"summary {summary.title!r}"
        yield place, summary.table, tables
        yield place, summary.by, {tables[summary.table].rows, tables[summary.table].columns}
    if study.headline is not None:
        yield "headline", study.headline.table, tables
        names = {one.name for one in study.curves}
        yield from (("headline", name, names) for name in (study.headline.curves,) if name)
        rows = study.levels_of(tables[study.headline.table])[tables[study.headline.table].rows]
        yield from (("headline: labels", level, rows) for level in study.headline.labels)
    for claim in study.claims:
        yield from _references_of(study, claim)


def _references_of(study: Study, claim: Claim) -> Iterator[tuple[str, str, Collection[str]]]:
    """The names to which a claim refers; see `_references`."""
    place, sides = f"claim {claim.text!r}", (claim.better, claim.than)
    yield place, claim.table, {table.name for table in study.tables}
    table = study.table(claim.table)
    levels = study.levels_of(table)
    yield from ((place, f, levels) for f in (*claim.better, *claim.than, claim.each) if f)
    yield from ((place, level, levels[f]) for side in sides for f, level in side.items())
    if study.registration is not None:
        seeds = study.registration.seeds
        yield "registration", SEED, seeds
        factors = study.factors(table.stage)
        yield from ((f"{place}: registration.seeds.{f}", f, factors) for f in seeds)


def _check_file_names(study: Study) -> None:
    """Refuse names that would lead a file of the study out of the study's directories."""
    names = {"stages": list(study.stages), "made": list(study.made)}
    names |= {k: [s.name for s in getattr(study, k)] for k in ("tables", "curves", "pictures")}
    for kind, every in names.items():
        if twice := _twice(every):
            raise BadInput(f"two of the {kind} are named {twice!r}; give one another name")
        for name in every:
            if not is_safe_filename(name):
                good = "give letters, digits, - and _"
                raise BadInput(f"{kind}: the name {name!r} is not a plain file name; {good}")
    files = {f"stages.{name}: result": stage.result for name, stage in study.stages.items()}
    files |= {f"pictures: {picture.name}: file": picture.file for picture in study.pictures}
    for place, file in files.items():
        if not all(map(is_safe_filename, file.split("/"))):
            raise BadInput(f"{place}={file!r} does not lie inside {{out}}")


def _check_stage(study: Study, name: str) -> None:
    stage, owner = study.stages[name], dict[str, str]()
    if bool(stage.recipe) == bool(stage.command):
        raise BadInput("give a recipe or a command, one of them")
    refuse_moved(stage.settings)  # before merging, which could hide an old name
    for factor, levels in study.factors(name).items():
        if not levels and name in study.shown_stages():
            raise BadInput(f"vary.{factor} has no level left")
        if factor in RESERVED:
            raise BadInput(
                f"vary.{factor}: give the factor another name: results.csv has a column of this one"
            )
        for settings in levels.values():
            refuse_moved(settings)
        keys = {key for settings in levels.values() for key in flat(settings)}
        for key in sorted(f"{key}.{SHORT[key]}" if key in SHORT else key for key in keys):
            if key in owner:  # one of them would overrule the other
                raise BadInput(
                    f"the factors {owner[key]} and {factor} both set {key}; let one of them do it"
                )
            owner[key] = factor


def _check_table(study: Study, table: ScoreTable) -> None:
    if table.rows == table.columns:
        raise BadInput(f"rows and columns are both {table.rows!r}")
    if table.columns == METRIC and isinstance(table.metric, str):
        raise BadInput(f'columns="{METRIC}" needs metric.NAME=METRIC')
    for column in study.columns(table) if isinstance(table.metric, dict) else ():
        if column not in table.metric:
            raise BadInput(f"metric.{column} must be given")
    if table.minus and table.best != "none":
        raise BadInput("a table of differences (minus) has no best; leave one of them out")


def _check_claim(study: Study, claim: Claim, table: ScoreTable) -> None:
    """Refuse a claim that compares nothing, or that has fewer seeds at this scale than its
    registration says."""
    sides = (claim.better, claim.than)
    if table.columns == METRIC and not all(METRIC in (*side, claim.each) for side in sides):
        raise BadInput(f"say which {METRIC} of table {table.name}")
    if claim.better == claim.than or claim.each in {**claim.better, **claim.than}:
        raise BadInput("it compares a level with itself")
    needed = study.registration.seeds if study.registration is not None else {}
    for (factor, number), side in product(needed.items(), sides):
        levels = seeds_of(study, table, side, factor)
        if len(levels) < number:
            fixed = [level for name, level in side.items() if name != METRIC]
            raise BadInput(
                f"registration.seeds.{factor}={number}, but {', '.join(fixed) or 'one side'} has "
                f"{len(levels)} levels of it"
            )


def seeds_of(study: Study, table: ScoreTable, side: Levels, factor: str) -> set[str]:
    """The levels of a random factor at which a table has runs for one side of a claim."""
    wanted = {name: level for name, level in side.items() if name != METRIC}
    every = study.combinations(table.stage)
    return {levels.get(factor, "") for levels in every if wanted.items() <= levels.items()}


def _twice(names: Iterable[str]) -> str:
    """The first name that comes a second time, or nothing."""
    return next((name for name, number in Counter(names).items() if number > 1), "")
