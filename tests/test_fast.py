"""The fast paths of the CPU against plain ones: masks of dropout, attention in blocks, the loss
over the vocabulary in blocks.

T tokens in the batch, H heads, D size of a head, M masked tokens, E embedding size, V vocabulary.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import HEADS, HIDDEN, INNER, LENGTHS, LONGEST, PIECES, distance, random_batch, seeded
from torch import Tensor

from xformer.model import attention as attentions
from xformer.model import heads
from xformer.model.attention import Backend, attention, drop, drop_add, kept, layout, roomy
from xformer.model.encoder import ModelConfig
from xformer.model.heads import MLMHead, Model

# ------------------------------------------------------------------------------------ dropout


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
def test_masks_have_the_rate_asked_for(rate: float) -> None:
    torch.manual_seed(0)
    mask = kept((13, 7, 9901), rate, torch.float32)
    assert mask.shape == (13, 7, 9901)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    sigma = math.sqrt(rate * (1 - rate) / mask.numel())
    assert abs(float(1 - mask.mean()) - rate) < 5 * sigma + 2**-17
    # also each of the elements that share a word of the generator
    for i in range(4):
        part = mask.flatten()[i::4]
        assert abs(float(1 - part.mean()) - rate) < 5 * 2 * sigma + 2**-17


@pytest.mark.usefixtures("kernels")
def test_masks_are_independent_of_their_neighbours_and_of_the_last() -> None:
    torch.manual_seed(1)
    rate = 0.1
    one, two = (kept((99, 4001), rate, torch.float64) - (1 - rate) for _ in range(2))
    pairs = [(one, two)]
    flat = one.flatten()
    pairs += [(flat[:-lag], flat[lag:]) for lag in (1, 2, 3, 4, 8, 4001)]
    for a, b in pairs:
        correlation = float((a * b).mean()) / (rate * (1 - rate))
        assert abs(correlation) < 5 / math.sqrt(a.numel())


@pytest.mark.usefixtures("kernels")
def test_a_seed_fixes_the_masks() -> None:
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(kept((7, 13), 0.5, torch.float32))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rate", [1e-9, 1 - 1e-9])
def test_rates_at_the_ends_neither_wrap_nor_fail(rate: float) -> None:
    torch.manual_seed(0)
    assert abs(float(kept((9999,), rate, torch.float32).mean()) - (1 - rate)) < 1e-3


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_scales_what_it_keeps(dtype: torch.dtype) -> None:
    x = (torch.randn(99, 13, generator=seeded(0), dtype=torch.float64) + 9).to(dtype)
    x.requires_grad_()
    torch.manual_seed(0)
    y = drop(x, 0.25)
    assert y.dtype == dtype
    left = y != 0
    assert 0.6 < float(left.float().mean()) < 0.9
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert torch.allclose(y[left], x[left] / 0.75, rtol=tolerance)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient != 0, left)
    for off in (drop(x, 0.25, training=False), drop(x, 0.0)):
        assert torch.equal(off, x)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rate", [0.25, 0.0])
def test_a_residual_sum_with_dropout_equals_the_plain_one(rate: float) -> None:
    x, y, direction = (torch.randn(99, 13, generator=seeded(i)) for i in range(3))
    found = []
    for plain in (False, True):
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        torch.manual_seed(5)
        z = drop_add(a, b, rate, plain)
        found.append((z, *torch.autograd.grad(z, (a, b), direction)))
    for one, two in zip(*found, strict=True):
        assert distance(one, two) <= 1e-6
    assert rate == 0.0 or 0.1 < float((found[0][2] == 0).float().mean()) < 0.4


# ---------------------------------------------------------------------------------- attention


def attended(
    lengths: list[int], rate: float, backend: Backend, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The output and the gradient of q, k and v, with the same masks at every call."""
    made = torch.randn(sum(lengths), 3, HEADS, 5, generator=seeded(3), dtype=torch.float64)
    qkv = made.to(dtype).requires_grad_()
    torch.manual_seed(7)
    out = attention(qkv, layout(np.cumsum([0, *lengths])), rate, backend)
    direction = torch.randn(out.shape, generator=seeded(4), dtype=torch.float64).to(dtype)
    return out, torch.autograd.grad(out, qkv, direction)[0]


