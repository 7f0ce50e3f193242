"""The statistics of studies, against closed forms, other libraries and published code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import f1_score, matthews_corrcoef

from xformer.study import statistics
from xformer.study.statistics import (
    detectable,
    example_variance,
    holm,
    interval,
    multibootstrap,
    nested_variances,
    pairs_for_tie,
    pairs_needed,
    rescored,
    seed_draws,
    tie_power,
    tie_test,
    two_sided,
)
from xformer.tasks.weighted import macro_f1, matthews, pearson, ratio, spearman

# What google-research/language, language/multiberts/multibootstrap.py (commit d9bdad8), returns
# with nboot=1000 and rng=0 for the predictions below. In this order: the first resample's mean
# score of either model; mean, standard deviation, 2.5 % and 97.5 % quantile of all differences; the
# share of differences that are not above 0.
REFERENCE = {
    ("accuracy", True): (0.615, 0.745, 0.155595, 0.06395945424084533, 0.02, 0.28, 0.014),
    ("accuracy", False): (0.635, 0.795, 0.15394, 0.06457395911817856, 0.025, 0.285, 0.007),
    ("f1", True): (
        0.4477074649488443, 0.616445623342175, 0.17926083441787344, 0.08007875676262786,
        0.01382538772769043, 0.32784749990746986, 0.021,
    ),
    ("f1", False): (
        0.5039408866995074, 0.7046507515473033, 0.17864104813462667, 0.07950629674735565,
        0.01987321187890907, 0.32808760715657265, 0.013,
    ),
    ("mcc", True): (
        0.1803661365750597, 0.4496773189228013, 0.3039903861621716, 0.13020151766254298,
        0.03782907679213616, 0.5489822881026705, 0.017,
    ),
    ("mcc", False): (
        0.2407208274265677, 0.5663428810367829, 0.30267071712101823, 0.13058844629558028,
        0.04784631768707141, 0.563699581863271, 0.008,
    ),
    ("spearman", True): (
        0.2950632243262799, 0.8495723188985991, 0.2663542589679371, 0.13253808808772471,
        -0.01309804298412878, 0.5228749035415503, 0.028,
    ),
}  # fmt: skip
EXAMPLES, SEEDS = 40, 5


def models(name: str) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """The predictions (S, N) of two models by formula, and the labels (N,)."""
    i, s = np.arange(EXAMPLES), np.arange(SEEDS)[:, None]
    if name == "spearman":
        score = 7 * i % 40 / 8
        return [*score + i * (3 + s) % 13], [*score + (5 * i + s) * (1 + s) % (7 + s)], score
    label = i % 3 % 2
    base = np.where((5 * i + 7 * s + i // 9) % 13 < 4 + s % 3, 1 - label, label)
    other = np.where((3 * i + 4 * s + i // 7) % 17 < 3 + s // 2, 1 - label, label)
    return [*base], [*other], label


def scorer(name: str, predicted: np.ndarray, label: np.ndarray) -> Callable[..., np.ndarray]:
    """A score as a function of weights."""
    by_name: dict[str, Callable[..., np.ndarray]] = {
        "accuracy": lambda w: ratio(w, predicted == label, np.ones(len(label))),
        "f1": lambda w: macro_f1(w, predicted, label, [1]),
        "mcc": lambda w: matthews(w, predicted, label),
        "spearman": lambda w: spearman(w, predicted, label),
    }
    return by_name[name]


@pytest.mark.parametrize(("name", "paired"), REFERENCE)
def test_the_multibootstrap_is_that_of_its_authors(name: str, paired: bool) -> None:
    """The same seeds and examples, drawn in the order in which their code draws them, give the same
    numbers."""
    rng = np.random.RandomState(0)
    drawn: list[list[np.ndarray]] = [[], [], []]
    for _ in range(1000):
        for side in range(1 if paired else 2):
            drawn[side].append(rng.choice(SEEDS, size=SEEDS, replace=True))
        rows = rng.choice(EXAMPLES, size=EXAMPLES, replace=True)
        drawn[2].append(np.bincount(rows, minlength=EXAMPLES))
    ours, theirs, weights = np.array(drawn[0]), np.array(drawn[not paired]), np.array(drawn[2])
    base, other, label = models(name)
    a, b = (np.array([scorer(name, p, label)(weights) for p in side]) for side in (base, other))
    before, after = multibootstrap(a, ours), multibootstrap(b, theirs)
    differences = multibootstrap(b - a, ours) if paired else after - before
    again = (
        before[0], after[0], differences.mean(), differences.std(ddof=1), *interval(differences),
        (differences < 1e-12).mean(),
    )  # fmt: skip
    assert again == pytest.approx(REFERENCE[name, paired], abs=1e-12)


@pytest.mark.parametrize("classes", [2, 4])
def test_weighted_scores_are_those_of_the_drawn_rows(classes: int) -> None:
    rng = np.random.default_rng(classes)
    label, predicted = rng.integers(classes, size=(2, 60))
    label[:3] = -2  # a class that does not occur in training: never right
    x, y = rng.integers(9, size=60).astype(float), rng.normal(size=60)
    weights = rng.multinomial(60, np.full(60, 1 / 60), 5)
    names = [1] if classes == 2 else list(range(classes))
    for one, w in enumerate(weights):
        rows = np.repeat(np.arange(60), w)
        options = {"labels": names, "average": "macro", "zero_division": 0}
        expected = {
            "f1": f1_score(label[rows], predicted[rows], **options),
            "mcc": matthews_corrcoef(label[rows], predicted[rows]),
            "pearson": stats.pearsonr(x[rows], y[rows])[0],
            "spearman": stats.spearmanr(x[rows], y[rows])[0],
        }
        again = {
            "f1": macro_f1(weights, predicted, label, names)[one],
            "mcc": matthews(weights, predicted, label)[one],
            "pearson": pearson(weights, x, y)[one],
            "spearman": spearman(weights, x, y)[one],
        }
        assert again == pytest.approx(expected, abs=1e-12)
    flat = np.full(60, 0.1)
    assert not pearson(weights, flat, y).any()
    assert not spearman(weights, flat, y).any()
    assert not matthews(weights, np.ones(60, int), label).any()


def test_the_multibootstrap_of_a_mean_has_the_variance_of_a_mean() -> None:
    """With scores that are sums of a seed's and an example's effect, the variance over resamples is
    that of both means. A bootstrap divides sums of squares by n, not by n - 1."""
    rng = np.random.default_rng(5)
    seeds, examples = rng.normal(0, 3, 8), rng.normal(0, 10, 200)

    def run(effect: float, seed: int = 1) -> np.ndarray:
        return rescored(lambda w: ratio(w, examples + effect, np.ones(200)), 200, seed)

    drawn = multibootstrap(np.array([run(effect) for effect in seeds]), seed_draws(8))
    expected = seeds.var() / 8 + examples.var() / 200
    assert drawn.var() == pytest.approx(expected, rel=0.1)
    assert drawn.mean() == pytest.approx(seeds.mean() + examples.mean(), abs=0.15)
    low, high = interval(drawn)
    assert high - low == pytest.approx(2 * 1.96 * expected**0.5, rel=0.1)
    assert two_sided(drawn, high) == pytest.approx(0.05, abs=0.005)
    assert two_sided(drawn, 1000.0) == 2 / 1001  # never 0
    # the mean over two tasks: examples are drawn within each task, seeds for both at once
    first = np.array([run(effect) for effect in seeds])
    other = np.array([run(-3 * effect, seed=2) for effect in seeds])
    both = multibootstrap((first + other) / 2, seed_draws(8))
    expected = seeds.var() / 8 + 2 * examples.var() / 200 / 4  # seeds: (1 - 3) / 2 = -1
    assert both.var() == pytest.approx(expected, rel=0.1)


def test_large_test_sets_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and a test set always has the same draws."""
    sizes: list[int] = []

    def score(weights: np.ndarray) -> np.ndarray:
        sizes.append(weights.size)
        assert (weights.sum(1) == 50).all()
        return np.asarray(weights @ np.arange(50.0))

    whole = rescored(score, 50, seed=3)
    monkeypatch.setattr(statistics, "AT_ONCE", 1234)
    sizes.clear()
    assert np.array_equal(rescored(score, 50, seed=3), whole)
    assert max(sizes) <= 1234
    assert sum(sizes) == whole.size * 50
    assert not np.array_equal(rescored(score, 50, seed=4), whole)


