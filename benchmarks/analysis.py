"""Time each analysis against a naive implementation, in one run.

    python -m benchmarks.analysis
    python -m benchmarks.analysis --only gradients --rounds 3
    python -m benchmarks.analysis --only million         # a million tokens x 768, constant memory

Weights and rows are random. The models have MiniLM's shape (6 layers, 384 wide, 12 heads, 30,522
pieces). The naive implementations:

    gradients     one backward pass for each example, all gradients in memory, the cosine of each
                  pair; or (product) one matrix product of all gradients with all gradients
    pwcca         both networks in memory, centred, full SVD of each, SVD of U^T V
    jacobian      one backward pass for each hidden unit of the token
    attention     every pair of heads on its own; then the same Hungarian matching
    perturbation  a loop over the examples, which computes their clean outputs again for each size
    capture       one example at a time, all states in memory, written at the end, same compression

The two alternate. The table shows medians of CPU seconds, which other work on the
machine hardly changes, and the difference of the two results.
"""

from __future__ import annotations

import atexit
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.optimize  # noqa: F401  (imported early, because it takes time)
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import machine
from benchmarks.bench import ROOT
from xformer import checkpoint as checkpoints
from xformer.analysis import attention, capture, gradients, jacobian, perturbation, pwcca
from xformer.analysis.examples import inside, open_examples
from xformer.data.arguments import CommandParser, whole_number
from xformer.data.batch import Batch
from xformer.data.store import open_store
from xformer.model.config import ModelConfig
from xformer.monitor import peak_memory
from xformer.parallel.feed import to_device
from xformer.parallel.processes import SystemConfig, start
from xformer.start import run
from xformer.tasks.known import task_of
from xformer.tasks.task import Head, Model

SHAPE = {"vocab_size": 30_522, "layers": 6, "hidden": 384, "heads": 12, "intermediate": 1536}
CONDITION = 5e3  # condition number of the representations
Case = tuple[Callable[[], Any], Callable[[], Any], Callable[[Any, Any], float]]
CHUNK = 4096  # rows of a matrix that arrive together


def model_of(head: Head | None) -> Model:
    """Random weights, in evaluation mode."""
    torch.manual_seed(0)
    model = Model(ModelConfig(**SHAPE), None if head is None else task_of(head)).eval()
    for name, weight in model.named_parameters():
        weight.data = torch.ones_like(weight) if "norm.weight" in name else weight.data
        if weight.ndim > 1:
            weight.data = 0.02 * torch.randn(weight.shape)
        elif "norm.weight" not in name:
            weight.data = torch.zeros_like(weight)
    return model


def packed(lengths: list[int], masked: bool = False) -> Batch[Tensor]:
    """Rows of random tokens, with 15 % of them masked or a label for each row."""
    generator = np.random.default_rng(1)
    T = sum(lengths)
    tokens = torch.from_numpy(generator.integers(1000, 30_000, T))
    positions = torch.cat([torch.arange(length) for length in lengths])
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    places = targets = labels = None
    if masked:
        starts = zip(ends[:-1], lengths, strict=True)
        masks = [
            start + generator.choice(n, max(1, round(0.15 * n)), replace=False)
            for start, n in starts
        ]
        places = torch.from_numpy(np.concatenate([np.sort(mask) for mask in masks]))
        targets = tokens[places]
    else:
        labels = torch.from_numpy(generator.integers(0, 2, len(lengths)))
    return Batch(
        tokens,
        positions,
        torch.zeros_like(tokens),
        torch.from_numpy(ends),
        max(lengths),
        labels,
        places,
        targets,
    )


def alone(batch: Batch[Tensor], i: int) -> Batch[Tensor]:
    """Example i as a batch of its own."""
    a, b = batch.cu_seqlens[i : i + 2].tolist()
    places = targets = None
    if batch.places is not None and batch.targets is not None:
        here = (batch.places >= a) & (batch.places < b)
        places, targets = batch.places[here] - a, batch.targets[here]
    labels = None if batch.labels is None else batch.labels[i : i + 1]
    return Batch(
        batch.tokens[a:b],
        batch.positions[a:b],
        batch.segments[a:b],
        torch.tensor([0, b - a], dtype=torch.int32),
        b - a,
        labels,
        places,
        targets,
    )


