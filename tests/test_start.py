"""How a command starts: what precedes the import of torch, and what ends an orphaned rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from helpers import PATIENCE, ROOT, SMOKE, training
from toys import Toys

from xformer import start
from xformer.data.errors import DISTRIBUTION

LIMIT = 30  # seconds that a busy machine has for what takes ten


def ranks_of(run: Path) -> list[int]:
    """The processes, other than torchrun, whose command line names a run's directory."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if f"run={run}" in words and "torch.distributed.run" not in words:
            found.append(int(folder.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
@pytest.mark.parametrize("moment", ["first", "importing", "training"])
def test_ranks_end_with_their_torchrun(data: Toys, tmp_path: Path, moment: str) -> None:
    """torchrun is killed when its ranks begin, a second later, and when they train."""
    run = tmp_path / "run"
    log = run / "log.jsonl"
    line = training(SMOKE, data.text, run, "train.steps=1000000", "train.log_every=1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    quiet = subprocess.DEVNULL
    agent = subprocess.Popen(
        [*torchrun, "--nproc-per-node", "2", *line], cwd=ROOT, stdout=quiet, stderr=quiet
    )
    end = time.monotonic() + PATIENCE
    begun = {
        "first": lambda: bool(ranks_of(run)),
        "importing": lambda: len(ranks_of(run)) == 2,
        "training": lambda: log.exists() and '"train"' in log.read_text(),
    }[moment]
    try:
        while not begun():
            assert time.monotonic() < end, "it never began"
            time.sleep(0.01)
        if moment == "importing":
            time.sleep(1)
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    end = time.monotonic() + LIMIT
    while (left := ranks_of(run)) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    if moment == "training":  # it stopped as after SIGTERM
        assert list((run / "checkpoints").iterdir())


def test_a_parent_is_a_python_program() -> None:
    """A rank whose torchrun was gone at its first look has a parent that adopts orphans."""
    assert not start._adopted(os.getpid())
    with subprocess.Popen(["sleep", "100"]) as other:
        assert start._adopted(other.pid)
        other.kill()
    assert not start._adopted(other.pid)  # gone: the parent's number has changed by then


@pytest.mark.parametrize("own", [{}, *({name: "7"} for name in start.WAITING)])
def test_how_threads_wait_is_the_users_choice(own: dict[str, str]) -> None:
    """The policy stands in the environment when torch is imported, unless the user gave one."""
    code = (
        "import os, sys; from xformer.start import WAITING, run\n"
        "def main():\n"
        "    assert 'torch' not in sys.modules\n"
        "    print({name: os.environ[name] for name in WAITING if name in os.environ})\n"
        "run(main)"
    )
    environment = {k: v for k, v in os.environ.items() if k not in start.WAITING}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, **own},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{own or {'GOMP_SPINCOUNT': start.SPINS}}\n"


@pytest.mark.parametrize("door", ["train", "evaluate"])
def test_doors_prepare_the_process_before_torch(door: str) -> None:
    """Importing a door loads no torch: `run` has its say first."""
    code = f"import sys, {door}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_nobody_is_sent_to_another_projects_package() -> None:
    """`xformer` on the package index is not this project."""
    wrong = re.compile(r"pip install [^\n]*\bxformer\b(?!-)|\bxformer\[\w+\]")
    patterns = ["*.md", "*.toml", "*.py", "docs/*.md", "recipes/**/*.toml"]
    patterns += ["xformer/**/*.py", "preprocess/**/*.py"]
    for file in (file for pattern in patterns for file in ROOT.glob(pattern)):
        for line in file.read_text(encoding="utf-8").splitlines():
            assert "Do not `pip install xformer`" in line or not wrong.search(line), (file, line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
