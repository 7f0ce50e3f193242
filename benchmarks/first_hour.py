"""The first hour on a CUDA machine: is it right there, and how fast is it?

    python -m benchmarks.first_hour --output docs     # or: make gpu
    python -m benchmarks.first_hour --rehearse        # tiny, on whatever device there is

Each part runs in a process of its own with a limit of time, so that one that fails or hangs leaves
the others alone. Weights and data are random: nothing is downloaded. Writes gpu.md and gpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import bare, machine
from benchmarks.steps import CASES
from xformer import cost
from xformer.data.batch import Batch, Workload
from xformer.model.config import ModelConfig
from xformer.ops import native
from xformer.tasks.classify import Classify
from xformer.tasks.mlm import MLM
from xformer.tasks.task import Head, Model

ROOT = Path(__file__).parents[1]
VOCABULARY, MASKED, TOKENS = 30_522, 0.15, 8192
SHAPES = {  # layers, hidden size, heads, inner size of the MLP
    "MiniLM": (6, 384, 12, 1536),
    "BERT-base": (12, 768, 12, 3072),
    "BERT-large": (24, 1024, 16, 4096),
    "tiny": (2, 64, 4, 128),
}
# optimizers that ask the host once a step whether to drop it
ASK_THE_HOST = ("adagrad", "adamax", "radam", "novograd")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROUNDS, WARM_UP = 3, 5  # rounds by turns with transformers; steps before the clock starts


@dataclass(frozen=True)
class Row:
    """A line of the table: what was looked at, and what came out."""

    what: str
    value: str
    note: str = ""


# ------------------------------------------------------------------------------- is it right?


def operations(rehearse: bool) -> list[Row]:
    """Every operation in every type against the plain way in fp64."""
    line = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    line += ["tests/test_ops.py", "-k", "dropout" if rehearse else "cuda or dropout"]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise AssertionError(ended.stdout[-2000:])
    return [Row("operations against the plain way", ended.stdout.strip().splitlines()[-1])]


def tasks(rehearse: bool) -> list[Row]:
    """The loss and the gradient of every task against those of the CPU in fp32."""
    rows = []
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
            wanted = gradient(model, batch, "cpu", torch.float32)
        for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
            error = float((gradient(model, batch, DEVICE, dtype) - wanted).norm() / wanted.norm())
            if not error < bound:
                raise AssertionError(f"{name}, {dtype}: the gradient is off by {error:.1e}")
            rows.append(Row(f"gradient of {name.removesuffix(', fp32')}, {dtype}", f"{error:.1e}"))
    return rows


def gradient(model: Model, batch: Batch[Tensor], device: str, dtype: torch.dtype) -> Tensor:
    """The whole gradient and the loss as one vector in fp64 on the CPU."""
    model = model.to(device)
    model.zero_grad()
    there: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in vars(batch).items()
    }
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(Batch(**there))
    loss.total.backward()
    parts = [loss.total.detach(), *(w.grad for w in model.parameters() if w.grad is not None)]
    return torch.cat([part.double().cpu().flatten() for part in parts])


def waits(rehearse: bool) -> list[Row]:
    """Twenty steps of every task, optimizer and shape, in which PyTorch refuses to wait."""
    for name, case in CASES.items():
        trainer, batches = case.trainer(DEVICE), case.batches(DEVICE)
        trainer.train([batches])  # what is copied once is copied now
        if CUDA and name not in ASK_THE_HOST:
            torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.train([batches] * (2 if rehearse else 20))
        except RuntimeError as error:
            raise AssertionError(f"{name}: {error}") from error
        finally:
            if CUDA:
                torch.cuda.set_sync_debug_mode("default")
    return [Row("steps in which the host never waits", f"{len(CASES)} cases")]


# ------------------------------------------------------------------------------- does it hold?


@contextmanager
def workshop() -> Iterator[tuple[Path, Callable[..., list[str]]]]:
    """A folder with a store of brackets, and the command line of a short run on it."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        line = [sys.executable, "preprocess.py", "synthetic", "nesting", "--tokens", "200000"]
        line += ["--vocab-size", "500", "--lengths", "20:60", "--output", str(place / "store")]
        subprocess.run(line, cwd=ROOT, check=True, capture_output=True)

        def training(run: str, *settings: str) -> list[str]:
            given = [f"data={place / 'store'}", f"run={place / run}", "train.steps=60"]
            given += ["train.checkpoint_every=10", "system.deterministic=true", *settings]
            return ["train.py", "pretrain/smoke", *given]

        yield place, training


