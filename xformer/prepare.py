"""Prepare a run: open, build and check everything that its recipe names."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from xformer import checkpoint as checkpoints
from xformer import provenance
from xformer.checkpoint import Checkpoint
from xformer.config import flat
from xformer.data import mapping
from xformer.data.batch import Assembler
from xformer.data.errors import BadInput, typed
from xformer.data.files import HOST, is_run, read_json, read_run_json
from xformer.data.joined import Joined, open_stores
from xformer.data.mixture import Mixture
from xformer.data.sampler import Samples
from xformer.data.store import Store
from xformer.model.config import DROPOUT, ModelConfig
from xformer.notes import notes_of
from xformer.parallel.precision import fast_on, reason_for_bf16
from xformer.parallel.processes import Ranks
from xformer.recipe import UNUSED_IF_SET, Recipe
from xformer.run import Run
from xformer.scoring import check_kind, long_windows
from xformer.setup import Setup, samples_of_run
from xformer.surgery import registry
from xformer.tasks.classify import balanced
from xformer.tasks.known import TASKS, task_of
from xformer.tasks.pairs import pair_scale
from xformer.tasks.regress import spread
from xformer.tasks.task import Head, Task

PROBED = ("task_head",)  # what a probe trains


def prepare(recipe: Recipe, ranks: Ranks, overrides: Collection[str] | None = None) -> Setup:
    """Open and check everything that a recipe names. Writes nothing. Raises BadInput.

    `overrides` are the keys that the user typed. Other values of model.* come from the recipe's
    file, and the checkpoint of `init=` replaces them. None, for callers without a command line,
    checks every key of model.* as if it had been typed.

    The setup's recipe has the values that the run uses: fp32 or bf16 in place of
    `system.precision=auto`, the model's length in place of `batch.max_tokens=0`, and the shape
    and dropout of the checkpoint.
    """
    if recipe.init == "":
        raise BadInput("init must be given: init=CHECKPOINT, or init=RUN of a finished run")
    resumed = not recipe.overwrite and is_run(Path(recipe.run) / "config.json")
    _check_used(recipe, () if resumed else overrides or ())
    recipe, precision = with_precision(recipe, ranks)
    store = open_stores(recipe.data)
    for name in store.splits:
        store.split(name)  # refuses a split without rows now, not when it is scored
    _check_overwriting(recipe)
    start = _initial(recipe, store, overrides)
    recipe, replaced = _with_shape(recipe, start)
    check_model(recipe, start.config)
    check_data(recipe, store.kind, store.splits, store.name)
    # before the mapping, because an operation may replace the tokenizer
    start = registry.apply(start, recipe.surgery, recipe.seed.of("weights"))
    split = store.split("train")
    _check_mapping(recipe, start, store)
    array = mapping.build_mapping(recipe.mapping, store, start.tokenizer, start.config.vocab_size)
    recipe = _with_length(_with_probe(recipe), start, store)
    if 0 < recipe.batch.tokens < split.together * recipe.batch.max_tokens:
        raise BadInput(
            f"batch.tokens={recipe.batch.tokens} is too small for one question: "
            f"{split.together} rows of batch.max_tokens={recipe.batch.max_tokens}"
        )
    training_rows = Assembler(split, start.tokenizer, recipe.batch.max_tokens, array)
    samples = _samples(recipe, store, training_rows)
    head = _head(recipe, store, samples)
    task = task_of(head)
    _check_rows(task, store, training_rows)
    before, start = start, start.with_head(head, recipe.seed.of("weights"))
    start = _with_mapping(start, recipe, store, array)
    notes = replaced + notes_of(recipe, overrides, store, samples, before, start)
    metric = _metric(recipe, task, store)
    setup = Setup(recipe, ranks, store, start, training_rows, samples, metric, notes, precision)
    _ = setup.trajectory  # refuses wrong marks now, before anything is written
    return setup


def _check_used(recipe: Recipe, typed_keys: Collection[str]) -> None:
    """Raise BadInput if the user typed a setting that this run would not use."""
    masks, decays = TASKS[recipe.head].predicts_masked, recipe.optim.schedule == "wsd"
    for key in typed_keys:
        if key.startswith("masking.") and not masks:
            raise BadInput(f"{key} needs head=mlm; head={recipe.head} masks no tokens")
        if key == "optim.decay" and not decays:
            raise BadInput(
                f"optim.decay needs optim.schedule=wsd; with {recipe.optim.schedule} it is not used"
            )
        other = UNUSED_IF_SET.get(key)
        if other and other not in typed_keys and (value := attrgetter(other)(recipe)):
            why = f"because the recipe has {other}={value}"
            raise BadInput(f"{key} is not used, {why}; give {other}=0, too")


def _check_mapping(recipe: Recipe, start: Checkpoint, store: Store) -> None:
    """Raise BadInput if the store needs the mapping of `init`'s training, and it is left out."""
    if recipe.mapping != "none" or start.source is None or start.head is None:
        return
    same, spec = start.source.fingerprint == store.fingerprint, start.head.mapping
    if same and spec != "none" and store.fingerprint != start.tokenizer.fingerprint:
        raise BadInput(f"init={recipe.init} was trained with mapping={spec}; give it here, too")


