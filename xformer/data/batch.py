"""From the rows of a store to a packed batch: map ids, truncate, add special tokens, pack, mask.

T tokens in the batch, N rows, M masked or tagged tokens, E examples, V vocabulary, K ordinary
pieces. The rows of a batch are sorted by length, because some attention kernels pad neighbouring
rows to the same length; `Batch.rows` says which row is where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from xformer.data import masking
from xformer.data.errors import BadInput
from xformer.data.store import TEXTS, Ragged, Split
from xformer.data.tokenizers import Tokenizer

CHUNK = 8192  # tokens in a forward pass that needs no gradient
WINDOW = 2**17  # number of examples that are sorted by length at a time
SAMPLED = 100_000  # rows whose lengths are checked before training or scoring

Array = TypeVar("Array")


@dataclass(frozen=True, eq=False)
class Batch(Generic[Array]):
    """A packed batch, of numpy arrays on the host or of tensors on a device.

    `places` and `targets` are set for tasks that label tokens (MLM, tags), and `labels` for tasks
    that label rows. An example is one row, or `together` neighbouring rows (the endings of a
    multiple-choice question).
    """

    tokens: Array  # (T,) int32
    positions: Array  # (T,) int32, from 0 in each row
    segments: Array  # (T,) int32, 1 for the second text of a pair and the separator after it
    cu_seqlens: Array  # (N + 1,) int32: row i is tokens[cu_seqlens[i] : cu_seqlens[i + 1]]
    longest: int  # at least the length of the longest row
    labels: Array | None = None  # (N,) int64 classes or float32 scores, (N, 2) int64 spans
    places: Array | None = None  # (M,) int64, indices in `tokens` of the tokens to predict
    targets: Array | None = None  # (M,) int64, the true ids or classes of these tokens
    rows: Any = None  # (N,) int64 array on the host, the row numbers in the split
    together: int = 1

    @property
    def first(self) -> Array:
        """The index of each row's first token, (N,)."""
        return self.cu_seqlens[:-1]  # type: ignore[index]

    def to(self, device: Any) -> Batch[Array]:
        """A batch of tensors on another device. (`xformer.tasks.task.to_device` makes one from
        arrays.)"""
        return replace(self, **{k: v.to(device) for k, v in vars(self).items() if hasattr(v, "to")})


@dataclass(frozen=True)
class Workload:
    """The amount of text that a model processes, as the counts that determine the cost.

    `squares` is the sum of the squared row lengths; the cost of attention is proportional to it.
    `masked` is the number of tokens that an MLM head predicts.
    """

    tokens: int
    squares: int
    rows: int
    masked: int = 0

    @staticmethod
    def even(rows: int, length: int, masked: float = 0.0) -> Workload:
        """The workload of `rows` rows of `length` tokens each, a share `masked` of them masked."""
        tokens = rows * length
        return Workload(tokens, tokens * length, rows, round(tokens * masked))


@dataclass(frozen=True)
class Masks:
    """Settings for BERT's masking. The seed and the examples' `epochs` (E,) select the tokens, or
    spans of tokens."""

    seed: int
    probability: float
    epochs: np.ndarray
    spans: bool = False


@lru_cache(2)
def _ramp(bits: int, dtype: type) -> np.ndarray:
    return np.arange(2**bits, dtype=dtype)


def shared_arange(n: int, dtype: type) -> np.ndarray:
    """The integers 0 to n - 1, (n,). All batches share the underlying array: do not write to it."""
    return _ramp(max(16, n.bit_length()), dtype)[:n]


