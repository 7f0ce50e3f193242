"""THE loop: pre-training and fine-tuning are one loop with another head and recipe."""

from __future__ import annotations

import json
import math
import platform
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from xformer import checkpoint as checkpoints
from xformer import distributed, spans
from xformer.checkpoint import Checkpoint, Head
from xformer.config import Settings, load
from xformer.data import mapping
from xformer.data.batch import Assembler, Batch
from xformer.data.errors import BadInput, Failure, Interrupted
from xformer.data.files import file_checksum, read_json, write_json
from xformer.data.hashing import key
from xformer.data.sampler import Samples, take_rows, take_tokens
from xformer.data.store import UNLABELLED, Store, open_store
from xformer.distributed import Ranks, SystemConfig
from xformer.evaluate import check_task, score
from xformer.freeze import account, chosen, freeze
from xformer.model.encoder import ModelConfig, to_device
from xformer.model.heads import HeadKind, Model
from xformer.monitor import Monitor, cut_log, peak_memory
from xformer.optim import FlatOptimizer, OptimConfig, learning_rate
from xformer.run import Run, open_run
from xformer.surgery.operations import Operation, apply

LOWER_IS_BETTER = ("loss", "perplexity")
DROPOUT = 4  # what a key is for
# summed since the last line of the log: over all ranks, but for this rank's "real" of "fed" tokens
SINCE_LOG = ("loss", "count", "correct", "tokens", "seconds", "real", "fed")


class DataConfig(Settings):
    """What to train on; `data=STORE` is short for `data.store=STORE`."""

    store: str
    """A store made by preprocess.py."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of the training rows to use, chosen by `seed`."""


class BatchConfig(Settings):
    """How many rows make a step, over all ranks and micro-batches."""

    rows: int = Field(32, ge=1, le=2**20)
    """Rows a step; the last step of a run may have fewer."""
    tokens: int = Field(0, ge=0, le=2**28)
    """Tokens a step, special ones included: as many rows as fit; 0 counts rows instead."""
    max_tokens: int = Field(128, ge=3)
    """Longest row in tokens, special ones included; longer ones are truncated."""
    accumulate: int = Field(1, ge=1, le=2**20)
    """Micro-batches a rank makes of its share, to save memory."""


class MaskingConfig(Settings):
    """BERT's masking: of the chosen tokens 80 % become the mask token, 10 % a random one."""

    probability: float = Field(0.15, gt=0, lt=1)
    """Share of the tokens to predict."""
    pair_weight: float = Field(0.0, ge=0)
    """Weight of the pairs' loss beside that of masked tokens, for stores of pairs; 0: none (BERT's
    next sentence and ALBERT's order: 1; PLUS's families: 0.43)."""


class TrainConfig(Settings):
    """How long to train, and what to keep."""

    steps: int = Field(0, ge=0)
    """Optimizer steps; 0 trains for `epochs`."""
    epochs: float = Field(3.0, gt=0)
    """Passes over the training rows, where `steps` is 0."""
    validate_every: int = Field(0, ge=0)
    """Steps between validations; 0 validates after every epoch. The end is always validated."""
    checkpoint_every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 writes one at each validation that is the best so far, and at
    the end."""
    log_every: int = Field(10, ge=1)
    """Steps between lines of the log; a line is the mean since the last."""
    select: Literal["best", "last"] = "best"
    """The checkpoint that a finished run stands for: the best on validation, or the last."""
    metric: str = ""
    """What "best" means; empty: the loss for MLM, else the store's metric."""
    patience: int = Field(0, ge=0)
    """Stop after this many validations without a better one; 0 never stops early."""
    only: tuple[str, ...] = ()
    """The weights to train, such as ["embeddings.word", "mlm_head"]: names or their beginnings,
    with * and ?; all others stay as they are. Empty: all."""


