"""The training loop. Pre-training and fine-tuning share it; the recipe and the head differ."""

from __future__ import annotations

if __name__ == "__main__":  # `python -m xformer.train`: before torch is imported
    from xformer.start import as_command

    as_command("train")

import math
import sys
import threading
from collections.abc import Collection, Generator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from xformer import checkpoint as checkpoints
from xformer import optim
from xformer.branch import check_branch, forget_validations
from xformer.config import flat, load, parse_overrides
from xformer.data.batch import Batch
from xformer.data.display import format_number, say
from xformer.data.errors import BadInput
from xformer.data.files import read_run_json
from xformer.freeze import freeze, weights_matching
from xformer.guard import Guard
from xformer.monitor import Monitor, cut_log, events
from xformer.ops import native
from xformer.optim import clip_and_step, gradient_norm
from xformer.parallel import processes
from xformer.parallel.compiled import GRAPHS, LAYERS, compile_parts
from xformer.parallel.feed import Feed, Step
from xformer.parallel.precision import speed_note
from xformer.parallel.processes import Ranks
from xformer.parallel.replicas import Replicas
from xformer.predictions import write
from xformer.prepare import open_run, prepare
from xformer.recipe import Recipe
from xformer.run import Run, State, is_finished, kept_only_weights
from xformer.scoring import Scores, score
from xformer.session import Session, announce, announce_changes, session_of, sync_log
from xformer.setup import Setup
from xformer.tasks.task import Model


def main() -> None:
    """`torchrun train.py RECIPE key=value ...`"""
    with processes.group():
        recipe = load(Recipe, sys.argv[1:])
        overrides = flat(parse_overrides(Recipe, sys.argv[2:]))
        train(recipe, overrides=overrides)


def train(
    recipe: Recipe,
    ranks: Ranks | None = None,
    until: int = 0,
    overrides: Collection[str] | None = None,
) -> None:
    """Run a recipe to its end, or to step `until`. If the run has a checkpoint, resume from the
    newest. By default `processes.start` gives the `ranks`: those of torchrun, or this process
    alone. `overrides` are the keys that the user typed; see `prepare`. A run that is stopped at
    `until` continues from its newest checkpoint, which may be older.

    Like the command, this sets torch's threads, lets the C library keep the memory that is freed,
    and seeds torch's generator in every step: call `torch.manual_seed` before your own draws.

    Raises BadInput if the input is wrong, before anything is written (except that a split with
    nothing to score may be noticed only when it is scored). Raises Interrupted if a signal stops
    the run, after a checkpoint was written. Raises Failure on numerical trouble, if the store is
    damaged, or if the last checkpoint cannot be written.
    """
    _check_caller()
    # open everything that the recipe names, and find out how far the run got
    ranks = ranks or processes.start(recipe.system)
    setup = prepare(recipe, ranks, overrides)
    ranks.on_rank_zero(lambda: check_branch(setup))
    with closing(open_run(setup)) as run:
        if ranks.on_rank_zero(lambda: kept_only_weights(run.path)):
            ranks.on_rank_zero(run.verify_selected)
            _leave(setup, run)
            return
        newest = ranks.on_rank_zero(run.newest)
        branch = recipe.train.branch_from
        begun = newest or (Path(branch) if branch else None)
        state = State.read(begun) if begun else State()
        if newest is None:
            forget_validations(state)
        if setup.done(state) and ranks.on_rank_zero(lambda: is_finished(run.path)):
            _leave(setup, run)
            return
        ranks.on_rank_zero(lambda: setup.trajectory.check_room(run.path, state.step))
        ranks.on_rank_zero(lambda: run.begin(state.step))
        _train_from(begun, state, setup, run, until, own=newest is not None)


def _check_caller() -> None:
    """Raise BadInput if the calling program has a setting that would change or break a training."""
    devices = ("cpu", "cuda")
    where = {
        "inside torch.autocast": any(map(torch.is_autocast_enabled, devices)),
        "inside torch.no_grad or torch.inference_mode": not torch.is_grad_enabled(),
        "with another default type than float32": torch.get_default_dtype() != torch.float32,
        "outside the main thread": threading.current_thread() is not threading.main_thread(),
    }
    if wrong := [place for place, is_so in where.items() if is_so]:
        raise BadInput(f"train() was called {wrong[0]}, where a run cannot be trained")


