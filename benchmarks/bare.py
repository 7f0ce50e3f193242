"""The training loop alone: without a store, a run directory, a log or checkpoints.

It trains on batches that are already on the device. So a measurement contains only the step, and a
step can run without files and on tensors without content (benchmarks/fake_cuda.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xformer import optim
from xformer.config import load
from xformer.data.batch import Batch
from xformer.guard import Guard
from xformer.model.config import ModelConfig
from xformer.parallel.compiled import GRAPHS, compile_parts
from xformer.parallel.feed import Feed
from xformer.parallel.processes import Ranks
from xformer.parallel.replicas import Replicas
from xformer.recipe import Recipe
from xformer.run import State
from xformer.session import Due
from xformer.setup import Setup
from xformer.tasks.task import Model
from xformer.train import loop

PLAIN = ("pretrain/smoke", "data=none", "run=none", "system.precision=fp32")
VOCABULARY, MASKED = 30_522, 0.15  # BERT's
SHAPES = {  # layers, hidden size, heads, inner size of the MLP
    "MiniLM": (6, 384, 12, 1536),
    "BERT-base": (12, 768, 12, 3072),
    "BERT-large": (24, 1024, 16, 4096),
    "tiny": (2, 64, 4, 128),
}


def shape(name: str) -> ModelConfig:
    """The config of a model in SHAPES."""
    layers, hidden, heads, intermediate = SHAPES[name]
    return ModelConfig(
        vocab_size=VOCABULARY,
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=intermediate,
    )


class Session:
    """The part of a session that the loop needs. Nothing is ever due: no log, no checkpoint."""

    def __init__(self, recipe: Recipe, ranks: Ranks, steps: int):
        setup: Any = SimpleNamespace(recipe=recipe, ranks=ranks)
        setup.seed_dropout = partial(Setup.seed_dropout, setup)
        self.setup = setup
        self.state, self.steps, self.signals = State(), steps, list[int]()
        self.snapshot = SimpleNamespace(let_copy_finish=lambda: None)
        self.monitor = None  # used only at numerical trouble, which is an error here

    @property
    def done(self) -> bool:
        """Whether the last step has been taken."""
        return self.state.step >= self.steps

    def part(self, name: str) -> AbstractContextManager[None]:
        """A context for a part of a step that a profile would name."""
        return nullcontext()

    def rate(self, step: object) -> float:
        """The learning rate."""
        return 1e-4

    def advance(self, step: object, stop_requests: object) -> Due:
        """Count a step."""
        self.state.step += 1
        return Due()

    def log(self, rate: float, sums: object) -> None:
        """Log nothing."""

    def keep(self, due: object, best: bool) -> None:
        """Keep nothing."""

    def stop_if_told(self, due: object) -> None:
        """Do not stop."""


class Trainer:
    """A model and its optimizer, trained in fp32 by the project's own loop. `settings` are those of
    a recipe, such as "optim.name=adam" or "system.precision=bf16". With a `feed` it is one of the
    feed's ranks."""

    def __init__(self, model: Model, *settings: str, feed: Feed | None = None):
        self.recipe = load(Recipe, [*PLAIN, *settings])
        device = next(model.parameters()).device
        self.ranks = Ranks(0, 1, device) if feed is None else feed.ranks
        self.optimizer = optim.build(model, self.recipe.optim)
        sample: Any = feed and feed.sample
        system = self.recipe.system
        graphs = system.compile in GRAPHS and device.type == "cuda"
        self.model = Replicas(model, self.ranks, sample, system.precision, graphs)
        self.guard = Guard(self.recipe.train.spike, State(), device)

    def compile(self, batch: Batch[Tensor]) -> str:
        """Compile the parts of the model that system.compile names, and try them on a batch.
        Returns why that failed, or ""."""
        system = self.recipe.system
        return compile_parts(
            self.model.model, system.compile, self.ranks, lambda: batch, system.precision
        )

    def train(self, steps: Sequence[list[Batch[Tensor]]]) -> None:
        """Take steps. Each is a list of micro-batches."""
        self.follow(((None, batches) for batches in steps), len(steps))

    def follow(self, steps: Any, count: int) -> None:
        """Take `count` steps of a feed: `steps` yields pairs of a step and its micro-batches."""
        session: Any = Session(self.recipe, self.ranks, count)
        self.guard.state = session.state
        loop(steps, self.model, self.optimizer, session, self.guard, 0)
        self.guard.unread.clear()  # the loop waits for a device only if something is due


def full_rows(
    rows: int, length: int, masked: float, vocab_size: int, device: str = "cuda"
) -> Batch[Tensor]:
    """A batch of full rows of random tokens, a share of them masked, with a class for each row."""
    tokens, places = rows * length, int(rows * length * masked)

    def numbers(count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), device=device)

    return Batch(
        tokens=numbers(tokens, vocab_size),
        positions=torch.arange(tokens, device=device) % length,
        segments=torch.zeros(tokens, dtype=torch.int64, device=device),
        cu_seqlens=torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device),
        longest=length,
        labels=numbers(rows, 2),
        places=torch.arange(places, device=device) * (tokens // max(1, places)),
        targets=numbers(places, vocab_size),
    )


def lines(lengths: Sequence[int], vocab_size: int) -> Batch[np.ndarray]:
    """A batch of rows of these lengths, of random tokens, with a class and a number for each row,
    as a run has them: torch.compile may look at every field."""
    draw = np.random.default_rng(len(lengths))
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Batch(
        tokens=draw.integers(0, vocab_size, ends[-1], np.int32),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        segments=np.zeros(ends[-1], np.int32),
        cu_seqlens=ends,
        longest=max(lengths),
        labels=draw.integers(0, 2, len(lengths)),
        rows=np.arange(len(lengths)),
    )
