"""train.py as users run it: exact resuming, ranks, refusals, learning and monitoring."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    CLASSIFY,
    NO_DROPOUT,
    QUIET,
    ROOT,
    SMOKE,
    Forks,
    command,
    good,
    refused,
    start,
    training,
)
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toys import Toys

from xformer import checkpoint as checkpoints
from xformer import session
from xformer.config import all_keys, load
from xformer.data.batch import Batch, Workload
from xformer.data.errors import BadInput
from xformer.data.files import read_json
from xformer.data.mixture import Mixture
from xformer.data.rows import write_store
from xformer.data.sampler import Samples
from xformer.data.store import open_store
from xformer.data.vocabularies import symbols
from xformer.monitor import Monitor, curves, peak_memory
from xformer.parallel.precision import speed_note
from xformer.parallel.processes import ALONE, Ranks
from xformer.prepare import prepare
from xformer.recipe import Recipe
from xformer.run import State, _refuse_other_settings, changes, completed
from xformer.setup import rows_per_step
from xformer.trajectory import Timeline

SHORT = [
    "train.steps=15",
    "train.checkpoint_every=4",
    "train.validate_every=6",
    "train.log_every=3",
]
# values that depend on the clock or on the moment of a restart
CLOCK = {"time", "seconds", "real_tokens_per_second", "memory_gib"}

# Python that sends this process a signal once a step is done and earlier checkpoints are written
AT_STEP = """
import os, signal
from xformer.monitor import Monitor
from xformer.writer import BackgroundWriter
quiet_advance, quiet_start, tasks = Monitor.advance, BackgroundWriter.start, []
def start(self, *work):
    quiet_start(self, *work)
    tasks.append(self.task)
BackgroundWriter.start = start
def advance(self, done):
    quiet_advance(self, done)
    if done == {step} and os.environ.get("RANK", "0") in "{ranks}":
        [task.result() for task in tasks]
        os.kill(os.getpid(), signal.{signal})
Monitor.advance = advance
"""


def timeless(value: Any) -> Any:
    """A JSON value without the entries that depend on the clock."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in CLOCK}
    return value


