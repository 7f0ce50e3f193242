"""The parts of the benchmark: each function takes a Bench and returns rows of the table."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ours, prepare
from benchmarks.bench import Bench, Row, Took, fresh, in_turn, module, rates
from xformer.data.store import Store

GROUPED = "`transformers`, length-grouped"
PADDED = "`transformers`, dynamic padding"
FULL_ROWS = "`transformers`"
CEILING = "the ceiling"
OURS = "xformer"
TRAINER_ATTENTION = "eager"  # on the CPU within a tenth of SDPA (docs/benchmarks.md)


def theirs(bench: Bench, **job: Any) -> Took:
    """Run a job of benchmarks/theirs.py and return its measurements."""
    common = {"threads": bench.threads, "precision": bench.precision}
    output = fresh(bench.folder / "theirs-run")
    job = common | {name: str(v) if isinstance(v, Path) else v for name, v in job.items()}
    took, ended = module(bench, "theirs", {"output": str(output), **job})
    fresh(output)
    return {**took, "seconds": ended.seconds}


@dataclass(frozen=True)
class TrainingStep:
    """A training step on the same rows for all contestants: ours, the Trainer and the ceiling.

    Each method trains in a process of its own, and returns measurements without the warm-up.
    """

    bench: Bench
    task: str
    rows: int  # of a batch
    store: Path
    table: Path  # the rows of the store, for the Trainer
    our_model: Path
    their_model: Path

    def xformer(self) -> Took:
        """train.py."""
        size = self.bench.size
        return ours.train(
            self.bench,
            self.task,
            self.store,
            self.our_model,
            steps=size.warmup + size.steps,
            every=size.warmup,
            settings=[f"batch.rows={self.rows}"],
        )[0]

    def grouped(self) -> Took:
        """The Trainer on batches of rows of similar length."""
        return self._trainer("sequential")

    def padded(self) -> Took:
        """The Trainer on rows in random order, padded to the longest row of each batch."""
        return self._trainer("random")

    def _trainer(self, sampling: str) -> Took:
        size = self.bench.size
        return theirs(
            self.bench,
            model=self.their_model,
            table=self.table,
            task=self.task,
            rows=self.rows,
            steps=size.warmup + size.steps,
            warmup=size.warmup,
            attention=TRAINER_ATTENTION,
            sampling=sampling,
        )

    def ceiling(self) -> Took:
        """The matrix products and the attention of an MLM step, and nothing else."""
        size = self.bench.size
        job = {
            "store": str(self.store),
            "init": str(self.our_model),
            "rows": self.rows,
            "length": size.length,
            "warmup": size.warmup,
            "steps": size.steps,
            "threads": self.bench.threads,
            "precision": self.bench.precision,
        }
        return module(self.bench, "ceiling", job)[0]


def training_step(bench: Bench, task: str, store: Store, name: str, rows: int) -> TrainingStep:
    """The training step on batches of `rows` typical rows of a store, whose trial is `name`."""
    trial, table = prepare.trial(bench, store, name, rows)
    return TrainingStep(bench, task, rows, trial, table, *prepare.model(bench))


def compare(took: dict[str, list[Took]], what: str, targets: dict[str, float]) -> list[Row]:
    """One row for each contestant that ours is compared with, and its target."""
    rows = []
    for name, target in targets.items():
        padding = took[name][0].get("padding", 0.0)
        notes = [f"{padding:.0%} padding"] if padding else []
        if name != CEILING and CEILING in took:
            most = median(rates(took[CEILING])) / median(rates(took[name]))
            notes.append(f"the ceiling is {most:.2f}x as fast")
        rows.append(
            Row(
                what,
                "real tokens/s",
                rates(took[OURS]),
                name,
                rates(took[name]),
                target,
                note="; ".join(notes),
            )
        )
    return rows


# ----------------------------------------------------------------------------------- the parts


def mixed(bench: Bench) -> list[Row]:
    """The MLM step on English lines, compared with transformers and the ceiling."""
    step = training_step(bench, "mlm", prepare.lines(bench), "lines", bench.size.rows)
    contestants = {
        OURS: step.xformer,
        GROUPED: step.grouped,
        PADDED: step.padded,
        CEILING: step.ceiling,
    }
    took = in_turn(bench.rounds, contestants)
    what = f"MLM step, {bench.size.rows} English lines of mixed length, {bench.precision}"
    return compare(took, what, {PADDED: 5.5, GROUPED: 5.5, CEILING: 0.9})


def full(bench: Bench) -> list[Row]:
    """The MLM step on full rows, compared with transformers and the ceiling."""
    rows, length = bench.size.full_rows, bench.size.length
    step = training_step(bench, "mlm", prepare.full_rows(bench), "full", rows)
    contestants = {OURS: step.xformer, CEILING: step.ceiling, FULL_ROWS: step.grouped}
    took = in_turn(bench.rounds, contestants)
    what = f"MLM step, {rows} full rows of {length}, {bench.precision}"
    return compare(took, what, {FULL_ROWS: 2.5, CEILING: 0.9})


def tasks(bench: Bench) -> list[Row]:
    """Fine-tuning on MRPC and CoLA, compared with transformers."""
    rows = []
    # CoLA's sentences are a fifth as long, so an equally precise mean needs more steps
    for name, title, factor in (("mrpc", "MRPC", 1), ("cola", "CoLA", 4)):
        longer = replace(bench, size=replace(bench.size, steps=factor * bench.size.steps))
        store = prepare.task(bench, name)
        step = training_step(longer, "classify", store, name, bench.size.rows)
        contestants = {OURS: step.xformer, GROUPED: step.grouped, PADDED: step.padded}
        took = in_turn(bench.rounds, contestants)
        what = f"fine-tuning, {title}, {bench.size.rows} rows, {bench.precision}"
        rows += compare(took, what, {PADDED: 1.8, GROUPED: 1.8})
    return rows


def evaluation(bench: Bench) -> list[Row]:
    """The forward pass on MRPC's dev set, compared with transformers."""
    store = prepare.task(bench, "mrpc")
    our_model, their_model = prepare.model(bench, tuple(store.labels))
    table = bench.folder / "mrpc-valid-table"
    if not table.exists():
        prepare.table(prepare.assembler(bench, store, "valid"), table)
    passes = 2
    job = {
        "do": "evaluate",
        "model": str(our_model),
        "store": str(store.path),
        "split": "valid",
        "length": bench.size.length,
        "passes": passes,
        "threads": bench.threads,
        "precision": bench.precision,
    }

    def xformer() -> Took:
        return module(bench, "ours", job)[0]

    def grouped(sampling: str = "group_by_length") -> Took:
        return theirs(
            bench,
            model=their_model,
            table=table,
            task="classify",
            rows=bench.size.rows,
            evaluations=passes,
            sampling=sampling,
        )

    def padded() -> Took:
        return grouped("random")

    took = in_turn(bench.rounds, {OURS: xformer, GROUPED: grouped, PADDED: padded})
    what = f"evaluation, forward only, MRPC, {bench.precision}"
    return compare(took, what, {PADDED: 1.5, GROUPED: 1.5})


