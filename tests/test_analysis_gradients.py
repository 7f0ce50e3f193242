"""Gradient confusion: one packed backward pass against one backward pass for each example."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import task
from tiny import (
    ESM,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    LONGEST,
    MODERNBERT,
    PIECES,
    random_batch,
    seeded,
)
from torch import Tensor, nn

from xformer.analysis import gradients
from xformer.analysis.gradients import Use, cosines, gram, inner_products
from xformer.data.batch import Batch
from xformer.data.errors import Failure
from xformer.model.config import ModelConfig
from xformer.tasks.task import Model

LENGTHS = [9, 5, 5, 2, LONGEST, 3]
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert, masked words": ("mlm", {}),
    "bert, classes": ("classify", {}),
    "bert, scores": ("regress", {}),
    "bert, answers": ("span", {}),
    "roberta: one segment": ("classify", {"token_types": 1, "first_position": 2}),
    "distilbert: no segments": ("classify", {"token_types": 0, "pooler": "relu"}),
    "albert: layers shared, narrow embeddings": (
        "mlm",
        {"shared_layers": True, "embedding": 11, "layers": LAYERS + 1},
    ),
    "plus: deviation, sinusoids, no pooler": (
        "classify",
        {"norm_form": "deviation", "positions": "sinusoidal", "pooler": "none"},
    ),
    "pre-LN": ("mlm", {"norm": "pre"}),
    "modernbert, masked words": ("mlm", {**MODERNBERT, "hidden": 36}),
    "modernbert, classes": ("classify", {**MODERNBERT, "hidden": 36}),
    "modernbert, answers": ("span", {**MODERNBERT, "hidden": 36}),
    "esm": ("mlm", {**ESM, "hidden": 36}),
}


def model_of(
    kind: str, changes: dict[str, Any], dtype: torch.dtype, pair_scale: float = 0.0
) -> Model:
    """A tiny model in which every weight is random."""
    shape = {
        "vocab_size": PIECES,
        "layers": LAYERS,
        "hidden": HIDDEN,
        "heads": HEADS,
        "intermediate": INNER,
        "max_positions": LONGEST,
        "layer_norm_eps": 1e-2,
    }
    config = ModelConfig(**{**shape, **changes})
    model = Model(config, task(kind, 4, pair_scale)).eval()
    generator = seeded(3)
    for name, weight in model.named_parameters():
        norm = "norm" in name and name.endswith("weight")
        weight.data = float(norm) + 0.3 * torch.randn(weight.shape, generator=generator)
    return model.to(dtype)


def batch_of(kind: str) -> Batch[Tensor]:
    batch = random_batch(LENGTHS)
    labels = batch.labels
    assert labels is not None
    if kind == "regress":
        labels = labels.float()  # as in a store
    elif kind == "span":
        labels = torch.stack([labels % 2, labels % 2], 1)  # spans that lie within every row
    return replace(batch, labels=labels)


def alone(batch: Batch[Tensor], i: int) -> Batch[Tensor]:
    """Example i in a batch of its own."""
    start, end = batch.cu_seqlens[i : i + 2].tolist()
    assert batch.places is not None
    assert batch.targets is not None
    assert batch.labels is not None
    here = (batch.places >= start) & (batch.places < end)
    return Batch(
        batch.tokens[start:end],
        batch.positions[start:end],
        batch.segments[start:end],
        torch.tensor([0, end - start], dtype=torch.int32),
        end - start,
        batch.labels[i : i + 1],
        batch.places[here] - start,
        batch.targets[here],
    )


def one_by_one(model: Model, batch: Batch[Tensor]) -> Tensor:
    """The gradients of the examples, each from its own backward pass: (N, all parameters)."""
    rows = []
    for i in range(len(batch.first)):
        model.zero_grad()
        model.loss(alone(batch, i)).total.backward()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        rows.append(torch.cat([part.flatten() for part in parts]))
    model.zero_grad()
    return torch.stack(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_one_backward_an_example(variant: str) -> None:
    kind, changes = VARIANTS[variant]
    model, batch = model_of(kind, changes, torch.float64), batch_of(kind)
    expected = one_by_one(model, batch)
    assert (expected.norm(dim=1) > 0).all()
    products = inner_products(model, batch)
    assert torch.allclose(products, expected @ expected.T, rtol=1e-10, atol=1e-10)


def test_a_pair_head_that_trains_with_masked_words() -> None:
    model = model_of("mlm", {}, torch.float64, 3.0)
    batch = replace(batch_of("mlm"), labels=torch.tensor([0, 1, 1, 0, 1, 0]))
    expected = one_by_one(model, batch)
    assert torch.allclose(inner_products(model, batch), expected @ expected.T, rtol=1e-10)


def test_single_precision_gives_the_cosines_to_1e_6() -> None:
    batch = batch_of("mlm")
    exact = one_by_one(model_of("mlm", {}, torch.float64), batch)
    wanted, norms = cosines(exact @ exact.T)
    values, value_norms = cosines(inner_products(model_of("mlm", {}, torch.float32), batch))
    assert np.abs(values - wanted).max() < 1e-6
    assert value_norms == pytest.approx(norms, rel=1e-5)
    pairs = [(i, j) for i in range(6) for j in range(i + 1, 6)]
    by_hand = [float(F.cosine_similarity(exact[i], exact[j], 0)) for i, j in pairs]
    assert wanted == pytest.approx(by_hand, abs=1e-12)


@pytest.mark.parametrize("strip", [3, 1024])
def test_both_ways_to_a_gram_matrix_are_equal(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways compute it from tokens, or form the gradients. Rows are dense or unit
    vectors.
    """
    monkeypatch.setattr(gradients, "STRIP", strip)
    monkeypatch.setattr(gradients, "FORMED", 4 * 5 * 2)  # two rows of the weight at a time
    generator = seeded(5)
    owner = torch.tensor([0, 0, 1, 1, 1, 3, 3])
    dense = [
        Use(
            torch.randn(7, 6, generator=generator, dtype=torch.float64),
            torch.randn(7, 5, generator=generator, dtype=torch.float64),
            owner,
        )
        for _ in range(2)
    ]
    single = Use(torch.tensor([1, 1, 5, 1, 0, 5, 2]), dense[0].right + 1, owner)

    def expected(uses: list[Use]) -> Tensor:
        each = torch.zeros(4, 6, 5, dtype=torch.float64)
        for use in uses:
            left = F.one_hot(use.left, 6).double() if use.left.dim() == 1 else use.left
            for row, i in enumerate(use.owner.tolist()):
                each[i] += left[row][:, None] * use.right[row]
        return each.flatten(1) @ each.flatten(1).T

    for uses in (dense[:1], dense):
        assert torch.allclose(gradients._by_tokens(uses, 4), expected(uses))
        assert torch.allclose(gradients._by_forming(uses, 4), expected(uses))
    for uses in ([single], [single, dense[1]], [dense[1], single, dense[0]]):
        assert torch.allclose(gram(uses, 4), expected(uses))


