"""Compare every way of every operation with its plain way in fp64: values, gradients and types.

T tokens, N sequences, H heads, D size of a head, C width, M masked tokens, E embedding size, V
vocabulary.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import layout, seeded
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from xformer.ops import native
from xformer.ops.add_norm import add_norm
from xformer.ops.attention import Layout, attention, probabilities
from xformer.ops.cast_weights import cast_weights
from xformer.ops.dropout import dropout, keep_mask, new_seed, plain
from xformer.ops.rotary import frequencies, rotary, turns
from xformer.ops.vocabulary_loss import one_pass, vocabulary_loss

HALF, FP16, SINGLE, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
# the largest error of a type, relative to the reference's norm
ERRORS = {DOUBLE: 1e-12, SINGLE: 1e-5, HALF: 2e-2, FP16: 3e-3}
RATE = 0.3
Run = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Case:
    """An operation on inputs of certain shapes.

    `run` takes the inputs, which have a gradient, then `whole`, a tensor of integers, and the
    dropout rate.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    run: Run
    whole: Tensor = field(default_factory=lambda: torch.empty(0))
    fp32: tuple[int, ...] = ()  # inputs that stay in fp32 while others have 16 bits

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        made = [
            torch.randn(shape, generator=seeded(i), dtype=DOUBLE)
            for i, shape in enumerate(self.shapes)
        ]
        types = [SINGLE if i in self.fp32 and dtype.itemsize == 2 else dtype for i in range(9)]
        return [x.to(t).requires_grad_() for x, t in zip(made, types, strict=False)]


def of_attention(lengths: list[int], heads: int, size: int, more: int = 0, window: int = 0) -> Case:
    where = layout(np.cumsum([0, *lengths]))
    name = f"attention {lengths[:5]} {heads} x {size}" + (f", window {window}" if window else "")
    shape = sum(lengths) + more, 3, heads, size

    def run(qkv: Tensor, cu_seqlens: Tensor, rate: float) -> Any:
        return (attention(qkv, Layout(cu_seqlens, where.longest, window), rate),)

    return Case(name, (shape,), run, where.cu_seqlens)


def of_norm(rows: int, width: int) -> Case:
    shapes = (rows, width), (rows, width), (width,), (width,)

    def run(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, _: Tensor, rate: float) -> Any:
        return add_norm(x, y, weight, bias, 1e-3, rate)

    return Case(f"add_norm {rows} x {width}", shapes, run, fp32=(0, 2, 3))


def of_norm_without_bias(rows: int, width: int) -> Case:
    shapes = (rows, width), (rows, width), (width,)

    def run(x: Tensor, y: Tensor, weight: Tensor, _: Tensor, rate: float) -> Any:
        return add_norm(x, y, weight, None, 1e-3, rate)

    return Case(f"add_norm {rows} x {width}, no bias", shapes, run, fp32=(0, 2))


def of_rotary(lengths: list[int], heads: int, size: int) -> Case:
    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))

    def run(qkv: Tensor, positions: Tensor, rate: float) -> Any:
        return (rotary(qkv, *turns(positions, size, 10000.0)),)

    shape = len(positions), 3, heads, size
    return Case(f"rotary {lengths} {heads} x {size}", (shape,), run, positions)


def of_dropout(*shape: int) -> Case:
    return Case(f"dropout {shape}", (shape,), lambda x, _, rate: (dropout(x, rate),))


def of_vocabulary(masked: int, width: int, pieces: int, more: int = 0) -> Case:
    targets = torch.randint(pieces, (masked,), generator=seeded(7))

    def run(h: Tensor, word: Tensor, bias: Tensor, targets: Tensor, rate: float) -> Any:
        return (vocabulary_loss(h, word, bias, targets)[0],)

    shapes = (masked + more, width), (pieces, width), (pieces,)
    return Case(
        f"vocabulary_loss {masked} + {more}, {width}, {pieces}", shapes, run, targets, fp32=(2,)
    )


