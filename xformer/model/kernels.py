"""Fused bidirectional self-attention over packed sequences, as Triton kernels.

A batch is packed: the tokens of all its sequences lie one after another, no padding between them,
and `cu_seqlens` says where each sequence starts. Every token attends to every token of its own
sequence. The kernels never write an (L, L) matrix to memory: the forward pass keeps a running
softmax, the backward pass recomputes the probabilities from one number a row (the log of its sum
of exponentials). Dropout's mask is a hash of the element's position, so it is recomputed too.

Import this module only where it is used: it needs Triton, thus a CUDA device or, slow but exact,
Triton's interpreter (TRITON_INTERPRET=1 in the environment before Triton is first imported).

Letters: T tokens in the batch, N sequences, H heads, D head size, L length of a sequence.
In the kernels a tile is (rows, columns); a row is a query and a column is a key, and the tile of
dK and dV, whose program owns keys, is transposed: (columns, rows).
"""

# mypy: allow-incomplete-defs
# (a kernel annotates its constexpr arguments only, which is how Triton knows them)

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from xformer.model.kernel_base import (
    check_device,
    check_dropout,
    interpreted,
    keep_kernel,
    kernel_arguments,
    mix_kernel,
    on_device,
)

LARGEST_HEAD = 128  # a wider tile would not leave the registers that the backward pass needs
# On the device exp2 is one instruction and exp is two, so scores are held in units of log 2.
LOG2_E = math.log2(math.e)


def packed_attention(
    qkv: Tensor, cu_seqlens: Tensor, max_length: int, dropout_p: float = 0.0, seed: int = 0
) -> Tensor:
    """Softmax attention of each packed sequence over itself, with a gradient for qkv.

    o_i = sum_j keep_ij / (1 - dropout_p) * softmax_j(q_i . k_j / sqrt(D)) v_j, with i and j in the
    same sequence. The method is FlashAttention-2's (Dao 2023, section 3), with a program a block of
    queries forward and for dQ, and a program a block of keys for dK and dV, so that no two programs
    add to the same place and a repeated call repeats every bit.

    Args:
        qkv: (T, 3, H, D), float32 or bfloat16, D from 1 to 128: queries, keys and values as one
            fused projection leaves them. What is not contiguous is copied.
        cu_seqlens: (N + 1,) int32 on the same device, rising from 0 to T; sequence n is the tokens
            cu_seqlens[n] to cu_seqlens[n + 1].
        max_length: at least the longest sequence's length. It sets the size of the launch. On CUDA
            neither this nor cu_seqlens' values are checked, which would wait for the device: with a
            smaller max_length the rows past it are left unwritten.
        dropout_p: the probability that an attention weight is dropped, in [0, 1).
        seed: which dropout mask; an integer, of which the low 64 bits count. Unused at dropout 0.

    Returns:
        (T, H, D), contiguous, in qkv's type. It can be differentiated once.

    Raises:
        ValueError: a shape, type, device or value is not as above, or the tensors are on the CPU
            and Triton is not interpreting.
    """
    _check_qkv(qkv)
    _check_lengths(cu_seqlens, max_length, qkv)
    check_dropout(dropout_p)
    check_device("packed_attention", qkv)
    output: Tensor = _PackedAttention.apply(qkv, cu_seqlens, max_length, dropout_p, seed)
    return output


