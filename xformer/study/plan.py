"""From a study file to its jobs: what each runs, what it depends on, and its content key.

A key is a hash of everything that determines a result. For a run, that is

- the resolved recipe, but not its `run`, `overwrite`, `system.*` or intervals of logs and
  checkpoints. Each path is replaced by the key of what is made there, or the digest of what lies
  there;
- the precision, tf32, the number of processes, and RESULTS.

For another command it is RESULTS and the command line, with its paths replaced in the same way. Two
studies that ask for the same run share it, and a changed run has another key.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from glob import has_magic
from itertools import takewhile
from pathlib import Path
from typing import Any

from xformer.config import each_text, find_recipe, flat, merge, nearest, read_recipe, validate
from xformer.data.errors import BadInput
from xformer.data.files import file_checksum, installed, read_json, read_run_json, write_json
from xformer.model.config import DROPOUT
from xformer.parallel.precision import fast_here
from xformer.parallel.processes import TORCHRUN
from xformer.recipe import ADDED_LATER, Recipe
from xformer.study.reading import doubts
from xformer.study.spec import (
    METRIC,
    PLACE,
    Claim,
    Curves,
    Levels,
    Need,
    ScoreTable,
    Study,
    with_levels,
    within,
)
from xformer.tasks.known import kind_of
from xformer.tasks.task import HIGHER, LOWER

RESULTS = 2  # raised by hand when a change of the code changes results
SCRIPTS = ("preprocess.py", "train.py", "evaluate.py")
READ = ("source", "store")  # arguments of operations on weights that are paths
# these change no result; `validate_every` does, as it affects which checkpoint is selected
INTERVALS = ("log_every", "checkpoint_every", "keep_last", "keep_every", "keep_state", "keep_at")
# numbers of a training line of the log besides the metrics of the task
LOGGED = ("loss", "lr", "grad_norm", "epoch", "real_tokens_per_second", "memory_gib", "mfu")
PLACE_BELOW = re.compile(PLACE.pattern + r"((?:/[^\s{}]*)?)")  # with the rest of its path
TRAJECTORIES = ("-m", "xformer.analysis", "blimp")  # it reads all checkpoints that a run keeps
UNPACKED = ".unpacked"  # marks a command's directory whose files come from the kept results


@dataclass(frozen=True)
class Job:
    """One command of a study; done when `proof` exists."""

    name: str
    key: str
    path: Path
    proof: Path
    command: tuple[str, ...]
    waits: tuple[str, ...] = ()  # keys of the jobs it needs
    reads: tuple[tuple[Path, str], ...] = ()  # what the user gave, with the digests in its key
    missing: tuple[str, ...] = ()  # names of the needs that are not there
    stage: str = ""  # empty for what is made before any run
    levels: Levels = field(default_factory=dict)
    recipe: dict[str, Any] | None = None  # with the paths filled in; None for other commands
    processes: int = 1

    @property
    def done(self) -> bool:
        return self.proof.exists()

    @property
    def whole(self) -> bool:
        """Whether other jobs can use its output. A job unpacked from the kept results is done but
        not whole: a run lacks its weights, a command everything but its result."""
        if self.recipe is None:
            return self.done and not (self.path / UNPACKED).exists()
        return self.done and any(self.path.glob("checkpoints/step_*/manifest.json"))


def to_do(jobs: Iterable[Job], wanted: Iterable[str], kept: Collection[str] = ()) -> dict[str, Job]:
    """The jobs that must run, by key in the order of `jobs`: the `wanted` ones that are not done,
    and their dependencies that are not whole. `kept` has the keys of jobs whose results are
    kept."""
    by_key = {job.key: job for job in jobs}
    needed: set[str] = set()
    left = [key for key in wanted if not by_key[key].done and key not in kept]
    while left:
        key = left.pop()
        if key not in needed:
            needed.add(key)
            left += [other for other in by_key[key].waits if not by_key[other].whole]
    return {key: job for key, job in by_key.items() if key in needed}


@dataclass
class _Inputs:
    """What a job reads, gathered while its places are filled in."""

    name: str
    levels: Levels
    waits: dict[str, None] = field(default_factory=dict)  # keys, in order
    reads: dict[Path, str] = field(default_factory=dict)  # digests by path
    missing: dict[str, None] = field(default_factory=dict)


class Plan:
    """The jobs of a study. `jobs` has them by key, in an order in which they can run. `wanted` has
    the keys of those that a table or figure shows; the others are there because these wait for
    them.

    `root` is the directory of all studies; `paths` {need: path} comes from the command line, and
    `kept` is the directory of kept results, if there is one. Raises BadInput if a recipe, a setting
    or a level is wrong.
    """

    def __init__(self, study: Study, root: Path, paths: dict[str, str], kept: Path | None = None):
        self.study, self.root, self.kept, self.fast = study, root, kept, fast_here()
        for name in paths:
            if name not in study.needs:
                known = ", ".join(study.needs) or "none"
                raise BadInput(f"needs.{name}: {study.path} has no such need; its needs: {known}")
        self.paths = {name: paths.get(name, need.path) for name, need in study.needs.items()}
        self.jobs: dict[str, Job] = {}
        self.wanted: set[str] = set()
        # pairs of runs with one key, of which only one types a dropout, and that is the default
        self.twins: list[tuple[Job, Job]] = []
        self.absent: dict[str, Path] = {}  # the first path that is missing below a need
        self.digests = Digests(root / "digests.json")
        self._read_of: dict[Path, str] = {}  # digests of what was read, each taken once
        self._staged: dict[str, dict[str, Job]] = {}  # by stage and name; stages may share a run
        self._recipes: dict[str, dict[str, Any]] = {}
        self._making: list[str] = []  # to detect cycles
        self._made_at: dict[tuple[str, frozenset[tuple[str, str]]], Job] = {}  # by name and levels
        self._made_with: dict[str, dict[str, Any]] = {}  # settings of runs here, by key
        self._auto: dict[str, set[str]] = {}  # the precisions that `auto` took, by stage
        with within(study.path):
            every = (stage.model_dump_json() for stage in study.stages.values())
            places = [place for text in every for place in PLACE.findall(text)]
            waited_for = {name for kind, name, *_ in places if kind == "stage"}
            for stage in study.shown_stages():
                # if nothing is shown, all stages that no other stage waits for are wanted
                if study.shows() or stage not in waited_for:
                    for levels in study.combinations(stage):
                        self.wanted.add(self._run(stage, levels).key)
            if study.stages and not self.wanted:
                raise BadInput(f"its stages wait for one another: {', '.join(study.stages)}")
            alone = bool(study.shows()) and not study.extends
            self._unseen = [one for one in study.stages if alone and one not in self._staged]
            for table in study.tables:
                self._check_metric(table)
            for shown in study.curves:
                self._check_curves(shown)
            for claim in study.claims:
                self._check_claim(claim)
            for stage in self._staged:
                self._check_levels(stage)
        for job in self.jobs.values():
            self._check_run(job)

    def restrict(self, only: Mapping[str, Sequence[str]]) -> None:
        """Keep only the wanted runs at these levels. A run that does not vary by a factor is kept.
        Raises BadInput for a factor or a level that does not exist."""
        every = [job for jobs in self._staged.values() for job in jobs.values()]
        for factor, levels in only.items():
            if not levels:
                raise BadInput(f"only.{factor}=[] leaves nothing to run; name a level")
            known = {job.levels[factor]: None for job in every if factor in job.levels}
            if not known:
                near = nearest(factor, list({name: None for job in every for name in job.levels}))
                raise BadInput(f"only.{factor}: {self.study.path} has no such factor{near}")
            if unknown := [level for level in levels if level not in known]:
                several = f"; for several, write 'only.{factor}=[\"{next(iter(known))}\", ...]'"
                raise BadInput(
                    f"only.{factor}={unknown[0]}: its levels are {', '.join(known)}"
                    f"{several if ',' in unknown[0] else ''}"
                )
        # stages may share a run: it must have all levels under one of its names
        self.wanted &= {
            job.key
            for job in every
            if all(job.levels.get(factor, some[0]) in some for factor, some in only.items())
        }
        if only and not self.wanted:
            given = " ".join(f"only.{factor}={','.join(levels)}" for factor, levels in only.items())
            raise BadInput(f"{given}: {self.study.path} has no run with all of these levels")

    def missing(self) -> dict[str, Need]:
        """The needs that some job waits for and that are not there."""
        names = {name for job in self.jobs.values() for name in job.missing}
        return {name: need for name, need in self.study.needs.items() if name in names}

    def stale(self, job: Job) -> str:
        """A line that names a file which the job reads and which has changed since the job's key
        was computed; "" if there is none. A file that is gone does not count: either the job has
        read it already, or the job will fail by itself."""
        for path, digest in job.reads:
            if path.exists() and self.digests.of(path) != digest:
                return f"{path} has changed since the study began; run the same command again"
        return ""

    def runs(self, stage: str, at: Levels | None = None) -> list[Job]:
        """The runs of a stage at some levels, in order."""
        every = self._staged.get(stage, {}).values()
        return [job for job in every if (at or {}).items() <= job.levels.items()]

    def runs_of(self, table: ScoreTable, side: Levels) -> Iterator[tuple[Job, Levels]]:
        """The runs of one side of a claim, in order, each with its levels. In a mean of metrics a
        run comes once for each."""
        for part in self.study.parts(table, side):
            for job in self.runs(table.stage, table.at(part)):
                yield job, {**job.levels, **part}

    def shown_in(self, table: ScoreTable) -> Iterator[tuple[Job, str]]:
        """The runs of a table that have a recipe, with the metrics that it reads of each. What a
        command leaves in its result is not known."""
        less = self.study.factors(table.minus) if table.minus else {}
        where = {factor: level for factor, level in table.where.items() if factor in less}
        for job in (*self.runs(table.stage, table.where), *self.runs(table.minus, where)):
            columns = self.study.columns_of(table, job.levels)  # none if only `minus` has it
            for metric in dict.fromkeys(map(table.metric_of, columns)):
                if job.recipe is not None:
                    yield job, metric

    def remarks(self) -> list[str]:
        """What a reader of the results must know: a line for each two levels that are the same
        runs, for each claim on a metric of which lower is better, for each doubt about published
        numbers, and for each stage whose runs differ in a precision that nobody chose."""
        lines = [
            f"stages.{stage}: {factor}={one} and {factor}={other} are the same runs, because these "
            "levels have the same settings"
            for stage in self._staged
            for factor, one, other in self._same(stage)
        ]
        for claim in self.study.claims:
            if not claim.tie and LOWER in self._directions_of(claim):
                higher = ", ".join(f"{f}={level}" for f, level in claim.better.items())
                lines.append(
                    f"in the claim {claim.text!r} lower numbers are better. The claim holds if "
                    f"its side `better` ({higher}) has the higher numbers"
                )
        if self._unseen:
            lines.append(
                "not run, because no table, curve or picture needs them: " + ", ".join(self._unseen)
            )
        return [*lines, *doubts(self.study), *self._mixed(), *self._kept_elsewhere()]

    def _mixed(self) -> list[str]:
        """A line for each stage whose runs differ in a precision that nobody chose."""
        return [
            f"the runs of the stage {name} are partly in bf16 and partly in fp32, because some "
            "were begun on another machine; a difference between them may be one of precision. To "
            "compare like with like, run a study file of two lines: base = this study's file, and "
            f'stages.{name}.settings.system.precision = "fp32"'
            for name, precisions in self._auto.items()
            if len(precisions) > 1
        ]

    def _kept_elsewhere(self) -> Iterator[str]:
        """A line for each stage of analyses of whole trajectories that has a result, although a run
        that it has read kept its weights at other steps than the study says now. Those steps are
        not part of its key."""
        told = set[str]()
        for job in self.jobs.values():
            if job.command[:3] != TRAJECTORIES or not job.done or job.stage in told:
                continue
            for run in (self.jobs[key] for key in job.waits if key in self._made_with):
                kept = self._made_with[run.key].get("train.keep_at", [])
                now = validate(Recipe, run.recipe or {}).model_dump(mode="json")["train"]["keep_at"]
                if kept != now and str(run.path) in job.command and job.stage not in told:
                    told.add(job.stage)
                    yield (
                        f"{job.name} has read {run.name}, which was made with train.keep_at={kept}"
                        f", now {now}; delete {job.path} and {run.path} to make both again"
                    )

    # ------------------------------------------------------------------------------ what it checks

    def _check_metric(self, table: ScoreTable) -> None:
        """Refuse a metric that the runs of a table will not have, a chance level of a loss, and
        means over scores and losses."""
        place = f"table {table.name}"
        for job, metric in self.shown_in(table):
            logged = LOGGED if table.split_of(metric) == "train" else ()
            _check_scores(place, [job], metric.rpartition(".")[2], logged)
        directions = self._directions(table)
        for column, direction in directions.items():
            if table.best != "none" and direction == LOWER:
                raise BadInput(
                    f"{place}: best is the highest number, but of {table.metric_of(column)} lower "
                    "is better; leave it out"
                )
        for column in table.chance:
            if directions.get(column) == LOWER:
                raise BadInput(
                    f"{place}: chance.{column}: runs above a chance level have learnt, but of "
                    f"{table.metric_of(column)} lower is better; leave it out"
                )
        for name, columns in table.means.items():
            if {HIGHER, LOWER} <= {directions.get(column) for column in columns}:
                raise BadInput(
                    f"{place}: means.{name} averages scores and losses; give each kind a mean of "
                    "its own"
                )

    def _directions(self, table: ScoreTable) -> dict[str, int]:
        """HIGHER or LOWER by column of a table, as far as known."""
        directions = {}
        for job in self.runs(table.stage, table.where):
            for column in self.study.columns_of(table, job.levels):
                _, metric = table.source_of(column)
                if metric in (known := _scores(job)):
                    directions[column] = known[metric]
        return directions

    def _directions_of(self, claim: Claim) -> set[int]:
        """HIGHER, LOWER or both: what is better of the scores that a claim compares."""
        table = self.study.table(claim.table)
        sides = claim.sides("")
        parts = [part for side in sides for part in self.study.parts(table, side)]
        own = {part.get(table.columns) for part in parts} - {None, ""}
        directions = self._directions(table).items()
        return {better for column, better in directions if column in own or not own}

    def _check_levels(self, stage: str) -> None:
        """Refuse seeds that are one run, at any levels of the other factors."""
        for factor in self.study.random_factors(stage):
            first: dict[tuple[str, ...], str] = {}  # by key and other levels
            for job in self._staged[stage].values():
                level, others = job.levels[factor], {**job.levels, factor: ""}
                one = first.setdefault((job.key, *others.values()), level)
                if one != level:
                    at = ", ".join(filter(None, others.values()))
                    raise BadInput(
                        f"stages.{stage}.vary.{factor}: {one} and {level} have the same settings, "
                        f"so they are one run, and not two{at and f' (at {at})'}; leave one out "
                        "with `without`"
                    )

    def _same(self, stage: str) -> Iterator[tuple[str, str, str]]:
        """The levels of a stage that change nothing: (factor, one level, another with the same
        runs). Each is named once."""
        for factor in self.study.factors(stage):
            runs: dict[str, set[tuple[Any, ...]]] = {}  # of each level: key and other levels
            for job in self._staged[stage].values():
                others = (v for name, v in job.levels.items() if name != factor)
                runs.setdefault(job.levels[factor], set()).add((job.key, *others))
            first: dict[frozenset[tuple[Any, ...]], str] = {}
            for level, keys in runs.items():
                if (one := first.setdefault(frozenset(keys), level)) != level:
                    yield factor, one, level

    def _check_curves(self, curves: Curves) -> None:
        """Refuse a number of the log that no run, or no run of the panel that it is for, will
        have."""
        jobs, place = self.runs(curves.stage, curves.where), f"curves {curves.name}"
        _check_scores(place, jobs, curves.value, LOGGED)
        wanted: dict[str, list[Job]] = {}  # by metric of validations
        for job in jobs:
            metric = curves.validation
            if not isinstance(metric, str):
                metric = metric.get(job.levels[curves.panels], "")
            wanted.setdefault(metric, []).append(job)
        for metric, some in wanted.items():
            if metric:
                _check_scores(place, some, metric)

    def _check_claim(self, claim: Claim) -> None:
        """Refuse a claim that compares runs with themselves, because two levels have the same
        settings."""
        table = self.study.table(claim.table)

        def keys(side: Levels) -> set[str]:
            return {job.key for job, _ in self.runs_of(table, side)}

        named = [
            [table.source_of(part[METRIC])[1] for part in self.study.parts(table, side)]
            for side in (claim.better, claim.than)
            if METRIC in side
        ]
        trained = all(job.recipe is not None for job in self.runs(table.stage, table.where))
        # numbers of an analysis may be alike
        if trained and named and named[0] != named[1] and not table.minus:
            metrics = sorted({*named[0], *named[1]})
            raise BadInput(
                f"claim {claim.text!r} compares {' with '.join(metrics)}; compare one "
                "metric, on both sides"
            )
        if claim.each != table.columns and len(self._directions_of(claim)) > 1:
            raise BadInput(
                f"claim {claim.text!r} averages scores and losses; make two claims of it"
            )
        better, than = keys(claim.better), keys(claim.than)
        same = better == than and claim.better.get(METRIC) == claim.than.get(METRIC)
        if better and same and not table.minus:
            raise BadInput(
                f"claim {claim.text!r}: both sides have the same runs, because their levels have "
                "the same settings"
            )

    def _check_run(self, job: Job) -> None:
        """Refuse a run whose directory holds another run: one copied from another key, or one in
        another precision, which was not always part of the key."""
        config = job.path / "config.json"
        if job.recipe is None or not config.is_file():
            return
        wanted = validate(Recipe, job.recipe).system.precision
        content = read_run_json(config)
        try:
            starts = [flat(start["config"]) for start in (content, *content.get("starts", ()))]
            made_as = Path(starts[0].get("run", job.key)).name
        except (AttributeError, KeyError, TypeError):
            raise BadInput(f"{config} is damaged: it holds no recipe") from None
        if made_as != job.key:
            raise BadInput(
                f"{job.path} holds the run {made_as}: it was copied or renamed; delete it to run "
                f"{job.name} again"
            )
        self._made_with[job.key] = starts[-1]
        for precision in (start.get("system.precision", wanted) for start in starts):
            if precision != wanted:
                raise BadInput(
                    f"{self.study.path}: {job.name}: {job.path} was made with "
                    f"system.precision={precision}, the study asks for {wanted}; delete that "
                    "directory to run it again, or give another output="
                )

    # ----------------------------------------------------------------------------------- its jobs

    def _run(self, name: str, levels: Levels) -> Job:
        """The run of a stage at these levels, planned with all that it waits for."""
        stage, factors = self.study.stages[name], self.study.factors(name)
        levels = {factor: levels[factor] for factor in factors}
        label = " ".join([name, *(f"{factor}={level}" for factor, level in levels.items())])
        if planned := self._staged.get(name, {}).get(label):
            return planned
        inputs = _Inputs(label, levels)
        settings = self.study.settings(name, levels)
        if stage.command:
            parts = with_settings(stage.command, settings)
            with self._once(f"stages.{name}"), within(label):
                return self._command(parts, inputs, "runs/", stage.result, name)
        if stage.recipe not in self._recipes:
            place = find_recipe(stage.recipe, self.study.path.parent)
            self._recipes[stage.recipe] = read_recipe(place)
        raw = merge(self._recipes[stage.recipe], settings)
        with self._once(f"stages.{name}"), within(label):
            by_key = self._by_content(self._filled(raw, inputs, True), inputs)
            precision, key = self._settled(by_key, stage.processes)
        if by_key.get("system", {}).get("precision", "auto") == "auto":
            self._auto.setdefault(name, set()).add(precision)
        path = self.root / "runs" / key
        recipe = {**self._filled(raw, inputs, False), "run": str(path)}
        recipe = merge({"train": {"keep_state": False}}, recipe)
        recipe = merge(recipe, {"system": {"precision": precision}})
        program: tuple[str, ...] = ("train.py",)
        if stage.processes > 1:
            program = (*TORCHRUN, str(stage.processes), "-m", "xformer.train")
        command = (*program, str(path.with_suffix(".toml")))
        job = Job(label, key, path, path / "result.json", command, recipe=recipe)
        return self._add(replace(job, processes=stage.processes), inputs, name)

    def _by_content(self, recipe: dict[str, Any], inputs: _Inputs) -> dict[str, Any]:
        """A recipe in which paths that the study types, rather than names as needs, are replaced by
        the digests of what lies there."""

        def change(text: str) -> str:
            path = installed(text)
            return self._read(path, inputs) if text and path.exists() else text

        def changed(group: dict[str, Any], *keys: str) -> dict[str, Any]:
            return group | {key: each_text(group[key], change) for key in keys if key in group}

        by_key = changed(recipe, "data", "init")
        if "train" in recipe:
            by_key["train"] = changed(recipe["train"], "branch_from")
        if "surgery" in recipe:
            by_key["surgery"] = [changed(step, *READ) for step in recipe["surgery"]]
        return by_key

    def _settled(self, by_key: dict[str, Any], processes: int) -> tuple[str, str]:
        """The precision of a run, and its key. `auto` takes the precision of a run that is already
        here or kept, or else the fast one of this machine."""
        recipe = validate(Recipe, {**by_key, "run": "-"})
        auto = ("bf16", "fp32") if self.fast == "bf16" else ("fp32", "bf16")
        chosen = recipe.system.precision
        keys = {}
        for precision in auto if chosen == "auto" else (chosen,):
            system = recipe.system.model_copy(update={"precision": precision})
            content = identity(recipe.model_copy(update={"system": system}))
            if processes > 1:
                content["processes"] = processes
            keys[precision] = content_key(content)
        there = [precision for precision, key in keys.items() if self._there(key)]
        precision = (*there, *keys)[0]
        return precision, keys[precision]

    def _there(self, key: str) -> bool:
        """Whether a run was begun here, or its result is kept."""
        here = (self.root / "runs" / key / "config.json").is_file()
        return here or (self.kept is not None and (self.kept / f"{key}.zip").is_file())

    def _made(self, name: str, levels: Levels) -> Job:
        """The job that makes {made.NAME} for a run at these levels."""
        place = name, frozenset(levels.items())
        if place in self._made_at:
            return self._made_at[place]
        if name not in self.study.made:
            raise BadInput(f"there is no made.{name}{nearest(name, list(self.study.made))}")
        made = self.study.made[name]
        if bool(made.same) == bool(made.command) or (made.command and "{out}" not in made.command):
            raise BadInput(
                f"made.{name} needs either `same`, or a command with {{out}} as a word of its own"
            )
        with self._once(f"made.{name}"):
            if made.same:
                job = self._made(made.same, levels)
            else:
                inputs = _Inputs(f"made.{name}", levels)
                job = self._command(made.command, inputs, f"made/{name}-")
        return self._made_at.setdefault(place, job)

    @contextmanager
    def _once(self, name: str) -> Iterator[None]:
        """Refuse to plan something while it is being planned, because it needs itself."""
        if name in self._making:
            raise BadInput(f"{name} is made from itself")
        self._making.append(name)
        try:
            yield
        finally:
            self._making.remove(name)

    def _command(
        self, parts: Sequence[str], inputs: _Inputs, place: str, proof: str = "", stage: str = ""
    ) -> Job:
        """The job of a command. Its path is `place` followed by its key, below the root."""
        key = content_key(self._filled(parts, inputs, True))
        filled = self._filled(parts, inputs, False)
        path = self.root / f"{place}{key}"
        command = tuple(part.replace("{out}", str(path)) for part in filled)
        return self._add(Job(inputs.name, key, path, path / proof, command), inputs, stage)

    def _add(self, job: Job, inputs: _Inputs, stage: str) -> Job:
        """The job with its inputs. An equal one that is already planned takes its place."""
        reads = tuple(inputs.reads.items())
        job = replace(job, waits=tuple(inputs.waits), missing=tuple(inputs.missing), reads=reads)
        if stage:
            job = replace(job, stage=stage, levels=inputs.levels)
        known = self.jobs.setdefault(job.key, job)
        if _dropout(known) != _dropout(job):
            self.twins.append((known, job))
        if stage:
            if known.proof != job.proof:
                raise BadInput(
                    f"it runs the same command as {known.name}, but reads another result "
                    f"of it ({job.proof.name}; {known.proof.name}); let the commands differ"
                )
            own = replace(known, name=job.name, stage=stage, levels=job.levels)
            self._staged.setdefault(stage, {})[job.name] = own
        return known

    def _filled(self, value: Any, inputs: _Inputs, by_key: bool) -> Any:
        """A value whose strings have their {places} filled in: by paths, or by the keys of what
        lies there."""

        def change(text: str) -> str:
            if "{" not in text:
                return text
            text = with_levels(text, inputs.levels)
            return PLACE_BELOW.sub(lambda place: self._place(place, inputs, by_key), text)

        return each_text(value, change)

    def _place(self, place: re.Match[str], inputs: _Inputs, by_key: bool) -> str:
        """The text that replaces a place and the rest of its path."""
        kind, name, factor, level, below = place.groups()
        if kind == "need":
            return self._need(name, below, place[0], by_key, inputs)
        levels = {**inputs.levels, factor: level} if factor else inputs.levels
        job = self._made(name, levels) if kind == "made" else self._waited_for(name, levels)
        inputs.waits[job.key] = None
        inputs.missing.update(dict.fromkeys(job.missing))
        return f"{job.key if by_key else job.path}{below}"

    def _waited_for(self, stage: str, levels: Levels) -> Job:
        """The run of a stage that another run waits for, at that one's levels."""
        if stage not in self.study.stages:  # its name may depend on a level
            raise BadInput(f"there is no stage {stage!r}{nearest(stage, list(self.study.stages))}")
        for factor, known in self.study.factors(stage).items():
            if factor not in levels:
                raise BadInput(f"{{stage.{stage}}} varies by {factor}, which this stage does not")
            if levels[factor] not in known:
                raise BadInput(f"stages.{stage}.vary.{factor} has no level {levels[factor]!r}")
        return self._run(stage, levels)

    def _need(self, name: str, below: str, place: str, by_key: bool, inputs: _Inputs) -> str:
        """The path of what lies `below` a need, or its digest."""
        if name not in self.paths:  # its name may depend on a level
            raise BadInput(f"there is no need {name!r}{nearest(name, list(self.paths))}")
        given, parts = self.paths[name], below.split("/")
        plain = [*takewhile(lambda part: not has_magic(part), parts)]
        # for a glob, the directory that holds its files
        path = Path(f"{installed(given)}{'/'.join(plain)}")
        pattern = "".join(f"/{part}" for part in parts[len(plain) :])
        there = bool(given) and path.exists()
        if not there:
            inputs.missing[name] = None
            self.absent.setdefault(name, path)
        if by_key:
            return f"{self._read(path, inputs)}{pattern}" if there else f"missing {place}"
        return f"{path}{pattern}" if given else place

    def _read(self, path: Path, inputs: _Inputs) -> str:
        """The digest of a path that a job reads."""
        if path not in self._read_of:
            self._read_of[path] = self.digests.of(path)
        return inputs.reads.setdefault(path, self._read_of[path])


