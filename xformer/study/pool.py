"""The queue that runs works: it starts each work whose inputs are there, here or on Slurm."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from shutil import which
from typing import Any, Protocol

from xformer import provenance
from xformer.data.display import say
from xformer.data.errors import BadInput, lacks
from xformer.study.job import Command, become
from xformer.study.plan import Work, to_do

TAIL = 15  # lines shown of a failed work's log
DOORS = ("preprocess.py", "train.py", "evaluate.py")
PRELOAD = "xformer.study.preload"  # what the process that forks the works imports first


class Job(Protocol):
    """A work that was started."""

    def status(self) -> int | None:
        """Its exit status; None while it runs."""

    def stop(self) -> None:
        """Ask it to stop; training writes a checkpoint first."""

    def wait(self) -> None:
        """Wait for the end of one that was asked to stop, unless somebody else sees to that."""


class Executor(Protocol):
    """Where works run: how many at once, and how one is started."""

    @property
    def slots(self) -> int: ...

    def start(self, work: Work, slot: int) -> Job: ...


def line_of(work: Work) -> tuple[str, ...]:
    """The command line of a work, whatever directory the study was started in.

    train.py and its like lie beside the package in a checkout. Without one they are sub-commands.
    """
    first, *rest = work.command
    door = provenance.ROOT / first
    if first in DOORS:
        program = [str(door)] if door.is_file() else ["-m", "xformer", door.stem]
        return (sys.executable, *program, *rest)
    return (sys.executable, *work.command)


def log_of(work: Work) -> Path:
    """The file that holds what a work prints."""
    return work.path.with_name(f"{work.path.name}.log")


@dataclass
class Process:
    """A process of this machine."""

    process: BaseProcess

    def status(self) -> int | None:
        return self.process.exitcode

    def stop(self) -> None:
        self.process.terminate()

    def wait(self) -> None:
        self.process.join()


@dataclass(frozen=True)
class Local:
    """Processes of this machine. Each slot has its share of the cores; with GPUs, slot i has GPU i
    modulo their number.

    They are forks of one process that has imported what they need, so imports are paid once.
    """

    slots: int
    threads: int
    devices: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them

    def start(self, work: Work, slot: int) -> Process:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        _start_server(environment)
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices[slot % len(self.devices)]
        log = log_of(work).absolute()
        log.open("ab").close()  # a disk that refuses is noticed here
        arguments = (line_of(work)[1:], str(log), environment)
        process = get_context("forkserver").Process(target=become, args=arguments)
        process.start()
        return Process(process)


def _start_server(environment: dict[str, str]) -> None:
    """Start the process that works are forked from, unless it runs, in an environment.

    When this process is killed, that one lives as long as its works. It gets none of the terminal
    and pipes that are open here, or whoever reads one of them would wait for the works.
    """
    forkserver.set_forkserver_preload([PRELOAD])
    before = dict(os.environ)
    paths = (str(provenance.ROOT), environment.get("PYTHONPATH", ""))
    outputs = {number: os.dup(number) for number in (1, 2)}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.environ.update(environment, PYTHONPATH=os.pathsep.join(filter(None, paths)))
        for number in outputs:
            os.dup2(null, number)
        forkserver.ensure_running()
    finally:
        for number, copy in outputs.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(null)
        os.environ.clear()
        os.environ.update(before)


def local(jobs: int, per_device: int) -> Local:
    """The executor of this machine: `per_device` runs on each GPU, else a run on each core;
    `jobs` above 0 says how many runs at once."""
    import torch

    cores = len(os.sched_getaffinity(0))
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

    def wait(self) -> None:
        pass  # the cluster ends it


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
    """How a work ended: "done", "there" (it was done before), "not needed" (it is not there, and no
    work that is to be done waits for it), "failed" or "not run"."""

    work: Work
    state: str
    seconds: float = 0.0
    why: str = ""


@dataclass
class _Begun:
    """A work that was started, and whether it was asked to stop for a pause."""

    work: Work
    job: Job
    begin: float
    slot: int
    asked: bool = False


def execute(
    works: Sequence[Work],
    executor: Executor,
    changed: Callable[[dict[str, Outcome]], None],
    prepare: Callable[[Work], None],
    poll: float = 0.2,
    *,
    wanted: Collection[str] | None = None,
    pause: Path | None = None,
    tell: Callable[[str], None] = say,
) -> dict[str, Outcome]:
    """Run what is to be done of the works, each when all it waits for is there, in the order of
    `_order`; the outcome of each, by key.

    `wanted` are the keys of those that are run for their own sake; without it, all. One that fails
    does not stop the others, only those that wait for it. `prepare` is called before a work starts,
    `changed` with all outcomes so far after each look, every `poll` seconds. While there is a file
    `pause` nothing runs, and `tell` is given a line. If `changed` raises, all running works are
    asked to stop.
    """
    queue = _Queue(works, executor, prepare, wanted)
    stops: list[Work] = []  # for the pause that is now
    told = False
    try:
        while queue.waiting or queue.begun:
            stops += queue.collect()
            paused = pause is not None and pause.exists()
            if paused:
                queue.stop()
                if not queue.begun and not told:
                    tell(f"paused: {_stopped(stops)}; remove {pause} to go on")
                    told = True
            else:
                if told:
                    tell("going on")
                stops, told = [], False
                queue.start()
            changed(queue.outcomes)
            if queue.waiting or queue.begun:
                time.sleep(poll)
    finally:
        queue.stop()
        for begun in queue.begun.values():
            begun.job.wait()
    return queue.outcomes


def _stopped(works: list[Work]) -> str:
    """What a pause has interrupted, in words."""
    runs = sum(work.recipe is not None for work in works)
    others = len(works) - runs
    parts = []
    if runs:
        parts += [
            f"{runs} runs stopped at their checkpoints"
            if runs > 1
            else "1 run stopped at its checkpoint"
        ]
    if others:
        parts += [f"{others} command{'s' * (others > 1)} to be started again"]
    return ", ".join(parts) or "nothing was running"


class _Queue:
    """The works of a study on their way: waiting, begun, ended."""

    def __init__(
        self,
        works: Sequence[Work],
        executor: Executor,
        prepare: Callable[[Work], None],
        wanted: Collection[str] | None,
    ):
        self.executor, self.prepare = executor, prepare
        todo = to_do(works, [work.key for work in works] if wanted is None else wanted)
        self.awaited = {key for work in todo.values() for key in work.waits}
        self._order = _order(works)
        self.waiting = sorted(todo.values(), key=lambda work: self._order[work.key])
        self.begun: dict[str, _Begun] = {}
        self.outcomes = {
            work.key: Outcome(work, "there" if work.done else "not needed")
            for work in works
            if work.key not in todo
        }

    def start(self) -> None:
        """Start works, the first of the plan first, as long as a slot is free."""
        for work in list(self.waiting):
            if blocker := _blocker(work, self.outcomes):
                self._end(work, Outcome(work, "not run", why=blocker))
        taken = {begun.slot for begun in self.begun.values()}
        free = [slot for slot in range(self.executor.slots) if slot not in taken]
        for work in list(self.waiting):
            if not free:
                return
            if not all(key in self.outcomes for key in work.waits) or in_use(work.path):
                continue
            if self._made(work):  # by another study, meanwhile
                self._end(work, Outcome(work, "there"))
            else:
                log_of(work).parent.mkdir(parents=True, exist_ok=True)
                self.prepare(work)
                slot = free.pop(0)
                job = self.executor.start(work, slot)
                self.begun[work.key] = _Begun(work, job, time.monotonic(), slot)
                self.waiting.remove(work)

    def collect(self) -> list[Work]:
        """Take note of what has ended; the works that did so because they were asked to stop, or
        because another process has their directory. They wait again."""
        stopped = []
        for key, begun in list(self.begun.items()):
            status = begun.job.status()
            if status is None:
                continue
            del self.begun[key]
            work, seconds = begun.work, time.monotonic() - begun.begin
            if self._made(work):
                self.outcomes[key] = Outcome(work, "there" if status else "done", seconds)
            elif begun.asked or in_use(work.path):  # by what a killed study left behind
                stopped.append(work)
            else:
                self.outcomes[key] = Outcome(work, "failed", seconds, _last_words(work, status))
        self.waiting = sorted(self.waiting + stopped, key=lambda work: self._order[work.key])
        return stopped

    def stop(self) -> None:
        """Ask what runs to stop, once."""
        for begun in self.begun.values():
            if not begun.asked:
                begun.asked = True
                begun.job.stop()

    def _made(self, work: Work) -> bool:
        return work.whole if work.key in self.awaited else work.done

    def _end(self, work: Work, outcome: Outcome) -> None:
        self.outcomes[work.key] = outcome
        self.waiting.remove(work)


def _order(works: Sequence[Work]) -> dict[str, tuple[int, int]]:
    """The rank of each work by key. The work with the most runs before it comes first; equal works
    keep the order of the plan. So the fine-tunings of a pre-training come before the next
    pre-training, and results come as early as possible."""
    runs: dict[str, int] = {}  # of each work, itself and what it waits for, in a row
    rank = {}
    for number, work in enumerate(works):  # what a work waits for comes before it
        before = max((runs[key] for key in work.waits), default=0)
        runs[work.key] = before + bool(work.stage)
        rank[work.key] = (-before, number)
    return rank


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


def _last_words(work: Work, status: int) -> str:
    """The end of a failed work's log."""
    try:
        lines = log_of(work).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    if status == 0:
        lines.append(f"it ended well and left no {work.proof}")
    return "\n".join(lines[-TAIL:])
