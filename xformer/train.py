"""THE loop: pre-training and fine-tuning are one loop with another head and recipe."""

from __future__ import annotations

if __name__ == "__main__":  # `python -m xformer.train`: before torch is imported
    from xformer.start import as_command

    as_command("train")

import json
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xformer import checkpoint as checkpoints
from xformer import cost, distributed, optim, provenance
from xformer.config import load
from xformer.data import mapping
from xformer.data.errors import BadInput, Failure, Interrupted, say
from xformer.data.files import read_json, sync
from xformer.data.hashing import key
from xformer.distributed import Ranks
from xformer.evaluate import Scores, score
from xformer.freeze import chosen, freeze
from xformer.model.heads import Loss, Model
from xformer.monitor import Monitor, cut_log, peak_memory
from xformer.ops import native
from xformer.optim import clip_and_step, gradient_norm, learning_rate
from xformer.packed import Packed, to_device
from xformer.parallel import Replicas, Sums
from xformer.predictions import write
from xformer.prepare import Job, has_labels, prepare, tokens, warmup_share
from xformer.profile import Profiler
from xformer.recipe import Recipe
from xformer.run import SINCE_LOG, Run, State, is_bare, is_finished, open_run
from xformer.snapshot import Snapshot
from xformer.surgery import operations
from xformer.trouble import LIMIT, NOWHERE, WEIGHT, Account, first_layer
from xformer.writer import Writer

LOWER_IS_BETTER = ("loss", "perplexity")
DROPOUT = 4  # what a key is for


def main() -> None:
    """`torchrun train.py RECIPE key=value ...`"""
    with distributed.group():
        recipe = load(Recipe, sys.argv[1:])
        mapping.parse(recipe.mapping)
        train(recipe, distributed.start(recipe.system))


# --------------------------------------------------------------------------------- the loop


