"""A mixture of several stores: sample k of a run is a pure function of (seed, k), as in
xformer.data.sampler.

The samples of a mixture come in decks. A deck holds about DECK samples, and each store gives its
share of them, evenly spread. Within a store, the rows come in the order of `Samples`: a keyed
permutation for each pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xformer.data.hashing import key
from xformer.data.sampler import Samples

STORE = 5  # keeps the seeds of the stores apart from other hash keys
DECK = 1024
STAGES = 256  # if the weights change, a run has at least this many decks of at least 16 samples


class Mixture(Samples):
    """The endless sequence of samples from stores that have `rows` (K,) examples each.

    Store i gives a share weights[i] of the samples. With `final`, the weights change linearly from
    `weights` to `final` over the first `planned` samples, and then stay. Both are divided by their
    sums. Examples are numbered through all stores in their order. Each store restarts, in a new
    order, when all its rows (or its `fraction` of them) were read. An epoch of the mixture has as
    many samples as all stores together have rows.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seed: int,
        fraction: float,
        weights: Sequence[float],
        final: Sequence[float] = (),
        planned: int = 1,
    ):
        super().__init__(sum(rows), seed, fraction)
        self.stores = [Samples(n, int(key(seed, STORE, i)), fraction) for i, n in enumerate(rows)]
        self.bounds = np.cumsum([0, *rows])  # store i has the examples bounds[i] to bounds[i + 1]
        self.planned = planned
        self.weights = np.asarray(weights) / sum(weights)
        self.change = np.asarray(final or weights) / sum(final or weights) - self.weights
        self.deck = min(DECK, max(16, planned // STAGES)) if self.change.any() else DECK
        self._plan(STAGES)

    @property
    def per_epoch(self) -> int:
        """Samples in an epoch."""
        return sum(store.per_epoch for store in self.stores)

    def some(self) -> np.ndarray:
        return self.at(np.arange(min(self.rows, 10_000)))[0]

    def at(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The example numbers and epochs, int64, of samples given by number, counted from 0. The
        epoch is the number of earlier passes over the sample's store. Takes longer if the numbers
        are far apart."""
        owners, numbers = self._draw(samples)
        rows, epochs = np.empty_like(numbers), np.empty_like(numbers)
        for i, store in enumerate(self.stores):
            here = np.flatnonzero(owners == i)
            rows[here], epochs[here] = store.at(numbers[here])
        return rows + self.bounds[owners], epochs

    def given(self, examples: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """How many of these examples (E,) each store gives, and with how many tokens; (2, K)
        int64."""
        owners = self.bounds.searchsorted(examples, "right") - 1
        counts = [np.bincount(owners, weights, len(self.stores)) for weights in (None, sizes)]
        return np.stack(counts).astype(np.int64)

    def _plan(self, decks: int) -> None:
        """Count the samples in the first `decks` decks. `drawn` (decks + 1, K) has how many each
        store gave before each deck: its ideal number, rounded. A longer plan begins like a shorter
        one."""
        middles = (np.arange(decks) + 0.5) * self.deck
        done = np.minimum(middles / self.planned, 1.0)
        ideal = np.cumsum(self.deck * (self.weights + done[:, None] * self.change), axis=0)
        drawn = np.concatenate([np.zeros_like(ideal[:1]), np.floor(ideal + 0.5)]).astype(np.int64)
        self.drawn, self.starts = drawn, drawn.sum(1)

    def _draw(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The store of each sample, and how many samples the store gave before it."""
        last = int(samples.max(initial=0))
        while self.starts[-1] <= last:
            self._plan(2 * len(self.starts))
        first = int(samples.min(initial=last))
        begin, end = self.starts.searchsorted([first, last], "right")
        drawn = self.drawn[begin - 1 : end + 1]
        owners, numbers, times = [], [], []
        for i in range(len(self.stores)):
            counts = np.diff(drawn[:, i])
            deck = np.repeat(np.arange(len(counts)), counts)
            number = np.arange(drawn[0, i], drawn[-1, i])
            owners.append(np.full_like(number, i))
            numbers.append(number)
            times.append(deck + (number - drawn[deck, i] + 0.5) / counts[deck])
        order = np.argsort(np.concatenate(times), kind="stable")
        chosen = order[samples - self.starts[begin - 1]]
        return np.concatenate(owners)[chosen], np.concatenate(numbers)[chosen]