def _check_rows(task: Task, store: Store, train: Assembler) -> None:
    """Raise BadInput if the training rows or the validation lack labels, or if a window of a
    context would be truncated."""
    if task.has_unlabelled(train.split):
        raise BadInput(f"{store.name}: the split 'train' has rows without a label")
    if "valid" in store.splits and not task.has_labels(store.split("valid")):
        raise BadInput(
            f"{store.name}: the split 'valid' has no labels, so the run cannot be validated; "
            "make the store again with labels for this split, or without the split"
        )
    for name in store.splits:
        if line := long_windows(task, replace(train, split=store.split(name)), store):
            raise BadInput(line)


def with_precision(recipe: Recipe, ranks: Ranks) -> tuple[Recipe, str]:
    """The recipe with fp32 or bf16 in place of `system.precision=auto`, and a line about it.

    A run that continues keeps its precision, even on another machine, and a branch that of the run
    it comes from. Any other new run takes bf16 if it is fast on the device of every rank.
    """
    chosen_by_user = recipe.system.precision
    if chosen_by_user != "auto":
        return recipe, f"precision {chosen_by_user}"

    def kept() -> tuple[str, str]:
        if not recipe.overwrite and (own := _earlier(Path(recipe.run))):
            return own, "as before, because a run keeps its precision"
        if branch := recipe.train.branch_from:
            other = Path(branch).absolute().parent.parent
            return _earlier(other), "as in the run that it branches from"
        return "", ""

    precision, why = ranks.on_rank_zero(kept)
    reasons = ranks.gather(reason_for_bf16(ranks.device))
    if not precision:
        precision, why = fast_on(reasons)
    line = f"precision {precision} (system.precision=auto: {why})"
    return recipe.having("system", precision=precision), line


def _earlier(run: Path) -> str:
    """The precision of the newest start of a run; "" if there is no run yet."""
    config = run / "config.json"
    if not is_run(config):
        return ""
    settings = read_run_json(config).get("config")
    recorded = flat(settings if isinstance(settings, dict) else {}).get("system.precision")
    return "bf16" if recorded == "bf16" else "fp32"  # the first versions knew only fp32


def _check_overwriting(recipe: Recipe) -> None:
    """Raise BadInput if `overwrite` would delete a checkpoint that the run reads, without which it
    could not be continued."""
    sources = [step.arguments["source"] for step in recipe.surgery if step.op == "transplant"]
    for given in filter(None, [recipe.init, *sources]) if recipe.overwrite else ():
        run = checkpoints.resolve(given).resolve().parent.parent  # if a run has written it
        if run == Path(recipe.run).resolve():
            key = "init=" if given == recipe.init else "the source of an operation, "
            raise BadInput(f"overwrite=true would delete {key}{given}: give another run=")


