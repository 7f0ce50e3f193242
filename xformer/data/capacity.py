"""Batches of a few fixed shapes, for CUDA graphs and compiled code: each is filled to a capacity.

T tokens in the batch, N rows, M masked or tagged tokens. A filled batch gives the same loss and the
same gradients: filler tokens are rows of their own, to which no other row attends, and no filler
has a label.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from xformer.data.batch import Batch
from xformer.data.store import IGNORED

ALIGNED = 16  # tokens and places are multiples of this, as 16-bit matrix products like it
SPARE = 1.25  # room for rows: this many times those of the batch with the most, plus filler rows
# For a batch that fits no capacity, the largest one is tried with this share added, then with twice
# this share, four times this share, and so on.
GROWTH = 0.05
DEVIATIONS = 3  # standard deviations by which a batch's masked tokens may exceed their mean


@dataclass(frozen=True, order=True)
class Capacity:
    """The shape of a filled batch: T, N and M. `places` is 0 if the task has none."""

    tokens: int
    rows: int
    places: int


class Capacities:
    """The shapes that the batches of a run are filled up to.

    `tokens` and `rows` (B,) are the sizes of some of the run's batches. At most `most` capacities
    are chosen, so that these batches need as little filler as possible. Later batches may fit none
    of them; `beyond` is for those. `longest` is the length limit of a row, `together` the number of
    rows in an example, and `masked` the expected share of tokens to predict (0: the task predicts
    no tokens, 1: any number is possible). `spread` is the standard deviation of the number of
    masked tokens, divided by that of tokens that are chosen independently.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        rows: np.ndarray,
        most: int,
        longest: int,
        together: int = 1,
        masked: float = 0.0,
        spread: float = 1.0,
    ):
        self.longest, self.together, self.masked, self.spread = longest, together, masked, spread
        levels = [_aligned(level + 1, ALIGNED) for level in least_filler(tokens, most)]
        most_filler = int(np.diff([0, *levels]).max())
        most_rows = int(SPARE * rows.max()) + -(-most_filler // longest) + together
        self.known = [self._capacity(level, most_rows) for level in sorted(set(levels))]

    def _capacity(self, tokens: int, rows: int) -> Capacity:
        places = tokens
        if self.masked < 1:
            deviation = self.spread * (self.masked * (1 - self.masked) * tokens) ** 0.5
            places = int(self.masked * tokens + DEVIATIONS * deviation)
        return Capacity(tokens, _aligned(rows, self.together), _aligned(places, ALIGNED))

    def fill(self, batch: Batch[np.ndarray]) -> Batch[np.ndarray]:
        """The batch, filled up to the first capacity that holds it.

        The choice does not depend on earlier batches, so a continued run fills its batches as one
        that never stopped would.
        """
        fitting = (c for c in itertools.chain(self.known, self.beyond()) if self._holds(c, batch))
        return filled(batch, next(fitting), self.longest)

    def beyond(self) -> Iterator[Capacity]:
        """Capacities above the largest chosen one. They are few: each is a new shape to compile."""
        most = self.known[-1]
        for i in itertools.count():
            factor = 1 + GROWTH * 2**i
            yield Capacity(
                _aligned(int(factor * most.tokens) + 1, ALIGNED),
                _aligned(int(factor * most.rows) + 1, self.together),
                _aligned(int(factor * most.places) + 1, ALIGNED),
            )

    def _holds(self, capacity: Capacity, batch: Batch[np.ndarray]) -> bool:
        spare = capacity.tokens - len(batch.tokens)
        rows = len(batch.cu_seqlens) - 1 + -(-spare // self.longest)
        places = 0 if batch.places is None else len(batch.places)
        return spare > 0 and rows <= capacity.rows and places <= capacity.places


def filled(batch: Batch[np.ndarray], capacity: Capacity, longest: int) -> Batch[np.ndarray]:
    """The batch with filler after its last row, in the shape of the capacity.

    At least one token is filler. Filler tokens form rows of at most `longest` tokens. The remaining
    rows of the capacity are empty. They begin at the first filler token, so that their entries in
    `Batch.first` are valid indices. `Batch.rows` names only the real rows.
    """
    T, N = len(batch.tokens), len(batch.cu_seqlens) - 1
    more, spare = capacity.tokens - T, capacity.rows - N
    ends = np.arange(capacity.tokens, T, -longest)[::-1].astype(np.int32)  # of the filler's rows
    empty = np.full(spare - len(ends), T, np.int32)
    starts = np.concatenate([[T], ends[:-1]])
    result = replace(
        batch,
        tokens=_extended(batch.tokens, more, 0),
        positions=np.concatenate(
            [batch.positions, np.arange(T, capacity.tokens) - np.repeat(starts, ends - starts)]
        ).astype(np.int32),
        segments=_extended(batch.segments, more, 0),
        cu_seqlens=np.concatenate([batch.cu_seqlens, empty, ends]),
        longest=longest,
    )
    if batch.labels is not None:
        label = np.nan if batch.labels.dtype.kind == "f" else IGNORED
        result = replace(result, labels=_extended(batch.labels, spare, label))
    if batch.places is not None and batch.targets is not None:
        more = capacity.places - len(batch.places)
        places, targets = _extended(batch.places, more, T), _extended(batch.targets, more, IGNORED)
        result = replace(result, places=places, targets=targets)
    return result


def least_filler(sizes: np.ndarray, most: int) -> list[int]:
    """At most `most` levels, chosen from these sizes (B,), in rising order. If each size is filled
    up to the next level, the sum of all filler is as small as possible."""
    values, counts = np.unique(sizes, return_counts=True)
    number = np.concatenate([[0], np.cumsum(counts)])  # how many sizes are below each value
    # least[i]: the least sum of the first i values, each filled up to its level
    least = np.concatenate([[0.0], np.full(len(values), np.inf)])
    chosen: list[np.ndarray] = []
    for _ in range(min(most, len(values))):
        costs = least[:-1] + (number[1:, None] - number[:-1]) * values[:, None]  # (end, begin)
        costs[np.triu_indices(len(values), 1)] = np.inf
        begin = costs.argmin(1)
        chosen.append(begin)
        least = np.concatenate([[0.0], costs[np.arange(len(values)), begin]])
    levels, end = [], len(values)
    for begin in reversed(chosen):
        if end:
            levels.append(int(values[end - 1]))
            end = int(begin[end - 1])
    return levels[::-1]


def _extended(values: np.ndarray, count: int, value: float) -> np.ndarray:
    """`values` with `count` more rows, filled with `value`."""
    return np.concatenate([values, np.full((count, *values.shape[1:]), value, values.dtype)])


def _aligned(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
