"""A study in one line: every combination of some values of a recipe's keys.

    python -m xformer.study sweep finetune/classify data=stores/cola init=runs/english \\
        optim.lr=1e-4,5e-5 seed=0..4
    python -m xformer.study sweep recipes/finetune/classify.toml data=stores/cola \\
        init=runs/english,runs/brackets train.epochs=3,5 seed=0..2 out=starts.toml --dry-run

The first argument is a recipe. Each of its keys can have several values: A,B,C or A..B, the whole
numbers from A to B. A list in brackets is one value: data='["stores/a", "stores/b"]' trains on two
stores. The command writes a study file, says how long the runs will take, runs them, and reports
which settings have the best mean score on validation. With --dry-run it stops before it runs them.
The same line again continues a stopped sweep. You can also edit the file, and run it with
python -m xformer.study FILE.

The keys below say how the runs are executed. All other keys are those of the recipe.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

from xformer.config import (
    all_keys,
    each,
    find_recipe,
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
from xformer.data.files import make_directory, write_text
from xformer.recipe import Recipe

RANGE = re.compile(r"(\d+)\.\.(\d+)")
PATHS = ("data", "init")  # keys whose values are paths; each path becomes a need of the study
OURS = ("run", "overwrite")  # keys that the study sets
MOST = 10_000  # the largest number of runs in a sweep
STAGE = "run"


@dataclass(frozen=True)
class Sweep:
    """What a study file is made from: its name, the command line that asks for it, the recipe, and
    the values of each key."""

    name: str
    line: str
    recipe: str
    values: dict[str, list[Any]]  # by key of the recipe

    def write(self, path: Path) -> bool:
        """Write the file, unless it exists already. Returns whether it was written. Raises BadInput
        if a file with other content has this name."""
        text = self.text(path.parent)
        if path.exists():
            try:
                same = tomllib.loads(path.read_text(encoding="utf-8")) == tomllib.loads(text)
            except (ValueError, OSError):
                same = False
            if not same:
                raise BadInput(
                    f"{path} exists and holds something else; give another file with out=, or run "
                    f"that one with {typed('python -m xformer.study')} {path}"
                )
            return False
        make_directory(path.parent, "out=" if path.parent != Path() else "")
        write_text(path, text)
        return True

    def text(self, folder: Path) -> str:
        """The text of the file. Paths in it are relative to `folder`, the folder of the file."""
        needs = _Needs()
        settings, vary = [], []
        for key, values in self.values.items():
            filled = [needs.filled(value) if key in PATHS else value for value in values]
            if len(values) == 1:
                settings.append(f"settings.{key} = {show(filled[0])}")
            elif filled == values:
                vary.append(f"vary.{quoted(key)} = {show(values)}")
            else:
                levels = needs.levels(values)
                vary += [
                    f"vary.{quoted(key)}.{quoted(level)} = {show({key: value})}"
                    for level, value in zip(levels, filled, strict=True)
                ]
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

    def filled(self, value: Any) -> Any:
        """A path, or a list of paths, as {need.NAME}."""
        if isinstance(value, list | tuple):
            return [self.filled(path) for path in value]
        if value not in self.names:
            plain = re.sub(r"[^\w-]", "-", Path(value).name) or "path"
            known = self.names.values()
            other = (f"{plain}-{number}" for number in range(2, len(known) + 3))
            self.names[value] = next(n for n in (plain, *other) if n not in known)
        return f"{{need.{self.names[value]}}}"

    def levels(self, values: Sequence[Any]) -> list[str]:
        """A name for each of some values, which are paths or lists of paths."""
        return ["+".join(self.names[path] for path in each(value)) for value in values]


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
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if equals:
            values |= _values(key, text)
    if not any(len(some) > 1 for some in values.values()):
        raise BadInput("nothing varies: give a key several values, such as seed=0..4")
    if (runs := prod(map(len, values.values()))) > MOST:
        raise BadInput(f"these values make {runs:,} runs, more than {MOST:,}; give fewer values")
    varied = [key.rpartition(".")[2] for key, some in values.items() if len(some) > 1]
    name = "-".join([Path(texts[0]).stem, *varied])
    line = shlex.join([*typed("python -m xformer.study").split(), "sweep", *arguments])
    return Sweep(name, line, texts[0], values)


def _values(key: str, text: str) -> dict[str, list[Any]]:
    """{key: its values}, for one argument."""
    keys = all_keys(Recipe) | {"seed": int}
    if key in OURS:
        raise BadInput(f"{key} is set by the sweep; leave it out")
    if key not in keys:
        raise BadInput(f"unknown key {key}{nearest(key, list(keys))}")
    parts = [
        reduce(dict.__getitem__, key.split("."), parse_overrides(Recipe, [f"{key}={part}"]))
        for part in _split(key, text)
    ]
    if twice := [part for part in parts if parts.count(part) > 1]:
        raise BadInput(f"{key}={text} names {show(twice[0])} twice; give each value once")
    return {key: parts}


def _split(key: str, text: str) -> list[str]:
    """The values in a text such as 1e-4,5e-5 or 0..4. Commas within brackets and quotes do not
    separate values."""
    whole = toml_value(f"[{text}]")
    parts = [show(part) for part in whole] if isinstance(whole, list) else text.split(",")
    values: list[str] = []
    for part in map(str.strip, parts):
        if ends := RANGE.fullmatch(part):
            first, last = int(ends[1]), int(ends[2])
            if last < first or last - first >= MOST:
                raise BadInput(
                    f"{key}={part}: a range goes upwards, such as 0..4, and has at most {MOST:,} "
                    "numbers"
                )
            values += map(str, range(first, last + 1))
        elif part:
            values.append(part)
        else:
            raise BadInput(f"{key}={text} has an empty value; write it like {key}=A,B")
    return values
