"""The optimizers of torch.optim, and NovoGrad; the learning-rate schedule; clip and step.

A loss is a sum over predictions, so its gradient is a sum too. The caller divides the result of
`gradient_norm` by the number of predictions, and `clip_and_step` divides the gradient by the same
number. With several ranks it is the number for one rank on average; see `Replicas.reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.optim import Optimizer

from xformer.config import Settings, follows
from xformer.data.errors import BadInput

# the moments that each optimizer keeps; all but adamw and muon are in Kao & Lee 2021, appendix A
MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
    "adamax": ("exp_avg", "exp_inf"),
    "radam": ("exp_avg", "exp_avg_sq"),
    "novograd": ("exp_avg", "exp_avg_sq"),
    "muon": ("exp_avg", "exp_avg_sq"),  # of the weights that it leaves to AdamW
}
BUFFER = "momentum_buffer"  # the only moment of a matrix that Muon trains
# Defaults that differ between optimizers: with Adam, an L2 term as large as AdamW's decay ruins
# training, and NovoGrad's authors never use Adam's betas.
DECAYS = {"adamw": 0.01, "muon": 0.01}
BETAS = {"novograd": (0.95, 0.98)}
LAYERS = "encoder.layers."  # Muon trains the matrices whose names begin so
PIECE = 2**18  # elements per norm on the CPU, where one fp32 sum over millions is off by 5e-4


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Settings):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "adam", "adagrad", "adamax", "radam", "novograd", "muon"] = "adamw"
    """AdamW (Loshchilov & Hutter 2019), Adam and AdaMax (Kingma & Ba 2015), Adagrad (Duchi et al.
    2011), RAdam (Liu et al. 2020) or NovoGrad (Ginsburg et al. 2019). muon: Muon (Jordan et al.
    2024) for the matrices of the layers, with momentum 0.95 and steps of the size of AdamW's (Liu
    et al. 2025), and AdamW for all other weights."""
    lr: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = follows("name", BETAS, (0.9, 0.999))
    """Decay rates of the two moments. Adagrad ignores them."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = follows("name", DECAYS, 0.0, ge=0)
    """Decay of matrices and embeddings, never of biases or LayerNorm. AdamW and Muon decouple it
    from the gradient, and NovoGrad adds it to the normalised gradient. All others add it to the
    gradient itself (an L2 term), which is far stronger than AdamW's decay at the same value."""
    schedule: Literal["linear", "cosine", "constant", "wsd"] = "linear"
    """How the rate falls after the warm-up: linearly to 0, along half a cosine to 0, or not at all.
    wsd (warm-up, stable, decay): it stays until the last optim.decay of the run, then falls
    linearly to 0. The rates before the decay do not depend on the length of the run; see
    train.branch_from."""
    decay: float = Field(0.2, gt=0)
    """With schedule=wsd: length of the decay in steps, or, below 1, as a share of the run."""
    warmup: float = Field(0.0, ge=0)
    """Length of the warm-up in steps, or, below 1, as a share of the run."""
    clip: float = Field(1.0, ge=0)
    """Gradient clipping: the maximum norm of the whole gradient. 0 turns it off."""

    @field_validator("decay", "warmup")
    @classmethod
    def _counts_steps(cls, value: float, info: ValidationInfo) -> float:
        if value > 1 and value != int(value):
            raise ValueError(
                f"optim.{info.field_name}={value:g}: a share of the run is below 1, and a number "
                "of steps is whole"
            )
        return value

    def lengths(self, whole: float, unit: float) -> tuple[float, float]:
        """The lengths of the warm-up and of the decay (0 without schedule=wsd) in a run of length
        `whole`, in steps or samples. A step has the length `unit`."""
        warmup = self.warmup * (whole if self.warmup < 1 else unit)
        decay = self.decay * (whole if self.decay < 1 else unit)
        return warmup, decay if self.schedule == "wsd" else 0.0

    def notes(self) -> list[str]:
        """Lines to print at the start of training: the optimizer, its rate and its weight decay."""
        decay = self.weight_decay
        lines = [f"{self.name}: peak rate {self.lr:g} ({self.schedule}), weight decay {decay:g}"]
        if decay and self.name not in ("adamw", "novograd", "muon"):
            lines.append(
                f"optim.weight_decay={decay:g} with {self.name} is an L2 term, added to the "
                "gradient; adamw decouples it from the gradient"
            )
        return lines


