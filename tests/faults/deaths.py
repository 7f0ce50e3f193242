"""Processes that die: at every operation on files, by a power cut, at a random moment, or by
SIGTERM in a critical phase.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from helpers import Fork

from faults.inject import KILL, POWER, SHORT, armed
from faults.works import Bench, Row, clear_line, ending


def sampled(number: int, most: int) -> list[int]:
    """The numbers of all `number` places, or `most` of them, evenly spread."""
    if number <= most:
        return list(range(number))
    return sorted({round(i * (number - 1) / (most - 1)) for i in range(most)})


def together(row: Row, trials: Sequence[Callable[[], str]], jobs: int) -> Row:
    """Do the trials, `jobs` at a time, and count their outcomes."""
    with ThreadPoolExecutor(jobs) as pool:
        for bad in pool.map(lambda trial: trial(), trials):
            row.count(bad)
    return row


def killed_at_operations(
    bench: Bench, name: str, fault: str, most: int, jobs: int, only: str = ""
) -> Row:
    """Die at every operation on files, and start again.

    With `most`, only that many operations are tried; with `only`, those whose names begin with it.
    """
    operations, reference = bench.operations(name), bench.reference(name)
    work = bench.works[name]
    how = {KILL: "SIGKILL", POWER: "power cut, what was not synced is gone,"}[fault]
    row = Row(f"{name}: {how} at every operation on files")
    places = sampled(len(operations), most)
    places = [place for place in places if operations[place].startswith(only)]
    if len(places) < len(operations):
        row.fault = f"{name}: {how} at {len(places)} of {len(operations)} operations on files"

    def trial(number: int) -> str:
        with bench.place(work) as place, bench.forks() as forks:
            before = armed(place, fault, number)
            done = forks.run(*work.line(place), ranks=work.ranks, before=before)
            if done.status != -signal.SIGKILL:
                return f"wrong: status {done.status} at operation {number}: {done.err[-200:]}"
            bad = work.finish(forks, place, reference)
            return bad and f"{bad} (at {number}: {operations[number]})"

    return together(row, [lambda n=n: trial(n) for n in places], jobs)  # type: ignore[misc]


def killed_at_random(bench: Bench, name: str, kills: int, jobs: int, seed: int = 0) -> Row:
    """Send SIGKILL at random moments until the work is done."""
    reference, work = bench.reference(name), bench.works[name]
    row = Row(f"{name}: SIGKILL at a random moment")
    draw = random.Random(seed)
    with bench.forks() as forks, bench.place(work) as place:
        began = time.monotonic()
        forks.run(*work.line(place), ranks=work.ranks)
        whole = time.monotonic() - began

    def chain(share: int, chance: random.Random) -> list[str]:
        """Kill the work `share` times. When it is done, it starts again from the beginning."""
        outcomes: list[str] = []
        while len(outcomes) < share:
            with bench.place(work) as place, bench.forks() as forks:
                for _ in range(8):
                    fork = forks.start(*work.line(place), ranks=work.ranks)
                    time.sleep(chance.uniform(0, whole))
                    if not kill(fork):
                        fork.wait()
                        break
                    fork.wait()
                    outcomes.append("")
                bad = work.finish(forks, place, reference)
                if bad and outcomes:
                    outcomes[-1] = bad
                elif bad:
                    outcomes.append(bad)
        return outcomes

    shares = [kills // jobs + (i < kills % jobs) for i in range(jobs)]
    with ThreadPoolExecutor(jobs) as pool:
        chances = [random.Random(draw.random()) for _ in shares]
        for outcomes in pool.map(chain, shares, chances):
            for bad in outcomes:
                row.count(bad)
    return row


def kill(fork: Fork) -> bool:
    """Send SIGKILL to every rank. Returns whether any was still alive."""
    hit = False
    for pid in fork.pids:
        with suppress(ProcessLookupError):
            hit |= not ended(pid)
            os.kill(pid, signal.SIGKILL)
    return hit


def ended(pid: int) -> bool:
    """Whether a process has ended. Its status may not have been read yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def refused_by_the_disk(bench: Bench, name: str, kind: str, most: int, jobs: int) -> Row:
    """From some operation on the disk is full or read-only, or one operation fails."""
    operations, reference = bench.operations(name), bench.reference(name)
    work = bench.works[name]
    how = {
        "full": "no space left (ENOSPC)",
        "error": "the disk fails once (EIO)",
        "read-only": "read-only directory (EROFS)",
    }[kind]
    row = Row(f"{name}: {how}")
    places = sampled(len(operations), most)

    def trial(number: int) -> str:
        with bench.place(work) as place, bench.forks() as forks:
            before = armed(place, kind, number, once=kind == "error")
            done = forks.run(*work.line(place), ranks=work.ranks, before=before)
            bad = clear_line(done)
            if not bad:
                bad = work.finish(forks, place, reference)
            return bad and f"{bad} (at {number}: {operations[number]})"

    return together(row, [lambda n=n: trial(n) for n in places], jobs)  # type: ignore[misc]


def short_writes(bench: Bench, name: str) -> Row:
    """Every write writes only half of its data."""
    row, work = Row(f"{name}: every write is short"), bench.works[name]
    reference = bench.reference(name)
    with bench.place(work) as place:
        done = bench.run(name, place, armed(place, SHORT, -1))
        row.count(ending(done, work.check, place, reference))
    return row


# Python that sends this process SIGTERM in a critical phase
TOLD = {
    "validation": "from xformer import train as m; name = 'score_split'",
    "a checkpoint": "from xformer import checkpoint as m; name = 'save_tensors'",
    "the end of a checkpoint": "from xformer import checkpoint as m; name = 'write_json'",
    "start-up": "from xformer import train as m; name = 'prepare'",
    "the opening of the run": "from xformer import train as m; name = 'cut_log'",
}
HOOK = """
import os, signal, sys
{where}
original, left = getattr(m, name), [{left}]
def hooked(*arguments, **options):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(*arguments, **options)
setattr(m, name, hooked)
"""


def told_to_stop(bench: Bench, name: str, when: Iterable[str] = TOLD) -> list[Row]:
    """Send SIGTERM in a critical phase. The same command then continues."""
    rows, work, reference = [], bench.works[name], bench.reference(name)
    for what in when:
        where = TOLD[what]
        row = Row(f"{name}: SIGTERM during {what}")
        for left in (1, 2) if "start" not in what and "opening" not in what else (1,):
            with bench.place(work) as place, bench.forks() as forks:
                before = HOOK.format(where=where, left=left)
                done = forks.run(*work.line(place), ranks=work.ranks, before=before)
                if done.status not in (128 + signal.SIGTERM, -signal.SIGTERM, 0):
                    row.count(f"wrong: status {done.status}: {done.err[-200:]}")
                elif "Traceback" in done.err:
                    row.count(f"wrong: a traceback: {done.err[-200:]}")
                else:
                    row.count(work.finish(forks, place, reference))
        rows.append(row)
    return rows
