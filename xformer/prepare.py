"""Prepare a run: open, build and check everything that its recipe names."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from xformer import checkpoint as checkpoints
from xformer import provenance, trajectory
from xformer.checkpoint import Checkpoint
from xformer.config import flat
from xformer.data import hashing, mapping
from xformer.data.batch import Assembler, rows_of
from xformer.data.errors import BadInput, typed
from xformer.data.files import read_run_json
from xformer.data.joined import Joined, open_stores
from xformer.data.masking import MaskSchedule
from xformer.data.mixture import Mixture
from xformer.data.outputs import is_run
from xformer.data.sampler import Samples, Stream
from xformer.data.store import Store
from xformer.freeze import chosen, describe_frozen
from xformer.model.config import DROPOUT, ModelConfig
from xformer.optim import learning_rate
from xformer.parallel.compiled import compiles
from xformer.parallel.feed import Feed
from xformer.parallel.precision import fast_on, reason_for_bf16
from xformer.parallel.processes import Ranks
from xformer.recipe import Recipe
from xformer.run import Run, State
from xformer.scoring import check_kind
from xformer.surgery import registry
from xformer.tasks.classify import balanced
from xformer.tasks.known import TASKS, task_of
from xformer.tasks.pairs import pair_scale
from xformer.tasks.task import Head, Task
from xformer.trajectory import Timeline, Trajectory

PROBED = ("task_head",)  # what a probe trains
SEEN = 10_000  # the mean length of a row is estimated from so many rows


@dataclass(frozen=True)
class Setup:
    """A recipe with its store, its initial checkpoint and its task, opened and checked.

    `start` holds the initial weights with the new head, `train` turns training rows into batches,
    `samples` is the order of the rows, and `metric` decides which checkpoint is the best. `notes`
    are lines to print when the run starts, and `precision` is one to print at every start.
    """

    recipe: Recipe
    ranks: Ranks
    store: Store
    start: Checkpoint
    train: Assembler
    samples: Samples
    metric: str
    notes: list[str]
    precision: str

    @property
    def length(self) -> int:
        """The length of the run in steps; in samples if it counts epochs."""
        train = self.recipe.train
        return train.steps or max(1, round(train.epochs * self.samples.per_epoch))

    @cached_property
    def unit(self) -> float:
        """The length of a step in what `length` counts: 1, or the number of its samples, which is
        estimated if it has `batch.tokens`."""
        steps = self.recipe.train.steps
        return 1 if steps else rows_per_step(self.recipe, self.train, self.samples)

    def done_at(self, step: int, position: int) -> int:
        """How much of `length` is done at this step and sample."""
        return step if self.recipe.train.steps else position

    def share(self, step: int, position: int) -> float:
        """The share of the run that is done at this step and sample."""
        return self.done_at(step, position) / self.length

    def rate(self, before: int, after: int) -> float:
        """The learning rate of a step; see `done_at` for what is done before and after it."""
        return learning_rate(self.recipe.optim, before, after, self.length, self.unit)

    def done(self, state: State) -> bool:
        """Whether the run has reached its end, or has been stopped by `train.patience`."""
        patience = self.recipe.train.patience
        return self.share(state.step, state.position) >= 1 or 0 < patience <= state.worse

    def given(self, state: State) -> dict[str, dict[str, float]]:
        """What each store of a mixture has given so far; {} without a mixture."""
        if not isinstance(self.samples, Mixture) or not isinstance(self.store, Joined):
            return {}
        names = [store.name for store in self.store.stores]
        pairs = zip(names, self.samples.stores, *state.given, strict=True)
        return {
            name: {"rows": rows, "tokens": tokens, "passes": round(rows / order.per_epoch, 4)}
            for name, order, rows, tokens in pairs
        }

    def seed_dropout(self, step: int, micro_batch: int) -> None:
        """Seed dropout, which has its own seed in every step, micro-batch and rank."""
        seed = self.recipe.seed.of("dropout")
        number = hashing.key(seed, hashing.DROPOUT, step, micro_batch, self.ranks.rank)
        self.ranks.seed(int(number >> 1))

    @property
    def task(self) -> Task:
        """The task of the run's head."""
        task = self.start.task
        assert task is not None
        return task

    def with_length_of(self, other: Recipe) -> Setup:
        """This setup with the length and the learning rates of another recipe."""
        recipe = self.recipe.model_copy(update={"optim": other.optim})
        length = {"steps": other.train.steps, "epochs": other.train.epochs}
        return replace(self, recipe=recipe.having("train", **length))

    @cached_property
    def compiling(self) -> str:
        """What the run compiles: `system.compile`, with "auto" replaced."""

        def pays() -> bool:
            """Compiling takes 20 s for each shape of a batch, and fine-tuning is soon over."""
            return self.task.predicts_masked and len(self.feed(fixed=True).shapes) == 1

        return compiles(self.recipe.system, self.ranks, self.start.config, pays)

    @cached_property
    def trajectory(self) -> Trajectory:
        """The steps at which `train.keep_at` keeps the weights. A branch leaves out the steps that
        were trained by the other run. Raises BadInput as `steps_of` does."""
        settings, split = self.recipe.train, self.train.split
        if not settings.keep_at:
            return Trajectory()
        timeline = Timeline(
            self.feed().stream,
            settings.steps,
            self.train.extra,
            split.tokens,
            split.words,
            str(self.store.path),
        )
        begun = 0
        if settings.branch_from:
            source = Path(settings.branch_from)
            there = (source / "state.json").is_file()
            # a branch with checkpoints of its own goes on without the other run
            begun = State.read(source).step if there else checkpoints.step_of(source.resolve()) or 0
        steps = trajectory.steps_of(settings.keep_at, timeline)
        own = frozenset(step for step in steps if step > begun or not begun)
        return Trajectory(own, checkpoints.size(self.start), steps - own)

    def feed(self, fixed: bool = False) -> Feed:
        """The training batches of this rank, step by step. If `fixed`, they have few shapes."""
        recipe, batch = self.recipe, self.recipe.batch
        end = 2**62 if recipe.train.steps else self.length
        stream = Stream(self.samples, end, self.train.sizes, batch.rows, batch.tokens)
        masking = self._masking() if self.task.predicts_masked else None
        return Feed(self.train, stream, self.ranks, batch.accumulate, masking, fixed)

    def _masking(self) -> MaskSchedule:
        """What share of the tokens is masked, and when."""
        recipe, masks = self.recipe, self.recipe.masking
        seed, first = recipe.seed.of("masks"), masks.probability
        if masks.final is None:
            return MaskSchedule(seed, first, first, spans=masks.spans)
        return MaskSchedule(seed, first, masks.final, self.planned, masks.spans)

    @property
    def planned(self) -> int:
        """The number of samples in the whole run, after which the weights of a mixture and the
        share of masked tokens have their final values. See `planned_samples`."""
        if self.recipe.mixture.final and isinstance(self.samples, Mixture):
            # not from the rows at the beginning: if their lengths differ from those of later rows,
            # the masking would end at another sample than the mixture
            return self.samples.planned
        return planned_samples(self.recipe, self.train, self.samples)

    def assembler(self, split: str) -> Assembler:
        """The assembler for a split of the run's store."""
        return replace(self.train, split=self.store.split(split))


