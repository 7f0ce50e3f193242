"""The schedule with a stable phase, and runs that branch from a checkpoint of another run."""

from __future__ import annotations

import fcntl
import gc
import shutil
import signal
import threading
import warnings
from contextlib import closing
from pathlib import Path

import pytest
from helpers import SMOKE, Forks, good, refused, training
from test_train import AT_STEP, content, log, timeless
from toys import Toys

from xformer.checkpoint import by_step
from xformer.config import validate
from xformer.data.errors import BadInput
from xformer.data.files import read_json, write_json
from xformer.optim import OptimConfig, learning_rate
from xformer.recipe import Recipe
from xformer.rows import batches_of
from xformer.run import SINCE_LOG, Run, State, in_use

WSD = ["optim.schedule=wsd", "train.select=last", "train.log_every=1", "train.validate_every=50"]
LONG = [*WSD, "optim.warmup=3", "train.keep_every=4"]
SHORT = [*LONG, "train.steps=12", "optim.decay=4"]


def test_the_rate_is_stable_and_then_falls_to_0() -> None:
    config = OptimConfig(lr=0.02, schedule="wsd", warmup=2, decay=4)
    rates = [learning_rate(config, i, i + 1, 10) for i in range(11)]
    assert rates == pytest.approx([0.01] + [0.02] * 6 + [0.015, 0.01, 0.005, 0.0])
    assert learning_rate(config, 12, 13, 10) == 0.0
    for length in (10, 17, 1234):  # bit for bit
        assert [learning_rate(config, i, i + 1, length) for i in range(6)] == [
            learning_rate(config, i, i + 1, 99) for i in range(6)
        ]


