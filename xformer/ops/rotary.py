"""Rotary positions: queries and keys are rotated by angles that grow with a token's position.

T tokens in the batch, H heads, D size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xformer.ops import native
from xformer.ops.library import define, differentiate, named


def turns(
    positions: Tensor, size: int, base: float, precision: str = "float32"
) -> tuple[Tensor, Tensor]:
    """The cosines and the sines of the angles of tokens at `positions` (T,), (T, 1, 1, D / 2) each.

    `size` is D. `frequencies` explains `base` and `precision`.
    """
    angles = positions[:, None].float() * frequencies(size, base, precision, positions.device)
    angles = angles[:, None, None]
    return angles.cos(), angles.sin()


def frequencies(
    size: int, base: float, precision: str = "float32", device: torch.device | str = "cpu"
) -> Tensor:
    """The angles between neighbouring positions, (D / 2,) fp32 (Su et al. 2021, section 3.2.2).

    `size` is D. Angle i is base^(-2 i / D), rounded to the type that `precision` names.
    """
    even = torch.arange(0, size, 2, dtype=torch.float32, device=device)
    result = 1.0 / base ** (even / size)
    return result if precision == "float32" else result.to(getattr(torch, precision)).float()


@named
def rotary(qkv: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """qkv (T, 3, H, D) with the queries and keys rotated by the angles of `turns`.

    Elements i and i + D / 2 of a head are the coordinates of a point, which is rotated. The
    arithmetic is in fp32 or more, and the result has the type of qkv. It can be differentiated any
    number of times; the angles have no gradient.
    """
    if native.serves(qkv, cosines, sines) and cosines.dtype == sines.dtype == torch.float32:
        return _in_cpp(qkv, cosines, sines, False)
    return plain(qkv, cosines, sines)


def plain(qkv: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """The same by PyTorch's operations."""
    first, second = qkv[:, :2].chunk(2, -1)  # (T, 2, H, D / 2) each
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return torch.cat([torch.cat(turned, -1).to(qkv.dtype), qkv[:, 2:]], 1)


# --------------------------------------------------------------------------------------- C++


def _rotary(qkv: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    """`plain`, or with `back` the rotation by the negative angles, which is its gradient."""
    out = torch.empty_like(qkv)
    T, _, H, D = qkv.size()
    native.call("rotary", qkv.dtype, qkv, cosines, sines, out, T, H, D, -1.0 if back else 1.0)
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cosines, sines, ctx.back = inputs
    ctx.save_for_backward(cosines, sines)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None, None]:
    return _in_cpp(d_out.contiguous(), *ctx.saved_tensors, not ctx.back), None, None, None


_in_cpp = define(_rotary, lambda qkv, *_: torch.empty_like(qkv))
differentiate(_in_cpp, _keep, _backward)
