"""Predict a score for each text, such as the similarity of two sentences.

N sequences, G groups of them.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.data.batch import Batch
from xformer.data.errors import BadInput
from xformer.data.store import Split
from xformer.tasks.classify import Pooled, first_by_group, known_rows, mean_by_group
from xformer.tasks.task import (
    HIGHER,
    LOWER,
    Loss,
    Model,
    Predictions,
    Table,
    check_finite,
    in_full,
    needed,
    of_rows,
    some_rows,
)
from xformer.tasks.weighted import Weighted, pearson, spearman, values_of


class Regress(Pooled):
    """One score per sequence, trained with the squared error."""

    name = "regress"
    stores = ("score",)
    metrics = {"loss": LOWER, "pearson": HIGHER, "spearman": HIGHER}
    arrays = {"outputs", "label"}
    optional_arrays = {"group"}
    counts_correct = False
    loss_in_nats = False
    loss_settings = ("standardize",)
    hf_class = "SequenceClassification"
    hf_pipeline = "text-classification"
    hf_table = "classify"
    hf_config = {"problem_type": "regression", "id2label": {"0": "score"}}

    @property
    def outputs(self) -> int:
        return 1

    def logits(self, model: Model, batch: Batch[Tensor]) -> Tensor:
        """The scores in the unit of the labels, (N, 1)."""
        mean, deviation = self.head.scale
        return mean + deviation * in_full(super().logits(model, batch))

    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        mean, deviation = self.head.scale
        scores = in_full(super().logits(model, batch)).squeeze(1)
        labels = (needed(batch.labels, "labels").to(scores.dtype) - mean) / deviation
        real = ~labels.isnan()  # filler has no label; see xformer.data.capacity
        labels = torch.where(real, labels, scores.detach())
        total = F.mse_loss(scores, labels, reduction="sum")
        return Loss(total, real.sum(), torch.zeros_like(total.detach()))

    @property
    def metric_note(self) -> str:
        mean, deviation = self.head.scale
        if self.head.scale == (0.0, 1.0):
            return ""
        return (
            f"the loss is in units of the variance of the training scores (mean {mean:.4g}, "
            f"standard deviation {deviation:.4g}): it is about 1 if each score is the mean"
        )

    def has_unlabelled(self, split: Split) -> bool:
        return bool(np.isnan(split.columns["label"]).any())

    def has_labels(self, split: Split) -> bool:
        return bool((~np.isnan(split.columns["label"])).any())

    def score(self, predictions: Predictions) -> dict[str, float]:
        """The loss is a mean over rows. If rows form groups, the correlations are over groups, with
        the mean predicted score of each group's rows."""
        outputs, labels, _ = finite_rows(predictions)
        loss = float((((outputs[:, 0] - labels) / self.head.scale[1]) ** 2).mean())
        return {"loss": loss} | values_of(self.weighted(predictions))

    def weighted(self, predictions: Predictions) -> dict[str, Weighted]:
        outputs, labels = outputs_and_labels(predictions)
        scores = {
            "pearson": lambda w: pearson(w, outputs, labels),
            "spearman": lambda w: spearman(w, outputs, labels),
        }
        return {name: Weighted(len(labels), labels, score) for name, score in scores.items()}

    def table(self, outputs: np.ndarray, split: Split, threshold: float | None = None) -> Table:
        return {"score": [str(score) for score in outputs[:, 0]]} | of_rows(split)

    def gold(self, split: Split) -> list[str] | None:
        labels = split.columns["label"]
        known = self.has_labels(split)
        return ["" if np.isnan(label) else str(label) for label in labels] if known else None


def spread(scores: np.ndarray) -> tuple[float, float]:
    """The mean and the standard deviation of scores (N,)."""
    scores = scores.astype(np.float64)
    return float(scores.mean()), float(scores.std())


def finite_rows(predictions: Predictions) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The outputs, labels and groups of the rows with labels. Raises BadInput if there are none or
    if labels are infinite, and Failure if outputs are not finite."""
    label = predictions.arrays["label"]
    outputs, labels, groups = known_rows(predictions, ~np.isnan(label))
    if len(bad := np.flatnonzero(np.isinf(label))):
        raise BadInput(
            f"the split {predictions.split!r}: {len(bad):,} labels are not finite, in the rows "
            f"{some_rows(bad)}; correct them and make the store again"
        )
    check_finite(outputs, "the predictions")
    return outputs, labels, groups


def outputs_and_labels(predictions: Predictions) -> tuple[np.ndarray, np.ndarray]:
    """The predicted scores and the labels, (N,) each; of groups if the rows form groups."""
    outputs, labels, groups = finite_rows(predictions)
    if groups is None:
        return outputs[:, 0], labels
    return mean_by_group(outputs, groups)[:, 0], first_by_group(labels, groups)
