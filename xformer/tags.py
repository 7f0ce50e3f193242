"""Labels of words: what a model says of every token, scores and predictions.

T tokens in a batch, K classes, S tokens of a split.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from xformer import metrics
from xformer.data.batch import Assembler, Batch, ragged_arange
from xformer.data.errors import BadInput
from xformer.data.store import UNLABELLED, Split
from xformer.data.tags import IGNORED, NO_LABEL, is_bio
from xformer.model.encoder import Packed
from xformer.model.heads import Model

WIDTH = 2  # numbers kept of every token: 1 + its likeliest class (0: it was cut), its loss


def outcome(
    model: Model, packed: Packed, batch: Batch, assembler: Assembler
) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of a batch's tokens among the split's, (n,), and WIDTH numbers of each, (n, 2)."""
    logits = model.logits(replace(packed, places=None)).float()  # (T, K)
    lengths = assembler.lengths(batch.rows)[0]
    inside = ragged_arange(batch.cu_seqlens[:-1] + 1, lengths)
    labels = np.full(len(batch.tokens), IGNORED)
    if batch.places is not None:
        labels[batch.places] = batch.targets
    targets = torch.from_numpy(labels).to(logits.device)
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    losses = losses.where(logits.isfinite().all(1), torch.nan)  # also where no label is
    found = torch.stack([1.0 + logits.argmax(1), losses], 1)
    offsets = assembler.split.columns["tokens"].offsets
    numbers = torch.from_numpy(ragged_arange(offsets[batch.rows], lengths)).to(logits.device)
    return numbers, found[torch.from_numpy(inside).to(logits.device)]


def score(outputs: np.ndarray, split: Split, classes: tuple[str, ...]) -> dict[str, float]:
    """Metrics of a split, from `outcome` of all its tokens, (S, 2): loss, accuracy and f1 (the mean
    over classes) of its labelled words, and where the classes are entities' entity_f1. Words that
    truncation cut are not scored. Raises BadInput where no word has a label."""
    column = split.columns["labels"]
    labels, predicted = np.asarray(column.values), outputs[:, 0].astype(np.int64) - 1
    scored = (labels != IGNORED) & (labels != UNLABELLED) & (predicted >= 0)
    if not scored.any():
        raise BadInput(f"the split {split.name!r} has no labels to score against")
    seen = scored & (labels >= 0)
    found = {"loss": float(outputs[seen, 1].astype(np.float64).mean())} if seen.any() else {}
    found |= metrics.tagging(predicted[scored], labels[scored], len(classes))
    if is_bio(classes):
        row = np.repeat(np.arange(split.rows), column.lengths(np.arange(split.rows)))[scored]
        found["entity_f1"] = metrics.entity_f1(predicted[scored], labels[scored], row, classes)
    return found


def broken(outputs: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Which rows have a token whose outputs are not finite, (rows,), from `outcome` of all tokens,
    (S, 2), and where each row begins."""
    tokens = np.flatnonzero(~np.isfinite(outputs).all(1))
    rows = np.searchsorted(offsets, tokens, "right") - 1
    return np.isin(np.arange(len(offsets) - 1), rows)


def has_labels(split: Split) -> bool:
    """Whether any word of a split has a label, be it of a class that training has not."""
    labels = np.asarray(split.columns["labels"].values)
    return bool(((labels != IGNORED) & (labels != UNLABELLED)).any())


def words(outputs: np.ndarray, split: Split, classes: tuple[str, ...]) -> list[str]:
    """The predicted class of each word of a row, with spaces between; NO_LABEL of those that were
    cut."""
    names = np.array([NO_LABEL, *classes], object)
    column = split.columns["labels"]
    found = []
    for row in range(split.rows):
        places = column.offsets[row] + np.flatnonzero(column[row] != IGNORED)
        found.append(" ".join(names[outputs[places, 0].astype(np.int64)]))
    return found
