"""Sentences whose numbers come from the settings: a study's notes, and its deviations.

    {finetune: optim.lr}                              a setting of a stage's runs, as they resolve
    {finetune(task=mrpc): batch.rows * train.steps}   of some of its runs; a product of settings
    {finetune: model.layers}                          of the model that the runs start from
    {finetune: runs}                                  how many runs the stage has
    {finetune: count.seed} {finetune: levels.seed}    how many levels a factor has; their names
    {look: examples}                                  of a stage that is a command: its examples=...
    {made.nesting: --tokens}                          an option of a command that makes something
    {made.minilm: model.layers}                       the shape of a checkpoint that one makes
    {paper: 200,000 steps of 150 rows}                what the paper prints, as it is written here

Where the runs differ, the values are listed: "16, 32 or 128". A value that is not known yet, such
as the shape of a model that is not there, is a question mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from math import prod
from typing import Any

from xformer.config import all_keys, nearest, validate
from xformer.data.errors import BadInput
from xformer.recipe import Recipe
from xformer.study.plan import Plan, Work
from xformer.study.shapes import Shapes
from xformer.study.spec import Curves, Deviation, Levels, Picture, Table

PLACE = re.compile(r"\{([^{}:]*):([^{}]*)\}")
MADE = re.compile(r"made\.([\w-]+)")
STAGE = re.compile(r"([\w-]+)(?:\(([^()]*)\))?")
UNKNOWN = "?"
UNUSED = {"train.epochs": "train.steps", "batch.rows": "batch.tokens"}  # if the other is given
MOST = 4  # values that are listed; more numbers become a range


class Notes:
    """A study's `notes` and `deviations` with their placeholders filled in.

    Raises BadInput naming the first placeholder that stands for nothing.
    """

    def __init__(self, plan: Plan, shapes: Shapes):
        self.plan, self.shapes, self.study = plan, shapes, plan.study
        self._recipes: dict[str, Recipe] = {}
        self.notes = tuple(self._filled(text, "notes") for text in self.study.notes)
        shows: tuple[Table | Curves | Picture, ...] = (
            *self.study.tables,
            *self.study.curves,
            *self.study.pictures,
        )
        self.deviations = tuple(
            self._deviation(one)
            for one in self.study.deviations
            if any(one.concerns(shown) for shown in shows)
        )

    def _deviation(self, one: Deviation) -> Deviation:
        place = f"deviation {one.what!r}"
        texts = {
            name: self._filled(getattr(one, name), place)
            for name in ("what", "paper", "ours", "why")
        }
        return one.model_copy(update=texts)

    def _filled(self, text: str, place: str) -> str:
        def value(match: re.Match[str]) -> str:
            try:
                return self._value(match[1].strip(), match[2].strip())
            except BadInput as error:
                raise BadInput(f"{self.study.path}: {place}: {match[0]}: {error}") from None

        done = PLACE.sub(value, text)
        rest = PLACE.sub("", text)
        if "{" in rest or "}" in rest:
            raise BadInput(
                f"{self.study.path}: {place}: {text!r} has a brace that belongs to no "
                "placeholder; one is written {STAGE: KEY}"
            )
        return done

    def _value(self, of: str, key: str) -> str:
        if of == "paper":
            return key
        if match := MADE.fullmatch(of):
            if key.startswith("model."):
                return self._made(match[1], key.removeprefix("model."))
            return shown(self._option(match[1], key))
        match = STAGE.fullmatch(of)
        if match is None or match[1] not in self.study.stages:
            near = nearest(of, ["paper", *self.study.stages])
            raise BadInput(f"there is no stage {of!r}{near}")
        runs = self._runs(match[1], match[2] or "")
        if key == "runs":
            return shown(len(runs))
        kind, _, factor = key.partition(".")
        if kind in ("count", "levels"):
            if factor not in runs[0].levels:
                near = nearest(factor, list(runs[0].levels))
                raise BadInput(f"the stage {match[1]} varies by no {factor!r}{near}")
            levels = list(dict.fromkeys(run.levels[factor] for run in runs))
            return shown(len(levels)) if kind == "count" else _joined(levels, "and")
        return listed(self._product(run, key) for run in runs)

    def _runs(self, stage: str, where: str) -> list[Work]:
        """The planned runs of a stage at the levels that "task=mrpc, seed=0" says."""
        wanted: Levels = {}
        for part in filter(None, where.split(",")):
            factor, equals, level = (word.strip() for word in part.partition("="))
            if not equals:
                raise BadInput(f"{part.strip()!r} is not of the form FACTOR=LEVEL")
            wanted[factor] = level
        runs = [run for run in self.plan.runs(stage) if wanted.items() <= run.levels.items()]
        if not runs:
            at = f" at {where.strip()}" if wanted else ""
            raise BadInput(f"the study has no run of the stage {stage}{at}")
        return runs

    def _option(self, name: str, option: str) -> str:
        """The value of an option in the command of {made.NAME}."""
        made = self.study.made.get(name)
        if made is None:
            raise BadInput(f"there is no made.{name}{nearest(name, list(self.study.made))}")
        if made.same:
            return self._option(made.same, option)
        for before, value in pairwise(made.command):
            if before == option and "{" not in value:
                return value
        raise BadInput(f"the command of made.{name} has no value of {option!r}")

    def _made(self, name: str, key: str) -> str:
        """A part of the shape of the checkpoint {made.NAME}."""
        works = [work for work in self.plan.works.values() if work.name == f"made.{name}"]
        if not works:
            near = nearest(name, list(self.study.made))
            raise BadInput(f"no run of the study needs made.{name}{near}")
        _known(f"model.{key}")
        shapes = [self.shapes.of(work) for work in works]
        return listed(None if shape is None else getattr(shape, key) for shape in shapes)

    def _product(self, run: Work, key: str) -> Any:
        values = [self._of(run, part.strip()) for part in key.split("*")]
        if len(values) == 1 or None in values:
            return None if None in values else values[0]
        if not all(_is_number(value) for value in values):
            raise BadInput(f"{key} is a product of something that is no number")
        return prod(values)

    def _of(self, run: Work, key: str) -> Any:
        """A setting of a run; None where it is not known yet."""
        if run.recipe is None:
            return self._argument(run, key)
        _known(key)
        group, _, name = key.partition(".")
        if group == "model":
            start = self.shapes.start(run)
            if start is None or (name == "vocab_size" and start.vocab_size == 0):
                return None
            return start.before_head if name == "head_dropout" else getattr(start, name)
        if (other := UNUSED.get(key)) and self._setting(run, other):
            raise BadInput(f"{run.name} does not use {key}, as it has {other}")
        value = self._setting(run, key)
        if value is None:
            raise BadInput(f"{run.name} gives {key} no value")
        return value

    def _setting(self, run: Work, key: str) -> Any:
        value: Any = self._recipe(run)
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def _recipe(self, run: Work) -> Recipe:
        assert run.recipe is not None
        if run.key not in self._recipes:
            self._recipes[run.key] = validate(Recipe, run.recipe)
        return self._recipes[run.key]

    def _argument(self, run: Work, key: str) -> str:
        """What a command is told by KEY=VALUE."""
        for argument in run.command:
            name, equals, value = argument.partition("=")
            if equals and name == key:
                return value
        raise BadInput(f"the command of {run.name} has no {key}=...")


def _known(key: str) -> None:
    keys = list(all_keys(Recipe))
    if key not in keys:
        raise BadInput(f"there is no key {key!r}{nearest(key, keys)}")


def listed(values: Iterable[Any]) -> str:
    """ "16, 32 or 128" of the different ones among the values, "5 to 80" where they are many."""
    found = list(dict.fromkeys(values))
    if None in found:
        return UNKNOWN
    if all(map(_is_number, found)):
        found.sort()
        if len(found) > MOST:
            return f"{shown(found[0])} to {shown(found[-1])}"
    return _joined([shown(value) for value in found], "or")


def shown(value: Any) -> str:
    """A value as a sentence has it: 200,000, 5e-5, 0.9 and 0.98."""
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else value
    if isinstance(value, tuple | list):
        return _joined([shown(part) for part in value], "and")
    if not _is_number(value):
        raise BadInput("it stands for a group of settings; name one of them")
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 0.001:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _joined(words: list[str], last: str) -> str:
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
