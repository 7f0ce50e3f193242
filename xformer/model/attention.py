"""Self-attention on packed sequences: one function, several equal back ends.

T tokens in the batch, N sequences, H heads, D size of a head, L length of a sequence, n sequences
of a block.

    varlen    torch's fused variable-length kernel: CUDA, 16 bit, no dropout
    triton    our own kernel (xformer/model/kernels.py): CUDA, also fp32 and dropout
    sdpa      scaled_dot_product_attention on blocks of equal length: the CPU without gradient
    fused     a backward pass written by hand: the CPU in training
    explicit  plain operations: attention maps, second derivatives, torch.func
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Backend = Literal["auto", "varlen", "triton", "sdpa", "fused", "explicit"]
SMALL = np.random.SFC64(0)  # its state is set before every use
BLOCK = 2**19  # probabilities that the CPU works on at a time, so that they stay in its cache


@dataclass(frozen=True)
class Layout:
    """Where the sequences of a packed batch lie: sequence i is rows cu_seqlens[i] to [i + 1]."""

    cu_seqlens: Tensor  # (N + 1,) int32, on the batch's device
    lengths: tuple[int, ...]

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    def blocks(self, heads: int) -> Iterator[tuple[int, int]]:
        """(n, L) for blocks of neighbours of equal length with at most BLOCK probabilities."""
        for length, run in groupby(self.lengths):
            left, most = len(list(run)), max(1, BLOCK // (heads * length**2))
            while left:
                yield min(left, most), length
                left -= min(left, most)


def layout(cu_seqlens: Sequence[int] | np.ndarray, device: torch.device | str = "cpu") -> Layout:
    """The layout of a packed batch from its boundaries, (N + 1,)."""
    boundaries = np.asarray(cu_seqlens, np.int32)
    lengths = tuple(int(n) for n in np.diff(boundaries))
    on_host = torch.from_numpy(boundaries)
    if torch.device(device).type == "cuda":
        on_host = on_host.pin_memory()  # else the copy waits
    return Layout(on_host.to(device, non_blocking=True), lengths)


def kept(size: Sequence[int], rate: float, dtype: torch.dtype) -> Tensor:
    """A mask on the CPU: 0 with the probability `rate` in steps of 2^-16, else 1.

    Four elements share a word of a small fast generator (SFC64, Doty-Humphrey 2010), which takes
    its seed from torch's: a tenth of the time of `bernoulli_`.
    """
    count = math.prod(size)
    seed = int(torch.randint(2**62, ()))
    SMALL.state = {"bit_generator": "SFC64", "has_uint32": 0, "uinteger": 0,
                   "state": {"state": np.array([seed, seed, seed, 1], np.uint64)}}  # fmt: skip
    SMALL.random_raw(12, output=False)  # until the words of the state are mixed
    words = np.random.Generator(SMALL).integers(0, 2**64, -(-count // 4), np.uint64)
    draws = torch.from_numpy(words.view(np.int16)[:count]).view(size)
    dropped = min(round(rate * 2**16), 2**16 - 1)
    return torch.ge(draws, dropped - 2**15, out=torch.empty(size, dtype=dtype))


def drop(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Dropout: F.dropout, on the CPU with the masks of `kept`."""
    if x.device.type != "cpu" or not training or rate == 0.0:
        return F.dropout(x, rate, training)
    return x * kept(x.size(), rate, x.dtype).mul_(1.0 / (1.0 - rate))


class _DropAdd(torch.autograd.Function):
    """x + dropout(y) on the CPU: one pass over memory each way, where plain operations make four
    and two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, rate: float) -> Tensor:
        mask = kept(y.size(), rate, y.dtype)
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - rate)
        return torch.addcmul(x, y, mask, value=ctx.scale)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        refuse_second_derivative("the fused sum and dropout has none: give the back end explicit")
        (mask,) = ctx.saved_tensors
        return d, torch.addcmul(d.new_zeros(()), d, mask, value=ctx.scale), None


def drop_add(x: Tensor, y: Tensor, rate: float, plain: bool = False) -> Tensor:
    """x + dropout(y); `plain` operations can be differentiated twice."""
    if plain or rate == 0.0 or x.device.type != "cpu" or x.dtype != y.dtype:
        return x + drop(y, rate)
    out = _DropAdd.apply(x, y, rate)
    assert isinstance(out, Tensor)
    return out


def refuse_second_derivative(instead: str) -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"second derivative: {instead}")


def choose_backend(qkv: Tensor, dropout: float) -> Backend:
    """The fastest back end that serves this device, type and dropout."""
    if qkv.is_cuda:
        half = qkv.dtype in (torch.bfloat16, torch.float16)
        wide = qkv.size(-1) % 8 == 0  # as the flash kernel underneath wants it
        if half and wide and dropout == 0.0:
            return "varlen"
        from xformer.model.kernels import LARGEST_HEAD

        if qkv.size(-1) > LARGEST_HEAD:
            return "explicit" if dropout > 0.0 else "sdpa"
        return "triton"
    return "fused" if dropout > 0.0 or qkv.requires_grad else "sdpa"


def attention(qkv: Tensor, layout: Layout, dropout: float = 0.0,
              backend: Backend = "auto") -> Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(D)) v within each sequence (Vaswani et al. 2017, section 3.2.1).

    qkv: (T, 3, H, D); returns (T, H, D). `dropout` falls on the probabilities. Raises ValueError
    where the named back end cannot serve the dropout asked for.
    """
    if backend == "auto":
        backend = choose_backend(qkv, dropout)
    if backend == "explicit":
        return explicit_attention(qkv, layout, dropout)[0]
    if backend == "fused":
        out = _Fused.apply(qkv, layout, dropout)
    elif backend == "triton":
        from xformer.model.kernels import packed_attention

        seed = int(torch.randint(2**62, ())) if dropout > 0.0 else 0
        return packed_attention(qkv, layout.cu_seqlens, layout.max_length, dropout, seed)
    elif dropout > 0.0:
        raise ValueError(f"the back end {backend!r} has no dropout: use triton, fused or explicit")
    elif backend == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        boundaries, longest = layout.cu_seqlens, layout.max_length
        q, k, v = qkv.unbind(1)
        out = varlen_attn(q, k, v, boundaries, boundaries, longest, longest)
    else:
        blocks = [F.scaled_dot_product_attention(*block) for block in _split(qkv, layout)]
        out = _join(blocks, qkv)
    assert isinstance(out, Tensor)
    return out


