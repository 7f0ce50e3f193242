"""A job of a study as a process: its command line, environment and log, where its output is
written, and what it says when it has ended."""

from __future__ import annotations

import errno
import glob
import os
import re
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from xformer import provenance
from xformer.children import first_on_path, same_code
from xformer.config import toml_text
from xformer.data.files import HOST, alive, owner
from xformer.study.plan import SCRIPTS, Job

BAD = ("failed", "not run")  # states after which what waits for a job cannot run
TAIL = 15  # lines shown of a failed job's log
WARNINGS = "warnings.txt"  # what a job warned of, beside its kept result


@dataclass
class Outcome:
    """How a job ended: "done", "there" (done before, or meanwhile by another study), "not needed"
    (not done, and no job that must run waits for it), "failed" or "not run"."""

    job: Job
    state: str
    seconds: float = 0.0
    why: str = ""


def line_of(job: Job) -> tuple[str, ...]:
    """The command line of a job, independent of the working directory.

    In a checkout, train.py and the other scripts lie next to the package. If xformer is installed
    without them, their sub-commands are run instead.
    """
    first, *rest = job.command
    if first not in SCRIPTS:
        return (sys.executable, *job.command)
    script = provenance.ROOT / first
    program = [str(script)] if script.is_file() else ["-m", "xformer", script.stem]
    return (sys.executable, *program, *rest)


def is_own(job: Job) -> bool:
    """Whether a job runs this package, rather than a program that the study's author chose."""
    first, module, *_ = (*job.command, "", "")
    of_package = first == "-m" and module.split(".")[0] == "xformer"
    return job.recipe is not None or first in SCRIPTS or of_package


def variables_of(job: Job) -> dict[str, str]:
    """Environment variables of a job. Our own commands run the code of this process, whatever lies
    in the working directory. For other commands Python searches that directory first, as usual."""
    if is_own(job):
        return same_code()
    return {"PYTHONPATH": first_on_path()}


def log_of(job: Job) -> Path:
    """The file that holds what a job prints."""
    return job.path.with_name(f"{job.path.name}.log")


def prepare(job: Job) -> None:
    """Write the recipe that a run is started with, or make the directory of a command's result. A
    job that is done but must be made again, because it is not whole, starts in an empty
    directory."""
    if job.done and not job.whole:
        discard(job)
    if job.recipe is not None:
        write_recipe(job)
    elif job.stage:
        job.path.mkdir(parents=True, exist_ok=True)


def write_recipe(job: Job) -> None:
    """Write the recipe of a run beside its directory."""
    assert job.recipe is not None
    job.path.parent.mkdir(parents=True, exist_ok=True)
    text = f"# {job.name}\n{toml_text(job.recipe)}"
    job.path.with_suffix(".toml").write_text(text, encoding="utf-8")


def discard(job: Job) -> None:
    """Delete what a job has made."""
    aside = job.path.with_name(f".{job.path.name}.{owner()}.partial")
    job.path.rename(aside)
    if aside.is_dir():
        shutil.rmtree(aside)
    else:
        aside.unlink()


def apart(job: Job) -> tuple[Job, Path | None]:
    """The job as it is started, and its place.

    A foreign command may leave half of its output if it fails or is stopped. So it writes into a
    directory of its own, from which `settle` moves the output. Our own commands write an output
    that is complete or absent; they and runs have no such place.
    """
    if is_own(job):
        return job, None
    name = f".{job.path.name}.{owner()}-"
    for old in job.path.parent.glob(f".{glob.escape(job.path.name)}.*.making"):
        left = re.fullmatch(rf"\.{re.escape(job.path.name)}\.{HOST}-(\d+)-\w+\.making", old.name)
        if left and not alive(int(left[1])):  # by a study that was killed
            shutil.rmtree(old, ignore_errors=True)
    place = Path(tempfile.mkdtemp(".making", name, job.path.parent))
    out = place / job.path.name
    if job.stage:
        out.mkdir()
    command = tuple(part.replace(str(job.path), str(out)) for part in job.command)
    return replace(job, command=command), place


def settle(job: Job, place: Path | None, status: int | None) -> None:
    """Move the output of a command from its place to the job's path if the command has ended well
    and no other study has made it meanwhile, and delete the place. It stays if the command may
    still run (`status` None). A child of a stopped command may still write there."""
    if place is None or status is None:
        return
    out = place / job.path.name
    if status == 0 and out.exists() and not job.whole:
        if job.path.exists():
            discard(job)
        out.rename(job.path)
    shutil.rmtree(place, ignore_errors=True)


def last_words(job: Job, status: int) -> str:
    """The end of a failed job's log, and how it ended if the log does not say so. At least one
    line."""
    try:
        lines = log_of(job).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    if status == 0:
        lines.append(f"it exited with status 0 but wrote no {job.proof}")
    elif status < 0:
        lines.append(f"it was ended by signal {-status} ({signal.strsignal(-status)})")
    elif not lines:
        full = _full(log_of(job).parent)
        lines.append(f"it exited with status {status} and printed nothing{full}")
    return "\n".join(lines[-TAIL:])


def _full(directory: Path) -> str:
    """Half a sentence if nothing can be written into a directory because its disk is full."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = os.strerror(error.errno).lower()
            return f", because the disk is full ({why}: {directory}); free some space"
    return ""


def warnings_of(job: Job) -> list[str]:
    """The warnings in the log of a job, such as that its tokenizer does not know the text, or those
    that were kept with its result. [] if the log is gone."""
    log = log_of(job) if log_of(job).is_file() else job.path / WARNINGS
    if not log.is_file():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return list(dict.fromkeys(line for line in lines if line.lower().startswith("warning: ")))
