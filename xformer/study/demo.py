"""The main job on an embedded default, as a user would type it: `make demo`.

English that every Python carries, and a corpus of nested brackets without any meaning; an encoder
pre-trained on each; both, and a from-scratch twin, fine-tuned to tell which part of the library a
passage documents; the scores of every seed, a table and a picture. Every step is a command of this
project, and the report prints them all.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from xformer.data.display import Progress, say
from xformer.data.errors import Failure
from xformer.start import run
from xformer.study.report import FineTuned, PreTrained, write_report

SEEDS = (0, 1, 2)
STARTS = {"english": "English", "nesting": "brackets", "scratch": "scratch"}
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PRETRAIN = "recipes/pretrain/demo.toml"
FINETUNE = "recipes/finetune/demo.toml"
TWIN = 'surgery=[{op="clean"}]'


@dataclass
class Stage:
    """Commands that run side by side; `weight` is their expected seconds on two cores."""

    name: str
    weight: float
    commands: list[list[str]]
    runs: list[Path] = field(default_factory=list)  # whose logs tell how far they are


def stages(demo: Path) -> list[Stage]:
    """Everything the demo does, in order."""
    raw, stores, tok = demo / "raw", demo / "stores", str(demo / "tokenizer")
    english, nesting, task = (str(stores / name) for name in ("english", "nesting", "task"))
    pre = [*PYTHON, "preprocess.py"]
    again = "--overwrite"
    done = [
        Stage("raw text", 6, [[*pre, "pydocs", "--output", str(raw), again]]),
        Stage(
            "tokenizer",
            3,
            [
                [
                    *pre,
                    "tokenizer",
                    "--kind",
                    "wordpiece",
                    "--vocab-size",
                    "4000",
                    "--input",
                    str(raw / "english.txt"),
                    "--output",
                    tok,
                    again,
                ]
            ],
        ),
        Stage(
            "stores",
            6,
            [
                [
                    *pre,
                    "text",
                    "--input",
                    str(raw / "english.txt"),
                    "--valid",
                    str(raw / "english.valid.txt"),
                    "--tokenizer",
                    tok,
                    "--max-tokens",
                    "62",
                    "--output",
                    english,
                    again,
                ],
                [
                    *pre,
                    "task",
                    "tsv",
                    "--input",
                    str(raw / "task"),
                    "--text",
                    "passage",
                    "--label",
                    "module",
                    "--tokenizer",
                    tok,
                    "--output",
                    task,
                    again,
                ],
            ],
        ),
        Stage(
            "bracket store",
            3,
            [
                [
                    *pre,
                    "synthetic",
                    "nesting",
                    "--tokens",
                    "1000000",
                    "--frequencies",
                    english,
                    "--lengths",
                    "30:62",
                    "--output",
                    nesting,
                    again,
                ]
            ],
        ),
    ]
    for name, store in (("english", english), ("nesting", nesting)):
        path = demo / f"pretrain-{name}"
        command = [*TORCHRUN, "train.py", PRETRAIN, f"data={store}", f"run={path}"]
        done.append(Stage(f"pre-train on {name}", 90, [command], [path]))
    for seed in SEEDS:
        paths = {name: demo / f"finetune-{name}-{seed}" for name in STARTS}
        commands = [fine_tune(demo, name, task, path, seed) for name, path in paths.items()]
        done.append(Stage(f"fine-tune each start, seed {seed}", 55, commands, [*paths.values()]))
    return done


def fine_tune(demo: Path, start: str, task: str, path: Path, seed: int) -> list[str]:
    """The command that fine-tunes from a start on the task."""
    init = demo / f"pretrain-{'nesting' if start == 'nesting' else 'english'}"
    extra = {"english": [], "nesting": ["mapping=ids"], "scratch": [TWIN]}[start]
    return [
        *PYTHON,
        "train.py",
        FINETUNE,
        f"data={task}",
        f"init={init}",
        *extra,
        f"seed={seed}",
        "system.threads=1",
        f"run={path}",
    ]


def execute(stage: Stage, logs: Path) -> Iterator[float]:
    """Run a stage's commands side by side, yielding the share that is done now and then.

    Raises Failure with the end of the output of a command that failed.
    """
    outputs = [logs / f"{stage.name}-{i}.txt" for i in range(len(stage.commands))]
    processes = []
    for command, output in zip(stage.commands, outputs, strict=True):
        with output.open("w", encoding="utf-8") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
    try:
        while any(p.poll() is None for p in processes):
            time.sleep(0.25)
            yield min((progress(path) for path in stage.runs), default=0.0)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
    for process, command, output in zip(processes, stage.commands, outputs, strict=True):
        if process.returncode:
            tail = output.read_text(encoding="utf-8").strip().splitlines()[-15:]
            raise Failure(f"this command failed: {shlex.join(command)}\n" + "\n".join(tail))


def progress(path: Path) -> float:
    """How much of a run is done, from the last line of its log."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))["config"]["train"]
        lines = (path / "log.jsonl").read_text(encoding="utf-8").splitlines()
        last = next(e for e in map(json.loads, reversed(lines)) if e["event"] == "train")
    except (OSError, ValueError, StopIteration):
        return 0.0
    share = last["step"] / config["steps"] if config["steps"] else last["epoch"] / config["epochs"]
    return min(share, 1.0)


def main() -> None:
    """`python -m xformer.study.demo [--output runs/demo]`"""
    parser = argparse.ArgumentParser(prog="python -m xformer.study.demo", description=__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/demo"),
        help="Directory of the demo; default runs/demo.",
    )
    demo = parser.parse_args().output
    if (demo / "report.md").exists():
        say(f"{demo} holds a finished demo: starting anew")
        shutil.rmtree(demo)
    logs = demo / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    plan = stages(demo)
    seconds: dict[str, float] = {}
    total = sum(stage.weight for stage in plan)
    with Progress("demo", total, "s of work", stay=True) as shown:
        before = 0.0
        for number, stage in enumerate(plan, 1):
            shown.what = stage.name
            begin = time.perf_counter()
            for share in execute(stage, logs):
                shown.advance(before + stage.weight * share - shown.done, stage=number)
            before += stage.weight
            shown.advance(before - shown.done, stage=number)
            seconds[stage.name] = time.perf_counter() - begin
            say(f"[{number}/{len(plan)}] {stage.name}: {seconds[stage.name]:.0f} s")
    pre_trained = [
        PreTrained(n, demo / f"pretrain-{n}", demo / f"stores/{n}") for n in ("english", "nesting")
    ]
    fine_tuned = [
        FineTuned(label, [demo / f"finetune-{name}-{seed}" for seed in SEEDS])
        for name, label in STARTS.items()
    ]
    commands = [command for stage in plan for command in stage.commands]
    say(*write_report(demo, pre_trained, fine_tuned, commands, seconds).split("\n"))
    say("", f"report   {demo / 'report.md'}   {demo / 'report.png'}")
    say(f"watch    tensorboard --logdir {demo}")


if __name__ == "__main__":
    run(main)