def explicit_attention(qkv: Tensor, layout: Layout,
                       dropout: float = 0.0) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Attention written out; also returns the maps: per sequence (H, L, L), before dropout."""
    out: list[Tensor] = []
    maps: list[Tensor] = []
    for q, k, v in _split(qkv, layout):
        weights = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(qkv.size(3)), -1)  # (n, H, L, L)
        maps += weights.unbind(0)
        out.append(drop(weights, dropout) @ v)
    return _join(out, qkv), maps


def _split(qkv: Tensor, layout: Layout) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v as (n, H, L, D) for each block."""
    sizes = list(layout.blocks(qkv.size(2)))
    # split, not slices: its backward is one concatenation, not a sum of zero-filled tensors
    rows = qkv.split([n * length for n, length in sizes])
    blocks = (x.unflatten(0, size) for x, size in zip(rows, sizes, strict=True))
    return [(q, k, v) for q, k, v in (x.permute(2, 0, 3, 1, 4) for x in blocks)]


def _join(blocks: list[Tensor], qkv: Tensor) -> Tensor:
    """(n, H, L, D) for each block -> (T, H, D)."""
    rows = [x.transpose(1, 2).flatten(0, 1) for x in blocks]
    return torch.cat(rows) if rows else torch.empty_like(qkv[:, 0])


class _Fused(torch.autograd.Function):
    """All blocks in one node of the graph, with the type of qkv throughout."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, qkv: Tensor, layout: Layout, dropout: float) -> Tensor:
        T, _, H, D = qkv.size()
        out, saved, start = qkv.new_empty(T, H, D), [], 0
        for n, L in layout.blocks(H):
            rows = slice(start, start + n * L)
            x = qkv[rows].view(n, L, 3, H, D).permute(2, 0, 3, 1, 4).reshape(3, n * H, L, D)
            q, k, v = x.unbind(0)
            weights = _product(q, k.transpose(1, 2), 1 / math.sqrt(D))
            torch.softmax(weights, -1, out=weights)
            left = weights  # what dropout leaves of them
            if dropout > 0.0:
                left = kept(weights.size(), dropout, weights.dtype).mul_(weights)
            y = _product(left, v, 1 / (1 - dropout))
            out[rows].view(n, L, H, D).copy_(y.view(n, H, L, D).transpose(1, 2))
            saved += [x, weights, left]
            start = rows.stop
        ctx.save_for_backward(*saved)
        ctx.layout, ctx.dropout = layout, dropout
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, d_out: Tensor) -> Any:
        refuse_second_derivative("the back end 'fused' has none: use explicit")
        T, H, D = d_out.size()
        d_qkv, saved, start = d_out.new_empty(T, 3, H, D), iter(ctx.saved_tensors), 0
        for n, L in ctx.layout.blocks(H):
            rows = slice(start, start + n * L)
            x, weights, left = next(saved), next(saved), next(saved)
            q, k, v = x.unbind(0)
            dy = d_out[rows].view(n, L, H, D).transpose(1, 2).reshape(n * H, L, D)
            dx = torch.empty_like(x)
            _product(left.transpose(1, 2), dy, 1 / (1 - ctx.dropout), dx[2])
            d = _product(dy, v.transpose(1, 2), 1 / (1 - ctx.dropout))
            if ctx.dropout > 0.0:  # nothing flows where nothing is left
                torch.ops.aten.threshold_backward.grad_input(d, left, 0, grad_input=d)
            torch._softmax_backward_data(d, weights, -1, weights.dtype, grad_input=d)
            _product(d, k, 1 / math.sqrt(D), dx[0])
            _product(d.transpose(1, 2), q, 1 / math.sqrt(D), dx[1])
            d_qkv[rows].view(n, L, 3, H, D).copy_(dx.view(3, n, H, L, D).permute(1, 3, 0, 2, 4))
            start = rows.stop
        return d_qkv, None, None


def _product(a: Tensor, b: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """scale * a b."""
    if out is None:
        out = a.new_empty(a.size(0), a.size(1), b.size(2))
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)
