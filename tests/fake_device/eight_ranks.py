"""Training steps of the first two or three of eight ranks, without the others and without a GPU.

    benchmarks.fake_cuda.start("fake_device.eight_ranks", FOLDER)

prints, for each rank as a line of JSON, the operations at which the host would wait for a fake
device, the number of micro-batches of each step, and what the rank exchanges with the others. The
group of ranks is PyTorch's own fake one, which exchanges nothing. If one rank exchanged something
else than another, real ranks would wait for each other for ever.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import bare, fake_cuda
from benchmarks.steps import BF16, CLASSES, CNN, FP32, SHAPE, TASKS
from fake_device.splits import LONGEST, TOKENIZER, split_for
from xformer import scoring
from xformer.data.batch import Assembler, Batch
from xformer.data.masking import MaskSchedule
from xformer.data.sampler import Samples, Stream
from xformer.model import hilbert
from xformer.model.config import ModelConfig
from xformer.parallel import replicas
from xformer.parallel.feed import Feed
from xformer.parallel.processes import Ranks
from xformer.tasks.classify import Classify
from xformer.tasks.task import Head, Loss, Model, Task

WORLD, ACCUMULATE, STEPS = 8, 2, 2
ROWS = 13  # rows of a step, for 16 micro-batches: some have no row
LESS = 8  # how many rows fewer the last step has


class Bucketed(DistributedDataParallel):
    """DistributedDataParallel for tensors without content. Three parts of it read the content of
    tensors or a clock of the device: the check of the weights' shapes, the second choice of
    buckets, and the timing."""

    def __init__(self, model: Model, **options: Any):
        with mock.patch.object(dist, "_verify_params_across_processes"):
            super().__init__(model, **options)
        self.register_comm_hook(None, averaged)
        parts: Any = self
        parts.reducer = Once(self.reducer)
        parts.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)


class Once:
    """A reducer that keeps its first buckets."""

    def __init__(self, reducer: Any):
        self.reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def averaged(_, bucket):  # PyTorch refuses annotations as text
    """The average of a bucket over the ranks."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer() / WORLD)
    return done


@contextmanager
def rank_of(number: int) -> Iterator[Ranks]:
    """A rank of the fake group, on the fake device."""
    hilbert._curve_on.cache_clear()  # it holds a tensor of the rank before
    hilbert.hilbert_curve.cache_clear()
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=WORLD)
    try:
        with fake_cuda.device(), mock.patch.object(replicas, "DistributedDataParallel", Bucketed):
            yield Ranks(number, WORLD, torch.device("cuda", 0))
    finally:
        dist.destroy_process_group()


class Alone(Classify):
    """A task whose loss exchanges something, which ranks without rows do not."""

    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        loss = super().loss(model, batch)
        dist.all_reduce(loss.total.detach())
        return loss


class Reading(Classify):
    """A task whose loss reads a number from the device."""

    def loss(self, model: Model, batch: Batch[Tensor]) -> Loss:
        loss = super().loss(model, batch)
        loss.total.item()
        return loss


@dataclass(frozen=True)
class Shared:
    """A task and a model, which the first `ranks` of all ranks train and score here. The first has
    no row in some micro-batch, the second has one in each."""

    task: Task
    ranks: int = 2
    settings: tuple[str, ...] = (BF16,)
    model: dict[str, Any] = field(default_factory=lambda: SHAPE)

    def feed(self, ranks: Ranks) -> Feed:
        """The batches of a rank."""
        assembler = Assembler(split_for(self.task), TOKENIZER, LONGEST)
        samples = Samples(assembler.examples, 0)
        stream = Stream(samples, STEPS * ROWS - LESS, assembler.sizes, ROWS)
        masking = MaskSchedule(0, 0.15, 0.15) if self.task.predicts_masked else None
        return Feed(assembler, stream, ranks, ACCUMULATE, masking)

    def seen(self, number: int) -> dict[str, Any]:
        """What happens on a rank."""
        with rank_of(number) as ranks:
            with torch.device(ranks.device):
                model = Model(ModelConfig(**self.model), self.task).train()
            feed = self.feed(ranks)
            with fake_cuda.Recorder() as begun:
                trainer = bare.Trainer(model, *self.settings, feed=feed)
            with fake_cuda.Recorder() as trained, closing(feed.steps(0)) as steps:
                trainer.follow(steps, STEPS)
            with fake_cuda.Recorder() as scored:
                precision = trainer.recipe.system.precision
                scoring.score(model, feed.assembler, ranks, precision)
            sizes = [len(feed.take(i * ROWS).batches) for i in range(STEPS)]
        return {
            "micro-batches": sizes,
            "waits in training": trained.waits,
            "waits in scoring": scored.waits,
            "exchanged": [begun.collectives, trained.collectives, scored.collectives],
        }


CASES = {
    "mlm": Shared(TASKS["mlm"], 3),
    "choice": Shared(TASKS["choice"]),
    "Hilbert-CNN": Shared(TASKS["classify"], settings=(FP32,), model=CNN),
}
HEAD = Head("classify", CLASSES)
WRONG = {
    "ranks without rows exchange less": Shared(Alone(HEAD)),
    "a loss that reads": Shared(Reading(HEAD)),
}


def main() -> None:
    """Print what is seen of each case on each rank, or its traceback, as a line of JSON."""
    for name, case in {**CASES, **WRONG}.items():
        for rank in range(case.ranks):
            try:
                told: Any = case.seen(rank)
            except Exception:
                told = traceback.format_exc()[-3000:]
            print(json.dumps([name, told]), flush=True)


if __name__ == "__main__":
    main()
