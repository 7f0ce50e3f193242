"""The wheel is built, installed and used outside of the checkout. Two editable checkouts coexist.

`make test-install` runs these tests. The test environments use the libraries of the environment
that runs the tests: a .pth file names its site-packages. Python does not read .pth files inside
that directory, so a checkout that is installed there in editable mode cannot be imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest
from helpers import QUIET, ROOT, SMOKE, Done, command, good, training
from test_train import same
from toys import Toys

from xformer.ops import native

pytestmark = pytest.mark.install
LIMIT = 900  # seconds for a command
BUILD = "from setuptools import build_meta; print(build_meta.build_sdist('..'))"
WHERE = """
import xformer, xformer.config, xformer.preprocess.cli
for file in (xformer.__file__, xformer.preprocess.cli.__file__,
             xformer.config.recipes()["finetune/classify"]):
    print(file)
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    path: Path

    @property
    def packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.path / "lib" / version / "site-packages"

    def run(self, program: str, *arguments: str | Path, cwd: Path, path: str = "") -> Done:
        """Run a program of the environment in the directory `cwd`, with PYTHONPATH=`path`."""
        environment = {**os.environ, **QUIET, "PYTHONPATH": path}
        if not path:
            del environment["PYTHONPATH"]
        line = [str(self.path / "bin" / program), *map(str, arguments)]
        done = subprocess.run(
            line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
        return Done(done.returncode, done.stdout, done.stderr)


def make_environment(path: Path, *installed: str | Path) -> Environment:
    """A virtual environment with the libraries of this one and the packages `installed`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    made = Environment(path)
    (made.packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", path / "bin/python", "install", *installed)
    return made


def pip(*arguments: str | Path) -> None:
    """Run pip without an index: the build tools and the sources are all here."""
    offline = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    line = [sys.executable, "-m", "pip", *map(str, arguments), *offline]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


def copy_checkout(to: Path) -> Path:
    """Copy the files of this checkout that git tracks or would track."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("docs/", "results/")):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
    return to


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--wheel-dir", folder, copy_checkout(folder / "source"))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel."""
    return make_environment(tmp_path_factory.mktemp("installed") / "venv", wheel)


def contents(wheel: Path) -> set[str]:
    return {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_package(wheel: Path, tmp_path: Path) -> None:
    """The wheel has every file and no others, also if it is built from the source distribution."""
    places = {
        "xformer": "xformer",
        "preprocess": "xformer/preprocess",
        "recipes": "xformer/recipes",
    }
    source = wheel.parent / "source"
    wanted = {
        f"{place}/{file.relative_to(source / folder)}"
        for folder, place in places.items()
        for file in (source / folder).rglob("*")
        if file.is_file()
    }
    assert {"xformer/py.typed", "xformer/ops/native.cpp"} < wanted
    wanted.add(f"xformer/ops/{native.LIBRARY.name}")  # compiled during the build
    assert contents(wheel) == wanted
    assert {
        "xformer/preprocess/fetch/catalogue.toml",
        "xformer/recipes/finetune/classify.toml",
    } < wanted
    for name in ("english", "brackets"):
        assert f"xformer/micro/{name}/model.safetensors" in wanted
    init = ZipFile(wheel).read("xformer/preprocess/__init__.py")
    assert init == b"", "the checkout's bridge to preprocess/ is not installed"

    again = copy_checkout(tmp_path / "source")
    subprocess.run([sys.executable, "-c", BUILD], cwd=again, capture_output=True, check=True)
    pip("wheel", "--wheel-dir", tmp_path / "wheel", next(tmp_path.glob("*.tar.gz")))
    assert contents(next((tmp_path / "wheel").glob("*.whl"))) == wanted


def test_the_installed_package_uses_its_library(installed: Environment, tmp_path: Path) -> None:
    code = "from xformer.ops import native; print(native.absent, native.__file__, sep='|')"
    said = installed.run("python", "-c", code, cwd=tmp_path)
    assert said.out == f"|{installed.packages / 'xformer/ops/native.py'}\n"


STUDY = """
title = "One run"
question = "Does it run without a checkout?"
paper = "Nobody 2026"
[needs.raw]
about = "texts"
get = "python preprocess.py pydocs"
[made.tok]
command = ["preprocess.py", "tokenizer", "--kind", "wordpiece", "--vocab-size", "90", "--input",
           "{need.raw}/train.txt", "--output", "{out}"]
[made.store]
command = ["preprocess.py", "text", "--tokenizer", "{made.tok}", "--max-tokens", "18", "--input",
           "{need.raw}/train.txt", "--valid", "{need.raw}/valid.txt", "--output", "{out}"]
[stages.train]
recipe = "pretrain/smoke"
settings.data = "{made.store}"
settings.model = { layers = 1, hidden = 16, heads = 2, intermediate = 16 }
settings.batch.max_tokens = 20
settings.train.steps = 2
[stages.score]
command = ["evaluate.py", "{stage.train}", "data={made.store}", "split=valid",
           "out={out}/result.json"]
[scales.mini]
"""


def test_everything_runs_from_the_wheel(installed: Environment, data: Toys, tmp_path: Path) -> None:
    """In an empty directory, the commands that a user types lead from raw text to a report."""
    here = tmp_path / "empty"
    here.mkdir()

    def xformer(line: str) -> Done:
        return good(installed.run("xformer", *line.split(), cwd=here))

    places = good(installed.run("python", "-c", WHERE, cwd=here)).out.splitlines()
    assert all(Path(place).is_relative_to(installed.packages) for place in places), places

    raw = data.raw / "train.txt"
    xformer(f"preprocess tokenizer --kind wordpiece --vocab-size 90 --input {raw} --output tok")
    text = f"preprocess text --input {raw} --valid {data.raw / 'valid.txt'} --workers 2"
    xformer(f"{text} --tokenizer tok --max-tokens 18 --output store")
    tiny = " ".join(training(SMOKE, "store", Path("run"), "train.steps=3")[2:])
    xformer(f"train pretrain/smoke {tiny}")
    assert "valid loss" in xformer("evaluate run data=store split=valid").out
    assert xformer("evaluate run text=[MASK]").out.startswith("mask 1:")
    xformer("convert to-hf run hf")
    assert (here / "hf/model.safetensors").is_file()
    xformer("surgery run half keep_layers(first=1)")
    assert "xformer.surgery" not in xformer("convert inspect half").out
    xformer("analyze curves run out=figures")
    assert (here / "figures/curves.json").is_file()
    listing = xformer("study kao2021-figure2 scale=mini --dry-run").out
    assert "jobs" in listing
    assert "xformer preprocess fetch" in listing  # how to get missing data

    (here / "one.toml").write_text(STUDY)
    xformer(f"study one.toml scale=mini jobs=1 needs.raw={data.raw}")
    assert len(list((here / "runs/studies/runs").glob("*/result.json"))) == 2
    wrong = installed.run("xformer", "train", "finetune/clasify", "data=store", "run=x", cwd=here)
    near = "error: the recipe finetune/clasify does not exist; did you mean finetune/classify?\n"
    assert (wrong.status, wrong.err) == (2, near)


def test_two_ranks_of_the_module_are_two_of_the_door(
    installed: Environment, data: Toys, tmp_path: Path
) -> None:
    runs = [tmp_path / "door", tmp_path / "module"]
    lines = [training(SMOKE, data.text, run, "train.steps=4")[2:] for run in runs]
    good(command("train.py", SMOKE, *lines[0], ranks=2))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    module = ["-m", "xformer.train", "pretrain/smoke", *lines[1]]
    good(installed.run("python", *torchrun, *module, cwd=tmp_path))
    same(runs[1], runs[0])


def test_two_checkouts_never_mix(tmp_path: Path) -> None:
    """One checkout is installed in editable mode. The other comes first on PYTHONPATH, or its door
    is started."""
    first, second = (copy_checkout(tmp_path / name) for name in ("first", "second"))
    environment = make_environment(tmp_path / "venv", "--editable", first)
    for checkout, path in ((first, ""), (second, str(second))):
        done = good(environment.run("python", "-c", WHERE, cwd=tmp_path, path=path))
        places = [checkout / "xformer/__init__.py", checkout / "preprocess/cli.py"]
        places.append(checkout / "recipes/finetune/classify.toml")
        assert done.out.splitlines() == list(map(str, places))
        help_ = environment.run("xformer", "preprocess", "--help", cwd=tmp_path, path=path)
        assert good(help_).out.startswith("usage: xformer preprocess ")

    (second / "preprocess/stats.py").write_text("raise SystemExit('this is the second')")
    door = environment.run("python", second / "preprocess.py", "--help", cwd=tmp_path)
    assert (door.status, door.err.strip()) == (1, "this is the second")
    good(environment.run("python", first / "preprocess.py", "--help", cwd=second))
