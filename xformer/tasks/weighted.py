"""Metrics as functions of how often each test example counts, for resampling.

N test examples, B resamples. `weights` (B, N) say how often a resample draws each example, and each
metric has the shape (B,). With weights of 1 it is the metric of the split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Weighted:
    """A metric of some predictions as a function of weights (B, N). Two models with equal `labels`
    were scored on the same test examples. An example has one label, or several, such as those of
    its words."""

    examples: int  # N
    labels: np.ndarray
    score: Callable[[np.ndarray], np.ndarray]

    @property
    def value(self) -> float:
        """The metric of the split: each example counts once."""
        return float(self.score(np.ones((1, self.examples)))[0])


def values_of(metrics: dict[str, Weighted]) -> dict[str, float]:
    """The metrics of the split, by name."""
    return {name: metric.value for name, metric in metrics.items()}


def average(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The mean of values (N,)."""
    return ratio(weights, values, np.ones(len(values)))


def ratio(weights: np.ndarray, part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """The sum of `part` (N,) over the sum of `whole` (N,), such as correct over masked tokens."""
    return np.asarray(weights @ part.astype(float) / (weights @ whole.astype(float)))


def macro_f1(
    weights: np.ndarray, predicted: np.ndarray, label: np.ndarray, names: Sequence[int]
) -> np.ndarray:
    """The mean F1 of the classes `names`. It is 0 for a class that is neither predicted nor a
    label."""
    right, guessed, actual = _counts(weights, predicted, label, names)
    return np.asarray((2 * right / np.maximum(guessed + actual, 1)).mean(1))


def matthews(weights: np.ndarray, predicted: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Matthews' correlation coefficient for any number of classes (Gorodkin 2004). It is 0 if all
    predictions or all labels are equal."""
    right, guessed, actual = _counts(
        weights, predicted, label, np.union1d(predicted, label).tolist()
    )
    total = weights.sum(1)
    above = right.sum(1) * total - (guessed * actual).sum(1)
    below = (total**2 - (guessed**2).sum(1)) * (total**2 - (actual**2).sum(1))
    return np.asarray(above / np.sqrt(np.where(below > 0, below, np.inf)))


def _counts(
    weights: np.ndarray, predicted: np.ndarray, label: np.ndarray, names: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By class, (B, classes) each: right predictions, predictions, labels. `names` are sorted."""
    classes = np.asarray(names)

    def count(values: np.ndarray, counted: np.ndarray | bool = True) -> np.ndarray:
        place = np.minimum(classes.searchsorted(values), len(classes) - 1)
        chosen = counted & (classes[place] == values)
        place = place[chosen]
        return np.stack([np.bincount(place, once[chosen], len(classes)) for once in weights])

    return count(label, predicted == label), count(predicted), count(label)


def pearson(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson's correlation of x and y, (N,) or (B, N) each. It is undefined if either is constant.
    The result is then 0, the chance level, as in GLUE."""
    total = weights.sum(1, keepdims=True)
    x, y = (np.asarray(z, np.float64) for z in (x, y))
    x, y = (z - z[..., :1] for z in (x, y))  # a constant must become exactly 0
    x, y = (z - (weights * z).sum(1, keepdims=True) / total for z in (x, y))
    below = (weights * x**2).sum(1) * (weights * y**2).sum(1)
    correlation = (weights * x * y).sum(1) / np.sqrt(np.where(below > 0, below, np.inf))
    return np.asarray(correlation.clip(-1, 1))  # rounding can exceed 1


def spearman(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman's correlation of x and y, (N,) each: Pearson's of their ranks in each resample."""
    return pearson(weights, _ranks(weights, x), _ranks(weights, y))


def _ranks(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The ranks of x (N,) in each resample, (B, N); ties have their mean rank."""
    values, group = np.unique(x, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(values)))
    tied = np.add.reduceat(weights[:, order], starts, axis=1)
    return np.asarray((tied.cumsum(1) - (tied - 1) / 2)[:, group])
