"""What a job of a cluster runs. Each job imports this before its work, so nothing heavy is here."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any


class Command:
    """What a job of the cluster does: a command whose output goes to a file; its exit status.

    Told that its time is over or its place is taken, the job stops the command, which writes a
    checkpoint, and is queued again to go on from it.
    """

    def __init__(self, line: tuple[str, ...], log: Path):
        self.line, self.log = line, log
        self.popen: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        # the cluster tells all processes of a job; the command is to hear it from this one
        old = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(self.line, stdout=log, stderr=log,
                                          stdin=subprocess.DEVNULL)  # fmt: skip
        signal.signal(signal.SIGUSR2, old)
        try:
            return self._wait()
        finally:
            self.stop()

    def checkpoint(self) -> Any:
        """What submitit queues when it interrupts the job."""
        from submitit.helpers import DelayedSubmission

        self.stop()
        return DelayedSubmission(Command(self.line, self.log))

    def stop(self) -> None:
        """Ask the command to stop, and wait until it has."""
        if self.popen is not None and self.popen.poll() is None:
            self.popen.terminate()
            self._wait()

    def _wait(self) -> int:
        """By asking now and then: `checkpoint` interrupts a wait, which holds a lock, and waits."""
        assert self.popen is not None
        while (status := self.popen.poll()) is None:
            time.sleep(0.1)
        return status
