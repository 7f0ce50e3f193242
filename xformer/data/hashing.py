"""Randomness without state: every random choice about data is a hash of the numbers that identify
it, such as a seed, an epoch and a row."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# The purpose of a key, which follows the seed. The numbers must differ, so that choices for two
# purposes are independent. Another number would change all runs.
FRACTION, EPOCH, MASK, DROPOUT, STORE = 1, 2, 3, 4, 5


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble uint64 values in place by a bijection, and return them (the finaliser of SplitMix64,
    Steele et al. 2014)."""
    shifted = x >> 30
    x ^= shifted
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= np.right_shift(x, 27, out=shifted)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= np.right_shift(x, 31, out=shifted)
    return x


@lru_cache(4096)
def key(*parts: int) -> np.uint64:
    """A 64-bit key for several integers. Their order matters."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state += GOLDEN
        state += np.uint64(part & 0xFFFFFFFFFFFFFFFF)
        mix(state)
    return state[0]


def key_with_each(values: np.ndarray, *parts: int) -> np.ndarray:
    """key(*parts, value) of each of the integers `values`, uint64 of their shape."""
    return mix(values.astype(np.uint64) + GOLDEN + key(*parts))


def hash_each(base: np.uint64 | np.ndarray, values: np.ndarray) -> np.ndarray:
    """A 64-bit key for each of the integers `values`, under the key `base`, or under a key for
    each. Faster than `key_with_each`, with other results."""
    x = np.add(values, 1, dtype=np.uint64, casting="unsafe")
    x *= GOLDEN
    x ^= base
    return mix(x)
