"""Singular values of Jacobians: linear models, whole Jacobians, an encoder, and an ESM-2."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import looking
import numpy as np
import pytest
import torch
from tiny import distance, seeded, tiny

from xformer.analysis.examples import open_examples
from xformer.analysis.jacobian import (
    JacobianConfig,
    estimate,
    jacobian_of_token,
    last_hidden_from_words,
)
from xformer.analysis.jacobian import singular_values as values_of
from xformer.convert import hf
from xformer.data.batch import Batch


def test_a_linear_model_has_its_own_matrix() -> None:
    L, E, C = 5, 7, 6
    matrix = torch.randn(L * C, L * E, generator=seeded(1), dtype=torch.float64)
    x = torch.randn(L, E, generator=seeded(2), dtype=torch.float64)

    def linear(x: torch.Tensor) -> torch.Tensor:
        return (x.flatten(1) @ matrix.T).view(-1, L, C)

    jacobian = jacobian_of_token(linear, x, 3)
    assert torch.allclose(jacobian, matrix[3 * C : 4 * C], atol=1e-13)
    assert torch.allclose(values_of(jacobian), torch.linalg.svdvals(matrix[3 * C : 4 * C]))
    # With as many steps as columns the quadrature is exact for any probe.
    whole = estimate(linear, x, 99, 3, seed=0)
    exact = torch.linalg.svdvals(matrix)
    assert float(whole["largest"]) == pytest.approx(float(exact[0]), rel=1e-8)
    assert whole["weights"].sum(1) == pytest.approx(1, abs=1e-10)


def test_the_estimate_holds_the_spectrum_within_its_error() -> None:
    L, n, probes = 8, 96, 200
    matrix = torch.randn(n, n, generator=seeded(3), dtype=torch.float64)
    x = torch.zeros(L, n // L, dtype=torch.float64)
    whole = estimate(lambda x: (x.flatten(1) @ matrix.T).view(len(x), L, -1), x, 15, probes, seed=1)
    squares = (whole["weights"] * whole["nodes"] ** 2).sum(1)
    error = float(squares.std()) / probes**0.5
    assert abs(float(squares.mean()) - float(matrix.square().sum()) / n) < 4 * error
    exact = torch.linalg.svdvals(matrix)
    near = (exact - whole["largest"]).abs().min()
    assert float(near) <= float(whole["residual"]) + 1e-9
    below = float((whole["weights"] * (whole["nodes"] < exact.median())).sum(1).mean())
    assert below == pytest.approx(0.5, abs=0.08)


def test_an_encoder_equals_differences(tmp_path: Path) -> None:
    """The derivative by the word vectors equals central differences of the encoder."""
    config = JacobianConfig(data=str(looking.store(tmp_path / "s")), out="x", threads=1)
    examples = open_examples(config, [str(looking.checkpoint(tmp_path / "c"))])
    reader = examples.models[0]
    reader.model.double().requires_grad_(False)
    batch = reader.assembler.batch(examples.rows[:1])
    function, x = last_hidden_from_words(reader, batch)
    assert torch.allclose(function(x[None])[0, 0], reader.model.encoder(_packed(batch, reader))[0])
    jacobian = jacobian_of_token(function, x, 2)
    step = 1e-5
    for place in (0, 40, x.numel() - 1):
        moved = torch.zeros(x.numel(), dtype=x.dtype)
        moved[place] = step
        ahead, behind = (function((x + sign * moved.view_as(x))[None])[0, 2] for sign in (1, -1))
        assert torch.allclose(jacobian[:, place], (ahead - behind) / (2 * step), atol=1e-7)


@pytest.mark.parametrize("length", [7, 37])
def test_an_esm_2_equals_transformers(length: int, tmp_path: Path) -> None:
    """The embeddings of an ESM-2 depend on which tokens are masked: here two of them are. A number
    of a token among all copies must not be taken for the id of the mask token."""
    longest = {"max_position_embeddings": 64, "token_dropout": True}
    theirs = tiny("EsmModel", tmp_path, **longest).double()
    made = hf.from_hf(tmp_path).checkpoint
    mask = made.config.zeroed_token
    assert mask is not None
    assert mask < 2 * length * made.config.hidden
    ids = torch.randint(4, 24, (length,), generator=seeded(7))
    ids[[1, 3]] = mask
    positions, ends = np.arange(length), np.array([0, length])
    batch = Batch(ids.numpy(), positions, np.zeros_like(positions), ends, length)
    model = made.model().double().requires_grad_(False)
    loaded: Any = SimpleNamespace(model=model, device=torch.device("cpu"))
    function, x = last_hidden_from_words(loaded, batch)

    def their_function(words: torch.Tensor) -> torch.Tensor:
        table = theirs.embeddings.word_embeddings
        hook = table.register_forward_hook(lambda *_: words[None])
        hidden = theirs(ids[None], torch.ones_like(ids[None])).last_hidden_state[0]
        hook.remove()
        return hidden

    expected = torch.autograd.functional.jacobian(their_function, x, vectorize=True)
    expected = expected.flatten(2)  # (L, C, L E)
    for token in (0, length - 1):
        ours = jacobian_of_token(function, x, token)
        assert distance(ours, expected[token]) < 1e-5  # transformers rotates in float32
    probes, steps = 3, 12
    v = torch.randn(probes, x.numel(), generator=seeded(9), dtype=torch.float64)
    v = v / v.norm(dim=1, keepdim=True)
    whole = estimate(function, x, steps, probes, seed=9)
    squares = (whole["weights"] * whole["nodes"] ** 2).sum(1)  # |J v|^2 of each probe
    assert distance(squares, (v @ expected.flatten(0, 1).T).square().sum(1)) < 1e-5
    exact = torch.linalg.svdvals(expected.flatten(0, 1))
    error = float((exact - whole["largest"]).abs().min())
    assert error <= float(whole["residual"]) + 1e-5 * float(exact[0])


def _packed(batch, reader):
    from xformer.parallel.feed import to_device

    assert isinstance(batch.tokens, np.ndarray)
    return to_device(batch, reader.device)
