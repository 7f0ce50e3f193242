"""Rows to packed batch, the one way: mapping, truncation, special tokens, packing, masking.

T tokens in the batch, N rows, M masked tokens. Within a batch rows lie in order of length, so that
rows of equal length are neighbours (attention on the CPU takes them in one call).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from xformer.data import masking
from xformer.data.errors import BadInput
from xformer.data.store import Ragged, Split
from xformer.data.tokenizers import Tokenizer

CHUNK = 8192  # tokens of one forward pass without gradient
WINDOW = 2**17  # rows that are put in order of length together
LOOKED_AT = 100_000  # rows whose length is looked at before training or scoring


Array = TypeVar("Array")


@dataclass(frozen=True)
class Batch(Generic[Array]):
    """A packed batch: of numpy arrays on the host, of tensors on a device.

    `places` and `targets` are set for MLM and tags, `labels` for other tasks. An example is
    `together` neighbouring rows.
    """

    tokens: Array  # (T,) int32
    positions: Array  # (T,) int32, from 0 in each row
    segments: Array  # (T,) int32, 1 from the second text of a pair on
    cu_seqlens: Array  # (N + 1,) int32: row i is tokens[cu_seqlens[i] : cu_seqlens[i + 1]]
    longest: int  # tokens of the longest row
    labels: Array | None = None  # (N,) int64 classes or float32 scores, (N, 2) int64 spans
    places: Array | None = None  # (M,) int64
    targets: Array | None = None  # (M,) int64
    rows: Any = None  # (N,) int64 array, the number of each row in the split
    together: int = 1

    @property
    def first(self) -> Array:
        """Where each row begins, (N,)."""
        begins: Any = self.cu_seqlens
        first: Array = begins[:-1]
        return first


@dataclass(frozen=True)
class Workload:
    """How much went through a model. `squares` is the sum over rows of their squared lengths; the
    cost of attention depends on it. `masked` counts the tokens that an MLM head predicted."""

    tokens: int
    squares: int
    rows: int
    masked: int = 0

    @staticmethod
    def even(rows: int, length: int, masking: float = 0.0) -> Workload:
        """`rows` rows of one length; the share `masking` of their tokens is predicted."""
        tokens = rows * length
        return Workload(tokens, tokens * length, rows, round(tokens * masking))


@dataclass(frozen=True)
class Masks:
    """BERT's masking of some rows. The seed and `epochs` (N,) decide which tokens are chosen."""

    seed: int
    probability: float
    epochs: np.ndarray


@lru_cache(2)
def _ramp(bits: int, dtype: type) -> np.ndarray:
    return np.arange(2**bits, dtype=dtype)


def upto(n: int, dtype: type) -> np.ndarray:
    """0 to n - 1. Do not change it: most batches share one array."""
    return _ramp(max(16, n.bit_length()), dtype)[:n]


