"""A study file: which runs, what varies, what to tabulate, what was published, what to check.

    [needs.NAME]             what the user brings: a checkpoint, a directory of data
    [made.NAME]              made from these by a command: stores, tokenizers, imported checkpoints
    [stages.NAME]            runs: a recipe (or a command), its settings, and what `vary`s them
    [[tables]] [[summaries]] [[curves]] [[pictures]] [[claims]]
                             what to show, and the paper's statements, checked
    notes, [[deviations]]    what a reader must know, and where the study leaves the paper
    [scales.NAME]            laid over all of the above: scale=mini, scale=paper
    base = "other.toml"      laid over another study, whose runs it shares where they are the same

In any string {need.X}, {made.X} and {stage.X} stand for a path, {FACTOR} for the name of a level,
also in what is made: {made.{model}} is made for each model that some run needs. A run finds in
{stage.X} the run of that stage at its own levels; {stage.X(corpus=english)} says another level.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

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
METRIC = "metric"  # what a table's columns are where they are no factor
SEED = "seed"  # the factor over whose levels scores are compared in pairs
RESERVED = ("stage", "run", "state", "key", "seconds", "split", METRIC, "value")  # in results.csv
STATISTICS = ("count", "mean", "std", "min", "25%", "50%", "75%", "max")
PLACE = re.compile(r"\{(need|made|stage)\.([\w-]+)(?:\(([\w-]+)=([^(){}]+)\))?\}")


class Need(Settings):
    """Something that the user brings."""

    about: str
    """What it is."""
    get: str
    """How to come by it."""
    path: str = ""
    """Where it is, unless the command line says needs.NAME=PATH."""


class Made(Settings):
    """Something made from the needs before any run."""

    command: tuple[str, ...] = ()
    """The arguments of `python`; `{out}` is where the result goes."""
    same: str = ""
    """Instead of a command: it is the same as another."""


class Stage(Settings):
    """Runs that differ by the levels of their factors."""

    recipe: str = ""
    """The recipe that train.py runs: a path relative to the study file, or a name."""
    command: tuple[str, ...] = ()
    """Instead of a recipe: the arguments of `python`; `{out}` is its directory."""
    result: str = "result.json"
    """The JSON file of `metrics` that a command writes into `{out}`, a directory that is there."""
    settings: dict[str, Any] = Field({})
    """Settings of every run, over the recipe's. Those of a command and of its levels take the place
    of {KEY} in it, or else are added to it as KEY=VALUE."""
    vary: dict[str, dict[str, dict[str, Any]] | list[Any]] = Field({})
    """Factors: for each level its settings; a plain list holds the values of the key so named."""
    without: tuple[Levels, ...] = ()
    """Combinations that make no sense and are left out, by some of their levels."""


class Published(Settings):
    """A table as the paper prints it."""

    source: str
    """Paper and table."""
    columns: tuple[str, ...]
    """Names of its columns: levels of the table's column factor where they are the same."""
    rows: dict[str, tuple[float | str, ...]]
    """Its numbers by row; "" where the paper has none."""

    def number(self, row: str, column: str) -> float | None:
        """The number in a row and column; None where there is none."""
        if row not in self.rows or column not in self.columns:
            return None
        number = self.rows[row][self.columns.index(column)]
        return number if isinstance(number, float) else None


class Table(Settings):
    """Scores of one stage by two of its factors; every other factor is averaged over."""

    name: str
    title: str
    stage: str
    rows: str
    columns: str
    """A factor; or "metric": then there is a column for each name in `metric`."""
    metric: str | dict[str, str] = "accuracy"
    """Name of the metric, or one for each column; "train.loss" names the split too, where train
    stands for the last line of the log. "valid+valid_mismatched.accuracy" is the mean over two
    splits."""
    split: str = "test"
    """The split that is scored."""
    percent: bool = True
    """Show 100 times the score, as the papers do."""
    where: Levels = Field({})
    """Only the runs at these levels."""
    minus: str = ""
    """A stage whose scores are subtracted, each at the same levels of the factors it has."""
    show: Literal["mean", "deviation"] = "mean"
    """What a cell is: the mean over runs, or their standard deviation."""
    best: Literal["none", "run", "epoch"] = "none"
    """Show the highest number too, as papers do that print no mean: of the runs as they are scored,
    or of every validation of every run."""
    means: dict[str, tuple[str, ...]] = Field({})
    """Further columns, each the mean of some columns of a run's mapping or seed."""
    chance: dict[str, float] = Field({})
    """For a column, the score that a model which has learnt nothing does not exceed: the share of
    the commonest class, or of a correlation over n rows 1.64 / sqrt(n), the 95 % quantile. Runs
    that score no more are counted: small sets often fail to train (Mosbach et al. 2021). If no run
    of a claim scores more, the claim stays undecided."""
    published: Published | None = None

    @property
    def digits(self) -> int:
        """Decimals that are shown."""
        return 1 if self.percent else 3