def whole(bench: Bench) -> list[Row]:
    """From the store to the checkpoint, start-up included, compared with transformers."""
    size, store = bench.size, prepare.lines(bench)
    our_model, their_model = prepare.model(bench)
    table = bench.folder / "lines-table"
    if not table.exists():
        prepare.table(prepare.assembler(bench, store), table)

    def xformer() -> Took:
        batch = [f"batch.rows={size.whole_rows}"]
        return ours.train(
            bench,
            "mlm",
            store.path,
            our_model,
            steps=size.whole_steps,
            every=max(1, size.whole_steps // 10),
            settings=batch,
        )[0]

    def grouped() -> Took:
        return theirs(
            bench,
            model=their_model,
            table=table,
            task="mlm",
            rows=size.whole_rows,
            steps=size.whole_steps,
            warmup=max(1, size.whole_steps // 10),
            save=True,
            sampling="group_by_length",
            attention=TRAINER_ATTENTION,
        )

    # Each run takes minutes. The shorter rounds of the other parts show the variation.
    took = in_turn(max(1, bench.rounds // 3), {OURS: xformer, GROUPED: grouped})
    seconds = (rates(took[OURS], "seconds"), rates(took[GROUPED], "seconds"))
    what = (
        f"whole run from store to checkpoint, {size.whole_steps} steps of {size.whole_rows} "
        f"lines, {bench.precision}"
    )
    return [Row(what, "s", seconds[0], GROUPED, seconds[1], 2.5)]


def batches(bench: Bench) -> list[Row]:
    """How fast one process builds masked batches from a store."""
    store, size = prepare.made(bench, bench.size.batch_tokens), bench.size
    init = prepare.model(bench)[0]
    longest = f"batch.max_tokens={size.length}"
    wanted = {
        f"batches of 150 rows up to {size.length}": (store, "batch.rows=150", 50.0),
        "batches of 65,536 tokens": (store, "batch.tokens=65536", 50.0),
        f"batches of {size.rows} English lines": (
            prepare.lines(bench),
            f"batch.rows={size.rows}",
            None,
        ),
    }

    def run(data: Store, batch: str) -> Took:
        job = {
            "do": "batches",
            "store": str(data.path),
            "init": str(init),
            "batch": [batch, longest],
            "count": size.batches,
        }
        return module(bench, "ours", job)[0]

    contestants = {what: partial(run, data, batch) for what, (data, batch, _) in wanted.items()}
    took = in_turn(bench.rounds, contestants)
    return [
        Row(
            f"{what} from the memory-mapped store, masked, one process",
            "M real tokens/s",
            [rate / 1e6 for rate in rates(took[what])],
            target=target,
        )
        for what, (_, _, target) in wanted.items()
    ]


def start(bench: Bench) -> list[Row]:
    """The time from the command to the end of the first step, on a small store and a large one."""
    init, size = prepare.model(bench)[0], bench.size
    stores = {tokens: prepare.made(bench, tokens) for tokens in (size.large, size.small)}
    shown = {tokens: f"{_bytes(store) / 1e9:.3g} GB" for tokens, store in stores.items()}

    def run(tokens: int) -> Took:
        drop_page_cache(stores[tokens])
        return ours.train(
            bench,
            "mlm",
            stores[tokens].path,
            init,
            steps=2,
            every=1,
            settings=[f"batch.rows={size.rows}"],
        )[0]

    took = in_turn(bench.rounds, {shown[tokens]: partial(run, tokens) for tokens in stores})
    large, small = (took[shown[tokens]] for tokens in (size.large, size.small))
    memory = [a["memory_gib"] / b["memory_gib"] for a, b in zip(large, small, strict=True)]
    return [
        Row(
            f"start of train.py to the end of its first step, a store of {shown[size.large]}",
            "s",
            rates(large, "first"),
            target=8.0,
            goal="below",
        ),
        Row(f"the same, a store of {shown[size.small]}", "s", rates(small, "first")),
        Row(
            f"peak memory of {shown[size.large]} over that of {shown[size.small]}",
            "",
            memory,
            target=1.05,
            goal="below",
        ),
    ]


def _bytes(store: Store) -> int:
    return sum(file.stat().st_size for file in store.path.rglob("*.npy"))


def drop_page_cache(store: Store) -> None:
    """Drop a store from the page cache, as if the machine had restarted."""
    for file in store.path.rglob("*.npy"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def settings(bench: Bench) -> list[Row]:
    """Other settings of the Trainer, one round each."""
    size, model = bench.size, prepare.model(bench)[1]
    steps = size.warmup + (size.steps + 1) // 2
    job: dict[str, Any] = {
        "model": model,
        "task": "mlm",
        "steps": steps,
        "warmup": size.warmup,
        "sampling": "sequential",
    }
    lines = prepare.trial(bench, prepare.lines(bench), "lines", size.rows)[1]
    rows = prepare.trial(bench, prepare.full_rows(bench), "full", size.full_rows)[1]
    of_lines: dict[str, Any] = {"table": lines, "rows": size.rows}
    of_full_rows: dict[str, Any] = {"table": rows, "rows": size.full_rows}
    wanted: dict[str, dict[str, Any]] = {
        "lines, length-grouped, eager attention": {**of_lines, "attention": "eager"},
        "lines, length-grouped, SDPA": of_lines,
        "lines, length-grouped, eager attention, one DataLoader worker": {
            **of_lines,
            "attention": "eager",
            "workers": 1,
        },
        "full rows, eager attention": {**of_full_rows, "attention": "eager"},
        "full rows, SDPA": of_full_rows,
        "full rows, SDPA, compiled": {**of_full_rows, "compile": True},
    }
    contestants = {
        what: partial(theirs, bench, **{**job, **changes}) for what, changes in wanted.items()
    }
    took = in_turn(1, contestants)
    return [
        Row(f"`transformers`: {what}, {bench.precision}", "real tokens/s", rates(took[what]))
        for what in wanted
    ]
