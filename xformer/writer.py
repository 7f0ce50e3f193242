"""Checkpoints written in the background: steps go on while files are written and synced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from xformer.data.errors import Failure, reason

PAUSES = (5.0, 30.0, 120.0)  # seconds before a failed write is tried again; then the last


class Writer:
    """Does one piece of work at a time in a thread. If the disk refuses, it tries again after a
    pause, until newer work takes its place. `failing` is true from the first refusal, which is said
    in one line, to the next success, which is said too. Use as a context manager."""

    def __init__(self, say: Callable[[str], None]):
        self.say, self.failing = say, False
        self.pool = ThreadPoolExecutor(1, "writer")
        self.task: Future[None] | None = None
        self.superseded = threading.Event()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.free()
        self.pool.shutdown()

    def free(self) -> None:
        """Wait until what is being written is written; what failed so far is given up."""
        self.superseded.set()
        if self.task is not None:
            self.task.result()
        self.superseded.clear()
        self.task = None

    def now(self, what: str, work: Callable[[], None]) -> None:
        """Do `work` at once, in this thread. Raises Failure if it cannot be done."""
        self.free()
        try:
            work()
        except (OSError, Failure) as error:
            raise Failure(f"{reason(error)}; no {what}, older ones are kept") from None
        self._succeeded(what)

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
                if not self.failing:
                    self.say(
                        f"{reason(error)}; no {what}, older ones are kept, and the run goes on; "
                        "until the disk takes a checkpoint, none becomes the best"
                    )
                self.failing = True
                if self.superseded.wait(PAUSES[min(tries, len(PAUSES) - 1)]):
                    return
                tries += 1
            else:
                self._succeeded(what)
                return

    def _succeeded(self, what: str) -> None:
        if self.failing:
            self.say(f"the {what} could be written now")
        self.failing = False
