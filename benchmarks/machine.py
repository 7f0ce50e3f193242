"""A description of the machine: what a reader needs to judge a number, and no host name."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import cores
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.ops import native
from xformer.parallel.precision import instructions

SETS = ("amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx2", "sve", "asimd")
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy")


def processor() -> tuple[str, set[str]]:
    """(name, instruction sets) of the processor, as Linux reports them."""
    names = native.processor_lines("model name")
    name = names[0].partition(":")[2].strip() if names else platform.machine()
    lines = native.processor_lines("flags", "Features")
    return name, {word for line in lines for word in line.partition(":")[2].split()}


def has_bf16() -> bool:
    """Whether the processor has instructions for bf16 products."""
    return bool(instructions())


def words() -> str:
    """A line about the machine: processor, instruction sets, cores, memory, speed of matrix
    products, device.
    """
    name, flags = processor()
    known = ", ".join(s.upper() for s in SETS if s in flags) or platform.machine()
    memory = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    bf16 = "bf16 instructions" if has_bf16() else "no bf16 instructions"
    threads = "1 thread" if (n := torch.get_num_threads()) == 1 else f"{n} threads"
    cuda = f"; {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else "; no CUDA device"
    return (
        f"{cores()} cores of an {name} ({known}; {bf16}), {memory:.0f} GiB{cuda}. Large matrix "
        f"products reach {gflops(torch.float32):.0f} GFLOP/s in fp32 and "
        f"{gflops(torch.bfloat16):.0f} GFLOP/s in bf16 with {threads}"
    )


def gflops(dtype: torch.dtype, n: int = 768) -> float:
    """GFLOP/s of the fastest of six square matrix products, on the threads that torch has now."""
    a, b = (torch.ones(n, n, dtype=dtype) for _ in range(2))
    taken = []
    for _ in range(6):
        started = time.perf_counter()
        a @ b
        taken.append(time.perf_counter() - started)
    return 2 * n**3 / min(taken) / 1e9


def versions() -> str:
    installed = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            installed.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(installed)


def load() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0]


def earlier(page: Path, setup: dict[str, str]) -> list[dict[str, Any]]:
    """What the JSON of an earlier benchmark has under `measured`; nothing without such a file.
    Raises BadInput if it was measured on another machine or with other versions than `setup`."""
    if not page.is_file():
        return []
    old = read_json(page)
    for name, value in setup.items():
        # the speed of matrix products is measured anew each time
        before, now = (text.split(". Large matrix")[0] for text in (old[name], value))
        if before != now:
            raise BadInput(
                f"{page} was measured with {before}, not {now}, so its rows cannot "
                "be mixed with new ones; delete it and measure everything"
            )
    measured: list[dict[str, Any]] = old["measured"]
    return measured
