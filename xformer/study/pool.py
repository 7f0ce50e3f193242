"""Works to processes: a queue that starts what waits for nothing, on this machine or on Slurm."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any, Protocol

from xformer import provenance
from xformer.data.errors import BadInput, lacks
from xformer.study.job import Command
from xformer.study.plan import Work

TAIL = 15  # lines shown of a failed work's log


class Job(Protocol):
    """A work that was started."""

    def status(self) -> int | None:
        """Its exit status; None while it runs."""

    def stop(self) -> None:
        """Ask it to stop; training writes a checkpoint first."""


class Executor(Protocol):
    """Where works run: how many at once, and how one is started."""

    @property
    def slots(self) -> int: ...

    def start(self, work: Work, slot: int) -> Job: ...


def line_of(work: Work) -> tuple[str, ...]:
    """The command line of a work, whatever directory the study was started in."""
    door = provenance.ROOT / work.command[0]  # train.py and its like lie beside the package
    first = str(door) if door.is_file() else work.command[0]
    return (sys.executable, first, *work.command[1:])


def log_of(work: Work) -> Path:
    """The file that holds what a work prints."""
    return work.path.with_name(f"{work.path.name}.log")


@dataclass
class Process:
    """A process of this machine."""

    popen: subprocess.Popen[bytes]

    def status(self) -> int | None:
        return self.popen.poll()

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
            self.popen.wait()


@dataclass(frozen=True)
class Local:
    """Processes here: each slot has its share of the cores, or one of the GPUs, by turns."""

    slots: int
    threads: int
    devices: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them

    def start(self, work: Work, slot: int) -> Process:
        environment = dict(os.environ)
        environment["OMP_NUM_THREADS"] = str(self.threads)
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices[slot % len(self.devices)]
        with log_of(work).open("ab") as log:
            popen = subprocess.Popen(line_of(work), stdout=log, stderr=log,
                                     stdin=subprocess.DEVNULL, env=environment)  # fmt: skip
        return Process(popen)


def local(jobs: int, per_device: int) -> Local:
    """The executor of this machine: `per_device` runs on each GPU, else a run on each core;
    `jobs` above 0 says how many runs at once."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        slots = jobs or count * per_device
        return Local(slots, max(1, cores // slots), tuple(visible.split(",")[:count]))
    slots = jobs or cores  # one thread a run: two runs side by side beat two threads of one
    return Local(slots, max(1, cores // slots))


@dataclass
class Submitted:
    """A job that submitit watches."""

    job: Any

    def status(self) -> int | None:
        if not self.job.done():
            return None
        try:
            return int(self.job.result())
        except Exception:  # whatever submitit makes of a job that died
            return 1

    def stop(self) -> None:
        self.job.cancel()


class Slurm:
    """Jobs of a Slurm cluster, through submitit; `options` are sbatch's, such as partition."""

    slots = 1000  # Slurm has a queue of its own

    def __init__(self, directory: Path, options: dict[str, str | int], cluster: str = "slurm"):
        if cluster == "slurm" and which("sbatch") is None:
            raise BadInput("executor=slurm: there is no sbatch on this machine; use executor=local")
        try:
            import submitit
        except ImportError:
            raise lacks("executor=slurm", "submitit", "slurm") from None
        self.executor = submitit.AutoExecutor(folder=directory / "slurm", cluster=cluster)
        self.executor.update_parameters(name="xformer", **options)

    def start(self, work: Work, slot: int) -> Submitted:
        command = Command(line_of(work), log_of(work).absolute())
        return Submitted(self.executor.submit(command))


# ------------------------------------------------------------------------------------- the queue


@dataclass
class Outcome:
    """How a work ended: "done", "there" (it was done before), "failed" or "not run"."""

    work: Work
    state: str
    seconds: float = 0.0
    why: str = ""


def execute(works: list[Work], executor: Executor, changed: Callable[[dict[str, Outcome]], None],
            prepare: Callable[[Work], None], poll: float = 0.2) -> dict[str, Outcome]:  # fmt: skip
    """Run the works, each when all it waits for is done; the outcome of each, by key.

    One that fails does not stop the others, only those that wait for it. `prepare` is called
    before a work starts, `changed` with all outcomes so far whenever one is added and at least once
    a second. On a signal all running works are asked to stop.
    """
    outcomes = {w.key: Outcome(w, "there") for w in works if w.done}
    waiting = [w for w in works if w.key not in outcomes]
    running: dict[str, tuple[Work, Job, float, int]] = {}
    with _stopped(running):
        while waiting or running:
            for work in list(waiting):
                blocker = _blocker(work, outcomes)
                if blocker:
                    outcomes[work.key] = Outcome(work, "not run", why=blocker)
                    waiting.remove(work)
            free = sorted(set(range(executor.slots)) - {slot for *_, slot in running.values()})
            for work in [w for w in waiting if w.done]:  # another study made it meanwhile
                outcomes[work.key] = Outcome(work, "there")
                waiting.remove(work)
            ready = [w for w in waiting if all(key in outcomes for key in w.waits)
                     and not in_use(w.path)]  # fmt: skip
            for work, slot in zip(ready, free, strict=False):
                log_of(work).parent.mkdir(parents=True, exist_ok=True)
                prepare(work)
                running[work.key] = (work, executor.start(work, slot), time.monotonic(), slot)
                waiting.remove(work)
            for key, (work, job, begin, _) in list(running.items()):
                status = job.status()
                if status is not None:
                    del running[key]
                    outcomes[key] = _ended(work, status, time.monotonic() - begin)
            changed(outcomes)
            if running or waiting:
                time.sleep(poll)
    return outcomes


def in_use(run: Path) -> bool:
    """Whether another process has a run: another study, or what a killed one left behind."""
    try:
        with (run / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none
        return False
    return False


def _blocker(work: Work, outcomes: dict[str, Outcome]) -> str:
    """Why a work can never run, or nothing."""
    if work.missing:
        return f"needs.{work.missing[0]} is missing"
    for key in work.waits:
        if key in outcomes and outcomes[key].state in ("failed", "not run"):
            return f"waits for {outcomes[key].work.name}"
    return ""


def _ended(work: Work, status: int, seconds: float) -> Outcome:
    if work.done:
        return Outcome(work, "there" if status else "done", seconds)
    try:
        lines = log_of(work).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    if status == 0:
        lines.append(f"it ended well and left no {work.proof}")
    return Outcome(work, "failed", seconds, "\n".join(lines[-TAIL:]))


@contextmanager
def _stopped(running: dict[str, tuple[Work, Job, float, int]]) -> Iterator[None]:
    """However the block ends, no work it started goes on."""
    try:
        yield
    finally:
        for _, job, _, _ in running.values():
            job.stop()
