"""BERT's masking as a pure function of (seed, epoch, row, position) (Devlin et al. 2019, 3.1)."""

from __future__ import annotations

import numpy as np

from xformer.data.hashing import GOLDEN, key, mix

MASK = 3  # what a key is for
TO_MASK, TO_RANDOM = 0.8, 0.1  # of the chosen tokens; the remaining tenth stays as it is


def mask(tokens: np.ndarray, positions: np.ndarray, row_keys: np.ndarray, lengths: np.ndarray,
         special: np.ndarray, mask_id: int, ordinary: np.ndarray, probability: float,
         ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Choose and replace tokens of a packed batch.

    `tokens`, `positions` (T,); `row_keys` (N,) uint64 from `row_keys()`, `lengths` (N,);
    `special` (V,) bool; `ordinary` (K,) the ids a random replacement is drawn from.
    Returns (masked tokens (T,), places (M,) of the chosen ones, their true ids (M,)).
    """
    hashes = mix(np.repeat(row_keys, lengths) + positions.astype(np.uint64) * GOLDEN)
    threshold = np.uint64(round(probability * 2**24))
    chosen = (hashes & np.uint64(2**24 - 1)) < threshold
    places = np.flatnonzero(chosen & ~special[tokens])
    targets = tokens[places]
    hashes = hashes[places]
    action = (hashes >> np.uint64(24) & np.uint64(0xFFFF)).astype(np.float64) / 2**16
    pick = (hashes >> np.uint64(40)) * np.uint64(len(ordinary)) >> np.uint64(24)
    replacement = np.where(action < TO_MASK + TO_RANDOM, ordinary[pick], targets)
    replacement[action < TO_MASK] = mask_id
    masked = tokens.copy()
    masked[places] = replacement
    return masked, places, targets


def row_keys(seed: int, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """One key a row, (N,) uint64, from the seed, its epoch and its row number in the store."""
    base = key(seed, MASK)
    return mix(mix(epochs.astype(np.uint64) * GOLDEN ^ base) + rows.astype(np.uint64) * GOLDEN)
