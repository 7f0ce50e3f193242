"""Whole steps of a model with the C++ operations against plain ones. Also the rows of padding that
round products up to fixed sizes.

M masked tokens, E embedding size, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import task
from tiny import HEADS, HIDDEN, INNER, LONGEST, PIECES, distance, random_batch, seeded
from torch import Tensor

from xformer.data.batch import Batch
from xformer.model.config import ModelConfig
from xformer.ops import padding
from xformer.ops.native import only_plain
from xformer.ops.padding import padded_count
from xformer.tasks.mlm import MLM, MLMHead
from xformer.tasks.task import Model


def mlm_head() -> tuple[MLMHead, Tensor, Tensor, Tensor]:
    """A head with random weights, x (M, C), the word table (V, E), and targets (M,)."""
    config = ModelConfig(vocab_size=PIECES, hidden=13, heads=1, embedding=7, layer_norm_eps=1e-2)
    head = MLMHead(config)
    for i, weight in enumerate(head.parameters()):
        weight.data = torch.randn(weight.shape, generator=seeded(i))
    x = torch.randn(29, 13, generator=seeded(8)).requires_grad_()
    word = torch.randn(PIECES, 7, generator=seeded(9))
    return head, x, word.requires_grad_(), torch.randint(PIECES, (29,), generator=seeded(10))


def plain_loss(head: MLMHead, x: Tensor, word: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the number of correct predictions, from all logits and PyTorch's operations."""
    logits = head(x, word).float()
    correct = (logits.argmax(1) == targets).sum()
    return F.cross_entropy(logits, targets, reduction="sum"), correct


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_the_loss_of_training_equals_that_of_all_logits(factor: float) -> None:
    head, x, word, targets = mlm_head()
    targets[::2] = head(x, word).argmax(1)[::2]  # some are right
    wanted, wanted_correct = plain_loss(head, x, word, targets)
    loss, correct = head.loss(x, word, targets)
    assert distance(loss, wanted) <= 1e-6
    assert int(correct) == int(wanted_correct) >= 15
    given = [x, word, *head.parameters()]
    for _ in range(2):  # backward can run more than once
        for one, two in zip(
            torch.autograd.grad(factor * loss, given, retain_graph=True),
            torch.autograd.grad(factor * wanted, given, retain_graph=True),
            strict=True,
        ):
            assert distance(one, two) <= 1e-5


@pytest.mark.usefixtures("kernels")
def test_the_loss_of_training_under_autocast() -> None:
    head, x, word, targets = mlm_head()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = head.loss(x, word, targets)
        wanted, _ = plain_loss(head, x, word, targets)
    assert loss.dtype == torch.float32
    assert distance(loss, wanted) <= 1e-2
    given = [x, word, head.bias]
    for one, two in zip(
        torch.autograd.grad(loss, given), torch.autograd.grad(wanted, given), strict=True
    ):
        assert one.dtype == torch.float32
        assert distance(one, two) <= 2e-2


# --------------------------------------------------------------------------- the whole model

SHAPES: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {"norm": "pre"},
    "shared": {"shared_layers": True, "embedding": 11},
    "deviation": {"norm_form": "deviation"},
}


