"""Fused residual sum, dropout and LayerNorm, as Triton kernels.

What ends each half of a transformer layer is three operations on the same rows. Here a row is read
once, and its dropout mask is a hash of where an element stands, so that nothing is stored for it.

Import this module only where it is used: it needs Triton, thus a CUDA device or, slow but exact,
Triton's interpreter (TRITON_INTERPRET=1 in the environment before Triton is first imported).

Letters: T tokens in the batch, C width of a row, P programs of the backward pass.
"""

# mypy: allow-incomplete-defs
# (a kernel annotates its constexpr arguments only, which is how Triton knows them)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from xformer.model.kernel_base import (
    check_device,
    check_dropout,
    keep_kernel,
    kernel_arguments,
    on_device,
)

LARGEST_WIDTH = 8192  # a row lies in the registers of one program
TILE = 2048  # elements that a program takes at a time, a row at least
# Programs of the backward pass at most, each of which leaves a partial sum: enough to keep a large
# device's memory busy, few enough for the sums to weigh nothing. The same on all devices, so that
# the order of summing is too.
PROGRAMS = 512


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """y = LayerNorm(z) with z = residual + dropout(x), with gradients for all four tensors.

    A post-LN layer goes on with y (Vaswani et al. 2017, section 5.4), a pre-LN layer with both: z
    is its residual, y its next part's input (Xiong et al. 2020). LayerNorm is that of Ba et al.
    2016, section 3: (z - mean) / sqrt(variance + eps) * weight + bias over each row, computed in
    float32 whatever the types. A repeated call repeats every bit: no two programs add to the same
    place, and the weights' gradients are sums of partial sums in a fixed order.

    Args:
        x, residual: (T, C), float32 or bfloat16 each, C from 1 to 8192. What is not contiguous is
            copied.
        weight, bias: (C,), float32 or bfloat16.
        eps: added to the variance.
        dropout_p: the probability that an element of x is dropped, in [0, 1).
        seed: which dropout mask; an integer, of which the low 64 bits count. Unused at dropout 0.

    Returns:
        y and z, (T, C). z has the type of `residual + x`; y has it too, but under autocast is
        float32, as torch's layer_norm is on CUDA. Both can be differentiated once.

    Raises:
        ValueError: a shape, type, device or value is not as above, or the tensors are on the CPU
            and Triton is not interpreting.
    """
    _check(x, residual, weight, bias)
    check_dropout(dropout_p)
    check_device("add_norm", x)
    y, z = _AddNorm.apply(x, residual, weight, bias, eps, dropout_p, seed)
    return y, z


