"""A run while it trains: where it stands, what is due, what it tells and what it keeps."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from xformer import checkpoint as checkpoints
from xformer import cost, provenance
from xformer.data.batch import Workload
from xformer.data.errors import BadInput, Failure, Interrupted
from xformer.data.files import sync
from xformer.monitor import Monitor, peak_memory
from xformer.optim import learning_rate
from xformer.parallel.feed import Step
from xformer.prepare import Job, tokens, warmup_share
from xformer.profile import Profiler
from xformer.run import SINCE_LOG, Run, State
from xformer.snapshot import Snapshot
from xformer.tasks.task import Model
from xformer.writer import Writer


@dataclass(frozen=True)
class Due:
    """What is to be done after a step."""

    log: bool
    validation: bool
    checkpoint: bool
    stop: bool

    @property
    def anything(self) -> bool:
        return self.log or self.validation or self.checkpoint or self.stop


class Session:
    """A run while it trains. Every rank has one. Use it as a context manager.

    `state` says where the run stands. The session decides what is due after a step, writes the log,
    and keeps checkpoints in the background.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        state: State,
        monitor: Monitor,
        model: Model,
        optimizer: torch.optim.Optimizer,
    ):
        self.job, self.run, self.state, self.monitor = job, run, state, monitor
        self.copy = Snapshot(model, optimizer, job.ranks)
        self.clock, self.stop_flag = Clock(state), StopFlag(job.ranks.device)
        wanted = job.recipe.train
        self.warmup = warmup_share(job, job.length(wanted.steps, wanted.epochs))
        self.stepped = threading.Event()  # from then on the store is checked

    def __enter__(self) -> Session:
        job, monitor = self.job, self.monitor
        tracing = job.recipe.system.profile and job.ranks.rank == 0
        with ExitStack() as stack:
            self.signals = stack.enter_context(_signals())
            self.writer = stack.enter_context(Writer(monitor.say))
            self.damage = stack.enter_context(_store_checked(job, self.stepped))
            profiler = Profiler(self.run.path, tracing, job.ranks.device, monitor.say)
            self.profiler = stack.enter_context(profiler)
            self.part = profiler.part
            if self.state.step == 0 and 0 in job.trajectory.steps:
                self._keep(whole=False, now=False)
            self.stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self.stack.__exit__(kind, error, trace)

    @property
    def done(self) -> bool:
        """Whether the run is at its end, or out of patience."""
        return self.job.done(self.state)

    @property
    def told(self) -> float:
        """1 if this rank was told to stop, else 0."""
        return float(bool(self.signals))

    def rate(self, step: Step) -> float:
        """The learning rate of the next step."""
        job, state = self.job, self.state
        before = job.share(state.step, state.position)
        after = job.share(state.step + 1, step.end)
        return learning_rate(job.recipe.optim, before, after, self.warmup)

    def advance(self, step: Step, told: Tensor) -> Due:
        """Count a step. `told` () is above 0 if a rank was told to stop. Raises Failure if the
        store turns out to be damaged."""
        job, state, wanted = self.job, self.state, self.job.recipe.train
        self.stepped.set()
        epoch = state.position // job.samples.per_epoch
        state.advance(step)
        job.ranks.at(state.step)
        self.monitor.advance(job.progress(state.step, state.position)[0])
        self.clock.mark += self.profiler.step(state.step)
        if self.damage:
            raise Failure(self.damage[0])

        def every(count: int) -> bool:
            return count > 0 and state.step % count == 0

        next_epoch = state.position // job.samples.per_epoch > epoch
        validation = every(wanted.validate_every) if wanted.validate_every else next_epoch
        return Due(
            every(wanted.log_every) or self.done,
            (validation or self.done) and "valid" in job.store.splits,
            every(wanted.checkpoint_every),
            self.stop_flag.read(state.step, told),
        )

    # ------------------------------------------------------------------------- what a run tells

    def log(self, rate: float, sums: Tensor) -> None:
        """One line of the log, if there is something to tell: means since the last one. `sums` (4,)
        are the loss, what it is a sum over, how many are right, and the norm of the newest
        gradient; they begin anew."""
        job, state, since = self.job, self.state, self.state.since_log
        total, count, correct, norm = sums.tolist()
        if not since["tokens"] or not count:
            return
        self.clock.read()
        loss = total / count
        values: dict[str, Any] = {"loss": loss}
        if "perplexity" in job.task.metrics:
            values["perplexity"] = math.exp(min(loss, 700))
        if job.task.counts_correct:
            values["accuracy"] = correct / count
        values |= {
            "lr": rate,
            "grad_norm": norm,
            "epoch": state.position / job.samples.per_epoch,
            "real_tokens_per_second": since["tokens"] / max(since["seconds"], 1e-9),
            "padding": 0.0,  # batches are packed
            "memory_gib": round(peak_memory(job.ranks.device), 3),
        }
        if (share := _utilisation(job, since, count)) is not None:
            values["mfu"] = share
        self.monitor.event("train", state.step, **values)
        sums.zero_()
        state.since_log = dict.fromkeys(SINCE_LOG, 0.0)

    def stop_if_told(self, due: Due) -> None:
        """Raise Interrupted if a rank was told to stop before the end."""
        if due.stop and not self.done:
            number = self.signals[0] if self.signals else signal.SIGTERM
            line = f"stopped at step {self.state.step}; the same command continues {self.run.path}"
            raise Interrupted(number, line)

    # ------------------------------------------------------------------------- what a run keeps

    def keep(self, due: Due, best: bool) -> None:
        """Keep a checkpoint if one is due, or if this step is the best so far or the last; and the
        weights alone at the steps of the trajectory. All ranks call it together."""
        whole = best or self.done or due.stop or due.checkpoint
        if whole or self.state.step in self.job.trajectory.steps:
            with self.clock.stopped():
                self._keep(whole, now=self.done or due.stop)

    def _keep(self, whole: bool, now: bool) -> None:
        """Copy what the run holds, the `whole` of it or the weights alone, and write it: in the
        background, or `now`."""
        self.writer.free()
        self.copy.take(whole)
        what = f"{'' if whole else 'trajectory '}checkpoint of step {self.state.step}"
        save = partial(self._save, asdict(self.state), whole)
        if now:
            self.job.ranks.on_rank_zero(partial(self.writer.now, what, save))
        elif self.job.ranks.rank == 0:
            self.writer.start(what, save)

    def _save(self, state: dict[str, Any], whole: bool) -> None:
        """Write what was copied: weights for the trajectory if the step is one of its, then the
        `whole` checkpoint, which is therefore never there without them. Raises OSError or Failure
        if the disk refuses."""
        job, run, recipe, step = self.job, self.run, self.job.recipe, state["step"]
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
        self.copy.wait()
        made = replace(job.start, weights=self.copy.weights, history=(*job.start.history, record))
        if step in job.trajectory.steps:
            checkpoints.save(made, run.trajectory_path(step), True)
        if not whole:
            return
        sync_told(run)
        checkpoints.save(made, run.checkpoint_path(step), True, self.copy.moments, state)
        run.prune(state["best_step"], recipe.train.keep_last, recipe.train.keep_every)


def _utilisation(job: Job, since: dict[str, float], predicted: float) -> float | None:
    """Share of the devices' peak since the last line of the log; None where no peak is known."""
    system, device = job.recipe.system, job.ranks.device
    peak = 1e12 * system.peak_tflops or cost.peak_flops(
        torch.cuda.get_device_name(device) if device.type == "cuda" else "", system.precision
    )
    if peak is None:
        return None
    tokens, squares, rows = (int(since[name]) for name in ("tokens", "squares", "rows"))
    work = Workload(tokens, squares, rows, int(predicted))
    flops = cost.training_flops(job.start.config, job.task, work)
    return cost.utilisation(flops, since["seconds"], peak, job.ranks.world_size)


def sync_told(run: Run) -> None:
    """Have the disk keep what was logged and drawn, before what goes on from it."""
    board = (run.path / "tensorboard").glob("*")
    for file in (run.path / "log.jsonl", *board):
        with suppress(FileNotFoundError):  # nothing is drawn where the disk refused
            sync(file)


def announce(job: Job, model: Model, monitor: Monitor) -> None:
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


def say_changes(job: Job, run: Run, state: State, config: dict[str, Any], monitor: Monitor) -> None:
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
