"""Bad rows: stop at the first one, or leave them all out and count them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from xformer.data.display import one_line, say
from xformer.data.errors import BadInput

LISTED = 10  # bad rows that the report shows


class BadRows:
    """Readers call this object for each row that they cannot use.

    Without `skip`, the call raises BadInput naming file and line. With `skip`, the row is recorded
    and the reader goes on. A row is counted once, however often its file is read. Memory grows
    only with the number of bad rows, by one line number each. Use it as a context manager: at its
    end it reports the bad rows, also if the command fails, because they may be the cause.
    """

    def __init__(self, skip: bool):
        self.skip = skip
        self.lines: dict[Path, set[int]] = {}
        self.first: list[str] = []

    def __call__(self, path: Path, line: int, reason: str) -> None:
        """Record that `line` of `path` is bad. Raises BadInput unless bad rows are skipped."""
        message = f"{path}:{line}: {reason}"
        if not self.skip:
            raise BadInput(message)
        known = self.lines.setdefault(path, set())
        if line not in known:
            known.add(line)
            if len(self.first) < LISTED:
                self.first.append(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.report()

    @property
    def count(self) -> int:
        """How many rows were left out."""
        return sum(map(len, self.lines.values()))

    def report(self) -> None:
        """Print on standard error how many bad rows there are, and list the first ones."""
        if self.count:
            rows = "1 bad row was" if self.count == 1 else f"{self.count:,} bad rows were"
            first = f"; the first {LISTED} are" if self.count > LISTED else ""
            lines = [
                f"{rows} left out{first}:",
                *(f"  {one_line(message)}" for message in self.first),
            ]
            say(*lines, error=True)

    def as_origin(self) -> dict[str, Any]:
        """The entry for a store's origin: the number of skipped rows, if `skip` is set."""
        return {"skipped_rows": self.count} if self.skip else {}


STRICT = BadRows(skip=False)  # the first bad row is an error, so it never holds any
