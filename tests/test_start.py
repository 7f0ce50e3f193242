"""How a command starts: what happens before torch is imported, and what ends an orphaned rank."""

from __future__ import annotations

import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import pytest
from helpers import PATIENCE, ROOT, SMOKE, Forks, command, good, training
from toys import Toys

from xformer import start
from xformer.data import files
from xformer.data.errors import DISTRIBUTION

LIMIT_IN_A_COMMAND = (
    "import resource\n"
    "from xformer.start import run\n"
    "run(lambda: print(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))"
)
LIMIT = 30  # seconds; the work takes ten on an idle machine


def ranks_of(run: Path) -> list[int]:
    """The processes whose command line names a run's directory, except torchrun."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if f"run={run}" in words and "torch.distributed.run" not in words:
            pids.append(int(folder.name))
    return pids


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
@pytest.mark.parametrize("moment", ["first", "importing", "training"])
@pytest.mark.slow
def test_ranks_end_with_their_torchrun(data: Toys, tmp_path: Path, moment: str) -> None:
    """torchrun is killed when its ranks begin, a second later, or while they train."""
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
    if moment == "training":  # the rank stopped in the way that SIGTERM stops it
        assert list((run / "checkpoints").iterdir())


WORK = """
import sys, time
from pathlib import Path
from xformer.start import run
def main():
    time.sleep(float(sys.argv[1]))
    Path(sys.argv[2]).write_text("done")