def train(recipe: Recipe, ranks: Ranks, until: int = 0) -> None:
    """Run a recipe to its end, or to a step, from wherever its run directory stands.

    Raises BadInput before anything is written, Interrupted after a signal once a checkpoint is
    written, Failure if the store turns out damaged, at numerical trouble, or if the last checkpoint
    cannot be written.
    """
    job = prepare(recipe, ranks)
    run, config = _open(job)
    finished, bare = ranks.on_rank_zero(lambda: (is_finished(run.path), is_bare(run.path)))
    if bare:
        ranks.on_rank_zero(run.verify_bare)
        _leave(job, run)
        return
    found = ranks.on_rank_zero(lambda: str(run.newest() or "")) or None
    state = State(**read_json(Path(found) / "state.json")) if found else State()
    state.since_log = dict.fromkeys(SINCE_LOG, 0.0) | state.since_log
    if job.done(state) and finished:
        _leave(job, run)
        return
    ranks.on_rank_zero(lambda: job.trajectory.check_room(run.path, state.step))
    ranks.on_rank_zero(lambda: run.begin(config, state.step))
    start = checkpoints.load(found, verified=True) if found else job.start
    model = start.model()
    freeze(model, chosen(start, recipe.train.only))
    model = model.to(ranks.device).train()
    optimizer = optim.build(model, recipe.optim)
    if found:
        moments = checkpoints.load_tensors(Path(found) / "optimizer.safetensors")
        optim.load_state(optimizer, moments)
    damage = cut_log(run.path, state.step if found else -1) if ranks.rank == 0 else ""
    unit = "step" if recipe.train.steps else "sample"
    bar = job.progress(state.step, state.position)
    with Monitor(run.path, ranks.rank == 0, state.step if found else -1, *bar, unit) as monitor:
        if found:
            monitor.say(f"continuing {run.path} from step {state.step}")
            _say_changes(job, run, state, config, monitor)
        else:
            _announce(job, model, monitor)
        slow = distributed.slow_precision(ranks.device, recipe.system.precision)
        kept = job.trajectory.announcement(run.path, state.step)
        for note in filter(None, (damage, slow, native.note(ranks.device), kept)):
            monitor.say(note)
        monitor.text("config", json.dumps(recipe.model_dump(mode="json"), indent=1))
        with _signals() as signals, Writer(monitor.say) as writer:
            loop(job, run, model, optimizer, state, monitor, signals, writer, until)
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
    job: Job,
    run: Run,
    model: Model,
    optimizer: torch.optim.Optimizer,
    state: State,
    monitor: Monitor,
    signals: list[int],
    writer: Writer,
    until: int,
) -> None:
    """Step until the end: rate, micro-batches, clip, step, log, validate, checkpoint."""
    recipe, ranks, every = job.recipe, job.ranks, job.recipe.train
    warmup = warmup_share(job, job.length(every.steps, every.epochs))
    carried = [state.since_log[name] for name in SINCE_LOG[:4]]
    account = Account(every.spike, carried, state.statistics, ranks.device)
    tracing = recipe.system.profile and ranks.rank == 0
    profiler = Profiler(run.path, tracing, ranks.device, monitor.say)
    stop, clock, done = StopFlag(ranks.device), Clock(state), job.done(state)
    copy = Snapshot(model, optimizer, ranks)
    feed = job.feed()
    steps = feed.steps(state.position)
    keep = partial(_keep, job, run, copy, writer, state)
    if state.step == 0 and 0 in job.trajectory.steps:
        keep(whole=False)
    running = threading.Event()  # the check would take disk and processor from the first step
    with _store_checked(job, running) as damage, closing(steps), profiler:
        replicas = Replicas(model, ranks, feed.sample, recipe.system.precision)
        while not done and (not until or state.step < until):
            with profiler.part("waiting for data"):
                step, batches = next(steps)
            before = job.share(state.step, state.position)
            after = job.share(state.step + 1, step.end)
            lr = learning_rate(recipe.optim, before, after, warmup)

            optimizer.zero_grad()
            replicas.begin()
            sums = Sums(ranks.device)
            sums.told += float(bool(signals))
            for i, batch in enumerate(batches or [None]):
                with replicas.averaging(last=i + 1 >= len(batches)):
                    loss = loss_of(job, replicas, batch, state.step, i)
                    loss.total.backward()
                sums.add(loss)
            with profiler.part("optimizer"):
                ranks.sum(sums.all)
                replicas.average_buffers()
                count = sums.count.clamp(min=1.0) / ranks.world_size  # ranks were averaged
                norm = gradient_norm(optimizer) / count
                drop = account.judge(sums, norm, state.step, state.position)
                copy.before_change()
                clip_and_step(optimizer, lr, count, norm, recipe.optim.clip, drop)
                replicas.restore(drop)
            running.set()

            epoch = state.position // job.samples.per_epoch
            state.advance(step)
            ranks.at(state.step)
            monitor.advance(job.progress(state.step, state.position)[0])
            done = job.done(state)
            stopped = stop.read(state.step, sums.told)
            log_due = state.step % every.log_every == 0 or done
            next_epoch = state.position // job.samples.per_epoch > epoch
            due = state.step % every.validate_every == 0 if every.validate_every else next_epoch
            validation_due = (due or done) and "valid" in job.store.splits
            due = bool(every.checkpoint_every) and state.step % every.checkpoint_every == 0
            if log_due or validation_due or due or stopped or ranks.device.type == "cpu":
                _settle(job, run, model, state, account, monitor, writer)
            if log_due:
                _log(job, state, account, lr, monitor, clock)
            clock.mark += profiler.step(state.step)
            if damage:
                raise Failure(damage[0])
            best = False
            if validation_due:
                with clock.stopped():
                    ranks.on_rank_zero(writer.free)
                    best = _validate(job, run, model, state, monitor, writer.failing)
                done = job.done(state)
                if done:  # of patience
                    _log(job, state, account, lr, monitor, clock)
            whole = best or done or stopped or due
            if whole or state.step in job.trajectory.steps:
                with clock.stopped():
                    if whole:
                        account.save(state)
                    keep(whole, now=done or stopped)
            if stopped and not done:
                number = signals[0] if signals else signal.SIGTERM
                message = f"stopped at step {state.step}; the same command continues {run.path}"
                raise Interrupted(number, message)


def _settle(
    job: Job,
    run: Run,
    model: Model,
    state: State,
    account: Account,
    monitor: Monitor,
    writer: Writer,
) -> None:
    """Trace, log and count the steps that were dropped since the last call; all ranks call it
    together. Raises Failure if the run is to stop."""
    for step, position, what in account.read():
        state.in_a_row = state.in_a_row + 1 if what else 0
        if not what:
            continue
        state.dropped += 1
        policy = job.recipe.train.trouble
        stage, place = _trace(job, model, step, position)
        record = {"what": what, **place, "action": policy, "dropped": state.dropped}
        monitor.event("trouble", step + 1, **record)
        line = f"{what} at step {step + 1}: {place['where']}"
        if stage != WEIGHT:  # then all rows of the step are in question
            line += f", rows {_some(place['rows'])} of the store"
        if policy == "stop" or stage == WEIGHT:
            writer.free()  # a checkpoint may be on its way to the disk
            kept = any((run.path / "checkpoints").glob("step_*"))
            older = "the newest checkpoint is from before" if kept else "no checkpoint is there"
            cure = "train.trouble=skip drops such updates"
            if stage == WEIGHT:
                older = "the newest checkpoint may hold it too" if kept else older
                cure = "dropping updates does not mend a weight"
            raise Failure(f"{line}; {older}; {cure}")
        monitor.say(f"{line}; its update is dropped")
        if state.in_a_row >= LIMIT:
            raise Failure(f"{line}: {LIMIT} updates in a row were dropped")


