"""A mixture of several stores: sample k of a run is a pure function of (seed, k), as in
xformer.data.sampler.

The samples of a mixture come in decks. A deck holds about DECK samples, and each store gives its
share of them, evenly spread. Within a store, the rows come in the order of `Samples`: a keyed
permutation for each pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xformer.data.hashing import STORE, key
from xformer.data.sampler import Samples

DECK = 1024
STAGES = 256  # if the weights change, a run has this many decks, but none under 16 samples


class Mixture(Samples):
    """An endless sequence of samples from K stores. Store i has rows[i] examples.

    Store i gives a share weights[i] of the samples. With `final`, the weights change linearly from
    `weights` to `final` over the first `planned` samples, and then stay. Both are divided by their
    sums. The examples of a store are numbered after those of the stores before it. When all
    examples of a store (or its `fraction` of them) were read, it starts again in a new order. An
    epoch of the mixture has as many samples as one pass over every store.
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

    def at(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The examples and epochs, int64, of the samples with these numbers, counted from 0. The
        epoch is the number of earlier passes over the sample's store. This takes longer if the
        numbers are far apart."""
        owners, numbers = self._draw(samples)
        rows, epochs = np.empty_like(numbers), np.empty_like(numbers)
        for i, store in enumerate(self.stores):
            here = np.flatnonzero(owners == i)
            rows[here], epochs[here] = store.at(numbers[here])
        return rows + self.bounds[owners], epochs

    def given(self, examples: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """How many of these examples (E,), and how many of their tokens, each store gives: (2, K)
        int64. `sizes` (E,) are the tokens of each example."""
        owners = self.bounds.searchsorted(examples, "right") - 1
        counts = [np.bincount(owners, weights, len(self.stores)) for weights in (None, sizes)]
        return np.stack(counts).astype(np.int64)

    def _plan(self, decks: int) -> None:
        """Count the samples in the first `decks` decks. Before deck d, store i has given
        drawn[d, i] samples, its ideal number, rounded. starts[d] is their sum, the number of the
        deck's first sample. If a plan is extended, its first decks stay the same."""
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
            times.append(deck + (number - drawn[deck, i] + 0.5) / counts[deck])  # evenly spread
        order = np.argsort(np.concatenate(times), kind="stable")
        chosen = order[samples - self.starts[begin - 1]]
        return np.concatenate(owners)[chosen], np.concatenate(numbers)[chosen]
