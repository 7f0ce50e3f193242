"""How far the work has come: a bar with a finishing time on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from xformer.data.display import escaped, say

EVERY = 10.0  # seconds between two plain lines


class Progress:
    """Counts `total` units of work ("B" for bytes, "rows", "tokens"), shown on standard error."""

    def __init__(self, what: str, total: int, unit: str):
        self.what, self.total, self.unit, self.done = what, max(total, 1), unit, 0
        self.started = self.said = time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            scale = 1024 if unit == "B" else 1000
            self.bar = tqdm(
                desc=escaped(what),
                total=total,
                unit=unit,
                unit_scale=True,
                unit_divisor=scale,
                leave=False,
            )

    def add(self, amount: int) -> None:
        """Note that `amount` more units are done."""
        self.done += amount
        if self.bar is not None:
            self.bar.update(amount)
            return
        now = time.monotonic()
        if now - self.said >= EVERY:
            self.said = now
            share = min(self.done / self.total, 1.0)
            left = (now - self.started) * (1 - share) / max(share, 1e-9)
            unit = " MB" if self.unit == "B" else f" {self.unit}"
            scale = 10**6 if self.unit == "B" else 1
            amounts = f"{self.done // scale:,} of {self.total // scale:,}{unit}"
            say(f"{self.what}: {share:.0%}, {amounts}, {left:.0f} s left", error=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Progress]:
    """A Progress that is cleared from the terminal however the work ends."""
    shown = Progress(what, total, unit)
    try:
        yield shown
    finally:
        shown.close()
