"""The run directory: its lock, the checkpoint from which a run continues, and pruning.

RUN/config.json            the resolved recipe, hashes of the store and the initial checkpoint,
                           versions
RUN/code.diff              changes of the code since its git revision, if there are any
RUN/log.jsonl              every event
RUN/log.jsonl.damaged      a copy of a log in which some lines could not be read
RUN/tensorboard/           curves, drawn from the log
RUN/profile/               a trace of a few steps, with `system.profile`
RUN/checkpoints/step_N/    the newest `keep_last`, one every `keep_every` steps, and the best one;
                           with `keep_state` = false a finished run keeps only the selected weights
RUN/trajectory/step_N/     only the weights, at the steps of `keep_at`; never pruned
RUN/result.json            scores, and the checkpoint that train.select chose
RUN/predictions/SPLIT.npz  the selected checkpoint's predictions for every row of a held-out split
RUN/run_manifest.json      SHA-256 of a finished run's result.json, config.json and predictions
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from xformer import checkpoint as checkpoints
from xformer import provenance
from xformer.data.display import say
from xformer.data.errors import BadInput
from xformer.data.files import (
    ASIDE,
    RUN_FILES,
    RUN_FOLDERS,
    RUN_MANIFEST,
    file_checksum,
    is_run,
    json_text,
    locks,
    make_directory,
    put_back,
    read_json,
    read_run_json,
    write_json,
    write_text,
)
from xformer.parallel.feed import Step
from xformer.predictions import FOLDER
from xformer.recipe import ADDED_LATER, Recipe

# keys that may change when a run is continued
MAY_CHANGE = {
    "batch.accumulate",
    "train.validate_every",
    "train.checkpoint_every",
    "train.log_every",
    "train.keep_last",
    "train.keep_every",
    "train.keep_state",
    "train.keep_at",
    "train.trouble",
    "train.spike",
}

BY_CONTENT = ("data", "init", "surgery")  # settings whose content, not their path, is compared
# the number of samples in a run enters its identity if it has one of these settings
DERIVED = {"mixture.samples": "mixture.final", "masking.samples": "masking.final"}
LISTED = 6  # how many changed settings a message names

# Values for the next line of the log, summed since the last line and over all ranks. "norm" is the
# newest gradient norm, and "seconds" are this rank's.
ON_DEVICE = ("loss", "count", "correct", "norm")  # the guard keeps these sums on the device
SINCE_LOG = (*ON_DEVICE, "tokens", "squares", "rows", "seconds")


@dataclass
class State:
    """The progress of a run. This, the weights and the optimizer's moments are all that a run needs
    to resume."""

    step: int = 0
    position: int = 0  # samples consumed
    best_step: int = 0
    best_scores: dict[str, float] = field(default_factory=dict)
    worse: int = 0  # number of validations since the best one
    seconds: float = 0.0
    real_tokens: int = 0
    given: list[list[int]] = field(default_factory=list)  # rows and tokens of each store, (2, K)
    dropped: int = 0  # updates that were dropped because of numerical trouble
    in_a_row: int = 0  # consecutive updates dropped up to now
    statistics: list[float] = field(default_factory=list)  # `Guard.seen`
    since_log: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SINCE_LOG, 0.0))
    logged: int = 0  # the step of the newest line about training in the log; 0 if not known

    @classmethod
    def read(cls, checkpoint: Path) -> State:
        """The progress of a run when it wrote this checkpoint."""
        content = read_json(checkpoint / "state.json")
        content.pop("last_scores", None)  # written by earlier versions
        if unknown := content.keys() - cls.__dataclass_fields__.keys():
            raise BadInput(
                f"{checkpoint / 'state.json'} has the unknown key {min(unknown)}; a newer version "
                "wrote it, so continue the run with that version"
            )
        state = cls(**content)
        state.since_log = dict.fromkeys(SINCE_LOG, 0.0) | state.since_log
        return state

    def advance(self, step: Step) -> None:
        """Count a step."""
        self.step, self.position = self.step + 1, step.end
        self.real_tokens += step.work.tokens
        if step.given is not None:
            self.given = (step.given + np.array(self.given or 0)).tolist()
        for name in ("tokens", "squares", "rows"):
            self.since_log[name] += getattr(step.work, name)


class Run:
    """A run directory. Rank 0 opens it with `open`, which locks it until `close`.

    `config` is the content of config.json for this start. `starts` lists the settings and the
    environment of each start that changed them, with its step. Both are known only to rank 0.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config: dict[str, Any] = {}
        self.starts: list[dict[str, Any]] = []
        self.writing: Future[None] | None = None  # a checkpoint, in the background
        self._lock: TextIO | None = None

    def open(self, config: dict[str, Any], overwrite: bool) -> None:
        """Create the directory, or open it to continue its run. Call `begin` afterwards. `config`
        is the content of its config.json. With `overwrite`, an existing run is deleted.

        Raises BadInput if another process uses the directory, if it contains something other than a
        run, or if its run was made with other settings, which the message names.
        """
        path = self.path
        for parent in (path, *path.parents):
            if parent.exists() and not parent.is_dir():
                raise BadInput(f"run={path}: {parent} is a file; give a directory")
        config_file = path / "config.json"
        others = [] if is_run(config_file) else sorted(p.name for p in path.glob("[!.]*"))
        if others:
            raise BadInput(
                f"run={path} exists and is not a run (it contains {others[0]}); give another "
                "directory"
            )
        earlier = read_run_json(config_file) if config_file.exists() and not overwrite else None
        if earlier is not None:
            _refuse_other_settings(path, earlier, config)
        make_directory(path, "run=")
        lock = (path / ".lock").open("a")
        try:
            if not _locks(lock):
                raise BadInput(
                    f"run={path} is in use by another process; stop it, or give another directory"
                )
            if overwrite:
                _delete_run(path)
        except BaseException:
            lock.close()
            raise
        self.config, self._lock = config, lock
        self.starts = [] if earlier is None else earlier["starts"]

    def close(self) -> None:
        """Unlock the directory, so that this or another process can continue the run. If a
        checkpoint is still being written, because an interrupt has ended the waiting for it, the
        directory is unlocked afterwards."""
        if (lock := self._lock) is None:
            return
        if self.writing is None:
            lock.close()
        else:
            self.writing.add_done_callback(lambda _: lock.close())

    def checkpoint_path(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step_{step}"

    def trajectory_path(self, step: int) -> Path:
        return self.path / "trajectory" / f"step_{step}"

    def predictions_path(self, split: str) -> Path:
        return self.path / FOLDER / f"{split}.npz"

    def newest(self) -> Path | None:
        """The newest undamaged checkpoint, or None. Damaged checkpoints are renamed and
        reported."""
        for aside in (self.path / "checkpoints").glob(f".step_*{ASIDE}"):
            put_back(aside.with_name(aside.name.split(".")[1]))
        there = self._checkpoints()
        for path in reversed(there.values()):
            try:
                checkpoints.verify(path)
            except (BadInput, OSError) as error:
                if isinstance(error, OSError) and error.errno != errno.EIO:
                    raise
                aside = path.with_name(f"damaged_{path.name}")
                shutil.rmtree(aside, ignore_errors=True)  # left by an earlier start
                path.rename(aside)
                say(f"{error}; {path.name} was renamed to {aside.name}", error=True)
                continue
            return path
        if there:
            say("no undamaged checkpoint is left: the run starts from the beginning", error=True)
        return None

    def made_by(self, step: int) -> dict[str, Any] | None:
        """The `config` and `environment` with which the checkpoint of a step was written, or None
        if they are not known. Call this after `begin`."""
        starts = [start for start in self.starts if start["step"] < step]
        return starts[-1] if starts else None

    def begin(self, step: int) -> None:
        """Record the settings and environment from `step` on. Delete incomplete files of a killed
        process, the trajectory after `step`, and the result, because the run is no longer
        finished."""
        now = {name: self.config[name] for name in ("config", "environment")}
        self.starts = [start for start in self.starts if start["step"] < step]
        if not self.starts or any(self.starts[-1][name] != now[name] for name in now):
            self.starts.append({"step": step, **now})
        (self.path / RUN_MANIFEST).unlink(missing_ok=True)  # only a finished run has this file
        write_json(self.path / "config.json", {**self.config, "starts": self.starts})
        code = self.path / "code.diff"
        if diff := provenance.diff(now["environment"]["git"]):
            code.write_text(diff, encoding="utf-8")
        else:
            code.unlink(missing_ok=True)
        (self.path / "result.json").unlink(missing_ok=True)
        shutil.rmtree(self.path / FOLDER, ignore_errors=True)
        (self.path / "checkpoints").mkdir(exist_ok=True)
        for leftover in self.path.glob(".*.json*.*"):
            leftover.unlink()
        for folder in ("checkpoints", "trajectory"):
            for leftover in (self.path / folder).glob(".*"):
                shutil.rmtree(leftover, ignore_errors=True)
        kept = checkpoints.by_step(self.path / "trajectory")
        self._delete([path for at, path in kept.items() if step == 0 or at > step])

    def finish(self, result: dict[str, Any]) -> None:
        """Write the manifest, then result.json, whose presence marks the run as finished."""
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
        """Delete all checkpoints except the newest `keep_last`, one every `keep_every` steps, and
        the best one."""
        kept = self._checkpoints()
        older = [step for step in list(kept)[:-keep_last] if step != best_step]
        self._delete([kept[step] for step in older if not keep_every or step % keep_every])

    def verify_selected(self) -> None:
        """Raise BadInput if the selected checkpoint, the only one of a finished run, is damaged."""
        try:
            checkpoints.verify(checkpoints.resolve(self.path))
        except BadInput as error:
            raise BadInput(
                f"{error}; {self.path} has no other checkpoint; give overwrite=true to train again"
            ) from None

    def forget_state(self) -> None:
        """Keep only the weights of a finished run's selected checkpoint: delete its state and all
        other checkpoints."""
        selected = checkpoints.resolve(self.path)
        checkpoints.forget_state(selected)  # first, because this marks the run as not extendable
        self._delete([path for path in self._checkpoints().values() if path != selected])

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            path.rename(path.with_name(f".{path.name}.deleted"))
        for path in self.path.glob("*/.step_*.deleted"):
            shutil.rmtree(path)

    def has_checkpoints(self) -> bool:
        """Whether a checkpoint was written, damaged or not."""
        return bool(self._checkpoints())

    def _checkpoints(self) -> dict[int, Path]:
        return checkpoints.by_step(self.path / "checkpoints")


def _delete_run(path: Path) -> None:
    """Delete a run's files. config.json, which marks the directory as a run, is deleted last: if
    this function is interrupted, the directory is still a run that can be overwritten."""
    for name in RUN_FOLDERS:
        shutil.rmtree(path / name, ignore_errors=True)
    for damaged in path.glob("log.jsonl.damaged*"):
        damaged.unlink()
    for name in RUN_FILES:
        (path / name).unlink(missing_ok=True)


def is_finished(path: Path) -> bool:
    """Whether the run in a directory is finished."""
    return (path / "result.json").is_file()


def _locks(lock: TextIO) -> bool:
    """Lock a run for this process. Returns whether that was possible. It tries for half a second,
    because `in_use` holds the lock for an instant. Raises BadInput if the file system has no
    locks."""
    for _ in range(6):
        if locks(lock):
            return True
        time.sleep(0.1)
    return False


def in_use(path: Path) -> bool:
    """Whether a process on this machine has the lock of a run, so that the run is in progress."""
    try:
        with (path / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the lock file does not exist
        return False
    return False


def kept_only_weights(path: Path) -> bool:
    """Whether a run is finished and kept only weights. Such a run cannot be extended."""
    if not is_finished(path):
        return False
    selected = checkpoints.resolve(path)
    return (selected / "manifest.json").is_file() and not (selected / "state.json").is_file()


def _refuse_other_settings(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    pairs = differences(completed(old["identity"]), new["identity"])
    changed = {name: pair for name, pair in pairs.items() if name not in MAY_CHANGE}
    refused = {name: pair for name, pair in changed.items() if not _longer(name, *pair)}
    if unknown := [name for name in refused if not _is_setting(name)]:
        raise BadInput(
            f"run={path} has the setting {unknown[0]}, which this version of xformer lacks: "
            "continue it with the version that made it, or give another run="
        )
    if changed and changed.keys() <= DERIVED.keys():
        before, now = next(iter(changed.values()))
        raise BadInput(
            f"run={path} was to end after about {before} rows, and this version of xformer "
            f"estimates {now}: continue it with the version that made it, or give another run="
        )
    if refused:
        raise BadInput(
            f"run={path} was made with other settings: {changes(refused, old, new)}; "
            "give the old value again, or another run=; overwrite=true starts from the beginning"
        )
    metric, now = old.get("metric"), new.get("metric")
    if metric and metric != now:
        raise BadInput(
            f"run={path} selects its checkpoints by {metric}, but the metric of the store is now "
            f"{now}; give another run=, or make the store again with --metric {metric}"
        )
    if changed and kept_only_weights(path):
        raise BadInput(
            f"run={path} is finished and kept only its weights (train.keep_state=false), so it "
            f"cannot be extended; give another run= with init={path}"
        )


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run. Those that its version did not have are added with defaults."""
    defaults = Recipe(data="-", run="-", head="mlm").model_dump(mode="json")
    for name in ADDED_LATER:
        group, _, key = name.partition(".")
        new = {key: defaults[group][key]} if key else defaults[group]
        if isinstance(own := config.get(group, {}), dict):  # it may be damaged
            config = {**config, group: {**new, **own}}
    return config


def changes(pairs: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> str:
    """At most LISTED of the pairs that `differences` returned, in words. `old` and `new` are the
    runs' config.json: they have the paths of the data, of which the pairs have only hashes."""
    if others := {name: pair for name, pair in pairs.items() if name not in DERIVED}:
        pairs = others  # the number of samples follows from these
    clauses = []
    for name, (before, now) in [*pairs.items()][:LISTED]:
        if name in BY_CONTENT:
            before, now = (run.get("config", {}).get(name) for run in (old, new))
        change = _change(name, before, now)
        clauses.append(f"the content of {name}={now} has changed" if before == now else change)
    more = len(pairs) - len(clauses)
    return "; ".join([*clauses, *([f"and {more} more"] if more else [])])


def _change(name: str, before: Any, now: Any) -> str:
    """A clause about a setting that has changed."""
    if name in DERIVED:
        return (
            f"it was to end after {before:,} rows, and now after {now:,}; a run with "
            f"{DERIVED[name]} keeps its length"
        )
    if name in BY_CONTENT:
        return f"{name}={before} is now {now}"
    if name == "train.steps" and not before:
        return f"it counted train.epochs, and now train.steps={now}"
    counts = ""
    if name == "train.steps" and not now:
        counts = ", which counts train.epochs"
    elif name in ("train.steps", "train.epochs") and before:
        counts = ", and it can only be raised"
    return f"{name}={str(before)[:80]} is now {str(now)[:80]}{counts}"


def _longer(name: str, old: Any, new: Any) -> bool:
    """Whether a changed setting only makes the run longer."""
    if name not in ("train.steps", "train.epochs"):
        return False
    return bool(old) and all(isinstance(v, int | float) for v in (old, new)) and new >= old


def _is_setting(name: str) -> bool:
    """Whether this version has the setting of a run's identity."""
    settings: Any = Recipe(data="-", run="-", head="mlm").model_dump(mode="json")
    first, *others = name.split(".")
    if name in DERIVED or first == "seed":  # seeds may be one number, or several with names
        return True
    for key in (first, *others):
        if not isinstance(settings, dict) or key not in settings:
            return False
        settings = settings[key]
    return True


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings that differ: {dotted key: (old value, new value)}."""
    pairs: dict[str, Any] = {}
    for name in [*old, *(n for n in new if n not in old)]:
        before, now = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            pairs |= differences(before, now, f"{prefix}{name}.")
        elif before != now:
            pairs[f"{prefix}{name}"] = (before, now)
    return pairs
