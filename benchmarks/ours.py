"""Our side: train.py as a user runs it, and the measurements that no command makes.

    python -m benchmarks.ours '{"do": "evaluate", "model": "classes2/ours", "store": "mrpc", ...}'

Prints its measurements as one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench import ROOT, Bench, Ended, Took, command, fresh
from xformer import checkpoint as checkpoints
from xformer.config import load
from xformer.data.batch import Assembler
from xformer.data.errors import Failure
from xformer.data.store import open_store
from xformer.monitor import events
from xformer.parallel import processes
from xformer.parallel.feed import STEPS_AHEAD
from xformer.parallel.processes import SystemConfig
from xformer.prepare import prepare
from xformer.recipe import Recipe
from xformer.scoring import score
from xformer.start import run

RECIPES = {"mlm": "benchmarks/mlm.toml", "classify": "recipes/finetune/classify.toml"}


def train(
    bench: Bench, task: str, store: Path, init: Path, *, steps: int, every: int, settings: list[str]
) -> tuple[Took, Ended]:
    """Run train.py for `steps` steps with a line of the log every `every` steps.

    Measures `rate` (real tokens a second after the log's first line), `first` (seconds from the
    start of the command to that line), `seconds` (of the whole command) and `memory_gib` (the
    highest resident memory up to the log's last line).
    """
    out = fresh(bench.folder / "run")
    line = [
        "train.py",
        RECIPES[task],
        f"data={store}",
        f"run={out}",
        f"init={init}",
        f"batch.max_tokens={bench.size.length}",
        "optim.lr=1e-4",
        "train.select=last",
        f"train.steps={steps}",
        f"train.log_every={every}",
        "overwrite=true",
        f"system.precision={bench.precision}",
        f"system.threads={bench.threads}",
        *settings,
    ]
    ended = command(line, bench.threads)
    logged = events(out, "train")
    took = {"rate": rate(logged)} if len(logged) > 1 else {}
    took |= {"first": logged[0]["time"] - ended.started, "seconds": ended.seconds}
    took |= {"memory_gib": logged[-1]["memory_gib"]}
    fresh(out)
    return took, ended


def rate(logged: list[dict[str, float]]) -> float:
    """Real tokens per second between the first and the last line of the log.

    Each line has the rate since the line before it.
    """
    taken = [(b["time"] - a["time"], b["real_tokens_per_second"]) for a, b in pairwise(logged)]
    return sum(seconds * speed for seconds, speed in taken) / sum(seconds for seconds, _ in taken)


# ------------------------------------------------------------------ each in a separate process


def evaluate(
    model: str, store: str, split: str, length: int, passes: int, threads: int, precision: str
) -> Took:
    """Real tokens a second of forward passes over a whole split, after one pass to warm up."""
    ranks = processes.start(SystemConfig(threads=threads))
    checkpoint, data = checkpoints.load(model), open_store(store)
    assert checkpoint.head is not None
    rows = Assembler(data.split(split), checkpoint.tokenizer, length)
    tokens = int(rows.sizes(np.arange(rows.split.rows)).sum())
    net = checkpoint.model().to(ranks.device)
    seconds = []
    for _ in range(1 + passes):
        started = time.perf_counter()
        score(net, rows, ranks, precision)
        seconds.append(time.perf_counter() - started)
    return {"rate": tokens * passes / sum(seconds[1:]), "tokens": tokens}


def batches(store: str, init: str, batch: list[str], count: int) -> Took:
    """Real tokens a second of the training loop's feed, with masking, in one process. The pages of
    the store are in memory. The feed makes up to STEPS_AHEAD steps at once, so the clock starts and
    stops between two such groups: after `count` steps or more."""
    warm_up = count // 10 + 1
    keys = [str(ROOT / RECIPES["mlm"]), f"data={store}", "run=none", f"init={init}", *batch]
    keys.append(f"train.steps={warm_up + count + 2 * STEPS_AHEAD}")
    job = prepare(load(Recipe, keys), processes.Ranks(0, 1, torch.device("cpu")))
    feed, position, steps, tokens, started = job.feed(), 0, 0, 0, 0.0
    job.store.verify_in_background(lambda damage: None).join()  # reads every page
    while True:
        if position not in feed.made:
            if started and steps >= count:
                break
            if not started and steps >= warm_up:
                steps, tokens, started = 0, 0, time.perf_counter()
        step = feed.take(position)
        position = step.end
        if not step.batches or step.batches[0].places is None:
            raise Failure("the feed gave a batch without masks")
        steps, tokens = steps + 1, tokens + step.work.tokens
    return {"rate": tokens / (time.perf_counter() - started), "a batch": tokens / steps}


def main() -> None:
    job = json.loads(sys.argv[1])
    functions: dict[str, Callable[..., Took]] = {"evaluate": evaluate, "batches": batches}
    print(json.dumps(functions[job.pop("do")](**job)))


if __name__ == "__main__":
    run(main)
