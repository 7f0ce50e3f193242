"""Operations on the word embeddings, a table of V pieces by E, the embedding size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from xformer import checkpoint as checkpoints
from xformer.checkpoint import Checkpoint, Distribution
from xformer.data.english import english_pieces
from xformer.data.errors import BadInput
from xformer.data.joined import open_stores
from xformer.data.mapping import UNUSED
from xformer.data.store import TEXTS, Store
from xformer.surgery.random_values import generator_of, refuse_cnn, reinitialise
from xformer.surgery.registry import Seed, operation

WORD, BIAS = "encoder.embeddings.word.weight", "mlm_head.bias"
BLOCK = 2**24  # ids read at a time


@operation
def clean_embeddings(
    checkpoint: Checkpoint, seed: Seed = 0, distribution: Distribution = "normal"
) -> Checkpoint:
    """Re-initialise the word embeddings and nothing else: "clean word embeddings" (Zhang
    2021, section 4, tables 4 and 5), "re-emb" (Kao & Lee 2021, section 3.2).

    Args:
        seed: Seed of the random values (default: the run's seed.weights; without a run, --seed).
        distribution: Normal or truncated, as in clean.
    """
    refuse_cnn(checkpoint.config, "which has no word embeddings")
    return reinitialise(checkpoint, [WORD], seed, distribution, "clean_embeddings")


def check_shuffle(english_only: bool, keep_special: bool, **_: object) -> None:
    """Raise BadInput if the arguments of shuffle_embeddings contradict each other."""
    if english_only and not keep_special:
        raise BadInput("keep_special=false needs english_only=false: no special token is English")


@partial(operation, check=check_shuffle)
def shuffle_embeddings(
    checkpoint: Checkpoint, seed: Seed = 0, keep_special: bool = True, english_only: bool = True
) -> Checkpoint:
    """Shuffle the word embeddings among the pieces of the vocabulary (Zhang 2021, section
    4.2).

    Entries such as [unused7], which were never trained, keep their vectors. So do rows of the table
    beyond the vocabulary.

    Args:
        seed: Seed of the shuffle (default: the run's seed.weights; without a run, --seed).
        keep_special: Special tokens keep their vectors. false needs english_only=false.
        english_only: Only English-like pieces, (##)?[A-Za-z]+, exchange their vectors. With false,
            all pieces do.
    """
    table, tokenizer = _word_embeddings(checkpoint), checkpoint.tokenizer
    if english_only and tokenizer.kind == "symbols":
        raise BadInput(
            "english_only=true needs a subword tokenizer, but this one has an alphabet of symbols; "
            "give english_only=false to shuffle all symbols"
        )
    fixed = set(tokenizer.all_special) if keep_special else set()
    trained = {i for i, piece in enumerate(tokenizer.pieces) if not UNUSED.fullmatch(piece)}
    moved = sorted((english_pieces(tokenizer).keys() if english_only else trained) - fixed)
    if len(moved) < 2:
        which = "English-like pieces" if english_only else "pieces"
        raise BadInput(f"the vocabulary has {len(moved)} {which} to shuffle; it needs at least 2")
    places = np.arange(len(table))
    places[moved] = generator_of(seed, "shuffle_embeddings").permutation(moved)
    shuffled = table.index_select(0, torch.from_numpy(places))
    return replace(checkpoint, weights={**checkpoint.weights, WORD: shuffled})


@operation
def transplant(checkpoint: Checkpoint, source: str) -> Checkpoint:
    """Replace the tokenizer and the word embeddings with those of another checkpoint (Zhang
    2021, section 4.3: English ones in a foreign model).

    The bias of an MLM head, which has one value per piece, is replaced too. It becomes 0 if the
    other checkpoint has no MLM head. Both embeddings must have the same width.

    Args:
        source: The checkpoint to take them from, or a finished run.
    """
    ours = _word_embeddings(checkpoint)
    other = checkpoints.load(source)
    if WORD not in other.weights:
        raise BadInput(f"source={source} has no word embeddings")
    theirs = other.weights[WORD]
    check_width(source, theirs.size(1), ours.size(1))
    if checkpoint.mapping is not None:
        raise BadInput(
            "the checkpoint has a mapping to the pieces that would be replaced; give a checkpoint "
            "without a mapping"
        )
    weights = {**checkpoint.weights, WORD: theirs}
    if BIAS in weights:
        weights[BIAS] = other.weights.get(BIAS, torch.zeros(len(theirs)))
    config = checkpoint.config.model_copy(update={"vocab_size": len(theirs)})
    if config.zeroed_token is not None:
        mask = other.tokenizer.special["mask"]
        config = config.model_copy(update={"zeroed_token": mask})
    return replace(checkpoint, config=config, weights=weights, tokenizer=other.tokenizer)


def check_width(source: str, theirs: int, ours: int) -> None:
    """Raise BadInput unless the word embeddings of `source` are as wide as the checkpoint's."""
    if theirs != ours:
        raise BadInput(f"source={source} has word embeddings {theirs} wide, the checkpoint {ours}")


@operation
def substitute_unused(
    checkpoint: Checkpoint, store: str, seed: Seed = 0, split: str = "train"
) -> Checkpoint:
    """Replace the word embeddings that pre-training never used with copies of used ones (Chiang &
    Lee 2020, section 4.3: 50-substitute).

    A piece is used if it occurs in the given split of the store, after the checkpoint's mapping if
    it has one. Special tokens are neither copied nor replaced. The paper does not say which vector
    is copied to which piece. Here they are assigned at random, and the numbers of copies of any two
    used vectors differ by at most one.

    Args:
        store: The store that the model was pre-trained on.
        seed: Seed of the assignment (default: the run's seed.weights; without a run, --seed).
        split: The split of the store.
    """
    table = _word_embeddings(checkpoint)
    special = checkpoint.tokenizer.all_special
    occurring = _occurring(checkpoint, open_stores(store), split)
    used = np.setdiff1d(occurring, special)
    unused = np.setdiff1d(np.arange(len(table)), [*used, *special])
    if not len(used):
        raise BadInput(f"the split {split} of {store} contains only special tokens")
    if not len(unused):
        raise BadInput(f"the split {split} of {store} uses every piece: there is none to replace")
    donors = generator_of(seed, "substitute_unused").permutation(len(unused)) % len(used)
    substituted = table.clone()
    substituted[unused] = table[used[donors]]
    return replace(checkpoint, weights={**checkpoint.weights, WORD: substituted})


def _occurring(checkpoint: Checkpoint, store: Store, split: str) -> np.ndarray:
    """The ids of the checkpoint's vocabulary that occur in a split."""
    known = [t.fingerprint for t in (checkpoint.tokenizer, checkpoint.source) if t is not None]
    check_source(store.name, store.fingerprint in known)
    occurs = np.zeros(store.vocab_size, bool)
    columns = store.split(split).columns
    for values in (columns[name].values for name in TEXTS if name in columns):
        for start in range(0, len(values), BLOCK):
            occurs[values[start : start + BLOCK]] = True
    ids = occurs.nonzero()[0]
    own = store.fingerprint == checkpoint.tokenizer.fingerprint
    return ids if own or checkpoint.mapping is None else checkpoint.mapping[ids]


def check_source(store: object, same: bool) -> None:
    """Raise BadInput that names the store if its tokenizer is not the checkpoint's (not `same`)."""
    if not same:
        raise BadInput(f"store={store} was made with a different tokenizer from the checkpoint's")


def _word_embeddings(checkpoint: Checkpoint) -> Tensor:
    """The word embeddings, (V, E). Raises BadInput if the model is a Hilbert-CNN."""
    refuse_cnn(checkpoint.config, "which has no word embeddings")
    return checkpoint.weights[WORD]