def _dropout(job: Job) -> dict[str, Any]:
    """The dropout that a run types instead of taking it from its initial checkpoint."""
    recipe = job.recipe or {}
    model = recipe.get("model", {}) if recipe.get("init") else {}
    return {name: model[name] for name in DROPOUT if name in model}


def _scores(job: Job) -> Mapping[str, int]:
    """The metrics of a run, each HIGHER or LOWER; those that a command leaves in its result are not
    known."""
    recipe = job.recipe or {}
    pairs = recipe.get("masking", {}).get("pair_weight", 0) > 0
    return kind_of(recipe["head"], pairs).metrics if recipe else {}


def _check_scores(place: str, jobs: Sequence[Job], metric: str, logged: Sequence[str] = ()) -> None:
    """Refuse a metric that none of some runs will have, nor `logged` by every run."""
    every = [(*_scores(job), *logged) for job in jobs if job.recipe is not None]
    if every and len(every) == len(jobs) and not any(metric in known for known in every):
        known = ", ".join(dict.fromkeys(every[0]))
        raise BadInput(f"{place}: {jobs[0].name} will have no {metric!r}; it has {known}")


def _files(directory: Path) -> Iterator[Path]:
    """The files in a directory and in those that it links to, relative to it. A directory that has
    several names is entered once, so that links may go round in circles. `.DS_Store`, which
    macOS writes when somebody opens a directory, is left out."""
    seen = {directory.resolve()}
    for folder, folders, names in os.walk(directory, followlinks=True):
        inner = {name: Path(folder, name).resolve() for name in sorted(folders)}
        folders[:] = [name for name, path in inner.items() if path not in seen]
        seen |= set(inner.values())
        kept = (name for name in names if name != ".DS_Store")
        yield from (Path(folder, name).relative_to(directory) for name in kept)