def ragged_arange(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... (lengths[0] of them), starts[1], ...: (sum of lengths,)."""
    skipped = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - skipped, lengths)


def rows_of(examples: np.ndarray, together: int) -> np.ndarray:
    """The numbers of examples (E,) -> those of their rows, (E x together,)."""
    if together == 1:
        return examples
    rows: np.ndarray = (examples[:, None] * together + np.arange(together)).ravel()
    return rows


def truncate(a: np.ndarray, b: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """New lengths of the two texts of each pair: the longer text loses tokens until both fit."""
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
        if self.mapping is not None:
            object.__setattr__(self, "mapping", self.mapping.astype(np.int32))
        object.__setattr__(self, "special", special)
        object.__setattr__(self, "ordinary", np.flatnonzero(~special))

    @property
    def examples(self) -> int:
        """How many examples the split has: its rows, or fewer if some rows belong together."""
        return self.split.rows // self.split.together

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

    def _whole_sizes(self) -> np.ndarray:
        """Tokens of each of the first LOOKED_AT rows before truncation, special ones included."""
        rows = np.arange(min(self.split.rows, LOOKED_AT))
        columns = [self.split.columns.get(name) for name in ("tokens", "tokens_b")]
        texts = [column.lengths(rows) for column in columns if column is not None]
        return np.sum(texts, 0) + self.extra

    def truncation(self, limit: str, longest: int) -> str:
        """A sentence that says how many rows are longer than `max_tokens`; "" if none is.

        If more than a tenth are, it is a warning with the length that would fit. `limit` is the
        user's name for max_tokens, `longest` the longest row in tokens that the model takes.
        """
        sizes = self._whole_sizes()
        cut = int((sizes > self.max_tokens).sum())
        if not cut:
            return ""
        first = "first " if len(sizes) < self.split.rows else ""
        share = min(100 * cut / len(sizes), 99.9) if cut < len(sizes) else 100.0
        shown = f"{share:.3g} % of the {first}" if share >= 0.05 else f"{cut:,} of the {first}"
        line = f"{shown}{len(sizes):,} rows are longer than {limit} and are truncated"
        if share <= 10:
            return line
        most = int(sizes.max())
        fit = int(np.quantile(sizes, 0.99, method="higher"))
        needs = f"the longest needs {most}"
        if fit <= 0.8 * most:
            needs += f", 99 % of the rows need at most {fit}"
        return f"WARNING: {line}; {needs} (the model takes up to {longest})"

    def sizes(self, examples: np.ndarray) -> np.ndarray:
        """Tokens of each example in a batch, special ones included."""
        together = self.split.together
        sizes = self.row_sizes(rows_of(examples, together))
        return sizes if together == 1 else sizes.reshape(-1, together).sum(1)

    def row_sizes(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of each row in a batch, special ones included."""
        a, b = self.lengths(rows)
        return a + b + self.extra

    def batch(self, examples: np.ndarray) -> Batch[np.ndarray]:
        """The packed batch of these examples, unmasked."""
        return self.batches(examples, [len(examples)])[0]

    def masked_batch(
        self, examples: np.ndarray, epochs: np.ndarray, seed: int, probability: float
    ) -> Batch[np.ndarray]:
        """The packed batch of these examples with BERT's masking; `epochs` (E,) vary the masks."""
        return self.batches(examples, [len(examples)], Masks(seed, probability, epochs))[0]

    def batches(
        self,
        examples: np.ndarray,
        counts: list[int],
        masks: Masks | None = None,
    ) -> list[Batch[np.ndarray]]:
        """Batches of the first counts[0] examples, of the next counts[1] examples, and so on. With
        `masks` they are masked. They are built together, because each step of the work costs nearly
        the same for a small batch as for a large one."""
        together = self.split.together
        rows = rows_of(examples, together)
        a, b = self.lengths(rows)
        sizes = a + b if together == 1 else (a + b).reshape(-1, together).max(1)
        which = np.repeat(np.arange(len(counts)) * (self.max_tokens + 1), counts)
        small = np.min_scalar_type(len(counts) * (self.max_tokens + 1))  # sorts in linear time
        order = np.argsort((which + sizes).astype(small), kind="stable")
        epochs = None if masks is None else np.repeat(masks.epochs[order], together)
        order = rows_of(order, together)
        whole = self._packed(rows[order], a[order], b[order])
        if masks is not None and epochs is not None:
            whole = self._masked(whole, epochs, masks)
        if len(counts) == 1:
            return [whole]
        ends = np.cumsum(counts) * together
        token_ends = whole.cu_seqlens[ends]
        place_ends = token_ends if whole.places is None else whole.places.searchsorted(token_ends)
        cuts = np.stack([ends, token_ends, place_ends], 1).tolist()
        return [_part(whole, begin, end) for begin, end in pairwise([[0, 0, 0], *cuts])]

    def _packed(self, rows: np.ndarray, a: np.ndarray, b: np.ndarray) -> Batch[np.ndarray]:
        """The packed batch of the rows in this order, with `a` tokens of each first text and `b` of
        each second one."""
        sizes = a + b + self.extra
        bounds = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(sizes, out=bounds[1:])
        starts, ends = bounds[:-1], bounds[1:]
        cu_seqlens = bounds.astype(np.int32)
        positions = np.repeat(cu_seqlens[:-1], sizes)
        np.subtract(upto(int(bounds[-1]), np.int32), positions, out=positions)
        columns, special = self.split.columns, self.tokenizer.special
        # write the first text as if it filled its row to the end, then write the rest over it
        first = columns["tokens"]
        source = np.repeat(first.offsets[rows] - 1 - starts, sizes)
        source += upto(len(source), np.int64)
        tokens = self._ids(first, source)
        tokens[starts], tokens[ends - 1] = special["cls"], special["sep"]
        segments = np.zeros_like(tokens)
        second = ends - 1 - b
        if "tokens_b" in columns:
            for i in range(1, self.tokenizer.pair_separators + 1):
                tokens[second - i] = special["sep"]
            source = ragged_arange(columns["tokens_b"].offsets[rows], b)
            tokens[ragged_arange(second, b)] = self._ids(columns["tokens_b"], source)
            segments[ragged_arange(second, b + 1)] = 1
        labels = self._labels(rows, second - starts, b) if "label" in columns else None
        places, targets = self._tags(rows, starts, a) if "labels" in columns else (None, None)
        return Batch(
            tokens,
            positions,
            segments,
            cu_seqlens,
            int(sizes.max(initial=0)),
            labels,
            places,
            targets,
            rows,
            self.split.together,
        )

    def _masked(
        self, batch: Batch[np.ndarray], epochs: np.ndarray, masks: Masks
    ) -> Batch[np.ndarray]:
        keys = masking.row_keys(masks.seed, epochs, batch.rows)
        sizes, mask_id = np.diff(batch.cu_seqlens), self.tokenizer.special["mask"]
        places, targets = masking.mask(
            batch.tokens,
            batch.positions,
            keys,
            sizes,
            self.special,
            mask_id,
            self.ordinary,
            masks.probability,
        )
        return replace(batch, places=places, targets=targets)

    def _ids(self, column: Ragged, places: np.ndarray) -> np.ndarray:
        """The model's ids of the tokens at these places of a column, int32. A place outside the
        column gives any id."""
        if not len(column.values):
            return np.zeros(len(places), np.int32)
        ids = column.values.take(places, mode="clip")
        return ids.astype(np.int32) if self.mapping is None else self.mapping[ids]

    def _labels(self, rows: np.ndarray, second: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Labels as the loss takes them. A span becomes positions in its row; without an answer, or
        if truncation has cut the answer, it is 0, the first special token."""
        labels = self.split.columns["label"][rows]
        if labels.ndim == 1:
            return labels
        there = (labels[:, 0] >= 0) & (labels[:, 1] < b)
        return np.where(there[:, None], second[:, None] + labels, 0)

    def _tags(
        self, rows: np.ndarray, starts: np.ndarray, a: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The places of tokens with a class, and their classes, (M,) each. Tokens that truncation
        has cut are not among them."""
        column = self.split.columns["labels"]
        labels = column.values[ragged_arange(column.offsets[rows], a)]
        known = labels >= 0
        return ragged_arange(starts + 1, a)[known], labels[known].astype(np.int64)


def _part(batch: Batch[np.ndarray], begin: list[int], end: list[int]) -> Batch[np.ndarray]:
    """The rows from `begin` to `end` as a batch; both are numbers of a row, its first token and its
    first place."""
    (row, token, place), (last_row, last_token, last_place) = begin, end
    ends = batch.cu_seqlens[row : last_row + 1] - np.int32(token)
    return Batch(
        batch.tokens[token:last_token],
        batch.positions[token:last_token],
        batch.segments[token:last_token],
        ends,
        int(np.diff(ends).max(initial=0)),
        None if batch.labels is None else batch.labels[row:last_row],
        None if batch.places is None else batch.places[place:last_place] - token,
        None if batch.targets is None else batch.targets[place:last_place],
        batch.rows[row:last_row],
        batch.together,
    )


def chunks(assembler: Assembler, examples: int) -> Iterator[np.ndarray]:
    """The numbers of examples, 0 to `examples` - 1, in parts of about CHUNK tokens; within every
    WINDOW examples they are in order of length."""
    for start in range(0, examples, WINDOW):
        order = np.arange(start, min(start + WINDOW, examples))
        sizes = assembler.sizes(order)
        order = order[np.argsort(sizes, kind="stable")]
        ends = np.cumsum(sizes[order - start])
        cuts = np.unique(np.searchsorted(ends, np.arange(CHUNK, int(ends[-1]), CHUNK)))
        yield from (part for part in np.split(order, cuts) if len(part))