def gradient_case(kind: Any, mean: int, pairs: bool = True, count: int = 64) -> Case:
    """`count` examples of about `mean` tokens.

    The naive version takes the cosine of each pair, or without `pairs` one product of all
    gradients.
    """
    model = model_of(Head(kind, ("no", "yes")))
    lengths = np.random.default_rng(2).integers(mean // 2, mean * 3 // 2 + 1, count)
    batch = packed(sorted(lengths.tolist()), kind == "mlm")

    def one_by_one() -> Tensor:
        parameters = [p.requires_grad_() for p in model.parameters()]
        each = torch.empty(count, sum(p.numel() for p in parameters))
        for i in range(count):
            model.zero_grad()
            model.loss(alone(batch, i)).total.backward()
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            torch.cat([part.flatten() for part in parts], out=each[i])
        model.zero_grad()
        if pairs:
            both = combinations(each, 2)
            return torch.stack([F.cosine_similarity(a, b, dim=0) for a, b in both])
        return torch.from_numpy(gradients.cosines((each @ each.T).double())[0])

    def apart(ours: Tensor, theirs: Tensor) -> float:
        return float(np.abs(gradients.cosines(ours)[0] - theirs.double().numpy()).max())

    return lambda: gradients.inner_products(model, batch), one_by_one, apart


def network(rows: int, width: int, seed: int, shared: Tensor) -> Tensor:
    """A network (rows, width) of condition CONDITION; `shared` is added to its first neurons."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    x[:, : shared.size(1)] += shared
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    x *= torch.logspace(0, -float(np.log10(CONDITION)), width)
    return x @ turn + 0.3


def pwcca_case(rows: int, width: int = 768) -> Case:
    """Two networks of `rows` tokens, in float32 as from an encoder."""
    shared = torch.randn(rows, width // 4, generator=torch.Generator().manual_seed(9))
    x, y = network(rows, width, 1, shared), network(rows, width, 2, shared)

    def streamed() -> float:
        pair = pwcca.factor_together(zip(x.split(CHUNK), y.split(CHUNK), strict=True))
        return pwcca.similarity(pair.x, pair.y, pair.inner).pwcca

    def in_memory() -> float:
        a, b = (z.double() - z.double().mean(0) for z in (x, y))
        u, s, v = torch.linalg.svd(a, full_matrices=False)
        q = torch.linalg.svd(b, full_matrices=False)[0]
        p, rho, _ = torch.linalg.svd(u.T @ q)
        weights = (p.T @ (s[:, None] * v)).abs().sum(1)
        return float(weights @ rho / weights.sum())

    return streamed, in_memory, lambda ours, theirs: abs(ours - theirs)


def jacobian_case(length: int = 64) -> Case:
    """One output token of one row."""
    encoder = model_of(None).requires_grad_(False).encoder
    words = encoder.embeddings.word.weight.detach()[: 2 * length : 2].clone()

    def function(x: Tensor) -> Tensor:
        B, L = x.shape[:2]
        each, none = torch.arange(L).repeat(B), torch.zeros(B * L, dtype=torch.int64)
        ends = L * torch.arange(B + 1, dtype=torch.int32)
        batch = Batch(torch.arange(B * L), each, none, ends, L)
        table = {"embeddings.word.weight": x.flatten(0, 1)}
        return torch.func.functional_call(encoder, table, (batch,)).unflatten(0, (B, L))

    def row_by_row() -> Tensor:
        x = words.clone()[None].requires_grad_()
        y = function(x)[0, 0]
        return torch.stack(
            [torch.autograd.grad(unit, x, retain_graph=True)[0].flatten() for unit in y]
        )

    def apart(ours: Tensor, theirs: Tensor) -> float:
        return float((ours - theirs).abs().max() / theirs.abs().max())

    return lambda: jacobian.jacobian_of_token(function, words, 0), row_by_row, apart


def attention_case(examples: int = 16, length: int = 64) -> Case:
    """The maps of one layer of two models, 12 heads each."""
    generator = torch.Generator().manual_seed(3)
    maps = torch.randn(2, examples, 12, length, length, generator=generator).softmax(-1)

    def ours() -> list[float]:
        costs = [attention.map_distances(a, b).double().numpy() for a, b in zip(*maps, strict=True)]
        return [float(cost[attention.match(cost)].mean()) for cost in costs]

    def pair_by_pair() -> list[float]:
        distances = []
        for a, b in zip(*maps, strict=True):
            cost = np.array([[float((p - q).abs().sum(-1).mean()) for q in b] for p in a])
            distances.append(float(cost[attention.match(cost)].mean()))
        return distances

    return ours, pair_by_pair, lambda a, b: max(abs(p - q) for p, q in zip(a, b, strict=True))


def perturbation_case(count: int = 16, length: int = 32) -> Case:
    """Two sizes of noise on all parameters of an encoder, one draw."""
    encoder = model_of(None).encoder.double()
    batch = packed([length] * count)
    sizes = (1e-2, 1e-4)

    @torch.no_grad()
    def ours() -> list[float]:
        before, distances = encoder(batch), []
        for size in sizes:
            moved = perturbation.perturbed(encoder, size, 0, 0)
            distances.append(float((moved(batch) - before).norm(dim=1).mean()))
        return distances

    @torch.no_grad()
    def one_at_a_time() -> list[float]:
        distances = []
        for size in sizes:
            moved = perturbation.perturbed(encoder, size, 0, 0)
            rows = [alone(batch, i) for i in range(count)]
            each = [moved(row) - encoder(row) for row in rows]
            distances.append(float(torch.cat(each).norm(dim=1).mean()))
        return distances

    return ours, one_at_a_time, lambda a, b: max(abs(p - q) for p, q in zip(a, b, strict=True))


def capture_case(examples: int = 256) -> Case:
    """Every layer's states of rows of 16 to 128 tokens, as float16."""
    directory = Path(tempfile.mkdtemp(prefix="bench-capture-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    store, ckpt = directory / "store", directory / "ckpt"
    line = [sys.executable, "preprocess.py", "synthetic", "uniform", "--tokens", "400000"]
    line += ["--lengths", "14:126", "--vocab-size", str(SHAPE["vocab_size"])]
    line += ["--output", str(store)]
    subprocess.run(line, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    checkpoints.save(
        checkpoints.fresh(ModelConfig(**SHAPE), open_store(store).tokenizer(), 0), ckpt
    )
    out, plain = directory / "ours.h5", directory / "plain.h5"
    config = capture.CaptureConfig(
        data=str(store), out=str(out), examples=examples, split="train", overwrite=True
    )

    def streamed() -> Path:
        capture.run([str(ckpt)], config)
        return out

    def in_memory() -> Path:
        chosen = open_examples(config, [str(ckpt)])
        loaded = chosen.models[0]
        states: list[list[Tensor]] = [[] for _ in range(loaded.layers + 1)]
        with torch.no_grad():
            for row in chosen.rows:
                batch = to_device(loaded.assembler.batch(np.array([row])), loaded.device)
                computed = inside(loaded.model.encoder, batch)
                for layer, hidden in zip(states, computed.hidden, strict=True):
                    layer.append(hidden)
        with h5py.File(plain, "w") as h5:
            for i, layer in enumerate(states):
                data = torch.cat(layer).numpy().astype(np.float16)
                h5.create_dataset(
                    f"hidden/{i}",
                    data=data,
                    compression="gzip",
                    compression_opts=1,
                    shuffle=True,
                    chunks=(capture.CHUNK_ROWS, data.shape[1]),
                )
        return plain

    def apart(ours: Path, theirs: Path) -> float:
        with h5py.File(ours) as a, h5py.File(theirs) as b:
            names = [f"hidden/{i}" for i in range(SHAPE["layers"] + 1)]
            return max(float(np.abs(a[n][:].astype(float) - b[n][:]).max()) for n in names)

    return streamed, in_memory, apart


CASES: dict[str, tuple[str, Callable[[], Case]]] = {
    "gradients": (
        "gradients, 64 examples of 8 to 24 tokens, masked words; each pair",
        lambda: gradient_case("mlm", 16),
    ),
    "gradients-middle": (
        "gradients, 64 examples of 16 to 48 tokens, masked words; each pair",
        lambda: gradient_case("mlm", 32),
    ),
    "gradients-long": (
        "gradients, 64 examples of 32 to 96 tokens, masked words; each pair",
        lambda: gradient_case("mlm", 64),
    ),
    "gradients-task": (
        "gradients, 64 examples of 32 to 96 tokens, two classes; each pair",
        lambda: gradient_case("classify", 64),
    ),
    "product": (
        "gradients, 64 examples of 8 to 24 tokens, masked words; one product",
        lambda: gradient_case("mlm", 16, False),
    ),
    "product-long": (
        "gradients, 64 examples of 32 to 96 tokens, masked words; one product",
        lambda: gradient_case("mlm", 64, False),
    ),
    "pwcca": ("PWCCA, 50,000 tokens x 768 twice", lambda: pwcca_case(50_000)),
    "jacobian": ("Jacobian of one output token, 64 tokens", jacobian_case),
    "attention": ("attention maps, 16 examples of 64 tokens", attention_case),
    "capture": ("capture, 7 layers of 256 examples of 16 to 128 tokens", capture_case),
    "perturbation": ("perturbation, 16 examples of 32 tokens, two sizes", perturbation_case),
}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """The CPU seconds that a call took, and its result."""
    begun = time.process_time()
    result = function()
    return time.process_time() - begun, result


def row(name: str, rounds: int) -> str:
    """A line of the table."""
    title, make = CASES[name]
    ours, theirs, apart = make()
    taken: tuple[list[float], list[float]] = ([], [])
    results: list[Any] = [None, None]
    for _ in range(rounds):
        for i, function in enumerate((ours, theirs)):
            seconds, results[i] = timed(function)
            taken[i].append(seconds)
    a, b = (statistics.median(side) for side in taken)
    return f"| {title} | {a:.2f} | {b:.2f} | {b / a:.2f}x | {apart(*results):.0e} |"


def million(rows: int, width: int = 768) -> str:
    """Seconds and peak memory for a million tokens, with one chunk in memory at a time."""

    def chunks() -> Any:
        for number in range(0, rows, CHUNK):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(CHUNK, width, generator=generator)
            y = torch.randn(CHUNK, width, generator=generator) + x
            yield x[: rows - number], y[: rows - number]

    cpu = torch.device("cpu")
    before = peak_memory(cpu)
    making = timed(lambda: [None for _ in chunks()])[0]
    seconds, pair = timed(lambda: pwcca.factor_together(chunks()))
    value = pwcca.similarity(pair.x, pair.y, pair.inner).pwcca
    peak = peak_memory(cpu)
    return (
        f"{rows:,} tokens x {width} twice, streamed: {seconds - making:.0f} s (and "
        f"{making:.0f} to draw them), peak memory {peak:.2f} GiB, {before:.2f} before; "
        f"PWCCA {value:.6f}"
    )


def main() -> None:
    about = (__doc__ or "").splitlines()[0]
    parser = CommandParser(prog="python -m benchmarks.analysis", description=about)
    parser.add_argument(
        "--only",
        nargs="*",
        default=list(CASES),
        choices=[*CASES, "million"],
        help="The parts to run (default: all but million).",
    )
    for name, default, about in (
        ("--rounds", 3, "How often each part is timed"),
        ("--tokens", 1_000_000, "Tokens of the part million"),
        ("--threads", 1, "CPU threads"),
    ):
        about += " (default: %(default)s)."
        parser.add_argument(name, type=whole_number(1), default=default, help=about)
    arguments = parser.parse_args()
    start(SystemConfig(threads=arguments.threads))
    print(
        f"{machine.words()}. {machine.versions()}. Threads: {torch.get_num_threads()}; "
        f"the load average before the start was {machine.load():.0f}."
    )
    print("| what | ours, CPU s | naive | | difference of results |")
    print("|---|---|---|---|---|")
    for name in arguments.only:
        shown = million(arguments.tokens) if name == "million" else row(name, arguments.rounds)
        print(shown, flush=True)


if __name__ == "__main__":
    run(main)