@pytest.mark.parametrize(
    "lengths", [[1], [2, 2, 2], [7, 1, 7, 7, 13, 1, 99], list(range(1, LONGEST + 1))]
)
@pytest.mark.parametrize(("block", "waste"), [(200, 99), (2**19, 0), (2**19, 2**30)])
def test_attention_in_blocks_equals_one_sequence_after_the_other(
    block: int, waste: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for sizes in ((1, 0), (block, waste)):
        for name, size in zip(("BLOCK", "WASTE"), sizes, strict=True):
            monkeypatch.setattr(attentions, name, size)
        found[sizes] = attended(lengths, 0.0, "explicit", torch.float32)
    for one, wanted in zip(found[block, waste], found[1, 0], strict=True):
        # for sequences of one token, the gradient of q and k is 0
        assert float((one - wanted).detach().norm()) <= 1e-5 * max(
            float(wanted.detach().norm()), 1.0
        )


def test_blocks_cover_every_sequence_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attentions, "BLOCK", 2 * HEADS * 49)
    monkeypatch.setattr(attentions, "WASTE", 0)
    lengths = [7] * 5 + [99] + [1] * 3
    blocks = layout(np.cumsum([0, *lengths])).blocks_of(HEADS)
    assert [(b.count, b.length) for b in blocks] == [(2, 7), (2, 7), (1, 7), (1, 99), (3, 1)]


def test_sequences_of_nearly_one_length_share_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attentions, "WASTE", HEADS * (64 - 49))
    where = layout(np.cumsum([0, 6, 7, 8, 30, 30]))
    first, second, third = where.blocks_of(HEADS)
    # 6 and 7 waste 13, and 8 would waste 30 with them
    assert [(b.count, b.length, b.tokens) for b in (first, second, third)] == [
        (2, 7, 13),
        (1, 8, 8),
        (2, 30, 60),
    ]
    x = torch.arange(1, 14)
    assert first.pad(x).tolist() == [[1, 2, 3, 4, 5, 6, 6], [7, 8, 9, 10, 11, 12, 13]]
    assert torch.equal(first.strip(first.pad(x)), x)
    assert second.real is None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("lengths", [LENGTHS, [9, 9, 9]])
def test_attention_in_16_bit_is_near_the_explicit_one_in_32(lengths: list[int]) -> None:
    for found, wanted in zip(
        attended(lengths, 0.1, "auto", torch.bfloat16),
        attended(lengths, 0.1, "explicit", torch.float32),
        strict=True,
    ):
        assert found.dtype == torch.bfloat16
        assert distance(found, wanted) <= 2e-2


def test_the_fast_paths_say_that_they_have_no_second_derivative() -> None:
    head, x, word, targets = mlm_head()
    with pytest.raises(RuntimeError, match="second derivative: the loss of training has none"):
        torch.autograd.grad(head.loss(x, word, targets)[0], x, create_graph=True)


# ----------------------------------------------------------------------------- the vocabulary


def mlm_head(dtype: torch.dtype = torch.float32) -> tuple[MLMHead, Tensor, Tensor, Tensor]:
    """A head with random weights; x (M, C), word (V, E), targets (M,)."""
    config = ModelConfig(vocab_size=PIECES, hidden=13, heads=1, embedding=7, layer_norm_eps=1e-2)
    head = MLMHead(config).to(dtype)
    for i, weight in enumerate(head.parameters()):
        weight.data = torch.randn(weight.shape, generator=seeded(i), dtype=torch.float64).to(dtype)
    x = torch.randn(29, 13, generator=seeded(8), dtype=torch.float64).to(dtype).requires_grad_()
    word = torch.randn(PIECES, 7, generator=seeded(9), dtype=torch.float64).to(dtype)
    targets = torch.randint(PIECES, (29,), generator=seeded(10))
    return head, x, word.requires_grad_(), targets


