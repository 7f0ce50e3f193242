"""Files with a task's predictions for every row of a split. With such a file, any statistic can be
computed later without the model and the store.

    from xformer.predictions import read

    valid = read("runs/cola/predictions/valid.npz")
    valid.metrics()                             # the metrics in result.json
    valid.arrays["outputs"].argmax(1)           # (N,) the predicted classes
    valid.arrays["label"], valid.classes

N rows of the split, K classes, W words, Q questions. Every file has the array `row`, the row number
in the store's split, and further arrays that depend on the task:

    classify  outputs (N, K) logits, label (N,); group (N,) if the rows of a group vote on its class
    regress   outputs (N, 1) scores, label (N,); group (N,) if a group has the mean of its rows
    choice    outputs (N, 1) the score of each ending, label (N,) the question's correct ending,
              group (N,) the question
    tag       row (W,), label (W,), predicted (W,) classes or -1 for truncated words, loss (W,)
    span      one row for each window of a question's context: group (N,) the question, label (N, 2)
              the first and the last token of the answer (-1 if the window does not contain it),
              no_answer (N,) the score of "no answer", best (N,) the score of the best span, first
              (N,) and last (N,) its first and its last token, loss (N,). Tokens are counted in the
              window
    mlm       loss (N,) summed over the masked tokens, masked (N,) their number, correct (N,) how
              many of them are predicted correctly; with a pair head also outputs (N, 2) and label
              (N,) of the pairs

Labels are those of the store. UNLABELLED (-1) or NaN means that a row has no label, UNSEEN (-2)
that its class does not occur in training.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np

from xformer.data.errors import BadInput, typed
from xformer.data.files import check_run_file, make_directory, write_bytes
from xformer.tasks.known import kind_of
from xformer.tasks.task import Head, Predictions, Questions

FORMAT = 1
FOLDER = "predictions"  # the directory of these files in a run


def write(path: str | Path, predictions: Predictions, store: str) -> None:
    """Write predictions to a compressed file, atomically. `store` is the key of the store. Raises
    OSError if writing fails."""
    path, questions = Path(path), predictions.questions
    about = {
        "format": FORMAT,
        "head": predictions.task.name,
        "split": predictions.split,
        "classes": predictions.classes,
        "questions": None if questions is None else vars(questions),
        "threshold": predictions.threshold,
        "store": store,
    }
    if (scale := predictions.task.head.scale) != Head.scale:
        about["scale"] = scale  # of standardized scores, whose loss is in this unit
    content, header = io.BytesIO(), np.array(json.dumps(about).encode())
    np.savez_compressed(content, about=header, **predictions.arrays)  # type: ignore[arg-type]
    make_directory(path.parent)
    write_bytes(path, content.getvalue())


def read(path: str | Path) -> Predictions:
    """The predictions in a file of RUN/predictions, or of `evaluate.py predictions=FILE.npz`.

    Raises BadInput that names the file if it is missing, is damaged, contains something else, or
    was changed after its run wrote it.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"the file of predictions {path} does not exist")
    if path.absolute().parent.name == FOLDER:
        again = typed("evaluate.py RUN data=STORE split=SPLIT predictions=FILE.npz")
        remedy = f"write it again with {again}"
        check_run_file(path.absolute().parents[1], f"{FOLDER}/{path.name}", path, remedy)
    content = io.BytesIO(path.read_bytes())
    try:
        if not is_zipfile(content):
            raise ValueError("it is not an .npz archive")
        content.seek(0)
        with np.load(content, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if "about" not in arrays:
            raise ValueError("it has no array 'about'")
        return _checked(json.loads(arrays.pop("about").item()), arrays)
    except Exception as error:  # a damaged file raises BadZipFile, zlib.error, OSError and others
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise BadInput(f"{path} is damaged, or not a file of predictions: {reason}") from None


def _checked(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> Predictions:
    """The content of a file. Raises ValueError, KeyError or TypeError if it is inconsistent."""
    if about["format"] != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    kind = kind_of(about["head"], "outputs" in arrays)
    scale = tuple(about.get("scale", Head.scale))
    task = kind(Head(about["head"], tuple(about["classes"]), scale=scale))
    if not kind.arrays <= arrays.keys() - {"row"} <= kind.arrays | kind.optional_arrays:
        raise ValueError(
            f"it contains the arrays {', '.join(arrays)}, which are not those of {kind.name}"
        )
    if "row" not in arrays or len({len(array) for array in arrays.values()}) != 1:
        raise ValueError("it has no array 'row', or its arrays differ in length")
    questions = None if about["questions"] is None else Questions(**about["questions"])
    if (questions is not None) != kind.has_questions:
        raise ValueError("its questions do not belong to its task")
    return Predictions(task, about["split"], arrays, questions, about["threshold"], about["store"])
