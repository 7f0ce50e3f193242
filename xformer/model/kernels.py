"""Fused bidirectional self-attention over packed sequences, as Triton kernels.

A batch is packed: the tokens of all its sequences lie one after another, no padding between them,
and `cu_seqlens` says where each sequence starts. Every token attends to every token of its own
sequence. The kernels never write an (L, L) matrix to memory: the forward pass keeps a running
softmax, the backward pass recomputes the probabilities from one number a row (the log of its sum
of exponentials), and dropout's mask is a hash of where an element stands, so it is recomputed too.
`dropout_mask` is the same hash in plain PyTorch, to test against and to read.

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
    keep,
    keep_kernel,
    kernel_arguments,
    mix,
    mix_kernel,
    on_device,
    seed_words,
)

# On the device exp2 is one instruction and exp is two, so scores are held in units of log 2.
LOG2_E = math.log2(math.e)

LARGEST_HEAD = 128  # a wider tile would not leave the registers that the backward pass needs


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    dropout_p: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Softmax attention of each packed sequence over itself, with gradients for q, k and v.

    o_i = sum_j keep_ij / (1 - dropout_p) * softmax_j(q_i . k_j / sqrt(D)) v_j, with i and j in the
    same sequence. The method is FlashAttention-2's (Dao 2023, section 3), with a program a block of
    queries forward and for dQ, and a program a block of keys for dK and dV, so that no two programs
    add to the same place and a repeated call repeats every bit.

    Args:
        q, k, v: (T, H, D), float32 or bfloat16, D from 1 to 128. Slices of a fused (T, 3, H, D)
            projection are read in place; only a last axis that is not contiguous costs a copy.
        cu_seqlens: (N + 1,) int32 on the same device, rising from 0 to T; sequence n is the tokens
            cu_seqlens[n] to cu_seqlens[n + 1].
        max_length: at least the longest sequence's length. It sets the size of the launch. On CUDA
            neither this nor cu_seqlens' values are checked, which would wait for the device: with a
            smaller max_length the rows past it are left unwritten.
        dropout_p: the probability that an attention weight is dropped, in [0, 1).
        seed: which dropout mask; an integer, of which the low 64 bits count. Unused at dropout 0.

    Returns:
        (T, H, D), contiguous, in q's type. It can be differentiated once.

    Raises:
        ValueError: a shape, type, device or value is not as above, or the tensors are on the CPU
            and Triton is not interpreting.
    """
    _check_tensors(q, k, v)
    _check_lengths(cu_seqlens, max_length, q)
    check_dropout(dropout_p)
    check_device("packed_attention", q)
    output: Tensor = _PackedAttention.apply(q, k, v, cu_seqlens, max_length, dropout_p, seed)
    return output


def dropout_mask(
    cu_seqlens: Tensor, max_length: int, heads: int, dropout_p: float, seed: int
) -> Tensor:
    """The mask that `packed_attention` applies after the softmax, written out.

    An element is kept by a hash of the seed, its head, its query's row in the packed batch and its
    key's position in the sequence (`kernel_base.keep`).

    Args:
        cu_seqlens: (N + 1,) int32.
        max_length: the L of the result.
        heads: H.
        dropout_p, seed: as for `packed_attention`.

    Returns:
        (N, H, L, L) bool, true where the weight is kept. The entries past a sequence's end hold
        values too, which nothing uses.

    Raises:
        ValueError: cu_seqlens is not a 1-d int32 tensor, or max_length or dropout_p out of range.
    """
    _check_lengths(cu_seqlens, max_length)
    check_dropout(dropout_p)
    device = cu_seqlens.device
    head = torch.arange(heads, device=device).view(-1, 1, 1)
    word_a, word_b = (mix(word ^ head) for word in seed_words(seed))
    position = torch.arange(max_length, device=device)
    row = cu_seqlens[:-1].long().view(-1, 1, 1, 1) + position.view(-1, 1)  # (N, 1, L, 1)
    return keep((word_a, word_b), row, position, dropout_p)  # (N, H, L, L)


