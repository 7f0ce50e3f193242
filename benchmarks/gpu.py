"""The parts for one CUDA device, in bf16: MFU, and speed compared with transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from benchmarks import ours, prepare
from benchmarks.bench import CUDA, Bench, Row, Took, in_turn, module, rates
from benchmarks.parts import OURS, ours_on, theirs
from xformer import cost
from xformer.data.batch import Workload
from xformer.data.errors import BadInput
from xformer.model.config import ModelConfig
from xformer.tasks.mlm import MLM
from xformer.tasks.task import Head

COMPILED = "`transformers`, SDPA, compiled, length-grouped"
PAPER_STEPS, PAPER_ROWS = 200_000, 150  # Chiang & Lee 2020, section 3, in rows of 128
MASKED = 0.15
# targets: MFU by length of rows, factors of speed and memory, hours, idle share
PEAK_SHARE = {512: 0.50, 128: 0.45}
SPEED, MEMORY, HOURS, IDLE = 2.5, 0.5, 2.0, 0.03
WANTED = (
    "the MFU of BERT-base's MLM step, counting the model's FLOPs on real tokens, "
    + " and ".join(f"on full rows of {n} (target: {share:g})" for n, share in PEAK_SHARE.items()),
    f"the MLM step on lines of mixed length compared with {COMPILED} (target: {SPEED:g}x), and "
    f"its peak memory over theirs (target: below {MEMORY:g})",
    f"hours for the {PAPER_STEPS:,} steps of {PAPER_ROWS} x 128 of Chiang & Lee 2020 (target: "
    f"below {HOURS:g})",
    f"the share of time in which no kernel runs, in steady state (target: below {IDLE:g})",
)


def peak(name: str) -> float:
    """The peak of a device in bf16 operations a second. Raises BadInput if it is not known."""
    flops = cost.peak_flops(name, "bf16")
    if flops is None:
        raise BadInput(f"the peak of a {name} is not known; add it to PEAKS in xformer/cost.py")
    return flops


def training_flops(config: ModelConfig, length: int, masked: float) -> float:
    """Operations a token of a training step on rows of this length with this share of masked
    tokens."""
    rows = 10_000  # so many that the number of masked tokens is whole
    work = Workload.even(rows, length, masked)
    return cost.training_flops(config, MLM(Head("mlm")), work) / work.tokens


def at(bench: Bench, length: int, rows: int = 0) -> Bench:
    """The bench for rows of this length, in a folder of its own."""
    folder = bench.folder / f"rows{length}"
    folder.mkdir(exist_ok=True)
    size = replace(bench.size, length=length, full_rows=rows or bench.size.full_rows)
    return replace(bench, folder=folder, size=size)


def steps(bench: Bench) -> Took:
    """The measurements of our steps on full rows. The rate excludes the warm-up."""
    store = prepare.full_rows(bench)
    return ours_on(bench, "mlm", store.path, prepare.model(bench)[0], bench.size.full_rows)


def packed(bench: Bench) -> list[Row]:
    """MFU on full rows."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    tokens = bench.size.full_rows * bench.size.length
    table = []
    for length, target in PEAK_SHARE.items():
        some = at(bench, length, max(1, tokens // length))
        took = in_turn(bench.rounds, {OURS: partial(steps, some)})[OURS]
        config = ModelConfig(**bench.size.model, vocab_size=len(prepare.tokenizer(bench)))
        flops = training_flops(config, length, MASKED * (length - 2) / length)
        share = [one["rate"] * flops / peak(device) for one in took]
        speed = sorted(one["rate"] for one in took)[len(took) // 2]
        what = f"MFU, MLM, full rows of {length}, bf16"
        table.append(Row(what, "", share, target=target, note=f"{speed:,.0f} tokens/s"))
    return table


def mixed(bench: Bench) -> list[Row]:
    """Lines of mixed length compared with compiled transformers, with the peak memory of both."""
    size = bench.size
    our_model, their_model = prepare.model(bench)
    store, table = prepare.trial(bench, prepare.lines(bench), "lines", size.rows)
    mine = partial(ours_on, bench, "mlm", store, our_model, size.rows)
    peer = partial(
        theirs,
        bench,
        model=their_model,
        table=table,
        task="mlm",
        rows=size.rows,
        steps=size.warmup + size.steps,
        warmup=size.warmup,
        sampling="sequential",
        compile=bench.cuda,
    )
    took = in_turn(bench.rounds, {OURS: mine, COMPILED: peer})
    what = f"MLM step, {size.rows} lines of mixed length, bf16"
    return [
        Row(what, "real tokens/s", rates(took[OURS]), COMPILED, rates(took[COMPILED]), SPEED),
        Row(
            f"peak memory, {what}",
            "GiB",
            rates(took[OURS], "memory_gib"),
            COMPILED,
            rates(took[COMPILED], "memory_gib"),
            MEMORY,
            "below",
        ),
    ]


def paper(bench: Bench) -> list[Row]:
    """Hours that the pre-training of Chiang & Lee 2020 would take."""
    took = in_turn(bench.rounds, {OURS: partial(steps, at(bench, 128, PAPER_ROWS))})[OURS]
    hours = [PAPER_STEPS * PAPER_ROWS * 128 / one["rate"] / 3600 for one in took]
    what = f"{PAPER_STEPS:,} steps of {PAPER_ROWS} x 128, bf16 (Chiang & Lee 2020: 60 on a V100)"
    return [Row(what, "hours", hours, target=HOURS, goal="below")]


def idle(bench: Bench) -> list[Row]:
    """The share of time in which no kernel runs, from the profiler."""
    some = at(bench, 128)
    store, init = prepare.full_rows(some), prepare.model(some)[0]
    job = {
        "do": "idle",
        "arguments": ours.arguments(
            some,
            "mlm",
            store.path,
            init,
            steps=some.size.warmup + some.size.steps,
            every=some.size.warmup,
            settings=[f"batch.rows={some.size.full_rows}"],
        ),
    }
    took = in_turn(bench.rounds, {OURS: lambda: module(some, "ours", job)[0]})[OURS]
    what = "share of time in which no kernel runs, full rows of 128, bf16"
    return [Row(what, "", rates(took, "idle"), target=IDLE, goal="below")]


PARTS = {"gpu-packed": packed, "gpu-mixed": mixed, "gpu-paper": paper, "gpu-idle": idle}


def on_cuda(bench: Bench) -> Bench:
    """The bench with the size, precision and folder of these parts."""
    folder = bench.folder / "cuda"
    folder.mkdir(exist_ok=True)
    return replace(bench, folder=folder, size=CUDA, precision="bf16", cuda=True)
