"""What all benchmarks share: sizes, alternating rounds, processes, and a row of the table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Literal

from xformer.data.errors import BadInput, Failure
from xformer.start import WAITING

PEERS = ("transformers", "accelerate", "datasets")
ROOT = Path(__file__).resolve().parents[1]
Took = dict[str, float]  # the measurements of one contestant in one round, by name
Contestants = Mapping[str, Callable[[], Took]]


@dataclass(frozen=True)
class Size:
    """How much is measured, and on what model."""

    model: dict[str, int]  # the shape, as keys of model.*
    rows: int = 32  # rows of a batch of lines or of a task
    full_rows: int = 16  # rows of a batch of full rows
    length: int = 128  # tokens of the longest row, and of a full one
    warmup: int = 2  # steps before the measured ones
    steps: int = 8  # measured steps
    whole_rows: int = 4  # rows of a batch of the whole run
    whole_steps: int = 500
    batches: int = 400  # batches that are built from the store
    batch_tokens: int = 50_000_000  # tokens of that store
    small: int = 5_000_000  # tokens of the small store whose start is timed: 10 MB
    large: int = 5_000_000_000  # tokens of the large store: 10 GB


MINILM = {"layers": 6, "hidden": 384, "heads": 12, "intermediate": 1536, "max_positions": 512}
TINY = {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 64, "max_positions": 512}

FULL = Size(MINILM)
# runs everything on made-up data in a minute: for tests and a first try
QUICK = Size(
    TINY,
    rows=8,
    full_rows=4,
    length=32,
    warmup=1,
    steps=2,
    whole_rows=4,
    whole_steps=4,
    batches=4,
    batch_tokens=20_000,
    small=10_000,
    large=100_000,
)


@dataclass(frozen=True)
class Bench:
    """The settings of a benchmark run: raw data, working directory, size, precision, threads."""

    data: Path
    folder: Path
    size: Size
    rounds: int = 3
    precision: Literal["fp32", "bf16"] = "fp32"
    threads: int = field(default_factory=lambda: cores())
    ours: tuple[str, ...] = ()  # further settings key=value of every contender of speedrun


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


# ---------------------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class Row:
    """A line of the table: the measurements of every round, ours and the other contestant's.

    The value of a round is our measurement divided by theirs, and for seconds theirs divided by
    ours. Without another contestant it is our measurement. `goal` says on which side of `target`
    the median must lie. A row without a target is for information.
    """

    what: str
    unit: str
    ours: list[float]
    other: str = ""  # the other contestant
    theirs: list[float] = field(default_factory=list)
    target: float | None = None
    goal: Literal["at least", "below"] = "at least"
    note: str = ""

    @property
    def values(self) -> list[float]:
        """The value of every round."""
        if not self.theirs:
            return self.ours
        pairs = list(zip(self.ours, self.theirs, strict=True))
        return [b / a if self.unit == "s" else a / b for a, b in pairs]

    @property
    def share(self) -> float:
        """The share of its target that the row reaches. 1 or more means that it is reached."""
        if self.target is None:
            raise ValueError(f"{self.what} has no target")
        middle = median(self.values)
        return middle / self.target if self.goal == "at least" else self.target / middle

    @property
    def reached(self) -> bool:
        return self.share >= 1


def in_turn(rounds: int, contestants: Contestants) -> dict[str, list[Took]]:
    """The measurements of every contestant in every round. The contestants alternate, so that a
    change in the machine's speed affects all of them."""
    took: dict[str, list[Took]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, run in contestants.items():
            started = time.perf_counter()
            took[name].append(run())
            shown = "  ".join(f"{key} {value:,.4g}" for key, value in took[name][-1].items())
            seconds = time.perf_counter() - started
            say(f"  round {number + 1} of {rounds}  {name:<28} {shown}  ({seconds:.0f} s in all)")
    return took


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def rates(took: list[Took], key: str = "rate") -> list[float]:
    return [one[key] for one in took]


# ----------------------------------------------------------------------------- the processes


@dataclass(frozen=True)
class Ended:
    """A command that has succeeded: its output, its duration in seconds, and its start in seconds
    since the epoch."""

    out: str
    seconds: float
    started: float


def environment(threads: int) -> dict[str, str]:
    """The environment of a contestant: this many threads, no GPU, and OpenMP's own way to wait.

    `xformer.start.run` has changed this process's way to wait. Our commands do that themselves, and
    others must not inherit it.
    """
    kept = {name: value for name, value in os.environ.items() if name not in WAITING}
    return {**kept, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}


def command(arguments: list[str], threads: int) -> Ended:
    """Run `python ARGUMENTS` in the project's root with this many threads. Raises Failure with its
    last lines if it fails."""
    offline = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    wall, started = time.time(), time.perf_counter()
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**environment(threads), **offline},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if process.returncode:
        end = "\n".join(process.stdout.splitlines()[-15:])
        raise Failure(f"python {' '.join(arguments)} failed: {end}")
    return Ended(process.stdout, time.perf_counter() - started, wall)


def module(bench: Bench, name: str, job: dict[str, Any]) -> tuple[Took, Ended]:
    """Run `python -m benchmarks.NAME JOB`, whose last line of output holds its measurements as
    JSON."""
    ended = command(["-m", f"benchmarks.{name}", json.dumps(job)], bench.threads)
    took: Took = json.loads(ended.out.strip().splitlines()[-1])
    return took, ended


def require(*packages: str) -> None:
    """Raise BadInput if a package of the other side is not installed."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise BadInput(f"{', '.join(missing)} not installed: pip install -e '.[bench]'")


def require_data(data: Path, *names: str) -> None:
    """Raise BadInput if a file or directory of the raw data is missing."""
    for name in names:
        if not (data / name).exists():
            raise BadInput(f"{data / name} does not exist; --data needs {', '.join(names)}")


def directory(text: str) -> Path:
    """An argument type: a directory that exists."""
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"{text} is not a directory; create it first")
    return Path(text)


def new_file(text: str) -> Path:
    """An argument type: a file that can be written, in a directory that exists."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a directory; give a file")
    directory(str(path.parent))
    return path


def fresh(folder: Path) -> Path:
    """Delete a directory if it exists, and return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