class Summary(Settings):
    """Count, mean, deviation, extremes and quartiles of a table's cells by row, or by column."""

    title: str
    table: str
    """Name of the table."""
    by: str
    """Its row factor, or its column factor."""
    published: Published | None = None
    """Its columns: count, mean, std, min, 25%, 50%, 75%, max."""


class Curves(Settings):
    """Curves of the logs of one stage's runs: a panel for each level of a factor, a line for each
    level of another; the mean over all other factors, in a band of a standard deviation."""

    name: str
    title: str
    stage: str
    panels: str
    lines: str
    value: str = "loss"
    """A number of the log's training lines."""
    validation: str | dict[str, str] = ""
    """A number of its validation lines, drawn below; or one for each panel."""
    where: Levels = Field({})
    """Only the runs at these levels."""


class Picture(Settings):
    """A figure that the command of a stage drew, such as one of python -m xformer.analysis: of the
    first finished run."""

    name: str
    title: str
    stage: str
    file: str
    """The SVG in `{out}`; with NAME-dark.svg beside it, that one on dark screens."""
    where: Levels = Field({})
    """Of the runs at these levels."""


class Claim(Settings):
    """A statement of the paper: `better` scores more than `than`, by `margin`, in `each`."""

    text: str
    """The statement in words."""
    table: str
    """Name of the table whose scores decide."""
    better: Levels
    than: Levels
    each: str = ""
    """The factor at each of whose levels it must hold; empty: on average."""
    margin: float = 0.0
    """How much more, in the units of the metric; negative allows so much less."""


class Registration(Settings):
    """How the claims are tested, written down before the first run. The report shows the commit
    that holds each claim; a claim that is younger than the first result is exploration."""

    seeds: dict[str, int]
    """How many levels each factor of chance has at least, for each side of a claim: seeds.seed = 5
    pre-trainings, seeds.draw = 2 fine-tunings of each."""
    test: Literal["paired t over seed"] = "paired t over seed"
    """The test: Student's, two-sided, on differences paired by the factor `seed`; scores are first
    averaged over everything else."""
    unit: str = Field(min_length=1)
    """What a level of `seed` is, such as "a pre-training": the claims are about these."""
    extension: str = Field(min_length=1)
    """The one extension that is planned, and when it is made; or "none". With one, every p is
    doubled, since claims are then looked at twice."""

    @property
    def looks(self) -> int:
        """How often a claim may be tested."""
        return 1 if self.extension == "none" else 2

    def words(self) -> str:
        """All of it in a line."""
        twice = " (so every p is doubled)" if self.looks == 2 else ""
        return f"{self.test}; a seed is {self.unit}; planned extension: {self.extension}{twice}"


class Deviation(Settings):
    """Where a study does not do what the paper did. Reports say so below what it concerns."""

    what: str = Field(min_length=1)
    """What differs, such as "weight decay of fine-tuning"."""
    paper: str = Field(min_length=1)
    """What the paper did; "not said" where it leaves it open."""
    ours: str = Field(min_length=1)
    """What the study does; its numbers are placeholders (see xformer.study.notes)."""
    why: str = Field(min_length=1)
    """The reason."""
    tables: tuple[str, ...] = ()
    """Names of the tables that it concerns."""
    curves: tuple[str, ...] = ()
    """Names of the curves that it concerns."""
    pictures: tuple[str, ...] = ()
    """Names of the pictures that it concerns. Without any name it concerns everything."""

    def cells(self) -> tuple[str, str, str, str]:
        """What a report says of it, in the order of a table's columns."""
        return self.what, self.paper, self.ours, self.why

    def concerns(self, shown: Table | Curves | Picture) -> bool:
        """Whether it belongs below a table or figure."""
        kinds = {Table: self.tables, Curves: self.curves, Picture: self.pictures}
        return shown.name in kinds[type(shown)] or not any(kinds.values())


