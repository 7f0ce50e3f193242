"""A study file: which runs, what varies, what to tabulate, what was published, what to check.

    [needs.NAME]             what the user brings: a checkpoint, a directory of data
    [made.NAME]              made from these by a command: stores, tokenizers, imported checkpoints
    [stages.NAME]            runs: a recipe (or a command), its settings, and what `vary`s them
    [[tables]] [[claims]]    what to show, and the paper's statements, checked
    [scales.NAME]            laid over all of the above: scale=mini, scale=paper

In any string {need.X}, {made.X} and {stage.X} stand for a path, {FACTOR} for the name of a level,
also in what is made: {made.{model}} is made for each model that some run needs. A run finds in
{stage.X} the run of that stage at its own levels; {stage.X(corpus=english)} says another level.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field

from xformer.config import Settings, flat, merge, nearest, read_recipe, validate
from xformer.data.errors import BadInput

Levels = dict[str, str]  # {factor: level}
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
    """The recipe that train.py runs, relative to the study file."""
    command: tuple[str, ...] = ()
    """Instead of a recipe: the arguments of `python`; `{out}` is its directory."""
    result: str = "result.json"
    """The JSON file of `metrics` that a command writes into `{out}`."""
    settings: dict[str, Any] = Field({})
    """Settings of every run, over the recipe's."""
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


class Table(Settings):
    """Scores of one stage by two of its factors; every other factor is averaged over."""

    name: str
    title: str
    stage: str
    rows: str
    columns: str
    metric: str | dict[str, str] = "accuracy"
    """Name of the metric, or one for each column."""
    split: str = "test"
    """The split that is scored."""
    percent: bool = True
    """Show 100 times the score, as the papers do."""
    published: Published | None = None


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


class Study(Settings):
    """A question, the runs that answer it, and what the paper found."""

    title: str
    question: str
    paper: str
    needs: dict[str, Need] = Field({})
    made: dict[str, Made] = Field({})
    stages: dict[str, Stage]
    tables: tuple[Table, ...] = ()
    claims: tuple[Claim, ...] = ()
    levels: dict[str, tuple[str, ...]] = Field({})
    """Of a factor, only these levels."""
    like: dict[str, str] = Field({})
    """Our level -> the published row or column it stands beside."""
    notes: tuple[str, ...] = ()
    """What a reader of the results must know."""
    path: Path = Field(exclude=True)

    def factors(self, stage: str) -> dict[str, dict[str, dict[str, Any]]]:
        """The factors of a stage: for each level, in order, its settings."""
        found = {}
        for factor, levels in self.stages[stage].vary.items():
            if isinstance(levels, list):
                levels = {str(value): {factor: value} for value in levels}
            kept = self.levels.get(factor, tuple(levels))
            found[factor] = {level: levels[level] for level in kept if level in levels}
        return found

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
    if not isinstance(scales, dict) or scale not in scales:
        raise BadInput(f"{path} has no scale {scale!r}; it has {', '.join(scales) or 'none'}")
    study = validate(Study, {**merge(values, scales[scale]), "path": path})
    _check(study)
    return study


def _check(study: Study) -> None:
    """Refuse a study whose parts do not fit together."""
    every = {factor for name in study.stages for factor in study.stages[name].vary}
    for factor, kept in study.levels.items():
        _known(study, f"levels.{factor}", factor, every)
        for level in kept:
            places = [n for n, s in study.stages.items() if factor in s.vary]
            found = {str(v) for n in places for v in study.stages[n].vary[factor]}
            _known(study, f"levels.{factor}", level, found)
    for name, stage in study.stages.items():
        if bool(stage.recipe) == bool(stage.command):
            raise BadInput(f"{study.path}: stages.{name} needs a recipe or a command, one of them")
        for factor, levels in study.factors(name).items():
            if not levels:
                raise BadInput(f"{study.path}: stages.{name}.vary.{factor} has no level left")
        _same_key_twice(study, name)
    for kind, name, *_ in _places(study):
        known: Mapping[str, Any] = getattr(study, f"{kind}s" if kind != "made" else kind)
        _known(study, f"{{{kind}.{name}}}", name, set(known))
    tables = {table.name: table for table in study.tables}
    for table in study.tables:
        _check_table(study, table)
    for claim in study.claims:
        _known(study, f"claim {claim.text!r}", claim.table, set(tables))
        factors = study.factors(tables[claim.table].stage)
        for factor in (*claim.better, *claim.than, *([claim.each] if claim.each else [])):
            _known(study, f"claim {claim.text!r}", factor, set(factors))
        for factor, level in (*claim.better.items(), *claim.than.items()):
            _known(study, f"claim {claim.text!r}", level, set(factors[factor]))


def _check_table(study: Study, table: Table) -> None:
    place = f"table {table.name}"
    _known(study, place, table.stage, set(study.stages))
    for factor in (table.rows, table.columns):
        _known(study, place, factor, set(study.factors(table.stage)))
    if table.published is not None:
        wanted = len(table.published.columns)
        for row, numbers in table.published.rows.items():
            if len(numbers) != wanted:
                raise BadInput(
                    f"{study.path}: {place}: the published row {row!r} has {len(numbers)} numbers, "
                    f"its columns are {wanted}"
                )


def _same_key_twice(study: Study, stage: str) -> None:
    """Two factors that set the same key would overrule one another."""
    owner: dict[str, str] = {}
    for factor, levels in study.factors(stage).items():
        for key in sorted({key for settings in levels.values() for key in flat(settings)}):
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
