"""BERT's masking (Devlin et al. 2019, section 3.1) as a function of (seed, epoch, row, position).

T tokens in the batch, N rows, M chosen tokens, V vocabulary, K ordinary pieces.
"""

from __future__ import annotations

import numpy as np

from xformer.data.hashing import GOLDEN, key, mix

MASK = 3  # distinguishes these keys from those of xformer.data.sampler


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
