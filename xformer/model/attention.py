"""Self-attention on packed sequences: one function, several equal back ends.

T tokens in the batch, N sequences, H heads, D size of a head, L length of a sequence, n sequences
of a block, t their tokens. On the CPU a call has a high fixed cost, so sequences of nearly equal
length share one call: attention pads them to the longest of them.

    varlen    torch's fused variable-length kernel: CUDA, 16 bit, no dropout
    triton    our own kernel (xformer/model/kernels.py): CUDA, also fp32 and dropout
    native    our own kernel (xformer/model/native.cpp): the CPU, fp32 and bf16
    sdpa      scaled_dot_product_attention, block by block: the CPU without native, no gradient
    explicit  plain operations: attention maps, second derivatives, torch.func; and the CPU without
              native, in training
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

Backend = Literal["auto", "varlen", "triton", "native", "sdpa", "explicit"]
SMALL = np.random.SFC64(0)  # its state is set before every use
BLOCK = 2**21  # most probabilities in a block, so that they stay in the cache of the CPU
WASTE = 2**13  # probabilities whose work costs the CPU as much as the calls for one more block


@dataclass(frozen=True)
class Layout:
    """The sequences of a packed batch: sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1]."""

    cu_seqlens: Tensor  # (N + 1,) int32, on the batch's device
    lengths: tuple[int, ...]

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    @cached_property
    def blocks(self) -> dict[int, list[Block]]:
        """The results of `blocks_of` by the number of heads. Every layer asks for the same one."""
        return {}

    def blocks_of(self, heads: int) -> list[Block]:
        """The sequences in order, as blocks of neighbours with (nearly) equal lengths.

        A block of several sequences has at most BLOCK probabilities. A sequence joins the block
        before it if that adds at most WASTE probabilities of padding.
        """
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
    """Whether `count` more sequences of one length should join a group."""
    longest = max(length, *group)
    size = (len(group) + count) * longest**2
    waste = len(group) * (longest**2 - max(group) ** 2) + count * (longest**2 - length**2)
    return heads * waste <= WASTE and heads * size <= BLOCK


@dataclass(frozen=True)
class Block:
    """n sequences in one call, each padded to L tokens; t tokens are real. If all sequences have L
    tokens, the tensors are None."""

    count: int
    length: int
    real: Tensor | None = None  # (t,) the place of each real token among the n L places
    source: Tensor | None = None  # (n L,) the token that each place holds; padding holds any token
    bias: Tensor | None = None  # (n, 1, 1, L) added to the scores: -inf for padding, else 0

    @property
    def tokens(self) -> int:
        return self.count * self.length if self.real is None else len(self.real)

    def pad(self, x: Tensor) -> Tensor:
        """(t, ...) -> (n, L, ...). Padding holds finite numbers without meaning."""
        x = x if self.source is None else x.index_select(0, self.source)
        return x.unflatten(0, (self.count, self.length))

    def strip(self, x: Tensor) -> Tensor:
        """(n, L, ...) -> (t, ...)"""
        x = x.flatten(0, 1)
        return x if self.real is None else x.index_select(0, self.real)


def _block(lengths: list[int], device: torch.device) -> Block:
    """The block of sequences of these lengths."""
    n, L = len(lengths), max(lengths)
    if min(lengths) == L:
        return Block(n, L)
    there = np.arange(L) < np.array(lengths)[:, None]  # (n, L)
    source = (np.cumsum(there) - 1).reshape(n * L)  # padding repeats the last real token
    bias = np.where(there, np.float32(0), np.float32(-np.inf))[:, None, None]
    arrays = np.flatnonzero(there), source, bias
    return Block(n, L, *(torch.from_numpy(array).to(device) for array in arrays))


def layout(cu_seqlens: Sequence[int] | np.ndarray, device: torch.device | str = "cpu") -> Layout:
    """The layout of a packed batch from its boundaries, (N + 1,)."""
    boundaries = np.ascontiguousarray(cu_seqlens, np.int32)
    lengths = tuple(int(n) for n in np.diff(boundaries))
    on_host = torch.from_numpy(boundaries)
    if torch.device(device).type == "cuda":
        on_host = on_host.pin_memory()  # without it the copy would wait for the device
    return Layout(on_host.to(device, non_blocking=True), lengths)


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


def new_seed() -> int:
    """A seed for a dropout mask, from torch's generator of the CPU."""
    return int(torch.randint(2**62, ()))


