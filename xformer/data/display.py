"""Everything that a command shows: lines, data, and how far its work is. Nothing else prints.

Names and data of the user may hold anything. They are escaped here, so that they cannot steer a
terminal, and a message never tears a progress bar.
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, TextIO

EVERY = 10.0  # seconds between two lines of progress in a log
REDRAW = 0.1  # seconds between two drawings of a bar


def one_line(text: str, most: int = 2000) -> str:
    """The text as one escaped line. Of a text above `most` characters the middle is left out."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return escaped(text)


def escaped(text: str) -> str:
    """The text with every character escaped that could steer a terminal or begin another line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(*lines: str, error: bool = False) -> None:
    """Print lines to standard output, or to standard error with `error`. Each argument is escaped
    and stays one line."""
    stream = sys.stderr if error else sys.stdout
    for line in lines:
        with _above_bars(stream):
            print(escaped(line), file=stream, flush=True)


def put(text: str) -> None:
    """Write data to standard output. It is escaped only if a terminal shows it."""
    if sys.stdout.isatty():
        lines = text.split("\n")
        text = "\n".join("\t".join(map(escaped, line.split("\t"))) for line in lines)
    with _above_bars(sys.stdout):
        sys.stdout.write(text)
        sys.stdout.flush()


class Progress:
    """Shows on standard error how much of some work is done.

    On a terminal it is a bar. In a log it is a line every EVERY seconds, so short work prints
    nothing. Both tell the same: the share, `done` of `total` units, the time left, and the newest
    numbers of the caller, such as the loss. Without numbers it is the speed, if above 1 a second.

    `unit` is a plural such as "rows", or "B" for bytes; a `total` of 0 means that it is not known.
    The bar is cleared when the work ends, unless it is to `stay`. With `lines=False` the caller
    writes lines of its own in a log, with `state`. With `active=False` nothing is shown.
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
            from tqdm import tqdm  # a log does not wait for this import

            self.bar = tqdm(
                desc=self._line(),
                initial=done,
                total=total or None,
                bar_format="{bar:10}| {desc}",
                leave=stay,
                dynamic_ncols=True,
            )
            _open.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the display. It may be called again."""
        if self in _open:
            self._draw()
            self.bar.close()
            _open.remove(self)

    def advance(self, amount: float, **numbers: float) -> None:
        """Note that `amount` more units are done, and the newest numbers by name."""
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
        """Seconds to the end, at the speed so far; None while that is not known."""
        if self.done <= self.before or not self.total:
            return None
        seconds = time.monotonic() - self.started
        return seconds * max(self.total - self.done, 0) / (self.done - self.before)

    def state(self) -> str:
        """How far the work is: `25%, 20 of 80 steps, 9 s left, loss 7.12`."""
        scale, unit = (1e6, "MB") if self.unit == "B" else (1, self.unit)
        digits = 1 if self.unit == "B" else 0
        parts = [f"{self.done / scale:,.{digits}f} {unit}"]
        if self.total:
            amounts = f"{self.done / scale:,.{digits}f} of {self.total / scale:,.{digits}f} {unit}"
            parts = [f"{min(self.done / self.total, 1):.0%}", amounts]
        if (left := self.left()) is not None:
            parts.append(f"{duration(left)} left")
        parts += [f"{name} {format_number(value)}" for name, value in self.numbers.items()]
        seconds = max(time.monotonic() - self.started, 1e-9)
        speed = (self.done - self.before) / scale / seconds
        if not self.numbers and speed >= 1:
            parts.append(f"{format_number(speed)} {unit}/s")
        return ", ".join(parts)

    def _line(self) -> str:
        return f"{escaped(self.what)}: {self.state()}"

    def _draw(self) -> None:
        self.bar.n = self.done
        self.bar.set_description_str(self._line())


_open: list[Progress] = []  # those that are a bar on the terminal now


def _above_bars(stream: TextIO) -> AbstractContextManager[None]:
    """What is written meanwhile stands above the bars, which are drawn again afterwards."""
    for progress in _open:
        above: AbstractContextManager[None] = progress.bar.external_write_mode(file=stream)
        return above
    return nullcontext()


def format_number(value: float) -> str:
    """A number for people: 12,345 or 7.123."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """1:02 h, 3.5 min, 12 s."""
    if seconds >= 3600:
        return f"{int(seconds // 3600):,}:{int(seconds % 3600 // 60):02} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"
