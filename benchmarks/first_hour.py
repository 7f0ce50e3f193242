"""The first hour on a CUDA machine: does xformer compute correctly there, and how fast is it?

    python -m benchmarks.first_hour --output docs     # or: make gpu
    python -m benchmarks.first_hour --rehearse        # tiny, on whatever device there is

Each part runs in its own process with a time limit, so that a part that fails or hangs does not
stop the others. The checks run at the same time; then the models are timed one after another. All
parts end after --minutes. A part that is cut off keeps the rows that it has, and the report says
which parts were cut off. Weights and data are random, and nothing is downloaded. gpu.md and
gpu.json are written again after every part.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import bare, machine
from benchmarks.bare import MASKED, VOCABULARY, shape
from benchmarks.bench import ROOT
from benchmarks.steps import CASES, SHAPE
from xformer import cost
from xformer.data.batch import Batch, Workload
from xformer.data.capacity import Capacities
from xformer.data.errors import Failure
from xformer.model.config import ModelConfig
from xformer.ops import native
from xformer.parallel import compiled
from xformer.parallel.compiled import GRAPHS, compile_parts
from xformer.parallel.feed import SHAPES as FEW_SHAPES
from xformer.parallel.feed import to_device
from xformer.parallel.processes import Ranks
from xformer.parallel.replicas import Replicas
from xformer.tasks.classify import Classify
from xformer.tasks.mlm import MLM
from xformer.tasks.task import Head, Model, Task

TOKENS = 8192
WAYS = ("none", "layers", "graphs", "both")  # system.compile
# fewer ways for some models, because compiling takes up to a minute
WAYS_OF = {"MiniLM": ("none", "graphs", "both"), "BERT-base": WAYS, "BERT-large": ("both",)}
# With these optimizers the host waits for the device once a step, to know whether to drop the
# update.
ASK_THE_HOST = ("adagrad", "adamax", "radam", "novograd")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BOUNDS = {"fp32": 1e-4, "bf16": 5e-2}  # of a gradient's relative error
ROUNDS = 3  # timed rounds of a model; the median counts


@dataclass(frozen=True)
class Row:
    """A line of the table: what was measured, and the result."""

    what: str
    value: str
    note: str = ""


# ------------------------------------------------------------------------------- is it right?


def operations(rehearse: bool) -> list[Row]:
    """Compare every operation in every dtype with its plain PyTorch version in fp64."""
    tests = ["tests/test_ops.py", "-k", "dropout" if rehearse else "cuda or dropout"]
    said = run(["-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *tests])
    return [Row("operations compared with plain PyTorch", said.strip().splitlines()[-1])]


def tasks(rehearse: bool) -> Iterator[Row]:
    """The loss and the gradient of every task against those of the CPU in fp32."""
    wrong = []
    quiet = {"dropout": 0.0, "attention_dropout": 0.0}
    for name, case in CASES.items():
        if not name.endswith(", fp32"):
            continue
        torch.manual_seed(1)
        model = Model(ModelConfig(**{**case.model, **quiet}), case.task).train()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0.0, 0.05)
        batch = case.batches("cpu")[0]
        with native.only_plain():
            wanted = gradient(model, batch, "cpu", "fp32")
        ways = WAYS[::2] if CUDA else ("none",)
        for precision, way, filler in product(BOUNDS, ways, (False, True)):
            given = with_filler(batch) if filler else batch
            got = gradient(model, given, DEVICE, precision, way == "graphs")
            error = float((got - wanted).norm() / wanted.norm())
            what = f"gradient of {name.removesuffix(', fp32')}, {precision}, compile={way}"
            what += ", with filler" if filler else ""
            if not error < BOUNDS[precision]:
                wrong.append(f"{what} is off by {error:.1e}")
            yield Row(what, f"{error:.1e}")
    if wrong:
        raise AssertionError("; ".join(wrong))


def with_filler(batch: Batch[Tensor]) -> Batch[Tensor]:
    """The batch with filler, as training on a GPU has it (but with places for all tokens)."""
    parts = {part.name: getattr(batch, part.name) for part in fields(batch)}
    arrays: dict[str, Any] = {k: v.numpy() for k, v in parts.items() if isinstance(v, Tensor)}
    packed: Batch[Any] = replace(batch, **arrays)
    sizes = np.array([len(packed.tokens)]), np.array([len(packed.cu_seqlens) - 1])
    shape = Capacities(*sizes, 1, packed.longest, packed.together, masked=1.0)
    return to_device(shape.fill(packed), torch.device("cpu"))


def gradient(
    model: Model, batch: Batch[Tensor], device: str, precision: str, graphs: bool = False
) -> Tensor:
    """The loss and the gradient of all weights, as one fp64 vector on the CPU."""
    ranks, batch = Ranks(0, 1, torch.device(device)), batch.to(device)
    replicas = Replicas(model.to(device), ranks, lambda: batch, precision, graphs)
    # with graphs: first without a graph, then recorded and replayed, then only replayed
    for _ in range(3 if graphs else 1):
        model.zero_grad()
        loss = replicas.forward_backward(batch, 0, 1)
    parts = [loss.total, *(w.grad for w in model.parameters() if w.grad is not None)]
    return torch.cat([part.double().cpu().flatten() for part in parts])


def waits(rehearse: bool) -> list[Row]:
    """Take twenty steps of every task, optimizer and shape, without CUDA graphs and with them. If
    the host waits, that is an error, except with the optimizers ASK_THE_HOST."""
    wrong = []
    ways = WAYS[::2] if CUDA else ("none",)
    cases = {f"{name}, {way}": (case, way) for name, case in CASES.items() for way in ways}
    cases.pop("Hilbert-CNN, graphs", None)
    for name, (case, way) in cases.items():
        trainer, batches = case.trainer(DEVICE, f"system.compile={way}"), case.batches(DEVICE)
        # the first step copies class weights and the Hilbert curve; the second is recorded
        try:
            trainer.train([batches] * (1 if rehearse else 3))
        except Failure as error:
            raise AssertionError(f"{name}: {error}") from error
        if CUDA and name.partition(",")[0] not in ASK_THE_HOST:
            torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.train([batches] * (1 if rehearse else 20))
        except RuntimeError as error:
            print(f"{name}:\n{traceback.format_exc(-4)}", file=sys.stderr)
            wrong.append(f"{name}: {' '.join(str(error).split())}")
        finally:
            if CUDA:
                torch.cuda.set_sync_debug_mode("default")
    if wrong:
        raise AssertionError("; ".join(wrong))
    return [Row("steps without an unexpected wait of the host", f"{len(cases)} cases")]


def programs(rehearse: bool) -> Iterator[Row]:
    """Compare compiled code with code that is not compiled, on batches of three shapes. Without
    dropout the losses of training must agree, and dropout must depend on the seed alone."""
    lengths = [[20] * 8, [16] * 8, [24] * 8] * (1 if rehearse else 7)
    packed = [bare.lines(each, SHAPE["vocab_size"]) for each in lengths]
    capacities = capacities_of(packed, 32)
    batches = [to_device(capacities.fill(batch), torch.device(DEVICE)) for batch in packed]
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
    wrong = []
    for precision, bound in (("fp32", 1e-4), ("bf16", 2e-2)):
        expected = np.zeros(0)
        for way in WAYS:
            model = Small(quiet, way, precision, batches[0])
            losses = np.array([model.step(batch, seed=i) for i, batch in enumerate(batches)])
            expected = losses if way == "none" else expected
            error = float(np.abs(losses / expected - 1).max())
            if not error < bound:
                wrong.append(f"compile={way}, {precision}: a loss is off by {error:.1e}")
            yield Row(f"losses of {len(batches)} steps, compile={way}, {precision}", f"{error:.1e}")
    for way in WAYS:
        model = Small({}, way, "bf16", batches[0])
        drawn = [model.step(batches[0], seed, rate=0.0) for seed in (1, 2, 1, 2)]
        if drawn[:2] != drawn[2:] or drawn[0] == drawn[1]:
            wrong.append(f"compile={way}: seeds 1, 2, 1, 2 give the losses {drawn}")
    if wrong:
        raise AssertionError("; ".join(wrong))
    yield Row("dropout in compiled code", "follows the seed, and only the seed")


class Small:
    """A small classifier with random weights, compiled in one way. `rates` are dropout rates."""

    def __init__(self, rates: dict[str, float], way: str, precision: str, batch: Batch[Tensor]):
        torch.manual_seed(0)
        with torch.device(DEVICE):
            task = Classify(Head("classify", ("a", "b")))
            self.model = Model(ModelConfig(**(SHAPE | rates)), task).train()
        for weight in self.model.parameters():
            torch.nn.init.normal_(weight, 0.0, 0.05)
        ranks = Ranks(0, 1, torch.device(DEVICE))
        if failure := compile_parts(self.model, way, ranks, lambda: batch, precision):
            raise AssertionError(f"torch.compile fails here ({failure})")
        graphs = CUDA and way in GRAPHS
        self.replicas = Replicas(self.model, ranks, lambda: batch, precision, graphs)

    def step(self, batch: Batch[Tensor], seed: int, rate: float = 1e-3) -> float:
        """Take a step of gradient descent, and return the loss before it."""
        torch.manual_seed(seed)
        loss = self.replicas.forward_backward(batch, 0, 1).total
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.grad is not None:
                    weight.sub_(weight.grad, alpha=rate)
        value = loss.item()
        self.model.zero_grad()
        return value


def capacities_of(packed: list[Batch[np.ndarray]], longest: int) -> Capacities:
    """The shapes for these batches of rows of at most `longest` tokens."""
    tokens = np.array([len(batch.tokens) for batch in packed])
    rows = np.array([len(batch.cu_seqlens) - 1 for batch in packed])
    return Capacities(tokens, rows, FEW_SHAPES, longest)


# ------------------------------------------------------------------------------- does it hold?


@contextmanager
def workshop() -> Iterator[tuple[Path, Callable[..., list[str]]]]:
    """A folder with a store of brackets, and the command line of a short run on it."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        line = ["preprocess.py", "synthetic", "nesting", "--tokens", "200000"]
        run([*line, "--vocab-size", "500", "--lengths", "20:60", "--output", str(place / "store")])

        def training(run: str, *settings: str) -> list[str]:
            given = [f"data={place / 'store'}", f"run={place / run}", "train.steps=60"]
            given += ["train.checkpoint_every=10", "system.deterministic=true", *settings]
            return ["train.py", "pretrain/smoke", *given]

        yield place, training