class _PackedAttention(torch.autograd.Function):
    """The autograd node: launches the kernels, keeps qkv, the output and (H, T) log sums."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cu_seqlens: Tensor, max_length: int, dropout_p: float, seed: int
    ) -> Tensor:
        qkv, cu_seqlens = qkv.contiguous(), cu_seqlens.contiguous()
        tokens, _, heads, size = qkv.shape
        o = qkv.new_empty(tokens, heads, size)
        # (H, T), not (T, H): a program reads a run of rows of one head
        log_sum = qkv.new_empty(heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(qkv, o, log_sum, cu_seqlens)
        ctx.max_length, ctx.dropout_p, ctx.seed = max_length, dropout_p, seed

        options = _kernel_options(qkv, dropout_p, seed)
        grid, blocks = _grid(options["OWN"], cu_seqlens, max_length, heads)
        with on_device(qkv):
            _forward_kernel[grid](qkv, o, log_sum, cu_seqlens, tokens, blocks, **options)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        qkv, o, log_sum, cu_seqlens = ctx.saved_tensors
        do = do.contiguous()
        tokens, _, heads, _ = qkv.shape
        dqkv = torch.empty_like(qkv)
        delta = torch.empty_like(log_sum)

        options = _kernel_options(qkv, ctx.dropout_p, ctx.seed)
        grid, blocks = _grid(options["OWN"], cu_seqlens, ctx.max_length, heads)
        rows = (log_sum, delta, cu_seqlens, tokens, blocks)
        with on_device(qkv):
            # the first kernel also writes delta, which the second reads
            _dq_kernel[grid](qkv, o, do, dqkv, *rows, **options)
            _dkdv_kernel[grid](qkv, do, dqkv, *rows, **options)
        return dqkv, None, None, None, None


# ---- what the launches share ----


def _check_qkv(qkv: Tensor) -> None:
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv must be (T, 3, H, D), got {tuple(qkv.shape)}")
    if not 1 <= qkv.shape[3] <= LARGEST_HEAD:
        raise ValueError(f"the head size must be 1 to {LARGEST_HEAD}, got {qkv.shape[3]}")
    if qkv.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"qkv must be float32 or bfloat16, got {qkv.dtype}")


def _check_lengths(cu_seqlens: Tensor, max_length: int, qkv: Tensor) -> None:
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens must be (N + 1,) int32, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    if cu_seqlens.device != qkv.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} but qkv is on {qkv.device}")
    if not qkv.is_cuda:  # where looking at the values costs nothing
        lengths = cu_seqlens.diff().tolist()
        if cu_seqlens[0] != 0 or cu_seqlens[-1] != len(qkv) or min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens must rise from 0 to T = {len(qkv)}, got {cu_seqlens}")
        if max(lengths, default=0) > max_length:
            raise ValueError(f"a sequence of {max(lengths)} is over max_length = {max_length}")


def _grid(own: int, cu_seqlens: Tensor, max_length: int, heads: int) -> tuple[tuple[int, int], int]:
    """The launch grid (N * blocks, H) and blocks, the number of programs a sequence and head get.

    Sequence and block share the first axis, the only one that may pass 65535; the blocks of a
    sequence are neighbours there, so that they find its keys and values in the cache.
    """
    blocks = triton.cdiv(max_length, own)
    return ((len(cu_seqlens) - 1) * blocks, heads), blocks


def tiles(dtype: torch.dtype, size: int, hopper: bool) -> dict[str, int]:
    """Block sizes by type, head size and whether the device is an H100 or newer.

    Chosen by what the compiler reports (benchmarks/kernels.py --compile lists it): at most 24 bytes
    a thread spilled and 65 KiB of shared memory a program. Not yet timed on a device. float32
    multiplies without tensor cores, from registers, which want smaller tiles.
    """
    padded = max(16, triton.next_power_of_2(size))  # a tensor core's smallest tile is 16 wide
    own = 32 if dtype == torch.float32 else 64
    whole = padded <= 32 if dtype == torch.float32 else padded <= 64 and hopper
    return {
        "PADDED_D": padded,
        "OWN": own,
        "STEP": own if whole else own // 2,
        "num_warps": 4 if padded <= 64 else 8,
        "num_stages": 2,
    }


def _kernel_options(qkv: Tensor, dropout_p: float, seed: int) -> dict[str, Any]:
    """The arguments that the three kernels share."""
    size = qkv.shape[3]
    hopper = qkv.is_cuda and torch.cuda.get_device_properties(qkv.device).major >= 9
    return {
        **tiles(qkv.dtype, size, hopper),
        **kernel_arguments(dropout_p, seed),
        "scale": 1.0 / math.sqrt(size),
        "scale_log2": LOG2_E / math.sqrt(size),
        "D": size,
        # The interpreter's bfloat16 tl.dot returns garbage: it multiplies in float32 there.
        "DOT": tl.float32 if qkv.dtype == torch.float32 or interpreted() else tl.bfloat16,
    }


# ---- kernels ----
#
# The arguments that they share:
#   blocks            programs to a sequence and head
#   scale_log2        log2(e) / sqrt(D), so that exp2 of a scaled score is the score's exponential
#   word_a, word_b    the hashed seed;  drop_below, keep_scale: p * 2^32 and 1 / (1 - p)
#   OWN, STEP         tokens that a program owns, and tokens that it takes in one turn of its loop
#   DOT               the type in which tiles are multiplied; sums are float32
# All arrays are dense: a token's row is H * D long, and in qkv and dqkv 3 * H * D. Where a sequence
# starts is a 64-bit offset, what lies within it a 32-bit one.

# Triton compiles in that an integer is 1, or a multiple of 16. For what changes from batch to batch
# that would mean compiling anew in the middle of a run.
CHANGING = ["tokens", "blocks", "word_a", "word_b", "drop_below"]


@triton.jit
def _head_word(word, head):
    return mix_kernel(word.to(tl.uint32) ^ head.to(tl.uint32))


@triton.jit
def _locate(cu_seqlens, blocks, OWN: tl.constexpr):
    # The part of the batch that is this program's: first token and length of its sequence, the
    # position in it of the first token that the program owns, and the head.
    sequence = tl.program_id(0) // blocks
    first = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - first
    begin = (tl.program_id(0) % blocks) * OWN
    return first.to(tl.int64), length, begin, tl.program_id(1).to(tl.int64)


@triton.jit
def _load_tile(start, stride, position, length, D: tl.constexpr, PADDED_D: tl.constexpr):
    axis = tl.arange(0, PADDED_D)
    inside = (position[:, None] < length) & (axis[None, :] < D)
    return tl.load(start + position[:, None] * stride + axis[None, :], mask=inside, other=0.0)


@triton.jit
def _store_tile(start, stride, position, length, tile, D: tl.constexpr, PADDED_D: tl.constexpr):
    axis = tl.arange(0, PADDED_D)
    inside = (position[:, None] < length) & (axis[None, :] < D)
    tile = tile.to(start.dtype.element_ty)
    tl.store(start + position[:, None] * stride + axis[None, :], tile, mask=inside)


@triton.jit(do_not_specialize=CHANGING)
def _forward_kernel(
    qkv,
    o,
    log_sum,
    cu_seqlens,
    tokens,
    blocks,
    scale,
    scale_log2,
    word_a,
    word_b,
    drop_below,
    keep_scale,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
    DROPOUT: tl.constexpr,
    DOT: tl.constexpr,
):
    first, length, begin, head = _locate(cu_seqlens, blocks, OWN)
    if begin >= length:
        return
    row = begin + tl.arange(0, OWN)
    wide = tl.num_programs(1) * D
    q = qkv + first * 3 * wide + head * D
    k, v = q + wide, q + 2 * wide
    q_tile = _load_tile(q, 3 * wide, row, length, D, PADDED_D).to(DOT)
    if DROPOUT:
        word_a = _head_word(word_a, head)
        word_b = _head_word(word_b, head)

    largest = tl.full([OWN], float("-inf"), tl.float32)
    total = tl.zeros([OWN], tl.float32)
    mixed = tl.zeros([OWN, PADDED_D], tl.float32)
    for step in range(0, length, STEP):
        column = step + tl.arange(0, STEP)
        k_tile = _load_tile(k, 3 * wide, column, length, D, PADDED_D).to(DOT)
        v_tile = _load_tile(v, 3 * wide, column, length, D, PADDED_D).to(DOT)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        score = tl.where(column[None, :] < length, score, float("-inf"))
        # the running softmax: what is summed so far shrinks when a larger score turns up
        larger = tl.maximum(largest, tl.max(score, 1))
        shrink = tl.exp2(largest - larger)
        largest = larger
        p = tl.exp2(score - largest[:, None])
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT:  # after the softmax: the sum above is of all weights
            kept = keep_kernel(word_a, word_b, drop_below, (first + row)[:, None], column[None, :])
            p = tl.where(kept, p, 0.0)
        mixed = tl.dot(p.to(DOT), v_tile, mixed * shrink[:, None], input_precision="ieee")

    mixed *= (keep_scale / total)[:, None]
    _store_tile(o + first * wide + head * D, wide, row, length, mixed, D, PADDED_D)
    tl.store(log_sum + head * tokens + first + row, largest + tl.log2(total), mask=row < length)


@triton.jit(do_not_specialize=CHANGING)
def _dq_kernel(
    qkv,
    o,
    do,
    dqkv,
    log_sum,
    delta,
    cu_seqlens,
    tokens,
    blocks,
    scale,
    scale_log2,
    word_a,
    word_b,
    drop_below,
    keep_scale,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
    DROPOUT: tl.constexpr,
    DOT: tl.constexpr,
):
    first, length, begin, head = _locate(cu_seqlens, blocks, OWN)
    if begin >= length:
        return
    row = begin + tl.arange(0, OWN)
    wide = tl.num_programs(1) * D
    q = qkv + first * 3 * wide + head * D
    k, v = q + wide, q + 2 * wide
    start = first * wide + head * D
    q_tile = _load_tile(q, 3 * wide, row, length, D, PADDED_D).to(DOT)
    do_tile = _load_tile(do + start, wide, row, length, D, PADDED_D)
    o_tile = _load_tile(o + start, wide, row, length, D, PADDED_D)
    if DROPOUT:
        word_a = _head_word(word_a, head)
        word_b = _head_word(word_b, head)

    # delta, the softmax gradient's sum_j p_ij dp_ij, is o_i . do_i with or without dropout
    row_sum = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    at = head * tokens + first + row
    tl.store(delta + at, row_sum, mask=row < length)
    row_log = tl.load(log_sum + at, mask=row < length, other=0.0)
    do_tile = do_tile.to(DOT)
    sum_dq = tl.zeros([OWN, PADDED_D], tl.float32)
    for step in range(0, length, STEP):
        column = step + tl.arange(0, STEP)
        k_tile = _load_tile(k, 3 * wide, column, length, D, PADDED_D).to(DOT)
        v_tile = _load_tile(v, 3 * wide, column, length, D, PADDED_D).to(DOT)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        # where no key is, exp2(0 - row_log) may overflow, and inf * 0 is not 0
        score = tl.where(column[None, :] < length, score, float("-inf"))
        p = tl.exp2(score - row_log[:, None])
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
        if DROPOUT:
            kept = keep_kernel(word_a, word_b, drop_below, (first + row)[:, None], column[None, :])
            dp = tl.where(kept, dp * keep_scale, 0.0)
        ds = p * (dp - row_sum[:, None])
        sum_dq = tl.dot(ds.to(DOT), k_tile, sum_dq, input_precision="ieee")
    dq = dqkv + first * 3 * wide + head * D
    _store_tile(dq, 3 * wide, row, length, sum_dq * scale, D, PADDED_D)


@triton.jit(do_not_specialize=CHANGING)
def _dkdv_kernel(
    qkv,
    do,
    dqkv,
    log_sum,
    delta,
    cu_seqlens,
    tokens,
    blocks,
    scale,
    scale_log2,
    word_a,
    word_b,
    drop_below,
    keep_scale,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
    DROPOUT: tl.constexpr,
    DOT: tl.constexpr,
):
    first, length, begin, head = _locate(cu_seqlens, blocks, OWN)
    if begin >= length:
        return
    column = begin + tl.arange(0, OWN)
    wide = tl.num_programs(1) * D
    q = qkv + first * 3 * wide + head * D
    k, v = q + wide, q + 2 * wide
    do += first * wide + head * D
    log_sum += head * tokens + first
    delta += head * tokens + first
    k_tile = _load_tile(k, 3 * wide, column, length, D, PADDED_D).to(DOT)
    v_tile = _load_tile(v, 3 * wide, column, length, D, PADDED_D).to(DOT)
    if DROPOUT:
        word_a = _head_word(word_a, head)
        word_b = _head_word(word_b, head)

    sum_dk = tl.zeros([OWN, PADDED_D], tl.float32)
    sum_dv = tl.zeros([OWN, PADDED_D], tl.float32)
    for step in range(0, length, STEP):
        row = step + tl.arange(0, STEP)
        q_tile = _load_tile(q, 3 * wide, row, length, D, PADDED_D).to(DOT)
        do_tile = _load_tile(do, wide, row, length, D, PADDED_D).to(DOT)
        # the log of a row that is not there: its weights are exp2(0 - inf) = 0
        row_log = tl.load(log_sum + row, mask=row < length, other=float("inf"))
        row_sum = tl.load(delta + row, mask=row < length, other=0.0)
        score = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * scale_log2
        # absent keys' sums are not stored; this keeps them from overflowing, as in _dq_kernel
        score = tl.where(column[:, None] < length, score, float("-inf"))
        p = tl.exp2(score - row_log[None, :])
        dp = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
        p_kept = p
        if DROPOUT:
            kept = keep_kernel(word_a, word_b, drop_below, (first + row)[None, :], column[:, None])
            p_kept = tl.where(kept, p, 0.0)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        sum_dv = tl.dot(p_kept.to(DOT), do_tile, sum_dv, input_precision="ieee")
        ds = p * (dp - row_sum[None, :])
        sum_dk = tl.dot(ds.to(DOT), q_tile, sum_dk, input_precision="ieee")
    dk = dqkv + first * 3 * wide + head * D + wide
    _store_tile(dk, 3 * wide, column, length, sum_dk * scale, D, PADDED_D)
    _store_tile(dk + wide, 3 * wide, column, length, sum_dv * keep_scale, D, PADDED_D)