class Study(Settings):
    """A question, the runs that answer it, and what the paper found."""

    title: str
    question: str
    paper: str
    needs: dict[str, Need] = Field({})
    made: dict[str, Made] = Field({})
    stages: dict[str, Stage]
    tables: tuple[Table, ...] = ()
    summaries: tuple[Summary, ...] = ()
    curves: tuple[Curves, ...] = ()
    pictures: tuple[Picture, ...] = ()
    claims: tuple[Claim, ...] = ()
    registration: Registration | None = None
    levels: dict[str, tuple[str, ...]] = Field({})
    """Of a factor, only these levels."""
    like: dict[str, str] = Field({})
    """Our level, or FACTOR=LEVEL, -> the published row or column it stands beside."""
    notes: tuple[str, ...] = ()
    """What a reader of the results must know; numbers are placeholders (xformer.study.notes)."""
    deviations: tuple[Deviation, ...] = ()
    """Where the study does not do what the paper did; those of a scale are added to these."""
    path: Path = Field(exclude=True)
    scale: str = Field("", exclude=True)

    def factors(self, stage: str) -> dict[str, dict[str, dict[str, Any]]]:
        """The factors of a stage: for each level, in order, its settings."""
        found = {}
        for factor, levels in self.stages[stage].vary.items():
            if isinstance(levels, list):
                levels = {str(value): {factor: value} for value in levels}
            kept = self.levels.get(factor, tuple(levels))
            found[factor] = {level: levels[level] for level in kept if level in levels}
        return found

    def columns(self, table: Table) -> tuple[str, ...]:
        """The columns of a table, without its means."""
        if table.columns != METRIC:
            return tuple(self.factors(table.stage)[table.columns])
        assert isinstance(table.metric, dict)
        return tuple(table.metric)

    def stands_for(self, factor: str, level: str) -> str:
        """The published name of a level."""
        return self.like.get(f"{factor}={level}", self.like.get(level, level))

    def shown(self) -> tuple[str, ...]:
        """The stages that a table or figure shows; all, where there is none."""
        stages = [table.stage for table in self.tables] + [table.minus for table in self.tables]
        stages += [curves.stage for curves in self.curves]
        stages += [picture.stage for picture in self.pictures]
        return tuple(name for name in self.stages if name in stages or not any(stages))

    def combinations(self, stage: str) -> Iterator[Levels]:
        """Every combination of levels of a stage that makes sense."""
        factors = self.factors(stage)
        for levels in product(*factors.values()):
            found = dict(zip(factors, levels, strict=True))
            left_out = self.stages[stage].without
            if not any(combination.items() <= found.items() for combination in left_out):
                yield found


def read_study(path: Path, scale: str) -> Study:
    """The study in a file at a scale. Raises BadInput naming what is wrong in it."""
    values = read_recipe(path)
    scales = values.pop("scales", {})
    if not isinstance(scales, dict) or not scales:
        door = typed("train.py")
        raise BadInput(f"{path} is no study, it has no scales; a recipe is run with {door}")
    if not scale:
        raise BadInput(f"give a scale of {path}: scale={' or scale='.join(scales)}")
    if scale not in scales or not is_safe_filename(scale):
        raise BadInput(f"{path} has no scale {scale!r}; it has {', '.join(scales) or 'none'}")
    merged = {**merge(values, scales[scale]), "path": path, "scale": scale}
    lists = [part.get("deviations", []) for part in (values, scales[scale])]
    if all(isinstance(found, list) for found in lists):
        merged["deviations"] = [*lists[0], *lists[1]]
    study = validate(Study, merged)
    _check_levels(study)
    _check_deviations(study)
    study = _at_scale(study)
    _check(study)
    return study


def _at_scale(study: Study) -> Study:
    """The study without what shows only runs `where` a factor has a level that `levels` leaves
    out."""

    def there(shows: Table | Curves | Picture) -> bool:
        vary = study.stages[shows.stage].vary if shows.stage in study.stages else {}
        return all(
            level in study.levels.get(factor, (level,)) or level not in vary.get(factor, ())
            for factor, level in shows.where.items()
        )

    tables = tuple(filter(there, study.tables))
    gone = {table.name for table in study.tables} - {table.name for table in tables}
    summaries = tuple(summary for summary in study.summaries if summary.table not in gone)
    curves = tuple(filter(there, study.curves))
    pictures = tuple(filter(there, study.pictures))
    return study.model_copy(
        update={"tables": tables, "summaries": summaries, "curves": curves, "pictures": pictures}
    )


def _check_deviations(study: Study) -> None:
    """Refuse a deviation of a table or figure that there is not. One that the study has from its
    base may be of a table that only the base shows."""
    if "base" in tomllib.loads(study.path.read_text(encoding="utf-8")):
        return
    for one in study.deviations:
        for kind in ("tables", "curves", "pictures"):
            names = {shown.name for shown in getattr(study, kind)}
            for name in getattr(one, kind):
                _known(study, f"deviation {one.what!r}: {kind}", name, names)


