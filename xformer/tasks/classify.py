"""Text classification, and the base class of all tasks that read the pooled state of a row.

N sequences, G groups of them, C hidden size, K classes.
"""

from __future__ import annotations

import shlex

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.data.batch import Batch, Workload
from xformer.data.errors import BadInput
from xformer.data.store import UNLABELLED, UNSEEN, Split
from xformer.model.config import ModelConfig
from xformer.tasks.task import (
    HIGHER,
    LOWER,
    Head,
    Loss,
    Model,
    Predictions,
    Table,
    Task,
    in_full,
    n_labels,
    needed,
    no_labels,
    of_rows,
    row_means,
    row_states,
    texts,
)
from xformer.tasks.weighted import Weighted, average, macro_f1, matthews, values_of


class Pooled(Task):
    """A task whose head reads the pooled state of a row (see `ModelConfig.pooling`), or the
    features of a HilbertCNN. A probe reads the mean over the tokens of a row."""

    reads_pooled = True
    takes_probe = True

    def dropouts(self, config: ModelConfig) -> tuple[float, float]:
        """The dropout rates before the pooler and before the head."""
        rate = config.before_head
        return rate if config.dropout_form in ("roberta", "esm") else 0.0, rate

    def logits(self, model: Model, batch: Batch[Tensor]) -> Tensor:
        """(N, outputs)"""
        before_pooler, before_head = self.dropouts(model.config)
        if model.cnn is not None:
            x = model.cnn(batch)
        elif self.head.layer is not None:
            x = row_means(model.encoder(batch, depth=self.head.layer), batch.cu_seqlens)
        else:
            x = model.pooled(row_states(model, batch, model.config.pooling), before_pooler)
        logits: Tensor = model.task_head(model.drop(x, before_head))
        return logits

    def tokens_read(self, config: ModelConfig, work: Workload) -> int:
        means = config.pooling == "mean" or self.head.layer is not None
        return work.tokens if means else work.rows

    def head_flops(self, config: ModelConfig, work: Workload) -> int:
        C = config.hidden
        return 2 * C * (self.outputs + C * self.has_pooler(config)) * work.rows

    def has_unlabelled(self, split: Split) -> bool:
        return bool((split.columns["label"] < 0).any())

    def has_labels(self, split: Split) -> bool:
        return bool((split.columns["label"] != UNLABELLED).any())

    def as_arrays(self, outputs: np.ndarray, split: Split) -> dict[str, np.ndarray]:
        names = [name for name in ("label", "group") if name in split.columns]
        return {"outputs": outputs, **{name: split.columns[name] for name in names}}


class Classify(Pooled):
    """One class per sequence."""

    name = "classify"
    stores = ("class",)
    metrics = {"loss": LOWER, "accuracy": HIGHER, "f1": HIGHER, "mcc": HIGHER}
    arrays = {"outputs", "label"}
    optional_arrays = {"group"}
    named_classes = True
    loss_settings = ("label_smoothing", "class_weights")
    hf_class = "SequenceClassification"
    hf_pipeline = "text-classification"
    hf_table = "classify"

    def __init__(self, head: Head):
        super().__init__(head)
        self._class_weights: Tensor | None = None  # (K,), on the device of the last batch

    @property
    def outputs(self) -> int:
        return len(self.head.labels)

    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        logits, labels = in_full(self.logits(model, batch)), needed(batch.labels, "labels")
        if labels.is_floating_point():
            raise BadInput("the labels are scores, but this head needs the numbers of classes")
        count, correct = n_labels(labels), (logits.detach().argmax(1) == labels).sum().float()
        if not model.training:
            return Loss(F.cross_entropy(logits, labels, reduction="sum"), count, correct)
        # The weighted loss is divided by the number of rows, not by the sum of their weights, so
        # that micro-batches and ranks can still add their sums. `balanced` weights have the mean 1.
        total = F.cross_entropy(
            logits,
            labels,
            self._weights_like(logits),
            reduction="sum",
            label_smoothing=self.head.smoothing,
        )
        return Loss(total, count, correct)

    def _weights_like(self, logits: Tensor) -> Tensor | None:
        """The class weights (K,), copied to the device of the logits once; None if all classes
        weigh the same."""
        if not self.head.class_weights:
            return None
        if self._class_weights is None or self._class_weights.device != logits.device:
            weights = torch.tensor(self.head.class_weights, dtype=torch.float32)
            self._class_weights = weights.to(logits.device)
        return self._class_weights.to(logits.dtype)

    @property
    def metric_note(self) -> str:
        names = self.head.labels
        if len(names) != 2:
            return ""
        line = f'f1 is that of the class "{names[1]}", the second label'
        other = ",".join(reversed(names))
        if (self.head.columns or {}).get("task") != "tsv" or other.count(",") > 1:
            return line
        return f"{line}; --labels {shlex.quote(other)} at preprocessing changes it"

    def prediction_note(self, predictions: Predictions) -> str:
        predicted, labels = predicted_and_labels(predictions)
        if (predicted != predicted[0]).any():
            return ""
        name, share = self.head.labels[predicted[0]], (labels == predicted[0]).mean()
        return f'every row is predicted as "{name}", the label of {share:.1%} of them'

    def label_note(self, split: Split) -> str:
        labels = split.columns["label"]
        unseen = int((labels == UNSEEN).sum())
        if not unseen:
            return ""
        return (
            f"{unseen:,} of {len(labels):,} rows have classes that do not occur in training: they "
            "count as wrong"
        )

    def score(self, predictions: Predictions) -> dict[str, float]:
        """The loss is a mean over rows. If rows form groups, the other metrics are over groups. The
        predicted class of a group is the one that most of its rows vote for (Kao & Lee 2021,
        appendix G.4)."""
        logits, labels, _ = known_rows(predictions, predictions.arrays["label"] != UNLABELLED)
        return losses_of(log_softmax(logits), labels) | values_of(self.weighted(predictions))

    def weighted(self, predictions: Predictions) -> dict[str, Weighted]:
        """With two classes, f1 is that of class 1, as in GLUE; with more, it is the mean over
        classes. A row whose label is not one of the classes counts as wrong."""
        predicted, labels = predicted_and_labels(predictions)
        names = [1] if self.outputs == 2 else range(self.outputs)
        scores = {
            "accuracy": lambda w: average(w, predicted == labels),
            "f1": lambda w: macro_f1(w, predicted, labels, names),
            "mcc": lambda w: matthews(w, predicted, labels),
        }
        return {name: Weighted(len(labels), labels, score) for name, score in scores.items()}

    def table(self, outputs: np.ndarray, split: Split, threshold: float | None = None) -> Table:
        """One line per row; one per group if the rows come from a file and form groups."""
        chances = np.exp(log_softmax(outputs))
        if "input" in split.columns and "group" in split.columns:
            return self._of_groups(chances, split)
        return self._likeliest(chances) | of_rows(split)

    def gold(self, split: Split) -> list[str] | None:
        names = {UNLABELLED: "", UNSEEN: "(unseen)"} | dict(enumerate(self.head.labels))
        labels = split.columns["label"].tolist()
        return [names[label] for label in labels] if self.has_labels(split) else None

    def _likeliest(self, chances: np.ndarray, best: np.ndarray | None = None) -> Table:
        """The names of the classes `best`, by default the likeliest of each row, and their
        probabilities."""
        best = chances.argmax(1) if best is None else best
        return {
            "label": [self.head.labels[i] for i in best],
            "probability": [f"{chance:.4f}" for chance in chances[np.arange(len(best)), best]],
        }

    def _of_groups(self, chances: np.ndarray, split: Split) -> Table:
        """One line per group: the class that its rows vote for, as in scoring, and the mean
        probability over the rows."""
        groups = split.columns["group"]
        best = vote(np.log(np.maximum(chances, 1e-30)), groups).argmax(1)
        table = self._likeliest(mean_by_group(chances, groups), best)
        _, first, counts = np.unique(groups, return_index=True, return_counts=True)
        ids = texts(split.columns["id"])
        return table | {"rows": [str(n) for n in counts], "id": [ids[row] for row in first]}


