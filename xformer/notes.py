"""The lines that a new run prints first: what its recipe leads to that the user may not expect."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from xformer import checkpoint as checkpoints
from xformer.checkpoint import Checkpoint
from xformer.data import mapping
from xformer.data.mixture import Mixture
from xformer.data.sampler import Samples
from xformer.data.store import Store
from xformer.freeze import describe_frozen, weights_matching
from xformer.recipe import Recipe
from xformer.surgery import registry
from xformer.tasks.known import TASKS
from xformer.tasks.regress import spread
from xformer.tasks.task import Task

SMALL, LOW = 256, 2e-5  # an encoder this wide learns little from a fine-tuning at BERT's rate
FAR = 10.0  # a mean or deviation of scores that a new head, whose scores are near 0, reaches late


def notes_of(
    recipe: Recipe,
    overrides: Collection[str] | None,
    store: Store,
    samples: Samples,
    before: Checkpoint,
    start: Checkpoint,
) -> list[str]:
    """The notes of a run, in the order in which they are printed.

    `start` are its initial weights, and `before` are those without the run's head. `overrides` are
    the keys that the user typed (None: not known).
    """
    task = start.task
    assert task is not None
    fresh, dropped = checkpoints.changed_weights(before, start)
    notes = [
        *(f"surgery: {step.op} ({registry.in_words(step.op)})" for step in recipe.surgery),
        _unused_labels(store, task),
        _random_weights(recipe, task, start),
        _other_letters(recipe, start),
        _exchanged_letters(recipe, start),
        _new_weights(fresh) if recipe.init is not None else "",
        _dropped_weights(dropped, task),
        _class_weights(task),
        task.meaning,
        _other_ids(recipe, before, start, store),
        _low_rate(recipe, start, overrides),
        _missing_classes(recipe, store, samples),
        _far_scores(recipe, store, samples),
    ]
    frozen = describe_frozen(start, weights_matching(start, recipe.train.only), fresh)
    return [*filter(None, notes), *frozen]


# Each function below returns a line, or "" if there is nothing to say.


def _unused_labels(store: Store, task: Task) -> str:
    if not task.predicts_masked or store.kind == "text" or task.head.pair_scale:
        return ""
    texts = "its pairs of texts" if task.head.pair else "its texts"
    return f"{store.name} has labels; head=mlm does not use them, only {texts}"


def _random_weights(recipe: Recipe, task: Task, start: Checkpoint) -> str:
    if recipe.init is not None or task.predicts_masked:
        return ""
    size = sum(weight.numel() for weight in start.weights.values())
    line = f"no init= is given: all {size:,} weights are random"
    if recipe.model.architecture == "transformer":
        line += "; init=CHECKPOINT, such as init=micro/english, starts from a trained encoder"
    return line


def _other_letters(recipe: Recipe, start: Checkpoint) -> str:
    if recipe.model.architecture != "hilbert_cnn" or "L" not in start.tokenizer.pieces:
        return ""
    return (
        "warning: hilbert_cnn reads A C G T alone, but the store's tokenizer also has letters "
        "of proteins"
    )


def _exchanged_letters(recipe: Recipe, start: Checkpoint) -> str:
    at_random = mapping.parse(recipe.mapping)[0] in ("symbols", "unused")
    both = {start.tokenizer.symbols, (start.source or start.tokenizer).symbols}
    if not at_random or both != {"letters"}:
        return ""
    return (
        f"warning: mapping={recipe.mapping} exchanges letters at random; a store that is made "
        "with --tokenizer CHECKPOINT keeps them"
    )


def _new_weights(fresh: Sequence[str]) -> str:
    if not (parts := _parts(fresh)):
        return ""
    why = " (the checkpoint has no MLM head; its decoder is tied to the word embeddings)"
    return f"new weights: {', '.join(parts)}{why if 'mlm_head' in parts else ''}"


def _dropped_weights(dropped: Sequence[str], task: Task) -> str:
    if not (parts := _parts(dropped)):
        return ""
    why = " (head=mlm trains no pooler, so a fine-tuning of this run begins with a new one)"
    unused = task.predicts_masked and "pooler" in parts
    return f"dropped weights: {', '.join(parts)}{why if unused else ''}"


def _parts(names: Sequence[str]) -> list[str]:
    return sorted({name.split(".")[0] for name in names})


def _class_weights(task: Task) -> str:
    if not task.head.class_weights:
        return ""
    pairs = zip(task.head.labels, task.head.class_weights, strict=True)
    weights = ", ".join(f"{name} {weight:.3g}" for name, weight in pairs)
    return f"class weights of the training loss: {weights}"


def _other_ids(recipe: Recipe, before: Checkpoint, start: Checkpoint, store: Store) -> str:
    """A warning that symbols get other ids than in the training of `init`. After an operation on
    the weights there is none."""
    if before.mapping is None or before.source is None or recipe.surgery:
        return ""
    pieces = store.tokenizer().pieces
    new = np.arange(len(pieces)) if start.mapping is None else start.mapping
    ids = dict(zip(pieces, new.tolist(), strict=True))
    old = zip(before.source.pieces, before.mapping.tolist(), strict=True)
    moved = [(piece, id_) for piece, id_ in old if ids.get(piece, id_) != id_]
    if not moved:
        return ""
    (piece, id_), spec = moved[0], before.head.mapping if before.head else "none"
    return (
        f"warning: {len(moved)} symbols get other ids than in the training of init={recipe.init} "
        f"({piece}: {ids[piece]}, not {id_}), so what it learnt of them is lost; give a store "
        f"made with the same tokenizer, and mapping={spec}"
    )


def _low_rate(recipe: Recipe, start: Checkpoint, overrides: Collection[str] | None) -> str:
    """A note that BERT's rate is low for a small encoder, unless the user typed it."""
    wide, untyped = start.config.hidden, overrides and "optim.lr" not in overrides
    if not untyped or recipe.optim.lr != LOW or wide > SMALL or recipe.train.only:
        return ""
    return f"optim.lr={LOW:g} is for large encoders; for one {wide} wide optim.lr=3e-4 is common"


def _missing_classes(recipe: Recipe, store: Store, samples: Samples) -> str:
    """A warning that names the classes whose rows `fraction` all leaves out."""
    if recipe.fraction == 1 or store.kind != "class" or isinstance(samples, Mixture):
        return ""
    seen = set(store.split("train").columns["label"][samples.first_epoch()].tolist())
    gone = ", ".join(name for i, name in enumerate(store.labels) if i not in seen)
    return f"warning: fraction={recipe.fraction} leaves out every row of {gone}" if gone else ""


def _far_scores(recipe: Recipe, store: Store, samples: Samples) -> str:
    """A warning that raw scores are far from those of a new head."""
    if "standardize" not in TASKS[recipe.head].loss_settings or recipe.loss.standardize:
        return ""
    mean, deviation = spread(store.split("train").columns["label"][samples.first_epoch()])
    if max(abs(mean), deviation) <= FAR:
        return ""
    return (
        f"warning: a new head's scores are near 0, but the training scores have mean {mean:.4g} "
        f"and standard deviation {deviation:.4g}; loss.standardize=true usually learns them sooner"
    )
