"""Hugging Face checkpoints that were converted, exported and operated on, compared to the last
bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from golden.exact.commands import run
from golden.exact.sources import MODELS
from golden.exact.stores import digest
from xformer import checkpoint as checkpoints

# these operations only move values
MOVES = (
    "reverse_layers",
    "keep_layers(first=2)",
    "keep_layers(every=2)",
    "keep_layers(layers=[1, 4])",
    "shuffle_embeddings(seed=1)",
    "shuffle_embeddings(seed=2, english_only=false)",
    "shuffle_embeddings(english_only=false, keep_special=false)",
    "oracle_shuffle(seed=3)",
    "transplant(source={out}/bert-classes)",
    "substitute_unused(store={store}, seed=4)",
)
# these draw: torch's normal numbers may differ in their last bits between processors
DRAWS = (
    "clean(seed=0)",
    "clean(seed=1, distribution=truncated)",
    "clean_embeddings(seed=2)",
    "reinit_scaled(match=variance, seed=3)",
    "reinit_last_layers(from_layer=3, seed=4)",
    "reinit_head(layer=2, head=1, seed=5)",
)


def make(directory: Path, sources: Path, store: Path) -> Path:
    """Convert, export and operate. `store` holds ids of BERT's tokenizer."""
    out = directory / "weights"
    out.mkdir()
    for name in MODELS:
        run("convert", "from-hf", sources / name, out / name)
        run("convert", "to-hf", out / name, out / f"{name}-exported")
    run("convert", "halve", out / "bert", out / "bert-halved")
    for number, operation in enumerate((*MOVES, *DRAWS)):
        given = operation.format(out=out, store=store)
        run("surgery", out / "bert", out / f"operation-{number}", given)
    run("surgery", out / "bert", out / "several", "reverse_layers", "keep_layers(first=3)")
    return out


def found(out: Path) -> dict[str, Any]:
    """Everything that was made, by name."""
    made: dict[str, Any] = {}
    for name in (*MODELS, "bert-halved", "several"):
        made[name] = {**checkpoint(out / name), **_described(out / name)}
    for name in MODELS:
        path = out / f"{name}-exported"
        made[f"{name} exported"] = {
            "config": _config(path),
            "weights": weights(path / "model.safetensors"),
            # a model card names versions; tests/test_share.py tests it
            "files": sorted(file.name for file in path.iterdir() if file.name != "README.md"),
        }
    for number, operation in enumerate((*MOVES, *DRAWS)):
        path = out / f"operation-{number}"
        exact = operation in MOVES
        made[operation] = checkpoint(path) if exact else numbers(path / "model.safetensors")
    return made


def _described(path: Path) -> dict[str, Any]:
    """The settings of a checkpoint's model that are not the default, its head and its history."""
    loaded = checkpoints.load(path)
    head = loaded.head
    return {
        "config": loaded.config.model_dump(exclude_defaults=True),
        "head": [head.kind, list(head.labels)] if head else None,
        "history": list(loaded.history),
    }


def _config(path: Path) -> dict[str, Any]:
    """The config.json of an export without the version of transformers."""
    content: dict[str, Any] = json.loads((path / "config.json").read_text())
    content.pop("transformers_version", None)
    return content


def checkpoint(path: Path) -> dict[str, Any]:
    """The tokenizer and the weights of a checkpoint, after loading it."""
    loaded = checkpoints.load(path)
    read = {name: tuple(weight.shape) for name, weight in loaded.weights.items()}
    made = weights(path / "model.safetensors")
    assert {name: list(shape) for name, shape in read.items()} == {
        name: json.loads(text.partition(" ")[2].rpartition(" ")[0]) for name, text in made.items()
    }
    return {"tokenizer": loaded.tokenizer.fingerprint, "weights": made}


def weights(file: Path) -> dict[str, str]:
    """Type, shape and digest of every tensor of a file, by name."""
    with safe_open(file, "numpy") as tensors:
        return {
            name: f"{tensor.dtype} {list(tensor.shape)} {digest(tensor.tobytes())}"
            for name in sorted(tensors.keys())
            for tensor in [tensors.get_tensor(name)]
        }


def numbers(file: Path) -> dict[str, list[float]]:
    """The sum, the first and the last value of every tensor of a file, by name, to seven digits."""
    with safe_open(file, "numpy") as tensors:
        found = {name: tensors.get_tensor(name) for name in sorted(tensors.keys())}
    return {
        name: [float(f"{x:.7g}") for x in (v.astype(np.float64).sum(), v.flat[0], v.flat[-1])]
        for name, v in found.items()
    }