def _trace(job: Job, model: Model, step: int, position: int) -> tuple[int, dict[str, Any]]:
    """How early the trouble of a step arose (WEIGHT to NOWHERE); where, and on whose rows."""
    ranks, batches = job.ranks, job.feed().take(position).batches
    packed = [to_device(batch, ranks.device) for batch in batches]
    found = first_layer(model, len(packed), lambda i: loss_of(job, model, packed[i], step, i))
    stage, i, where = found
    mine = [batch.rows.tolist() for batch in batches]
    idle = not batches  # such a rank has no gradient to tell of
    every = ranks.gather([stage, idle, ranks.rank, i, where, mine])
    stage, _, rank, i, where, theirs = min(every)
    if stage in (WEIGHT, NOWHERE):  # no micro-batch has done it
        rows = [row for *_, batches in every for batch in batches for row in batch]
        return stage, {"where": where, "rows": sorted(rows)}
    return stage, {"where": where, "rank": rank, "micro_batch": i, "rows": sorted(theirs[i])}


def _some(rows: list[int]) -> str:
    shown = ", ".join(map(str, rows[:8]))
    return f"{shown} and {len(rows) - 8} more" if len(rows) > 8 else shown


def loss_of(
    job: Job, model: Model | Replicas, batch: Packed | None, step: int, micro_batch: int
) -> Loss:
    """The loss of a micro-batch, with the dropout that is its own."""
    number = key(job.recipe.seed.of("dropout"), DROPOUT, step, micro_batch, job.ranks.rank)
    torch.manual_seed(int(number >> 1))
    with job.ranks.autocast(job.recipe.system.precision):
        loss: Loss = model(batch)
        return loss


class Clock:
    """Counts the seconds of a run's steps, without what is done between them."""

    def __init__(self, state: State):
        self.state, self.mark = state, time.perf_counter()

    def read(self) -> None:
        """Bring the state up to date."""
        now = time.perf_counter()
        self.state.seconds += now - self.mark
        self.state.since_log["seconds"] += now - self.mark
        self.mark = now

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.read()
        yield
        self.mark = time.perf_counter()


