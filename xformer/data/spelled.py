"""Texts that spell out special tokens, such as `[SEP]`."""

from __future__ import annotations

from collections.abc import Iterable

from xformer.data.tokenizers import Tokenizer


class Spelled:
    """Counts texts that spell out special tokens. In a store these are plain characters, but
    `transformers` gives them their ids."""

    def __init__(self, tokenizer: Tokenizer):
        self.pieces = [tokenizer.pieces[i] for i in tokenizer.all_special]
        self.texts, self.seen = 0, dict[str, None]()

    def add(self, texts: Iterable[str]) -> None:
        """Count some texts."""
        for text in texts:
            if here := [piece for piece in self.pieces if piece in text]:
                self.texts += 1
                self.seen |= dict.fromkeys(here)

    def note(self) -> str:
        """A line that says how many texts there were, or "" if there were none."""
        if not self.texts:
            return ""
        some = "1 text spells" if self.texts == 1 else f"{self.texts:,} texts spell"
        return f"note: {some} out {', '.join(self.seen)}; these are read as plain characters"
