"""What a model said of every row of a split, in a file from which any statistic can be computed
later, without the model and without the store.

    from xformer.predictions import read

    found = read("runs/cola/predictions/valid.npz")
    found.metrics()                             # those of result.json, digit for digit
    found.arrays["outputs"].argmax(1)           # (N,) the predicted classes
    found.arrays["label"], found.classes

N rows of the split, K classes, W words, Q questions. Every file has the array `row`, the row number
in the store's split, and of each head

    classify  outputs (N, K) logits, label (N,), group (N,) if rows vote
    regress   outputs (N, 1) scores, label (N,), group (N,) if rows are averaged
    tag       row (W,), label (W,), predicted (W,) classes or -1 for words that were cut, loss (W,)
    span      group (N,) the question, label (N, 2), no_answer (N,) and best (N,) scores, first (N,)
              and last (N,) token of the best span in the window, loss (N,)
    mlm       loss (N,) summed over the masked tokens, masked (N,) and correct (N,) how many; with a
              pair head outputs (N, 2) and label (N,) of the pairs

Labels are those of the store: UNLABELLED (-1) or NaN: there is none; UNSEEN (-2): a class that
training lacks.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xformer import metrics
from xformer.data.errors import BadInput, typed
from xformer.data.files import check_finished, make_directory, write_bytes
from xformer.data.store import UNLABELLED, UNSEEN
from xformer.data.tags import is_bio

FORMAT = 1
FOLDER = "predictions"  # of a run
# the arrays of each head beside `row`, and those that some stores lack
ARRAYS: dict[str, tuple[set[str], set[str]]] = {
    "classify": ({"outputs", "label"}, {"group"}),
    "regress": ({"outputs", "label"}, {"group"}),
    "tag": ({"label", "predicted", "loss"}, set()),
    "span": ({"group", "label", "no_answer", "best", "first", "last", "loss"}, set()),
    "mlm": ({"loss", "masked", "correct"}, {"outputs", "label"}),
}


@dataclass(frozen=True)
class Questions:
    """The questions of a span head, by the number in `group`: lists of Q."""

    id: list[str]
    answer: list[str]  # the text of the best span over a question's windows
    right: list[list[str] | None]  # all right answers; none of them: [], not known: None


@dataclass(frozen=True)
class Predictions:
    """What a head said of a split. `store` is the key of the store, `threshold` that of a span head
    (see `metrics`)."""

    head: str
    split: str
    classes: tuple[str, ...]
    arrays: dict[str, np.ndarray]
    questions: Questions | None = None
    threshold: float | None = None
    store: str = ""

    def metrics(self) -> dict[str, float]:
        """Every metric that evaluation gives for these outputs, by name.

        Labels of -1 or NaN are not scored. Raises BadInput if no row has a label.
        """
        kinds = {
            "classify": self._classes,
            "regress": self._scores,
            "tag": self._words,
            "span": self._answers,
            "mlm": self._masked,
        }
        return kinds[self.head]()

    def _known(self, known: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """float64 outputs, labels and groups of the rows that have a label."""
        if not known.any():
            raise BadInput(
                f"the split {self.split!r} has no labels to score against; give another split"
            )
        outputs, group = self.arrays["outputs"][known], self.arrays.get("group")
        groups = None if group is None else group[known]
        return outputs.astype(np.float64), self.arrays["label"][known], groups

    def _classes(self) -> dict[str, float]:
        """The loss is a mean over rows; where rows form groups, metrics are over groups: a group
        has the class most of its rows vote for (Kao & Lee 2021, appendix G.4)."""
        some, labels, groups = self._known(self.arrays["label"] != UNLABELLED)
        logits = some - some.max(1, keepdims=True)
        log_probability = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        seen = np.flatnonzero(labels != UNSEEN)  # the others have no probability: never right
        losses = -log_probability[seen, labels[seen]]
        if groups is not None:
            some = metrics.vote(log_probability, groups)
            labels = metrics.first_by_group(labels, groups)
        found = metrics.classification(some.argmax(1), labels, some.shape[1])
        return ({"loss": float(losses.mean())} if len(seen) else {}) | found

    def _scores(self) -> dict[str, float]:
        """The loss is a mean over rows; where rows form groups, correlations are of the groups'
        mean scores."""
        label = self.arrays["label"]
        some, labels, groups = self._known(~np.isnan(label))
        if len(bad := np.flatnonzero(np.isinf(label))):
            raise BadInput(
                f"the split {self.split!r}: {len(bad):,} labels are not finite, those of "
                f"the rows {metrics.some_rows(bad)}"
            )
        loss = float(((some[:, 0] - labels) ** 2).mean())
        if groups is not None:
            some = metrics.mean_by_group(some, groups)
            labels = metrics.first_by_group(labels, groups)
        return {"loss": loss, **metrics.regression(some[:, 0], labels)}

    def _words(self) -> dict[str, float]:
        """loss, accuracy and f1 (the mean over classes) of labelled words, and where the classes
        are entities' entity_f1. Words that truncation cut are not scored."""
        row, label, predicted = (self.arrays[name] for name in ("row", "label", "predicted"))
        scored = (label != UNLABELLED) & (predicted >= 0)
        if not scored.any():
            raise BadInput(
                f"the split {self.split!r} has no labels to score against; give another split"
            )
        seen = scored & (label >= 0)
        losses = self.arrays["loss"][seen].astype(np.float64)
        found = {"loss": float(losses.mean())} if seen.any() else {}
        row, label, predicted = row[scored], label[scored], predicted[scored]
        found |= metrics.tagging(predicted, label, len(self.classes))
        if is_bio(self.classes):
            found["entity_f1"] = metrics.entity_f1(predicted, label, row, self.classes)
        return found

    def _answers(self) -> dict[str, float]:
        """SQuAD's metrics, and the loss as a mean over windows. A question is left unanswered if
        "no answer" scores higher than its best span by more than `threshold`, by default 0 where
        questions without an answer occur; there the best threshold is found too."""
        assert self.questions is not None
        arrays, right = self.arrays, self.questions.right
        _, margin = metrics.best_windows(arrays["best"], arrays["no_answer"], arrays["group"])
        known = [i for i, found in enumerate(right) if found is not None]
        if not known:
            raise BadInput(f"the split {self.split!r} has no answers to score against")
        wanted = [right[i] or [] for i in known]
        texts, margin = [self.questions.answer[i] for i in known], margin[known]
        said = metrics.answered(texts, margin, metrics.threshold(right, self.threshold))
        found = {"loss": float(arrays["loss"].astype(np.float64).mean())}
        found |= metrics.squad(said, wanted)
        return found | ({} if all(wanted) else metrics.squad_with_threshold(texts, margin, wanted))

    def _masked(self) -> dict[str, float]:
        """Means over masked tokens; of pairs means over rows."""
        loss, masked, correct = (self.arrays[name] for name in ("loss", "masked", "correct"))
        count = int(masked.sum())
        if count == 0:
            raise BadInput(f"the split {self.split!r} has no token to mask")
        mean = float(loss.astype(np.float64).sum()) / count
        found = {
            "loss": mean,
            "accuracy": int(correct.sum()) / count,
            "perplexity": math.exp(min(mean, 700)),
        }
        if "outputs" in self.arrays:
            pairs = self._classes()
            found |= {f"pair_{name}": pairs[name] for name in ("loss", "accuracy")}
        return found