def model(rate: float, kind: str = "mlm", outputs: int = 0, **changes: Any) -> Model:
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
    made = Model(config, task(kind, outputs))
    for i, weight in enumerate(made.parameters()):
        weight.data = torch.randn(weight.shape, generator=seeded(i)) * 0.3
    return made.train()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_equals_the_plain_one_under_the_same_masks(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, batch = model(0.2, **SHAPES[shape]), random_batch()
    assert made.mlm_head is not None
    assert batch.places is not None
    assert batch.targets is not None
    torch.manual_seed(11)
    with monkeypatch.context() as patch:
        patch.delattr(MLMHead, "forward")  # training does not compute the logits
        loss = made.loss(batch)
    torch.manual_seed(11)
    with only_plain():
        x = made.encoder(batch, batch.places)
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


def of_rows(network: Model, batch: Batch[Tensor]) -> Tensor:
    """The numbers that evaluation keeps for each row, (N, 3)."""
    assert isinstance(network.task, MLM)
    assert batch.places is not None
    host = Batch(
        batch.tokens.numpy(),
        batch.positions.numpy(),
        batch.segments.numpy(),
        batch.cu_seqlens.numpy(),
        batch.longest,
        places=batch.places.numpy(),
    )
    x = network.encoder(batch, places=padding.pad_rows(batch.places))
    return network.task.by_row(network, x, batch, host)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("more", [1, 61])
def test_rows_that_belong_to_no_sequence_change_nothing(
    shape: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, batch, results = model(0.2, **SHAPES[shape]), random_batch(), []
    for rows in (0, more):
        monkeypatch.setattr(padding, "padded_count", lambda count, _, rows=rows: count + rows)
        torch.manual_seed(11)
        made.train()
        loss = made.loss(batch)
        gradients = torch.autograd.grad(loss.total, list(made.parameters()))
        with only_plain():
            plain = made.encoder(batch)
        with torch.no_grad():
            scored, logits = made.eval().loss(batch), made.logits(batch)
            scores, states = of_rows(made, batch), made.encoder(batch)
        results.append(
            [loss.total, loss.correct, *gradients, plain, scored.total, logits, scores, states]
        )
    for one, two in zip(*results, strict=True):
        assert one.shape == two.shape
        assert float((one - two).detach().norm()) <= 1e-5 * max(float(two.detach().norm()), 1.0)


def test_products_in_16_bit_have_few_numbers_of_rows() -> None:
    cpu = torch.device("cpu")
    assert [padded_count(n, cpu) for n in (0, 1, 1437)] == [0, 1, 1437]
    with torch.autocast("cpu", torch.bfloat16):
        assert [padded_count(n, cpu) for n in (0, 1, 16, 17, 512, 513)] == [0, 16, 16, 32, 512, 544]
        assert len({padded_count(n, cpu) for n in range(1024, 2048)}) == 17
        assert all(0 <= padded_count(n, cpu) - n <= n / 16 for n in range(256, 4096))
        assert (
            padded_count(1437, torch.device("cuda"))
            == padded_count(1437, torch.device("meta"))
            == 1437
        )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", SHAPES)
def test_some_places_come_out_as_of_all(shape: str) -> None:
    made, batch = model(0.0, **SHAPES[shape]), random_batch()
    places = torch.tensor([0, 1, 5, 5, len(batch.tokens) - 1])
    some, wanted = made.encoder(batch, places=places), made.encoder(batch)[places]
    assert distance(some, wanted) <= 1e-6
    direction = torch.randn(some.shape, generator=seeded(1))
    weights = list(made.encoder.parameters())
    for one, two in zip(
        torch.autograd.grad(some, weights, direction),
        torch.autograd.grad(wanted, weights, direction),
        strict=True,
    ):
        # the gradient of the keys' bias is only rounding
        assert float((one - two).norm()) <= 1e-5 * max(float(two.norm()), 1.0)


@pytest.mark.usefixtures("kernels")
def test_the_loss_in_training_is_that_of_scoring() -> None:
    """Scoring computes the loss of each token from the logits. Filler, with the target -100, does
    not count in either mode."""
    made, batch = model(0.0), random_batch()
    assert batch.targets is not None
    targets = batch.targets.clone()
    targets[::3] = -100
    for mode in (True, False):
        made.train(mode)
        for wanted in (batch.targets, targets):
            loss = made.loss(replace(batch, targets=wanted))
            logits, real = made.logits(batch), wanted >= 0
            assert logits.shape == (len(wanted), PIECES)
            assert distance(loss.total, F.cross_entropy(logits, wanted, reduction="sum")) <= 1e-6
            assert int(loss.count) == int(real.sum())
            assert int(loss.correct) == int((logits.argmax(1) == wanted)[real].sum())


@pytest.mark.parametrize(
    ("shape", "kind", "outputs"),
    [*((shape, "mlm", 0) for shape in SHAPES), ("post", "classify", 4), ("post", "span", 2)],
)
@pytest.mark.slow
def test_a_step_is_one_graph_for_torch_compile(shape: str, kind: str, outputs: int) -> None:
    """There is no graph break, and loss and gradients are the same under the same masks."""
    torch._dynamo.reset()  # it counts how often a line was recompiled
    made = model(0.2, kind, outputs, **SHAPES[shape])
    batch = random_batch()
    if kind == "span":
        batch = replace(batch, labels=torch.zeros(len(batch.first), 2, dtype=torch.long))
    compiled = torch.compile(lambda: made.loss(batch).total, backend="aot_eager", fullgraph=True)
    results = []
    for step in (compiled, lambda: made.loss(batch).total):
        torch.manual_seed(11)
        total = step()
        weights = list(made.parameters())
        gradients = torch.autograd.grad(total, weights, allow_unused=True)
        results.append([total, *(x for x in gradients if x is not None)])
    for one, two in zip(*results, strict=True):
        assert float((one - two).detach().norm()) <= 1e-6 * max(float(two.detach().norm()), 1.0)
