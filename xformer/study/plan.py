"""From a study to its runs: what each does, on what it waits, and the key of its content.

A key is a hash of all that decides a result: the resolved recipe without `run`, `system.*` and the
intervals of logs and checkpoints, the precision, the keys of the stores and of the initial
checkpoint, and RESULTS. Two studies that ask for the same run share it, and a changed one is
another.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from glob import has_magic
from itertools import takewhile
from pathlib import Path
from typing import Any

from xformer.config import find_recipe, flat, merge, nearest, read_recipe, validate
from xformer.data.errors import BadInput
from xformer.data.files import file_checksum, installed, read_json, write_json
from xformer.recipe import Recipe
from xformer.run import read_config
from xformer.study.spec import PLACE, Levels, Need, Stage, Study, Table
from xformer.tasks.known import kind_of

RESULTS = 2  # raised by hand when a change of the code changes results
# they change no result: `validate_every` is none of them, it decides which checkpoint is the best
INTERVALS = ("log_every", "checkpoint_every", "keep_last", "keep_every", "keep_state", "keep_at")
# fields of the recipe that are younger than the first results: they enter the key only if they
# differ from their default, so that earlier results keep their keys. Add each new field here, or to
# INTERVALS if it changes no result
LATER = ("loss", "train.trouble", "train.spike")
BELOW = re.compile(r"(?:/[^\s{}]*)?")  # what follows a need and belongs to its path
FACTOR = re.compile(r"\{[A-Za-z][\w.-]*\}")
UNPACKED = ".unpacked"  # marks the result of a command that came out of a ledger


@dataclass(frozen=True)
class Work:
    """One command of a study; done when `proof` exists."""

    name: str
    key: str
    path: Path
    proof: Path
    command: tuple[str, ...]
    waits: tuple[str, ...] = ()  # keys of the works it needs
    missing: tuple[str, ...] = ()  # names of the needs that are not there
    stage: str = ""  # empty for what is made before any run
    levels: Levels = field(default_factory=dict)
    recipe: dict[str, Any] | None = None  # with the paths filled in; None for other commands

    @property
    def done(self) -> bool:
        return self.proof.exists()

    @property
    def whole(self) -> bool:
        """Whether others can start from it. A done work whose result came out of a ledger is not
        whole: a run lacks its weights, a command all files but its result."""
        if self.recipe is None:
            return self.done and not (self.path / UNPACKED).exists()
        return self.done and any(self.path.glob("checkpoints/step_*/manifest.json"))


def to_do(
    works: Iterable[Work], wanted: Iterable[str], kept: Collection[str] = ()
) -> dict[str, Work]:
    """What is to be made, by key in the order of the works: the `wanted` ones that are not done,
    and all they wait for that is not whole. `kept` are keys that a ledger holds."""
    by_key = {work.key: work for work in works}
    found: set[str] = set()
    open_ = [key for key in wanted if not by_key[key].done and key not in kept]
    while open_:
        key = open_.pop()
        if key not in found:
            found.add(key)
            open_ += [other for other in by_key[key].waits if not by_key[other].whole]
    return {key: work for key, work in by_key.items() if key in found}


class Plan:
    """The works of a study in an order in which they can run, `works`, by key; `wanted` has the
    keys of those that are shown. The others are there because these wait for them.

    `root` is the directory of all studies; `paths` {need: path} comes from the command line.
    Raises BadInput where a recipe, a setting or a level is wrong.
    """

    def __init__(self, study: Study, root: Path, paths: dict[str, str]):
        self.study, self.root = study, root
        for name in paths:
            if name not in study.needs:
                known = ", ".join(study.needs) or "none"
                raise BadInput(f"needs.{name}: {study.path} has no such need; its needs: {known}")
        self.paths = {name: paths.get(name, need.path) for name, need in study.needs.items()}
        self.works: dict[str, Work] = {}
        self.wanted: set[str] = set()
        self._staged: dict[str, dict[str, Work]] = {}  # by stage and name; stages may share a run
        self._recipes: dict[str, dict[str, Any]] = {}
        self._open: list[str] = []  # what is being made, to see circles
        self.absent: dict[str, Path] = {}  # the first that is missing of a need
        self.digests = Digests(root / "digests.json")
        depended = {name for kind, name, *_ in self._all_places() if kind == "stage"}
        for stage in study.stages:
            self._refuse_circle(stage)
        every = not (
            study.tables or study.curves or study.pictures
        )  # then all that no other stage waits for
        for stage in study.shown():
            if stage not in depended or not every:
                for levels in study.combinations(stage):
                    self.wanted.add(self._run(stage, levels).key)

        for table in study.tables:
            self._check_metric(table)
        for work in self.works.values():
            self._check_run(work)

    def _check_metric(self, table: Table) -> None:
        """Refuse a metric that the runs of a table will not have; what a command leaves in its
        result is its own affair."""
        for work in self.runs(table.stage):
            wanted = (
                [table.metric]
                if isinstance(table.metric, str)
                else [
                    name
                    for column, name in table.metric.items()
                    if column == work.levels.get(table.columns, column)
                ]
            )
            if work.recipe is None or not table.where.items() <= work.levels.items():
                continue
            pairs = work.recipe.get("masking", {}).get("pair_weight", 0) > 0
            known = kind_of(work.recipe["head"], pairs).metrics
            for metric in wanted:
                split, _, name = metric.rpartition(".")
                if split != "train" and name not in known:
                    raise BadInput(
                        f"{self.study.path}: table {table.name}: {work.name} will have "
                        f"no {name!r}; it has {', '.join(known)}"
                    )

    def _check_run(self, work: Work) -> None:
        """Refuse a run that lies there and is another: in another precision (before precision
        belonged to the key, runs of all precisions had one), or copied from another key."""
        config = work.path / "config.json"
        if work.recipe is None or not config.is_file():
            return
        wanted = validate(Recipe, work.recipe).system.precision
        content = read_config(config)
        try:
            starts = (content, *content.get("starts", ()))
            found = [flat(start["config"]).get("system.precision", wanted) for start in starts]
            made_as = Path(content["config"].get("run", work.key)).name
        except (AttributeError, KeyError, TypeError):
            raise BadInput(f"{config} is damaged: it holds no recipe") from None
        if made_as != work.key:
            raise BadInput(
                f"{work.path} holds the run {made_as}: it was copied or renamed; delete it to run "
                f"{work.name} again"
            )
        for has in found:
            if has != wanted:
                raise BadInput(
                    f"{self.study.path}: {work.name}: {work.path} was made with "
                    f"system.precision={has}, the study asks for {wanted}; delete that directory "
                    "to run it again, or give another output="
                )

    def _all_places(self) -> list[tuple[str, str, str, str]]:
        return PLACE.findall(json.dumps([s.model_dump() for s in self.study.stages.values()]))

    def _refuse_circle(self, stage: str, way: tuple[str, ...] = ()) -> None:
        if stage in way:
            circle = " -> ".join((*way[way.index(stage) :], stage))
            raise BadInput(f"{self.study.path}: its stages wait for one another: {circle}")
        for kind, name, *_ in PLACE.findall(self.study.stages[stage].model_dump_json()):
            if kind == "stage":
                self._refuse_circle(name, (*way, stage))

    def restrict(self, only: Mapping[str, Sequence[str]]) -> None:
        """Leave of the wanted runs those at these levels of the factors that they have. Raises
        BadInput for a factor or a level that there is not."""
        for factor, levels in only.items():
            if not levels:
                raise BadInput(f"only.{factor}=[] leaves nothing to run; name a level")
            known = {w.levels[factor]: None for w in self._all_staged() if factor in w.levels}
            if not known:
                factors = {name: None for work in self._all_staged() for name in work.levels}
                near = nearest(factor, list(factors))
                raise BadInput(f"only.{factor}: {self.study.path} has no such factor{near}")
            if unknown := [level for level in levels if level not in known]:
                raise BadInput(f"only.{factor}={unknown[0]}: its levels are {', '.join(known)}")
            self.wanted &= {
                work.key
                for work in self._all_staged()
                if work.levels.get(factor, levels[0]) in levels
            }

    def _all_staged(self) -> list[Work]:
        return [work for works in self._staged.values() for work in works.values()]

    def missing(self) -> dict[str, Need]:
        """The needs that some work waits for and that are not there."""
        names = {name for work in self.works.values() for name in work.missing}
        return {name: need for name, need in self.study.needs.items() if name in names}

    def runs(self, stage: str) -> list[Work]:
        """The runs of a stage, in order."""
        return list(self._staged.get(stage, {}).values())

    # ------------------------------------------------------------------------------- its works

    def _run(self, name: str, levels: Levels) -> Work:
        """The run of a stage at these levels, planned with all that it waits for."""
        stage = self.study.stages[name]
        factors = self.study.factors(name)
        levels = {factor: levels[factor] for factor in factors}
        label = " ".join([name, *(f"{factor}={level}" for factor, level in levels.items())])
        waits: list[Work] = []
        missing: list[str] = []

        def put(text: str, by_key: bool) -> str:
            return self._put(text, levels, label, by_key, waits, missing)

        settings: dict[str, Any] = dict(stage.settings)
        for factor, level in levels.items():
            settings = merge(settings, nested(factors[factor][level]))
        if stage.command:
            parts = with_settings(stage.command, settings)
            return self._command(label, stage, parts, name, levels, put, waits, missing)
        if stage.recipe not in self._recipes:
            self._recipes[stage.recipe] = read_recipe(
                find_recipe(stage.recipe, self.study.path.parent)
            )
        raw = merge(self._recipes[stage.recipe], settings)
        values = {**_each_string(raw, lambda t: put(t, True)), "run": "-"}
        try:
            by_key = validate(Recipe, values)
        except BadInput as error:
            raise BadInput(f"{self.study.path}: {label}: {error}") from None
        key = content_key(identity(by_key))
        path = self.root / "runs" / key
        filled = _each_string(raw, lambda t: put(t, False))
        recipe = merge({"train": {"keep_state": False}}, {**filled, "run": str(path)})
        command = ("train.py", str(path.with_suffix(".toml")))
        return self._add(
            Work(
                label,
                key,
                path,
                path / "result.json",
                command,
                _keys(waits),
                tuple(dict.fromkeys(missing)),
                name,
                levels,
                recipe,
            )
        )

    def _command(
        self,
        label: str,
        stage: Stage,
        parts: list[str],
        name: str,
        levels: Levels,
        put: Callable[[str, bool], str],
        waits: list[Work],
        missing: list[str],
    ) -> Work:
        by_key = [put(part, True) for part in parts]
        key = content_key(by_key)
        path = self.root / "runs" / key
        command = tuple(put(p, False).replace("{out}", str(path)) for p in parts)
        return self._add(
            Work(
                label,
                key,
                path,
                path / stage.result,
                command,
                _keys(waits),
                tuple(dict.fromkeys(missing)),
                name,
                levels,
            )
        )

    def _make(self, name: str, levels: Levels, label: str) -> Work:
        """The work that makes {made.NAME} for a run at these levels."""
        if name not in self.study.made:
            near = nearest(name, list(self.study.made))
            raise BadInput(f"{self.study.path}: {label}: there is no made.{name}{near}")
        made = self.study.made[name]
        if name in self._open:
            raise BadInput(f"{self.study.path}: made.{name} is made from itself")
        if bool(made.same) == bool(made.command) or (made.command and "{out}" not in made.command):
            raise BadInput(
                f"{self.study.path}: made.{name} needs `same`, or a command with {{out}}"
            )
        self._open.append(name)
        if made.same:
            work = self._make(made.same, levels, label)
            self._open.remove(name)
            return work
        parts = made.command
        waits: list[Work] = []
        missing: list[str] = []
        label = f"made.{name}"
        by_key = [self._put(part, levels, label, True, waits, missing) for part in parts]
        key = content_key(by_key)
        path = self.root / "made" / f"{name}-{key}"
        filled = [self._put(part, levels, label, False, waits, missing) for part in parts]
        self._open.remove(name)
        command = tuple(part.replace("{out}", str(path)) for part in filled)
        return self._add(
            Work(label, key, path, path, command, _keys(waits), tuple(dict.fromkeys(missing)))
        )

    def _add(self, work: Work) -> Work:
        found = self.works.setdefault(work.key, work)
        if work.stage:
            own = replace(found, name=work.name, stage=work.stage, levels=work.levels)
            self._staged.setdefault(work.stage, {})[work.name] = own
        return found

    def _put(
        self,
        text: str,
        levels: Levels,
        label: str,
        by_key: bool,
        waits: list[Work],
        missing: list[str],
    ) -> str:
        """The text with its {places} filled in: by paths, or by the keys of what lies there."""
        if "{" not in text:
            return text
        for factor, level in levels.items():
            text = text.replace(f"{{{factor}}}", level)
        done = ""
        while found := PLACE.search(text):
            done, text = done + text[: found.start()], text[found.end() :]
            kind, name, factor, level = found.groups()
            if kind == "need":
                below = BELOW.match(text)
                assert below is not None
                text = text[below.end() :]
                done += self._need(name, below.group(), found.group(), by_key, missing)
                continue
            its = {**levels, factor: level} if factor else levels
            work = self._make(name, its, label) if kind == "made" else self._of(name, its, label)
            waits.append(work)
            missing.extend(work.missing)
            done += work.key if by_key else str(work.path)
        unknown = FACTOR.search(text)
        if unknown and unknown.group() != "{out}":
            has = ", ".join(levels) or "none"
            raise BadInput(
                f"{self.study.path}: {label}: {text!r}: {unknown.group()} is no "
                f"factor of it; its factors: {has}"
            )
        return done + text

    def _need(self, name: str, below: str, place: str, by_key: bool, missing: list[str]) -> str:
        """The path of what lies `below` a need, or its digest."""
        given = self.paths[name]
        parts = below.split("/")
        plain = [*takewhile(lambda part: not has_magic(part), parts)]
        # of a glob, the directory that holds its files
        path = Path(f"{installed(given)}{'/'.join(plain)}")
        there = bool(given) and path.exists()
        if not there:
            missing.append(name)
            self.absent.setdefault(name, path)
        if by_key:
            glob = "/".join(["", *parts[len(plain) :]]) if len(plain) < len(parts) else ""
            return self.digests.of(path) + glob if there else f"missing {place}{below}"
        return "/".join([str(path), *parts[len(plain) :]]) if given else place + below

    def _of(self, name: str, levels: Levels, label: str) -> Work:
        """The run of a stage that another one waits for, at that one's levels."""
        wanted = self.study.factors(name)
        lacking = [factor for factor in wanted if factor not in levels]
        if lacking:
            raise BadInput(
                f"{self.study.path}: {label}: {{stage.{name}}} varies by {lacking[0]}, which "
                "this stage does not"
            )
        for factor, known in wanted.items():
            if levels[factor] not in known:
                raise BadInput(
                    f"{self.study.path}: {label}: stages.{name}.vary.{factor} has no level "
                    f"{levels[factor]!r}"
                )
        return self._run(name, levels)