CASES = [
    # one token; repeats; whole tiles of 8 and 16 and one more or less; more than a block of queries
    *(
        of_attention(lengths, heads, size, more=3)
        for lengths in ([1], [2, 2, 2], [7, 1, 0, 13, 1], [15, 16, 17, 8, 9], [64, 65, 63, 200])
        for heads, size in ((3, 1), (4, 5), (12, 32), (2, 48), (1, 128))
    ),
    *(
        of_attention(lengths, heads, size, more=3, window=window)
        for lengths in ([1], [7, 1, 0, 13, 1], [64, 65, 63, 200], [300])
        for heads, size in ((2, 5), (3, 32))
        for window in (1, 5, 16, 63, 128, 2**29)
    ),
    of_attention([1025], 1, 3),
    of_attention([1025], 1, 3, window=64),
    of_attention([], 2, 8),
    of_attention([], 2, 8, more=5),
    of_attention([0, 0], 2, 8),
    *(of_norm(*shape) for shape in ((0, 5), (1, 1), (5, 33), (300, 384), (7, 1000))),
    *(of_norm_without_bias(*shape) for shape in ((0, 5), (5, 33), (300, 384))),
    *(of_rotary(*shape) for shape in (([1, 7, 2], 3, 2), ([40, 3], 2, 32))),
    *(of_dropout(*shape) for shape in ((0, 3), (1,), (5,), (13, 7, 99), (300, 384))),
    *(
        of_vocabulary(*shape)
        for shape in ((0, 7, 97), (0, 7, 97, 16), (1, 1, 1), (29, 7, 97), (29, 13, 500, 3))
    ),
]
WAYS = {  # the types that each way claims
    "C++": (SINGLE, HALF),
    "plain": (DOUBLE, SINGLE, HALF, FP16),
}


@contextmanager
def taking(way: str) -> Iterator[None]:
    if way == "C++":
        if native.absent:
            pytest.skip(f"no C++ operations: {native.absent}")
        yield
        return
    with native.only_plain() if way == "plain" else nullcontext():
        yield


def results(case: Case, dtype: torch.dtype, way: str, rate: float) -> list[Tensor]:
    """The outputs, then the gradients of the inputs for one fixed output gradient, with one
    mask.
    """
    given = case.inputs(dtype)
    torch.manual_seed(3)
    with taking(way):
        out = list(case.run(*given, case.whole, rate))
        ahead = [
            torch.randn(x.shape, generator=seeded(20 + i), dtype=DOUBLE).to(x.dtype)
            for i, x in enumerate(out)
        ]
        gradients = torch.autograd.grad(out, given, ahead)
    for x, gradient in zip(given, gradients, strict=True):
        assert (gradient.dtype, gradient.shape) == (x.dtype, x.shape)
    return [*(x.detach() for x in out), *gradients]


@lru_cache(maxsize=4)
def exact(case: Case, rate: float) -> list[Tensor]:
    """The plain results in fp64. The tests of all ways and types of a case follow one another."""
    return results(case, DOUBLE, "plain", rate)


