"""The fused kernels against the same written out, on CUDA or in Triton's interpreter.

Letters: T tokens, N sequences, H heads, D head size, L length, C width of a row.
"""

# mypy: disable-error-code="call-arg"
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from tiny import PIECES, random_batch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

triton = pytest.importorskip("triton", reason="the kernels are written in Triton")

from masks import attention_mask, norm_mask  # noqa: E402

from xformer.model import encoder as encoders  # noqa: E402
from xformer.model import norm_kernels  # noqa: E402
from xformer.model.encoder import Encoder, ModelConfig  # noqa: E402
from xformer.model.kernels import packed_attention  # noqa: E402
from xformer.model.norm_kernels import add_norm  # noqa: E402

LENGTHS = [1, 13, 7, 99]  # one token; less than a block; blocks of 16, 32 and 64 with a rest
HEADS = 2
SIDE = 120  # of the square masks whose statistics are taken
EVERY_SEED = [0, 1, -1, 2**31, 2**32, 2**63 + 5]


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def projection(tokens: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(T, 3, H, D), as a fused projection leaves it."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, 3, HEADS, size, generator=generator)
    return x.to(DEVICE, dtype).requires_grad_()


def explicit_attention(
    qkv: Tensor, cu_seqlens: Tensor, dropout_p: float = 0.0, seed: int = 0
) -> Tensor:
    """One sequence at a time, with the (H, L, L) weights written out."""
    bounds = cu_seqlens.tolist()
    longest = max(int(cu_seqlens.diff().max()), 1)
    mask = attention_mask(cu_seqlens, longest, HEADS, dropout_p, seed)
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
    o = packed_attention(qkv, cu_seqlens, max(lengths), dropout_p, seed)
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


@pytest.mark.parametrize(
    ("size", "dropout_p"), [(16, 0.0), (24, 0.3), (48, 0.3), (64, 0.0), (64, 0.1)]
)
def test_output_and_gradients_match_explicit_attention(size: int, dropout_p: float) -> None:
    found = errors(projection(sum(LENGTHS), size), LENGTHS, dropout_p, seed=2**45 + 3)
    assert all(error <= 1e-5 for error in found.values()), found


@pytest.mark.parametrize("size", [1, 17, 32, 80, 96, 128])
def test_other_head_sizes(size: int) -> None:
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


def test_other_layouts() -> None:
    # (H, T, 3, D) in memory; and a gradient broadcast from one number, as that of a sum is
    qkv, cu_seqlens = projection(20, 24), starts([13, 7])
    moved = qkv.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).requires_grad_()
    o = packed_attention(qkv, cu_seqlens, 13, 0.2, 5)
    o_moved = packed_attention(moved, cu_seqlens, 13, 0.2, 5)
    assert torch.equal(o_moved, o)
    (gradient,) = torch.autograd.grad(o, qkv, torch.ones_like(o))
    (gradient_moved,) = torch.autograd.grad(o_moved.sum(), moved)
    assert torch.equal(gradient_moved, gradient)


