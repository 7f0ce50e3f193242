"""Our C++ kernels for the CPU (native.cpp): how they are compiled, at their first use, and called.

They do what lies between a step's large matrix products: attention on packed sequences, a residual
sum with dropout and LayerNorm, the loss over a vocabulary. Each has an equal form in plain PyTorch
beside its call, which serves where there is no compiler, no GNU OpenMP in torch (macOS), or
XFORMER_NATIVE=0; only the dropout masks differ, and the time.

The compiled library lies beside fetched data ($XFORMER_CACHE, or ~/.cache/xformer), under a name
that depends on the source, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xformer.data.files import cache_folder

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp",
         "-fPIC")  # fmt: skip
OFF = "XFORMER_NATIVE=0"
TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
PASSED: dict[str, Any] = {
    "p": ctypes.c_void_p, "n": ctypes.c_int64, "s": ctypes.c_uint64, "d": ctypes.c_double,
}  # fmt: skip
KERNELS = {  # by name: pointers, numbers, seeds and doubles as native.cpp takes them
    "fill_mask": "pnnsd",
    "attention": "ppppnnnnsd",
    "attention_backward": "pppppnnnnsd",
    "attention_mask": "ppnnnsd",
    "add_norm": "pppppppnndsd",
    "add_norm_backward": "pppppppppnnsd",
    "cross_entropy": "pppppnnnn",
}
Kernels = dict[tuple[str, torch.dtype], Callable[..., None]]


class Unavailable(Exception):
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
    except (OSError, ValueError, subprocess.SubprocessError, Unavailable) as error:
        return " ".join(str(error).split())


def _compiled() -> Path:
    """The library of this source for this processor, made unless it is there."""
    if os.environ.get("XFORMER_NATIVE") == "0":
        raise Unavailable(OFF)
    compiler = [os.environ.get("CXX") or "c++", *FLAGS]
    try:
        version = subprocess.run([compiler[0], "--version"], capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise Unavailable(f"no C++ compiler {compiler[0]!r}") from None
    if "avx512f" in _processor():
        compiler.append("-mprefer-vector-width=512")
    what = (SOURCE.read_bytes(), version, repr(compiler).encode(), _processor().encode())
    name = hashlib.sha256(b"\0".join(what)).hexdigest()[:16]
    path = cache_folder() / "native" / f"{name}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made, out = (Path(folder) / file for file in ("native.o", "native.so"))
            _run([*compiler, "-c", str(SOURCE), "-o", str(made)])
            # not linked to an OpenMP of the compiler's: two would each have threads of their own
            _run([compiler[0], "-shared", str(made), "-o", str(out)])
            out.rename(path)  # whole, and of several processes' the last
    return path


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kinds)))


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if ended.returncode:
        lines = [x for x in ended.stderr.splitlines() if "error" in x] or ended.stderr.splitlines()
        raise Unavailable(f"{command[0]} failed: {(lines or ['?'])[0]}")


def _load(path: Path) -> ctypes.CDLL:
    """Load the library upon the OpenMP that torch has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    except OSError:
        raise Unavailable("only on Linux") from None
    for openmp in sorted({word for word in maps if "omp" in Path(word).name and ".so" in word}):
        ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def missing() -> str:
    """In a line why the CPU does without the kernels, or nothing."""
    found = _kernels()
    return found if isinstance(found, str) else ""


def note(device: torch.device) -> str:
    """What to tell who trains on the CPU without the kernels and did not ask for that, or
    nothing."""
    why = missing() if device.type == "cpu" else ""
    if not why or why == OFF:
        return ""
    return f"no native kernels ({why}): steps take up to a third longer"


def watched() -> bool:
    """Whether a mode of torch watches operations, to count them or to gather gradients: it is to
    see torch's own."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


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
