"""Which pieces of a vocabulary are English-like (Zhang et al. 2021, section 4.1).

A WordPiece is English-like when it matches ^(##)?[A-Za-z]+$. The other kinds mark the beginning of
a word instead of its inside: ^Ġ?[A-Za-z]+$ in byte-level BPE, ^▁?[A-Za-z]+$ in unigram; a symbol is
English-like when it is letters alone.
"""

from __future__ import annotations

import re

from xformer.data.tokenizers import Tokenizer

MARKS = {"wordpiece": "##", "bpe": "Ġ", "unigram": "▁", "symbols": ""}


def english_pieces(tokenizer: Tokenizer) -> dict[int, tuple[str, bool]]:
    """The English-like pieces by id: their letters, and whether they begin a word."""
    mark = MARKS[tokenizer.kind]
    like = re.compile(f"({mark})?([A-Za-z]+)")
    # where marks begin no word (WordPiece, symbols), a piece without one does
    marked = tokenizer.kind in ("bpe", "unigram")
    return {
        i: (match[2], bool(match[1]) == marked)
        for i, piece in enumerate(tokenizer.pieces)
        if (match := like.fullmatch(piece))
    }
