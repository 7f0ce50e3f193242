"""Studies where other people have a say: another copy of the package in the working directory, an
output that several people can write, a disk without space, a study file of somebody else.
"""

from __future__ import annotations

import sys
from pathlib import Path

import fake_slurm
import pytest
from helpers import ROOT, command, good
from toys import Toys

from xformer.data.files import read_json
from xformer.study.launch import variables_of
from xformer.study.plan import Job

# how an installed command starts: the working directory is not searched
DOOR = """
import sys
from xformer.start import run
from xformer.study import local
from xformer.study.__main__ import main
if __name__ == "__main__":
    local.FORKS = sys.argv.pop(1) == "fork"
    run(main)
"""
MINE = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(f'mine {sys.path[0]}')"
LOOK = """
import json, sys
with open(sys.argv[-1], "w") as file:
    json.dump({"metrics": {"test": {"a": 1.0}}}, file)
"""
STUDY = """
title = "Copies"
[needs.data]
about = "a store"
[made.module]
command = ["-m", "mine", "{out}"]
[made.line]
command = ["-c", "import sys, mine", "{out}"]
[made.hf]
command = ["-m", "xformer.convert", "to-hf", "{stage.one}", "{out}"]
[stages.one]
recipe = "pretrain/smoke"
settings.data = "{need.data}"
settings.model = { layers = 1, hidden = 16, heads = 2, intermediate = 16 }
settings.train.steps = 2
[stages.two]
recipe = "pretrain/smoke"
processes = 2
settings.data = "{need.data}"
settings.model = { layers = 1, hidden = 16, heads = 2, intermediate = 16 }
settings.train.steps = 2
[stages.look]
command = ["-m", "look", "{made.module}", "{made.line}", "{made.hf}", "{out}/result.json"]
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory with another package xformer, and with modules of the user."""
    directory = tmp_path / "here"
    (directory / "xformer").mkdir(parents=True)
    (directory / "xformer/__init__.py").write_text("raise SystemExit('another copy')")
    (directory / "torch.py").write_text("raise SystemExit('no torch')")
    (directory / "mine.py").write_text(MINE)
    (directory / "look.py").write_text(LOOK)
    (directory / "study.toml").write_text(STUDY)
    (tmp_path / "door.py").write_text(DOOR)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "spawn", "slurm"])
def test_a_study_computes_with_the_code_of_its_command(
    here: Path, data: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Although the working directory has another package of this name, and although commands of
    the user's own are searched for there. Repeating a run's steps does the same."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    line = [tmp_path / "door.py", "fork" if how == "fork" else "spawn"]
    options = ["jobs=1", "output=out", f"needs.data={data.text}"]
    if how == "slurm":
        pytest.importorskip("submitit")
        if sys.platform != "linux":
            pytest.skip("the imitated cluster is tried on Linux only")
        for name, value in fake_slurm.install(tmp_path / "slurm").items():
            monkeypatch.setenv(name, value)
        options += ["executor=slurm", "slurm.timeout_min=30"]
    good(command(*line, "study.toml", *options, cwd=here))
    for name in ("module", "line"):
        (made,) = (here / "out/made").glob(f"{name}-????????????????")
        assert made.read_text().startswith("mine ")
    configs = [read_json(path) for path in (here / "out/runs").glob("*/config.json")]
    assert sorted(one["starts"][0]["environment"]["world_size"] for one in configs) == [1, 2]
    if how == "fork":
        for run in (here / "out/runs").glob("*/config.json"):
            good(command(*line, "verify", run.parent, cwd=here))


def test_only_our_own_commands_leave_out_the_working_directory(tmp_path: Path) -> None:
    ranks = ("-m", "torch.distributed.run", "--standalone", "-m", "xformer.train", "x.toml")
    recipes: dict[tuple[str, ...], dict[str, str]] = {ranks: {}, ("train.py", "x.toml"): {}}
    own = (*recipes, ("preprocess.py", "text"), ("-m", "xformer.analysis"), ("-m", "xformer"))
    others = (("-m", "mine"), ("-c", "import xformer"), ("mine.py", "x"), ("-m", "xformers"))
    for command_ in (*own, *others):
        job = Job("a", "a", tmp_path, tmp_path, command_, recipe=recipes.get(command_))
        variables = variables_of(job)
        assert variables["PYTHONPATH"].split(":")[0] == str(ROOT)
        assert ("PYTHONSAFEPATH" in variables) == (command_ in own), command_
