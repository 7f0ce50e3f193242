"""Heads on the encoder, and the model that joins the two.

T tokens in the batch, N sequences, M masked tokens, C hidden size, V vocabulary, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xformer.model.encoder import Encoder, ModelConfig, Packed, activate

HeadKind = Literal["mlm", "classify", "regress"]


@dataclass(frozen=True)
class Loss:
    """A loss as its sum and what it is a sum over; `correct` counts right predictions."""

    total: Tensor  # ()
    count: int
    correct: Tensor  # (), float


class MLMHead(nn.Module):
    """Dense, activation, LayerNorm, then the word embeddings as decoder with a bias of its own."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.activation = config.activation

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        """x (M, C), word (V, C) -> logits (M, V)."""
        return F.linear(self.norm(activate(self.dense(x), self.activation)), word, self.bias)


class Model(nn.Module):
    """An encoder with the heads a checkpoint has: an MLM head, a pooler, a task head.

    `kind` says which one trains and predicts; "classify" has `outputs` classes, "regress" one
    score.
    """

    def __init__(self, config: ModelConfig, kind: HeadKind | None, outputs: int = 0,
                 pooler: bool = False):  # fmt: skip
        super().__init__()
        self.config, self.kind = config, kind
        self.encoder = Encoder(config)
        task = kind in ("classify", "regress")
        self.mlm_head = MLMHead(config) if kind == "mlm" else None
        self.pooler = nn.Linear(config.hidden, config.hidden) if task or pooler else None
        self.task_head = nn.Linear(config.hidden, outputs) if task else None

    def logits(self, batch: Packed) -> Tensor:
        """(M, V) at the masked places for MLM, else (N, outputs)."""
        x = self.encoder(batch)
        if self.mlm_head is not None:
            assert batch.places is not None
            return self.mlm_head(x[batch.places], self.encoder.embeddings.word.weight)
        if self.pooler is None or self.task_head is None:
            raise ValueError("this model has no head: give it one with Checkpoint.with_head")
        pooled = torch.tanh(self.pooler(x[batch.first]))  # (N, C)
        return self.task_head(F.dropout(pooled, self.config.dropout, self.training))

    def loss(self, batch: Packed) -> tuple[Loss, Tensor]:
        """The summed loss and the logits: cross-entropy, or the squared error of a score."""
        logits = self.logits(batch).float()
        targets = batch.targets if self.kind == "mlm" else batch.labels
        assert targets is not None
        if self.kind == "regress":
            total = F.mse_loss(logits.squeeze(1), targets, reduction="sum")
            return Loss(total, len(targets), torch.zeros((), device=logits.device)), logits
        total = F.cross_entropy(logits, targets, reduction="sum")
        correct = (logits.detach().argmax(1) == targets).sum().float()
        return Loss(total, len(targets), correct), logits