def kept(size: Sequence[int], rate: float, dtype: torch.dtype) -> Tensor:
    """A dropout mask on the CPU: 0 with the probability `rate`, else 1. torch draws its seed.

    The native kernels compute it if they are there. Otherwise four elements share a word of a small
    fast generator (SFC64, Doty-Humphrey 2010), which rounds `rate` to a multiple of 2^-16.
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
    SMALL.random_raw(12, output=False)  # twelve rounds mix the words of the state
    words = np.random.Generator(SMALL).integers(0, 2**64, -(-count // 4), np.uint64)
    draws = torch.from_numpy(words.view(np.int16)[:count]).view(size)
    dropped = min(round(rate * 2**16), 2**16 - 1)
    return torch.ge(draws, dropped - 2**15, out=torch.empty(size, dtype=dtype))


def drop(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Dropout. It is F.dropout, but on the CPU it takes the masks of `kept`."""
    if x.device.type != "cpu" or not training or rate == 0.0:
        return F.dropout(x, rate, training)
    return x * kept(x.size(), rate, x.dtype).mul_(1.0 / (1.0 - rate))


class _DropAdd(torch.autograd.Function):
    """x + dropout(y) on the CPU in one pass over memory forward and one backward. Plain operations
    take four and two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, rate: float) -> Tensor:
        mask = kept(y.size(), rate, y.dtype)
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - rate)
        return torch.addcmul(x, y, mask, value=ctx.scale)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        refuse_second_derivative("the sum with dropout has none: give the back end explicit")
        (mask,) = ctx.saved_tensors
        return d, torch.addcmul(d.new_zeros(()), d, mask, value=ctx.scale), None


def drop_add(x: Tensor, y: Tensor, rate: float, plain: bool = False) -> Tensor:
    """x + dropout(y). With `plain` it can be differentiated twice."""
    if plain or rate == 0.0 or x.device.type != "cpu" or x.dtype != y.dtype:
        return x + drop(y, rate)
    out = _DropAdd.apply(x, y, rate)
    assert isinstance(out, Tensor)
    return out


def refuse_second_derivative(instead: str) -> None:
    """Raise RuntimeError if this backward pass records a graph, that is, with create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"second derivative: {instead}")


def choose_backend(qkv: Tensor, dropout: float) -> Backend:
    """The fastest back end that serves this device, type and dropout."""
    if qkv.is_cuda:
        half = qkv.dtype in (torch.bfloat16, torch.float16)
        wide = qkv.size(-1) % 8 == 0  # FlashAttention takes no other head sizes
        if half and wide and dropout == 0.0:
            return "varlen"
        from xformer.model.kernels import LARGEST_HEAD

        if qkv.size(-1) > LARGEST_HEAD:
            return "explicit" if dropout > 0.0 else "sdpa"
        return "triton"
    if native.serves(qkv):
        return "native"
    return "explicit" if dropout > 0.0 or qkv.requires_grad else "sdpa"


def attention(
    qkv: Tensor, layout: Layout, dropout: float = 0.0, backend: Backend = "auto"
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence (Vaswani et al. 2017, section 3.2.1).

    qkv: (T, 3, H, D); returns (T, H, D). `dropout` falls on the probabilities. Rows after the last
    sequence become 0 in explicit and in the back ends of the CPU; the other back ends take no such
    rows. Raises ValueError if the named back end has no dropout and `dropout` is above 0.
    """
    if backend == "auto":
        backend = choose_backend(qkv, dropout)
        mixed = len(set(layout.lengths)) > 1
        if backend == "explicit" and mixed and qkv.device.type == "cpu" and qkv.element_size() < 4:
            # oneDNN compiles a 16-bit product for each new shape: fp32 is faster for mixed lengths
            with torch.autocast("cpu", enabled=False):
                return explicit_attention(qkv.float(), layout, dropout)[0].to(qkv.dtype)
    if backend == "explicit":
        return explicit_attention(qkv, layout, dropout)[0]
    if backend == "native":
        out = _Native.apply(qkv, layout, dropout)
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
        else:  # the masks of the back end native
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
    # the backward pass of split is one concatenation; that of slices sums zero-filled tensors
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
    """Attention by a native kernel. Its backward pass computes the probabilities and their mask
    again."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, layout: Layout, dropout: float) -> Tensor:
        T, _, H, D = qkv.size()
        N, ends = len(layout.lengths), layout.cu_seqlens
        if not native.serves(qkv) or sum(layout.lengths) > T:
            raise ValueError(
                "the back end 'native' needs its kernels, and a contiguous qkv in fp32 or bf16 on "
                "the CPU with a row for every token"
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
