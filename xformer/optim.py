"""The optimizer on one flat buffer: parameters, gradients and moments lie end to end, so that a
step is one fused kernel a group and the gradient of all ranks is one reduction.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn

from xformer.config import Settings
from xformer.data.errors import BadInput

ALIGN = 64  # elements: every parameter starts where vector loads like it


class OptimConfig(Settings):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "adam"] = "adamw"
    """AdamW (Loshchilov & Hutter 2019) or Adam (Kingma & Ba 2015)."""
    lr: float = Field(1e-4, gt=0)
    """Highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
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


class FlatOptimizer:
    """Adam or AdamW over a model's parameters, moved into one flat buffer.

    `gradient` is the flat gradient; its last COUNTS entries travel with it through `reduce` and
    belong to the caller (`counts`).
    """

    COUNTS = 4

    def __init__(self, model: nn.Module, config: OptimConfig):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        decayed = [(n, p) for n, p in named if p.ndim > 1]
        plain = [(n, p) for n, p in named if p.ndim <= 1]
        self.places: dict[str, tuple[int, torch.Size]] = {}
        offset = 0
        for name, parameter in [*decayed, *plain]:
            self.places[name] = (offset, parameter.shape)
            offset += -(-parameter.numel() // ALIGN) * ALIGN
        split = self.places[plain[0][0]][0] if plain else offset
        device = named[0][1].device
        self.flat = torch.zeros(offset, device=device)
        self.gradient = torch.zeros(offset + self.COUNTS, device=device)
        for name, parameter in named:
            parameter.data = self._view(self.flat, name).copy_(parameter.data)
            parameter.grad = self._view(self.gradient, name)
        groups = []
        for begin, end, decay in ((0, split, config.weight_decay), (split, offset, 0.0)):
            group = nn.Parameter(self.flat[begin:end])
            group.grad = self.gradient[begin:end]
            groups.append({"params": [group], "weight_decay": decay})
        kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
        lr = torch.tensor(config.lr) if device.type == "cuda" else config.lr
        self.optimizer = kinds[config.name](
            groups, lr=lr, betas=config.betas, eps=config.eps, fused=True
        )
        self.clip = config.clip

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
        """Sum gradient and counts over the ranks."""
        if world_size > 1:
            dist.all_reduce(self.gradient)

    def step(self, count: Tensor, lr: float) -> Tensor:
        """Divide the gradient by `count`, clip it, take a step; the norm before clipping, ()."""
        gradient = self.gradient[: -self.COUNTS]
        scale = 1.0 / count.clamp(min=1.0)
        norm = torch.linalg.vector_norm(gradient) * scale
        if self.clip > 0:
            scale = scale * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        gradient.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm

    def state(self) -> dict[str, Tensor]:
        """The moments by parameter name, and the step count."""
        tensors: dict[str, Tensor] = {}
        for moment in ("exp_avg", "exp_avg_sq"):
            flat = self._moment(moment)
            for name in self.places:
                tensors[f"{moment}.{name}"] = self._view(flat, name).cpu().clone()
        first = self.optimizer.param_groups[0]["params"][0]
        tensors["step"] = self.optimizer.state[first]["step"].cpu().clone()
        return tensors

    def _moment(self, moment: str) -> Tensor:
        groups = [group["params"][0] for group in self.optimizer.param_groups]
        return torch.cat([self.optimizer.state[group][moment] for group in groups])

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `state()`. Raises BadInput if the parameters were others."""
        wanted = {f"{m}.{name}" for m in ("exp_avg", "exp_avg_sq") for name in self.places}
        if wanted | {"step"} != set(tensors):
            raise BadInput("the checkpoint's optimizer state belongs to another model")
        flats = {}
        for moment in ("exp_avg", "exp_avg_sq"):
            flats[moment] = torch.zeros_like(self.flat)
            for name in self.places:
                self._view(flats[moment], name).copy_(tensors[f"{moment}.{name}"])
        offset = 0
        for group in self.optimizer.param_groups:
            parameter = group["params"][0]
            end = offset + parameter.numel()
            self.optimizer.state[parameter] = {
                "step": tensors["step"].clone().to(parameter.device),
                **{moment: flat[offset:end].clone() for moment, flat in flats.items()},
            }
            offset = end