def run(line: list[str]) -> str:
    """Run Python with these arguments, and return what it printed. Raises AssertionError, with the
    end of its output, if it fails."""
    ended = subprocess.run(
        [sys.executable, *line], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        said = f"{ended.stdout[-2000:]}{ended.stderr[-1500:]}".strip()
        raise AssertionError(f"{' '.join(line[:3])} ended with {ended.returncode}: {said}")
    return ended.stdout


def weights(place: Path, run: str) -> bytes:
    """The last checkpoint's weights, byte for byte."""
    return (place / run / "checkpoints/step_60/model.safetensors").read_bytes()


def repeat(rehearse: bool) -> list[Row]:
    """The same run twice, and once more after SIGKILL, with the same weights bit for bit."""
    with workshop() as (place, training), ThreadPoolExecutor(1) as pool:
        run(training("first"))
        second = pool.submit(run, training("second"))
        process = subprocess.Popen(
            [sys.executable, *training("killed")], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        checkpoint = place / "killed/checkpoints/step_10"
        while process.poll() is None and not checkpoint.is_dir():
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        at = sorted(p.name for p in (place / "killed/checkpoints").iterdir())
        run(training("killed"))
        second.result()
        if "step_60" in at:
            raise AssertionError("the run ended before SIGKILL, so nothing was continued")
        same = weights(place, "first") == weights(place, "second")
        resumed = weights(place, "first") == weights(place, "killed")
    if not (same and resumed):
        raise AssertionError(f"twice the same: {same}; the same after SIGKILL: {resumed}")
    return [
        Row("two runs with system.deterministic=true", "bit for bit equal"),
        Row("a run continued after SIGKILL", "bit for bit equal", f"killed with {', '.join(at)}"),
    ]


def ranks(rehearse: bool) -> Iterator[Row]:
    """Two ranks against one process, without dropout."""
    if CUDA and torch.cuda.device_count() < 2:
        yield Row("two ranks", "not run", "there is one device")
        return
    quiet = ["model.dropout=0", "model.attention_dropout=0"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with workshop() as (place, training):
        run(training("one", *quiet))
        one = final_loss(place / "one")
        for way in WAYS[::2] if CUDA else ("none",):
            run([*torchrun, *training(way, *quiet, f"system.compile={way}")])
            two = final_loss(place / way)
            if not (error := abs(one - two) / one) < 1e-4:
                raise AssertionError(f"one process ends at {one}, two ranks ({way}) at {two}")
            what = f"two ranks against one process, compile={way}"
            yield Row(what, f"{error:.1e}", "of the loss after 60 steps")


def final_loss(run: Path) -> float:
    """The validation loss of a finished run."""
    loss: float = json.loads((run / "result.json").read_text())["metrics"]["valid"]["loss"]
    return loss


# ------------------------------------------------------------------------------- how fast is it?


def speed_of(name: str) -> Callable[[bool], Iterator[Row]]:
    """The part that times the pre-training of a model on full rows of 128 and 512."""

    def speed(rehearse: bool) -> Iterator[Row]:
        for length in (16,) if rehearse else (128, 512):
            rows = 4 if rehearse else TOKENS // length
            config = shape("tiny" if rehearse else name)
            yield from full_rows(name, config, rows, length, 2 if rehearse else 20)

    return speed


def full_rows(name: str, config: ModelConfig, rows: int, length: int, steps: int) -> Iterator[Row]:
    """Tokens a second of MLM on full rows, ours and those of transformers."""
    batch, task = bare.full_rows(rows, length, MASKED, VOCABULARY, DEVICE), MLM(Head("mlm"))
    labels = torch.full((rows * length,), -100, device=DEVICE)
    assert batch.places is not None
    assert batch.targets is not None
    labels[batch.places] = batch.targets
    # The rows are full, so no mask is needed. Without one transformers uses its fastest attention.
    given = {"input_ids": batch.tokens.view(rows, length), "labels": labels.view(rows, length)}
    yield from compared(
        f"{called(name)}, MLM, bf16, {rows} rows of {length}",
        "tokens/s",
        rows * length * steps,
        lambda way: trainer_of(config, task, way),
        {way: [[batch]] * steps for way in (WAYS_OF[name] if length < 512 else ("both",))},
        lambda: Peer("BertForMaskedLM", config),
        [given] * steps,
        cost.training_flops(config, task, Workload.even(rows, length, MASKED)) * steps,
    )


def called(name: str) -> str:
    """The name of a part in the report. The weights are random, so only a shape is MiniLM's."""
    return "MiniLM's shape" if name == "MiniLM" else name


def fine_tuning(rehearse: bool) -> Iterator[Row]:
    """Real tokens a second of fine-tuning MiniLM on rows of mixed lengths."""
    config = shape("tiny" if rehearse else "MiniLM")
    steps, rows = (2, 4) if rehearse else (40, 32)
    draw = np.random.default_rng(0)
    every = [np.clip(draw.lognormal(3.7, 0.4, rows).astype(int), 8, 128) for _ in range(steps)]
    # both sides read rows of similar length together
    every = list(np.sort(np.concatenate(every)).reshape(steps, rows))
    task = Classify(Head("classify", ("a", "b")))
    packed = [bare.lines(lengths.tolist(), VOCABULARY) for lengths in every]
    capacities = capacities_of(packed, 128)
    own = {"none": packed, "graphs": [*map(capacities.fill, packed)]}
    yield from compared(
        f"{called('MiniLM')}, fine-tuning, bf16, {rows} rows of 8 to 128",
        "real tokens/s",
        sum(len(batch.tokens) for batch in packed),
        lambda way: trainer_of(config, task, way),
        {
            way: [[to_device(batch, torch.device(DEVICE))] for batch in batches]
            for way, batches in own.items()
        },
        lambda: Peer("BertForSequenceClassification", config),
        [padded_rows(lengths) for lengths in every],
    )


def trainer_of(config: ModelConfig, task: Task, way: str) -> bare.Trainer:
    """A trainer of a model with random weights."""
    with torch.device(DEVICE):
        model = Model(config, task).train()
    for weight in model.parameters():  # BERT's initialisation of matrices
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, 0.0, 0.02)
    return bare.Trainer(model, "system.precision=bf16", f"system.compile={way}")


def padded_rows(lengths: np.ndarray) -> dict[str, Tensor]:
    """Rows of these lengths as transformers takes them, padded to a multiple of 8."""
    longest = -(-int(lengths.max()) // 8) * 8
    mask = torch.arange(longest)[None] < torch.from_numpy(lengths)[:, None]
    ids = torch.randint(VOCABULARY, mask.shape)
    labels = torch.randint(2, (len(lengths),))
    given = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
    return {name: tensor.to(DEVICE) for name, tensor in given.items()}


class Peer:
    """A model of transformers with SDPA, compiled, with CUDA graphs, bf16 and a fused AdamW."""

    def __init__(self, kind: str, config: ModelConfig):
        import transformers

        theirs = transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.intermediate,
            max_position_embeddings=config.max_positions,
        )
        theirs._attn_implementation = "sdpa"
        self.model = getattr(transformers, kind)(theirs).to(DEVICE).train()
        self.ways: dict[str, Callable[..., Any]] = {"not compiled": self.model}
        if CUDA:
            graphs = torch.compile(self.model, mode="reduce-overhead")
            self.ways = {"CUDA graphs": graphs, "compiled": torch.compile(self.model), **self.ways}
        self.how, self.forward = next(iter(self.ways.items()))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)

    def warm_up(self, batches: list[dict[str, Tensor]]) -> None:
        """Train until everything is compiled and recorded, in the best way that works here."""
        failed = ""
        for how, forward in self.ways.items():
            self.forward, self.how = forward, how + failed
            try:
                for _ in range(3 if CUDA else 1):
                    self.train(batches)
            except Exception as error:
                if forward is self.model:
                    raise
                traceback.print_exc()
                failed += f" ({how}: {type(error).__name__})"
            else:
                return

    def train(self, batches: list[dict[str, Tensor]]) -> None:
        """Take a step on each batch."""
        for batch in batches:
            self.optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = self.forward(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()


def compared(
    what: str,
    unit: str,
    tokens: int,
    make_trainer: Callable[[str], bare.Trainer],
    steps: dict[str, list[list[Batch[Tensor]]]],
    make_peer: Callable[[], Peer],
    batches: list[dict[str, Tensor]],
    flops: float = 0.0,
) -> Iterator[Row]:
    """First our speed with each way to compile, on its `steps`. Then the speed of transformers on
    `batches`, in rounds that alternate with our fastest way.

    All hold the same `tokens`. `flops` are the model's operations on them, or 0. Our rows come
    before transformers is loaded and compiled, so that they are kept if that fails.
    """
    # Without this, the peer's second length would be compiled with dynamic shapes, which is slower.
    # It comes before our trainers, because it forgets their compiled code too.
    torch.compiler.reset()
    if only_compile:
        if "both" in steps:
            make_trainer("both").compile(steps["both"][0][0])
        make_peer().warm_up(batches)
        return
    fastest, ours = float("inf"), None
    for way, own in steps.items():
        begun, before = time.perf_counter(), memory_in_use()
        trainer = make_trainer(way)
        if failure := trainer.compile(own[0][0]):
            yield Row(f"{what}, compile={way}", "not run", f"torch.compile fails here ({failure})")
            continue

        def train(trainer: bare.Trainer = trainer, own: list[Any] = own) -> None:
            trainer.train(own)

        train()
        warm = time.perf_counter() - begun
        memory = peak_memory() - before
        seconds = median([seconds_of(train) for _ in range(ROUNDS)])
        peak = cost.peak_flops(torch.cuda.get_device_name(0), "bf16") if CUDA else None
        share = f"{flops / seconds / peak:.1%} of the peak, " if flops and peak else ""
        some = own[:: max(1, len(own) // 10)]  # of every length
        idle = idle_share(lambda trainer=trainer, some=some: trainer.train(some))  # type: ignore[misc]
        note = f"{share}{memory:.1f} GiB{idle}, {warm:.0f} s to warm up"
        yield Row(f"{what}, compile={way}", f"{tokens / seconds:,.0f} {unit}", note)
        if seconds < fastest:
            fastest, ours = seconds, train
        del trainer, train

    before = memory_in_use()
    peer = make_peer()

    def theirs() -> None:
        peer.train(batches)

    peer.warm_up(batches)
    memory = peak_memory() - before
    ours_took, theirs_took = [], []
    for _ in range(ROUNDS):
        ours_took += [seconds_of(ours)] if ours else []
        theirs_took.append(seconds_of(theirs))
    seconds, note = median(theirs_took), f"{memory:.1f} GiB"
    if ours_took:
        note = f"ours is {seconds / median(ours_took):.2f} times as fast; {note}"
    what = f"{what}: transformers, SDPA, {peer.how}"
    yield Row(what, f"{tokens / seconds:,.0f} {unit}", note)


def seconds_of(work: Callable[[], None]) -> float:
    """Seconds that a piece of work takes, up to the end of its last kernel."""
    if CUDA:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def memory_in_use() -> float:
    """The GiB of the GPU that PyTorch needs for what is alive. `peak_memory` counts from here."""
    if not CUDA:
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved() / 2**30


def peak_memory() -> float:
    """The most GiB of the GPU that PyTorch has held at once since `memory_in_use`."""
    return torch.cuda.max_memory_reserved() / 2**30 if CUDA else 0.0


def idle_share(work: Callable[[], None]) -> str:
    """The share of time in which no kernel runs, by PyTorch's profiler, as a note of a row."""
    if not CUDA:
        return ""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    if not spans:
        return ", idle share unknown: the profiler saw no kernel"
    busy, end = 0.0, spans[0][0]
    for begin, finish in spans:
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return f", idle {1 - busy / (end - spans[0][0]):.1%}"


# ------------------------------------------------------------------------------- all of it


CHECKS: dict[str, Callable[[bool], Iterable[Row]]] = {
    "operations": operations,
    "tasks": tasks,
    "waits": waits,
    "compiled": programs,
    "repeat": repeat,
    "ranks": ranks,
}
SPEEDS = {  # the most useful parts first, because the last ones may be cut off
    "fine-tuning": fine_tuning,
    "BERT-base": speed_of("BERT-base"),
    "MiniLM": speed_of("MiniLM"),
    "BERT-large": speed_of("BERT-large"),
}
PARTS = CHECKS | SPEEDS
LIMIT = 300  # seconds after which a part counts as hanging
OVER = "the time for all parts is over; --only {} runs this part alone"
running: set[subprocess.Popen[str]] = set()  # the parts, each in a session of its own
only_compile = False  # time nothing: fill the compilers' caches for a later process


def main() -> int:
    """Run the parts and write the report. Returns 1 if a part failed."""
    global only_compile
    given = _arguments()
    only_compile = given.only_compile
    if given.part:
        if given.part == given.fail:
            raise AssertionError("this part was told to fail")
        if not CUDA:
            compiled.BACKEND = "eager"  # traces the code but compiles nothing, so it takes seconds
        for row in PARTS[given.part](given.rehearse):
            print(json.dumps(asdict(row)), flush=True)
        return 0
    begun = time.monotonic()
    about_machine, deadline = described(), time.monotonic() + 60 * given.minutes
    results = earlier(given.output, about_machine) if given.output else {}

    def measure(part: str, *options: str) -> dict[str, Any]:
        options += ("--rehearse",) * given.rehearse + ("--fail", part) * (given.fail == part)
        return of_part(part, deadline, *options)

    for part, result in in_turn(given.only, measure):
        results[part] = result
        print(f"{part}: {result['seconds']} s", *table(part, result), sep="\n", flush=True)
        if given.output:
            ordered = {name: results[name] for name in PARTS if name in results}
            write_report(given.output, about_machine, ordered)
    print(f"all of it: {time.monotonic() - begun:.0f} s")
    return int(any("error" in result for result in results.values()))


def _arguments() -> argparse.Namespace:
    about, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_hour",
        description=about,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for gpu.md and gpu.json (default: only print the results)",
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny models, on any device")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"run only some of the parts, and keep the others of a report of this machine in "
        f"--output: {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="the time for all parts together (default: %(default)g)",
    )
    parser.add_argument(
        "--fail", choices=PARTS, metavar="PART", help="make this part fail, to try the report"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--only-compile", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not (CUDA or given.rehearse):
        parser.error("there is no CUDA device; --rehearse runs tiny models on the CPU")
    if not given.minutes > 0:
        parser.error(f"--minutes {given.minutes:g} is not allowed; it must be above 0")
    if given.output and given.output.exists() and not given.output.is_dir():
        parser.error(f"--output {given.output} is not a directory")
    return given


def in_turn(
    parts: list[str], measure: Callable[..., dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each part with its result, as it ends. The checks run at the same time, while other processes
    compile what the remaining parts need. Then these run one after another. On the CPU the checks
    would only wait for each other, so they take turns."""
    with ThreadPoolExecutor(len(PARTS) if CUDA else 1) as pool:
        speeds = [part for part in parts if part in SPEEDS]
        compiling = [pool.submit(measure, part, "--only-compile") for part in speeds if CUDA]
        checks = {pool.submit(measure, part): part for part in parts if part in CHECKS}
        try:
            for done in as_completed(checks):
                yield checks[done], done.result()
            wait(compiling)
            for part in speeds:
                yield part, measure(part)
        except BaseException:  # Ctrl-C does not reach a process of another session
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def earlier(folder: Path, about_machine: str) -> dict[str, dict[str, Any]]:
    """The parts that an earlier run on this machine has written into gpu.json; --only replaces some
    of them."""
    path = folder / "gpu.json"
    told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    # what follows "Large" is measured anew each time
    setups = (told.get("machine", ""), about_machine)
    before, now = (setup.partition("Large")[0] for setup in setups)
    return told["parts"] if before == now and told["versions"] == machine.versions() else {}


def described() -> str:
    """The machine in words. Another process asks, so that this one takes no memory of the GPU."""
    try:
        return run(["-c", "from benchmarks import machine; print(machine.words())"]).strip()
    except AssertionError as error:
        print(error, file=sys.stderr)
        return "An unknown machine"


def of_part(part: str, deadline: float, *options: str) -> dict[str, Any]:
    """The rows of a part, the seconds that it took, and, if it failed, the end of its output and
    the reason in a line. A part is killed after LIMIT seconds, or at the `deadline` of all parts
    (of time.monotonic)."""
    begun = time.monotonic()
    left = deadline - begun
    if left <= 0:
        reason = f"not run: {OVER.format(part)}"
        return {"seconds": 0.0, "rows": [], "error": "", "reason": reason}
    line = [sys.executable, "-m", "benchmarks.first_hour", "--part", part, *options]
    limit, late = min(left, LIMIT), ""
    process = subprocess.Popen(
        line,
        cwd=ROOT,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    running.add(process)
    try:
        out, error = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own processes too
        out, error = process.communicate()
        late = OVER.format(part) if left < LIMIT else f"it did not end in {LIMIT} s"
    finally:
        running.discard(process)
    result: dict[str, Any] = {
        "seconds": round(time.monotonic() - begun, 1),
        "rows": [json.loads(line) for line in out.splitlines() if line.startswith('{"what": ')],
    }
    if process.returncode < 0 and not late:
        late = f"it was ended by {signal.Signals(-process.returncode).name}"
    if process.returncode:
        result["error"] = error[-6000:]
        named = [
            line for line in error.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)
        ]
        result["reason"] = late or (named or [f"status {process.returncode}"])[-1]
    return result


def write_report(folder: Path, about_machine: str, results: dict[str, dict[str, Any]]) -> None:
    """Write gpu.md and gpu.json with the results so far."""
    lines = ["# On a GPU", "", f"{about_machine}. {machine.versions()}.", ""]
    lines += ["| what | value | |", "|---|---|---|"]
    lines += [line for part, result in results.items() for line in table(part, result)]
    seconds = sum(result["seconds"] for result in results.values())
    end = f"The parts took {seconds:.0f} s together, and on a GPU the checks run at the same time."
    text = "\n".join([*lines, "", end, ""])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.md").write_text(text, encoding="utf-8")
    told = {"machine": about_machine, "versions": machine.versions(), "parts": results}
    (folder / "gpu.json").write_text(json.dumps(told, indent=1), encoding="utf-8")


def table(part: str, result: dict[str, Any]) -> list[str]:
    """The lines of the table for a part. A failed part ends with the reason."""
    lines = [f"| {row['what']} | {row['value']} | {row['note']} |" for row in result["rows"]]
    if "error" in result:
        reason = result["reason"].replace("|", "\\|")
        lines.append(f"| {called(part)} | **failed** | {reason} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
