"""The run directory: who may write it, what it continues from, which checkpoints it keeps.

RUN/config.json   the resolved recipe, the keys of store and initial checkpoint, versions
RUN/log.jsonl     every event      RUN/tensorboard/   drawn from it
RUN/checkpoints/step_N/            the newest two and the best
RUN/result.json   scores, and the checkpoint that train.select chose
"""

from __future__ import annotations

import fcntl
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

from xformer import checkpoint as checkpoints
from xformer.data.errors import BadInput
from xformer.data.files import read_json, write_json

INTERVALS = ("validate_every", "checkpoint_every", "log_every")
KEEP = 2  # newest checkpoints, beside the best


class Run:
    """An opened run directory, locked on rank 0 until this process ends; `earlier` is the content
    of its config.json where it goes on."""

    def __init__(self, path: Path, lock: TextIO | None = None,
                 earlier: dict[str, Any] | None = None):  # fmt: skip
        self.path, self.earlier = path, earlier
        self._lock = lock

    def checkpoint_path(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step}"

    def newest(self) -> Path | None:
        """The newest whole checkpoint; a damaged one is set aside by name and the next is tried."""
        for path in sorted(self._checkpoints(), key=_step, reverse=True):
            try:
                checkpoints.verify(path)
            except BadInput as error:
                aside = path.with_name(f"damaged_{path.name}")
                shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
                path.rename(aside)
                print(f"{error}; {path.name} is set aside as {aside.name}", file=sys.stderr)
                continue
            return path
        return None

    def begin(self, config: dict[str, Any]) -> None:
        """Note what the run is made with, and clear what a killed process left half done.

        From here to its end the run has no result.
        """
        write_json(self.path / "config.json", config)
        (self.path / "result.json").unlink(missing_ok=True)
        (self.path / "checkpoints").mkdir(exist_ok=True)
        for leftover in self.path.glob(".*.json.*"):
            leftover.unlink()
        for leftover in (self.path / "checkpoints").glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def prune(self, best_step: int) -> None:
        """Delete all checkpoints but the newest two and the best."""
        paths = sorted(self._checkpoints(), key=_step)
        for path in paths[:-KEEP]:
            if _step(path) != best_step:
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.deleted")))

    def _checkpoints(self) -> list[Path]:
        return [p for p in (self.path / "checkpoints").glob("step_*") if p.is_dir()]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def open_run(path: Path, config: dict[str, Any], overwrite: bool) -> Run:
    """Create a run directory, or open one to continue; its first step is to `begin` it.

    Raises BadInput if another process has it, if it is no run, or if it was made with other
    settings, which it names. `overwrite` empties an existing run first.
    """
    for parent in (path, *path.parents):
        if parent.exists() and not parent.is_dir():
            raise BadInput(f"run={path}: {parent} is a file; give a directory")
    known = path / "config.json"
    strangers = [] if not path.is_dir() or _is_run(known) else sorted(
        p.name for p in path.iterdir() if not p.name.startswith(".")
    )  # fmt: skip
    if strangers:
        raise BadInput(
            f"run={path} exists and is not a run (it holds {strangers[0]}); give another"
        )
    earlier = read_json(known) if known.exists() and not overwrite else None
    if earlier is not None:
        _refuse_other_settings(path, earlier, config)
    path.mkdir(parents=True, exist_ok=True)
    lock = (path / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise BadInput(f"run={path} is in use by another process") from None
    if overwrite:  # the checkpoints first, and last what makes it a run, lest this is cut short
        for name in ("checkpoints", "tensorboard", "profile"):
            shutil.rmtree(path / name, ignore_errors=True)
        for name in ("result.json", "log.jsonl", "config.json"):
            (path / name).unlink(missing_ok=True)
    return Run(path, lock, earlier)


def _is_run(config: Path) -> bool:
    """Whether this config.json is a run's; checkpoints and other libraries have one too."""
    if not config.exists():
        return False
    content = read_json(config)
    return isinstance(content, dict) and "identity" in content


def _refuse_other_settings(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    differences = [
        f"{name}={_show(a)} is now {_show(b)}"
        for name, (a, b) in _differences(old.get("identity", {}), new["identity"]).items()
        if not _allowed(name, a, b)
    ]
    if differences:
        raise BadInput(
            f"run={path} was made with other settings: {'; '.join(differences)}; "
            "give another run=, or overwrite=true to start anew"
        )


def _show(value: Any) -> str:
    return str(value)[:80]


def _allowed(name: str, old: Any, new: Any) -> bool:
    if name in ("train.steps", "train.epochs"):
        return bool(old) and new >= old
    return name.removeprefix("train.") in INTERVALS


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: (old value, new value)} where the two differ."""
    found: dict[str, Any] = {}
    for name in [*old, *(n for n in new if n not in old)]:
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= _differences(a, b, f"{prefix}{name}.")
        elif a != b:
            found[f"{prefix}{name}"] = (a, b)
    return found
