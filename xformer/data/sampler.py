"""The order of the samples: sample k of a run is a pure function of (seed, k).

The stream of samples is epoch after epoch, each a keyed permutation of the rows, so nothing is
replayed when a run resumes and no array of the store's size is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xformer.data.hashing import key, keys

ROUNDS = 4
FRACTION, EPOCH = 1, 2  # what a key is for


def permute(positions: np.ndarray, n: int, permutation_key: np.uint64) -> np.ndarray:
    """The images of `positions` under the keyed permutation of range(n), O(1) each.

    A Feistel network over the smallest power of two that holds n; an image beyond n is sent
    through again until it falls inside (cycle walking), at most twice on average.
    """
    bits = max(2, int(n - 1).bit_length())
    rounds = ROUNDS if bits > 7 else 4 * ROUNDS  # halves of few bits mix slowly
    low_bits = np.uint64(bits // 2)
    high = np.uint64(2 ** (bits - bits // 2) - 1)
    low = np.uint64(2 ** (bits // 2) - 1)
    round_keys = [permutation_key ^ key(r) for r in range(2 * rounds)]
    result = positions.astype(np.uint64)
    walking = np.arange(len(result))
    while len(walking):
        x = result[walking]
        a, b = x >> low_bits, x & low
        for r in range(rounds):
            a = a ^ (keys(round_keys[2 * r], b) & high)
            b = b ^ (keys(round_keys[2 * r + 1], a) & low)
        result[walking] = a << low_bits | b
        walking = walking[result[walking] >= n]
    return result.astype(np.int64)


@dataclass(frozen=True)
class Samples:
    """The endless stream of samples over `rows` rows; `fraction` keeps that share of them.

    Which rows a fraction keeps depends on the seed alone (Kao & Lee 2021, section 4.1).
    """

    rows: int
    seed: int
    fraction: float = 1.0

    @property
    def per_epoch(self) -> int:
        return max(1, round(self.rows * self.fraction))

    def at(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows, epochs), int64, of the samples with these numbers (from 0)."""
        epochs, positions = np.divmod(samples, self.per_epoch)
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = key(self.seed, EPOCH, int(epoch))
            rows[here] = permute(positions[here], self.per_epoch, order)
        if self.per_epoch < self.rows:
            rows = permute(rows, self.rows, key(self.seed, FRACTION))
        return rows, epochs


def take_rows(position: int, end: int, rows: int) -> np.ndarray:
    """The numbers of the next `rows` samples from `position`, not beyond `end`."""
    return np.arange(position, min(position + rows, end))


def take_tokens(position: int, end: int, tokens: int,
                lengths: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:  # fmt: skip
    """The numbers of as many samples from `position` as `tokens` hold, at least one.

    `lengths` gives the tokens of samples by their numbers, special ones included.
    """
    if position >= end:
        return np.arange(0)
    window = 64
    while True:
        samples = np.arange(position, min(position + window, end))
        total = np.cumsum(lengths(samples))
        if position + window >= end or total[-1] > tokens:
            return samples[: max(1, int(np.searchsorted(total, tokens, side="right")))]
        window *= 4
