"""A recipe with everything that it names, and what follows from the two: the length of the run, its
learning rates, its batches and its masks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from xformer import checkpoint as checkpoints
from xformer import trajectory
from xformer.checkpoint import Checkpoint
from xformer.data import hashing
from xformer.data.batch import Assembler, rows_of
from xformer.data.joined import Joined
from xformer.data.masking import MaskSchedule
from xformer.data.mixture import Mixture
from xformer.data.sampler import Samples, Stream
from xformer.data.store import Store
from xformer.optim import learning_rate
from xformer.parallel.compiled import compile_mode
from xformer.parallel.feed import Feed
from xformer.parallel.processes import Ranks
from xformer.recipe import Recipe
from xformer.run import State
from xformer.surgery import registry
from xformer.tasks.task import Task
from xformer.trajectory import Timeline, Trajectory

SEEN = 10_000  # the mean length of a row is estimated from so many rows
LONG = 10_000_000  # tokens of a validation, which take minutes on CPUs


@dataclass(frozen=True)
class Setup:
    """A recipe with its store, its initial checkpoint and its task, opened and checked.

    `start` holds the initial weights with the new head, `training_rows` makes batches of the
    split 'train', `samples` is the order of its rows, and `metric` decides which checkpoint is the
    best. `notes` are lines to print when the run starts, and `precision` is one to print at every
    start.
    """

    recipe: Recipe
    ranks: Ranks
    store: Store
    start: Checkpoint
    training_rows: Assembler
    samples: Samples
    metric: str
    notes: list[str]
    precision: str

    @property
    def task(self) -> Task:
        """The task of the run's head."""
        task = self.start.task
        assert task is not None
        return task

    @property
    def length(self) -> int:
        """The length of the run in steps; in samples if it counts epochs."""
        steps = self.recipe.train.steps
        return steps or samples_of_run(self.recipe, self.training_rows, self.samples)

    @cached_property
    def unit(self) -> float:
        """The length of a step in the unit of `length`: 1 step, or its number of samples, which is
        estimated if it has `batch.tokens`."""
        steps = self.recipe.train.steps
        return 1 if steps else rows_per_step(self.recipe, self.training_rows, self.samples)

    @property
    def planned_steps(self) -> int:
        """The number of steps of the run without early stopping. With epochs and `batch.tokens` it
        is an estimate, because it depends on the lengths of the rows."""
        return math.ceil(self.length / self.unit)

    @property
    def schedule_end(self) -> int:
        """The number of samples after which the weights of a mixture and the share of masked tokens
        have their final values: all samples of the run (see `samples_of_run`)."""
        if self.recipe.mixture.final and isinstance(self.samples, Mixture):
            # the mixture's own estimate, so that its weights and the masking end together
            return self.samples.planned
        return samples_of_run(self.recipe, self.training_rows, self.samples)

    @property
    def stable_phase(self) -> tuple[float, float]:
        """Where the stable phase of a run with schedule=wsd begins and ends, in the unit of
        `length`."""
        warmup, decay = self.recipe.optim.lengths(self.length, self.unit)
        return warmup, self.length - decay

    def done_at(self, step: int, position: int) -> int:
        """How much of `length` is done at this step and sample."""
        return step if self.recipe.train.steps else position

    def ended(self, state: State) -> bool:
        """Whether the run has reached its end."""
        return self.done_at(state.step, state.position) >= self.length

    def done(self, state: State) -> bool:
        """Whether the run has reached its end, or has been stopped by `train.patience`."""
        return self.ended(state) or 0 < self.recipe.train.patience <= state.worse

    def rate(self, before: int, after: int) -> float:
        """The learning rate of a step; see `done_at` for what is done before and after it."""
        return learning_rate(self.recipe.optim, before, after, self.length, self.unit)

    def schedule_notes(self) -> list[str]:
        """A line that gives the lengths of the warm-up and of the decay in steps, if there are any:
        `optim.decay=0.2` is a share of the run, and `optim.decay=2` is two steps. If they do not
        fit into the run, another line says so."""
        recipe, length, unit = self.recipe, self.length, self.unit
        warmup, decay = (part / unit for part in recipe.optim.lengths(length, unit))
        first = f"{warmup:,.0f}" if warmup >= 1 else f"{warmup:.2g}"
        parts = [f"warm-up in the first {first}"] if warmup else []
        if decay:
            parts.append(f"decay in the last {decay:,.0f}")
        notes = [f"of {self.planned_steps:,} steps: {', '.join(parts)}"] if parts else []
        if warmup + decay > length / unit * (1 + 1e-9):
            both = "warm-up and decay are" if decay else "the warm-up is"
            notes.append(f"{both} longer than the run, so the rate does not reach its peak")
        return notes

    def validation_note(self) -> str:
        """A line that says so if validations on a large split take longer than the training between
        them, or ""."""
        read = self.store.split("valid").tokens if "valid" in self.store.splits else 0
        if read < LONG:
            return ""
        rows = self.recipe.train.validate_every * rows_per_step(
            self.recipe, self.training_rows, self.samples
        )
        share = rows / self.samples.per_epoch if rows else 1.0  # of an epoch
        trained = share * self.training_tokens
        if read < 3 * trained:  # a forward pass is a third of a training step
            return ""
        return (
            f"each validation reads the {read:,} tokens of valid, but the run trains on only about "
            f"{trained:,.0f} between two: a smaller split valid or a larger train.validate_every "
            "saves time"
        )

    def with_length_of(self, other: Recipe) -> Setup:
        """This setup with the length and the learning rates of another recipe."""
        recipe = self.recipe.model_copy(update={"optim": other.optim})
        length = {"steps": other.train.steps, "epochs": other.train.epochs}
        return replace(self, recipe=recipe.having("train", **length))

    @property
    def training_tokens(self) -> int:
        """The number of tokens in the training rows, before truncation and without special
        tokens."""
        split = self.training_rows.split
        if self.samples.per_epoch == self.training_rows.examples:
            return split.tokens
        rows = rows_of(self.samples.first_epoch(), split.together)
        return int((self.training_rows.whole_sizes(rows) - self.training_rows.extra).sum())

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

    def feed(self, fixed: bool = False) -> Feed:
        """The training batches of this rank, step by step. If `fixed`, they have few shapes."""
        recipe, batch = self.recipe, self.recipe.batch
        end = 2**62 if recipe.train.steps else self.length
        stream = Stream(self.samples, end, self.training_rows.sizes, batch.rows, batch.tokens)
        masking = self._masking() if self.task.predicts_masked else None
        return Feed(self.training_rows, stream, self.ranks, batch.accumulate, masking, fixed)

    def _masking(self) -> MaskSchedule:
        """What share of the tokens is masked, and when."""
        recipe, masks = self.recipe, self.recipe.masking
        seed, first = recipe.seed.of("masks"), masks.probability
        if masks.final is None:
            return MaskSchedule(seed, first, first, spans=masks.spans)
        return MaskSchedule(seed, first, masks.final, self.schedule_end, masks.spans)

    def assembler(self, split: str) -> Assembler:
        """The assembler for a split of the run's store."""
        return replace(self.training_rows, split=self.store.split(split))

    def seed_dropout(self, step: int, micro_batch: int) -> None:
        """Seed dropout, which has its own seed in every step, micro-batch and rank."""
        seed = self.recipe.seed.of("dropout")
        number = hashing.key(seed, hashing.DROPOUT, step, micro_batch, self.ranks.rank)
        self.ranks.seed(int(number >> 1))

    @cached_property
    def trajectory(self) -> Trajectory:
        """The steps at which `train.keep_at` keeps the weights. A branch leaves out the steps that
        were trained by the other run. Raises BadInput as `steps_of` does."""
        settings, split = self.recipe.train, self.training_rows.split
        if not settings.keep_at:
            return Trajectory()
        timeline = Timeline(
            self.feed().stream,
            settings.steps,
            self.training_rows.extra,
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

    @cached_property
    def compiling(self) -> str:
        """What the run compiles: `system.compile`, with "auto" replaced."""

        def pays() -> bool:
            """Compiling takes 20 s for each shape of a batch, and fine-tuning is soon over."""
            return self.task.predicts_masked and len(self.feed(fixed=True).shapes) == 1

        return compile_mode(self.recipe.system, self.ranks, self.start.config, pays)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that are compared when a run continues. A hash of the content replaces the
        path of the store, of the initial checkpoint, and of each input of a `surgery` operation."""
        recipe, config = self.recipe, self.recipe.model_dump(mode="json")
        identity = {k: v for k, v in config.items() if k not in ("run", "overwrite", "system")}
        identity["data"] = self.store.key
        if recipe.mixture.final:
            identity["mixture"]["samples"] = self.schedule_end  # the order depends on it
        if recipe.masking.final is not None:
            identity["masking"]["samples"] = self.schedule_end
        if recipe.init is not None:
            identity["init"] = checkpoints.content_key(checkpoints.resolve(recipe.init))
        inputs = [registry.content(operation) for operation in recipe.surgery]
        if any(inputs):
            pairs = zip(config["surgery"], inputs, strict=True)
            identity["surgery"] = [{**operation, **content} for operation, content in pairs]
        return identity


def rows_per_step(recipe: Recipe, train: Assembler, samples: Samples) -> float:
    """The number of rows in a step. If a step has `batch.tokens`, it is estimated from the first
    rows in the order of training; the store may be sorted by length."""
    batch = recipe.batch
    if not batch.tokens:
        return batch.rows
    examples, _ = samples.at(np.arange(min(samples.per_epoch, SEEN)))
    return batch.tokens / float(train.sizes(examples).mean())


def samples_of_run(recipe: Recipe, train: Assembler, samples: Samples) -> int:
    """The number of samples in the whole run; an estimate if it has `train.steps` steps of
    `batch.tokens` tokens."""
    steps, epochs = recipe.train.steps, recipe.train.epochs
    if steps:
        return round(steps * rows_per_step(recipe, train, samples))
    return max(1, round(epochs * samples.per_epoch))
