"""Orders, masks, mappings and packed batches: integers, so that they are the same everywhere."""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np

from golden.exact.stores import digest
from xformer.data import mapping, masking, tokenizers
from xformer.data.batch import Assembler, Batch, Masks, chunks
from xformer.data.hashing import hash_each, key
from xformer.data.joined import open_stores
from xformer.data.sampler import Samples, Stream
from xformer.data.store import open_store
from xformer.data.tokenizers import Tokenizer

# the stores that `found` reads
STORES = (
    "text",
    "text-lines",
    "text-roberta",
    "text-fasta",
    "pairs-next",
    "tsv",
    "tsv-pairs",
    "tsv-again",
    "tsv-score",
    "glue-mrpc",
    "conll",
    "squad",
    "squad-bpe",
    "music",
    "dna-splice",
    "protein-secondary",
)
TOKENIZERS = ("from-bert", "from-roberta")
SEEDS = (0, 1, 2**63 - 1)
# store, tokens in a row, mapping, masking probability (0: none)
BATCHES: tuple[tuple[str, int, str, float], ...] = (
    ("text", 20, "none", 0.15),
    ("text", 9, "shift:7", 0.4),
    ("text-lines", 64, "random:3", 0.15),
    ("text-roberta", 12, "none", 0.15),
    ("text-fasta", 16, "symbols:1", 0.15),
    ("pairs-next", 11, "none", 0.15),
    ("tsv", 8, "none", 0.0),
    ("tsv-pairs", 13, "random:0", 0.0),
    ("tsv-score", 20, "none", 0.0),
    ("glue-mrpc", 24, "ids", 0.0),
    ("conll", 15, "none", 0.0),
    ("squad", 40, "none", 0.0),
    ("squad-bpe", 30, "none", 0.0),
    ("music", 10, "symbols:2", 0.0),
    ("dna-splice", 50, "symbols:0", 0.0),
    ("protein-secondary", 25, "unused:0", 0.0),
)
MAPPINGS = {
    "text": ("shift:0", "shift:1", "shift:1000", "random:0", "random:5"),
    "text-fasta": ("symbols:0", "symbols:1", "unused:0", "ids"),
    "music": ("symbols:4",),
    "dna-splice": ("symbols:0", "unused:3"),
}