def _train_from(
    begun: Path | None, state: State, setup: Setup, run: Run, until: int, own: bool
) -> None:
    """Train from the checkpoint `begun`, which has this `state`, or without one from the beginning.
    The checkpoint is the run's `own`, or that of `train.branch_from`."""
    ranks, recipe = setup.ranks, setup.recipe
    model, optimizer = _model_and_optimizer(setup, begun, own)
    logged_until = state.step if own else -1
    damage = cut_log(run.path, logged_until, state.logged) if ranks.rank == 0 else ""
    unit = "step" if recipe.train.steps else "sample"
    done = setup.done_at(state.step, state.position)
    with Monitor(run.path, ranks.rank == 0, logged_until, done, setup.length, unit) as monitor:
        if own:
            monitor.say(f"continuing {run.path} from step {state.step}")
            announce_changes(setup, run, state, monitor)
        else:
            if begun:
                monitor.say(f"branching from {recipe.train.branch_from} at step {state.step}")
            announce(setup, model, monitor)
        notes = (
            damage,
            setup.precision,
            speed_note(ranks.device, recipe.system.precision, recipe.system.tf32),
            native.note(ranks.device),
            setup.trajectory.announcement(run.path, state.step),
        )
        monitor.say(*filter(None, notes))
        monitor.describe(run.starts)
        feed = setup.feed(fixed=setup.compiling != "none")
        _compile(model, setup, feed, monitor)
        with (
            session_of(setup, run, state, monitor, model, optimizer) as session,
            closing(feed.steps(state.position)) as steps,
        ):
            graphs = setup.compiling in GRAPHS
            replicas = Replicas(model, ranks, feed.sample, recipe.system.precision, graphs)
            guard = Guard(recipe.train.spike, state, ranks.device)
            loop(steps, replicas, optimizer, session, guard, until)
        if setup.done(state):
            if note := setup.trajectory.missing(run.path, state.step):
                monitor.say(note)
            _finish(session, model)


def _model_and_optimizer(
    setup: Setup, begun: Path | None, own: bool
) -> tuple[Model, torch.optim.Optimizer]:
    """The model on the device of this rank, ready to train, and its optimizer. Both have the state
    of the checkpoint `begun`, or without one the state of a new run. `Run.newest` has verified a
    checkpoint of the run's `own`."""
    start = checkpoints.load(begun, verified=own) if begun else setup.start
    model = start.model()
    freeze(model, weights_matching(start, setup.recipe.train.only))
    model = model.to(setup.ranks.device).train()
    optimizer = optim.build(model, setup.recipe.optim)
    if begun:
        moments = checkpoints.load_tensors(begun / "optimizer.safetensors")
        optim.load_state(optimizer, moments)
    return model, optimizer


def _compile(model: Model, setup: Setup, feed: Feed, monitor: Monitor) -> None:
    """Compile the parts of a model in place, and print what is compiled."""
    ranks, precision = setup.ranks, setup.recipe.system.precision
    failure = compile_parts(model, setup.compiling, ranks, feed.sample, precision)
    line = f"torch.compile fails here ({failure}): the model runs without it"
    if failure and ranks.rank:  # this rank alone may lack a compiler
        say(f"rank {ranks.rank}: {line}", error=True)
    elif failure:
        monitor.say(line)
    elif setup.compiling in LAYERS:
        monitor.say("torch.compile: layers; the first batch of each shape takes longer")


# --------------------------------------------------------------------------------- the loop


def loop(
    steps: Generator[tuple[Step, list[Batch[Tensor]]], None, None],
    replicas: Replicas,
    optimizer: torch.optim.Optimizer,
    session: Session,
    guard: Guard,
    until: int,
) -> None:
    """The training loop: micro-batches, rate, passes, clip, step, log, validate, checkpoint.

    The way from a row to its gradient, with MLM:

    steps                Feed.steps and Feed.take (parallel/feed.py)
                         Assembler.batches (data/batch.py): pack and mask the rows of the step
    forward_backward     Replicas (parallel/replicas.py): the loss, then loss.total.backward()
                         Model.forward and MLM.loss (tasks/task.py, tasks/mlm.py)
                         Encoder.forward (model/encoder.py), attention (ops/attention.py)
                         vocabulary_loss (ops/vocabulary_loss.py)
    clip_and_step        optim.py: divide the summed gradient, clip it, change the weights
    """
    setup, state = session.setup, session.state
    while not session.done and (not until or state.step < until):
        with session.part("waiting for data"):
            step, batches = next(steps)
        rate = session.rate(step)

        optimizer.zero_grad()
        sums = replicas.begin(bool(session.signals))
        for i, batch in enumerate(batches or [None]):  # the last step may leave a rank without rows
            setup.seed_dropout(state.step, i)
            sums.add(replicas.forward_backward(batch, i, len(batches)))
        with session.part("optimizer"):
            divisor = replicas.reduce(sums)
            norm = gradient_norm(optimizer) / divisor
            drop = guard.judge(sums, norm)
            session.snapshot.let_copy_finish()
            clip_and_step(optimizer, rate, divisor, norm, setup.recipe.optim.clip, drop)
            replicas.restore(drop)

        due = session.advance(step, sums.stop_requests)
        if any(due) or setup.ranks.device.type == "cpu":  # other steps do not wait for CUDA
            guard.settle(session, replicas.model)
        if due.log:
            session.log(rate, guard.sums)
        best = due.validation and run_validation(session, replicas.model)
        if session.done and not due.log:  # early stopping (train.patience)
            session.log(rate, guard.sums)
        session.keep(due, best)
        session.stop_if_told(due)