def _initial(recipe: Recipe, store: Store, overrides: Collection[str] | None) -> Checkpoint:
    """The checkpoint of `init=`, or fresh weights. Raises BadInput if a weight is not finite."""
    if recipe.init is None:
        return checkpoints.fresh(recipe.model, store.tokenizer(), recipe.seed.of("weights"))
    start, given = checkpoints.load(recipe.init), f"init={recipe.init}"
    start = replace(start, config=with_dropout(start.config, recipe.model, overrides))
    for name, weight in start.weights.items():
        if not weight.isfinite().all():
            raise BadInput(f"{given}: its weight {name} is not finite; give another checkpoint")
    return start


def _with_shape(recipe: Recipe, start: Checkpoint) -> tuple[Recipe, list[str]]:
    """The recipe with the shape and the dropout of the checkpoint, and a line about the values of
    the shape that it replaces."""
    if recipe.init is None:
        return recipe, []
    other = _differing(start.config, recipe.model)
    dropout = {name: getattr(start.config, name) for name in DROPOUT}
    shape = {name: has for name, (_, has) in other.items()}
    recipe = recipe.having("model", **shape, **dropout)
    if not other:
        return recipe, []
    old = ", ".join(f"model.{name}={value}" for name, (value, _) in other.items())
    line = f"init={recipe.init} decides the shape of the model, not the recipe's {old}"
    return recipe, [line]


def _with_length(recipe: Recipe, start: Checkpoint, store: Store) -> Recipe:
    """The recipe. `batch.max_tokens=0` is replaced by the longest row that the model accepts.
    Raises BadInput if the store has a longer row."""
    if recipe.batch.max_tokens:
        return recipe
    most = start.config.max_positions
    for name in store.splits:
        rows = Assembler(store.split(name), start.tokenizer, most)
        if (longest := rows.longest()) > most:
            raise BadInput(
                f"{store.name}: the longest row of {name} has {longest} tokens, special tokens "
                f"included, but the model takes {most}; make the store again with --max-tokens "
                f"{most - rows.extra}, or give batch.max_tokens={most}, which truncates rows"
            )
    recipe = recipe.having("batch", max_tokens=most)
    check_model(recipe, start.config)
    return recipe


def _with_probe(recipe: Recipe) -> Recipe:
    """The recipe, in which a probe trains only its head. Raises BadInput if the task has no probe,
    or if other weights are to be trained."""
    if recipe.probe.layer is None:
        return recipe
    if recipe.train.only not in ((), PROBED):
        raise BadInput(
            f"probe.layer={recipe.probe.layer} trains only the head, but train.only="
            f"{list(recipe.train.only)}; leave one of them out"
        )
    return recipe.having("train", only=PROBED)