def log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def content(run: Path) -> dict[str, Any]:
    """Everything in a run that must be the same whether or not it was stopped."""
    actual: dict[str, Any] = {"log": timeless_log(run), "result": result(run)}
    actual["predictions"] = {p.name: p.read_bytes() for p in (run / "predictions").iterdir()}
    for path in (run / "checkpoints").glob("step_*"):
        actual[path.name] = [
            (path / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")
        ]
        actual[path.name] += [timeless(read_json(path / f"{n}.json")) for n in ("state", "config")]
    return actual


def timeless_log(run: Path) -> list[dict[str, Any]]:
    return [timeless(record) for record in log(run)]


def result(run: Path) -> dict[str, Any]:
    return timeless(read_json(run / "result.json"))


def board(run: Path) -> EventAccumulator:
    """The curves that TensorBoard shows."""
    shown = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    return shown.Reload()


def drawn_once(run: Path) -> None:
    """Assert that TensorBoard shows the numbers of the log, each of them once."""
    expected: dict[str, list[tuple[int, float]]] = {}
    for record in log(run):
        for name, value in curves(record).items():
            point = (record["step"], float(np.float32(value)))
            expected.setdefault(name, []).append(point)
    shown = board(run)
    actual = {t: [(e.step, e.value) for e in shown.Scalars(t)] for t in shown.Tags()["scalars"]}
    assert actual == expected


def start_texts(run: Path) -> dict[int, list[str]]:
    """The texts about the run's starts that TensorBoard shows, by step."""
    texts: dict[int, list[str]] = {}
    for event in board(run).Tensors("start/text_summary"):
        texts.setdefault(event.step, []).append(event.tensor_proto.string_val[0].decode())
    return texts


def same(run: Path, reference: Path) -> None:
    """Assert that two runs are equal bit for bit. A failure names the first difference."""
    a, b = content(run), content(reference)
    steps = [max(int(n.removeprefix("step_")) for n in c if "step" in n) for c in (a, b)]
    assert steps[0] == steps[1]
    for name in set(a) & set(b):  # a stop writes an extra checkpoint, which may be among the newest
        assert a[name] == b[name], name


# --------------------------------------------------------------------------------- resuming

VARIANTS: dict[str, tuple[int, str, list[str]]] = {
    "plain": (1, "text", []),
    "tokens": (1, "text", ["batch.tokens=100"]),
    "accumulate": (1, "text", ["batch.accumulate=2"]),
    "bf16": (1, "text", ["system.precision=bf16"]),
    "epochs": (1, "classes", ["batch.rows=50", "train.steps=0", "train.epochs=2.5"]),
    "two ranks": (2, "text", []),
    "three ranks": (3, "text", ["batch.rows=12"]),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_equals_never_stopped(
    variant: str, forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """The run, with dropout, gets SIGTERM before step 5 (one rank only), and later SIGKILL after
    step 11.
    """
    ranks, store, overrides = VARIANTS[variant]
    recipe = SMOKE if store == "text" else CLASSIFY
    runs = [tmp_path / "straight", tmp_path / "stopped"]
    straight, stopped = [
        training(recipe, getattr(data, store), run, *SHORT, *overrides) for run in runs
    ]
    unit = 50 if store == "classes" else 1  # with train.epochs the bar counts samples, 50 a step
    reference = forks.start(*straight, ranks=ranks)
    one = AT_STEP.format(step=4 * unit, signal="SIGTERM", ranks=ranks - 1)
    done = forks.run(*stopped, ranks=ranks, before=one)
    assert done.status == 128 + signal.SIGTERM, done.err
    assert done.err.splitlines()[-1] == (f"stopped at step 5; the same command continues {runs[1]}")
    victims = "1" if ranks == 2 else "012"  # the other rank cannot go on alone
    killer = AT_STEP.format(step=11 * unit, signal="SIGKILL", ranks=victims)
    assert forks.run(*stopped, ranks=ranks, before=killer).status in (-signal.SIGKILL, 1)
    assert not (runs[1] / "result.json").exists()
    continued = good(forks.run(*stopped, ranks=ranks))
    assert f"continuing {runs[1]} from step 8" in continued.err
    good(reference.wait())
    same(runs[1], runs[0])
    drawn_once(runs[1])


@pytest.mark.slow
def test_stopped_and_continued_by_torchrun(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """As users do it: torchrun with 2 processes gets SIGTERM, and the run is continued."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    steps = ["train.steps=80", "train.validate_every=40", "train.log_every=1"]
    reference = forks.start(*training(SMOKE, data.text, straight, *steps), ranks=2)
    first = start(*training(SMOKE, data.text, stopped, *steps), ranks=2)
    for line in first.stderr or []:
        if line.startswith("train") and " 20 " in line:
            first.send_signal(signal.SIGTERM)
            break
    _, err = first.communicate()
    assert first.returncode != 0
    assert err.count("the same command continues") == 1, err
    continued = good(forks.run(*training(SMOKE, data.text, stopped, *steps), ranks=2))
    *_, last = (line for line in continued.err.splitlines() if line.startswith("train "))
    assert "  100%, 80 of 80 steps, 0 s left" in last
    assert "  loss " in last
    assert "  tokens/s " in last
    good(reference.wait())
    same(stopped, straight)
    drawn_once(stopped)


def test_best_and_patience_survive_a_restart(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """With these accuracies step 6 is the best and step 12 the last, whether or not the run was
    stopped.
    """
    prescribed = """
import numpy as np
from xformer import train
from xformer.scoring import Scores
from xformer.tasks.mlm import MLM
from xformer.tasks.task import Head, Predictions
accuracies = {2: 0.5, 4: 0.4, 6: 0.6, 8: 0.5, 10: 0.6, 12: 0.5}
original = train.run_validation
def validate(session, model):
    def scores_of(step):
        scores = {"loss": 1.0, "accuracy": accuracies[step], "perplexity": 1.0}
        return Scores(scores, np.zeros((0, 5)), Predictions(MLM(Head("mlm")), "valid", {}))
    train.score = lambda *_: scores_of(session.state.step)
    better = original(session, model)
    train.score = lambda *_: scores_of(session.state.best_step)  # for the end of the run
    return better
train.run_validation = validate
"""
    patient = [
        "train.metric=accuracy",
        "train.patience=3",
        "train.steps=50",
        "train.validate_every=2",
        "train.log_every=5",
        "train.keep_at=[2, 30]",
    ]
    runs = [tmp_path / "straight", tmp_path / "stopped"]
    good(forks.run(*training(SMOKE, data.text, runs[0], *patient), before=prescribed))
    line = training(SMOKE, data.text, runs[1], *patient)
    for step, number in ((4, signal.SIGINT), (9, signal.SIGTERM), (11, signal.SIGKILL)):
        killer = AT_STEP.format(step=step, signal=number.name, ranks="0")
        status = forks.run(*line, before=prescribed + killer).status
        assert status == (-9 if number == signal.SIGKILL else 128 + number)
    done = good(forks.run(*line, before=prescribed))
    early = "early stopping: 3 validations in a row were no better than step 6 (train.patience=3)"
    assert early in done.err
    same(*runs)
    assert result(runs[1])["steps"] == 12
    steps = [record["step"] for record in log(runs[1]) if record["event"] == "train"]
    assert steps == [5, 10, 12]  # the two steps before the early end are logged too
    assert result(runs[1])["selected"] == "checkpoints/step_6"
    kept = {p.name for p in (runs[1] / "checkpoints").iterdir()}
    assert kept == {"step_6", "step_10", "step_12"}  # the best, and the newest two
    again = good(forks.run(*line)).err
    assert "is finished: see" in again
    assert "trajectory lacks" not in again  # step 30 was never reached


def test_valid_is_scored_once(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """The end of a run takes the scores of its validation. A run that was stopped after the
    validation of the selected checkpoint scores it again, with the same result."""
    spy = """
from xformer import train
original = train.score_split
train.score_split = lambda *words: (print("scored", words[2]), original(*words))[1]
"""
    settings = [*SHORT, "train.steps=14", "train.select=best"]
    # the best checkpoint is the first, because the rate is then negligible
    settings += ["optim.lr=1e-30", "optim.clip=0"]
    runs = [tmp_path / "straight", tmp_path / "stopped"]
    done = good(forks.run(*training(SMOKE, data.text, runs[0], *settings), before=spy))
    assert done.out.split("\n")[:-1] == [*["scored valid"] * 3, "scored test"]
    assert result(runs[0])["selected"] == "checkpoints/step_6"
    line = training(SMOKE, data.text, runs[1], *settings)
    killer = AT_STEP.format(step=13, signal="SIGKILL", ranks="0")
    assert forks.run(*line, before=killer).status == -signal.SIGKILL
    done = good(forks.run(*line, before=spy))
    assert done.out.split("\n")[:-1] == ["scored valid"] * 2 + ["scored test"]
    same(*runs)
    last = training(SMOKE, data.text, tmp_path / "last", *SHORT, "train.select=last")
    assert good(forks.run(*last, before=spy)).out.count("scored valid") == 3


WAITING = """
from xformer.writer import BackgroundWriter
def leave(self, *error):
    os.kill(os.getpid(), signal.SIGINT)
    self.free()
BackgroundWriter.__exit__ = leave
"""


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_other_signals_stop_a_run(name: str, forks: Forks, data: Toys, tmp_path: Path) -> None:
    """A closed terminal, the warnings of Slurm and Grid Engine, and a limit of CPU time."""
    run = tmp_path / "run"
    line = training(SMOKE, data.text, run, *SHORT)
    stopped = forks.run(*line, before=AT_STEP.format(step=5, signal=name, ranks="0"))
    assert stopped.status == 128 + getattr(signal, name)
    assert f"stopping ({name}): finishing at most two steps" in stopped.err
    assert (run / "checkpoints/step_6").is_dir()
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as nohup does
    if name == "SIGHUP":
        good(forks.run(*line, before=ignored + AT_STEP.format(step=7, signal=name, ranks="0")))


@pytest.mark.parametrize("step", [5, 6])
def test_on_a_gpu_a_run_finishes_at_most_five_steps(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes in this step. The device needs no time here."""
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    flag = session.StopFlag(torch.device("cpu"))
    flag.on_cuda = True
    stops = [n for n in range(1, 20) if flag.read(n, torch.tensor(float(n > step)))]
    assert stops[0] - step in (3, 4)


def test_lost_lines_of_a_log_are_pointed_out(forks: Forks, data: Toys, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = training(SMOKE, data.text, run, *SHORT, "train.log_every=2")
    stopped = forks.run(*line, before=AT_STEP.format(step=5, signal="SIGTERM", ranks="0"))
    assert stopped.status == 128 + signal.SIGTERM
    lines = (run / "log.jsonl").read_bytes().splitlines(keepends=True)
    steps = [json.loads(text)["step"] for text in lines if b'"event": "train"' in text]
    assert steps == [2, 4, 6]
    (run / "log.jsonl").write_bytes(b"".join(lines[:2])[:-20])
    done = good(forks.run(*line))
    assert (
        f"{run / 'log.jsonl'} is incomplete: its lines after step 0 up to step 6 are lost"
        in done.err
    )


def test_a_second_interrupt_stops_at_once(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """The first one announces a checkpoint. After the second, the run continues from an older
    one."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    line = training(SMOKE, data.text, run, *SHORT)
    told = "stopping (SIGINT): finishing at most two steps, or the validation that is running, "
    told += "then saving; press Ctrl-C again to stop at once"
    twice = AT_STEP.format(step=2, signal="SIGINT); os.kill(os.getpid(), signal.SIGINT", ranks="0")
    stopped = forks.run(*line, before=twice)
    ending = f"before the first checkpoint; the same command starts {run} from the beginning"
    assert stopped.err.splitlines()[-1] == f"stopped after step 2, {ending}"
    once = AT_STEP.format(step=5, signal="SIGINT", ranks="0")
    stopped = forks.run(*line, before=once)
    assert stopped.status == 128 + signal.SIGINT
    assert stopped.err.count(told) == 1
    assert stopped.err.splitlines()[-1].startswith("stopped at step 6; the same command continues")
    twice = AT_STEP.format(step=7, signal="SIGINT); os.kill(os.getpid(), signal.SIGINT", ranks="0")
    stopped = forks.run(*line, before=twice)
    assert stopped.status == 128 + signal.SIGINT
    assert stopped.err.count(told) == 1
    ending = f"stopped after step 7; the same command continues {run} from its newest checkpoint"
    assert stopped.err.splitlines()[-1] == ending
    assert log(run)[-1]["event"] == "stopped"
    newest = {int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir()}
    assert max(newest) == 6
    # the second one comes while the run waits for its last checkpoint
    late = AT_STEP.format(step=8, signal="SIGINT", ranks="0") + WAITING
    stopped = forks.run(*line, before=late)
    assert stopped.err.splitlines()[-1] == ending.replace("step 7", "step 9")
    good(forks.run(*line))
    good(forks.run(*training(SMOKE, data.text, straight, *SHORT)))
    same(run, straight)


def test_every_forward_pass_has_its_own_dropout(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """Every step, micro-batch and rank has a seed of its own. Another run has the same seeds."""
    spy = """
from xformer.parallel.processes import Ranks
original = Ranks.seed
Ranks.seed = lambda self, seed: (print(seed), original(self, seed))
"""
    seeds = []
    for run in ("a", "b"):
        line = training(SMOKE, data.text, tmp_path / run, "train.steps=3", "batch.accumulate=2")
        fork = forks.start(*line, ranks=2, before=spy)
        good(fork.wait())
        seeds.append([Path(out).read_text().split() for out, _ in fork.outputs])
    assert seeds[0] == seeds[1]
    assert len({seed for rank in seeds[0] for seed in rank}) == 3 * 2 * 2


def test_damaged_checkpoint_is_set_aside(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """If a bit of the newest checkpoint is flipped, the run continues from the one before."""
    runs = [tmp_path / "straight", tmp_path / "damaged"]
    good(forks.run(*training(SMOKE, data.text, runs[0], *SHORT)))
    line = training(SMOKE, data.text, runs[1], *SHORT)
    for kind in ("optimizer", "model"):
        killer = AT_STEP.format(step=11, signal="SIGKILL", ranks="0")
        assert forks.run(*line, before=killer).status == -signal.SIGKILL
        flip(runs[1] / f"checkpoints/step_8/{kind}.safetensors", -9)
    done = good(forks.run(*line))
    assert "model.safetensors is damaged" in done.err
    assert "step_8 was renamed to damaged_step_8" in done.err
    assert "continuing" in done.err
    assert "from step 6" in done.err
    same(runs[1], runs[0])


def test_a_run_without_an_undamaged_checkpoint_says_that_it_starts_again(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    line = training(SMOKE, data.text, tmp_path / "run", *SHORT)
    killer = AT_STEP.format(step=8, signal="SIGKILL", ranks="0")
    assert forks.run(*line, before=killer).status == -signal.SIGKILL
    for weights in (tmp_path / "run/checkpoints").glob("*/model.safetensors"):
        flip(weights, -9)
    done = good(forks.run(*line))
    assert "no undamaged checkpoint is left: the run starts from the beginning" in done.err
    assert log(tmp_path / "run")[0]["event"] == "start"


def flip(path: Path, place: int) -> None:
    """Flip the lowest bit of one byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


# ------------------------------------------------------------------------------------ ranks


def test_ranks_and_micro_batches_give_one_gradient(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """Without dropout, these give the losses of 1 process: 2 ranks, 3 ranks, 4 micro-batches, and 2
    ranks that continue a run of 1.
    """
    runs = {"one": (1, "1"), "two": (2, "1"), "three": (3, "1"), "four": (1, "4")}
    lines = {
        name: training(
            SMOKE, data.text, tmp_path / name, *SHORT, *NO_DROPOUT, f"batch.accumulate={accumulate}"
        )
        for name, (_, accumulate) in {**runs, "elastic": (2, "1")}.items()
    }
    going = [forks.start(*lines[name], ranks=ranks) for name, (ranks, _) in runs.items()]
    killer = AT_STEP.format(step=4, signal="SIGTERM", ranks="0")
    assert forks.run(*lines["elastic"], before=killer).status == 128 + signal.SIGTERM
    going.append(forks.start(*lines["elastic"], ranks=2))
    for fork in going:
        good(fork.wait())
    logs = {name: log(tmp_path / name) for name in lines}
    weights = {
        name: load_file(tmp_path / name / "checkpoints/step_15/model.safetensors") for name in lines
    }
    for name in lines:
        for a, b in zip(logs["one"], logs[name], strict=True):
            for key in ("loss", "grad_norm", "lr", "accuracy"):
                assert b.get(key, 0) == pytest.approx(a.get(key, 0), rel=1e-5), (name, key)
        for key, tensor in weights["one"].items():
            torch.testing.assert_close(weights[name][key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overrides", [[], ["batch.tokens=150"], ["head=classify"]])
def test_ranks_share_one_batch(overrides: list[str], data: Toys, tmp_path: Path) -> None:
    """Order and masks do not depend on world size and accumulation: each row occurs once."""
    line = training(SMOKE, data.classes, tmp_path / "run", *overrides)[1:]
    whole, _, _ = everything(line, 1, 1)
    for ranks, accumulate in ((2, 1), (1, 3), (3, 2), (5, 3)):
        rows, sizes, ends = everything(line, ranks, accumulate)
        assert rows == whole
        assert len(set(ends)) == 1
        if ranks == 2:  # the tokens are divided as evenly as the rows allow
            assert abs(sizes[0] - sizes[1]) <= 2 * 20


def everything(
    line: list[str], ranks: int, accumulate: int
) -> tuple[dict[int, tuple[list[int], ...]], list[int], list[tuple[int, Workload]]]:
    """What the ranks read in the second step.

    Returns the tokens and targets of each row, the number of tokens of each rank, and (position,
    work) of each rank.
    """
    recipe = load(Recipe, [*line, f"batch.accumulate={accumulate}"])
    rows: dict[int, tuple[list[int], ...]] = {}
    sizes, ends = [], []
    for rank in range(ranks):
        feed = prepare(recipe, Ranks(rank, ranks, torch.device("cpu"))).feed()
        step = feed.take(feed.take(0).end)
        for batch in step.batches:
            actual = by_row(batch)
            assert not set(actual) & set(rows)
            rows |= actual
        sizes.append(sum(len(batch.tokens) for batch in step.batches))
        ends.append((step.end, step.work))
    return rows, sizes, ends


@pytest.mark.parametrize("overrides", [["batch.tokens=150"], ["train.steps=0", "batch.rows=7"]])
def test_a_step_is_the_same_wherever_a_run_goes_on(
    overrides: list[str], data: Toys, tmp_path: Path
) -> None:
    """The feed prepares many steps at once. Each is the same as if it were the first to be
    prepared.
    """
    line = training(SMOKE, data.text, tmp_path / "run", *overrides)[1:]
    job = prepare(load(Recipe, line), Ranks(0, 1, torch.device("cpu")))
    position, steps = 0, 0
    for step, packed in job.feed().steps(0):
        fresh = job.feed().take(position)
        assert (step.end, step.work, len(packed)) == (fresh.end, fresh.work, 1)
        assert step.work.tokens == len(fresh.batches[0].tokens)
        for name in ("tokens", "positions", "segments", "cu_seqlens", "places", "targets"):
            actual = getattr(packed[0], name)
            assert np.array_equal(actual.numpy(), getattr(fresh.batches[0], name)), name
        assert packed[0].longest == fresh.batches[0].longest
        position, steps = step.end, steps + 1
        if steps == 200:
            break
    if "train.steps=0" in overrides:
        assert (position, steps) == (900, -(-900 // 7))


def by_row(batch: Batch[np.ndarray]) -> dict[int, tuple[list[int], ...]]:
    actual: dict[int, tuple[list[int], ...]] = {}
    assert batch.rows is not None
    for i, row in enumerate(batch.rows):
        begin, end = batch.cu_seqlens[i], batch.cu_seqlens[i + 1]
        masks = [0] * len(batch.tokens)
        if batch.places is not None and batch.targets is not None:
            for place, target in zip(batch.places, batch.targets, strict=True):
                masks[place] = int(target)
        label = [] if batch.labels is None else [int(batch.labels[i])]
        actual[int(row)] = (batch.tokens[begin:end].tolist(), masks[begin:end], label)
    return actual


# ------------------------------------------------------------------- what may change, what not


def test_a_run_of_a_version_that_estimated_its_steps_otherwise(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """With batch.tokens the number of steps in an epoch is an estimate, and so is the place where a
    warm-up in steps ends."""
    run = tmp_path / "run"
    options = ["train.steps=0", "train.epochs=4", "batch.tokens=150", "train.checkpoint_every=2"]
    line = training(SMOKE, data.text, run, *options, "train.select=last")
    killer = AT_STEP.format(step="(done if self.step == 5 else -1)", signal="SIGKILL", ranks="0")
    assert forks.run(*line, before=killer).status == -signal.SIGKILL
    text = (run / "log.jsonl").read_text()
    planned = re.findall(r'"steps": (\d+)', text)
    assert len(planned) == 1
    other = text.replace(f'"steps": {planned[0]}', '"steps": 1234')
    words = f"was planned with 1,234 steps, and now with {int(planned[0]):,}, because this version"
    (run / "log.jsonl").write_text(other)
    shutil.copytree(run, tmp_path / "copy")
    assert words in good(forks.run(*line)).err
    shutil.rmtree(run)
    (tmp_path / "copy").rename(run)
    (run / "log.jsonl").write_text(text)
    assert "was planned with" not in good(forks.run(*line)).err


def test_raised_steps_continue_and_other_settings_are_refused(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    line = training(SMOKE, data.text, run, *SHORT, "train.select=last")
    good(forks.run(*line))
    before = snapshot(run)

    done = good(forks.run(*line))
    assert done.err == f"{run} is finished: see {run / 'result.json'}\n"
    refused(forks.run(*line, "optim.lr=0.5"), "optim.lr=0.001 is now 0.5", "overwrite=true")
    refused(
        forks.run(*line, "train.steps=14"), "train.steps=15 is now 14, and it can only be raised"
    )
    counts = "train.steps=15 is now 0, which counts train.epochs; give the old value again, or ano"
    refused(forks.run(*line, "train.steps=0"), counts)
    earlier, now = ({"identity": completed({"train": {"steps": steps}})} for steps in (0, 6))
    with pytest.raises(BadInput, match=r"it counted train\.epochs, and now train\.steps=6;"):
        _refuse_other_settings(run, earlier, now)
    earlier, now = {"identity": {"loss": {"new": 1}}}, {"identity": completed({})}
    with pytest.raises(
        BadInput, match=r"the setting loss\.new, which this version of xformer lacks"
    ):
        _refuse_other_settings(run, earlier, now)
    earlier, now = (
        {"identity": completed({"masking": {"samples": number}})} for number in (3915, 2840)
    )
    with pytest.raises(
        BadInput, match=r"after about 3915 rows, and this version .* estimates 2840:"
    ):
        _refuse_other_settings(run, earlier, now)
    refused(forks.run(*line, "seed=1", "model.dropout=0"), "seed=0", "model.dropout=0.1")
    earlier, now = ({"identity": {"seed": {"all": 0, key: 3}}} for key in ("order", "masks"))
    with pytest.raises(BadInput, match=r"was made with other settings: seed\.order=3 is now None"):
        _refuse_other_settings(run, earlier, now)
    refused(forks.run(*line, f"data={data.classes}"), f"data={data.text} is now {data.classes};")
    assert good(forks.run(*line, "system.precision=bf16", "train.log_every=4")).out == ""
    assert snapshot(run) == before

    # The run is killed in the added steps. It has no result, because a run that continues deletes
    # its old result.
    killer = AT_STEP.format(step=25, signal="SIGKILL", ranks="0")
    longer = [*line, "train.steps=30", "train.log_every=5", "train.checkpoint_every=10"]
    killed = forks.run(*longer, before=killer)
    assert killed.status == -signal.SIGKILL
    assert "train.steps was 15 and is now 30: the schedule now spans the longer run" in killed.err
    assert not (run / "result.json").exists()
    done = good(forks.run(*longer, "system.precision=bf16"))
    assert "continuing" in done.err
    # the warning is "" if this processor has instructions for bf16
    assert speed_note(torch.device("cpu"), "bf16") in done.err
    assert result(run)["selected"] == "checkpoints/step_30"
    steps = [record["step"] for record in log(run) if record["event"] == "train"]
    assert steps == [3, 6, 9, 12, 15, 20, 25, 30]
    assert len([record for record in log(run) if record["event"] == "end"]) == 2
    drawn_once(run)
    texts = start_texts(run)  # each change of the settings is shown once
    again = read_json(run / "config.json")["starts"][-1]["step"] + 1
    assert {step: len(shown) for step, shown in texts.items()} == {0: 1, 16: 1, again: 1}
    for step, steps_set, precision in ((0, 15, "fp32"), (16, 30, "fp32"), (again, 30, "bf16")):
        assert f"\ntrain.steps = {steps_set}\n" in texts[step][0]
        assert f'\nsystem.precision = "{precision}"\n' in texts[step][0]
    assert read_json(run / "config.json")["config"]["train"]["steps"] == 30

    good(forks.run(*line, "optim.lr=0.5", "overwrite=true"))
    assert result(run)["steps"] == 15
    assert (run / "checkpoints/step_15").is_dir()
    assert not (run / "checkpoints/step_30").exists()


def test_changed_settings_are_named_by_their_paths() -> None:
    pairs: dict[str, Any] = {"data": ("0a", "1b"), "init": (None, "2c")}
    pairs |= {f"optim.{letter}": (0, 1) for letter in "abcdef"}
    old, new = ({"config": {"data": "stores/a", "init": init}} for init in (None, "runs/b"))
    assert changes(pairs, old, new) == (
        "the content of data=stores/a has changed; init=None is now runs/b; optim.a=0 is now 1; "
        "optim.b=0 is now 1; optim.c=0 is now 1; optim.d=0 is now 1; and 2 more"
    )


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    """When every file below a directory was last written, and how large it is."""
    actual = {str(path): path.stat() for path in directory.rglob("*")}
    return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in actual.items()}


# -------------------------------------------------------------------------------- bad input


@pytest.fixture(scope="session")
def trained(forks: Forks, data: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short finished run on text."""
    run = tmp_path_factory.mktemp("trained") / "run"
    good(forks.run(*training(SMOKE, data.text, run, "train.steps=4", "train.validate_every=2")))
    return run


# arguments added to a good command line, and parts of the message
BAD_INPUT: list[tuple[list[str], list[str]]] = [
    (["optim.rl=1"], ["unknown key optim.rl; did you mean optim.lr?"]),
    (["steps=1"], ["unknown key steps; did you mean train.steps?"]),
    (["model.hiden=32"], ["unknown key model.hiden; did you mean model.hidden?"]),
    (["optim.lr=fast"], ["optim.lr='fast'", "number"]),
    (["optim.lr=nan"], ["optim.lr=nan", "finite"]),
    (["train.epochs=inf"], ["train.epochs=inf", "finite"]),
    (["train.steps=1.5"], ["train.steps=1.5", "integer"]),
    (["train.patience=1", "train.select=last"], ["train.patience=1", "give train.select=best"]),
    (["train.steps=-1"], ["train.steps=-1", "greater than or equal to 0"]),
    (["optim.schedule=cosin"], ["optim.schedule='cosin'", "'cosine'"]),
    (["optim.betas=[0.9]"], ["optim.betas=[0.9]: this list needs at least 2 values"]),
    (["optim=3"], ["optim=3", "optim.KEY=VALUE"]),
    (["optim.lr.x=3"], ["optim.lr={'x': 3}"]),
    (["model.heads=3"], ["model.hidden=32 is not a multiple of model.heads=3"]),
    (["head=clasify"], ["head='clasify'", "'classify'"]),
    (["data="], [" is not a store"]),
    (["nonsense"], ["'nonsense' is not of the form key=value"]),
    (["=5"], ["'=5' is not of the form key=value"]),
    (["optim..lr=5"], ["'optim..lr=5' is not of the form key=value"]),
    (["data={toys}/absent"], ["absent is not a store"]),
    (["data={toys}/raw"], ["raw is not a store"]),
    (["data={toys}/splice", "init={trained}"], ["splice was made with a different tokenizer"]),
    (
        ["data={toys}/splice", "init={trained}", "mapping=symbol:0"],
        ["mapping='symbol:0'", "symbols:SEED"],
    ),
    (["mapping=shift:x"], ["mapping='shift:x'"]),
    (
        ["head=classify"],
        [
            "head=classify needs a store of kind class, which preprocess.py task tsv makes;",
            "text is of kind text",
        ],
    ),
    (
        ["head=regress", "data={toys}/classes"],
        ["head=regress needs a store of kind score, which preprocess.py task tsv --kind score m"],
    ),
    (["init={toys}/absent"], ["absent does not exist"]),
    (["init={toys}/text"], ["text is not a checkpoint"]),
    (["init={trained}", "model.hidden=64"], ["model.hidden=64", "has 32"]),
    (["init={trained}", "model.layers=3"], ["model.layers=3", "has 2"]),
    (["model.vocab_size=10"], ["model.vocab_size=10 is below the tokenizer's"]),
    (["batch.max_tokens=65"], ["batch.max_tokens=65", "takes 64"]),
    (["batch.tokens=19"], ["batch.tokens=19 is below"]),
    (["batch.rows=1000000000"], ["batch.rows=1000000000", "less than or equal to 1048576"]),
    (['surgery=[{op="cleen"}]'], ["surgery.0", "its op must be one of 'clean'"]),
    (['surgery=[{op="clean", sed=1}]'], ["unknown key surgery.0.sed"]),
    (['surgery=[{op="clean", seed="x"}]'], ["surgery.0.seed='x'", "integer"]),
    (["surgery=[{}]"], ["an operation is written like"]),
    (["surgery=clean"], ["surgery='clean'", "list"]),
    (["train.metric=f1"], ["train.metric='f1' is not a metric", "has loss, accuracy, perplexity"]),
    (["data={no_valid}"], ["needs a split 'valid'", "train.select=last"]),
]


@pytest.fixture(scope="session")
def no_valid(forks: Forks, data: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with only the split train."""
    store = tmp_path_factory.mktemp("no-valid") / "store"
    good(
        forks.run(
            "preprocess.py",
            "text",
            "--input",
            data.raw / "train.txt",
            "--tokenizer",
            data.tokenizer,
            "--output",
            store,
        )
    )
    return store


@pytest.mark.parametrize("case", BAD_INPUT, ids=lambda case: " ".join(case[0]))
def test_bad_input_costs_one_line(
    case: tuple[list[str], list[str]],
    forks: Forks,
    data: Toys,
    trained: Path,
    no_valid: Path,
    tmp_path: Path,
) -> None:
    overrides, words = case
    names = {"toys": data.text.parent, "trained": trained, "no_valid": no_valid}
    given = [o if o.startswith("surgery") else o.format(**names) for o in overrides]
    refused(forks.run(*training(SMOKE, data.text, tmp_path / "run", *given)), *words)
    assert list(tmp_path.iterdir()) == []


def test_bad_recipes(forks: Forks, data: Toys, tmp_path: Path) -> None:
    not_toml = str(data.raw / "classes/train.tsv")
    for recipe, words in (
        ("recipes/pretrain/smoek.toml", "smoek.toml does not exist; did you mean smoke.toml?"),
        ("recipes/pretrain", "the recipe recipes/pretrain is a directory"),
        ("setup.py/x.toml", "the recipe setup.py/x.toml does not exist"),
        (not_toml, f"{not_toml} is not TOML"),
    ):
        refused(forks.run(*training(recipe, data.text, tmp_path / "run")), words)
    refused(forks.run("train.py"), "the first argument must be a recipe")
    refused(forks.run("train.py", "run=x"), "the first argument must be a recipe")
    refused(forks.run("train.py", SMOKE, f"run={tmp_path / 'run'}"), "data", "must be given")
    refused(forks.run("train.py", SMOKE, f"data={data.text}"), "run must be given: run=...")
    assert list(tmp_path.iterdir()) == []


def test_bad_places_for_a_run(forks: Forks, data: Toys, tmp_path: Path) -> None:
    file, foreign = tmp_path / "file", tmp_path / "foreign"
    file.write_text("dear diary")
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("final")
    for overwrite in ("false", "true"):
        for run, words in (
            (file, "is a file"),
            (file / "below", "is a file"),
            (foreign, "is not a run (it contains thesis.tex)"),
        ):
            line = training(SMOKE, data.text, run, f"overwrite={overwrite}")
            refused(forks.run(*line), str(run), words)
    assert file.read_text() == "dear diary"
    assert [p.name for p in foreign.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_torchrun_says_it_once(data: Toys, tmp_path: Path) -> None:
    """Rank 0 prints the error, even if another rank fails first. torchrun adds its own report."""
    done = command(*training(SMOKE, data.text, tmp_path / "run", "optim.rl=1"), ranks=2)
    assert done.status == 1
    lines = [line for line in done.err.splitlines() if "error: " in line]
    assert lines == ["error: unknown key optim.rl; did you mean optim.lr?"]
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------- damage


def test_damaged_store(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """A truncated file is refused at once. A flipped bit stops the run with a line that names its
    block.
    """
    store, run = tmp_path / "store", tmp_path / "run"
    shutil.copytree(data.text, store)
    tokens = store / "train/tokens.npy"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-1])
    refused(forks.run(*training(SMOKE, store, run)), str(tokens), "bytes")
    tokens.unlink()
    refused(forks.run(*training(SMOKE, store, run)), str(tokens), "missing")
    tokens.write_bytes(b"\x94" + whole[1:])
    refused(forks.run(*training(SMOKE, store, run)), str(tokens), "not a .npy file")
    assert not run.exists()
    slow = """
import time
from xformer.data.store import Store
original = Store.verify
Store.verify = lambda self: (time.sleep(1.5), *original(self))[1:]
"""
    flipped, impossible = bytearray(whole), bytearray(whole)
    flipped[-2] ^= 1  # another word
    # an id that no vocabulary has; training may crash before the check sees it
    impossible[-1] = 0xFF
    for content, before, ranks in (
        (flipped, "", 1),
        (flipped, slow, 1),
        (impossible, slow, 1),
        (flipped, "", 2),
    ):
        tokens.write_bytes(content)
        longer = ["overwrite=true", "train.steps=80", "train.log_every=90"]
        done = forks.run(*training(SMOKE, store, run, *longer), before=before, ranks=ranks)
        assert done.status == 1
        assert f"error: {tokens} is damaged in block 0" in done.err.splitlines()[-1]
        assert "Traceback" not in done.err
        assert not (run / "result.json").exists()


@pytest.mark.slow
def test_full_disk(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """If no space is left, the run ends with one line and status 1. Earlier checkpoints are
    complete, and the run continues later.
    """
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("small file systems cannot be mounted here")
    straight, disk, rescued = (tmp_path / name for name in ("straight", "disk", "rescued"))
    disk.mkdir()
    script = f"""
        mount -t tmpfs -o size=700k tmpfs {disk}
        "$@"
        status=$?
        cp -r {disk}/run {rescued}
        exit $status
    """
    line = training(SMOKE, data.text, disk / "run", *SHORT)
    full = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, *line],
        cwd=ROOT,
        env={**os.environ, **QUIET},
        text=True,
        capture_output=True,
    )
    assert (full.returncode, "Traceback" in full.stderr) == (1, False), full.stderr
    assert "No space left on device" in full.stderr.splitlines()[-1], full.stderr
    assert {p.name for p in (rescued / "checkpoints").iterdir()} == {"step_4", "step_6"}
    for run in (rescued, straight):
        good(forks.run(*training(SMOKE, data.text, run, *SHORT)))
    same(rescued, straight)


# --------------------------------------------------------------------------------- learning


def test_learns_what_can_be_learnt(learned: dict[str, Path], data: Toys) -> None:
    """Each task is learned: a class that one token decides, a score that counts tokens, the words
    of topics.
    """
    scores = {name: result(run)["metrics"]["test"] for name, run in learned.items()}
    assert scores["classes"]["accuracy"] > 0.95
    assert scores["scores"]["spearman"] > 0.9
    words = np.load(data.text / "train/tokens.npy")
    share = np.bincount(words) / len(words)
    unigram = -(share[share > 0] * np.log(share[share > 0])).sum()
    assert scores["text"]["loss"] < unigram - 1
    losses = [record["loss"] for record in log(learned["text"]) if record["event"] == "train"]
    assert losses[0] > unigram > losses[-1]


def test_schedules(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """The logged learning rates equal closed forms, by steps and by epochs, with warm-up in either
    unit.
    """
    steps, warm = 20, 5
    every = ["train.log_every=1", "train.select=last", "optim.lr=0.01", f"train.steps={steps}"]
    cases = {
        "linear": ["optim.warmup=5"],
        "cosine": ["optim.warmup=0.25"],
        "constant": ["optim.warmup=5", "train.steps=0", "train.epochs=2", "batch.rows=30"],
    }
    going = [
        forks.start(
            *training(
                CLASSIFY,
                data.classes,
                tmp_path / name,
                *every,
                f"optim.schedule={name}",
                *overrides,
            )
        )
        for name, overrides in cases.items()
    ]
    for fork in going:
        good(fork.wait())
    k = np.arange(1, steps + 1)
    left = np.clip((steps - k + 1) / (steps - warm), 0, 1)
    falls = {"linear": left, "cosine": (1 - np.cos(np.pi * left)) / 2, "constant": left * 0 + 1}
    for name, fall in falls.items():
        rates = [record["lr"] for record in log(tmp_path / name) if record["event"] == "train"]
        expected = 0.01 * np.where(k <= warm, k / warm, fall)
        np.testing.assert_allclose(rates, expected, rtol=1e-12, err_msg=name)


def test_tensorboard_and_log(learned: dict[str, Path]) -> None:
    run = learned["text"]
    drawn_once(run)
    shown = board(run)
    numbers = {
        "loss": "loss/train",
        "accuracy": "score/accuracy/train",
        "perplexity": "score/perplexity/train",
        "lr": "training/lr",
        "grad_norm": "training/grad_norm",
        "real_tokens_per_second": "speed/tokens_per_second",
        "memory_gib": "system/memory_gib",
    }
    validated = ["loss/valid", "score/accuracy/valid", "score/perplexity/valid"]
    assert sorted(shown.Tags()["scalars"]) == sorted([*numbers.values(), *validated])
    assert sorted(shown.Tags()["scalars"])[:2] == ["loss/train", "loss/valid"]
    assert [shown.Scalars("loss/train")[0].value, shown.Scalars("training/lr")[0].value] == [
        float(np.float32(log(run)[1][name])) for name in ("loss", "lr")
    ]
    [[text]], start = start_texts(run).values(), log(run)[0]
    assert text.startswith(
        f"steps 250, parameters {start['parameters']:,}, rows {start['rows']:,}, tokens "
    )
    for line in ('head = "mlm"', "train.steps = 250", f'torch = "{torch.__version__}"'):
        assert f"\n{line}\n" in text
    for record in log(run):
        assert {"event", "step", "time"} <= set(record)
        if record["event"] == "train":
            assert numbers.keys() <= set(record)


def test_the_peak_is_that_of_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`getrusage` also counts the memory of the process that started this one."""
    status = "VmPeak:\t 9437184 kB\nVmHWM:\t 1048576 kB\nVmRSS:\t 524288 kB\n"
    for text, peak in ((status, 1.0), (status.replace("VmHWM", "VmNew"), 0.5), ("", 0.0)):
        monkeypatch.setattr(Path, "read_text", lambda path, text=text: text)
        assert peak_memory(torch.device("cpu")) == peak
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("resource.getrusage", lambda _: SimpleNamespace(ru_maxrss=2**29))
    assert peak_memory(torch.device("cpu")) == 0.5  # macOS counts bytes


def test_help_explains_every_key() -> None:
    """--help shows each key with its type, default and description, in at most 100 columns."""
    done = good(command("train.py", "--help"))
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("Pre-train or fine-tune")
    for key in all_keys(Recipe):
        place = next(i for i, line in enumerate(lines) if line.startswith(f"  {key}: "))
        assert lines[place + 1].startswith("      "), key
    for line in (
        "  data: str | list of str (required)",
        "  fraction: float = 1.0",
        "  init: str (optional)",
        '  head: "mlm" | "classify" | "regress" | "span" | "tag" | "choice" (required)',
        "  optim.betas: [float, float] = [0.95, 0.98] for novograd, [0.9, 0.999] for all others",
        "  overwrite: true | false = false",
        "  surgery: list of operations = []",
        '        {op = "clean", seed = int, distribution = "normal" | "truncated"}',
        "batch.*: The batch size of an optimizer step, summed over all ranks and micro-batches.",
    ):
        assert line in lines


def test_a_start_says_what_it_starts_from(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """A run says how many tokens it trains on, and that its encoder is not pre-trained."""
    fresh = "no init= is given: all "
    steps = ["train.steps=1", "train.select=last"]
    half = training(CLASSIFY, data.pairs, tmp_path / "half", *steps, "fraction=0.5")
    done = good(forks.run(*half))
    (note,) = [line for line in done.err.splitlines() if line.startswith(fresh)]
    advice = "init=CHECKPOINT, such as init=micro/english, starts from a trained encoder"
    weights = sum(
        weight.numel() for weight in prepare(load(Recipe, half[1:]), ALONE).start.weights.values()
    )
    assert note == f"{fresh}{weights:,} weights are random; {advice}"
    job = prepare(load(Recipe, half[1:]), ALONE)
    rows = set(job.samples.at(np.arange(job.samples.per_epoch))[0].tolist())
    columns = job.training_rows.split.columns
    tokens = sum(len(columns[name][row]) for name in ("tokens", "tokens_b") for row in rows)
    start = log(tmp_path / "half")[0]
    assert (start["rows"], start["tokens"], start["steps"]) == (len(rows), tokens, 1)
    assert tokens < job.training_rows.split.tokens
    done = good(forks.run(*training(SMOKE, data.text, tmp_path / "text", *steps)))
    assert fresh not in done.out + done.err


def test_a_fraction_without_a_class_is_pointed_out(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    store = open_store(data.classes)
    few = training(CLASSIFY, data.classes, tmp_path / "few", "fraction=0.001")
    job = prepare(load(Recipe, few[1:]), ALONE)
    rows, _ = job.samples.at(np.arange(job.samples.per_epoch))
    kept = {store.labels[i] for i in np.asarray(store.split("train").columns["label"])[rows]}
    gone = ", ".join(name for name in store.labels if name not in kept)
    assert 0 < len(kept) < len(store.labels)
    assert f"warning: fraction=0.001 leaves out every row of {gone}" in job.notes
    whole = prepare(load(Recipe, training(CLASSIFY, data.classes, tmp_path / "all")[1:]), ALONE)
    assert not any("leaves out every row" in note for note in whole.notes)
    masked = training(SMOKE, data.classes, tmp_path / "masked", "fraction=0.001")
    notes = prepare(load(Recipe, masked[1:]), ALONE).notes
    assert not any("leaves out every row" in note for note in notes)  # it uses no classes


def test_a_run_does_not_delete_what_it_starts_from(data: Toys, tmp_path: Path) -> None:
    run, english = tmp_path / "run", checkpoints.load("micro/english")
    for folder in ("checkpoints", "trajectory"):
        init = run / folder / "step_1"
        checkpoints.save(english, init)
        settings = ["mapping=ids", f"init={init}", "overwrite=true"]
        recipe = load(Recipe, [CLASSIFY, f"data={data.classes}", f"run={run}", *settings])
        with pytest.raises(
            BadInput, match=f"overwrite=true would delete init={init}: give another"
        ):
            prepare(recipe, ALONE)
        prepare(recipe.model_copy(update={"run": str(tmp_path / "other")}), ALONE)
    (tmp_path / "link").symlink_to(init)
    linked = load(Recipe, [CLASSIFY, f"data={data.classes}", f"run={run}", "mapping=ids"])
    update = {"init": str(tmp_path / "link"), "overwrite": True}
    with pytest.raises(BadInput, match=f"overwrite=true would delete init={tmp_path / 'link'}"):
        prepare(linked.model_copy(update=update), ALONE)
    transplant = [f'surgery=[{{op="transplant", source="{init}"}}]', "overwrite=true"]
    settings = ["init=micro/english", "mapping=ids", *transplant]
    recipe = load(Recipe, [CLASSIFY, f"data={data.classes}", f"run={run}", *settings])
    with pytest.raises(BadInput, match=f"would delete the source of an operation, {init}: give"):
        prepare(recipe, ALONE)


def test_letters_that_are_exchanged_at_random_are_pointed_out(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    good(forks.run(*training(SMOKE, data.splice, tmp_path / "run", "train.steps=1")))
    write_store(tmp_path / "s", symbols("ACGT"), {"train": ["ACGT" * 4] * 8})
    line = training(
        SMOKE, tmp_path / "s", tmp_path / "x", f"init={tmp_path / 'run'}", "train.select=last"
    )
    with pytest.raises(BadInput, match="reads letters, too: make it again with --tokenizer"):
        prepare(load(Recipe, line[1:]), ALONE)
    notes = prepare(load(Recipe, [*line[1:], "mapping=symbols:0"]), ALONE).notes
    assert any("mapping=symbols:0 exchanges letters at random" in note for note in notes)


def test_a_run_with_nothing_to_score_says_how_it_ended(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    words = ("--input", data.raw / "valid.txt", "--tokenizer", data.tokenizer)
    good(forks.run("preprocess.py", "text", *words, "--output", tmp_path / "store"))
    run = tmp_path / "run"
    done = good(
        forks.run(*training(SMOKE, tmp_path / "store", run, "train.steps=3", "train.select=last"))
    )
    (record,) = [record for record in log(run) if record["event"] == "train"]
    last = done.err.splitlines()[-1]
    assert f"training loss {record['loss']:.4g}"[:-1] in last
    assert last.endswith(f"the checkpoint is {run / 'checkpoints/step_3'}")


def test_the_steps_of_a_run_are_known_before_it_starts(data: Toys, tmp_path: Path) -> None:
    for settings, error in (
        (["train.steps=9"], 0.0),
        (["batch.rows=7", "train.epochs=2.5"], 0.0),
        (["batch.tokens=100", "train.epochs=2"], 0.1),
    ):
        line = training(SMOKE, data.text, tmp_path / "run", "train.steps=0", *settings)
        job = prepare(load(Recipe, line[1:]), ALONE)
        timeline = Timeline(job.feed().stream, job.recipe.train.steps, 2, 0, None, "")
        assert job.planned_steps == pytest.approx(timeline.length(), rel=error, abs=0)


def test_the_mean_length_of_rows_is_that_of_the_whole_store(tmp_path: Path) -> None:
    """The store is sorted by length, as if a store of long rows were joined to one of short rows.
    Without train.steps, the end of masking.final and the length of the warm-up depend on it."""
    line = training(
        SMOKE, tmp_path / "store", tmp_path / "run", "train.steps=0", "batch.tokens=1000"
    )
    recipe = load(Recipe, line[1:])
    lengths = np.sort(np.random.default_rng(0).integers(5, 100, 50_000))
    assembler: Any = SimpleNamespace(sizes=lambda rows: lengths[rows])
    for samples in (Samples(50_000, 0), Mixture([20_000, 30_000], 0, 1.0, [0.4, 0.6])):
        expected = 1000 / lengths.mean()
        assert rows_per_step(recipe, assembler, samples) == pytest.approx(expected, rel=0.02)
    half = Samples(50_000, 0, 0.1)
    kept, _ = half.at(np.arange(half.per_epoch))
    expected = 1000 / lengths[kept].mean()
    assert rows_per_step(recipe, assembler, half) == pytest.approx(expected, rel=1e-12)


def test_a_log_that_is_gone_ends_the_curves_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Monitor(tmp_path, True, -1, 0, 80, "step") as monitor:
        (tmp_path / "log.jsonl").unlink()
        monitor._on_board(monitor._draw_anew)
    assert "log.jsonl does not exist" in capsys.readouterr().err
    assert not (tmp_path / "tensorboard").exists()


def test_a_slow_run_prints_lines_before_the_first_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("xformer.data.display.time.monotonic", lambda: now)
    numbers = {"loss": 1.0, "lr": 0.1, "real_tokens_per_second": 5.0}
    with Monitor(tmp_path, True, -1, 0, 80, "step") as monitor:
        for step in range(1, 9):
            now += 6
            monitor.advance(step)
            if step == 5:
                monitor.event("train", step, **numbers)
    assert capsys.readouterr().err.splitlines() == [
        "training: 2%, 2 of 80 steps, 7.8 min left",
        "training: 5%, 4 of 80 steps, 7.6 min left",
        "train      step      5  loss 1  lr 0.1  tokens/s 5  6%, 5 of 80 steps, 7.5 min left",
    ]
    assert [record["event"] for record in log(tmp_path)] == ["train"]


def test_overwrite_spares_what_is_no_run(
    forks: Forks, data: Toys, learned: dict[str, Path], tmp_path: Path
) -> None:
    """A checkpoint has a config.json too, but overwrite=true does not delete it, because it is not
    a run.
    """
    path = tmp_path / "checkpoint"
    shutil.copytree(checkpoints.resolve(learned["text"]), path)
    before = sorted(p.name for p in path.iterdir())
    refused(forks.run(*training(SMOKE, data.text, path, "overwrite=true")), "is not a run")
    assert sorted(p.name for p in path.iterdir()) == before


def test_a_diverged_run_fails(forks: Forks, data: Toys, tmp_path: Path) -> None:
    wild = ["optim.lr=1e30", "optim.clip=0", "optim.warmup=0", "train.steps=20"]
    done = forks.run(*training(SMOKE, data.text, tmp_path / "run", *wild))
    assert done.status == 1, done
    assert "the loss is not finite at step" in done.err.splitlines()[-1]
    assert not (tmp_path / "run/result.json").exists()


def test_a_clock_counts_what_lies_between_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.5, 13.0, 100.0, 101.0])
    monkeypatch.setattr(session.time, "perf_counter", lambda: next(times))
    state = State(seconds=1.0)
    clock = session.Clock(state)
    clock.read()
    assert state.seconds == 1 + 2.5
    with clock.stopped():
        assert state.seconds == 1 + 3
    clock.read()  # what happened while it was stopped does not count
    assert (state.seconds, state.since_log["seconds"]) == (1 + 4, 4)


@pytest.mark.parametrize("name", ["text", "classes"])
def test_speed_is_that_of_the_log(name: str, learned: dict[str, Path]) -> None:
    """Over a whole run it lies between the slowest and the fastest interval, but for the moment
    after the last line of the log."""
    finished = read_json(learned[name] / "result.json")
    records = log(learned[name])
    rates = [record["real_tokens_per_second"] for record in records if record["event"] == "train"]
    assert 0 < finished["seconds"] < records[-1]["time"] - records[0]["time"]
    assert min(rates) <= 1.3 * finished["real_tokens_per_second"]
    assert finished["real_tokens_per_second"] <= 1.001 * max(rates)
