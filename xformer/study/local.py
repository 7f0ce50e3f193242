"""The jobs of a study as processes of this machine."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess

from xformer.children import same_code
from xformer.data.files import usable_cores
from xformer.study.launch import is_own, line_of, log_of, variables_of
from xformer.study.plan import Job

FORKS = sys.platform != "darwin"  # macOS's own libraries may not survive a fork
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


def this_machine(jobs: int) -> Local:
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
        sys.modules.pop(f"{rest[0]}.__main__", None)  # what the study imports may include it
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")
