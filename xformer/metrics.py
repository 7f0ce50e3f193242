"""Metrics of class and score tasks, by scikit-learn and scipy."""

from __future__ import annotations

import warnings

import numpy as np

CLASS = ("accuracy", "f1", "mcc")
SCORE = ("pearson", "spearman")


def classification(predictions: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, float]:
    """accuracy, f1, mcc of class numbers, (N,) each, of a task with so many `classes`.

    f1 is that of class 1 where there are two classes (GLUE's), else the mean over classes; mcc is
    Matthews' coefficient (scikit-learn's definition, also for more than two classes). Labels
    outside the classes are never right.
    """
    from sklearn.metrics import f1_score, matthews_corrcoef

    names = [1] if classes == 2 else range(classes)
    f1 = f1_score(labels, predictions, labels=names, average="macro", zero_division=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single class gives 0, as it should
        mcc = matthews_corrcoef(labels, predictions)
    return {
        "accuracy": float((predictions == labels).mean()),
        "f1": float(f1),
        "mcc": float(mcc),
    }


def regression(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """pearson and spearman correlation of scores, (N,) each; 0 where one side is constant."""
    from scipy.stats import pearsonr, spearmanr

    if len(labels) < 2:
        return dict.fromkeys(SCORE, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a constant side gives NaN, which becomes 0 below
        values = [pearsonr(predictions, labels)[0], spearmanr(predictions, labels)[0]]
    return {name: float(np.nan_to_num(v)) for name, v in zip(SCORE, values, strict=True)}


def vote(log_probabilities: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(N, K), group numbers (N,) -> votes (G, K) of the groups in order of their numbers.

    Each row votes for its likeliest class (Kao & Lee 2021, appendix G.4); the mean probability
    breaks ties.
    """
    choices = np.eye(log_probabilities.shape[1])[log_probabilities.argmax(1)]
    number, inverse = np.unique(groups, return_inverse=True)
    votes = np.zeros((len(number), log_probabilities.shape[1]))
    np.add.at(votes, inverse, choices)
    # halved, as a certain class has the mean probability 1
    return votes + mean_by_group(np.exp(log_probabilities), groups) / 2


def mean_by_group(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(N, K), group numbers (N,) -> means (G, K), groups in order of their numbers."""
    number, inverse, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    sums = np.zeros((len(number), values.shape[1]))
    np.add.at(sums, inverse, values)
    return sums / sizes[:, None]


def first_by_group(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(N,) -> (G,): the value of each group's first row."""
    return values[np.unique(groups, return_index=True)[1]]
