"""Loss curves of runs: the mean over seeds, with a band of one standard deviation.

    python -m xformer.analysis curves RUN RUN ... out=DIR
    python -m xformer.analysis curves runs/splice-* validation=accuracy smooth=5 out=figures

Runs whose recipes differ only in seeds (including those of mappings and surgery) or in `system`
form one curve. A curve is named after the settings in which it differs from the others; `names=`
gives shorter names. If there is only one curve, it is named after the common prefix of the runs'
names. The numbers come from each run's log.jsonl (Kao & Lee 2021, figures 3, 4 and 6 to 9; Huang et
al. 2021, figures 1 and 4).
"""

from __future__ import annotations

import math
import re
import textwrap
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from xformer.analysis import drawing
from xformer.analysis.subcommand import NameList, Output, Subcommand, publish
from xformer.config import flat, show
from xformer.data import style
from xformer.data.display import many
from xformer.data.errors import BadInput
from xformer.data.files import read_run_json
from xformer.monitor import records
from xformer.run import completed
from xformer.tasks.known import TASKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDED = re.compile(r"^(random|symbols|unused):\d+$")
MAY_DIFFER = ("run", "seed", "overwrite", "system")  # keys in which runs of one curve may differ


class CurvesConfig(Output):
    """Which numbers of the logs are drawn."""

    value: str = "loss"
    """A number that the log has for training steps, such as loss, lr or grad_norm."""
    validation: str | None = None
    """A number that the log has for validations, such as loss or accuracy. It is drawn in a second
    panel."""
    x: Literal["step", "epoch"] = "step"
    """The horizontal axis."""
    names: NameList = ()
    """Names of the curves, in the order of their first runs. Default: the settings that differ."""
    smooth: int = Field(1, ge=1)
    """Average over this many neighbouring points."""


SUBCOMMAND = Subcommand("curves", CurvesConfig, __doc__ or "", 1, None, "run")


def run(paths: list[str], config: CurvesConfig) -> None:
    """`python -m xformer.analysis curves RUN ... key=value ...`"""
    for path in paths:
        if not all((Path(path) / name).is_file() for name in ("log.jsonl", "config.json")):
            raise BadInput(
                f"{path} is not a run directory (it lacks log.jsonl or config.json); give the "
                "directory of a training run"
            )
    groups = _renamed(grouped(paths), config.names)
    panels = [("train", config.value)]
    panels += [("validation", config.validation)] if config.validation else []
    drawn: list[dict[str, Any]] = []
    for event, value in panels:
        series = [
            {"name": name, "runs": runs, **average(runs, event, value, config.x, config.smooth)}
            for name, runs in groups.items()
        ]
        drawn.append({"event": event, "value": value, "series": series})
    heads = {_recipe(path).get("head") for path in paths}
    result = {
        "analysis": "curves",
        "x": config.x,
        "smooth": config.smooth,
        "panels": drawn,
        "nats": all(TASKS[head].loss_in_nats for head in heads if head in TASKS),
    }
    first = drawn[0]["series"]
    line = f"curves {config.value}: " + "; ".join(
        f"{s['name']} {drawing.plus_minus(s['mean'][-1], s['deviation'][-1], len(s['runs']))} at "
        f"{config.x} {s['x'][-1]:g} ({many(len(s['runs']), 'run')})"
        for s in first
    )
    publish(config, result, draw, line, {s["name"]: {config.value: s["mean"][-1]} for s in first})


def grouped(paths: list[str]) -> dict[str, list[str]]:
    """The runs of each curve, by the curve's name, in the order of `paths`."""
    recipes = {path: flat(_without_seeds(_recipe(path))) for path in paths}
    keys = {key for recipe in recipes.values() for key in recipe}
    differing = sorted(key for key in keys if len({repr(r.get(key)) for r in recipes.values()}) > 1)
    names = [Path(path).absolute().name for path in recipes]
    first = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    alike = "".join(letters[0] for letters in first).rstrip("-_.=")
    alike = alike if len(alike) > 2 or len(names) == 1 else "all alike"
    shown = {key: _texts([recipe.get(key) for recipe in recipes.values()]) for key in differing}
    groups: dict[str, list[str]] = {}
    for number, path in enumerate(recipes):
        parts = [f"{key}={texts[number]}" for key, texts in shown.items()]
        groups.setdefault(", ".join(parts) or alike, []).append(path)
    return groups


def _renamed(groups: dict[str, list[str]], names: tuple[str, ...]) -> dict[str, list[str]]:
    """The groups under these names. Raises BadInput unless each group has one of its own."""
    if not names:
        return groups
    if len(set(names)) != len(groups) or len(names) != len(groups) or "" in names:
        raise BadInput(
            f"names={','.join(names)}: the runs form {many(len(groups), 'curve')}; give "
            "one name for each, all different, with commas between them"
        )
    return dict(zip(names, groups.values(), strict=True))