def learning_rate(
    config: OptimConfig, before: float, after: float, whole: float, unit: float = 1.0
) -> float:
    """The rate of a step. `before` and `after` are what is done before and after this step, and
    `whole` is the length of the run. All three count steps, or all three count samples; a step
    then has `unit` samples.

    The rate rises linearly, and the step that ends the warm-up has the full rate.
    """
    warmup, decay = config.lengths(whole, unit)
    if config.schedule != "wsd":  # as shares; with wsd the length must not change the stable phase
        warmup = config.warmup if config.warmup < 1 else warmup / whole
        before, after, whole = before / whole, after / whole, 1.0
    if after <= warmup:
        return config.lr * after / warmup
    if config.schedule == "wsd":
        return config.lr * min(max((whole - before) / decay, 0.0), 1.0)
    if config.schedule == "constant":
        return config.lr
    left = (1.0 - before) / (1.0 - warmup) if warmup < 1.0 else 1.0
    left = min(max(left, 0.0), 1.0)
    return config.lr * (left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


class NovoGrad(Optimizer):
    """NovoGrad (Ginsburg et al. 2019, algorithm 1).

    The second moment of a layer is one number, the squared norm of its gradient. Here each weight
    is a layer, and all elements of its second moment hold that number. In the first step
    both betas count as 0, so the moments start from the first gradient. Weight decay applies in
    this step too.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state, gradient = self.state[weight], weight.grad
                first, second = state["exp_avg"], state["exp_avg_sq"]
                beta1, beta2 = group["betas"] if state["step"] > 0 else (0.0, 0.0)
                second.mul_(beta2).add_((1 - beta2) * gradient.square().sum())
                step = gradient / (second.sqrt() + group["eps"]) + group["weight_decay"] * weight
                first.mul_(beta1).add_(step)
                weight -= group["lr"] * first
                state["step"] += 1


class MuonAndAdamW(Optimizer):
    """torch.optim.Muon for the last group if it has the key `matrices`, and torch.optim.AdamW for
    the others.

    Muon sees the query, key and value weights as three matrices, although they are stored as one.
    It sees the two matrices of a gated MLP (`mlp.up`) as one.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ):
        super().__init__(groups, {"lr": lr})
        others = [group for group in self.param_groups if "matrices" not in group]
        self.adamw = self.muon = None
        if others:
            self.adamw = torch.optim.AdamW(others, betas=betas, eps=eps, fused=True)
            self.adamw.state = self.state
        self.pieces: list[tuple[nn.Parameter, int, nn.Parameter]] = []
        for group in self.param_groups[len(others) :]:
            for name, weight in zip(group["param_names"], group["params"], strict=True):
                parts = weight.detach().chunk(3 if ".qkv." in name else 1)
                self.pieces += [(weight, i, nn.Parameter(part)) for i, part in enumerate(parts)]
            pieces = [piece for *_, piece in self.pieces]
            decay = group["weight_decay"]
            self.muon = torch.optim.Muon(pieces, weight_decay=decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step_scaled(self, divisor: Tensor, drop: Tensor) -> None:
        """Divide the gradient by `divisor` () and take a step. If `drop` () is above 0, nothing
        changes; the host does not wait for it."""
        if self.adamw is not None:
            self.adamw.grad_scale, self.adamw.found_inf = divisor, drop  # type: ignore[attr-defined]
            self.adamw.step()
        if self.muon is None:
            return
        self.muon.param_groups[0]["lr"] = self.param_groups[-1]["lr"]
        for weight, i, piece in self.pieces:
            rows = slice(i * len(piece), (i + 1) * len(piece))
            assert weight.grad is not None
            piece.grad = weight.grad[rows] / divisor
            self.muon.state[piece] = {BUFFER: self.state[weight][BUFFER][rows]}
        weights = self.param_groups[-1]["params"]
        tensors = [tensor for w in weights for tensor in (w.detach(), self.state[w][BUFFER])]
        before = [tensor.clone() for tensor in tensors]
        self.muon.step()
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(drop > 0, old, tensor))


