"""Self-attention on packed sequences.

T tokens in the batch, N sequences, H heads, D size of a head, L length of the longest sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.ops import dropout as dropouts
from xformer.ops import native
from xformer.ops.library import define, differentiate, named

SIMILAR = 16  # tokens; neighbouring sequences with equal length // SIMILAR are padded together


@dataclass(frozen=True)
class Layout:
    """Where the sequences of a packed batch lie: sequence i is tokens cu_seqlens[i] up to
    cu_seqlens[i + 1].

    `longest` is at least the length of the longest sequence. With a `window` a token attends only
    to itself and to `window` tokens on each side (Beltagy et al. 2020); 0 is no window. Raises
    ValueError if `cu_seqlens` is not (N + 1,) int32 and contiguous.
    """

    cu_seqlens: Tensor  # (N + 1,) int32, on the batch's device
    longest: int
    window: int = 0

    def __post_init__(self) -> None:
        ends = self.cu_seqlens
        if ends.dtype != torch.int32 or ends.dim() != 1 or not len(ends) or ends.stride(0) != 1:
            raise ValueError(
                f"cu_seqlens must be (N + 1,) int32 without gaps, not {tuple(ends.shape)} "
                f"{ends.dtype} with stride {ends.stride()}"
            )


@named
def attention(qkv: Tensor, layout: Layout, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence (Vaswani et al. 2017, section 3.2.1), or
    within a window around each token.

    qkv: (T, 3, H, D), fp64, fp32, bf16 or fp16. Returns (T, H, D) of the same type. `dropout` is
    the rate at which probabilities are dropped. On the CPU there may be tokens after the last
    sequence; their output is 0. The result can be differentiated once; `plain` can be
    differentiated twice.
    Raises ValueError if qkv has another shape, and on the CPU if the layout does not fit it.
    """
    if qkv.dim() != 4 or qkv.size(1) != 3:
        raise ValueError(f"attention takes (T, 3, H, D), not {tuple(qkv.shape)}")
    if native.serves(qkv):
        seed = dropouts.new_seed() if dropout > 0.0 else None
        return _in_cpp(qkv, layout.cu_seqlens, layout.longest, layout.window, dropout, seed)[0]
    if qkv.is_cuda and layout.longest and not native.plain_is_asked():
        half = qkv.dtype in (torch.bfloat16, torch.float16)
        if half and qkv.size(3) <= 256 and "flash" not in untrusted:
            return _flash(qkv, layout, dropout)
        single = qkv.dtype == torch.float32 and not layout.window
        if single and dropout == 0.0 and "efficient" not in untrusted:
            return _efficient(qkv, layout)
    if qkv.device.type == "cpu" and type(qkv) is Tensor and not torch.compiler.is_compiling():
        return _run_by_run(qkv, layout, dropout)
    return plain(qkv, layout, dropout)


# ------------------------------------------------------------------------------------- plain


def plain(
    qkv: Tensor, layout: Layout, dropout: float = 0.0, seed: Tensor | None = None, first: int = 0
) -> Tensor:
    """Attention by PyTorch's operations, with every sequence padded to the longest.

    On the CPU the dropout masks depend on the `seed` and on each token's index in the batch;
    `first` is the index of qkv[0].
    """
    token, ends = torch.arange(len(qkv), device=qkv.device), layout.cu_seqlens
    inside = (token < ends[-1])[:, None, None]
    if not len(ends) - 1 or not layout.longest:
        return torch.where(inside, qkv[:, 0], 0.0)
    weights, v = probabilities(qkv, layout)
    if dropout > 0.0:
        weights = _dropped(weights, layout.cu_seqlens + first, dropout, seed)
    out = (weights.to(v.dtype) @ v).transpose(1, 2).flatten(0, 1)  # (N L, H, D)
    sequence = torch.searchsorted(ends[1:], token, right=True, out_int32=True)  # (T,)
    sequence = sequence.clamp(max=len(ends) - 2)
    place = sequence * layout.longest + token - ends[sequence]
    place = place.clamp(max=len(out) - 1)  # for the tokens after the last sequence
    return torch.where(inside, out.index_select(0, place), 0.0).to(qkv.dtype)


