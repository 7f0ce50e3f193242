"""MLM together with a binary classification of text pairs: next-sentence prediction (Devlin et al.
2019), sentence-order prediction (Lan et al. 2020), or whether two proteins belong to the same
family (Min et al. 2019).

N sequences, M masked tokens, C hidden size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xformer.data.batch import Assembler, Batch, Workload
from xformer.data.store import UNLABELLED, Split
from xformer.model.config import ModelConfig
from xformer.ops.padding import pad_rows
from xformer.tasks.classify import known_rows, log_softmax, losses_of
from xformer.tasks.mlm import MLM
from xformer.tasks.task import HIGHER, LOWER, Loss, Model, Pooler, Predictions, needed


class Pairs(MLM):
    """MLM with a pair head. In the loss a pair counts as much as `head.pair_scale` masked tokens.
    Evaluation keeps MLM's numbers, then the two logits of the pair head."""

    metrics = {**MLM.metrics, "pair_loss": LOWER, "pair_accuracy": HIGHER}
    arrays = MLM.arrays | {"outputs", "label"}
    named_classes = True
    width = 5

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        C, heads = config.hidden, super().modules(config)
        if config.pooler != "none":
            heads["pooler"] = Pooler(config)
        return heads | {"pair_head": nn.Linear(C, 2)}

    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        labels = needed(batch.labels, "labels of pairs")
        masked, pairs = self._both(model, batch)
        loss = self.masked_loss(model, masked, batch)
        pair_loss = F.cross_entropy(pairs, labels, reduction="sum")
        return replace(loss, total=loss.total + self.head.pair_scale * pair_loss)

    def _both(self, model: Model, batch: Batch[Tensor]) -> tuple[Tensor, Tensor]:
        """Hidden states of the masked tokens, (M, C), and logits of the pairs, (N, 2)."""
        places = pad_rows(needed(batch.places, "masked tokens"))
        x = model.encoder(batch, places=torch.cat([places, batch.first]))
        masked, first = x.split([len(places), len(batch.first)])
        config = model.config
        rate = config.before_head if config.dropout_form == "albert" else 0.0
        return masked, model.pair_head(model.drop(model.pooled(first), rate)).float()

    def tokens_read(self, config: ModelConfig, work: Workload) -> int:
        return work.masked + work.rows

    def head_flops(self, config: ModelConfig, work: Workload) -> int:
        C = config.hidden
        pooler = 2 * C * C * work.rows if config.pooler != "none" else 0
        return super().head_flops(config, work) + pooler + 2 * C * 2 * work.rows

    def evaluate(
        self, model: Model, batch: Batch[Tensor], host: Batch[np.ndarray], assembler: Assembler
    ) -> tuple[np.ndarray, Tensor]:
        masked, pairs = self._both(model, batch)
        return host.rows, torch.cat([self.by_row(model, masked, batch, host), pairs], 1)

    def as_arrays(self, outputs: np.ndarray, split: Split) -> dict[str, np.ndarray]:
        pairs = {"outputs": outputs[:, 3:], "label": split.columns["label"]}
        return super().as_arrays(outputs, split) | pairs

    def has_unlabelled(self, split: Split) -> bool:
        return bool((split.columns["label"] < 0).any())

    def metrics_on(self, split: Split) -> list[str]:
        labelled = (split.columns["label"] != UNLABELLED).any()
        return list(self.metrics if labelled else MLM.metrics)

    def score(self, predictions: Predictions) -> dict[str, float]:
        """MLM's metrics are means over masked tokens. The metrics of the pair head are means over
        rows, and are left out if no pair has a label."""
        scores = super().score(predictions)
        labelled = predictions.arrays["label"] != UNLABELLED
        if not labelled.any():
            return scores
        logits, labels, _ = known_rows(predictions, labelled)
        pairs = losses_of(log_softmax(logits), labels)
        pairs["accuracy"] = float((logits.argmax(1) == labels).mean())
        return scores | {f"pair_{name}": value for name, value in pairs.items()}


def pair_scale(weight: float, masking: float, split: Split) -> float:
    """The number of masked tokens that a pair must count as, so that the loss is the mean over
    masked tokens plus `weight` times the mean over pairs. `masking` is the share of masked tokens.

    The number is the same for the whole split. The loss therefore remains a sum, which can be added
    over micro-batches and ranks.
    """
    return weight * masking * split.tokens / split.rows
