"""How every command starts: before torch is imported, and until its exit status is known.

A door, the command `xformer` or `python -m xformer.X` calls `run(main)`, and `main` imports
whatever needs torch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from xformer.data.display import one_line, say
from xformer.data.errors import OF_THE_DISK, BadInput, Failure, Interrupted, reason

# by any of these a user decides how OpenMP's threads wait
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPINS = "2000"  # turns of libgomp's waiting loop; docs/scaling.md has the measurement
POLL = 1.0  # seconds between two looks at the parent
GRACE = 7.0  # seconds that an orphaned rank has to write a checkpoint


def run(main: Callable[[], None]) -> None:
    """Call `main` and exit: status 0, or one line on standard error and the error's own status.

    Under torchrun only rank 0 prints. Errors that are none of BadInput, Failure and Interrupted are
    bugs and keep their traceback.
    """
    end_with_parent()
    share_cores()
    rank_zero = os.environ.get("RANK", "0") == "0"
    status, line = 0, ""
    try:
        main()
    except (BadInput, Failure, Interrupted) as error:
        status, line = error.status, str(error)
    except KeyboardInterrupt:
        status, line = 128 + signal.SIGINT, "interrupted"
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        status, line = 1, reason(error)
    if line and rank_zero:
        say(one_line(f"error: {line}" if status < 128 else line), error=True)
    sys.exit(status)


def as_command(name: str) -> None:
    """Make `python -m xformer.NAME` mean `xformer NAME`; never returns.

    The module calls this before its imports. It is then imported again under its own name, so that
    no class exists twice. The command stands above all modules, so it is imported by name here.
    """
    sys.argv.insert(1, name)
    import_module("xformer.command").main()


def share_cores() -> None:
    """Let OpenMP's idle threads give up their core soon, unless the user has decided.

    By default an idle thread of GNU's OpenMP spins for milliseconds, and two runs on the same cores
    make each other several times slower. The variable is read when torch loads OpenMP, and child
    processes inherit it.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def end_with_parent() -> None:
    """Under torchrun, end this rank within seconds of torchrun's own end.

    torchrun starts its ranks in sessions of their own, so that they outlive it when it is killed.
    While they start they would wait half an hour for its store.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent and not _adopted(parent):
        time.sleep(POLL)
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # torchrun may have read what its ranks print
            say("error: torchrun is gone: its ranks stop", error=True)
    # a rank that trains writes a checkpoint first; one that still starts ends at once
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def _adopted(parent: int) -> bool:
    """Whether torchrun was gone before this process first looked, so that the system's first
    process has adopted it.

    In a container torchrun may itself be the first process. A parent with another number may be a
    wrapper such as a shell or a profiler, which is left alone.
    """
    if parent != 1:
        return False
    try:
        command = Path("/proc/1/cmdline").read_bytes()
    except OSError:  # not Linux
        return False
    return b"python" not in command and b"torch" not in command
