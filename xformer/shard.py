"""Training state divided among the ranks, for models that do not fit one device.

    system.shard = "optimizer"   each rank keeps the moments of its slice of the flat buffer, and
                                 steps that slice (ZeRO-1, Rajbhandari et al. 2020, section 5.1)
    system.shard = "model"       each rank keeps its rows of every weight, gradient and moment; the
                                 weights of a layer are gathered while it computes (FSDP2)

Checkpoints are those of an undivided run, and either continues the other's. Results are equal but
for rounding: sums over ranks run in another order. One rank divides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from xformer.distributed import Ranks
from xformer.model.heads import Model
from xformer.optim import (
    MOMENTS,
    FlatOptimizer,
    Judge,
    OptimConfig,
    adam_step,
    check_state,
    keep,
)

if TYPE_CHECKING:  # its import takes a second
    from torch.distributed.tensor import DTensor


class ShardedOptimizer:
    """Adam or AdamW on each rank's rows of the weights: FlatOptimizer for a divided model.

    The gradients are summed over the ranks by the backward pass itself.
    """

    def __init__(self, model: Model, config: OptimConfig, ranks: Ranks):
        self.config, self.ranks = config, ranks
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.moments = {
            m: {n: torch.zeros_like(p) for n, p in self.parameters.items()}
            for m in MOMENTS[config.name]
        }
        self.steps = {n: torch.zeros((), device=ranks.device) for n in self.parameters}
        self.counts = torch.zeros(FlatOptimizer.COUNTS, device=ranks.device)

    def zero(self) -> None:
        self.counts.zero_()
        for parameter in self.parameters.values():
            parameter.grad = None

    def reduce(self, world_size: int) -> None:
        """Sum the counts over the ranks."""
        dist.all_reduce(self.counts)

    @torch.no_grad()
    def step(self, count: Tensor, lr: float, judge: Judge = keep) -> Tensor:
        """As FlatOptimizer's."""
        gradients = {
            name: _local(torch.zeros_like(p) if p.grad is None else p.grad)
            for name, p in self.parameters.items()
        }
        scale = 1.0 / count.clamp(min=1.0)
        squares = torch.stack([g.square().sum() for g in gradients.values()]).sum()
        norm = self.ranks.sum(squares).sqrt() * scale
        drop = judge(norm)
        config = self.config
        if config.clip > 0:
            scale = scale * (config.clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(gradients.values()), scale)
        for decayed in (True, False):
            names = [n for n, p in self.parameters.items() if (p.ndim > 1) == decayed]
            adam_step(
                config,
                [_local(self.parameters[n]) for n in names],
                [gradients[n] for n in names],
                [[_local(m[n]) for n in names] for m in self.moments.values()],
                [self.steps[n] for n in names],
                config.weight_decay if decayed else 0.0,
                lr,
                drop,
            )
        return norm

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """As FlatOptimizer's: whole tensors, for which all ranks call it together."""
        for moment, moments in self.moments.items():
            for name, tensor in moments.items():
                yield f"{moment}.{name}", whole(tensor)
        yield "step", next(iter(self.steps.values()))

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """As FlatOptimizer's."""
        check_state(tensors, self.moments, self.parameters)
        for m, moments in self.moments.items():
            for name, tensor in moments.items():
                _fill(tensor, tensors[f"{m}.{name}"])
        for steps in self.steps.values():
            steps.copy_(tensors["step"])


def place(
    model: Model, config: OptimConfig, ranks: Ranks, shard: str
) -> FlatOptimizer | ShardedOptimizer:
    """Move a model (on the CPU) to the ranks' devices, divided as `shard` says, in training mode.
    Returns its optimizer."""
    model.train()
    if shard != "model" or ranks.world_size == 1:
        return FlatOptimizer(model.to(ranks.device), config, ranks, shard == "optimizer")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    for module in (*model.encoder.layers, model):
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # a sum, as the loss is one
        module.set_force_sum_reduction_for_comms(True)
    for method in ("loss", "logits"):
        register_fsdp_forward_method(model, method)
    return ShardedOptimizer(model, config, ranks)


class Snapshot:
    """Copies weights and optimizer state into memory of rank 0 that is taken once and used again:
    12 bytes a parameter. On CUDA it is pinned, and copying goes on beside the computation."""

    def __init__(self, model: Model, optimizer: FlatOptimizer | ShardedOptimizer, ranks: Ranks):
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.cuda = ranks.device.type == "cuda"
        self.stream = torch.cuda.Stream(ranks.device) if self.cuda else None
        self.copied: torch.cuda.Event | None = None
        self.weights: dict[str, Tensor] = {}
        self.moments: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, moments: bool = True) -> None:
        """Copy what the model and, with `moments`, the optimizer hold. All ranks call it together;
        where state is divided it is gathered one tensor at a time. What was copied before is
        overwritten."""
        optimizer = self.optimizer
        if self.ranks.rank and isinstance(optimizer, FlatOptimizer) and optimizer.slices == 1:
            return
        for name, buffer in self.model.named_buffers():  # the next forward pass changes them
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
            self._copy(self.weights, name, whole(parameter))
        for name, tensor in self.optimizer.state() if moments else ():
            self._copy(self.moments, name, tensor)

    def _copy(self, to: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        if self.ranks.rank == 0:
            if name not in to:
                to[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.cuda)
            to[name].copy_(tensor, non_blocking=True)

    def before_change(self) -> None:
        """Have the device finish copying before it goes on; the host does not wait."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)

    def wait(self) -> None:
        """Wait until all is copied."""
        if self.copied is not None:
            self.copied.synchronize()


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered if it is divided: then all ranks call it together."""
    return (tensor.full_tensor() if _divided(tensor) else tensor).detach()


def load_weights(model: Model, weights: dict[str, Tensor]) -> None:
    """Replace a placed model's weights by whole ones."""
    for name, tensor in model.state_dict().items():
        _fill(tensor, weights[name])


def is_divided(model: Model) -> bool:
    """Whether its weights are divided: then all ranks must pass through it equally often."""
    return any(_divided(parameter) for parameter in model.parameters())


def _divided(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "to_local")


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows."""
    return tensor.to_local() if _divided(tensor) else tensor


@torch.no_grad()
def _fill(tensor: Tensor, content: Tensor) -> None:
    """Copy a whole tensor, of which each rank has a copy, into a divided one."""
    content = content.to(tensor.device)
    if _divided(tensor):
        from torch.distributed.tensor import distribute_tensor

        content = distribute_tensor(
            content, tensor.device_mesh, tensor.placements, src_data_rank=None
        ).to_local()
    _local(tensor).copy_(content)
