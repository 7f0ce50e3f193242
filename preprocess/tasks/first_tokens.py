"""Which token of a text begins each word. Words are separated by white space."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from xformer.data.tokenizers import Tokenizer

_WORD = re.compile(r"\S+")


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
