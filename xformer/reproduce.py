"""Train a small encoder, and compare its loss curves with the expected ones.

    python -m xformer.study reproduce
    python -m xformer.study reproduce seed=3
    python -m xformer.study reproduce pretrain.optim.lr=4e-3    # a change that the curves notice
    python -m xformer.study reproduce record=curves.json        # measure the expected curves anew

It makes two stores, pre-trains, fine-tunes, and prints one line for each curve. The line says that
the curve lies in the band of the expected curves, or where it first leaves the band. If a curve
leaves its band or the bytes of a store differ, the exit status is 1. The bands come from ten seeds
in fp32. They hold on CPUs and GPUs, in fp32 and bf16, with and without the C++ operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from xformer.analysis.curves import average
from xformer.config import Settings, find_recipe, load, merge
from xformer.data import style
from xformer.data.display import say
from xformer.data.errors import BadInput, Failure
from xformer.data.files import make_directory, read_json, write_json
from xformer.data.outputs import check_writable
from xformer.data.store import open_store
from xformer.study import pool
from xformer.study.forecast import Forecast
from xformer.study.local import this_machine
from xformer.study.plan import Job, Plan
from xformer.study.reading import read_study
from xformer.study.report import write_report
from xformer.study.results import Results
from xformer.study.spec import Study

EXPECTED = Path(__file__).with_suffix(".json")
SCALE = "mini"
WIDTH = 5.0  # half the width of a band, in standard deviations over seeds
NEIGHBOURS = 2  # points on each side over which the deviation is averaged
LEAST = 0.05  # the least half-width of a band, in nats or as a share of right answers
STORES = ("made.text", "made.task")
CHANCE = 1 / 3  # of the fine-tuning's accuracy: there are three dialects


@dataclass(frozen=True)
class Curve:
    """A curve to compare: its stage, the event of the log and the number in it, the name of the
    curve, and the largest possible value."""

    stage: str
    event: str
    value: str
    name: str
    panel: int  # of the picture
    most: float = math.inf


CURVES = (
    Curve("pretrain", "train", "loss", "pre-training, loss", 0),
    Curve("pretrain", "validation", "loss", "pre-training, validation loss", 0),
    Curve("finetune", "train", "loss", "fine-tuning, loss", 1),
    Curve("finetune", "validation", "accuracy", "fine-tuning, validation accuracy", 2, 1.0),
)


class Reproduce(Settings):
    """What to train, and what to compare it with."""

    output: str = "runs/reproduce"
    """The directory of the runs, the picture and the report. Runs that are finished there are not
    repeated."""
    seed: int = Field(0, ge=0)
    """The seed of both trainings."""
    pretrain: dict[str, Any] = Field({})
    """Settings of the pre-training that differ from the recipe pretrain/reproduce, such as
    pretrain.optim.lr=4e-3 or pretrain.system.precision=bf16."""
    finetune: dict[str, Any] = Field({})
    """Settings of the fine-tuning that differ from the recipe finetune/reproduce."""
    expected: str = ""
    """The file of expected curves, which record= wrote. Empty: the one that comes with the
    package."""
    record: str = ""
    """Instead of comparing, train with several seeds in fp32 and write their curves to this
    file."""
    seeds: int = Field(10, ge=2)
    """How many seeds to record: 0, 1, 2, ..."""


def main(arguments: list[str]) -> None:
    """`python -m xformer.study reproduce key=value ...`

    Raises Failure if a curve leaves its band, if a store has other content, or if a run fails.
    """
    settings = load(Reproduce, arguments, recipe=False, title=__doc__)
    plan = Plan(study_of(settings), Path(settings.output), {})
    Forecast(plan).check()
    expected = {} if settings.record else _read(Path(settings.expected or EXPECTED))
    directory = plan.root / f"{plan.study.path.stem}-{SCALE}"
    make_directory(directory, "output=")
    make_directory(Path(settings.record).parent, "record=")
    if settings.record:
        check_writable(Path(settings.record))
    outcomes = pool.run_plan(plan, this_machine(0), lambda job, again: "")
    results = Results(plan)
    write_report(results, outcomes, directory)
    for outcome in outcomes.values():
        if outcome.state == "failed":
            raise Failure(f"{outcome.job.name} failed: {outcome.why.splitlines()[-1]}")
    if settings.record:
        write_json(Path(settings.record), recorded(plan))
        say(f"{settings.record}: {len(CURVES)} curves of {settings.seeds} seeds")
        return
    compared = [compare(curve, expected, plan.runs(curve.stage)[0]) for curve in CURVES]
    keys = _keys(plan)
    same = {name: key == expected["stores"].get(name) for name, key in keys.items()}
    with style.colours(style.LIGHT):
        style.write(draw(compared, _best(plan)), directory / "reproduce.png")
    say(*_stores(keys, same), *(one.line() for one in compared))
    say(f"picture  {directory / 'reproduce.png'}   report  {directory / 'report.html'}")
    bad = [one.curve.name for one in compared if not one.inside]
    bad += [name for name in same if not same[name]]
    if bad:
        raise Failure(f"not reproduced: {'; '.join(bad)}")


def study_of(settings: Reproduce) -> Study:
    """The study recipes/studies/reproduce.toml with these settings."""
    study = read_study(find_recipe("studies/reproduce"), SCALE)
    seeds = list(range(settings.seeds)) if settings.record else [settings.seed]
    fp32: dict[str, Any] = {"system": {"precision": "fp32"}} if settings.record else {}
    stages = {}
    for name, stage in study.stages.items():
        own = merge(merge(stage.settings, fp32), getattr(settings, name))
        stages[name] = stage.model_copy(update={"settings": own, "vary": {"seed": seeds}})
    return study.model_copy(update={"stages": stages})


# ------------------------------------------------------------------------------------- the curves


def recorded(plan: Plan) -> dict[str, Any]:
    """The content of the file of expected curves, from finished runs."""
    curves: dict[str, Any] = {}
    for curve in CURVES:
        steps, values = points(curve, plan.runs(curve.stage))
        seeds = [[float(f"{value:.4g}") for value in row] for row in values]
        curves[curve.name] = {"steps": steps, "seeds": seeds}
    # the suite compares the keys of the runs with those of the recipes
    keys = {name: plan.runs(name)[0].key for name in plan.study.stages}
    return {"runs": keys, "stores": _keys(plan), "curves": curves}


def points(curve: Curve, runs: list[Job]) -> tuple[list[float], np.ndarray]:
    """The steps (S,) at which runs logged a number, and the numbers (runs, S)."""
    paths = [str(run.path) for run in runs]
    content = average(paths, curve.event, curve.value)
    return content["x"], np.array(content["values"])


def band(seeds: np.ndarray, most: float = math.inf) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper end of the band (S,) of the curves of several seeds (seeds, S), whose
    values lie between 0 and `most`.

    Half its width is WIDTH standard deviations, but at least LEAST. The variance is averaged over
    neighbouring points, because a few seeds estimate the variance of a single point badly.
    """
    padded = np.pad(seeds.var(0, ddof=1), NEIGHBOURS, mode="edge")
    window = np.ones(2 * NEIGHBOURS + 1) / (2 * NEIGHBOURS + 1)
    deviation = np.sqrt(np.convolve(padded, window, mode="valid"))
    half = np.maximum(WIDTH * deviation, LEAST)
    return np.maximum(seeds.mean(0) - half, 0.0), np.minimum(seeds.mean(0) + half, most)


