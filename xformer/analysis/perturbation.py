"""Output variance: how far a model's outputs move when noise is added to its parameters.

    python -m xformer.analysis perturbation CHECKPOINT [CHECKPOINT ...] data=STORE out=DIR
    python -m xformer.analysis perturbation ckpt/bert ckpt/bert-clean data=stores/rte \\
      mapping=shift:1000 examples=64 draws=5 out=figures

Gaussian noise of mean 0 and standard deviations 1e-2, 1e-4, 1e-6 and 1e-8 is added to every
parameter of the encoder (Liu et al. 2020; Kao & Lee 2021, F.3, figures 12 and 13). The L2 distance
is that between a token's last hidden states without and with noise, averaged over an example's
tokens; mean and deviation are over examples and draws. Everything is float64: in float32, noise of
1e-8 is less than the spacing of numbers near 1.

T tokens in a batch, N examples, C hidden size.
"""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from xformer.analysis import drawing
from xformer.analysis.examples import (
    Examples,
    ExamplesConfig,
    LoadedModel,
    check_hidden_finite,
    look_inside,
    open_examples,
)
from xformer.analysis.subcommand import Subcommand, publish, with_progress
from xformer.data import style
from xformer.data.errors import BadInput
from xformer.parallel.feed import to_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PerturbationConfig(ExamplesConfig):
    """What noise."""

    examples: int = Field(64, ge=1)
    """How many rows, drawn by `seed`; all of them if the split has no more."""
    deviations: tuple[float, ...] = (1e-2, 1e-4, 1e-6, 1e-8)
    """Standard deviations of the noise, as a list: [1e-2,1e-4]."""
    draws: int = Field(3, ge=1)
    """Draws of the noise at each size; draw i has the same directions at every size."""


SUBCOMMAND = Subcommand("perturbation", PerturbationConfig, __doc__ or "", 1, None)


def noise(name: str, weight: Tensor, seed: int, draw: int) -> Tensor:
    """Standard Gaussian noise for one parameter, a function of (seed, draw, name)."""
    digest = hashlib.sha256(f"noise:{seed}:{draw}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    made = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return made.to(weight.device)


@torch.no_grad()
def perturbed(model: nn.Module, deviation: float, seed: int, draw: int) -> nn.Module:
    """A copy of a float64 model with noise of this standard deviation on every parameter."""
    moved = copy.deepcopy(model)
    for name, weight in moved.named_parameters():
        weight.add_(deviation * noise(name, weight, seed, draw))
    return moved


@torch.no_grad()
def outputs(encoder: nn.Module, loaded: LoadedModel, examples: Examples) -> list[Tensor]:
    """The last hidden states of every example, a list of (L, C). Raises BadInput naming the row
    where one is not finite."""
    found: list[Tensor] = []
    for part in examples.parts():
        batch = loaded.assembler.batch(part)
        packed = to_device(batch, loaded.device)
        hidden = encoder(packed)
        if not torch.isfinite(hidden).all():
            look_inside(loaded, part)  # which says in which layer, unless it is for the noise
        check_hidden_finite(hidden, batch, loaded, "the last layer")
        found += hidden.split(np.diff(batch.cu_seqlens).tolist())
    return found


def output_distances(before: list[Tensor], after: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The L2 distance of each example, and that relative to its outputs' length, (N,) each; both
    are means over the example's tokens."""
    pairs = list(zip(before, after, strict=True))
    apart = [float((b - a).norm(dim=1).mean()) for a, b in pairs]
    size = [float(a.norm(dim=1).mean()) for a, _ in pairs]
    return np.array(apart), np.array(apart) / np.array(size)


# ------------------------------------------------------------------------------ the command


def run(paths: list[str], config: PerturbationConfig) -> None:
    """`python -m xformer.analysis perturbation CHECKPOINT ... key=value ...`"""
    if not config.deviations or min(config.deviations) <= 0:
        raise BadInput("deviations: give positive numbers, such as deviations=[1e-2,1e-4]")
    examples = open_examples(config, paths)
    work = [(loaded, n) for loaded in examples.models for n in range(config.draws)]
    measured: dict[str, dict[float, list[tuple[np.ndarray, np.ndarray]]]] = {}
    encoders = {r.path: copy.deepcopy(r.model.encoder).double() for r in examples.models}
    before = {r.path: outputs(encoders[r.path], r, examples) for r in examples.models}
    for loaded, number in with_progress(work, len(work), "draws"):
        for deviation in config.deviations:
            moved = perturbed(encoders[loaded.path], deviation, config.seed, number)
            after = outputs(moved, loaded, examples)
            of_model = measured.setdefault(loaded.path, {})
            of_model.setdefault(deviation, []).append(output_distances(before[loaded.path], after))
    found: list[dict[str, Any]] = [
        {"name": r.name, "noise": [_summary(d, measured[r.path][d]) for d in config.deviations]}
        for r in examples.models
    ]
    result = {
        "analysis": "perturbation",
        "draws": config.draws,
        "seed": config.seed,
        "distance": "L2 of a token's last hidden states, mean over the tokens of an example",
        **examples.describe(),
        "models": found,
    }
    line = "perturbation " + "; ".join(
        f"{f['name']}: " + ", ".join(f"{n['mean']:.3g} at {n['std']:g}" for n in f["noise"])
        for f in found
    )
    line += f" (L2, {len(examples.rows)} examples, {drawing.many(config.draws, 'draw')} of noise)"
    metrics = {f["name"]: {f"{n['std']:.0e}": n["mean"] for n in f["noise"]} for f in found}
    publish(config, result, draw, line, metrics)


def _summary(deviation: float, drawn: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    absolute, relative = (np.concatenate([pair[i] for pair in drawn]) for i in (0, 1))
    ddof = int(len(absolute) > 1)
    return {
        "std": deviation,
        "mean": float(absolute.mean()),
        "deviation": float(absolute.std(ddof=ddof)),
        "relative": float(relative.mean()),
        "by_draw": [float(a.mean()) for a, _ in drawn],
    }


def draw(result: dict[str, Any]) -> Figure:
    """Bars of the means with deviations, as figures 12 and 13 of the paper."""
    from matplotlib import rcParams

    models = result["models"]
    figure = style.new_figure(6.4, 3.8)
    axes = figure.subplots()
    width = 0.8 / len(models)
    for i, model in enumerate(models):
        places = np.arange(len(model["noise"])) + (i + 0.5) * width - 0.4
        mean = np.array([n["mean"] for n in model["noise"]])
        spread = np.array([n["deviation"] for n in model["noise"]])
        # an error bar that reaches 0 has no lower end on this axis
        below = np.minimum(spread, 0.9 * mean)
        axes.bar(
            places,
            mean,
            width * 0.92,
            color=f"C{i}",
            label=drawing.short(model["name"]),
        )
        axes.errorbar(
            places,
            mean,
            [below, spread],
            fmt="none",
            ecolor=rcParams["text.color"],
            lw=1,
            capsize=3,
        )
    axes.set_yscale("log")
    style.plain_ticks(axes.yaxis)
    axes.set_xticks(range(len(models[0]["noise"])), [f"{n['std']:g}" for n in models[0]["noise"]])
    axes.grid(axis="x", visible=False)
    store = drawing.of_stores(result["data"]["store"])
    axes.set(
        xlabel="standard deviation of the noise on every parameter",
        ylabel="L2 distance of last hidden states",
        title=f"{result['data']['examples']} examples of {store}, "
        f"{drawing.many(result['draws'], 'draw')} of noise (mean ± sd)",
    )
    axes.legend(fontsize=8.5)
    return figure