def run(line: list[str]) -> None:
    """Run a command of this project. Raises AssertionError with the end of what it said."""
    ended = subprocess.run(
        [sys.executable, *line], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise AssertionError(f"{' '.join(line[:3])}: {ended.stderr[-1500:]}")


def weights(place: Path, run: str) -> bytes:
    """The last checkpoint's weights, byte for byte."""
    return (place / run / "checkpoints/step_60/model.safetensors").read_bytes()


def repeat(rehearse: bool) -> list[Row]:
    """The same run twice, and once more after SIGKILL, with the same weights bit for bit."""
    with workshop() as (place, training):
        for name in ("first", "second"):
            run(training(name))
        same = weights(place, "first") == weights(place, "second")
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
        resumed = weights(place, "first") == weights(place, "killed")
    if not (same and resumed):
        raise AssertionError(f"twice the same: {same}; the same after SIGKILL: {resumed}")
    return [
        Row("two runs with system.deterministic=true", "bit for bit equal"),
        Row("a run continued after SIGKILL", "bit for bit equal", f"killed with {', '.join(at)}"),
    ]


def ranks(rehearse: bool) -> list[Row]:
    """Two ranks against one process, without dropout."""
    if CUDA and torch.cuda.device_count() < 2:
        return [Row("two ranks", "not run", "there is one device")]
    quiet = ["model.dropout=0", "model.attention_dropout=0"]
    with workshop() as (place, training):
        run(training("one", *quiet))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        run([*torchrun, *training("two", *quiet)])
        losses = [final_loss(place / name) for name in ("one", "two")]
    error = abs(losses[0] - losses[1]) / losses[0]
    if not error < 1e-4:
        raise AssertionError(f"one process ends at {losses[0]}, two ranks at {losses[1]}")
    return [Row("two ranks against one process", f"{error:.1e}", "of the loss after 60 steps")]


def final_loss(run: Path) -> float:
    """The validation loss of a finished run."""
    loss: float = json.loads((run / "result.json").read_text())["metrics"]["valid"]["loss"]
    return loss


# ------------------------------------------------------------------------------- how fast is it?


def speed_of(name: str) -> Callable[[bool], list[Row]]:
    """The part that times the pre-training of a model on full rows of 128 and 512."""

    def speed(rehearse: bool) -> list[Row]:
        rows = []
        for length in (16,) if rehearse else (128, 512):
            batch_rows = 4 if rehearse else TOKENS // length
            config = shape("tiny" if rehearse else name, length)
            rows += full_rows(name, config, batch_rows, length, 2 if rehearse else 20)
        return rows

    return speed


def shape(name: str, length: int) -> ModelConfig:
    """The config of a model by its name."""
    layers, hidden, heads, intermediate = SHAPES[name]
    return ModelConfig(
        vocab_size=VOCABULARY,
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=intermediate,
        max_positions=max(512, length),
    )


def full_rows(name: str, config: ModelConfig, rows: int, length: int, steps: int) -> list[Row]:
    """Tokens a second of MLM on full rows, ours and transformers' by turns."""
    batch = bare.full_rows(rows, length, MASKED, VOCABULARY, DEVICE)
    with torch.device(DEVICE):
        model = Model(config, MLM(Head("mlm"))).train()
    trainer = bare.Trainer(initialised(model), "system.precision=bf16")
    labels = torch.full((rows * length,), -100, device=DEVICE)
    assert batch.places is not None
    assert batch.targets is not None
    labels[batch.places] = batch.targets
    given = {
        "input_ids": batch.tokens.view(rows, length),
        "attention_mask": torch.ones(rows, length, dtype=torch.int64, device=DEVICE),
        "labels": labels.view(rows, length),
    }
    peer = Peer("BertForMaskedLM", config)
    ours, theirs = by_turns(
        lambda: trainer.train([[batch]] * steps), lambda: peer.train([given] * steps)
    )
    tokens = rows * length * steps
    work = Workload.even(rows, length, MASKED)
    flops = cost.training_flops(config, model.task, work) / work.tokens
    peak = cost.peak_flops(torch.cuda.get_device_name(0), "bf16") if CUDA else None
    share = f"{tokens / ours.seconds * flops / peak:.1%} of the peak, " if peak else ""
    what = f"{name}, MLM, bf16, {rows} rows of {length}"
    idle = idle_share(lambda: trainer.train([[batch]] * 10))
    return [
        Row(what, f"{tokens / ours.seconds:,.0f} tokens/s", f"{share}{ours.memory:.1f} GiB{idle}"),
        Row(
            f"{what}: transformers, SDPA, compiled",
            f"{tokens / theirs.seconds:,.0f} tokens/s",
            f"ours is {theirs.seconds / ours.seconds:.2f} times as fast; {theirs.memory:.1f} GiB",
        ),
    ]


def fine_tuning(rehearse: bool) -> list[Row]:
    """Real tokens a second of fine-tuning MiniLM on rows of mixed lengths."""
    config = shape("tiny" if rehearse else "MiniLM", 128)
    steps, rows = (2, 4) if rehearse else (40, 32)
    draw = np.random.default_rng(0)
    every = [np.clip(draw.lognormal(3.7, 0.4, rows).astype(int), 8, 128) for _ in range(steps)]
    every = list(np.sort(np.concatenate(every)).reshape(steps, rows))  # length-grouped, as theirs
    with torch.device(DEVICE):
        model = Model(config, Classify(Head("classify", ("a", "b")))).train()
    trainer = bare.Trainer(initialised(model), "system.precision=bf16")
    batches = [[bare.lines(lengths.tolist(), VOCABULARY, DEVICE)] for lengths in every]
    padded = [padded_rows(lengths) for lengths in every]
    peer = Peer("BertForSequenceClassification", config)
    ours, theirs = by_turns(lambda: trainer.train(batches), lambda: peer.train(padded))
    tokens = sum(int(lengths.sum()) for lengths in every)
    what = f"MiniLM, fine-tuning, bf16, {rows} rows of 8 to 128"
    idle = idle_share(lambda: trainer.train(batches[:10]))
    return [
        Row(what, f"{tokens / ours.seconds:,.0f} real tokens/s", f"{ours.memory:.1f} GiB{idle}"),
        Row(
            f"{what}: transformers, SDPA, compiled, length-grouped",
            f"{tokens / theirs.seconds:,.0f} real tokens/s",
            f"ours is {theirs.seconds / ours.seconds:.2f} times as fast; {theirs.memory:.1f} GiB",
        ),
    ]


def padded_rows(lengths: np.ndarray) -> dict[str, Tensor]:
    """Rows of these lengths as transformers takes them, padded to a multiple of 8."""
    longest = -(-int(lengths.max()) // 8) * 8
    mask = torch.arange(longest)[None] < torch.from_numpy(lengths)[:, None]
    ids = torch.randint(VOCABULARY, mask.shape)
    labels = torch.randint(2, (len(lengths),))
    given = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
    return {name: tensor.to(DEVICE) for name, tensor in given.items()}


def initialised(model: Model) -> Model:
    """The model with BERT's initialisation of matrices."""
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, 0.0, 0.02)
    return model


class Peer:
    """A model of transformers at its best: SDPA, compiled, bf16, fused AdamW."""

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
        self.compiled = torch.compile(self.model) if CUDA else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)

    def train(self, batches: list[dict[str, Tensor]]) -> None:
        """Take a step on each batch."""
        for batch in batches:
            self.optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = self.compiled(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()


@dataclass(frozen=True)
class Took:
    """Seconds of the median round, and the peak memory in GiB."""

    seconds: float
    memory: float


def by_turns(*works: Callable[[], None]) -> list[Took]:
    """What pieces of work take, measured by turns, each after one round to warm up."""
    for work in works:
        work()
    taken: list[list[tuple[float, float]]] = [[] for _ in works]
    for _ in range(ROUNDS):
        for work, rounds in zip(works, taken, strict=True):
            if CUDA:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            work()
            if CUDA:
                torch.cuda.synchronize()
            memory = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
            rounds.append((time.perf_counter() - begun, memory))
    return [Took(*sorted(rounds)[len(rounds) // 2]) for rounds in taken]


def idle_share(work: Callable[[], None]) -> str:
    """In words, the share of time in which no kernel runs, by PyTorch's profiler."""
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
    busy, end = 0.0, spans[0][0]
    for begin, finish in spans:
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return f", idle {1 - busy / (end - spans[0][0]):.1%}"


# ------------------------------------------------------------------------------- all of it


# name: the part, and its limit in seconds
PARTS: dict[str, tuple[Callable[[bool], list[Row]], int]] = {
    "operations": (operations, 90),
    "tasks": (tasks, 60),
    "waits": (waits, 60),
    "repeat": (repeat, 120),
    "ranks": (ranks, 90),
    "MiniLM": (speed_of("MiniLM"), 120),
    "BERT-base": (speed_of("BERT-base"), 120),
    "BERT-large": (speed_of("BERT-large"), 150),
    "fine-tuning": (fine_tuning, 150),
}


def main() -> int:
    """Run all parts and write the report. Returns 1 if a part failed."""
    about, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_hour",
        description=about,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="folder for gpu.md and gpu.json")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, on any device")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--fail", choices=PARTS, metavar="PART", help="let a part fail, as a trial")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        if given.part == given.fail:
            raise AssertionError("this part was told to fail")
        print(json.dumps([asdict(row) for row in PARTS[given.part][0](given.rehearse)]))
        return 0
    if not (CUDA or given.rehearse):
        parser.error("there is no CUDA device; --rehearse runs tiny models on the CPU")
    results = {part: of_part(part, given.rehearse, given.fail == part) for part in given.only}
    words = markdown(results)
    print(words)
    if given.output:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "gpu.md").write_text(words, encoding="utf-8")
        (given.output / "gpu.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    return int(any("error" in result for result in results.values()))


def of_part(part: str, rehearse: bool, fail: bool) -> dict[str, Any]:
    """What a part printed, how long it took, and its error if it has one."""
    line = [sys.executable, "-m", "benchmarks.first_hour", "--part", part]
    line += ["--rehearse"] * rehearse + ["--fail", part] * fail
    limit, begun = PARTS[part][1] * (4 if rehearse else 1), time.monotonic()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        line,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own processes too
        process.communicate()
        out, error = "", f"it did not end in {limit} s"
    seconds = round(time.monotonic() - begun, 1)
    print(f"{part}: {seconds} s", file=sys.stderr)
    if process.returncode == 0:
        return {"seconds": seconds, "rows": json.loads(out.splitlines()[-1])}
    return {"seconds": seconds, "error": error[-3000:]}


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The report."""
    lines = ["# On a GPU", "", f"{machine.words()}. PyTorch {torch.__version__}.", ""]
    lines += ["| what | value | |", "|---|---|---|"]
    for part, result in results.items():
        for row in result.get("rows", []):
            lines.append(f"| {row['what']} | {row['value']} | {row['note']} |")
        if "error" in result:
            last = result["error"].strip().splitlines()[-1].replace("|", "\\|")
            lines.append(f"| {part} | **failed** | {last} |")
    seconds = sum(result["seconds"] for result in results.values())
    return "\n".join([*lines, "", f"It took {seconds:.0f} s.", ""])


if __name__ == "__main__":
    sys.exit(main())
