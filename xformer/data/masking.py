"""BERT's masking as a pure function of (seed, epoch, row, position) (Devlin et al. 2019, 3.1)."""

from __future__ import annotations

import numpy as np

from xformer.data.hashing import GOLDEN, key, mix

MASK = 3  # what a key is for


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
    """Choose and replace tokens of a packed batch, in place.

    `tokens` and `positions` (T,) int32, the latter from 0 in each of N rows `lengths` (N,) long;
    `row_keys` (N,) uint64 from `row_keys()`; `special` (V,) bool; `ordinary` (K,) the ids a random
    replacement is drawn from. Of the chosen tokens 80 % become the mask and 10 % a random one; the
    remaining tenth stays as it is.
    Returns (places (M,) of the chosen ones, their true ids (M,)), both int64.
    """
    # the draw of a token says whether it is chosen, what becomes of it, and which random one
    draws = _draws(positions, row_keys, lengths)
    below = [round(share * probability * (2**32 - 1)) for share in (1, 0.9, 0.8)]
    chosen, replaced, masked = (np.uint32(limit) for limit in below)
    places = np.flatnonzero(draws < chosen)
    targets = tokens.take(places)
    wanted = ~special.take(targets)
    places, targets = places[wanted], targets[wanted]
    draws = draws.take(places)
    tokens[places] = np.where(draws < masked, np.int32(mask_id), targets)
    random = np.flatnonzero((draws >= masked) & (draws < replaced))
    which = (draws[random] - masked) * np.uint64(len(ordinary)) // np.uint64(replaced - masked)
    tokens[places[random]] = ordinary.take(which.view(np.int64))
    return places, targets.astype(np.int64)


def _draws(positions: np.ndarray, row_keys: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A number for each token, (T,) uint32: its position hashed by the two halves of its row's key.

    In 32 bits, as processors multiply them by the vector: MurmurHash3's finaliser (Appleby 2011)
    with the second half of the key in its middle, and without its last step, which changes the
    lower bits alone.
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
    """One key a row, (N,) uint64, from the seed, its epoch and its row number in the store."""
    base = key(seed, MASK)
    return mix(mix(epochs.astype(np.uint64) * GOLDEN ^ base) + rows.astype(np.uint64) * GOLDEN)
