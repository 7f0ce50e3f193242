"""BERT's masking of single tokens (Devlin et al. 2019, section 3.1), and of spans (Joshi et al.
2020, section 3.1). What is masked depends only on (seed, epoch, row, position).

T tokens in the batch, N rows, M chosen tokens, V vocabulary, K ordinary pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from xformer.data.hashing import GOLDEN, MASK, key, mix

# SpanBERT: a span has at most LONGEST tokens, and ends after each of them with the chance STOP
LONGEST, STOP = 10, 0.2
# With spans the number of masked tokens varies more: its standard deviation is this many times that
# of single tokens.
SPREAD = 2.3


@dataclass(frozen=True)
class MaskSchedule:
    """What share of the tokens a run predicts. It changes linearly from `first` to `final` over the
    first `planned` samples, and then stays. With `spans`, spans of tokens are chosen. The `seed`
    decides which."""

    seed: int
    first: float
    final: float
    planned: int = 1
    spans: bool = False

    @property
    def changes(self) -> bool:
        return self.final != self.first

    def share(self, position: int) -> float:
        """The share of tokens to predict in the step that begins at a sample."""
        return self.first + min(position / self.planned, 1.0) * (self.final - self.first)


def mask(
    tokens: np.ndarray,
    positions: np.ndarray,
    row_keys: np.ndarray,
    lengths: np.ndarray,
    special: np.ndarray,
    mask_id: int,
    ordinary: np.ndarray,
    probability: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose tokens of a packed batch to predict, and mask them in place.

    tokens: (T,) int32. positions: (T,) int32, from 0 in each row. row_keys: (N,) uint64, from
    `row_keys`. lengths: (N,) of the rows. special: (V,) bool, tokens that are never chosen.
    ordinary: (K,) ids from which random replacements are drawn. Of the chosen tokens 80 % become
    the mask, 10 % become a random token, and 10 % stay unchanged. Returns the places and the true
    ids of the chosen tokens, (M,) int64 each.
    """
    # One draw decides whether a token is chosen, whether it is replaced, and with which token.
    draws = _draws(positions, row_keys, lengths)  # (T,)
    below = [round(share * probability * (2**32 - 1)) for share in (1, 0.9, 0.8)]
    chosen, replaced, masked = (np.uint32(limit) for limit in below)
    places = np.flatnonzero(draws < chosen)
    targets = tokens.take(places)
    allowed = ~special.take(targets)
    places, targets = places[allowed], targets[allowed]  # (M,) each
    draws = draws.take(places)
    tokens[places] = np.where(draws < masked, np.int32(mask_id), targets)
    random = np.flatnonzero((draws >= masked) & (draws < replaced))
    which = (draws[random] - masked) * np.uint64(len(ordinary)) // np.uint64(replaced - masked)
    tokens[places[random]] = ordinary.take(which.view(np.int64))
    return places, targets.astype(np.int64)


