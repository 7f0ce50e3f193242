"""Randomness without memory: every random choice about data is a hash of what it is about."""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """A bijective scramble of uint64 values (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def key(*parts: int) -> np.uint64:
    """One 64-bit key of several integers; the order matters."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mix(state + GOLDEN + np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return state[0]


def keys(base: np.uint64, values: np.ndarray) -> np.ndarray:
    """A 64-bit key for each of the integers `values` under the key `base`."""
    return mix((values.astype(np.uint64) + np.uint64(1)) * GOLDEN ^ base)
