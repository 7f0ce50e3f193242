"""The notes and deviations of a study: placeholders replaced by numbers of its planned runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from xformer.config import all_keys, flat, nearest
from xformer.data.errors import BadInput
from xformer.recipe import UNUSED_IF_SET, Recipe
from xformer.study.forecast import Forecast, option_of, settings_of
from xformer.study.plan import Job
from xformer.study.spec import Deviation, Levels, within

PLACEHOLDER = re.compile(r"\{([^{}:]*):([^{}]*)\}")
OF_MADE = re.compile(r"made\.([\w-]+)")
OF_STAGE = re.compile(r"([\w-]+)(?:\(([^()]*)\))?")
KEYS = all_keys(Recipe)
UNKNOWN = "?"
MOST = 4  # values that are listed; more numbers become a range


class Notes:
    """A study's `notes` and `deviations`, with placeholders replaced by values.

        {finetune: optim.lr}                              a setting of a stage's runs, resolved
        {finetune(task=mrpc): batch.rows}                 of some runs
        {finetune: model.layers}                          of the model that the runs start from
        {finetune: runs}                                  how many runs the stage has
        {finetune: count.seed} {finetune: levels.seed}    how many levels a factor has; their names
        {look: examples}                                  for a stage that is a command: examples=
        {made.nesting: --tokens}                          an option of a command
        {made.minilm: model.layers}                       the shape of a checkpoint that is made
        {paper: 200,000 steps of 150 rows}                this text as it is: what the paper says

    If the runs differ, the values are listed: "16, 32 or 128". A value that is not known yet, such
    as the shape of a model that does not exist, is a question mark. Raises BadInput naming the
    first placeholder that is not valid.
    """

    def __init__(self, forecast: Forecast):
        self.forecast, self.plan, self.study = forecast, forecast.plan, forecast.plan.study
        self._flat: dict[str, dict[str, Any]] = {}  # settings of runs, by dotted key
        with within(self.study.path):
            self.notes = tuple(self._filled(text, "notes") for text in self.study.notes)
            self.deviations = tuple(
                self._deviation(one)
                for one in self.study.deviations
                if any(map(one.concerns, self.study.shows()))
            )

    def _deviation(self, one: Deviation) -> Deviation:
        texts = {name: text for name, text in one if isinstance(text, str)}
        place = f"deviation {one.what!r}"
        filled = {name: self._filled(text, place) for name, text in texts.items()}
        return one.model_copy(update=filled)

    def _filled(self, text: str, place: str) -> str:
        def value(match: re.Match[str]) -> str:
            with within(f"{place}: {match[0]}"):
                return self._value(match[1].strip(), match[2].strip())

        rest = PLACEHOLDER.sub("", text)
        filled = PLACEHOLDER.sub(value, text)
        if "{" in rest or "}" in rest:
            raise BadInput(
                f"{place}: {text!r} has a brace outside a placeholder; a placeholder is written "
                "{STAGE: KEY}"
            )
        return filled

    def _value(self, of: str, key: str) -> str:
        if of == "paper":
            return key
        if match := OF_MADE.fullmatch(of):
            if key.startswith("model."):
                return self._made_shape(match[1], key)
            return in_words(self._option(match[1], key))
        match = OF_STAGE.fullmatch(of)
        if match is None or match[1] not in self.study.stages:
            near = nearest(of, ["paper", *self.study.stages])
            raise BadInput(f"there is no stage {of!r}{near}")
        runs = self._runs(match[1], match[2] or "")
        if key == "runs":
            return in_words(len(runs))
        kind, _, factor = key.partition(".")
        if kind in ("count", "levels"):
            if factor not in runs[0].levels:
                near = nearest(factor, list(runs[0].levels))
                raise BadInput(f"the stage {match[1]} does not vary by {factor!r}{near}")
            levels = list(dict.fromkeys(run.levels[factor] for run in runs))
            return in_words(len(levels)) if kind == "count" else _joined(levels, "and")
        return listed(self._setting(run, key) for run in runs)

    def _runs(self, stage: str, where: str) -> list[Job]:
        """The planned runs of a stage at the levels that "task=mrpc, seed=0" says."""
        wanted: Levels = {}
        for part in filter(None, where.split(",")):
            factor, equals, level = (word.strip() for word in part.partition("="))
            if not equals:
                raise BadInput(f"{part.strip()!r} is not of the form FACTOR=LEVEL")
            wanted[factor] = level
        runs = self.plan.runs(stage, wanted)
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
        value = option_of(made.command, option)
        if value is None or "{" in value:
            raise BadInput(f"the command of made.{name} has no value of {option!r}")
        return value

    def _made_shape(self, name: str, key: str) -> str:
        """A part of the shape of the checkpoint {made.NAME}."""
        jobs = [job for job in self.plan.jobs.values() if job.name == f"made.{name}"]
        if not jobs:
            near = nearest(name, list(self.study.made))
            raise BadInput(f"no run of the study needs made.{name}{near}")
        _check_key(key)
        shapes = [self.forecast.made(job).shape for job in jobs]
        return listed(getattr(shape, key.removeprefix("model."), None) for shape in shapes)

    def _setting(self, run: Job, key: str) -> Any:
        """A setting of a run; None if it is not known yet."""
        if run.recipe is None:
            if (value := settings_of(run.command).get(key)) is None:
                raise BadInput(f"the command of {run.name} has no {key}=...")
            return value
        _check_key(key)
        group, _, name = key.partition(".")
        if group == "model":
            shape = self.forecast.start(run)
            if shape is None or (name == "vocab_size" and shape.vocab_size == 0):
                return None
            return shape.before_head if name == "head_dropout" else getattr(shape, name)
        if run.key not in self._flat:
            self._flat[run.key] = flat(self.forecast.recipe(run).model_dump())
        values = self._flat[run.key]
        if (other := UNUSED_IF_SET.get(key)) and values[other]:
            raise BadInput(f"{run.name} does not use {key}, as it has {other}")
        value = values.get(key, {})
        if value is None:
            raise BadInput(f"{run.name} gives {key} no value")
        return value


def _check_key(key: str) -> None:
    if key not in KEYS:
        raise BadInput(f"there is no key {key!r}{nearest(key, list(KEYS))}")


def listed(values: Iterable[Any]) -> str:
    """ "16, 32 or 128" for the different ones among the values; "5 to 80" for many numbers."""
    different = list(dict.fromkeys(values))
    if None in different:
        return UNKNOWN
    if all(map(_is_number, different)):
        different.sort()
        if len(different) > MOST:
            return f"{in_words(different[0])} to {in_words(different[-1])}"
    return _joined([in_words(value) for value in different], "or")


def in_words(value: Any) -> str:
    """A value as it stands in a sentence: 200,000, 5e-5, 0.9 and 0.98."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else value
    if isinstance(value, tuple | list):
        return _joined([in_words(part) for part in value], "and")
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
    """ "a, b or c", if `last` is "or"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
