"""Self-attention on packed sequences: one function, several equal back ends.

T tokens in the batch, N sequences, H heads, D size of a head, L length of a sequence, n sequences
of a block, t their tokens. As a call costs the CPU as much as much work, sequences of nearly one
length are padded to the longest of them, within attention alone.

    varlen    torch's fused variable-length kernel: CUDA, 16 bit, no dropout
    triton    our own kernel (xformer/model/kernels.py): CUDA, also fp32 and dropout
    native    our own kernel (xformer/model/native.cpp): the CPU, fp32 and bf16
    sdpa      scaled_dot_product_attention, block by block: the CPU without native, no gradient
    fused     a backward pass written by hand: the CPU without native, in training
    explicit  plain operations: attention maps, second derivatives, torch.func
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.model import native

Backend = Literal["auto", "varlen", "triton", "native", "sdpa", "fused", "explicit"]
SMALL = np.random.SFC64(0)  # its state is set before every use
BLOCK = 2**21  # probabilities that the CPU works on at a time, so that they stay in its cache
WASTE = 2**13  # probabilities more that cost the CPU as much as the calls for a block more


@dataclass(frozen=True)
class Layout:
    """Where the sequences of a packed batch lie: sequence i is rows cu_seqlens[i] to [i + 1]."""

    cu_seqlens: Tensor  # (N + 1,) int32, on the batch's device
    lengths: tuple[int, ...]

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    @cached_property
    def blocks(self) -> dict[int, list[Block]]:
        """By the number of heads, what `blocks_of` has made: every layer asks again."""
        return {}

    def blocks_of(self, heads: int) -> list[Block]:
        """Neighbours of (nearly) equal length, with at most BLOCK probabilities unless it is one
        sequence, and at most WASTE of padding for a block saved."""
        if heads not in self.blocks:
            groups: list[list[int]] = []
            for length, run in groupby(self.lengths):
                left = len(list(run))
                if groups and _joins(groups[-1], length, left, heads):
                    groups[-1] += [length] * left
                    continue
                most = max(1, BLOCK // (heads * length**2))
                while left:
                    groups.append([length] * min(left, most))
                    left -= len(groups[-1])
            self.blocks[heads] = [_block(group, self.cu_seqlens.device) for group in groups]
        return self.blocks[heads]


def _joins(group: list[int], length: int, count: int, heads: int) -> bool:
    """Whether `count` more sequences of one length are better done with a group than after it."""
    longest = max(length, *group)
    size = (len(group) + count) * longest**2
    waste = len(group) * (longest**2 - max(group) ** 2) + count * (longest**2 - length**2)
    return heads * waste <= WASTE and heads * size <= BLOCK


@dataclass(frozen=True)
class Block:
    """n sequences attended to at once, as if each had L tokens; t tokens are real. Where all have L
    the tensors are None."""

    count: int
    length: int
    real: Tensor | None = None  # (t,) where they are among n L
    source: Tensor | None = None  # (n L,) which of t a place takes; one behind an end takes any
    bias: Tensor | None = None  # (n, 1, 1, L) for the scores: -inf behind each end, else 0

    @property
    def tokens(self) -> int:
        return self.count * self.length if self.real is None else len(self.real)

    def pad(self, x: Tensor) -> Tensor:
        """(t, ...) -> (n, L, ...), with anything finite behind each end."""
        x = x if self.source is None else x.index_select(0, self.source)
        return x.unflatten(0, (self.count, self.length))

    def pad_with_zeros(self, x: Tensor) -> Tensor:
        """(t, ...) -> (n, L, ...), 0 behind each end; not to be differentiated."""
        if self.real is not None:
            zeros = x.new_zeros(self.count * self.length, *x.size()[1:])
            x = zeros.index_copy_(0, self.real, x)
        return x.unflatten(0, (self.count, self.length))

    def strip(self, x: Tensor) -> Tensor:
        """(n, L, ...) -> (t, ...)"""
        x = x.flatten(0, 1)
        return x if self.real is None else x.index_select(0, self.real)

    def strip_into(self, out: Tensor, x: Tensor) -> None:
        """`strip` in one pass over memory; not to be differentiated."""
        if self.real is None:
            out.unflatten(0, (self.count, self.length)).copy_(x)
        else:
            torch.index_select(x.to(out.dtype).flatten(0, 1), 0, self.real, out=out)


def _block(lengths: list[int], device: torch.device) -> Block:
    """The block of sequences of these lengths."""
    n, L = len(lengths), max(lengths)
    if min(lengths) == L:
        return Block(n, L)
    there = np.arange(L) < np.array(lengths)[:, None]  # (n, L)
    source = (np.cumsum(there) - 1).reshape(n * L)  # behind an end the last token before it
    bias = np.where(there, np.float32(0), np.float32(-np.inf))[:, None, None]
    arrays = np.flatnonzero(there), source, bias
    return Block(n, L, *(torch.from_numpy(array).to(device) for array in arrays))


def layout(cu_seqlens: Sequence[int] | np.ndarray, device: torch.device | str = "cpu") -> Layout:
    """The layout of a packed batch from its boundaries, (N + 1,)."""
    boundaries = np.ascontiguousarray(cu_seqlens, np.int32)
    lengths = tuple(int(n) for n in np.diff(boundaries))
    on_host = torch.from_numpy(boundaries)
    if torch.device(device).type == "cuda":
        on_host = on_host.pin_memory()  # else the copy waits
    return Layout(on_host.to(device, non_blocking=True), lengths)


def roomy(count: int, device: torch.device) -> int:
    """How many rows to make of `count` before products. Under autocast the CPU compiles every
    product for the number of its rows, 2 to 6 ms each: there are 16 numbers an octave."""
    if device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return count
    step = max(16, 2 ** (count.bit_length() - 5))
    return -(-count // step) * step


def with_room(x: Tensor) -> Tensor:
    """x (n,) and zeros behind it, (roomy(n),)."""
    more = roomy(len(x), x.device) - len(x)
    return F.pad(x, (0, more)) if more else x


def new_seed() -> int:
    """A seed for a dropout mask, from torch's generator of the CPU."""
    return int(torch.randint(2**62, ()))


