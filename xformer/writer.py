"""Write checkpoints in the background, so that training does not wait for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, repeat

from xformer.data.errors import Failure, reason

PAUSES = (5.0, 30.0, 120.0)  # seconds before the first, second and every later retry of a write


class BackgroundWriter:
    """Runs one job at a time in a thread; a context manager.

    A job that fails is tried again after a pause, until a newer job replaces it. `failing` is true
    from the first failure to the next success. Each of these two is reported in one line.
    """

    def __init__(self, say: Callable[[str], None]):
        self.say, self.failing = say, False
        self.pool = ThreadPoolExecutor(1, "writer")
        self.task: Future[None] | None = None
        self.superseded = threading.Event()

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.free()
        self.pool.shutdown()

    def free(self) -> None:
        """Wait for the current job. A job that has failed is not tried again."""
        self.superseded.set()
        if self.task is not None:
            self.task.result()
        self.superseded.clear()
        self.task = None

    def now(self, what: str, work: Callable[[], None]) -> None:
        """Do `work` in the calling thread. Raises Failure if `work` fails."""
        self.free()
        try:
            work()
        except (OSError, Failure) as error:
            raise Failure(
                f"{reason(error)}; the {what} was not written; older ones are kept"
            ) from None
        self._succeeded(what)

    def start(self, what: str, work: Callable[[], None]) -> None:
        """Start `work` in the background. It must write `what`, and raise OSError or Failure if it
        cannot."""
        self.free()
        self.task = self.pool.submit(self._persist, what, work)

    def _persist(self, what: str, work: Callable[[], None]) -> None:
        for pause in chain(PAUSES, repeat(PAUSES[-1])):
            try:
                work()
            except (OSError, Failure) as error:
                if not self.failing:
                    self.say(
                        f"{reason(error)}; the {what} was not written; older ones are kept, and "
                        "the run continues; no checkpoint becomes the best until one can be written"
                    )
                self.failing = True
                if self.superseded.wait(pause):
                    return
            else:
                self._succeeded(what)
                return

    def _succeeded(self, what: str) -> None:
        if self.failing:
            self.say(f"the {what} is now written")
        self.failing = False
