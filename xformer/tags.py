"""Labels of words: what a model says of every token, scores and predictions.

T tokens in a batch, K classes, S tokens of a split.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from xformer.data.batch import Assembler, Batch, ragged_arange
from xformer.data.store import UNLABELLED, Split
from xformer.data.tags import IGNORED, NO_LABEL
from xformer.model.heads import Model
from xformer.packed import Packed
from xformer.predictions import Predictions, small

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


def kept(outputs: np.ndarray, split: Split, classes: tuple[str, ...]) -> Predictions:
    """`outcome` of all tokens of a split, (S, 2), as predictions are kept: those of the words."""
    column = split.columns["labels"]
    label = np.asarray(column.values)
    words = label != IGNORED
    row = np.repeat(np.arange(split.rows), column.lengths(np.arange(split.rows)))
    arrays = {
        "row": row[words],
        "label": label[words],
        "loss": outputs[words, 1],
        "predicted": outputs[words, 0].astype(np.int64) - 1,
    }
    arrays = {name: small(values) for name, values in arrays.items()}
    return Predictions("tag", split.name, classes, arrays)


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
