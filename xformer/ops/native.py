"""Loads the C++ implementations of the operations (native.cpp), and calls their functions.

setup.py compiles the library when the package is installed, for the processor of that machine. It
is loaded when this module is imported. If it is missing, cut off, or made from another source or
for another processor, `absent` says why, and every operation uses its plain implementation.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.cpp")
LIBRARY = SOURCE.with_name(f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
OFF, ELSEWHERE = "XFORMER_NATIVE=0", "they are for Linux"
REMEDY = "install xformer again on this machine"
TYPES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
PASSED: dict[str, Any] = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double}
FUNCTIONS = {  # the pointers, integers and doubles that each function of native.cpp takes
    "dropout": "ppnndp",
    "attention": "ppppnnnnnndp",
    "attention_backward": "pppppnnnnnndp",
    "rotary": "ppppnnnd",
    "add_norm": "pppppppnnddp",
    "add_norm_backward": "pppppppppnndp",
    "cross_entropy": "ppppppnnnn",
}
# The features of an x86-64 processor that a compiler may use. On ARM all features are compared.
X86 = "avx|amx|s?sse|fma|f16c|bmi|aes|vaes|v?pclmul|gfni|sha|popcnt|abm|adx|movbe|xsave"
INSTRUCTIONS = re.compile(X86 if platform.machine() == "x86_64" else "")
Functions = dict[tuple[str, torch.dtype], Callable[..., int]]


def _loaded() -> tuple[Functions, str, str]:
    """The functions, the name of their build and "", or no functions, "" and why there are none."""
    if os.environ.get("XFORMER_NATIVE") == "0":
        return {}, "", OFF
    if sys.platform != "linux":
        return {}, "", ELSEWHERE
    if not LIBRARY.exists():
        return {}, "", f"they were not compiled; {REMEDY}, with a C++ compiler"
    try:
        if not _is_whole(LIBRARY):
            return {}, "", f"{LIBRARY.name} is cut off; {REMEDY}"
        library = _open(LIBRARY)
        source, processor, build = (
            (ctypes.c_char_p.in_dll(library, f"xformer_{name}").value or b"").decode()
            for name in ("source", "processor", "build")
        )
        functions: Functions = {
            (name, dtype): ctypes.CFUNCTYPE(ctypes.c_int, *(PASSED[letter] for letter in passed))(
                ctypes.c_void_p.in_dll(library, f"{name}_{kind}").value or 0
            )
            for name, passed in FUNCTIONS.items()
            for dtype, kind in TYPES.items()
        }
        changed = source != hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        return {}, "", f"{' '.join(str(error).split())}; {REMEDY}"
    if changed:
        return {}, "", f"{SOURCE.name} has changed since it was compiled; {REMEDY}"
    here = {word for line in processor_lines("flags", "Features") for word in line.split()}
    needed = filter(INSTRUCTIONS.match, processor.split())
    if lacking := [name for name in needed if name not in here]:
        some = " ".join(lacking[:3]) + " ..." * (len(lacking) > 3)
        return {}, "", f"they were compiled for a processor with {some}; {REMEDY}"
    return functions, build, ""


def _is_whole(path: Path) -> bool:
    """Whether an ELF file of 64 bits reaches to the end of its section headers, which linkers write
    last. Loading a file that was cut off would kill Python (SIGBUS)."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:5] != b"\x7fELF\x02" or len(header) < 64:
        return True  # the loader refuses it with a message of its own
    start, size, count = struct.unpack_from("=40xQ10xHH", header)
    return path.stat().st_size >= start + size * count


def _open(path: Path) -> ctypes.CDLL:
    """Load the library. It needs the OpenMP of torch, whose symbols are usually global.
    If they are not, they are made global first."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        files = {line.split(maxsplit=5)[5] for line in mapped if line.count("/")}
        for file in sorted(files):
            if re.match(r"lib[gi]?omp\d*[-.]", Path(file).name):
                ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))


def processor_lines(*kinds: str) -> list[str]:
    """The lines of /proc/cpuinfo that begin with one of `kinds`, without repetitions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line for line in lines if line.startswith(kinds)))


_functions, _build, absent = _loaded()
_only_plain = False


@contextmanager
def only_plain() -> Iterator[None]:
    """A context in which every operation of this process uses its plain implementation, on every
    device.

    The plain implementations consist of PyTorch's own operations: they support second derivatives,
    forward mode and torch.func, and every mode of PyTorch sees what they do.
    """
    global _only_plain
    before, _only_plain = _only_plain, True
    try:
        yield
    finally:
        _only_plain = before


def plain_is_asked() -> bool:
    """Whether `only_plain` is in force."""
    return _only_plain


def serves(*tensors: Tensor) -> bool:
    """Whether the C++ implementations accept these tensors: CPU, fp32 or bf16, contiguous."""
    if absent or _only_plain:
        return False
    return all(x.device.type == "cpu" and x.dtype in TYPES and x.is_contiguous() for x in tensors)


def call(name: str, dtype: torch.dtype, *arguments: Tensor | float | None) -> int:
    """Call a function of the library in its variant for `dtype`, and return its status. `serves`
    must have accepted the tensors."""
    passed = (x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
    return _functions[name, dtype](*passed)


def refuse_second_derivative(name: str) -> None:
    """Raise RuntimeError if this backward pass records a graph (create_graph=True)."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"the fast {name} has no second derivative; compute it within ops.native.only_plain()"
        )


def note(device: torch.device) -> str:
    """A line for a user on the CPU who could have the C++ operations but does not, or ""."""
    if device.type != "cpu" or absent in ("", OFF, ELSEWHERE):
        return ""
    return f"no C++ operations ({absent}): steps take 1.3 to 1.6 times as long"


def cpu_kernels() -> str:
    """Which kernels run on the CPU: the C++ ones, by the name of their build, or only torch's."""
    return "torch's kernels alone" if absent else f"native kernels {_build}"