def plain_loss(head: MLMHead, x: Tensor, word: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(x, word).float()
    correct = (logits.argmax(1) == targets).sum()
    return F.cross_entropy(logits, targets, reduction="sum"), correct


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("most", [1, 5 * 112, 2**23])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_the_loss_in_blocks_equals_the_plain_one(
    factor: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "LOGITS", most)
    head, x, word, targets = mlm_head()
    targets[::2] = head(x, word).argmax(1)[::2]  # some are right
    wanted, wanted_correct = plain_loss(head, x, word, targets)
    found, correct = head.loss(x, word, targets)
    assert distance(found, wanted) <= 1e-6
    assert int(correct) == int(wanted_correct) >= 15
    given = [x, word, *head.parameters()]
    for one, two in zip(
        torch.autograd.grad(factor * found, given),
        torch.autograd.grad(factor * wanted, given),
        strict=True,
    ):
        assert distance(one, two) <= 1e-5


def test_the_loss_in_blocks_has_the_right_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "LOGITS", 300)
    head, x, word, targets = mlm_head(torch.float64)
    few = x[:5].detach().requires_grad_()
    # halved: the gradient of the whole loss may be taken once only
    assert torch.autograd.gradcheck(lambda a, b: head.loss(a, b, targets[:5])[0] / 2, (few, word))


def test_the_loss_in_blocks_goes_backward_once() -> None:
    head, x, word, targets = mlm_head()
    total = head.loss(x, word, targets)[0]
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="goes backward once"):
        total.backward()


@pytest.mark.usefixtures("kernels")
def test_the_loss_in_blocks_under_autocast_is_near_the_plain_one() -> None:
    head, x, word, targets = mlm_head()
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = head.loss(x, word, targets)
        wanted, _ = plain_loss(head, x, word, targets)
    assert found.dtype == torch.float32
    assert distance(found, wanted) <= 1e-2
    given = [x, word, head.bias]
    for one, two in zip(
        torch.autograd.grad(found, given), torch.autograd.grad(wanted, given), strict=True
    ):
        assert one.dtype == torch.float32
        assert distance(one, two) <= 2e-2


@pytest.mark.usefixtures("kernels")
def test_of_equal_logits_in_16_bit_the_first_is_the_prediction() -> None:
    head, x, word, targets = mlm_head()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        head.bias.zero_()
        head.bias[0] = head.bias[-1] = 1.0
        for piece, wanted in ((0, len(targets)), (len(word) - 1, 0)):
            _, correct = head.loss(x, 0 * word, torch.full_like(targets, piece))
            assert int(correct) == wanted


@pytest.mark.usefixtures("kernels")
def test_the_loss_in_blocks_bears_far_logits_and_no_rows() -> None:
    head, x, word, targets = mlm_head()
    with torch.no_grad():
        word *= 1e4  # the probability of a target is 0 in fp32
        found, _ = head.loss(x, word, targets)
        wanted, _ = plain_loss(head, x, word, targets)
        none, correct = head.loss(x[:0], word, targets[:0])
    assert math.isfinite(float(found))
    assert distance(found, wanted) <= 1e-6
    assert float(none) == float(correct) == 0.0


# --------------------------------------------------------------------------- the whole model

SHAPES: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {"norm": "pre"},
    "shared": {"shared_layers": True, "embedding": 11},
    "deviation": {"norm_form": "deviation"},
}


