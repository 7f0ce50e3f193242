"""The dropout masks of the Triton kernels, written out in plain PyTorch.

The kernels compute these masks and store none. Letters: N sequences, H heads, L length of a
sequence, T tokens, C width of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xformer.model.kernel_base import MASK_32, MULTIPLIER_1, MULTIPLIER_2, mix, seed_words


def keep(words: tuple[Any, Any], row: Tensor, column: Tensor, dropout_p: float) -> Tensor:
    """Which elements are kept: bool, in the shape that `row` and `column` (int64) broadcast to.

    `words` are the two words of the seed, or two tensors that broadcast too.
    """
    row_a, row_b = (mix(word ^ row) for word in words)
    bits = row_a ^ column
    bits = bits ^ (bits >> 16)
    bits = (bits * MULTIPLIER_1.value) & MASK_32
    bits = bits ^ (bits >> 13) ^ row_b
    bits = (bits * MULTIPLIER_2.value) & MASK_32
    bits = bits ^ (bits >> 16)
    return bits >= min(round(dropout_p * 2**32), MASK_32)


def attention_mask(
    cu_seqlens: Tensor, max_length: int, heads: int, dropout_p: float, seed: int
) -> Tensor:
    """The mask of `packed_attention`, (N, H, L, L), L being `max_length`: true where a weight is
    kept. Entries past the end of a sequence have values too; nothing uses them."""
    device = cu_seqlens.device
    head = torch.arange(heads, device=device).view(-1, 1, 1)
    word_a, word_b = (mix(word ^ head) for word in seed_words(seed))
    position = torch.arange(max_length, device=device)
    row = cu_seqlens[:-1].long().view(-1, 1, 1, 1) + position.view(-1, 1)  # (N, 1, L, 1)
    return keep((word_a, word_b), row, position, dropout_p)  # (N, H, L, L)


def norm_mask(tokens: int, width: int, dropout_p: float, seed: int) -> Tensor:
    """The mask of `add_norm`, (T, C): true where an element of x is kept."""
    row, column = torch.arange(tokens)[:, None], torch.arange(width)
    return keep(seed_words(seed), row, column, dropout_p)
