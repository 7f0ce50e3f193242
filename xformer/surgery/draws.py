"""What the operations have in common: fresh values, and work on many weights at once."""

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

BUCKET = 2**15  # elements that the cache of one core holds
CHUNK = 8 * BUCKET  # elements that are dealt out to buckets at once


def changed(
    checkpoint: Checkpoint, names: Iterable[str], change: Callable[[str, Tensor], Tensor]
) -> Checkpoint:
    """The checkpoint with `change(name, weight)` in place of the named weights, all else as it is.

    The weights are made on all cores, the largest first: drawing leaves the interpreter free.
    """
    weights = dict(checkpoint.weights)
    order = sorted(names, key=lambda name: -weights[name].numel())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda name: change(name, checkpoint.weights[name]), order)
        weights |= dict(zip(order, made, strict=True))
    return replace(checkpoint, weights=weights)


def redrawn(
    checkpoint: Checkpoint,
    names: Iterable[str],
    seed: int,
    distribution: Distribution,
    purpose: str,
) -> Checkpoint:
    """The checkpoint with fresh values in the named weights (see `initialise`).

    With a `purpose` they differ from those that a training with the same seed began with: else
    re-initialising would undo the training instead.
    """

    def fresh(name: str, weight: Tensor) -> Tensor:
        return initialise(name, weight.shape, checkpoint.config, seed, distribution, purpose)

    return changed(checkpoint, names, fresh)


def matrices(name: str, weight: Tensor) -> tuple[Tensor, ...]:
    """The matrices that a weight holds: query, key and value are stored as one."""
    return weight.chunk(3) if ".attention.qkv." in name else (weight,)


def generator(*key: object) -> np.random.Generator:
    """A generator of its own for what the key spells."""
    return np.random.default_rng(number(*key))


def shuffled(values: Tensor, *key: object) -> Tensor:
    """The same elements, every order equally likely.

    Of many elements each goes to a bucket at random, and the buckets are shuffled, which is as
    random as shuffling all at once and stays in the cache (Rao 1961; Sandelius 1962).
    """
    rng, array = generator(*key), values.flatten().numpy()
    count = min(array.size // BUCKET, 256)
    if count < 2:
        made = array.copy()
        rng.shuffle(made)
        return torch.from_numpy(made).view(values.shape)
    bits, dealt = array.view(f"u{array.itemsize}"), []
    buckets = rng.integers(0, count, array.size, np.uint8)
    for start in range(0, array.size, CHUNK):  # temporaries small enough for memory that is there
        own = buckets[start : start + CHUNK]
        sizes = torch.bincount(torch.from_numpy(own), minlength=count)
        order = np.argsort(own, kind="stable")
        dealt.append(np.split(bits[start : start + CHUNK][order], sizes.cumsum(0)[:-1].numpy()))
    made, end = np.empty_like(bits), 0
    for pieces in zip(*dealt, strict=True):
        bucket = np.concatenate(pieces, dtype=np.uint64)  # numpy shuffles words of 8 bytes fastest
        rng.shuffle(bucket)
        begin, end = end, end + bucket.size
        made[begin:end] = bucket
    return torch.from_numpy(made.view(array.dtype)).view(values.shape)


def refuse_cnn(config: ModelConfig, what: str) -> None:
    """Raise BadInput where the model is no transformer."""
    if config.architecture != "transformer":
        raise BadInput(f"this model is a Hilbert-CNN, {what}")