class Recipe(Settings):
    """Everything a run is."""

    data: DataConfig
    run: str = Field(min_length=1)
    """Directory of the run; started again with the same settings, it goes on where it was."""
    init: str | None = None
    """A checkpoint or finished run to start from; absent: `model.*`, freshly initialised."""
    head: HeadKind
    """What to predict: masked tokens, a class, a score, or the span of an answer."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of order, masks, dropout and fresh weights."""
    mapping: str = "none"
    """What the store's ids mean to the model: none, ids, shift:K, random:SEED, symbols:SEED,
    unused:SEED."""
    surgery: tuple[Operation, ...] = ()
    """Operations on the initial weights, in order, such as [{op = "clean"}]."""
    overwrite: bool = False
    """Start the run anew, deleting what its directory holds."""
    model: ModelConfig = ModelConfig()
    batch: BatchConfig = BatchConfig()
    masking: MaskingConfig = MaskingConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    system: SystemConfig = SystemConfig()


def main() -> None:
    """`torchrun train.py RECIPE key=value ...`"""
    with distributed.group():
        recipe = load(Recipe, sys.argv[1:])
        mapping.parse(recipe.mapping)
        train(recipe, distributed.start(recipe.system))


# ------------------------------------------------------------------------------ preparation


@dataclass
class State:
    """Where a run stands; with the weights and moments it is all that resuming needs."""

    step: int = 0
    position: int = 0  # samples consumed
    best_step: int = 0
    best_scores: dict[str, float] = field(default_factory=dict)
    last_scores: dict[str, float] = field(default_factory=dict)
    worse: int = 0  # validations since the best one
    seconds: float = 0.0
    real_tokens: int = 0
    since_log: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SINCE_LOG, 0.0))


@dataclass(frozen=True)
class Job:
    """A recipe with everything it names opened and checked."""

    recipe: Recipe
    ranks: Ranks
    store: Store
    start: Checkpoint
    train: Assembler
    samples: Samples
    metric: str
    notes: list[str]

    @property
    def end(self) -> int:
        """Samples of the whole run; with `train.steps` there is no such bound."""
        if self.recipe.train.steps:
            return 2**62
        return max(1, round(self.recipe.train.epochs * self.samples.per_epoch))

    def assembler(self, split: str) -> Assembler:
        return replace(self.train, split=self.store.split(split))


def prepare(recipe: Recipe, ranks: Ranks) -> Job:
    """Open and check all a recipe names; nothing is written. Raises BadInput."""
    store = open_store(recipe.data.store)
    if recipe.init is not None:
        start = with_model_settings(checkpoints.load(recipe.init), recipe.model)
    else:
        start = checkpoints.fresh(recipe.model, store.tokenizer(), recipe.seed)
    if recipe.batch.max_tokens > start.config.max_positions:
        longest = start.config.max_positions
        raise BadInput(f"batch.max_tokens={recipe.batch.max_tokens}: the model takes {longest}")
    split = store.split("train")
    array = mapping.build(recipe.mapping, store, start.tokenizer)
    pairs = recipe.masking.pair_weight > 0
    head = Head(
        recipe.head,
        labels=tuple(store.labels) if recipe.head == "classify" or pairs else (),
        metric=store.metric,
        mapping=recipe.mapping,
        max_tokens=recipe.batch.max_tokens,
        masking=recipe.masking.probability,
        pair="tokens_b" in split.columns,
        pair_scale=_pair_scale(recipe, store),
        columns=store.meta["origin"].get("columns"),
    )
    check_task(store, head)
    if recipe.head in ("classify", "regress"):
        labels = np.asarray(split.columns["label"])
        if (np.isnan(labels) if recipe.head == "regress" else labels < 0).any():
            raise BadInput(f"{store.path}: the split 'train' has rows without a label")
    train_assembler = Assembler(split, start.tokenizer, recipe.batch.max_tokens, array)
    if recipe.batch.tokens and recipe.batch.tokens < recipe.batch.max_tokens:
        raise BadInput(f"batch.tokens={recipe.batch.tokens} is below one row's batch.max_tokens")
    if recipe.train.select == "best" and "valid" not in store.splits:
        raise BadInput(f"{store.path} has no split 'valid' to select by; give train.select=last")
    start = apply(start, recipe.surgery, recipe.seed)
    start, fresh, dropped = start.with_head(head, recipe.seed)
    if array is not None or recipe.mapping == "ids":
        identity = np.arange(store.vocab_size)
        source, array = store.tokenizer(), identity if array is None else array
        start = replace(start, source=source, mapping=array)
    notes = [f"new weights: {', '.join(_parts(fresh))}"] if fresh and recipe.init else []
    notes += [f"dropped weights: {', '.join(_parts(dropped))}"] if dropped else []
    notes += account(start, chosen(start, recipe.train.only), fresh)
    return Job(
        recipe,
        ranks,
        store,
        start,
        train_assembler,
        Samples(split.rows, recipe.seed, recipe.data.fraction),
        _metric(recipe, store),
        notes,
    )


