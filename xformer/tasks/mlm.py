"""Masked language modelling (Devlin et al. 2019, section 3.1).

T tokens in the batch, N sequences, M masked tokens, C hidden size, E embedding size, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xformer.data.batch import Assembler, Batch, Workload, ragged_arange
from xformer.data.errors import BadInput
from xformer.data.store import Split
from xformer.model.config import ModelConfig
from xformer.model.encoder import Norm, activate
from xformer.ops.padding import pad_rows
from xformer.ops.vocabulary_loss import vocabulary_loss
from xformer.tasks.task import (
    HIGHER,
    LOWER,
    Loss,
    Model,
    Predictions,
    Task,
    n_labels,
    needed,
    tensor_on,
)
from xformer.tasks.weighted import Weighted, ratio


class MLMHead(nn.Module):
    """Dense layer, activation and LayerNorm, then the tied word embeddings with a separate bias."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.width, config.bias)
        self.norm = Norm(config, config.width)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.activation = config.activation

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        """x (M, C), word (V, E) -> logits (M, V)."""
        return F.linear(self.states(x), word, self.bias)

    def states(self, x: Tensor) -> Tensor:
        """x (M, C) -> the input of the tied word embeddings, (M, E)."""
        return self.norm(activate(self.dense(x), self.activation))

    def loss(self, x: Tensor, word: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """x (M, C), word (V, E), targets (M,) -> the summed cross-entropy, (), and the number of
        correct predictions, (). If x has more rows than targets, the last ones are padding and do
        not count."""
        return vocabulary_loss(self.states(x), word, self.bias, targets)


class MLM(Task):
    """Predict the masked tokens of any text. Evaluation keeps three numbers for each row: the loss
    summed over its masked tokens, the number of these tokens, and how many of them are predicted
    correctly."""

    name = "mlm"
    stores = ("text", "class", "score", "span", "tag", "choice")
    metrics = {"loss": LOWER, "accuracy": HIGHER, "perplexity": LOWER}
    arrays = {"loss", "masked", "correct"}
    predicts_masked = True
    head_reads = "places"
    hf_class = "MaskedLM"
    hf_pipeline = "fill-mask"
    hf_table = "mlm"
    width = 3

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        return {"mlm_head": MLMHead(config)}

    def logits(self, model: Model, batch: Batch[Tensor]) -> Tensor:
        """(M, V) at the masked places."""
        return self._logits_of(model, model.encoder(batch, places=batch.places))

    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        places = needed(batch.places, "masked tokens (`pack` needs masking=0.15)")
        x = model.encoder(batch, places=pad_rows(places))
        return self.masked_loss(model, x, batch)

    def masked_loss(self, model: Model, x: Tensor, batch: Batch[Tensor]) -> Loss:
        """The loss from the hidden states of the masked tokens, x (M, C). If x has more rows than
        the batch has targets, the last ones are padding and do not count."""
        targets = batch.targets
        assert targets is not None
        total, correct = model.mlm_head.loss(x, model.encoder.embeddings.word.weight, targets)
        return Loss(total, n_labels(targets), correct)

    def _logits_of(self, model: Model, x: Tensor) -> Tensor:
        logits: Tensor = model.mlm_head(x, model.encoder.embeddings.word.weight)
        return logits

    @property
    def metric_note(self) -> str:
        share = f"{100 * self.head.masking:.3g} % of all"
        return f"{share} tokens are masked: compare this loss only with losses at the same share"

    def head_flops(self, config: ModelConfig, work: Workload) -> int:
        C, E, V = config.hidden, config.width, config.vocab_size
        return (2 * C * E + 2 * E * V) * work.masked

    def evaluation_batch(
        self, assembler: Assembler, examples: np.ndarray, seed: int
    ) -> Batch[np.ndarray]:
        first_epoch = np.zeros_like(examples)
        return assembler.masked_batch(examples, first_epoch, seed, self.head.masking)

    def evaluate(
        self, model: Model, batch: Batch[Tensor], host: Batch[np.ndarray], assembler: Assembler
    ) -> tuple[np.ndarray, Tensor]:
        assert batch.places is not None
        x = model.encoder(batch, places=pad_rows(batch.places))
        return host.rows, self.by_row(model, x, batch, host)

    def by_row(
        self, model: Model, x: Tensor, batch: Batch[Tensor], host: Batch[np.ndarray]
    ) -> Tensor:
        """The three numbers that evaluation keeps for each row, (N, 3). x (M, C) are the hidden
        states of the masked tokens."""
        targets = batch.targets
        assert targets is not None
        assert host.places is not None
        logits = self._logits_of(model, x)[: len(targets)].float()  # (M, V)
        losses = F.cross_entropy(logits, targets, reduction="none")
        tokens = torch.stack([losses, (logits.argmax(1) == targets).float()], 1)  # (M, 2)
        counts = np.diff(np.searchsorted(host.places, host.cu_seqlens))
        row = np.repeat(np.arange(len(counts)), counts)
        within = ragged_arange(np.zeros_like(counts), counts)
        # pad and sum along an axis, because index_add on CUDA adds in no fixed order
        table = tokens.new_zeros(len(counts), max(1, int(counts.max())), 2)
        table[tensor_on(row, x.device), tensor_on(within, x.device)] = tokens
        loss, right = table.sum(1).unbind(1)
        return torch.stack([loss, tensor_on(counts, x.device).to(loss.dtype), right], 1)

    def default_metric(self, of_store: str | None) -> str:
        return "loss"

    def as_arrays(self, outputs: np.ndarray, split: Split) -> dict[str, np.ndarray]:
        return {
            "loss": outputs[:, 0],
            "masked": outputs[:, 1].astype(np.int64),
            "correct": outputs[:, 2].astype(np.int64),
        }

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Means over masked tokens."""
        loss, masked, correct = (predictions.arrays[name] for name in ("loss", "masked", "correct"))
        count = int(masked.sum())
        if count == 0:
            raise BadInput(
                f"in the split {predictions.split!r} no token was masked; give a higher "
                "masking.probability, another split=, or, for training, another store"
            )
        mean = float(loss.astype(np.float64).sum()) / count
        return {
            "loss": mean,
            "accuracy": int(correct.sum()) / count,
            "perplexity": math.exp(min(mean, 700)),
        }

    def weighted(self, predictions: Predictions) -> dict[str, Weighted]:
        """The examples are rows; an accuracy is still a mean over their masked tokens."""
        loss, masked, correct = (predictions.arrays[name] for name in ("loss", "masked", "correct"))
        scores = {
            "loss": lambda w: ratio(w, loss, masked),
            "accuracy": lambda w: ratio(w, correct, masked),
        }
        return {name: Weighted(len(masked), masked, score) for name, score in scores.items()}
