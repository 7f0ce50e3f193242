"""Our C++ kernels for the CPU (native.cpp): how they are compiled, at their first use, and called.

They do what lies between a step's large matrix products: attention on packed sequences, a residual
sum with dropout and LayerNorm, and the loss over a vocabulary. Each has an equal form in plain
PyTorch beside its call, which serves where there is no GCC, no Linux, or XFORMER_NATIVE=0:
the dropout masks differ, the rounding (in here all is fp32) and the time.

The compiled library lies beside fetched data ($XFORMER_CACHE, or ~/.cache/xformer), under a name
that depends on the source, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from xformer.data.files import cache_folder, sync

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
)
OFF, ELSEWHERE = "XFORMER_NATIVE=0", "only on Linux"
TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
PASSED: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "s": ctypes.c_uint64,
    "d": ctypes.c_double,
}
KERNELS = {  # by name: pointers, numbers, seeds and doubles as native.cpp takes them
    "fill_mask": "pnnsd",
    "attention": "ppppnnnnsd",
    "attention_backward": "pppppnnnnsd",
    "attention_mask": "ppnnnsd",
    "add_norm": "pppppppnndsd",
    "add_norm_backward": "pppppppppnnsd",
    "cross_entropy": "ppppppnnnn",
}
Kernels = dict[tuple[str, torch.dtype], Callable[..., None]]


class Unavailable(RuntimeError):
    """Why there are no kernels."""


@cache
def _kernels() -> Kernels | str:
    """The kernels, or in a line why there are none."""
    try:
        library = _load(_compiled())
        return {
            (name, dtype): ctypes.CFUNCTYPE(None, *(PASSED[letter] for letter in passed))(
                ctypes.c_void_p.in_dll(library, f"{name}_{kind}").value or 0
            )
            for name, passed in KERNELS.items()
            for dtype, kind in TYPES.items()
        }
    # of Path.home(), where nobody has a home, RuntimeError
    except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
        return " ".join(str(error).split())


@cache
def _compiled() -> Path:
    """The library of this source for this processor, made unless it is there. Raises Unavailable,
    OSError, RuntimeError or SubprocessError where it cannot be."""
    if os.environ.get("XFORMER_NATIVE") == "0":
        raise Unavailable(OFF)
    if sys.platform != "linux":
        raise Unavailable(ELSEWHERE)
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    try:
        version = subprocess.run(
            [*compiler, "--version"], capture_output=True, check=True, timeout=60
        ).stdout
    except FileNotFoundError:
        raise Unavailable(f"no C++ compiler {compiler[0]!r}") from None
    flags = [*FLAGS, "-mprefer-vector-width=512"] if "avx512f" in _processor() else [*FLAGS]
    what = (SOURCE.read_bytes(), version, repr([compiler, flags]).encode(), _processor().encode())
    name = hashlib.sha256(b"\0".join(what)).hexdigest()[:16]
    path = cache_folder() / "native" / f"{name}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made, out = (Path(folder) / file for file in ("native.o", "native.so"))
            _run([*compiler, *flags, "-c", str(SOURCE), "-o", str(made)])
            # not linked to an OpenMP of the compiler's: two would each have threads of their own
            _run([*compiler, "-shared", str(made), "-o", str(out)])
            sync(out)
            out.rename(path)  # whole, and of several processes' the last
    return path


def _processor() -> str:
    """What -march=native depends on."""
    return "\n".join(processor_lines("model", "flags", "Features")) or platform.processor()


def processor_lines(*kinds: str) -> list[str]:
    """The lines of these kinds that Linux has about its processors, each once."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line for line in lines if line.startswith(kinds)))


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if ended.returncode:
        lines = [x for x in ended.stderr.splitlines() if "error" in x] or ended.stderr.splitlines()
        raise Unavailable(f"{command[0]} failed: {(lines or ['?'])[0]}")


def _load(path: Path) -> ctypes.CDLL:
    """Load the library upon the OpenMP that torch has loaded; as a rule its symbols are global."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        files = {line.split(maxsplit=5)[5] for line in mapped if line.count("/")}
        for file in sorted(files):
            if re.match(r"lib[gi]?omp\d*[-.]", Path(file).name):
                ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))


def missing() -> str:
    """In a line why the CPU does without the kernels, or nothing."""
    found = _kernels()
    return found if isinstance(found, str) else ""


def note(device: torch.device) -> str:
    """What to tell who works on the CPU without the kernels and could have them, or nothing."""
    why = missing() if device.type == "cpu" else ""
    if why in ("", OFF, ELSEWHERE):
        return ""
    return f"no native kernels ({why}): steps take up to three fifths longer"


def identity() -> str:
    """Whose kernels run on the CPU; ours by a hash of source, compiler and processor."""
    return "torch's kernels alone" if missing() else f"native kernels {_compiled().stem}"


def watched() -> bool:
    """Whether a mode of torch watches operations, to count them or to gather gradients: it is to
    see torch's own. (A default device is a mode too, which watches nothing.)"""
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
    watching = any(not isinstance(mode, DeviceContext) for mode in modes)
    return watching or bool(torch._C._len_torch_dispatch_stack())


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels take these: on the CPU, in fp32 or bf16, without gaps, unwatched."""
    fit = (x.device.type == "cpu" and x.dtype in TYPES and x.is_contiguous() for x in tensors)
    return all(fit) and not missing() and not watched()


def call(name: str, dtype: torch.dtype, *arguments: Tensor | float | None) -> None:
    """Call a kernel in its form for `dtype`, with tensors that it serves. Raises RuntimeError where
    there are no kernels."""
    kernels = _kernels()
    if isinstance(kernels, str):
        raise RuntimeError(f"no native kernels: {kernels}")
    passed = (x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
    watched = torch.autograd._profiler_enabled()
    with torch.profiler.record_function(f"native::{name}") if watched else nullcontext():
        kernels[name, dtype](*passed)