def with_model_settings(start: Checkpoint, wanted: ModelConfig) -> Checkpoint:
    """The checkpoint with the recipe's dropout. Raises BadInput if the recipe asks for a shape
    that the checkpoint has not."""
    free = {}
    for name in wanted.model_fields_set:
        value, has = getattr(wanted, name), getattr(start.config, name)
        if name in ("dropout", "attention_dropout", "head_dropout"):
            free[name] = value
        elif value != has and not (name == "vocab_size" and value == 0):
            raise BadInput(f"model.{name}={value}: the checkpoint given as init has {has}")
    return replace(start, config=start.config.model_copy(update=free))


def _pair_scale(recipe: Recipe, store: Store) -> float:
    """As how many masked tokens a pair counts: with this constant the loss is the mean over masked
    tokens and `pair_weight` times the mean over pairs, and still a sum that may be cut anywhere."""
    weight, split = recipe.masking.pair_weight, store.split("train")
    if not weight:
        return 0.0
    if recipe.head != "mlm" or "tokens_b" not in split.columns or len(store.labels) != 2:
        raise BadInput(
            "masking.pair_weight needs head=mlm and a store of pairs of two classes, such as "
            f"preprocess.py pairs makes; {store.path} has {len(store.labels)} classes"
        )
    return weight * recipe.masking.probability * split.tokens / split.rows


def _parts(names: list[str]) -> list[str]:
    return sorted({name.split(".")[0] for name in names})


def _metric(recipe: Recipe, store: Store) -> str:
    known = {
        "mlm": ["loss", "accuracy", "perplexity", "pair_loss", "pair_accuracy"],
        "classify": ["loss", "accuracy", "f1", "mcc"],
        "regress": ["loss", "pearson", "spearman"],
        "span": ["loss", "exact_match", "f1", "best_exact_match", "best_f1"],
    }[recipe.head]
    metric = recipe.train.metric or ("loss" if recipe.head == "mlm" else store.metric or known[1])
    if metric not in known:
        raise BadInput(f"train.metric={metric!r} is none of {', '.join(known)}")
    return metric


# --------------------------------------------------------------------------------- the loop


@dataclass(frozen=True)
class Feed:
    """The micro-batches of a step for this rank, built ahead by a thread."""

    job: Job

    def take(self, position: int) -> tuple[int, list[Batch], int]:
        """(position after the step, this rank's micro-batches, tokens of the step on all ranks)."""
        job, batch = self.job, self.job.recipe.batch
        if batch.tokens:
            samples = take_tokens(position, job.end, batch.tokens, self._sizes)
        else:
            samples = take_rows(position, job.end, batch.rows)
        rows, epochs = job.samples.at(samples)
        ends = np.cumsum(job.train.sizes(rows))
        pieces = job.ranks.world_size * batch.accumulate
        cuts = np.searchsorted(ends, ends[-1] * np.arange(1, pieces) / pieces)
        mine = range(job.ranks.rank * batch.accumulate, (job.ranks.rank + 1) * batch.accumulate)
        parts = list(zip(np.split(rows, cuts), np.split(epochs, cuts), strict=True))
        micro = [self._build(*parts[i]) for i in mine if len(parts[i][0])]
        return position + len(samples), micro, int(ends[-1])

    def _sizes(self, samples: np.ndarray) -> np.ndarray:
        return self.job.train.sizes(self.job.samples.at(samples)[0])

    def _build(self, rows: np.ndarray, epochs: np.ndarray) -> Batch:
        recipe = self.job.recipe
        if recipe.head != "mlm":
            return self.job.train.batch(rows)
        return self.job.train.masked_batch(rows, epochs, recipe.seed, recipe.masking.probability)


