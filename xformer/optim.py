"""The optimizer on one flat buffer: parameters, gradients and moments lie end to end, so that a
step is one fused kernel a group and the gradient of all ranks is one reduction.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.radam import radam

from xformer.config import Settings
from xformer.data.errors import BadInput
from xformer.distributed import Ranks, all_gather, reduce_scatter

# what each optimizer keeps of a parameter; all but Adam's are for Kao & Lee 2021, appendix A
MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
    "adamax": ("exp_avg", "exp_inf"),
    "radam": ("exp_avg", "exp_avg_sq"),
    "novograd": ("exp_avg", "exp_avg_sq"),
}
ALIGN = 64  # elements: every parameter starts where vector loads like it


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Settings):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "adam", "adagrad", "adamax", "radam", "novograd"] = "adamw"
    """AdamW (Loshchilov & Hutter 2019), Adam and AdaMax (Kingma & Ba 2015), Adagrad (Duchi et al.
    2011), RAdam (Liu et al. 2020) or NovoGrad (Ginsburg et al. 2019). All but the first two want
    whole moments: system.shard=none."""
    lr: float = Field(1e-4, gt=0)
    """Highest learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the two moments; Adagrad has none."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.01, ge=0)
    """Decay of matrices and embeddings, never of biases or LayerNorm; with all but adamw an L2
    term."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the rate falls after the warm-up: to 0 in a line, to 0 in a half cosine, not at all."""
    warmup: float = Field(0.0, ge=0)
    """Warm-up in steps, or below 1 as a share of the run."""
    clip: float = Field(1.0, ge=0)
    """Largest norm of the whole gradient; 0 does not clip."""


