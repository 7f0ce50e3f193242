"""Operations on weights: each a plain function from a checkpoint to a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from xformer.checkpoint import Checkpoint, initialise
from xformer.config import Settings
from xformer.data.errors import BadInput


class Clean(Settings):
    """Re-initialise every weight: the from-scratch twin (Zhang et al. 2021, 4)."""

    op: Literal["clean"] = "clean"
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Seed of the fresh values; absent: the run's."""


class CleanEmbeddings(Settings):
    """Re-initialise the word embeddings alone (Kao & Lee 2021, 3.2: re-emb)."""

    op: Literal["clean_embeddings"] = "clean_embeddings"
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Seed of the fresh values; absent: the run's."""


Operation = Annotated[Clean | CleanEmbeddings, Field(discriminator="op")]


def clean(checkpoint: Checkpoint, seed: int) -> Checkpoint:
    """Every weight as `initialise` gives it (Zhang et al. 2021, section 4; Kao & Lee 2021,
    section 3.2)."""
    weights = {
        name: initialise(name, weight.shape, checkpoint.config, seed)
        for name, weight in checkpoint.weights.items()
    }
    return replace(checkpoint, weights=weights)


def clean_embeddings(checkpoint: Checkpoint, seed: int) -> Checkpoint:
    """The word embeddings as `initialise` gives them, all else untouched (Kao & Lee 2021, section
    3.2)."""
    name = "encoder.embeddings.word.weight"
    if name not in checkpoint.weights:
        raise BadInput("surgery=clean_embeddings: this model has no word embeddings")
    word = initialise(name, checkpoint.weights[name].shape, checkpoint.config, seed)
    return replace(checkpoint, weights={**checkpoint.weights, name: word})


def apply(checkpoint: Checkpoint, operations: tuple[Operation, ...] | list[Operation],
          seed: int = 0) -> Checkpoint:  # fmt: skip
    """The operations in order, each recorded in the checkpoint's history.

    `seed` serves the operations that name none.
    """
    functions = {"clean": clean, "clean_embeddings": clean_embeddings}
    for operation in operations:
        own_seed = seed if operation.seed is None else operation.seed
        checkpoint = functions[operation.op](checkpoint, own_seed)
        record = {**operation.model_dump(), "seed": own_seed}
        checkpoint = replace(checkpoint, history=(*checkpoint.history, record))
    return checkpoint
