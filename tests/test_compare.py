"""The comparison of two checkouts: what it calls equal or slower, and whose code it runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from safetensors.numpy import load_file, save_file

from benchmarks import compare
from benchmarks.compare import differences, place_of, verdict


def copied(path: Path) -> Path:
    """A copy of this checkout that leaves a file when its package is imported."""
    for name in ("preprocess", "recipes", "xformer"):
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("micro"))
    for name in ("preprocess.py", "train.py", "setup.py"):
        shutil.copy(ROOT / name, path)
    note = "from pathlib import Path\n\nPath(__file__).with_name('imported').touch()\n"
    (path / "xformer/__init__.py").write_text(note)
    return path


@pytest.mark.slow
def test_a_checkout_equals_itself_and_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One recipe bit for bit, and one pair of timed runs, in two checkouts of the same code.

    Both have this checkout's library: each is to be compiled, but the compiler fails.
    """
    sides = [copied(tmp_path / name) for name in ("old", "new")]
    options = ["--recipes", "mlm", "pretrain", "--pairs", "1", "--steps", "12", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["compare", *map(str, sides), *options])
    monkeypatch.setitem(compare.TIMED, "pretrain", compare.EXACT["mlm"])  # a tiny model
    monkeypatch.setenv("CXX", "false")
    compare.main()
    out = capsys.readouterr().out
    assert "| mlm | 0 | equal | equal | equal |" in out
    assert "| mlm | 0.1 | equal | equal | equal |" in out
    assert "pretrain: median NEW / OLD" in out
    assert "1 pairs are too few for an interval" in out
    for side in sides:
        assert (side / "xformer/imported").exists()


def finished(path: Path) -> Path:
    """A finished run of one step, with only the files that are compared."""
    (path / "best").mkdir(parents=True)
    save_file({"a": np.arange(4.0), "b": np.ones((2, 2))}, path / "best/model.safetensors")
    result = {"metrics": {"valid": {"loss": 2.0}}, "selected": "best", "seconds": 3.0}
    (path / "result.json").write_text(json.dumps(result))
    (path / "log.jsonl").write_text('{"event": "train", "step": 1, "loss": 4.0, "time": 5.0}\n')
    return path


def test_differences_are_found_and_measured(tmp_path: Path) -> None:
    old, new = finished(tmp_path / "old"), finished(tmp_path / "new")
    log, result, weights = new / "log.jsonl", new / "result.json", new / "best/model.safetensors"
    log.write_text(log.read_text().replace("5.0", "9.0"))  # the clock
    assert differences(old, new) == ["equal", "equal", "equal"]
    save_file(load_file(weights) | {"a": np.array([0.0, 1.0, 2.0, 3.003])}, weights)
    log.write_text(log.read_text().replace("4.0", "4.4"))
    result.write_text(result.read_text().replace("2.0", "NaN"))
    assert differences(old, new) == [
        "1.0e-03 in a",
        "1.0e-01 in train 1: loss",
        "inf in valid.loss",
    ]
    save_file({"a": np.arange(4.0)}, weights)
    log.write_text(log.read_text() + '{"event": "train", "step": 2, "loss": 4.0}\n')
    result.write_text(result.read_text().replace("NaN", "2.0"))
    assert differences(old, new) == [
        "new lacks 1, such as b",
        "new has 3 more, such as train 2: event",
        "equal",
    ]


def test_the_interval_of_a_median_is_that_of_the_sign_test() -> None:
    # Conover 1999, table A3: of 9 values the second and the eighth, of 15 the fourth
    assert [place_of(n) for n in (1, 5, 6, 8, 9, 15)] == [0, 0, 1, 1, 2, 4]
    slow = [0.90, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.965, 1.2]
    assert "0.940 (0.910 to 0.965); the interval lies wholly below 0.97: NEW is slow" in verdict(
        slow
    )
    assert "does not lie wholly below 0.97: NEW is not shown to be slower" in verdict([*slow, 1.1])
