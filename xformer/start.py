"""Start a command: prepare the process before torch is imported, and turn errors into an exit
status.

train.py, evaluate.py, preprocess.py, `xformer` and `python -m xformer.X` call `run(main)`; `main`
then imports what needs torch.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path

from xformer.data.display import one_line, say
from xformer.data.errors import OF_THE_DISK, BadInput, Failure, Interrupted, reason

# variables with which a user sets how OpenMP's threads wait
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPINS = "2000"  # iterations of libgomp's waiting loop; measured in docs/scaling.md
POLL = 1.0  # seconds between two checks of the parent
OBJECTS = 100_000  # new objects between two searches for garbage; Python's default is 700
FILES = 4096  # that a command may open
GRACE = 7.0  # seconds that an orphaned rank has to write a checkpoint


def run(main: Callable[[], None]) -> None:
    """Call `main` and exit with status 0. After an error, print a line about it on standard error,
    or a line for each of several mistakes in a file, and exit with its status.

    Under torchrun only rank 0 prints. Errors other than BadInput, Failure, Interrupted and those of
    the disk are bugs, and keep their traceback.
    """
    open_standard_streams()
    end_with_parent()
    search_for_garbage_seldom()
    rank_zero = os.environ.get("RANK", "0") == "0"
    status, lines = 0, tuple[str, ...]()
    try:
        if sys.platform == "win32":
            raise BadInput("xformer does not run on Windows itself; use its Linux subsystem (WSL)")
        if sys.flags.optimize > 1:
            raise BadInput("xformer needs its docstrings, which python -OO removes; use python -O")
        main()
    except BadInput as error:
        status, lines = error.status, error.lines
    except (Failure, Interrupted) as error:
        status, lines = error.status, (str(error),)
    except KeyboardInterrupt:
        status, lines = 128 + signal.SIGINT, ("interrupted",)
    except BrokenPipeError:  # whoever read standard output, such as `head`, has ended
        status = 128 + signal.SIGPIPE
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        status, lines = 1, (reason(error),)
    except MemoryError:
        status, lines = 1, ("the memory is full; free some, or raise the limit (ulimit -v)",)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        status, lines = 2, ("this command needs torch, which is not installed: pip install torch",)
    if rank_zero:
        say(*(one_line(f"error: {x}" if status < 128 else x) for x in lines), error=True)
    # A rank ends without destructors. One that stays in a group of NCCL would wait there (see
    # xformer.parallel.processes). A thread of gloo may still free a tensor, for which it needs the
    # interpreter, and aborts the process if that is going away (pytorch#190489).
    if "RANK" in os.environ and "torch.distributed" in sys.modules:
        os._exit(status)
    sys.exit(status)


def as_command(name: str) -> None:
    """Make `python -m xformer.NAME` the same as `xformer NAME`; never returns.

    A module calls this before its imports. The command then imports the module under its own name,
    so that no class exists twice. xformer.command is imported by name, because it imports all other
    modules.
    """
    sys.argv.insert(1, name)
    # two modules with one file would keep pydantic from the docstrings of the fields
    vars(sys.modules["__main__"]).pop("__file__", None)
    import_module("xformer.command").main()


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed, so that no other file gets its
    number. Characters that an output cannot encode are escaped."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w"))  # noqa: SIM115
        elif name != "stdin" and isinstance(getattr(sys, name), TextIOWrapper):
            getattr(sys, name).reconfigure(errors="backslashreplace")


def share_cores() -> None:
    """Make idle OpenMP threads yield their core soon, unless the user has set how they wait.

    By default an idle thread of GNU's OpenMP spins for milliseconds, so that two runs on the same
    cores slow each other down several times. torch reads the variable when it loads OpenMP, and
    child processes inherit it. The package calls this when it is imported.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def search_for_garbage_seldom() -> None:
    """Search for garbage less often, and not at the end of the process.

    The imports leave about 180,000 objects, and almost none of them is garbage. By default
    Python searches through them many times, which is a quarter of the time that the imports take.
    """
    gc.set_threshold(OBJECTS)
    # Frozen objects are not searched. If Triton is loaded, it would report each of them as leaked.
    atexit.register(lambda: None if "triton" in sys.modules else gc.freeze())


def allow_more_files() -> None:
    """Raise the limit of open files, which on macOS is 256. Each column of a store is one. The
    package calls this when it is imported."""
    try:
        import resource
    except ImportError:  # on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FILES:
        most = hard if 0 <= hard < FILES else FILES
        with suppress(OSError, ValueError):  # without permission the limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def end_with_parent() -> None:
    """Under torchrun, end this rank within seconds of the end of torchrun.

    torchrun starts each rank in a session of its own, so that ranks outlive it if it is killed.
    Ranks that are still starting would wait half an hour for its TCP store.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent and not _adopted(parent):
        time.sleep(POLL)
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # standard error may have been a pipe to torchrun
            say("error: torchrun has ended: its ranks stop", error=True)
    # a rank that is training writes a checkpoint first; one that is starting ends at once
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def _adopted(parent: int) -> bool:
    """Whether torchrun ended before this process first checked, so that the system's first process
    (number 1) is now its parent.

    In a container torchrun itself may be process 1. Other parents may be wrappers, such as a shell
    or a profiler.
    """
    if parent != 1:
        return False
    try:
        command = Path("/proc/1/cmdline").read_bytes()
    except OSError:  # there is no /proc
        return False
    return b"python" not in command and b"torch" not in command
