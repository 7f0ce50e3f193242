"""The trajectory of a run: weights alone, kept at the steps that `train.keep_at` asks for.

    "log"       step 0 and the powers of two below a twentieth of the run, then every twentieth
    "log:500"   step 0 and the powers of two below 500, then every 500 steps
    [0, 100, "2000 steps", "5M tokens", "1M words"]    a bare number counts steps

Every form becomes step numbers before the run starts. Which rows a step takes depends on the seed
and on the step alone, so tokens and words are counted without training, and a run that is stopped
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
from xformer.checkpoint import Checkpoint
from xformer.data.errors import BadInput, typed
from xformer.data.sampler import Stream

FORMS = '"log", "log:500", or a list such as [0, 100, "2000 steps", "5M tokens", "1M words"]'
PARTS = 20  # that "log" divides a run into
SUFFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}
LOG = re.compile(r"log(?::([1-9]\d{0,17}))?")
MARK = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?([kKMB]?) ?(step|token|word)s?")
SAMPLE = 100  # steps of which an error message takes the mean


@dataclass(frozen=True)
class Mark:
    """The first step at which a run has made so many steps, or has seen so many tokens or words;
    `text` is how it was given."""

    amount: int
    unit: str  # "step", "token" or "word"
    text: str


@dataclass(frozen=True)
class Log:
    """The powers of two below `every` steps, then every so many; None: a twentieth of the run."""

    every: int | None


def parse(value: Any) -> Log | tuple[Mark, ...]:
    """What a value of `train.keep_at` says. Raises ValueError with one line if it is none."""
    if isinstance(value, str) and (found := LOG.fullmatch(value)):
        return Log(int(found[1]) if found[1] else None)
    if not isinstance(value, list | tuple):
        raise ValueError(_refusal(value))
    return tuple(_mark(each) for each in value)


def _mark(value: Any) -> Mark:
    if type(value) is int and 0 <= value < 2**62:
        return Mark(value, "step", str(value))
    if isinstance(value, str) and LOG.fullmatch(value):
        raise ValueError(f"train.keep_at: {value!r} stands alone, not in a list")
    found = MARK.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(_refusal(value))
    number, suffix, unit = found.groups()
    amount = Decimal(number) * SUFFIXES[suffix]
    if amount != int(amount):
        raise ValueError(f"train.keep_at={value!r}: this is not a whole number of {unit}s")
    return Mark(int(amount), unit, value)


def _refusal(value: Any) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return f"train.keep_at={shown}: give {FORMS}"


# ------------------------------------------------------------------------- counting in advance


class Place(NamedTuple):
    """Where a run stands after a step: `tokens` with special ones, `words` of the raw text."""

    step: int
    tokens: int
    words: int


@dataclass(frozen=True)
class Course:
    """What the steps of a run take, known before it starts: `steps` of them, or with 0 all that
    the stream has.

    `extra` is how many special tokens a row has; `tokens` and `words` are those of the whole
    training split, without special tokens; `words` is None where the `store` does not know it.
    """

    stream: Stream
    steps: int
    extra: int
    tokens: int
    words: int | None
    store: str

    def length(self) -> int:
        """Steps of the run."""
        if self.steps:
            return self.steps
        if not self.stream.tokens:
            return -(-self.stream.end // self.stream.per_step)
        return sum(1 for _ in self.walk()) - 1

    def walk(self) -> Iterator[Place]:
        """Where the run stands at step 0, 1, 2, ... to its end; a fifth of a second a million rows.

        A row that is truncated counts with the tokens that are left, and with as many words as
        these tokens are worth on average.
        """
        step = position = tokens = 0
        while True:
            words = (tokens - self.extra * position) * (self.words or 0) // max(self.tokens, 1)
            yield Place(step, tokens, words)
            if (step == self.steps) if self.steps else (position >= self.stream.end):
                return
            *_, sizes = self.stream.take(position)
            step, position, tokens = step + 1, position + len(sizes), tokens + int(sizes.sum())

    def end(self, steps: int) -> str:
        """Where a run of so many steps ends, in words; tokens are those of its first steps."""
        *_, seen = islice(self.walk(), min(steps, SAMPLE) + 1)
        tokens = steps * seen.tokens // max(seen.step, 1)
        return f"the run ends at step {steps:,}, about {_short(tokens)} tokens"


def steps_of(keep_at: str | Sequence[int | str], course: Course) -> frozenset[int]:
    """The steps at which a run keeps its weights.

    Raises BadInput for what lies beyond the run's end, and for words where the store does not know
    how many it has.
    """
    wanted = parse(keep_at)
    if isinstance(wanted, Log):
        return _log(wanted.every, course)
    for mark in wanted:
        if mark.unit == "word" and course.words is None:
            raise BadInput(
                f"train.keep_at={mark.text}: {course.store} does not know how many words it has; "
                f"make it again with {typed('preprocess.py text')}, or give tokens"
            )
    if all(mark.unit == "step" for mark in wanted):
        return _counted(wanted, course)
    return _walked(wanted, course)


def _log(every: int | None, course: Course) -> frozenset[int]:
    length = course.length()
    if every is not None and every > length:
        raise BadInput(f"train.keep_at=log:{every}: {course.end(length)}")
    gap = Fraction(length, PARTS) if every is None else Fraction(every)
    powers = [2**i for i in range(length.bit_length()) if 2**i < gap]
    return frozenset([0, *powers, *(ceil(i * gap) for i in range(1, int(length / gap) + 1))])


def _counted(marks: Sequence[Mark], course: Course) -> frozenset[int]:
    """The steps of marks that are steps."""
    length = course.length() if marks else 0
    for mark in marks:
        if mark.amount > length:
            raise BadInput(f"train.keep_at={mark.text}: {course.end(length)}")
    return frozenset(mark.amount for mark in marks)


def _walked(marks: Sequence[Mark], course: Course) -> frozenset[int]:
    """The steps of any marks."""
    left: dict[str, list[Mark]] = {"step": [], "token": [], "word": []}
    for mark in sorted(marks, key=lambda mark: -mark.amount):
        left[mark.unit].append(mark)
    found, place = set(), Place(0, 0, 0)
    for place in course.walk():
        for waiting, reached in zip(left.values(), place, strict=True):
            while waiting and waiting[-1].amount <= reached:
                found.add(place.step)
                waiting.pop()
        if not any(left.values()):
            return frozenset(found)
    first = next(waiting[-1] for waiting in left.values() if waiting)
    end = f"the run ends at step {place.step:,}, after {_short(place.tokens)} tokens"
    words = f" and {_short(place.words)} words" if course.words is not None else ""
    raise BadInput(f"train.keep_at={first.text}: {end}{words}")


def _short(count: int) -> str:
    """A count as `train.keep_at` takes it, to four digits and rounded down: 5.123M."""
    suffix = next((s for s in "BMk" if count >= SUFFIXES[s]), "")
    whole = 10 ** max(len(str(count)) - 4, 0)
    return f"{Decimal(count // whole * whole) / SUFFIXES[suffix]:f}{suffix}"


# ------------------------------------------------------------------------------ on the disk


@dataclass(frozen=True)
class Trajectory:
    """The steps at which a run keeps its weights, and about how many bytes a checkpoint of them
    has."""

    steps: frozenset[int] = frozenset()
    bytes: int = 0

    def ahead(self, step: int) -> int:
        """How many checkpoints a run still writes that starts, or goes on, at a step."""
        return sum(each >= step if step == 0 else each > step for each in self.steps)

    def check_room(self, run: Path, step: int) -> None:
        """Raise BadInput where the disk has no room for the checkpoints that are ahead. Those of a
        run that lie there already, and will be replaced, count as room."""
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
                f"{self._checkpoints(step)}, and the disk has {_size(free)} free; "
                "keep fewer, or make room"
            )

    def announcement(self, run: Path, step: int) -> str:
        """One line that says what the run will write from a step on; "" if that is nothing."""
        number = self.ahead(step)
        if not number:
            return ""
        behind = f", after step {step:,}" if step else ""
        total = _size(self.bytes * number)
        return f"trajectory: {self._checkpoints(step)}, {total}, in {run / 'trajectory'}{behind}"

    def missing(self, run: Path, step: int) -> str:
        """One line that names the checkpoints up to a step that are not there; "" if all are."""
        places = ((each, run / "trajectory" / f"step_{each}") for each in sorted(self.steps))
        gone = [each for each, place in places if each <= step and not place.is_dir()]
        if not gone:
            return ""
        shown = ", ".join(map(str, gone[:8])) + (f" and {len(gone) - 8} more" if gone[8:] else "")
        return (
            f"{run / 'trajectory'} lacks step {shown}: the disk refused it, or train.keep_at asked "
            "for it when the run was past it"
        )

    def _checkpoints(self, step: int) -> str:
        number = self.ahead(step)
        return f"{number:,} checkpoint{'s' if number > 1 else ''} of {_size(self.bytes)}"


def plan(keep_at: str | Sequence[int | str], course: Course, start: Checkpoint) -> Trajectory:
    """The trajectory of a run that starts from a checkpoint. Raises BadInput as `steps_of`."""
    return Trajectory(steps_of(keep_at, course), checkpoints.size(start))


def _replaced(run: Path, step: int) -> Iterator[Path]:
    """The files of a run's checkpoints that go when it starts, or goes on, at a step."""
    for place in run.glob("*/step_*"):
        at = place.name.removeprefix("step_")
        if at.isdigit() and (step == 0 or int(at) > step):
            yield from (file for file in place.rglob("*") if file.is_file())


def _size(count: int) -> str:
    if count >= 1e8:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.{0 if count >= 1e7 else 1}f} MB"
