"""How OpenMP's idle threads should wait: one run alone, and two runs on the same cores.

    python -m benchmarks.waiting                 # recipes/pretrain/smoke.toml on made-up rows
    python -m benchmarks.waiting --spins 300000 3000 1000 0 --rounds 5
    python -m benchmarks.waiting --layers 6 --hidden 384 --steps 40     # MiniLM's shape

Each contestant is a number of turns (GOMP_SPINCOUNT) that a thread of GNU's OpenMP waits awake for
work before it sleeps: 300,000 is the library's own default, 0 what OMP_WAIT_POLICY=passive does.
All train by turns, each run with two threads. Printed are real tokens a second of a run, and their
ratio to the first contestant alone and to the last one side by side, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.bench import ROOT
from xformer.data.errors import Failure
from xformer.start import SPINS, WAITING, run

DEFAULT = 300_000  # of libgomp
SKIP = 2  # lines of a log that belong to the start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    spins = [DEFAULT, int(SPINS), 0]
    parser.add_argument("--spins", type=int, nargs="+", default=spins, help="the contestants")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--steps", type=int, default=400, help="steps of a run")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
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
    found = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def make_store(path: Path) -> None:
    """Rows of tokens drawn at random, 10 to 62 tokens long."""
    command = ["preprocess.py", "synthetic", "uniform", "--tokens", "1000000"]
    command += ["--vocab-size", "8000", "--lengths", "10:62", "--output", str(path)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)


def train(runs: int, spins: int, folder: Path, arguments: argparse.Namespace) -> float:
    """Real tokens a second of each of so many runs at once, the mean of the runs."""
    environment = {k: v for k, v in os.environ.items() if k not in (*WAITING, "OMP_NUM_THREADS")}
    environment["GOMP_SPINCOUNT"] = str(spins)
    hidden = arguments.hidden
    settings = {
        "data": folder / "store",
        "model.layers": arguments.layers,
        "model.hidden": hidden,
        "model.heads": hidden // 32,
        "model.intermediate": 4 * hidden,
        "train.steps": arguments.steps,
        "train.validate_every": arguments.steps,
        "train.log_every": max(1, arguments.steps // 20),
        "train.keep_state": "false",
        "system.threads": 2,
        "overwrite": "true",
    }
    line = [sys.executable, "train.py", "recipes/pretrain/smoke.toml"]
    line += [f"{key}={value}" for key, value in settings.items()]
    paths = [folder / f"run-{i}" for i in range(runs)]
    quiet = subprocess.DEVNULL
    started = [
        subprocess.Popen([*line, f"run={path}"], cwd=ROOT, env=environment, stderr=quiet)
        for path in paths
    ]
    if any(process.wait() for process in started):
        raise Failure(f"a run failed: {' '.join(line)} run={paths[0]}")
    return sum(map(speed, paths)) / runs


def speed(path: Path) -> float:
    """Real tokens a second of a run: the median of its log's lines."""
    records = map(json.loads, (path / "log.jsonl").read_text().splitlines())
    values = [r["real_tokens_per_second"] for r in records if r["event"] == "train"]
    return median(values[SKIP:])


if __name__ == "__main__":
    run(main)