class _PackedAttention(torch.autograd.Function):
    """The autograd node: launches the kernels, keeps q, k, v, the output and (H, T) log sums."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_length: int,
        dropout_p: float,
        seed: int,
    ) -> Tensor:
        q, k, v, cu_seqlens = _last_axis_dense(q, k, v, cu_seqlens)
        tokens, heads, _ = q.shape
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # (H, T), not (T, H): a program reads a run of rows of one head
        log_sum = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, o, log_sum, cu_seqlens)
        ctx.max_length, ctx.dropout_p, ctx.seed = max_length, dropout_p, seed

        options = _kernel_options(q, dropout_p, seed)
        grid, blocks = _grid(options["OWN"], cu_seqlens, max_length, heads)
        with on_device(q):
            _forward_kernel[grid](
                *(q, k, v, o, log_sum, cu_seqlens, tokens, blocks),
                *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
                **options,
            )
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, log_sum, cu_seqlens = ctx.saved_tensors
        (do,) = _last_axis_dense(do)
        tokens, heads, _ = q.shape
        dq, dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
        delta = torch.empty_like(log_sum)

        options = _kernel_options(q, ctx.dropout_p, ctx.seed)
        grid, blocks = _grid(options["OWN"], cu_seqlens, ctx.max_length, heads)
        strides = (
            *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            *(do.stride(0), do.stride(1)),
        )
        with on_device(q):
            # the first kernel also writes delta, which the second reads
            _dq_kernel[grid](
                *(q, k, v, o, do, dq, log_sum, delta, cu_seqlens, tokens, blocks, *strides),
                **options,
            )
            _dkdv_kernel[grid](
                *(q, k, v, do, dk, dv, log_sum, delta, cu_seqlens, tokens, blocks, *strides),
                **options,
            )
        return dq, dk, dv, None, None, None, None


# ---- what the launches share ----


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 3 or k.shape != q.shape or v.shape != q.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k and v must have one shape (T, H, D), got {shapes}")
    if not 1 <= q.shape[2] <= LARGEST_HEAD:
        raise ValueError(f"the head size must be 1 to {LARGEST_HEAD}, got {q.shape[2]}")
    if q.dtype not in (torch.float32, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must all be float32 or all bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}"
        )


def _check_lengths(cu_seqlens: Tensor, max_length: int, q: Tensor | None = None) -> None:
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens must be (N + 1,) int32, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    if q is None:
        return
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} but q is on {q.device}")
    if not q.is_cuda:  # where looking at the values costs nothing
        lengths = cu_seqlens.diff().tolist()
        if cu_seqlens[0] != 0 or cu_seqlens[-1] != len(q) or min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens must rise from 0 to T = {len(q)}, got {cu_seqlens}")
        if max(lengths, default=0) > max_length:
            raise ValueError(f"a sequence of {max(lengths)} is over max_length = {max_length}")


def _last_axis_dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    # a gradient may come broadcast (stride 0), as that of .sum() does
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _grid(own: int, cu_seqlens: Tensor, max_length: int, heads: int) -> tuple[tuple[int, int], int]:
    """The launch grid (N * blocks, H) and blocks, the number of programs a sequence and head get.

    Sequence and block share the first axis, the only one that may pass 65535; the blocks of a
    sequence are neighbours there, so that they find its keys and values in the cache.
    """
    blocks = triton.cdiv(max_length, own)
    return ((len(cu_seqlens) - 1) * blocks, heads), blocks


def tiles(dtype: torch.dtype, size: int, hopper: bool) -> dict[str, int]:
    """Block sizes by type, head size and whether the device is an H100 or newer.

    The largest that neither spill registers nor take the room of a second program on a
    multiprocessor, by what the compiler reports (benchmarks/kernels.py --compile lists it).
    float32 multiplies without tensor cores, from registers, which want smaller tiles.
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


def _kernel_options(q: Tensor, dropout_p: float, seed: int) -> dict[str, Any]:
    """The arguments that the three kernels share."""
    size = q.shape[2]
    hopper = q.is_cuda and torch.cuda.get_device_properties(q.device).major >= 9
    return {
        **tiles(q.dtype, size, hopper),
        **kernel_arguments(dropout_p, seed),
        "scale": 1.0 / math.sqrt(size),
        "scale_log2": LOG2_E / math.sqrt(size),
        "D": size,
        # The interpreter's bfloat16 tl.dot returns garbage: it multiplies in float32 there.
        "DOT": tl.float32 if q.dtype == torch.float32 or interpreted() else tl.bfloat16,
    }


