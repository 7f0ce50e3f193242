"""The C++ kernels of the CPU against plain operations, and what happens where they cannot be made.

T tokens in the batch, H heads, D size of a head, L length of a sequence.
"""

import math
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT
from tiny import distance, seeded
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from xformer.model import native
from xformer.model.attention import attention, kept, layout
from xformer.model.encoder import ModelConfig, add_norm
from xformer.model.heads import Model

needs_kernels = pytest.mark.skipif(bool(native.missing()), reason=f"no kernels: {native.missing()}")

# ---------------------------------------------------------------------------------- attention

# one token; repeats; whole tiles of 8 and 16 and one more or less; more than a block of queries
MIXES = [[1], [2, 2, 2], [7, 1, 7, 13, 1], [15, 16, 17, 8, 9], [64, 65, 63, 128, 200]]


def attended(
    backend: str,
    lengths: list[int],
    heads: int,
    size: int,
    rate: float,
    dtype: torch.dtype,
    more: int = 0,
) -> tuple[Tensor, Tensor]:
    """The output and the gradient of q, k and v, with the same mask; `more` rows at the end."""
    shape = sum(lengths) + more, 3, heads, size
    qkv = torch.randn(shape, generator=seeded(3)).to(dtype).requires_grad_()
    torch.manual_seed(7)
    out = attention(qkv, layout(np.cumsum([0, *lengths])), rate, backend)  # type: ignore[arg-type]
    direction = torch.randn(out.shape, generator=seeded(4)).to(dtype)
    return out.detach(), torch.autograd.grad(out, qkv, direction)[0]


@needs_kernels
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(("heads", "size"), [(3, 1), (4, 5), (12, 32), (2, 48), (2, 64), (1, 130)])
@pytest.mark.parametrize("lengths", MIXES)
def test_attention_equals_the_explicit_one(
    lengths: list[int], heads: int, size: int, rate: float
) -> None:
    found = attended("native", lengths, heads, size, rate, torch.float32, more=3)
    wanted = attended("explicit", lengths, heads, size, rate, torch.float32, more=3)
    for one, two in zip(found, wanted, strict=True):
        # of sequences of one token, q and k have the gradient 0
        assert float((one - two).norm()) <= 1e-5 * max(float(two.norm()), 1.0)
        assert not one[-3:].any()


@needs_kernels
@pytest.mark.parametrize("lengths", MIXES)
def test_attention_in_16_bit_is_near_the_explicit_one_in_32(lengths: list[int]) -> None:
    found = attended("native", lengths, 4, 32, 0.1, torch.bfloat16)
    wanted = attended("explicit", lengths, 4, 32, 0.1, torch.float32)
    for one, two in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one - two).norm()) <= 1e-2 * max(float(two.norm()), 1.0)


@needs_kernels
def test_attention_bears_far_scores_and_tells_of_what_is_not_a_number() -> None:
    qkv = torch.randn(20, 3, 2, 8, generator=seeded(0))
    qkv[:, :2] *= 100  # most probabilities are 0 in fp32
    where = layout([0, 9, 20])
    with torch.no_grad():
        out = attention(qkv, where, backend="native")
        assert distance(out, attention(qkv, where, backend="explicit")) <= 1e-5
        qkv[12, 1, 1, 3] = torch.nan
        bad = attention(qkv, where, backend="native").isnan()
    assert bad[9:, 1].all()  # of its sequence and head, and of no other
    assert int(bad.sum()) == 11 * 8


@needs_kernels
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_gradient_that_is_not_a_number_stays_within_its_head(rate: float) -> None:
    qkv = torch.randn(20, 3, 2, 8, generator=seeded(0)).requires_grad_()
    out = attention(qkv, layout([0, 9, 20]), rate, "native")
    direction = torch.ones_like(out)
    direction[12, 1, 3] = torch.nan
    (found,) = torch.autograd.grad(out, qkv, direction)
    assert found[9:, :2, 1].isnan().any(2).any(1).all()  # all keys, through the row of token 12
    assert found[9:, 2, 1, 3].isnan().sum() >= 1
    assert not found[:9].isnan().any()
    assert not found[:, :, 0].isnan().any()


@needs_kernels
def test_equal_bits_by_any_number_of_threads() -> None:
    """Of attention; and of sums over rows by the same number."""
    threads, found, sums = torch.get_num_threads(), [], []
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            found.append(attended("native", MIXES[-1], 4, 32, 0.1, torch.float32))
            norm = nn.LayerNorm(384)
            x = torch.randn(300, 384, generator=seeded(1))
            torch.manual_seed(3)
            out, _ = add_norm(x, x, norm, 0.1)
            direction = torch.randn(300, 384, generator=seeded(2))
            sums.append(torch.autograd.grad(out, list(norm.parameters()), direction))
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))
    assert all(map(torch.equal, sums[1], sums[3]))


