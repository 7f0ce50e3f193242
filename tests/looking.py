"""A tiny store and tiny checkpoints for the tests of the analyses, without a subprocess."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from xformer import checkpoint as checkpoints
from xformer.data import tokenizers, vocabularies
from xformer.data.writing import create_store
from xformer.model.config import ModelConfig

ROWS, PIECES, LAYERS, HEADS, HIDDEN, LONGEST = 13, 29, 2, 3, 21, 17


def tokenizer() -> tokenizers.Tokenizer:
    pieces = [*tokenizers.BERT_SPECIAL.values(), *(f"w{i}" for i in range(PIECES - 5))]
    return vocabularies.wordpiece({piece: i for i, piece in enumerate(pieces)}, lowercase=True)


def store(path: Path, seed: int = 0, least: int = 4) -> Path:
    """A store with random rows of `least` to LONGEST - 2 ids in the split `valid`."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(least, LONGEST - 1, ROWS)
    with create_store(path, tokenizer(), {"tokens": ""}) as writer:
        with writer.split("valid") as split:
            split.append_ragged("tokens", generator.integers(5, PIECES, lengths.sum()), lengths)
        writer.finish("text", [], None, {})
    return path


def checkpoint(path: Path, seed: int = 0, damage: str = "", **changes: Any) -> Path:
    """A model with random weights that are large enough for its layers to differ.

    `damage` names a weight that becomes NaN.
    """
    shape = {
        "layers": LAYERS,
        "heads": HEADS,
        "hidden": HIDDEN,
        "intermediate": 33,
        "max_positions": LONGEST,
        "initializer_range": 0.2,
    }
    made = checkpoints.fresh(ModelConfig(**{**shape, **changes}), tokenizer(), seed)
    if damage:
        made = replace(made, weights={**made.weights, damage: made.weights[damage] * np.nan})
    checkpoints.save(made, path)
    return path