KINDS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
    "radam": torch.optim.RAdam,
    "novograd": NovoGrad,
    "muon": MuonAndAdamW,
}
FUSED = ("adamw", "adam")  # have a fused kernel that reads `grad_scale` and `found_inf`


def build(model: nn.Module, config: OptimConfig) -> Optimizer:
    """The optimizer of all weights that are not frozen, with moments of zero."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    muon, fused = config.name == "muon", config.name in FUSED
    matrices = {n: p for n, p in named if muon and p.ndim == 2 and n.startswith(LAYERS)}
    decayed = [(name, p) for name, p in named if p.ndim > 1 and name not in matrices]
    others = [(name, p) for name, p in named if p.ndim <= 1]
    groups = [
        {"params": some, "weight_decay": decay}
        for some, decay in ((decayed, config.weight_decay), (others, 0.0))
        if some
    ]
    if matrices:
        params, decay = [*matrices.items()], config.weight_decay
        groups.append({"params": params, "weight_decay": decay, "matrices": True})
    options: dict[str, Any] = {"lr": config.lr, "eps": config.eps}
    if config.name != "adagrad":
        options["betas"] = config.betas
    if fused:
        options["fused"] = True
    optimizer: Optimizer = KINDS[config.name](groups, **options)
    # Made here and not by the first step, which may be dropped before a checkpoint is written.
    for name, weight in named:
        moments = (BUFFER,) if name in matrices else MOMENTS[config.name]
        optimizer.state[weight] = {m: torch.zeros_like(weight) for m in moments}
        step = torch.zeros((), device=weight.device if fused or muon else "cpu")
        optimizer.state[weight]["step"] = step
    return optimizer


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradient of each weight."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [weight.grad for weight in weights if weight.grad is not None]


@torch.no_grad()
def gradient_norm(optimizer: Optimizer) -> Tensor:
    """The norm of the whole gradient, ()."""
    pieces = gradients(optimizer)
    if pieces[0].device.type == "cpu":
        pieces = [piece for g in pieces for piece in g.reshape(-1).split(PIECE)]
    # torch's nn.utils.get_total_norm does the same with many more calls, because it also takes
    # tensors of several devices
    return torch.stack(torch._foreach_norm(pieces)).norm()


@torch.no_grad()
def clip_and_step(
    optimizer: Optimizer,
    lr: float,
    divisor: Tensor,
    norm: Tensor,
    clip: float,
    drop: Tensor,
) -> None:
    """Divide the gradient by `divisor` (), clip it to the norm `clip` (0: do not clip), and take a
    step.

    `norm` () must be the norm of the gradient after the division, before clipping.
    If `drop` () is above 0, weights and moments do not change. Adam, AdamW and Muon read `drop` on
    the device; with the other optimizers the host waits for it.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    if clip > 0:
        divisor = divisor / (clip / (norm + 1e-6)).clamp(max=1.0)
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
        # what torch.amp.GradScaler sets
        optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
        optimizer.found_inf = drop  # type: ignore[attr-defined]
        optimizer.step()
    elif isinstance(optimizer, MuonAndAdamW):
        optimizer.step_scaled(divisor.float(), drop)
    elif not drop > 0:
        torch._foreach_div_(gradients(optimizer), divisor.float())
        optimizer.step()


def state(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The moments as "MOMENT.WEIGHT", and the step count as "step"; not copies."""
    groups = optimizer.param_groups
    for group in groups:
        for name, weight in zip(group["param_names"], group["params"], strict=True):
            for moment, tensor in optimizer.state[weight].items():
                if moment != "step":
                    yield f"{moment}.{name}", tensor
    # the first weight's: Muon does not count the steps of its matrices, which come last
    yield "step", optimizer.state[groups[0]["params"][0]]["step"]


@torch.no_grad()
def load_state(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Copy the tensors of an earlier `state()` into the optimizer. Raises BadInput if their names
    are not those of this optimizer's state."""
    own = dict(state(optimizer))
    if own.keys() != tensors.keys():
        name = min(own.keys() ^ tensors.keys())
        raise BadInput(
            f"the checkpoint's optimizer state belongs to another model or optimizer: {name} is in "
            "only one of them; give the settings that the run was made with"
        )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
    for of_weight in optimizer.state.values():
        of_weight["step"].copy_(tensors["step"])