def mask_spans(
    tokens: np.ndarray,
    positions: np.ndarray,
    row_keys: np.ndarray,
    lengths: np.ndarray,
    special: np.ndarray,
    mask_id: int,
    ordinary: np.ndarray,
    probability: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Like `mask`, but choose spans of 1 to LONGEST tokens, 3.8 on average; short ones are more
    frequent. A span may begin at any token. It may also begin up to LONGEST - 1 tokens before the
    row, because the first tokens would be chosen less often otherwise. The chance that a span
    begins somewhere is such that each token is chosen with `probability`. Spans that touch or
    overlap count as one. All tokens of a span become the mask (80 %), or each becomes a random
    token (10 %), or all stay unchanged (10 %)."""
    covered = _covered(positions, row_keys, lengths, probability)
    places = np.flatnonzero(covered & ~special.take(tokens))  # (M,)
    targets = tokens.take(places)

    # the fate of a span is that of its first token
    fates = _draws(positions, mix(row_keys ^ GOLDEN), lengths).take(places)
    starts = np.ones(len(places), bool)
    starts[1:] = (np.diff(places) > 1) | (positions.take(places[1:]) == 0)
    fate = fates[np.maximum.accumulate(np.where(starts, np.arange(len(places)), 0))]
    below = [np.uint32(round(share * (2**32 - 1))) for share in (0.8, 0.9)]
    tokens[places[fate < below[0]]] = mask_id
    random = np.flatnonzero((fate >= below[0]) & (fate < below[1]))
    # mixed again, because the fates of first tokens lie between the limits
    which = (fates[random] * np.uint32(GOLDEN >> 32)).astype(np.uint64) * len(ordinary) >> 32
    tokens[places[random]] = ordinary.take(which.astype(np.int64))
    return places, targets.astype(np.int64)


def _covered(
    positions: np.ndarray, row_keys: np.ndarray, lengths: np.ndarray, probability: float
) -> np.ndarray:
    """Whether each token lies in a span, (T,) bool."""
    row_ends = np.cumsum(lengths)
    at, first = np.arange(len(positions)), row_ends - lengths  # (T,), (N,)
    spans = _spans(_draws(positions, row_keys, lengths), probability)
    ends = np.minimum(at + spans, np.repeat(row_ends, lengths))  # (T,) of each token's span
    ahead = np.arange(1, LONGEST, dtype=np.int32)  # a span may begin this many tokens before a row
    before = _draws(np.tile(-ahead, len(lengths)), row_keys, np.full(len(lengths), len(ahead)))
    reach = _spans(before, probability).reshape(len(lengths), -1) - ahead  # (N, LONGEST - 1)
    reach_ends = first + np.clip(reach.max(1, initial=0), 0, lengths)
    some = np.flatnonzero(lengths)  # rows may be empty
    ends[first[some]] = np.maximum(ends[first[some]], reach_ends[some])
    return np.maximum.accumulate(ends) > at


def _spans(draws: np.ndarray, probability: float) -> np.ndarray:
    """The length of the span that begins at each token, int32; 0 if none begins."""
    limits = _limits(probability)  # the draws below limits[k] begin a span of more than k tokens
    return (LONGEST - np.searchsorted(limits[::-1], draws, "right")).astype(np.int32)


@lru_cache(2)
def _limits(probability: float) -> np.ndarray:
    """The limits of `_spans`, (LONGEST,) uint32, falling."""
    longer = (1 - STOP) ** np.arange(LONGEST)  # the chance that a span has more than k tokens
    longer = (longer - (1 - STOP) ** LONGEST) / (1 - (1 - STOP) ** LONGEST)
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection: the chance with which a span must begin at each token
        chance = (low + high) / 2
        chosen = 1 - np.prod(1 - chance * longer)
        low, high = (chance, high) if chosen < probability else (low, chance)
    return (low * longer * 2**32).astype(np.uint32)


def _draws(positions: np.ndarray, row_keys: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A number for each token, (T,) uint32: a hash of its position and its row's key.

    The key enters as two halves of 32 bits. The hash is MurmurHash3's finaliser (Appleby 2011),
    with the second half of the key in the middle, and without the last step, which changes only the
    lower bits. It has 32 bits because processors have vector instructions for 32-bit products.
    """
    low, high = row_keys.astype(np.uint32), (row_keys >> 32).astype(np.uint32)
    x = np.repeat(low, lengths)
    x ^= positions.view(np.uint32)
    shifted = x >> 16
    x ^= shifted
    x *= np.uint32(0x85EBCA6B)
    x ^= np.right_shift(x, 13, out=shifted)
    x ^= np.repeat(high, lengths)
    x *= np.uint32(0xC2B2AE35)
    return x


def row_keys(seed: int, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A key for each row, (N,) uint64, from the seed, the row's epoch and its number in the
    split."""
    base = key(seed, MASK)
    return mix(mix(epochs.astype(np.uint64) * GOLDEN ^ base) + rows.astype(np.uint64) * GOLDEN)
