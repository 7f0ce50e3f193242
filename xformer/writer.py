"""Checkpoints written in the background: steps go on while files are written and synced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from xformer.data.errors import Failure

PAUSES = (5.0, 30.0, 120.0)  # seconds before a failed write is tried again; then the last


class Writer:
    """Does one piece of work at a time in a thread. Where the disk refuses, it says so in one line
    and tries again after a pause, until newer work takes its place. Use as a context manager."""

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.pool = ThreadPoolExecutor(1, "writer")
        self.task: Future[None] | None = None
        self.superseded = threading.Event()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.free()
        self.pool.shutdown()

    def free(self) -> None:
        """Wait until what is being written is written; what failed so far is given up."""
        self.superseded.set()
        if self.task is not None:
            self.task.result()
        self.superseded.clear()
        self.task = None

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Begin `work`, which makes `what` and raises OSError or Failure where it cannot."""
        self.free()
        self.task = self.pool.submit(self._persist, what, work)

    def _persist(self, what: str, work: Callable[[], None]) -> None:
        tries = 0
        while True:
            try:
                work()
            except (OSError, Failure) as error:
                if tries == 0:
                    self.say(f"{error}: no {what}; older ones are kept, and the run goes on")
                if self.superseded.wait(PAUSES[min(tries, len(PAUSES) - 1)]):
                    return
                tries += 1
            else:
                if tries:
                    self.say(f"the {what} could be written now")
                return