def _samples(recipe: Recipe, store: Store, train: Assembler) -> Samples:
    """The order of the training rows. Raises BadInput if a store of a mixture has none."""
    seed, mixture = recipe.seed.of("order"), recipe.mixture
    if not mixture.given:
        return Samples(train.examples, seed, recipe.fraction)
    assert isinstance(store, Joined)
    rows = [part.split("train").rows // train.split.together for part in store.stores]
    weights = mixture.weights or [count ** (1 / mixture.temperature) for count in rows]
    if not mixture.final:
        return Mixture(rows, seed, recipe.fraction, weights)
    ends = [np.divide(w, sum(w)) for w in (weights, mixture.final)]
    mean = Mixture(rows, seed, recipe.fraction, np.mean(ends, 0).tolist())  # over the whole run
    planned = samples_of_run(recipe, train, mean)
    return Mixture(rows, seed, recipe.fraction, weights, mixture.final, planned)


def _head(recipe: Recipe, store: Store, samples: Samples) -> Head:
    """The description of the run's head. Raises BadInput if the settings for pairs or for the loss
    do not fit the store or the task."""
    kind, scale = TASKS[recipe.head], _pair_scale(recipe, store)
    for name, value in recipe.loss:
        if value != type(recipe.loss).model_fields[name].default and name not in kind.loss_settings:
            other = next(head for head, task in TASKS.items() if name in task.loss_settings)
            raise BadInput(
                f"loss.{name}: head={recipe.head} has no such setting; leave it out, or use "
                f"head={other}"
            )
    return Head(
        recipe.head,
        labels=tuple(store.labels) if kind.named_classes or scale else (),
        metric=store.metric,
        mapping=recipe.mapping,
        max_tokens=recipe.batch.max_tokens,
        masking=recipe.masking.probability,
        pair="tokens_b" in store.split("train").columns,
        pair_scale=scale,
        columns=store.meta["origin"].get("columns"),
        smoothing=recipe.loss.label_smoothing,
        class_weights=_class_weights(recipe, store, samples),
        scale=_scale(recipe, store, samples),
        layer=recipe.probe.layer,
    )


def _with_mapping(
    start: Checkpoint, recipe: Recipe, store: Store, array: np.ndarray | None
) -> Checkpoint:
    """The checkpoint with the tokenizer of the store and the mapping of its ids, if the store's ids
    are not the model's own. Those of an earlier training are dropped."""
    if array is None and recipe.mapping != "ids":
        return replace(start, source=None, mapping=None)
    array = np.arange(store.vocab_size) if array is None else array
    return replace(start, source=store.tokenizer(), mapping=array)


def check_model(recipe: Recipe, config: ModelConfig) -> None:
    """Raise BadInput unless a model with this config can train with the recipe's batches and
    head."""
    batch = recipe.batch
    if batch.max_tokens > config.max_positions:
        longest = config.max_positions
        raise BadInput(
            f"batch.max_tokens={batch.max_tokens}: the model takes {longest} at most; give "
            f"batch.max_tokens={longest}"
        )
    if batch.tokens and batch.tokens < batch.max_tokens:
        raise BadInput(
            f"batch.tokens={batch.tokens} is below batch.max_tokens={batch.max_tokens}, the length "
            "of one row; raise batch.tokens or lower batch.max_tokens"
        )
    checkpoints.check_head(config, TASKS[recipe.head](Head(recipe.head, layer=recipe.probe.layer)))


def check_data(recipe: Recipe, kind: str, splits: Collection[str], store: object) -> None:
    """Raise BadInput unless the recipe can train on a store of this kind with these splits. `store`
    names it in the message."""
    check_kind(kind, TASKS[recipe.head], store)
    if recipe.train.patience and recipe.train.select == "last":
        raise BadInput(
            f"train.patience={recipe.train.patience} stops after validations that became worse, "
            "but train.select=last keeps the weights of the last one; give train.select=best"
        )
    if recipe.train.select == "best" and "valid" not in splits:
        raise BadInput(
            f"train.select=best needs a split 'valid', which {store} lacks; give train.select=last"
        )


def with_dropout(
    config: ModelConfig, wanted: ModelConfig, overrides: Collection[str] | None = None
) -> ModelConfig:
    """A checkpoint's model config with the dropout of `wanted`. If the two differ in other keys,
    raises a BadInput that names them. Only the architecture and the keys in `overrides` are checked
    (None: every key)."""
    refused = {
        f"model.{name}": values
        for name, values in _differing(config, wanted).items()
        if overrides is None or f"model.{name}" in overrides or name == "architecture"
    }
    if refused:
        given = ", ".join(f"{name}={value}" for name, (value, _) in refused.items())
        has = ", ".join(str(has) for _, has in refused.values())
        raise BadInput(
            f"{given}: the checkpoint given as init has {has}; leave {', '.join(refused)} out"
        )
    dropout = [name for name in DROPOUT if name in wanted.model_fields_set]
    return config.model_copy(update={name: getattr(wanted, name) for name in dropout})


def _differing(config: ModelConfig, wanted: ModelConfig) -> dict[str, tuple[object, object]]:
    """The settings, except dropout, in which the wanted shape differs from a checkpoint's `config`:
    {name: (wanted value, the checkpoint's)}."""
    names = [name for name in ModelConfig.model_fields if name in wanted.model_fields_set]
    pairs = {name: (getattr(wanted, name), getattr(config, name)) for name in names}
    return {
        name: (value, has)
        for name, (value, has) in pairs.items()
        if name not in DROPOUT and value != has and not (name == "vocab_size" and value == 0)
    }


def _pair_scale(recipe: Recipe, store: Store) -> float:
    """The weight of a pair in the loss, in masked tokens; 0 without a pair head. Raises BadInput if
    the task cannot learn pairs, or the store has no pairs of two classes."""
    masking, split = recipe.masking, store.split("train")
    if not masking.pair_weight:
        return 0.0
    masks = TASKS[recipe.head].predicts_masked
    if not masks or "tokens_b" not in split.columns or len(store.labels) != 2:
        raise BadInput(
            "masking.pair_weight needs head=mlm and a store of pairs with two classes; "
            f"{store.name} has {len(store.labels)} classes; "
            f"make such a store with {typed('python preprocess.py pairs')}"
        )
    return pair_scale(masking.pair_weight, masking.probability, split)


def _class_weights(recipe: Recipe, store: Store, samples: Samples) -> tuple[float, ...]:
    """The weight of each class in the training loss; () if all weigh the same. Raises BadInput if
    the number of weights is wrong."""
    loss, split = recipe.loss, store.split("train")
    if loss.class_weights == "balanced":
        return balanced(split.columns["label"][samples.first_epoch()], len(store.labels))
    if loss.class_weights and len(loss.class_weights) != len(store.labels):
        raise BadInput(
            f"loss.class_weights has {len(loss.class_weights)} weights; {store.name} has the "
            f"classes {', '.join(store.labels)}; give one weight for each"
        )
    return tuple(float(weight) for weight in loss.class_weights)


def _scale(recipe: Recipe, store: Store, samples: Samples) -> tuple[float, float]:
    """What a head that learns standardized scores adds and multiplies by; see `Head`."""
    if not recipe.loss.standardize:
        return Head.scale
    mean, deviation = spread(store.split("train").columns["label"][samples.first_epoch()])
    return mean, deviation or 1.0  # equal scores have no deviation


def _metric(recipe: Recipe, task: Task, store: Store) -> str:
    """The metric that decides which checkpoint is the best. Raises BadInput if validation does not
    compute it."""
    metric = recipe.train.metric or task.default_metric(task.head.metric)
    split = store.split("valid" if "valid" in store.splits else "train")
    known = task.metrics_on(split) if recipe.train.metric else task.metrics
    if metric not in known:
        raise BadInput(
            f"train.metric={metric!r} is not a metric of the split {split.name!r} of "
            f"{store.name}, which has {', '.join(known)}"
        )
    return metric


def open_run(setup: Setup) -> Run:
    """The run of a setup. Rank 0 has opened its directory. Raises BadInput as `Run.open` does, and
    if the ranks differ in their versions, data or initial weights."""
    config, identity = setup.recipe.model_dump(mode="json"), setup.identity
    read = {
        f"the content of {name}": sha256(repr(identity[name]).encode()).hexdigest()[:9]
        for name in ("data", "init", "surgery")
    }
    provenance.refuse_unlike_ranks(setup.ranks, read)
    environment = setup.ranks.on_rank_zero(partial(provenance.environment, setup.ranks))
    environment["compile"] = setup.compiling
    content = {"config": config, "identity": identity, "environment": environment}
    content["metric"] = setup.metric
    run = Run(Path(setup.recipe.run))
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        agent = f"{HOST}-{os.getppid()}"  # as a digest: results may be published
        content["torchrun"] = sha256(agent.encode()).hexdigest()[:16]
    overwrite = setup.recipe.overwrite and not _is_restart(run.path, content)

    def open_here() -> None:
        if overwrite or not (run.path / "config.json").exists():
            setup.trajectory.check_room(run.path, 0)  # before anything is deleted or made
        run.open(content, overwrite)

    setup.ranks.on_rank_zero(open_here)
    return run


def _is_restart(path: Path, content: dict[str, Any]) -> bool:
    """Whether this torchrun has begun the run, and now restarts it."""
    with suppress(BadInput, AttributeError, OSError):
        earlier = read_json(path / "config.json").get("torchrun")
        return earlier is not None and earlier == content.get("torchrun")
    return False
