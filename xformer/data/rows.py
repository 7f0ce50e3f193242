"""Make a store from rows that a Python program has in memory or yields one by one.

A row is a text; or a tuple of a text and a label; or a tuple of two texts and a label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from xformer.data.display import many, say
from xformer.data.errors import BadInput
from xformer.data.memory import check_list, ids_of
from xformer.data.store import SPLIT_NAMES
from xformer.data.tokenizers import Tokenizer
from xformer.data.writing import SplitWriter, create_store

LARGEST = float(np.finfo(np.float32).max)
BATCH = 1000  # rows that are encoded and written together
Row = tuple[Any, ...]
FORMS = {1: "a text", 2: "(text, label)", 3: "(text, second text, label)"}  # by width
METRICS = {"text": None, "class": "accuracy", "score": "spearman"}


def write_store(
    path: str | Path,
    tokenizer: Tokenizer,
    splits: Mapping[str, Iterable[Any]],
    labels: Sequence[str] = (),
    overwrite: bool = False,
) -> None:
    """Write rows as a new store, which train.py and evaluate.py read like any other.

    `splits` maps the name of each split ("train", "valid", "test") to an iterable of its rows,
    which is read once, a thousand rows at a time. If the rows are texts, the store is of kind
    "text". If they are tuples, `labels` decides: with the names of the classes the store is of kind
    "class", and a row's label is a name or its number; without them it is of kind "score", and the
    label is a number. A long text is truncated when a batch is built, so split documents for
    pre-training into rows that fit the model.

    Raises BadInput if `path` exists (with `overwrite`, if it is not a store), if a split has no
    rows or a name that is not allowed, if a row has another form than the first one or a label that
    is not known or is infinite, or if `labels` has a name that is not a text, names a class twice
    or only one class, or the rows have none. A score of NaN means that the row has none.
    """
    check_list(labels, "names of classes")
    labels = list(labels)
    if not all(isinstance(label, str) for label in labels):
        raise BadInput(f"labels={labels}: give the names of the classes, which are texts")
    if not isinstance(splits, Mapping):
        raise BadInput("give the rows of each split by its name: {'train': rows, 'valid': others}")
    for name, its_rows in splits.items():
        if hasattr(its_rows, "columns"):
            form = "table[['text', 'label']].itertuples(index=False)"
            raise BadInput(f"the split {name!r} is a table; give its rows, such as {form}")
        if (own := SPLIT_NAMES.get(name.lower(), name)) != name:
            raise BadInput(f"the split {name!r} is called {own!r} here")
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise BadInput(
                f"the name of a split has letters, digits, '_', '-' and '.', not {name!r}"
            )
    first, iterators = _peeked(splits)
    texts = ["tokens", "tokens_b"][: max(1, len(first) - 1)]
    kind = "text" if len(first) == 1 else "class" if labels else "score"
    if labels and (kind == "text" or len(set(labels)) < max(2, len(labels))):
        alone = "there is only one class" if len(labels) == 1 else "a class is named twice"
        why = "the rows are texts alone" if kind == "text" else alone
        raise BadInput(f"labels={labels}: {why}")
    columns = dict.fromkeys(texts, "")
    if kind != "text":
        columns["label"] = "int64" if kind == "class" else "float32"
    with create_store(path, tokenizer, columns, texts, overwrite) as store:
        for name, rows in iterators.items():
            with store.split(name) as split:
                start = empty = 0
                while some := list(islice(rows, BATCH)):
                    checked = _checked(some, len(first), name, start)
                    _append(split, tokenizer, checked, labels, texts)
                    start += len(some)
                    empty += sum(not any(map(str.strip, row[: len(texts)])) for row in checked)
            if empty:
                say(f"warning: {name} has {many(empty, 'row')} without text", error=True)
        # the names that `evaluate.py input=` looks for in the header of a table
        names = {"text": "text", "text_b": "text_b" if len(texts) == 2 else None}
        store.finish(kind, labels, METRICS[kind], {} if kind == "text" else {"columns": names})


def _peeked(splits: Mapping[str, Iterable[Any]]) -> tuple[Row, dict[str, Iterator[Any]]]:
    """The first row of the first split that has one, and iterators over the rows of all splits,
    which still yield this row."""
    iterators = {name: iter(rows) for name, rows in splits.items()}
    for name, rows in iterators.items():
        for row in rows:
            iterators[name] = chain([row], rows)
            width = len(_as_tuple(row))
            if width not in FORMS:
                forms = f"a text, {FORMS[2]} or {FORMS[3]}"
                raise BadInput(f"row 0 of the split {name!r} is {row!r}; a row is {forms}")
            return _checked([row], width, name, 0)[0], iterators
    raise BadInput("there are no rows to write")


def _as_tuple(row: Any) -> Row:
    """A row as a tuple; () if it is neither a text nor a tuple or list."""
    if isinstance(row, str):
        return (row,)
    return tuple(row) if isinstance(row, tuple | list) else ()


def _checked(rows: Sequence[Any], width: int, split: str, start: int) -> list[Row]:
    """The rows as tuples. Raises BadInput that names the first row that does not have `width`
    elements, or has something else in place of a text. `start` is the number of rows before
    these."""
    tuples = [_as_tuple(row) for row in rows]
    for number, row in enumerate(tuples):
        texts = row[: max(1, width - 1)]
        if len(row) != width or not all(isinstance(text, str) for text in texts):
            raise BadInput(
                f"row {start + number} of the split {split!r} is {rows[number]!r}; it must be "
                f"{FORMS[width]}, like every row of this store"
            )
    return tuples


def _append(
    split: SplitWriter,
    tokenizer: Tokenizer,
    rows: list[Row],
    labels: Sequence[str],
    texts: Sequence[str],
) -> None:
    columns = list(zip(*rows, strict=True))
    for name, values in zip(texts, columns, strict=False):
        split.append_ragged(name, *ids_of(tokenizer, values))
    if len(columns) > len(texts):
        split.append("label", np.array([_number(label, labels) for label in columns[-1]]))


def _number(label: Any, labels: Sequence[str]) -> float:
    """The number of a class, or a score. Raises BadInput if it is neither."""
    if not labels:
        try:
            score = float(label)
        except (TypeError, ValueError):
            raise BadInput(
                f"the label {label!r} is not a number; give the names of the classes as labels="
            ) from None
        if abs(score) > LARGEST:  # NaN passes: it means that the row has no score
            raise BadInput(f"the label {label!r} is too large for a score, which is float32")
        return score
    if isinstance(label, str) and label in labels:
        return labels.index(label)
    number = label.item() if hasattr(label, "item") else label  # of numpy or torch
    if isinstance(number, int | float) and float(number).is_integer():
        name = str(int(number))
        if name in labels and labels.index(name) != number:
            raise BadInput(
                f"the label {label!r} is the name of a class and the number of another; give its "
                f"name, {name!r}, or give labels in the order of their numbers"
            )
        if number in range(len(labels)):
            return int(number)
    named = ", ".join(labels)
    raise BadInput(f"the label {label!r} is neither one of {named} nor the number of one, from 0")
