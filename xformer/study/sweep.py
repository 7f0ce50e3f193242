"""A study in one line: every combination of some values of a recipe's keys.

    python -m xformer.study sweep finetune/classify data=stores/cola init=runs/english \\
        optim.lr=1e-4,5e-5 seed=0..4
    python -m xformer.study sweep recipes/finetune/classify.toml data=stores/cola \\
        init=runs/english,runs/brackets train.epochs=3,5 seed=0..2 out=starts.toml --dry-run

The first argument is a recipe. Each of its keys can have several values: A,B,C or A..B, the whole
numbers from A to B. symbols:0..2 stands for symbols:0,symbols:1,symbols:2. A list in brackets is
one value: data='["stores/a", "stores/b"]' trains on two stores. Every combination of values is a
run, but pair=init,data takes the first value of both keys together, then the second, and so on.

The command writes a study file, says how long the runs will take, runs them, and reports which
settings have the best mean score on validation. With --dry-run it only says how long the runs will
take, and writes the file only if out= names it. The same line again continues a stopped sweep. You
can also edit the file, and run it with python -m xformer.study FILE.

The keys below say how the runs are executed. All other keys are those of the recipe.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

from xformer.config import PATHS as PATH_TYPES
from xformer.config import (
    TEXT,
    all_keys,
    each,
    find_recipe,
    flat,
    nearest,
    parse_overrides,
    quoted,
    read_recipe,
    recipes,
    show,
    toml_value,
)
from xformer.data.display import escaped
from xformer.data.errors import BadInput, typed
from xformer.data.files import installed, make_directory, near, write_text
from xformer.recipe import UNUSED_IF_SET, Recipe

RANGE = re.compile(r"(\w+:)?(\d+)\.\.(\d+)")  # 0..4, or symbols:0..4
DASHED = re.compile(r"(\d+)-(\d+)")  # how other programs write 0..4
OUTSIDE = re.compile(r",(?![^\[]*\])")  # a comma that is not inside brackets
# keys whose values are paths; each path becomes a need of the study, so its content enters the key
PATHS = ("data", "init", "train.branch_from")
OURS = ("run", "overwrite")  # keys that the study sets
MOST = 10_000  # the largest number of runs in a sweep
STAGE = "run"


@dataclass(frozen=True)
class Sweep:
    """What a study file is made from: its name, the command line that asks for it, the recipe, and
    the values of each key. The keys of `pairs` take their values together."""

    name: str
    line: str
    recipe: str
    values: dict[str, list[Any]]  # by key of the recipe
    pairs: tuple[tuple[str, ...], ...] = ()

    def check_paths(self) -> None:
        """Raise BadInput naming the first path that does not exist."""
        for key in (key for key in PATHS if key in self.values):
            for path in (path for value in self.values[key] for path in each(value)):
                if not installed(path).exists():
                    raise BadInput(f"{key}={path}: {path} does not exist{near(Path(path))}")

    def write(self, path: Path) -> None:
        """Write the file, unless it exists already. Raises BadInput if a file with other content
        has this name."""
        text = self.text(path.parent)
        if path.exists():
            try:
                same = tomllib.loads(path.read_text(encoding="utf-8-sig")) == tomllib.loads(text)
            except (ValueError, OSError):
                same = False
            if not same:
                raise BadInput(
                    f"{path} exists and holds something else; give another file with out=, or run "
                    f"that one with {typed('python -m xformer.study')} {path}"
                )
            return
        make_directory(path.parent, "out=" if path.parent != Path() else "")
        write_text(path, text)

    def text(self, folder: Path) -> str:
        """The text of the file. Paths in it are relative to `folder`, the folder of the file."""
        needs = _Needs()
        settings, vary = [], []
        for keys in factors(self.values, self.pairs):
            rows = rows_of(self.values, keys)
            if len(rows) == 1:
                settings += [f"settings.{k} = {show(needs.filled(k, rows[0][k]))}" for k in keys]
            elif len(keys) == 1 and keys[0] not in PATHS:
                vary.append(f"vary.{quoted(keys[0])} = {show(self.values[keys[0]])}")
            else:
                factor = quoted("+".join(keys))
                for row in rows:
                    filled = {key: needs.filled(key, value) for key, value in row.items()}
                    level = quoted("+".join(needs.level(key, value) for key, value in row.items()))
                    vary.append(f"vary.{factor}.{level} = {show(filled)}")
        varied = ", ".join(key for key, values in self.values.items() if len(values) > 1)
        lines = [f"# {escaped(self.line)}", f"title = {show(f'{self.recipe}: {varied}')}", ""]
        for path, name in needs.names.items():
            lines += [f"[needs.{name}]", f"about = {show(f'a path of the sweep, {path}')}"]
            lines += [f"path = {show(path)}", ""]
        lines += [f"[stages.{STAGE}]", f"recipe = {show(self._reference(folder))}"]
        return "\n".join([*lines, *settings, *vary, ""])

    def _reference(self, folder: Path) -> str:
        """How a file in `folder` refers to the recipe: by its name, or by a relative path."""
        file = find_recipe(self.recipe).resolve()
        names = {path.resolve(): name for name, path in recipes().items()}
        return names.get(file) or os.path.relpath(file, folder.resolve())


class _Needs:
    """The paths that a sweep reads, each with a name."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def filled(self, key: str, value: Any) -> Any:
        """A value of a key. Paths, and lists of paths, become {need.NAME}."""
        if key not in PATHS:
            return value
        if isinstance(value, list | tuple):
            return [self.filled(key, path) for path in value]
        if value not in self.names:
            plain = re.sub(r"[^\w-]", "-", Path(value).name, flags=re.ASCII) or "path"
            known = self.names.values()
            other = (f"{plain}-{number}" for number in range(2, len(known) + 3))
            self.names[value] = next(n for n in (plain, *other) if n not in known)
        return f"{{need.{self.names[value]}}}"

    def level(self, key: str, value: Any) -> str:
        """The name of a value as the level of a factor."""
        if key in PATHS:
            return "+".join(self.names[path] for path in each(value))
        return value if isinstance(value, str) else show(value)


