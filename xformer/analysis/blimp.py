"""Accuracy on minimal pairs, such as BLiMP: over the training of runs, and by phenomenon.

    python -m xformer.analysis blimp RUN|CHECKPOINT ... data=BLiMP.zip out=DIR
    python -m xformer.analysis blimp runs/english runs/brackets micro/english data=BLiMP.zip \\
      pairs=100 tokenizer=micro/english out=figures

A run that was trained with train.keep_at has a curve: all of its kept checkpoints are scored. Any
other run or checkpoint is scored once, and is a dashed line. The second panel compares the last
checkpoints of all by phenomenon. The scores are those of `xformer evaluate CHECKPOINT blimp=FILE`,
which also gives them by paradigm and by pair (Warstadt et al. 2020; Salazar et al. 2020; Kauf &
Ivanova 2023).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from xformer import checkpoint as checkpoints
from xformer.analysis import drawing
from xformer.analysis.examples import names_of
from xformer.analysis.subcommand import NameList, Output, Subcommand, publish
from xformer.convert.recorded import step_of
from xformer.data import style
from xformer.data.display import say
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
    """Names of the runs and checkpoints in the result, in order. Default: their paths, as short as
    possible."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of the matrix products, except those with the vocabulary, which are in fp32."""


SUBCOMMAND = Subcommand("blimp", BlimpConfig, __doc__ or "", 1, None)


def run(paths: list[str], config: BlimpConfig) -> None:
    """`python -m xformer.analysis blimp RUN|CHECKPOINT ... key=value ...`"""
    names = names_of(paths, config.names)
    pairs = read_pairs(Path(config.data), config.pairs)
    tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
    places = {name: kept(path) for name, path in zip(names, paths, strict=True)}
    ranks = processes.start(SystemConfig(threads=config.threads))
    if ranks.world_size > 1:
        raise BadInput("this command is a single process; start it without torchrun")
    models: list[dict[str, Any]] = []
    for name, some in places.items():
        points: list[dict[str, Any]] = []
        for step, path in some:
            loaded = checkpoints.load(path)
            scores = score_pairs(loaded, pairs, config.pll, ranks, config.precision, tokenizer)
            phenomena = {k: part["accuracy"] for k, part in scores.by("phenomenon").items()}
            points.append({"step": step, "accuracy": scores.accuracy, "phenomena": phenomena})
            at = "" if step is None else f" step {step:,}"
            say(f"{name}{at}: accuracy {scores.accuracy:.4f}", error=True)
        models.append({"name": name, "points": points})
    settings = config.model_dump(include={"data", "pll", "precision", "tokenizer"})
    result = {"analysis": "blimp", **settings, "pairs": len(pairs), "models": models}
    last = {model["name"]: model["points"][-1] for model in models}
    line = "; ".join(f"{name} {point['accuracy']:.4f}" for name, point in last.items())
    line = f"blimp accuracy on {len(pairs):,} pairs: {line}"
    metrics = {
        name: {"accuracy": point["accuracy"], **point["phenomena"]} for name, point in last.items()
    }
    publish(config, result, draw, line, metrics)


def kept(path: str) -> list[tuple[int | None, Path]]:
    """The checkpoints that a run kept, with their steps in order; of any other run or checkpoint
    one, without a step."""
    folder = Path(path) / "trajectory"
    inside = folder.iterdir() if folder.is_dir() else ()
    steps = {step: place for place in inside if (step := step_of(place)) is not None}
    return sorted(steps.items()) or [(None, checkpoints.resolve(path))]


def draw(result: dict[str, Any]) -> Figure:
    """A panel over steps, if a run has several checkpoints, and one by phenomenon."""
    models = result["models"]
    several = any(len(model["points"]) > 1 for model in models)
    figure = style.new_figure(11.5 if several else 6.2, 4.6)
    axes = figure.subplots(1, 1 + several, squeeze=False)[0]
    if several:
        _over_steps(axes[0], models)
    _by_phenomenon(axes[-1], models)
    title = f"{result['pairs']:,} minimal pairs, scored by PLL ({result['pll']})"
    figure.suptitle(title, fontsize=9, color=style.FAINT)
    return figure


def _over_steps(axes: Any, models: list[dict[str, Any]]) -> None:
    for i, model in enumerate(models):
        points, colour, name = model["points"], f"C{i}", drawing.short(model["name"])
        accuracy = [point["accuracy"] for point in points]
        if len(points) > 1:
            steps = [point["step"] for point in points]
            axes.plot(steps, accuracy, color=colour, lw=1.6, marker="o", ms=3.5, label=name)
        else:
            axes.axhline(accuracy[0], color=colour, lw=1.3, ls="--", label=name)
    axes.axhline(CHANCE, color=style.FAINT, lw=1, ls=":")
    steps = sorted({p["step"] for m in models if len(m["points"]) > 1 for p in m["points"]})
    first = next(step for step in steps if step > 0)
    # logarithmic from the first step after 0
    axes.set_xscale("symlog", base=2, linthresh=first, linscale=0.5)
    axes.set_xlim(-0.15 * first, 1.15 * steps[-1])
    axes.set_xticks(_apart(steps))
    axes.minorticks_off()
    style.plain_ticks(axes.xaxis)
    axes.set(xlabel="step", ylabel="accuracy", title="Over training")
    axes.legend(fontsize=8)


def _apart(steps: list[int]) -> list[int]:
    """The last step, and going down about eight that are far enough apart for their labels."""
    apart = max(1.5, (steps[-1] / (steps[0] or steps[1])) ** (1 / 8))
    kept = steps[-1:]
    for step in reversed(steps):
        if step * apart <= kept[-1]:
            kept.append(step)
    return kept[::-1]


def _by_phenomenon(axes: Any, models: list[dict[str, Any]]) -> None:
    names = list(models[0]["points"][-1]["phenomena"])[::-1]
    for i, model in enumerate(models):
        last = model["points"][-1]["phenomena"]
        below = 0.14 * (i - (len(models) - 1) / 2)  # so that equal values do not hide each other
        axes.plot(
            [last[name] for name in names],
            [y - below for y in range(len(names))],
            "o",
            color=f"C{i}",
            ms=5,
            alpha=0.85,
            label=drawing.short(model["name"]),
        )
    axes.axvline(CHANCE, color=style.FAINT, lw=1, ls=":")
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.set(xlabel="accuracy", title="Last checkpoint, by phenomenon")
    axes.legend(fontsize=8)
