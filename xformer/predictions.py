"""What a task said of every row of a split, in a file from which any statistic can be computed
later, without the model and without the store.

    from xformer.predictions import read

    found = read("runs/cola/predictions/valid.npz")
    found.metrics()                             # those of result.json, digit for digit
    found.arrays["outputs"].argmax(1)           # (N,) the predicted classes
    found.arrays["label"], found.classes

N rows of the split, K classes, W words, Q questions. Every file has the array `row`, the row number
in the store's split, and for each task

    classify  outputs (N, K) logits, label (N,), group (N,) if rows vote
    regress   outputs (N, 1) scores, label (N,), group (N,) if rows are averaged
    choice    outputs (N, 1) a score of each ending, label (N,) the right ending of the question,
              group (N,) the question
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
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data.errors import BadInput, typed
from xformer.data.files import check_run_file, make_directory, write_bytes
from xformer.tasks.known import kind_of
from xformer.tasks.task import Head, Predictions, Questions

FORMAT = 1
FOLDER = "predictions"  # of a run


def write(path: Path, kept: Predictions, store: str) -> None:
    """Write the predictions for a split of the store with this key, compressed and whole or not at
    all. Raises OSError where the disk refuses."""
    about = {
        "format": FORMAT,
        "head": kept.head,
        "split": kept.split,
        "classes": kept.classes,
        "questions": None if kept.questions is None else vars(kept.questions),
        "threshold": kept.threshold,
        "store": store,
    }
    content = io.BytesIO()
    np.savez_compressed(content, about=np.array(json.dumps(about).encode()), **kept.arrays)  # type: ignore[arg-type]
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
        check_run_file(path.absolute().parents[1], f"{FOLDER}/{path.name}", path, cure)
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
    if about["format"] != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    kind = kind_of(about["head"], "outputs" in arrays)
    task = kind(Head(about["head"], tuple(about["classes"])))
    if not kind.arrays <= arrays.keys() - {"row"} <= kind.arrays | kind.optional_arrays:
        raise ValueError(f"it holds the arrays {', '.join(arrays)}")
    if "row" not in arrays or len({len(array) for array in arrays.values()}) != 1:
        raise ValueError("its arrays are not of one length")
    asked = about["questions"]
    questions = None if asked is None else Questions(**asked)
    if (questions is not None) != kind.has_questions:
        raise ValueError("its questions are not those of its task")
    return Predictions(task, about["split"], arrays, questions, about["threshold"], about["store"])
