"""What a store's ids mean to a model: an array from the store's ids to the model's.

    none            the store was made with the model's own tokenizer
    ids             the ids as they are, though the tokenizer is another (Chiang & Lee 2020, 3)
    shift:K         T(i) = (i + K) mod D, to the letter of Kao & Lee 2021, section 2.1
    random:SEED     a random one-to-one mapping of the vocabulary onto itself
    symbols:SEED    each non-text symbol to a random subword (Kao & Lee 2021, section 2.2)
    unused:SEED     the ablation of `symbols` that uses the vocabulary's unused entries alone

Special tokens keep their meaning (`shift` moves every id of the store; the special tokens around a
row are added after it). Entries such as [unused7] are never a target of `random` or
`symbols`: their vectors were never trained, and they bring a model down to scratch (Kao & Lee
2021).
"""

from __future__ import annotations

import re

import numpy as np

from xformer.data.errors import BadInput
from xformer.data.store import Ragged, Store
from xformer.data.tokenizers import Tokenizer

UNUSED = re.compile(r"\[unused\d+\]|madeupword\d+")
FORMS = ("none", "ids", "shift:K", "random:SEED", "symbols:SEED", "unused:SEED")


def parse(spec: str) -> tuple[str, int]:
    """("shift", 1000) of "shift:1000". Raises BadInput naming the forms there are."""
    match = re.fullmatch(r"(none|ids)|(shift|random|symbols|unused):(\d+)", spec)
    if match is None:
        raise BadInput(f"mapping={spec!r} is none of {', '.join(FORMS)} (K, SEED: whole numbers)")
    return match[1] or match[2], int(match[3] or 0)


def build(spec: str, store: Store, model: Tokenizer, embeddings: int = 0) -> np.ndarray | None:
    """The array (store vocabulary,) int64 of model ids, or None where nothing changes.

    `embeddings` of the model may be more than its tokenizer has pieces (0: as many).

    Raises BadInput where the store's tokenizer is not the model's and `spec` does not say what its
    ids mean, or where the model's vocabulary cannot hold them.
    """
    name, number = parse(spec)
    same = store.fingerprint == model.fingerprint
    if not same:
        check_other(spec, store.name)
    if name == "ids":
        _check_ids(store, max(embeddings, len(model)))
    if name in ("none", "ids"):
        return None
    if name in ("shift", "random"):
        return _shift(model, number) if name == "shift" else _random(model, number)
    return _symbols(store.tokenizer(), model, number, unused=name == "unused")


def check_other(spec: str, store: object) -> None:
    """Raise BadInput where a mapping does not serve a store, named `store`, that was made with
    a different tokenizer from the checkpoint's."""
    name, _ = parse(spec)
    if name == "none":
        raise BadInput(
            f"{store} was made with a different tokenizer from the checkpoint's; make it anew "
            f"with --tokenizer CHECKPOINT, or say what its ids mean, by mapping=: "
            f"{', '.join(FORMS[1:])}"
        )
    if name in ("shift", "random"):
        raise BadInput(f"mapping={spec} needs a store made with the checkpoint's own tokenizer")


def _ordinary(model: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(ids of ordinary pieces, ids of unused entries), special tokens in neither."""
    special = set(model.special.values())
    plain = [i for i, p in enumerate(model.pieces) if i not in special and not UNUSED.fullmatch(p)]
    unused = [i for i, piece in enumerate(model.pieces) if UNUSED.fullmatch(piece)]
    return np.array(plain, np.int64), np.array(unused, np.int64)


def _check_ids(store: Store, embeddings: int) -> None:
    if store.vocab_size > embeddings:
        for name in store.splits:
            for column, values in store.split(name).columns.items():
                largest = int(values.values.max(initial=0)) if isinstance(values, Ragged) else 0
                if largest >= embeddings:
                    raise BadInput(
                        f"mapping=ids: the id {largest} in {store.name}/{name}/{column}.npy does "
                        f"not fit the model's {embeddings} embeddings"
                    )


def _shift(model: Tokenizer, k: int) -> np.ndarray:
    return (np.arange(len(model)) + k) % len(model)


def _random(model: Tokenizer, seed: int) -> np.ndarray:
    plain, _ = _ordinary(model)
    mapping = np.arange(len(model))
    mapping[plain] = np.random.default_rng(seed).permutation(plain)
    return mapping


def _symbols(source: Tokenizer, model: Tokenizer, seed: int, unused: bool) -> np.ndarray:
    targets = _ordinary(model)[1 if unused else 0]
    special = {i: role for role, i in source.special.items()}
    wanted = [i for i in range(len(source)) if i not in special]
    if len(wanted) > len(targets):
        what = "unused entries" if unused else "ordinary pieces"
        raise BadInput(f"{len(wanted)} symbols do not fit the vocabulary's {len(targets)} {what}")
    mapping = np.zeros(len(source), np.int64)
    mapping[wanted] = np.random.default_rng(seed).choice(targets, len(wanted), replace=False)
    for i, role in special.items():
        mapping[i] = model.special[role]
    return mapping