class Digests:
    """SHA-256 of files and directories, cached by path, size and ctime.

    Files from an archive often share one time of modification. Every change sets the ctime, and no
    program can set it back.
    """

    def __init__(self, path: Path):
        self.path = path
        self.known: dict[str, list[Any]] = {}
        with suppress(BadInput):  # without a readable cache all files are hashed again
            content = read_json(path)
            good = isinstance(content, dict) and all(isinstance(v, list) for v in content.values())
            self.known = content if good else {}
        self.changed = False  # since it was read

    def of(self, path: Path) -> str:
        """That of a file's content, or of the names and contents of all files in a directory."""
        if path.is_file():
            return self._file(path)
        names = sorted(name for name in _files(path) if (path / name).is_file())
        hashes = [f"{name}:{self._file(path / name)}" for name in names]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    def _file(self, path: Path) -> str:
        status, name = path.stat(), str(path.resolve())
        mark = [status.st_size, status.st_ctime_ns]
        if self.known.get(name, [])[:2] != mark:
            self.known[name] = [*mark, file_checksum(path)]
            self.changed = True
        return str(self.known[name][2])

    def save(self) -> None:
        """Write the cache if it has changed. In a directory that this user may not write, nothing
        is kept, and the files are hashed again the next time."""
        if self.changed and self.path.parent.is_dir():
            try:
                write_json(self.path, self.known)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise


