"""The ceiling: a training step that consists only of matrix products and attention.

T tokens, M masked tokens, C hidden size, F inner size, V vocabulary, H heads, D size of a head.

    python -m benchmarks.ceiling '{"store": "trial-lines/store", "init": "mlm/ours", ...}'

It times, for the same batches that train.py takes: every product of the layers and the head, the
two backward products of each, and attention without dropout forward and backward. Attention is the
fastest of our kernel and two PyTorch versions; in bf16, attention in fp32 is tried too. It leaves
out embeddings, biases, norms, activations, dropout, residual sums, the loss, clipping and the
optimizer. Inputs are made before the clock starts, and products write to preallocated memory.
Prints its measurements as one JSON object.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.bench import Took
from xformer import checkpoint as checkpoints
from xformer.data.batch import Assembler
from xformer.data.sampler import Samples
from xformer.data.store import open_store
from xformer.model.config import ModelConfig
from xformer.ops.attention import Layout, attention
from xformer.ops.padding import padded_count


@dataclass(frozen=True)
class Shape:
    """The shape of a batch."""

    tokens: int  # T
    masked: int  # M
    runs: list[tuple[int, int]]  # (number of sequences, length) of neighbours of equal length


def shapes(
    store: Path,
    init: Path,
    rows: int,
    length: int,
    count: int,
    dtype: torch.dtype,
) -> list[Shape]:
    """The shapes of the first batches of `rows` rows that train.py makes from a store. The numbers
    of tokens are rounded up as train.py rounds them for its matrix products in this dtype."""
    cpu = torch.device("cpu")
    data, words = open_store(store), checkpoints.load(init).tokenizer
    assembler = Assembler(data.split("train"), words, length)
    samples = Samples(assembler.split.rows, seed=0)
    batches = []
    for step in range(count):
        chosen, epochs = samples.at(np.arange(step * rows, (step + 1) * rows))
        batch = assembler.masked_batch(chosen, epochs, 0, 0.15)
        assert batch.places is not None
        lengths = np.diff(batch.cu_seqlens).tolist()
        runs = [(len(list(equal)), size) for size, equal in groupby(lengths)]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            tokens, masked = (
                padded_count(len(batch.tokens), cpu),
                padded_count(len(batch.places), cpu),
            )
        batches.append(Shape(tokens, masked, runs))
    return batches


class Products:
    """All matrix products of a step, on random numbers. Each layer has its own weights, so that
    they are read from memory as in a real step."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, every: list[Shape]):
        C, F, V = config.hidden, config.intermediate, config.vocab_size
        T, M = max(s.tokens for s in every), max(s.masked for s in every)
        self.dtype = dtype
        # (inputs, outputs) of qkv, out, up, down of every layer; then of the head, on masked tokens
        self.layers = [(C, 3 * C), (C, C), (C, F), (F, C)] * config.layers
        self.head = [(C, C), (C, V)]
        largest = max(T * max(3 * C, F), M * V)
        self.x, self.y, self.dx = (self._numbers(largest) for _ in range(3))
        self.weights = [self._numbers(a * b).view(b, a) for a, b in [*self.layers, *self.head]]
        self.gradients = [torch.empty_like(weight) for weight in self.weights]

    def _numbers(self, count: int) -> Tensor:
        return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(self.dtype)

    def run(self, shape: Shape) -> None:
        """y = x W^T; then dx = dy W and dW = dy^T x."""
        # after its attention, the last layer computes only the masked tokens: out, up and down
        masked = 3 + len(self.head)
        rows = [shape.tokens] * (len(self.weights) - masked) + [shape.masked] * masked
        sizes = [*self.layers, *self.head]
        for n, (a, b), weight, gradient in zip(
            rows, sizes, self.weights, self.gradients, strict=True
        ):
            x, y, dx = (t[: n * m].view(n, m) for t, m in ((self.x, a), (self.y, b), (self.dx, a)))
            torch.mm(x, weight.t(), out=y)
            torch.mm(y, weight, out=dx)
            torch.mm(y.t(), x, out=gradient)


def attend(config: ModelConfig, shape: Shape, form: str, numbers: Tensor) -> None:
    """Attention of all layers, forward and backward: ours, PyTorch's fused kernel, or explicit. Its
    inputs are read from the first 3 T C `numbers`."""
    C, H, D = config.hidden, config.heads, config.hidden // config.heads
    lengths = [length for n, length in shape.runs for _ in range(n)]
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    packed, T = Layout(ends, max(lengths)), sum(lengths)
    for _ in range(config.layers):
        if form == "ours":
            qkv = numbers[: 3 * T * C].view(T, 3, H, D).requires_grad_()
            out = attention(qkv, packed)
            torch.autograd.grad(out, qkv, numbers[: T * C].view_as(out))
            continue
        for n, length in shape.runs:
            size = n * length * C
            q, k, v = (
                part.view(n, H, length, D).requires_grad_()
                for part in numbers[: 3 * size].split(size)
            )
            if form == "fused":
                out = scaled_dot_product_attention(q, k, v)
            else:
                out = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(D), -1) @ v
            torch.autograd.grad(out, (q, k, v), numbers[:size].view_as(out))


def seconds(work: Callable[[Shape], None], every: list[Shape], warmup: int) -> float:
    """Seconds that the batches after the warm-up take."""
    for shape in every[:warmup]:
        work(shape)
    started = time.perf_counter()
    for shape in every[warmup:]:
        work(shape)
    return time.perf_counter() - started


def measure(
    store: str,
    init: str,
    rows: int,
    length: int,
    warmup: int,
    steps: int,
    threads: int,
    precision: str,
) -> Took:
    """Real tokens per second of a step made of its products and the fastest attention."""
    torch.set_num_threads(threads)
    config = checkpoints.load(init).config
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    every = shapes(Path(store), Path(init), rows, length, warmup + steps, dtype)
    products = Products(config, dtype, every)
    taken = seconds(products.run, every, warmup)
    longest = max(sum(n * length for n, length in shape.runs) for shape in every)
    ones = torch.ones(3 * longest * config.hidden)
    attending = min(
        seconds(partial(attend, config, form=form, numbers=ones.to(each)), every, warmup)
        for form in ("ours", "fused", "explicit")
        for each in {dtype, torch.float32}  # one if they are equal
    )
    tokens = sum(n * length for shape in every[warmup:] for n, length in shape.runs)
    return {"rate": tokens / (taken + attending), "products": taken, "attention": attending}


def main() -> None:
    print(json.dumps(measure(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
