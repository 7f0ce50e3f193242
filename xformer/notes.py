"""The lines that a new run prints first: what its recipe leads to that the user may not expect."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

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
    the keys that the user typed (None: not known). Raises BadInput if a pattern of `train.only`
    matches no weight.
    """
    task = start.task
    assert task is not None
    fresh, dropped = checkpoints.changed_weights(before, start)
    notes = [
        *_about_start(recipe, store, task, fresh, dropped, start),
        task.metric_note,
        _other_ids(recipe, before, start, store),
        _low_rate(recipe, start, overrides),
        _missing_classes(recipe, store, samples) if task.named_classes else "",
        _far_scores(recipe, store, samples),
        *describe_frozen(start, weights_matching(start, recipe.train.only), fresh),
    ]
    return [*filter(None, notes)]


def _about_start(
    recipe: Recipe,
    store: Store,
    task: Task,
    fresh: Sequence[str],
    dropped: Sequence[str],
    start: Checkpoint,
) -> Iterator[str]:
    """Notes about operations on the weights, labels that are not used, letters, weights that are
    new (`fresh`) or `dropped`, and class weights."""
    for step in recipe.surgery:
        yield f"surgery: {step.op} ({registry.in_words(step.op)})"
    if task.predicts_masked and store.kind != "text" and not task.head.pair_scale:
        texts = "its pairs of texts" if task.head.pair else "its texts"
        yield f"{store.name} has labels; head=mlm does not use them, only {texts}"
    if recipe.init is None and not task.predicts_masked:
        size = sum(weight.numel() for weight in start.weights.values())
        line = f"no init= is given: all {size:,} weights are random"
        if recipe.model.architecture == "transformer":
            line += "; init=CHECKPOINT, such as init=micro/english, starts from a trained encoder"
        yield line
    if recipe.model.architecture == "hilbert_cnn" and "L" in start.tokenizer.pieces:
        yield (
            "warning: hilbert_cnn reads A C G T alone, but the store's tokenizer also has letters "
            "of proteins"
        )
    at_random = mapping.parse(recipe.mapping)[0] in ("symbols", "unused")
    both = {start.tokenizer.symbols, (start.source or start.tokenizer).symbols}
    if at_random and both == {"letters"}:
        yield (
            f"warning: mapping={recipe.mapping} exchanges letters at random; a store that is made "
            "with --tokenizer CHECKPOINT keeps them"
        )
    new, gone = (sorted({name.split(".")[0] for name in names}) for names in (fresh, dropped))
    if new and recipe.init is not None:
        why = " (the checkpoint has no MLM head; its decoder is tied to the word embeddings)"
        yield f"new weights: {', '.join(new)}{why if 'mlm_head' in new else ''}"
    if gone:
        why = " (head=mlm trains no pooler, so a fine-tuning of this run begins with a new one)"
        unused = task.predicts_masked and "pooler" in gone
        yield f"dropped weights: {', '.join(gone)}{why if unused else ''}"
    if task.head.class_weights:
        pairs = zip(task.head.labels, task.head.class_weights, strict=True)
        weights = ", ".join(f"{name} {weight:.3g}" for name, weight in pairs)
        yield f"class weights of the training loss: {weights}"


# Each function below returns a note, or "" if there is nothing to say.


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