def balanced(labels: np.ndarray, classes: int) -> tuple[float, ...]:
    """Class weights from labels (N,), like "balanced" in scikit-learn. A weight is inversely
    proportional to the number of rows of its class, and the mean over all rows is 1. A class
    without rows has the weight 0."""
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    present = counts > 0
    weights = present * counts.sum() / (present.sum() * np.maximum(counts, 1))
    return tuple(float(weight) for weight in weights)


# --------------------------------------------------------------------------------- rows and groups


def known_rows(
    predictions: Predictions, known: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The outputs (in float64), labels and groups of the rows for which `known` (N,) is true.
    Raises BadInput if there are no such rows."""
    if not known.any():
        raise no_labels(predictions.split)
    outputs, group = predictions.arrays["outputs"][known], predictions.arrays.get("group")
    groups = None if group is None else group[known]
    return outputs.astype(np.float64), predictions.arrays["label"][known], groups


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """The logarithm of a softmax over the last axis, (N, K)."""
    logits = logits - logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def losses_of(log_probability: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The mean loss from log-probabilities (N, K) and labels (N,). Rows whose class does not occur
    in training are left out, because the model has no probability for their class."""
    seen = np.flatnonzero(labels != UNSEEN)
    losses = -log_probability[seen, labels[seen]]
    return {"loss": float(losses.mean())} if len(seen) else {}


def predicted_and_labels(predictions: Predictions) -> tuple[np.ndarray, np.ndarray]:
    """The predicted classes and the labels, (N,) each; of groups if the rows form groups."""
    logits, labels, groups = known_rows(predictions, predictions.arrays["label"] != UNLABELLED)
    if groups is None:
        return logits.argmax(1), labels
    return vote(log_softmax(logits), groups).argmax(1), first_by_group(labels, groups)


def vote(log_probabilities: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Log-probabilities (N, K), group numbers (N,) -> votes (G, K), ordered by group number.

    Each row votes for its likeliest class (Kao & Lee 2021, appendix G.4). To break ties, half of
    the mean probability is added.
    """
    choices = np.eye(log_probabilities.shape[1])[log_probabilities.argmax(1)]
    number, inverse = np.unique(groups, return_inverse=True)
    votes = np.zeros((len(number), log_probabilities.shape[1]))
    np.add.at(votes, inverse, choices)
    # half, because a mean probability of 1 would count as much as a vote
    return votes + mean_by_group(np.exp(log_probabilities), groups) / 2


def mean_by_group(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Values (N, K), group numbers (N,) -> means (G, K), ordered by group number."""
    number, inverse, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    sums = np.zeros((len(number), values.shape[1]))
    np.add.at(sums, inverse, values)
    return sums / sizes[:, None]


def first_by_group(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Values (N,) -> the value of each group's first row (G,), ordered by group number."""
    return values[np.unique(groups, return_index=True)[1]]