run(main)
"""


def test_a_rank_may_have_a_wrapper_for_a_parent(tmp_path: Path) -> None:
    """torchrun --no-python may start a shell or a profiler, which then starts the rank."""
    (tmp_path / "rank.py").write_text(WORK)
    # the shell stays the parent, and its own command line names neither Python nor torch
    (tmp_path / "run.sh").write_text(f"{sys.executable} rank.py 2 out\nexit $?\n")
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "test", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "run.sh"], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0
    assert (tmp_path / "out").exists()


def test_a_rank_that_begins_as_an_orphan_ends(tmp_path: Path) -> None:
    """Its torchrun was gone before the rank first looked at its parent."""
    out, who = tmp_path / "out", tmp_path / "pid"
    code = f"import os, time; time.sleep(1); open({str(who)!r}, 'w').write(f'{{os.getpid()}} "
    code += f"{{os.getppid()}}')\n{WORK}"
    line = ["sh", "-c", '"$@" & exit 0', "sh", sys.executable, "-c", code, "60", str(out)]
    quiet = subprocess.DEVNULL
    subprocess.run(
        line,
        cwd=ROOT,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "test"},
        stdout=quiet,
        stderr=quiet,
        check=True,
    )
    end = time.monotonic() + LIMIT
    while not who.exists() or not who.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    pid, parent = map(int, who.read_text().split())
    if not start._adopted(parent):
        os.kill(pid, signal.SIGKILL)
        pytest.skip(f"orphans of this machine are adopted by process {parent}")
    while time.monotonic() < end and Path(f"/proc/{pid}/cmdline").exists():
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}/cmdline").exists()
    assert not out.exists()


@pytest.mark.parametrize("own", [{}, *({name: "7"} for name in start.WAITING)])
def test_how_threads_wait_is_the_users_choice(own: dict[str, str]) -> None:
    """The policy is in the environment when torch is imported. A policy that the user set is
    kept.
    """
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


@pytest.mark.parametrize("triton", [False, True])
def test_the_end_searches_for_garbage_only_if_triton_reports_it(triton: bool) -> None:
    """Else a command that trained ends with 26 lines about objects that are left."""
    code = (
        "import atexit, gc, sys; from types import ModuleType; from xformer import start\n"
        "before = gc.get_freeze_count()\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > before))\n"
        f"sys.modules.update({{'triton': ModuleType('triton')}} if {triton} else {{}})\n"
        "start.search_for_garbage_seldom()"
    )
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{not triton}\n"


@pytest.mark.parametrize("door", ["train", "evaluate"])
def test_doors_prepare_the_process_before_torch(door: str) -> None:
    """Importing a script does not load torch, so `run` acts before torch is imported."""
    code = f"import sys, {door}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    line = "ulimit -S -n 256; " + shlex.join([sys.executable, "-c", LIMIT_IN_A_COMMAND])
    shown = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(shown.stdout) == (start.FILES if hard < 0 else min(start.FILES, hard))


@pytest.mark.parametrize(
    ("failing", "status", "words"),
    [
        ("raise MemoryError", 1, "the memory is full; free some, or raise the limit (ulimit -v)"),
        ("import torch", 2, "this command needs torch, which is not installed: pip install torch"),
    ],
)
def test_what_the_machine_lacks_costs_a_line(failing: str, status: int, words: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"def main():\n    {failing}\n"
        "from xformer.start import run; run(main)"
    )
    ended = command("-c", code)
    assert (ended.status, ended.out, ended.err) == (status, "", f"error: {words}\n")


def test_docstrings_are_needed() -> None:
    ended = command("-OO", "train.py", "--help")
    assert ended.status == 2
    assert ended.err == (
        "error: xformer needs its docstrings, which python -OO removes; use python -O\n"
    )


def test_a_container_has_as_many_cores_as_its_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "cpu").mkdir()
    for quota, cores in (("max 100000", 64), ("200000 100000", 2), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert files.usable_cores() == cores
    (tmp_path / "cpu.max").unlink()
    assert files.usable_cores() == 64
    for share, cores in (("-1", 64), ("350000", 4)):  # control groups of version 1
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{share}\n")
        (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
        assert files.usable_cores() == cores


def test_windows_is_refused_in_one_line() -> None:
    code = "import shutil, sys; sys.platform = 'win32'; from xformer.start import run; run(print)"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    words = "xformer does not run on Windows itself; use its Linux subsystem (WSL)"
    assert ended.stderr == f"error: {words}\n"


def test_a_run_without_what_macos_lacks(forks: Forks, data: Toys, tmp_path: Path) -> None:
    """It has neither core affinity nor /proc. `make check` finds other missing functions."""
    before = (
        "import os, sys; from pathlib import Path\n"
        "sys.platform = 'darwin'; del os.sched_getaffinity\n"
        "def refuse(path, *a, _open=Path.open, **k):\n"
        "    if str(path).startswith('/proc'): raise FileNotFoundError(path)\n"
        "    return _open(path, *a, **k)\n"
        "Path.open = refuse"
    )
    run = tmp_path / "run"
    line = training(SMOKE, data.text, run, "train.steps=2", "train.log_every=1", "system.threads=0")
    good(forks.run(*line, before=before))
    good(forks.run("evaluate.py", run, f"data={data.text}", "split=valid", before=before))


def test_a_reader_that_ends_early() -> None:
    """Nobody needs to read the progress on standard error. What nobody reads on standard output was
    asked for, so the status says that it is missing."""
    code = (
        "from xformer.data.display import say\n"
        "from xformer.start import run\n"
        "def work():\n"
        "    for i in range(20_000): say(f'{i}', error=True)\n"
        "    open('{}', 'w').close()\n"
        "    for i in range(20_000): say(f'{i}')\n"
        "run(work)"
    )
    for read, status in (("2>&1 >/dev/null", 0), ("", 141)):
        with tempfile.TemporaryDirectory() as place:
            script = code.replace("{}", f"{place}/done")
            line = f"{shlex.join([sys.executable, '-c', script])} {read} | head -n 1"
            line = f"{line} >/dev/null; exit ${{PIPESTATUS[0]}}"
            ended = subprocess.run(
                ["bash", "-c", line], cwd=ROOT, stderr=subprocess.DEVNULL, check=False
            )
            assert (ended.returncode, (Path(place) / "done").exists()) == (status, True)


SAY = """
from xformer.data.display import say
from xformer.start import run
run(lambda: (say("a", error=True), say("b"), say("c" * 100_000, error=True)))
"""


@pytest.mark.parametrize("closed", ["2>/dev/full", "2>&-", "0<&- 2>&-"])
def test_standard_error_that_takes_nothing_ends_nothing(closed: str) -> None:
    """The disk of a cluster's log may be full, and a launcher may have closed the streams."""
    line = f"exec {shlex.join([sys.executable, '-c', SAY])} {closed}"
    done = subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "b\n")


def test_standard_output_that_is_not_utf8() -> None:
    code = "from xformer.start import run\nfrom xformer.data.display import say\n"
    code += "run(lambda: say('\u2581caf\u00e9'))"
    latin = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, env=latin)
    assert (done.returncode, done.stdout) == (0, b"\\u2581caf\xe9\n")


def test_nobody_is_sent_to_another_projects_package() -> None:
    """The package named `xformer` on the package index belongs to another project."""
    wrong = re.compile(r"pip install [^\n]*\bxformer\b(?!-)|\bxformer\[\w+\]")
    patterns = ["*.md", "*.toml", "*.py", "docs/*.md", "recipes/**/*.toml"]
    patterns += ["xformer/**/*.py", "preprocess/**/*.py"]
    for file in (file for pattern in patterns for file in ROOT.glob(pattern)):
        for line in file.read_text(encoding="utf-8").splitlines():
            assert "Do not `pip install xformer`" in line or not wrong.search(line), (file, line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
