"""The fused packed attention against attention written out, on CUDA or in Triton's interpreter.

Letters: T tokens, N sequences, H heads, D head size, L length.
"""

import os
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

triton = pytest.importorskip("triton", reason="the kernels are written in Triton")

from xformer.model.kernels import dropout_mask, packed_attention  # noqa: E402

LENGTHS = [1, 13, 7, 99]  # one token; less than a block; blocks of 16, 32 and 64 with a rest
HEADS = 3
SIDE = 120  # of the square masks whose statistics are taken
EVERY_SEED = [0, 1, -1, 2**31, 2**32, 2**63 + 5]


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def projection(tokens: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(T, 3, H, D), as a fused projection leaves it; q, k and v are strided slices of it."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, 3, HEADS, size, generator=generator)
    return x.to(DEVICE, dtype).requires_grad_()


def attend(
    qkv: Tensor, cu_seqlens: Tensor, max_length: int, dropout_p: float = 0.0, seed: int = 0
) -> Tensor:
    q, k, v = qkv.unbind(1)
    return packed_attention(q, k, v, cu_seqlens, max_length, dropout_p, seed)


def explicit_attention(
    qkv: Tensor, cu_seqlens: Tensor, dropout_p: float = 0.0, seed: int = 0
) -> Tensor:
    """One sequence at a time, with the (H, L, L) weights written out."""
    bounds = cu_seqlens.tolist()
    longest = max(int(cu_seqlens.diff().max()), 1)
    mask = dropout_mask(cu_seqlens, longest, HEADS, dropout_p, seed)
    outputs = []
    for n, (start, end) in enumerate(pairwise(bounds)):
        q, k, v = qkv[start:end].unbind(1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        keep = mask[n, :, : end - start, : end - start]
        weights = scores.softmax(-1) * keep / (1 - dropout_p)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, v))
    return torch.cat(outputs)


def relative_error(x: Tensor, expected: Tensor) -> float:
    x, expected = x.detach().double(), expected.detach().double()
    return float((x - expected).norm() / expected.norm())


def errors(
    qkv: Tensor, lengths: Sequence[int], dropout_p: float = 0.0, seed: int = 0
) -> dict[str, float]:
    """Relative errors of the output and of the gradients for q, k and v."""
    cu_seqlens = starts(lengths)
    o = attend(qkv, cu_seqlens, max(lengths), dropout_p, seed)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(8)).to(o)
    (gradient,) = torch.autograd.grad(o, qkv, do)

    wide = qkv.detach().float().requires_grad_()
    expected = explicit_attention(wide, cu_seqlens, dropout_p, seed)
    (expected_gradient,) = torch.autograd.grad(expected, wide, do.float())
    found = {"o": relative_error(o, expected)}
    for i, name in enumerate(("dq", "dk", "dv")):
        found[name] = relative_error(gradient[:, i], expected_gradient[:, i])
    return found


@pytest.fixture(autouse=True)
def interpreter_is_on() -> None:
    if DEVICE == "cpu" and isinstance(triton.language.zeros, triton.runtime.JITFunction):
        pytest.fail("Triton was imported before TRITON_INTERPRET=1 was set: set it in conftest.py")


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("size", [16, 24, 64])
def test_output_and_gradients_match_explicit_attention(size: int, dropout_p: float) -> None:
    found = errors(projection(sum(LENGTHS), size), LENGTHS, dropout_p, seed=2**45 + 3)
    assert all(error <= 1e-5 for error in found.values()), found


@pytest.mark.parametrize("size", [80, 128])
def test_wide_heads(size: int) -> None:
    found = errors(projection(41, size), [40, 1], dropout_p=0.1)
    assert all(error <= 1e-5 for error in found.values()), found


