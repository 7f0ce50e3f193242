"""Extractive question answering: the answer is a span of the context, scored as by SQuAD's script.

N windows, L the length of the longest, T tokens in the batch, Q questions.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xformer.data.batch import Assembler, Batch
from xformer.data.errors import BadInput
from xformer.data.store import LONGEST_ANSWER, Split
from xformer.tasks.task import (
    HIGHER,
    LOWER,
    Loss,
    Model,
    Predictions,
    Questions,
    Table,
    Task,
    in_full,
    n_labels,
    needed,
    tensor_on,
    texts,
)
from xformer.tasks.weighted import Weighted, average

NO_ANSWER, BEST, FIRST, LAST, LOSS = range(5)  # the columns of the outputs; see Span
MEANS = ("exact_match", "f1")  # metrics that are means over questions


class Span(Task):
    """Predict the first and the last token of an answer. Evaluation keeps five numbers for each
    window: the scores of "no answer" and of the best span, the first and the last token of that
    span, and the loss."""

    name = "span"
    stores = ("span",)
    metrics = {
        "loss": LOWER,
        "exact_match": HIGHER,
        "f1": HIGHER,
        "best_exact_match": HIGHER,
        "best_f1": HIGHER,
    }
    arrays = {"group", "label", "no_answer", "best", "first", "last", "loss"}
    head_reads = "tokens"
    has_questions = True
    hf_class = "QuestionAnswering"
    hf_pipeline = "question-answering"
    hf_table = "span"
    outputs = 2
    width = 5

    @property
    def hf_example(self) -> str:
        return 'outputs = model(**tokenizer("a question", "its context", return_tensors="pt"))'

    def logits(self, model: Model, batch: Batch[Tensor]) -> Tensor:
        """(T, 2): logits of being the first and the last token of the answer."""
        config = model.config
        rate = config.dropout if config.dropout_form == "distilbert" else 0.0
        rate = config.before_head if config.dropout_form == "modernbert" else rate
        logits: Tensor = model.task_head(model.drop(model.states(model.encoder(batch)), rate))
        return logits

    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        rows = as_rows(in_full(self.logits(model, batch)), batch)  # (N, L, 2)
        labels = needed(batch.labels, "labels")
        total = F.nll_loss(_log_probability(rows), labels.flatten(), reduction="sum") / 2
        correct = (rows.detach().argmax(1) == labels).all(1).float().sum()
        return Loss(total, n_labels(labels[:, 0]), correct)

    def evaluate(
        self, model: Model, batch: Batch[Tensor], host: Batch[np.ndarray], assembler: Assembler
    ) -> tuple[np.ndarray, Tensor]:
        rows = as_rows(self.logits(model, batch).float(), batch)  # (N, L, 2)
        b = tensor_on(assembler.lengths(host.rows)[1], rows.device)
        best = best_spans(rows, batch.cu_seqlens.diff() - 1 - b, b)
        losses = torch.zeros_like(best[:, :1])
        if batch.labels is not None:
            each = F.nll_loss(_log_probability(rows), batch.labels.flatten(), reduction="none")
            losses = each.view(-1, 2).mean(1, keepdim=True)
        return host.rows, torch.cat([best, losses], 1)

    def broken(self, outputs: np.ndarray, split: Split) -> np.ndarray:
        # a window without any context has no span: its best score is -inf
        best = outputs[:, BEST]
        bad = np.isnan(best) | np.isposinf(best)
        return bad | ~np.isfinite(np.delete(outputs, BEST, 1)).all(1)

    def has_labels(self, split: Split) -> bool:
        return any(right is not None for right in right_answers(split))

    def metrics_on(self, split: Split) -> list[str]:
        unanswerable = any(right == [] for right in right_answers(split))
        return [m for m in self.metrics if unanswerable or not m.startswith("best_")]

    def as_arrays(self, outputs: np.ndarray, split: Split) -> dict[str, np.ndarray]:
        columns = split.columns
        return {
            "no_answer": outputs[:, NO_ANSWER],
            "best": outputs[:, BEST],
            "loss": outputs[:, LOSS],
            "first": outputs[:, FIRST].astype(np.int64),
            "last": outputs[:, LAST].astype(np.int64),
            "group": columns["group"],
            "label": columns["label"],
        }

    def questions(self, outputs: np.ndarray, split: Split) -> Questions:
        ids = texts(split.columns["question.id"])
        return Questions(ids, answers(outputs, split)[0], right_answers(split))

    def score(self, predictions: Predictions) -> dict[str, float]:
        """SQuAD's metrics, and the loss as a mean over windows of the questions that are scored.

        A question is left unanswered if "no answer" scores higher than its best span by more than
        the threshold (see the function `answered` for its default). If some questions have no
        answer, the best threshold and its scores are returned too.
        """
        predicted, margin, gold = scored_questions(predictions)
        chosen = answered(predicted, margin, gold, predictions.threshold)
        assert predictions.questions is not None
        scored = np.array([right is not None for right in predictions.questions.right])
        losses = predictions.arrays["loss"][scored[predictions.arrays["group"]]]
        scores = {"loss": float(losses.astype(np.float64).mean())} | squad(chosen, gold)
        return scores | ({} if all(gold) else squad_with_threshold(predicted, margin, gold))

    def weighted(self, predictions: Predictions) -> dict[str, Weighted]:
        predicted, margin, gold = scored_questions(predictions)
        chosen = answered(predicted, margin, gold, predictions.threshold)
        scores = np.array(list(map(answer_scores, chosen, gold)))  # (Q, 2)
        labels = np.array([repr(g) for g in gold])
        return {
            name: Weighted(len(gold), labels, partial(average, values=values))
            for name, values in zip(MEANS, scores.T, strict=True)
        }

    def table(self, outputs: np.ndarray, split: Split, threshold: float | None = None) -> Table:
        """One line per question: its answer, by how much "no answer" scores higher, and the
        question."""
        predicted, margin = answers(outputs, split)
        return {
            "answer": answered(predicted, margin, right_answers(split), threshold),
            "no_answer": [f"{value:.4f}" for value in margin],
            "input": texts(split.columns["question.input"]),
            "id": texts(split.columns["question.id"]),
        }

    def lines(self, outputs: np.ndarray, split: Split, threshold: float | None = None) -> str:
        """JSON for SQuAD's own script: question id -> answer, "" for "no answer"."""
        return json.dumps(by_question(outputs, split, threshold), ensure_ascii=False) + "\n"


