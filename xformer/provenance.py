"""What a run is made with: versions, processor, and the exact code."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xformer.data.errors import DISTRIBUTION
from xformer.distributed import Ranks
from xformer.model import native

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 20  # seconds for git


def environment(ranks: Ranks) -> dict[str, Any]:
    """Versions, processes and processor: what may change a result, and the command line."""
    cuda = ranks.device.type == "cuda"
    return {
        **versions(),
        "git": revision(),
        "device": torch.cuda.get_device_name(ranks.device) if cuda else processor(),
        "world_size": ranks.world_size,
        "threads": torch.get_num_threads(),
        "command": sys.argv,
    }


def processor() -> str:
    """The kind of processor, the instructions that torch uses of it, and whose kernels run."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {native.identity()}"


def versions() -> dict[str, str]:
    """Of Python, torch, numpy and this package."""
    try:
        own = version(DISTRIBUTION)
    except PackageNotFoundError:
        own = "not installed"
    return {"python": platform.python_version(), "torch": torch.__version__,
            "numpy": np.__version__, "xformer": own}  # fmt: skip


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
        capture_output=True, text=True, errors="replace", check=True, timeout=PATIENCE,
        stdin=subprocess.DEVNULL, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
    )  # fmt: skip
    return done.stdout.rstrip("\n")