@pytest.mark.parametrize(("size", "dropout_p"), [(24, 0.3), (128, 0.0)])
def test_bfloat16_is_close_to_float32(size: int, dropout_p: float) -> None:
    found = errors(projection(sum(LENGTHS), size, torch.bfloat16), LENGTHS, dropout_p)
    assert all(error <= 2e-2 for error in found.values()), found


def test_empty_sequences_are_passed_over() -> None:
    found = errors(projection(8, 16), [0, 3, 0, 5, 0])
    assert all(error <= 1e-5 for error in found.values()), found


def test_scores_far_below_zero() -> None:
    # The keys past a sequence's end score 0: against -300, exp2(300) would overflow were they used.
    qkv = projection(5, 16).detach()
    qkv[:, 0] += 9.0
    qkv[:, 1] -= 9.0
    found = errors(qkv.requires_grad_(), [5], dropout_p=0.2)
    assert all(error <= 1e-3 for error in found.values()), found


def test_slices_of_a_fused_projection_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = projection(20, 24)
    q, k, v = (x.contiguous() for x in qkv.unbind(1))
    cu_seqlens = starts([13, 7])
    o_copied = packed_attention(q, k, v, cu_seqlens, 13, 0.2, 5)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "contiguous", lambda self: pytest.fail("copied"))
        o = attend(qkv, cu_seqlens, 13, 0.2, 5)
    assert relative_error(o, o_copied) <= 1e-6

    # other layouts, (H, T, D) and (T, D, H) in memory, and a gradient broadcast from one number
    q_moved = q.transpose(0, 1).contiguous().transpose(0, 1)
    k_moved, v_moved = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    o_moved = packed_attention(q_moved, k_moved, v_moved, cu_seqlens, 13, 0.2, 5)
    assert relative_error(o_moved, o_copied) <= 1e-6
    (gradient,) = torch.autograd.grad(o.sum(), qkv)
    (gradient_copied,) = torch.autograd.grad(o_copied, qkv, torch.ones_like(o))
    assert relative_error(gradient, gradient_copied) <= 1e-6