def _run_by_run(qkv: Tensor, layout: Layout, dropout: float) -> Tensor:
    """`plain` for each run of neighbouring sequences with similar lengths: padding a whole batch to
    its longest sequence could take a hundred times the time and memory."""
    bounds = layout.cu_seqlens.tolist()
    sizes = [end - begin for begin, end in pairwise(bounds)]
    fits = all(0 <= size <= layout.longest for size in sizes)
    if not fits or bounds[0] != 0 or bounds[-1] > len(qkv):
        raise ValueError(_misfit(len(qkv), layout.longest))
    seed, out, i = dropouts.new_seed() if dropout > 0.0 else None, [], 0
    for _, run in groupby(sizes, lambda size: size // SIMILAR):
        lengths = list(run)
        run_bounds, begin = layout.cu_seqlens[i : i + len(lengths) + 1], bounds[i]
        part = qkv[begin : bounds[i + len(lengths)]]
        where = replace(layout, cu_seqlens=run_bounds - begin, longest=max(lengths))
        out.append(plain(part, where, dropout, seed, begin))
        i += len(lengths)
    after = qkv[bounds[-1] :, 0]  # tokens after the last sequence, which get a gradient of 0
    return torch.cat([*out, after.masked_fill(torch.ones((), dtype=torch.bool), 0.0)])


def _misfit(tokens: int, longest: int) -> str:
    return (
        f"the layout does not fit: cu_seqlens must rise from 0 to at most {tokens}, in steps of at "
        f"most {longest}"
    )


def probabilities(qkv: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The attention maps (N, H, L, L), and v padded, (N, H, L, D). Entries beyond the length of a
    sequence are meaningless."""
    starts, sizes = layout.cu_seqlens[:-1, None], layout.cu_seqlens.diff()[:, None]
    position = torch.arange(layout.longest, device=qkv.device)
    # Padding repeats the last real token: a NaN must not reach another sequence.
    source = starts + torch.minimum(position, (sizes - 1).clamp(min=0))  # (N, L)
    source = source.clamp(max=len(qkv) - 1)  # an empty sequence may begin at T
    padded = qkv.index_select(0, source.flatten()).unflatten(0, source.shape)
    q, k, v = padded.permute(2, 0, 3, 1, 4)  # (N, H, L, D) each
    scores = q / math.sqrt(qkv.size(3)) @ k.transpose(2, 3)  # (N, H, L, L)
    real = (position < sizes)[:, None, None]  # (N, 1, 1, L)
    # Not -inf: an empty sequence has no real key, and the gradient of its softmax would be NaN.
    if layout.window:
        real = real & ((position[:, None] - position).abs() <= layout.window)  # (N, 1, L, L)
    scores = scores.masked_fill(~real, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1), v


def _dropped(weights: Tensor, bounds: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    """Dropout on the probabilities (N, H, L, L), on the CPU with the same masks as in C++.
    `bounds` (N + 1,) are the indices of the sequences' first tokens in the batch."""
    if weights.device.type != "cpu":
        return F.dropout(weights, rate)
    seed = dropouts.new_seed() if seed is None else seed
    _, H, L, _ = weights.size()
    position = torch.arange(L, dtype=torch.int32, device="cpu")
    head = torch.arange(H, dtype=torch.int32, device="cpu")
    row = bounds[:-1, None] + position  # (N, L): the query's index in the batch
    keep = dropouts.keep_mask(rate, seed, row[:, None, :, None], position, head[:, None, None])
    return torch.where(keep, weights / (1.0 - rate), 0.0)


# --------------------------------------------------------------------------------------- CUDA


untrusted: set[str] = set()  # kernels that check_kernels has ruled out in this process


def check_kernels(device: torch.device) -> str:
    """Compare the two kernels below, which are private operations of PyTorch, with `plain`.

    A kernel that fails or differs is not used in this process. Returns a sentence that says so, or
    "" if both agree. This takes a tiny batch, and runs once at the start of a command.
    """
    kernels = {  # name: kernel, type, largest error, windows
        "flash": (_flash, torch.bfloat16, 5e-2, (0, 2)),
        "efficient": (_efficient, torch.float32, 1e-4, (0,)),
    }
    ends, problems = torch.tensor([0, 4, 4, 11], dtype=torch.int32, device=device), []
    for name, (kernel, dtype, bound, windows) in kernels.items():
        qkv = torch.linspace(-2.0, 2.0, 11 * 3 * 2 * 20, device=device).sin().view(11, 3, 2, 20)
        errors = []
        try:
            for window in windows:
                where = Layout(ends, 7, window)
                wanted = _with_gradient(plain, qkv.to(dtype).float(), where)
                given = _with_gradient(kernel, qkv.to(dtype), where)
                errors.append((given - wanted).abs().max().item())
            problem = "" if max(errors) < bound else f"is off by {max(errors):.1e}"
        except (RuntimeError, TypeError, AttributeError) as failure:
            problem = f"fails ({str(failure).strip().splitlines()[0]})"
        if problem:
            untrusted.add(name)
            problems.append(f"PyTorch's {name} attention {problem} on this device")
    return f"{' and '.join(problems)}: the plain way is used, which is slower" if problems else ""


def _with_gradient(way: Callable[..., Tensor], qkv: Tensor, layout: Layout) -> Tensor:
    """The output and the gradient of its squared sum, as one fp32 vector."""
    qkv = qkv.clone().requires_grad_()
    out = way(qkv, layout)
    out.float().square().sum().backward()
    assert qkv.grad is not None
    return torch.cat([out.detach().float().flatten(), qkv.grad.float().flatten()])


def _flash(qkv: Tensor, layout: Layout, dropout: float = 0.0) -> Tensor:
    """FlashAttention-2 (Dao 2023), as PyTorch ships it: for 16 bits and heads of at most 256."""
    D = qkv.size(3)
    q, k, v = _wider_heads(qkv, 8).unbind(1)  # (T, H, D) each
    ends, longest, options = layout.cu_seqlens, layout.longest, {"scale": 1 / math.sqrt(D)}
    if layout.window:
        options |= {"window_size_left": layout.window, "window_size_right": layout.window}
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, ends, ends, longest, longest, dropout, False, False, **options
    )[0]
    return out if out.size(2) == D else out.narrow(2, 0, D)  # a view adds a backward kernel


def _efficient(qkv: Tensor, layout: Layout) -> Tensor:
    """Memory-efficient attention (Rabe & Staats 2021), as PyTorch ships it: for fp32.

    It is not used with a window, because its own windows end at the query. It is not used with
    dropout, because on packed sequences its forward and backward passes number the random draws
    differently (pytorch issue 115590), so that their masks would differ.
    """
    D = qkv.size(3)
    q, k, v = _wider_heads(qkv, 4).unsqueeze(0).unbind(2)  # (1, T, H, D) each
    # q is scaled here, because PyTorch 2.13 cannot trace the backward pass of a call with `scale`
    if q.size(3) != D:
        q = q * math.sqrt(q.size(3) / D)
    ends, longest = layout.cu_seqlens, layout.longest
    out = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, ends, ends, longest, longest, 0.0, 0, True
    )[0]
    return out.squeeze(0).narrow(2, 0, D)


