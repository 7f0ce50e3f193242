"""Fast, exact encoding with a table: words repeat, so the ids of a known word are looked up.

WordPiece and byte-level BPE never look across the white space between words, so the ids of a text
are the ids of its words one after the other. `CachedEncoder` splits a text at places where its
tokenizer splits too, asks the tokenizer for new words only, and takes all other ids from its table.
The ids equal those of `Tokenizer.encode_batch`; tests compare the two on real text and on unusual
Unicode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import count, repeat
from typing import NamedTuple

import numpy as np

from xformer.data.tokenizers import Tokenizer

TABLE_CHARACTERS = 2**23  # total length of known words (200 MB); then the table is cleared
GROUP = 64  # how many new words are encoded as one text

# Python treats all these characters as white space, but BERT's normaliser deletes them, and \s in
# the library `tokenizers` does not match \x1c to \x1f. A text with one of them is not split.
_ODD = re.compile(r"[\x0b\x0c\x1c-\x1f\x85]")
# BERT makes every punctuation mark a word of its own. Here texts are split at the ASCII marks and
# at some marks of other scripts. BERT also makes every Chinese character a word of its own, unless
# the tokenizer is configured otherwise.
_ASCII_MARKS = r"!-/:-@\[-`{-~"
MARKS = r"\u2010-\u2027\u3001-\u3003\u3008-\u3011\u3014-\u301f"
MARKS += r"\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
_CHINESE = r"\u3400-\u4dbf\u4e00-\u9fff"
EAST_ASIAN = _CHINESE + r"\u3041-\u3096\u30a1-\u30fa"  # with kana: scripts without spaces
# GPT-2's own rule, but only for ASCII texts: Python's `re` lacks the character classes by which
# that rule finds other letters and digits. In a text that is not ASCII, any run of visible
# characters is a word. Chinese and Japanese have no spaces: they are also cut at punctuation marks.
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
    """How to split texts into words for one kind of tokenizer.

    Many words can be encoded as one text with `joint` between them, because `joint` has a single
    id. Only words for which `joinable` is true may be joined.
    """

    split: Callable[[str], list[str]]
    joint: str
    joinable: Callable[[str], object]


def _wordpiece(apart: str) -> _Rules:
    """The rules if every character in the set `apart` is a word of its own."""
    words = re.compile(rf"[^\s{apart}]+|[{apart}]")
    return _Rules(words.findall, " . ", re.compile(rf"[^\s{_ASCII_MARKS}]+").fullmatch)


# The rules for each kind of tokenizer. They are tried in order. The first ones that give the same
# ids as the tokenizer itself are used.
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


class CachedEncoder:
    """Encodes texts, with a table of known words if the kind of tokenizer allows one.

    If `processes` encoders work at once, each takes an equal part of the memory for tables.
    `unknown` counts the characters of the texts so far that became unknown tokens. It stays 0 for a
    tokenizer without a table.
    """

    def __init__(self, tokenizer: Tokenizer, processes: int = 1):
        self.tokenizer = tokenizer
        self.rules: _Rules | None = None
        self.known: dict[str, int] = {}
        self.starts = self.lengths = np.empty(0, np.int64)
        self.ids = np.empty(0, np.int32)
        self.under_unknown = np.empty(0, np.int64)  # characters of each word
        self.characters = self.unknown = 0
        self.limit = min(TABLE_CHARACTERS, max(TABLE_CHARACTERS // processes, 2**20))
        # A tokenizer with added words gets no table, because these may begin and end anywhere. A
        # tokenizer that puts a space before each text gets none either: no rules give its ids.
        for self.rules in _RULES.get(tokenizer.kind, []) if not tokenizer.added else []:
            if np.array_equal(self.encode(_PROBE)[0], self._each(_PROBE)[0]):
                break
            self._forget()
        else:
            self.rules = None
        self.unknown = 0  # without those of the probe

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts.

        Returns the ids of all texts one after the other (int32), and the number of ids of each text
        (int64).
        """
        if self.rules is None:
            return self._each(texts)
        words: list[str] = []
        counts = np.empty(len(texts), np.int64)
        for i, text in enumerate(texts):
            parts = [text] if _ODD.search(text) else self.rules.split(text)
            counts[i] = len(parts)
            words += parts
        numbers = self._numbers(words)
        self.unknown += int(self.under_unknown[numbers].sum())
        return self._gather(numbers, counts)

    def _each(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = self.tokenizer.encode_batch(texts)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.concatenate([np.empty(0, np.int32), *ids]), lengths

    def _joined(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Like `_each`, at half its cost, for words that may be joined."""
        assert self.rules is not None
        mark = self.tokenizer.encode_batch([self.rules.joint])[0]
        if len(mark) != 1:  # the vocabulary lacks the joint, or splits it
            return self._each(words)
        groups = [words[i : i + GROUP] for i in range(0, len(words), GROUP)]
        ids = self.tokenizer.encode_batch([self.rules.joint.join(group) for group in groups])
        flat = np.concatenate([part for group in ids for part in (group, mark)])
        ends = np.flatnonzero(flat == mark[0])
        if len(ends) != len(words):  # a word contains the joint's id
            return self._each(words)
        return flat[flat != mark[0]], np.diff(ends, prepend=-1) - 1

    def _numbers(self, words: list[str]) -> np.ndarray:
        """The row of each word in the table. New words are added."""
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
        self.under_unknown = self.under_unknown[:0]
        self.characters = 0

    def _learn(self, words: list[str]) -> None:
        assert self.rules is not None
        joinable: list[str] = []
        others: list[str] = []
        for word in words:
            may_join = self.rules.joinable(word) and not _ODD.search(word)
            (joinable if may_join else others).append(word)
        for part, encode in ((joinable, self._joined), (others, self._each)):
            if part:
                ids, lengths = encode(part)
                starts = len(self.ids) + np.cumsum(lengths) - lengths
                self.known.update(zip(part, count(len(self.starts)), strict=False))
                self.starts = np.concatenate([self.starts, starts])
                self.lengths = np.concatenate([self.lengths, lengths])
                self.ids = np.concatenate([self.ids, ids])
                lost = self._under_unknown(part, ids, lengths)
                self.under_unknown = np.concatenate([self.under_unknown, lost])
        self.characters += sum(map(len, words))

    def _under_unknown(self, words: list[str], ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The number of characters of each word that became unknown tokens."""
        lost, unknown = np.zeros(len(words), np.int64), self.tokenizer.special["unk"]
        wrong = ids == unknown
        if not wrong.any():
            return lost
        some = np.unique(np.repeat(np.arange(len(words)), lengths)[wrong]).tolist()
        cut = [i for i in some if lengths[i] > 1]
        lost[some] = [len(words[i]) for i in some]
        spans = self.tokenizer.encode_with_offsets([words[i] for i in cut])
        for i, (pieces, starts, ends) in zip(cut, spans, strict=True):
            lost[i] = (ends - starts)[pieces == unknown].sum()
        return lost

    def _gather(self, numbers: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lengths = self.lengths[numbers]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        places = np.repeat(self.starts[numbers] - (ends - lengths), lengths) + np.arange(total)
        per_text = np.diff(np.concatenate([[0], ends])[np.cumsum(counts)], prepend=0)
        return self.ids[places], per_text
