"""Self-attention on packed sequences: one function, several equal back ends.

T tokens in the batch, N sequences, H heads, D size of a head, L length of a sequence.

    varlen    torch's fused variable-length kernel: CUDA, 16 bit, no dropout
    triton    our own kernel (xformer/model/kernels.py): CUDA, also fp32 and dropout
    sdpa      scaled_dot_product_attention on runs of equal length: the CPU, no dropout
    explicit  softmax written out: the CPU otherwise, attention maps, second derivatives
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Backend = Literal["auto", "varlen", "triton", "sdpa", "explicit"]


@dataclass(frozen=True)
class Layout:
    """Where the sequences of a packed batch lie: sequence i is rows cu_seqlens[i] to [i + 1]."""

    cu_seqlens: Tensor  # (N + 1,) int32, on the batch's device
    lengths: tuple[int, ...]

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    def runs(self) -> list[tuple[int, int]]:
        """(number of sequences, their length) for each run of neighbours of equal length."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]


def layout(cu_seqlens: Sequence[int] | np.ndarray, device: torch.device | str = "cpu") -> Layout:
    """The layout of a packed batch from its boundaries, (N + 1,)."""
    boundaries = np.asarray(cu_seqlens, np.int32)
    lengths = tuple(int(n) for n in np.diff(boundaries))
    return Layout(torch.from_numpy(boundaries).to(device, non_blocking=True), lengths)


def choose_backend(q: Tensor, dropout: float) -> Backend:
    """The fastest back end that serves this device, type and dropout."""
    if q.is_cuda:
        half = q.dtype in (torch.bfloat16, torch.float16)
        return "varlen" if half and dropout == 0.0 else "triton"
    # the CPU's fused kernel has no dropout, and its 16-bit backward is 3 to 5 times slower than
    # written-out products (docs/log.md, 2026-11-21)
    fused = dropout == 0.0 and (q.dtype == torch.float32 or not q.requires_grad)
    return "sdpa" if fused else "explicit"


def attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, dropout: float = 0.0,
              backend: Backend = "auto") -> Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(D)) v within each sequence (Vaswani et al. 2017, section 3.2.1).

    q, k, v: (T, H, D); returns (T, H, D). `dropout` falls on the probabilities. Raises ValueError
    where the named back end cannot serve the dropout asked for.
    """
    if backend == "auto":
        backend = choose_backend(q, dropout)
    if backend == "explicit":
        return explicit_attention(q, k, v, layout, dropout)[0]
    if backend == "triton":
        from xformer.model.kernels import packed_attention

        seed = int(torch.randint(2**62, ())) if dropout > 0.0 else 0
        qkv = torch.stack((q, k, v), 1)
        return packed_attention(qkv, layout.cu_seqlens, layout.max_length, dropout, seed)
    if dropout > 0.0:
        raise ValueError(f"the back end {backend!r} has no dropout: use triton or explicit")
    if backend == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        boundaries, longest = layout.cu_seqlens, layout.max_length
        out = varlen_attn(q, k, v, boundaries, boundaries, longest, longest)
        assert isinstance(out, Tensor)
        return out
    outputs = [
        F.scaled_dot_product_attention(q_run, k_run, v_run).transpose(1, 2).flatten(0, 1)
        for q_run, k_run, v_run in _runs(q, k, v, layout)
    ]
    return torch.cat(outputs) if outputs else torch.empty_like(q)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout,
                       dropout: float = 0.0) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Attention written out; also returns the maps: per sequence (H, L, L), before dropout."""
    out: list[Tensor] = []
    maps: list[Tensor] = []
    for q_run, k_run, v_run in _runs(q, k, v, layout):
        scores = q_run @ k_run.transpose(2, 3) / math.sqrt(q.size(2))  # (n, H, L, L)
        weights = torch.softmax(scores, dim=-1)
        maps += weights.unbind(0)
        kept = F.dropout(weights, dropout) if dropout > 0.0 else weights
        out.append((kept @ v_run).transpose(1, 2).flatten(0, 1))
    return torch.cat(out) if out else torch.empty_like(q), maps


def _runs(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> list[tuple[Tensor, ...]]:
    """q, k, v as (n, H, L, D) for each run of n neighbours of equal length L."""
    runs = layout.runs()
    sizes = [n * length for n, length in runs]
    # split, not slices: its backward is one concatenation, not a sum of zero-filled tensors
    split = [x.split(sizes) for x in (q, k, v)]
    return [
        tuple(x[i].unflatten(0, run).transpose(1, 2) for x in split) for i, run in enumerate(runs)
    ]
