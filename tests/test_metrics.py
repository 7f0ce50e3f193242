"""The metrics of tasks against scikit-learn and scipy, and where they are undefined."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pytest
from helpers import resamples_as_scored
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from xformer.data.errors import BadInput, Failure
from xformer.data.store import UNLABELLED, UNSEEN
from xformer.tasks.choice import Choice
from xformer.tasks.classify import Classify
from xformer.tasks.regress import Regress
from xformer.tasks.tag import Tag
from xformer.tasks.task import Head, Predictions

Ids = Sequence[int] | np.ndarray
CASES = {
    "plain": ([0, 1, 1, 0, 2, 1, 2], [0, 1, 0, 0, 1, 1, 2]),
    "constant predictions": ([0, 0, 0, 0], [0, 1, 1, 0]),
    "constant labels": ([0, 1, 1, 0], [1, 1, 1, 1]),
    "all the same": ([1, 1, 1], [1, 1, 1]),
    "all wrong": ([0, 1, 0, 1], [1, 0, 1, 0]),
    "one row": ([1], [1]),
    "one wrong row": ([0], [1]),
    "a class that no row has": ([0, 2, 0, 2], [0, 0, 2, 2]),
    "a class that is only predicted": ([0, 2, 1], [0, 0, 1]),
    "a class that does not occur in training": ([0, 1, 0, 1, 0], [0, 1, 1, UNSEEN, UNSEEN]),
    "only classes that do not occur in training": ([0, 1], [UNSEEN, UNSEEN]),
    "rows without labels": ([0, 1, 1, 0, 0], [UNLABELLED, 1, 0, 0, UNLABELLED]),
}


def names(classes: int) -> tuple[str, ...]:
    return tuple("abcd"[:classes])


def classified(answers: Ids, labels: Ids, classes: int) -> Predictions:
    """The predictions of a classifier for some rows; `answers` are the predicted classes."""
    outputs = 3.0 * np.eye(classes, dtype=np.float32)[np.asarray(answers)]
    arrays = {"row": np.arange(len(labels)), "outputs": outputs, "label": np.asarray(labels)}
    return Predictions(Classify(Head("classify", names(classes))), "valid", arrays)


def tagged(answers: Ids, labels: Ids, classes: int) -> Predictions:
    """The predictions of a tagger for words, two in a row."""
    words = len(labels)
    arrays = {
        "row": np.arange(words) // 2,
        "label": np.asarray(labels),
        "predicted": np.asarray(answers),
        "loss": np.ones(words, np.float32),
    }
    return Predictions(Tag(Head("tag", names(classes))), "valid", arrays)


def regressed(answers: np.ndarray, labels: np.ndarray) -> Predictions:
    arrays: dict[str, np.ndarray] = {
        "row": np.arange(len(labels)),
        "outputs": answers.astype(np.float32)[:, None],
        "label": labels.astype(np.float32),
    }
    return Predictions(Regress(Head("regress")), "valid", arrays)


def of_classes(answers: np.ndarray, labels: np.ndarray, names: Sequence[int]) -> dict[str, float]:
    """What scikit-learn says. It warns where a metric is undefined."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f1 = f1_score(labels, answers, labels=names, average="macro", zero_division=0)
        mcc = matthews_corrcoef(labels, answers)
    return {"accuracy": accuracy_score(labels, answers), "f1": f1, "mcc": mcc}