def prepare(recipe: Recipe, ranks: Ranks, overrides: Collection[str] | None = None) -> Setup:
    """Open and check everything that a recipe names. Writes nothing. Raises BadInput.

    `overrides` are the keys that the user typed. Other values of model.* come from the recipe's
    file, and the checkpoint of `init=` replaces them. By default all keys of model.* count as
    typed, and no others.

    The setup's recipe has the values that the run uses: fp32 or bf16 in place of
    `system.precision=auto`, the model's length in place of `batch.max_tokens=0`, and the shape
    and dropout of the checkpoint.
    """
    if recipe.init == "":
        raise BadInput("init must be given: init=CHECKPOINT, or init=RUN of a finished run")
    _check_used(recipe, overrides or ())
    recipe, precision = with_precision(recipe, ranks)
    store = open_stores(recipe.data)
    for name in store.splits:
        store.split(name)  # refuses a split without rows now, not when it is scored
    start = _initial(recipe, store, overrides)
    recipe, replaced = _with_shape(recipe, start)
    check_model(recipe, start.config)
    check_data(recipe, store.kind, store.splits, store.name)
    # before the mapping, because an operation may replace the tokenizer
    start = registry.apply(start, recipe.surgery, recipe.seed.of("weights"))
    split = store.split("train")
    array = mapping.build_mapping(recipe.mapping, store, start.tokenizer, start.config.vocab_size)
    recipe = _with_length(_with_probe(recipe), start, store)
    if 0 < recipe.batch.tokens < split.together * recipe.batch.max_tokens:
        raise BadInput(
            f"batch.tokens={recipe.batch.tokens} is too small for one question: "
            f"{split.together} rows of batch.max_tokens={recipe.batch.max_tokens}"
        )
    train_assembler = Assembler(split, start.tokenizer, recipe.batch.max_tokens, array)
    samples = _samples(recipe, store, train_assembler)
    head = _head(recipe, store, samples)
    task = task_of(head)
    if task.has_unlabelled(split):
        raise BadInput(f"{store.name}: the split 'train' has rows without a label")
    if "valid" in store.splits and not task.has_labels(store.split("valid")):
        raise BadInput(
            f"{store.name}: the split 'valid' has no labels, so the run cannot be validated; "
            "make the store again with labels for this split, or without the split"
        )
    before, start = start, start.with_head(head, recipe.seed.of("weights"))
    fresh, dropped = checkpoints.changed_weights(before, start)
    if array is not None or recipe.mapping == "ids":
        identity = np.arange(store.vocab_size)
        source, array = store.tokenizer(), identity if array is None else array
        start = replace(start, source=source, mapping=array)
    notes = replaced + _notes(recipe, store, task, fresh, dropped, start)
    notes += describe_frozen(start, chosen(start, recipe.train.only), fresh)
    metric = _metric(recipe, task, store)
    setup = Setup(recipe, ranks, store, start, train_assembler, samples, metric, notes, precision)
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