@pytest.mark.parametrize("rate", [0.0, RATE])
@pytest.mark.parametrize(
    ("way", "dtype"), [(way, t) for way, types in WAYS.items() for t in types if t != DOUBLE]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_way_equals_the_plain_one_in_fp64(
    case: Case, way: str, dtype: torch.dtype, rate: float
) -> None:
    actual, wanted = results(case, dtype, way, rate), exact(case, rate)
    # rounding the inputs is not an error of the operation, but it changes the output
    bound = ERRORS[dtype] * (3 if dtype.itemsize == 2 else 1)
    for one, two in zip(actual, wanted, strict=True):
        assert one.isfinite().all()
        # q and k of a sequence of one token have a gradient of 0
        assert float((one.double() - two).norm()) <= bound * max(float(two.norm()), 1.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [1, 3, 70])
def test_a_window_hides_what_is_far(way: str, window: int) -> None:
    """An identity matrix as v shows the probabilities: those of one softmax over the window."""
    qkv = torch.randn(100, 3, 2, 100, generator=seeded(1))
    qkv[:, 2] = torch.eye(100)[:, None]
    where = replace(layout([0, 100]), window=window)
    with taking(way):
        actual = attention(qkv, where).transpose(0, 1)  # (H, queries, keys)
    q, k = qkv[:, 0].transpose(0, 1), qkv[:, 1].transpose(0, 1)
    near = (torch.arange(100)[:, None] - torch.arange(100)).abs() <= window
    scores = (q @ k.mT / 10).masked_fill(~near, -math.inf)
    torch.testing.assert_close(actual, scores.softmax(-1))
    assert torch.equal(actual > 0, near.expand(2, -1, -1))
    assert torch.equal(probabilities(qkv, where)[0][0] > 0, near.expand(2, -1, -1))


def test_rotary_positions_turn_pairs_as_complex_numbers() -> None:
    """Element i of a head and element i + D / 2 are one complex number, whose angle grows."""
    positions, base = torch.tensor([0, 1, 2, 0, 1]), 160000.0
    qkv = torch.randn(5, 3, 2, 6, generator=seeded(1))
    first, second = qkv[:, :2].double().chunk(2, -1)
    angles = torch.outer(positions.double(), base ** (-torch.arange(3) / 3).double())
    turned = (
        torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None, None]
    )
    actual = rotary(qkv, *turns(positions, 6, base))
    wanted = torch.cat([turned.real, turned.imag], -1).float()
    torch.testing.assert_close(actual[:, :2], wanted)
    assert torch.equal(actual[:, 2], qkv[:, 2])
    # the score of two tokens depends on their distance only
    q, k = qkv[:1, 0].expand(9, -1, -1), qkv[:1, 1].expand(9, -1, -1)
    same = rotary(torch.stack([q, k, k], 1), *turns(torch.arange(9), 6, base))
    scores = torch.einsum("qhd,khd->hqk", same[:, 0], same[:, 1])
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance, 1, 2)
        torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal))
    rounded = frequencies(6, base, "float16")
    assert torch.equal(rounded, rounded.half().float())
    assert not torch.equal(rounded, frequencies(6, base))


def test_rows_after_the_last_sequence_are_zero() -> None:
    for way in WAYS:
        out, gradient = results(of_attention([3, 4], 2, 8, more=3), SINGLE, way, RATE)
        assert not out[-3:].any()
        assert not gradient[-3:].any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_finite_shows_and_stays_in_its_place(way: str, value: float) -> None:
    with taking(way), torch.no_grad():
        qkv = torch.randn(20, 3, 2, 8, generator=seeded(0))
        qkv[12, 1, 1, 3] = value  # a key of the second sequence and head
        bad = ~attention(qkv, layout([0, 9, 20])).isfinite()
        assert bad[9:, 1].any()
        assert not bad[:9].any()
        assert not bad[:, 0].any()
        x, one = torch.randn(5, 33, generator=seeded(1)), torch.ones(33)
        x[2, 7] = value
        for out in add_norm(x, x, one, one, 1e-3):
            assert (~out.isfinite()).any(1).tolist() == [False, False, True, False, False]
        h, word = torch.randn(4, 7, generator=seeded(2)), torch.randn(50, 7, generator=seeded(3))
        h[1, 0] = value
        loss, _ = vocabulary_loss(h, word, torch.zeros(50), torch.arange(4))
        assert not loss.isfinite()


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_not_a_number_stays_in_its_head(way: str) -> None:
    qkv = torch.randn(20, 3, 2, 8, generator=seeded(0)).requires_grad_()
    with taking(way):
        out = attention(qkv, layout([0, 9, 20]), RATE)
        direction = torch.ones_like(out)
        direction[12, 1, 3] = math.nan
        (actual,) = torch.autograd.grad(out, qkv, direction)
    assert actual[9:, :2, 1].isnan().any()
    assert not actual[:9].isnan().any()
    assert not actual[:, :, 0].isnan().any()