def train(recipe: Recipe, ranks: Ranks) -> None:
    """Run a recipe to its end, from wherever its run directory stands.

    Raises BadInput before anything is written, Interrupted after a signal once a checkpoint is
    written, Failure if the store turns out damaged.
    """
    job = prepare(recipe, ranks)
    run, config = _open(job)
    found = ranks.on_rank_zero(lambda: str(run.newest() or "")) or None
    state = State(**read_json(Path(found) / "state.json")) if found else State()
    if _done(job, state) and (run.path / "result.json").is_file():
        if ranks.rank == 0:
            print(f"{run.path} is finished: see {run.path / 'result.json'}", file=sys.stderr)
        return
    ranks.on_rank_zero(lambda: run.begin(config))
    start = checkpoints.load(found) if found else job.start
    model = start.model().to(ranks.device).train()
    freeze(model, chosen(start, recipe.train.only))
    optimizer = FlatOptimizer(model, recipe.optim)
    if found:
        optimizer.load_state(checkpoints.load_tensors(Path(found) / "optimizer.safetensors"))
    if ranks.rank == 0:
        cut_log(run.path, state.step if found else -1)
    bar = (state.position, job.end, "sample")
    if recipe.train.steps:
        bar = (state.step, recipe.train.steps, "step")
    with Monitor(run.path, ranks.rank == 0, *bar) as monitor:
        if found:
            monitor.say(f"continuing {run.path} from step {state.step}")
        else:
            _announce(job, model, monitor)
        monitor.text("config", json.dumps(recipe.model_dump(mode="json"), indent=1))
        with _signals() as signals:
            loop(job, run, model, optimizer, state, monitor, signals)
        _finish(job, run, model, state, monitor)


def loop(job: Job, run: Run, model: Model, optimizer: FlatOptimizer, state: State,
         monitor: Monitor, signals: list[int]) -> None:  # fmt: skip
    """Step until the end: rate, micro-batches, reduce, clip, step, log, validate, checkpoint."""
    recipe, ranks, feed = job.recipe, job.ranks, Feed(job)
    warmup = _warmup_share(job)
    carried = [state.since_log[name] for name in SINCE_LOG[:3]]
    sums = torch.tensor(carried, dtype=torch.float64, device=ranks.device)
    mark = time.perf_counter()
    with _store_checked(job) as damage, ThreadPoolExecutor(1) as pool:
        if not _done(job, state):
            ahead: Future[Any] = pool.submit(feed.take, state.position)
        while not _done(job, state):
            position, micro_batches, tokens = ahead.result()
            if not _ends(job, state.step + 1, position):
                ahead = pool.submit(feed.take, position)
            before, after = _share(job, state.step, state.position, position)
            lr = learning_rate(recipe.optim, before, after, warmup)

            optimizer.zero()
            for i, batch in enumerate(micro_batches):
                torch.manual_seed(int(key(recipe.seed, DROPOUT, state.step, i, ranks.rank) >> 1))
                with ranks.autocast(recipe.system.precision):
                    loss, _ = model.loss(to_device(batch, ranks.device))
                loss.total.backward()
                optimizer.counts[0] += loss.total.detach()
                optimizer.counts[1] += loss.count
                optimizer.counts[2] += loss.correct
                state.since_log["real"] += int(batch.cu_seqlens[-1])
                state.since_log["fed"] += len(batch.tokens)
            optimizer.counts[3] += float(bool(signals))
            optimizer.reduce(ranks.world_size)
            norm = optimizer.step(optimizer.counts[1], lr)
            sums += optimizer.counts[:3]

            crossed = position // job.samples.per_epoch > state.position // job.samples.per_epoch
            state.step, state.position = state.step + 1, position
            state.real_tokens += tokens
            state.since_log["tokens"] += tokens
            monitor.advance(state.step if recipe.train.steps else position)
            done = _done(job, state)
            if state.step % recipe.train.log_every == 0 or done:
                mark = _log(job, state, sums, norm, lr, monitor, mark)
            if damage:
                raise Failure(damage[0])
            every = recipe.train.validate_every
            due = state.step % every == 0 if every else crossed
            best = False
            if (due or done) and "valid" in job.store.splits:
                mark = _pause(state, mark)
                best = _validate(job, model, state, monitor)
                mark = time.perf_counter()
            stopped = _may_stop(ranks, state.step) and bool(optimizer.counts[3] > 0)
            done = _done(job, state)
            every = recipe.train.checkpoint_every
            if best or done or stopped or (every and state.step % every == 0):
                mark = _pause(state, mark)
                state.since_log |= dict(zip(SINCE_LOG, sums.tolist(), strict=False))
                ranks.on_rank_zero(lambda: _save(job, run, model, optimizer, state))
                mark = time.perf_counter()
            if stopped and not done:
                number = signals[0] if signals else signal.SIGTERM
                message = f"stopped at step {state.step}; the same command continues {run.path}"
                raise Interrupted(number, message)


