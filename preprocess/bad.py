"""Rows that cannot be used: the first one ends the work, or all are left out and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xformer.data.display import one_line, say
from xformer.data.errors import BadInput

SHOWN = 10  # bad rows listed one by one


class BadRows:
    """What readers call for a row they cannot use.

    Without `skip` the call raises BadInput naming file and line; with it the row is remembered and
    the reader goes on with the next. Files may be read more than once: a row counts once. Memory
    grows with the number of bad rows alone (a line number each).
    """

    def __init__(self, skip: bool):
        self.skip = skip
        self.lines: dict[Path, set[int]] = {}
        self.first: list[str] = []

    def __call__(self, path: Path, line: int, reason: str) -> None:
        """Note that `line` of `path` is bad. Raises BadInput unless bad rows are skipped."""
        message = f"{path}:{line}: {reason}"
        if not self.skip:
            raise BadInput(message)
        known = self.lines.setdefault(path, set())
        if line not in known:
            known.add(line)
            if len(self.first) < SHOWN:
                self.first.append(message)

    @property
    def count(self) -> int:
        """How many rows were left out."""
        return sum(map(len, self.lines.values()))

    def report(self) -> None:
        """List the first bad rows and say how many there are, on standard error."""
        if self.count:
            rows = "1 bad row was" if self.count == 1 else f"{self.count:,} bad rows were"
            first = f", of which the first {SHOWN} are" if self.count > SHOWN else ""
            lines = [
                f"{rows} left out{first}:",
                *(f"  {one_line(message)}" for message in self.first),
            ]
            say(*lines, error=True)

    def as_origin(self) -> dict[str, Any]:
        """For a store's origin: how many rows were left out, if leaving out was asked for."""
        return {"skipped_rows": self.count} if self.skip else {}