def test_far_scores_and_far_logits() -> None:
    """The scores are so far apart that most probabilities are 0 in fp32."""
    qkv = torch.randn(20, 3, 2, 8, generator=seeded(0))
    qkv[:, :2] *= 100
    h, word = torch.randn(9, 7, generator=seeded(1)), 1e4 * torch.randn(50, 7, generator=seeded(2))
    actual = []
    for way in WAYS:
        with taking(way):
            out = attention(qkv, layout([0, 9, 20]))
            loss, correct = vocabulary_loss(h, word, torch.zeros(50), torch.arange(9))
        assert out.isfinite().all()
        assert loss.isfinite()
        actual.append([out, loss, correct])
    for one, two in zip(*actual, strict=True):
        torch.testing.assert_close(one, two)


# ---------------------------------------------------------------------------- dropout's masks


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rate", [1e-9, 0.1, 0.5, 0.9, 1 - 1e-9])
def test_dropout_has_the_rate_asked_for(way: str, rate: float) -> None:
    torch.manual_seed(0)
    with taking(way):
        mask = dropout(torch.ones(300, 4001), rate) == 0
    deviation = math.sqrt(rate * (1 - rate) / mask.numel())
    assert abs(float(mask.float().mean()) - rate) <= 5 * deviation + 1e-6
    if 0.05 < rate < 0.95:  # no row or column stands out
        for axis in (0, 1):
            counts = mask.double().sum(axis)
            variance = mask.size(axis) * rate * (1 - rate)
            assert abs(float(counts.var()) / variance - 1) < 6 * math.sqrt(2 / len(counts))


def test_masks_are_independent() -> None:
    """Masks are independent of neighbours in every direction, of other heads and of other seeds."""
    heads, side, rate = 6, 200, 0.1
    position, head = torch.arange(side).int(), torch.arange(heads).int()[:, None, None]

    def mask(seed: int) -> Tensor:
        where = torch.tensor(seed)
        return keep_mask(rate, where, position[:, None], position, head).double() - (1 - rate)

    one = mask(5)
    pairs = [(one[1:], one[:-1]), (one, one.mT)]
    pairs += [(one, mask(other)) for other in (4, 6, 5 + 2**32, 5 << 32)]
    for lag in (1, 2, 16, 64):
        pairs += [(one[:, lag:], one[:, :-lag]), (one[:, :, lag:], one[:, :, :-lag])]
    below = torch.ones(side, side).tril(-1).bool()
    for a, b in pairs:
        a, b = (a[:, below], b[:, below]) if b.data_ptr() == a.data_ptr() else (a, b)
        correlation = float((a * b).mean()) / (rate * (1 - rate))
        assert abs(correlation) <= 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**61 + 12345])
def test_all_ways_have_the_same_masks(seed: int) -> None:
    """The masks of dropout, add_norm and attention are equal bit for bit. In attention, an identity
    matrix as v shows the mask.
    """
    if native.absent:
        pytest.skip(f"no C++ operations: {native.absent}")
    x, where = torch.ones(37, 77), torch.tensor(seed)
    wanted = plain(x, RATE, where)
    assert torch.equal(torch.ops.xformer.dropout(x, RATE, where), wanted)
    out = torch.ops.xformer.add_norm(0 * x, x, x[0], x[0], 1e-5, RATE, where)
    assert torch.equal(out[1], wanted)
    qkv = torch.zeros(9, 3, 2, 9)
    qkv[:, 2] = torch.eye(9)[:, None]
    ends = torch.tensor([0, 9], dtype=torch.int32)
    actual = torch.ops.xformer.attention(qkv, ends, 9, 0, RATE, where)[0]  # (T, H, keys)
    position, head = torch.arange(9).int(), torch.arange(2).int()[:, None, None]
    assert torch.equal(
        actual.transpose(0, 1) > 0, keep_mask(RATE, where, position[:, None], position, head)
    )