@pytest.fixture(scope="module")
def runs(forks: Forks, data: Toys, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of 20 steps that decays from step 16, and one of 12 steps that decays from step 8. With
    dropout."""
    place = tmp_path_factory.mktemp("branch")
    line = training(SMOKE, data.text, place / "long", *LONG, "train.steps=20", "optim.decay=0.2")
    going = forks.start(*line)
    good(forks.run(*training(SMOKE, data.text, place / "short", *SHORT)))
    good(going.wait())
    return {name: place / name for name in ("long", "short")}


def test_the_state_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    earlier = {"step": 3, "last_scores": {"loss": 2.0}, "since_log": {"loss": 1.5}}
    write_json(tmp_path / "state.json", earlier)
    state = State.read(tmp_path)
    assert (state.step, state.since_log["loss"]) == (3, 1.5)
    assert state.since_log.keys() == set(SINCE_LOG)
    write_json(tmp_path / "state.json", {"step": 3, "sun": 1})
    with pytest.raises(BadInput, match=r"state.json has the unknown key sun; a newer version"):
        State.read(tmp_path)


def test_a_copy_of_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    for name in ("step_5", "step_10", "step_5_copy", "step_05", "damaged_step_3"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert list(by_step(tmp_path / "checkpoints")) == [5, 10]
    Run(tmp_path).prune(0, 1, 0)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_10", "step_5_copy", "step_05", "damaged_step_3"}


def test_who_looks_at_a_run_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open() as watcher:
        fcntl.flock(watcher, fcntl.LOCK_SH)
        assert not in_use(tmp_path)  # another one may look at the same time
        threading.Timer(0.2, fcntl.flock, (watcher, fcntl.LOCK_UN)).start()
        run = Run(tmp_path)
        run.open({"identity": {}}, False)
    assert in_use(tmp_path)
    with pytest.raises(BadInput, match="is in use by another process"):
        Run(tmp_path).open({"identity": {}}, False)
    del run


def test_a_run_that_is_refused_leaves_no_open_file(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """With PYTHONWARNINGS=error the command printed a traceback after its line."""
    warnings.simplefilter("always", ResourceWarning)
    with closing(Run(tmp_path)) as run:
        run.open({"identity": {}}, False)
        assert in_use(tmp_path)
        with pytest.raises(BadInput, match="is in use by another process"):
            Run(tmp_path).open({"identity": {}}, False)
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []
    assert not in_use(tmp_path)


def losses(run: Path) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in log(run) if e["event"] == "train"}


@pytest.mark.slow
def test_stable_phases_are_equal(runs: dict[str, Path]) -> None:
    long, short = losses(runs["long"]), losses(runs["short"])
    assert [long[step] for step in range(1, 10)] == [short[step] for step in range(1, 10)]
    assert long[11] != short[11]
    rates = {e["step"]: e["lr"] for e in log(runs["long"]) if e["event"] == "train"}
    assert [rates[step] for step in (1, 3, 4, 16, 17)] == pytest.approx(
        [1e-3 / 3, 1e-3, 1e-3, 1e-3, 1e-3]
    )
    assert [rates[step] for step in (18, 20)] == pytest.approx([7.5e-4, 2.5e-4])


def branching(runs: dict[str, Path], step: int = 8) -> str:
    return f"train.branch_from={runs['long'] / f'checkpoints/step_{step}'}"


@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.slow
def test_a_branch_equals_the_run_that_decayed_there(
    forks: Forks, data: Toys, runs: dict[str, Path], tmp_path: Path, step: int
) -> None:
    """Weights, moments, log and scores are the same bit for bit. The branch is killed once."""
    run = tmp_path / "branch"
    marks = "train.keep_at=[2, 10]"  # the other run took step 2
    line = training(SMOKE, data.text, run, *SHORT, branching(runs, step), marks)
    killer = AT_STEP.format(step=11, signal="SIGKILL", ranks="0")
    first = forks.run(*line, before=killer)
    assert "of 12 steps: warm-up in the first 3, decay in the last 4\n" in first.err
    assert f"branching from {runs['long']}/checkpoints/step_{step} at step {step}" in first.err
    assert first.status == -signal.SIGKILL
    again = good(forks.run(*line)).err
    assert ("continuing" in again) == (step == 4)  # it has written a checkpoint at step 8
    assert [path.name for path in (run / "trajectory").iterdir()] == ["step_10"]
    assert "trajectory lacks" not in again
    assert "the run that it branched from kept these steps: 2\n" in first.err
    short, branch = content(runs["short"]), content(run)
    ends = branch["log"][-3:]
    assert ends == short["log"][-3:]
    trained = [
        [timeless(e) for e in log(each) if e["event"] == "train" and e["step"] > step]
        for each in (run, runs["short"])
    ]
    assert trained[0] == trained[1]
    assert branch["result"] == short["result"]
    assert branch["predictions"] == short["predictions"]
    assert branch["step_12"] == short["step_12"]
    # the rows are computed again for steps of the branch, and for those of the other run
    for number in (2, 11):
        rows = [batches_of(each, number)[3][0][2].rows.tolist() for each in (run, runs["short"])]
        assert rows[0] == rows[1]


@pytest.mark.slow
def test_a_branch_without_checkpoints_verifies_its_source_again(
    forks: Forks, data: Toys, runs: dict[str, Path], tmp_path: Path
) -> None:
    """All checkpoints of the branch are damaged, and so is the one that it came from."""
    copy, run = tmp_path / "long", tmp_path / "branch"
    shutil.copytree(runs["long"], copy)
    source = copy / "checkpoints/step_8"
    line = training(SMOKE, data.text, run, *SHORT, f"train.branch_from={source}")
    good(forks.run(*line))
    damage(*(path / "model.safetensors" for path in (run / "checkpoints").glob("step_*")))
    damage(source / "optimizer.safetensors")
    done = forks.run(*line)
    assert done.status == 2
    assert "step_12 was renamed to damaged_step_12" in done.err
    assert f"{source}/optimizer.safetensors is damaged: its checksum differs" in done.err
    shutil.copytree(runs["long"], copy, dirs_exist_ok=True)
    assert f"branching from {source} at step 8" in good(forks.run(*line)).err
    assert content(run)["step_12"] == content(runs["short"])["step_12"]


def test_an_empty_path_is_no_branch() -> None:
    recipe = {"data": "-", "run": "-", "head": "mlm", "train": {"branch_from": ""}}
    assert validate(Recipe, recipe).train.branch_from is None


def damage(*files: Path) -> None:
    """Change the last byte of each file."""
    for file in files:
        changed = bytearray(file.read_bytes())
        changed[-1] ^= 1
        file.write_bytes(changed)


@pytest.mark.slow
def test_two_ranks_branch_too(
    forks: Forks, data: Toys, runs: dict[str, Path], tmp_path: Path
) -> None:
    line = training(SMOKE, data.text, tmp_path / "run", *SHORT, branching(runs))
    good(forks.run(*line, ranks=2))
    assert min(losses(tmp_path / "run")) == 9


@pytest.mark.slow
def test_what_is_no_branch_is_refused(
    forks: Forks, data: Toys, runs: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def asks(*settings: str, step: int = 8) -> None:
        *words, settings_ = settings
        line = training(SMOKE, data.text, run, *SHORT, branching(runs, step), *words)
        refused(forks.run(*line), settings_)

    asks("optim.lr=2e-3", "made with other settings: optim.lr=0.001 is now 0.002")
    asks("seed=1", "seed=0 is now 1")
    no_decay = [*LONG, "train.steps=12", "optim.schedule=linear", branching(runs, 8)]
    refused(
        forks.run(*training(SMOKE, data.text, run, *no_decay)), "optim.schedule=wsd is now linear"
    )
    asks("optim.warmup=2", "optim.warmup=3.0 is now 2.0")
    asks("optim.decay=1.5", "optim.decay=1.5: a share of the run is below 1, and a number of steps")
    decayed = "lies in or after the decay of"
    asks("train.steps=11", f"{decayed} {run}: branch from an earlier step")
    asks("train.steps=30", f"{decayed} {runs['long']} when it had train.steps=20", step=20)
    epochs = ["train.steps=0", "train.epochs=1"]
    asks(*epochs, "that run counts train.steps, but this one train.epochs")
    asks("train.branch_from=nowhere", "=nowhere does not exist")
    absent = runs["long"] / "checkpoints/step_9999"
    asks(f"train.branch_from={absent}", f"{absent} does not exist; that run has the steps 4, 8")
    asks(f"train.branch_from={runs['long']}", "is not a checkpoint with the state")
    copy = tmp_path / "long"
    shutil.copytree(runs["long"], copy)
    changed = read_json(copy / "config.json")
    for part in ("config", "identity"):
        changed[part]["optim"]["warmup"] = 0.15
    (copy / "run_manifest.json").unlink()  # it has the checksum of config.json
    write_json(copy / "config.json", changed)
    place = f"train.branch_from={copy}/checkpoints/step_8"
    asks("optim.warmup=0.15", place, "has another warm-up: give optim.warmup in steps")
    shutil.copytree(runs["long"], copy, dirs_exist_ok=True)
    damage(copy / "checkpoints/step_8/model.safetensors")
    asks(place, "model.safetensors")
    assert not run.exists()
    own = training(SMOKE, data.text, copy, *SHORT, f"train.branch_from={copy}/checkpoints/step_4")
    refused(forks.run(*own, "overwrite=true"), "overwrite=true would delete train.branch_from=")
    assert (copy / "checkpoints/step_4").is_dir()


@pytest.mark.parametrize("counts", ["steps", "epochs"])
@pytest.mark.slow
def test_steps_of_a_decay_before_a_run_was_made_longer_are_no_branch(
    forks: Forks, data: Toys, tmp_path: Path, counts: str
) -> None:
    """The longer run decays from step 20, but it was made as one that decayed from step 4."""
    lengths = {"steps": (8, 24, 16), "epochs": (64 / 300, 192 / 300, 128 / 300)}[counts]
    first, then, branch = (
        [f"train.{counts}={length}", "train.steps=0"][: 1 + (counts == "epochs")]
        for length in lengths
    )
    settings = [*WSD, "optim.warmup=1", "optim.decay=4"]
    settings += ["train.keep_every=2", "train.checkpoint_every=2"]
    long, run = tmp_path / "long", tmp_path / "run"
    for length in (first, then):
        good(forks.run(*training(SMOKE, data.text, long, *settings, *length)))

    def line(step: int) -> list[str]:
        place = f"train.branch_from={long / f'checkpoints/step_{step}'}"
        return training(SMOKE, data.text, run, *settings, *branch, place)

    for step in (6, 8, 10, 12):
        words = f"lies in or after the decay of {long} when it had {first[0][:16]}"
        refused(forks.run(*line(step)), words)
    assert "branching from" in good(forks.run(*line(4))).err
    straight = tmp_path / "straight"
    good(forks.run(*training(SMOKE, data.text, straight, *settings, *branch)))
    assert content(run)["step_16"] == content(straight)["step_16"]


@pytest.mark.slow
def test_a_branch_has_the_precision_of_the_other_run(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """Whatever the machine would take for a new run."""
    for precision in ("bf16", "fp32"):
        long, run = tmp_path / f"{precision}-long", tmp_path / precision
        settings = [*LONG, "optim.decay=2", f"system.precision={precision}"]
        good(forks.run(*training(SMOKE, data.text, long, *settings, "train.steps=8")))
        branch = ["train.steps=10", f"train.branch_from={long}/checkpoints/step_4"]
        line = training(SMOKE, data.text, run, *settings, *branch, "system.precision=auto")
        said = f"precision {precision} (system.precision=auto: as in the run that it branches from)"
        assert said in good(forks.run(*line)).err
        assert read_json(run / "config.json")["config"]["system"]["precision"] == precision