# --------------------------------------------------------------------- from logits to answers


def as_rows(values: Tensor, batch: Batch[Tensor]) -> Tensor:
    """Packed values (T, K) -> padded values (N, L, K), with -inf after the end of a sequence."""
    sizes = batch.cu_seqlens.diff()  # (N,)
    row = torch.arange(len(sizes), device=values.device)
    # CUDA need not synchronise if it knows the size of the output
    row = row.repeat_interleave(sizes, output_size=len(values))
    out = values.new_full((len(sizes), batch.longest, values.size(1)), -torch.inf)
    out[:, 0] = 0.0  # the softmax of an empty sequence, which is filler, must not be NaN
    return out.index_put((row, batch.positions), values)


def _log_probability(rows: Tensor) -> Tensor:
    """Logits (N, L, 2) -> log-probabilities (2 N, L). Start and end get separate rows, because CUDA
    sums this layout deterministically."""
    return rows.log_softmax(1).transpose(1, 2).flatten(0, 1)


def best_spans(logits: Tensor, second: Tensor, lengths: Tensor) -> Tensor:
    """Start and end logits (N, L, 2) -> (N, 4): the scores of "no answer" and of the best span, and
    the span's first and last token, counted in the window. A score is the sum of two logits.

    A row's window begins at token `second` and has `lengths` tokens, (N,) each. "No answer" is the
    first special token. A span has at most LONGEST_ANSWER tokens.
    """
    L = logits.size(1)
    null = logits[:, 0].sum(1)
    place = torch.arange(L, device=logits.device)
    inside = (place >= second[:, None]) & (place < (second + lengths)[:, None])
    start, end = (logits[..., i].masked_fill(~inside, -torch.inf) for i in (0, 1))
    # (N, L, LONGEST_ANSWER): the scores of the spans of 1, 2, ... tokens that start at each place
    ends = F.pad(end, (0, LONGEST_ANSWER - 1), value=-torch.inf).unfold(1, LONGEST_ANSWER, 1)
    score, flat = (start[:, :, None] + ends).flatten(1).max(1)
    first = flat // LONGEST_ANSWER
    return torch.stack([null, score, first - second, first + flat % LONGEST_ANSWER - second], 1)


