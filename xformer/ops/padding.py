"""Rows added to a batch on the CPU, so that oneDNN can reuse a compiled matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def padded_count(count: int, device: torch.device) -> int:
    """The number of rows to which `count` rows are padded before matrix products.

    Under autocast oneDNN compiles a product for each new number of rows, which takes 2 to 6 ms.
    Padding leaves only 16 numbers between a power of two and the next. Without autocast and on
    other devices nothing is padded.
    """
    if device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return count
    step = max(16, 2 ** (count.bit_length() - 5))
    return -(-count // step) * step


def pad_rows(x: Tensor) -> Tensor:
    """x (n,) with zeros at its end, (padded_count(n),)."""
    more = padded_count(len(x), x.device) - len(x)
    return F.pad(x, (0, more)) if more else x
