"""Accuracy on minimal pairs, such as BLiMP: over the training of runs, and by phenomenon.

    python -m xformer.analysis blimp RUN|CHECKPOINT ... data=BLiMP.zip out=DIR
    python -m xformer.analysis blimp runs/english runs/brackets micro/english data=BLiMP.zip \\
      pairs=100 tokenizer=micro/english out=figures

A run that was trained with train.keep_at has a curve: all of its kept checkpoints are scored. Any
other run or checkpoint is scored once, and is a dashed line. The second panel compares the last
checkpoints of all by phenomenon. Runs or checkpoints that are given the same name, such as several
seeds, are averaged, and a band shows their lowest and highest accuracy. The scores are those of
`xformer evaluate CHECKPOINT blimp=FILE`, which also gives them by paradigm and by pair (Warstadt et
al. 2020; Salazar et al. 2020; Kauf & Ivanova 2023).
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from xformer import checkpoint as checkpoints
from xformer.analysis import drawing
from xformer.analysis.examples import names_of
from xformer.analysis.subcommand import NameList, Output, Subcommand, publish
from xformer.data import style
from xformer.data.display import many, say
from xformer.data.errors import BadInput
from xformer.data.tokenizers import load_tokenizer
from xformer.minimal_pairs import PLL, read_pairs, score_pairs
from xformer.parallel import processes
from xformer.parallel.processes import SystemConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHANCE = 0.5


class BlimpConfig(Output):
    """Which pairs are scored, and how."""

    data: str
    """The archive BLiMP.zip, a directory or a file of minimal pairs; see `evaluate --help`."""
    pll: PLL = "word-l2r"
    """The variant of the pseudo-log-likelihood; see `evaluate --help`."""
    pairs: int = Field(100, ge=0)
    """Score only this many pairs of each paradigm, the first ones. 0: all."""
    tokenizer: str | None = None
    """The tokenizer of the pairs for all checkpoints. Default: their own."""
    names: NameList = ()
    """Names of the runs and checkpoints in the result, in order. Those with the same name are
    averaged. Default: their paths, as short as possible."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of the matrix products, except those with the vocabulary, which are in fp32."""


SUBCOMMAND = Subcommand("blimp", BlimpConfig, __doc__ or "", 1, None)


def run(paths: list[str], config: BlimpConfig) -> None:
    """`python -m xformer.analysis blimp RUN|CHECKPOINT ... key=value ...`"""
    names = names_of(paths, config.names, repeated=True)
    places = [(name, kept(path)) for name, path in zip(names, paths, strict=True)]
    _check_steps(places)
    pairs = read_pairs(Path(config.data), config.pairs)
    tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
    ranks = processes.start(SystemConfig(threads=config.threads))
    if ranks.world_size > 1:
        raise BadInput("this command is a single process; start it without torchrun")
    for path in dict.fromkeys(path for _, some in places for _, path in some):
        _check_head(path)
    models: list[dict[str, Any]] = []
    for name, some in places:
        points: list[dict[str, Any]] = []
        for step, path in some:
            loaded = checkpoints.load(path)
            own = loaded.source or loaded.tokenizer
            replaced = tokenizer is not None and own.fingerprint != tokenizer.fingerprint
            if replaced and not own.symbols:
                line = f"warning: {path} was trained with another tokenizer; with tokenizer="
                say(f"{line}{config.tokenizer} its ids stand for other pieces", error=True)
            scores = score_pairs(loaded, pairs, config.pll, ranks, config.precision, tokenizer)
            phenomena = {k: part["accuracy"] for k, part in scores.by("phenomenon").items()}
            points.append({"step": step, "accuracy": scores.accuracy, "phenomena": phenomena})
            at = "" if step is None else f" step {step:,}"
            say(f"{name}{at}: accuracy {scores.accuracy:.4f}", error=True)
        models.append({"name": name, "points": points})
    settings = config.model_dump(include={"data", "pll", "precision", "tokenizer"})
    result = {"analysis": "blimp", **settings, "pairs": len(pairs), "models": models}
    last = {name: points[-1] for name, points in averaged(models).items()}
    line = "; ".join(f"{name} {point['accuracy']:.4f}" for name, point in last.items())
    line = f"blimp accuracy on {many(len(pairs), 'pair')}: {line}"
    metrics = {
        name: {"accuracy": point["accuracy"], **point["phenomena"]} for name, point in last.items()
    }
    publish(config, result, draw, line, metrics)


def kept(path: str) -> list[tuple[int | None, Path]]:
    """The checkpoints that a run kept, with their steps in order; of any other run or checkpoint
    one, without a step."""
    steps = checkpoints.by_step(Path(path) / "trajectory")
    return [*steps.items()] or [(None, checkpoints.resolve(path))]