def best_windows(
    best: np.ndarray, no_answer: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The index of each question's best window, (Q,), and the margin by which "no answer" scores
    higher than the best span of that window, (Q,).

    `best` and `no_answer` are the scores of each window's best span and of "no answer", and
    `groups` the number of its question, (N,) each. The score of "no answer" for a question is the
    lowest over its windows.
    """
    order = np.lexsort((-best, groups))
    windows = order[np.unique(groups[order], return_index=True)[1]]
    null = np.full(len(windows), np.inf)
    np.minimum.at(null, groups, no_answer)
    return windows, null - best[windows]


def scored_questions(predictions: Predictions) -> tuple[list[str], np.ndarray, list[list[str]]]:
    """The predicted answers, the margins of `best_windows` (Q,) and the right answers of the
    questions that are scored. Raises BadInput if there are none."""
    assert predictions.questions is not None
    arrays, right = predictions.arrays, predictions.questions.right
    _, margin = best_windows(arrays["best"], arrays["no_answer"], arrays["group"])
    known = [i for i, answers in enumerate(right) if answers is not None]
    if not known:
        raise BadInput(
            f"the split {predictions.split!r} has no answers to score against; give another "
            "split=, or, for training, another store"
        )
    predicted = [predictions.questions.answer[i] for i in known]
    return predicted, margin[known], [right[i] or [] for i in known]


def answers(outputs: np.ndarray, split: Split) -> tuple[list[str], np.ndarray]:
    """From the outputs of all windows of a split: the text of each question's best span, and by how
    much "no answer" scores higher than that span, (Q,)."""
    groups = split.columns["group"]
    best, margin = best_windows(outputs[:, BEST], outputs[:, NO_ANSWER], groups)
    ends = outputs[best][:, [FIRST, LAST]].astype(np.int64).tolist()
    return [answer(split, row, *both) for row, both in zip(best, ends, strict=True)], margin


def answer(split: Split, row: int, first: int, last: int) -> str:
    """The text of the context from token `first` to token `last` of a row's window, both included
    and counted from 0. It is "" if `first` is negative or after `last`."""
    if first < 0 or last < first:
        return ""
    columns = split.columns
    context = int(columns["question.context"][columns["group"][row]])
    window = int(columns["window"][row])
    start = columns["context.starts"][context][window + first]
    end = columns["context.ends"][context][window + last]
    text: str = columns["context.text"].text(context)[start:end]
    return text


def right_answers(split: Split) -> list[list[str] | None]:
    """All correct answers of each question: [] if it has no answer, None if they are not known."""
    return [json.loads(text) for text in texts(split.columns["question.answers"])]


def by_question(
    outputs: np.ndarray, split: Split, threshold: float | None = None
) -> dict[str, str]:
    """question id -> answer, or "" for "no answer" (see `answered`)."""
    predicted, margin = answers(outputs, split)
    chosen = answered(predicted, margin, right_answers(split), threshold)
    return dict(zip(texts(split.columns["question.id"]), chosen, strict=True))


def answered(
    predicted: list[str],
    margin: np.ndarray,
    right: Sequence[Sequence[str] | None],
    threshold: float | None,
) -> list[str]:
    """The `predicted` answers, each replaced by "" if its margin is above the threshold.

    `margin` (Q,) is that of `best_windows`. Without a threshold from the user (None) it is 0 if
    some question has no answer among the `right` ones, else infinity.
    """
    if threshold is None:
        threshold = 0.0 if any(answers == [] for answers in right) else math.inf
    return ["" if m > threshold else text for text, m in zip(predicted, margin, strict=True)]


# ------------------------------------------------------------------------- SQuAD's metrics

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def plain_answer(text: str) -> str:
    """A text in lower case, without punctuation, articles and extra white space (Rajpurkar et al.
    2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_scores(answer: str, wanted: Sequence[str]) -> tuple[float, float]:
    """(exact match, F1 over words) of an answer. Each is the best over the correct answers
    `wanted`. If there are none, "" is correct (Rajpurkar et al. 2018)."""
    golds = [gold for gold in wanted if plain_answer(gold)] or [""]
    plain = plain_answer(answer)
    exact = max(float(plain == plain_answer(gold)) for gold in golds)
    return exact, max(_word_f1(plain.split(), plain_answer(gold).split()) for gold in golds)


def _word_f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    shared = sum((Counter(predicted) & Counter(gold)).values())
    return 2 * shared / (len(predicted) + len(gold))


def squad(answers: Sequence[str], wanted: Sequence[Sequence[str]]) -> dict[str, float]:
    """exact_match and f1: means over questions, between 0 and 1. If there are both answerable and
    unanswerable questions, the result also has the means over each kind."""
    scores = np.array([answer_scores(a, w) for a, w in zip(answers, wanted, strict=True)])
    has = np.array([len(w) > 0 for w in wanted])
    parts = {"": np.ones(len(has), bool)}
    if has.any() and not has.all():
        parts |= {"answerable_": has, "unanswerable_": ~has}
    return {
        f"{part}{name}": float(scores[which, i].mean())
        for part, which in parts.items()
        for i, name in enumerate(MEANS)
    }


def squad_with_threshold(
    answers: Sequence[str], no_answer: np.ndarray, wanted: Sequence[Sequence[str]]
) -> dict[str, float]:
    """The best exact_match and f1 that a threshold on `no_answer` (Q,) can reach, and the threshold
    with that f1. A question whose value is above the threshold is unanswered (Rajpurkar et al.
    2018)."""
    given = np.array([answer_scores(a, w) for a, w in zip(answers, wanted, strict=True)])
    none = np.array([answer_scores("", w) for w in wanted])
    order = np.argsort(no_answer, kind="stable")
    # totals[k]: the first k questions are answered, and the others are not
    totals = none.sum(0) + np.concatenate([[[0, 0]], np.cumsum((given - none)[order], 0)])
    values = np.concatenate([[-np.inf], no_answer[order]])
    # a threshold cannot separate equal values
    allowed = np.append(values[1:] > values[:-1], True)
    totals = np.where(allowed[:, None], totals, -1)
    best = totals.argmax(0)
    threshold = values[best[1]] if best[1] else no_answer.min() - 1
    scores = totals.max(0) / len(wanted)
    return {
        "best_exact_match": float(scores[0]),
        "best_f1": float(scores[1]),
        "best_threshold": float(threshold),
    }
