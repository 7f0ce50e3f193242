"""What the operations share: random values, shuffles, and work on many weights at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from xformer.checkpoint import Checkpoint, Distribution, initialise, number
from xformer.data.errors import BadInput
from xformer.model.config import ModelConfig

BUCKET = 2**15  # elements that fit into the cache of one core
CHUNK = 8 * BUCKET  # elements that are assigned to buckets at a time


def replace_weights(
    checkpoint: Checkpoint, names: Iterable[str], change: Callable[[str, Tensor], Tensor]
) -> Checkpoint:
    """The checkpoint with `change(name, weight)` in place of each named weight.

    Uses all cores, since torch and numpy release the interpreter lock while they draw. The largest
    weights come first so that the cores finish together.
    """
    old = checkpoint.weights
    order = sorted(names, key=lambda name: -old[name].numel())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        new = pool.map(lambda name: change(name, old[name]), order)
        return replace(checkpoint, weights={**old, **dict(zip(order, new, strict=True))})


def reinitialise(
    checkpoint: Checkpoint, names: list[str], seed: int, distribution: Distribution, purpose: str
) -> Checkpoint:
    """The checkpoint with fresh values in the named weights (see `initialise`).

    A `purpose` makes the values differ from those that training with the same seed started from.
    Without it, re-initialising a weight would take it back to its value before training.
    """

    def fresh(name: str, weight: Tensor) -> Tensor:
        return initialise(name, weight.shape, checkpoint.config, seed, distribution, purpose)

    return replace_weights(checkpoint, names, fresh)


def generator_of(*key: object) -> np.random.Generator:
    """A random generator that depends only on the parts of the key, such as seed and name."""
    return np.random.default_rng(number(*key))


def shuffled(values: Tensor, *key: object) -> Tensor:
    """The elements in random order, all orders equally likely. `key` seeds the generator.

    A large tensor does not fit into the cache. Each of its elements is assigned to a random bucket,
    and the buckets, which do fit, are shuffled. The result is as random as one shuffle of all
    elements (Rao 1961; Sandelius 1962).
    """
    rng, array = generator_of(*key), values.flatten().numpy()
    count = min(array.size // BUCKET, 256)
    if count < 2:
        return torch.from_numpy(rng.permutation(array)).view(values.shape)
    bits, dealt = array.view(f"u{array.itemsize}"), []
    bucket_of = rng.integers(0, count, array.size, np.uint8)
    for start in range(0, array.size, CHUNK):  # chunks keep the temporary arrays small
        buckets = bucket_of[start : start + CHUNK]
        sizes = torch.bincount(torch.from_numpy(buckets), minlength=count)
        order = np.argsort(buckets, kind="stable")
        dealt.append(np.split(bits[start : start + CHUNK][order], sizes.cumsum(0)[:-1].numpy()))
    result, end = np.empty_like(bits), 0
    for pieces in zip(*dealt, strict=True):
        bucket = np.concatenate(pieces, dtype=np.uint64)  # numpy shuffles 8-byte words fastest
        rng.shuffle(bucket)
        begin, end = end, end + bucket.size
        result[begin:end] = bucket
    return torch.from_numpy(result.view(array.dtype)).view(values.shape)


def refuse_cnn(config: ModelConfig, why: str) -> None:
    """Raise BadInput, which ends with `why`, if the model is a Hilbert-CNN."""
    if config.architecture != "transformer":
        raise BadInput(f"this model is a Hilbert-CNN, {why}")