class _AddNorm(torch.autograd.Function):
    """The autograd node: launches the kernels, keeps z and each row's mean and 1 / deviation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        dropout_p: float,
        seed: int,
    ) -> tuple[Tensor, Tensor]:
        x, residual, weight, bias = (t.contiguous() for t in (x, residual, weight, bias))
        (T, C), device = x.shape, x.device
        z = torch.empty(T, C, dtype=torch.promote_types(x.dtype, residual.dtype), device=device)
        autocast = torch.is_autocast_enabled(device.type)
        y = torch.empty(T, C, dtype=torch.float32 if autocast else z.dtype, device=device)
        mean, inverse = (torch.empty(T, dtype=torch.float32, device=device) for _ in range(2))
        ctx.save_for_backward(z, weight, mean, inverse)
        ctx.set_materialize_grads(False)
        ctx.dropout_p, ctx.seed, ctx.x_type, ctx.residual_type = (
            *(dropout_p, seed, x.dtype, residual.dtype),
        )
        options = {**tiles(C), **kernel_arguments(dropout_p, seed)}
        grid = (triton.cdiv(T, options["ROWS"]),)
        with on_device(x):
            _forward_kernel[grid](
                *(x, residual, weight, bias, y, z, mean, inverse, T, eps), **options
            )
        return y, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        z, weight, mean, inverse = ctx.saved_tensors
        (T, C), device = z.shape, z.device
        dy = torch.zeros_like(z) if dy is None else dy.contiguous()
        dx = torch.empty(T, C, dtype=ctx.x_type, device=device)
        dresidual = torch.empty(T, C, dtype=ctx.residual_type, device=device)

        options = {**tiles(C), **kernel_arguments(ctx.dropout_p, ctx.seed)}
        programs = min(triton.cdiv(T, options["ROWS"]), PROGRAMS)
        sums = torch.empty(2, programs, C, dtype=torch.float32, device=device)
        with on_device(z):
            _backward_kernel[(programs,)](
                *(dy, z if dz is None else dz.contiguous(), z, weight, mean, inverse),
                *(dx, dresidual, sums[0], sums[1], T),
                **options,
                HAS_DZ=dz is not None,
            )
        dweight, dbias = sums.sum(1).to(weight.dtype)
        return dx, dresidual, dweight, dbias, None, None, None


def tiles(width: int) -> dict[str, int]:
    """Block sizes by width: a program holds ROWS rows, padded to a power of two."""
    padded = max(16, triton.next_power_of_2(width))
    rows = max(1, min(16, TILE // padded))
    return {
        "C": width,
        "PADDED_C": padded,
        "ROWS": rows,
        "num_warps": 4 if rows * padded <= 2048 else 8 if padded <= 4096 else 16,
    }


def _check(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> None:
    tensors = (x, residual, weight, bias)
    if x.dim() != 2 or residual.shape != x.shape:
        raise ValueError(
            "x and residual must have one shape (T, C), "
            f"got {tuple(x.shape)} and {tuple(residual.shape)}"
        )
    width = x.shape[1]
    if not 1 <= width <= LARGEST_WIDTH:
        raise ValueError(f"the width must be 1 to {LARGEST_WIDTH}, got {width}")
    if not weight.shape == bias.shape == (width,):
        raise ValueError(
            f"weight and bias must be ({width},) as x is {width} wide, "
            f"got {tuple(weight.shape)} and {tuple(bias.shape)}"
        )
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"add_norm takes float32 and bfloat16, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"all must be on one device, got {x.device} and {tensor.device}")


# ---- kernels ----
#
# The arguments that they share:
#   inverse           1 / sqrt(variance + eps) of each row
#   word_a, word_b    the hashed seed;  drop_below, keep_scale: p * 2^32 and 1 / (1 - p)
#   ROWS, PADDED_C    the tile: rows taken at a time, and C padded to a power of two

# What changes from batch to batch must not be compiled in (see kernels.py).
CHANGING = ["tokens", "word_a", "word_b", "drop_below"]


@triton.jit
def _load(start, at, inside):
    return tl.load(start + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(start, at, inside, tile):
    tl.store(start + at, tile.to(start.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=CHANGING)
def _forward_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    z,
    mean,
    inverse,
    tokens,
    eps,
    word_a,
    word_b,
    drop_below,
    keep_scale,
    C: tl.constexpr,
    PADDED_C: tl.constexpr,
    ROWS: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED_C)
    inside = (row[:, None] < tokens) & (column[None, :] < C)
    at = row[:, None].to(tl.int64) * C + column[None, :]
    x_tile = _load(x, at, inside)
    if DROPOUT:
        kept = keep_kernel(word_a, word_b, drop_below, row[:, None], column[None, :])
        x_tile = tl.where(kept, x_tile * keep_scale, 0.0)
    # rounded to its type before the statistics, as if the sum had been an operation of its own
    z_tile = (_load(residual, at, inside) + x_tile).to(z.dtype.element_ty)
    _store(z, at, inside, z_tile)
    z_tile = z_tile.to(tl.float32)
    row_mean = tl.sum(z_tile, 1) / C
    centred = tl.where(inside, z_tile - row_mean[:, None], 0.0)
    row_inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    w_tile = _load(weight, column, column < C)
    b_tile = _load(bias, column, column < C)
    _store(y, at, inside, centred * row_inverse[:, None] * w_tile[None, :] + b_tile[None, :])
    tl.store(mean + row, row_mean, mask=row < tokens)
    tl.store(inverse + row, row_inverse, mask=row < tokens)


@triton.jit(do_not_specialize=CHANGING)
def _backward_kernel(
    dy,
    dz,
    z,
    weight,
    mean,
    inverse,
    dx,
    dresidual,
    dweight,
    dbias,
    tokens,
    word_a,
    word_b,
    drop_below,
    keep_scale,
    C: tl.constexpr,
    PADDED_C: tl.constexpr,
    ROWS: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_DZ: tl.constexpr,
):
    # A program takes every P-th group of rows, and leaves one row of dweight and dbias, (P, C).
    column = tl.arange(0, PADDED_C)
    w_tile = _load(weight, column, column < C)[None, :]
    sum_dw = tl.zeros([ROWS, PADDED_C], tl.float32)
    sum_db = tl.zeros([ROWS, PADDED_C], tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in range(tl.program_id(0) * ROWS, tokens, step):
        row = first + tl.arange(0, ROWS)
        inside = (row[:, None] < tokens) & (column[None, :] < C)
        at = row[:, None].to(tl.int64) * C + column[None, :]
        row_mean = tl.load(mean + row, mask=row < tokens, other=0.0)[:, None]
        row_inverse = tl.load(inverse + row, mask=row < tokens, other=0.0)[:, None]
        normed = tl.where(inside, (_load(z, at, inside) - row_mean) * row_inverse, 0.0)
        dy_tile = _load(dy, at, inside)
        sum_dw += dy_tile * normed
        sum_db += dy_tile
        # through the norm: what is left once the row's mean and its share along the row are out
        wdy = dy_tile * w_tile
        along = tl.sum(wdy * normed, 1)[:, None] / C
        grad = (wdy - tl.sum(wdy, 1)[:, None] / C - normed * along) * row_inverse
        if HAS_DZ:
            grad += _load(dz, at, inside)
        _store(dresidual, at, inside, grad)
        if DROPOUT:
            kept = keep_kernel(word_a, word_b, drop_below, row[:, None], column[None, :])
            grad = tl.where(kept, grad * keep_scale, 0.0)
        _store(dx, at, inside, grad)
    at = tl.program_id(0) * C + column
    _store(dweight, at, column < C, tl.sum(sum_dw, 0))
    _store(dbias, at, column < C, tl.sum(sum_db, 0))