@pytest.mark.usefixtures("kernels")
def test_a_seed_fixes_the_mask() -> None:
    actual = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        actual.append(dropout(torch.ones(7, 13), 0.5))
    assert torch.equal(actual[0], actual[1])
    assert not torch.equal(actual[0], actual[2])
    assert dropout(actual[0], 0.0) is actual[0]


def test_dropout_falls_on_the_probabilities() -> None:
    qkv = torch.randn(60, 3, 2, 60, generator=seeded(1))
    qkv[:, 2] = torch.eye(60)[:, None]  # an output row is its row of probabilities
    weights = probabilities(qkv, layout([0, 60]))[0][0].transpose(0, 1)
    for way in WAYS:
        with taking(way):
            actual = attention(qkv, layout([0, 60]), RATE)
        left = actual != 0
        torch.testing.assert_close(actual[left], weights[left] / (1 - RATE))


# ------------------------------------------------------------- what else PyTorch can do with them

TWICE = [
    of_attention([3, 2], 2, 2),
    of_attention([3, 2], 2, 2, window=1),
    of_norm(3, 4),
    of_norm_without_bias(3, 4),
    of_rotary([3, 2], 2, 2),
    of_dropout(3, 4),
    of_vocabulary(3, 4, 5),
]


@pytest.mark.parametrize("case", TWICE, ids=lambda case: case.name)
def test_the_plain_way_has_second_derivatives(case: Case) -> None:
    given = case.inputs(DOUBLE)
    with native.only_plain():
        assert torch.autograd.gradgradcheck(lambda *x: case.run(*x, case.whole, 0.0), given)


@pytest.mark.parametrize(
    "case", [CASES[0], of_norm(4, 6), of_vocabulary(4, 6, 9)], ids=lambda case: case.name
)
def test_the_fast_way_says_that_it_has_none(case: Case) -> None:
    if native.absent:
        pytest.skip(f"no C++ operations: {native.absent}")
    given = case.inputs(SINGLE)
    out = case.run(*given, case.whole, 0.0)[0]
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(out.sum(), given, create_graph=True)


def test_dropout_in_cpp_is_differentiated_as_often_as_one_likes() -> None:
    x = torch.randn(5, 7, generator=seeded(0)).requires_grad_()
    (first,) = torch.autograd.grad(dropout(x, RATE).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second != 0, first != 0)


SOME = [
    of_attention([7, 1, 0, 13], 3, 5),
    of_attention([64, 200], 2, 48),
    of_attention([64, 200], 2, 48, window=17),
    of_norm_without_bias(5, 33),
    of_rotary([7, 1, 0, 13], 3, 6),
    of_norm(0, 5),
    of_norm(5, 33),
    of_dropout(13, 7, 99),
    of_vocabulary(0, 7, 97),
    of_vocabulary(29, 13, 500),
]


def without_content(case: Case, dtype: torch.dtype, way: str, device: str) -> list[Tensor]:
    """The outputs of an operation on fake tensors, and on the CPU the gradients."""
    types = [x.dtype for x in case.inputs(dtype)]
    with FakeTensorMode(), taking(way):
        made = zip(case.shapes, types, strict=True)
        given = [torch.empty(n, dtype=t, device=device, requires_grad=True) for n, t in made]
        whole = torch.empty(case.whole.shape, dtype=case.whole.dtype, device=device)
        out = list(case.run(*given, whole, RATE))
        if device == "cpu":
            out += torch.autograd.grad(out, given, [torch.empty_like(x) for x in out])
    return out


