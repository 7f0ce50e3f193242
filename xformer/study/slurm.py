"""The jobs of a study as jobs of a Slurm cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xformer.children import first_on_path, same_code
from xformer.data.display import say
from xformer.data.errors import BadInput, lacks
from xformer.data.files import make_directory, read_json, write_json
from xformer.study.launch import is_own, line_of, log_of
from xformer.study.plan import Job

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