def kept(size: Sequence[int], rate: float, dtype: torch.dtype) -> Tensor:
    """A mask on the CPU: 0 with the probability `rate`, else 1; from a seed that torch draws.

    With native kernels it is the one that they compute themselves. Without, four elements share a
    word of a small fast generator (SFC64, Doty-Humphrey 2010), so that `rate` has steps of 2^-16.
    """
    count, seed = math.prod(size), new_seed()
    if not native.missing():
        mask = torch.empty(size, dtype=dtype if dtype in native.TYPES else torch.float32)
        columns = max(1, size[-1] if size else 1)
        native.call("fill_mask", mask.dtype, mask, count // columns, columns, seed, rate)
        return mask.to(dtype)
    SMALL.state = {
        "bit_generator": "SFC64",
        "has_uint32": 0,
        "uinteger": 0,
        "state": {"state": np.array([seed, seed, seed, 1], np.uint64)},
    }
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
    if native.serves(qkv):
        return "native"
    return "fused" if dropout > 0.0 or qkv.requires_grad else "sdpa"


def attention(
    qkv: Tensor, layout: Layout, dropout: float = 0.0, backend: Backend = "auto"
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence (Vaswani et al. 2017, section 3.2.1).

    qkv: (T, 3, H, D); returns (T, H, D). `dropout` falls on the probabilities. For rows behind the
    last sequence the back ends of the CPU and explicit return 0; the others take none. Raises
    ValueError where the named back end cannot serve the dropout asked for.
    """
    if backend == "auto":
        backend = choose_backend(qkv, dropout)
    if backend == "explicit":
        return explicit_attention(qkv, layout, dropout)[0]
    if backend == "native":
        out = _Native.apply(qkv, layout, dropout)
    elif backend == "fused":
        out = _Fused.apply(qkv, layout, dropout)
    elif backend == "triton":
        from xformer.model.kernels import packed_attention

        seed = new_seed() if dropout > 0.0 else 0
        return packed_attention(qkv, layout.cu_seqlens, layout.max_length, dropout, seed)
    elif dropout > 0.0:
        raise ValueError(f"the back end {backend!r} has no dropout: give auto or explicit")
    elif backend == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        boundaries, longest = layout.cu_seqlens, layout.max_length
        q, k, v = qkv.unbind(1)
        out = varlen_attn(q, k, v, boundaries, boundaries, longest, longest)
    else:
        blocks = layout.blocks_of(qkv.size(2))
        out = _join(
            blocks,
            [
                F.scaled_dot_product_attention(q, k, v, None if bias is None else bias.to(q.dtype))
                for q, k, v, bias in _split(qkv, blocks)
            ],
            qkv,
        )
    assert isinstance(out, Tensor)
    return out


def explicit_attention(
    qkv: Tensor, layout: Layout, dropout: float = 0.0
) -> tuple[Tensor, list[Tensor]]:
    """Attention written out; also returns the maps: per sequence (H, L, L), before dropout."""
    out: list[Tensor] = []
    maps: list[Tensor] = []
    blocks = layout.blocks_of(qkv.size(2))
    lengths, begin = iter(layout.lengths), 0
    draws = dropout > 0.0 and qkv.device.type == "cpu" and not native.missing()
    seed = new_seed() if draws else None
    for (q, k, v, bias), block in zip(_split(qkv, blocks), blocks, strict=True):
        scores = q @ k.transpose(2, 3) / math.sqrt(qkv.size(3))
        weights = torch.softmax(scores if bias is None else scores + bias.to(q.dtype), -1)
        maps += [x[:, :n, :n] for x, n in zip(weights, lengths, strict=False)]  # of (n, H, L, L)
        if seed is None:
            left = drop(weights, dropout)
        else:  # as the back end native does, with its masks
            mask = torch.empty(weights.size(), dtype=torch.float32)
            native.call(
                "attention_mask",
                mask.dtype,
                mask,
                layout.cu_seqlens[begin:],
                block.count,
                qkv.size(2),
                block.length,
                seed,
                dropout,
            )
            left = weights * mask.to(weights.dtype).mul_(1 / (1 - dropout))
        out.append(left @ v)
        begin += block.count
    return _join(blocks, out, qkv), maps


def _split(
    qkv: Tensor,
    blocks: list[Block],
) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """q, k, v as (n, H, L, D), and the bias, for each block."""
    # split, not slices: its backward is one concatenation, not a sum of zero-filled tensors
    sizes = [block.tokens for block in blocks]
    rows = qkv.split([*sizes, len(qkv) - sum(sizes)])
    padded = (block.pad(x).permute(2, 0, 3, 1, 4) for x, block in zip(rows, blocks, strict=False))
    return [(q, k, v, block.bias) for (q, k, v), block in zip(padded, blocks, strict=True)]


def _join(blocks: list[Block], values: list[Tensor], qkv: Tensor) -> Tensor:
    """(n, H, L, D) for each block -> (T, H, D)."""
    rows = [block.strip(x.transpose(1, 2)) for block, x in zip(blocks, values, strict=True)]
    behind = qkv[sum(len(x) for x in rows) :, 0]
    return torch.cat([*rows, torch.zeros_like(behind)])


class _Native(torch.autograd.Function):
    """Attention by a native kernel; for its backward pass it computes the probabilities and their
    mask anew."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, layout: Layout, dropout: float) -> Tensor:
        T, _, H, D = qkv.size()
        N, ends = len(layout.lengths), layout.cu_seqlens
        if not native.serves(qkv) or sum(layout.lengths) > T:
            raise ValueError(
                "the back end 'native' wants its kernels, and qkv in fp32 or bf16 on "
                "the CPU, without gaps, with a row for every token"
            )
        out, sums = qkv.new_empty(T, H, D), qkv.new_empty(T, H, 2, dtype=torch.float32)
        ctx.rest = N, H, D, layout.max_length, new_seed() if dropout > 0.0 else 0, dropout
        native.call("attention", qkv.dtype, qkv, ends, out, sums, *ctx.rest)
        ctx.count = sum(layout.lengths)
        out[ctx.count :] = 0
        ctx.save_for_backward(qkv, ends, sums)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        refuse_second_derivative("the back end 'native' has none: use explicit")
        qkv, ends, sums = ctx.saved_tensors
        d_qkv = torch.empty_like(qkv)
        native.call(
            "attention_backward", qkv.dtype, qkv, ends, sums, d_out.contiguous(), d_qkv, *ctx.rest
        )
        d_qkv[ctx.count :] = 0
        return d_qkv, None, None


class _Fused(torch.autograd.Function):
    """All blocks in one node of the graph. Products of 16 bits are compiled for their shape (see
    roomy): where lengths differ, those of 32 bits are faster."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, qkv: Tensor, layout: Layout, dropout: float) -> Tensor:
        T, _, H, D = qkv.size()
        out, saved, start = qkv.new_empty(T, H, D), [], 0
        even = len(set(layout.lengths)) == 1
        dtype = qkv.dtype if even else torch.promote_types(qkv.dtype, torch.float32)
        for block in layout.blocks_of(H):
            n, L, rows = block.count, block.length, slice(start, start + block.tokens)
            x = block.pad(qkv[rows]).permute(2, 0, 3, 1, 4)
            if x.dtype != dtype:
                x = x.to(dtype, memory_format=torch.contiguous_format)
            x = x.reshape(3, n * H, L, D)
            q, k, v = x.unbind(0)
            bias = block.bias
            if bias is not None:
                bias = bias.to(q.dtype).expand(n, H, 1, L).reshape(n * H, 1, L)
            weights = _product(q, k.transpose(1, 2), 1 / math.sqrt(D), bias=bias)
            torch.softmax(weights, -1, out=weights)
            left = weights  # what dropout leaves of them
            if dropout > 0.0:
                left = kept(weights.size(), dropout, weights.dtype).mul_(weights)
            y = _product(left, v, 1 / (1 - dropout))
            block.strip_into(out[rows], y.view(n, H, L, D).transpose(1, 2))
            saved += [x, weights, left]
            start = rows.stop
        out[start:] = 0
        ctx.save_for_backward(*saved)
        ctx.layout, ctx.dropout = layout, dropout
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, d_out: Tensor) -> Any:
        refuse_second_derivative("the back end 'fused' has none: use explicit")
        T, H, D = d_out.size()
        d_qkv, saved, start = d_out.new_empty(T, 3, H, D), iter(ctx.saved_tensors), 0
        for block in ctx.layout.blocks_of(H):
            n, L, rows = block.count, block.length, slice(start, start + block.tokens)
            x, weights, left = next(saved), next(saved), next(saved)
            q, k, v = x.unbind(0)
            # with 0 behind each end nothing flows back from there
            dy = block.pad_with_zeros(d_out[rows].to(x.dtype))
            dy = dy.transpose(1, 2).reshape(n * H, L, D)
            dx = x.new_empty(x.size())  # end to end, which x is not of one sequence
            _product(left.transpose(1, 2), dy, 1 / (1 - ctx.dropout), dx[2])
            d = _product(dy, v.transpose(1, 2), 1 / (1 - ctx.dropout))
            if ctx.dropout > 0.0:  # nothing flows where nothing is left
                torch.ops.aten.threshold_backward.grad_input(d, left, 0, grad_input=d)
            torch._softmax_backward_data(d, weights, -1, weights.dtype, grad_input=d)
            _product(d, k, 1 / math.sqrt(D), dx[0])
            _product(d.transpose(1, 2), q, 1 / math.sqrt(D), dx[1])
            block.strip_into(d_qkv[rows], dx.view(3, n, H, L, D).permute(1, 3, 0, 2, 4))
            start = rows.stop
        d_qkv[start:] = 0
        return d_qkv, None, None


def _product(
    a: Tensor, b: Tensor, scale: float, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """scale * a b, into `out` or plus a `bias`."""
    if bias is not None:
        return torch.baddbmm(bias, a, b, alpha=scale)
    if out is None:
        out = a.new_empty(a.size(0), a.size(1), b.size(2))
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)