@pytest.mark.parametrize(("way", "dtype"), [(way, t) for way, types in WAYS.items() for t in types])
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_a_way_runs_on_tensors_without_content(case: Case, way: str, dtype: torch.dtype) -> None:
    """Under FakeTensorMode it gives the shapes and types of the real operation and reads no
    value."""
    real = results(case, dtype, way, RATE)
    for fake, wanted in zip(without_content(case, dtype, way, "cpu"), real, strict=True):
        assert (fake.shape, fake.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [SINGLE, HALF, FP16])
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_cuda_equals_the_plain_way_in_fp64(case: Case, dtype: torch.dtype) -> None:
    wanted = results(case, DOUBLE, "plain", 0.0)
    given = [x.detach().cuda().requires_grad_() for x in case.inputs(dtype)]
    out = list(case.run(*given, case.whole.cuda(), 0.0))
    ahead = [
        torch.randn(x.shape, generator=seeded(20 + i), dtype=DOUBLE) for i, x in enumerate(out)
    ]
    gradients = torch.autograd.grad(out, given, [a.to(x) for a, x in zip(ahead, out, strict=True)])
    for one, two in zip([*out, *gradients], wanted, strict=True):
        bound = 3 * ERRORS[dtype] * max(float(two.norm()), 1.0)
        assert float((one.detach().cpu().double() - two).norm()) <= bound


# what PyTorch without CUDA lacks for fake tensors on a CUDA device
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""


def check_cuda(guard: str) -> None:
    """Check that PyTorch's CUDA kernels accept their arguments. (Without a device there is no
    backward pass.)
    """
    ctypes.CDLL(guard)
    for case in SOME:
        for dtype in (SINGLE, HALF, FP16):
            real = results(case, dtype, "plain", RATE)
            for fake, wanted in zip(
                without_content(case, dtype, "CUDA", "cuda"), real, strict=False
            ):
                assert (fake.shape, fake.dtype) == (wanted.shape, wanted.dtype), case.name
                assert fake.device == torch.device("cuda:0"), case.name
    print("checked")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this PyTorch has CUDA")
@pytest.mark.slow
def test_cuda_runs_on_tensors_without_content(tmp_path: Path) -> None:
    source, guard, torchs = tmp_path / "guard.cpp", tmp_path / "guard.so", Path(torch.__path__[0])
    source.write_text(GUARD)
    line = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{torchs / 'include'}", str(source)]
    subprocess.run([*line, f"-L{torchs / 'lib'}", "-lc10", "-o", str(guard)], check=True)
    code = f"import test_ops; test_ops.check_cuda({str(guard)!r})"
    line = [sys.executable, "-c", code]
    ended = subprocess.run(line, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "checked\n"), ended.stderr


def test_the_operations_pass_torchs_own_checks() -> None:
    if native.absent:
        pytest.skip(f"no C++ operations: {native.absent}")
    ops, seed = torch.ops.xformer, new_seed()
    x, y, weight, bias = of_norm(5, 33).inputs(SINGLE)
    (qkv,) = of_attention([7, 1, 13], 2, 8).inputs(SINGLE)
    h, word, b = of_vocabulary(9, 7, 50).inputs(SINGLE)
    ends, targets = torch.tensor([0, 7, 8, 21], dtype=torch.int32), torch.arange(9)
    for operation, given in (
        (ops.dropout, (x, RATE, seed)),
        (ops.add_norm, (x, y, weight, bias, 1e-3, RATE, seed)),
        (ops.add_norm, (x, y, weight, bias, 1e-3, 0.0, None)),
        (ops.attention, (qkv, ends, 13, 0, RATE, seed)),
        (ops.attention, (qkv, ends, 13, 2, RATE, seed)),
        (ops.rotary, (qkv, *turns(torch.arange(21), 8, 10000.0), False)),
        (ops.vocabulary_loss, (h, word, b, targets)),
    ):
        assert set(torch.library.opcheck(operation.default, given).values()) == {"SUCCESS"}


# ----------------------------------------------------------------- what CUDA runs, here on the CPU


