"""The run directory: who may write it, what it continues from, which checkpoints it keeps.

RUN/config.json   the resolved recipe, the keys of store and initial checkpoint, versions
RUN/code.diff     what the code had in it that its git revision has not
RUN/log.jsonl     every event      RUN/tensorboard/   drawn from it
RUN/log.jsonl.damaged  a log of which some lines could not be read, as it was
RUN/checkpoints/step_N/            the newest `keep_last`, each `keep_every` steps, and the best;
                                   without `keep_state` at the end the selected one's weights alone
RUN/trajectory/step_N/             the weights alone, at the steps of `keep_at`; not pruned
RUN/result.json   scores, and the checkpoint that train.select chose
RUN/predictions/SPLIT.npz  what the selected checkpoint says of every row of a held-out split
RUN/run_manifest.json  the SHA-256 of a finished run's result.json, config.json and predictions
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from xformer import checkpoint as checkpoints
from xformer import provenance
from xformer.data.display import say
from xformer.data.errors import BadInput
from xformer.data.files import (
    ASIDE,
    RUN_MANIFEST,
    file_checksum,
    json_text,
    make_directory,
    put_back,
    read_json,
    read_run_json,
    write_json,
    write_text,
)
from xformer.parallel.feed import Step
from xformer.predictions import FOLDER
from xformer.recipe import LossConfig

# keys that may be others where a run goes on
FREE = {
    "batch.accumulate",
    *(
        f"train.{name}"
        for name in (
            "validate_every",
            "checkpoint_every",
            "log_every",
            "keep_last",
            "keep_every",
            "keep_state",
            "keep_at",
            "trouble",
            "spike",
        )
    ),
}

# summed over all ranks since the last line of the log; the first four on the device
SINCE_LOG = ("loss", "count", "correct", "norm", "tokens", "squares", "rows", "seconds")


@dataclass
class State:
    """Where a run stands; with the weights and moments it is all that resuming needs."""

    step: int = 0
    position: int = 0  # samples consumed
    best_step: int = 0
    best_scores: dict[str, float] = field(default_factory=dict)
    last_scores: dict[str, float] = field(default_factory=dict)
    worse: int = 0  # validations since the best one
    seconds: float = 0.0
    real_tokens: int = 0
    dropped: int = 0  # updates, for trouble
    in_a_row: int = 0  # of them, the newest
    statistics: list[float] = field(default_factory=list)  # see Account
    since_log: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SINCE_LOG, 0.0))

    def advance(self, step: Step) -> None:
        self.step, self.position = self.step + 1, step.end
        self.real_tokens += step.work.tokens
        for name in ("tokens", "squares", "rows"):
            self.since_log[name] += getattr(step.work, name)


class Run:
    """An opened run directory, locked on rank 0 until this process ends; `earlier` is the content
    of its config.json where it goes on."""

    def __init__(
        self, path: Path, lock: TextIO | None = None, earlier: dict[str, Any] | None = None
    ):
        self.path, self.earlier = path, earlier
        self._lock = lock

    def checkpoint_path(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step}"

    def trajectory_path(self, step: int) -> Path:
        return self.path / "trajectory" / f"step_{step}"

    def predictions_path(self, split: str) -> Path:
        return self.path / FOLDER / f"{split}.npz"

    def newest(self) -> Path | None:
        """The newest whole checkpoint; a damaged one is set aside by name and the next is tried."""
        for aside in (self.path / "checkpoints").glob(f".step_*{ASIDE}"):
            put_back(aside.with_name(aside.name.split(".")[1]))
        for path in sorted(self._checkpoints(), key=_step, reverse=True):
            try:
                checkpoints.verify(path)
            except (BadInput, OSError) as error:
                if isinstance(error, OSError) and error.errno != errno.EIO:
                    raise
                aside = path.with_name(f"damaged_{path.name}")
                shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
                path.rename(aside)
                say(f"{error}; {path.name} is set aside as {aside.name}", error=True)
                continue
            return path
        return None

    def made_by(self, step: int) -> dict[str, Any] | None:
        """The `config` and `environment` of the start that made the checkpoint of a step, of a run
        that has begun. A start that was killed before its first checkpoint made none."""
        if self.earlier is None:
            return None
        starts = [start for start in self.earlier["starts"] if start["step"] < step]
        return starts[-1] if starts else None

    def begin(self, config: dict[str, Any], step: int) -> None:
        """Note what the run is made with from `step` on, and clear what a killed process left half
        done, and of its trajectory what lies after `step`. `starts` in config.json keeps what it
        was made with before.

        From here to its end the run has no result.
        """
        now = {name: config[name] for name in ("config", "environment")}
        earlier = self.earlier or {}
        first = [{**earlier, "step": 0}] if now.keys() <= earlier.keys() else []
        starts = [start for start in earlier.get("starts", first) if start["step"] < step]
        if not starts or any(starts[-1][name] != now[name] for name in now):
            starts.append({"step": step, **now})
        (self.path / RUN_MANIFEST).unlink(missing_ok=True)  # it covers a finished run alone
        self.earlier = {**config, "starts": starts}
        write_json(self.path / "config.json", self.earlier)
        code = self.path / "code.diff"
        if diff := provenance.diff(now["environment"]["git"]):
            code.write_text(diff, encoding="utf-8")
        else:
            code.unlink(missing_ok=True)
        (self.path / "result.json").unlink(missing_ok=True)
        shutil.rmtree(self.path / FOLDER, ignore_errors=True)
        (self.path / "checkpoints").mkdir(exist_ok=True)
        for leftover in self.path.glob(".*.json.*"):
            leftover.unlink()
        for folder in ("checkpoints", "trajectory"):
            for leftover in (self.path / folder).glob(".*"):
                shutil.rmtree(leftover, ignore_errors=True)
        kept = (self.path / "trajectory").glob("step_*")
        self._delete([path for path in kept if step == 0 or _step(path) > step])

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result, which is what makes the run finished, after the manifest of it and of
        the predictions."""
        text = json_text(result)
        sums = {
            "result.json": hashlib.sha256(text.encode()).hexdigest(),
            "config.json": file_checksum(self.path / "config.json"),
        }
        for file in sorted((self.path / FOLDER).glob("*.npz")):
            sums[f"{FOLDER}/{file.name}"] = file_checksum(file)
        write_json(self.path / RUN_MANIFEST, {"sha256": sums})
        write_text(self.path / "result.json", text)

    def prune(self, best_step: int, keep_last: int, keep_every: int) -> None:
        """Delete all checkpoints but the newest, one each `keep_every` steps, and the best."""
        older = sorted(self._checkpoints(), key=_step)[:-keep_last]
        every = [path for path in older if keep_every and _step(path) % keep_every == 0]
        self._delete([p for p in older if p not in every and _step(p) != best_step])

    def verify_bare(self) -> None:
        """Raise BadInput where the only checkpoint of a finished run is damaged."""
        try:
            checkpoints.verify(checkpoints.resolve(self.path))
        except BadInput as error:
            raise BadInput(
                f"{error}; {self.path} has no other checkpoint: overwrite=true makes it anew"
            ) from None

    def forget_state(self) -> None:
        """Keep of a finished run's checkpoints the weights of the selected one alone."""
        selected = checkpoints.resolve(self.path)
        checkpoints.forget_state(selected)  # first: from here on the run does not go on
        self._delete([path for path in self._checkpoints() if path != selected])

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            path.rename(path.with_name(f".{path.name}.deleted"))
        for path in self.path.glob("*/.step_*.deleted"):
            shutil.rmtree(path)

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
    strangers = (
        []
        if not path.is_dir() or is_run(known)
        else sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
    )
    if strangers:
        raise BadInput(
            f"run={path} exists and is not a run (it holds {strangers[0]}); give another"
        )
    earlier = read_config(known) if known.exists() and not overwrite else None
    if earlier is not None:
        _refuse_other_settings(path, earlier, config)
    make_directory(path, "run=")
    lock = (path / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise BadInput(f"run={path} is in use by another process") from None
    if overwrite:  # the checkpoints first, and last what makes it a run, lest this is cut short
        for name in ("checkpoints", "trajectory", FOLDER, "tensorboard", "profile"):
            shutil.rmtree(path / name, ignore_errors=True)
        for damaged in path.glob("log.jsonl.damaged*"):
            damaged.unlink()
        for name in (
            RUN_MANIFEST,
            "result.json",
            "log.jsonl",
            "dropped.json",  # written by earlier versions
            "code.diff",
            "config.json",
        ):
            (path / name).unlink(missing_ok=True)
    return Run(path, lock, earlier)


def read_config(path: Path) -> Any:
    """The content of a run's config.json in today's words.

    Runs of before have the groups `data.store` and `data.fraction`; here alone they become `data`
    and `fraction`. `system.shard`, which never decided a result, is left out. Raises BadInput where
    `read_run_json` does.
    """
    content = read_run_json(path)
    if isinstance(content, dict):
        starts = content.get("starts")
        starts = [s for s in starts if isinstance(s, dict)] if isinstance(starts, list) else []
        parts = [content.get("identity"), *(one.get("config") for one in (content, *starts))]
        for part in parts:
            if isinstance(part, dict) and isinstance(part.get("data"), dict):
                old = part["data"]
                part["data"], part["fraction"] = old.get("store"), old.get("fraction", 1.0)
            if isinstance(part, dict) and isinstance(part.get("system"), dict):
                part["system"].pop("shard", None)
    return content


def is_finished(path: Path) -> bool:
    """Whether a run has come to its end."""
    return (path / "result.json").is_file()


def is_bare(path: Path) -> bool:
    """Whether a run is finished and has kept weights alone, and so cannot be made longer."""
    if not is_finished(path):
        return False
    selected = checkpoints.resolve(path)
    return (selected / "manifest.json").is_file() and not (selected / "state.json").is_file()


def is_run(config: Path) -> bool:
    """Whether this config.json is a run's; checkpoints and other libraries have one too."""
    if not config.exists():
        return False
    content = read_json(config)
    return isinstance(content, dict) and "identity" in content


def _refuse_other_settings(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    found = _differences(completed(old.get("identity", {})), new["identity"]).items()
    others = [(name, a, b) for name, (a, b) in found if name not in FREE]
    differences = [
        f"{name}={_show(a)} is now {_show(b)}" for name, a, b in others if not _longer(name, a, b)
    ]
    if others and not differences and is_bare(path):
        raise BadInput(
            f"run={path} is finished and kept its weights alone (train.keep_state=false): it "
            f"cannot be made longer; give another run= with init={path}"
        )
    if differences:
        raise BadInput(
            f"run={path} was made with other settings: {'; '.join(differences)}; "
            "give another run=, or overwrite=true to start anew"
        )


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of an older run with those that its version did not know, at their defaults."""
    return {"loss": LossConfig().model_dump(mode="json"), **config}


def _show(value: Any) -> str:
    return str(value)[:80]


def _longer(name: str, old: Any, new: Any) -> bool:
    if name not in ("train.steps", "train.epochs"):
        return False
    return bool(old) and all(isinstance(v, int | float) for v in (old, new)) and new >= old


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
