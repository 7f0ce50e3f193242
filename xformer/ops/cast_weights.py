"""The weights of a layer in the type of autocast, cast together.

Autocast casts every weight and every bias with a separate kernel, and so does the backward pass
with their gradients. These are 16 kernels a layer, and most of them take longer to launch than to
run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def cast_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights of a module's linear layers in the type of autocast, by their names in the
    module. Empty without autocast.

    One kernel casts all of them, and in the backward pass one kernel casts their gradients back,
    before these are added to the gradients of other micro-batches and ranks. Frozen weights are
    left to autocast: they need no gradient.
    """
    dtype = autocast_type(next(module.parameters()).device)
    if dtype is None:
        return {}
    weights = {
        f"{path}.{name}": weight
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear)
        for name, weight in part.named_parameters()
        if weight.requires_grad and weight.dtype == torch.float32
    }
    if not weights:
        return {}
    return dict(zip(weights, Cast.apply(dtype, *weights.values()), strict=True))


def autocast_type(device: torch.device) -> torch.dtype | None:
    """The type in which autocast computes matrix products on a device; None without autocast."""
    kind = device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):  # others, as meta, have none
        return torch.get_autocast_dtype(kind)
    return None


class Cast(torch.autograd.Function):
    """Tensors of one type in another type. The gradient is cast back."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        results = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(results, tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *Cast.apply(ctx.dtype, *gradients)