def _open(job: Job) -> tuple[Run, dict[str, Any]]:
    """The run, which rank 0 opens and the others follow, and the content of its config.json."""
    config = job.recipe.model_dump(mode="json")
    identity = {k: v for k, v in config.items() if k not in ("run", "overwrite", "system")}
    identity["data"] = {**config["data"], "store": job.store.key}
    if job.recipe.init is not None:
        manifest = checkpoints.resolve(job.recipe.init) / "manifest.json"
        identity["init"] = file_checksum(manifest)
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "world_size": job.ranks.world_size,
        "command": sys.argv,
    }
    content = {"config": config, "identity": identity, "environment": environment}
    path = Path(job.recipe.run)
    opened: list[Run] = []
    job.ranks.on_rank_zero(lambda: opened.append(open_run(path, content, job.recipe.overwrite)))
    return opened[0] if opened else Run(path, None), content


def _announce(job: Job, model: Model, monitor: Monitor) -> None:
    for note in job.notes:
        monitor.say(note)
    cut = job.train.share_truncated()
    if cut > 0:
        longest = job.recipe.batch.max_tokens
        monitor.say(f"{cut:.1%} of the rows are cut to batch.max_tokens={longest}")
    parameters = sum(p.numel() for p in model.parameters())
    split = job.train.split
    monitor.event("start", 0, parameters=parameters, rows=job.samples.per_epoch,
                  tokens=split.tokens, ranks=job.ranks.world_size)  # fmt: skip


@contextmanager
def _store_checked(job: Job) -> Iterator[list[str]]:
    """The first damage that rank 0 finds in the store's blocks, checking them in the background.

    Raises Failure with it where the block ends before the check, or crashes: that may be why.
    """
    damage: list[str] = []
    check = job.store.verify_in_background(damage.append) if job.ranks.rank == 0 else None
    try:
        yield damage
    except (BadInput, Failure, Interrupted, OSError):
        raise
    except Exception as error:
        if check is not None:
            check.join()
        if damage:
            raise Failure(damage[0]) from error
        raise
    if check is not None:
        check.join()
    if damage:
        raise Failure(damage[0])


def _ends(job: Job, step: int, position: int) -> bool:
    steps = job.recipe.train.steps
    return step >= steps if steps else position >= job.end


def _done(job: Job, state: State) -> bool:
    patience = job.recipe.train.patience
    return _ends(job, state.step, state.position) or 0 < patience <= state.worse


def _share(job: Job, step: int, before: int, after: int) -> tuple[float, float]:
    """Shares of the run that lie behind before and after a step."""
    steps = job.recipe.train.steps
    return (step / steps, (step + 1) / steps) if steps else (before / job.end, after / job.end)


def _warmup_share(job: Job) -> float:
    """`optim.warmup` as a share of the run's samples."""
    warmup, batch = job.recipe.optim.warmup, job.recipe.batch
    if warmup < 1:
        return warmup
    if job.recipe.train.steps:
        return warmup / job.recipe.train.steps
    rows: float = batch.rows
    if batch.tokens:
        some = np.arange(min(job.samples.rows, 10_000))
        rows = batch.tokens / float(job.train.sizes(some).mean())
    return warmup * rows / job.end


def _may_stop(ranks: Ranks, step: int) -> bool:
    # reading the flag waits for the device: on CUDA only now and then
    return ranks.device.type == "cpu" or step % 8 == 0


def _pause(state: State, mark: float) -> float:
    """Add the time since `mark` to the run's clock, before something that is not a step."""
    now = time.perf_counter()
    state.since_log["seconds"] += now - mark
    state.seconds += now - mark
    return now


