"""A long run of a tiny model: the memory, files and threads that it uses at its beginning and
end.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
from helpers import SMOKE, training

from faults.works import Bench, Row

SAMPLE = """
import json, os, pathlib, signal, threading, time, resource
from xformer.monitor import Monitor
plain = Monitor.advance
def held():
    status = pathlib.Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    maps = pathlib.Path("/proc/self/maps").read_text()
    return {{"rss": int(fields["RssAnon"].split()[0]) * 1024,
            "files": len(os.listdir("/proc/self/fd")), "threads": int(fields["Threads"]),
            "shared": maps.count("/dev/shm/"),
            "cpu": time.process_time(), "wall": time.perf_counter()}}
def advance(self, done):
    plain(self, done)
    if done % 1000 == 0:
        print(json.dumps({{"step": done, **held()}}), flush=True)
Monitor.advance = advance
signal.alarm(0)  # the patience of tests is for shorter commands
"""
TINIEST = [
    "model.layers=1",
    "model.hidden=16",
    "model.heads=1",
    "model.intermediate=16",
    "batch.rows=2",
    "train.log_every=100",
    "train.validate_every=5000",
    "train.checkpoint_every=2500",
]
SLOWER = 1.05  # the last steps may take so many times as long as the first
GROWTH = 32 * 2**20  # bytes that the process may grow by after its first tenth


def long_haul(bench: Bench, steps: int = 20_000) -> tuple[Row, dict[str, Any]]:
    """In many steps of a tiny model, memory, files, threads and shared memory do not grow.

    Neither does the CPU time of a step.
    """
    row = Row(f"{steps:,} steps of a tiny model")
    with bench.place() as place, bench.forks() as forks:
        line = training(SMOKE, bench.toys.text, place / "run", *TINIEST, f"train.steps={steps}")
        done = forks.run(*line, before=SAMPLE.format())
    if done.status:
        row.count(f"lost: {done.err[-300:]}")
        return row, {}
    points = [json.loads(text) for text in done.out.splitlines() if text.startswith('{"step"')]
    early, last = points[max(1, len(points) // 10)], points[-1]
    usage: dict[str, Any] = {
        name: [(b[name] - a[name]) for a, b in pairwise(points)] for name in ("cpu", "wall")
    }  # seconds per thousand steps are milliseconds per step
    usage["memory_mib"] = [round(p["rss"] / 2**20, 1) for p in points]
    usage |= {name: [p[name] for p in points] for name in ("files", "threads", "shared")}
    few = max(1, len(usage["cpu"]) // 6)
    speed = [float(np.median(part)) for part in (usage["cpu"][:few], usage["cpu"][-few:])]
    bad = ""
    if last["rss"] - early["rss"] > GROWTH:
        bad = f"wrong: memory grows: {usage['memory_mib']} MiB"
    for name in ("files", "threads", "shared"):
        if last[name] > early[name]:
            bad = f"wrong: {name} grow: {usage[name]}"
    if speed[1] > SLOWER * speed[0]:
        bad = f"wrong: it slows down: {usage['cpu']} s of CPU a thousand steps"
    row.count(bad)
    row.notes.append(
        f"memory {usage['memory_mib'][0]} to {usage['memory_mib'][-1]} MiB, "
        f"{last['files']} files, {last['threads']} threads; "
        f"{speed[0]:.2f} to {speed[1]:.2f} ms of CPU a step"
    )
    return row, usage
