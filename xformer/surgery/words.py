"""Operations on the word embeddings. V pieces, E embedding size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from xformer import checkpoint as checkpoints
from xformer.checkpoint import Checkpoint, Distribution
from xformer.data.english import english_pieces
from xformer.data.errors import BadInput
from xformer.data.mapping import UNUSED
from xformer.data.store import TEXTS, Store, open_store
from xformer.surgery.draws import generator, redrawn, refuse_cnn

WORD, BIAS = "encoder.embeddings.word.weight", "mlm_head.bias"
BLOCK = 2**24  # ids looked at at once


def clean_embeddings(
    checkpoint: Checkpoint, seed: int, distribution: Distribution = "normal"
) -> Checkpoint:
    """Fresh word embeddings, all else as it is: "clean word embeddings" of Zhang et al. 2021
    (section 4, tables 4 and 5), re-emb of Kao & Lee 2021 (section 3.2)."""
    _table(checkpoint)
    return redrawn(checkpoint, [WORD], seed, distribution, "clean_embeddings")


def shuffle_embeddings(
    checkpoint: Checkpoint, seed: int, keep_special: bool = True, english_only: bool = True
) -> Checkpoint:
    """The word embeddings dealt out anew among the pieces (Zhang et al. 2021, section 4.2).

    With `english_only` English-like pieces exchange vectors among themselves, and all others keep
    theirs. Without, all pieces do, but for entries such as [unused7], whose vectors were never
    trained, and special tokens, unless `keep_special` is false. Vectors beyond the vocabulary stay.
    """
    table, tokenizer = _table(checkpoint), checkpoint.tokenizer
    check_shuffle(keep_special, english_only)
    if english_only and tokenizer.kind == "symbols":
        raise BadInput(
            "english_only=true needs a tokenizer of words, and this one has symbols; "
            "english_only=false shuffles them all"
        )
    kept = set(tokenizer.special.values()) if keep_special else set()
    if english_only:
        moved = sorted(english_pieces(tokenizer).keys() - kept)
    else:
        pieces = enumerate(tokenizer.pieces)
        moved = [i for i, piece in pieces if i not in kept and not UNUSED.fullmatch(piece)]
    if len(moved) < 2:
        which = "English-like pieces" if english_only else "pieces"
        raise BadInput(f"the vocabulary has {len(moved)} {which} to shuffle")
    places = np.arange(len(table))
    places[moved] = generator(seed, "shuffle_embeddings").permutation(moved)
    made = table.index_select(0, torch.from_numpy(places))
    return replace(checkpoint, weights={**checkpoint.weights, WORD: made})


def check_shuffle(keep_special: bool, english_only: bool) -> None:
    """Raise BadInput for a choice that contradicts itself."""
    if english_only and not keep_special:
        raise BadInput(
            "shuffle_embeddings: keep_special=false needs english_only=false, as no "
            "special token is English-like"
        )


def transplant(checkpoint: Checkpoint, source: str) -> Checkpoint:
    """The tokenizer and word embeddings of another checkpoint, `source`, in place of one's own
    (Zhang et al. 2021, section 4.3: English ones in a foreign model).

    An MLM head gets the source's bias too, which is one number a piece, or 0 where it has none.
    Raises BadInput where the two embeddings differ in width.
    """
    ours = _table(checkpoint)
    other = checkpoints.load(source)
    if WORD not in other.weights:
        raise BadInput(f"source={source} has no word embeddings")
    theirs = other.weights[WORD]
    check_width(source, theirs.size(1), ours.size(1))
    if checkpoint.mapping is not None:
        raise BadInput("the checkpoint maps the ids of its raw input to the pieces that would go")
    weights = {**checkpoint.weights, WORD: theirs}
    if BIAS in weights:
        weights[BIAS] = other.weights.get(BIAS, torch.zeros(len(theirs)))
    config = checkpoint.config.model_copy(update={"vocab_size": len(theirs)})
    return replace(checkpoint, config=config, weights=weights, tokenizer=other.tokenizer)


def check_width(source: str, theirs: int, ours: int) -> None:
    """Raise BadInput unless the word embeddings of a source are as wide as a checkpoint's own."""
    if theirs != ours:
        raise BadInput(f"source={source} has word embeddings {theirs} wide, the checkpoint {ours}")


def substitute_unused(
    checkpoint: Checkpoint, store: str, seed: int, split: str = "train"
) -> Checkpoint:
    """Copies of used word embeddings in place of those that pre-training never used (Chiang & Lee
    2020, section 4.3: 50-substitute).

    Used is a piece that occurs in the split of the store that the model was pre-trained on, through
    the checkpoint's mapping if it has one. Special tokens neither give nor get. The paper does not
    say which goes where: each used vector is copied equally often, at random. Raises BadInput where
    the store's ids are not the checkpoint's, or nothing is unused or used.
    """
    table = _table(checkpoint)
    special = sorted(checkpoint.tokenizer.special.values())
    seen = torch.zeros(len(table), dtype=torch.bool)
    seen[_occurring(checkpoint, open_store(store), split)] = True
    seen[special] = False
    used = seen.nonzero().squeeze(1)
    seen[special] = True
    unused = (~seen).nonzero().squeeze(1)
    if not len(used):
        raise BadInput(f"the split {split} of {store} uses no piece but special tokens")
    if not len(unused):
        raise BadInput(f"the split {split} of {store} uses every piece: there is none to replace")
    turns = generator(seed, "substitute_unused").permutation(len(unused)) % len(used)
    made = table.clone()
    made[unused] = table[used[turns]]
    return replace(checkpoint, weights={**checkpoint.weights, WORD: made})


def _occurring(checkpoint: Checkpoint, store: Store, split: str) -> np.ndarray:
    """The ids, of the checkpoint's vocabulary, that a split holds."""
    known = store.fingerprint == checkpoint.tokenizer.fingerprint
    source = checkpoint.source
    check_source(
        store.name, known or (source is not None and store.fingerprint == source.fingerprint)
    )
    found = np.zeros(store.vocab_size, bool)
    columns = store.split(split).columns
    for values in (columns[name].values for name in TEXTS if name in columns):
        for start in range(0, len(values), BLOCK):
            found[values[start : start + BLOCK]] = True
    ids = found.nonzero()[0]
    return ids if known or checkpoint.mapping is None else checkpoint.mapping[ids]


def check_source(store: object, same: bool) -> None:
    """Raise BadInput unless a store, named so, was made with the checkpoint's tokenizer."""
    if not same:
        raise BadInput(f"store={store} was made with another tokenizer than the checkpoint's")


def _table(checkpoint: Checkpoint) -> Tensor:
    """The word embeddings, (V, E)."""
    refuse_cnn(checkpoint.config, "which has no word embeddings")
    return checkpoint.weights[WORD]