@pytest.mark.parametrize("seed", EVERY_SEED)
def test_kernel_mask_is_dropout_mask_bit_for_bit(seed: int) -> None:
    # With equal weights and the identity for v, an output element is keep / (L (1 - p)).
    lengths, size, p = [5, 16, 3], 16, 0.4
    cu_seqlens = starts(lengths)
    zero = torch.zeros(sum(lengths), HEADS, size, device=DEVICE)
    identity = torch.cat([torch.eye(length, size) for length in lengths]).to(DEVICE)
    v = identity[:, None].repeat(1, HEADS, 1).requires_grad_()
    o = packed_attention(zero, zero, v, cu_seqlens, 16, p, seed)
    (dv,) = torch.autograd.grad(o, v, v.detach())
    mask = dropout_mask(cu_seqlens, 16, HEADS, p, seed)
    for n, length in enumerate(lengths):
        own = slice(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
        expected = mask[n, :, :length, :length]
        assert torch.equal(o[own, :, :length].transpose(0, 1) > 0, expected)
        assert torch.equal(dv[own, :, :length].permute(1, 2, 0) > 0, expected)


def test_same_seed_repeats_every_bit() -> None:
    def run(seed: int, max_length: int = 20) -> tuple[Tensor, Tensor]:
        qkv = projection(25, 16)
        o = attend(qkv, starts([5, 20]), max_length, 0.1, seed)
        return o, torch.autograd.grad(o.square().sum(), qkv)[0]

    o, gradient = run(3)
    for other in (run(3), run(3, max_length=77)):
        assert torch.equal(o, other[0])
        assert torch.equal(gradient, other[1])
    assert not torch.equal(o, run(4)[0])
    assert not torch.equal(o, run(3 + 2**32)[0])


def assert_rate(hits: Tensor, rate: float) -> None:
    """The share of true is what independent draws give, within five standard deviations."""
    deviation = (rate * (1 - rate) / hits.numel()) ** 0.5
    assert abs(float(hits.double().mean()) - rate) <= 5 * deviation


def one_mask(p: float, seed: int) -> Tensor:
    return dropout_mask(starts([SIDE]), SIDE, 4, p, seed)[0]  # (H, L, L)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropout_rate(p: float) -> None:
    for seed in EVERY_SEED:
        mask = one_mask(p, seed)
        assert_rate(~mask, p)
        for head in mask:
            assert_rate(~head, p)
    # nor do rows or columns stand out: the counts in them spread as a binomial distribution does
    variance = SIDE * p * (1 - p)
    excess = (1 - 6 * p * (1 - p)) / variance
    for axis in (-1, -2):
        squares = (mask.double().sum(axis) - SIDE * (1 - p)).square()
        deviation = ((2 + excess) / squares.numel()) ** 0.5
        assert abs(float(squares.mean()) / variance - 1) <= 5 * deviation


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_are_independent(p: float) -> None:
    agree = p**2 + (1 - p) ** 2
    mask = one_mask(p, 11)
    for other_seed in (10, 12, 11 + 2**32, 11 + 2**63, 11 << 32):
        assert_rate(mask == one_mask(p, other_seed), agree)
    for first in range(4):
        for second in range(first):
            assert_rate(mask[first] == mask[second], agree)
            assert_rate(mask[first] == mask[second].mT, agree)
    below = torch.ones_like(mask).tril(-1)
    assert_rate(mask[below] == mask.mT[below], agree)
    for shift in (1, 2, 16, 64):
        assert_rate(mask[:, shift:] == mask[:, :-shift], agree)  # rows
        assert_rate(mask[:, :, shift:] == mask[:, :, :-shift], agree)  # keys
        assert_rate(mask[:, shift:, shift:] == mask[:, :-shift, :-shift], agree)


def test_no_dropout_keeps_everything() -> None:
    assert bool(dropout_mask(starts(LENGTHS), 99, HEADS, 0.0, 5).all())


def test_wrong_arguments_are_refused() -> None:
    q, k, v = projection(20, 16).detach().unbind(1)
    cu = starts([13, 7])
    with pytest.raises(ValueError, match="one shape"):
        packed_attention(q, k[:, :2], v, cu, 13)
    with pytest.raises(ValueError, match="one shape"):
        packed_attention(q[0], k[0], v[0], cu, 13)
    with pytest.raises(ValueError, match="head size"):
        attend(torch.zeros(20, 3, HEADS, 129, device=DEVICE), cu, 13)
    with pytest.raises(ValueError, match="float32"):
        packed_attention(q, k, v.bfloat16(), cu, 13)
    with pytest.raises(ValueError, match="float32"):
        packed_attention(q.half(), k.half(), v.half(), cu, 13)
    with pytest.raises(ValueError, match="int32"):
        packed_attention(q, k, v, cu.long(), 13)
    with pytest.raises(ValueError, match="int32"):
        dropout_mask(cu[None], 13, HEADS, 0.1, 0)
    with pytest.raises(ValueError, match="max_length"):
        packed_attention(q, k, v, cu, 0)
    for dropout_p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="dropout_p"):
            packed_attention(q, k, v, cu, 13, dropout_p)
        with pytest.raises(ValueError, match="dropout_p"):
            dropout_mask(cu, 13, HEADS, dropout_p, 0)


@pytest.mark.skipif(DEVICE == "cuda", reason="there it would wait for the device")
def test_wrong_lengths_are_refused_on_the_cpu() -> None:
    q, k, v = projection(20, 16).detach().unbind(1)
    for lengths in ([13, 8], [13, 6], [21, -1]):
        with pytest.raises(ValueError, match="rise from 0"):
            packed_attention(q, k, v, starts(lengths), 21)
    with pytest.raises(ValueError, match="over max_length"):
        packed_attention(q, k, v, starts([13, 7]), 12)
