"""The settings in which the two sides of a claim differ, and a warning if their losses cannot be
compared."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xformer.config import each, flat
from xformer.data.files import installed
from xformer.study.forecast import Forecast
from xformer.study.notes import in_words
from xformer.study.plan import INTERVALS, READ, Job
from xformer.study.spec import METRIC, Claim
from xformer.surgery.registry import Operation
from xformer.tasks.known import TASKS

# these decide nothing, or are the random part of a comparison
LEFT_OUT = ("run", "overwrite", *(f"train.{name}" for name in INTERVALS))
# what a loss of masked tokens is a loss on
PREDICTED = ("data", "mapping", "masking")
INNER = ": "  # between the name of a stage and a setting of its runs
MOST = 4  # settings of a group whose values are shown; of more the names alone


class Sides:
    """The settings in which the sides of a study's claims differ. A setting of a run that a job
    starts from or reads has the key "STAGE: KEY"."""

    def __init__(self, forecast: Forecast):
        self.forecast, self.plan = forecast, forecast.plan
        self._settings: dict[str, dict[str, Any]] = {}  # by key of a job
        jobs = self.plan.jobs.values()
        made = Counter(job.name for job in jobs if not job.stage)
        needs = {name: str(installed(given)) for name, given in self.plan.paths.items() if given}
        # every relative path and every word of a command lies below the current directory
        self._names = {path: f"needs.{name}" for name, path in needs.items() if path != "."}
        for job in jobs:  # a thing that is made differently at some levels has its key beside it
            name = job.stage or (f"{job.name} {job.key[:6]}" if made[job.name] > 1 else job.name)
            self._names[str(job.path)] = name

    def differing(self, claim: Claim) -> dict[str, tuple[Any, Any]]:
        """The settings in which the runs of the two sides of a claim differ, as {key: (the value of
        `better`, that of `than`)}. The value is None if the runs of a side have several."""
        better, than = (self._values(side) for side in self._runs(claim))
        pairs: dict[str, tuple[Any, Any]] = {}
        for key in {**better, **than}:
            if (one := better.get(key)) != (other := than.get(key)):
                stage = key.partition(INNER)[0]
                if INNER in key and not _both(better, than, f"{stage}{INNER}"):
                    pairs[stage] = (None, None)
                elif not key.startswith("model.") or _both(better, than, "model."):
                    pairs[key] = (_only(one), _only(other))
        own = {key: pair for key, pair in pairs.items() if INNER not in key}
        return {k: p for k, p in pairs.items() if k in own or own.get(k.partition(INNER)[2]) != p}

    def words(self, claim: Claim) -> str:
        """The same in words: "masking.spans (true; false), pretrain: optim.lr (1e-4; 5e-5)"."""
        pairs = self.differing(claim)
        if (columns := (claim.better.get(METRIC), claim.than.get(METRIC)))[0] != columns[1]:
            pairs[METRIC] = columns
        groups = Counter(key.rpartition(".")[0] for key in pairs)
        parts = []
        for key, pair in pairs.items():
            values = [in_words(one) for one in pair if isinstance(one, bool | int | float | str)]
            shown = len(values) == len(pair) and groups[key.rpartition(".")[0]] <= MOST
            parts.append(f"{key} ({'; '.join(values)})" if shown else key)
        return ", ".join(parts)

    def lines(self) -> list[str]:
        """The lines of --dry-run: a header, and a line for each claim whose sides differ."""
        words = [(claim.text, self.words(claim)) for claim in self.plan.study.claims]
        lines = [f"  {text}: {own}" for text, own in words if own]
        return ["the sides of each claim differ in", *lines, ""] if lines else []

    def remarks(self) -> Iterator[str]:
        """A line for each claim on scores of masked tokens whose sides mask or read differently."""
        for claim in self.plan.study.claims:
            jobs = [job for side in self._runs(claim) for job in side]
            if not jobs or not all(self._predicts(job, claim) for job in jobs):
                continue
            keys = [key for key in self.differing(claim) if key.split(".")[0] in PREDICTED]
            if keys:
                yield (
                    f"the sides of the claim {claim.text!r} differ in {', '.join(keys)}. So they "
                    "predict other tokens, and the better score need not be the better model"
                )

    def _predicts(self, job: Job, claim: Claim) -> bool:
        """Whether a claim compares scores of masked tokens that a job predicts."""
        if job.recipe is None:
            return False
        task, table = TASKS[job.recipe["head"]], self.plan.study.table(claim.table)
        sides = (claim.better, claim.than)
        parts = [part for side in sides for part in self.plan.study.parts(table, side)]
        columns = {part.get(table.columns) for part in parts} - {None}
        shown = columns or set(self.plan.study.columns(table))
        metrics = {table.source_of(column)[1] for column in shown if column is not None}
        return task.predicts_masked and bool(metrics & set(task.metrics))

    def _runs(self, claim: Claim) -> list[list[Job]]:
        """The runs of each side of a claim."""
        table = self.plan.study.table(claim.table)
        sides = (claim.better, claim.than)
        return [[job for job, _ in self.plan.runs_of(table, side)] for side in sides]

    def _values(self, jobs: list[Job]) -> dict[str, list[str]]:
        """The values that each setting has in some runs, as sorted JSON."""
        values: dict[str, set[str]] = {}
        for job in jobs:
            for key, value in self._of(job).items():
                values.setdefault(key, set()).add(json.dumps(value, sort_keys=True))
        return {key: sorted(some) for key, some in values.items()}

    def _of(self, job: Job) -> Mapping[str, Any]:
        """The settings that decide the result of a job, by key."""
        if job.key not in self._settings:
            settings = self._of_command(job) if job.recipe is None else self._of_run(job)
            for other in (self.plan.jobs[key] for key in job.waits):
                for name, value in self._of(other).items() if other.stage else ():
                    key = name if INNER in name else f"{other.stage}{INNER}{name}"
                    known = settings.setdefault(key, value)
                    if known != value:  # it starts from several runs of the stage
                        settings[key] = [known, value]
            self._settings[job.key] = settings
        return self._settings[job.key]

    def _of_command(self, job: Job) -> dict[str, Any]:
        """The words of a command: those that are KEY=VALUE, and the others together."""
        pairs = [word.partition("=") for word in job.command if str(job.path) not in word]
        others = [self._name(word) for word, equals, _ in pairs if not equals]
        return {
            "command": " ".join(others),
            **{key: self._name(value) for key, equals, value in pairs if equals},
        }

    def _of_run(self, job: Job) -> dict[str, Any]:
        recipe, start = self.forecast.recipe(job), self.forecast.start(job)
        content = recipe.model_dump(mode="json")
        content["system"] = {name: content["system"][name] for name in ("precision", "tf32")}
        content["data"] = " + ".join(self._name(path) for path in each(recipe.data))
        content["model"] = {} if start is None else start.model_dump(mode="json")
        content["surgery"] = " + ".join(map(self._operation, recipe.surgery)) or "none"
        content["init"] = recipe.init and self._name(recipe.init)
        settings = {k: v for k, v in flat(content).items() if k not in LEFT_OUT}
        return {key: value for key, value in settings.items() if key.split(".")[0] != "seed"}

    def _operation(self, operation: Operation) -> str:
        """An operation on weights as one would type it, without its seed."""
        typed = operation.model_dump(mode="json", exclude={"op", "seed"}, exclude_defaults=True)
        given = [f"{k}={self._name(v) if k in READ else in_words(v)}" for k, v in typed.items()]
        return f"{operation.op}({', '.join(given)})" if given else operation.op

    def _name(self, path: str) -> str:
        """A path as it stands in the study: a stage, what is made or a need, and what lies below
        it. Any other word as it is."""
        for place in (path, *map(str, Path(path).parents)):
            if place in self._names:
                return f"{self._names[place]}{path[len(place) :]}"
        return path


def _only(values: list[str] | None) -> Any:
    """The value that a list of JSON texts has; None if it has several or none."""
    return json.loads(values[0]) if values and len(values) == 1 else None


def _both(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str) -> bool:
    """Whether two groups of settings both have keys that begin with a prefix."""
    return all(any(key.startswith(prefix) for key in settings) for settings in (one, other))