def _initial(recipe: Recipe, store: Store, overrides: Collection[str] | None) -> Checkpoint:
    """The checkpoint of `init=`, or fresh weights. Raises BadInput if a weight is not finite."""
    if recipe.init is None:
        return checkpoints.fresh(recipe.model, store.tokenizer(), recipe.seed.of("weights"))
    start = checkpoints.load(recipe.init)
    start = replace(start, config=with_dropout(start.config, recipe.model, overrides))
    for name, weight in start.weights.items():
        if not weight.isfinite().all():
            raise BadInput(
                f"init={recipe.init}: its weight {name} is not finite; give another checkpoint"
            )
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
    if not TASKS[recipe.head].takes_probe:
        able = ", ".join(name for name, task in TASKS.items() if task.takes_probe)
        raise BadInput(f"probe.layer={recipe.probe.layer} needs one of the heads {able}")
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
    planned = planned_samples(recipe, train, mean)
    return Mixture(rows, seed, recipe.fraction, weights, mixture.final, planned)


def rows_per_step(recipe: Recipe, train: Assembler, samples: Samples) -> float:
    """The number of rows in a step. If a step has `batch.tokens`, it is estimated from the first
    rows in the order of training; the store may be sorted by length."""
    batch = recipe.batch
    if not batch.tokens:
        return batch.rows
    examples, _ = samples.at(np.arange(min(samples.per_epoch, SEEN)))
    return batch.tokens / float(train.sizes(examples).mean())


