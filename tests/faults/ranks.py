"""One of two ranks is killed or hangs. How soon does the other end, what does it say, and does the
same command, or torchrun by itself, go on?
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from helpers import QUIET, ROOT, SMOKE, training

from faults.deaths import ended, together
from faults.works import STEPS, Bench, Row, check_run, wrong

AT = """
import os, signal
from xformer.monitor import Monitor
plain = Monitor.advance
def advance(self, done):
    plain(self, done)
    if done == {step} and os.environ["RANK"] == "{rank}" and {when}:
        os.kill(os.getpid(), signal.{signal})
Monitor.advance = advance
"""
RESTARTS = 6  # restarts by torchrun for each signal; rank 0, rank 1 or neither comes late
LIMIT = 60  # seconds within which the others must have ended


def one_of_two(bench: Bench, number: signal.Signals, rank: int) -> Row:
    """One rank is killed or stopped after step 3."""
    what = {signal.SIGKILL: "killed", signal.SIGSTOP: "hangs (SIGSTOP)"}[number]
    row = Row(f"training on two ranks: rank {rank} {what}")
    name = "training on two ranks"
    work, reference = bench.works[name], bench.reference(name)
    with bench.place() as place, bench.forks() as forks:
        before = AT.format(step=3, rank=rank, signal=number.name, when="True")
        fork = forks.start(*work.line(place), ranks=2, before=before)
        other, victim = fork.pids[1 - rank], fork.pids[rank]
        while not (ended(victim) or stopped(victim)):
            time.sleep(0.05)
        began = time.monotonic()
        while not ended(other) and time.monotonic() - began < LIMIT:
            time.sleep(0.05)
        seconds, told = time.monotonic() - began, Path(fork.outputs[1 - rank][1]).read_text()
        for pid in fork.pids:
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)
        fork.wait()
        bad = ""
        if seconds >= LIMIT:
            bad = f"wrong: the other rank still ran after {LIMIT} s"
        elif not re.search(rf"^error: rank {rank} at step \d+ ended or hangs", told, re.M):
            bad = f"wrong: nobody named rank and step: {told[-300:]}"
        elif "Traceback" in told:
            bad = f"wrong: a traceback: {told[-300:]}"
        row.count(bad or work.finish(forks, place, reference))
        row.notes.append(f"the other rank ended after {seconds:.0f} s")
    return row


def stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except OSError:
        return False


ELASTIC = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
sys.argv[0] = "train.py"
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if not first and os.environ["RANK"] == "{late}":
    time.sleep(3)
{hook}
from xformer.start import run
from xformer.train import main
run(main)
"""


def restarted_by_torchrun(bench: Bench, number: signal.Signals, jobs: int = 2) -> Row:
    """torchrun --max-restarts 1 brings the killed or stopped rank back, and the run ends as it
    should.

    In some restarts rank 0 comes late, in others rank 1.
    """
    row = Row(f"training on two ranks: torchrun restarts after {number.name} to one")
    reference = bench.reference("training on two ranks")

    def trial(late: int) -> str:
        with bench.place() as place:
            hook = AT.format(step=3, rank=1, signal=number.name, when="first")
            script = bench.scratch / f"elastic-{number.name}-{late}.py"
            script.write_text(ELASTIC.format(root=str(ROOT), hook=hook, late=late))
            line = training(SMOKE, bench.toys.text, place / "run", *STEPS)[1:]
            launcher = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "--max-restarts",
                "1",
                str(script),
                *line,
            ]
            done = subprocess.run(
                launcher, cwd=ROOT, env={**os.environ, **QUIET}, text=True, capture_output=True
            )
            if done.returncode:
                said = re.findall(r"^(?:.*: )?(?:error|\w+Error): .*", done.stderr, re.M)
                return f"lost: {said[-4:] or done.stderr[-300:]}"  # not torchrun's own report
            if "from step" not in done.stderr:
                return "lost: it began anew"
            return wrong(check_run, place, reference)

    return together(row, [partial(trial, i % 3) for i in range(RESTARTS)], jobs)
