"""The characters of a training text, and what a tokenizer does with them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

import numpy as np

from xformer.data.tokenizers import Tokenizer

# A line says if a tokenizer deletes more than these shares of a text. Signs are the vowel signs of
# Hindi (20 to 25 % of the text), the tone marks of Thai (18 %) and the voicing marks of Japanese
# (7 %): without them words cannot be told apart, so the limit is low, and a text that is Hindi in
# part is told, too. Accents belong to Latin, Greek and Cyrillic letters. Here the limit lies above
# the languages that BERT's authors had in mind (English 0.1 %, Russian 1 %, German with its umlauts
# 1.5 %, French and Spanish 3 %), and below Hungarian and Greek (8 %), Czech (11 %) and Vietnamese
# (30 %).
SIGNS = 0.01
ACCENTS = 0.05
SHOWN = 8  # characters that a line names
HELD = 2**20  # characters that are counted at once


class CharacterCounts:
    """How often each character occurs in a text that arrives in pieces."""

    def __init__(self) -> None:
        self._counts = np.zeros(0x110000, np.int64)
        self._held: list[str] = []  # texts that are not counted yet
        self._size = 0

    def add(self, text: str) -> None:
        """Count the characters of a text. Many at once take a tenth of the time of a Counter."""
        self._held.append(text)
        self._size += len(text)
        if self._size > HELD:
            self._count()

    def _count(self) -> None:
        codes = "".join(self._held).encode("utf-32-le", "surrogatepass")
        counts = np.bincount(np.frombuffer(codes, np.uint32))
        self._counts[: len(counts)] += counts
        self._held, self._size = [], 0

    def items(self) -> Iterator[tuple[str, int]]:
        """Every character that occurs, in Unicode's order, with its count."""
        self._count()
        for code in np.flatnonzero(self._counts).tolist():
            yield chr(code), int(self._counts[code])


def marks(text: str) -> list[str]:
    """The marks that BERT and ALBERT strip from a text: vowel signs, tone marks, and the accents
    that its letters are composed of. Those that choose the form of an emoji are left out."""
    parts = unicodedata.normalize("NFD", text)
    return [c for c in parts if unicodedata.category(c) == "Mn" and not "\ufe00" <= c <= "\ufe0f"]


def _is_accent(mark: str) -> bool:
    """Whether a mark is an accent of Latin, Greek or Cyrillic letters, and no sign of another
    script."""
    return "\u0300" <= mark <= "\u036f"


def deleted(counts: CharacterCounts) -> str:
    """A note if a large part of a text's characters is deleted as accents, else ""."""
    signs = accents = visible = 0
    for character, count in counts.items():
        its_marks = marks(character)
        own = len(its_marks) - (its_marks == [character])  # marks within a composed letter
        visible += 0 if character.isspace() else count * (1 + own)
        here = sum(map(_is_accent, its_marks))
        accents += here * count
        signs += (len(its_marks) - here) * count
    if signs <= SIGNS * visible and accents <= ACCENTS * visible:
        return ""
    return (
        f"note: {100 * (signs + accents) / visible:.3g} % of the text's characters are deleted: "
        "accents, vowel signs, tone marks and voicing marks; --keep-accents keeps them, and "
        "--cased keeps upper case, too"
    )


def left_out(counts: CharacterCounts, tokenizer: Tokenizer, coverage: float | None) -> str:
    """A note if a tokenizer does not know some characters of its own training text, else ""."""
    visible = {c: count for c, count in counts.items() if not c.isspace()}
    ids = tokenizer.encode_batch([*visible])
    unknown = tokenizer.special["unk"]
    lost = [c for c, of_c in zip(visible, ids, strict=True) if unknown in of_c]
    if not lost:
        return ""
    share = sum(visible[c] for c in lost) / sum(visible.values())
    first = " ".join(sorted(lost, key=lambda c: -visible[c])[:SHOWN])
    option = "" if coverage == 1 else "; --character-coverage 1 keeps all"
    return (
        f"note: {len(lost):,} of the text's {len(visible):,} different characters are left out "
        f"({100 * share:.3g} % of the text becomes {tokenizer.pieces[unknown]}), such as "
        f"{first}{option}"
    )
