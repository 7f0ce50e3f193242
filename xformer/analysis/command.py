"""What the sub-commands share: their arguments, and how a result is published."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
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

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _split(names: Any) -> Any:
    return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]


class Output(Settings):
    """Where a result goes."""

    out: str
    """Directory for the result as JSON and the figures drawn from it, named after the
    sub-command."""
    run: str | None = None
    """A run directory whose TensorBoard is to show the result too."""
    overwrite: bool = False
    """Replace an earlier result of the same name in `out`."""
    threads: int = Field(0, ge=0, le=1024)
    """CPU threads; 0: OMP_NUM_THREADS, else every core."""


Item = TypeVar("Item")


@dataclass(frozen=True)
class Command:
    """One sub-command: its settings, how many paths come first (`most` None: any number), and what
    they are called in messages."""

    name: str
    schema: type[Output]
    text: str
    least: int = 1
    most: int | None = 1
    what: str = "checkpoint"
    directory: bool = True  # `out` is a directory for a result and its figures


def parse(command: Command, arguments: list[str]) -> tuple[list[str], Any]:
    """The leading paths and the settings. Raises BadInput; a bare `--help` prints and exits."""
    if any(argument in ("-h", "--help") for argument in arguments):
        say(*help_text(command.schema, command.text).split("\n"))
        sys.exit(0)
    keys = next((i for i, argument in enumerate(arguments) if "=" in argument), len(arguments))
    paths = arguments[:keys]
    if len(paths) < command.least or (command.most is not None and len(paths) > command.most):
        several = command.most != 1
        wanted = str(command.least) if command.least == command.most else f"{command.least} or more"
        raise BadInput(
            f"{command.name} takes {wanted} {command.what}{'s' if several else ''} first, then "
            f"key=value; given: {' '.join(paths) or 'none'}"
        )
    if command.most is None and (twice := [path for path in paths if paths.count(path) > 1]):
        raise BadInput(f"the {command.what} {twice[0]} is given twice")
    config = validate(command.schema, parse_overrides(command.schema, arguments[keys:]))
    if command.directory:
        check_output(config, command.name)
    return paths, config


def check_output(config: Output, name: str) -> None:
    """Raise BadInput, before any work, where a result could not be written."""
    out = Path(config.out)
    parent = out.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise BadInput(f"out={out} cannot be written: {parent} is a file")
    if (out / f"{name}.json").exists() and not config.overwrite:
        raise BadInput(
            f"{out / name}.json exists; give another out=, or overwrite=true to replace it"
        )
    if config.run is not None and not (Path(config.run) / "log.jsonl").is_file():
        raise BadInput(f"run={config.run} is no run directory (it has no log.jsonl)")


def progress(
    items: Iterable[Item], total: float, unit: str, size: Callable[[Item], float] = lambda _: 1
) -> Iterator[Item]:
    """The items, while a Progress is shown; `size` of each adds up to `total`."""
    with Progress("analyzing", total, unit, stay=True) as shown:
        for item in items:
            yield item
            shown.advance(size(item))


def made() -> dict[str, Any]:
    """How a result came about: the command and the versions."""
    from xformer.provenance import versions

    command = ["python", "-m", "xformer.analysis", *sys.argv[1:]]
    return {"command": shlex.join(command), **versions()}


def publish(
    config: Output,
    found: dict[str, Any],
    draw: Callable[[dict[str, Any]], Figure],
    line: str,
    metrics: dict[str, dict[str, float]],
) -> None:
    """Write `found` as JSON and draw it from there, into TensorBoard too where a run is given;
    print the one line that sums it up. `found["analysis"]` names the files. `metrics` {of what:
    {name: number}} are the few numbers that a table of a study or TensorBoard shows. Raises Failure
    where one of them is not finite."""
    name, out = found["analysis"], Path(config.out)
    for of_what, numbers in metrics.items():
        for key, value in numbers.items():
            if not math.isfinite(value):
                raise Failure(f"{name}: {of_what}.{key} is {value}: no result is written")
    make_directory(out, "out=")
    found = {**found, "metrics": metrics, "made": made()}
    pictures = style.write_light_and_dark(partial(draw, found), out, name)
    write_json(out / f"{name}.json", found)
    if config.run is not None:
        _to_tensorboard(Path(config.run), name, out / f"{name}.png", line, metrics)
    say(line)
    files = ", ".join(picture.name for picture in pictures)
    say(f"{out / name}.json, {files}", error=True)


def _to_tensorboard(
    run: Path, name: str, picture: Path, line: str, metrics: dict[str, dict[str, float]]
) -> None:
    """A page beside the run's own curves, which are drawn anew whenever it goes on."""
    from matplotlib.image import imread
    from torch.utils.tensorboard import SummaryWriter

    directory = run / "analysis" / name
    shutil.rmtree(directory, ignore_errors=True)
    with SummaryWriter(str(directory)) as board:
        board.add_image(name, imread(picture)[..., :3], 0, dataformats="HWC")
        board.add_text(name, line, 0)
        for of_what, numbers in metrics.items():
            for key, value in numbers.items():
                board.add_scalar(f"{name}/{of_what}/{key}", value, 0)
