"""A split in memory, of texts that are not in a store."""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from xformer.data.display import one_line
from xformer.data.errors import BadInput
from xformer.data.store import Ragged, Split
from xformer.data.tokenizers import HALF, Tokenizer


def split_of(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    texts_b: Sequence[str] | None = None,
    labels: Any = None,
) -> Split:
    """A split in memory with N `texts`, and with `texts_b` if the rows are pairs.

    `labels` are N class numbers or N scores, or (N, 2) spans of the second texts: a list, an array
    or a tensor on the CPU. Raises BadInput that names the first of the texts that is not a string,
    or if the labels are not numbers, and ValueError if the numbers of texts and labels differ.
    """
    columns: dict[str, Any] = {"tokens": _ragged(tokenizer, texts)}
    if texts_b is not None:
        columns["tokens_b"] = _ragged(tokenizer, texts_b)
    if labels is not None:
        values = np.asarray(labels)
        spans = texts_b is not None and values.ndim == 2 and values.dtype.kind in "ui"
        if not spans and (values.ndim != 1 or values.dtype.kind not in "buif"):
            raise BadInput("labels must be one number for each row: that of its class, or a score")
        columns["label"] = values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
    if len({len(column) for column in columns.values()}) > 1:
        sizes = ", ".join(f"{len(column)} {name}" for name, column in columns.items())
        raise ValueError(f"each row needs one value in every column; there are {sizes}")
    tokens = len(columns["tokens"].values)
    return Split("rows", len(texts), tokens, columns)


def check_list(values: object, what: str) -> None:
    """Raise BadInput if these are not `what` one after the other: a single text, a table (which
    yields the names of its columns), a dict or a set."""
    if isinstance(values, str):
        raise BadInput(f"give a list of {what}, not a single text")
    if hasattr(values, "columns"):
        raise BadInput(f"give a list of {what}, not a table; a column of it is one: table['text']")
    if isinstance(values, Mapping | AbstractSet) and not isinstance(values, KeysView):
        raise BadInput(f"give a list of {what}, not a {type(values).__name__}")


def _ragged(tokenizer: Tokenizer, texts: Sequence[str]) -> Ragged:
    check_list(texts, "texts")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            what = f"{one_line(repr(text), 60)}, of type {type(text).__name__}"
            raise BadInput(f"number {number} of the texts is {what}; give a list of strings")
        if not text.isascii() and HALF.search(text):
            raise BadInput(f"number {number} of the texts holds half of a surrogate pair")
    values, lengths = ids_of(tokenizer, texts)
    return Ragged(values, np.concatenate([[0], np.cumsum(lengths)]))


def ids_of(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The concatenated ids of the texts, and the number of ids of each."""
    ids = tokenizer.encode_batch(texts)
    return np.concatenate([np.zeros(0, np.int32), *ids]), np.array([len(x) for x in ids], np.int64)
