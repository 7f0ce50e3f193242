"""The order of samples: sample k of a run is a pure function of (seed, k).

Every epoch is a keyed permutation of the examples. A resumed run therefore need not replay the
earlier samples, and the order needs no array as long as the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xformer.data.hashing import EPOCH, FRACTION, hash_each, key, key_with_each

ROUNDS = 4
# At most this many samples are looked up at once. At first there are fewer, because the store may
# not be in the page cache.
AHEAD = 2**16


def permute(positions: np.ndarray, n: int, order: np.uint64 | np.ndarray) -> np.ndarray:
    """The images (P,) of the positions (P,) under a permutation of range(n), in O(1) each. `order`
    is the key of the permutation, or (P,) a key for each position.

    The permutation is a Feistel network over the smallest power of two that is at least n. If an
    image is n or more, the network is applied to it again until it is below n (cycle walking). On
    average that takes at most two applications.
    """
    bits = max(2, int(n - 1).bit_length())
    rounds = ROUNDS if bits > 7 else 4 * ROUNDS  # halves of few bits mix slowly
    low_bits = np.uint64(bits // 2)
    high = np.uint64(2 ** (bits - bits // 2) - 1)
    low = np.uint64(2 ** (bits // 2) - 1)
    result = positions.astype(np.uint64)
    walking, x, order = np.arange(len(result)), result, np.broadcast_to(order, result.shape)
    while len(walking):
        a, b = x >> low_bits, x & low
        for r in range(rounds):
            a ^= hash_each(order ^ key(2 * r), b) & high
            b ^= hash_each(order ^ key(2 * r + 1), a) & low
        x = a << low_bits | b
        result[walking] = x
        outside = np.flatnonzero(x >= n)
        walking, x, order = walking[outside], x[outside], order[outside]
    return result.view(np.int64)


@dataclass
class Samples:
    """The endless sequence of samples over `rows` examples, or over a random `fraction` of them.

    Which examples the fraction keeps depends only on the seed (Kao & Lee 2021, section 4.2).
    """

    rows: int
    seed: int
    fraction: float = 1.0

    @property
    def per_epoch(self) -> int:
        """Samples in an epoch."""
        return max(1, round(self.rows * self.fraction))

    def given(self, examples: np.ndarray, sizes: np.ndarray) -> np.ndarray | None:
        """None: only a mixture counts what each store gives."""
        return None

    def first_epoch(self) -> np.ndarray:
        """The examples of the first epoch in their order, (`per_epoch`,)."""
        return self.at(np.arange(self.per_epoch))[0]

    def at(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The examples and epochs, int64, of the samples with these numbers, counted from 0."""
        epochs, positions = np.divmod(samples, self.per_epoch)
        orders = key_with_each(epochs, self.seed, EPOCH)
        rows = permute(positions, self.per_epoch, orders)
        if self.per_epoch < self.rows:
            rows = permute(rows, self.rows, key(self.seed, FRACTION))
        return rows, epochs


class Stream:
    """The samples of a run in order, from 0 to `end` - 1. A step has `rows` samples or, if `tokens`
    is given, as many samples as fit into that many tokens.

    `sizes` returns the lengths of examples by number, special tokens included. Many samples are
    looked up at once, because looking up one takes as long as looking up a thousand.
    """

    def __init__(
        self,
        samples: Samples,
        end: int,
        sizes: Callable[[np.ndarray], np.ndarray],
        rows: int,
        tokens: int = 0,
    ):
        self.samples, self.end, self.sizes = samples, end, sizes
        self.per_step, self.tokens, self.ahead = rows, tokens, 1
        self._look_up(0, 0)

    def take(self, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The examples, epochs and sizes of the step that begins at sample `position` < `end`."""
        assert position < self.end, f"sample {position} lies beyond the end of the run"
        count = max(min(self.ahead, self.samples.per_epoch), self.per_step + 1)
        while True:
            first, seen = position - self.first, len(self.rows)
            if 0 <= first < seen:
                last = first + self.per_step
                if self.tokens:
                    full = self.totals[first] - self.row_sizes[first] + self.tokens
                    last = max(first + 1, int(self.totals.searchsorted(full, "right")))
                if last < seen or self.first + seen >= self.end:
                    part = slice(first, last)
                    return self.rows[part], self.epochs[part], self.row_sizes[part]
            self._look_up(position, count)
            count *= 4
            self.ahead = min(4 * self.ahead, AHEAD)

    def _look_up(self, first: int, count: int) -> None:
        self.first = first
        numbers = np.arange(first, min(first + count, self.end))
        self.rows, self.epochs = self.samples.at(numbers)
        self.row_sizes = self.sizes(self.rows)
        self.totals = np.cumsum(self.row_sizes)