@needs_kernels
def test_no_sequences_empty_ones_and_gradients_without_memory_of_their_own() -> None:
    qkv = torch.randn(9, 3, 2, 8, generator=seeded(0)).requires_grad_()
    for ends in ([0], [0, 0]):
        out = attention(qkv, layout(ends), backend="native")
        assert not out.any()
        assert not torch.autograd.grad(out.sum(), qkv)[0].any()  # of a gradient without strides
    out = attention(qkv, layout([0, 4, 4, 9]), backend="native")
    wanted = attention(qkv, layout([0, 4, 9]), backend="explicit")
    assert distance(out, wanted) <= 1e-6
    gradients = [torch.autograd.grad(x.sum(), qkv)[0] for x in (out, wanted)]
    assert distance(*gradients) <= 1e-5


@needs_kernels
def test_what_the_kernels_do_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, where = torch.randn(4, 3, 2, 8), layout([0, 4])
    for bad in (qkv.double(), qkv.transpose(0, 1).contiguous().transpose(0, 1), qkv[:3]):
        with pytest.raises(ValueError, match="the back end 'native' needs"):
            attention(bad, where, backend="native")
    assert attention(qkv.double(), where).dtype == torch.float64  # another back end
    config = ModelConfig(vocab_size=50, hidden=8, heads=2, layers=1, intermediate=8)
    model = Model(config, "mlm").train()
    assert model.mlm_head is not None
    x, word = torch.randn(3, 8), torch.randn(50, 8)
    for target in (-100, 50):
        with pytest.raises(IndexError, match="a target is not in 0 to 49"):
            model.mlm_head.loss(x, word, torch.tensor([1, target, 2]))
    half = model.mlm_head.bfloat16()  # its bias too, which the kernel would take for fp32
    loss, _ = half.loss(x.bfloat16(), word.bfloat16(), torch.tensor([1, 49, 2]))
    assert loss.isfinite()
    with torch.device("cpu"):  # a mode of torch's that watches nothing
        assert native.serves(qkv)
    with FlopCounterMode(display=False):
        assert not native.serves(qkv)


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="-mno-avx512f is for x86-64")
def test_a_processor_without_avx512_computes_the_same(tmp_path: Path) -> None:
    narrow = script(tmp_path / "cxx", 'exec c++ "$@" -mno-avx512f')
    code = (
        "import sys, torch\n"
        "sys.path.insert(0, 'tests')\n"
        "from test_native import MIXES, attended, native\n"
        "assert not native.missing(), native.missing()\n"
        "for lengths in MIXES:\n"
        "    for size in (1, 5, 32, 48):\n"
        "        one, two = (attended(backend, lengths, 3, size, 0.1, torch.float32, 2)\n"
        "                    for backend in ('native', 'explicit'))\n"
        "        for a, b in zip(one, two):\n"
        "            assert (a - b).norm() <= 1e-5 * max(b.norm(), 1), (lengths, size)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**PLAIN, "XFORMER_CACHE": str(tmp_path / "cache"), "CXX": narrow},
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@needs_kernels
def test_a_mask_is_that_of_the_triton_kernel() -> None:
    masks = pytest.importorskip("masks", reason="the Triton kernels cannot be imported")
    ends, heads, length, seed = torch.tensor([0, 7, 20], dtype=torch.int32), 3, 13, 2**61 + 12345
    found = torch.empty(2, heads, length, length)
    native.call("attention_mask", torch.float32, found, ends, 2, heads, length, seed, 0.3)
    assert torch.equal(found.bool(), masks.attention_mask(ends, length, heads, 0.3, seed))


@needs_kernels
def test_masks_of_heads_rows_and_columns_are_independent() -> None:
    heads, length, rate = 12, 512, 0.1
    ends = torch.tensor([0, length], dtype=torch.int32)
    mask = torch.empty(heads, length, length)
    native.call("attention_mask", torch.float32, mask, ends, 1, heads, length, 5, rate)
    assert abs(float(1 - mask.mean()) - rate) < 5 * math.sqrt(rate * (1 - rate) / mask.numel())
    x = mask - (1 - rate)
    for a, b in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[:, :, 1:], x[:, :, :-1])):
        correlation = float((a * b).mean()) / (rate * (1 - rate))
        assert abs(correlation) < 5 / math.sqrt(a.numel())


# ------------------------------------------------------------------------------------ LayerNorm


