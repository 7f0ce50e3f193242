"""From span logits to answers: the best span of every window, the best window of every question.

N windows, L their longest length, Q questions.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xformer import metrics
from xformer.data.errors import BadInput
from xformer.data.spans import answer
from xformer.data.store import Split

LONGEST = 30  # tokens of an answer (Devlin et al. 2019)


def best_spans(logits: Tensor, second: Tensor, lengths: Tensor) -> Tensor:
    """Start and end logits (N, L, 2) -> (N, 4): the score of "no answer", that of the best span,
    its first and last token in the window. A score is the sum of two logits.

    The window is tokens `second` to `second + lengths` of its row, (N,) each; "no answer" is the
    first special token. A span is at most LONGEST tokens.
    """
    L = logits.size(1)
    null = logits[:, 0].sum(1)
    place = torch.arange(L, device=logits.device)
    inside = (place >= second[:, None]) & (place < (second + lengths)[:, None])
    start, end = (logits[..., i].masked_fill(~inside, -torch.inf) for i in (0, 1))
    # (N, L, LONGEST): the scores of the spans from each place, one more token each time
    ends = torch.nn.functional.pad(end, (0, LONGEST - 1), value=-torch.inf).unfold(1, LONGEST, 1)
    score, flat = (start[:, :, None] + ends).flatten(1).max(1)
    first = flat // LONGEST
    return torch.stack([null, score, first - second, first + flat % LONGEST - second], 1)


def answers(outputs: np.ndarray, split: Split) -> tuple[list[str], np.ndarray]:
    """`best_spans` of all rows of a split, (rows, 4) -> the text of each question's best span over
    its windows, and how far "no answer" lies above it, (Q,)."""
    groups = np.asarray(split.columns["group"])
    order = np.lexsort((-outputs[:, 1], groups))
    best = order[np.unique(groups[order], return_index=True)[1]]
    texts = [answer(split, row, int(outputs[row, 2]), int(outputs[row, 3])) for row in best]
    null = np.full(len(best), np.inf)
    np.minimum.at(null, groups, outputs[:, 0])
    return texts, null - outputs[best, 1]


def wanted_answers(split: Split) -> list[list[str] | None]:
    """All right answers of each question; None where they are not known."""
    column = split.columns["question.answers"]
    return [json.loads(column.text(i)) for i in range(len(column))]


def score(outputs: np.ndarray, split: Split, threshold: float | None = None) -> dict[str, float]:
    """SQuAD's metrics of a split. A question is left unanswered if "no answer" scores higher than
    its best span by more than `threshold`, by default 0 where questions without an answer occur;
    there the best threshold is found too. Raises BadInput where no answers are known."""
    texts, margin = answers(outputs, split)
    every = wanted_answers(split)
    known = [i for i, found in enumerate(every) if found is not None]
    wanted = [every[i] or [] for i in known]
    texts, margin = [texts[i] for i in known], margin[known]
    if not known:
        raise BadInput(f"the split {split.name!r} has no answers to score against")
    found = metrics.squad(answered(texts, margin, _threshold(every, threshold)), wanted)
    return found | ({} if all(wanted) else metrics.squad_with_threshold(texts, margin, wanted))


def predictions(
    outputs: np.ndarray, split: Split, threshold: float | None = None
) -> dict[str, Any]:
    """question id -> answer, "" for none, in the form that SQuAD's own script reads; `threshold` as
    for `score`."""
    texts, margin = answers(outputs, split)
    ids = split.columns["question.id"]
    chosen = answered(texts, margin, _threshold(wanted_answers(split), threshold))
    return {ids.text(i): text for i, text in enumerate(chosen)}


def answered(texts: list[str], margin: np.ndarray, threshold: float) -> list[str]:
    """The answers, "" where "no answer" lies above the best span by more than `threshold`."""
    return ["" if m > threshold else text for text, m in zip(texts, margin, strict=True)]


def _threshold(wanted: list[list[str] | None], given: float | None) -> float:
    if given is not None:
        return given
    return 0.0 if any(found == [] for found in wanted) else float("inf")
