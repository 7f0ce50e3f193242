"""List and compare the runs below a directory, or print the rows of a training step.

    python -m xformer.runs runs
    python -m xformer.runs runs/study csv=runs.csv    # every column, unabridged
    python -m xformer.runs rows runs/english step=1234
    python -m xformer.runs rows runs/english step=1234 > rows.tsv

The table has a line for each run: its state, its step, the settings in which the runs differ, the
scores of each split, and the speed in tokens per second. If the terminal is too narrow, the least
important columns are left out, and a line names them. In a pipe or a file nothing is left out or
shortened. The scores of a finished run are those of its selected checkpoint. Other runs show the
scores of their last validation.

The state is running (a process on this machine works on the run), finished, stopped (by a
signal), failed, or "killed?". The last means that no process on this machine works on
the run, and that its log does not say how it ended: it was killed, or it runs on another machine.

`rows` prints the rows that the run read in a step; `rows --help` says more.
"""

from __future__ import annotations

if __name__ == "__main__":  # `python -m xformer.runs`: before torch is imported
    from xformer.start import as_command

    as_command("runs")

import csv
import difflib
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xformer import checkpoint as checkpoints
from xformer.config import (
    Settings,
    flat,
    help_text,
    parse_overrides,
    show,
    validate,
)
from xformer.data.display import UNLIMITED, columns, one_line, say
from xformer.data.errors import BadInput
from xformer.data.files import read_run_json, write_text
from xformer.data.outputs import check_writable
from xformer.model.config import DROPOUT, ModelConfig
from xformer.monitor import SILENT, records
from xformer.recipe import Recipe
from xformer.rows import RowsConfig, print_rows
from xformer.run import MAY_CHANGE, in_use, is_finished
from xformer.tasks.known import TASKS
from xformer.tasks.task import Head

ROWS = """Print the rows that a run read in a training step.

    python -m xformer.runs rows runs/english step=1234
    python -m xformer.runs rows runs/english step=1234 > rows.tsv

There is a line for each row: its rank, micro-batch and number in the store, what the model read,
and the masked tokens or the labels, as POSITION:TOKEN. The rows are computed again from the recipe,
so the run's store and its initial checkpoint must still be there.
"""
CELL = 32  # widest cell of a table on a terminal, in characters
FIRST = 3  # this many of the settings in which runs differ come before the scores


class ListConfig(Settings):
    """How to list runs."""

    csv: str | None = None
    """Write the table to this file as comma-separated values, with all columns and digits."""


def main() -> None:
    """`python -m xformer.runs DIR key=value ...`, or `rows RUN step=N`"""
    rows = sys.argv[1:2] == ["rows"]
    arguments = sys.argv[2:] if rows else sys.argv[1:]
    schema = RowsConfig if rows else ListConfig
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        say(*help_text(schema, ROWS if rows else None).split("\n"))
        return
    if "=" in arguments[0]:
        raise BadInput(f"the first argument must be a directory of runs, not {arguments[0]!r}")
    if not rows:
        _refuse_more(arguments)
    if rows and (numbers := [argument for argument in arguments[1:] if argument.isdecimal()]):
        raise BadInput(f"{numbers[0]!r} is not of the form key=value; write step={numbers[0]}")
    config = validate(schema, parse_overrides(schema, arguments[1:]))
    if isinstance(config, RowsConfig):
        print_rows(Path(arguments[0]), config)
    elif isinstance(config, ListConfig):
        print_runs(Path(arguments[0]), config.csv)


def _refuse_more(arguments: list[str]) -> None:
    """Raise BadInput if the first word is a misspelt `rows`, or if a second directory is given."""
    first, *others = arguments
    more = [argument for argument in others if "=" not in argument and not argument.startswith("-")]
    if not Path(first).exists() and difflib.get_close_matches(first, ["rows"]):
        raise BadInput(f"{first} is not a directory of runs; did you mean rows?")
    if more:
        raise BadInput(
            f"{more[0]} is a second directory; give one directory, and every run below it is listed"
        )


# ------------------------------------------------------------------------------------- the list