def learning_rate(config: OptimConfig, before: float, after: float, warmup: float) -> float:
    """The rate of a step that takes a run from the share `before` of its samples to `after`.

    `warmup` is a share too: the rate rises in a line and is full on the step that ends it.
    """
    if after <= warmup:
        return config.lr * after / warmup
    if config.schedule == "constant":
        return config.lr
    left = (1.0 - before) / (1.0 - warmup) if warmup < 1.0 else 1.0
    left = min(max(left, 0.0), 1.0)
    return config.lr * (left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


class FlatOptimizer:
    """An optimizer over a model's parameters, moved into one flat buffer.

    `gradient` is the flat gradient; its last COUNTS entries travel with it through `reduce` and
    belong to the caller (`counts`). With `sliced` each of the ranks has the moments of its slice of
    the buffer alone and steps that slice (ZeRO-1, Rajbhandari et al. 2020, section 5.1).
    """

    COUNTS = 4

    def __init__(self, model: nn.Module, config: OptimConfig, ranks: Ranks | None = None,
                 sliced: bool = False):  # fmt: skip
        self.slices, self.slice = (ranks.world_size, ranks.rank) if ranks and sliced else (1, 0)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        decayed = [(n, p) for n, p in named if p.ndim > 1]
        plain = [(n, p) for n, p in named if p.ndim <= 1]
        self.places: dict[str, tuple[int, torch.Size]] = {}
        offset = 0
        for name, parameter in [*decayed, *plain]:
            self.places[name] = (offset, parameter.shape)
            offset += -(-parameter.numel() // ALIGN) * ALIGN
        split = self.places[plain[0][0]][0] if plain else offset
        length = -(-offset // (self.slices * ALIGN)) * ALIGN
        offset = length * self.slices
        device = named[0][1].device
        self.flat = torch.zeros(offset, device=device)
        self.gradient = torch.zeros(offset + self.COUNTS, device=device)
        for name, parameter in named:
            parameter.data = self._view(self.flat, name).copy_(parameter.data)
            parameter.grad = self._view(self.gradient, name)
        # this rank's slice of weights and summed gradient, its moments
        start = self.slice * length
        self.mine = self.flat[start : start + length]
        whole = self.slices == 1
        self.summed = self.gradient[: -self.COUNTS] if whole else torch.zeros_like(self.mine)
        self.moments = {name: torch.zeros_like(self.mine) for name in MOMENTS[config.name]}
        # where each group lies in the slice, its decay, and the steps it took
        middle = min(max(split - start, 0), length)
        self.groups = [
            (part, decay, torch.zeros((), device=device))
            for part, decay in (
                (slice(0, middle), config.weight_decay),
                (slice(middle, length), 0.0),
            )
            if len(self.mine[part])
        ]
        self.config = config
        self.buffers = list(model.buffers())

    @property
    def counts(self) -> Tensor:
        """(COUNTS,) numbers that are summed over ranks together with the gradient."""
        return self.gradient[-self.COUNTS :]

    def _view(self, flat: Tensor, name: str) -> Tensor:
        offset, shape = self.places[name]
        return flat[offset : offset + shape.numel()].view(shape)

    def zero(self) -> None:
        self.gradient.zero_()

    def reduce(self, world_size: int) -> None:
        """Sum gradient and counts over the ranks, and give all the mean of their buffers (the
        running statistics of batch norms)."""
        if world_size > 1:
            if self.slices == 1:
                dist.all_reduce(self.gradient)
            else:
                reduce_scatter(self.summed, self.gradient[: -self.COUNTS])
                dist.all_reduce(self.counts)
            for buffer in self.buffers:
                dist.all_reduce(buffer)
                buffer /= world_size

    @torch.no_grad()
    def step(self, count: Tensor, lr: float) -> Tensor:
        """Divide the gradient by `count`, clip it, take a step; the norm before clipping, ()."""
        gradient = self.summed
        scale = 1.0 / count.clamp(min=1.0)
        norm = torch.linalg.vector_norm(gradient) * scale
        if self.slices > 1:
            norm = norm.square()
            dist.all_reduce(norm)
            norm = norm.sqrt()
        config = self.config
        if config.clip > 0:
            scale = scale * (config.clip / (norm + 1e-6)).clamp(max=1.0)
        gradient.mul_(scale)
        for part, decay, steps in self.groups:
            # not torch.optim.AdamW: its first use imports torch.compile's machinery, 1.5 s
            moments = [moment[part] for moment in self.moments.values()]
            if config.name not in ("adam", "adamw"):
                self._other(part, decay, steps, moments, lr)
                continue
            first, second = moments
            adam(
                [self.mine[part]], [gradient[part]], [first], [second], [], [steps], fused=True,
                decoupled_weight_decay=config.name == "adamw", lr=lr, weight_decay=decay,
                beta1=config.betas[0], beta2=config.betas[1], eps=config.eps,
                amsgrad=False, maximize=False,
            )  # fmt: skip
        if self.slices > 1:
            all_gather(self.flat, self.mine.clone())
        return norm

    def _other(self, part: slice, decay: float, steps: Tensor, moments: list[Tensor],
               lr: float) -> None:  # fmt: skip
        """A step of one group by another optimizer than Adam."""
        weights, gradient, config = self.mine[part], self.summed[part], self.config
        if config.name == "adagrad":
            adagrad([weights], [gradient], moments, [steps], lr=lr, weight_decay=decay,
                    lr_decay=0.0, eps=config.eps, maximize=False)  # fmt: skip
        elif config.name == "novograd":
            steps += 1
            places = [slice(offset - part.start, offset - part.start + shape.numel())
                      for offset, shape in self.places.values()
                      if part.start <= offset < part.stop]  # fmt: skip
            first, second = moments
            novograd(weights, gradient, first, second, places, bool(steps == 1), lr, config.betas,
                     decay, config.eps)  # fmt: skip
        else:
            step = adamax if config.name == "adamax" else radam
            step([weights], [gradient], [moments[0]], [moments[1]], [steps], beta1=config.betas[0],
                 beta2=config.betas[1], lr=lr, weight_decay=decay, eps=config.eps)  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """The moments by parameter name, and the step count. Where moments are sliced, all ranks
        call it together; those other than rank 0 get no moments."""
        tensors: dict[str, Tensor] = {}
        for moment, mine in self.moments.items():
            flat = mine if self.slices == 1 else torch.empty_like(self.flat)
            if self.slices > 1:
                all_gather(flat, mine)
            if self.slice == 0:
                for name in self.places:
                    tensors[f"{moment}.{name}"] = self._view(flat, name).cpu().clone()
        return {**tensors, "step": self.groups[0][2].cpu().clone()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state()`. Raises BadInput if the parameters were others."""
        check_state(tensors, self.moments, self.places)
        start = self.slice * len(self.mine)
        for moment, mine in self.moments.items():
            flat = mine if self.slices == 1 else torch.zeros_like(self.flat)
            for name in self.places:
                self._view(flat, name).copy_(tensors[f"{moment}.{name}"])
            if self.slices > 1:
                mine.copy_(flat[start : start + len(mine)])
        for _, _, steps in self.groups:
            steps.copy_(tensors["step"])


def novograd(weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor,
             places: Iterable[slice], begin: bool, lr: float, betas: tuple[float, float],
             decay: float, eps: float) -> None:  # fmt: skip
    """A step of NovoGrad (Ginsburg et al. 2019, algorithm 1) on flat tensors, in place.

    Its second moment is one number a layer, the squared norm of the gradient; here each parameter,
    which lies at its place, is a layer, and all its elements of `second` hold that number. In the
    first step, at `begin`, the moments are those of the gradient.
    """
    share, keep = (0.0, 0.0) if begin else (betas[0], betas[1])
    for place in places:
        own, g = second[place], gradient[place]
        own.mul_(keep).add_((1 - keep) * g.square().sum())
        direction = g / (own.sqrt() + eps) + decay * weights[place]
        first[place] = share * first[place] + direction
        weights[place] -= lr * first[place]


def check_state(tensors: dict[str, Tensor], moments: Collection[str],
                names: Collection[str]) -> None:  # fmt: skip
    """Raise BadInput unless these are the moments of parameters of these names."""
    if {f"{m}.{name}" for m in moments for name in names} | {"step"} != set(tensors):
        raise BadInput("the checkpoint's optimizer state belongs to another model")