def read(arguments: list[str]) -> Sweep:
    """The sweep that a command line describes. Raises BadInput naming what is wrong in it."""
    texts = [a for a in arguments if "=" not in a]
    if len(texts) != 1 or texts[0].startswith("-"):
        given = " ".join(texts) or "none"
        such = typed("python -m xformer.study sweep finetune/classify data=STORE seed=0..4")
        raise BadInput(f"give one recipe, as in {such}; given: {given}")
    if "scales" in read_recipe(find_recipe(texts[0])):
        raise BadInput(f"{texts[0]} is a study; a sweep needs a recipe, such as finetune/classify")
    values: dict[str, list[Any]] = {}
    pairs: list[tuple[str, ...]] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if key == "pair":
            pairs.append(tuple(text.split(",")))
        elif equals:
            if key in values:
                raise BadInput(f"{key}= is given twice; give all its values at once: {key}=A,B")
            values |= _values(key, text)
    fixed = flat(read_recipe(find_recipe(texts[0])))
    for key in (key for key in values if key in UNUSED_IF_SET and UNUSED_IF_SET[key] not in values):
        if value := fixed.get(other := UNUSED_IF_SET[key]):
            why = f"because the recipe has {other}={value}"
            raise BadInput(f"{key} is not used, {why}; give {other}=0, too")
    _check_pairs(values, pairs)
    for keys in factors(values, pairs):
        rows = rows_of(values, keys)
        if twice := [row for row in rows if rows.count(row) > 1]:
            named = " with ".join(f"{key}={show(value)}" for key, value in twice[0].items())
            raise BadInput(f"{named} is given twice; give each value once")
    if not any(len(some) > 1 for some in values.values()):
        raise BadInput(
            "nothing varies: give a key several values, such as optim.lr=1e-4,5e-5 or seed=0..4"
        )
    if (runs := prod(len(values[keys[0]]) for keys in factors(values, pairs))) > MOST:
        raise BadInput(f"these values make {runs:,} runs, more than {MOST:,}; give fewer values")
    varied = [key.rpartition(".")[2] for key, some in values.items() if len(some) > 1]
    name = "-".join([Path(texts[0]).stem, *varied])
    line = shlex.join([*typed("python -m xformer.study").split(), "sweep", *arguments])
    return Sweep(name, line, texts[0], values, tuple(pairs))