def ragged_arange(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The concatenated ranges starts[i], ..., starts[i] + lengths[i] - 1, (sum of lengths,)."""
    skipped = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - skipped, lengths)


def rows_of(examples: np.ndarray, together: int) -> np.ndarray:
    """The row numbers (E x together,) of the examples with these numbers (E,)."""
    if together == 1:
        return examples
    rows: np.ndarray = (examples[:, None] * together + np.arange(together)).ravel()
    return rows


def truncate(a: np.ndarray, b: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Truncate pairs of texts, each pair to `budget` tokens in total. The first texts have `a`
    tokens and the second texts `b`, (N,) each.

    The longer text of a pair loses tokens until both fit. Returns the new lengths, (N,) each.
    """
    over = a + b > budget
    short = np.minimum(a, b)
    first = np.where(a >= b, budget - short, a)
    # both texts are too long: each gets half
    first = np.where(short > budget // 2, (budget + 1) // 2, first)
    new_a = np.where(over, np.minimum(a, first), a)
    return new_a, np.where(over, np.minimum(b, budget - new_a), b)


@dataclass(frozen=True)
class Assembler:
    """Builds batches from one split of a store for one model.

    `tokenizer` is the model's. `max_tokens` is the length limit of a row, special tokens included.
    `mapping` has a model id for each id of the store's vocabulary (see xformer.data.mapping); None
    leaves the ids unchanged. Raises BadInput if `max_tokens` is less than the number of special
    tokens in a row.
    """

    split: Split
    tokenizer: Tokenizer
    max_tokens: int
    mapping: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < self.extra:
            raise BadInput(
                f"batch.max_tokens={self.max_tokens} leaves no room for the {self.extra} special "
                "tokens of a row; give a larger number"
            )

    @cached_property
    def special(self) -> np.ndarray:
        """Whether each id of the model is a special token, (V,)."""
        special = np.zeros(len(self.tokenizer), bool)
        special[list(self.tokenizer.special.values())] = True
        return special

    @cached_property
    def ordinary(self) -> np.ndarray:
        """The ids that can replace a masked token: all but the special tokens, (K,)."""
        return np.flatnonzero(~self.special)

    @property
    def examples(self) -> int:
        """Number of examples in the split: fewer than rows if an example spans several rows."""
        return self.split.rows // self.split.together

    @property
    def labels_words(self) -> bool:
        """Whether words have labels. The `places` of a batch are then the labelled words."""
        return "labels" in self.split.columns

    @property
    def extra(self) -> int:
        """Number of special tokens in a row."""
        return 2 + (self.tokenizer.pair_separators if "tokens_b" in self.split.columns else 0)

    def lengths(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The lengths of the first and second text of each row after truncation, (N,) each."""
        columns, budget = self.split.columns, self.max_tokens - self.extra
        a = columns["tokens"].lengths(rows)
        if "tokens_b" not in columns:
            return np.minimum(a, budget), np.zeros_like(a)
        return truncate(a, columns["tokens_b"].lengths(rows), budget)

    def whole_sizes(self, rows: np.ndarray) -> np.ndarray:
        """Length of each row before truncation, special tokens included, (N,)."""
        columns = [self.split.columns[name] for name in TEXTS if name in self.split.columns]
        return np.sum([column.lengths(rows) for column in columns], 0) + self.extra

    def longest(self) -> int:
        """Length of the split's longest row before truncation, special tokens included."""
        rows = self.split.rows
        blocks = (np.arange(i, min(i + WINDOW, rows)) for i in range(0, rows, WINDOW))
        return max(int(self.whole_sizes(block).max()) for block in blocks)

    def truncation(self, limit: str, longest: int, remedy: str = "") -> str:
        """A sentence that says how many rows are longer than `max_tokens`, or "" if none is.

        If more than a tenth of the rows are longer, the sentence is a warning that says what length
        they need, and ends with the `remedy`. `limit` names the limit and its value, such as
        "batch.max_tokens=128". `longest` is the longest row that the model accepts, in tokens.
        """
        sizes = self.whole_sizes(np.arange(min(self.split.rows, SAMPLED)))
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
        return f"WARNING: {line}; {needs} (the model takes up to {longest}){remedy}"

    def sizes(self, examples: np.ndarray) -> np.ndarray:
        """Length of each example in a batch, special tokens included, (E,)."""
        together = self.split.together
        sizes = self.row_sizes(rows_of(examples, together))
        return sizes if together == 1 else sizes.reshape(-1, together).sum(1)

    def row_sizes(self, rows: np.ndarray) -> np.ndarray:
        """Length of each row in a batch, special tokens included, (N,)."""
        a, b = self.lengths(rows)
        return a + b + self.extra

    def batch(self, examples: np.ndarray) -> Batch[np.ndarray]:
        """The packed batch of these examples (E,), without masking."""
        return self.batches(examples, [len(examples)])[0]

    def masked_batch(
        self, examples: np.ndarray, epochs: np.ndarray, seed: int, probability: float
    ) -> Batch[np.ndarray]:
        """The packed and masked batch of these examples (E,). The masks depend on `epochs` (E,)."""
        return self.batches(examples, [len(examples)], Masks(seed, probability, epochs))[0]

    def in_order(self, rows: np.ndarray, masks: Masks | None = None) -> Batch[np.ndarray]:
        """The packed batch of these rows (N,) in the order given, masked if there are `masks`."""
        batch = self._packed(rows, *self.lengths(rows))
        return batch if masks is None else self._masked(batch, masks)

    def batches(
        self,
        examples: np.ndarray,
        counts: list[int],
        masks: Masks | None = None,
    ) -> list[Batch[np.ndarray]]:
        """Packed batches of the first counts[0] examples, of the next counts[1], and so on.

        If `masks` is given, the batches are masked. All are built in one pass, because a numpy call
        takes nearly as long for a small batch as for a large one.
        """
        together = self.split.together
        rows = rows_of(examples, together)
        a, b = self.lengths(rows)
        sizes = a + b if together == 1 else (a + b).reshape(-1, together).max(1)  # (E,)
        # sort by batch, then by length; numpy sorts 16-bit integers in linear time
        batch_keys = np.repeat(np.arange(len(counts)) * (self.max_tokens + 1), counts)  # (E,)
        key_type = np.min_scalar_type(len(counts) * (self.max_tokens + 1))
        by_length = np.argsort((batch_keys + sizes).astype(key_type), kind="stable")  # (E,)
        order = rows_of(by_length, together)  # (N,)
        whole = self._packed(rows[order], a[order], b[order])
        if masks is not None:
            epochs = np.repeat(masks.epochs[by_length], together)  # (N,)
            whole = self._masked(whole, replace(masks, epochs=epochs))
        if len(counts) == 1:
            return [whole]
        row_ends = np.cumsum(counts) * together
        token_ends = whole.cu_seqlens[row_ends]
        place_ends = token_ends if whole.places is None else whole.places.searchsorted(token_ends)
        cuts = np.stack([row_ends, token_ends, place_ends], 1).tolist()
        return [_slice(whole, begin, end) for begin, end in pairwise([[0, 0, 0], *cuts])]

    def _packed(self, rows: np.ndarray, a: np.ndarray, b: np.ndarray) -> Batch[np.ndarray]:
        """The packed batch of the rows in this order, with `a` tokens of each first text and `b` of
        each second text, (N,) each."""
        sizes = a + b + self.extra
        bounds = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(sizes, out=bounds[1:])
        starts, ends = bounds[:-1], bounds[1:]
        cu_seqlens = bounds.astype(np.int32)
        positions = np.repeat(cu_seqlens[:-1], sizes)  # (T,)
        np.subtract(shared_arange(int(bounds[-1]), np.int32), positions, out=positions)
        columns, special = self.split.columns, self.tokenizer.special
        # Fill each row with ids from the first text's column, then overwrite the special tokens and
        # the second text. This avoids an index array for the tokens of the first texts.
        first = columns["tokens"]
        source = np.repeat(first.offsets[rows] - 1 - starts, sizes)  # (T,)
        source += shared_arange(len(source), np.int64)
        tokens = self._ids(first, source)
        tokens[starts], tokens[ends - 1] = special["cls"], special["sep"]
        segments = np.zeros_like(tokens)
        second = ends - 1 - b  # where the second texts begin
        if "tokens_b" in columns:
            for i in range(1, self.tokenizer.pair_separators + 1):
                tokens[second - i] = special["sep"]
            source = ragged_arange(columns["tokens_b"].offsets[rows], b)
            tokens[ragged_arange(second, b)] = self._ids(columns["tokens_b"], source)
            if self.tokenizer.segments:
                segments[ragged_arange(second, b + 1)] = 1
        labels = self._labels(rows, second - starts, b) if "label" in columns else None
        places, targets = self._tags(rows, starts, a) if self.labels_words else (None, None)
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

    def _masked(self, batch: Batch[np.ndarray], masks: Masks) -> Batch[np.ndarray]:
        """The batch with its tokens masked, in place. `masks.epochs` (N,) are those of its rows."""
        keys = masking.row_keys(masks.seed, masks.epochs, batch.rows)
        sizes, mask_id = np.diff(batch.cu_seqlens), self.tokenizer.special["mask"]
        choose = masking.mask_spans if masks.spans else masking.mask
        tokens, special, ordinary = batch.tokens, self.special, self.ordinary
        places, targets = choose(
            tokens, batch.positions, keys, sizes, special, mask_id, ordinary, masks.probability
        )
        return replace(batch, places=places, targets=targets)

    def _ids(self, column: Ragged, places: np.ndarray) -> np.ndarray:
        """The model's ids of the tokens at these places of a column, int32.

        A place outside the column yields an arbitrary id, which the caller overwrites.
        """
        if not len(column.values):
            return np.zeros(len(places), np.int32)
        ids = column.values.take(places, mode="clip")
        return (ids if self.mapping is None else self.mapping[ids]).astype(np.int32)

    def _labels(self, rows: np.ndarray, second: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The labels of these rows: (N,) classes or scores, or (N, 2) spans.

        The ends of a span are positions in its row. If there is no answer, or it was truncated,
        both ends are 0, the position of the first special token.
        """
        labels = self.split.columns["label"][rows]
        if labels.ndim == 1:
            return labels
        answered = (labels[:, 0] >= 0) & (labels[:, 1] < b)
        return np.where(answered[:, None], second[:, None] + labels, 0)

    def _tags(
        self, rows: np.ndarray, starts: np.ndarray, a: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The places of the tokens that have a class, and their classes, (M,) each. Truncated
        tokens are left out."""
        column = self.split.columns["labels"]
        labels = column.values[ragged_arange(column.offsets[rows], a)]
        known = labels >= 0
        return ragged_arange(starts + 1, a)[known], labels[known].astype(np.int64)


def _slice(batch: Batch[np.ndarray], begin: list[int], end: list[int]) -> Batch[np.ndarray]:
    """The rows from `begin` up to `end` as a batch. `begin` and `end` have three numbers each: that
    of a row, of the row's first token, and of the row's first place."""
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


def chunks(assembler: Assembler, examples: int, tokens: int = CHUNK) -> Iterator[np.ndarray]:
    """The example numbers 0 to `examples` - 1, in chunks of about this many tokens.

    Each block of WINDOW examples is sorted by length, so that a chunk holds rows of similar length.
    """
    for start in range(0, examples, WINDOW):
        order = np.arange(start, min(start + WINDOW, examples))
        sizes = assembler.sizes(order)
        order = order[np.argsort(sizes, kind="stable")]
        ends = np.cumsum(sizes[order - start])
        cuts = np.unique(np.searchsorted(ends, np.arange(tokens, int(ends[-1]), tokens)))
        yield from (part for part in np.split(order, cuts) if len(part))