def run_validation(session: Session, model: Model) -> bool:
    """Score the split 'valid', log the scores, and return whether they are the best so far."""
    setup, run, state = session.setup, session.run, session.state
    with session.clock.stopped():
        setup.ranks.on_rank_zero(session.writer.free)
        best = run.checkpoint_path(state.best_step)
        if state.best_step and not setup.ranks.on_rank_zero(best.is_dir):
            if not session.writer.failing:  # else the writer has reported it already
                session.monitor.say(f"{best} is missing: this validation counts as the best so far")
            state.best_step, state.best_scores = 0, {}
        validated = score_split(setup, model, "valid")
        scores = validated.metrics
        sign = setup.task.metrics[setup.metric]
        before = state.best_scores.get(setup.metric, -math.inf * sign)
        better = sign * scores[setup.metric] > sign * before
        if better:
            state.best_step, state.best_scores, state.worse = state.step, scores, 0
        else:
            state.worse += 1
        if better or setup.recipe.train.select == "last":
            session.validated = {state.step: validated}
        session.monitor.event("validation", state.step, **scores)
        if session.done and not setup.ended(state):
            session.monitor.say(
                f"early stopping: {state.worse} validations in a row were no better than step "
                f"{state.best_step} (train.patience={setup.recipe.train.patience})"
            )
    return better


def score_split(setup: Setup, model: Model, split: str) -> Scores:
    """Score the model on a split of the run's store."""
    return score(model, setup.assembler(split), setup.ranks, setup.recipe.system.precision)


# --------------------------------------------------------------------------------- the end


def _finish(session: Session, model: Model) -> None:
    """Score the selected checkpoint, and write its predictions and result.json."""
    setup, run, state, monitor = session.setup, session.run, session.state, session.monitor
    best = setup.recipe.train.select == "best" and state.best_step > 0
    step = state.best_step if best else state.step
    selected = run.checkpoint_path(step)
    if step != state.step:
        monitor.say(
            f"the run selects the checkpoint of step {state.best_step}, the best on valid by "
            f"{setup.metric}: its scores follow"
        )
        model.load_state_dict(checkpoints.load(selected).weights)
    metrics = _score_splits(session, model, step)
    if not metrics:
        _say_end(run.path, monitor, state.step, selected)
    if setup.ranks.rank == 0:
        result = {
            "metrics": metrics,
            "selected": str(selected.relative_to(run.path)),
            "best_step": state.best_step,
            "steps": state.step,
            "dropped": state.dropped,
            "seconds": round(state.seconds, 3),
            "real_tokens_per_second": state.real_tokens / max(state.seconds, 1e-9),
        }
        if given := setup.given(state):
            result["stores"] = given
        sync_log(run)
        run.finish(result)
        if not setup.recipe.train.keep_state:
            run.forget_state()


def _score_splits(session: Session, model: Model, step: int) -> dict[str, dict[str, float]]:
    """Score the selected checkpoint, that of `step`, on every labelled split but 'train'. Write its
    predictions and log its metrics, which are returned by split.

    `session.validated` lacks the selected checkpoint if the run was stopped after the validation;
    then 'valid' is scored again.
    """
    setup, run, monitor = session.setup, session.run, session.monitor
    metrics, remarks = {}, {}
    for split in setup.store.splits:
        if split != "train" and setup.task.has_labels(setup.store.split(split)):
            known = session.validated.get(step) if split == "valid" else None
            scores = known or score_split(setup, model, split)
            metrics[split] = scores.metrics
            if setup.ranks.rank == 0:
                write(run.predictions_path(split), scores.predictions, setup.store.key)
            if remark := setup.task.prediction_note(scores.predictions):
                remarks[split] = {"remark": remark}
                monitor.say(f"warning: {split}: {remark}")
    for split, values in metrics.items():
        monitor.event("end", session.state.step, split=split, **values, **remarks.get(split, {}))
    return metrics


def _say_end(run: Path, monitor: Monitor, step: int, selected: Path) -> None:
    """Say how a run ended whose store has nothing to score: its last training loss, and where its
    checkpoint is."""
    losses = [record["loss"] for record in events(run, "train")] if monitor.active else []
    loss = f"training loss {format_number(losses[-1])}  " if losses else ""
    monitor.say(
        f"end        step {step:>6}  {loss}(no split but 'train' can be scored); the checkpoint is "
        f"{selected}"
    )


def _leave(setup: Setup, run: Run) -> None:
    """Say that the run is already finished. With train.keep_state=false, delete its state."""
    if not setup.recipe.train.keep_state:
        setup.ranks.on_rank_zero(run.forget_state)
    if setup.ranks.rank == 0:
        say(f"{run.path} is finished: see {run.path / 'result.json'}", error=True)
        reached = read_run_json(run.path / "result.json")["steps"]
        if note := setup.trajectory.missing(run.path, reached):
            say(note, error=True)
