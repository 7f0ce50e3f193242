"""A residual sum with dropout, and its LayerNorm: the end of each half of a transformer layer.

T tokens, C width of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.ops import dropout, native
from xformer.ops.library import define, differentiate, named


@named
def add_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float, rate: float = 0.0
) -> tuple[Tensor, Tensor]:
    """LayerNorm(z) and z = x + dropout(y) (Ba et al. 2016, section 3).

    A post-LN layer uses the first result (Vaswani et al. 2017, section 5.4). A pre-LN layer uses
    both (Xiong et al. 2020). x, y: (T, C) of floating types, T may be 0. weight: (C,). bias:
    (C,) or None. `rate` is the dropout rate of y. Returns two tensors (T, C). They can be
    differentiated once; `plain` can be differentiated twice. Raises ValueError for other shapes.
    """
    affine = (weight,) if bias is None else (weight, bias)
    if x.dim() != 2 or x.shape != y.shape or any(x.shape[1:] != v.shape for v in affine):
        shapes = [tuple(tensor.shape) for tensor in (x, y, *affine)]
        raise ValueError(f"add_norm takes (T, C), (T, C), (C,) and (C,), not {shapes}")
    if native.serves(x, y, *affine) and {v.dtype for v in (x, *affine)} == {torch.float32}:
        seed = dropout.new_seed() if rate > 0.0 else None
        bias = torch.zeros_like(weight) if bias is None else bias
        out, z, _ = _in_cpp(x, y, weight, bias, eps, rate, seed)
        return out, z
    z = x + dropout.dropout(y, rate)
    return plain(z, weight, bias, eps), z


def plain(z: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm by PyTorch's operation."""
    return F.layer_norm(z, z.shape[1:], weight, bias, eps)


# --------------------------------------------------------------------------------------- C++


def _add_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float, rate: float, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm(z), z, and each row's mean and 1 / sqrt(variance + eps), (T, 2)."""
    T, C = x.size()
    out, z, moments = _empty_results(x)
    native.call("add_norm", y.dtype, x, y, weight, bias, z, out, moments, T, C, eps, rate, seed)
    return out, z, moments


def _empty_results(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(len(x), 2)


def _add_norm_backward(
    d_out: Tensor,
    d_z: Tensor | None,
    z: Tensor,
    moments: Tensor,
    weight: Tensor,
    half: bool,
    rate: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (T, C), of y (T, C), and of weight and bias, (2, C).

    Without dropout, x and y have the same gradient, and that of y is returned empty. If y is bf16
    (`half`), it is never empty, because its type differs from that of x.
    """
    d_x, d_y, d_affine = _empty_gradients(z, half, rate)
    of_y = d_x if d_y.dim() == 1 else d_y  # 1: it is empty
    tensors = d_out, d_z, z, moments, weight, d_x, of_y, *d_affine.unbind()
    native.call("add_norm_backward", of_y.dtype, *tensors, *z.size(), rate, seed)
    return d_x, d_y, d_affine


def _empty_gradients(z: Tensor, half: bool, rate: float) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.bfloat16 if half else torch.float32
    d_y = torch.empty_like(z, dtype=dtype) if half or rate > 0.0 else z.new_empty(0)
    return torch.empty_like(z), d_y, z.new_empty(2, z.size(1))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, y, weight, _, _, ctx.rate, seed = inputs
    _, z, moments = output
    ctx.half = y.dtype == torch.bfloat16
    ctx.save_for_backward(z, moments, weight, seed)
    ctx.set_materialize_grads(False)  # a post-LN layer does not use z: d_z is None there


def _backward(ctx: Any, d_out: Tensor | None, d_z: Tensor | None, _: Any) -> tuple[Any, ...]:
    native.refuse_second_derivative("add_norm")
    z, moments, weight, seed = ctx.saved_tensors
    d_out = torch.zeros_like(z) if d_out is None else d_out.contiguous()
    d_z = None if d_z is None else d_z.contiguous()
    d_x, d_y, d_affine = _backward_in_cpp(d_out, d_z, z, moments, weight, ctx.half, ctx.rate, seed)
    d_weight, d_bias = d_affine.unbind()
    return d_x, d_x if d_y.dim() == 1 else d_y, d_weight, d_bias, None, None, None


_in_cpp = define(_add_norm, lambda x, *_: _empty_results(x))
_backward_in_cpp = define(
    _add_norm_backward,
    lambda d_out, d_z, z, moments, weight, half, rate, seed: _empty_gradients(z, half, rate),
)
differentiate(_in_cpp, _keep, _backward)