@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE, HALF, FP16])
@pytest.mark.parametrize("shape", [(0, 7, 97), (1, 1, 1), (29, 7, 96), (29, 13, 500, 3)], ids=str)
def test_one_pass_equals_the_plain_way(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    case, wide = of_vocabulary(*shape), torch.promote_types(dtype, SINGLE)
    targets = case.whole.clone()
    targets[2:4] = -100  # do not count
    wanted = case.inputs(DOUBLE)
    losses = torch.nn.functional.cross_entropy(
        wanted[0][: len(targets)] @ wanted[1].T + wanted[2], targets, reduction="none"
    )
    wanted_total = losses.sum()
    given = case.inputs(dtype)
    total, _ = one_pass(given[0], given[1], given[2], targets)
    assert total.dtype == wide
    bound = 3 * ERRORS[dtype]
    assert float((total - wanted_total).abs().detach()) <= bound * float(losses.detach().norm())
    for one, two, x in zip(
        torch.autograd.grad(total * 2, given),
        torch.autograd.grad(wanted_total * 2, wanted),
        given,
        strict=True,
    ):
        assert (one.dtype, one.shape) == (x.dtype, x.shape)
        assert float((one.double() - two).norm()) <= bound * max(float(two.norm()), 1.0)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_one_pass_counts_the_right_predictions_and_takes_far_logits(dtype: torch.dtype) -> None:
    word = (torch.eye(8, dtype=dtype)).repeat(4, 1)[:30]
    h = (1e4 * torch.eye(8, dtype=dtype)).requires_grad_()
    targets = torch.tensor([0, 1, 2, 3, 12, -100, 6, 0])  # of equal logits the first is predicted
    total, correct = one_pass(h, word, torch.zeros(30), targets)
    assert int(correct) == 5
    assert total.item() == pytest.approx(1e4, rel=1e-2)  # the last one is wrong
    (gradient,) = torch.autograd.grad(total, h)
    assert gradient.isfinite().all()


def test_one_pass_refuses_a_second_derivative() -> None:
    given = of_vocabulary(4, 6, 9).inputs(SINGLE)
    total, _ = one_pass(given[0], given[1], given[2], torch.arange(4))
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(total, given, create_graph=True)


def test_weights_that_are_cast_together_train_like_those_that_autocast_casts() -> None:
    layers = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 4)
    )
    x = torch.randn(9, 6, generator=seeded(1))
    assert cast_weights(layers) == {}
    layers[2].bias.requires_grad_(False)
    trained = [weight for weight in layers.parameters() if weight.requires_grad]
    with torch.autocast("cpu", HALF):
        weights = cast_weights(layers)
        assert list(weights) == ["0.weight", "0.bias", "2.weight"]
        actual = torch.func.functional_call(layers, weights, x).float().square().sum()
        wanted = layers(x).float().square().sum()
    assert torch.equal(actual, wanted)
    for weight, one, two in zip(
        trained,
        torch.autograd.grad(actual, trained, create_graph=True),
        torch.autograd.grad(wanted, trained),
        strict=True,
    ):
        assert one.dtype == weight.dtype
        assert torch.equal(one, two)
        assert one.requires_grad  # it has a second derivative


# ------------------------------------------------------------------------------ what is refused


def test_layouts_and_targets_that_do_not_fit_are_refused() -> None:
    if native.absent:
        pytest.skip(f"no C++ operations: {native.absent}")
    qkv = torch.randn(4, 3, 2, 3)
    for ends, longest in (([0, 5], 5), ([0, 4], 3), ([0, 3, 2], 3), ([1, 4], 3)):
        with pytest.raises(ValueError, match="the layout does not fit"):
            torch.ops.xformer.attention(
                qkv, torch.tensor(ends, dtype=torch.int32), longest, 0, 0.0, None
            )
    h, word, bias = torch.randn(3, 8), torch.randn(50, 8), torch.zeros(50)
    for way in WAYS:
        for target in (-101, 50):
            with taking(way), pytest.raises(IndexError):
                vocabulary_loss(h, word, bias, torch.tensor([1, target, 2]))


