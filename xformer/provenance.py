"""The environment of a run (versions, processor, exact code), and how two environments differ."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xformer.config import flat
from xformer.data.errors import DISTRIBUTION, BadInput
from xformer.ops import native
from xformer.parallel.processes import Ranks

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 20  # seconds that a git command may take
CODE = ("--", "*.py", "*.cpp")  # the files that decide a result, besides what a run records itself


def environment(ranks: Ranks) -> dict[str, Any]:
    """Everything outside the recipe that may change the bits of a result (versions, code,
    processor, number of processes), and the command line."""
    cuda = ranks.device.type == "cuda"
    gpu = torch.cuda.get_device_name(ranks.device) if cuda else ""
    return {
        **versions(),
        "git": revision(),
        "processor": gpu or processor_model(),
        "kernels": kernels(ranks),
        "world_size": ranks.world_size,
        "threads": torch.get_num_threads(),
        "command": sys.argv,
    }


def processor_model() -> str:
    """The name of the processor and the instruction set that torch uses on it."""
    named = [line.partition(":")[2].strip() for line in native.processor_lines("model name")]
    name = named[0] if named else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def kernels(ranks: Ranks) -> str:
    """The kernels that compute on the device of these ranks: CUDA's, native, or torch's."""
    if ranks.device.type == "cuda":
        return f"CUDA {torch.version.cuda}"
    return native.cpu_kernels()


# settings and properties that may change the bits of a result, with their names in messages
COMPARED = {
    "torch": "torch",
    "numpy": "numpy",
    "python": "Python",
    "xformer": "xformer",
    "git": "code",
    "kernels": "",  # the value needs no name
    "processor": "processor",
    "threads": "threads",
    "world_size": "processes",
    "system.precision": "system.precision",
    "system.tf32": "system.tf32",
    "compile": "system.compile",
    "batch.accumulate": "batch.accumulate",
}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences between two starts that may change the bits of a result, such as
    "torch 2.11.0 -> 2.13.0".

    `before` and `now` each contain the `config` and `environment` of a start. Values that an older
    version of this package did not record are not compared.
    """
    old, new = ({**flat(start["config"]), **start["environment"]} for start in (before, now))
    return [
        f"{called} {_short(name, old[name])} -> {_short(name, new[name])}".lstrip()
        for name, called in COMPARED.items()
        if name in old and name in new and old[name] != new[name]
    ]


def _short(name: str, value: Any) -> str:
    """A value for a message. A git revision is shortened to nine digits."""
    if name == "git" and re.fullmatch(r"[0-9a-f]{40}[+]?", str(value)):
        return f"{value[:9]}{value[40:]}"
    return str(value)


def refuse_unlike_ranks(ranks: Ranks, read: dict[str, str] | None = None) -> None:
    """Raise BadInput, with ranks and values, if the ranks differ in versions, kernels or what they
    have `read`."""
    own = {name: versions()[name] for name in ("torch", "xformer")} | {"kernels": kernels(ranks)}
    own |= read or {}
    every = ranks.gather(own)
    for name in own:
        ranks_of: dict[str, list[str]] = {}
        for rank, environment in enumerate(every):
            ranks_of.setdefault(environment[name], []).append(str(rank))
        if len(ranks_of) > 1:
            shown = ", ".join(
                f"{value} on rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
                for value, numbers in ranks_of.items()
            )
            remedy = ", or set XFORMER_NATIVE=0 on all ranks" if name == "kernels" else ""
            raise BadInput(f"the ranks differ in {name}: {shown}; use the same on all{remedy}")


def versions() -> dict[str, str]:
    """The versions of Python, torch, numpy and this package."""
    try:
        own = version(DISTRIBUTION)
    except PackageNotFoundError:
        own = "not installed"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "xformer": own,
    }


@cache  # a process keeps the code that it has loaded, and so do its forks
def revision() -> str:
    """The git revision of this code, with "+" if it has changed since. If there is none, the
    reason why."""
    try:
        if Path(_git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return "no git checkout"
        changed = _git("status", "--porcelain", *CODE)
        return _git("rev-parse", "HEAD") + ("+" if changed else "")
    except FileNotFoundError:
        return "git is not installed"
    except (OSError, subprocess.SubprocessError):
        return "no git checkout"


@cache
def diff(revision: str) -> str:
    """The changes of the code since its `revision`, with the names of new files. "" if there are no
    changes or no git."""
    if not revision.endswith("+"):
        return ""
    try:
        commands = ("status", "--porcelain"), ("diff", "HEAD", "--no-ext-diff")
        return "\n".join(filter(None, (_git(*command, *CODE) for command in commands)))
    except (OSError, subprocess.SubprocessError) as error:
        return f"git could not list the changes: {error}"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        # git refuses the checkout of another user, such as the administrator, unless told that it
        # is safe; its code runs here anyway
        ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
    )
    return done.stdout.rstrip("\n")