# ---- kernels ----
#
# The arguments that they share:
#   q_t, q_h, ...     strides of the token and the head axis, in elements (o, dq, dk, dv are dense)
#   blocks            programs to a sequence and head
#   scale_log2        log2(e) / sqrt(D), so that exp2 of a scaled score is the score's exponential
#   word_a, word_b    the hashed seed;  drop_below, keep_scale: p * 2^32 and 1 / (1 - p)
#   OWN, STEP         tokens that a program owns, and tokens that it takes in one turn of its loop
#   DOT               the type in which tiles are multiplied; sums are float32
# Where a sequence starts is a 64-bit offset, what lies within it a 32-bit one.

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
    q, k, v, o, log_sum, cu_seqlens, tokens, blocks,
    q_t, q_h, k_t, k_h, v_t, v_h,
    scale, scale_log2, word_a, word_b, drop_below, keep_scale,
    D: tl.constexpr, PADDED_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
    DROPOUT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    first, length, begin, head = _locate(cu_seqlens, blocks, OWN)
    if begin >= length:
        return
    row = begin + tl.arange(0, OWN)
    k += first * k_t + head * k_h
    v += first * v_t + head * v_h
    q_tile = _load_tile(q + first * q_t + head * q_h, q_t, row, length, D, PADDED_D).to(DOT)
    if DROPOUT:
        word_a = _head_word(word_a, head)
        word_b = _head_word(word_b, head)

    largest = tl.full([OWN], float("-inf"), tl.float32)
    total = tl.zeros([OWN], tl.float32)
    mixed = tl.zeros([OWN, PADDED_D], tl.float32)
    for step in range(0, length, STEP):
        column = step + tl.arange(0, STEP)
        k_tile = _load_tile(k, k_t, column, length, D, PADDED_D).to(DOT)
        v_tile = _load_tile(v, v_t, column, length, D, PADDED_D).to(DOT)
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

    heads = tl.num_programs(1)
    mixed *= (keep_scale / total)[:, None]
    _store_tile(o + (first * heads + head) * D, heads * D, row, length, mixed, D, PADDED_D)
    tl.store(log_sum + head * tokens + first + row, largest + tl.log2(total), mask=row < length)


@triton.jit(do_not_specialize=CHANGING)
def _dq_kernel(
    q, k, v, o, do, dq, log_sum, delta, cu_seqlens, tokens, blocks,
    q_t, q_h, k_t, k_h, v_t, v_h, do_t, do_h,
    scale, scale_log2, word_a, word_b, drop_below, keep_scale,
    D: tl.constexpr, PADDED_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
    DROPOUT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    first, length, begin, head = _locate(cu_seqlens, blocks, OWN)
    if begin >= length:
        return
    row = begin + tl.arange(0, OWN)
    k += first * k_t + head * k_h
    v += first * v_t + head * v_h
    heads = tl.num_programs(1)
    dense = (first * heads + head) * D
    q_tile = _load_tile(q + first * q_t + head * q_h, q_t, row, length, D, PADDED_D).to(DOT)
    do_tile = _load_tile(do + first * do_t + head * do_h, do_t, row, length, D, PADDED_D)
    o_tile = _load_tile(o + dense, heads * D, row, length, D, PADDED_D)
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
        k_tile = _load_tile(k, k_t, column, length, D, PADDED_D).to(DOT)
        v_tile = _load_tile(v, v_t, column, length, D, PADDED_D).to(DOT)
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
    _store_tile(dq + dense, heads * D, row, length, sum_dq * scale, D, PADDED_D)


@triton.jit(do_not_specialize=CHANGING)
def _dkdv_kernel(
    q, k, v, do, dk, dv, log_sum, delta, cu_seqlens, tokens, blocks,
    q_t, q_h, k_t, k_h, v_t, v_h, do_t, do_h,
    scale, scale_log2, word_a, word_b, drop_below, keep_scale,
    D: tl.constexpr, PADDED_D: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
    DROPOUT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    first, length, begin, head = _locate(cu_seqlens, blocks, OWN)
    if begin >= length:
        return
    column = begin + tl.arange(0, OWN)
    q += first * q_t + head * q_h
    do += first * do_t + head * do_h
    log_sum += head * tokens + first
    delta += head * tokens + first
    k_tile = _load_tile(k + first * k_t + head * k_h, k_t, column, length, D, PADDED_D).to(DOT)
    v_tile = _load_tile(v + first * v_t + head * v_h, v_t, column, length, D, PADDED_D).to(DOT)
    if DROPOUT:
        word_a = _head_word(word_a, head)
        word_b = _head_word(word_b, head)

    sum_dk = tl.zeros([OWN, PADDED_D], tl.float32)
    sum_dv = tl.zeros([OWN, PADDED_D], tl.float32)
    for step in range(0, length, STEP):
        row = step + tl.arange(0, STEP)
        q_tile = _load_tile(q, q_t, row, length, D, PADDED_D).to(DOT)
        do_tile = _load_tile(do, do_t, row, length, D, PADDED_D).to(DOT)
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
    heads = tl.num_programs(1)
    dense = (first * heads + head) * D
    _store_tile(dk + dense, heads * D, column, length, sum_dk * scale, D, PADDED_D)
    _store_tile(dv + dense, heads * D, column, length, sum_dv * keep_scale, D, PADDED_D)