def planned_samples(recipe: Recipe, train: Assembler, samples: Samples) -> int:
    """The number of samples in the whole run; an estimate if it has `train.steps` steps of
    `batch.tokens` tokens."""
    steps, epochs = recipe.train.steps, recipe.train.epochs
    if steps:
        return round(steps * rows_per_step(recipe, train, samples))
    return max(1, round(epochs * samples.per_epoch))


def _head(recipe: Recipe, store: Store, samples: Samples) -> Head:
    """The description of the run's head. Raises BadInput if the settings for pairs or for class
    weights do not fit the store."""
    kind, scale = TASKS[recipe.head], _pair_scale(recipe, store)
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
        layer=recipe.probe.layer,
    )


def _notes(
    recipe: Recipe,
    store: Store,
    task: Task,
    fresh: list[str],
    dropped: list[str],
    start: Checkpoint,
) -> list[str]:
    """Lines about operations on the weights, labels that are not used, weights that are new or
    dropped, class weights, and the meaning of a metric."""
    notes = [f"surgery: {step.op} ({registry.in_words(step.op)})" for step in recipe.surgery]
    if task.predicts_masked and store.kind != "text" and not task.head.pair_scale:
        paired = "tokens_b" in store.split("train").columns
        texts = "its pairs of texts" if paired else "its texts"
        notes.append(f"{store.name} has labels; head=mlm does not use them, only {texts}")
    if recipe.init is None and not task.predicts_masked:
        size = sum(weight.numel() for weight in start.weights.values())
        line = f"no init= is given: all {size:,} weights are random"
        if recipe.model.architecture == "transformer":
            line += "; init=CHECKPOINT, such as init=micro/english, starts from a trained encoder"
        notes.append(line)
    if recipe.init is not None and fresh:
        parts = _parts(fresh)
        why = ""
        if "mlm_head" in parts:
            why = " (the checkpoint has no MLM head; its decoder is tied to the word embeddings)"
        notes.append(f"new weights: {', '.join(parts)}{why}")
    if dropped:
        parts = _parts(dropped)
        why = ""
        if "pooler" in parts and task.predicts_masked:
            why = " (head=mlm trains no pooler, so a fine-tuning of this run begins with a new one)"
        notes.append(f"dropped weights: {', '.join(parts)}{why}")
    if task.head.class_weights:
        pairs = zip(task.head.labels, task.head.class_weights, strict=True)
        weights = ", ".join(f"{name} {weight:.3g}" for name, weight in pairs)
        notes.append(f"class weights of the training loss: {weights}")
    return [*notes, *filter(None, [task.meaning])]


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
    if recipe.train.select == "best" and "valid" not in splits:
        raise BadInput(
            f"train.select=best needs a split 'valid', which {store} lacks; give train.select=last"
        )


