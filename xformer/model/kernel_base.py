"""What the Triton kernels share: where they run, and dropout masks that are computed, not drawn.

A hash of an element's row and column decides whether the element is kept. A kernel recomputes the
mask in its backward pass: it stores none, and needs no generator. FlashAttention recomputes its
mask from a counter in the same way (Dao 2023, section 3). tests/masks.py writes the masks out in
plain PyTorch.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# The two odd multipliers of MurmurHash3's 32-bit finaliser, which spreads every input bit over
# every output bit. A kernel may read a global only if it is a constexpr.
MULTIPLIER_1 = tl.constexpr(0x85EBCA6B)
MULTIPLIER_2 = tl.constexpr(0xC2B2AE35)
MASK_32 = 0xFFFFFFFF


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels. It runs them on the CPU."""
    return not isinstance(mix_kernel, triton.runtime.JITFunction)


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Make the tensor's device the current one: Triton launches kernels there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_device(function: str, tensor: Tensor) -> None:
    """Raise ValueError if no kernel can run on the tensor's device."""
    if not tensor.is_cuda and not interpreted():
        raise ValueError(
            f"{function} needs CUDA tensors, or TRITON_INTERPRET=1 set before Triton's import"
        )


def check_dropout(dropout_p: float) -> None:
    """Raise ValueError unless 0 <= dropout_p < 1."""
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")


def seed_words(seed: int) -> tuple[int, int]:
    """Two 32-bit words, each a hash of the low 64 bits of the seed."""
    low, high = seed & MASK_32, (seed >> 32) & MASK_32
    # the finaliser sends 0 to 0: the constants (the digits of pi) keep seed 0 from doing the same
    return mix(mix(low ^ 0x243F6A88) ^ high), mix(mix(high ^ 0x85A308D3) ^ low)


def mix(x: Any) -> Any:
    """MurmurHash3's 32-bit finaliser, on Python integers or int64 tensors in [0, 2^32)."""
    # int64 stands for the kernels' uint32: if a product wraps, its low 32 bits are still right
    x = x ^ (x >> 16)
    x = (x * MULTIPLIER_1.value) & MASK_32
    x = x ^ (x >> 13)
    x = (x * MULTIPLIER_2.value) & MASK_32
    return x ^ (x >> 16)


def kernel_arguments(dropout_p: float, seed: int) -> dict[str, Any]:
    """A kernel's arguments for dropout: the two words of the seed, the bound below which elements
    are dropped, and the factor of kept elements."""
    word_a, word_b = seed_words(seed)
    return {
        # signed, so that the argument has one type whatever its value; the kernel casts it back
        "word_a": _as_int32(word_a),
        "word_b": _as_int32(word_b),
        "drop_below": _as_int32(min(round(dropout_p * 2**32), MASK_32)),
        "keep_scale": 1.0 / (1.0 - dropout_p),
        "DROPOUT": dropout_p > 0.0,
    }


def _as_int32(word: int) -> int:
    return (word ^ 2**31) - 2**31  # no branch: torch.compile would compile anew for each side


@triton.jit
def mix_kernel(x):
    """`mix` in uint32."""
    # the product is meant to wrap around, so Triton's debug mode must not check for overflow
    x ^= x >> 16
    x = tl.mul(x, MULTIPLIER_1, sanitize_overflow=False)
    x ^= x >> 13
    x = tl.mul(x, MULTIPLIER_2, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def keep_kernel(word_a, word_b, drop_below, row, column):
    """Which elements of one tile are kept; row is (R, 1) and column (1, C), or transposed.

    An element is kept if its 32-bit hash is at least `drop_below`. A row is hashed with both words
    of the seed: with one word, a few pairs among 10^5 rows would share a mask.
    """
    row_a = mix_kernel(word_a.to(tl.uint32) ^ row.to(tl.uint32))
    row_b = mix_kernel(word_b.to(tl.uint32) ^ row.to(tl.uint32))
    bits = row_a ^ column.to(tl.uint32)
    bits ^= bits >> 16
    bits = tl.mul(bits, MULTIPLIER_1, sanitize_overflow=False)
    bits = bits ^ (bits >> 13) ^ row_b
    bits = tl.mul(bits, MULTIPLIER_2, sanitize_overflow=False)
    bits ^= bits >> 16
    return bits >= drop_below.to(tl.uint32)
