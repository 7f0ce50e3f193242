"""The trajectory of a run: its weights at the steps that `train.keep_at` asks for.

    "log"       step 0 and the powers of two below a twentieth of the run, then every twentieth
    "log:500"   step 0 and the powers of two below 500, then every 500 steps
    [0, 100, "2000 steps", "5M tokens", "10K words"]   a bare number counts steps
    "1M words"                                         a single entry, without a list

Every form is converted to step numbers before the run starts. The rows of a step depend only on the
seed and the step, so tokens and words can be counted without training, and a run that is stopped
and continued keeps the same steps.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from xformer import checkpoint as checkpoints
from xformer.data.display import many, one_line
from xformer.data.errors import BadInput, typed
from xformer.data.sampler import Stream

FORMS = '"log", "log:500", or a list such as [0, 100, "2000 steps", "5M tokens", "1M words"]'
PARTS = 20  # "log" divides a run into this many parts
SUFFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}
LOG = re.compile(r"log(?::([1-9]\d{0,17}))?")
MILESTONE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?([kKMB]?) ?(step|token|word)s?")
SAMPLE = 100  # an error message estimates the tokens of a run from this many steps


@dataclass(frozen=True)
class Milestone:
    """The first step at which a run has made `amount` steps, or has seen that many tokens or words.
    `text` is what the user wrote."""

    amount: int
    unit: str  # "step", "token" or "word"
    text: str


@dataclass(frozen=True)
class LogSpaced:
    """Powers of two below `every`, then multiples of `every`; None: a twentieth of the run."""

    every: int | None


def parse(value: Any) -> LogSpaced | tuple[Milestone, ...]:
    """Parse a value of `train.keep_at`. Raises ValueError with one line if it is invalid."""
    if isinstance(value, str) and (match := LOG.fullmatch(value)):
        return LogSpaced(int(match[1]) if match[1] else None)
    several = value if isinstance(value, list | tuple) else (value,)
    return tuple(_milestone(each) for each in several)


def _milestone(value: Any) -> Milestone:
    if type(value) is int and 0 <= value < 2**62:
        return Milestone(value, "step", str(value))
    if isinstance(value, str) and LOG.fullmatch(value):
        raise ValueError(f"train.keep_at: give {value!r} by itself, not in a list")
    match = MILESTONE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"train.keep_at={one_line(repr(value), 80)}: give {FORMS}")
    number, suffix, unit = match.groups()
    amount = Decimal(number) * SUFFIXES[suffix]
    if amount != int(amount):
        raise ValueError(f"train.keep_at={value!r}: give a whole number of {unit}s")
    return Milestone(int(amount), unit, value)


# ------------------------------------------------------------------------- counting in advance


class Position(NamedTuple):
    """What a run has seen after a step: tokens, special ones included, and words of the raw
    text."""

    step: int
    tokens: int
    words: int


@dataclass(frozen=True)
class Timeline:
    """The rows of each step of a run, known before it starts. The run has `steps` steps; 0 means as
    many as the stream has.

    `extra` is the number of special tokens per row. `tokens` and `words` count the whole training
    split, without special tokens; `words` is None if the store has no word count. `store` names the
    store in messages.
    """

    stream: Stream
    steps: int
    extra: int
    tokens: int
    words: int | None
    store: str

    def length(self) -> int:
        """The number of steps of the run."""
        if self.steps:
            return self.steps
        if not self.stream.tokens:
            return -(-self.stream.end // self.stream.per_step)
        return sum(1 for _ in self.walk()) - 1

    def walk(self) -> Iterator[Position]:
        """What the run has seen at step 0, 1, 2, ... to its end. Takes 0.2 s per million rows.

        Only the tokens that are left in a truncated row are counted. Words are counted in
        proportion to the tokens.
        """
        step = rows = tokens = 0
        while True:
            words = (tokens - self.extra * rows) * (self.words or 0) // max(self.tokens, 1)
            yield Position(step, tokens, words)
            ended = step == self.steps if self.steps else rows >= self.stream.end
            if ended:
                return
            *_, sizes = self.stream.take(rows)
            step, rows, tokens = step + 1, rows + len(sizes), tokens + int(sizes.sum())

    def end(self, steps: int) -> str:
        """A clause for messages: where a run of this many steps ends. Its tokens are estimated from
        the first steps."""
        *_, seen = islice(self.walk(), min(steps, SAMPLE) + 1)
        tokens = steps * seen.tokens // max(seen.step, 1)
        return f"the run ends at step {steps:,}, about {_short(tokens)} tokens"


def steps_of(keep_at: str | Sequence[int | str], timeline: Timeline) -> frozenset[int]:
    """The steps at which a run keeps its weights.

    Raises BadInput if a milestone lies beyond the run's end, or asks for words although the store
    has no word count.
    """
    wanted = parse(keep_at)
    if isinstance(wanted, LogSpaced):
        length = timeline.length()
        if wanted.every is not None and wanted.every > length:
            raise BadInput(f"train.keep_at=log:{wanted.every}: {timeline.end(length)}")
        return _log(wanted.every, length)
    for milestone in wanted:
        if milestone.unit == "word" and timeline.words is None:
            raise BadInput(
                f"train.keep_at={milestone.text}: {timeline.store} has no word count; "
                f"make it again with {typed('preprocess.py text')}, or give tokens"
            )
    if any(milestone.unit != "step" for milestone in wanted):
        return _walked(wanted, timeline)
    length = timeline.length()
    for milestone in wanted:
        if milestone.amount > length:
            raise BadInput(f"train.keep_at={milestone.text}: {timeline.end(length)}")
    return frozenset(milestone.amount for milestone in wanted)


def steps_without_data(keep_at: str | Sequence[int | str], steps: int) -> frozenset[int] | None:
    """The steps at which a run of `steps` steps keeps its weights; None if that depends on its
    data, because tokens or words are counted, or because the run has epochs (`steps` is 0)."""
    wanted = parse(keep_at)
    if isinstance(wanted, LogSpaced):
        return _log(wanted.every, steps) if steps else None
    if any(milestone.unit != "step" for milestone in wanted):
        return None
    return frozenset(milestone.amount for milestone in wanted)


def _log(every: int | None, length: int) -> frozenset[int]:
    gap = Fraction(length, PARTS) if every is None else Fraction(every)
    powers = [2**i for i in range(length.bit_length()) if 2**i < gap]
    return frozenset([0, *powers, *(ceil(i * gap) for i in range(1, int(length / gap) + 1))])


def _walked(milestones: Sequence[Milestone], timeline: Timeline) -> frozenset[int]:
    """The steps of any milestones, determined by walking through the run."""
    left: dict[str, list[Milestone]] = {"step": [], "token": [], "word": []}
    for milestone in sorted(milestones, key=lambda milestone: -milestone.amount):
        left[milestone.unit].append(milestone)
    steps, position = set(), Position(0, 0, 0)
    for position in timeline.walk():
        for waiting, reached in zip(left.values(), position, strict=True):
            while waiting and waiting[-1].amount <= reached:
                steps.add(position.step)
                waiting.pop()
        if not any(left.values()):
            return frozenset(steps)
    first = next(waiting[-1] for waiting in left.values() if waiting)
    end = f"the run ends at step {position.step:,}, after {_short(position.tokens)} tokens"
    words = f" and {_short(position.words)} words" if timeline.words is not None else ""
    raise BadInput(f"train.keep_at={first.text}: {end}{words}")


def _short(count: int) -> str:
    """A count in the form of `train.keep_at`, such as 5.123M: four digits, rounded down."""
    suffix = next((s for s in "BMk" if count >= SUFFIXES[s]), "")
    whole = 10 ** max(len(str(count)) - 4, 0)
    return f"{Decimal(count // whole * whole) / SUFFIXES[suffix]:f}{suffix}"


# ------------------------------------------------------------------------------ on the disk


@dataclass(frozen=True)
class Trajectory:
    """The steps at which a run keeps its weights, and about how many bytes each checkpoint has."""

    steps: frozenset[int] = frozenset()
    bytes: int = 0
    of_other: frozenset[int] = frozenset()  # steps of the run that this one branches from

    def ahead(self, step: int) -> int:
        """How many checkpoints are still to be written by a run that starts or continues at a
        step."""
        return sum(each >= step if step == 0 else each > step for each in self.steps)

    def check_room(self, run: Path, step: int) -> None:
        """Raise BadInput if the disk has no room for the checkpoints still to be written. Existing
        ones that will be replaced count as free space."""
        needed = self.bytes * self.ahead(step)
        if not needed:
            return
        disk = run.absolute()
        while not disk.is_dir():
            disk = disk.parent
        free = shutil.disk_usage(disk).free
        free += sum(file.stat().st_size for file in _replaced(run, step))
        if needed > free:
            raise BadInput(
                f"train.keep_at needs {_size(needed)} in {run / 'trajectory'}, for "
                f"{self._checkpoints(step)}, but the disk has {_size(free)} free; "
                "keep fewer, or make room"
            )

    def announcement(self, run: Path, step: int) -> str:
        """A line that says what the run will write after this step; "" if it will write nothing."""
        clauses = []
        if number := self.ahead(step):
            behind = f", after step {step:,}" if step else ""
            total = f"{_size(self.bytes * number)}, in {run / 'trajectory'}"
            clauses.append(f"{self._checkpoints(step)}, {total}{behind}")
        if self.of_other:
            steps = ", ".join(map(str, sorted(self.of_other)))
            clauses.append(f"the run that it branched from kept these steps: {steps}")
        return f"trajectory: {'; '.join(clauses)}" if clauses else ""

    def missing(self, run: Path, step: int) -> str:
        """A line that names the missing checkpoints up to a step; "" if none is missing."""
        places = ((each, run / "trajectory" / f"step_{each}") for each in sorted(self.steps))
        gone = [each for each, place in places if each <= step and not place.is_dir()]
        if not gone:
            return ""
        shown = ", ".join(map(str, gone[:8])) + (f" and {len(gone) - 8} more" if gone[8:] else "")
        return (
            f"{run / 'trajectory'} lacks step {shown}: writing failed, or train.keep_at was "
            "changed after that step"
        )

    def _checkpoints(self, step: int) -> str:
        return f"{many(self.ahead(step), 'checkpoint')} of {_size(self.bytes)}"


def _replaced(run: Path, step: int) -> Iterator[Path]:
    """The files of checkpoints that are deleted when a run starts or continues at a step."""
    for folder in ("checkpoints", "trajectory"):
        for at, place in checkpoints.by_step(run / folder).items():
            if step == 0 or at > step:
                yield from (file for file in place.rglob("*") if file.is_file())


def _size(count: int) -> str:
    if count >= 1e8:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.{0 if count >= 1e7 else 1}f} MB"
