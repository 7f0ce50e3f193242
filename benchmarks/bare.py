"""The training loop alone: without a store, a run directory, a log or checkpoints.

It trains on batches that are already on the device. So a measurement contains only the step, and a
step can run without files and on tensors without content (benchmarks/fake_cuda.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from xformer import optim
from xformer.config import load
from xformer.data.batch import Batch
from xformer.guard import Guard
from xformer.ops.attention import layout
from xformer.parallel.processes import Ranks
from xformer.parallel.replicas import Replicas
from xformer.recipe import Recipe
from xformer.run import State
from xformer.tasks.task import Model
from xformer.train import loop

PLAIN = ("pretrain/smoke", "data=none", "run=none", "system.precision=fp32")


class Session:
    """The part of a session that the loop needs. Nothing is ever due: no log, no checkpoint."""

    def __init__(self, recipe: Recipe, ranks: Ranks, steps: int):
        self.setup = SimpleNamespace(recipe=recipe, ranks=ranks)
        self.state, self.steps, self.told = State(), steps, 0.0
        self.snapshot = SimpleNamespace(before_change=lambda: None)
        self.monitor = None  # used only at numerical trouble, which is an error here

    @property
    def done(self) -> bool:
        """Whether the last step is taken."""
        return self.state.step >= self.steps

    def part(self, name: str) -> AbstractContextManager[None]:
        """Around a part of a step that a profile names."""
        return nullcontext()

    def rate(self, step: object) -> float:
        """The learning rate."""
        return 1e-4

    def advance(self, step: object, told: object) -> SimpleNamespace:
        """Count a step."""
        self.state.step += 1
        return SimpleNamespace(anything=False, log=False, validation=False, checkpoint=False)

    def log(self, rate: float, sums: object) -> None:
        """Log nothing."""

    def keep(self, due: object, best: bool) -> None:
        """Keep nothing."""

    def stop_if_told(self, due: object) -> None:
        """Go on."""


class Trainer:
    """A model and its optimizer, trained in fp32 by the project's own loop. `settings` are those of
    a recipe, such as "optim.name=adam" or "system.precision=bf16"."""

    def __init__(self, model: Model, *settings: str):
        self.recipe = load(Recipe, [*PLAIN, *settings])
        device = next(model.parameters()).device
        self.ranks = Ranks(0, 1, device)
        self.optimizer = optim.build(model, self.recipe.optim)
        self.model = Replicas(model, self.ranks, lambda: None, self.recipe.system.precision)  # type: ignore[arg-type, return-value]
        self.guard = Guard(self.recipe.train.spike, State(), device)

    def train(self, steps: Sequence[list[Batch[Tensor]]]) -> None:
        """Take steps. Each is a list of micro-batches."""
        session: Any = Session(self.recipe, self.ranks, len(steps))
        self.guard.state = session.state
        every: Any = ((None, batches) for batches in steps)
        loop(every, self.model, self.optimizer, session, self.guard, 0)
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


def lines(lengths: Sequence[int], vocab_size: int, device: str = "cuda") -> Batch[Tensor]:
    """A batch of rows of these lengths, of random tokens, with a class for each row."""
    tokens = sum(lengths)
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    where = layout(ends, device)
    position = torch.cat([torch.arange(length) for length in lengths]).to(device)
    return Batch(
        tokens=torch.randint(vocab_size, (tokens,), device=device),
        positions=position,
        segments=torch.zeros(tokens, dtype=torch.int64, device=device),
        cu_seqlens=where.cu_seqlens,
        longest=where.longest,
        labels=torch.randint(2, (len(lengths),), device=device),
    )
