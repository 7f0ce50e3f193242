"""Work in several processes, whose results come back in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, cycle, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, NoReturn, TypeVar

from xformer.data.errors import Failure

FEW = 8  # with fewer items, this process is done before others would have helped
FORKS = sys.platform != "darwin"  # macOS's own libraries may not survive a fork
# what a terminal or a scheduler sends to all processes of a command; the parent acts on it
GROUP = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

Item = TypeVar("Item")
Result = TypeVar("Result")


class Worker(NamedTuple):
    """A forked process, and the parent's end of its pipe. No other process has this end, so each of
    the two notices if the other dies."""

    process: BaseProcess
    pipe: Connection

    def result(self) -> Any:
        """Its next result. Raises Failure if it has died."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self._died()

    def begin(self, item: Any) -> None:
        """Give it an item, after all its results were received. Raises Failure if it has died."""
        try:
            self.pipe.send(item)
        except OSError:
            self._died()

    def _died(self) -> NoReturn:
        self.process.join()
        code = self.process.exitcode or 0
        how = f"ended with status {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        hint = " (out of memory? --workers 1 needs the least)" if code == -signal.SIGKILL else ""
        raise Failure(f"a worker process {how}{hint}") from None


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], processes: int
) -> Generator[Result, None, None]:
    """Yield `work(item)` for each item, in their order. Memory holds one item for each process, and
    one more; at the beginning FEW. Close the generator to end the processes.

    With one process, if there are few items, or on macOS, this process does all the work. The
    others are forks, so what `work` refers to is not sent to them; items and results are pickled.
    Raises Failure if one of them dies.
    """
    items = iter(items)
    first = list(islice(items, FEW)) if processes > 1 and FORKS else []
    enough = len(first) == FEW
    items = chain(first, items)
    del first
    if not enough:
        yield from map(work, items)
        return
    with _forked(work, processes) as workers:
        busy = 0
        for worker, item in zip(workers, items, strict=False):
            worker.begin(item)
            busy += 1
        turns = cycle(workers)
        for item in items:  # read while the workers work
            worker = next(turns)
            result = worker.result()
            worker.begin(item)
            yield result
        for worker in islice(turns, busy):
            yield worker.result()


@contextmanager
def _forked(work: Callable[[Any], Any], processes: int) -> Iterator[list[Worker]]:
    """Processes that do the `work`. They are killed at the end."""
    fork = multiprocessing.get_context("fork")
    workers: list[Worker] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP)  # until they have left the parent's group
        for _ in range(processes):
            ours, theirs = fork.Pipe()
            others = [*(worker.pipe for worker in workers), ours]
            process = fork.Process(target=_serve, args=(work, theirs, others), daemon=True)
            process.start()
            workers.append(Worker(process, ours))
            theirs.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for worker in workers:
            worker.process.join()
            worker.pipe.close()


def _serve(work: Callable[[Any], Any], pipe: Connection, others: list[Connection]) -> None:
    """Work until the parent has closed the pipe, or has died."""
    os.setpgid(0, 0)
    for number in (*GROUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP)
    for other in others:  # an open one here would hide that the parent is gone
        other.close()
    while True:
        try:
            item = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(work(item))
