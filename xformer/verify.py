"""Repeat the first steps of a run, and compare the new log with the old one bit for bit.

python -m xformer.study verify runs/english steps=20
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import Field

from xformer import checkpoint as checkpoints
from xformer import provenance, start, train
from xformer.children import same_code
from xformer.config import Settings, each, help_text, parse_overrides, validate
from xformer.data.display import say
from xformer.data.errors import BadInput, Failure
from xformer.data.files import is_run, read_json, read_run_json
from xformer.model.config import DROPOUT
from xformer.monitor import ENDS, records
from xformer.parallel import processes
from xformer.parallel.processes import TORCHRUN
from xformer.recipe import Recipe

# fields of a log's record that the clock or the machine decides, and one that older versions wrote
CLOCK = {"time", "seconds", "real_tokens_per_second", "memory_gib", "mfu", "padding"}


class Verify(Settings):
    """How much of a run to make again."""

    steps: int = Field(20, ge=1)
    """How many steps to repeat, from the first. At least the run's train.log_every are repeated,
    because its log has one line for that many."""


def main(arguments: list[str]) -> None:
    """`python -m xformer.study verify RUN key=value ...`: one line, "same" or what differs first.

    Raises Failure if the new log differs, BadInput if the run cannot be repeated.
    """
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        say(*help_text(Verify, __doc__).split("\n"))
        return
    run = Path(arguments[0])
    if not is_run(run / "config.json"):
        raise BadInput(f"{run} is not a run: it has no config.json that training wrote")
    steps = validate(Verify, parse_overrides(Verify, arguments[1:])).steps
    content = read_run_json(run / "config.json")
    first, *later = content["starts"]
    if first["step"]:
        raise BadInput(f"{run}/config.json lacks the settings of its first steps; give another run")
    config = first["config"]
    steps = max(steps, config["train"]["log_every"])
    steps = min([steps, *(other["step"] for other in later)])
    expected = _records(run, steps)
    steps = max((record["step"] for record in expected), default=0)
    if not steps:
        raise BadInput(f"{run / 'log.jsonl'} has no line of a step to compare")
    with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
        again = Path(scratch) / "run"
        _make({**config, "model": _model(run, config)}, first["environment"], again, steps)
        now, made = read_json(again / "config.json"), _records(again, steps)
    for name in ("data", "init"):
        if content["identity"].get(name) != now["identity"].get(name):
            place = " and ".join(each(config[name]))
            raise BadInput(f"{name}={place} is not what {run} was made with")
    changes = "; ".join(provenance.changes(first, {**now, "config": config}))
    changed = f" ({changes})" if changes else " with the same versions"
    if difference := _first_difference(expected, made):
        raise Failure(f"{run} is not reproduced: {difference}{changed}")
    say(f"{run}: {steps} steps made again, {len(expected)} records of its log the same{changed}")


def _model(run: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The model settings that make a run again.

    A run that starts from a checkpoint has its shape from there. Earlier versions recorded the
    default shape and dropout all the same, so only the dropout of the trained model is kept.
    """
    if config["init"] is None:
        model: dict[str, Any] = config["model"]
        return model
    trained = checkpoints.by_step(run / "checkpoints")
    if not trained:
        raise BadInput(f"{run} has no checkpoint to read its dropout from")
    checkpoint = checkpoints.load(next(iter(trained.values())))
    return checkpoint.config.model_dump(mode="json", include=set(DROPOUT))


def _make(config: dict[str, Any], environment: dict[str, Any], again: Path, steps: int) -> None:
    """Repeat the first steps of a run in the directory `again`, in as many processes with as many
    threads as the first time."""
    ranks = environment["world_size"]
    system = {**config["system"], "threads": environment.get("threads", 0), "profile": False}
    no_weights = {**config["train"], "keep_at": []}
    own = {"run": str(again), "overwrite": False, "system": system, "train": no_weights}
    recipe = again.with_name("recipe.json")
    recipe.write_text(json.dumps({**config, **own}), encoding="utf-8")
    launcher = (*TORCHRUN, str(ranks)) if ranks > 1 else ()
    line = [sys.executable, *launcher, "-m", __name__, str(recipe), str(steps)]
    environ = os.environ | same_code()
    done = subprocess.run(line, capture_output=True, text=True, errors="replace", env=environ)
    if done.returncode:
        said = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
        raise Failure(said[0].removeprefix("error: ") if said else done.stderr.strip()[-400:])


def again() -> None:
    """What `_make` starts: a recipe as JSON, and how many steps of it to make."""
    recipe = validate(Recipe, read_json(Path(sys.argv[1])))
    with processes.group():
        train.train(recipe, processes.start(recipe.system), int(sys.argv[2]))


def _records(run: Path, steps: int) -> list[dict[str, Any]]:
    """The log to a step, without its end and what the clock decides."""
    return [
        {k: v for k, v in record.items() if k not in CLOCK}
        for record in records(run)
        if record["step"] <= steps and record["event"] not in ENDS
    ]


def _first_difference(expected: list[dict[str, Any]], made: list[dict[str, Any]]) -> str:
    for a, b in zip(expected, made, strict=False):
        if a != b:
            name = next(k for k in {**a, **b} if a.get(k) != b.get(k))
            return f"{a['event']} at step {a['step']}: {name} {a.get(name)} is now {b.get(name)}"
    if len(expected) != len(made):
        return f"{len(expected)} records are now {len(made)}"
    return ""


if __name__ == "__main__":
    start.run(again)