def summary(array: np.ndarray | None) -> Any:
    """The type, shape, digest and first values of an array."""
    if array is None:
        return None
    array = np.ascontiguousarray(array)
    text = digest(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return f"{array.dtype} {list(array.shape)} {text} {array.ravel()[:6].tolist()}"


def found(out: Path) -> dict[str, Any]:
    """All recorded arrays by name. `out` holds what the commands of `stores` made."""
    return {
        "hashes": _hashes(),
        "orders": _orders(),
        "steps": _steps(out),
        "masks": _masks(),
        "mappings": _mappings(out),
        "batches": _batches(out),
        "joined": _joined(out),
    }


def _hashes() -> dict[str, Any]:
    parts: list[tuple[int, ...]] = [(), (0,), (1, 2, 3), (3, 2, 1), (-1, 2**63)]
    return {
        **{f"key{part}": int(key(*part)) for part in parts},
        "keys": summary(hash_each(key(5), np.arange(100))),
    }


def _orders() -> dict[str, Any]:
    """The rows and epochs of the first samples of runs over stores of many sizes."""
    made = {}
    for rows in (1, 2, 3, 5, 100, 129, 1000, 70_001):
        for seed in SEEDS:
            for fraction in (1.0, 0.3):
                samples = Samples(rows, seed, fraction)
                which, epochs = samples.at(np.arange(min(3 * rows, 5000)))
                made[f"{rows} rows, seed {seed}, fraction {fraction}"] = [
                    samples.per_epoch,
                    summary(which),
                    summary(epochs),
                ]
    return made


def _steps(out: Path) -> dict[str, Any]:
    """The samples of each step, by rows and by tokens. A second stream starts in the middle."""
    split = open_store(out / "text").split("train")
    lengths = split.columns["tokens"].lengths(np.arange(split.rows))
    made = {}
    for rows, tokens in ((7, 0), (64, 0), (1, 40), (1, 200)):
        end = 3 * split.rows
        stream = Stream(Samples(split.rows, 4), end, lengths.__getitem__, rows, tokens)
        position, steps = 0, list[np.ndarray]()
        while position < end:
            steps.append(stream.take(position)[0])
            position += len(steps[-1])
        again = Stream(Samples(split.rows, 4), end, lengths.__getitem__, rows, tokens)
        middle = sum(map(len, steps[: len(steps) // 2]))
        made[f"{rows} rows, {tokens} tokens"] = {
            "sizes": [len(step) for step in steps[:12]],
            "rows": summary(np.concatenate(steps)),
            "from the middle": [summary(array) for array in again.take(middle)],
        }
    return made


def _masks() -> dict[str, Any]:
    """What masking makes of 40 rows of 50 tokens."""
    made = {}
    rows, length, pieces = 40, 50, 200
    special = np.zeros(pieces, bool)
    special[:5] = True
    for seed in SEEDS:
        for probability in (0.01, 0.15, 0.8):
            row_keys = masking.row_keys(seed, np.arange(rows) % 3, np.arange(rows) * 7)
            tokens = (np.arange(rows * length) * 11 % pieces).astype(np.int32)
            positions = np.tile(np.arange(length, dtype=np.int32), rows)
            places, targets = masking.mask(
                tokens,
                positions,
                row_keys,
                np.full(rows, length),
                special,
                4,
                np.flatnonzero(~special),
                probability,
            )
            made[f"seed {seed}, probability {probability}"] = [
                summary(array) for array in (row_keys, tokens, places, targets)
            ]
    return made


def _mappings(out: Path) -> dict[str, Any]:
    made = {}
    for name, specs in MAPPINGS.items():
        store = open_store(out / name)
        for spec in specs:
            array = mapping.build_mapping(spec, store, _model(out, name, spec))
            made[f"{name}, {spec}"] = None if array is None else array.tolist()
    return made


def _model(out: Path, name: str, spec: str) -> Tokenizer:
    """The tokenizer of a model that learns from a store: the store's own, or one of text."""
    if not spec.startswith(("symbols", "unused")):
        return tokenizers.load_tokenizer(out / name)
    return tokenizers.load_tokenizer(out / ("from-roberta" if name == "music" else "from-bert"))


def _batches(out: Path) -> dict[str, Any]:
    """Three batches of each store, made in one call, and how evaluation cuts its rows."""
    made = {}
    for name, most, spec, probability in BATCHES:
        store = open_store(out / name)
        model = _model(out, name, spec)
        split = store.split("train")
        assembler = Assembler(split, model, most, mapping.build_mapping(spec, store, model))
        rows, epochs = Samples(split.rows, 2).at(np.arange(30))
        masks = Masks(6, probability, epochs) if probability else None
        batches = assembler.batches(rows, [9, 1, 20], masks)
        cuts = [*chunks(assembler, split.rows)]
        made[f"{name}, {most} tokens, {spec}, masking {probability}"] = {
            "batches": [fields(batch) for batch in batches],
            "in order of length": [len(cuts), summary(np.concatenate(cuts))],
        }
    return made


# fields that were added after the recording; they can be computed from the others
DERIVED = ("longest", "together")


def fields(batch: Batch) -> dict[str, Any]:
    """The arrays of a batch."""
    names = (field.name for field in dataclass_fields(batch) if field.name not in DERIVED)
    return {name: summary(getattr(batch, name)) for name in names}


def _joined(out: Path) -> dict[str, Any]:
    """Several stores read as one."""
    store = open_stores([str(out / name) for name in ("tsv-pairs", "tsv-again")])
    split = store.split("train")
    assembler = Assembler(split, store.tokenizer(), 16)
    whole = Assembler(split, store.tokenizer(), 2**20)
    return {
        "key": store.key,
        "rows": split.rows,
        "batch": fields(assembler.batch(np.arange(35, 49))),
        "lengths": summary(whole.sizes(np.arange(split.rows))),
        "labels": store.labels,
    }