@pytest.mark.parametrize("seed", EVERY_SEED)
def test_the_mask_of_attention_bit_for_bit(seed: int) -> None:
    # With equal weights and the identity for v, an output element is keep / (L (1 - p)).
    lengths, size, p = [5, 16, 3], 16, 0.4
    cu_seqlens = starts(lengths)
    identity = torch.cat([torch.eye(length, size) for length in lengths]).to(DEVICE)
    qkv = torch.zeros(sum(lengths), 3, HEADS, size, device=DEVICE)
    qkv[:, 2] = identity[:, None]
    qkv.requires_grad_()
    o = packed_attention(qkv, cu_seqlens, 16, p, seed)
    (gradient,) = torch.autograd.grad(o, qkv, qkv[:, 2].detach())
    dv = gradient[:, 2]
    mask = attention_mask(cu_seqlens, 16, HEADS, p, seed)
    for n, length in enumerate(lengths):
        own = slice(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
        expected = mask[n, :, :length, :length]
        assert torch.equal(o[own, :, :length].transpose(0, 1) > 0, expected)
        assert torch.equal(dv[own, :, :length].permute(1, 2, 0) > 0, expected)


def test_same_seed_repeats_every_bit() -> None:
    def run(seed: int, max_length: int = 20) -> tuple[Tensor, Tensor]:
        qkv = projection(25, 16)
        o = packed_attention(qkv, starts([5, 20]), max_length, 0.1, seed)
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
    return attention_mask(starts([SIDE]), SIDE, 4, p, seed)[0]  # (H, L, L)


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
    assert bool(attention_mask(starts(LENGTHS), 99, HEADS, 0.0, 5).all())


def test_wrong_arguments_are_refused() -> None:
    qkv = projection(20, 16).detach()
    cu = starts([13, 7])
    for wrong in (qkv[:, 0], qkv[:, :2], qkv[0]):
        with pytest.raises(ValueError, match="must be \\(T, 3, H, D\\)"):
            packed_attention(wrong, cu, 13)
    with pytest.raises(ValueError, match="head size must be 1 to 128, got 129"):
        packed_attention(torch.zeros(20, 3, HEADS, 129, device=DEVICE), cu, 13)
    with pytest.raises(ValueError, match="float32 or bfloat16, got"):
        packed_attention(qkv.half(), cu, 13)
    with pytest.raises(ValueError, match="int32"):
        packed_attention(qkv, cu.long(), 13)
    with pytest.raises(ValueError, match="int32"):
        packed_attention(qkv, cu[None], 13)
    with pytest.raises(ValueError, match="max_length"):
        packed_attention(qkv, cu, 0)
    for dropout_p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="dropout_p"):
            packed_attention(qkv, cu, 13, dropout_p)


@pytest.mark.skipif(DEVICE == "cuda", reason="there it would wait for the device")
def test_wrong_lengths_are_refused_on_the_cpu() -> None:
    qkv = projection(20, 16).detach()
    for lengths in ([13, 8], [13, 6], [21, -1]):
        with pytest.raises(ValueError, match="rise from 0"):
            packed_attention(qkv, starts(lengths), 21)
    with pytest.raises(ValueError, match="over max_length"):
        packed_attention(qkv, starts([13, 7]), 12)


# ---- residual + dropout + LayerNorm ----


def norm_inputs(
    tokens: int,
    width: int,
    x_type: torch.dtype = torch.float32,
    residual_type: torch.dtype = torch.float32,
) -> Any:  # a list of tensors, passed with *
    generator = torch.Generator().manual_seed(9)
    shapes = [(tokens, width)] * 2 + [(width,)] * 2
    types = [x_type, residual_type, torch.float32, torch.float32]
    return [
        torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()
        for shape, dtype in zip(shapes, types, strict=True)
    ]


def plain_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, p: float, seed: int
) -> tuple[Tensor, Tensor]:
    T, C = x.shape
    z = residual + x * norm_mask(T, C, p, seed).to(x.device) / (1 - p)
    return F.layer_norm(z, z.shape[1:], weight, bias, eps), z


def norm_errors(inputs: Any, eps: float, p: float, seed: int) -> dict[str, float]:
    """Relative errors of y, z and the gradients that flow from both."""
    wide: Any = [x.detach().double().requires_grad_() for x in inputs]
    found = add_norm(*inputs, eps, p, seed)
    expected = plain_norm(*wide, eps, p, seed)
    generator = torch.Generator().manual_seed(8)
    ahead = [torch.randn(y.shape, generator=generator).to(DEVICE, y.dtype) for y in found]
    gradients = torch.autograd.grad(found, inputs, ahead)
    expected_gradients = torch.autograd.grad(expected, wide, [dy.double() for dy in ahead])
    names = ("y", "z", "dx", "dresidual", "dweight", "dbias")
    pairs = zip((*found, *gradients), (*expected, *expected_gradients), strict=True)
    return {name: relative_error(*pair) for name, pair in zip(names, pairs, strict=True)}


@pytest.mark.parametrize(
    ("tokens", "width", "p"),
    [(13, 7, 0.3), (99, 3, 0.1), (31, 99, 0.0), (7, 384, 0.1), (5, 1000, 0.5), (2, 8192, 0.1)],
)
def test_norm_matches_plain_torch(
    tokens: int, width: int, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_kernels, "PROGRAMS", 2)  # each takes rows more than once
    found = norm_errors(norm_inputs(tokens, width), 1e-12, p, seed=2**45 + 3)
    assert all(error <= 1e-5 for error in found.values()), found


