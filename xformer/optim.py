"""The optimizer on one flat buffer: parameters, gradients and moments lie end to end, so that a
step is one fused kernel a group and the gradient of all ranks is one reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.radam import radam

from xformer.config import Settings, follows
from xformer.data.errors import BadInput
from xformer.distributed import Ranks, all_gather, reduce_scatter
from xformer.model import native

# what each optimizer keeps of a parameter; all but Adam's are for Kao & Lee 2021, appendix A
MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
    "adamax": ("exp_avg", "exp_inf"),
    "radam": ("exp_avg", "exp_avg_sq"),
    "novograd": ("exp_avg", "exp_avg_sq"),
}
# defaults that belong to one optimizer alone: an L2 term as large as AdamW's decay ruins Adam's
# steps, and NovoGrad's authors never use Adam's betas
DECAYS = {"adamw": 0.01}
BETAS = {"novograd": (0.95, 0.98)}
ALIGN = 64  # elements: every parameter starts where vector loads like it
PIECE = 2**18  # elements of a gradient whose squares are summed at once
LARGE = 2**20  # elements of a table of embeddings whose gradient may be sparse


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Settings):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "adam", "adagrad", "adamax", "radam", "novograd"] = "adamw"
    """AdamW (Loshchilov & Hutter 2019), Adam and AdaMax (Kingma & Ba 2015), Adagrad (Duchi et al.
    2011), RAdam (Liu et al. 2020) or NovoGrad (Ginsburg et al. 2019). All but the first two want
    whole moments: system.shard=none."""
    lr: float = Field(1e-4, gt=0)
    """Highest learning rate."""
    betas: tuple[Beta, Beta] = follows("name", BETAS, (0.9, 0.999))
    """Decay of the two moments; Adagrad has none."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = follows("name", DECAYS, 0.0, ge=0)
    """Decay of matrices and embeddings, never of biases or LayerNorm. AdamW shrinks the weights
    beside the step, and NovoGrad adds the decay to the normalised gradient. All others add it to
    the gradient itself (an L2 term), which is far stronger than AdamW's decay at the same value."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the rate falls after the warm-up: to 0 in a line, to 0 in a half cosine, not at all."""
    warmup: float = Field(0.0, ge=0)
    """Warm-up in steps, or below 1 as a share of the run."""
    clip: float = Field(1.0, ge=0)
    """Largest norm of the whole gradient; 0 does not clip."""

    def notes(self) -> list[str]:
        """What to say at the start of training: the optimizer, its rate and its weight decay."""
        decay = self.weight_decay
        lines = [f"{self.name}: highest rate {self.lr:g} ({self.schedule}), weight decay {decay:g}"]
        if decay and self.name not in ("adamw", "novograd"):
            lines.append(
                f"optim.weight_decay={decay:g} with {self.name} is an L2 term, added to the "
                "gradient; adamw shrinks the weights beside the step"
            )
        return lines


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
    """Pieces of the flat buffer that are stepped together: where each lies in this rank's slice,
    its weights, moments and step count; `names` of the parameters that the pieces are, none where
    a piece holds many."""

    names: list[str]
    parts: list[slice]
    weights: list[Tensor]
    moments: list[list[Tensor]]
    steps: list[Tensor]
    decay: float


