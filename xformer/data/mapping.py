"""How store ids become model ids: an array with the model's id for each id of the store.

    none            no change: the store was made with the model's own tokenizer
    ids             no change, though the tokenizers differ (Chiang & Lee 2020, section 2)
    shift:K         T(i) = (i + K) mod D for D pieces, exactly as in Kao & Lee 2021, section 2.1
    random:SEED     a random permutation of the vocabulary
    symbols:SEED    each non-text symbol to a random subword (Kao & Lee 2021, section 2.2)
    unused:SEED     the ablation of `symbols` that uses only the vocabulary's unused entries

The special tokens around a row are added after the mapping. Those within a row, such as [UNK], keep
their meaning, with two exceptions: `shift` shifts their ids too, and `ids` keeps their ids, which
may mean something else to the model. `random` and `symbols` never choose an unused entry such
as [unused7]: its embedding was never trained, and with such embeddings a pre-trained model does no
better than one from scratch (Kao & Lee 2021).
"""

from __future__ import annotations

import re

import numpy as np

from xformer.data.errors import BadInput
from xformer.data.store import TEXTS, Store
from xformer.data.tokenizers import Tokenizer

UNUSED = re.compile(r"\[unused\d+\]|madeupword\d+")
FORMS = ("none", "ids", "shift:K", "random:SEED", "symbols:SEED", "unused:SEED")


def parse(spec: str) -> tuple[str, int]:
    """The name and number of a mapping: ("shift", 1000) for "shift:1000". Raises BadInput unless
    `spec` has one of the FORMS."""
    match = re.fullmatch(r"(none|ids)|(shift|random|symbols|unused):(\d+)", spec)
    if match is None:
        raise BadInput(
            f"mapping={spec!r} must be one of {', '.join(FORMS)} (K and SEED are whole numbers)"
        )
    return match[1] or match[2], int(match[3] or 0)


def build_mapping(
    spec: str, store: Store, model: Tokenizer, embeddings: int = 0
) -> np.ndarray | None:
    """The model ids of all store ids, (store vocabulary,) int64, or None if no id changes.

    `embeddings` is the size of the model's word table, which may exceed its tokenizer's vocabulary
    (0: they are equal). Raises BadInput if the store was made with another tokenizer and `spec` is
    not a mapping for such stores, if `spec` is only for such stores and this is not one, or if the
    ids do not fit the model's vocabulary.
    """
    name, number = parse(spec)
    same = store.fingerprint == model.fingerprint
    if not same:
        check_foreign_store(spec, store.name, store.tokenizer().symbols, model.symbols)
    else:
        check_own_store(spec, store.name)
    if name == "ids":
        _check_ids(store, max(embeddings, len(model)))
    if name in ("none", "ids"):
        return None
    if name == "shift":
        return (np.arange(len(model)) + number % len(model)) % len(model)
    if name == "random":
        return _random(model, number)
    return _symbols(store.tokenizer(), model, number, unused=name == "unused")


def check_own_store(spec: str, store: object) -> None:
    """Raise BadInput if a mapping cannot be used with a store that was made with the checkpoint's
    own tokenizer. `store` is the store's name."""
    if parse(spec)[0] in ("symbols", "unused"):
        raise BadInput(
            f"mapping={spec} is for a tokenizer that differs from the checkpoint's, but "
            f"{store} was made with the checkpoint's own: its ids need mapping=none"
        )


def check_foreign_store(
    spec: str, store: object, symbols: str | None = None, models: str | None = None
) -> None:
    """Raise BadInput if a mapping cannot be used with a store whose tokenizer is not the
    checkpoint's. `store` is the store's name. `symbols` and `models` are what has an id of its own
    in the store and in the model (see Tokenizer.symbols; None: not known)."""
    name, _ = parse(spec)
    if name == "none":
        again = "make it again with --tokenizer CHECKPOINT"
        random = "give mapping=symbols:0, which replaces each symbol with a random subword"
        ids = "; mapping=ids keeps the ids, for models of artificial corpora"
        if symbols and symbols == models:
            remedy = f"the model reads {symbols}, too: {again}"
            remedy += f"; for words of another kind {random}{ids}" if symbols == "words" else ""
        elif symbols:
            remedy = f"its symbols (letters, pitches) are not words: {random}{ids}"
        elif symbols is None:
            remedy = f"for text {again}; for DNA, proteins or music {random}{ids}"
        else:
            remedy = (f"the model reads {models}, not text" if models else again) + ids
        raise BadInput(
            f"{store} was made with a different tokenizer from the checkpoint's; {remedy}"
        )
    if name in ("shift", "random"):
        raise BadInput(
            f"mapping={spec} needs a store made with the checkpoint's own tokenizer; {store} has "
            "another"
        )


def _ordinary(model: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The ids of ordinary pieces and those of unused entries. Special tokens are in neither."""
    special = set(model.special.values())
    unused = [i for i, piece in enumerate(model.pieces) if UNUSED.fullmatch(piece)]
    ordinary = sorted(set(range(len(model))) - special - set(unused))
    return np.array(ordinary, np.int64), np.array(unused, np.int64)


def _check_ids(store: Store, embeddings: int) -> None:
    if store.vocab_size <= embeddings:
        return
    for split in map(store.split, store.splits):
        for column in (name for name in TEXTS if name in split.columns):
            largest = int(split.columns[column].values.max(initial=0))
            if largest >= embeddings:
                raise BadInput(
                    f"mapping=ids: the id {largest} in {store.name}/{split.name}/{column}.npy does "
                    f"not fit the model's {embeddings} embeddings; give another mapping=, or "
                    f"pre-train with model.vocab_size={store.vocab_size}"
                )


def _random(model: Tokenizer, seed: int) -> np.ndarray:
    ordinary, _ = _ordinary(model)
    mapping = np.arange(len(model))
    mapping[ordinary] = np.random.default_rng(seed).permutation(ordinary)
    return mapping


def _symbols(source: Tokenizer, model: Tokenizer, seed: int, unused: bool) -> np.ndarray:
    targets = _ordinary(model)[1 if unused else 0]
    special = {i: role for role, i in source.special.items()}
    symbols = [i for i in range(len(source)) if i not in special]
    if len(symbols) > len(targets):
        what = "unused entries" if unused else "ordinary pieces"
        raise BadInput(
            f"{len(symbols)} symbols do not fit the vocabulary's {len(targets)} {what}; give "
            "another mapping= or a model that has more"
        )
    mapping = np.zeros(len(source), np.int64)
    mapping[symbols] = np.random.default_rng(seed).choice(targets, len(symbols), replace=False)
    for i, role in special.items():
        mapping[i] = model.special[role]
    return mapping