def test_long_and_short_examples_take_the_cheaper_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for way in ("_by_tokens", "_by_forming"):
        monkeypatch.setattr(gradients, way, lambda uses, count, way=way: taken.append(way))
    for rows in (4, 4000):
        gram([Use(torch.zeros(rows, 64), torch.zeros(rows, 64), torch.zeros(rows))], 8)
    assert taken == ["_by_tokens", "_by_forming"]


def test_an_example_without_a_masked_token_has_no_cosine() -> None:
    batch = batch_of("mlm")
    assert batch.places is not None
    assert batch.targets is not None
    kept = batch.places >= LENGTHS[0]  # leaves no masked token in the first example
    batch = replace(batch, places=batch.places[kept], targets=batch.targets[kept])
    values, norms = cosines(inner_products(model_of("mlm", {}, torch.float64), batch))
    assert norms[0] == 0
    assert np.isnan(values).sum() == 5
    assert np.isfinite(values).sum() == 10


def test_an_unknown_use_of_a_parameter_is_an_error() -> None:
    """The use may be a PyTorch function without a rule, or be inside an autograd function."""

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
            ctx.save_for_backward(x, scale)
            return x * scale

        @staticmethod
        def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, Tensor]:
            x, scale = ctx.saved_tensors
            return g[0] * scale, (g[0] * x).sum(0)

    class Strange(nn.Module):
        def __init__(self, inner: nn.Module, how: str):
            super().__init__()
            self.inner, self.how = inner, how
            self.scale = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return Hidden.apply(y, self.scale) if self.how == "hidden" else y / self.scale

    for how in ("hidden", "plain"):
        model, batch = model_of("mlm", {}, torch.float64), batch_of("mlm")
        layer: Any = model.encoder.layers[0]
        layer.mlp = Strange(layer.mlp, how)
        with pytest.raises(Failure, match="this analysis"):
            inner_products(model, batch)