@pytest.mark.parametrize("way", WAYS)
def test_other_shapes_are_refused(way: str) -> None:
    x, one = torch.randn(4, 8), torch.ones(8)
    h, word, bias, targets = torch.randn(3, 8), torch.randn(50, 8), torch.zeros(50), torch.arange(3)
    with taking(way):
        for given in (
            (x, x[0], one, one),
            (x, x[:1], one, one),
            (x, x, one[:3], one),
            (x, x, one, one[:0]),
        ):
            with pytest.raises(ValueError, match="add_norm takes"):
                add_norm(*given, 1e-5)
        for other in (
            (h, word, bias[:1], targets),
            (h[:2], word, bias, targets),
            (h, word[:, :5], bias, targets),
            (h, word, bias, targets[:, None]),
        ):
            with pytest.raises(ValueError, match="vocabulary_loss takes"):
                vocabulary_loss(*other)
        with pytest.raises(ValueError, match="attention takes"):
            attention(torch.randn(9, 2, 2, 8), layout([0, 9]))
        for ends, longest in (([0, 12], 12), ([0, 9], 3), ([0, 3, 2], 3), ([1, 9], 8)):
            where = Layout(torch.tensor(ends, dtype=torch.int32), longest)
            with pytest.raises(ValueError, match="the layout does not fit"):
                attention(torch.randn(9, 3, 2, 8), where)
    for wrong in (
        torch.tensor([0, 5, 9]),
        torch.empty(0, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32)[::2],
    ):
        with pytest.raises(ValueError, match="cu_seqlens must be"):
            Layout(wrong, 9)


def test_a_layout_is_its_own() -> None:
    bounds = np.array([0, 4, 9], np.int32)
    where = layout(bounds)
    bounds[2] = 10**6
    assert where.cu_seqlens.tolist() == [0, 4, 9]


def test_far_scores_in_fp16() -> None:
    qkv = torch.full((3, 3, 1, 64), 60.0, dtype=FP16)
    assert attention(qkv, layout([0, 3])).isfinite().all()


def test_what_the_library_does_not_take_goes_the_plain_way() -> None:
    x = torch.randn(4, 3, 2, 8)
    assert not native.serves(x.double())
    assert not native.serves(x.half())
    assert not native.serves(x.transpose(0, 1))
    assert not native.serves(x.to("meta"))
    with native.only_plain():
        assert native.plain_is_asked()
        assert not native.serves(x)
    assert not native.plain_is_asked()


@pytest.mark.usefixtures("kernels")
def test_of_equal_logits_the_first_is_the_prediction() -> None:
    h, word, bias = torch.ones(3, 8), torch.zeros(50, 8), torch.zeros(50)
    bias[0] = bias[-1] = 1.0
    for dtype in (SINGLE, HALF):
        for piece, wanted in ((0, 3), (49, 0)):
            targets = torch.full((3,), piece)
            assert int(vocabulary_loss(h.to(dtype), word.to(dtype), bias, targets)[1]) == wanted


def test_equal_bits_by_any_number_of_threads() -> None:
    """Masks and attention have equal bits with any number of threads. Sums over rows have equal
    bits if the number of threads is the same.
    """
    threads, actual = torch.get_num_threads(), []
    cases = of_dropout(300, 384), of_attention([64, 65, 200], 4, 32), of_norm(300, 384)
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            actual.append([results(case, SINGLE, "C++", RATE) for case in cases])
    finally:
        torch.set_num_threads(threads)
    for other in actual[1:]:
        for one, two in zip(actual[0][:2], other[:2], strict=True):
            assert all(map(torch.equal, one, two))
    assert all(map(torch.equal, actual[1][2], actual[3][2]))
