"""Everything that a command prints: lines, data and progress. No other module prints.

The user's names and data may hold any character. They are escaped here, so that they cannot control
the terminal. Messages appear above the progress bar and leave it intact.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import TextIOWrapper
from typing import Any, Self, TextIO

UNLIMITED = sys.maxsize  # a width
EVERY = 10.0  # seconds between two lines of progress in a log
REDRAW = 0.1  # seconds between two drawings of a bar


def one_line(text: str, most: int = 2000) -> str:
    """The text as one escaped line. If it is longer than `most` characters, its middle is left
    out."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return escaped(text)


def escaped(text: str) -> str:
    """The text with all non-printable characters escaped, such as control codes and line ends."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(*lines: str, error: bool = False) -> None:
    """Print each argument as one escaped line on standard output, or on standard error if `error`
    is true. If nobody reads standard error any more, the work goes on without it.

    Raises BrokenPipeError if nobody reads standard output any more.
    """
    stream = sys.stderr if error else sys.stdout
    with _if_anyone_reads() if error else nullcontext():
        for line in lines:
            with _above_bars(stream):
                print(escaped(line), file=stream, flush=True)


@contextmanager
def _if_anyone_reads() -> Iterator[None]:
    """A context that writes to standard error. What cannot be written is lost: a run must not end
    because nobody reads its lines any more, or because the disk of their file is full."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ESTALE):
            return  # later lines may be written again
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def say_at_once(line: str) -> None:
    """Print a line on standard error from a signal handler. Printing as usual could fail there,
    because the signal may have interrupted another line."""
    text = f"\n{escaped(line)}\n"
    with suppress(OSError, ValueError):
        if isinstance(sys.stderr, TextIOWrapper):
            os.write(sys.stderr.fileno(), text.encode())
        else:  # a notebook's, whose file is the terminal of its server
            sys.stderr.write(text)


def put(text: str) -> None:
    """Write data to standard output. It is escaped only if standard output is a terminal."""
    if sys.stdout.isatty():
        lines = text.split("\n")
        text = "\n".join("\t".join(map(escaped, line.split("\t"))) for line in lines)
    with _above_bars(sys.stdout):
        sys.stdout.write(text)
        sys.stdout.flush()


def columns() -> int:
    """The width of the terminal on standard output; UNLIMITED in a pipe or a file."""
    return shutil.get_terminal_size((UNLIMITED, 0)).columns


class Progress:
    """Shows the progress of some work on standard error.

    On a terminal it draws a bar. Otherwise it prints a line every EVERY seconds, so short work
    prints nothing. Both show `done` of `total` units, the time left, and the caller's newest
    numbers, such as the loss. If there are no such numbers, they show the speed, unless it is below
    1 unit per second. On a narrow terminal the bar omits the last of these items.

    `unit` is a plural such as "rows", or "B" for bytes. A `total` of 0 means that the total is
    unknown. The bar disappears when the work ends, unless `stay` is true. With `lines=False` no
    lines are printed; the caller prints its own with `state`. With `active=False` nothing is shown.
    """

    def __init__(
        self,
        what: str,
        total: float,
        unit: str,
        done: float = 0,
        *,
        active: bool = True,
        lines: bool = True,
        stay: bool = False,
    ):
        self.what, self.total, self.unit, self.done = what, total, unit, done
        self.before, self.lines = done, lines and active
        self.numbers: dict[str, float] = {}
        self.started = self.shown = time.monotonic()
        self.bar: Any = None
        if active and sys.stderr.isatty():
            from tqdm import tqdm  # imported here, because only a bar needs it

            self.bar = tqdm(
                desc=self._bar_text(None),
                initial=done,
                total=total or None,
                bar_format="{desc} |{bar}",
                leave=stay,
                dynamic_ncols=True,
            )
            _open.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the display. A second call does nothing."""
        if self in _open:
            self._draw()
            self.bar.close()
            _open.remove(self)

    def advance(self, amount: float, **numbers: float) -> None:
        """Report that `amount` more units are done, and the newest numbers by name."""
        self.done += amount
        self.numbers.update(numbers)
        now = time.monotonic()
        if now - self.shown >= (EVERY if self.bar is None else REDRAW):
            self.shown = now
            if self.bar is not None:
                self._draw()
            elif self.lines:
                say(self._line(), error=True)

    def left(self) -> float | None:
        """Seconds until the end at the average speed so far, or None while this is unknown."""
        if self.done <= self.before or not self.total:
            return None
        seconds = time.monotonic() - self.started
        return seconds * max(self.total - self.done, 0) / (self.done - self.before)

    def state(self) -> str:
        """The progress in words: `25%, 20 of 80 steps, 9 s left, loss 7.12`."""
        share = [f"{min(self.done / self.total, 1):.0%}"] if self.total else []
        return ", ".join(share + self._parts(" of "))

    def _line(self) -> str:
        """The line for a log."""
        return f"{escaped(self.what)}: {self.state()}"

    def _parts(self, of: str) -> list[str]:
        """The parts of the display, most important first. `of` is the text between `done` and
        `total`."""
        scale, unit, digits = (1e6, "MB", 1) if self.unit == "B" else (1, self.unit, 0)
        amounts = [self.done, self.total] if self.total else [self.done]
        parts = [of.join(f"{amount / scale:,.{digits}f}" for amount in amounts) + f" {unit}"]
        if (left := self.left()) is not None:
            parts.append(f"{duration(left)} left")
        parts += [f"{name} {format_number(value)}" for name, value in self.numbers.items()]
        seconds = max(time.monotonic() - self.started, 1e-9)
        speed = (self.done - self.before) / scale / seconds
        if not self.numbers and speed >= 1:
            parts.append(f"{format_number(speed)} {unit}/s")
        return parts

    def _bar_text(self, columns: int | None) -> str:
        """The text before the bar, with as many parts as fit into `columns` beside a minimal
        bar."""
        first, *others = self._parts("/")
        text = f"{escaped(self.what)} {first}"
        for part in others:
            if columns is None or len(text) + len(part) + len(",  |#") <= columns:
                text += f", {part}"
        return text

    def _draw(self) -> None:
        self.bar.n = self.done
        with _if_anyone_reads():
            self.bar.set_description_str(self._bar_text(self.bar.format_dict["ncols"]))


_open: list[Progress] = []  # the objects that show a bar at present


def _above_bars(stream: TextIO) -> AbstractContextManager[None]:
    """A context in which text is printed above the bars, which are redrawn afterwards."""
    for progress in _open:
        above: AbstractContextManager[None] = progress.bar.external_write_mode(file=stream)
        return above
    return nullcontext()


def format_number(value: float) -> str:
    """A number for people: 12,345 or 7.123."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Seconds for people: 1:02 h, 3.5 min, 12 s."""
    if seconds >= 3600:
        return f"{int(seconds // 3600):,}:{int(seconds % 3600 // 60):02} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"


def many(count: int, noun: str) -> str:
    """A count with its noun in singular or plural: 1 example, 2 examples."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