def model(rate: float, **changes: Any) -> Model:
    config = ModelConfig(
        vocab_size=PIECES,
        layers=2,
        hidden=HIDDEN,
        heads=HEADS,
        intermediate=INNER,
        max_positions=LONGEST,
        layer_norm_eps=1e-2,
        dropout=rate,
        attention_dropout=rate,
        **changes,
    )
    made = Model(config, "mlm")
    for i, weight in enumerate(made.parameters()):
        weight.data = torch.randn(weight.shape, generator=seeded(i)) * 0.3
    return made.train()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_equals_the_plain_one_under_the_same_masks(shape: str) -> None:
    made, batch = model(0.2, **SHAPES[shape]), random_batch()
    assert made.mlm_head is not None
    assert batch.places is not None
    assert batch.targets is not None
    torch.manual_seed(11)
    loss, logits = made.loss(batch)
    assert logits.shape == (0,)
    torch.manual_seed(11)
    x = made.encoder(batch, "explicit", batch.places)
    wanted, correct = plain_loss(
        made.mlm_head, x, made.encoder.embeddings.word.weight, batch.targets
    )
    assert distance(loss.total, wanted) <= 1e-5
    assert int(loss.correct) == int(correct)
    names, weights = zip(*made.named_parameters(), strict=True)
    for name, one, two in zip(
        names,
        torch.autograd.grad(loss.total, weights),
        torch.autograd.grad(wanted, weights),
        strict=True,
    ):
        assert float((one - two).norm()) <= 1e-5 * max(float(two.norm()), 1.0), name


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("more", [1, 61])
def test_rows_that_belong_to_no_sequence_change_nothing(
    shape: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, batch, found = model(0.2, **SHAPES[shape]), random_batch(), []
    for rows in (0, more):
        monkeypatch.setattr(attentions, "roomy", lambda count, _, rows=rows: count + rows)
        torch.manual_seed(11)
        made.train()
        loss, _ = made.loss(batch)
        gradients = torch.autograd.grad(loss.total, list(made.parameters()))
        plain = made.encoder(batch, "explicit")
        with torch.no_grad():
            scored, logits = made.eval().loss(batch)
            states = made.encoder(batch)
        found.append([loss.total, loss.correct, *gradients, plain, scored.total, logits, states])
    for one, two in zip(*found, strict=True):
        assert one.shape == two.shape
        assert float((one - two).detach().norm()) <= 1e-5 * max(float(two.detach().norm()), 1.0)


def test_products_in_16_bit_have_few_numbers_of_rows() -> None:
    cpu = torch.device("cpu")
    assert [roomy(n, cpu) for n in (0, 1, 1437)] == [0, 1, 1437]
    with torch.autocast("cpu", torch.bfloat16):
        assert [roomy(n, cpu) for n in (0, 1, 16, 17, 512, 513)] == [0, 16, 16, 32, 512, 544]
        assert len({roomy(n, cpu) for n in range(1024, 2048)}) == 17
        assert all(0 <= roomy(n, cpu) - n <= n / 16 for n in range(256, 4096))
        assert roomy(1437, torch.device("cuda")) == roomy(1437, torch.device("meta")) == 1437


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", SHAPES)
def test_some_places_come_out_as_of_all(shape: str) -> None:
    made, batch = model(0.0, **SHAPES[shape]), random_batch()
    places = torch.tensor([0, 1, 5, 5, len(batch.tokens) - 1])
    found, wanted = made.encoder(batch, places=places), made.encoder(batch)[places]
    assert distance(found, wanted) <= 1e-6
    direction = torch.randn(found.shape, generator=seeded(1))
    weights = list(made.encoder.parameters())
    for one, two in zip(
        torch.autograd.grad(found, weights, direction),
        torch.autograd.grad(wanted, weights, direction),
        strict=True,
    ):
        # nothing but rounding reaches the bias of keys
        assert float((one - two).norm()) <= 1e-5 * max(float(two.norm()), 1.0)


@pytest.mark.usefixtures("kernels")
def test_the_loss_in_training_is_that_of_scoring() -> None:
    made, batch = model(0.0), random_batch()
    training, _ = made.loss(batch)
    scoring, logits = made.eval().loss(replace(batch))
    assert logits.shape == (training.count, PIECES)
    assert distance(training.total, scoring.total) <= 1e-6
    assert int(training.correct) == int(scoring.correct)
