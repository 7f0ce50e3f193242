"""Data parallelism: the gradient's average over the ranks, and the sums reduced with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from xformer.data.batch import Batch
from xformer.data.errors import Failure
from xformer.parallel.graphs import Recorder
from xformer.parallel.processes import Ranks
from xformer.tasks.task import Loss, Model


class Sums:
    """Sums over the micro-batches of a step and over the ranks, () each: the loss, the number of
    predictions, how many of them are correct, and how many ranks were told to stop."""

    def __init__(self, device: torch.device, stop_requested: bool = False):
        self.all = torch.zeros(4, device=device)
        self.loss, self.count, self.correct, self.stop_requests = self.all.unbind()  # views
        self.stop_requests += stop_requested

    def add(self, loss: Loss) -> None:
        """Add the loss of a micro-batch."""
        self.loss += loss.total
        self.count += loss.count
        self.correct += loss.correct


class Replicas:
    """A model with a copy on every rank.

    DistributedDataParallel averages the gradients over the ranks during the backward pass of a
    step's last micro-batch. On a single rank this is the model itself. `sample` returns any valid
    micro-batch, and `precision` is the precision of training. If `graphs`, the passes become CUDA
    graphs. They contain no exchange, because every rank meets the shapes of its micro-batches in
    its own order; the gradients are then averaged after the last replay of a step.
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        sample: Callable[[], Batch[Tensor]],
        precision: str = "fp32",
        graphs: bool = False,
    ):
        self.ranks, self.model, self.buffers = ranks, model, list(model.buffers())
        self.precision = precision
        self.recorder = Recorder(model) if graphs else None
        self.before = self.buffers
        self.wrapped: nn.Module = model
        if ranks.world_size == 1 or graphs:
            return
        self.wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # `reduce` averages the buffers, so DistributedDataParallel need not broadcast them. Torch
        # 2.13 deprecates the argument broadcast_buffers, and torch 2.11 has nothing in its place.
        self.wrapped.broadcast_buffers = False
        # The first backward pass decides the order in which gradients are summed. Make it a pass
        # whose gradient is discarded, so that a continued run has the same order as a new one.
        self.begin()
        self.forward_backward(sample(), 0, 1)
        model.zero_grad()
        self.restore(torch.ones((), device=ranks.device))

    def forward_backward(self, batch: Batch[Tensor] | None, number: int, of: int) -> Loss:
        """Run forward and backward for micro-batch `number`, counted from 0, of the `of` in this
        step. Add its gradients to those of the weights, and return its loss. Raises Failure if the
        memory of the GPU does not suffice."""
        last = number + 1 >= of
        try:
            with self._exchange(last):
                if self.recorder is None or batch is None:
                    loss = self._passes(batch)
                else:
                    loss = self.recorder(self._passes, batch, alone=of == 1)
            if last and self.recorder is not None and self.ranks.world_size > 1:
                self._average_gradients()
        except torch.OutOfMemoryError as error:
            more = ", and system.compile=none takes less memory when a new shape comes"
            line = "the GPU has too little memory: batch.accumulate divides a step into smaller "
            line += f"micro-batches{more if self.recorder else ''}"
            raise Failure(line) from error
        return loss

    def _passes(self, batch: Batch[Tensor] | None) -> Loss:
        with self.ranks.autocast(self.precision):
            loss: Loss = self.wrapped(batch)
        loss.total.backward()
        return replace(loss, total=loss.total.detach())

    def begin(self, stop_requested: bool = False) -> Sums:
        """Begin a step: save the buffers (running statistics of batch norms) and return empty sums.
        `stop_requested` says whether this rank was told to stop."""
        self.before = [buffer.clone() for buffer in self.buffers]
        return Sums(self.ranks.device, stop_requested)

    def _exchange(self, last: bool) -> AbstractContextManager[None]:
        """The context for the passes of a micro-batch: only after the `last` do ranks exchange
        gradients."""
        if last or not isinstance(self.wrapped, DistributedDataParallel):
            return nullcontext()
        return self.wrapped.no_sync()

    def _average_gradients(self) -> None:
        """Average the gradients over the ranks, in place. Every rank has a gradient for the same
        weights. Those of a rank without rows are 0."""
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        flat = self.ranks.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        flat /= self.ranks.world_size
        parts = flat.split([gradient.numel() for gradient in gradients])
        means = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
        torch._foreach_copy_(gradients, means)

    def reduce(self, sums: Sums) -> Tensor:
        """Sum the sums over the ranks, and average the buffers over the ranks.

        Returns the divisor of the gradient, (): the predictions of all ranks over the number of
        ranks. The ranks have averaged their gradients, which divided the sum by that number.
        """
        self.ranks.sum(sums.all)
        for buffer in self.buffers if self.ranks.world_size > 1 else ():
            self.ranks.sum(buffer).div_(self.ranks.world_size)
        return sums.count.clamp(min=1.0) / self.ranks.world_size

    def restore(self, drop: Tensor) -> None:
        """Restore the buffers to their state before the step, if `drop` () is above 0."""
        for buffer, before in zip(self.buffers, self.before, strict=True):
            torch.where(drop > 0, before, buffer, out=buffer)
