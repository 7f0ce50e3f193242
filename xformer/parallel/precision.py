"""Which precision of the matrix products is fast on a device, and what to say about a slow one.

docs/precision.md has the measurements behind `reason_for_bf16`, and curves of both precisions.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import torch

from xformer.data.errors import BadInput
from xformer.ops import native

Precision = Literal["fp32", "bf16"]
MEASURED = ("amx_bf16", "avx512_bf16")  # x86: whole training steps were timed, and bf16 won
KNOWN = (*MEASURED, "bf16", "svebf16")  # the last two are ARM's; no step was timed there
AMPERE = (8, 0)  # the first compute capability whose tensor cores have bf16 and TF32
SIDE, REPEATS = 4096, 5  # of the product that `times_slower` measures


def instructions() -> set[str]:
    """The bf16 instructions of this processor, by the names that Linux has for them."""
    lines = native.processor_lines("flags", "Features")
    return {word for line in lines for word in line.split() if word in KNOWN}


def reason_for_bf16(device: torch.device) -> str:
    """Why bf16 is faster than fp32 on this device, such as "this processor has avx512_bf16"; empty
    if it is not."""
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= AMPERE
        return "this GPU has tensor cores for bf16" if fast else ""
    has = instructions()
    return next((f"this processor has {name}" for name in MEASURED if name in has), "")


def fast_on(reasons: list[str]) -> tuple[Precision, str]:
    """The precision that is fast on all ranks, and why. `reasons` has each rank's
    `reason_for_bf16`."""
    if all(reasons):
        return "bf16", reasons[0]
    return "fp32", "bf16 is not known to be faster here"


def first_device() -> torch.device:
    """This machine's first GPU, or else its processor."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def fast_here() -> Precision:
    """The precision that is fast on this machine's first device."""
    return "bf16" if reason_for_bf16(first_device()) else "fp32"


def speed_note(device: torch.device, precision: str, tf32: bool = False) -> str:
    """A line that says that `precision` is slow on this device and what to set, or ""."""
    if precision == "bf16":
        cuda = device.type == "cuda"
        if reason_for_bf16(device) if cuda else instructions():
            return ""
        name = "GPU" if cuda else "processor"
        return f"this {name} has no bf16 instructions: system.precision=fp32 is faster here"
    if device.type == "cpu" or tf32 or not reason_for_bf16(device):
        return ""
    return (
        f"precision fp32 is slow here: a large matrix product takes {times_slower(device):.1f} "
        "times as long as in bf16; set system.precision=bf16, or system.tf32=true"
    )


def times_slower(device: torch.device) -> float:
    """How many times as long a large matrix product takes in fp32 as in bf16."""
    fastest = []
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
        seconds = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            (matrix @ matrix)[0, 0].item()  # waits for the product
            seconds.append(time.perf_counter() - begun)
        fastest.append(min(seconds))
    return fastest[0] / fastest[1]


def use_tf32(device: torch.device, wanted: bool) -> None:
    """Compute fp32 products and convolutions on CUDA in TF32, or in full fp32. Raises BadInput if
    TF32 is wanted on a device that lacks it."""
    if device.type != "cuda":
        if wanted:
            raise BadInput(
                "system.tf32=true: this run is on the CPU, and only CUDA has TF32; leave it out"
            )
        return
    if wanted and torch.cuda.get_device_capability(device) < AMPERE:
        raise BadInput(
            "system.tf32=true: this GPU has no TF32, which needs compute capability 8.0 or more; "
            "leave it out"
        )
    # PyTorch has older and newer flags for TF32, and raises an error if they differ. An older flag
    # that is false leaves the newer one to a setting of all of PyTorch.
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    cudnn: Any = torch.backends.cudnn
    cudnn.allow_tf32 = wanted
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32" if wanted else "ieee"