@needs_kernels
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("used", ["norm", "sum", "both"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 33), (300, 384)])
def test_sum_and_norm_equal_the_plain_ones(rows: int, columns: int, used: str, rate: float) -> None:
    norm = nn.LayerNorm(columns, eps=1e-3)
    for i, weight in enumerate(norm.parameters()):
        weight.data = torch.randn(columns, generator=seeded(i))
    found = []
    for plain in (False, True):
        x, y = (torch.randn(rows, columns, generator=seeded(i)).requires_grad_() for i in (5, 6))
        torch.manual_seed(9)
        out, z = add_norm(x, y, norm, rate, plain)
        one, two = (torch.randn(rows, columns, generator=seeded(i)) for i in (7, 8))
        total = (one * out).sum() * (used != "sum") + (two * z).sum() * (used != "norm")
        gradients = torch.autograd.grad(total, [x, y, *norm.parameters()])
        found.append([out, z, *gradients])
    for a, b in zip(*found, strict=True):
        assert float((a - b).detach().norm()) <= 1e-5 * max(float(b.detach().norm()), 1.0)


@needs_kernels
def test_sum_and_norm_of_16_bit_are_near_those_of_32() -> None:
    norm, found = nn.LayerNorm(384), []
    for dtype in (torch.bfloat16, torch.float32):
        x, y = (torch.randn(99, 384, generator=seeded(i)) for i in (5, 6))
        given = x.requires_grad_(), y.to(dtype).requires_grad_()
        torch.manual_seed(9)
        out, _ = add_norm(*given, norm, 0.1)
        direction = torch.randn(99, 384, generator=seeded(7))
        found.append([out, *torch.autograd.grad(out, given, direction)])
    assert found[0][2].dtype == torch.bfloat16
    for a, b in zip(*found, strict=True):
        assert distance(a, b) <= 1e-2


@needs_kernels
def test_there_is_no_second_derivative() -> None:
    qkv = torch.randn(4, 3, 2, 3, generator=seeded(0)).requires_grad_()
    out = attention(qkv, layout([0, 4]), 0.0, "native")
    with pytest.raises(RuntimeError, match="second derivative: the back end 'native' has none"):
        torch.autograd.grad(out.sum(), qkv, create_graph=True)
    x = torch.randn(4, 6, generator=seeded(0)).requires_grad_()
    normed, _ = add_norm(x, x, nn.LayerNorm(6), 0.0)
    with pytest.raises(RuntimeError, match="second derivative: the native LayerNorm has none"):
        torch.autograd.grad(normed.sum(), x, create_graph=True)


@needs_kernels
def test_the_number_of_threads_changes_no_mask() -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            found.append(kept((300, 400), 0.2, torch.float32))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# ------------------------------------------------------------------------------ how they are made


PLAIN = {k: v for k, v in os.environ.items() if k not in ("XFORMER_NATIVE", "CXX")}


def asked(cache: Path, **environment: str) -> str:
    """What a process of its own says of the kernels, with what they come to where they are."""
    code = (
        "import torch\n"
        "from xformer.model import native\n"
        "print(native.missing(), native.note(torch.device('cpu')), sep='|')\n"
        "x = torch.empty(2, 3)\n"
        "if not native.missing():\n"
        "    native.call('fill_mask', x.dtype, x, 2, 3, 0, 0.0)\n"
        "    assert x.sum() == 6\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**PLAIN, "XFORMER_CACHE": str(cache), **environment},
        timeout=240,
    )
    assert ended.stderr == ""
    return ended.stdout.strip()


def script(path: Path, text: str) -> str:
    """An executable that stands for the compiler."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@needs_kernels
def test_they_are_compiled_once(tmp_path: Path) -> None:
    cache, count = tmp_path / "cache", tmp_path / "count"
    counting = script(tmp_path / "cxx", f'echo "$*" >> {count}\nexec c++ "$@"')
    for _ in range(2):
        assert asked(cache, CXX=counting) == "|"
    made = [line for line in count.read_text().splitlines() if "--version" not in line]
    assert len(made) == 2  # compiled, linked
    assert len(list((cache / "native").iterdir())) == 1  # nothing is left beside it
    assert asked(cache, CXX="c++") == "|"  # another compiler has its own
    assert asked(cache, CXX="  ") == "|"  # no compiler is named: the usual one
    assert len(list((cache / "native").iterdir())) == 2


def test_without_them_a_line_says_why(tmp_path: Path) -> None:
    longer = "steps take up to three fifths longer"
    why = "no C++ compiler '/nowhere/c++'"
    assert asked(tmp_path / "a", CXX="/nowhere/c++") == f"{why}|no native kernels ({why}): {longer}"
    broken = script(
        tmp_path / "cxx", '[ "$1" = --version ] && exit 0; echo "error: no" >&2; exit 1'
    )
    why = f"{broken} failed: error: no"
    assert asked(tmp_path / "b", CXX=broken) == f"{why}|no native kernels ({why}): {longer}"
    assert not list((tmp_path / "b" / "native").iterdir())
    (tmp_path / "file").write_text("")
    assert "Not a directory" in asked(tmp_path / "file", CXX="true")
    assert asked(tmp_path / "c", XFORMER_NATIVE="0") == "XFORMER_NATIVE=0|"
