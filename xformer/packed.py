"""A packed batch as tensors on a device, and the rows that are added to it for fast products.

T tokens in the batch, N sequences, M masked tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.data.batch import Batch
from xformer.ops.attention import Layout


@dataclass(frozen=True)
class Packed:
    """A packed batch as tensors on a device; see xformer.data.batch.Batch."""

    tokens: Tensor  # (T,)
    positions: Tensor  # (T,)
    segments: Tensor  # (T,)
    layout: Layout
    labels: Tensor | None = None  # (N,), spans (N, 2)
    places: Tensor | None = None  # (M,)
    targets: Tensor | None = None  # (M,)

    @property
    def first(self) -> Tensor:
        """Where each sequence begins, (N,)."""
        return self.layout.cu_seqlens[:-1]

    def with_room(self) -> Packed:
        """The batch with tokens after the last sequence, as `with_room` adds them."""
        tokens, positions, segments = map(with_room, (self.tokens, self.positions, self.segments))
        if tokens is self.tokens:
            return self
        return replace(self, tokens=tokens, positions=positions, segments=segments)


def layout(cu_seqlens: Sequence[int] | np.ndarray, device: torch.device | str = "cpu") -> Layout:
    """The layout of a packed batch from its boundaries, (N + 1,)."""
    boundaries = np.array(cu_seqlens, np.int32)  # a copy, which nobody else changes
    on_host = torch.from_numpy(boundaries)
    if torch.device(device).type == "cuda":
        on_host = on_host.pin_memory()  # without it the copy would wait for the device
    longest = int(np.diff(boundaries).max(initial=0))
    return Layout(on_host.to(device, non_blocking=True), longest)


def to_device(batch: Batch, device: torch.device) -> Packed:
    """Move a batch to a device, on CUDA from pinned memory without waiting."""

    def move(array) -> Tensor | None:  # type: ignore[no-untyped-def]
        if array is None:
            return None
        tensor = torch.from_numpy(array)
        return (
            tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
        )

    tokens, positions, segments = (move(a) for a in (batch.tokens, batch.positions, batch.segments))
    assert tokens is not None
    assert positions is not None
    assert segments is not None
    return Packed(
        tokens,
        positions,
        segments,
        layout(batch.cu_seqlens, device),
        move(batch.labels),
        move(batch.places),
        move(batch.targets),
    )


def roomy(count: int, device: torch.device) -> int:
    """The number of rows to which `count` rows are padded before matrix products.

    Under autocast oneDNN compiles a product for each new number of rows, which takes 2 to 6 ms.
    Padding leaves 16 different numbers between one power of two and the next. Without autocast, and
    on other devices, it is `count` itself.
    """
    if device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return count
    step = max(16, 2 ** (count.bit_length() - 5))
    return -(-count // step) * step


def with_room(x: Tensor) -> Tensor:
    """x (n,) padded with zeros at its end, (roomy(n),)."""
    more = roomy(len(x), x.device) - len(x)
    return F.pad(x, (0, more)) if more else x
