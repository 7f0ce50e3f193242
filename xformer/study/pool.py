"""Running the jobs of a plan: in which order, how many at once, and how each ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from xformer.data.display import say
from xformer.data.errors import Interrupted
from xformer.run import in_use
from xformer.study.launch import BAD, Outcome, apart, discard, last_words, log_of, prepare, settle
from xformer.study.plan import Job, Plan, to_do
from xformer.study.progress import StudyProgress
from xformer.study.slurm import Slurm

SIGNALS = (signal.SIGTERM, signal.SIGINT)  # they end a study at its next poll
POLL = 0.2  # seconds


class Handle(Protocol):
    """A started job, with the interface of multiprocessing.Process."""

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""

    def terminate(self) -> None:
        """Ask it to stop. Training writes a checkpoint first."""

    def join(self) -> None:
        """Wait for the end of a job that was asked to stop, unless the cluster sees to it."""


class Executor(Protocol):
    """Where jobs run: how many processes at once, and how a job is started."""

    @property
    def slots(self) -> int: ...

    def choose(self, free: Sequence[int], processes: int) -> Sequence[int]:
        """The slots of a job, among the free ones; none if it must wait."""

    def start(self, job: Job, slots: Sequence[int]) -> Handle: ...


def run_plan(
    plan: Plan,
    executor: Executor,
    keep: Callable[[Job, bool], str],
    rates: Mapping[str, float] | None = None,
) -> dict[str, Outcome]:
    """Run the jobs of a plan that must be done, and show progress and the time left. `keep` is
    called with each job that is done and whether it ran now. It returns a line for the user, or
    nothing. `rates` are known FLOP/s by kind of run."""
    signals: list[int] = []
    old = {number: signal.signal(number, lambda n, _: signals.append(n)) for number in SIGNALS}
    try:
        slots = 0 if isinstance(executor, Slurm) else executor.slots
        with StudyProgress(plan, slots, keep, rates) as progress:

            def changed(outcomes: dict[str, Outcome]) -> None:
                progress.show(outcomes)
                if signals:
                    raise Interrupted(signals[0], "stopped; run the same command again to continue")

            return run_jobs(
                list(plan.jobs.values()),
                executor,
                changed,
                prepare,
                wanted=plan.wanted,
                stale=plan.stale,
                pause=plan.root / "PAUSE",
                tell=partial(say, error=True),
            )
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@dataclass
class _Running:
    """A job that was started, and whether it was asked to stop."""

    job: Job
    handle: Handle
    slots: Sequence[int]
    place: Path | None = None  # see `apart`
    started: float = field(default_factory=time.monotonic)
    asked: bool = False


def run_jobs(
    jobs: Sequence[Job],
    executor: Executor,
    changed: Callable[[dict[str, Outcome]], None],
    set_up: Callable[[Job], None],
    poll: float = POLL,
    *,
    wanted: Collection[str] | None = None,
    stale: Callable[[Job], str] = lambda _: "",
    pause: Path | None = None,
    tell: Callable[[str], None] = say,
) -> dict[str, Outcome]:
    """Run the jobs that must be done in the order of `_order`, each once its dependencies are done.
    Returns the outcome of each, by key.

    `wanted` has the keys of the jobs that are run for their own sake (default: all). A failed job
    stops only those that depend on it. `set_up` is called before a job starts, `changed` with all
    outcomes so far every `poll` seconds. A job for which `stale` gives a reason fails; if it has
    ended, its result is deleted. While a file `pause` exists nothing runs, and `tell` is given a
    line. If `changed` raises, all running jobs are asked to stop.
    """
    queue = _Queue(jobs, executor, set_up, wanted, stale)
    stopped: list[Job] = []  # by the present pause
    told = False
    try:
        while queue.waiting or queue.running:
            stopped += queue.collect()
            if pause is not None and pause.exists():
                queue.stop()
                if not queue.running and not told:
                    tell(f"paused: {_in_words(stopped)}; remove {pause} to continue")
                    told = True
            else:
                if told:
                    tell("resumed")
                stopped, told = [], False
                queue.start()
            changed(queue.outcomes)
            if queue.waiting or queue.running:
                time.sleep(poll)
    finally:
        queue.stop()
        for running in queue.running.values():
            running.handle.join()
            settle(running.job, running.place, running.handle.exitcode)
    return queue.outcomes


def _in_words(stopped: list[Job]) -> str:
    """What a pause has interrupted."""
    if not stopped:
        return "nothing was running"
    runs = sum(job.recipe is not None for job in stopped)
    return (
        f"runs stopped with a checkpoint: {runs}, commands to be restarted: {len(stopped) - runs}"
    )


class _Queue:
    """The jobs of a study: which wait, which run, which have ended."""

    def __init__(
        self,
        jobs: Sequence[Job],
        executor: Executor,
        set_up: Callable[[Job], None],
        wanted: Collection[str] | None,
        stale: Callable[[Job], str],
    ):
        self.executor, self.set_up, self.stale = executor, set_up, stale
        todo = to_do(jobs, [job.key for job in jobs] if wanted is None else wanted)
        self.awaited = {key for job in todo.values() for key in job.waits}
        self._order = _order(jobs)
        self.waiting = sorted(todo.values(), key=lambda job: self._order[job.key])
        self.running: dict[str, _Running] = {}
        self.outcomes = {
            job.key: Outcome(job, "there" if job.done else "not needed")
            for job in jobs
            if job.key not in todo
        }

    def start(self) -> None:
        """Start jobs, in order, as long as slots are free."""
        for job in list(self.waiting):
            if blocker := _blocker(job, self.outcomes):
                self._end(job, Outcome(job, "not run", why=blocker))
        taken = {slot for running in self.running.values() for slot in running.slots}
        free = [slot for slot in range(self.executor.slots) if slot not in taken]
        for job in list(self.waiting):
            if not free:
                return
            if not all(map(self._ended_well, job.waits)) or in_use(job.path):
                continue
            if self._made(job):  # by another study, meanwhile
                self._end(job, Outcome(job, "there"))
                continue
            if why := self.stale(job):
                self._end(job, Outcome(job, "failed", why=why))
                continue
            slots = self.executor.choose(free, job.processes)
            if not slots:
                return  # wait for others to end: smaller jobs could starve this one
            free = [slot for slot in free if slot not in slots]
            log_of(job).parent.mkdir(parents=True, exist_ok=True)
            self.set_up(job)
            started, place = apart(job)
            handle = self.executor.start(started, slots)
            self.running[job.key] = _Running(job, handle, slots, place)
            self.waiting.remove(job)

    def collect(self) -> list[Job]:
        """Collect the jobs that have ended. Returns those that were asked to stop, or whose
        directory another process has; they wait again."""
        stopped = []
        for key, running in list(self.running.items()):
            status = running.handle.exitcode
            if status is None:
                continue
            del self.running[key]
            job, seconds = running.job, time.monotonic() - running.started
            settle(job, running.place, status)
            if self._made(job) and (why := self.stale(job)):
                discard(job)
                self.outcomes[key] = Outcome(job, "failed", seconds, why)
            elif self._made(job):
                self.outcomes[key] = Outcome(job, "there" if status else "done", seconds)
            elif running.asked or in_use(job.path):  # by a job that a killed study left running
                stopped.append(job)
            else:
                self.outcomes[key] = Outcome(job, "failed", seconds, last_words(job, status))
        self.waiting = sorted(self.waiting + stopped, key=lambda job: self._order[job.key])
        return stopped

    def stop(self) -> None:
        """Ask everything that runs to stop, once."""
        for running in self.running.values():
            if not running.asked:
                running.asked = True
                running.handle.terminate()

    def _ended_well(self, key: str) -> bool:
        return key in self.outcomes and self.outcomes[key].state not in BAD

    def _made(self, job: Job) -> bool:
        return job.whole if job.key in self.awaited else job.done

    def _end(self, job: Job, outcome: Outcome) -> None:
        self.outcomes[job.key] = outcome
        self.waiting.remove(job)


def _order(jobs: Sequence[Job]) -> dict[str, tuple[int, int]]:
    """The rank of each job, by key. Stores and other things that wait for no run come first, so
    that bad data is refused before any training. Then a job with a longer chain of runs before it
    comes earlier; ties keep the order of the plan. So the fine-tunings of a pre-training come
    before the next pre-training, and results come early."""
    runs: dict[str, int] = {}  # the longest chain of runs that ends with a job
    rank = {}
    for number, job in enumerate(jobs):  # what a job waits for comes before it
        before = max((runs[key] for key in job.waits), default=0)
        runs[job.key] = before + bool(job.stage)
        rank[job.key] = (-before if runs[job.key] else -len(jobs), number)
    return rank


def _blocker(job: Job, outcomes: dict[str, Outcome]) -> str:
    """Why a job can never run, or nothing."""
    if job.missing:
        return f"needs.{job.missing[0]} is missing"
    for key in job.waits:
        if key in outcomes and outcomes[key].state in BAD:
            return f"waits for {outcomes[key].job.name}"
    return ""
