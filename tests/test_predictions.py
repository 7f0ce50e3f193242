"""The predictions that a run keeps: they give every score again without model or store, and damage
is refused.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    CLASSIFY,
    ROOT,
    SMOKE,
    Forks,
    good,
    kept_as_scored,
    resamples_as_scored,
    training,
)
from toys import Toys

from xformer.data.errors import BadInput
from xformer.data.files import RUN_MANIFEST, read_json
from xformer.data.store import open_store
from xformer.predictions import read, write
from xformer.tasks import classify
from xformer.tasks.known import task_of
from xformer.tasks.task import Head, Predictions, Task, small

STEPS = ["train.steps=4", "train.validate_every=2"]
KILLED = """
import os, signal
from xformer import train
original = train.write
def write(path, *rest):
    original(path, *rest)
    if path.name == "valid.npz":
        os.kill(os.getpid(), signal.SIGKILL)
train.write = write
"""


def classes(*names: str) -> Task:
    return task_of(Head("classify", names))


@pytest.mark.parametrize("name", ["text", "classes", "scores", "pairs", "splice"])
def test_a_run_keeps_what_it_scored(name: str, data: Toys, learned: dict[str, Path]) -> None:
    run, store = learned[name], open_store(getattr(data, name))
    kept_as_scored(run)
    for split in ("valid", "test"):
        predictions, columns = read(run / f"predictions/{split}.npz"), store.split(split).columns
        assert predictions.store == store.key
        rows = store.split(split).rows
        assert predictions.arrays["row"].tolist() == list(range(rows))
        if name == "text":
            assert predictions.arrays["masked"].sum() > 0
            assert (predictions.arrays["correct"] <= predictions.arrays["masked"]).all()
            continue
        assert predictions.classes == tuple(store.labels)
        assert np.array_equal(predictions.arrays["label"], columns["label"])
        outputs = predictions.arrays["outputs"]
        assert (outputs.dtype, outputs.shape) == (np.float32, (rows, len(store.labels) or 1))
        if store.labels:  # a user can compute other statistics
            right = outputs.argmax(1) == predictions.arrays["label"]
            assert right.mean() == predictions.metrics()["accuracy"]


def test_evaluation_writes_the_same_file(
    forks: Forks, data: Toys, learned: dict[str, Path], tmp_path: Path
) -> None:
    """This holds with 1 and 2 processes, for classes and for masked tokens. With any other file
    name the output is a table.
    """
    for name in ("classes", "text"):
        for ranks in (1, 2):
            out = tmp_path / f"{name}{ranks}.npz"
            good(
                forks.run(
                    "evaluate.py",
                    learned[name],
                    f"data={getattr(data, name)}",
                    f"predictions={out}",
                    "system.threads=1",
                    ranks=ranks,
                )
            )
            assert out.read_bytes() == (learned[name] / "predictions/test.npz").read_bytes()


@pytest.mark.slow
def test_reading_needs_neither_the_store_nor_the_checkpoint(
    forks: Forks, data: Toys, tmp_path: Path
) -> None:
    """A new process reads them when both are deleted."""
    run, store = tmp_path / "run", tmp_path / "store"
    shutil.copytree(data.classes, store)
    good(forks.run(*training(CLASSIFY, store, run, *STEPS)))
    shutil.rmtree(store)
    shutil.rmtree(run / "checkpoints")
    file = run / "predictions/test.npz"
    code = f"from xformer.predictions import read; print(read({str(file)!r}).metrics())"
    line = [sys.executable, "-c", code]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=240)
    scores = read_json(run / "result.json")["metrics"]["test"]
    assert (ended.stdout, ended.stderr) == (f"{scores}\n", "")


def test_old_predictions_go_with_the_old_result(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """Cases: a run is made longer, is made again, or was killed between its predictions and its
    result.
    """
    run = tmp_path / "run"
    line = training(CLASSIFY, data.classes, run, *STEPS)
    assert forks.run(*line, before=KILLED).status == -signal.SIGKILL
    files = sorted(path.name for path in (run / "predictions").iterdir())
    assert files == ["valid.npz"]
    assert not (run / "result.json").exists()
    for more in ([], ["train.steps=6"], ["overwrite=true"]):
        (run / "predictions/old.npz").touch()
        good(forks.run(*line, *more))
        kept_as_scored(run)  # nothing else is there
        listed = read_json(run / RUN_MANIFEST)["sha256"]
        assert {"predictions/valid.npz", "predictions/test.npz"} < listed.keys()


def test_two_ranks_write_what_one_writes(forks: Forks, data: Toys, tmp_path: Path) -> None:
    for ranks in (1, 2):
        run = tmp_path / f"run{ranks}"
        good(forks.run(*training(SMOKE, data.text, run, *STEPS), ranks=ranks))
        kept_as_scored(run)


def test_a_damaged_file_is_refused_by_name(learned: dict[str, Path], tmp_path: Path) -> None:
    """A change of any byte is noticed, in a run and in a file alone. Other files and files that
    lack an array are refused too.
    """
    content = (learned["classes"] / "predictions/valid.npz").read_bytes()
    scores = read(learned["classes"] / "predictions/valid.npz").metrics()
    run, alone = tmp_path / "predictions/valid.npz", tmp_path / "alone.npz"
    run.parent.mkdir()
    (tmp_path / RUN_MANIFEST).write_text(
        (learned["classes"] / RUN_MANIFEST).read_text(), encoding="utf-8"
    )
    for place in range(0, len(content), 13):
        changed = bytearray(content)
        changed[place] ^= 4
        run.write_bytes(changed)
        with pytest.raises(BadInput, match=r"valid.npz is damaged: its checksum is not the one in"):
            read(run)
        alone.write_bytes(changed)
        with suppress(BadInput):  # some bytes do not matter, such as the file's time
            assert read(alone).metrics() == scores
    run.write_bytes(content)
    assert read(run).metrics() == scores
    run.rename(run.with_name("other.npz"))
    with pytest.raises(BadInput, match=r"lists no checksum of predictions/other.npz"):
        read(run.with_name("other.npz"))
    with pytest.raises(BadInput, match=r"valid.npz does not exist"):
        read(run)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.npz"
    for content in (b"", b"PK", b"words"):
        file.write_bytes(content)
        with pytest.raises(BadInput, match=r"file.npz is damaged, or not"):
            read(file)
    np.savez(file, row=np.arange(3))
    with pytest.raises(BadInput, match=r"file.npz is damaged, or not .* no array 'about'"):
        read(file)
    for arrays, words in (
        ({"row": np.arange(3)}, "it contains the arrays row"),
        (
            {"row": np.arange(3), "outputs": np.zeros((2, 2)), "label": np.zeros(3)},
            "differ in length",
        ),
    ):
        write(file, Predictions(classes("a", "b"), "valid", arrays), "key")
        with pytest.raises(BadInput, match=words):
            read(file)


def test_groups_and_unknown_labels_survive_the_file(tmp_path: Path) -> None:
    """Scores from the file equal the metrics computed directly, with votes, rows without a label,
    and classes that training lacks.
    """
    draw = np.random.default_rng(3)
    rows, group = 60, np.repeat(np.arange(20), 3) + 400
    outputs = draw.normal(size=(rows, 3)).astype(np.float32)
    label = np.repeat(draw.choice([-2, -1, 0, 1, 2], 20), 3)
    arrays: dict[str, np.ndarray] = {"row": np.arange(rows), "outputs": outputs, "label": label}
    arrays["group"] = group
    made = Predictions(
        classes("a", "b", "c"),
        "test",
        {name: small(values) for name, values in arrays.items()},
    )
    file = tmp_path / "test.npz"
    write(file, made, "key")
    again = read(file)
    assert again.metrics() == made.metrics()
    resamples_as_scored(again)
    assert [again.arrays[n].dtype for n in arrays] == [np.uint8, np.float32, np.int8, np.uint16]
    known = label != -1
    chances = np.exp(outputs[known].astype(float))
    votes = classify.vote(np.log(chances / chances.sum(1, keepdims=True)), group[known])
    right = votes.argmax(1) == classify.first_by_group(label[known], group[known])
    assert again.metrics()["accuracy"] == right.mean()
    with pytest.raises(BadInput, match="the split 'test' has no labels to score against"):
        Predictions(classes(), "test", {**arrays, "label": label * 0 - 1}).metrics()


def test_integers_take_the_smallest_type() -> None:
    for values, dtype in (
        ([0, 255], "u1"),
        ([0, 256], "u2"),
        ([-2, 127], "i1"),
        ([-2, 128], "i2"),
        ([0, 2**16], "u4"),
        ([], "u1"),
    ):
        packed = small(np.array(values, np.int64))
        assert packed.dtype == dtype
        assert packed.tolist() == values
    assert small(np.array([0.5])).dtype == np.float32
