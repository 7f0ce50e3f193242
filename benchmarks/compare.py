"""Compare two checkouts of this project: are their trainings equal, and is one slower?

    git worktree add ../before COMMIT
    python -m benchmarks.compare ../before .                     # both parts
    python -m benchmarks.compare ../before . --only exact        # minutes
    python -m benchmarks.compare ../before . --only time --pairs 15
    python -m benchmarks.compare ../before . --recipes mlm pretrain

The data is made up. OLD's preprocess.py makes the stores, and both sides train on them. Each side
runs in its own processes on the CPU, with its checkout as working directory and as PYTHONPATH. Its
C++ is compiled first.

Exact: seven tiny recipes (MLM, MLM with sentence pairs, the heads classify, regress, span and tag,
and the convolutional network) train 20 steps on one thread in each checkout, with and without
dropout. The weights of the selected checkpoint, every line of log.jsonl except for times and
speeds, and the metrics of all splits are compared. "equal" means that every byte or digit is equal.
Otherwise the largest difference is shown: for weights relative to the largest number of the tensor,
for log and metrics relative to the number itself.

Time: three recipes (pre-training, fine-tuning, fine-tuning with MiniLM's shape) train alternately
in OLD and NEW, and every second pair starts with NEW. The speed of a run is the median of the real
tokens a second in its log after the first lines, so the start of the process does not count. The
output is the median of NEW / OLD over the pairs and an interval that holds the true median with 95
% confidence (from the order statistics, without an assumption about the distribution; it needs 6
pairs). NEW is called slower only if the whole interval lies below 0.97. Do not use the machine for
other work at the same time.

The exit status says whether the comparison was completed, not its result.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.bench import cores, directory, environment, fresh
from benchmarks.quick import SPECIAL, WORDS
from benchmarks.waiting import speed
from xformer.config import flat
from xformer.data.arguments import CommandParser, whole_number
from xformer.data.errors import BadInput, Failure
from xformer.start import run

SLOWER = 0.97  # NEW is slower if the whole interval of NEW / OLD lies below this
CONFIDENCE = 0.95
LINES = 12  # lines of a timed run's log; waiting.speed leaves out the first ones
RATES = (0, 0.1)  # the rates of dropout
# runs a checkout's train.py several times in one process, so that torch is imported once
DRIVER = """
import json, runpy, sys
for line in json.loads(sys.argv[1]):
    sys.argv = line
    try:
        runpy.run_path(line[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""
# keys of the log that depend on the clock or the machine
CLOCK = ("time", "seconds", "real_tokens_per_second", "memory_gib", "mfu")
SMOKE, CLASSIFY = "recipes/pretrain/smoke.toml", "recipes/finetune/classify.toml"


def shape(layers: int, hidden: int, heads: int, most: int) -> dict[str, int]:
    """The settings of a model for rows of at most `most` tokens."""
    return {
        "model.layers": layers,
        "model.hidden": hidden,
        "model.heads": heads,
        "model.intermediate": 4 * hidden,
        "model.max_positions": most,
    }


TINY, SMALL, MINILM = shape(2, 32, 2, 64), shape(4, 256, 4, 64), shape(6, 384, 12, 512)
SHORT = {
    "batch.rows": 16,
    "batch.max_tokens": 64,
    "optim.lr": 1e-3,
    "train.steps": 20,
    "train.log_every": 1,
    "train.validate_every": 20,
    "train.select": "last",
    "system.threads": 1,
    "system.precision": "fp32",
}


@dataclass(frozen=True)
class Recipe:
    """A recipe of the checkouts, the store it trains on, and settings that override its own.
    `dropout` names the keys that switch dropout on and off."""

    file: str
    store: str
    settings: dict[str, Any] = field(default_factory=dict)
    dropout: tuple[str, ...] = ("model.dropout", "model.attention_dropout")


EXACT = {
    "mlm": Recipe(SMOKE, "text", TINY),
    "mlm+pairs": Recipe(SMOKE, "pairs", TINY | {"masking.pair_weight": 1}),
    "classify": Recipe(CLASSIFY, "classes", TINY),
    "regress": Recipe(CLASSIFY, "scores", TINY | {"head": "regress"}),
    "span": Recipe("recipes/finetune/squad.toml", "spans", TINY),
    "tag": Recipe("recipes/finetune/tag.toml", "tags", TINY),
    "hilbert": Recipe(
        "recipes/finetune/hilbert-cnn.toml",
        "dna",
        {"model.kmer": 2, "batch.max_tokens": 62},
        ("model.head_dropout",),
    ),
}
TIMED = {
    "pretrain": Recipe(SMOKE, "text", SMALL | {"model.vocab_size": 8_000}),
    # a word table of BERT's size: in a step few of its rows have a gradient
    "finetune": Recipe(CLASSIFY, "classes", SMALL | {"model.vocab_size": 30_522}),
    "minilm": Recipe(CLASSIFY, "classes", MINILM | {"model.vocab_size": 30_522}),
}


@dataclass(frozen=True)
class Sides:
    """The two checkouts, and a folder for stores and runs."""

    old: Path
    new: Path
    folder: Path

    def each(self) -> dict[str, Path]:
        return {"old": self.old, "new": self.new}


def main() -> None:
    """`python -m benchmarks.compare OLD NEW`"""
    arguments = _arguments()
    for checkout in (arguments.old, arguments.new):
        if not (checkout / "train.py").is_file():
            raise BadInput(f"{checkout} is not a checkout of this project: it has no train.py")
    chosen = set(arguments.recipes or [*EXACT, *TIMED])
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        sides = Sides(arguments.old.resolve(), arguments.new.resolve(), Path(folder))
        print(f"old: {_version(sides.old)}\nnew: {_version(sides.new)}", flush=True)
        for side in (sides.old, sides.new):
            wait(start(side, ["setup.py", "-q", "build_ext", "--inplace"]), f"compiling {side}")
        make_raw(sides.folder / "raw")
        if arguments.only != "time" and (exact := [name for name in EXACT if name in chosen]):
            compare_exactly(sides, exact)
        if arguments.only != "exact":
            names = [name for name in TIMED if name in chosen]
            compare_times(sides, names, arguments.pairs, arguments.steps, arguments.threads)


def _arguments() -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="The checkout to compare with.")
    parser.add_argument("new", type=Path, metavar="NEW", help="The checkout to compare.")
    parser.add_argument(
        "--only", choices=("exact", "time"), help="Do only this part (default: both)."
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        metavar="NAME",
        choices=[*EXACT, *TIMED],
        help=f"Compare only these: {', '.join(EXACT)} exactly, {', '.join(TIMED)} in time "
        "(default: all).",
    )
    for name, least, default, about in (
        ("--pairs", 1, 9, "How many pairs of runs are timed (default: %(default)s)."),
        ("--steps", LINES, 60, f"Steps of a timed run, at least {LINES} (default: %(default)s)."),
        ("--threads", 1, cores(), "Threads of a timed run (default: all cores of this process)."),
    ):
        parser.add_argument(name, type=whole_number(least), default=default, help=about)
    parser.add_argument(
        "--scratch",
        type=directory,
        metavar="DIR",
        help="The directory for temporary files (default: the system's).",
    )
    arguments = parser.parse_args()
    only, recipes = arguments.only, arguments.recipes
    known = {"exact": EXACT, "time": TIMED}.get(only, {})
    if only and recipes and not known.keys() & set(recipes):
        names = ", ".join(recipes)
        raise BadInput(f"--only {only} does not compare {names}; it compares {', '.join(known)}")
    return arguments


def _version(checkout: Path) -> str:
    """The path of a checkout, with its commit if git knows it."""
    line = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude", "*"]
    described = subprocess.run(line, capture_output=True, text=True, check=False)
    return f"{checkout} ({described.stdout.strip() or 'no commit'})"


# ------------------------------------------------------------------------------------- processes


def start(checkout: Path, arguments: list[str], threads: int = 1) -> subprocess.Popen[str]:
    """Start `python ARGUMENTS` with a checkout's own code."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=checkout,
        env={**environment(threads), "PYTHONPATH": str(checkout)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait(process: subprocess.Popen[str], what: str) -> None:
    """Wait for a process. Raises Failure with its last lines if it failed."""
    out, _ = process.communicate()
    if process.returncode:
        end = " | ".join(out.splitlines()[-5:])
        raise Failure(f"{what} failed with status {process.returncode}: {end}")


def training(recipe: Recipe, data: Path, out: Path, settings: dict[str, Any]) -> list[str]:
    """The arguments of a training run."""
    values = {"data": data, "run": out, **SHORT, **recipe.settings, **settings}
    return ["train.py", recipe.file, *(f"{key}={value}" for key, value in values.items())]


# ------------------------------------------------------------------------------------------ data


def make_raw(folder: Path) -> None:
    """Write the raw files of all stores. Every call writes the same files."""
    draw = np.random.default_rng(0)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choice(WORDS, draw.integers(least, most + 1)))

    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    for split, rows in (("train", 600), ("valid", 40)):
        lines = [text(5, 60) for _ in range(rows)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
        tables = {
            "classes": [f"{text(5, 30)}\t{draw.choice(['a', 'b', 'c'])}" for _ in range(rows)],
            "scores": [f"{text(5, 30)}\t{draw.random():.3f}" for _ in range(rows)],
            "pairs": [
                f"{text(5, 25)}\t{text(5, 25)}\t{draw.choice(['no', 'yes'])}" for _ in range(rows)
            ],
        }
        for name, table in tables.items():
            head = "text\ttext_b\tlabel" if name == "pairs" else "text\tlabel"
            (folder / name).mkdir(exist_ok=True)
            (folder / name / f"{split}.tsv").write_text("\n".join([head, *table]) + "\n")
        words = [
            "\n".join(f"{word} {draw.choice(['O', 'B-X', 'I-X'])}" for word in line.split())
            for line in lines
        ]
        (folder / f"{split}.conll").write_text("\n\n".join(words) + "\n")
        (folder / f"{split}.json").write_text(json.dumps(_squad(draw, rows // 8)))
    genes = [f"{draw.choice(['EI', 'IE', 'N'])},X-{i},{_letters(draw)}" for i in range(300)]
    (folder / "splice.data").write_text("\n".join(genes) + "\n")


def _squad(draw: np.random.Generator, paragraphs: int) -> dict[str, Any]:
    """Questions that are one word of their context. The answer is the next word."""
    articles = []
    for i in range(paragraphs):
        words = [str(word) for word in draw.permutation(WORDS)[:40]]
        context, questions = " ".join(words), []
        for place in draw.integers(0, 39, 4).tolist():
            begin = len(" ".join(words[: place + 1])) + 1
            answer = {"text": words[place + 1], "answer_start": begin}
            questions.append({"id": f"{i}-{place}", "question": words[place], "answers": [answer]})
        unique = list({question["id"]: question for question in questions}.values())
        articles.append({"context": context, "qas": unique})
    return {"version": "1.1", "data": [{"title": "made up", "paragraphs": articles}]}


def _letters(draw: np.random.Generator) -> str:
    return "".join(draw.choice(list("ACGT"), 60))


def store(sides: Sides, name: str) -> Path:
    """The path of a store, which OLD's preprocess.py makes if it does not exist."""
    raw, out = sides.folder / "raw", sides.folder / name
    if out.exists():
        return out
    words = [] if name in ("tokenizer", "dna") else ["--tokenizer", store(sides, "tokenizer")]
    table = ["task", "tsv", "--input", raw / name, "--text", "text", "--label", "label"]
    conll = ["--train", raw / "train.conll", "--valid", raw / "valid.conll"]
    squad = ["--train", raw / "train.json", "--valid", raw / "valid.json"]
    windows = ["--max-tokens", 32, "--stride", 10, "--max-question", 4]
    lines = {
        "tokenizer": ["tokenizer", "--from", raw / "vocab.txt"],
        "text": ["text", "--lines", "--input", raw / "train.txt", "--valid", raw / "valid.txt"],
        "classes": table,
        "scores": [*table, "--kind", "score"],
        "pairs": [*table, "--text-b", "text_b"],
        "tags": ["task", "conll", *conll],
        "spans": ["task", "squad", *squad, *windows],
        "dna": ["task", "dna/splice", "--input", raw / "splice.data"],
    }
    line = ["preprocess.py", *lines[name], *words, "--output", out]
    wait(start(sides.old, [str(part) for part in line]), f"making {name}")
    return out


# ----------------------------------------------------------------------------------- bit for bit


def compare_exactly(sides: Sides, names: list[str]) -> None:
    """Train every recipe in both checkouts at once and print a row of the table for each."""
    print("\n| recipe | dropout | weights | log | metrics |\n|---|---:|---|---|---|", flush=True)
    for name in names:
        recipe = EXACT[name]
        data = store(sides, recipe.store)
        outs = {side: fresh(sides.folder / f"{side} runs") for side in sides.each()}
        going = {}
        for side, checkout in sides.each().items():
            lines = [
                training(recipe, data, outs[side] / str(rate), dict.fromkeys(recipe.dropout, rate))
                for rate in RATES
            ]
            going[side] = start(checkout, ["-c", DRIVER, json.dumps(lines)])
        for side, process in going.items():
            wait(process, f"{name} in {side}, {sides.each()[side]},")
        for rate in RATES:
            old, new = (out / str(rate) for out in outs.values())
            cells = [name, str(rate), *differences(old, new)]
            print(f"| {' | '.join(cells)} |", flush=True)


def differences(old: Path, new: Path) -> list[str]:
    """How weights, log and metrics of two finished runs differ: "equal", or by how much."""
    return [
        _of_weights(_weights(old), _weights(new)),
        _of_numbers(_log(old), _log(new)),
        _of_numbers(flat(_result(old)["metrics"]), flat(_result(new)["metrics"])),
    ]


def _result(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((path / "result.json").read_text(encoding="utf-8"))
    return result


def _weights(path: Path) -> Path:
    return path / _result(path)["selected"] / "model.safetensors"


def _log(path: Path) -> dict[str, Any]:
    """The values of all lines of the log, by event, step, split and name."""
    numbers: dict[str, Any] = {}
    for line in map(json.loads, (path / "log.jsonl").read_text(encoding="utf-8").splitlines()):
        place = f"{line['event']} {line['step']} {line.get('split', '')}".strip()
        for key, value in flat(line).items():
            if key.partition(".")[0] not in CLOCK:
                numbers[f"{place}: {key}"] = value
    return numbers


def _of_weights(old: Path, new: Path) -> str:
    if old.read_bytes() == new.read_bytes():
        return "equal"
    a, b = load_file(old), load_file(new)
    if problem := _other_names(a, b):
        return problem
    difference = {}
    for name, tensor in a.items():
        if tensor.shape != b[name].shape:
            return f"{name} has another shape"
        one, two = (x.astype(np.float64) for x in (tensor, b[name]))
        largest = float(np.abs(one).max(initial=0))
        difference[name] = _relative(float(np.abs(one - two).max(initial=0)), largest)
    name = max(difference, key=lambda key: difference[key])
    if not difference[name]:
        return "equal numbers in other bytes"
    return f"{difference[name]:.1e} in {name}"


def _of_numbers(old: dict[str, Any], new: dict[str, Any]) -> str:
    if problem := _other_names(old, new):
        return problem
    difference: dict[str, float] = {}
    for name, value in old.items():
        numbers = isinstance(value, int | float) and isinstance(new[name], int | float)
        if not numbers and value != new[name]:
            return f"{name} is another text"
        if numbers:
            difference[name] = _relative(abs(value - new[name]), abs(value))
    name = max(difference, key=lambda key: difference[key], default="")
    return "equal" if not name or difference[name] == 0 else f"{difference[name]:.1e} in {name}"


def _relative(difference: float, size: float) -> float:
    """A difference relative to a size; NaN counts as infinite."""
    if difference == 0:
        return 0.0
    return difference / size if size and difference == difference else math.inf


def _other_names(old: dict[str, Any], new: dict[str, Any]) -> str:
    missing, more = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    if missing:
        return f"new lacks {len(missing)}, such as {missing[0]}"
    return f"new has {len(more)} more, such as {more[0]}" if more else ""


# ----------------------------------------------------------------------------------------- time


def compare_times(sides: Sides, names: list[str], pairs: int, steps: int, threads: int) -> None:
    """Time the checkouts in pairs of runs. Prints each pair, and a verdict for each recipe."""
    for name in names:
        recipe = TIMED[name]
        data = store(sides, recipe.store)
        print(f"\n{name}: {pairs} pairs of {steps} steps, {threads} threads, tokens a second")
        ratios = []
        for pair in range(pairs):
            took = {}
            for side in ("old", "new") if pair % 2 == 0 else ("new", "old"):
                out = fresh(sides.folder / "run")
                settings = {
                    "train.steps": steps,
                    "train.validate_every": steps,
                    "train.log_every": steps // LINES,
                    "train.keep_state": "false",
                    "system.threads": threads,
                    "batch.rows": 32,
                }
                line = training(recipe, data, out, settings)
                wait(start(sides.each()[side], line, threads), f"{name} in {side}")
                took[side] = speed(out)
            ratios.append(took["new"] / took["old"])
            shown = f"old {took['old']:,.0f}  new {took['new']:,.0f}  ratio {ratios[-1]:.3f}"
            print(f"  pair {pair + 1}  {shown}", flush=True)
        print(f"{name}: {verdict(ratios)}", flush=True)


def verdict(ratios: list[float]) -> str:
    """The median of the ratios of NEW to OLD, its interval, and whether NEW is slower."""
    middle = f"median NEW / OLD {median(ratios):.3f}"
    place = place_of(len(ratios))
    if place == 0:
        return f"{middle}; {len(ratios)} pairs are too few for an interval"
    low, high = sorted(ratios)[place - 1], sorted(ratios)[-place]
    wholly = "lies wholly below" if high < SLOWER else "does not lie wholly below"
    slower = "NEW is slower" if high < SLOWER else "NEW is not shown to be slower"
    return f"{middle} ({low:.3f} to {high:.3f}); the interval {wholly} {SLOWER}: {slower}"


def place_of(count: int) -> int:
    """The largest k such that the k-th smallest and the k-th largest of `count` values enclose the
    median of their distribution with CONFIDENCE; 0 if there is none.

    Each value lies below the median with probability 1/2. The interval misses it only if fewer than
    k values lie on one of its sides.
    """
    best, missed = 0, 0.0
    for k in range(1, count // 2 + 1):
        missed += 2 * math.comb(count, k - 1) / 2**count
        if missed <= 1 - CONFIDENCE:
            best = k
    return best


if __name__ == "__main__":
    run(main)
