"""The optimizer on one flat buffer: parameters, gradients and moments lie end to end, so that a
step is one fused kernel a group and the gradient of all ranks is one reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
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
LARGE = 2**20  # elements of a table of embeddings whose gradient may be sparse


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


@dataclass(frozen=True)
class Group:
    """Pieces of the flat buffer that are stepped together: their weights, moments and step counts,
    one each; `names` of the parameters whose pieces they are, none where a piece holds many."""

    names: list[str]
    weights: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]
    decay: float


class FlatOptimizer:
    """Adam or AdamW over a model's parameters, moved into one flat buffer.

    `gradient` is the flat gradient; its last COUNTS entries travel with it through `reduce` and
    belong to the caller (`counts`). With `sliced` each of the ranks has the moments of its slice of
    the buffer alone and steps that slice (ZeRO-1, Rajbhandari et al. 2020, section 5.1).

    One process on the CPU (`scattered`) has nothing to reduce, and steps wait for its memory: its
    gradients stay where the backward pass makes them, which saves the zeroing of a flat one and the
    addition to it; that of a large table of embeddings is sparse where nothing else makes it dense.
    """

    COUNTS = 4

    def __init__(self, model: nn.Module, config: OptimConfig, ranks: Ranks | None = None,
                 sliced: bool = False):  # fmt: skip
        self.config, self.buffers = config, list(model.buffers())
        self.slices, self.slice = (ranks.world_size, ranks.rank) if ranks and sliced else (1, 0)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        decayed = [(n, p) for n, p in named if p.ndim > 1]
        plain = [(n, p) for n, p in named if p.ndim <= 1]
        self.parameters = dict([*decayed, *plain])
        self.places: dict[str, tuple[int, torch.Size]] = {}
        offset = 0
        for name, parameter in self.parameters.items():
            self.places[name] = (offset, parameter.shape)
            offset += -(-parameter.numel() // ALIGN) * ALIGN
        split = self.places[plain[0][0]][0] if plain else offset
        length = -(-offset // (self.slices * ALIGN)) * ALIGN
        device = named[0][1].device
        self.flat = torch.zeros(length * self.slices, device=device)
        for name, parameter in named:
            parameter.data = self._view(self.flat, name).copy_(parameter.data)
        # this rank's slice of the weights, and its moments
        start = self.slice * length
        self.mine = self.flat[start : start + length]
        self.moments = {name: torch.zeros_like(self.mine) for name in MOMENTS}
        self.scattered = device.type == "cpu" and (ranks is None or ranks.world_size == 1)
        self.rows: dict[str, Tensor] = {}  # a sparse gradient made dense: zero between steps
        if self.scattered:
            self.gradient = torch.zeros(self.COUNTS)
            self.groups = [self._scattered_group(names, decay) for names, decay in
                           ((decayed, config.weight_decay), (plain, 0.0)) if names]  # fmt: skip
            for module in model.modules():
                if isinstance(module, nn.Embedding) and module.weight.numel() >= LARGE:
                    module.sparse = True
            return
        self.gradient = torch.zeros(len(self.flat) + self.COUNTS, device=device)
        for name, parameter in named:
            parameter.grad = self._view(self.gradient, name)
        whole = self.slices == 1
        self.summed = self.gradient[: -self.COUNTS] if whole else torch.zeros_like(self.mine)
        middle = min(max(split - start, 0), length)
        self.groups = [
            self._group([], [part], decay)
            for part, decay in ((slice(middle), config.weight_decay), (slice(middle, length), 0.0))
            if len(self.mine[part])
        ]

    def _scattered_group(self, named: list[tuple[str, nn.Parameter]], decay: float) -> Group:
        starts = [self.places[name][0] for name, _ in named]
        parts = [slice(at, at + p.numel()) for at, (_, p) in zip(starts, named, strict=True)]
        return self._group([name for name, _ in named], parts, decay)

    def _group(self, names: list[str], parts: list[slice], decay: float) -> Group:
        first, second = ([moment[part] for part in parts] for moment in self.moments.values())
        steps = [torch.zeros((), device=self.flat.device) for _ in parts]
        return Group(names, [self.mine[part] for part in parts], first, second, steps, decay)

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
        if self.scattered:
            for parameter in self.parameters.values():
                parameter.grad = None

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
        config, gradients = self.config, self._gradients()
        divisor = count.clamp(min=1.0)
        squares = torch.stack(torch._foreach_norm([g for some in gradients for g in some])).square()
        norm = squares.sum()
        if self.slices > 1:
            dist.all_reduce(norm)
        norm = norm.sqrt() / divisor
        drop = judge(norm)
        if config.clip > 0:
            divisor = divisor / (config.clip / (norm + 1e-6)).clamp(max=1.0)
        for group, some in zip(self.groups, gradients, strict=True):
            # not torch.optim.AdamW: its first use imports torch.compile's machinery, 1.5 s
            adam(
                group.weights, some, group.first, group.second, [], group.steps, fused=True,
                grad_scale=divisor.float(), decoupled_weight_decay=config.name == "adamw", lr=lr,
                weight_decay=group.decay, beta1=config.betas[0], beta2=config.betas[1],
                eps=config.eps, amsgrad=False, maximize=False, found_inf=drop,
            )  # fmt: skip
        self._forget_rows()
        if drop is not None:
            for buffer, before in zip(self.buffers, self.before, strict=True):
                torch.where(drop > 0, before, buffer, out=buffer)
        if self.slices > 1:
            all_gather(self.flat, self.mine.clone())
        return norm

    def _gradients(self) -> list[list[Tensor]]:
        """Of each group the gradients of its pieces, flat."""
        if self.scattered:
            return [[self._of(name) for name in group.names] for group in self.groups]
        ends = torch.tensor([0, *(len(group.weights[0]) for group in self.groups)]).cumsum(0)
        return [[self.summed[a:b]] for a, b in pairwise(ends.tolist())]

    def _of(self, name: str) -> Tensor:
        """The gradient of a parameter, flat and dense."""
        parameter = self.parameters[name]
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            if name not in self.rows:
                self.rows[name] = torch.zeros_like(parameter)
            gradient = self.rows[name].index_copy_(0, gradient.indices()[0], gradient.values())
        return gradient.reshape(-1)

    def _forget_rows(self) -> None:
        """Make the dense forms of sparse gradients zero again."""
        for name, dense in self.rows.items():
            gradient = self.parameters[name].grad
            if gradient is not None and gradient.is_sparse:
                dense.index_fill_(0, gradient.indices()[0], 0.0)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """The moments by parameter name, and the step count: the tensors themselves, or gathered
        from the slices, for which all ranks call it together."""
        for moment, mine in self.moments.items():
            flat = mine if self.slices == 1 else torch.empty_like(self.flat)
            if self.slices > 1:
                all_gather(flat, mine)
            for name in self.places:
                yield f"{moment}.{name}", self._view(flat, name)
        yield "step", self.groups[0].steps[0]

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
        for group in self.groups:
            for steps in group.steps:
                steps.copy_(tensors["step"])


def check_state(tensors: dict[str, Tensor], names: Collection[str]) -> None:
    """Raise BadInput unless these are the moments of parameters of these names."""
    if {f"{m}.{name}" for m in MOMENTS for name in names} | {"step"} != set(tensors):
        raise BadInput("the checkpoint's optimizer state belongs to another model")
