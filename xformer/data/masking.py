"""BERT's masking as a pure function of (seed, epoch, row, position) (Devlin et al. 2019, 3.1)."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from xformer.data.hashing import GOLDEN, key, mix

MASK = 3  # what a key is for
# of the chosen tokens 80 % become the mask, 10 % a random one; the remaining tenth stays as it is
MASK_BELOW, RANDOM_BELOW = math.ceil(0.8 * 2**16), math.ceil(0.9 * 2**16)


def mask(tokens: np.ndarray, row_keys: np.ndarray, lengths: np.ndarray, special: np.ndarray,
         mask_id: int, ordinary: np.ndarray, probability: float,
         ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Choose and replace tokens of a packed batch, in place.

    `tokens` (T,) int32, of N rows `lengths` (N,) long; `row_keys` (N,) uint64 from `row_keys()`;
    `special` (V,) bool; `ordinary` (K,) the ids a random replacement is drawn from.
    Returns (places (M,) of the chosen ones, their true ids (M,)), both int64.
    """
    # the hash of a token is that of its row's key + its position * GOLDEN
    starts = (np.cumsum(lengths) - lengths).astype(np.uint64)
    hashes = np.repeat(row_keys - starts * GOLDEN, lengths)
    hashes += _multiples(max(16, len(hashes).bit_length()))[: len(hashes)]
    # bits 0-23 choose, 24-39 say what happens, 40-63 pick the replacement
    chosen = (mix(hashes) & 0xFFFFFF) < round(probability * 2**24)
    places = np.flatnonzero(chosen)
    targets = tokens.take(places)
    wanted = ~special.take(targets)
    places, targets = places[wanted], targets[wanted]
    hashes = hashes.take(places)
    action = hashes >> 24 & 0xFFFF
    tokens[places[action < MASK_BELOW]] = mask_id
    random = np.flatnonzero((action >= MASK_BELOW) & (action < RANDOM_BELOW))
    pick = (hashes.take(random) >> 40) * np.uint64(len(ordinary)) >> 24
    tokens[places.take(random)] = ordinary.take(pick.view(np.int64))
    return places, targets.astype(np.int64)


@lru_cache(1)
def _multiples(bits: int) -> np.ndarray:
    return np.arange(2**bits, dtype=np.uint64) * GOLDEN


def row_keys(seed: int, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """One key a row, (N,) uint64, from the seed, its epoch and its row number in the store."""
    base = key(seed, MASK)
    return mix(mix(epochs.astype(np.uint64) * GOLDEN ^ base) + rows.astype(np.uint64) * GOLDEN)
