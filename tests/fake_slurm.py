"""A cluster of one machine, for tests: sbatch, srun, squeue, scancel and scontrol in one program.

Slurm is imitated in what a study relies on. A signal reaches all processes of a job. A job that is
cancelled or preempted gets SIGTERM, and SIGKILL soon after. One that is queued again starts with
the same script and number. There is no accounting, so sacct fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = "FAKE_SLURM"  # names the directory of the state: a file for each job that waits or runs
GRACE = 1.0  # seconds between SIGTERM and SIGKILL
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sacct")


def install(directory: Path) -> dict[str, str]:
    """Make the commands. Returns the environment in which they are used."""
    (directory / "bin").mkdir(parents=True)
    (directory / "jobs").mkdir()
    for name in COMMANDS:
        program = directory / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        program.chmod(0o755)
    path = os.pathsep.join([str(directory / "bin"), os.environ["PATH"]])
    return {"PATH": path, STATE: str(directory / "jobs")}


def preempt(state: Path, number: str) -> None:
    """Stop a job for a more urgent one, and queue it again."""
    (state / f"{number}.again").touch()
    kill(state, number)


def kill(state: Path, number: str) -> None:
    """End all processes of a job, as Slurm does."""
    group = int((state / number).read_text())
    os.killpg(group, signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(group, signal.SIGKILL)


def keep(state: Path, number: str, script: str) -> None:
    """Run a job, again as long as it is queued again."""
    while True:
        job = subprocess.Popen(
            ["bash", "-c", f"trap : USR2; . '{script}'"],  # the batch script is not warned
            env={**os.environ, "SLURM_JOB_ID": number},
            start_new_session=True,
        )
        (state / f"{number}.new").write_text(str(job.pid))
        (state / f"{number}.new").rename(state / number)
        job.wait()
        if not (state / f"{number}.again").exists():
            return (state / number).unlink()
        (state / f"{number}.again").unlink()


def sbatch(state: Path, *arguments: str) -> None:
    script = Path(arguments[-1])
    if "--partition=wrong" in script.read_text():
        sys.exit("sbatch: error: invalid partition specified: wrong")
    number = str(1 + max((int(p.stem) for p in state.iterdir()), default=0))
    (state / f"{number}.script").write_text(script.read_text())
    (state / number).write_text("0")
    subprocess.Popen(
        [sys.executable, __file__, "keep", number, str(state / f"{number}.script")],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    print(f"Submitted batch job {number}")


def srun(state: Path, *arguments: str) -> None:
    rest = list(arguments)
    while rest[0].startswith("--"):
        option = rest.pop(0)
        if option in ("--output", "--error"):
            file = rest.pop(0).replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", "0")
            target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(target, 1 if option == "--output" else 2)
    os.execv(rest[0], rest)


def squeue(state: Path, *arguments: str) -> None:
    print(*(path.name for path in state.iterdir() if not path.suffix), sep="\n")


def scancel(state: Path, number: str) -> None:
    kill(state, number)


def scontrol(state: Path, what: str, number: str) -> None:
    assert what == "requeue"
    (state / f"{number}.again").touch()


def sacct(state: Path, *arguments: str) -> None:
    sys.exit("Slurm accounting storage is disabled")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(os.environ[STATE]), *sys.argv[2:])
