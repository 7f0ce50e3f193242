"""Time the first steps of a study's runs, to estimate how long the study will take.

One run of each kind (the same model, batches and rows) is timed, and OUTPUT/timings.json keeps its
speed. If a run of the kind has finished, the speed of that run is used instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from xformer.config import merge
from xformer.data.display import many, say
from xformer.data.errors import BadInput
from xformer.data.files import make_directory, read_json, write_json
from xformer.monitor import events
from xformer.study.costs import Costs, Work, logged_speed
from xformer.study.launch import last_words, prepare
from xformer.study.local import Local
from xformer.study.plan import Job, Plan

FILE = "timings.json"
LIMIT = 20.0  # seconds for all timings of a study together
WARM_UP = 3  # number of first steps that are left out
STEPS, SECONDS = 5, 3.0  # a timing ends when it has more than these steps and seconds
POLL = 0.1  # seconds


def measure(plan: Plan, costs: Costs, todo: Iterable[Job], executor: Local) -> None:
    """Add the FLOP/s of more kinds of runs to the `costs`. Those in OUTPUT/timings.json are read.
    For each other kind the first run in `todo` that can start is timed. All timings together take
    LIMIT seconds at most."""
    known = measured(plan, executor)
    wanted: dict[str, tuple[Job, Work]] = {}
    for job in todo:
        work = costs.work.get(job.key)
        startable = not job.missing and all(plan.jobs[key].whole for key in job.waits)
        if work and startable and work.kind not in {*known, *costs.rates}:
            wanted.setdefault(work.kind, (job, work))
    end = time.monotonic() + LIMIT
    if wanted:
        runs = many(len(wanted), "run")
        say(f"timing the first steps of {runs}, for {LIMIT:.0f} s at most", error=True)
    for kind, (job, work) in wanted.items():
        speed = _tokens_per_second(job, executor, end)
        if speed is not None:
            known[kind] = work.operations / work.tokens * speed
    if wanted:
        make_directory(plan.root, "output=")
        write_json(plan.root / FILE, {"threads": executor.threads, "flops_per_second": known})
    costs.rates = known | costs.rates


def other_work() -> list[str]:
    """A line if this machine has more work than cores, so that runs will take longer."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return []
    return [f"other work is running: load {load:.1f} on {cores} cores"]


def measured(plan: Plan, executor: Local) -> dict[str, float]:
    """The FLOP/s by kind that `measure` wrote. If runs had another number of threads then, they are
    ignored."""
    with suppress(BadInput, KeyError, TypeError, ValueError, AttributeError):  # it is damaged
        content = read_json(plan.root / FILE)
        if content["threads"] == executor.threads:
            return {kind: float(rate) for kind, rate in content["flops_per_second"].items()}
    return {}


def _tokens_per_second(job: Job, executor: Local, end: float) -> float | None:
    """The speed of a run after its first steps, or None if it logs no step before `end`, a value
    of time.monotonic(). The run trains in a temporary directory and is killed."""
    with TemporaryDirectory(prefix="timing-", ignore_cleanup_errors=True) as scratch:
        path = Path(scratch) / "run"
        train = {"log_every": 1, "validate_every": 2**30, "checkpoint_every": 0, "keep_at": []}
        # compiling could take longer than LIMIT, and graphs alone are nearly as fast
        cnn = (job.recipe or {}).get("model", {}).get("architecture") == "hilbert_cnn"
        graphs = executor.devices and job.processes == 1 and not cnn
        system = {"compile": "graphs" if graphs else "none"}
        own = {"run": str(path), "train": train, "system": system}
        recipe = merge(job.recipe or {}, own)
        command = (*job.command[:-1], str(path.with_suffix(".toml")))
        timed = replace(job, path=path, proof=path / "result.json", recipe=recipe, command=command)
        prepare(timed)
        handle = executor.start(timed, range(min(job.processes, executor.slots)))
        try:
            while handle.exitcode is None and time.monotonic() < end:
                if _enough(events(path, "train")):
                    break
                time.sleep(POLL)
            status = handle.exitcode
        finally:
            handle.kill()
            handle.join()
        if status:
            say(f"{job.name} fails: {last_words(timed, status)}", error=True)
        return None if status else logged_speed(path, WARM_UP)


def _enough(steps: list[dict[str, Any]]) -> bool:
    """Whether enough steps were timed."""
    timed = steps[WARM_UP:]
    return len(timed) > STEPS and timed[-1]["time"] - timed[0]["time"] > SECONDS
