"""The loop. Pre-training and fine-tuning are the same loop with another head and recipe."""

from __future__ import annotations

if __name__ == "__main__":  # `python -m xformer.train`: before torch is imported
    from xformer.start import as_command

    as_command("train")

import json
import math
import sys
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from xformer import checkpoint as checkpoints
from xformer import optim
from xformer.config import load
from xformer.data import mapping
from xformer.data.batch import Batch
from xformer.data.display import say
from xformer.data.files import read_json
from xformer.data.hashing import key
from xformer.freeze import chosen, freeze
from xformer.guard import Guard
from xformer.monitor import Monitor, cut_log
from xformer.ops import native
from xformer.optim import clip_and_step, gradient_norm
from xformer.parallel import processes
from xformer.parallel.feed import Step
from xformer.parallel.processes import Ranks
from xformer.parallel.replicas import Replicas
from xformer.predictions import write
from xformer.prepare import Job, open_for, prepare
from xformer.recipe import Recipe
from xformer.run import SINCE_LOG, Run, State, is_bare, is_finished
from xformer.scoring import Scores, score
from xformer.session import Session, announce, say_changes, sync_told
from xformer.tasks.task import Loss, Model

DROPOUT = 4  # what a key is for


def main() -> None:
    """`torchrun train.py RECIPE key=value ...`"""
    with processes.group():
        recipe = load(Recipe, sys.argv[1:])
        mapping.parse(recipe.mapping)
        train(recipe, processes.start(recipe.system))


# --------------------------------------------------------------------------------- the loop


def train(recipe: Recipe, ranks: Ranks, until: int = 0) -> None:
    """Run a recipe to its end, or to a step, from wherever its run directory stands.

    Raises BadInput before anything is written, Interrupted after a signal once a checkpoint is
    written, Failure if the store turns out damaged, at numerical trouble, or if the last checkpoint
    cannot be written.
    """
    job = prepare(recipe, ranks)
    run, config = open_for(job)
    finished, bare = ranks.on_rank_zero(lambda: (is_finished(run.path), is_bare(run.path)))
    if bare:
        ranks.on_rank_zero(run.verify_bare)
        _leave(job, run)
        return
    newest = ranks.on_rank_zero(lambda: str(run.newest() or "")) or None
    state = State(**read_json(Path(newest) / "state.json")) if newest else State()
    state.since_log = dict.fromkeys(SINCE_LOG, 0.0) | state.since_log
    if job.done(state) and finished:
        _leave(job, run)
        return
    ranks.on_rank_zero(lambda: job.trajectory.check_room(run.path, state.step))
    ranks.on_rank_zero(lambda: run.begin(config, state.step))
    start = checkpoints.load(newest, verified=True) if newest else job.start
    model = start.model()
    freeze(model, chosen(start, recipe.train.only))
    model = model.to(ranks.device).train()
    optimizer = optim.build(model, recipe.optim)
    if newest:
        moments = checkpoints.load_tensors(Path(newest) / "optimizer.safetensors")
        optim.load_state(optimizer, moments)
    damage = cut_log(run.path, state.step if newest else -1) if ranks.rank == 0 else ""
    unit = "step" if recipe.train.steps else "sample"
    bar = job.progress(state.step, state.position)
    with Monitor(run.path, ranks.rank == 0, state.step if newest else -1, *bar, unit) as monitor:
        if newest:
            monitor.say(f"continuing {run.path} from step {state.step}")
            say_changes(job, run, state, config, monitor)
        else:
            announce(job, model, monitor)
        slow = processes.slow_precision(ranks.device, recipe.system.precision)
        kept = job.trajectory.announcement(run.path, state.step)
        for note in filter(None, (damage, slow, native.note(ranks.device), kept)):
            monitor.say(note)
        monitor.text("config", json.dumps(recipe.model_dump(mode="json"), indent=1))
        feed = job.feed()
        with (
            Session(job, run, state, monitor, model, optimizer) as session,
            closing(feed.steps(state.position)) as steps,
        ):
            replicas = Replicas(model, ranks, feed.sample, recipe.system.precision)
            guard = Guard(recipe.train.spike, state, ranks.device)
            loop(steps, replicas, optimizer, session, guard, until)
        if job.done(state):
            if note := job.trajectory.missing(run.path, state.step):
                monitor.say(note)
            _finish(job, run, model, state, monitor)


def _leave(job: Job, run: Run) -> None:
    """Leave a finished run as it is, but for what was not deleted when it ended."""
    if not job.recipe.train.keep_state:
        job.ranks.on_rank_zero(run.forget_state)
    if job.ranks.rank == 0:
        say(f"{run.path} is finished: see {run.path / 'result.json'}", error=True)
        if note := job.trajectory.missing(run.path, max(job.trajectory.steps, default=0)):
            say(note, error=True)