def test_nested_variances_are_those_of_the_analysis_of_variance() -> None:
    scores = np.array([[[1.0, 3.0], [4.0, 4.0]], [[7.0, 9.0], [6.0, 10.0]]])  # (2, 2, 2)
    # mean squares: within pairs, between pairs within halves, between halves
    within = ((scores - scores.mean(2, keepdims=True)) ** 2).sum() / 4
    pairs = 2 * ((scores.mean(2) - scores.mean((1, 2))[:, None]) ** 2).sum() / 2
    halves = 4 * ((scores.mean((1, 2)) - scores.mean()) ** 2).sum() / 1
    expected = [(halves - pairs) / 4, (pairs - within) / 2, within]
    assert nested_variances(scores) == pytest.approx(expected)
    assert nested_variances(np.array([1.0, 4.0])) == pytest.approx([4.5])


def test_variances_are_found_again() -> None:
    """Simulated scores of known variances: 20 pre-trainings with 3 fine-tunings of 2 orders each,
    200 times over. The estimates are unbiased."""
    rng = np.random.default_rng(0)
    again = np.array(
        [
            nested_variances(
                rng.normal(0, 2.0, (20, 1, 1))
                + rng.normal(0, 1.0, (20, 3, 1))
                + rng.normal(0, 0.5, (20, 3, 2))
            )
            for _ in range(200)
        ]
    )
    error = again.std(0, ddof=1) / 200**0.5
    assert (np.abs(again.mean(0) - [4.0, 1.0, 0.25]) < 3 * error).all()


