"""Everything around the training step: what is due after it, what is logged, which checkpoints are
kept."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xformer import checkpoint as checkpoints
from xformer import cost, provenance
from xformer.data.batch import Workload
from xformer.data.display import say_at_once
from xformer.data.errors import BadInput, Failure, Interrupted
from xformer.data.files import sync
from xformer.monitor import Monitor, events, peak_memory
from xformer.parallel.feed import Step
from xformer.profile import Profiler
from xformer.run import SINCE_LOG, Run, State
from xformer.scoring import Scores, longest_remedy
from xformer.setup import Setup
from xformer.snapshot import Snapshot
from xformer.tasks.task import Model
from xformer.writer import BackgroundWriter

# SIGHUP: the terminal was closed; SIGUSR1: `sbatch --signal=USR1@300`, and Grid Engine's warning of
# a suspension; SIGUSR2: its warning of a kill; SIGXCPU: a limit of CPU time
STOPPING = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)


class Due(NamedTuple):
    """What to do after a step. `any(due)` says whether there is anything to do."""

    log: bool = False
    validation: bool = False
    checkpoint: bool = False
    stop: bool = False


@dataclass
class Session:
    """The bookkeeping of a training run, which `session_of` opens on every rank.

    The session decides what is due after a step, writes the log, and writes checkpoints in the
    background. `state` is the progress of the run, `signals` are the signals that this rank has
    received, and `damage` has a line about the first damage of the store. `stepped` is set after
    the first step, when the check of the store may begin.
    """

    setup: Setup
    run: Run
    state: State
    monitor: Monitor
    snapshot: Snapshot
    signals: list[int]
    writer: BackgroundWriter
    damage: list[str]
    profiler: Profiler
    stepped: threading.Event
    # {step: scores on 'valid'} of the step that would be selected now; {} if not validated
    validated: dict[int, Scores] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock, self.stop_flag = Clock(self.state), StopFlag(self.setup.ranks.device)
        self.part = self.profiler.part

    @property
    def done(self) -> bool:
        """Whether the run has reached its end, or has been stopped by `train.patience`."""
        return self.setup.done(self.state)

    def rate(self, step: Step) -> float:
        """The learning rate of the next step."""
        setup, state = self.setup, self.state
        before = setup.done_at(state.step, state.position)
        return setup.rate(before, setup.done_at(state.step + 1, step.end))

    def advance(self, step: Step, stop_requests: Tensor) -> Due:
        """Count a step, and return what to do after it. `stop_requests` () is above 0 if any rank
        was told to stop. Raises Failure if the store is damaged."""
        setup, state, settings = self.setup, self.state, self.setup.recipe.train
        self.stepped.set()
        epoch = state.position // setup.samples.per_epoch
        state.advance(step)
        setup.ranks.report_step(state.step)
        self.monitor.step = state.step
        self.monitor.advance(setup.done_at(state.step, state.position))
        self.clock.mark += self.profiler.step(state.step)
        if self.damage:
            raise Failure(self.damage[0])

        def falls_on(interval: int) -> bool:
            return interval > 0 and state.step % interval == 0

        next_epoch = state.position // setup.samples.per_epoch > epoch
        validation = falls_on(settings.validate_every) if settings.validate_every else next_epoch
        return Due(
            log=falls_on(settings.log_every) or self.done,
            validation=(validation or self.done) and "valid" in setup.store.splits,
            checkpoint=falls_on(settings.checkpoint_every) or falls_on(settings.keep_every),
            stop=self.stop_flag.read(state.step, stop_requests),
        )

    # ---------------------------------------------------------------------------------- the log

    def log(self, rate: float, sums: Tensor) -> None:
        """Write a line of the log, with means over the steps since the last line. Does nothing if
        there were none, or none with predictions.

        `sums` (4,) holds the summed loss, the number of predictions, how many of them are right,
        and the norm of the newest gradient. This resets `sums` to zero.
        """
        setup, state, since = self.setup, self.state, self.state.since_log
        total, count, correct, norm = sums.tolist()
        if not since["tokens"] or not count:
            return
        self.clock.read()
        loss = total / count
        values: dict[str, Any] = {"loss": loss}
        if "perplexity" in setup.task.metrics:
            values["perplexity"] = math.exp(min(loss, 700))
        if setup.task.counts_correct:
            values["accuracy"] = correct / count
        values |= {
            "lr": rate,
            "grad_norm": norm,
            "epoch": state.position / setup.samples.per_epoch,
            "real_tokens_per_second": since["tokens"] / max(since["seconds"], 1e-9),
            "memory_gib": round(peak_memory(setup.ranks.device), 3),
        }
        if (share := _utilisation(setup, since, count)) is not None:
            values["mfu"] = share
        if given := setup.given(state):
            values["stores"] = given
        self.monitor.event("train", state.step, **values)
        if given and self.done:
            self.monitor.say(*_shares(given))
        sums.zero_()
        state.since_log, state.logged = dict.fromkeys(SINCE_LOG, 0.0), state.step

    def stop_if_told(self, due: Due) -> None:
        """Raise Interrupted if a rank was told to stop before the end of the run."""
        if due.stop and not self.done:
            number = self.signals[0] if self.signals else signal.SIGTERM
            line = f"stopped at step {self.state.step}; {_continues(self.setup)} {self.run.path}"
            raise Interrupted(number, line)

    # -------------------------------------------------------------------------- the checkpoints

    def keep(self, due: Due, best: bool) -> None:
        """Write a checkpoint if one is due, if a rank was told to stop, or if this step is the last
        or the `best` so far. At other steps of the trajectory, write only the weights. All ranks
        call this together."""
        whole = best or self.done or due.stop or due.checkpoint
        if whole or self.state.step in self.setup.trajectory.steps:
            with self.clock.stopped():
                self.write(whole, now=self.done or due.stop)

    def write(self, whole: bool, now: bool = False) -> None:
        """Copy the state of the run, or only the weights if not `whole`. Write the copy in the
        background; if `now`, wait until it is written. All ranks call this together."""
        self.writer.free()
        self.snapshot.take(whole)
        what = f"{'' if whole else 'trajectory '}checkpoint of step {self.state.step}"
        save = partial(self._save, asdict(self.state), whole)
        if now:
            self.setup.ranks.on_rank_zero(partial(self.writer.now, what, save))
        elif self.setup.ranks.rank == 0:
            self.writer.start(what, save)
            self.run.writing = self.writer.task

    def _save(self, state: dict[str, Any], whole: bool) -> None:
        """Write the copy: first the weights for the trajectory, if the step belongs to it, then the
        `whole` checkpoint. In this order, no run resumes from a step whose trajectory weights are
        missing. Raises OSError or Failure if writing fails."""
        setup, run, recipe, step = self.setup, self.run, self.setup.recipe, state["step"]
        record: dict[str, Any] = {
            "op": "train",
            "head": recipe.head,
            "data": setup.store.key,
            "steps": step,
            "tokens": state["real_tokens"],
            "seed": recipe.seed.model_dump(mode="json"),
            "mapping": recipe.mapping,
        }
        if recipe.system.precision != "fp32":
            record["precision"] = recipe.system.precision
        if recipe.train.only:
            record["only"] = list(recipe.train.only)
        self.snapshot.wait()
        history = (*setup.start.history, record)
        trained = replace(setup.start, weights=self.snapshot.weights, history=history)
        if step in setup.trajectory.steps:
            checkpoints.save(trained, run.trajectory_path(step), True)
        if not whole:
            return
        sync_log(run)
        checkpoints.save(trained, run.checkpoint_path(step), True, self.snapshot.moments, state)
        run.prune(state["best_step"], recipe.train.keep_last, recipe.train.keep_every)


@contextmanager
def session_of(
    setup: Setup,
    run: Run,
    state: State,
    monitor: Monitor,
    model: Model,
    optimizer: torch.optim.Optimizer,
) -> Iterator[Session]:
    """The session of a run; every rank enters this context.

    Raises Interrupted if Ctrl-C is pressed twice, and Failure if the store is damaged.
    """
    snapshot, stepped = Snapshot(model, optimizer, setup.ranks), threading.Event()
    tracing = setup.recipe.system.profile and setup.ranks.rank == 0
    try:
        with (
            _signals(setup.ranks.device, monitor.active) as signals,
            BackgroundWriter(monitor.say) as writer,
            _store_checked(setup, stepped) as damage,
            Profiler(run.path, tracing, setup.ranks.device, monitor.say) as profiler,
        ):
            session = Session(
                setup, run, state, monitor, snapshot, signals, writer, damage, profiler, stepped
            )
            if state.step == 0 and 0 in setup.trajectory.steps:
                session.write(whole=False)
            yield session
    except KeyboardInterrupt:
        line = f"stopped after step {state.step}; {_continues(setup)} {run.path} from its newest "
        line += "checkpoint"
        if not run.has_checkpoints():
            line = f"stopped after step {state.step}, before the first checkpoint; the same "
            line += f"command starts {run.path} from the beginning"
        raise Interrupted(signal.SIGINT, line) from None


def _continues(setup: Setup) -> str:
    more = " without overwrite=true" if setup.recipe.overwrite else ""
    return f"the same command{more} continues"


def _utilisation(setup: Setup, since: dict[str, float], predicted: float) -> float | None:
    """The model FLOPs utilisation (MFU) since the last line of the log; None if the peak of the
    device is not known."""
    system, device = setup.recipe.system, setup.ranks.device
    peak = 1e12 * system.peak_tflops or cost.peak_flops(
        torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "tf32" if system.tf32 else system.precision,
    )
    if peak is None:
        return None
    tokens, squares, rows = (int(since[name]) for name in ("tokens", "squares", "rows"))
    work = Workload(tokens, squares, rows, int(predicted))
    flops = cost.training_flops(setup.start.config, setup.task, work)
    return cost.utilisation(flops, since["seconds"], peak, setup.ranks.world_size)


def _shares(given: dict[str, dict[str, float]]) -> list[str]:
    """A line for each store of a mixture: what it gave to the run."""
    total = sum(store["rows"] for store in given.values())
    return [
        f"{name} gave {store['rows']:,} rows ({100 * store['rows'] / total:.3g} %), "
        f"{store['tokens']:,} tokens, {store['passes']:.3g} passes"
        for name, store in given.items()
    ]


def sync_log(run: Run) -> None:
    """Flush the log and TensorBoard's files to the disk. Called before a checkpoint is written, so
    that the log of a run resumed from it is complete up to that step."""
    board = (run.path / "tensorboard").glob("*")
    for file in (run.path / "log.jsonl", *board):
        with suppress(FileNotFoundError):  # TensorBoard's directory is deleted after a disk error
            sync(file)


def announce(setup: Setup, model: Model, monitor: Monitor) -> None:
    """Print what a new run trains, and log the numbers of steps, parameters, rows and tokens."""
    monitor.say(*setup.notes, *setup.recipe.optim.notes(), *setup.schedule_notes())
    limit, most = setup.recipe.batch.max_tokens, setup.start.config.max_positions
    remedy = longest_remedy(setup.task.head, limit - setup.training_rows.extra)
    truncated = setup.training_rows.truncation(f"batch.max_tokens={limit}", most, remedy)
    monitor.say(*filter(None, [truncated, setup.validation_note()]))
    monitor.event(
        "start",
        0,
        steps=setup.planned_steps,
        parameters=sum(p.numel() for p in model.parameters()),
        rows=setup.samples.per_epoch,
        tokens=setup.training_tokens,
        ranks=setup.ranks.world_size,
    )


def announce_changes(setup: Setup, run: Run, state: State, monitor: Monitor) -> None:
    """Compare this start with the one that made the checkpoint. Print what may keep the results
    from being bit-identical, and how a raised train.steps or train.epochs changes the rate."""
    earlier = run.made_by(state.step)
    if earlier is None:
        return
    if differing := provenance.changes(earlier, run.config):
        monitor.say(
            f"since the last start: {', '.join(differing)}; results may not be bit-identical to "
            "those of an uninterrupted run"
        )
    begun = next((event.get("steps", 0) for event in events(run.path, "start")), 0)
    same_length = all(
        setup.recipe.train.epochs == start["config"]["train"].get("epochs") for start in run.starts
    )
    if same_length and not setup.recipe.train.steps and begun not in (0, setup.planned_steps):
        monitor.say(
            f"at its start this run was planned with {begun:,} steps, and now with "
            f"{setup.planned_steps:,}, because this version estimates the rows of a step "
            "otherwise: a warm-up or a decay in steps is another part of the run now"
        )
    before, now = earlier["config"]["train"], setup.recipe.train
    name = "steps" if now.steps else "epochs"
    if before[name] == getattr(now, name):
        return
    done = setup.done_at(state.step, state.position)
    before_change = replace(setup, recipe=setup.recipe.having("train", **{name: before[name]}))
    old, new = (each.rate(done, done) for each in (before_change, setup))
    monitor.say(
        f"train.{name} was {before[name]} and is now {getattr(now, name)}: the schedule now spans "
        f"the longer run, so the learning rate changes from {old:.3g} to {new:.3g}"
    )


class Clock:
    """Counts the seconds that a run spends on steps, without validations and checkpoints."""

    def __init__(self, state: State):
        self.state, self.mark = state, time.perf_counter()

    def read(self) -> None:
        """Add the seconds since the last call to the state."""
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
    """Tells all ranks, in the same step, that one of them received a signal to stop. On CUDA they
    learn it three or four steps later, so that the host never waits for the device."""

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.value = torch.zeros((), pin_memory=self.on_cuda)
        self.copied: torch.cuda.Event | None = None

    def read(self, step: int, stop_requests: torch.Tensor) -> bool:
        """Whether to stop after this step. `stop_requests` () is above 0 if a rank was told to stop
        in this step or an earlier one."""
        if not self.on_cuda:
            return bool(stop_requests > 0)
        if step % 2:
            return False
        if self.copied is not None:
            self.copied.synchronize()  # recorded 2 steps ago
        stop = bool(self.value > 0)
        self.value.copy_(stop_requests, non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()
        return stop


@contextmanager
def _store_checked(setup: Setup, begin: threading.Event) -> Iterator[list[str]]:
    """Let rank 0 check the store's blocks in the background once `begin` is set. Yields a list to
    which a line about the first damage will be appended.

    Raises Failure with that line when the `with` block ends, also if the block crashed: the damage
    may be the cause.
    """
    damage: list[str] = []
    crash: Exception | None = None
    check = (
        setup.store.verify_in_background(damage.append, begin) if setup.ranks.rank == 0 else None
    )
    try:
        yield damage
    except (BadInput, Failure, Interrupted, OSError):
        raise
    except Exception as error:
        crash = error
    begin.set()
    if check is not None:
        check.join()
    if damage:
        raise Failure(damage[0]) from crash
    if crash is not None:
        raise crash


@contextmanager
def _signals(device: torch.device, active: bool) -> Iterator[list[int]]:
    """A list to which the signals in STOPPING append their numbers, so that the loop can stop
    between two steps. If `active`, the first signal prints a line, and so does the first Ctrl-C. A
    second Ctrl-C raises KeyboardInterrupt. It cannot damage a checkpoint, because each gets its
    name only when it is complete."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        if number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        if active and (not received or number == signal.SIGINT):
            steps = "five" if device.type == "cuda" else "two"  # see StopFlag
            line = f"stopping ({signal.Signals(number).name}): finishing at most {steps} steps, or "
            line += "the validation that is running, then saving"
            again = "; press Ctrl-C again to stop at once, without saving"
            say_at_once(line + again * (number == signal.SIGINT))
        received.append(number)

    # A signal that is already ignored stays ignored, such as SIGHUP under nohup. SIGINT is an
    # exception, because shells ignore it for jobs in the background.
    always = (signal.SIGTERM, signal.SIGINT)
    numbers = [n for n in STOPPING if n in always or signal.getsignal(n) != signal.SIG_IGN]
    old = [signal.signal(n, receive) for n in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, old, strict=True):
            signal.signal(number, handler)