class FlatOptimizer:
    """An optimizer over a model's parameters, moved into one flat buffer.

    `gradient` is the flat gradient; its last COUNTS entries travel with it through `reduce` and
    belong to the caller (`counts`). With `sliced` each of the ranks has the moments of its slice of
    the buffer alone and steps that slice (ZeRO-1, Rajbhandari et al. 2020, section 5.1).

    One process on the CPU (`scattered`) has nothing to reduce, and steps wait for its memory: its
    gradients stay where the backward pass makes them, which saves the zeroing of a flat one and the
    addition to it; that of a large table of embeddings is sparse where nothing else makes it dense.
    """

    COUNTS = 4

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        ranks: Ranks | None = None,
        sliced: bool = False,
    ):
        self.config, self.buffers = config, list(model.buffers())
        self.slices, self.slice = (ranks.world_size, ranks.rank) if ranks and sliced else (1, 0)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        decayed = [name for name, p in named if p.ndim > 1]
        plain = [name for name, p in named if p.ndim <= 1]
        parameters = dict(named)
        self.parameters = {name: parameters[name] for name in (*decayed, *plain)}
        self.places: dict[str, tuple[int, torch.Size]] = {}
        offset = 0
        for name, parameter in self.parameters.items():
            self.places[name] = (offset, parameter.shape)
            offset += -(-parameter.numel() // ALIGN) * ALIGN
        split = self.places[plain[0]][0] if plain else offset
        length = -(-offset // (self.slices * ALIGN)) * ALIGN
        device = named[0][1].device
        self.flat = torch.zeros(length * self.slices, device=device)
        for name, parameter in named:
            parameter.data = self._view(self.flat, name).copy_(parameter.data)
        # this rank's slice of the weights, and its moments
        start = self.slice * length
        self.mine = self.flat[start : start + length]
        self.moments = {name: torch.zeros_like(self.mine) for name in MOMENTS[config.name]}
        self.scattered = device.type == "cpu" and (ranks is None or ranks.world_size == 1)
        # by parameters on the CPU, so that its kernels round alike for any number of processes, and
        # for NovoGrad, whose moments are a layer's
        if (device.type == "cpu" and self.slices == 1) or config.name == "novograd":
            self.groups = [
                self._group(names, [self._part(name) for name in names], decay)
                for names, decay in ((decayed, config.weight_decay), (plain, 0.0))
                if names
            ]
        else:
            middle = min(max(split - start, 0), length)
            halves = (slice(0, middle), config.weight_decay), (slice(middle, length), 0.0)
            self.groups = [
                self._group([], [part], decay) for part, decay in halves if len(self.mine[part])
            ]
        self.rows: dict[str, Tensor] = {}  # a sparse gradient made dense: zero between steps
        if self.scattered:
            self.gradient = torch.zeros(self.COUNTS)
            for module in model.modules():
                if isinstance(module, nn.Embedding) and module.weight.numel() >= LARGE:
                    module.sparse = True
            return
        self.gradient = torch.zeros(len(self.flat) + self.COUNTS, device=device)
        for name, parameter in named:
            parameter.grad = self._view(self.gradient, name)
        whole = self.slices == 1
        self.summed = self.gradient[: -self.COUNTS] if whole else torch.zeros_like(self.mine)

    def _part(self, name: str) -> slice:
        offset, shape = self.places[name]
        return slice(offset, offset + shape.numel())

    def _group(self, names: list[str], parts: list[slice], decay: float) -> Group:
        moments = [[moment[part] for part in parts] for moment in self.moments.values()]
        steps = [torch.zeros((), device=self.flat.device) for _ in parts]
        return Group(names, parts, [self.mine[part] for part in parts], moments, steps, decay)

    @property
    def counts(self) -> Tensor:
        """(COUNTS,) numbers that are summed over ranks together with the gradient."""
        return self.gradient[-self.COUNTS :]

    def _view(self, flat: Tensor, name: str) -> Tensor:
        return flat[self._part(name)].view(self.places[name][1])

    def zero(self) -> None:
        self.gradient.zero_()
        if self.scattered:
            for parameter in self.parameters.values():
                parameter.grad = None
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
        config, gradients = self.config, [self._gradients(group) for group in self.groups]
        divisor = count.clamp(min=1.0)
        norm = _square(self._not_zero(gradients))
        if self.slices > 1:
            dist.all_reduce(norm)
        norm = norm.sqrt() / divisor
        drop = judge(norm)
        if config.clip > 0:
            divisor = divisor / (config.clip / (norm + 1e-6)).clamp(max=1.0)
        for group, some in zip(self.groups, gradients, strict=True):
            if config.name not in ("adam", "adamw"):
                if drop is None or not drop > 0:
                    torch._foreach_div_(some, divisor.float())
                    _other(config, group, some, lr)
                continue
            adam_step(
                config,
                group.weights,
                some,
                group.moments,
                group.steps,
                group.decay,
                lr,
                drop,
                divisor.float(),
            )
        self._forget_rows()
        if drop is not None:
            for buffer, before in zip(self.buffers, self.before, strict=True):
                torch.where(drop > 0, before, buffer, out=buffer)
        if self.slices > 1:
            all_gather(self.flat, self.mine.clone())
        return norm

    def _gradients(self, group: Group) -> list[Tensor]:
        """The gradients of a group's pieces, flat."""
        if self.scattered:
            return [self._of(name) for name in group.names]
        return [self.summed[part] for part in group.parts]

    def _not_zero(self, gradients: list[list[Tensor]]) -> Iterator[Tensor]:
        """The same gradients; of a sparse one its rows alone."""
        for group, some in zip(self.groups, gradients, strict=True):
            for name, dense in zip(group.names or [""] * len(some), some, strict=True):
                found = self.parameters[name].grad if name in self.rows else None
                if found is not None and found.is_sparse:
                    dense = found.values().reshape(-1)
                yield dense

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
        check_state(tensors, self.moments, self.places)
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


def _square(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of the squares of flat gradients, ()."""
    flat = list(gradients)
    if flat[0].is_cuda:
        return torch.stack(torch._foreach_norm(flat)).square().sum()
    if _served(flat):
        total = torch.zeros((), dtype=torch.float64)
        native.call("squares", torch.float32, _addresses(flat), total, len(flat))
        return total.float()
    # on the CPU `dot` takes half the time of a norm; in one sum of millions it is wrong by 1e-3
    return torch.stack([part.dot(part) for g in flat for part in g.split(PIECE)]).sum()


def _served(tensors: list[Tensor]) -> bool:
    """Whether the native kernels take these: their form for the optimizer is of fp32."""
    fp32 = bool(tensors) and all(x.dtype == torch.float32 for x in tensors)
    return fp32 and native.serves(*tensors)


def _addresses(*lists: list[Tensor]) -> Tensor:
    """Where the i-th tensors of lists lie and how long they are, (n, lists + 1)."""
    return torch.tensor(
        [[*(x.data_ptr() for x in some), some[0].numel()] for some in zip(*lists, strict=True)]
    )


def adam_step(
    config: OptimConfig,
    weights: list[Tensor],
    gradients: list[Tensor],
    moments: list[list[Tensor]],
    steps: list[Tensor],
    decay: float,
    lr: float,
    drop: Tensor | None,
    divisor: Tensor | None = None,
) -> None:
    """A fused update by Adam or AdamW, none where `drop` is above 0; `divisor` is of the gradients,
    which may be changed."""
    first, second = moments
    decoupled = config.name == "adamw"
    if _served(weights + gradients):  # torch's kernel writes the divided gradients too
        if drop is None or not drop > 0:
            torch._foreach_add_(steps, 1)
            native.call(
                "adam",
                torch.float32,
                _addresses(weights, gradients, first, second),
                len(weights),
                1.0 if divisor is None else float(divisor),
                lr,
                *config.betas,
                config.eps,
                decay if decoupled else 0.0,
                0.0 if decoupled else decay,
                int(steps[0]),
            )
        return
    # not torch.optim.AdamW: its first use imports torch.compile's machinery, 1.5 s
    adam(
        weights,
        gradients,
        first,
        second,
        [],
        steps,
        fused=True,
        grad_scale=divisor,
        lr=lr,
        decoupled_weight_decay=decoupled,
        weight_decay=decay,
        beta1=config.betas[0],
        beta2=config.betas[1],
        eps=config.eps,
        amsgrad=False,
        maximize=False,
        found_inf=drop,
    )


def _other(config: OptimConfig, group: Group, gradients: list[Tensor], lr: float) -> None:
    """A step of one group by another optimizer than Adam."""
    b1, b2 = config.betas
    if config.name == "adagrad":
        (sums,) = group.moments
        adagrad(
            group.weights,
            gradients,
            sums,
            group.steps,
            lr=lr,
            weight_decay=group.decay,
            lr_decay=0.0,
            eps=config.eps,
            maximize=False,
        )
    elif config.name == "novograd":
        novograd(group, gradients, lr, config.betas, config.eps)
    else:
        first, second = group.moments
        step = adamax if config.name == "adamax" else radam
        step(
            group.weights,
            gradients,
            first,
            second,
            group.steps,
            beta1=b1,
            beta2=b2,
            lr=lr,
            weight_decay=group.decay,
            eps=config.eps,
        )


def novograd(
    group: Group, gradients: list[Tensor], lr: float, betas: tuple[float, float], eps: float
) -> None:
    """A step of NovoGrad (Ginsburg et al. 2019, algorithm 1), in place.

    Its second moment is one number a layer, the squared norm of the gradient; here each parameter
    is a layer, and all its elements of the second moment hold that number. In the first step the
    moments are those of the gradient.
    """
    pieces = zip(group.weights, gradients, *group.moments, group.steps, strict=True)
    for weights, gradient, first, second, steps in pieces:
        share, kept = betas if steps > 0 else (0.0, 0.0)
        second.mul_(kept).add_((1 - kept) * gradient.square().sum())
        first.mul_(share).add_(gradient / (second.sqrt() + eps) + group.decay * weights)
        weights -= lr * first
        steps += 1


def check_state(
    tensors: dict[str, Tensor], moments: Collection[str], names: Collection[str]
) -> None:
    """Raise BadInput unless these are the moments of parameters of these names."""
    if {f"{m}.{name}" for m in moments for name in names} | {"step"} != set(tensors):
        raise BadInput("the checkpoint's optimizer state belongs to another model")
