"""Find out how long OpenMP's idle threads should spin: one run alone, and two on the same cores.

    python -m benchmarks.waiting                 # recipes/pretrain/smoke.toml on made-up rows
    python -m benchmarks.waiting --spins 300000 3000 1000 0 --rounds 5
    python -m benchmarks.waiting --layers 6 --hidden 384 --steps 40     # MiniLM's shape

Each contestant is a number of turns (GOMP_SPINCOUNT) that an idle thread of GNU's OpenMP spins
before it sleeps: 300,000 is the library's default, and 0 is what OMP_WAIT_POLICY=passive does. The
contestants alternate, and each run has two threads. The table shows real tokens a second of a run.
Runs alone are compared with the first contestant, and runs side by side with the last, round by
round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.bench import ROOT
from xformer.data.arguments import CommandParser, whole_number
from xformer.data.errors import Failure
from xformer.monitor import events
from xformer.start import SPINS, WAITING, run

DEFAULT = 300_000  # the default of libgomp
SKIP = 2  # the first lines of a log, which include the start


def main() -> None:
    parser = CommandParser(
        prog="python -m benchmarks.waiting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    spins = [DEFAULT, int(SPINS), 0]
    parser.add_argument(
        "--spins",
        type=whole_number(0),
        nargs="+",
        default=spins,
        help="turns before a thread sleeps, one number for each contestant (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=whole_number(1),
        default=3,
        help="how often each contestant runs (default: %(default)s)",
    )
    for name, least, default, about in (
        ("--steps", SKIP + 1, 400, "steps of a run"),
        ("--layers", 1, 2, "layers of the model"),
        ("--hidden", 1, 64, "hidden size of the model"),
    ):
        about += " (default: %(default)s)"
        parser.add_argument(name, type=whole_number(least), default=default, help=about)
    arguments = parser.parse_args()
    alone: dict[int, list[float]] = {number: [] for number in arguments.spins}
    both: dict[int, list[float]] = {number: [] for number in arguments.spins}
    with tempfile.TemporaryDirectory() as folder:
        make_store(Path(folder) / "store")
        for number in range(1, arguments.rounds + 1):
            for spins in arguments.spins:
                alone[spins].append(train(1, spins, Path(folder), arguments))
                both[spins].append(train(2, spins, Path(folder), arguments))
                speeds = f"{alone[spins][-1]:,.0f} alone, {both[spins][-1]:,.0f} each side by side"
                print(f"round {number}, {spins:,} spins: {speeds} tokens/s", flush=True)
    first, last = alone[arguments.spins[0]], both[arguments.spins[-1]]
    print("\n| spins | alone | to the first | side by side | to the last |")
    print("|---:|---:|---:|---:|---:|")
    for spins in arguments.spins:
        ours, theirs = alone[spins], both[spins]
        cells = [f"{spins:,}", f"{median(ours):,.0f}", ratios(ours, first)]
        cells += [f"{median(theirs):,.0f}", ratios(theirs, last)]
        print(f"| {' | '.join(cells)} |")


def ratios(ours: list[float], theirs: list[float]) -> str:
    """The median of the ratios of each round, and their range."""
    values = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def make_store(path: Path) -> None:
    """Make a store of random tokens in rows of 10 to 62 tokens."""
    command = ["preprocess.py", "synthetic", "uniform", "--tokens", "1000000"]
    command += ["--vocab-size", "8000", "--lengths", "10:62", "--output", str(path)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)


def train(runs: int, spins: int, folder: Path, arguments: argparse.Namespace) -> float:
    """Train this many runs at once, and return the mean of their real tokens a second."""
    environment = {k: v for k, v in os.environ.items() if k not in (*WAITING, "OMP_NUM_THREADS")}
    environment["GOMP_SPINCOUNT"] = str(spins)
    hidden = arguments.hidden
    settings = {
        "data": folder / "store",
        "model.layers": arguments.layers,
        "model.hidden": hidden,
        "model.heads": max(1, hidden // 32),
        "model.intermediate": 4 * hidden,
        "train.steps": arguments.steps,
        "train.validate_every": arguments.steps,
        "train.log_every": max(1, arguments.steps // 20),
        "train.keep_state": "false",
        "system.threads": 2,
        "system.precision": "fp32",
        "overwrite": "true",
    }
    line = [sys.executable, "train.py", "recipes/pretrain/smoke.toml"]
    line += [f"{key}={value}" for key, value in settings.items()]
    paths = [folder / f"run-{i}" for i in range(runs)]
    kept = subprocess.PIPE
    started = [
        subprocess.Popen([*line, f"run={path}"], cwd=ROOT, env=environment, stderr=kept, text=True)
        for path in paths
    ]
    for process, said in [(process, process.communicate()[1]) for process in started]:
        if process.returncode:
            raise Failure(f"a run failed, {' '.join(line)}: {said.strip().splitlines()[-1]}")
    return sum(map(speed, paths)) / runs


def speed(path: Path) -> float:
    """Real tokens a second of a run: the median over the lines of its log."""
    return median(line["real_tokens_per_second"] for line in events(path, "train")[SKIP:])


if __name__ == "__main__":
    run(main)
