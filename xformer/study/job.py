"""What runs a work: a process of this machine, or a job of a cluster.

Each of them imports this before its work, so nothing heavy is here.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def become(arguments: tuple[str, ...], log: str, environment: dict[str, str]) -> None:
    """Be `python ARGUMENTS` in a process that was forked for it, with its output in a log.

    SIGTERM was blocked until here, so that none is lost before the command can hear it.
    """
    numbers = (os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND))
    for number, file in enumerate((*numbers, numbers[1])):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    first, *rest = arguments
    if first == "-c":
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    elif first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")


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
            self.popen = subprocess.Popen(
                self.line, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
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