def _wider_heads(qkv: Tensor, multiple: int) -> Tensor:
    """qkv with D padded by zeros to a multiple of `multiple`, which changes no score."""
    more = -qkv.size(3) % multiple
    return F.pad(qkv, (0, more)) if more else qkv


# --------------------------------------------------------------------------------------- C++


def _attention(
    qkv: Tensor, cu_seqlens: Tensor, longest: int, window: int, rate: float, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output, and (T, H, 2): each token's largest score and 1 / the sum of its exponentials."""
    T, _, H, D = qkv.size()
    out, sums = _empty_results(qkv)
    sizes = T, len(cu_seqlens) - 1, H, D, longest, window
    if native.call("attention", qkv.dtype, qkv, cu_seqlens, out, sums, *sizes, rate, seed):
        raise ValueError(_misfit(len(qkv), longest))
    return out, sums


def _empty_results(qkv: Tensor) -> tuple[Tensor, Tensor]:
    T, _, H, D = qkv.size()
    return qkv.new_empty(T, H, D), qkv.new_empty(T, H, 2, dtype=torch.float32)


def _attention_backward(
    d_out: Tensor,
    qkv: Tensor,
    cu_seqlens: Tensor,
    sums: Tensor,
    longest: int,
    window: int,
    rate: float,
    seed: Tensor | None,
) -> Tensor:
    """The gradient of qkv. Probabilities and dropout masks are computed again (Dao 2023)."""
    T, _, H, D = qkv.size()
    d_qkv = torch.empty_like(qkv)
    sizes = T, len(cu_seqlens) - 1, H, D, longest, window
    tensors = qkv, cu_seqlens, sums, d_out, d_qkv
    if native.call("attention_backward", qkv.dtype, *tensors, *sizes, rate, seed):
        raise ValueError(_misfit(len(qkv), longest))
    return d_qkv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, cu_seqlens, ctx.longest, ctx.window, ctx.rate, seed = inputs
    ctx.save_for_backward(qkv, cu_seqlens, output[1], seed)


def _backward(ctx: Any, d_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    native.refuse_second_derivative("attention")
    qkv, cu_seqlens, sums, seed = ctx.saved_tensors
    sizes = ctx.longest, ctx.window, ctx.rate
    d_qkv = _backward_in_cpp(d_out.contiguous(), qkv, cu_seqlens, sums, *sizes, seed)
    return d_qkv, None, None, None, None, None


_in_cpp = define(_attention, lambda qkv, *_: _empty_results(qkv))
_backward_in_cpp = define(_attention_backward, lambda _, qkv, *__: torch.empty_like(qkv))
differentiate(_in_cpp, _keep, _backward)
