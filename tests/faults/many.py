"""Many processes at once, with one run directory, one output or one store."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import ExitStack
from pathlib import Path

from helpers import SMOKE, Forks, refused, training

from faults.works import STEPS, Bench, Row, check_run, ending, wrong
from xformer.data.errors import BadInput
from xformer.data.files import atomic_directory
from xformer.data.store import open_store

# Python that holds a process at its third step until a file is there
HELD = """
import pathlib, time
from xformer.monitor import Monitor
plain = Monitor.advance
def advance(self, done):
    plain(self, done)
    while done == 2 and not pathlib.Path({go!r}).exists():
        time.sleep(0.01)
Monitor.advance = advance
"""


def same_run(bench: Bench, others: int = 3) -> Row:
    """While a process uses a run, others are refused with its name, and the run is not
    disturbed."""
    row, reference = Row("two processes with one run="), bench.reference("training")
    work = bench.works["training"]
    with bench.place() as place, bench.place() as aside, bench.forks() as forks:
        go = aside / "go"
        first = forks.start(*work.line(place), before=HELD.format(go=str(go)))
        while not (place / "run/log.jsonl").is_file():
            time.sleep(0.01)
        for i in range(others):
            second = forks.run(*work.line(place), *["overwrite=true"] * (i == 1))
            row.count(wrong(refused, second, str(place / "run"), "in use by another process"))
        go.touch()
        row.count(ending(first.wait(), check_run, place, reference))
    return row


def same_output(bench: Bench, times: int = 5) -> Row:
    """Two preprocess runs write the same output. It is complete, and the later run is refused."""
    row, work = Row("two preprocess runs to one output"), bench.works["preprocessing"]
    reference = bench.reference("preprocessing")
    for overwrite in (False, True):
        for _ in range(times):
            with bench.place(work if overwrite else None) as place, bench.forks() as forks:
                line = [a for a in work.line(place) if overwrite or a != "--overwrite"]
                both = [forks.start(*line) for _ in range(2)]
                ends = [fork.wait() for fork in both]
                good = sum(done.status == 0 for done in ends)
                bad = ""
                if good < 1 + overwrite:
                    late = [done for done in ends if done.status]
                    if not good or any("exists" not in done.err for done in late):
                        bad = f"lost: {[done.err[-100:] for done in late]}"
                row.count(bad or wrong(work.check, place, reference))
    return row


def ten_readers(bench: Bench, number: int = 10) -> Row:
    """Many runs that read one store give the results of one run."""
    row, reference = Row(f"{number} runs reading one store"), bench.reference("training")
    work = bench.works["training"]
    with ExitStack() as stack:
        places = [stack.enter_context(bench.place()) for _ in range(number)]
        forks = stack.enter_context(bench.forks())
        going = [forks.start(*work.line(place)) for place in places]
        for place, fork in zip(places, going, strict=True):
            row.count(ending(fork.wait(), check_run, place, reference))
    return row


def replaced_while_read(bench: Bench, seconds: float = 5) -> list[Row]:
    """A store is replaced again and again. Every reader opens a complete store, old or new.

    A run that has the store open continues with what it opened.
    """
    row = Row("a store opened while it is replaced")
    run = Row("a run whose store is replaced under it")
    with bench.place() as place, bench.forks() as forks:
        store = place / "store"
        kinds = {open_store(source).key: source for source in (bench.toys.text, bench.toys.classes)}
        shutil.copytree(bench.toys.text, store)
        pid = os.fork()
        if pid == 0:
            _replace_for_ever(store, list(kinds.values()))
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                row.count(_open(store, set(kinds)))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        run.count(_replaced_under_run(bench, place, forks))
    return [row, run]


def _open(store: Path, known: set[str]) -> str:
    try:
        opened = open_store(store)
        tokens = opened.split("train").columns["tokens"]
        total = sum(len(tokens[i]) for i in range(len(tokens)))
        bad = [name for name, _, good in opened.verify() if not good]
    except BadInput as error:
        return f"lost: {error}"
    if bad or opened.key not in known or total != opened.split("train").tokens:
        return f"wrong: a mixture of two stores {bad}"
    return ""


def _replace_for_ever(store: Path, kinds: list[Path]) -> None:
    """Replace the store again and again. This runs in a process of its own."""
    number = 0
    while True:
        number += 1
        with atomic_directory(store, overwrite=True) as directory:
            shutil.copytree(kinds[number % 2], directory, dirs_exist_ok=True)


def _replaced_under_run(bench: Bench, place: Path, forks: Forks) -> str:
    store, go = place / "mine", place / "go"
    shutil.copytree(bench.toys.text, store)
    line = training(SMOKE, store, place / "run", *STEPS)
    first = forks.start(*line, before=HELD.format(go=str(go)))
    while not (place / "run/log.jsonl").is_file():
        time.sleep(0.01)
    with atomic_directory(store, overwrite=True) as directory:
        shutil.copytree(bench.toys.classes, directory, dirs_exist_ok=True)
    go.touch()
    return ending(first.wait(), check_run, place, bench.reference("training"))