def correlations(answers: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """What scipy says, and 0 where a correlation is undefined."""
    x, y = (values.astype(np.float32).astype(np.float64) for values in (answers, labels))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both = [stats.pearsonr(x, y)[0], stats.spearmanr(x, y)[0]] if len(x) > 1 else [0.0, 0.0]
    return dict(zip(("pearson", "spearman"), np.nan_to_num(both), strict=True))


def compare(predictions: Predictions, expected: dict[str, float]) -> None:
    actual = predictions.metrics()
    actual.pop("loss", None)
    assert list(actual) == list(predictions.task.metrics)[1 : 1 + len(actual)]
    assert actual == pytest.approx(expected, abs=1e-15, rel=0)
    assert all(type(value) is float for value in actual.values())
    resamples_as_scored(predictions)


@pytest.mark.parametrize("case", CASES)
def test_metrics_of_classes_are_those_of_scikit_learn(case: str) -> None:
    answers, labels = map(np.array, CASES[case])
    known = labels != UNLABELLED
    for classes in (2, 3, 4):
        if classes <= max(answers.max(), labels.max()):
            continue
        every = range(classes)
        expected = of_classes(answers[known], labels[known], [1] if classes == 2 else every)
        compare(classified(answers, labels, classes), expected)
        del expected["mcc"]
        expected["f1"] = of_classes(answers[known], labels[known], every)["f1"]
        compare(tagged(answers, labels, classes), expected)


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_metrics_of_drawn_classes_are_those_of_scikit_learn(classes: int) -> None:
    rng = np.random.default_rng(classes)
    for size in (2, 7, 300, 5000):
        labels, answers = rng.integers(classes, size=(2, size))
        answers = np.where(rng.random(size) < 0.5, labels, answers)
        labels[rng.random(size) < 0.1] = UNSEEN
        expected = of_classes(answers, labels, [1] if classes == 2 else range(classes))
        compare(classified(answers, labels, classes), expected)


RISING = np.arange(5.0)
SCORES = {
    "plain": (RISING, np.array([0.2, 1.4, 1.1, 2.6, 2.5])),
    "equal": (RISING, RISING),
    "a line": (RISING, 0.1 - 0.3 * RISING),
    "constant predictions": (np.full(5, 0.1), RISING),
    "constant labels": (RISING, np.full(5, 0.1)),
    "all constant": (np.full(5, 0.1), np.full(5, 0.3)),
    "one row": (np.ones(1), np.ones(1)),
    "two rows": (np.array([0.1, 0.7]), np.array([3.3, 1.9])),
    "ties": (np.array([1.0, 1, 2, 2, 2, 3]), np.array([0.5, 0.5, 0.5, 4, 3, 4])),
    "nearly constant": (np.array([1, 1, 1, 1 + 2**-20]), np.array([0.1, 0.2, 0.3, 0.4])),
    "far from 0": (1e4 + RISING, np.array([3.8, 0.6, 2.2, 4.4, 1.0])),
    "large and small": (1e30 * RISING, 1e-30 * np.array([1.0, 2, 2, 1, 5])),
}


@pytest.mark.parametrize("case", SCORES)
def test_correlations_are_those_of_scipy(case: str) -> None:
    compare(regressed(*SCORES[case]), correlations(*SCORES[case]))


def test_correlations_of_drawn_scores_are_those_of_scipy() -> None:
    """Labels such as those of STS-B, which have many ties and are not exact in float32."""
    rng = np.random.default_rng(0)
    for size in (3, 60, 1500):
        labels = rng.integers(26, size=size) / 5
        answers = labels + rng.normal(size=size)
        compare(regressed(answers, labels), correlations(answers, labels))
        tied = answers.round()
        compare(regressed(tied, labels), correlations(tied, labels))
        compare(regressed(7 * labels + 3, labels), correlations(7 * labels + 3, labels))


def test_correlations_refuse_what_is_not_finite() -> None:
    nan, infinite = (np.where(RISING == 3, bad, RISING) for bad in (np.nan, np.inf))
    for bad in (nan, infinite):
        with pytest.raises(Failure, match=r"the predictions are not finite in 1 of 5 rows: 3"):
            regressed(bad, RISING).metrics()
    with pytest.raises(BadInput, match=r"1 labels are not finite, in the rows 3"):
        regressed(RISING, infinite).metrics()
    with pytest.raises(BadInput, match="has no labels to score against"):
        regressed(RISING, np.full(5, np.nan)).metrics()


def test_f1_follows_the_task_not_the_split() -> None:
    """If only two of three classes occur in a split, f1 is the mean over three, not that of class
    1."""
    labels, answers = [0, 1, 1, 0], [1, 1, 1, 1]
    assert classified(answers, labels, 2).metrics()["f1"] == pytest.approx(2 / 3)
    assert classified(answers, labels, 3).metrics()["f1"] == pytest.approx(2 / 9)


def test_classes_that_training_has_not_are_wrong() -> None:
    """A row with the label UNSEEN always counts as wrong, in accuracy, f1 and Matthews'
    coefficient."""
    actual = classified([0, 1, 0, 1, 0], [0, 1, 1, UNSEEN, UNSEEN], 2).metrics()
    assert actual["accuracy"] == pytest.approx(2 / 5)
    # two rows are predicted as class 1, and two have this label
    assert actual["f1"] == pytest.approx(2 * 1 / (2 + 2))
    # by Gorodkin 2004, equation 8: 5 rows, 2 right; the answers occur 3 and 2 times, the labels 1,
    # 2 and 2
    covariance, spread = 2 * 5 - (3 * 1 + 2 * 2), (25 - 13) * (25 - 9)
    assert actual["mcc"] == pytest.approx(covariance / spread**0.5)
    three = classified([2, 1, 0], [2, UNSEEN, 0], 3).metrics()
    assert three["f1"] == pytest.approx((1 + 0 + 1) / 3)


def test_the_accuracy_of_choices_is_that_of_a_plain_loop() -> None:
    """The third question has no label."""
    outputs = np.array([0.2, 0.9, 0.1, 0.5, 0.4, 0.3, 1.0, 2.0, 3.0, 0.0, 0.1, 0.2], np.float32)
    label = np.repeat([1, 2, UNLABELLED, 2], 3)
    arrays: dict[str, np.ndarray] = {"outputs": outputs[:, None], "label": label}
    arrays |= {"row": np.arange(12), "group": np.arange(12) // 3}
    predictions = Predictions(Choice(Head("choice")), "valid", arrays)
    compare(predictions, {"accuracy": 2 / 3})
