"""Heads on the encoder, and the model that joins the two.

T tokens in the batch, N sequences, M masked tokens, C hidden size, V vocabulary, K classes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xformer.model.config import ModelConfig
from xformer.model.encoder import Encoder, Norm, activate
from xformer.model.hilbert import FEATURES, HilbertCNN
from xformer.ops.dropout import dropout
from xformer.ops.vocabulary_loss import vocabulary_loss
from xformer.packed import Packed, with_room

HeadKind = Literal["mlm", "classify", "regress", "span", "tag"]


@dataclass(frozen=True)
class Loss:
    """A loss as its sum and what it is a sum over; `correct` counts right predictions."""

    total: Tensor  # ()
    count: int
    correct: Tensor  # (), float
    pairs: Tensor | None = None  # (N, 2) logits of the pair head, where it trains too
    # (M, 2) of masked tokens or (N, 2) of spans, in evaluation: the loss, and 1 where it is right
    each: Tensor | None = None


class MLMHead(nn.Module):
    """Dense, activation, LayerNorm, then the word embeddings as decoder with a bias of its own."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.width)
        self.norm = Norm(config, config.width)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.activation = config.activation

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        """x (M, C), word (V, E) -> logits (M, V)."""
        return F.linear(self.states(x), word, self.bias)

    def states(self, x: Tensor) -> Tensor:
        """x (M, C) -> what meets the word embeddings, (M, E)."""
        return self.norm(activate(self.dense(x), self.activation))

    def loss(self, x: Tensor, word: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """x (M, C), word (V, E), targets (M,) -> the summed cross-entropy and how many are right.
        Rows of x after those of the targets do not count."""
        return vocabulary_loss(self.states(x), word, self.bias, targets)


class Model(nn.Module):
    """An encoder with the heads a checkpoint has; or a HilbertCNN, `cnn`, in place of the encoder.

    `kind` says which one trains and predicts: "mlm"; "classify" (`outputs` classes) and "regress"
    (one score) on the pooled first token; "span" (start and end of an answer) and "tag" (`outputs`
    classes) on every token.
    `parts` are further heads kept beside it: "pooler", and "pair_head", which predicts whether the
    second of two texts follows the first (Devlin et al. 2019: next sentence; Lan et al. 2020: their
    order; Min et al. 2019: whether both are of one family). With a `pair_scale` it trains together
    with an MLM head, and a pair counts as much as `pair_scale` masked tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: HeadKind | None,
        outputs: int = 0,
        parts: Collection[str] = (),
        pair_scale: float = 0.0,
    ):
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
        self.task_head = nn.Linear(C, outputs) if task or kind in ("span", "tag") else None
        form, rate = config.dropout_form, config.before_head
        # before the pooler, before the head, before the pair head
        self.first_dropout = rate if form == "roberta" and pooled else 0.0
        self.dropout = rate if kind != "span" else 0.0
        if form == "distilbert" and kind in ("span", "tag"):
            self.dropout = config.dropout
        self.pair_dropout = rate if form == "albert" else 0.0

    def forward(self, batch: Packed | None) -> Loss:
        """The loss of a batch; of None a loss of 0 over nothing, with a gradient of zero for every
        weight. That is what a rank without rows adds to a step (DistributedDataParallel waits for
        the gradient of every weight on every rank)."""
        if batch is not None:
            return self.loss(batch)[0]
        total = torch.stack([weight.sum() for weight in self.parameters()]).sum() * 0.0
        return Loss(total, 0, torch.zeros_like(total.detach()))

    def _drop(self, x: Tensor, rate: float) -> Tensor:
        return dropout(x, rate if self.training else 0.0)

    def pooled(self, x: Tensor) -> Tensor:
        """The hidden states of each sequence's first token, (N, C), -> the pooled ones, (N, C).

        Raises ValueError if the model has no pooler and its config asks for one.
        """
        if self.config.pooler == "none":
            return x
        if self.pooler is None:
            raise ValueError("this model has no pooler: give it one with Checkpoint.with_head")
        y = self.pooler(self._drop(x, self.first_dropout))
        return torch.relu(y) if self.config.pooler == "relu" else torch.tanh(y)

    def logits(self, batch: Packed) -> Tensor:
        """(M, V) at the masked places for MLM, (M, outputs) at the labelled ones for tags (without
        places at all T), (T, 2) for spans, else (N, outputs)."""
        if self.mlm_head is not None:
            assert batch.places is not None
            x = self.encoder(batch, places=batch.places)
            return self.mlm_head(x, self.encoder.embeddings.word.weight)
        if self.task_head is None:
            raise ValueError("this model has no head: give it one with Checkpoint.with_head")
        if self.cnn is not None:
            x = self.cnn(batch)
        elif self.kind in ("span", "tag"):
            x = self.encoder(batch, places=batch.places if self.kind == "tag" else None)
        else:
            x = self.pooled(self.encoder(batch, places=batch.first))  # (N, C)
        return self.task_head(self._drop(x, self.dropout))

    def loss(self, batch: Packed) -> tuple[Loss, Tensor]:
        """The summed loss and the logits: cross-entropy (of a span the mean of start and end), or
        the squared error of a score. MLM in training has no logits: they are (0,)."""
        if self.kind == "mlm":
            return self._masked_loss(batch)
        logits = self.logits(batch).float()
        targets = batch.targets if self.kind == "tag" else batch.labels
        assert targets is not None
        if self.kind == "regress":
            total = F.mse_loss(logits.squeeze(1), targets, reduction="sum")
            return Loss(total, len(targets), torch.zeros((), device=logits.device)), logits
        if self.kind == "span":
            rows = padded(logits, batch)  # (N, L, 2)
            # a row each for start and end, (2 N, L): CUDA sums no others deterministically
            each = rows.log_softmax(1).transpose(1, 2).flatten(0, 1)
            right = (rows.detach().argmax(1) == targets).all(1).float()
            if self.training:
                total = F.nll_loss(each, targets.flatten(), reduction="sum") / 2
                return Loss(total, len(targets), right.sum()), logits
            losses = F.nll_loss(each, targets.flatten(), reduction="none").view(-1, 2).mean(1)
            return _of_each(losses, right), logits
        total = F.cross_entropy(logits, targets, reduction="sum")
        correct = (logits.detach().argmax(1) == targets).sum().float()
        return Loss(total, len(targets), correct), logits

    def _masked_loss(self, batch: Packed) -> tuple[Loss, Tensor]:
        """The loss of masked tokens, plus that of pairs if they train, and the tokens' logits."""
        assert self.mlm_head is not None
        assert batch.places is not None
        assert batch.targets is not None
        M, places = len(batch.targets), with_room(batch.places)
        first = batch.first if self.pair_scale else places[:0]
        x = self.encoder(batch, places=torch.cat([places, first]) if self.pair_scale else places)
        masked, first = x.split([len(places), len(first)])
        word = self.encoder.embeddings.word.weight
        if self.training:
            total, correct = self.mlm_head.loss(masked, word, batch.targets)
            loss, logits = Loss(total, M, correct), total.new_empty(0)
        else:
            logits = self.mlm_head(masked, word)[:M].float()
            losses = F.cross_entropy(logits, batch.targets, reduction="none")
            loss = _of_each(losses, (logits.detach().argmax(1) == batch.targets).float())
        if self.pair_scale:
            assert self.pair_head is not None
            assert batch.labels is not None
            pooled = self._drop(self.pooled(first), self.pair_dropout)
            pairs = self.pair_head(pooled).float()
            pair_loss = F.cross_entropy(pairs, batch.labels, reduction="sum")
            loss = replace(loss, total=loss.total + self.pair_scale * pair_loss, pairs=pairs)
        return loss, logits


def _of_each(losses: Tensor, right: Tensor) -> Loss:
    """The loss of all targets, from that of each, (M,), and 1 where it is right, (M,)."""
    return Loss(losses.sum(), len(losses), right.sum(), each=torch.stack([losses, right], 1))


def padded(values: Tensor, batch: Packed) -> Tensor:
    """Packed values (T, K) -> (N, L, K), with -inf after the end of a sequence."""
    ends = batch.layout.cu_seqlens
    sizes = ends.diff()  # (N,)
    row = torch.arange(len(sizes), device=values.device)
    row = row.repeat_interleave(sizes, output_size=len(values))  # given, no device is waited for
    out = values.new_full((len(sizes), batch.layout.longest, values.size(1)), -torch.inf)
    return out.index_put((row, batch.positions), values)
