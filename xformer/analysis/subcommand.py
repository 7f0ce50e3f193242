"""Shared by all sub-commands of `python -m xformer.analysis`: arguments, progress, results."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field

from xformer.config import Settings, help_text, parse_overrides, validate
from xformer.data import style
from xformer.data.display import Progress, say
from xformer.data.errors import BadInput, Failure
from xformer.data.files import make_directory, write_json
from xformer.data.outputs import refuse_owned

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _split_at_commas(names: Any) -> Any:
    return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names


NameList = Annotated[tuple[str, ...], BeforeValidator(_split_at_commas)]


class Output(Settings):
    """Where the result is written."""

    out: str
    """Directory for the JSON file and the figures. It is created if necessary. The files are named
    after the analysis, such as pwcca.json."""
    run: str | None = None
    """A run directory. Its TensorBoard then also shows the figure and the main numbers."""
    overwrite: bool = False
    """Replace an earlier result of the same analysis in `out`."""
    threads: int = Field(0, ge=0, le=1024)
    """Number of CPU threads. 0: $OMP_NUM_THREADS if it is set, otherwise all cores."""


Item = TypeVar("Item")


@dataclass(frozen=True)
class Subcommand:
    """The name, settings and help text of one analysis, and the paths that it takes."""

    name: str
    schema: type[Output]
    text: str
    least: int = 1  # number of paths
    most: int | None = 1  # None: any number
    path_kind: str = "checkpoint"  # what a path is called in messages
    directory: bool = True  # whether `out` is a directory for a JSON file and figures


def parse_arguments(command: Subcommand, arguments: list[str]) -> tuple[list[str], Any]:
    """Parse a command line as `parse` does. Raises BadInput also if the result cannot be written.
    If `--help` is among the arguments, prints the help and exits."""
    if any(argument in ("-h", "--help") for argument in arguments):
        say(*help_text(command.schema, command.text).split("\n"))
        sys.exit(0)
    paths, config = parse(command, arguments)
    if command.directory:
        check_writable(config, command.name)
    return paths, config


def parse(command: Subcommand, arguments: Sequence[str]) -> tuple[list[str], Any]:
    """The paths, which come first, and the settings of a command line, an instance of
    `command.schema`. Raises BadInput if an argument is wrong."""
    keys = (i for i, text in enumerate(arguments) if "=" in text or text.startswith("-"))
    first_key = next(keys, len(arguments))
    paths = [*arguments[:first_key]]
    values = parse_overrides(command.schema, [*arguments[first_key:]])
    if len(paths) < command.least or (command.most is not None and len(paths) > command.most):
        several = command.most != 1
        wanted = str(command.least) if command.least == command.most else f"{command.least} or more"
        raise BadInput(
            f"{command.name} takes {wanted} {command.path_kind}{'s' if several else ''} first, "
            f"then key=value; given: {' '.join(paths) or 'none'}"
        )
    places = [os.path.abspath(path) for path in paths]
    for path, place in zip(paths, places, strict=True):
        if command.most is None and places.count(place) > 1:
            raise BadInput(f"the {command.path_kind} {path} is given twice; give each one once")
    return paths, validate(command.schema, values)


def check_writable(config: Output, name: str) -> None:
    """Raise BadInput if the result of the analysis `name` could not be written.

    This is checked before the analysis, which may take hours.
    """
    out = Path(config.out)
    check_place(out)
    if (out / f"{name}.json").exists() and not config.overwrite:
        raise BadInput(
            f"{out / name}.json exists; give another out=, or overwrite=true to replace it"
        )
    if config.run is not None and not (Path(config.run) / "log.jsonl").is_file():
        raise BadInput(
            f"run={config.run} is not a run directory (it has no log.jsonl); give the directory of "
            "a training run"
        )


def check_place(out: Path) -> None:
    """Raise BadInput if `out` cannot be created because one of its parents is a file, or if it
    belongs to a run, a store or a checkpoint."""
    refuse_owned(out)
    parent = out.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise BadInput(f"out={out} cannot be written: {parent} is a file; give another out=")


def with_progress(
    items: Iterable[Item], total: float, unit: str, size: Callable[[Item], float] = lambda _: 1
) -> Iterator[Item]:
    """The items, with a progress bar. The sizes of all items add up to `total`."""
    with Progress("analyzing", total, unit, stay=True) as bar:
        for item in items:
            yield item
            bar.advance(size(item))


def origin() -> dict[str, Any]:
    """The command line and the software versions that produced a result."""
    from xformer.provenance import versions

    command = ["python", "-m", "xformer.analysis", *sys.argv[1:]]
    return {"command": shlex.join(command), **versions()}


def publish(
    config: Output,
    result: dict[str, Any],
    draw: Callable[[dict[str, Any]], Figure],
    line: str,
    metrics: dict[str, dict[str, float]],
) -> None:
    """Write a result as JSON, draw it, and print its one-line summary, `line`.

    The files are named after `result["analysis"]`. `metrics` {group: {name: number}} are the main
    numbers, which a study's tables and TensorBoard show. Raises Failure if one is not finite.
    """
    name, out = result["analysis"], Path(config.out)
    for group, numbers in metrics.items():
        for key, value in numbers.items():
            if not math.isfinite(value):
                raise Failure(f"{name}: {group}.{key} is {value}: no result is written")
    make_directory(out, "out=")
    result = {**result, "metrics": metrics, "made": origin()}
    write_json(out / f"{name}.json", result)  # first: it can be drawn again
    figures = style.write_light_and_dark(partial(draw, result), out, name)
    if config.run is not None:
        _to_tensorboard(Path(config.run), name, out / f"{name}.png", line, metrics)
    say(line)
    say(f"{out / name}.json, {', '.join(path.name for path in figures)}", error=True)


def _to_tensorboard(
    run: Path, name: str, image: Path, line: str, metrics: dict[str, dict[str, float]]
) -> None:
    """Show a result in a run's TensorBoard, behind the curves: its figure, and its main numbers as
    a text, because a curve of one point shows nothing.

    The result has its own directory, because a resumed run rewrites the directory of its curves.
    """
    from matplotlib.image import imread
    from torch.utils.tensorboard import SummaryWriter

    directory = run / "analysis" / name
    shutil.rmtree(directory, ignore_errors=True)
    with SummaryWriter(str(directory)) as board:
        board.add_image(f"view/{name}", imread(image)[..., :3], 0, dataformats="HWC")
        rows = [
            f"| {group} | {key} | {value:.6g} |"
            for group, numbers in metrics.items()
            for key, value in numbers.items()
        ]
        table = ["| group | name | value |", "|---|---|---|", *rows]
        board.add_text(name, "\n".join([line, "", *table]), 0)