def with_dropout(
    config: ModelConfig, wanted: ModelConfig, overrides: Collection[str] | None = None
) -> ModelConfig:
    """A checkpoint's model config with the dropout of `wanted`. If the two differ in other keys,
    raises a BadInput that names them. It checks the architecture and the `overrides` (None: all
    keys)."""
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
    the task takes no such settings, or the number of weights is wrong."""
    loss, split = recipe.loss, store.split("train")
    if loss == type(loss)():
        return ()
    if not TASKS[recipe.head].takes_class_weights:
        named = ", ".join(f"loss.{name}" for name in sorted(loss.model_fields_set))
        raise BadInput(
            f"{named}: head={recipe.head} has no such setting; leave it out, or use head=classify"
        )
    if loss.class_weights == "balanced":
        rows, _ = samples.at(np.arange(samples.per_epoch))
        return balanced(np.asarray(split.columns["label"])[rows], len(store.labels))
    if loss.class_weights and len(loss.class_weights) != len(store.labels):
        raise BadInput(
            f"loss.class_weights has {len(loss.class_weights)} weights; {store.name} has the "
            f"classes {', '.join(store.labels)}; give one weight for each"
        )
    return tuple(float(weight) for weight in loss.class_weights)


def _parts(names: list[str]) -> list[str]:
    return sorted({name.split(".")[0] for name in names})


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


def training_tokens(setup: Setup) -> int:
    """The number of tokens in the training rows, before truncation and without special tokens."""
    split = setup.train.split
    if setup.samples.per_epoch == setup.train.examples:
        return split.tokens
    examples, _ = setup.samples.at(np.arange(setup.samples.per_epoch))
    rows = rows_of(examples, split.together)
    return int((setup.train.whole_sizes(rows) - setup.train.extra).sum())


def stable_phase(setup: Setup) -> tuple[float, float]:
    """Where the stable phase of a run with schedule=wsd begins and ends, in steps or samples."""
    warmup, decay = setup.recipe.optim.lengths(setup.length, setup.unit)
    return warmup, setup.length - decay


def schedule_notes(setup: Setup) -> list[str]:
    """A line that gives the lengths of the warm-up and of the decay in steps, if there are any:
    `optim.decay=0.2` is a share of the run, and `optim.decay=2` is two steps. If they do not fit
    into the run, another line says so."""
    recipe, length, unit = setup.recipe, setup.length, setup.unit
    warmup, decay = (part / unit for part in recipe.optim.lengths(length, unit))
    parts = [f"warm-up in the first {warmup:,.0f}"] if warmup else []
    if recipe.optim.schedule == "wsd":
        parts.append(f"decay in the last {decay:,.0f}")
    notes = [f"of {planned_steps(setup):,} steps: {', '.join(parts)}"] if parts else []
    both = "warm-up and decay are" if recipe.optim.schedule == "wsd" else "the warm-up is"
    if warmup + decay * (recipe.optim.schedule == "wsd") > length / unit * (1 + 1e-9):
        notes.append(f"{both} longer than the run, so the rate does not reach its peak")
    return notes


def planned_steps(setup: Setup) -> int:
    """The number of steps of a run, if no patience ends it. It is estimated if the recipe counts
    epochs and `batch.tokens`, because the lengths of the rows then decide."""
    return math.ceil(setup.length / setup.unit)


def identity_of(setup: Setup) -> dict[str, Any]:
    """The settings that are compared when a run continues. A hash of the content replaces the path
    of the store, of the initial checkpoint, and of each input of a `surgery` operation."""
    config = setup.recipe.model_dump(mode="json")
    identity = {k: v for k, v in config.items() if k not in ("run", "overwrite", "system")}
    identity["data"] = setup.store.key
    if setup.recipe.mixture.final:
        identity["mixture"]["samples"] = setup.planned  # the order depends on it
    if setup.recipe.masking.final is not None:
        identity["masking"]["samples"] = setup.planned
    if setup.recipe.init is not None:
        identity["init"] = checkpoints.content_key(checkpoints.resolve(setup.recipe.init))
    inputs = [registry.content(operation) for operation in setup.recipe.surgery]
    if any(inputs):
        identity["surgery"] = [{**o, **c} for o, c in zip(config["surgery"], inputs, strict=True)]
    return identity


def open_run(setup: Setup) -> tuple[Run, dict[str, Any]]:
    """Open the run's directory on rank 0. Returns the run, on every rank, and the content of its
    config.json. Raises BadInput as `Run.open` does."""
    config, identity = setup.recipe.model_dump(mode="json"), identity_of(setup)
    provenance.refuse_unlike_ranks(setup.ranks)
    environment = setup.ranks.on_rank_zero(partial(provenance.environment, setup.ranks))
    environment["compile"] = setup.compiling
    content = {"config": config, "identity": identity, "environment": environment}
    run, overwrite = Run(Path(setup.recipe.run)), setup.recipe.overwrite

    def open_here() -> None:
        if overwrite or not (run.path / "config.json").exists():
            setup.trajectory.check_room(run.path, 0)  # before anything is deleted or made
        run.open(content, overwrite)

    setup.ranks.on_rank_zero(open_here)
    return run, content