@dataclass(frozen=True)
class RunSummary:
    """What the table shows of a run. The keys of `settings` and `scores` are columns, and `main`
    has the columns of the metric that selects the checkpoint. `steps` is 0 if the recipe counts
    epochs, and `share` is the share of the run that is done. `job` is the name of the run in a
    study, and `why` says why it failed."""

    run: str
    job: str
    state: str
    why: str
    step: int
    steps: int
    share: float
    settings: dict[str, str]
    scores: dict[str, float]
    main: set[str]
    speed: float | None

    def cells(self) -> dict[str, str]:
        """The cells of the table, by column."""
        of = f"{self.step:,} of {self.steps:,}"
        step = of if self.steps else f"{self.step:,} ({self.share:.0%})"
        scores = {k: f"{v:.4f}" if abs(v) < 100 else f"{v:,.1f}" for k, v in self.scores.items()}
        speed = "" if self.speed is None else f"{self.speed:,.0f}"
        first = {"run": self.run, "job": self.job, "state": self.state, "step": step}
        return {**first, **self.settings, **scores, "tokens/s": speed}

    def values(self) -> dict[str, Any]:
        """The cells of the csv file, by column."""
        first = {name: getattr(self, name) for name in ("run", "job", "state", "why", "step")}
        progress = {"steps": self.steps or None, "share": self.share}
        return {**first, **progress, **self.settings, **self.scores, "tokens/s": self.speed}


