"""Which pieces of a vocabulary are English-like (Zhang et al. 2021, section 4.1).

A WordPiece is English-like when it matches ^(##)?[A-Za-z]+$. The other kinds mark the beginning of
a word instead of its inside: ^Ġ?[A-Za-z]+$ in byte-level BPE, ^▁?[A-Za-z]+$ in unigram; a symbol is
English-like when it is letters alone.
"""

from __future__ import annotations

import re

from xformer.data.tokenizers import Tokenizer

MARKS = {"wordpiece": "##", "bpe": "Ġ", "unigram": "▁", "symbols": ""}


def english(tokenizer: Tokenizer) -> dict[int, tuple[str, bool]]:
    """The English-like pieces by id: their letters, and whether they begin a word."""
    mark = MARKS[tokenizer.kind]
    like = re.compile(f"({mark})?([A-Za-z]+)")
    found = {i: like.fullmatch(piece) for i, piece in enumerate(tokenizer.pieces)}
    marked = tokenizer.kind != "wordpiece"  # does the mark stand at the beginning of a word?
    if not mark:
        return {i: (match[2], True) for i, match in found.items() if match}
    return {i: (match[2], bool(match[1]) == marked) for i, match in found.items() if match}