def test_norm_of_width_one_and_of_equal_elements() -> None:
    for width in (1, 13):
        x, residual, weight, bias = norm_inputs(7, width)
        equal = residual.detach()[:, :1].expand(-1, width).contiguous().requires_grad_()
        y, z = add_norm(x.detach() * 0, equal, weight, bias, 1e-5)
        assert torch.equal(z, equal)
        assert torch.allclose(y, bias.expand(7, -1), atol=1e-4)
        (gradient,) = torch.autograd.grad(y.sum(), equal)
        assert bool(gradient.isfinite().all())


def test_norm_of_a_row_far_from_zero() -> None:
    x, residual, weight, bias = norm_inputs(7, 99)
    residual = (residual.detach() + 1000).requires_grad_()
    found = norm_errors([x, residual, weight, bias], 1e-12, 0.1, seed=3)
    assert all(error <= 1e-3 for error in found.values()), found  # of 24 bits, 10 hold the 1000


@pytest.mark.parametrize("used", [0, 1])
def test_norm_with_one_output_used(used: int) -> None:
    # post-LN layers use y alone; z alone is a residual sum with dropout
    inputs = norm_inputs(13, 24)
    gradients = torch.autograd.grad(
        add_norm(*inputs, 1e-5, 0.2, 5)[used].square().sum(), inputs, allow_unused=True
    )
    expected = torch.autograd.grad(
        plain_norm(*inputs, 1e-5, 0.2, 5)[used].square().sum(), inputs, allow_unused=True
    )
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient is not None
        other = torch.zeros_like(gradient) if other is None else other
        assert torch.allclose(gradient, other, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("x_type", "residual_type", "result"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_norm_in_bfloat16(
    x_type: torch.dtype, residual_type: torch.dtype, result: torch.dtype
) -> None:
    inputs = norm_inputs(13, 99, x_type, residual_type)
    y, z = add_norm(*inputs, 1e-12, 0.3, 5)
    assert (y.dtype, z.dtype) == (result, result)
    gradients = torch.autograd.grad(y.sum() + z.sum(), inputs)
    assert [gradient.dtype for gradient in gradients] == [x.dtype for x in inputs]
    found = norm_errors(inputs, 1e-12, 0.3, seed=5)
    assert all(error <= 1e-2 for error in found.values()), found
    with torch.autocast(DEVICE, torch.bfloat16):
        y, z = add_norm(*inputs, 1e-12, 0.3, 5)
    plain = F.layer_norm(z.float(), (99,), *inputs[2:], 1e-12)
    assert (y.dtype, z.dtype) == (torch.float32, result)
    assert relative_error(y, plain) <= 1e-5  # bfloat16 too: the statistics are those of rounded z


@pytest.mark.parametrize("seed", EVERY_SEED)
def test_the_mask_of_the_norm_bit_for_bit(seed: int) -> None:
    x = torch.ones(37, 77, device=DEVICE).requires_grad_()
    weight = torch.ones(77, device=DEVICE)
    _, z = add_norm(x, torch.zeros_like(x), weight, weight, 1e-5, 0.4, seed)
    mask = norm_mask(37, 77, 0.4, seed).to(DEVICE)
    assert torch.equal(z > 0, mask)
    (gradient,) = torch.autograd.grad(z.sum(), x)
    assert torch.equal(gradient > 0, mask)
    assert torch.equal(z.detach(), gradient)


def test_norm_mask_statistics() -> None:
    for p in (0.01, 0.1, 0.5):
        agree = p**2 + (1 - p) ** 2
        mask = norm_mask(500, 768, p, 11)
        assert_rate(~mask, p)
        for axis in (0, 1):
            counts = (~mask).double().sum(axis)
            variance = mask.shape[axis] * p * (1 - p)
            assert abs(float((counts - mask.shape[axis] * p).square().mean()) / variance - 1) < 0.3
        for shift in (1, 2, 16, 64):
            assert_rate(mask[shift:] == mask[:-shift], agree)
            assert_rate(mask[:, shift:] == mask[:, :-shift], agree)
        for seed in (10, 12, 11 + 2**32):
            assert_rate(mask == norm_mask(500, 768, p, seed), agree)


def test_norm_repeats_every_bit() -> None:
    def run(seed: int) -> list[Tensor]:
        inputs = norm_inputs(99, 24)
        y, z = add_norm(*inputs, 1e-5, 0.1, seed)
        return [y, z, *torch.autograd.grad(y.square().sum() + z.square().sum(), inputs)]

    first, again, other = run(3), run(3), run(4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_norm_of_other_layouts_and_of_nothing() -> None:
    inputs = norm_inputs(13, 24)
    y, z = add_norm(*inputs, 1e-5)
    moved: Any = [x.detach().t().contiguous().t() for x in inputs[:2]] + inputs[2:]
    assert torch.equal(add_norm(*moved, 1e-5)[0], y)
    (gradient,) = torch.autograd.grad(y.sum(), inputs[3])  # a gradient broadcast from one number
    assert torch.allclose(gradient, torch.full_like(gradient, 13.0))

    empty = norm_inputs(0, 24)
    y, z = add_norm(*empty, 1e-5, 0.1, 3)
    assert y.shape == z.shape == (0, 24)
    gradients = torch.autograd.grad(y.sum() + z.sum(), empty)
    assert [float(gradient.sum()) for gradient in gradients] == [0.0] * 4


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_encoder_takes_the_fused_norm(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients are those of the plain path; dropout is there, by torch's seed."""
    config = ModelConfig(
        vocab_size=PIECES,
        layers=2,
        hidden=12,
        heads=3,
        intermediate=19,
        max_positions=17,
        norm=norm,
        dropout=0.0,
        attention_dropout=0.0,
    )
    batch, used = random_batch([1, 5, 7]), []
    model = Encoder(config).to(DEVICE).train()
    for i, weight in enumerate(model.parameters()):
        weight.data.normal_(generator=torch.Generator().manual_seed(i)).mul_(0.3)
    fused = norm_kernels.add_norm

    def counted(*given: Any) -> Any:
        used.append(given[-2:])
        return fused(*given)

    monkeypatch.setattr(norm_kernels, "add_norm", counted)
    found = []
    for fuses in (False, True):
        monkeypatch.setattr(encoders, "fuses", lambda x, fuses=fuses: fuses)
        out = model(batch)
        gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        found.append([out, *gradients])
    assert len(used) == (4 if norm == "post" else 2)
    for one, two in zip(*found, strict=True):
        # nothing but rounding reaches the bias of keys
        assert float((one - two).detach().norm()) <= 1e-5 * max(float(one.detach().norm()), 1.0)
    for layer in model.layers:
        for name in ("dropout", "mlp_dropout"):
            setattr(layer, name, 0.3)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(model(batch))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert {rate for rate, _ in used} == {0.0, 0.3}
    assert len({seed for _, seed in used}) > 4  # another mask each time
    count = len(used)
    model(batch, "explicit")  # to be differentiated twice
    assert len(used) == count


def test_wrong_arguments_of_the_norm_are_refused() -> None:
    x, residual, weight, bias = (tensor.detach() for tensor in norm_inputs(13, 24))
    with pytest.raises(ValueError, match="one shape"):
        add_norm(x, residual[1:], weight, bias, 1e-5)
    with pytest.raises(ValueError, match="one shape"):
        add_norm(x[None], residual[None], weight, bias, 1e-5)
    with pytest.raises(ValueError, match="must be \\(24,\\)"):
        add_norm(x, residual, weight[1:], bias, 1e-5)
    with pytest.raises(ValueError, match="float32 and bfloat16, got"):
        add_norm(x.half(), residual, weight, bias, 1e-5)
    with pytest.raises(ValueError, match="width must be 1 to 8192, got 8193"):
        add_norm(*(torch.zeros(2, 8193, device=DEVICE),) * 4, 1e-5)
    with pytest.raises(ValueError, match="dropout_p"):
        add_norm(x, residual, weight, bias, 1e-5, 1.0)
    with pytest.raises(ValueError, match="dropout_p"):
        add_norm(x, residual, weight, bias, 1e-5, -0.1)


# ---- torch's own kernel for packed sequences, which needs CUDA ----


class StandIn(TorchDispatchMode):
    """Answers for the operators behind `varlen_attn`, and writes down what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name()
        if name not in ("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"):
            return func(*args, **(kwargs or {}))
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        self.calls.append(given)
        q, k, v = (given[key].float() for key in ("query", "key", "value"))
        weights = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        sequence = torch.bucketize(torch.arange(len(q)), given["cu_seq_q"][1:], right=True)
        weights = weights.masked_fill(sequence[:, None] != sequence, -torch.inf).softmax(-1)
        if name.endswith("_varlen_attn"):
            o = torch.einsum("hij,jhd->ihd", weights, v).to(given["query"].dtype)
            return o, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)
        do = given["grad_out"].float()
        dp = torch.einsum("ihd,jhd->hij", do, v)
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        gradients = (
            torch.einsum("hij,jhd->ihd", ds, k),
            torch.einsum("hij,ihd->jhd", ds, q),
            torch.einsum("hij,ihd->jhd", weights, do),
        )
        return tuple(gradient.to(given["query"].dtype) for gradient in gradients)


@pytest.mark.parametrize("autocast", [False, True])
def test_varlen_attention_is_called_as_it_wants(autocast: bool) -> None:
    from torch.nn.attention import varlen  # noqa: F401  (registers the operators)

    torch.manual_seed(3)
    config = ModelConfig(
        vocab_size=PIECES,
        layers=1,
        hidden=16,
        heads=2,
        intermediate=24,
        max_positions=99,
        dropout=0.0,
        attention_dropout=0.0,
    )
    encoder = Encoder(config)
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    batch = random_batch([13, 7])
    results = []
    for backend in ("varlen", "explicit"):
        encoder.zero_grad()
        with StandIn() as stand_in, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = encoder(batch, backend)
            out.square().sum().backward()
        results.append([out, *(p.grad for p in encoder.parameters() if p.grad is not None)])
        if backend == "varlen":
            forward, backward = stand_in.calls
    assert all(
        relative_error(a, b) <= (3e-2 if autocast else 1e-5) for a, b in zip(*results, strict=True)
    )
    for given in (forward, backward):
        assert given["query"].dtype == (torch.bfloat16 if autocast else torch.float32)
        assert given["query"].shape == (20, 2, 8)
        assert given["query"].stride(-1) == 1
        for side in ("q", "k"):
            assert given[f"cu_seq_{side}"].dtype == torch.int32
            assert given[f"cu_seq_{side}"].tolist() == [0, 13, 20]
            assert given[f"max_{side}"] == 13
        assert (given["is_causal"], given["scale"]) == (False, None)
        assert list(given["window_size"]) == [-1, -1]


# ---- ahead of time ----

# every head size, and every type on every device
ATTENTION = [
    (80, "bf16", 16),
    (90, "fp32", 24),
    (80, "fp32", 32),
    (90, "bf16", 48),
    (80, "bf16", 64),
    (90, "bf16", 64),
    (90, "fp32", 96),
    (80, "fp32", 128),
    (90, "bf16", 128),
]
NORM = [(80, "bf16", 768), (90, "bf16", 8192), (90, "fp32", 99)]
COMPILE = """
import json, sys
from benchmarks.kernels import compile_all, missing_compiler
cases = [[(*case, True) for case in group] for group in json.loads(sys.argv[1])]
reason = missing_compiler()
print(json.dumps(reason or [row._asdict() for row in compile_all(*cases)]))
"""


@pytest.fixture(scope="module", autouse=True)
def compiler() -> Iterator[subprocess.Popen[str]]:
    """Compiles beside the other tests, in a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "-c", COMPILE, json.dumps([ATTENTION, NORM])],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def test_kernels_fit_the_devices(compiler: subprocess.Popen[str]) -> None:
    out, err = compiler.communicate(timeout=600)
    assert compiler.returncode == 0, err
    rows = json.loads(out)
    if isinstance(rows, str):
        pytest.skip(rows)
    assert len(rows) == 3 * len(ATTENTION) + 2 * len(NORM)
    for row in rows:
        assert 0 < row["shared"] <= 99 * 1024, row  # what the smallest devices have
        assert 32 * row["warps"] * row["registers"] <= 65536, row
        assert row["spilled"] <= 32, row  # bytes a thread
