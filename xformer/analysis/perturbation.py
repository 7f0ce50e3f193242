"""Output variance: how much a model's outputs change when noise is added to its parameters.

    python -m xformer.analysis perturbation CHECKPOINT [CHECKPOINT ...] data=STORE out=DIR
    python -m xformer.analysis perturbation ckpt/bert ckpt/bert-clean data=stores/rte \\
      mapping=shift:1000 examples=64 draws=5 out=figures

Gaussian noise is added to every parameter of the encoder, with mean 0 and standard deviations
1e-2, 1e-4, 1e-6 and 1e-8 (Liu et al. 2020; Kao & Lee 2021, F.3, figures 12 and 13). The result is
the L2 distance between a token's last hidden states without and with noise, averaged over an
example's tokens. Its mean and standard deviation are taken over examples and draws of the noise.
All computations are in float64, because noise of 1e-8 is smaller than the spacing of float32
numbers near 1.
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
from xformer.data.display import many
from xformer.data.errors import BadInput
from xformer.tasks.task import to_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Shapes: L tokens of an example, N examples, C hidden size.


class PerturbationConfig(ExamplesConfig):
    """Which noise is added."""

    examples: int = Field(64, ge=1)
    """Number of rows, drawn at random with `seed`, or all rows if the split has fewer."""
    deviations: tuple[float, ...] = (1e-2, 1e-4, 1e-6, 1e-8)
    """Standard deviations of the noise, such as [1e-2,1e-4]."""
    draws: int = Field(3, ge=1)
    """How many times noise is drawn. Every draw is used with each of the standard deviations."""


SUBCOMMAND = Subcommand("perturbation", PerturbationConfig, __doc__ or "", 1, None)


def noise(name: str, weight: Tensor, seed: int, number: int) -> Tensor:
    """Standard Gaussian noise for a parameter. It depends on `seed`, the draw's `number` and the
    parameter's `name`."""
    digest = hashlib.sha256(f"noise:{seed}:{number}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    values = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return values.to(weight.device)


@torch.no_grad()
def perturbed(model: nn.Module, deviation: float, seed: int, number: int) -> nn.Module:
    """A copy of a float64 model with noise of this standard deviation on every parameter."""
    moved = copy.deepcopy(model)
    for name, weight in moved.named_parameters():
        weight.add_(deviation * noise(name, weight, seed, number))
    return moved


@torch.no_grad()
def outputs(encoder: nn.Module, loaded: LoadedModel, examples: Examples) -> list[Tensor]:
    """The last hidden states of every example, a list of (L, C).

    Raises BadInput that names the row if one is not finite.
    """
    states: list[Tensor] = []
    for part in examples.parts():
        batch = loaded.assembler.batch(part)
        packed = to_device(batch, loaded.device)
        hidden = encoder(packed)
        if not torch.isfinite(hidden).all():
            look_inside(loaded, part)  # names the layer if the states are bad even without noise
        check_hidden_finite(hidden, batch, loaded, "the last layer")
        states += hidden.split(np.diff(batch.cu_seqlens).tolist())
    return states


def output_distances(before: list[Tensor], after: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Each example's L2 distance, (N,), and its ratio to the norm of the outputs before, (N,).

    Distances and norms are averaged over the example's tokens. If all outputs before are 0, the
    ratio is NaN.
    """
    pairs = list(zip(before, after, strict=True))
    apart = [float((b - a).norm(dim=1).mean()) for a, b in pairs]
    size = [float(a.norm(dim=1).mean()) or np.nan for a, _ in pairs]
    return np.array(apart), np.array(apart) / np.array(size)


# ------------------------------------------------------------------------------ the command


def run(paths: list[str], config: PerturbationConfig) -> None:
    """`python -m xformer.analysis perturbation CHECKPOINT ... key=value ...`"""
    once = len(set(config.deviations)) == len(config.deviations)
    if not config.deviations or min(config.deviations) <= 0 or not once:
        raise BadInput(
            f"deviations={list(config.deviations)}: give positive numbers, each once, such as "
            "deviations=[1e-2,1e-4]"
        )
    examples = open_examples(config, paths)
    encoders = {m.path: copy.deepcopy(m.model.encoder).double() for m in examples.models}
    before = {m.path: outputs(encoders[m.path], m, examples) for m in examples.models}
    # by model and size of the noise: the distances of each draw
    distances: dict[str, dict[float, list[tuple[np.ndarray, np.ndarray]]]] = {
        m.path: {deviation: [] for deviation in config.deviations} for m in examples.models
    }
    work = [(loaded, number) for loaded in examples.models for number in range(config.draws)]
    for loaded, number in with_progress(work, len(work), "draws"):
        for deviation in config.deviations:
            moved = perturbed(encoders[loaded.path], deviation, config.seed, number)
            try:
                after = outputs(moved, loaded, examples)
            except BadInput:  # without noise the outputs are finite
                raise BadInput(
                    f"deviations: noise of {deviation:g} is too large for {loaded.path}: its "
                    "outputs are not finite; give smaller numbers"
                ) from None
            of_draw = output_distances(before[loaded.path], after)
            distances[loaded.path][deviation].append(of_draw)
    models: list[dict[str, Any]] = [
        {"name": m.name, "noise": [_summary(d, distances[m.path][d]) for d in config.deviations]}
        for m in examples.models
    ]
    result = {
        "analysis": "perturbation",
        "draws": config.draws,
        "seed": config.seed,
        "distance": "L2 of a token's last hidden states, mean over the tokens of an example",
        **examples.describe(),
        "models": models,
    }
    line = "perturbation " + "; ".join(
        f"{m['name']}: " + ", ".join(f"{n['mean']:.3g} at {n['std']:g}" for n in m["noise"])
        for m in models
    )
    counts = f"{many(len(examples.rows), 'example')}, {many(config.draws, 'draw')} of noise"
    line += f" (L2, {counts})"
    metrics = {m["name"]: {_key(n["std"]): n["mean"] for n in m["noise"]} for m in models}
    publish(config, result, draw, line, metrics)


def _key(deviation: float) -> str:
    """The name of a metric: "1e-02" for 0.01, and "0.012", which has two digits, as it is."""
    short = f"{deviation:.0e}"
    return short if float(short) == deviation else f"{deviation:g}"


def _summary(deviation: float, of_draws: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """The distances for noise of one size, over examples and draws. `relative` is None if the
    outputs without noise are 0."""
    absolute, relative = (np.concatenate([draw[i] for draw in of_draws]) for i in (0, 1))
    ratio = float(relative.mean())
    return {
        "std": deviation,
        **drawing.spread(absolute),
        "relative": ratio if np.isfinite(ratio) else None,
        "by_draw": [float(a.mean()) for a, _ in of_draws],
    }


def draw(result: dict[str, Any]) -> Figure:
    """Bars of the means with deviations, as in Kao & Lee 2021, figures 12 and 13."""
    from matplotlib import rcParams

    models = result["models"]
    figure = style.new_figure(6.4, 3.8)
    axes = figure.subplots()
    width = 0.8 / len(models)
    for i, model in enumerate(models):
        places = np.arange(len(model["noise"])) + (i + 0.5) * width - 0.4
        mean = np.array([n["mean"] for n in model["noise"]])
        above = np.array([n.get("deviation", np.nan) for n in model["noise"]])  # NaN: no bar
        # An error bar cannot reach 0 on a logarithmic axis.
        below = np.minimum(above, 0.9 * mean)
        axes.bar(places, mean, width * 0.92, color=f"C{i}", label=drawing.short(model["name"]))
        axes.errorbar(
            places, mean, [below, above], fmt="none", ecolor=rcParams["text.color"], lw=1, capsize=3
        )
    axes.set_yscale("log")
    style.plain_ticks(axes.yaxis)
    axes.set_xticks(range(len(models[0]["noise"])), [f"{n['std']:g}" for n in models[0]["noise"]])
    axes.grid(axis="x", visible=False)
    store = drawing.of_stores(result["data"]["store"])
    axes.set(
        xlabel="standard deviation of the noise on every parameter",
        ylabel="L2 distance of last hidden states",
        title=f"{many(result['data']['examples'], 'example')} of {store}, "
        f"{many(result['draws'], 'draw')} of noise (mean ± sd)",
    )
    axes.legend(fontsize=8.5)
    return figure