def _check_levels(study: Study) -> None:
    """Refuse `levels` that name a factor or a level that there is not."""
    every = {factor for name in study.stages for factor in study.stages[name].vary}
    for factor, kept in study.levels.items():
        _known(study, f"levels.{factor}", factor, every)
        for level in kept:
            places = [n for n, s in study.stages.items() if factor in s.vary]
            found = {str(v) for n in places for v in study.stages[n].vary[factor]}
            _known(study, f"levels.{factor}", level, found)


def _check(study: Study) -> None:
    """Refuse a study whose parts do not fit together."""
    _check_file_names(study)
    for name, stage in study.stages.items():
        if bool(stage.recipe) == bool(stage.command):
            raise BadInput(f"{study.path}: stages.{name} needs a recipe or a command, one of them")
        for factor, levels in study.factors(name).items():
            if not levels and name in study.shown():
                raise BadInput(f"{study.path}: stages.{name}.vary.{factor} has no level left")
            if factor in RESERVED:
                raise BadInput(
                    f"{study.path}: stages.{name}.vary.{factor}: give the factor "
                    "another name: results.csv has a column of this one"
                )
        _check_moved(study, name)
        _same_key_twice(study, name)
    for kind, name, *_ in _places(study):
        known: Mapping[str, Any] = getattr(study, f"{kind}s" if kind != "made" else kind)
        _known(study, f"{{{kind}.{name}}}", name, set(known))
    for what, shows in (
        ("tables", study.tables),
        ("curves", study.curves),
        ("pictures", study.pictures),
    ):
        if twice := _twice(show.name for show in shows):
            raise BadInput(f"{study.path}: two of the {what} are named {twice!r}")
    for table in study.tables:
        _check_table(study, table)
    for curves in study.curves:
        place = f"curves {curves.name}"
        _known(study, place, curves.stage, set(study.stages))
        _check_factors(study, place, curves.stage, (curves.panels, curves.lines), curves.where)
    for picture in study.pictures:
        place = f"picture {picture.name}"
        _known(study, place, picture.stage, set(study.stages))
        _check_factors(study, place, picture.stage, (), picture.where)
    tables = {table.name: table for table in study.tables}
    for summary in study.summaries:
        place = f"summary {summary.title!r}"
        _known(study, place, summary.table, set(tables))
        table = tables[summary.table]
        _known(study, place, summary.by, {table.rows, table.columns})
        if summary.published is not None:
            _check_published(study, place, summary.published)
    for claim in study.claims:
        place = f"claim {claim.text!r}"
        _known(study, place, claim.table, set(tables))
        _check_claim(study, place, claim, tables[claim.table])
        _check_seeds(study, place, claim, tables[claim.table])


def _check_file_names(study: Study) -> None:
    """Refuse names that would lead a file of the study out of the study's directories."""
    names: dict[str, Iterable[str]] = {
        "tables": [table.name for table in study.tables],
        "curves": [curves.name for curves in study.curves],
        "pictures": [picture.name for picture in study.pictures],
        "stages": study.stages,
        "made": study.made,
    }
    for what, found in names.items():
        for name in found:
            if not is_safe_filename(name):
                raise BadInput(
                    f"{study.path}: {what}: the name {name!r} is no plain file name; give letters, "
                    "digits, - and _"
                )
    places = {f"stages.{name}: result": stage.result for name, stage in study.stages.items()}
    places |= {f"pictures: {picture.name}: file": picture.file for picture in study.pictures}
    for place, file in places.items():
        if not all(map(is_safe_filename, file.split("/"))):
            raise BadInput(f"{study.path}: {place}={file!r} does not lie below {{out}}")


def _check_claim(study: Study, place: str, claim: Claim, table: Table) -> None:
    factors = {name: set(levels) for name, levels in study.factors(table.stage).items()}
    if table.columns == METRIC:
        factors[METRIC] = set(study.columns(table))
        for side in (claim.better, claim.than):
            if METRIC not in (*side, claim.each):
                raise BadInput(f"{study.path}: {place}: say which {METRIC} of table {table.name}")
    for factor in (*claim.better, *claim.than, *([claim.each] if claim.each else [])):
        _known(study, place, factor, set(factors))
    for factor, level in (*claim.better.items(), *claim.than.items()):
        _known(study, place, level, factors[factor])
    if claim.better == claim.than or claim.each in {**claim.better, **claim.than}:
        raise BadInput(f"{study.path}: {place}: it compares a level with itself")


