"""Time each operation on BERT-base (Zhang 2021, table 7) and a straightforward equivalent.

    python -m benchmarks.surgery
    python -m benchmarks.surgery --rounds 1 --only reverse_layers

Writes a BERT-base with 109 M random parameters to a temporary directory and runs each operation as
a command. All times are seconds. "work" is what the command does: open the checkpoint and verify
its checksums, operate, write the new checkpoint with checksums and flush it. "command" adds the
start of Python and torch. "the obvious way" runs in a process that has imported everything: it
copies all weights into memory, operates with the usual calls of torch and scipy, and saves without
checksums or a flush.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from torch import Tensor

from benchmarks.bench import ROOT
from xformer import checkpoint as checkpoints
from xformer.data import tokenizers, vocabularies
from xformer.data.arguments import CommandParser, whole_number
from xformer.data.errors import BadInput
from xformer.data.writing import create_store
from xformer.model.config import ModelConfig
from xformer.start import run

WORD = "encoder.embeddings.word.weight"
PIECES = 30_522
Weights = dict[str, Tensor]


def make(directory: Path) -> None:
    """Write two BERT-bases, and a store in which 50 pieces occur."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = map("".join, product(letters, repeat=4))
    special = list(tokenizers.BERT_SPECIAL.values())
    pieces = [*special, *(next(words) for _ in range(PIECES - len(special)))]
    known = vocabularies.wordpiece({piece: i for i, piece in enumerate(pieces)}, lowercase=True)
    for seed, name in enumerate(("base", "english")):
        checkpoints.save(checkpoints.fresh(ModelConfig(), known, seed), directory / name)
    with create_store(directory / "store", known, {"tokens": ""}, ("tokens",)) as writer:
        with writer.split("train") as split:
            split.append_ragged("tokens", np.arange(5, 55), np.array([50]))
        writer.finish("text", [], None, {})


def reverse(state: Weights, _: Path) -> Weights:
    def name(old: str) -> str:
        return re.sub(r"layers\.(\d+)", lambda match: f"layers.{11 - int(match[1])}", old)

    return {name(old): weight for old, weight in state.items()}


def halve(state: Weights, _: Path) -> Weights:
    return {n: w for n, w in state.items() if not re.search(r"layers\.([6-9]|1[01])\.", n)}


def normal(state: Weights, _: Path) -> Weights:
    return {n: torch.empty_like(w).normal_(0, 0.02) if w.ndim > 1 else w for n, w in state.items()}


def truncated(state: Weights, _: Path) -> Weights:
    return {n: _scipy(w) if w.ndim > 1 else w for n, w in state.items()}


def last_layers(state: Weights, _: Path) -> Weights:
    return {n: _scipy(w) if w.ndim > 1 and ".layers." in n else w for n, w in state.items()}


def _scipy(weight: Tensor) -> Tensor:
    drawn = stats.truncnorm.rvs(-2, 2, scale=0.02, size=tuple(weight.shape))
    return torch.from_numpy(drawn.astype(np.float32))


def one_head(state: Weights, _: Path) -> Weights:
    qkv, out = (state[f"encoder.layers.0.attention.{n}.weight"] for n in ("qkv", "out"))
    for start in (0, 768, 1536):
        qkv[start : start + 64] = _scipy(qkv[start : start + 64])
    out[:, :64] = _scipy(out[:, :64])
    return state


def clean_words(state: Weights, _: Path) -> Weights:
    return {**state, WORD: torch.empty_like(state[WORD]).normal_(0, 0.02)}


def shuffle_words(state: Weights, _: Path) -> Weights:
    return {**state, WORD: state[WORD][torch.randperm(PIECES)]}


def take_words(state: Weights, directory: Path) -> Weights:
    other = load_file(directory / "english/model.safetensors")
    return {**state, WORD: {name: weight.clone() for name, weight in other.items()}[WORD]}


def copy_words(state: Weights, _: Path) -> Weights:
    state[WORD][55:] = state[WORD][5:55][torch.randint(50, (PIECES - 55,))]
    return state


def scaled(state: Weights, _: Path) -> Weights:
    return {n: torch.randn_like(w) * w.std() if w.ndim > 1 else w for n, w in state.items()}


def oracle(state: Weights, _: Path) -> Weights:
    return {n: w.flatten()[torch.randperm(w.numel())].view(w.shape) for n, w in state.items()}


CASES: dict[str, Callable[[Weights, Path], Weights]] = {
    "reverse_layers": reverse,
    "clean(distribution=normal)": normal,
    "clean(distribution=truncated)": truncated,
    "clean_embeddings": clean_words,
    "shuffle_embeddings": shuffle_words,
    "transplant(source=DIR/english)": take_words,
    "reinit_scaled(match=variance)": scaled,
    "oracle_shuffle": oracle,
    "keep_layers(first=6)": halve,
    "reinit_last_layers(from_layer=1)": last_layers,
    "reinit_head(layer=1, head=1)": one_head,
    "substitute_unused(store=DIR/store)": copy_words,
}


def by_command(operation: str, directory: Path) -> tuple[float, float]:
    """The seconds of work, and the seconds of the whole command."""
    out = directory / "out"
    shutil.rmtree(out, ignore_errors=True)
    line = [
        sys.executable,
        "-m",
        "xformer.surgery",
        str(directory / "base"),
        str(out),
        operation.replace("DIR", str(directory)),
    ]
    began = time.perf_counter()
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-2]), time.perf_counter() - began


def the_obvious_way(change: Callable[[Weights, Path], Weights], directory: Path) -> float:
    """The seconds to load all weights, change them and save them."""
    out = directory / "obvious.safetensors"
    out.unlink(missing_ok=True)
    began = time.perf_counter()
    loaded = load_file(directory / "base/model.safetensors")
    state = change({name: weight.clone() for name, weight in loaded.items()}, directory)
    save_file({name: weight.contiguous() for name, weight in state.items()}, out)
    return time.perf_counter() - began


def main() -> None:
    """Print the table of docs/surgery.md."""
    parser = CommandParser(
        prog="python -m benchmarks.surgery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    about = "Rounds over all operations (default: %(default)s)."
    parser.add_argument("--rounds", type=whole_number(1), default=5, help=about)
    about = "Time operations that begin with this text (default: all)."
    parser.add_argument("--only", default="", metavar="TEXT", help=about)
    parser.add_argument("--alone", action="store_true", help="Do not time the obvious way.")
    arguments = parser.parse_args()
    chosen = {o: case for o, case in CASES.items() if o.startswith(arguments.only)}
    if not chosen:
        raise BadInput(f"no operation begins with {arguments.only!r}: {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        make(directory)
        rounds: dict[str, list[tuple[float, ...]]] = {operation: [] for operation in chosen}
        for number in range(arguments.rounds):
            for operation, change in chosen.items():
                # scipy takes a minute, so it runs once
                skip = arguments.alone or (number > 0 and change in (truncated, last_layers))
                obvious = float("nan") if skip else the_obvious_way(change, directory)
                rounds[operation].append((*by_command(operation, directory), obvious))
    print("| operation | work | command | the obvious way |\n|---|---|---|---|")
    for operation, taken in rounds.items():
        medians = [
            statistics.median([x for x in column if x == x] or [float("nan")])
            for column in zip(*taken, strict=True)
        ]
        shown = " | ".join(f"{x:.2f}" if x == x else "-" for x in medians)
        print(f"| `{operation}` | {shown} |")


if __name__ == "__main__":
    run(main)
