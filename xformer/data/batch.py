"""Rows to packed batch, the one way: mapping, truncation, special tokens, packing, masking.

T tokens in the batch, N rows, M masked tokens. Within a batch rows lie in order of length, so that
rows of equal length are neighbours (attention on the CPU takes them in one call).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from xformer.data import masking
from xformer.data.errors import BadInput
from xformer.data.store import Ragged, Split
from xformer.data.tokenizers import Tokenizer

CHUNK = 8192  # tokens of one forward pass without gradient


@dataclass(frozen=True)
class Batch:
    """A packed batch of numpy arrays; `places`, `targets` are set for MLM and tags, `labels` for
    other tasks."""

    tokens: np.ndarray  # (T,) int64
    positions: np.ndarray  # (T,) int64, from 0 in each row
    segments: np.ndarray  # (T,) int64, 1 from the second text of a pair on
    cu_seqlens: np.ndarray  # (N + 1,) int32: row i is tokens[cu_seqlens[i] : cu_seqlens[i + 1]]
    rows: np.ndarray  # (N,) int64, where each came from in the store
    labels: np.ndarray | None = None  # (N,) int64 classes or float32 scores, (N, 2) int64 spans
    places: np.ndarray | None = None  # (M,) int64
    targets: np.ndarray | None = None  # (M,) int64


def ragged_arange(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... (lengths[0] of them), starts[1], ...: (sum of lengths,)."""
    skipped = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - skipped, lengths)


def truncate(a: np.ndarray, b: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the two texts of each pair when the longer loses tokens until both fit."""
    over = a + b > budget
    short = np.minimum(a, b)
    first = np.where(a >= b, budget - short, a)
    first = np.where(short > budget // 2, (budget + 1) // 2, first)
    new_a = np.where(over, np.minimum(a, first), a)
    return new_a, np.where(over, np.minimum(b, budget - new_a), b)


@dataclass(frozen=True)
class Assembler:
    """Builds batches from one split for one model.

    `tokenizer` is the model's; `mapping` the array of xformer.data.mapping or None; `max_tokens` a
    row's length with its special tokens.
    """

    split: Split
    tokenizer: Tokenizer
    max_tokens: int
    mapping: np.ndarray | None = None
    special: np.ndarray = field(init=False, repr=False)
    ordinary: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_tokens < self.extra:
            raise BadInput(
                f"batch.max_tokens={self.max_tokens} has no room for the {self.extra} special "
                "tokens of a row"
            )
        special = np.zeros(len(self.tokenizer), bool)
        special[list(self.tokenizer.special.values())] = True
        object.__setattr__(self, "special", special)
        object.__setattr__(self, "ordinary", np.flatnonzero(~special))

    @property
    def extra(self) -> int:
        """Special tokens in a row."""
        return 2 + (self.tokenizer.pair_separators if "tokens_b" in self.split.columns else 0)

    def lengths(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens taken from the first and second text of each row."""
        columns, budget = self.split.columns, self.max_tokens - self.extra
        a = columns["tokens"].lengths(rows)
        if "tokens_b" not in columns:
            return np.minimum(a, budget), np.zeros_like(a)
        return truncate(a, columns["tokens_b"].lengths(rows), budget)

    def share_truncated(self, most: int = 100_000) -> float:
        """Share of rows that lose tokens to `max_tokens`, among the first `most`."""
        rows = np.arange(min(self.split.rows, most))
        texts = (name for name in ("tokens", "tokens_b") if name in self.split.columns)
        whole = sum(self.split.columns[name].lengths(rows) for name in texts)
        return float((whole + self.extra > self.max_tokens).mean()) if len(rows) else 0.0

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of each row in a batch, special ones included."""
        a, b = self.lengths(rows)
        return a + b + self.extra

    def batch(self, rows: np.ndarray) -> Batch:
        """The packed batch of these rows, unmasked."""
        rows = rows[np.argsort(self.sizes(rows), kind="stable")]
        a, b = self.lengths(rows)
        sizes = a + b + self.extra
        ends = np.cumsum(sizes)
        starts = ends - sizes
        columns, special = self.split.columns, self.tokenizer.special
        tokens = np.full(int(ends[-1]) if len(ends) else 0, special["sep"], np.int64)
        tokens[starts] = special["cls"]
        segments = np.zeros_like(tokens)
        tokens[ragged_arange(starts + 1, a)] = self._ids(columns["tokens"], rows, a)
        second = ends - 1 - b
        if "tokens_b" in columns:
            tokens[ragged_arange(second, b)] = self._ids(columns["tokens_b"], rows, b)
            segments[ragged_arange(second, b + 1)] = 1
        places, targets = self._tags(rows, starts, a) if "labels" in columns else (None, None)
        return Batch(
            tokens=tokens,
            positions=ragged_arange(np.zeros_like(sizes), sizes),
            segments=segments,
            cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
            rows=rows,
            labels=self._labels(rows, second - starts, b) if "label" in columns else None,
            places=places,
            targets=targets,
        )

    def _labels(self, rows: np.ndarray, second: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Labels as the loss takes them: a span in positions of its row, 0 (the first special
        token) where there is no answer, or it was truncated away."""
        labels = self.split.columns["label"][rows]
        if labels.ndim == 1:
            return labels
        there = (labels[:, 0] >= 0) & (labels[:, 1] < b)
        return np.where(there[:, None], second[:, None] + labels, 0)

    def _tags(self, rows: np.ndarray, starts: np.ndarray, a: np.ndarray
              ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Where tokens have a class, and which: (M,) each. What truncation cut has none."""
        column = self.split.columns["labels"]
        labels = column.values[ragged_arange(column.offsets[rows], a)]
        known = labels >= 0
        return ragged_arange(starts + 1, a)[known], labels[known].astype(np.int64)

    def masked_batch(self, rows: np.ndarray, epochs: np.ndarray, seed: int,
                     probability: float) -> Batch:  # fmt: skip
        """The packed batch of these rows with BERT's masking; `epochs` (N,) vary the masks."""
        order = np.argsort(self.sizes(rows), kind="stable")
        plain = self.batch(rows)
        tokens, places, targets = masking.mask(
            plain.tokens,
            plain.positions,
            masking.row_keys(seed, epochs[order], plain.rows),
            np.diff(plain.cu_seqlens),
            self.special,
            self.tokenizer.special["mask"],
            self.ordinary,
            probability,
        )
        return Batch(**{**plain.__dict__, "tokens": tokens, "places": places, "targets": targets})

    def _ids(self, column: Ragged, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        ids = column.values[ragged_arange(column.offsets[rows], lengths)]
        return ids if self.mapping is None else self.mapping[ids]


def chunks(assembler: Assembler, rows: int) -> Iterator[np.ndarray]:
    """Row numbers 0 to `rows` in order of length, cut where CHUNK tokens are full."""
    order = np.arange(rows)
    sizes = assembler.sizes(order)
    order = order[np.argsort(sizes, kind="stable")]
    ends = np.cumsum(sizes[order])
    cuts = np.unique(np.searchsorted(ends, np.arange(CHUNK, int(ends[-1]), CHUNK)))
    yield from (part for part in np.split(order, cuts) if len(part))
