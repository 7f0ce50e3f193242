"""Classify each word: part-of-speech tags, named entities, protein secondary structure.

T tokens in the batch, K classes, S tokens in a split, W words in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.data.batch import Assembler, Batch, ragged_arange
from xformer.data.store import IGNORED, NO_LABEL, UNLABELLED, UNSEEN, Split, marks_entities
from xformer.tasks.task import (
    HIGHER,
    LOWER,
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
    tensor_on,
)
from xformer.tasks.weighted import Weighted, average, macro_f1, values_of


class Tag(Task):
    """One class per word, predicted from the word's first token. Evaluation keeps two numbers for
    each token: 1 + its likeliest class (0 if the token was truncated), and its loss."""

    name = "tag"
    stores = ("tag",)
    metrics = {"loss": LOWER, "accuracy": HIGHER, "f1": HIGHER, "entity_f1": HIGHER}
    arrays = {"label", "predicted", "loss"}
    named_classes = True
    takes_probe = True
    head_reads = "places"
    hf_class = "TokenClassification"
    hf_pipeline = "token-classification"
    hf_table = "tag"
    width = 2

    @property
    def outputs(self) -> int:
        return len(self.head.labels)

    def logits(self, model: Model, batch: Batch[Tensor]) -> Tensor:
        """(M, K) for the labelled tokens, or (T, K) for all if the batch has no `places`."""
        x = model.encoder(batch, places=batch.places, depth=self.head.layer)
        x = model.states(x) if self.head.layer is None else x  # a probe reads them without a pooler
        config = model.config
        rate = config.dropout if config.dropout_form == "distilbert" else config.before_head
        logits: Tensor = model.task_head(model.drop(x, rate))
        return logits

    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        targets = needed(batch.targets, "labels of words")
        logits = in_full(self.logits(model, batch))
        total = F.cross_entropy(logits, targets, reduction="sum")
        correct = (logits.detach().argmax(1) == targets).sum().float()
        return Loss(total, n_labels(targets), correct)

    def size(self, split: Split) -> int:
        return split.tokens

    def evaluate(
        self, model: Model, batch: Batch[Tensor], host: Batch[np.ndarray], assembler: Assembler
    ) -> tuple[np.ndarray, Tensor]:
        logits = self.logits(model, replace(batch, places=None)).float()  # (T, K)
        lengths = assembler.lengths(host.rows)[0]
        inside = ragged_arange(host.cu_seqlens[:-1] + 1, lengths)
        labels = np.full(len(host.tokens), IGNORED)
        if host.places is not None:
            labels[host.places] = host.targets
        targets = tensor_on(labels, logits.device)
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        losses = losses.where(logits.isfinite().all(1), torch.nan)  # also for unlabelled tokens
        outputs = torch.stack([1.0 + logits.argmax(1), losses], 1)
        offsets = assembler.split.columns["tokens"].offsets
        places = ragged_arange(offsets[host.rows], lengths)
        return places, outputs[tensor_on(inside, logits.device)]

    def broken(self, outputs: np.ndarray, split: Split) -> np.ndarray:
        offsets = np.asarray(split.columns["tokens"].offsets)
        tokens = np.flatnonzero(~np.isfinite(outputs).all(1))
        rows = np.searchsorted(offsets, tokens, "right") - 1
        return np.isin(np.arange(split.rows), rows)

    def has_labels(self, split: Split) -> bool:
        labels = np.asarray(split.columns["labels"].values)
        return bool(((labels != IGNORED) & (labels != UNLABELLED)).any())

    def metrics_on(self, split: Split) -> list[str]:
        return [m for m in self.metrics if m != "entity_f1" or marks_entities(self.head.labels)]

    def as_arrays(self, outputs: np.ndarray, split: Split) -> dict[str, np.ndarray]:
        column = split.columns["labels"]
        label = np.asarray(column.values)
        words = label != IGNORED
        row = np.repeat(np.arange(split.rows), column.lengths(np.arange(split.rows)))
        return {
            "row": row[words],
            "label": label[words],
            "loss": outputs[words, 1],
            "predicted": outputs[words, 0].astype(np.int64) - 1,
        }

    def score(self, predictions: Predictions) -> dict[str, float]:
        """loss, accuracy and f1 (the mean over classes) over labelled words, and entity_f1 if the
        classes mark entities. Truncated words are not scored. The loss leaves out
        words whose class does not occur in training; accuracy and f1 count them as wrong."""
        row, label, predicted, losses = scored_words(predictions)
        losses = losses[label >= 0].astype(np.float64)
        scores = {"loss": float(losses.mean())} if len(losses) else {}
        scores |= values_of(self.weighted(predictions))
        if marks_entities(self.head.labels):
            scores["entity_f1"] = entity_f1(predicted, label, row, self.head.labels)
        return scores

    def weighted(self, predictions: Predictions) -> dict[str, Weighted]:
        """The examples are rows, and a row counts with all of its words."""
        row, label, predicted, _ = scored_words(predictions)
        numbers, of_word = np.unique(row, return_inverse=True)
        classes = range(len(self.head.labels))
        scores = {
            "accuracy": lambda w: average(w[:, of_word], predicted == label),
            "f1": lambda w: macro_f1(w[:, of_word], predicted, label, classes),
        }
        return {name: Weighted(len(numbers), label, score) for name, score in scores.items()}

    def table(self, outputs: np.ndarray, split: Split, threshold: float | None = None) -> Table:
        """One line per row: the predicted classes of its words, NO_LABEL for truncated words."""
        return {"labels": self._of_words(outputs[:, 0].astype(np.int64), split)} | of_rows(split)

    def gold(self, split: Split) -> list[str] | None:
        labels = np.asarray(split.columns["labels"].values, np.int64)
        # as `_of_words` counts them: unseen classes are the last, and words without a label 0
        numbers = np.where(labels == UNSEEN, len(self.head.labels) + 1, np.maximum(labels + 1, 0))
        return self._of_words(numbers, split) if self.has_labels(split) else None

    def _of_words(self, numbers: np.ndarray, split: Split) -> list[str]:
        """The class names of each row's words, joined by spaces. `numbers` (S,) holds 1 + the class
        of each token, 0 for NO_LABEL, or 1 + the number of classes for one unseen in training."""
        names = np.array([NO_LABEL, *self.head.labels, "(unseen)"], object)
        column, rows = split.columns["labels"], []
        for row in range(split.rows):
            places = column.offsets[row] + np.flatnonzero(column[row] != IGNORED)
            rows.append(" ".join(names[numbers[places]]))
        return rows


def scored_words(
    predictions: Predictions,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """row, label, predicted and loss of the words that are scored, (W,) each. Raises BadInput if
    there are none."""
    arrays = predictions.arrays
    known = (arrays["label"] != UNLABELLED) & (arrays["predicted"] >= 0)
    if not known.any():
        raise no_labels(predictions.split)
    row, label, predicted, loss = (
        arrays[name][known] for name in ("row", "label", "predicted", "loss")
    )
    return row, label, predicted, loss


def entities(labels: Sequence[str]) -> set[tuple[int, int, str]]:
    """(first word, last word, type) of every entity in a row of labels (`marks_entities`). Any
    label but O begins an entity if none of its type is open, as in the script of Tjong Kim Sang &
    De Meulder 2003."""
    spans, start, current = set(), 0, ""
    for i, label in enumerate([*labels, "O"]):
        mark, _, entity = label.partition("-")
        if current and (mark not in "IMEL" or entity != current):
            spans.add((start, i - 1, current))
            current = ""
        if mark != "O" and not current:
            start, current = i, entity
        if current and mark in "ELSU":
            spans.add((start, i, current))
            current = ""
    return spans


def entity_f1(
    predictions: np.ndarray, labels: np.ndarray, rows: np.ndarray, classes: Sequence[str]
) -> float:
    """F1 over entities. A predicted entity is correct if its first word, last word and type are.

    `predictions` and `labels` are class numbers (W,); `rows` (W,) is the row of each word.
    Neighbouring words whose labels are not among the classes count as one entity, which no
    prediction matches. If there are no entities at all, the result is 1.
    """
    names = np.array([*classes, "I-(unseen)"], object)
    named = names[predictions], names[np.where(labels < 0, len(classes), labels)]
    cuts = np.flatnonzero(np.diff(rows)) + 1
    right = both = 0
    for ours, gold in zip(*(np.split(side, cuts) for side in named), strict=True):
        ours_of_row, gold_of_row = entities(ours), entities(gold)
        right += len(ours_of_row & gold_of_row)
        both += len(ours_of_row) + len(gold_of_row)
    return 2 * right / both if both else 1.0
