"""A report of a few runs: a table in Markdown, a picture, and how they were made."""

from __future__ import annotations

import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xformer import checkpoint as checkpoints
from xformer.data.files import read_run_json
from xformer.data.store import Store, open_store
from xformer.evaluate import fill_mask
from xformer.monitor import records
from xformer.study.statistics import compare

# Okabe and Ito's palette, distinct to colour-blind eyes
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


@dataclass(frozen=True)
class PreTrained:
    """A pre-training run and the store it read."""

    name: str
    run: Path
    store: Path


@dataclass(frozen=True)
class FineTuned:
    """The runs of one starting point, one a seed."""

    name: str
    runs: list[Path]

    def scores(self, metric: str) -> list[float]:
        """The metric on the test split, one number a run."""
        return [read_run_json(r / "result.json")["metrics"]["test"][metric] for r in self.runs]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in a run's log, in order."""
    return [record for record in records(run) if record["event"] == kind]


def unigram_cross_entropy(store: Store) -> float:
    """Nats a token of the validation split under the unigram frequencies of the training split
    (add-one smoothed).

    A model that knows how often each token occurs, and nothing else, reaches this loss.
    """
    counts = [
        np.bincount(store.split(s).columns["tokens"].values, minlength=store.vocab_size)
        for s in ("train", "valid")
    ]
    known = (counts[0] + 1) / (counts[0] + 1).sum()
    return float(-(counts[1] * np.log(known)).sum() / counts[1].sum())


def score_table(fine_tuned: list[FineTuned], metrics: list[str]) -> list[str]:
    """Markdown rows: each start's scores on the test split by seed, mean and standard deviation."""
    lines = [
        "| start | " + " | ".join(f"{m}, mean ± sd" for m in metrics) + " | accuracy by seed |",
        "|---|" + "---|" * (len(metrics) + 1),
    ]
    for start in fine_tuned:
        cells = []
        for metric in metrics:
            scores = start.scores(metric)
            cells.append(f"{statistics.mean(scores):.3f} ± {statistics.stdev(scores):.3f}")
        seeds = ", ".join(f"{s:.3f}" for s in start.scores("accuracy"))
        lines.append(f"| {start.name} | " + " | ".join(cells) + f" | {seeds} |")
    return lines


def majority_share(store: Store) -> float:
    """Test accuracy of always answering the class that is most frequent in training."""
    answer = np.bincount(np.asarray(store.split("train").columns["label"])).argmax()
    return float((np.asarray(store.split("test").columns["label"]) == answer).mean())


def write_report(
    directory: Path,
    pre_trained: list[PreTrained],
    fine_tuned: list[FineTuned],
    commands: list[list[str]],
    seconds: dict[str, float],
) -> str:
    """Write report.md and report.png into `directory`; the tables as text.

    The last of `fine_tuned` is the twin that the others are compared with.
    """
    task = open_store(directory / "stores/task")
    baselines = [unigram_cross_entropy(open_store(p.store)) for p in pre_trained]
    lines = ["**Pre-training** (masked language modelling, nats a token)", ""]
    lines += [
        "| corpus | validation loss | unigram cross-entropy | accuracy | tokens/s |",
        "|---|---|---|---|---|",
    ]
    for p, unigram in zip(pre_trained, baselines, strict=True):
        result = read_run_json(p.run / "result.json")
        valid = result["metrics"]["valid"]
        lines.append(
            f"| {p.name} | {valid['loss']:.3f} | {unigram:.3f} | {valid['accuracy']:.3f} "
            f"| {result['real_tokens_per_second']:,.0f} |"
        )
    rows = {split: task.split(split).rows for split in task.splits}
    lines += [
        "",
        f"**Fine-tuning** on {len(task.labels)} classes, {rows['train']:,} passages; "
        f"scores on {rows['test']:,} held-out passages of the test split",
        "",
    ]
    lines += score_table(fine_tuned, ["accuracy", "f1", "mcc"])
    lines += ["", f"Always the most frequent class: accuracy {majority_share(task):.3f}."]
    *starts, twin = fine_tuned
    for start in starts:
        difference = compare(start.scores("accuracy"), twin.scores("accuracy"))
        mean, half = difference.mean, difference.half
        words = f"{start.name} - {twin.name}: {mean:+.3f}"
        if half is None:
            lines.append(f"{words}, with one pair of seeds or without spread: undecided.")
            continue
        decided = "" if abs(mean) > half else ": undecided at this number of seeds"
        lines.append(
            f"{words} ± {half:.3f} (95 % t interval over {len(twin.runs)} paired seeds){decided}."
        )
    table = "\n".join(lines)
    _draw(directory / "report.png", pre_trained, baselines, fine_tuned, majority_share(task))
    fillings = _fillings(pre_trained[0].run)
    made = "\n".join(shlex.join(["python", *command[1:]]) for command in commands)
    times = "\n".join(f"| {name} | {s:.0f} |" for name, s in seconds.items())
    report = (
        f"# What pre-training transfers: the demo\n\n{table}\n\n![report](report.png)\n\n"
        f"**Fillings** of the encoder pre-trained on {pre_trained[0].name}\n\n{fillings}\n\n"
        f"**Commands**\n\n```\n{made}\n```\n\n"
        f"**Seconds**\n\n| step | seconds |\n|---|---|\n{times}\n"
        f"| all | {sum(seconds.values()):.0f} |\n"
    )
    (directory / "report.md").write_text(report, encoding="utf-8")
    return table.replace("**", "")


