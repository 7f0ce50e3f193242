"""The command `xformer`: its sub-commands and their help, and recipes by name."""

from __future__ import annotations

import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, SMOKE, Forks, command, good, training
from test_train import same
from toys import Toys

from xformer import command as commands
from xformer.config import find_recipe, read_recipe, recipes
from xformer.data.errors import BadInput, typed
from xformer.study.launch import line_of
from xformer.study.plan import Job, Plan
from xformer.study.reading import read_study

NAMES = (
    *("preprocess", "train", "evaluate", "encode", "convert", "surgery", "analyze", "study"),
    "runs",
    "recipes",
)


def xformer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """What `xformer ARGUMENTS` prints, if it says something and ends well."""
    monkeypatch.setattr(sys, "argv", ["xformer", *arguments])
    monkeypatch.setattr(sys.modules["__main__"], "__doc__", "")
    capsys.readouterr()
    with suppress(SystemExit):  # --help exits
        commands._dispatch()
    return capsys.readouterr().out


def test_help_lists_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuple(commands.COMMANDS) == NAMES
    for arguments in ((), ("--help",), ("-h",)):
        lines = xformer(monkeypatch, capsys, *arguments).splitlines()
        for name in NAMES:
            assert [line.endswith(".") for line in lines if f"xformer {name} " in line] == [True]
    version, *about = xformer(monkeypatch, capsys, "--version").splitlines()
    assert version.startswith("xformer ")
    assert about[0].startswith("Python 3.")
    assert f", torch {torch.__version__}, NumPy {np.__version__}" in about[0]
    assert about[-1] == f"package: {ROOT / 'xformer'}"
    monkeypatch.setattr(sys, "argv", ["xformer", "analyse"])
    with pytest.raises(BadInput, match=r"no command 'analyse'; did you mean analyze\?"):
        commands._dispatch()
    for name in commands.BELOW:
        monkeypatch.setattr(sys, "argv", ["xformer", name])
        with pytest.raises(BadInput, match=f"write xformer {commands.BELOW[name]} {name}$"):
            commands._dispatch()
        help_of = xformer(monkeypatch, capsys, commands.BELOW[name], "--help")
        assert f" {name} " in help_of, "the sub-command knows it"
    monkeypatch.setattr(sys, "argv", ["xformer", "train"])
    with pytest.raises(BadInput, match="must be a recipe, such as pretrain/mini"):
        commands._dispatch()


@pytest.mark.parametrize("module", ["encode", "runs"])
def test_a_module_is_its_command(module: str) -> None:
    """The help of `python -m xformer.MODULE` describes every key, too."""
    texts = [
        good(command("-m", *w, "--help")).out for w in ((f"xformer.{module}",), ("xformer", module))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("line", "use"),
    [
        ("preprocess", "usage: xformer preprocess "),
        ("preprocess task tsv", "usage: xformer preprocess task tsv "),
        ("train", "xformer train finetune/classify data="),
        ("evaluate", "xformer evaluate runs/cola data="),
        ("encode", "xformer encode micro/english input="),
        ("convert", "usage: xformer convert "),
        ("convert to-hf", "usage: xformer convert to-hf "),
        ("surgery", "usage: xformer surgery "),
        ("analyze", "xformer analyze pwcca CHECKPOINT"),
        ("analyze curves", "xformer analyze curves RUN"),
        ("analyze draw", "xformer analyze draw FILE"),
        ("study", "xformer study studies/kao2021-figure2 scale=mini"),
        ("study verify", "xformer study verify runs/english"),
        ("runs", "xformer runs runs/study csv=runs.csv"),
        (
            "runs rows",
            "Print the rows that a run read in a training step.\n\n    xformer runs rows",
        ),
        ("recipes", "xformer recipes show finetune/classify"),
    ],
)
def test_each_has_its_own_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, use: str
) -> None:
    shown = xformer(monkeypatch, capsys, *line.split(), "--help")
    assert use in shown
    for other in ("python -m", "preprocess.py", "train.py", "evaluate.py", "recipes/"):
        assert other not in shown, other


def docstring(door: str) -> str:
    names: dict[str, object] = {}
    exec(compile((ROOT / f"{door}.py").read_text(), door, "exec"), {"__name__": door}, names)
    return str(names.get("__doc__"))


@pytest.mark.parametrize(("door", "usage"), [("train", "TRAIN"), ("evaluate", "EVALUATE")])
def test_the_usage_is_that_of_the_door(
    monkeypatch: pytest.MonkeyPatch, door: str, usage: str
) -> None:
    """The scripts train.py and evaluate.py are not installed, so the command repeats their
    docstrings.
    """
    text = docstring(door)
    assert typed(text) == text, "this is not the command"
    monkeypatch.setattr(sys, "argv", [f"xformer {door}"])
    assert typed(text) == getattr(commands, usage)


def test_commands_are_written_as_the_user_types_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["xformer study"])
    for checkout, installed in (
        ("see train.py --help", "see xformer train --help"),
        ("python -m xformer.analysis pwcca", "xformer analyze pwcca"),
        (
            "torchrun --nproc-per-node 2 train.py x",
            "torchrun --nproc-per-node 2 -m xformer.train x",
        ),
        # files of the user, and modules without a sub-command, are left as they are
        ("my/train.py retrain.py", "my/train.py retrain.py"),
        ("python -m xformer.study.pool", "python -m xformer.study.pool"),
    ):
        assert typed(checkout) == installed
        assert typed(installed) == installed


