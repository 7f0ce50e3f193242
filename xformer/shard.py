"""Training state divided among the ranks, for models that do not fit one device.

    system.shard = "optimizer"   each rank keeps the moments of its slice of the flat buffer, and
                                 steps that slice (ZeRO-1, Rajbhandari et al. 2020, section 5.1)
    system.shard = "model"       each rank keeps its rows of every weight, gradient and moment; the
                                 weights of a layer are gathered while it computes (FSDP2)

Checkpoints are those of an undivided run, and either continues the other's. Results are equal but
for rounding: sums over ranks run in another order. One rank divides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adam import adam

from xformer.distributed import Ranks
from xformer.model.heads import Model
from xformer.optim import MOMENTS, FlatOptimizer, OptimConfig, check_state

if TYPE_CHECKING:  # its import takes a second
    from torch.distributed.tensor import DTensor


class ShardedOptimizer:
    """Adam or AdamW on each rank's rows of the weights: FlatOptimizer for a divided model.

    The gradients are summed over the ranks by the backward pass itself.
    """

    def __init__(self, model: Model, config: OptimConfig, ranks: Ranks):
        self.config, self.ranks = config, ranks
        self.parameters = dict(model.named_parameters())
        self.moments = {m: {n: torch.zeros_like(p) for n, p in self.parameters.items()}
                        for m in MOMENTS[config.name]}  # fmt: skip
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
    def step(self, count: Tensor, lr: float) -> Tensor:
        """As FlatOptimizer's."""
        gradients = {name: _local(torch.zeros_like(p) if p.grad is None else p.grad)
                     for name, p in self.parameters.items()}  # fmt: skip
        scale = 1.0 / count.clamp(min=1.0)
        squares = torch.stack([g.square().sum() for g in gradients.values()]).sum()
        norm = self.ranks.sum(squares).sqrt() * scale
        config = self.config
        if config.clip > 0:
            scale = scale * (config.clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(gradients.values()), scale)
        for decayed in (True, False):
            names = [n for n, p in self.parameters.items() if (p.ndim > 1) == decayed]
            first, second = ([_local(m[n]) for n in names] for m in self.moments.values())
            adam(
                [_local(self.parameters[n]) for n in names], [gradients[n] for n in names],
                first, second, [], [self.steps[n] for n in names], fused=True,
                decoupled_weight_decay=config.name == "adamw", lr=lr,
                weight_decay=config.weight_decay if decayed else 0.0,
                beta1=config.betas[0], beta2=config.betas[1], eps=config.eps,
                amsgrad=False, maximize=False,
            )  # fmt: skip
        return norm

    def state(self) -> dict[str, Tensor]:
        """As FlatOptimizer's: whole tensors. All ranks call it together."""
        tensors = {f"{m}.{name}": whole(tensor, self.ranks) for m, moments in self.moments.items()
                   for name, tensor in moments.items()}  # fmt: skip
        return {**tensors, "step": next(iter(self.steps.values())).cpu().clone()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """As FlatOptimizer's."""
        check_state(tensors, self.moments, self.parameters)
        for m, moments in self.moments.items():
            for name, tensor in moments.items():
                _fill(tensor, tensors[f"{m}.{name}"])
        for steps in self.steps.values():
            steps.copy_(tensors["step"])


def place(model: Model, config: OptimConfig, ranks: Ranks,
          shard: str) -> FlatOptimizer | ShardedOptimizer:  # fmt: skip
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


def snapshot(model: Model, optimizer: FlatOptimizer | ShardedOptimizer,
             ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Weights and optimizer state by name, gathered one tensor at a time on rank 0. All ranks call
    it together; what the others get is of no use."""
    if ranks.rank and isinstance(optimizer, FlatOptimizer) and optimizer.slices == 1:
        return {}, {}
    weights = {name: whole(tensor, ranks) for name, tensor in model.state_dict().items()}
    return weights, optimizer.state()


def whole(tensor: Tensor, ranks: Ranks) -> Tensor:
    """A divided tensor gathered on the CPU of rank 0, on the others an empty one."""
    gathered = tensor.full_tensor() if _divided(tensor) else tensor
    return gathered.detach().cpu() if ranks.rank == 0 else torch.empty(0)


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
