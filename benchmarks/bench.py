"""What all benchmarks share: how much is measured, rounds in turn, and a row of the table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from xformer.data.errors import Failure

ROOT = Path(__file__).resolve().parents[1]
Took = dict[str, float]  # what one contestant took in one round, by name
Contestants = Mapping[str, Callable[[], Took]]


@dataclass(frozen=True)
class Size:
    """How much is measured, and on what model."""

    model: dict[str, int]  # the shape, as keys of model.*
    rows: int = 32  # a batch of lines, or of a task's rows
    full_rows: int = 16  # a batch of rows that are full
    length: int = 128  # the longest row, and a full one
    warmup: int = 2  # steps that are not counted
    steps: int = 8  # those that are
    whole_rows: int = 4  # a batch of the whole run
    whole_steps: int = 500
    batches: int = 400  # built from the store
    batch_tokens: int = 50_000_000  # of the store that they are built from
    small: int = 5_000_000  # tokens of the small store whose start is timed: 10 MB
    large: int = 5_000_000_000  # and of the large one: 10 GB


MINILM = {"layers": 6, "hidden": 384, "heads": 12, "intermediate": 1536, "max_positions": 512}
BERT_BASE = {"layers": 12, "hidden": 768, "heads": 12, "intermediate": 3072, "max_positions": 512}
TINY = {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 64, "max_positions": 512}

FULL = Size(MINILM)
SHORT = Size(MINILM, warmup=1, steps=5, whole_steps=100, batches=100)  # a first look
# real runs of everything on data made up, in a minute: for tests and a first try
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
CUDA = Size(BERT_BASE, rows=256, full_rows=512, warmup=30, steps=120)


@dataclass(frozen=True)
class Bench:
    """One benchmarking: the raw data, where to work, how much, and how."""

    data: Path
    folder: Path
    size: Size
    rounds: int = 3
    precision: Literal["fp32", "bf16"] = "fp32"
    threads: int = field(default_factory=lambda: cores())
    ours: tuple[str, ...] = ()  # further key=value of our train.py
    cuda: bool = False  # whether the processes may see CUDA devices


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


# ---------------------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class Row:
    """A line of the table: what was measured in every round, ours and the others'.

    What counts is ours over theirs (of seconds theirs over ours), round by round; without `theirs`
    it is ours alone. `goal` says on which side of `target` it must lie; without a target the row is
    for information.
    """

    what: str
    unit: str
    ours: list[float]
    other: str = ""  # beside whom
    theirs: list[float] = field(default_factory=list)
    target: float | None = None
    goal: Literal["at least", "below"] = "at least"
    note: str = ""

    @property
    def values(self) -> list[float]:
        """What counts, by round."""
        if not self.theirs:
            return self.ours
        pairs = list(zip(self.ours, self.theirs, strict=True))
        return [b / a if self.unit == "s" else a / b for a, b in pairs]

    @property
    def share(self) -> float:
        """How much of its target a row has reached; 1 and above: reached."""
        if self.target is None:
            raise ValueError(f"{self.what} has no target")
        middle = median(self.values)
        return middle / self.target if self.goal == "at least" else self.target / middle

    @property
    def reached(self) -> bool:
        return self.share >= 1


def in_turn(rounds: int, contestants: Contestants) -> dict[str, list[Took]]:
    """What every contestant took in every round; they run by turns, so that a machine that grows
    faster or slower does so for all."""
    found: dict[str, list[Took]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, run in contestants.items():
            started = time.perf_counter()
            found[name].append(run())
            shown = "  ".join(f"{key} {value:,.4g}" for key, value in found[name][-1].items())
            seconds = time.perf_counter() - started
            say(f"  round {number + 1} of {rounds}  {name:<28} {shown}  ({seconds:.0f} s in all)")
    return found


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def rates(took: list[Took], key: str = "rate") -> list[float]:
    return [one[key] for one in took]


# ----------------------------------------------------------------------------- the processes


@dataclass(frozen=True)
class Ended:
    """A command that has succeeded: its output, its seconds from start to end, when it started
    (seconds since the epoch), and its peak of resident memory in GiB."""

    out: str
    seconds: float
    started: float
    memory: float


def command(bench: Bench, arguments: list[str]) -> Ended:
    """Run `python ARGUMENTS` from the project's root. If it fails, raises Failure with the end of
    its output."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(bench.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if not bench.cuda:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    wall, started = time.time(), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        end = "\n".join(out.splitlines()[-15:])
        raise Failure(f"python {' '.join(arguments)} failed: {end}")
    return Ended(out, time.perf_counter() - started, wall, usage.ru_maxrss / 2**20)


def module(bench: Bench, name: str, job: dict[str, Any]) -> tuple[Took, Ended]:
    """Run `python -m benchmarks.NAME JOB`, whose last line of output is what it took, as JSON."""
    ended = command(bench, ["-m", f"benchmarks.{name}", json.dumps(job)])
    found: Took = json.loads(ended.out.strip().splitlines()[-1])
    return found, ended


def fresh(folder: Path) -> Path:
    """An empty directory's path, whatever was there."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
