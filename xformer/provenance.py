"""What a run is made with: versions, processor, and the exact code; and what differs from that."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
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
PATIENCE = 20  # seconds for git


def environment(ranks: Ranks) -> dict[str, Any]:
    """Versions, processes and processor: what may change a result, and the command line."""
    cuda = ranks.device.type == "cuda"
    gpu = torch.cuda.get_device_name(ranks.device) if cuda else ""
    return {
        **versions(),
        "git": revision(),
        "device": gpu or processor(),
        "processor": gpu or processor_model(),
        "kernels": kernels(ranks),
        "world_size": ranks.world_size,
        "threads": torch.get_num_threads(),
        "command": sys.argv,
    }


def processor() -> str:
    """The kind of processor, the instructions that torch uses of it, and whose kernels run."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {native.cpu_kernels()}"


def processor_model() -> str:
    """The name of the processor and the instructions that torch uses of it."""
    named = [line.partition(":")[2].strip() for line in native.processor_lines("model name")]
    name = named[0] if named else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def kernels(ranks: Ranks) -> str:
    """Whose kernels compute on the device of these ranks."""
    if ranks.device.type == "cuda":
        return f"CUDA {torch.version.cuda}"
    return native.cpu_kernels()


# what may change the bits of a result, and how it is called in a line
COMPARED = {
    "torch": "torch",
    "numpy": "numpy",
    "python": "Python",
    "xformer": "xformer",
    "git": "code",
    "kernels": "",  # their name says what they are
    "processor": "processor",
    "threads": "threads",
    "world_size": "processes",
    "system.precision": "system.precision",
    "batch.accumulate": "batch.accumulate",
}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What may change the bits of a result between two starts, each "torch 2.11.0 -> 2.13.0".

    `before` and `now` have the `config` and `environment` of a start. What a start of an older
    version of this package did not note is not compared.
    """
    old, new = ({**flat(start["config"]), **start["environment"]} for start in (before, now))
    return [
        f"{called} {_short(name, old[name])} -> {_short(name, new[name])}".lstrip()
        for name, called in COMPARED.items()
        if name in old and name in new and old[name] != new[name]
    ]


def _short(name: str, value: Any) -> str:
    """A value for a line; of a revision of the code as much as git shows."""
    if name == "git" and re.fullmatch(r"[0-9a-f]{40}[+]?", str(value)):
        return f"{value[:9]}{value[40:]}"
    return str(value)


def refuse_unlike_ranks(ranks: Ranks) -> None:
    """Raise BadInput naming ranks and values where ranks have other versions or other kernels."""
    own = {name: versions()[name] for name in ("torch", "xformer")} | {"kernels": kernels(ranks)}
    every = ranks.gather(own)
    for name in own:
        found: dict[str, list[str]] = {}
        for rank, has in enumerate(every):
            found.setdefault(has[name], []).append(str(rank))
        if len(found) > 1:
            shown = ", ".join(
                f"{value} on rank{'s' * (len(having) > 1)} {', '.join(having)}"
                for value, having in found.items()
            )
            cure = "; XFORMER_NATIVE=0 on all makes them alike" if name == "kernels" else ""
            raise BadInput(f"the ranks differ in {name}: {shown}; give all the same{cure}")


def versions() -> dict[str, str]:
    """Of Python, torch, numpy and this package."""
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


def revision() -> str:
    """The git revision of this code, with "+" where files are changed; or why there is none."""
    try:
        if Path(_git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return "no git checkout"
        changed = _git("status", "--porcelain")
        return _git("rev-parse", "HEAD") + ("+" if changed else "")
    except FileNotFoundError:
        return "git is not installed"
    except (OSError, subprocess.SubprocessError):
        return "no git checkout"


def diff(revision: str) -> str:
    """What changed in the code since its revision, new files by name; empty where nothing did, or
    there is no git."""
    if not revision.endswith("+"):
        return ""
    try:
        return "\n".join(
            filter(None, (_git("status", "--porcelain"), _git("diff", "HEAD", "--no-ext-diff")))
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"git could not say: {error}"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
    )
    return done.stdout.rstrip("\n")
