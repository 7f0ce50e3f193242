"""Dropout: each element becomes 0 with a given probability; the others are scaled up.

On the CPU a mask is computed, not drawn: a hash of a seed, the row and the column decides whether
an element is kept. The backward pass computes the mask again, so none is stored. The C++
and the plain implementation use the same masks. On other devices PyTorch's own kernel draws them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.ops import native
from xformer.ops.library import define, differentiate, named

# The two odd multipliers of MurmurHash3's 32-bit finaliser, which spreads every input bit over
# every output bit. They are signed numbers here: int32 arithmetic wraps around, so it gives the
# same 32 bits as unsigned arithmetic.
MULTIPLIER_1 = 0x85EBCA6B - 2**32
MULTIPLIER_2 = 0xC2B2AE35 - 2**32


@named
def dropout(x: Tensor, rate: float) -> Tensor:
    """Set each element of x to 0 with probability `rate`, else divide it by 1 - rate (Srivastava et
    al. 2014).

    x: (..., C), of any floating type. Returns the same shape. `rate` is in [0, 1); at 0 the result
    is x itself. The device's generator decides which elements are dropped. The result can be
    differentiated.
    """
    if rate == 0.0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, rate)
    seed = new_seed()
    if native.serves(x):
        return _in_cpp(x, rate, seed)
    return plain(x, rate, seed)


def new_seed() -> Tensor:
    """A seed for dropout on the CPU, () int64, drawn from PyTorch's generator."""
    return torch.randint(2**62, (), device="cpu")


# ------------------------------------------------------------------------------------- plain


def plain(x: Tensor, rate: float, seed: Tensor) -> Tensor:
    """Dropout by PyTorch's operations."""
    columns = x.size(-1) if x.dim() else 1
    rows = torch.arange(x.numel() // max(1, columns), dtype=torch.int32, device=x.device)
    place = torch.arange(columns, dtype=torch.int32, device=x.device)
    keep = keep_mask(rate, seed, rows[:, None], place)
    return torch.where(keep.view(x.shape), x / (1.0 - rate), 0.0)


def keep_mask(
    rate: float, seed: Tensor, row: Tensor, column: Tensor, head: Tensor | None = None
) -> Tensor:
    """Which elements are kept: bool, of the shape to which the int32 tensors broadcast.

    An element is kept if its 32-bit hash is at least rate * 2^32. A row is hashed with both words
    of the seed: with one word, a few pairs among 10^5 rows would share a mask. The head is hashed
    into both words, too.
    """
    low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
    # The finaliser maps 0 to 0. The constants, digits of pi, keep seed 0 from hashing to 0.
    a, b = _mix(_mix(low ^ 0x243F6A88) ^ high), _mix(_mix(high ^ (0x85A308D3 - 2**32)) ^ low)
    if head is not None:
        a, b = _mix(a ^ head), _mix(b ^ head)
    a, b = _mix(a ^ row), _mix(b ^ row)
    bits = a ^ column
    bits = (bits ^ _shifted(bits, 16)) * MULTIPLIER_1
    bits = (bits ^ _shifted(bits, 13) ^ b) * MULTIPLIER_2
    bits = bits ^ _shifted(bits, 16)
    below = min(round(rate * 2**32), 2**32 - 1)
    return (bits ^ -(2**31)) >= below - 2**31  # compares them as unsigned numbers


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser, on int32."""
    x = (x ^ _shifted(x, 16)) * MULTIPLIER_1
    x = (x ^ _shifted(x, 13)) * MULTIPLIER_2
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, count: int) -> Tensor:
    """x >> count, with the int32 x taken as unsigned."""
    return (x >> count) & (2 ** (32 - count) - 1)


# --------------------------------------------------------------------------------------- C++


def _dropout(x: Tensor, rate: float, seed: Tensor) -> Tensor:
    out = torch.empty_like(x)
    columns = max(1, x.size(-1) if x.dim() else 1)
    native.call("dropout", x.dtype, x, out, x.numel() // columns, columns, rate, seed)
    return out


def _backward(ctx, d_out: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
    return _in_cpp(d_out.contiguous(), ctx.rate, ctx.saved_tensors[0]), None, None


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, ctx.rate, seed = inputs
    ctx.save_for_backward(seed)


_in_cpp = define(_dropout, lambda x, *_: torch.empty_like(x))
differentiate(_in_cpp, _keep, _backward)
