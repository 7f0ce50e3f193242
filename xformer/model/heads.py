"""Heads on the encoder, and the model that joins the two.

T tokens in the batch, N sequences, M masked tokens, C hidden size, V vocabulary, K classes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xformer.model.encoder import Encoder, ModelConfig, Packed, activate, layer_norm
from xformer.model.hilbert import FEATURES, HilbertCNN

HeadKind = Literal["mlm", "classify", "regress", "span"]


@dataclass(frozen=True)
class Loss:
    """A loss as its sum and what it is a sum over; `correct` counts right predictions."""

    total: Tensor  # ()
    count: int
    correct: Tensor  # (), float
    pairs: Tensor | None = None  # (N, 2) logits of the pair head, where it trains too

    def nothing(self) -> Loss:
        """The same pass, counting nothing and with a gradient of zero."""
        return Loss(0.0 * self.total, 0, 0.0 * self.correct)


class MLMHead(nn.Module):
    """Dense, activation, LayerNorm, then the word embeddings as decoder with a bias of its own."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.width)
        self.norm = layer_norm(config, config.width)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.activation = config.activation

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        """x (M, C), word (V, E) -> logits (M, V)."""
        return F.linear(self.norm(activate(self.dense(x), self.activation)), word, self.bias)


class Model(nn.Module):
    """An encoder with the heads a checkpoint has; or a HilbertCNN, `cnn`, in place of the encoder.

    `kind` says which one trains and predicts: "mlm"; "classify" (`outputs` classes) and "regress"
    (one score) on the pooled first token; "span" (start and end of an answer) on every token.
    `parts` are further ones kept beside it: "pooler", and "pair_head", which tells of two texts
    whether the second follows the first (Devlin et al. 2019: next sentence; Lan et al. 2020: their
    order; Min et al. 2019: whether they are of one family). With a `pair_scale` it trains with an
    MLM head: a pair counts as much as so many masked tokens.
    """

    def __init__(self, config: ModelConfig, kind: HeadKind | None, outputs: int = 0,
                 parts: Collection[str] = (), pair_scale: float = 0.0):  # fmt: skip
        super().__init__()
        self.config, self.kind, self.pair_scale = config, kind, pair_scale
        self.cnn = HilbertCNN(config) if config.architecture == "hilbert_cnn" else None
        if self.cnn is None:
            self.encoder = Encoder(config)
        C = config.hidden if self.cnn is None else FEATURES
        task = kind in ("classify", "regress")
        pooled = task and self.cnn is None
        self.mlm_head = MLMHead(config) if kind == "mlm" else None
        pools = (pooled or bool(parts)) and config.pooler != "none"
        self.pooler = nn.Linear(C, C) if pools else None
        self.pair_head = nn.Linear(C, 2) if "pair_head" in parts else None
        self.task_head = nn.Linear(C, outputs) if task or kind == "span" else None

    def pooled(self, x: Tensor, batch: Packed) -> Tensor:
        """Hidden states (T, C) -> the pooled first token of each sequence, (N, C)."""
        if self.config.pooler == "none":
            return x[batch.first]
        if self.pooler is None:
            raise ValueError("this model has no pooler: give it one with Checkpoint.with_head")
        y = self.pooler(x[batch.first])
        return torch.relu(y) if self.config.pooler == "relu" else torch.tanh(y)

    def logits(self, batch: Packed) -> Tensor:
        """(M, V) at the masked places for MLM, (T, 2) for spans, else (N, outputs)."""
        x = self.encoder(batch) if self.cnn is None else self.cnn(batch)
        if self.mlm_head is not None:
            assert batch.places is not None
            return self.mlm_head(x[batch.places], self.encoder.embeddings.word.weight)
        if self.task_head is None:
            raise ValueError("this model has no head: give it one with Checkpoint.with_head")
        if self.kind == "span":
            return self.task_head(x)
        pooled = self.pooled(x, batch) if self.cnn is None else x  # (N, C)
        return self.task_head(F.dropout(pooled, self.config.before_head, self.training))

    def loss(self, batch: Packed) -> tuple[Loss, Tensor]:
        """The summed loss and the logits: cross-entropy (of a span the mean of start and end), or
        the squared error of a score."""
        if self.pair_scale:
            return self._joint_loss(batch)
        logits = self.logits(batch).float()
        targets = batch.targets if self.kind == "mlm" else batch.labels
        assert targets is not None
        if self.kind == "regress":
            total = F.mse_loss(logits.squeeze(1), targets, reduction="sum")
            return Loss(total, len(targets), torch.zeros((), device=logits.device)), logits
        if self.kind == "span":
            rows = padded(logits, batch)  # (N, L, 2)
            total = F.cross_entropy(rows, targets, reduction="sum") / 2
            correct = (rows.detach().argmax(1) == targets).all(1).sum().float()
            return Loss(total, len(targets), correct), logits
        total = F.cross_entropy(logits, targets, reduction="sum")
        correct = (logits.detach().argmax(1) == targets).sum().float()
        return Loss(total, len(targets), correct), logits

    def _joint_loss(self, batch: Packed) -> tuple[Loss, Tensor]:
        """Of masked tokens and pairs, with the logits of the tokens."""
        assert self.mlm_head is not None
        assert self.pair_head is not None
        assert batch.places is not None
        assert batch.targets is not None
        assert batch.labels is not None
        x = self.encoder(batch)
        logits = self.mlm_head(x[batch.places], self.encoder.embeddings.word.weight).float()
        pooled = F.dropout(self.pooled(x, batch), self.config.before_head, self.training)
        pairs = self.pair_head(pooled).float()
        total = F.cross_entropy(logits, batch.targets, reduction="sum")
        total = total + self.pair_scale * F.cross_entropy(pairs, batch.labels, reduction="sum")
        correct = (logits.detach().argmax(1) == batch.targets).sum().float()
        return Loss(total, len(batch.targets), correct, pairs), logits


def padded(values: Tensor, batch: Packed) -> Tensor:
    """Packed values (T, K) -> (N, L, K), with -inf behind the end of a sequence."""
    ends = batch.layout.cu_seqlens
    sizes = ends.diff()  # (N,)
    row = torch.repeat_interleave(torch.arange(len(sizes), device=values.device), sizes)
    out = values.new_full((len(sizes), batch.layout.max_length, values.size(1)), -torch.inf)
    return out.index_put((row, batch.positions), values)