def _log(job: Job, state: State, sums: torch.Tensor, norm: torch.Tensor, lr: float,
         monitor: Monitor, mark: float) -> float:  # fmt: skip
    """One line of the log: means since the last one. Returns the time it was written."""
    total, count, correct = sums.tolist()
    mark = _pause(state, mark)
    since = state.since_log
    loss = total / max(count, 1)
    if not math.isfinite(loss):
        raise Failure(
            f"the loss is not finite at step {state.step}; the newest checkpoint is from before"
        )
    values: dict[str, Any] = {"loss": loss}
    if job.recipe.head == "mlm":
        values["perplexity"] = math.exp(min(loss, 700))
    if job.recipe.head != "regress":
        values["accuracy"] = correct / max(count, 1)
    values |= {
        "lr": lr,
        "grad_norm": float(norm),
        "epoch": state.position / job.samples.per_epoch,
        "real_tokens_per_second": since["tokens"] / max(since["seconds"], 1e-9),
        "padding": 1.0 - since["real"] / max(since["fed"], 1),
        "memory_gib": round(peak_memory(job.ranks.device), 3),
    }
    monitor.event("train", state.step, **values)
    sums.zero_()
    state.since_log = dict.fromkeys(SINCE_LOG, 0.0)
    return mark


def _validate(job: Job, model: Model, state: State, monitor: Monitor) -> bool:
    """Score the split 'valid', note it, and say whether it is the best so far."""
    scores = _score(job, model, "valid")
    sign = -1 if job.metric in LOWER_IS_BETTER else 1
    before = state.best_scores.get(job.metric, -math.inf * sign)
    best = sign * scores[job.metric] > sign * before
    state.last_scores = scores
    if best:
        state.best_step, state.best_scores, state.worse = state.step, scores, 0
    else:
        state.worse += 1
    monitor.event("validation", state.step, **scores)
    return best


def _score(job: Job, model: Model, split: str) -> dict[str, float]:
    recipe, head = job.recipe, job.start.head
    assert head is not None
    precision = recipe.system.precision
    return score(model, job.assembler(split), head, job.ranks, precision).metrics


def _save(job: Job, run: Run, model: Model, optimizer: FlatOptimizer, state: State) -> None:
    weights = dict(model.state_dict())
    record = {"op": "train", "head": job.recipe.head, "data": job.store.key, "steps": state.step,
              "seed": job.recipe.seed, "mapping": job.recipe.mapping}  # fmt: skip
    part = {"only": list(job.recipe.train.only)} if job.recipe.train.only else {}
    made = replace(job.start, weights=weights, history=(*job.start.history, {**record, **part}))
    path = run.checkpoint_path(state.step)
    try:
        checkpoints.save(made, path, True, optimizer.state(), asdict(state))
    except (OSError, Failure) as error:
        raise Failure(f"{error}; no checkpoint of step {state.step}, older ones are kept") from None
    run.prune(state.best_step)


def _finish(job: Job, run: Run, model: Model, state: State, monitor: Monitor) -> None:
    """Score the selected checkpoint on the splits held out that have labels; write result.json."""
    best = job.recipe.train.select == "best" and state.best_step > 0
    chosen = run.checkpoint_path(state.best_step if best else state.step)
    if best and state.best_step != state.step:
        model.load_state_dict(checkpoints.load(chosen).weights)
    metrics = {"valid": state.best_scores if best else state.last_scores}
    if not metrics["valid"]:
        del metrics["valid"]
    for split in job.store.splits:
        if split not in ("train", "valid") and _has_labels(job, split):
            metrics[split] = _score(job, model, split)
    for split, scores in metrics.items():
        monitor.event("end", state.step, split=split, **scores)
    if job.ranks.rank == 0:
        result = {
            "metrics": metrics,
            "selected": str(chosen.relative_to(run.path)),
            "best_step": state.best_step,
            "steps": state.step,
            "seconds": round(state.seconds, 3),
            "real_tokens_per_second": state.real_tokens / max(state.seconds, 1e-9),
        }
        write_json(run.path / "result.json", result)


def _has_labels(job: Job, split: str) -> bool:
    if job.recipe.head == "mlm":
        return True
    if job.recipe.head == "span":
        return any(found is not None for found in spans.wanted_answers(job.store.split(split)))
    labels = np.asarray(job.store.split(split).columns["label"])
    return bool((~np.isnan(labels) if job.recipe.head == "regress" else labels != UNLABELLED).any())


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
