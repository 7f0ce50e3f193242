"""Measure the minutes until a validation loss: three ways to pre-train the same small encoder.

    python -m benchmarks.speedrun --data DIR --output docs
    python -m benchmarks.speedrun --data DIR --only fast --seeds 0

DIR holds english_books and english_wikipedia. All contenders have the tokenizer of micro/english,
4 layers of width 256, and the same text:

    trainer   BERT's recipe (benchmarks/bert.toml) in the Trainer of transformers, on full rows
    bert      BERT's recipe in train.py
    fast      the recipe pretrain/micro-fast in train.py

A run counts from the start of its command to the end, when its checkpoint is written. Its length is
fixed beforehand. Then one program computes the loss of every checkpoint on held-out Wikipedia. It
masks 15 % of the tokens, the same ones every time. --output adds the runs to DIR/speedrun.json and
replaces the table in DIR/speedrun.md, which must exist.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from benchmarks import machine, prepare, report
from benchmarks.bench import (
    FULL,
    PEERS,
    ROOT,
    Bench,
    command,
    directory,
    fresh,
    module,
    require,
    require_data,
    say,
)
from xformer import checkpoint as checkpoints
from xformer.checkpoint import Head
from xformer.config import load
from xformer.convert.hf import from_hf, to_hf
from xformer.data.arguments import CommandParser, whole_number
from xformer.data.batch import Assembler
from xformer.data.errors import BadInput
from xformer.data.files import write_json
from xformer.data.store import Store, open_store
from xformer.parallel import processes
from xformer.parallel.processes import SystemConfig
from xformer.recipe import Recipe
from xformer.scoring import score
from xformer.start import run

TARGET = 6.5  # nats: the mean loss that every contender has to reach
TEXTS = {  # the raw texts of each store
    "train": ("english_books/train.txt.gz", "english_wikipedia/train.txt"),
    "valid": ("english_wikipedia/valid.txt",),
}
BERT, FAST = ROOT / "benchmarks/bert.toml", ROOT / "recipes/pretrain/micro-fast.toml"
BEGIN = "<!-- written by benchmarks.speedrun -->"
# what --ours can change for the Trainer: these and model.*
OF_TRAINER = ("batch.tokens", "optim.lr", "optim.warmup", "optim.weight_decay", "train.steps")


@dataclass(frozen=True)
class Timed:
    """A run: its seconds in all, and the loss (nats) and accuracy of its checkpoint."""

    contender: str
    seed: int
    steps: int
    seconds: float
    loss: float
    accuracy: float


# --------------------------------------------------------------------------- the contenders


def store(bench: Bench, name: str) -> Store:
    """One of the stores of TEXTS. Its rows have at most `bench.size.length` tokens. Each store has
    only the split `train`, so that train.py spends no time on validation."""
    path = bench.folder / name
    if not path.exists():
        say(f"making the store {name}")
        files = [
            "--input",
            *(str(bench.data / text) for text in TEXTS[name]),
            "--output",
            str(path),
        ]
        rows = ["--skip-lines", prepare.FOOTNOTE, "--max-tokens", str(bench.size.length - 4)]
        line = ["preprocess.py", "text", *files, "--tokenizer", "micro/english", *rows]
        command(line, bench.threads)
    return open_store(path)


def settings(bench: Bench, recipe: Path, seed: int) -> list[str]:
    """The recipe and the settings of one of our runs."""
    data, out = store(bench, "train").path, bench.folder / "run"
    system = [f"system.threads={bench.threads}", f"system.precision={bench.precision}"]
    return [str(recipe), f"data={data}", f"run={out}", f"seed={seed}", *system, *bench.ours]


def ours(bench: Bench, recipe: Path, seed: int) -> tuple[Path, float]:
    """(checkpoint, seconds) of train.py."""
    out = fresh(bench.folder / "run")
    return out, command(["train.py", *settings(bench, recipe, seed)], bench.threads).seconds


def theirs(bench: Bench, recipe: Path, seed: int) -> tuple[Path, float]:
    """(checkpoint, seconds) of the Trainer with the settings of our recipe. It gets the text as
    full rows, as run_mlm makes them, and the initial weights as a directory."""
    same = load(Recipe, settings(bench, recipe, seed))
    table, weights, out = (bench.folder / name for name in ("table", "weights", "trainer"))
    if not table.exists():
        say("making the Trainer's table")
        rows = prepare.joined(bench, store(bench, "train"), bench.folder / "rows")
        prepare.table(prepare.assembler(bench, rows), table)
    encoder = checkpoints.fresh(same.model, store(bench, "train").tokenizer(), seed)
    to_hf(encoder.with_head(Head("mlm"), seed), fresh(weights))
    job = {
        "model": str(weights),
        "table": str(table),
        "output": str(fresh(out)),
        "task": "mlm",
        "rows": same.batch.tokens // bench.size.length,
        "steps": same.train.steps,
        "lr": same.optim.lr,
        "decay": same.optim.weight_decay,
        "rise": same.optim.warmup,
        "seed": seed,
        "save": True,
        "precision": bench.precision,
        "attention": "sdpa",
        "threads": bench.threads,
    }
    _, ended = module(bench, "theirs", job)
    converted = fresh(bench.folder / "converted")
    imported = from_hf(out / f"checkpoint-{same.train.steps}")
    checkpoints.save(imported.checkpoint, converted)
    return converted, ended.seconds


@dataclass(frozen=True)
class Contender:
    """Its name in the table, its recipe, and the function that trains it."""

    name: str
    recipe: Path
    train: Callable[[Bench, Path, int], tuple[Path, float]]


CONTENDERS = {
    "trainer": Contender("BERT's recipe in the Trainer", BERT, theirs),
    "bert": Contender("BERT's recipe here", BERT, ours),
    "fast": Contender("`pretrain/micro-fast` here", FAST, ours),
}


def loss(bench: Bench, path: Path) -> dict[str, float]:
    """Loss and accuracy of a checkpoint on the held-out text, 15 % of it masked."""
    trained = checkpoints.load(path)
    assert trained.head is not None
    trained = replace(trained, head=replace(trained.head, masking=0.15))
    ranks = processes.start(SystemConfig(threads=bench.threads))
    split = store(bench, "valid").split("train")
    rows = Assembler(split, trained.tokenizer, bench.size.length)
    return score(trained.model().to(ranks.device), rows, ranks, "fp32").metrics


# ------------------------------------------------------------------------------ the command


def main() -> None:
    """`python -m benchmarks.speedrun --data DIR`"""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as place:
        bench = Bench(arguments.data.resolve(), Path(place), FULL, ours=tuple(arguments.ours))
        bench = replace(bench, precision="bf16" if machine.has_bf16() else "fp32")
        page = (arguments.output or bench.folder) / "speedrun.json"
        setup = {"machine": machine.words(), "versions": machine.versions()}
        runs = [Timed(**one) for one in machine.earlier(page, setup)]
        for seed in arguments.seeds:  # the contenders alternate
            for name in arguments.only:
                runs = [one for one in runs if (one.contender, one.seed) != (name, seed)]
                runs.append(measure(bench, name, seed))
                write_json(page, {**setup, "measured": [asdict(one) for one in runs]})
        if arguments.output:
            report.write(page.with_suffix(".md"), section(setup, runs), BEGIN)
        print("\n".join(table(runs)))


def measure(bench: Bench, name: str, seed: int) -> Timed:
    """Train a contender and score its checkpoint."""
    contender = CONTENDERS[name]
    steps = load(Recipe, settings(bench, contender.recipe, seed)).train.steps
    path, seconds = contender.train(bench, contender.recipe, seed)
    scores = loss(bench, path)
    say(f"{name}, seed {seed}: {seconds:.0f} s, loss {scores['loss']:.3f}")
    return Timed(name, seed, steps, seconds, scores["loss"], scores["accuracy"])


def table(runs: list[Timed]) -> list[str]:
    """A row for each contender: its steps, minutes and loss, and how many times as fast it is."""
    lines = [
        f"| loss of {TARGET} or less | seeds | steps | minutes | loss | accuracy | times as fast |",
        "|---|---|---|---|---|---|---|",
    ]
    minutes = {
        name: [one.seconds / 60 for one in runs if one.contender == name] for name in CONTENDERS
    }
    for name, contender in CONTENDERS.items():
        mine = [one for one in runs if one.contender == name]
        if not mine:
            continue
        losses, faster = [one.loss for one in mine], "-"
        if mean(losses) > TARGET:
            faster = "not reached"
        elif minutes["trainer"]:
            faster = f"{mean(minutes['trainer']) / mean(minutes[name]):.3g}"
        cells = (
            contender.name,
            str(len(mine)),
            f"{mine[0].steps:,}",
            _mean(minutes[name], 2),
            _mean(losses, 3),
            f"{mean(one.accuracy for one in mine):.3f}",
            faster,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _mean(values: list[float], digits: int) -> str:
    """The mean, with the smallest and the largest value in brackets."""
    middle, least, most = (f"{f(values):.{digits}f}" for f in (mean, min, max))
    return f"{middle} ({least} to {most})"


def section(setup: dict[str, str], runs: list[Timed]) -> str:
    """The part of the page that a run replaces."""
    return "\n".join([BEGIN, "", f"{'. '.join(setup.values())}.", "", *table(runs), "", report.END])


def _arguments() -> argparse.Namespace:
    """The command line. Raises BadInput if an argument is wrong, or a package is not installed."""
    parser = CommandParser(
        prog="python -m benchmarks.speedrun",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, names = parser.add_argument, list(CONTENDERS)
    add("--data", type=Path, metavar="DIR", required=True, help="The directory of the raw data.")
    about = "The contenders to run (default: all)."
    add("--only", nargs="+", choices=names, default=names, help=about)
    about = "The seeds of each contender (default: 0 1 2)."
    add("--seeds", nargs="+", type=whole_number(0), default=[0, 1, 2], help=about)
    about = "Where speedrun.json and speedrun.md are (default: only print the table)."
    add("--output", type=directory, metavar="DIR", help=about)
    about = "The working directory, which needs 1 GB (default: a temporary directory)."
    add("--scratch", type=directory, metavar="DIR", help=about)
    add(
        "--ours",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="A further setting of every contender; can be repeated. The contender trainer takes "
        f"only model.* and {', '.join(OF_TRAINER)}.",
    )
    arguments = parser.parse_args()
    require_data(arguments.data, *(text for texts in TEXTS.values() for text in texts))
    if arguments.output:
        report.check_marks(arguments.output / "speedrun.md", BEGIN)
    if "trainer" in arguments.only:
        require(*PEERS)
        for setting in arguments.ours:
            if not setting.startswith(("model.", *(f"{key}=" for key in OF_TRAINER))):
                others = ", ".join(("model.*", *OF_TRAINER))
                raise BadInput(
                    f"--ours {setting} does not reach the contender trainer; give one of {others}, "
                    "or leave it out with --only bert fast"
                )
    return arguments


if __name__ == "__main__":
    run(main)
