"""Running the jobs of a plan: where they run, in which order, and what the user sees meanwhile."""

from __future__ import annotations

import errno
import glob
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from xformer import provenance
from xformer.children import first_on_path, same_code
from xformer.config import toml_text
from xformer.data.display import Progress, duration, say
from xformer.data.errors import BadInput, Interrupted, lacks
from xformer.data.files import (
    HOST,
    alive,
    make_directory,
    owner,
    read_json,
    usable_cores,
    write_json,
)
from xformer.monitor import events
from xformer.run import in_use
from xformer.study.costs import Costs
from xformer.study.forecast import Forecast
from xformer.study.plan import SCRIPTS, Job, Plan, to_do

BAD = ("failed", "not run")  # states after which what waits for a job cannot run
TAIL = 15  # lines shown of a failed job's log
SIGNALS = (signal.SIGTERM, signal.SIGINT)  # they end a study at its next poll
FORKS = sys.platform != "darwin"  # macOS's own libraries may not survive a fork
POLL = 0.2  # seconds
MINUTE = 60.0  # seconds between two progress lines in a log
WARNINGS = "warnings.txt"  # what a job warned of, beside its kept result
AGAIN = 30.0  # seconds after which the end of a job lets the time left be estimated again
LATER = 300.0  # seconds after which it is estimated again in any case; while unknown, each minute
# The imports of the fork server. It must be single-threaded and must not have initialized a device
# when it forks, so nothing here may compute anything.
PRELOADED = [
    __name__,
    "xformer.study.loaded",  # asks git, and nothing else
    "xformer.train",
    "xformer.evaluate",
    "xformer.analysis.subcommand",
    "xformer.convert.hf",
    "xformer.preprocess.cli",
    "xformer.preprocess.tasks.predict",
    # what these import late
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.record_writer",
    "torch._dynamo",  # by the first optimizer, 1.5 s
]


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


def line_of(job: Job) -> tuple[str, ...]:
    """The command line of a job, independent of the working directory.

    In a checkout, train.py and the other scripts lie next to the package. If xformer is installed
    without them, their sub-commands are run instead.
    """
    first, *rest = job.command
    if first not in SCRIPTS:
        return (sys.executable, *job.command)
    script = provenance.ROOT / first
    program = [str(script)] if script.is_file() else ["-m", "xformer", script.stem]
    return (sys.executable, *program, *rest)


def is_own(job: Job) -> bool:
    """Whether a job runs this package, rather than a program that the study's author chose."""
    first, module, *_ = (*job.command, "", "")
    of_package = first == "-m" and module.split(".")[0] == "xformer"
    return job.recipe is not None or first in SCRIPTS or of_package


def variables_of(job: Job) -> dict[str, str]:
    """Environment variables of a job. Our own commands run the code of this process, whatever lies
    in the working directory. For other commands Python searches that directory first, as usual."""
    if is_own(job):
        return same_code()
    return {"PYTHONPATH": first_on_path()}


def log_of(job: Job) -> Path:
    """The file that holds what a job prints."""
    return job.path.with_name(f"{job.path.name}.log")


# ----------------------------------------------------------------------------------- this machine


@dataclass(frozen=True)
class Local:
    """Processes of this machine. Each slot has its share of the cores; with GPUs, slot i has GPU i
    modulo their number.

    They are forked from one server process that has imported what they need. On macOS
    each is a new process.
    """

    slots: int
    threads: int
    devices: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them

    def choose(self, free: Sequence[int], processes: int) -> Sequence[int]:
        """The first slots. With GPUs, each process of a job gets one of its own."""
        number = min(processes, self.slots, len(self.devices) or processes)
        if self.devices:
            free = sorted({slot % len(self.devices): slot for slot in reversed(free)}.values())
        return free[:number] if len(free) >= number else ()

    def start(self, job: Job, slots: Sequence[int]) -> BaseProcess:
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads)} | variables_of(job)
        if FORKS:
            _start_server(environment | same_code())
        if self.devices:
            devices = dict.fromkeys(self.devices[slot % len(self.devices)] for slot in slots)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        log = log_of(job).absolute()
        log.open("ab").close()  # fail here if the log cannot be written
        arguments = (line_of(job)[1:], str(log), environment, is_own(job))
        context = get_context("forkserver") if FORKS else get_context("spawn")
        process = context.Process(target=become, args=arguments)
        process.start()
        return process