def _check_steps(places: list[tuple[str, list[tuple[int | None, Path]]]]) -> None:
    """Raise BadInput if runs of the same name kept different steps."""
    first: dict[str, list[tuple[int | None, Path]]] = {}
    for name, some in places:
        other = first.setdefault(name, some)
        if [step for step, _ in some] != [step for step, _ in other]:
            raise BadInput(
                f"{some[-1][1]} and {other[-1][1]} have the name {name!r}, but were not kept at "
                "the same steps; give them different names"
            )


def _check_head(path: Path) -> None:
    """Raise BadInput unless a checkpoint has an MLM head and all its weights are finite."""
    loaded = checkpoints.load(path)
    if loaded.task is None or not loaded.task.predicts_masked:
        raise BadInput(
            f"{path} has no MLM head to score sentences with; give a checkpoint that was trained "
            "with head=mlm"
        )
    for name, weight in loaded.weights.items():
        if not torch.isfinite(weight).all():
            raise BadInput(
                f"{path}: the weight {name} is not finite (NaN or infinite): the weights are "
                "damaged, or training diverged; give another checkpoint"
            )


def averaged(models: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The points of each name: means over the models that have it, and their `range`, the lowest
    and the highest accuracy."""
    names = dict.fromkeys(model["name"] for model in models)
    groups = {name: [m["points"] for m in models if m["name"] == name] for name in names}
    return {
        name: [_mean(points) for points in zip(*group, strict=True)]
        for name, group in groups.items()
    }


def _mean(points: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The mean of points that have the same step."""
    every = [point["accuracy"] for point in points]
    phenomena = {
        name: fmean(point["phenomena"][name] for point in points) for name in points[0]["phenomena"]
    }
    return {
        "step": points[0]["step"],
        "accuracy": fmean(every),
        "range": (min(every), max(every)),
        "phenomena": phenomena,
    }


def draw(result: dict[str, Any]) -> Figure:
    """A panel over steps, if a run has several checkpoints, and one by phenomenon. They share a
    legend."""
    curves = averaged(result["models"])
    several = any(len(points) > 1 for points in curves.values())
    figure = style.new_figure(11.5 if several else 6.2, 4.6)
    axes = figure.subplots(1, 1 + several, squeeze=False)[0]
    _by_phenomenon(axes[-1], curves)
    if several:
        _over_steps(axes[0], curves)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4 if several else 2,
        fontsize=8,
    )
    title = f"{many(result['pairs'], 'minimal pair')}, scored by PLL ({result['pll']})"
    figure.suptitle(title, fontsize=9, color=style.FAINT)
    return figure


def _over_steps(axes: Any, curves: dict[str, list[dict[str, Any]]]) -> None:
    for i, (name, points) in enumerate(curves.items()):
        look: Any = {"color": f"C{i}", "label": drawing.short(name)}
        accuracy, ranges = [p["accuracy"] for p in points], [p["range"] for p in points]
        if len(points) > 1:
            steps = [point["step"] for point in points]
            axes.plot(steps, accuracy, lw=1.6, marker="o", ms=3.5, **look)
            axes.fill_between(steps, *zip(*ranges, strict=True), color=f"C{i}", alpha=0.15, lw=0)
        else:
            axes.axhline(accuracy[0], lw=1.3, ls="--", **look)
            axes.axhspan(*ranges[0], color=f"C{i}", alpha=0.15, lw=0)
    axes.axhline(CHANCE, color=style.FAINT, lw=1, ls=":")
    steps = sorted({p["step"] for points in curves.values() if len(points) > 1 for p in points})
    first = next(step for step in steps if step > 0)
    # logarithmic from the first step after 0
    axes.set_xscale("symlog", base=2, linthresh=first, linscale=0.5)
    axes.set_xlim(-0.15 * first, 1.15 * steps[-1])
    axes.set_xticks(_apart(steps))
    axes.minorticks_off()
    style.plain_ticks(axes.xaxis)
    axes.set(xlabel="step", ylabel="accuracy", title="Over training")


def _apart(steps: list[int]) -> list[int]:
    """The last step, and going down about eight that are far enough apart for their labels."""
    apart = max(1.5, (steps[-1] / (steps[0] or steps[1])) ** (1 / 8))
    kept = steps[-1:]
    for step in reversed(steps):
        if step * apart <= kept[-1]:
            kept.append(step)
    return kept[::-1]


def _by_phenomenon(axes: Any, curves: dict[str, list[dict[str, Any]]]) -> None:
    last = {name: points[-1]["phenomena"] for name, points in curves.items()}
    names = list(next(iter(last.values())))[::-1]
    for i, (label, accuracy) in enumerate(last.items()):
        below = 0.14 * (i - (len(last) - 1) / 2)  # so that equal values do not hide each other
        axes.plot(
            [accuracy[name] for name in names],
            [y - below for y in range(len(names))],
            "o",
            color=f"C{i}",
            ms=5,
            alpha=0.85,
            label=drawing.short(label),
        )
    axes.axvline(CHANCE, color=style.FAINT, lw=1, ls=":")
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.set(xlabel="accuracy", title="Last checkpoint, by phenomenon")
