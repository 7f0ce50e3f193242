"""Metrics of class and score tasks, by scikit-learn and scipy."""

from __future__ import annotations

import warnings

import numpy as np

CLASS = ("accuracy", "f1", "mcc")
SCORE = ("pearson", "spearman")


def classification(predictions: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, float]:
    """accuracy, f1, mcc of class numbers, (N,) each, of a task with so many `classes`.

    f1 is that of class 1 where there are two classes (GLUE's), else the mean over classes; mcc is
    Matthews' coefficient (scikit-learn's definition, also for more than two classes).
    """
    from sklearn.metrics import f1_score, matthews_corrcoef

    if classes == 2:
        f1 = f1_score(labels, predictions, average="binary", zero_division=0)
    else:
        names = range(classes)
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
