"""Labels of words: which token of a text begins each word, and the values of the label column.

Words are separated by white space. A word's label is stored at its first token; its other tokens
have no label (Devlin et al. 2019, section 5.3).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import numpy as np

from xformer.data.tokenizers import Tokenizer

# In the column `labels`: no word begins at this token. (A word itself can be UNLABELLED or UNSEEN.)
IGNORED = -100
NO_LABEL = "_"  # in labels as text: this word has no label
_WORD = re.compile(r"\S+")
_BIO = re.compile(r"O|[BI]-.+")


def encode_words(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each text its ids, int32, and the index of each word's first token, int64.

    The ids are those of `encode_batch`, with one exception: a word that the tokenizer would delete
    becomes the unknown token, so that every word has a token.
    """
    return [
        _places(text, ids, starts, tokenizer.special["unk"])
        for text, (ids, starts, _) in zip(texts, tokenizer.encode_with_offsets(texts), strict=True)
    ]


def _places(
    text: str, ids: np.ndarray, starts: np.ndarray, unknown: int
) -> tuple[np.ndarray, np.ndarray]:
    spans = [word.span() for word in _WORD.finditer(text)]
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
    first = np.searchsorted(starts, begins)
    deleted = np.append(starts, len(text))[first] >= ends
    return (
        np.insert(ids, first[deleted], unknown).astype(np.int32),
        first + np.cumsum(deleted) - deleted,
    )


def is_bio(labels: Collection[str]) -> bool:
    """Whether these classes mark entities: B-X begins an entity of type X, I-X continues it, O is
    outside (Ramshaw & Marcus 1995)."""
    return all(map(_BIO.fullmatch, labels)) and any(label != "O" for label in labels)