def test_the_variance_of_test_examples() -> None:
    """Every run has the difficulty of the examples in common, and a part of its own, which is not
    counted."""
    rng = np.random.default_rng(2)
    common, own = rng.normal(0, 2.0, 400), rng.normal(0, 1.0, (10, 400))

    def drawn(run: np.ndarray) -> np.ndarray:
        return rescored(lambda w: np.asarray(w @ run / 400), 400, seed=0)

    scores = np.array([drawn(run) for run in common + own])
    assert example_variance(scores) == pytest.approx(common.var() / 400, rel=0.15)
    assert example_variance(scores[:1]) == pytest.approx((common + own[0]).var() / 400, rel=0.1)


# what statsmodels 0.15.0 gives: ttost_paired, multipletests, and TTestPower.solve_power rounded up
TOST = {0.01: 0.20747713503989712, 0.02: 0.022292411754899488, 0.05: 0.0002469291139095986}
HOLM = [0.048, 0.09, 0.005, 0.09, 0.2]
PAIRS = {0.3: 90, 0.5: 34, 1.0: 10, 2.0: 5}
PAIRS_OF_THREE = 45  # at the effect 0.5, with a level of 0.05 / 3
A = np.array([0.81, 0.78, 0.84, 0.80, 0.79, 0.83])
B = np.array([0.80, 0.79, 0.82, 0.80, 0.77, 0.84])


@pytest.mark.parametrize("margin", [0.01, 0.02, 0.05])
def test_two_one_sided_tests(margin: float) -> None:
    d, error = A - B, (A - B).std(ddof=1) / 6**0.5
    one = stats.t.sf((d.mean() + margin) / error, 5)
    other = stats.t.cdf((d.mean() - margin) / error, 5)
    assert tie_test(list(d), margin) == pytest.approx(max(one, other))
    assert tie_test(list(d), margin) == pytest.approx(TOST[margin], abs=1e-12)
    # p <= 0.05 says the same as: the 90 % interval lies inside the margins
    half = stats.t.ppf(0.95, 5) * error
    inside = abs(d.mean()) + half <= margin
    assert (tie_test(list(d), margin) <= 0.05) == inside


def test_holm_is_that_of_statsmodels() -> None:
    assert holm([0.012, 0.04, 0.001, 0.03, 0.2]) == pytest.approx(HOLM)


def test_how_many_pairs_a_claim_would_need() -> None:
    """Against statsmodels' TTestPower.solve_power, rounded up."""
    again = {effect: pairs_needed(effect) for effect in PAIRS}
    assert again == PAIRS
    assert pairs_needed(-0.5) == pairs_needed(0.5)
    assert pairs_needed(0.5, tests=3) == PAIRS_OF_THREE
    for pairs in (4, 20):  # the other way round
        assert pairs_needed(detectable(pairs) * 1.0001) == pairs
    assert pairs_needed(0.0) is None  # no number of pairs shows a difference that is not there
    assert pairs_needed(0.01) is None  # 78,491 pairs
    assert pairs_needed(1e6) == 2


def test_how_many_pairs_a_tie_would_need() -> None:
    """By simulation, and as the closed form for a known deviation, which many pairs approach."""
    rng = np.random.default_rng(1)
    samples = rng.normal(0.2, 1.0, (4000, 12))
    error = samples.std(1, ddof=1) / 12**0.5
    reach = 1.0 - stats.t.ppf(0.95, 11) * error
    assert tie_power(12, 0.2, 1.0) == pytest.approx((abs(samples.mean(1)) < reach).mean(), abs=0.02)
    large = 2 * stats.norm.cdf(0.1 * 400**0.5 - stats.norm.ppf(0.95)) - 1
    assert tie_power(400, 0.0, 0.1) == pytest.approx(large, abs=0.005)
    pairs = pairs_for_tie(0.2, 1.0)
    assert pairs is not None
    assert tie_power(pairs - 1, 0.2, 1.0) < 0.8 <= tie_power(pairs, 0.2, 1.0)
    assert pairs_for_tie(0.2, 1.0, tests=3) > pairs  # type: ignore[operator]
    assert pairs_for_tie(1.5, 1.0) is None  # the difference is larger than the margin