def loop(
    steps: Generator[tuple[Step, list[Batch[Tensor]]], None, None],
    model: Replicas,
    optimizer: torch.optim.Optimizer,
    session: Session,
    guard: Guard,
    until: int,
) -> None:
    """Step until the end: rate, micro-batches, clip, step, log, validate, checkpoint."""
    job, state = session.job, session.state
    while not session.done and (not until or state.step < until):
        with session.part("waiting for data"):
            step, batches = next(steps)
        rate = session.rate(step)

        optimizer.zero_grad()
        sums = model.begin(session.told)
        for i, batch in enumerate(batches or [None]):  # a rank may have no rows
            with model.averaging(last=i + 1 >= len(batches)):
                loss = loss_of(job, model, batch, state.step, i)
                loss.total.backward()
            sums.add(loss)
        with session.part("optimizer"):
            count = model.reduce(sums)
            norm = gradient_norm(optimizer) / count
            drop = guard.judge(sums, norm)
            session.copy.before_change()
            clip_and_step(optimizer, rate, count, norm, job.recipe.optim.clip, drop)
            model.restore(drop)

        due = session.advance(step, sums.told)
        if due.anything or job.ranks.device.type == "cpu":  # CUDA is not waited for otherwise
            guard.settle(session, model.model, loss_of)
        if due.log:
            session.log(rate, guard.sums)
        best = due.validation and validate(session, model.model)
        if session.done and not due.log:  # out of patience
            session.log(rate, guard.sums)
        session.keep(due, best)
        session.stop_if_told(due)


def loss_of(
    job: Job, model: Model | Replicas, batch: Batch[Tensor] | None, step: int, micro_batch: int
) -> Loss:
    """The loss of a micro-batch, with a seed of dropout of its own."""
    number = key(job.recipe.seed.of("dropout"), DROPOUT, step, micro_batch, job.ranks.rank)
    torch.manual_seed(int(number >> 1))
    with job.ranks.autocast(job.recipe.system.precision):
        loss: Loss = model(batch)
        return loss


def validate(session: Session, model: Model) -> bool:
    """Score the split 'valid', note it, and say whether it is the best so far."""
    job, run, state = session.job, session.run, session.state
    with session.clock.stopped():
        job.ranks.on_rank_zero(session.writer.free)
        best = run.checkpoint_path(state.best_step)
        if state.best_step and not job.ranks.on_rank_zero(best.is_dir):
            if not session.writer.failing:  # then the user knows that none is written
                session.monitor.say(f"{best} is missing: another one is to be the best")
            state.best_step, state.best_scores = 0, {}
        scores = _score(job, model, "valid").metrics
        sign = job.task.metrics[job.metric]
        before = state.best_scores.get(job.metric, -math.inf * sign)
        better = sign * scores[job.metric] > sign * before
        state.last_scores = scores
        if better:
            state.best_step, state.best_scores, state.worse = state.step, scores, 0
        else:
            state.worse += 1
        session.monitor.event("validation", state.step, **scores)
        if job.share(state.step, state.position) < 1 and session.done:
            session.monitor.say(
                f"the run ends early: {state.worse} validations were not better than step "
                f"{state.best_step} (train.patience={job.recipe.train.patience})"
            )
    return better


def _score(job: Job, model: Model, split: str) -> Scores:
    return score(model, job.assembler(split), job.ranks, job.recipe.system.precision)


def _finish(job: Job, run: Run, model: Model, state: State, monitor: Monitor) -> None:
    """Score the selected checkpoint on the splits held out that have labels; write the predictions
    for each, and result.json.

    'valid' is scored again, as only this has its predictions also if the process that validated the
    selected checkpoint was stopped. The scores in result.json are those of what is written.
    """
    best = job.recipe.train.select == "best" and state.best_step > 0
    selected = run.checkpoint_path(state.best_step if best else state.step)
    if best and state.best_step != state.step:
        monitor.say(
            f"the run stands for the checkpoint of step {state.best_step}, the best on valid by "
            f"{job.metric}: its scores follow"
        )
        model.load_state_dict(checkpoints.load(selected).weights)
    metrics = {}
    for split in job.store.splits:
        if split != "train" and job.task.has_labels(job.store.split(split)):
            scores = _score(job, model, split)
            metrics[split] = scores.metrics
            if job.ranks.rank == 0:
                write(run.predictions_path(split), scores.predictions, job.store.key)
    for split, values in metrics.items():
        monitor.event("end", state.step, split=split, **values)
    if job.ranks.rank == 0:
        result = {
            "metrics": metrics,
            "selected": str(selected.relative_to(run.path)),
            "best_step": state.best_step,
            "steps": state.step,
            "dropped": state.dropped,
            "seconds": round(state.seconds, 3),
            "real_tokens_per_second": state.real_tokens / max(state.seconds, 1e-9),
        }
        sync_told(run)
        run.finish(result)
        if not job.recipe.train.keep_state:
            run.forget_state()
