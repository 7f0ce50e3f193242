"""A copy of a run's weights and moments, which a thread can write while training continues."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from xformer import optim
from xformer.parallel.processes import Ranks
from xformer.tasks.task import Model


class Snapshot:
    """Copies weights and optimizer state into host memory of rank 0.

    The memory, 12 bytes per parameter, is allocated once and reused. On CUDA it is pinned, and the
    copy runs in parallel with the computation, on a separate stream.
    """

    def __init__(self, model: Model, optimizer: Optimizer, ranks: Ranks):
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.cuda = ranks.device.type == "cuda"
        self.stream = torch.cuda.Stream(ranks.device) if self.cuda else None
        self.copied: torch.cuda.Event | None = None
        self.weights: dict[str, Tensor] = {}
        self.moments: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, moments: bool) -> None:
        """Copy the weights and, with `moments`, the optimizer state. Overwrites the last copy."""
        if self.ranks.rank:
            return
        # copy buffers on the main stream, because the next forward pass changes them
        for name, buffer in self.model.named_buffers():
            self._copy(self.weights, name, buffer)
        if self.stream is None:
            self._copy_all(moments)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._copy_all(moments)
            self.copied = self.stream.record_event()

    def _copy_all(self, moments: bool) -> None:
        for name, parameter in self.model.named_parameters():
            self._copy(self.weights, name, parameter)
        for name, tensor in optim.state(self.optimizer) if moments else ():
            self._copy(self.moments, name, tensor)

    def _copy(self, to: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        if name not in to:
            to[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.cuda)
        to[name].copy_(tensor, non_blocking=True)

    def let_copy_finish(self) -> None:
        """Call this before the optimizer step: the device then finishes the copy first. The host
        does not wait."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)

    def wait(self) -> None:
        """Wait on the host until the copy is complete."""
        if self.copied is not None:
            self.copied.synchronize()
