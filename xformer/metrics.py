"""Metrics: classes and scores by scikit-learn and scipy, answers as SQuAD's own script does."""

from __future__ import annotations

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Sequence

import numpy as np

from xformer.data.errors import Failure

SCORE = ("pearson", "spearman")


def classification(predictions: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, float]:
    """accuracy, f1 and mcc of class numbers, (N,) each; the task has `classes` classes.

    With two classes f1 is that of class 1 (GLUE's), otherwise the mean over classes. mcc is
    Matthews' coefficient (scikit-learn's definition, also for more than two classes). A label
    outside the classes counts as wrong.
    """
    from sklearn.metrics import f1_score, matthews_corrcoef

    names = [1] if classes == 2 else range(classes)
    f1 = f1_score(labels, predictions, labels=names, average="macro", zero_division=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single class gives 0, which is right
        mcc = matthews_corrcoef(labels, predictions)
    return {
        "accuracy": float((predictions == labels).mean()),
        "f1": float(f1),
        "mcc": float(mcc),
    }


def tagging(predictions: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, float]:
    """accuracy, and f1 as the mean over all `classes`, from the class numbers of words, (N,) each.
    A label outside the classes counts as wrong."""
    from sklearn.metrics import f1_score

    f1 = f1_score(labels, predictions, labels=range(classes), average="macro", zero_division=0)
    return {"accuracy": float((predictions == labels).mean()), "f1": float(f1)}


def entities(labels: Sequence[str]) -> set[tuple[int, int, str]]:
    """(first word, last word, type) of every entity in a row of labels O, B-X and I-X. An I-X that
    follows neither B-X nor I-X begins an entity, as in the script of Tjong Kim Sang & De Meulder
    2003."""
    found, start, kind = set(), 0, ""
    for i, label in enumerate([*labels, "O"]):
        mark, _, its = label.partition("-")
        if kind and (mark != "I" or its != kind):
            found.add((start, i - 1, kind))
            kind = ""
        if mark != "O" and not kind:
            start, kind = i, its
    return found


def entity_f1(
    predictions: np.ndarray, labels: np.ndarray, rows: np.ndarray, classes: Sequence[str]
) -> float:
    """F1 over entities; an entity is right if all its words and its type are.

    predictions and labels are class numbers (N,), rows (N,) the row of each word. A word whose
    label lies outside the classes belongs to no entity. Without any entity the result is 1.
    """
    names = np.array([*classes, "O"], object)
    found = names[predictions], names[np.where(labels < 0, len(classes), labels)]
    cuts = np.flatnonzero(np.diff(rows)) + 1
    right = both = 0
    for ours, gold in zip(*(np.split(side, cuts) for side in found), strict=True):
        ours_of_row, gold_of_row = entities(ours), entities(gold)
        right += len(ours_of_row & gold_of_row)
        both += len(ours_of_row) + len(gold_of_row)
    return 2 * right / both if both else 1.0


def regression(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """pearson and spearman correlation of scores, (N,) each.

    A correlation is undefined if one side is constant or there is one row. It then counts as 0, as
    GLUE's scores of a model at chance do. Raises Failure if a score is not finite.
    """
    from scipy.stats import pearsonr, spearmanr

    check_finite(predictions, "the predictions")
    check_finite(labels, "the labels")
    if len(labels) < 2:
        return dict.fromkeys(SCORE, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a constant side gives NaN, which becomes 0 below
        values = [pearsonr(predictions, labels)[0], spearmanr(predictions, labels)[0]]
    return {name: float(np.nan_to_num(v)) for name, v in zip(SCORE, values, strict=True)}


def check_finite(values: np.ndarray, what: str) -> None:
    """Raise Failure that names the rows of values (N,) or (N, K) which are not finite numbers."""
    bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))
    if len(bad):
        count = f"{len(bad):,} of {len(values):,} rows"
        raise Failure(f"{what} are not finite in {count}: {some_rows(bad)}")


def some_rows(rows: Sequence[int] | np.ndarray) -> str:
    """The first row numbers of a list, and how many more there are."""
    shown = ", ".join(str(row) for row in rows[:8])
    return f"{shown} and {len(rows) - 8:,} more" if len(rows) > 8 else shown


def vote(log_probabilities: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(N, K), group numbers (N,) -> votes (G, K), the groups in order of their numbers.

    Each row votes for its likeliest class (Kao & Lee 2021, appendix G.4); the mean probability
    breaks ties.
    """
    choices = np.eye(log_probabilities.shape[1])[log_probabilities.argmax(1)]
    number, inverse = np.unique(groups, return_inverse=True)
    votes = np.zeros((len(number), log_probabilities.shape[1]))
    np.add.at(votes, inverse, choices)
    # halved, because the mean probability of a certain class is 1: a whole vote
    return votes + mean_by_group(np.exp(log_probabilities), groups) / 2


def mean_by_group(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(N, K), group numbers (N,) -> means (G, K), groups in order of their numbers."""
    number, inverse, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    sums = np.zeros((len(number), values.shape[1]))
    np.add.at(sums, inverse, values)
    return sums / sizes[:, None]


def first_by_group(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(N,) -> (G,): the value of each group's first row."""
    return values[np.unique(groups, return_index=True)[1]]


# -------------------------------------------------------------------------------- answers

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def plain_answer(text: str) -> str:
    """Lower-cased, without punctuation, articles and extra white space (Rajpurkar et al. 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_scores(answer: str, wanted: Sequence[str]) -> tuple[float, float]:
    """(exact match, F1 over words) of an answer, the best over those `wanted`; no wanted answer
    means that none is right (Rajpurkar et al. 2018)."""
    golds = [gold for gold in wanted if plain_answer(gold)] or [""]
    found = plain_answer(answer)
    exact = max(float(found == plain_answer(gold)) for gold in golds)
    return exact, max(_word_f1(found.split(), plain_answer(gold).split()) for gold in golds)


def _word_f1(found: list[str], gold: list[str]) -> float:
    if not found or not gold:
        return float(found == gold)
    shared = sum((Counter(found) & Counter(gold)).values())
    return 2 * shared / (len(found) + len(gold))


def squad(answers: Sequence[str], wanted: Sequence[Sequence[str]]) -> dict[str, float]:
    """exact_match and f1, means over questions between 0 and 1. If there are both answerable and
    unanswerable questions, each kind has its own means too."""
    scores = np.array([answer_scores(a, w) for a, w in zip(answers, wanted, strict=True)])
    has = np.array([len(w) > 0 for w in wanted])
    parts = {"": np.ones(len(has), bool)}
    if has.any() and not has.all():
        parts |= {"answerable_": has, "unanswerable_": ~has}
    return {
        f"{part}{name}": float(scores[which, i].mean())
        for part, which in parts.items()
        for i, name in enumerate(("exact_match", "f1"))
    }


def best_windows(
    best: np.ndarray, no_answer: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The score of the best span and of "no answer" in each window, and the number of its question,
    (N,) each -> each question's best window, (Q,), and how far "no answer" lies above it, (Q,)."""
    order = np.lexsort((-best, groups))
    windows = order[np.unique(groups[order], return_index=True)[1]]
    null = np.full(len(windows), np.inf)
    np.minimum.at(null, groups, no_answer)
    return windows, null - best[windows]


def answered(texts: list[str], margin: np.ndarray, threshold: float) -> list[str]:
    """The answers; "" if "no answer" scores higher than the best span by more than `threshold`."""
    return ["" if m > threshold else text for text, m in zip(texts, margin, strict=True)]


def threshold(wanted: Sequence[Sequence[str] | None], given: float | None) -> float:
    """The given threshold. Without one it is 0 if some question has no answer, else infinite."""
    if given is not None:
        return given
    return 0.0 if any(found == [] for found in wanted) else math.inf


def squad_with_threshold(
    answers: Sequence[str], no_answer: np.ndarray, wanted: Sequence[Sequence[str]]
) -> dict[str, float]:
    """The best exact_match and f1 that a threshold on `no_answer` can reach, and f1's threshold:
    a question with a higher value is taken to have no answer (Rajpurkar et al. 2018)."""
    given = np.array([answer_scores(a, w) for a, w in zip(answers, wanted, strict=True)])
    none = np.array([answer_scores("", w) for w in wanted])
    order = np.argsort(no_answer, kind="stable")
    # with the first k questions answered, and the others not
    totals = none.sum(0) + np.concatenate([[[0, 0]], np.cumsum((given - none)[order], 0)])
    values = np.concatenate([[-np.inf], no_answer[order]])
    # a threshold cannot tell equal values apart
    allowed = np.append(values[1:] > values[:-1], True)
    totals = np.where(allowed[:, None], totals, -1)
    best = totals.argmax(0)
    threshold = values[best[1]] if best[1] else no_answer.min() - 1
    found = totals.max(0) / len(wanted)
    return {
        "best_exact_match": float(found[0]),
        "best_f1": float(found[1]),
        "best_threshold": float(threshold),
    }
