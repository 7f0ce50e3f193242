"""Which pieces of a vocabulary are English-like (Zhang 2021, section 4.1).

A WordPiece is English-like if it matches ^(##)?[A-Za-z]+$. Byte-level BPE and unigram mark the
pieces that begin a word, not those that continue one: ^Ġ?[A-Za-z]+$ and ^▁?[A-Za-z]+$. A symbol is
English-like if it consists of letters.
"""

from __future__ import annotations

import re

from xformer.data.tokenizers import Tokenizer

MARKS = {"wordpiece": "##", "bpe": "Ġ", "unigram": "▁", "symbols": ""}


def english_pieces(tokenizer: Tokenizer) -> dict[int, tuple[str, bool]]:
    """The English-like pieces by id: the letters of each, and whether it begins a word."""
    mark = MARKS[tokenizer.kind]
    like = re.compile(f"({mark})?([A-Za-z]+)")
    # in WordPiece a piece with a mark continues a word
    mark_begins_word = tokenizer.kind in ("bpe", "unigram")
    return {
        i: (match[2], bool(match[1]) == mark_begins_word)
        for i, piece in enumerate(tokenizer.pieces)
        if (match := like.fullmatch(piece))
    }