def _recipe(path: str) -> dict[str, Any]:
    """The recipe of a run. Raises BadInput if its config.json contains no recipe."""
    content = read_run_json(Path(path) / "config.json")
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise BadInput(f"{path}/config.json is damaged: it holds no recipe; give another run")
    return completed(content["config"])


def _without_seeds(value: Any, key: str = "") -> Any:
    """A recipe without the parts in which runs of one curve may differ."""
    if isinstance(value, dict):
        return {k: _without_seeds(v, k) for k, v in value.items() if k not in MAY_DIFFER}
    if isinstance(value, list):
        return [_without_seeds(v, key) for v in value]
    if isinstance(value, str) and SEEDED.match(value):
        return value.partition(":")[0]
    return value


def _texts(values: list[Any]) -> list[str]:
    """The values of a key as a legend shows them. They are shortened, unless two different ones
    would then look alike: their runs would become one curve."""
    short = [_short(value) for value in values]
    return short if len(set(short)) == len(set(map(repr, values))) else [*map(show, values)]


def _short(value: Any) -> str:
    """A value in short form: operations as calls, paths by their last part."""
    if isinstance(value, list | tuple):
        parts = [drawing.as_call(v) if isinstance(v, dict) else str(v) for v in value]
        return "+".join(parts) or "no"
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)


def average(
    runs: list[str], event: str, value: str, x: str = "step", smooth: int = 1
) -> dict[str, Any]:
    """Mean and standard deviation over runs, at the points that all runs logged. `smooth` is how
    many neighbouring points are averaged.

    Raises BadInput if a run did not log the number, or if the runs have no point in common.
    """
    curves = [_curve(path, event, value, x, smooth) for path in runs]
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    if not shared:
        raise BadInput(
            f"{', '.join(runs)} have no {x} of {event} in common; give runs that log at "
            "the same points"
        )
    values = np.array([[curve[point] for point in shared] for curve in curves])
    ddof = int(len(values) > 1)
    return {
        "x": shared,
        "mean": values.mean(0).tolist(),
        "deviation": values.std(0, ddof=ddof).tolist(),
        "values": values.tolist(),
    }


def _curve(path: str, event: str, value: str, x: str, smooth: int) -> dict[float, float]:
    """The smoothed number of one run at each point x."""
    points: dict[float, float] = {}
    names: set[str] = set()
    log = records(Path(path))
    for record in _with_epochs(log) if x == "epoch" else log:
        if record["event"] != event:
            continue
        known = {k for k, v in record.items() if type(v) in (int, float) and abs(v) < math.inf}
        names |= known
        if value in known and x in known:
            points[float(record[x])] = float(record[value])
    if not points:
        has = ", ".join(sorted(names - {"time"})) or f"no line of {event}"
        raise BadInput(f"{path}/log.jsonl has no {value} over {x} in {event}; it has {has}")
    xs = sorted(points)
    before, after = (smooth - 1) // 2, smooth // 2
    return {
        point: float(np.mean([points[n] for n in xs[max(0, i - before) : i + after + 1]]))
        for i, point in enumerate(xs)
    }


def _with_epochs(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a log. One without an epoch, such as that of a validation, gets the epoch of its
    step, read off the lines of training."""
    known = {line["step"]: float(line["epoch"]) for line in log if "epoch" in line}
    if not known:
        return log
    last = max(known)
    after = max(line["step"] for line in log) / last  # after the last line the epochs go on alike
    steps = [0, *known, (1 + after) * last]
    epochs = [0.0, *known.values(), (1 + after) * known[last]]
    return [{"epoch": float(np.interp(line["step"], steps, epochs)), **line} for line in log]


def draw(result: dict[str, Any]) -> Figure:
    """A panel for training, and another for validation if the result has one."""
    panels = result["panels"]
    figure = style.new_figure(1.2 + 5.0 * len(panels), 3.8)
    axes = figure.subplots(1, len(panels), squeeze=False)
    for panel_axes, panel in zip(axes[0], panels, strict=True):
        for i, series in enumerate(panel["series"]):
            colour = f"C{i}"
            x, mean, deviation = (np.array(series[k]) for k in ("x", "mean", "deviation"))
            name = drawing.plain(textwrap.shorten(series["name"], 60, placeholder=" …"))
            label = f"{name} ({many(len(series['runs']), 'run')})"
            panel_axes.plot(
                x,
                mean,
                color=colour,
                lw=1.6,
                label=label,
                marker="o" if len(x) < 12 else None,
                ms=3.5,
            )
            if len(series["runs"]) > 1:
                panel_axes.fill_between(
                    x, mean - deviation, mean + deviation, color=colour, alpha=0.2, lw=0
                )
        unit = " (nats)" if panel["value"] == "loss" and result.get("nats", True) else ""
        title = {"train": "Training", "validation": "Validation"}[panel["event"]]
        panel_axes.set(xlabel=result["x"], ylabel=f"{panel['value']}{unit}", title=title)
        panel_axes.legend(fontsize=8)
    figure.suptitle("Mean over runs, band ± sd", fontsize=9, color=style.FAINT)
    return figure
