"""Metrics of class and score tasks, by scikit-learn and scipy."""

from __future__ import annotations

import warnings

import numpy as np

CLASS = ("accuracy", "f1", "mcc")
SCORE = ("pearson", "spearman")


def classification(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """accuracy, f1, mcc of class numbers, (N,) each.

    f1 is that of class 1 where there are two classes (GLUE's), else the mean over classes; mcc is
    Matthews' coefficient (scikit-learn's definition, also for more than two classes).
    """
    from sklearn.metrics import f1_score, matthews_corrcoef

    average = "binary" if max(labels.max(), predictions.max()) <= 1 else "macro"
    return {
        "accuracy": float((predictions == labels).mean()),
        "f1": float(f1_score(labels, predictions, average=average, zero_division=0)),
        "mcc": float(matthews_corrcoef(labels, predictions)),
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