@dataclass(frozen=True)
class Comparison:
    """A run's curve and its band. `outside` is the index of the first point outside the band, or
    None if all lie inside. `ours` is None if the run has not logged the expected steps."""

    curve: Curve
    steps: np.ndarray  # (S,)
    seeds: np.ndarray  # (seeds, S)
    ours: np.ndarray | None  # (S,)
    outside: int | None

    @property
    def inside(self) -> bool:
        return self.ours is not None and self.outside is None

    def line(self) -> str:
        """One line: whether the curve was reproduced, and what was measured."""
        if self.ours is None:
            what = f"the run did not log the steps {self.steps[0]:g} to {self.steps[-1]:g}"
            return _line(False, self.curve.name, what)
        i = len(self.steps) - 1 if self.outside is None else self.outside
        low, high = (end[i] for end in band(self.seeds, self.curve.most))
        what = f"step {self.steps[i]:g}: {self.ours[i]:.3f}, expected {low:.3f} to {high:.3f}"
        what = what if self.inside else f"leaves its band at {what}"
        return _line(self.inside, self.curve.name, what)


def compare(curve: Curve, expected: dict[str, Any], run: Job) -> Comparison:
    """A run's curve next to the expected one."""
    content = expected["curves"][curve.name]
    steps, seeds = np.array(content["steps"]), np.array(content["seeds"])
    logged, values = points(curve, [run])
    at = dict(zip(logged, values[0], strict=True))
    if not all(step in at for step in steps):
        return Comparison(curve, steps, seeds, None, None)
    ours = np.array([at[step] for step in steps])
    low, high = band(seeds, curve.most)
    outside = np.flatnonzero(~((low <= ours) & (ours <= high)))
    return Comparison(curve, steps, seeds, ours, int(outside[0]) if len(outside) else None)


