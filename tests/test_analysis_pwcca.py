"""Compare PWCCA, SVCCA, CCA and linear CKA with an independent derivation and closed forms.

n samples, d neurons of a network.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.linalg
import torch

from xformer.analysis import pwcca as analysis
from xformer.analysis.factor import FOLD, Factor, basis
from xformer.analysis.pwcca import chance, compare_networks, grid, pwcca, similarity

Array = np.ndarray


def networks(n: int, d: int, e: int, seed: int = 0, shared: int = 3) -> tuple[Array, Array]:
    """Two networks (n, d) and (n, e) that are not centred and share `shared` signals."""
    generator = np.random.default_rng(seed)
    signal = generator.standard_normal((n, shared))
    x = signal @ generator.standard_normal((shared, d)) + generator.standard_normal((n, d)) + 5
    y = signal @ generator.standard_normal((shared, e)) + generator.standard_normal((n, e)) - 3
    return x * generator.uniform(0.1, 4, d), y * generator.uniform(0.1, 4, e)


def by_eigenvalues(x: Array, y: Array) -> dict[str, float]:
    """All measures from covariances and a generalised eigenvalue problem, with weights in loops."""
    x, y = x - x.mean(0), y - y.mean(0)
    d, e = x.shape[1], y.shape[1]
    zero = np.zeros
    left = np.block([[zero((d, d)), x.T @ y], [y.T @ x, zero((e, e))]])
    right = np.block([[x.T @ x, zero((d, e))], [zero((e, d)), y.T @ y]])
    values, vectors = scipy.linalg.eigh(left, right)
    measures = {}
    correlations = values[::-1][: min(d, e)]
    for name, neurons, part in (("pwcca", x, slice(0, d)), ("pwcca_reversed", y, slice(d, d + e))):
        top = bottom = 0.0
        for i, rho in enumerate(correlations):
            h = neurons @ vectors[part, -1 - i]
            h = h / np.sqrt(h @ h)
            alpha = sum(abs(float(h @ neuron)) for neuron in neurons.T)
            top, bottom = top + alpha * rho, bottom + alpha
        measures[name] = top / bottom
    cross = np.linalg.norm(x.T @ y) ** 2
    cka = cross / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)
    return {**measures, "cca": float(correlations.mean()), "cka": float(cka)}


@pytest.mark.parametrize(("n", "d", "e"), [(211, 13, 7), (211, 7, 13), (99, 13, 13), (999, 1, 7)])
def test_equals_an_independent_derivation(n: int, d: int, e: int) -> None:
    x, y = networks(n, d, e)
    measured, expected = compare_networks(x, y), by_eigenvalues(x, y)
    for name, value in expected.items():
        assert abs(getattr(measured, name) - value) < 1e-8, name
    assert measured.ranks == measured.widths == (d, e)
    assert pwcca(x, y) == measured.pwcca
    assert abs(pwcca(y, x) - measured.pwcca_reversed) < 1e-12
    assert abs(measured.weights.sum() - 1) < 1e-12


def test_a_worked_example() -> None:
    """Two networks of two neurons each, chosen so that every number is known.

    The first neurons are equal up to scale. The second neuron of y is that of x plus noise of the
    same norm. So the correlations are 1 and sqrt(1/2).
    """
    n = 4
    waves = scipy.linalg.hadamard(n)[:, 1:]  # orthogonal, of mean 0 and norm 2
    a, b, c = waves.T.astype(float)
    x, y = np.stack([3 * a, b], 1), np.stack([a, b + c], 1)
    with pytest.warns(UserWarning, match="too few"):
        measured = compare_networks(x, y)
    root = math.sqrt(0.5)
    assert np.allclose(measured.correlations, [1, root])
    # alpha_1 = |<a, 3a>| / |a| = 6, alpha_2 = 2; from y: 2 and |<(b + c) / |b + c|, b + c>|
    assert measured.pwcca == pytest.approx((6 + 2 * root) / 8)
    assert measured.pwcca_reversed == pytest.approx((2 + math.sqrt(8) * root) / (2 + math.sqrt(8)))
    assert measured.cca == pytest.approx((1 + root) / 2)
    # sum of squares of X^T Y: 12^2 + 4^2; |X^T X| = |(36, 4)|, |Y^T Y| = |(4, 8)|
    assert measured.cka == pytest.approx(160 / math.hypot(36, 4) / math.hypot(4, 8))


def test_svcca_keeps_99_percent_of_the_variance() -> None:
    """The large directions differ and the small ones are equal. SVCCA drops the small ones."""
    generator = np.random.default_rng(1)
    small = generator.standard_normal((20_000, 2)) * 0.05
    x = np.concatenate([generator.standard_normal((20_000, 2)), small], 1)
    y = np.concatenate([generator.standard_normal((20_000, 2)), small], 1)
    measured = compare_networks(x, y)
    assert measured.svcca < 0.02
    assert measured.correlations[:2] == pytest.approx([1, 1], abs=1e-12)
    assert measured.cca == pytest.approx(0.5, abs=0.01)


def test_invertible_maps_of_the_second_network_change_nothing() -> None:
    x, y = networks(301, 13, 7)
    generator = np.random.default_rng(2)
    moved = y @ generator.standard_normal((7, 7)) + 11
    assert pwcca(x, moved) == pytest.approx(pwcca(x, y), abs=1e-10)
    turned = scipy.linalg.qr(generator.standard_normal((7, 7)))[0]
    assert compare_networks(x, 3 * y @ turned).cka == pytest.approx(
        compare_networks(x, y).cka, abs=1e-12
    )
    # A map of the first network keeps the correlations, but the weights come from its neurons.
    assert abs(pwcca(x @ generator.standard_normal((13, 13)), y) - pwcca(x, y)) > 1e-4


def test_identical_networks_are_1() -> None:
    x, _ = networks(301, 13, 7)
    measured = compare_networks(x, x - 2)
    for name in analysis.MEASURES:
        assert getattr(measured, name) == pytest.approx(1, abs=1e-12), name
    assert measured.correlations == pytest.approx(1, abs=1e-12)


def test_independent_gaussians_give_the_analytic_expectation() -> None:
    """For one neuron and q others, rho^2 follows Beta(q / 2, (n - 1 - q) / 2), and PWCCA is rho."""
    n, q, times = 40, 5, 400
    normal = np.random.default_rng(3).standard_normal
    similarities = [pwcca(normal((n, 1)), normal((n, q))) for _ in range(times)]
    gamma, half = math.lgamma, (n - 1) / 2
    expected = math.exp(gamma((q + 1) / 2) + gamma(half) - gamma(q / 2) - gamma(half + 0.5))
    beta = scipy.stats.beta(q / 2, (n - 1 - q) / 2)
    error = math.sqrt((beta.mean() - expected**2) / times)
    assert abs(np.mean(similarities) - expected) < 4 * error
    assert error < 0.01


@pytest.mark.parametrize(("n", "d", "e"), [(1001, 60, 90), (501, 200, 100), (201, 120, 120)])
def test_many_independent_neurons_give_wachters_mean(n: int, d: int, e: int) -> None:
    generator = np.random.default_rng(4)
    x, y = generator.standard_normal((n, d)), generator.standard_normal((n, e))
    measured = similarity(*_bases(x, y))
    assert measured.cca == pytest.approx(chance(n, d, e), abs=0.004)
    assert measured.pwcca == pytest.approx(chance(n, d, e), abs=0.01)
    squares = (measured.correlations**2).sum()
    assert squares == pytest.approx(d * e / (n - 1), rel=0.03)  # its exact expectation


def _bases(x: Array, y: Array):  # type: ignore[no-untyped-def]
    pair = analysis.factor_together(iter([(torch.from_numpy(x), torch.from_numpy(y))]))
    return pair.x, pair.y, pair.inner


def test_constant_duplicated_and_dependent_neurons_do_not_count() -> None:
    x, y = networks(301, 6, 7)
    ones = np.ones((301, 1))
    wide = np.concatenate([x, 7 * ones, x[:, :2], x @ np.ones((6, 1)), 0 * ones], 1)  # 11 columns
    measured = compare_networks(wide, np.concatenate([y, -ones], 1))
    assert measured.ranks == (6, 7)
    assert measured.widths == (11, 8)
    # The correlations are those of the independent neurons; the weights count every neuron.
    assert measured.correlations == pytest.approx(compare_networks(x, y).correlations, abs=1e-10)
    assert np.isfinite([measured.pwcca, measured.svcca, measured.cka]).all()
    # Duplicated neurons count twice, here computed in loops.
    centred = wide - wide.mean(0)
    u, v = scipy.linalg.orth(x - x.mean(0)), scipy.linalg.orth(y - y.mean(0))
    p, rho, _ = scipy.linalg.svd(u.T @ v)
    alpha = np.array([sum(abs(float(h @ neuron)) for neuron in centred.T) for h in (u @ p).T])
    assert measured.pwcca == pytest.approx(float(alpha @ rho / alpha.sum()), abs=1e-8)


def test_a_layer_norm_output_lacks_one_direction() -> None:
    x, y = networks(301, 13, 7)
    normed = torch.nn.functional.layer_norm(torch.from_numpy(x), (13,)).numpy()
    assert compare_networks(normed, y).ranks == (12, 7)
    single = torch.nn.functional.layer_norm(torch.from_numpy(x).float(), (13,)).numpy()
    assert compare_networks(single, y).ranks == (12, 7)
    assert compare_networks(single, y).pwcca == pytest.approx(
        compare_networks(normed, y).pwcca, abs=1e-5
    )


def test_fewer_samples_than_neurons_warn_with_the_number_needed() -> None:
    x, y = networks(9, 13, 7)
    with pytest.warns(UserWarning, match=r"9 tokens are too few.* 15 tokens, and ideally 80"):
        measured = compare_networks(x, y)
    assert measured.ranks == (8, 7)
    assert measured.correlations == pytest.approx(1)
    assert measured.chance == 1


def test_arrays_that_are_not_two_networks_are_refused() -> None:
    x, y = networks(31, 3, 2)
    with pytest.raises(ValueError, match="31 samples and y has 30"):
        pwcca(x, y[:30])
    with pytest.raises(ValueError, match="all neurons are constant"):
        pwcca(np.full((31, 3), 0.1), y)
    with pytest.raises(ValueError, match="not finite"):
        pwcca(np.where(x > 8, np.nan, x), y)
    with pytest.raises(ValueError, match="samples, neurons"):
        pwcca(x[:, 0], y)


# ------------------------------------------------------------------------------- variants


def test_the_variant_svcca_is_what_that_program_computes() -> None:
    """The steps of the published program are written out here: covariances, their roots, directions
    with means added, QR, no centring.
    """
    for d, e in ((5, 8), (8, 5)):
        x, y = networks(211, d, e)
        a, b = (x, y) if d <= e else (y, x)
        n = len(a)
        within = np.cov(a, rowvar=False)
        root = np.linalg.inv(scipy.linalg.sqrtm(within))
        other = np.linalg.inv(scipy.linalg.sqrtm(np.cov(b, rowvar=False)))
        between = (a - a.mean(0)).T @ (b - b.mean(0)) / (n - 1)
        u, rho, _ = scipy.linalg.svd(root @ between @ other)
        # the program leaves the signs open
        u = u * np.sign(np.take_along_axis(u, np.abs(u).argmax(0)[None], 0))
        directions = u.T @ (a - a.mean(0)).T + a.mean(0)[:, None]
        orthonormal, _ = scipy.linalg.qr(directions.T, mode="economic")
        weights = np.abs(orthonormal.T @ a).sum(1)
        expected = float((weights * rho).sum() / weights.sum())
        assert pwcca(x, y, "svcca") == pytest.approx(expected, abs=1e-8)
        assert abs(pwcca(x, y, "svcca") - pwcca(x, y)) > 1e-3


def test_the_variant_anatome_is_what_that_program_computes() -> None:
    for d, e in ((5, 8), (8, 5)):
        x, y = networks(211, d, e)
        a, b = x - x.mean(0), y - y.mean(0)
        u, s, vt = scipy.linalg.svd(a, full_matrices=False)
        left, rho, _ = scipy.linalg.svd(
            u.T @ scipy.linalg.svd(b, full_matrices=False)[0], full_matrices=False
        )
        coefficients, _ = scipy.linalg.qr(vt.T @ (left / s[:, None]), mode="economic")
        weights = np.abs(a @ coefficients).sum(0)
        expected = float((weights * rho).sum() / weights.sum())
        assert pwcca(x, y, "anatome") == pytest.approx(expected, abs=1e-8)
        assert abs(pwcca(x, y, "anatome") - pwcca(x, y)) > 1e-3


# ------------------------------------------------------------------------------- streams


def ill(n: int, d: int, condition: float, seed: int) -> Array:
    """A network (n, d) with the given condition number whose mean is far from 0."""
    generator = np.random.default_rng(seed)
    u, _ = scipy.linalg.qr(generator.standard_normal((n, d)), mode="economic")
    v, _ = scipy.linalg.qr(generator.standard_normal((d, d)))
    scales = np.geomspace(1, 1 / condition, d)
    return math.sqrt(n) * (u * scales) @ v + generator.standard_normal(d) * 3


def in_memory(x: Array, y: Array) -> float:
    """PWCCA from singular value decompositions of the whole matrices."""
    x, y = x - x.mean(0), y - y.mean(0)
    u = scipy.linalg.svd(x, full_matrices=False)[0]
    v = scipy.linalg.svd(y, full_matrices=False)[0]
    p, rho, _ = scipy.linalg.svd(u.T @ v, full_matrices=False)
    alpha = np.abs((u @ p).T @ x).sum(1)
    return float(alpha @ rho / alpha.sum())


def test_a_stream_equals_the_matrix_in_memory() -> None:
    """The condition number is 9,000, the chunks have uneven sizes, and there are many more rows
    than FOLD collects.
    """
    n, d, e = 4001, 33, 21
    x, y = ill(n, d, 9e3, 5), ill(n, e, 9e3, 6)
    y[:, :5] = x[:, :5] + 0.3 * y[:, :5]
    cuts = [0, 1, 13, 700, 701, 1999, 3999, 4001]
    assert n > 5 * FOLD * (d + e)
    pieces = [(torch.from_numpy(x[a:b]), torch.from_numpy(y[a:b])) for a, b in pairwise(cuts)]
    pair = analysis.factor_together(iter(pieces))
    expected = in_memory(x, y)
    # It differs by up to 2e-10 (see below); how much depends on the processor.
    assert similarity(pair.x, pair.y, pair.inner).pwcca == pytest.approx(expected, abs=1e-9)
    assert pair.x.rank == d
    assert pair.y.rank == e

    def stream():
        for a, b in pieces:
            yield [a, b], [b]

    cells = grid(stream)
    # Over 24 such matrices, the root mean square difference is 2.2e-10 for the grid and 1.4e-10 for
    # the pair. Changing the last bit of the numbers changes the result in memory as much.
    assert cells[0][0].pwcca == pytest.approx(expected, abs=1e-9)
    assert cells[1][0].pwcca == pytest.approx(1, abs=1e-10)
    assert cells[0][0].cka == pytest.approx(compare_networks(x, y).cka, abs=1e-10)


def test_the_factor_of_chunks_is_that_of_the_centred_matrix() -> None:
    """This also holds if the means of the chunks are far apart, so that centring matters."""
    generator = np.random.default_rng(7)
    x = generator.standard_normal((997, 7)) + 1e3 * (np.arange(997)[:, None] // 100)
    factor = Factor(7)
    for start in range(0, 997, 31):
        factor.add(torch.from_numpy(x[start : start + 31]))
    r, mean = factor.result()
    centred = x - x.mean(0)
    assert np.allclose(mean.numpy(), x.mean(0), rtol=1e-13)
    assert np.allclose((r.T @ r).numpy(), centred.T @ centred, rtol=1e-11)
    network, _ = basis(r, mean, factor.rows)
    rows = network.coordinates(torch.from_numpy(x))
    assert np.allclose((rows.T @ rows).numpy(), np.eye(7), atol=1e-9)


def test_memory_of_a_stream_does_not_grow() -> None:
    """The number of rows that wait is bounded, however many were added."""
    factor = Factor(5)
    for _ in range(200):
        factor.add(torch.randn(17, 5, generator=torch.Generator().manual_seed(1)))
        kept = sum(len(chunk) for chunk in factor._waiting)
        assert kept < FOLD * 5 + 17
    assert factor.rows + kept == 200 * 17


def test_a_constant_layer_is_named() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(2))
    with pytest.raises(ValueError, match="layer 1 of the second network: all neurons are constant"):
        grid(lambda: iter([([x], [x, torch.ones(50, 4)])]))
    with pytest.raises(ValueError, match="layer 12 of the second network: all neurons are constan"):
        analysis._compare_layers(
            lambda: iter([([x], [x, torch.ones(50, 4)])]), [[6], [6, 12]], "definition"
        )
