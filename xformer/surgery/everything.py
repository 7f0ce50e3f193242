"""Operations on all weights of a model."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from xformer.checkpoint import Checkpoint, Distribution, initialise
from xformer.surgery.draws import changed, matrices, redrawn, refuse_cnn, shuffled

Scale = Literal["magnitude", "variance"]


def clean(checkpoint: Checkpoint, seed: int, distribution: Distribution = "normal") -> Checkpoint:
    """Fresh values everywhere: the twin from scratch (Zhang et al. 2021, section 4; Kao & Lee 2021,
    section 3.2). With the same seed it is the model that a recipe without `init` starts from."""
    return redrawn(checkpoint, checkpoint.weights, seed, distribution, purpose="")


def reinit_scaled(
    checkpoint: Checkpoint, match: Scale, seed: int, distribution: Distribution = "normal"
) -> Checkpoint:
    """Fresh values everywhere, each matrix scaled to the `match` it had (Zhang et al. 2021, section
    5.1): its magnitude, read as the root of its sum of squares, or its variance.

    Biases and LayerNorms, which are no matrices, are as in `clean`. Query, key and value are three.
    """
    refuse_cnn(checkpoint.config, "and the operation is one on transformers")

    def scaled(name: str, weight: Tensor) -> Tensor:
        fresh = initialise(
            name, weight.shape, checkpoint.config, seed, distribution, "reinit_scaled"
        )
        if weight.ndim > 1:
            for new, old in zip(matrices(name, fresh), matrices(name, weight), strict=True):
                new.mul_(_size(old, match) / _size(new, match))
        return fresh

    return changed(checkpoint, checkpoint.weights, scaled)


def _size(matrix: Tensor, match: Scale) -> float:
    """The number that is proportional to a matrix and that `match` keeps."""
    centred = matrix - matrix.mean(dtype=torch.double) if match == "variance" else matrix
    return float(torch.linalg.vector_norm(centred, dtype=torch.double))


def oracle_shuffle(checkpoint: Checkpoint, seed: int) -> Checkpoint:
    """The elements of each weight in random order, the "oracle" initialisation: every parameter
    keeps the very distribution of its values and nothing else (Zhang et al. 2021, section 5.2).

    So do biases and LayerNorms. Query, key and value are three matrices.
    """
    refuse_cnn(checkpoint.config, "and the operation is one on transformers")

    def shuffle(name: str, weight: Tensor) -> Tensor:
        key = (seed, "oracle_shuffle", name)
        parts = [shuffled(part, *key, i) for i, part in enumerate(matrices(name, weight))]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return changed(checkpoint, checkpoint.weights, shuffle)