# ------------------------------------------------------------------------------------- the stores


def _keys(plan: Plan) -> dict[str, str]:
    """The key of the content of each store."""
    paths = {job.name: job.path for job in plan.jobs.values()}
    return {name: open_store(paths[name]).key for name in STORES}


def _stores(keys: dict[str, str], same: dict[str, bool]) -> Iterator[str]:
    """A line for each store: whether it has the expected content."""
    for name, key in keys.items():
        what = f"{'the same' if same[name] else 'other'} bytes, SHA-256 {key[:16]}"
        yield _line(same[name], f"store of the {name.removeprefix('made.')}", what)


def _line(same: bool, name: str, what: str) -> str:
    return f"{'reproduced' if same else 'NOT reproduced':<15} {name:<33} {what}"


def _best(plan: Plan) -> float:
    """The best possible loss of the pre-training."""
    raw = next(job.path for job in plan.jobs.values() if job.name == "made.raw")
    return float(read_json(raw / "best.json")["loss"])


def _read(path: Path) -> dict[str, Any]:
    """The expected curves in a file. Raises BadInput if it holds something else."""
    content = read_json(path)
    try:
        for curve in CURVES:
            one = content["curves"][curve.name]
            seeds = np.array(one["seeds"], dtype=float)
            whole = seeds.ndim == 2 and len(seeds) > 1 and seeds.shape[1] == len(one["steps"]) > 0
            if not whole or not np.isfinite(seeds).all():
                raise ValueError
        dict(content["stores"])
    except (KeyError, TypeError, ValueError):
        raise BadInput(
            f"expected={path} holds no expected curves; give a file that record= wrote"
        ) from None
    return dict(content)


# ------------------------------------------------------------------------------------ the picture


def draw(compared: list[Comparison], best: float) -> Any:
    """A panel for each number: the band of the expected curves, and this run's curve."""
    figure = style.new_figure(11.5, 3.9)
    panels = figure.subplots(1, 3)
    titles = ("Pre-training", "Fine-tuning", "Fine-tuning")
    names = ("loss (nats)", "loss (nats)", "validation accuracy")
    for one in compared:
        axes = panels[one.curve.panel]
        dots = one.curve.event == "validation"
        low, high = band(one.seeds, one.curve.most)
        axes.fill_between(one.steps, low, high, color=style.FAINT, alpha=0.3, lw=0)
        if one.ours is not None:
            colour = "C0" if one.inside else "C1"
            look = {"marker": "o", "ms": 3.5} if dots else {}
            what = "validation" if dots and one.curve.value == "loss" else "this run"
            axes.plot(one.steps, one.ours, color=colour, lw=1.6, label=what, **look)
            if one.outside is not None:
                x, y = one.steps[one.outside], one.ours[one.outside]
                axes.plot(x, y, "x", color="C1", ms=11, mew=2.5, label="leaves the band here")
    for axes, title, name in zip(panels, titles, names, strict=True):
        axes.fill_between([], [], color=style.FAINT, alpha=0.3, lw=0, label="expected")
        axes.set(title=title, xlabel="step", ylabel=name)
        axes.set_ylim(0, 1.03 if name == names[-1] else None)
    panels[0].axhline(best, color=style.FAINT, ls="--", lw=1.2, label="the best possible")
    panels[1].axhline(math.log(1 / CHANCE), color=style.FAINT, ls=":", lw=1.2, label="chance")
    panels[2].axhline(CHANCE, color=style.FAINT, ls=":", lw=1.2, label="chance")
    for axes in panels:
        axes.legend(fontsize=8.5)
    every = all(one.inside for one in compared)
    figure.suptitle("Reproduced" if every else "NOT reproduced", color="C2" if every else "C1")
    return figure
