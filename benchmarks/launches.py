"""How many kernels a training step launches, how many are casts, and how many bytes they move.

    python -m benchmarks.launches

It needs no GPU: the step runs on tensors without content (benchmarks/fake_cuda.py). An operation of
PyTorch counts as one launch, unless it is a view or an allocation. Bytes are those of
the inputs and outputs of every operation except matrix products and attention.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks import fake_cuda

if TYPE_CHECKING:
    from xformer.model.config import ModelConfig
    from xformer.tasks.task import Task

# layers, hidden size, heads, inner size of the MLP
MODELS = {
    "BERT-base MLM": (12, 768, 12, 3072),
    "BERT-large MLM": (24, 1024, 16, 4096),
    "MiniLM MLM": (6, 384, 12, 1536),
}
SHAPES = ((64, 128), (16, 512))
VOCABULARY, MASKED = 30_522, 0.15


def main() -> None:
    """Print the table."""
    if fake_cuda.LOADED not in os.environ:
        with TemporaryDirectory() as folder:
            process = fake_cuda.start("benchmarks.launches", Path(folder))
            print(process.communicate()[0], end="")
            sys.exit(process.returncode)
    print("| step in bf16 | kernels | casts | others' GB | host waits |")
    print("|---|---|---|---|---|")
    for name, shape in MODELS.items():
        for rows, length in SHAPES:
            seen = step(*shape, rows, length)
            kernels, casts = len(seen.operations), sum(one.is_cast for one in seen.operations)
            moved = sum(one.bytes for one in seen.operations if not one.is_product) / 1e9
            waits = json.dumps(seen.waits) if seen.waits else "none"
            print(f"| {name}, {rows} x {length} | {kernels} | {casts} | {moved:.1f} | {waits} |")
            if "-v" in sys.argv:
                print(Counter(one.name for one in seen.operations))


def config(layers: int, hidden: int, heads: int, intermediate: int) -> ModelConfig:
    """A model of this shape."""
    from xformer.model.config import ModelConfig

    return ModelConfig(
        vocab_size=VOCABULARY,
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=intermediate,
    )


def task(name: str) -> Task:
    """The task of a step: "mlm", or "classify" with two classes."""
    from xformer.tasks.known import task_of
    from xformer.tasks.task import Head

    made = task_of(Head(name, ("a", "b") if name == "classify" else ()))
    assert made is not None
    return made


def step(
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
    rows: int,
    length: int,
    trained: Task | None = None,
) -> fake_cuda.Recorder:
    """The operations that a training step of this shape runs on a GPU, by default of MLM."""
    import torch

    from benchmarks import bare
    from xformer.tasks.task import Model

    with fake_cuda.device():
        with torch.device("cuda"):
            shape = config(layers, hidden, heads, intermediate)
            model = Model(shape, trained or task("mlm")).train()
        batch = bare.full_rows(rows, length, MASKED, VOCABULARY)
        trainer = bare.Trainer(model, "system.precision=bf16")
        with fake_cuda.Recorder() as seen:
            trainer.train([[batch]])
    return seen


if __name__ == "__main__":
    main()