def factors(
    values: Mapping[str, Sequence[Any]], pairs: Sequence[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """The keys that vary together, in the order of `values`: most of them alone."""
    owner = {key: keys for keys in pairs for key in keys}
    return list(dict.fromkeys(owner.get(key, (key,)) for key in values))


def rows_of(values: Mapping[str, Sequence[Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """The values that some keys take together: the first of each, the second of each, and so on."""
    columns = (values[key] for key in keys)
    return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]


def _check_pairs(values: Mapping[str, Sequence[Any]], pairs: Sequence[tuple[str, ...]]) -> None:
    """Raise BadInput unless the keys of each pair are different ones with equally many values."""
    every = [key for keys in pairs for key in keys]
    for keys in pairs:
        given = f"pair={','.join(keys)}"
        if len(keys) < 2 or any(every.count(key) > 1 for key in keys):
            raise BadInput(f"{given}: name two or more keys, each once, such as pair=init,data")
        if missing := [key for key in keys if key not in values]:
            raise BadInput(f"{given}: {missing[0]} has no values; write {missing[0]}=A,B")
        numbers = [len(values[key]) for key in keys]
        if len(set(numbers)) > 1:
            counts = ", ".join(f"{key} {number}" for key, number in zip(keys, numbers, strict=True))
            raise BadInput(f"{given}: the keys need equally many values, but they have {counts}")


def _values(key: str, text: str) -> dict[str, list[Any]]:
    """{key: its values}, for one argument."""
    keys = all_keys(Recipe) | {"seed": int}
    if key in OURS:
        raise BadInput(f"{key} is set by the sweep; leave it out")
    if key not in keys:
        raise BadInput(f"unknown key {key}{nearest(key, list(keys))}")
    if keys[key] not in (*TEXT, *PATH_TYPES):
        _check_numbers(key, text)
    return {
        key: [
            reduce(dict.__getitem__, key.split("."), parse_overrides(Recipe, [f"{key}={part}"]))
            for part in _split(key, text)
        ]
    }


def _check_numbers(key: str, text: str) -> None:
    """Raise BadInput if a range of numbers is written in another way than 0..2."""
    for part in map(str.strip, text.split(",")):
        if dashed := DASHED.fullmatch(part):
            first, last = map(int, dashed.groups())
            some = ",".join(map(str, range(first, min(last, first + 2) + 1)))
            listed = f" or {key}={some}" if first < last <= first + 2 else ""
            raise BadInput(f"{key}={part} is not a number; write {key}={first}..{last}{listed}")
        if ".." in part and not RANGE.fullmatch(part):
            raise BadInput(
                f"{key}={part}: a range has whole numbers, such as 0..4; list other values"
            )


def _split(key: str, text: str) -> list[str]:
    """The values in a text such as 1e-4,5e-5 or 0..4. Commas within brackets and quotes do not
    separate values."""
    whole = toml_value(f"[{text}]")
    parts = [show(part) for part in whole] if isinstance(whole, list) else OUTSIDE.split(text)
    values: list[str] = []
    for part in map(str.strip, parts):
        if ends := RANGE.fullmatch(part):
            first, last = int(ends[2]), int(ends[3])
            if last < first or last - first >= MOST:
                raise BadInput(
                    f"{key}={part}: a range goes upwards, such as 0..4, and has at most {MOST:,} "
                    "numbers"
                )
            values += [f"{ends[1] or ''}{number}" for number in range(first, last + 1)]
        elif part:
            values.append(part)
        else:
            raise BadInput(f"{key}={text} has an empty value; write it like {key}=A,B")
    return values