class Digests:
    """SHA-256 of files and directories, remembered by path, size and time of change."""

    def __init__(self, path: Path):
        self.path = path
        self.known: dict[str, list[Any]] = {}
        with suppress(BadInput):  # what it remembers can be found out again
            found = read_json(path)
            good = isinstance(found, dict) and all(isinstance(v, list) for v in found.values())
            self.known = found if good else {}

    def of(self, path: Path) -> str:
        """Of a file's content, or of the names and contents of all files in a directory."""
        if path.is_file():
            return self._file(path)
        names = sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file())
        hashes = [f"{name}:{self._file(path / name)}" for name in names]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    def _file(self, path: Path) -> str:
        status, name = path.stat(), str(path.resolve())
        mark = [status.st_size, status.st_mtime_ns]
        if self.known.get(name, [])[:2] != mark:
            self.known[name] = [*mark, file_checksum(path)]
        return str(self.known[name][2])

    def save(self) -> None:
        if self.path.parent.is_dir():
            write_json(self.path, self.known)


def identity(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe decides its result. tests/test_keys.py holds the keys that come of it."""
    content = recipe.model_dump(mode="json")
    for name in ("run", "overwrite", "system"):
        del content[name]
    for name in INTERVALS:
        del content["train"][name]
    defaults = Recipe(data="-", run="-", head="mlm").model_dump(mode="json")
    for name in LATER:
        *groups, field = name.split(".")
        own, others = (reduce(dict.__getitem__, groups, values) for values in (content, defaults))
        if own[field] == others[field]:
            del own[field]
    # today's `data`, `fraction` and fp32 are written in the form that the first results were named
    # by, when `data` was a group and the precision was left out: so these keep their keys
    content["data"] = {"store": content["data"], "fraction": content.pop("fraction")}
    if recipe.system.precision != "fp32":
        content["precision"] = recipe.system.precision
    return content


def content_key(content: Any) -> str:
    """16 hexadecimal digits of the SHA-256 of a JSON value and RESULTS."""
    text = json.dumps([RESULTS, content], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_settings(command: Sequence[str], settings: dict[str, Any]) -> list[str]:
    """A command with its settings: in the place of {KEY}, or else added as KEY=VALUE."""
    values = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in flat(settings).items()
    }
    whole = "\n".join(command)
    added = [f"{key}={value}" for key, value in values.items() if f"{{{key}}}" not in whole]
    found = []
    for part in command:
        for key, value in values.items():
            part = part.replace(f"{{{key}}}", value)
        found.append(part)
    return found + added


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """{"optim": {"lr": 1e-4}} of {"optim.lr": 1e-4}; whole groups stay as they are."""
    found: dict[str, Any] = {}
    for key, value in flat(settings).items():
        for part in reversed(key.split(".")):
            value = {part: value}
        found = merge(found, value)
    return found


def _each_string(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_string(v, change) for key, v in value.items()}
    return [_each_string(v, change) for v in value] if isinstance(value, list | tuple) else value


def _keys(works: list[Work]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(work.key for work in works))
