"""Operations on all weights of a model."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from xformer.checkpoint import Checkpoint, Distribution, initialise
from xformer.surgery.random_values import refuse_cnn, reinitialise, replace_weights, shuffled
from xformer.surgery.registry import Seed, operation

Scale = Literal["magnitude", "variance"]


@operation
def clean(
    checkpoint: Checkpoint, seed: Seed = 0, distribution: Distribution = "normal"
) -> Checkpoint:
    """Re-initialise every weight: the from-scratch baseline (Zhang 2021, section 4; Kao &
    Lee 2021, section 3.1).

    With the same seed, the result is the model that a recipe without `init` starts from.

    Args:
        seed: Seed of the random values (default: the run's seed.weights; without a run, --seed).
        distribution: Normal (Kao & Lee 2021), or truncated at two standard deviations (Devlin et
            al. 2019).
    """
    return reinitialise(checkpoint, list(checkpoint.weights), seed, distribution, purpose="")


@operation
def reinit_scaled(
    checkpoint: Checkpoint, match: Scale, seed: Seed = 0, distribution: Distribution = "normal"
) -> Checkpoint:
    """Re-initialise every weight, then scale each matrix to its old magnitude or variance (Zhang et
    al. 2021, section 5.1).

    Query, key and value are scaled separately. Biases and LayerNorms, which are vectors, get the
    values of `clean`.

    Args:
        match: What each matrix keeps: its magnitude (the Frobenius norm) or its
            variance.
        seed: Seed of the random values (default: the run's seed.weights; without a run, --seed).
        distribution: Normal or truncated, as in clean.
    """
    refuse_cnn(checkpoint.config, "and this operation works on transformers only")

    def scaled(name: str, weight: Tensor) -> Tensor:
        config = checkpoint.config
        fresh = initialise(name, weight.shape, config, seed, distribution, "reinit_scaled")
        if weight.ndim > 1:
            for new, old in zip(_matrices_of(name, fresh), _matrices_of(name, weight), strict=True):
                new.mul_(_size(old, match) / _size(new, match))
        return fresh

    return replace_weights(checkpoint, checkpoint.weights, scaled)


def _matrices_of(name: str, weight: Tensor) -> tuple[Tensor, ...]:
    """The matrices in a weight: three if it stores query, key and value together, else one."""
    return weight.chunk(3) if ".attention.qkv." in name else (weight,)


def _size(matrix: Tensor, match: Scale) -> float:
    """A number proportional to the magnitude or to the standard deviation of a matrix."""
    centred = matrix - matrix.mean(dtype=torch.double) if match == "variance" else matrix
    return float(torch.linalg.vector_norm(centred, dtype=torch.double))


@operation
def oracle_shuffle(checkpoint: Checkpoint, seed: Seed = 0) -> Checkpoint:
    """Shuffle the elements within each weight tensor: the "oracle" initialisation (Zhang
    2021, section 5.2).

    Each tensor keeps the exact distribution of its values and nothing else. Query, key and value
    are shuffled separately. Biases and LayerNorms are shuffled too.

    Args:
        seed: Seed of the shuffles (default: the run's seed.weights; without a run, --seed).
    """
    refuse_cnn(checkpoint.config, "and this operation works on transformers only")

    def shuffle(name: str, weight: Tensor) -> Tensor:
        parts = enumerate(_matrices_of(name, weight))
        return torch.cat([shuffled(part, seed, "oracle_shuffle", name, i) for i, part in parts])

    return replace_weights(checkpoint, checkpoint.weights, shuffle)