def _fillings(run: Path) -> str:
    checkpoint = checkpoints.load(run)
    texts = (
        "Return [MASK] if the object is an instance of the class.",
        "If the file does not [MASK], an exception is raised.",
    )
    lines = []
    for text in texts:
        best = fill_mask(checkpoint, text, 5)[0]
        lines.append(f"- {text} " + ", ".join(f"{piece} {p:.2f}" for p, piece in best))
    return "\n".join(lines)


def _draw(
    path: Path,
    pre_trained: list[PreTrained],
    baselines: list[float],
    fine_tuned: list[FineTuned],
    majority: float,
) -> None:
    """Three panels: pre-training loss, fine-tuning loss, test accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style: Any = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9.5,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
    }
    with plt.rc_context(style):
        figure, (left, middle, right) = plt.subplots(
            1, 3, figsize=(12.5, 3.9), dpi=160, layout="constrained"
        )
        draw_pretraining(left, pre_trained, baselines)
        for start, colour in zip(fine_tuned, COLOURS, strict=False):
            _curve(middle, start, colour)
        middle.set(title="Fine-tuning", xlabel="epoch", ylabel="training loss (nats)")
        middle.set_ylim(bottom=0)
        middle.legend()
        for i, (start, colour) in enumerate(zip(fine_tuned, COLOURS, strict=False)):
            _points(right, i, start.scores("accuracy"), colour)
        right.axhline(majority, color="0.45", ls="--", lw=1.2)
        right.text(
            len(fine_tuned) - 0.45,
            majority,
            "most frequent class",
            ha="right",
            va="bottom",
            color="0.35",
            fontsize=8,
        )
        right.set_xticks(range(len(fine_tuned)), [start.name for start in fine_tuned])
        right.set(
            title=f"Test accuracy, {len(fine_tuned[0].runs)} seeds (mean ± sd)",
            xlabel="start",
            ylabel="accuracy",
        )
        right.set_xlim(-0.55, len(fine_tuned) - 0.45)
        right.set_ylim(0, 1)
        figure.savefig(path)
        plt.close(figure)


def draw_pretraining(axes: Any, runs: list[PreTrained], baselines: list[float]) -> None:
    """Training and validation loss of runs, and what knowing token frequencies would reach."""
    for run, unigram, colour in zip(runs, baselines, COLOURS, strict=False):
        train, valid = events(run.run, "train"), events(run.run, "validation")
        axes.plot(
            [e["step"] for e in train],
            [e["loss"] for e in train],
            color=colour,
            alpha=0.45,
            lw=1.2,
            label=f"{run.name}, training",
        )
        axes.plot(
            [e["step"] for e in valid],
            [e["loss"] for e in valid],
            "o-",
            ms=3.5,
            color=colour,
            label=f"{run.name}, validation",
        )
        axes.axhline(
            unigram, color=colour, ls=":", lw=1.4, label=f"{run.name}, unigram cross-entropy"
        )
    axes.set(title="Pre-training", xlabel="step", ylabel="masked-token loss (nats)")
    axes.legend(fontsize=7.5)


def _curve(axes: Any, start: FineTuned, colour: str) -> None:
    """Mean training loss over seeds with a band of one standard deviation."""
    curves = [events(run, "train") for run in start.runs]
    epochs = [e["epoch"] for e in curves[0]]
    losses = np.array([[e["loss"] for e in curve] for curve in curves])
    mean, spread = losses.mean(0), losses.std(0, ddof=1)
    axes.plot(epochs, mean, color=colour, label=start.name)
    axes.fill_between(epochs, mean - spread, mean + spread, color=colour, alpha=0.2, lw=0)


def _points(axes: Any, x: int, scores: list[float], colour: str) -> None:
    """Each seed as a point, mean and standard deviation beside them."""
    places = x - 0.12 + np.linspace(-0.06, 0.06, len(scores))
    axes.plot(places, scores, "o", color=colour, alpha=0.55, ms=5.5, mew=0)
    mean, spread = statistics.mean(scores), statistics.stdev(scores)
    axes.errorbar(x + 0.12, mean, spread, fmt="o", color=colour, ms=7, capsize=5, lw=1.8)
    axes.annotate(f"{mean:.3f}", (x + 0.2, mean), va="center", color=colour, fontsize=9)