def test_a_recipe_is_found_by_path_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recipes()["finetune/classify"] == ROOT / "recipes/finetune/classify.toml"
    assert find_recipe("finetune/classify") == recipes()["finetune/classify"]
    assert find_recipe("micro", kind="studies") == recipes()["studies/micro"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "finetune").mkdir()
    (tmp_path / "finetune/classify").mkdir()  # a directory is not a recipe
    assert find_recipe("finetune/classify") == recipes()["finetune/classify"]
    (tmp_path / "finetune/regress").write_text("head = 'mlm'")  # a file comes first
    assert read_recipe(find_recipe("finetune/regress")) == {"head": "mlm"}
    (tmp_path / "mine.toml").write_text('base = "finetune/classify"\nseed = 7')
    mine = read_recipe(find_recipe("mine.toml"))
    assert mine == {**read_recipe(recipes()["finetune/classify"]), "seed": 7}
    for wrong, near in (
        ("finetune/clasify", "; did you mean finetune/classify?"),
        ("recipes/pretrain/mini.toml", "; did you mean pretrain/mini?"),  # there is no checkout
        ("clasify", "; did you mean finetune/classify?"),
        ("pretrain/micr", "; did you mean pretrain/micro?"),
        ("recipes/pretrain/dem.toml", "; did you mean pretrain/demo?"),
        ("micr", "; did you mean pretrain/micro?"),
        ("studies/micr", "; did you mean studies/micro?"),
        ("zzz", f"; there are {', '.join(n for n in recipes() if not n.startswith('studies'))}"),
        (
            "finetune/zzz.toml",
            "; there are finetune/choice, finetune/classify, finetune/demo, finetune/hilbert-cnn, "
            "finetune/probe, finetune/regress, finetune/reproduce, finetune/squad, finetune/tag",
        ),
    ):
        with pytest.raises(BadInput) as refusal:
            read_recipe(find_recipe(wrong))
        assert str(refusal.value) == f"the recipe {wrong} does not exist{near}"


def test_recipes_are_listed_and_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def no_terminal(_: int) -> None:
        raise OSError

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", no_terminal)
    lines = xformer(monkeypatch, capsys, "recipes").splitlines()
    assert [line.split()[0] for line in lines] == list(recipes())
    assert not any(line.endswith("...") for line in lines), "a pipe gets whole descriptions"
    assert any("pretrain/mini  " in line and " A small encoder (4 layers" in line for line in lines)
    monkeypatch.setenv("COLUMNS", "100")
    short = xformer(monkeypatch, capsys, "recipes").splitlines()
    assert all(36 < len(line) <= 100 for line in short)
    shown = xformer(monkeypatch, capsys, "recipes", "show", "pretrain/continue")
    assert "#   xformer train pretrain/continue init=CHECKPOINT" in shown
    assert "with `xformer preprocess text --tokenizer CHECKPOINT`" in shown
    for name, path in recipes().items():  # a copy means the same in any directory
        copy = tmp_path / "copy.toml"
        copy.write_text(xformer(monkeypatch, capsys, "recipes", "show", name))
        assert read_recipe(copy).keys() == read_recipe(path).keys()
        stages = tomllib.loads(copy.read_text()).get("stages", {}).values()
        for stage in (stage for stage in stages if "recipe" in stage):
            assert find_recipe(stage["recipe"], tmp_path).is_file()
    for wrong, words in (
        (["finetune/clasify"], "no recipe is named 'finetune/clasify'; did you mean finetune/clas"),
        ([], "write `xformer recipes`, or `xformer recipes show NAME`"),
    ):
        monkeypatch.setattr(sys, "argv", ["xformer", "recipes", "show", *wrong])
        with pytest.raises(BadInput, match=words):
            commands._dispatch()


def test_a_copied_study_plans_the_same_runs(tmp_path: Path) -> None:
    """This also holds for a study with a base, whose stages name recipes relative to the base."""
    path = recipes()["studies/kao2021-table2"]
    copy, own = tmp_path / "copy.toml", tmp_path / "own.toml"
    copy.write_text(commands.portable(path))
    own.write_text('base = "studies/kao2021-table2"')
    plans = [Plan(read_study(file, "mini"), tmp_path, {}) for file in (path, copy, own)]
    assert list(plans[0].jobs) == list(plans[1].jobs) == list(plans[2].jobs)


def test_works_need_no_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed package has no scripts next to it: the jobs of a study are sub-commands."""
    recipe = ("train.py", "recipe.toml")
    job = Job("a", "a", tmp_path, tmp_path, recipe)
    assert line_of(job) == (sys.executable, str(ROOT / "train.py"), "recipe.toml")
    monkeypatch.setattr("xformer.provenance.ROOT", tmp_path)
    assert line_of(job) == (sys.executable, "-m", "xformer", "train", "recipe.toml")
    convert = Job("b", "b", tmp_path, tmp_path, ("-m", "xformer.convert", "inspect", "x"))
    assert line_of(convert) == (sys.executable, "-m", "xformer.convert", "inspect", "x")


@pytest.mark.slow
def test_modules_are_commands(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """`python -m xformer.train` and `python -m xformer.evaluate` do what the two scripts do."""
    runs = [tmp_path / "door", tmp_path / "module"]
    lines = [training(SMOKE, data.text, run, "train.steps=3")[1:] for run in runs]
    good(forks.run("train.py", *lines[0]))
    good(command("-m", "xformer.train", "pretrain/smoke", *lines[1][1:], cwd=tmp_path))
    same(runs[1], runs[0])
    score = [f"data={data.text}", "split=test"]
    door = good(forks.run("evaluate.py", runs[0], *score))
    assert good(command("-m", "xformer.evaluate", runs[0], *score, cwd=tmp_path)).out == door.out
