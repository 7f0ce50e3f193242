"""Work in several processes, whose results come back in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any, TypeVar

from xformer.data.errors import Failure

FEW = 8  # with fewer items, this process is done before others would have helped
FORKS = sys.platform != "darwin"  # macOS's own libraries may not survive a fork
# what a terminal or a scheduler sends to all processes of a command; the parent acts on it
GROUP = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

Item = TypeVar("Item")
Result = TypeVar("Result")
_work: Callable[[Any], Any]  # of a worker


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], processes: int
) -> Generator[Result, None, None]:
    """Yield `work(item)` for each item, in their order. Memory holds at most two items for each
    process. Close the generator to end the processes.

    With one process, if there are few items, or on macOS, this process does all the work. The
    others are forks, so what `work` refers to is not sent to them; items and results are pickled.
    Raises Failure if one of them dies.
    """
    items = iter(items)
    first = list(islice(items, FEW)) if processes > 1 and FORKS else []
    items = chain(first, items)
    if len(first) < FEW:
        yield from map(work, items)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warns of the fork
    fork = multiprocessing.get_context("fork")
    executor = ProcessPoolExecutor(processes, fork, _start, (work,))
    results: deque[Future[Result]] = deque()
    try:
        for item in items:
            results.append(_submit(executor, item))
            if len(results) == 2 * processes:
                yield results.popleft().result()
        while results:
            yield results.popleft().result()
    except BrokenProcessPool:
        raise Failure(
            "a worker process died (out of memory? --workers 1 needs the least)"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def _submit(executor: ProcessPoolExecutor, item: Any) -> Future[Any]:
    """Submit an item. The first call forks all processes; until they have left the group of the
    parent, they must not hear its signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP)
    try:
        return executor.submit(_do, item)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(work: Callable[[Any], Any]) -> None:
    """Begin a worker: it hears no signal to the parent's group, and ends when the parent does."""
    global _work
    _work = work
    os.setpgid(0, 0)
    for number in GROUP:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(item: Any) -> Any:
    return _work(item)