class StopFlag:
    """Whether any rank was told to stop, in the same step on all. On CUDA known some steps late, so
    that nobody waits for the device."""

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.value = torch.zeros((), pin_memory=self.on_cuda)
        self.copied: torch.cuda.Event | None = None

    def read(self, step: int, told: torch.Tensor) -> bool:
        """`told` () is above 0 where a rank was told, in this step or an earlier one."""
        if not self.on_cuda:
            return bool(told > 0)
        if step % 2:
            return False
        if self.copied is not None:
            self.copied.synchronize()  # recorded 2 steps ago
        stop = bool(self.value > 0)
        self.value.copy_(told, non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()
        return stop


def _open(job: Job) -> tuple[Run, dict[str, Any]]:
    """The run, which rank 0 opens and the others follow, and the content of its config.json."""
    config = job.recipe.model_dump(mode="json")
    identity = {k: v for k, v in config.items() if k not in ("run", "overwrite", "system")}
    identity["data"] = job.store.key
    if job.recipe.init is not None:
        identity["init"] = checkpoints.content_key(checkpoints.resolve(job.recipe.init))
    read = [operations.content(operation) for operation in job.recipe.surgery]
    if any(read):  # what operations read beside the checkpoint
        identity["surgery"] = [{**o, **c} for o, c in zip(config["surgery"], read, strict=True)]
    provenance.refuse_unlike_ranks(job.ranks)
    environment = job.ranks.on_rank_zero(partial(provenance.environment, job.ranks))
    content = {"config": config, "identity": identity, "environment": environment}
    path = Path(job.recipe.run)
    opened: list[Run] = []

    def opening() -> None:
        if job.recipe.overwrite or not (path / "config.json").exists():
            job.trajectory.check_room(path, 0)  # before anything is deleted or made
        opened.append(open_run(path, content, job.recipe.overwrite))

    job.ranks.on_rank_zero(opening)
    return opened[0] if opened else Run(path), content


def _announce(job: Job, model: Model, monitor: Monitor) -> None:
    for note in (*job.notes, *job.recipe.optim.notes()):
        monitor.say(note)
    limit = f"batch.max_tokens={job.recipe.batch.max_tokens}"
    if note := job.train.truncation(limit, job.start.config.max_positions):
        monitor.say(note)
    parameters = sum(p.numel() for p in model.parameters())
    monitor.event(
        "start",
        0,
        parameters=parameters,
        rows=job.samples.per_epoch,
        tokens=tokens(job),
        ranks=job.ranks.world_size,
    )


@contextmanager
def _store_checked(job: Job, begin: threading.Event) -> Iterator[list[str]]:
    """The first damage that rank 0 finds in the store's blocks, checking them in the background
    from `begin` on.

    Raises Failure with it where the block ends before the check, or crashes: that may be why.
    """
    damage: list[str] = []
    check = job.store.verify_in_background(damage.append, begin) if job.ranks.rank == 0 else None
    try:
        yield damage
    except (BadInput, Failure, Interrupted, OSError):
        raise
    except Exception as error:
        begin.set()
        if check is not None:
            check.join()
        if damage:
            raise Failure(damage[0]) from error
        raise
    begin.set()
    if check is not None:
        check.join()
    if damage:
        raise Failure(damage[0])


def _say_changes(
    job: Job, run: Run, state: State, config: dict[str, Any], monitor: Monitor
) -> None:
    """Say what differs from the start that made the checkpoint: what changes the bits of a result,
    and what a raised train.steps or train.epochs does to the learning rate."""
    earlier = run.made_by(state.step)
    if earlier is None:
        return
    if differing := provenance.changes(earlier, config):
        monitor.say(
            f"since the last start: {', '.join(differing)}; results may not be bit for bit those "
            "of one uninterrupted run"
        )
    before, now = earlier["config"]["train"], job.recipe.train
    name = "steps" if now.steps else "epochs"
    if before[name] == getattr(now, name):
        return
    done, rates = job.progress(state.step, state.position)[0], []
    for steps, epochs in ((before["steps"], before["epochs"]), (now.steps, now.epochs)):
        length = job.length(steps, epochs)
        warmup = warmup_share(job, length)
        rates.append(learning_rate(job.recipe.optim, done / length, done / length, warmup))
    monitor.say(
        f"train.{name} was {before[name]} and is now {getattr(now, name)}: the schedule spans the "
        f"longer run, so the rate goes on at {rates[1]:.3g}; it stood at {rates[0]:.3g}"
    )


def _log(
    job: Job, state: State, account: Account, lr: float, monitor: Monitor, clock: Clock
) -> None:
    """One line of the log, if there is something to tell: means since the last one."""
    since = state.since_log
    total, count, correct, norm = account.sums.tolist()
    if not since["tokens"] or not count:
        return
    clock.read()
    loss = total / count
    values: dict[str, Any] = {"loss": loss}
    if job.recipe.head == "mlm":
        values["perplexity"] = math.exp(min(loss, 700))
    if job.recipe.head != "regress":
        values["accuracy"] = correct / count
    values |= {
        "lr": lr,
        "grad_norm": norm,
        "epoch": state.position / job.samples.per_epoch,
        "real_tokens_per_second": since["tokens"] / max(since["seconds"], 1e-9),
        "padding": 0.0,  # batches are packed
        "memory_gib": round(peak_memory(job.ranks.device), 3),
    }
    if (share := _utilisation(job, since, count)) is not None:
        values["mfu"] = share
    monitor.event("train", state.step, **values)
    account.sums.zero_()
    state.since_log = dict.fromkeys(SINCE_LOG, 0.0)


def _utilisation(job: Job, since: dict[str, float], predicted: float) -> float | None:
    """Share of the devices' peak since the last line of the log; None where no peak is known."""
    system, device, head = job.recipe.system, job.ranks.device, job.start.head
    peak = 1e12 * system.peak_tflops or cost.peak_flops(
        torch.cuda.get_device_name(device) if device.type == "cuda" else "", system.precision
    )
    if peak is None or head is None:
        return None
    tokens, squares, rows = (int(since[name]) for name in ("tokens", "squares", "rows"))
    work, pairs = cost.Work(tokens, squares, rows, int(predicted)), head.pair_scale > 0
    flops = cost.training_flops(job.start.config, head.kind, work, head.outputs, pairs)
    return cost.utilisation(flops, since["seconds"], peak, job.ranks.world_size)


def _validate(
    job: Job, run: Run, model: Model, state: State, monitor: Monitor, failing: bool
) -> bool:
    """Score the split 'valid', note it, and say whether it is the best so far. `failing`: the user
    knows that checkpoints cannot be written."""
    best = run.checkpoint_path(state.best_step)
    if state.best_step and not job.ranks.on_rank_zero(best.is_dir):
        if not failing:
            monitor.say(f"{best} is missing: another one is to be the best")
        state.best_step, state.best_scores = 0, {}
    scores = _score(job, model, "valid").metrics
    sign = -1 if job.metric in LOWER_IS_BETTER else 1
    before = state.best_scores.get(job.metric, -math.inf * sign)
    better = sign * scores[job.metric] > sign * before
    state.last_scores = scores
    if better:
        state.best_step, state.best_scores, state.worse = state.step, scores, 0
    else:
        state.worse += 1
    monitor.event("validation", state.step, **scores)
    return better


def _score(job: Job, model: Model, split: str) -> Scores:
    recipe, head = job.recipe, job.start.head
    assert head is not None
    precision = recipe.system.precision
    return score(model, job.assembler(split), head, job.ranks, precision)


def _keep(
    job: Job,
    run: Run,
    copy: Snapshot,
    writer: Writer,
    state: State,
    whole: bool,
    now: bool = False,
) -> None:
    """Copy what the run holds, the `whole` of it or the weights alone, and write it: in the
    background, or `now`. All ranks call it together."""
    writer.free()
    copy.take(whole)
    what = f"{'' if whole else 'trajectory '}checkpoint of step {state.step}"
    save = partial(_save, job, run, copy, asdict(state), whole)
    if now:
        job.ranks.on_rank_zero(partial(writer.now, what, save))
    elif job.ranks.rank == 0:
        writer.start(what, save)


def _save(job: Job, run: Run, copy: Snapshot, state: dict[str, Any], whole: bool) -> None:
    """Write what was copied: weights for the trajectory if the step is one of its, then the `whole`
    checkpoint, which is therefore never there without them. Raises OSError or Failure where the
    disk refuses."""
    recipe, step = job.recipe, state["step"]
    record: dict[str, Any] = {
        "op": "train",
        "head": recipe.head,
        "data": job.store.key,
        "steps": step,
        "tokens": state["real_tokens"],
        "seed": recipe.model_dump(mode="json")["seed"],
        "mapping": recipe.mapping,
    }
    if recipe.train.only:
        record["only"] = list(recipe.train.only)
    copy.wait()
    made = replace(job.start, weights=copy.weights, history=(*job.start.history, record))
    if step in job.trajectory.steps:
        checkpoints.save(made, run.trajectory_path(step), True)
    if not whole:
        return
    _sync_told(run)
    checkpoints.save(made, run.checkpoint_path(step), True, copy.moments, state)
    run.prune(state["best_step"], recipe.train.keep_last, recipe.train.keep_every)


def _finish(job: Job, run: Run, model: Model, state: State, monitor: Monitor) -> None:
    """Score the selected checkpoint on the splits held out that have labels; write the predictions
    for each, and result.json.

    'valid' is scored again, as only this has its predictions also if the process that validated the
    selected checkpoint was stopped. The scores in result.json are those of what is written.
    """
    best = job.recipe.train.select == "best" and state.best_step > 0
    chosen = run.checkpoint_path(state.best_step if best else state.step)
    if best and state.best_step != state.step:
        model.load_state_dict(checkpoints.load(chosen).weights)
    metrics = {}
    for split in job.store.splits:
        if split != "train" and has_labels(job, split):
            scores = _score(job, model, split)
            metrics[split] = scores.metrics
            if job.ranks.rank == 0:
                write(run.predictions_path(split), scores.predictions, job.store.key)
    for split, found in metrics.items():
        monitor.event("end", state.step, split=split, **found)
    if job.ranks.rank == 0:
        result = {
            "metrics": metrics,
            "selected": str(chosen.relative_to(run.path)),
            "best_step": state.best_step,
            "steps": state.step,
            "dropped": state.dropped,
            "seconds": round(state.seconds, 3),
            "real_tokens_per_second": state.real_tokens / max(state.seconds, 1e-9),
        }
        _sync_told(run)
        run.finish(result)
        if not job.recipe.train.keep_state:
            run.forget_state()


def _sync_told(run: Run) -> None:
    """Have the disk keep what was logged and drawn, before what goes on from it."""
    board = (run.path / "tensorboard").glob("*")
    for file in (run.path / "log.jsonl", *board):
        with suppress(FileNotFoundError):  # nothing is drawn where the disk refused
            sync(file)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that SIGTERM and Ctrl-C append to, so that the loop stops between two steps."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    old = [signal.signal(n, lambda number, _: received.append(number)) for n in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, old, strict=True):
            signal.signal(number, handler)
