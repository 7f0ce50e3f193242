"""CUDA graphs: the passes of a micro-batch are recorded once for each shape, and then replayed.

A training step launches hundreds of kernels. The host needs longer to launch a small kernel than
the GPU needs to run it. A replayed graph is a single launch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from xformer.data.batch import Batch
from xformer.data.errors import Failure
from xformer.tasks.task import Loss

Passes = Callable[[Batch[Tensor]], Loss]


@dataclass(frozen=True)
class Recording:
    """The passes of one shape. `replay()` reads `batch`, and writes `loss` and `gradients`."""

    replay: Callable[[], None]
    batch: Batch[Tensor]
    loss: Loss
    gradients: dict[nn.Parameter, Tensor]

    def run(self, batch: Batch[Tensor], alone: bool) -> Loss:
        """The loss of another batch of this shape; see `Recorder.__call__`."""
        torch._foreach_copy_([*_tensors(self.batch).values()], [*_tensors(batch).values()])
        self.replay()
        if alone:
            for weight, gradient in self.gradients.items():
                weight.grad = gradient
            return self.loss
        pairs = [(weight.grad, new) for weight, new in self.gradients.items()]
        if sums := [(old, new) for old, new in pairs if old is not None]:
            torch._foreach_add_([old for old, _ in sums], [new for _, new in sums])
        for weight, gradient in self.gradients.items():
            if weight.grad is None:  # a copy, because the next replay overwrites `gradient`
                weight.grad = gradient.clone()
        return self.loss


class Recorder:
    """Computes the loss and the gradients of micro-batches by CUDA graphs.

    `model` is the one whose gradients are computed. The first micro-batch of a shape runs without a
    graph, which loads kernels and compiles code. The second one is recorded. Dropout depends on
    PyTorch's generator as it does without a graph. All graphs share the memory of their
    activations, and that of their gradients. It is freed with the last reference to the recorder.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.recordings: dict[Any, Recording | None] = {}  # by shape; None: seen once
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def __call__(self, passes: Passes, batch: Batch[Tensor], alone: bool) -> Loss:
        """The loss of a micro-batch. Its gradients are added to those of the weights, or, if it is
        `alone` in its step, take their place. The next call overwrites the result. `passes(batch)`
        runs the forward and the backward pass without a graph. Raises Failure if a graph cannot be
        recorded, and OutOfMemoryError if the memory does not suffice."""
        shape = _shape(batch)
        if shape in self.recordings:
            recording = self.recordings[shape] or self._record(passes, batch)
            self.recordings[shape] = recording
            return recording.run(batch, alone)
        self.recordings[shape] = None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # PyTorch wants it where it will record
            loss = passes(batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def _record(self, passes: Passes, batch: Batch[Tensor]) -> Recording:
        """Record the passes of a batch's shape, without running them or changing a gradient."""
        weights = [*self.model.parameters()]
        before = [weight.grad for weight in weights]
        own: dict[str, Any] = {name: value.clone() for name, value in _tensors(batch).items()}
        batch = replace(batch, **own)
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # an older graph that is freed while this one is recorded would spoil it
        # The graph then gets a workspace of its own. Other programs may free the common one.
        torch._C._cuda_clearCublasWorkspaces()
        for weight in weights:
            weight.grad = None
        try:
            # thread_local: the feed's thread may copy batches to the GPU meanwhile
            with torch.cuda.graph(graph, self.pool, self.stream, "thread_local"):
                loss = passes(batch)
                gradients = self._in_common_memory(weights)
            return Recording(graph.replay, batch, loss, gradients)
        except RuntimeError as error:  # PyTorch cannot compute on this device after that
            cause = error.__context__ or error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise Failure(
                "the forward and backward pass cannot be recorded as a CUDA graph "
                f"({' '.join(str(cause).split())[:200]}); give system.compile=layers or none"
            ) from error
        finally:
            for weight, gradient in zip(weights, before, strict=True):
                weight.grad = gradient

    def _in_common_memory(self, weights: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The gradients of these weights, moved to the memory that all graphs share."""
        new = {weight: weight.grad for weight in weights if weight.grad is not None}
        common = {weight: self.gradients.setdefault(weight, new[weight]) for weight in new}
        if moved := [weight for weight in new if common[weight] is not new[weight]]:
            torch._foreach_copy_([common[w] for w in moved], [new[w] for w in moved])
        return common


def _tensors(batch: Batch[Tensor]) -> dict[str, Tensor]:
    """The tensors of a batch, by field."""
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


def _shape(batch: Batch[Tensor]) -> Any:
    """What a graph cannot change: everything about a batch but the content of its tensors."""
    shapes = [(name, value.shape, value.dtype) for name, value in _tensors(batch).items()]
    return *shapes, batch.longest, batch.together