def identity(recipe: Recipe) -> dict[str, Any]:
    """The part of a recipe that decides its result. tests/test_keys.py pins the keys of it. The
    precision must be settled: fp32 or bf16."""
    content = recipe.model_dump(mode="json")
    for name in ("run", "overwrite", "system"):
        del content[name]
    for name in INTERVALS:
        del content["train"][name]
    for (*groups, key), default in _later().items():
        own = reduce(dict.__getitem__, groups, content)
        if isinstance(default, dict):  # without the keys of the group that are themselves later
            default = {name: value for name, value in default.items() if name in own[key]}
        if own[key] == default:
            del own[key]
    # when the first results were made, `data` was a group that held `fraction`, and fp32 was not
    # written. This form is kept, so that they keep their keys
    content["data"] = {"store": content["data"], "fraction": content.pop("fraction")}
    if recipe.system.precision != "fp32":
        content["precision"] = recipe.system.precision
    if recipe.system.tf32:
        content["tf32"] = True
    return content


@cache
def _later() -> dict[tuple[str, ...], Any]:
    """The default of each key of ADDED_LATER, by its parts."""
    defaults = Recipe(data="-", run="-", head="mlm").model_dump(mode="json")
    every = [tuple(name.split(".")) for name in ADDED_LATER]
    return {parts: reduce(dict.__getitem__, parts, defaults) for parts in every}


def content_key(content: Any) -> str:
    """16 hexadecimal digits of the SHA-256 of a JSON value and RESULTS."""
    text = json.dumps([RESULTS, content], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_settings(command: Sequence[str], settings: dict[str, Any]) -> list[str]:
    """A command with its settings: each in the place of {KEY}, or else added as KEY=VALUE."""
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in flat(settings).items()}
    parts, whole = list(command), "\n".join(command)
    for key, value in values.items():
        parts = [part.replace(f"{{{key}}}", value) for part in parts]
    return [*parts, *(f"{k}={v}" for k, v in values.items() if f"{{{k}}}" not in whole)]
