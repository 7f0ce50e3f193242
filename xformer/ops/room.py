"""Rows that are added to a batch so that the CPU finds a matrix product of its size compiled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
