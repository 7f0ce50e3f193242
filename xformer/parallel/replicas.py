"""One model on several ranks, by torch's DistributedDataParallel, and what travels beside its
gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from xformer.data.batch import Batch
from xformer.parallel.processes import Ranks
from xformer.tasks.task import Loss, Model


class Sums:
    """What is summed over the micro-batches of a step and over the ranks, each (): the loss, what
    it is a sum over, how many predictions are right, and how many ranks were told to stop."""

    def __init__(self, device: torch.device, told: float = 0.0):
        self.all = torch.zeros(4, device=device)
        self.loss, self.count, self.correct, self.told = self.all.unbind()  # views
        self.told += told

    def add(self, loss: Loss) -> None:
        """Add the loss of a micro-batch."""
        self.loss += loss.total.detach()
        self.count += loss.count
        self.correct += loss.correct


class Replicas:
    """A model of which every rank has a copy. Calling it gives the loss of a micro-batch.

    The backward pass of the last micro-batch of a step averages the gradients over the ranks while
    it goes on. On one rank this is the model itself. `sample` makes any micro-batch, and
    `precision` is that of training.
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        sample: Callable[[], Batch[Tensor]],
        precision: str = "fp32",
    ):
        self.ranks, self.model, self.buffers = ranks, model, list(model.buffers())
        self.before = self.buffers
        self.copy: nn.Module = model
        if ranks.world_size == 1:
            return
        self.copy = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # Set here because torch 2.13 deprecates the argument, and torch 2.11 has no other.
        self.copy.broadcast_buffers = False  # `reduce` does it
        # The first backward pass decides in which order gradients are summed. It is a pass that
        # counts nothing, so that the order is the same where a run begins and where it goes on.
        self.begin()
        with ranks.autocast(precision):
            self.copy(sample()).total.backward()
        model.zero_grad()
        self.restore(torch.ones((), device=ranks.device))

    def __call__(self, batch: Batch[Tensor] | None) -> Loss:
        loss: Loss = self.copy(batch)
        return loss

    def begin(self, told: float = 0.0) -> Sums:
        """Begin a step: remember the buffers (the running statistics of batch norms), and give
        empty sums. `told` is 1 if this rank was told to stop."""
        self.before = [buffer.clone() for buffer in self.buffers]
        return Sums(self.ranks.device, told)

    def averaging(self, last: bool) -> AbstractContextManager[None]:
        """Around the passes of a micro-batch: the `last` one of a step averages the gradient."""
        if last or not isinstance(self.copy, DistributedDataParallel):
            return nullcontext()
        return self.copy.no_sync()

    def reduce(self, sums: Sums) -> Tensor:
        """Sum the sums over the ranks, and give all ranks the mean of their buffers. Returns what
        the gradient is to be divided by, (): as the ranks averaged it, the count of one rank."""
        self.ranks.sum(sums.all)
        if self.ranks.world_size > 1:
            for buffer in self.buffers:
                dist.all_reduce(buffer)
                buffer /= self.ranks.world_size
        return sums.count.clamp(min=1.0) / self.ranks.world_size

    def restore(self, drop: Tensor) -> None:
        """Undo what a step did to the buffers, if `drop` () is above 0."""
        for buffer, before in zip(self.buffers, self.before, strict=True):
            torch.where(drop > 0, before, buffer, out=buffer)
