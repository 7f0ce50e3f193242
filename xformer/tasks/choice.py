"""Multiple choice: predict which of n endings continues a context (SWAG, Zellers et al. 2018).

Q questions, N = n Q sequences. Each ending is a separate row, and the rows of a question are
neighbours in the store and in a batch.
"""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from xformer.data.batch import Batch
from xformer.data.store import UNLABELLED, Split
from xformer.model.config import ModelConfig
from xformer.tasks.classify import Pooled, log_softmax
from xformer.tasks.task import (
    HIGHER,
    LOWER,
    Loss,
    Model,
    Predictions,
    Table,
    in_full,
    n_labels,
    needed,
    no_labels,
    texts,
)
from xformer.tasks.weighted import Weighted, average, values_of


class Choice(Pooled):
    """One score per ending. A softmax over the endings of a question gives probabilities."""

    name = "choice"
    stores = ("choice",)
    metrics = {"loss": LOWER, "accuracy": HIGHER}
    arrays = {"outputs", "label", "group"}
    hf_class = "MultipleChoice"
    hf_pipeline = "multiple-choice"
    hf_table = "choice"
    outputs = 1

    @property
    def hf_example(self) -> str:
        return (
            'context, endings = "the context", ["one ending", "another ending"]\n'
            'rows = tokenizer([context] * 2, endings, padding=True, return_tensors="pt")\n'
            "outputs = model(**{name: values[None] for name, values in rows.items()})"
        )

    def dropouts(self, config: ModelConfig) -> tuple[float, float]:
        return 0.0, config.dropout if config.dropout_form == "roberta" else config.before_head

    @property
    def _first(self) -> int:
        """The number that the training file gives to the first ending."""
        options = (self.head.columns or {}).get("options", {})
        return int(options.get("first") or 0)

    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        labels = needed(batch.labels, "labels")[:: batch.together]  # (Q,)
        logits = in_full(self.logits(model, batch)).view(-1, batch.together)  # (Q, n)
        total = F.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.detach().argmax(1) == labels).sum().float()
        return Loss(total, n_labels(labels), correct)

    def as_arrays(self, outputs: np.ndarray, split: Split) -> dict[str, np.ndarray]:
        group = np.arange(split.rows) // split.together
        return {"outputs": outputs, "label": split.columns["label"], "group": group}

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Means over questions."""
        logits, labels = scored_questions(predictions)
        losses = -log_softmax(logits)[np.arange(len(labels)), labels]
        return {"loss": float(losses.mean())} | values_of(self.weighted(predictions))

    def weighted(self, predictions: Predictions) -> dict[str, Weighted]:
        logits, labels = scored_questions(predictions)
        right = logits.argmax(1) == labels
        return {"accuracy": Weighted(len(labels), labels, lambda w: average(w, right))}

    def table(self, outputs: np.ndarray, split: Split, threshold: float | None = None) -> Table:
        """One line per question: the number of its likeliest ending, counted as in the training
        file (`--first`), and its probability."""
        chances = np.exp(log_softmax(outputs.astype(np.float64).reshape(-1, split.together)))
        best = chances.argmax(1)
        table = {
            "ending": [str(self._first + i) for i in best],
            "probability": [f"{chance:.4f}" for chance in chances.max(1)],
        }
        first = np.arange(len(best)) * split.together
        if "input" in split.columns:
            contexts, endings = (texts(split.columns[name]) for name in ("input", "input_b"))
            table["input"] = [contexts[row] for row in first]
            table["chosen"] = [endings[row] for row in first + best]
        else:
            table["question"] = [str(i) for i in range(len(best))]
        if "id" in split.columns:
            ids = texts(split.columns["id"])
            table["id"] = [ids[row] for row in first]
        return table

    def gold(self, split: Split) -> list[str] | None:
        labels = split.columns["label"][:: split.together].tolist()
        names = ["" if label < 0 else str(self._first + label) for label in labels]
        return names if self.has_labels(split) else None


def scored_questions(predictions: Predictions) -> tuple[np.ndarray, np.ndarray]:
    """The scores of the endings (Q, n) and the correct endings (Q,) of the labelled questions.
    Raises BadInput if there are none."""
    questions = int(predictions.arrays["group"][-1]) + 1
    logits = predictions.arrays["outputs"].astype(np.float64).reshape(questions, -1)
    labels = predictions.arrays["label"].reshape(questions, -1)[:, 0]
    known = np.flatnonzero(labels != UNLABELLED)
    if not len(known):
        raise no_labels(predictions.split)
    return logits[known], labels[known]