def local(jobs: int) -> Local:
    """The executor of this machine. It runs this many jobs at once; with 0 one on each GPU or,
    without GPUs, one on each core."""
    import torch

    cores = usable_cores()
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        slots = jobs or count
        return Local(slots, max(1, cores // slots), tuple(visible.split(",")[:count]))
    slots = jobs or cores  # one thread a run: two runs side by side beat two threads of one
    return Local(slots, max(1, cores // slots))


def _start_server(environment: dict[str, str]) -> None:
    """Start the fork server with this environment, unless it is running.

    If this process is killed, the server lives as long as its jobs. It must not inherit our stdout
    and stderr: whoever reads a pipe from us would wait for the jobs too. SIGTERM is blocked in it,
    because a signal to the whole process group is not meant for the server.
    """
    forkserver.set_forkserver_preload(PRELOADED)
    before = dict(os.environ)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    outputs = {number: os.dup(number) for number in (1, 2)}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.environ.update(environment)
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
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def become(arguments: tuple[str, ...], log: str, environment: dict[str, str], own: bool) -> None:
    """Turn the forked process into `python ARGUMENTS`, with its output in a log. Our own modules
    are not searched for in the working directory.

    SIGTERM was blocked until here, so that none is lost before the command can handle it.
    """
    numbers = (os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND))
    for number, file in enumerate((*numbers, numbers[1])):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    first, *rest = arguments
    if first == "-c":
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    elif first == "-m":
        sys.argv = ["-m", *rest[1:]]
        if not own:
            sys.path.insert(0, os.getcwd())
        sys.modules.pop(f"{rest[0]}.__main__", None)  # the forecast has imported it
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")


# -------------------------------------------------------------------------------------- a cluster


EACH = ("cpus_per_task", "gpus_per_node", "mem_gb")  # of each process; submitit's names
OWN = ("time", "nodes", "ntasks", "ntasks_per_node", "array", "signal", "output", "error")
QUEUED = 1000  # jobs at once, unless jobs= says how many
TIMEOUTS = 100  # how often a job that reaches its time limit is queued again
LISTED = 20.0  # seconds after which Slurm is asked for its jobs again
LOST = 60.0  # seconds; the result of a job that has ended may be visible so much later over NFS
KILLED = 3600.0  # seconds after which a job that Slurm told to stop no longer expects to be killed


def check_slurm(options: Mapping[str, bool | int | float | str]) -> None:
    """Raises BadInput if an option is wrong, or if the time limit is missing."""
    if wrong := next((name for name in options if "-" in name), ""):
        raise BadInput(f"slurm.{wrong}: write slurm.{wrong.replace('-', '_')}")
    for name in OWN:
        if name in options:
            right = "slurm.timeout_min=MINUTES is the time limit" if name == "time" else "leave out"
            raise BadInput(f"slurm.{name} cannot be set: the study sets it; {right}")
    for name in ("timeout_min", *EACH):
        if name in options and (type(options[name]) is not int or int(options[name]) < 1):
            raise BadInput(f"slurm.{name}={options[name]}: give a whole number above 0")
    if "timeout_min" not in options:
        raise BadInput(
            "executor=slurm needs the time limit of a job in minutes, such as "
            "slurm.timeout_min=600; a run that reaches it is queued again and continues"
        )


def own_folder(folder: Path) -> None:
    """Make a folder that only this user may enter. Raises BadInput if it is not this user's.

    submitit pickles each job into its folder, and the job unpickles it on the cluster. So whoever
    can write there can run programs as this user.
    """
    make_directory(folder, "output=")
    with suppress(OSError):  # said below
        folder.chmod(0o700)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise BadInput(
            f"executor=slurm: {folder} belongs to another user, who could run programs as you; "
            "give another output="
        )
    if status.st_mode & 0o022:
        raise BadInput(
            f"executor=slurm: other users can write into {folder}, and so run programs as you; "
            f"type chmod 700 {shlex.quote(str(folder))}, or give another output="
        )


def _note(pickle: Path) -> Path:
    """The file that has as JSON what the study must know of one of submitit's pickles. The study
    itself reads no pickles."""
    return pickle.with_suffix(".json")


class Slurm:
    """Jobs of a Slurm cluster, through submitit.

    `options` are `timeout_min`, the time limit, which is required; `cpus_per_task`,
    `gpus_per_node` and `mem_gb` for each process of a job; and any option of sbatch by its name,
    such as `partition`. At most `slots` jobs are submitted at once.
    """

    def __init__(
        self,
        directory: Path,
        options: Mapping[str, bool | int | float | str],
        slots: int = QUEUED,
    ):
        for name in ("sbatch", "srun"):
            if shutil.which(name) is None:
                missing = f"executor=slurm: there is no {name} on this machine"
                raise BadInput(f"{missing}; use executor=local, or a machine that submits jobs")
        check_slurm(options)
        try:
            import submitit
        except ImportError:
            raise lacks("executor=slurm", "submitit", "slurm") from None
        self.folder, self.slots = directory / "slurm", slots
        own_folder(self.folder)
        self.executor = submitit.AutoExecutor(
            self.folder,
            "slurm",
            slurm_max_num_timeout=TIMEOUTS,
            slurm_python=f"{shlex.quote(sys.executable)} -P",
        )
        self.each = {name: int(options[name]) for name in EACH if name in options}
        other = {k: v for k, v in options.items() if k not in ("timeout_min", *EACH)}
        flags = {key: value for key, value in other.items() if value is not False}
        self.executor.update_parameters(
            name="xformer",
            timeout_min=options["timeout_min"],
            slurm_additional_parameters={"requeue": True, **flags},
            slurm_setup=[f"export PYTHONPATH={shlex.quote(first_on_path())}"],
        )
        self.looked, self.answered, self.jobs = -LISTED, 0.0, set[str]()
        self.left = self._left()

    def choose(self, free: Sequence[int], processes: int) -> Sequence[int]:
        return free[:1]

    def start(self, job: Job, slots: Sequence[int]) -> SlurmHandle:
        """Raises BadInput if sbatch refuses the job."""
        from submitit import SlurmJob
        from submitit.core.utils import FailedJobError

        line, log, threads = line_of(job), log_of(job).absolute(), self.each.get(EACH[0], 0)
        command = ClusterCommand(line, log, threads, is_own(job))
        if number := self.left.pop((command.line, command.log), ""):
            return SlurmHandle(SlurmJob(self.folder, number), self)
        of_all = {name: job.processes * number for name, number in self.each.items()}
        self.executor.update_parameters(**of_all)
        try:
            submitted = self.executor.submit(command)
            write_json(_note(submitted.paths.submitted_pickle), [command.line, str(command.log)])
            return SlurmHandle(submitted, self)
        except FailedJobError as error:
            reason = " ".join(str(error).replace("sbatch: error:", "").split())
            raise BadInput(f"executor=slurm: sbatch refused {job.name!r}: {reason}") from None

    def _left(self) -> dict[tuple[tuple[str, ...], Path], str]:
        """The jobs of an earlier call that was killed: the number of each command line and log."""
        from submitit import SlurmJob

        self.lists("", 0.0)
        left = {}
        for number in self.jobs:
            with suppress(BadInput, TypeError, ValueError):  # another study's, or damaged
                line, log = read_json(_note(SlurmJob(self.folder, number).paths.submitted_pickle))
                left[tuple(line), Path(log)] = number
        return left

    def lists(self, number: str, since: float) -> bool:
        """Whether Slurm has a job that was submitted at `since`. Without an answer it is assumed.
        This asks squeue, because many small clusters have no accounting, which sacct needs."""
        if time.monotonic() > self.looked + LISTED:
            self.looked = time.monotonic()
            line = ("squeue", "--noheader", "--me", "--format=%A")
            try:
                answer = subprocess.check_output(line, text=True, timeout=60)
                self.answered, self.jobs = self.looked, set(answer.split())
            except (OSError, subprocess.SubprocessError) as error:
                if self.answered >= 0:  # say it once
                    say(f"warning: jobs that die are not noticed, because {error}", error=True)
                self.answered = -1.0
        return number in self.jobs or self.answered < since


@dataclass
class SlurmHandle:
    """A job that was submitted."""

    submitted: Any
    cluster: Slurm
    seen: float = field(default_factory=time.monotonic)  # when Slurm last had it

    @property
    def exitcode(self) -> int | None:
        """None while it waits or runs; as if it was killed if Slurm no longer has it."""
        if self.submitted.paths.result_pickle.exists():
            try:
                return int(read_json(_note(self.submitted.paths.result_pickle)))
            except (BadInput, TypeError, ValueError):  # the job died
                return 1
        if self.cluster.lists(self.submitted.job_id, self.seen):
            self.seen = time.monotonic()
        lost = time.monotonic() > self.seen + LISTED + LOST
        return -signal.SIGKILL if lost else None

    def terminate(self) -> None:
        self.submitted.cancel(check=False)
        pickle = self.submitted.paths.submitted_pickle
        for file in (pickle, _note(pickle)):  # so that nobody takes it up again
            file.unlink(missing_ok=True)

    def join(self) -> None:
        pass  # the cluster takes care of it


@dataclass
class ClusterCommand:
    """What submitit runs on the cluster: a command whose output goes to a file. Returns its exit
    status.

    Before the time limit Slurm sends SIGUSR2. The command is then stopped, which makes training
    write a checkpoint, and queued again to continue from it. A job that is preempted or cancelled
    gets SIGTERM, and so does its command; Slurm kills the job and may queue it again.
    """

    line: tuple[str, ...]
    log: Path
    threads: int = 0  # of each process; 0 if it is not known
    own: bool = False  # see `is_own`
    popen: subprocess.Popen[bytes] | None = None
    told: bool = False  # by SIGTERM

    def __call__(self) -> int:
        # the cluster signals all processes of a job; the command must hear it from this one only
        from submitit import JobEnvironment

        old = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        variables = same_code() if self.own else {}
        if self.threads:
            variables["OMP_NUM_THREADS"] = str(self.threads)
        with self.log.open("ab") as log:
            null, env = subprocess.DEVNULL, os.environ | variables
            self.popen = subprocess.Popen(self.line, stdin=null, stdout=log, stderr=log, env=env)
        signal.signal(signal.SIGUSR2, old)
        signal.signal(signal.SIGTERM, self._stopped)
        try:
            status = self._wait()
            if self.told and status:  # not a result: the job may be queued again
                time.sleep(KILLED)
            write_json(_note(JobEnvironment().paths.result_pickle), status)
            return status
        finally:
            self.stop()

    def _stopped(self, *_: object) -> None:
        self.told = True

    def checkpoint(self) -> Any:
        """What submitit queues when it interrupts the job."""
        from submitit.helpers import DelayedSubmission

        self.stop()
        return DelayedSubmission(ClusterCommand(self.line, self.log, self.threads, self.own))

    def stop(self) -> None:
        """Ask the command to stop, and wait until it has."""
        if self.popen is not None and self.popen.poll() is None:
            self.popen.terminate()
            self._wait()

    def _wait(self) -> int:
        """Poll, because `checkpoint` is called from a signal handler: Popen.wait would deadlock
        there if it interrupted another Popen.wait."""
        assert self.popen is not None
        while (status := self.popen.poll()) is None:
            time.sleep(0.1)
        return status


# ------------------------------------------------------------------------------------- the queue


@dataclass
class Outcome:
    """How a job ended: "done", "there" (done before, or meanwhile by another study), "not needed"
    (not done, and no job that must run waits for it), "failed" or "not run"."""

    job: Job
    state: str
    seconds: float = 0.0
    why: str = ""


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


def last_words(job: Job, status: int) -> str:
    """The end of a failed job's log, and how it ended if the log does not say so. At least one
    line."""
    try:
        lines = log_of(job).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    if status == 0:
        lines.append(f"it exited with status 0 but wrote no {job.proof}")
    elif status < 0:
        lines.append(f"it was ended by signal {-status} ({signal.strsignal(-status)})")
    elif not lines:
        full = _full(log_of(job).parent)
        lines.append(f"it exited with status {status} and printed nothing{full}")
    return "\n".join(lines[-TAIL:])


def _full(directory: Path) -> str:
    """Half a sentence if nothing can be written into a directory because its disk is full."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = os.strerror(error.errno).lower()
            return f", because the disk is full ({why}: {directory}); free some space"
    return ""


def warnings_of(job: Job) -> list[str]:
    """The warnings in the log of a job, such as that its tokenizer does not know the text, or those
    that were kept with its result. [] if the log is gone."""
    log = log_of(job) if log_of(job).is_file() else job.path / WARNINGS
    if not log.is_file():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return list(dict.fromkeys(line for line in lines if line.lower().startswith("warning: ")))


# --------------------------------------------------------------------------------- a whole study


def set_up(job: Job) -> None:
    """Write the recipe that a run is started with, or make the directory of a command's result. A
    job that is done but must be made again, because it is not whole, starts in an empty
    directory."""
    if job.done and not job.whole:
        discard(job)
    if job.recipe is not None:
        job.path.parent.mkdir(parents=True, exist_ok=True)
        text = f"# {job.name}\n{toml_text(job.recipe)}"
        job.path.with_suffix(".toml").write_text(text, encoding="utf-8")
    elif job.stage:
        job.path.mkdir(parents=True, exist_ok=True)


def discard(job: Job) -> None:
    """Delete what a job has made."""
    aside = job.path.with_name(f".{job.path.name}.{owner()}.partial")
    job.path.rename(aside)
    if aside.is_dir():
        shutil.rmtree(aside)
    else:
        aside.unlink()


def apart(job: Job) -> tuple[Job, Path | None]:
    """The job as it is started, and its place.

    A foreign command may leave half of its output if it fails or is stopped. So it writes into a
    directory of its own, from which `settle` moves the output. Our own commands write an output
    that is complete or absent; they and runs have no such place.
    """
    if is_own(job):
        return job, None
    name = f".{job.path.name}.{owner()}-"
    for old in job.path.parent.glob(f".{glob.escape(job.path.name)}.*.making"):
        left = re.fullmatch(rf"\.{re.escape(job.path.name)}\.{HOST}-(\d+)-\w+\.making", old.name)
        if left and not alive(int(left[1])):  # by a study that was killed
            shutil.rmtree(old, ignore_errors=True)
    place = Path(tempfile.mkdtemp(".making", name, job.path.parent))
    out = place / job.path.name
    if job.stage:
        out.mkdir()
    command = tuple(part.replace(str(job.path), str(out)) for part in job.command)
    return replace(job, command=command), place


def settle(job: Job, place: Path | None, status: int | None) -> None:
    """Move the output of a command from its place to the job's path if the command has ended well
    and no other study has made it meanwhile, and delete the place. It stays if the command may
    still run (`status` None). A child of a stopped command may still write there."""
    if place is None or status is None:
        return
    out = place / job.path.name
    if status == 0 and out.exists() and not job.whole:
        if job.path.exists():
            discard(job)
        out.rename(job.path)
    shutil.rmtree(place, ignore_errors=True)


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
                set_up,
                wanted=plan.wanted,
                stale=plan.stale,
                pause=plan.root / "PAUSE",
                tell=partial(say, error=True),
            )
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def newest_numbers(jobs: Iterable[Job]) -> dict[str, float]:
    """Step, loss and speed of the training that logged last among jobs that are not done."""
    try:
        runs = [job.path for job in jobs if (job.path / "log.jsonl").is_file()]
        newest = max(runs, key=lambda run: (run / "log.jsonl").stat().st_mtime)
        record = events(newest, "train")[-1]
        speed = record["real_tokens_per_second"]
        return {"step": record["step"], "loss": record["loss"], "tokens/s": speed}
    except (OSError, IndexError, KeyError, ValueError):  # no log yet, or a half-written line
        return {}


class StudyProgress(Progress):
    """The progress of a study: a line for each job that ends and one per minute, with the time
    left; on a terminal also a bar. Nobody knows how long a cluster will take (`slots` is 0)."""

    def __init__(
        self,
        plan: Plan,
        slots: int,
        keep: Callable[[Job, bool], str],
        rates: Mapping[str, float] | None = None,
    ):
        self.plan, self.slots, self.keep, self.rates = plan, slots, keep, rates or {}
        self.open = to_do(plan.jobs.values(), plan.wanted)
        self.said: set[str] = set()
        self.warned: set[str] = set()  # each warning is printed once
        self.looked = self.ended = time.monotonic()
        self._estimate()
        super().__init__("study", len(plan.jobs), "jobs", lines=False, stay=True)

    def show(self, outcomes: dict[str, Outcome]) -> None:
        """Say what has ended since the last time."""
        for key in [key for key in outcomes if key not in self.said]:
            self.said.add(key)
            self._ended(key, outcomes[key])
        now = time.monotonic()
        if now - self.looked > MINUTE:
            self.looked = now
            # a run of unknown cost may have logged its speed, and more stores may exist
            if self.left() is None or now - self.estimated > LATER:
                self._estimate()
            self.numbers = newest_numbers(self.open.values())
            if self.bar is None and self.open:
                say(self._line(), error=True)
        self.advance(0)  # the time left has changed

    def _ended(self, key: str, outcome: Outcome) -> None:
        if outcome.state == "not needed":
            self.total -= 1
            return
        if self.open.pop(key, None):
            if time.monotonic() > self.estimated + AGAIN:  # more stores exist now
                self._estimate()
            self.seconds.pop(key, None)
            self.ended = time.monotonic()
        else:
            self.before += 1  # done before: it says nothing about the speed
        self.advance(1)
        line = f"[{self.done:.0f}/{self.total:.0f}] {outcome.job.name}: {outcome.state}"
        if outcome.state == "done":
            left = self.left() if self.seconds else None
            took = f", {outcome.seconds:.0f} s" if self.slots else ""  # with the time in a queue
            after = "" if left is None else f"; about {duration(left)} left"
            warnings = [text for text in warnings_of(outcome.job) if text not in self.warned]
            self.warned.update(warnings)
            said = (f"    {text}" for text in warnings)
            say(f"{line}{took}{after}", *said, error=True)
        elif outcome.state != "there":
            say(line, *(f"    {text}" for text in outcome.why.splitlines()), error=True)
        if outcome.state in ("done", "there"):
            say(*filter(None, [self.keep(outcome.job, outcome.state == "done")]), error=True)

    def left(self) -> float | None:
        """Estimated seconds left: the cost of the open jobs, minus the time since one ended, which
        counts for one job at most. None if the cost of a run is not known yet, or on a cluster."""
        costs = [seconds for seconds in self.seconds.values() if seconds is not None]
        if len(costs) < len(self.seconds) or not self.slots:
            return None
        rest = sum(costs) / max(1, min(self.slots, len(costs)))
        spent = min(time.monotonic() - self.ended, max(costs, default=0.0))
        return max(0.0, rest - spent)

    def _estimate(self) -> None:
        costs = Costs(Forecast(self.plan))
        costs.rates = {**self.rates, **costs.rates}
        self.seconds = {key: costs.guess(job) for key, job in self.open.items()}
        self.estimated = time.monotonic()