def _check_seeds(study: Study, place: str, claim: Claim, table: Table) -> None:
    """Refuse a claim that has fewer seeds at this scale than its registration says."""
    if study.registration is None:
        return
    _known(study, "registration", SEED, set(study.registration.seeds))
    for factor, number in study.registration.seeds.items():
        _known(study, f"registration.seeds.{factor}", factor, set(study.factors(table.stage)))
        for side in (claim.better, claim.than):
            wanted = {name: level for name, level in side.items() if name != METRIC}
            there = {
                levels[factor]
                for levels in study.combinations(table.stage)
                if wanted.items() <= levels.items()
            }
            if len(there) < number:
                raise BadInput(
                    f"{study.path}: {place}: registration.seeds.{factor}={number}, but "
                    f"{', '.join(wanted.values()) or 'one side'} has {len(there)} levels of it"
                )


def _check_table(study: Study, table: Table) -> None:
    place = f"table {table.name}"
    _known(study, place, table.stage, set(study.stages))
    named = [table.rows] + ([table.columns] if table.columns != METRIC else [])
    _check_factors(study, place, table.stage, named, table.where)
    if table.rows == table.columns:
        raise BadInput(f"{study.path}: {place}: rows and columns are both {table.rows!r}")
    if table.columns == METRIC and not isinstance(table.metric, dict):
        raise BadInput(f'{study.path}: {place}: columns="{METRIC}" needs metric.NAME=METRIC')
    if isinstance(table.metric, dict):
        for column in study.columns(table):
            if column not in table.metric:
                raise BadInput(f"{study.path}: {place}: metric.{column} must be given")
    for column in table.chance:
        known = study.stages[table.stage].vary.get(table.columns, table.metric)
        _known(study, f"{place}: chance", column, set(map(str, known)))
    if table.minus and table.best != "none":
        raise BadInput(f"{study.path}: {place}: a table of differences (minus) has no best")
    if table.minus:
        _known(study, place, table.minus, set(study.stages))
        _check_factors(study, place, table.stage, study.stages[table.minus].vary, {})
    if table.published is not None:
        _check_published(study, place, table.published)


def _check_factors(
    study: Study, place: str, stage: str, factors: Iterable[str], where: Levels
) -> None:
    known = study.factors(stage)
    for factor in (*factors, *where):
        _known(study, place, factor, set(known))
    for factor, level in where.items():
        _known(study, place, level, set(known[factor]))


def _check_published(study: Study, place: str, published: Published) -> None:
    wanted = len(published.columns)
    if twice := _twice(published.columns):
        raise BadInput(f"{study.path}: {place}: two published columns are named {twice!r}")
    for row, numbers in published.rows.items():
        if len(numbers) != wanted:
            raise BadInput(
                f"{study.path}: {place}: the published row {row!r} has {len(numbers)} numbers, "
                f"its columns are {wanted}"
            )
        if words := [number for number in numbers if isinstance(number, str) and number]:
            raise BadInput(
                f"{study.path}: {place}: the published row {row!r} has {words[0]!r}, "
                'which is no number; give "" where the paper has none'
            )


def _twice(names: Iterable[str]) -> str:
    """The first name that comes a second time, or nothing."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""


def _check_moved(study: Study, stage: str) -> None:
    """Refuse the old names of keys, which another factor's settings could hide in a run."""
    levels = [one for factor in study.factors(stage).values() for one in factor.values()]
    for settings in (study.stages[stage].settings, *levels):
        try:
            refuse_moved(settings)
        except BadInput as error:
            raise BadInput(f"{study.path}: stages.{stage}: {error}") from None


def _same_key_twice(study: Study, stage: str) -> None:
    """Two factors that set the same key would overrule one another."""
    owner: dict[str, str] = {}
    for factor, levels in study.factors(stage).items():
        keys = {key for settings in levels.values() for key in flat(settings)}
        for key in sorted(f"{key}.{SHORT[key]}" if key in SHORT else key for key in keys):
            if key in owner:
                raise BadInput(
                    f"{study.path}: stages.{stage}: the factors {owner[key]} and {factor} both "
                    f"set {key}; let one of them do it"
                )
            owner[key] = factor


def _places(study: Study) -> Iterator[tuple[str, str, str, str]]:
    """Every {kind.name(factor=level)} in the study."""
    yield from PLACE.findall(study.model_dump_json())


def _known(study: Study, place: str, name: str, names: set[str]) -> None:
    if name not in names:
        near = nearest(name, sorted(names))
        raise BadInput(f"{study.path}: {place}: there is no {name!r} among its names{near}")