def print_runs(directory: str | Path, file: str | None) -> None:
    """Print the runs below a directory as a table, and write it to a csv file if one is given. If
    the config.json of a directory is damaged or not from a run, or if a directory cannot be read, a
    line below the table says so."""
    directory = Path(directory)
    if not directory.is_dir():
        raise BadInput(f"{directory} is not a directory; give one that has runs below it")
    if file is not None and Path(file).suffix != ".csv":
        raise BadInput(f"csv={file}: give a name that ends in .csv")
    if file is not None:
        check_writable(Path(file))
    runs, skipped = [], list[str]()
    for path in run_directories(directory, skipped):
        try:
            runs.append(summary(path, str(path.relative_to(directory))))
        except BadInput as error:
            skipped.append(f"skipped {path}: {error}")
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            skipped.append(f"skipped {path}: it cannot be read ({error!r})")
    if not runs and not skipped:
        raise BadInput(f"there are no runs below {directory}")
    runs = differing(sorted(runs, key=lambda run: _natural(run.job or run.run)))
    if runs:
        say(*table(runs, columns()))
    say(*(one_line(f"{run.run} failed: {run.why}") for run in runs if run.why))
    say(*map(one_line, skipped), error=True)
    if file is not None:
        text = io.StringIO()
        names = dict.fromkeys(name for run in runs for name in run.values())
        writer = csv.DictWriter(text, list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows(run.values() for run in runs)
        write_text(Path(file), text.getvalue())


def run_directories(directory: Path, skipped: list[str]) -> Iterator[Path]:
    """The directories that have a config.json. Hidden directories, and those inside one that has a
    config.json, are left out. A line about each that cannot be read is added to `skipped`."""

    def skip(error: OSError) -> None:
        skipped.append(f"skipped {error.filename}: {os.strerror(error.errno or 0)}")

    for folder, names, files in os.walk(directory, onerror=skip):
        names[:] = [] if "config.json" in files else sorted(n for n in names if n[0] != ".")
        if "config.json" in files:
            yield Path(folder)


def _natural(name: str) -> list[Any]:
    """A key that sorts names by the numbers in them: step_9 before step_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def summary(path: str | Path, name: str) -> RunSummary:
    """What the table shows of the run in a directory. Raises BadInput if it is not a run."""
    path = Path(path)
    content = read_run_json(path / "config.json")
    if not isinstance(content, dict) or "identity" not in content:
        raise BadInput("its config.json is not that of a run")
    content["config"].get("system", {}).pop("shard", None)  # some kept results have it
    recipe = validate(Recipe, content["config"])
    log = records(path) if (path / "log.jsonl").exists() else []
    newest: dict[str, dict[str, Any]] = {record["event"]: record for record in log}
    result = read_run_json(path / "result.json") if is_finished(path) else {}
    last = log[-1]["event"] if log else ""
    state = "finished" if result else last if last in ("stopped", "failed") else "killed?"
    state = "running" if in_use(path) else state
    if result:
        scores = {
            f"{s} {m}": v for s, metrics in result["metrics"].items() for m, v in metrics.items()
        }
    else:
        validated = newest.get("validation", {}).items()
        scores = {f"valid {m}": v for m, v in validated if m not in SILENT}
    metric = content.get("metric") or recipe.train.metric  # early versions did not record it
    metric = metric or TASKS[recipe.head](Head(recipe.head)).default_metric(None)
    train, steps = newest.get("train", {}), recipe.train.steps
    kept = checkpoints.by_step(path / "checkpoints")
    step = max([0, *kept, *(record["step"] for record in log[-1:])])
    job = path.with_suffix(".toml")  # a study writes its recipes beside its runs
    return RunSummary(
        path.resolve().name if name == "." else name,
        job.read_text(encoding="utf-8").partition("\n")[0].strip("# ") if job.is_file() else "",
        state,
        log[-1].get("why", "") if state == "failed" else "",
        step,
        steps,
        min(1.0, step / steps if steps else train.get("epoch", 0.0) / recipe.train.epochs),
        _settings(recipe),
        dict(sorted(scores.items(), key=lambda pair: pair[0].split()[1] != metric)),
        {column for column in scores if column.split()[1] == metric},
        result.get("real_tokens_per_second") or train.get("real_tokens_per_second"),
    )


def _settings(recipe: Recipe) -> dict[str, str]:
    """The settings of a run by dotted key. Those of the model are left out if they come from the
    checkpoint of `init`."""
    values = flat(recipe.model_dump(mode="json", exclude={"run", "overwrite"}))
    if recipe.init is not None:
        own = ModelConfig().model_dump(mode="json")
        shape = {f"model.{name}" for name in own if name not in DROPOUT}
        unset = {f"model.{name}" for name in own if values[f"model.{name}"] == own[name]}
        values = {k: v for k, v in values.items() if k not in shape and k not in unset}
    return {
        "seed" if name == "seed.all" else name: value if isinstance(value, str) else show(value)
        for name, value in ((n, "" if v is None else v) for n, v in values.items())
    }


def differing(runs: list[RunSummary]) -> list[RunSummary]:
    """The runs, each with only the settings in which the runs differ. A run that starts from a
    checkpoint may lack a setting, because the checkpoint decides it. A missing setting therefore
    counts as a difference only among such runs."""

    def differs(name: str) -> bool:
        values = {run.settings[name] for run in runs if name in run.settings}
        continued = {run.settings.get(name) for run in runs if run.settings["init"]}
        return len(values) > 1 or len(continued) > 1

    kept = [n for n in dict.fromkeys(n for run in runs for n in run.settings) if differs(n)]
    return [replace(r, settings={n: r.settings.get(n, "") for n in kept}) for r in runs]


def table(runs: list[RunSummary], width: int) -> list[str]:
    """The lines of the table, at most `width` characters wide. Further lines name the columns that
    do not fit. One score comes first. Then settings come before scores, because they say which run
    is which. But runs of different kinds differ in many settings, so scores come before all but the
    FIRST."""
    cells = [run.cells() for run in runs]
    settings = list(dict.fromkeys(name for run in runs for name in run.settings))
    free = [name for name in settings if name in MAY_CHANGE or name.startswith("system.")]
    first = [name for name in settings if name not in free][:FIRST]
    main = {name for run in runs for name in run.main}
    scores = sorted(dict.fromkeys(n for r in runs for n in r.scores), key=lambda n: n not in main)
    order = ["run", "state", *scores[:1], "step", *first, *(n for n in scores if n in main)]
    order += ["job", *(n for n in settings if n not in free), "tokens/s", *scores, *free]
    blocks: dict[str, list[str]] = {}  # a column as lines of equal width, its name on the first two
    for name in ("run", "job", "state", "step", *settings, *scores, "tokens/s"):
        column = [row.get(name, "") for row in cells]
        column = column if width == UNLIMITED else _shortened(column)
        if any(column):
            above, below = re.fullmatch(r"(.*[ .])?(.*)", name).groups("")  # type: ignore[union-attr]
            lines = [above.strip(), below, *column]
            right = name in scores or name in ("step", "tokens/s")
            size = max(map(len, lines))
            blocks[name] = [line.rjust(size) if right else line.ljust(size) for line in lines]
    chosen, left = set(), width
    for name in sorted(blocks, key=order.index):
        if len(blocks[name][0]) <= left:
            chosen.add(name)
            left -= len(blocks[name][0]) + 2
    shown = [block for name, block in blocks.items() if name in chosen]
    lines = ["  ".join(parts).rstrip() for parts in zip(*shown, strict=True)]
    missing = [name for name in blocks if name not in chosen]
    note = f"columns that do not fit: {', '.join(missing)} (csv=FILE writes all)"
    return lines[not lines[0] :] + textwrap.wrap(note, width) * bool(missing)


def _shortened(texts: list[str]) -> list[str]:
    """The cells of a column, shortened. Paths lose the folders that all of them begin with."""
    folders = [os.path.dirname(text) for text in texts if "/" in text]
    mixed = len({folder.startswith("/") for folder in folders}) != 1
    common = "" if mixed else os.path.commonpath(folders)
    short = [text.removeprefix(f"{common}/") if common else text for text in texts]
    long = len("...") - CELL
    return [
        text if len(text) <= CELL else f"...{text[long:]}" if "/" in text else f"{text[:-long]}..."
        for text in short
    ]
