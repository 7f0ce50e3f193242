"""How many kernels a training step launches, how many are casts, and how many bytes they move.

    python -m benchmarks.launches

It needs no GPU: the step runs on tensors without content (benchmarks/fake_cuda.py). An operation of
PyTorch counts as one launch, unless it is a view or an allocation. Bytes are those of
the inputs and outputs of every operation except matrix products and attention.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks import fake_cuda
from xformer.data.arguments import CommandParser
from xformer.start import run

if TYPE_CHECKING:
    from xformer.tasks.task import Task

MODELS = ("BERT-base", "BERT-large", "MiniLM")  # in benchmarks.bare.SHAPES
BATCHES = ((64, 128), (16, 512))  # rows, and tokens of a row


def main() -> None:
    """Print the table."""
    CommandParser(
        prog="python -m benchmarks.launches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    if fake_cuda.LIBRARY not in os.environ:
        with TemporaryDirectory() as folder:
            process = fake_cuda.start("benchmarks.launches", Path(folder))
            print(process.communicate()[0], end="")
            sys.exit(process.returncode)
    print("| step in bf16 | kernels | casts | others' GB | host waits |")
    print("|---|---|---|---|---|")
    for name in MODELS:
        for rows, length in BATCHES:
            seen = step(name, rows, length)
            kernels, casts = len(seen.operations), sum(one.is_cast for one in seen.operations)
            moved = sum(one.bytes for one in seen.operations if not one.is_product) / 1e9
            waits = json.dumps(seen.waits) if seen.waits else "none"
            print(
                f"| {name} MLM, {rows} x {length} | {kernels} | {casts} | {moved:.1f} | {waits} |"
            )


def task(name: str) -> Task:
    """The task of a step: "mlm", or "classify" with two classes."""
    from xformer.tasks.known import task_of
    from xformer.tasks.task import Head

    return task_of(Head(name, ("a", "b") if name == "classify" else ()))


def step(name: str, rows: int, length: int, trained: Task | None = None) -> fake_cuda.Recorder:
    """The operations that a training step of a model in benchmarks.bare.SHAPES runs on a GPU, by
    default of MLM."""
    import torch

    from benchmarks import bare
    from xformer.tasks.task import Model

    with fake_cuda.device():
        with torch.device("cuda"):
            model = Model(bare.shape(name), trained or task("mlm")).train()
        batch = bare.full_rows(rows, length, bare.MASKED, bare.VOCABULARY)
        trainer = bare.Trainer(model, "system.precision=bf16")
        with fake_cuda.Recorder() as seen:
            trainer.train([[batch]])
    return seen


if __name__ == "__main__":
    run(main)