def small(values: np.ndarray) -> np.ndarray:
    """Integers in the smallest type that holds them all; floats as float32."""
    values = np.asarray(values)
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    least, most = (int(values.min()), int(values.max())) if values.size else (0, 0)
    return values.astype(np.min_scalar_type(min(least, ~most) if least < 0 else most))


def write(path: Path, found: Predictions, store: str) -> None:
    """Write the predictions for a split of the store with this key, compressed and whole or not at
    all. Raises OSError where the disk refuses."""
    about = {"format": FORMAT, **asdict(replace(found, arrays={}, store=store))}
    del about["arrays"]
    content = io.BytesIO()
    np.savez_compressed(content, about=np.array(json.dumps(about).encode()), **found.arrays)  # type: ignore[arg-type]
    make_directory(path.parent)
    write_bytes(path, content.getvalue())


def read(path: str | Path) -> Predictions:
    """The predictions in a file of a run's folder `predictions`, or of `evaluate.py predictions=`.

    Raises BadInput that names the file if it is missing, is damaged, holds something else, or is
    not the one that its run wrote.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"{path} does not exist")
    if path.absolute().parent.name == FOLDER:
        again = typed("evaluate.py RUN data=STORE split=SPLIT predictions=FILE.npz")
        cure = f"write it anew with {again}"
        check_finished(path.absolute().parents[1], f"{FOLDER}/{path.name}", path, cure)
    content = io.BytesIO(path.read_bytes())
    try:
        with np.load(content, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if "about" not in arrays:
            raise ValueError("it has no array 'about'")
        return _checked(json.loads(arrays.pop("about").item()), arrays)
    except Exception as error:  # a damaged archive fails anywhere: BadZipFile, zlib.error, OSError
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise BadInput(f"{path} is damaged, or not a file of predictions: {reason}") from None


def _checked(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> Predictions:
    """The content of a file. Raises ValueError, KeyError or TypeError if it cannot be so."""
    if about.pop("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    needed, possible = ARRAYS[about["head"]]
    if not needed <= arrays.keys() - {"row"} <= needed | possible or "row" not in arrays:
        raise ValueError(f"it holds the arrays {', '.join(arrays)}")
    if len({len(array) for array in arrays.values()}) != 1:
        raise ValueError("its arrays are not of one length")
    asked = about.pop("questions")
    questions = None if asked is None else Questions(**asked)
    if (questions is not None) != (about["head"] == "span"):
        raise ValueError("questions are a span head's")
    return Predictions(
        **{**about, "classes": tuple(about["classes"])}, arrays=arrays, questions=questions
    )
