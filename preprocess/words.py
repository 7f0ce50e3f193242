"""Fast exact encoding: words repeat, so the pieces of a word are looked up instead of computed.

WordPiece and byte-level BPE never look across the white space between words: the ids of a text are
those of its words, end to end. `Encoder` splits a text where its tokenizer splits in any case, asks
the tokenizer for the words it has not met, and gathers the ids of all others from a table. The ids
are those of `Tokenizer.encode_batch`; tests compare them on real text and on odd Unicode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import count, repeat
from typing import NamedTuple

import numpy as np

from xformer.data.tokenizers import Tokenizer

LIMIT = 2**23  # characters of known words (about 200 MB); beyond it the table starts anew
GROUP = 64  # unknown words encoded as one text

# BERT's normaliser deletes control characters that are white space to Python, and Python's \s holds
# four that the tokenizers' does not: a text with one of them is encoded as it is
_ODD = re.compile(r"[\x0b\x0c\x1c-\x1f\x85]")
# every ASCII punctuation mark is a word of its own to BERT, wherever it stands, and so are these
# marks of other writing and, unless the tokenizer is told otherwise, every Chinese character
_ASCII_MARKS = r"!-/:-@\[-`{-~"
MARKS = r"\u2010-\u2027\u3001-\u3003\u3008-\u3011\u3014-\u301f"
MARKS += r"\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
_CHINESE = r"\u3400-\u4dbf\u4e00-\u9fff"
EAST_ASIAN = _CHINESE + r"\u3041-\u3096\u30a1-\u30fa"  # and kana: letters without spaces
# GPT-2's own rule; its letters and digits are known to `re` in ASCII only, and in another text any
# run of visible characters stands for a word, but for Chinese and Japanese, which have no spaces
_BYTE_ASCII = re.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
)
_BYTE_OTHER = re.compile(r" ?\S+|\s+(?!\S)|\s+")
_EDGE = re.compile(rf"(?<=[{MARKS}])(?=[{EAST_ASIAN}])|(?<=[{EAST_ASIAN}])(?=[{MARKS}])")


def _byte_words(text: str) -> list[str]:
    if text.isascii():
        return _BYTE_ASCII.findall(text)
    return [word for part in _EDGE.split(text) for word in _BYTE_OTHER.findall(part)]


class _Rules(NamedTuple):
    """How texts of one kind of tokenizer fall into words, and what may stand between words to
    encode many as one text: it has one id, which no word that `joins` has."""

    split: Callable[[str], list[str]]
    joint: str
    joins: Callable[[str], object]


def _wordpiece(apart: str) -> _Rules:
    """Rules under which the characters of the set `apart` are words of their own."""
    words = re.compile(rf"[^\s{apart}]+|[{apart}]")
    return _Rules(words.findall, " . ", re.compile(rf"[^\s{_ASCII_MARKS}]+").fullmatch)


# of each kind the first that gives what the tokenizer gives
_RULES = {
    "wordpiece": [
        _wordpiece(_ASCII_MARKS + MARKS + _CHINESE),
        _wordpiece(_ASCII_MARKS + MARKS),
    ],
    "bpe": [_Rules(_byte_words, "\n", re.compile(r" ?\S+").fullmatch)],
}
_PROBE = [
    "It's a  [MASK]\n\n  don't, \tÉtude e\u0301 中文 x\r\n y ",
    *(" a", "a ", " \n ", "“中。文” a…b"),
]


class Encoder:
    """Texts -> ids, with a table of the words met so far where the kind of tokenizer allows it.

    Of several processes at work each has its `share`th part of the table's memory.
    """

    def __init__(self, tokenizer: Tokenizer, share: int = 1):
        self.tokenizer = tokenizer
        self.rules: _Rules | None = None
        self.known: dict[str, int] = {}
        self.starts = self.lengths = np.empty(0, np.int64)
        self.ids = np.empty(0, np.int32)
        self.characters = 0
        self.limit = min(LIMIT, max(LIMIT // share, 2**20))
        # a tokenizer with rules of its own has no such table: a space put before each text, words
        # that were added and may begin and end anywhere
        for self.rules in _RULES.get(tokenizer.kind, []) if not tokenizer.added else []:
            if np.array_equal(self.encode(_PROBE)[0], self._each(_PROBE)[0]):
                break
            self._forget()
        else:
            self.rules = None

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts end to end, int32; how many each text has, int64)."""
        if self.rules is None:
            return self._each(texts)
        words: list[str] = []
        counts = np.empty(len(texts), np.int64)
        for i, text in enumerate(texts):
            found = [text] if _ODD.search(text) else self.rules.split(text)
            counts[i] = len(found)
            words += found
        return self._gather(self._numbers(words), counts)

    def _each(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = self.tokenizer.encode_batch(texts)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.concatenate([np.empty(0, np.int32), *ids]), lengths

    def _joined(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """As `_each`, at half its cost, for words that may stand in one text."""
        assert self.rules is not None
        mark = self.tokenizer.encode_batch([self.rules.joint])[0]
        if len(mark) != 1:  # the vocabulary lacks the mark, or splits it
            return self._each(words)
        groups = [words[i : i + GROUP] for i in range(0, len(words), GROUP)]
        ids = self.tokenizer.encode_batch([self.rules.joint.join(group) for group in groups])
        flat = np.concatenate([part for group in ids for part in (group, mark)])
        ends = np.flatnonzero(flat == mark[0])
        if len(ends) != len(words):  # the mark is also part of a word
            return self._each(words)
        return flat[flat != mark[0]], np.diff(ends, prepend=-1) - 1

    def _numbers(self, words: list[str]) -> np.ndarray:
        """The row of the table that holds each word; unknown words are added to it."""
        if self.characters > self.limit:
            self._forget()
        numbers = np.fromiter(map(self.known.get, words, repeat(-1)), np.int64, len(words))
        missing = np.flatnonzero(numbers < 0)
        if len(missing):
            self._learn(list(dict.fromkeys([words[i] for i in missing])))
            numbers[missing] = [self.known[words[i]] for i in missing]
        return numbers

    def _forget(self) -> None:
        self.known.clear()
        self.starts, self.lengths, self.ids = self.starts[:0], self.lengths[:0], self.ids[:0]
        self.characters = 0

    def _learn(self, words: list[str]) -> None:
        assert self.rules is not None
        joinable: list[str] = []
        others: list[str] = []
        for word in words:
            joins = self.rules.joins(word) and not _ODD.search(word)
            (joinable if joins else others).append(word)
        for part, encode in ((joinable, self._joined), (others, self._each)):
            if part:
                ids, lengths = encode(part)
                starts = len(self.ids) + np.cumsum(lengths) - lengths
                self.known.update(zip(part, count(len(self.starts)), strict=False))
                self.starts = np.concatenate([self.starts, starts])
                self.lengths = np.concatenate([self.lengths, lengths])
                self.ids = np.concatenate([self.ids, ids])
        self.characters += sum(map(len, words))

    def _gather(self, numbers: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lengths = self.lengths[numbers]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        places = np.repeat(self.starts[numbers] - (ends - lengths), lengths) + np.arange(total)
        per_text = np.diff(np.concatenate([[0], ends])[np.cumsum(counts)], prepend=0)
        return self.ids[places], per_text
