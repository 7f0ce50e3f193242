"""The optimizer on one flat buffer: parameters, gradients and moments lie end to end, so that a
step is one fused kernel a group and the gradient of all ranks is one reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.optim.adam import adam

from xformer.config import Settings
from xformer.data.errors import BadInput
from xformer.distributed import Ranks, all_gather, reduce_scatter

MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGN = 64  # elements: every parameter starts where vector loads like it


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Settings):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "adam"] = "adamw"
    """AdamW (Loshchilov & Hutter 2019) or Adam (Kingma & Ba 2015)."""
    lr: float = Field(1e-4, gt=0)
    """Highest learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.01, ge=0)
    """Decay of matrices and embeddings, never of biases or LayerNorm; with adam an L2 term."""
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


Judge = Callable[[Tensor], Tensor | None]
"""Given the norm () of the gradient before clipping: () above 0 where the step is to be dropped,
weights, moments and their steps staying as they are."""


def keep(norm: Tensor) -> None:
    """The judge who takes every step."""


class FlatOptimizer:
    """Adam or AdamW over a model's parameters, moved into one flat buffer.

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
        self.moments = {name: torch.zeros_like(self.mine) for name in MOMENTS}
        # where each group lies in the slice, its decay, and the steps it took
        middle = min(max(split - start, 0), length)
        self.groups = [
            (part, decay, torch.zeros((), device=device))
            for part, decay in ((slice(middle), config.weight_decay), (slice(middle, length), 0.0))
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
        self.before = [buffer.clone() for buffer in self.buffers]

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
    def step(self, count: Tensor, lr: float, judge: Judge = keep) -> Tensor:
        """Divide the gradient by `count`, clip it, take a step unless `judge` drops it; the norm
        before clipping, ()."""
        gradient = self.summed
        scale = 1.0 / count.clamp(min=1.0)
        norm = torch.linalg.vector_norm(gradient) * scale
        if self.slices > 1:
            norm = norm.square()
            dist.all_reduce(norm)
            norm = norm.sqrt()
        drop = judge(norm)
        config = self.config
        if config.clip > 0:
            scale = scale * (config.clip / (norm + 1e-6)).clamp(max=1.0)
        gradient.mul_(scale)
        for part, decay, steps in self.groups:
            # not torch.optim.AdamW: its first use imports torch.compile's machinery, 1.5 s
            first, second = (moment[part] for moment in self.moments.values())
            adam(
                [self.mine[part]], [gradient[part]], [first], [second], [], [steps], fused=True,
                decoupled_weight_decay=config.name == "adamw", lr=lr, weight_decay=decay,
                beta1=config.betas[0], beta2=config.betas[1], eps=config.eps,
                amsgrad=False, maximize=False, found_inf=drop,
            )  # fmt: skip
        if drop is not None:
            for buffer, before in zip(self.buffers, self.before, strict=True):
                torch.where(drop > 0, before, buffer, out=buffer)
        if self.slices > 1:
            all_gather(self.flat, self.mine.clone())
        return norm

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The moments by parameter name, and the step count: the tensors themselves, or gathered
        from the slices, for which all ranks call it together."""
        for moment, mine in self.moments.items():
            flat = mine if self.slices == 1 else torch.empty_like(self.flat)
            if self.slices > 1:
                all_gather(flat, mine)
            for name in self.places:
                yield f"{moment}.{name}", self._view(flat, name)
        yield "step", self.groups[0][2]

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Continue from a copy of `state()`. Raises BadInput if the parameters were others."""
        check_state(tensors, self.places)
        start = self.slice * len(self.mine)
        for moment, mine in self.moments.items():
            flat = mine if self.slices == 1 else torch.zeros_like(self.flat)
            for name in self.places:
                self._view(flat, name).copy_(tensors[f"{moment}.{name}"])
            if self.slices > 1:
                mine.copy_(flat[start : start + len(mine)])
        for _, _, steps in self.groups:
            steps.copy_(tensors["step"])


def check_state(tensors: dict[str, Tensor], names: Collection[str]) -> None:
    """Raise BadInput unless these are the moments of parameters of these names."""
    if {f"{m}.{name}" for m in MOMENTS for name in names} | {"step"} != set(tensors):
        raise BadInput("the checkpoint's optimizer state belongs to another model")
